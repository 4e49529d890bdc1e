"""The small matrices: the QR basis, both iterations on the Gram matrix, and φ₁ against a dense block exponential."""

import itertools
import math
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from osa import reference
from osa.functional import orthogonal_attention
from osa.linalg import (
    balanced,
    cholesky_qr_basis,
    newton_schulz_gram,
    phi1_times,
    polar_express_gram,
    qr_basis,
    resolvent_times,
    solve_by_cholesky,
)
from osa.options import EPSILON
from osa.runtime import full_precision
from tests.osa.helpers import Results, draw, orthogonality_error, relative_error

DTYPES = [torch.float64, torch.float32]
RADII = [0, 1e-6, 1e-3, 1, 2.9, 3.1, 11.9, 12.1, 1e2, 1e3]  # spectral radii; φ₁Y changes its algorithm near 3 and 12


@pytest.mark.parametrize("setting", ["medium", "high", "highest", "new"])
def test_tf32_is_off_inside_and_is_put_back(setting):
    """Both of torch's settings can be made, and read, without a device."""
    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    try:
        if setting == "new":
            matmul.fp32_precision = "tf32"  # alone: torch then refuses to read the older setting
        else:
            torch.set_float32_matmul_precision(setting)
        outside = matmul.fp32_precision
        with full_precision(torch.device("cpu")):
            assert matmul.fp32_precision == outside
        with full_precision(torch.device("cuda")):
            assert matmul.fp32_precision == "ieee" and (setting == "new" or not matmul.allow_tf32)
        assert matmul.fp32_precision == outside
        if setting != "new":
            assert torch.get_float32_matmul_precision() == setting and matmul.allow_tf32 == (setting != "highest")
    finally:
        matmul.allow_tf32 = False
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("method", ["exact", "qr", "newton_schulz", "polar_express", "cayley"])
def test_forward_and_backward_ask_for_full_precision(monkeypatch, method):
    inside, bmm = [], torch.bmm

    @contextmanager
    def spy(device):
        inside.append(device)
        yield
        inside.pop()

    def product(*arguments, **options):
        assert inside, "a product outside"
        return bmm(*arguments, **options)

    monkeypatch.setattr("osa.routes.full_precision", spy)
    monkeypatch.setattr(torch, "bmm", product)
    orthogonal_attention(*draw(11, 3, dtype=torch.float32), method=method).sum().backward()


def of_condition(condition):
    """(2, 3, 53, 10) in float32, with singular values from 1 down to 1/condition."""
    left, right = (torch.linalg.qr(torch.randn(2, 3, n, 10, dtype=torch.float64)).Q for n in (53, 10))
    return (left * torch.logspace(0, -math.log10(condition), 10, dtype=torch.float64) @ right.mT).float()


MATRICES = {
    "condition 1e20": lambda: of_condition(1e20),
    "Q = K": lambda: torch.randn(2, 3, 53, 5).repeat(1, 1, 1, 2),
    "rank 1": lambda: torch.ones(2, 3, 53, 10),
    "one of the batch zero": lambda: torch.randn(2, 3, 53, 10) * torch.tensor([[1.0, 0, 1], [1, 1, 1]])[..., None, None],
    "few tokens that are not zero": lambda: torch.randn(2, 3, 53, 10) * (torch.arange(53) < 7)[:, None],
    "minus the diagonal added": lambda: -torch.eye(53)[:, :10].expand(2, 3, 53, 10),
    "small": lambda: 1e-25 * torch.randn(2, 3, 53, 10),
    "large": lambda: 1e15 * torch.randn(2, 3, 53, 10),
}


@pytest.mark.parametrize("name", MATRICES)
def test_the_cholesky_basis_is_as_good_as_householders(name):
    """The basis is as orthonormal, and as near to the column space, to within the rounding of float32 and a factor of 2."""
    m = MATRICES[name]()
    eps = torch.finfo(torch.float32).eps
    errors = []
    for basis in (cholesky_qr_basis(m), qr_basis(m)):
        assert basis.dtype == m.dtype and basis.shape == m.shape
        basis, exact = basis.double(), m.double()
        outside = torch.linalg.matrix_norm(exact - basis @ (basis.mT @ exact), ord=2)
        outside = outside / torch.linalg.matrix_norm(exact, ord=2).clamp(min=torch.finfo(torch.float32).tiny)
        errors.append((orthogonality_error(basis), outside.max().item()))
    assert all(ours <= 2 * max(householder, eps) for ours, householder in zip(*errors, strict=True))


@pytest.mark.parametrize("least", [1e-3, 0.1])
def test_seven_steps_of_polar_express_make_small_singular_values_one(least):
    """Orthonormal to 1e-6 for σ_min ≥ 10⁻³ ‖M‖_F, which Newton–Schulz is not."""
    m = torch.randn(3, 11, 5, dtype=torch.float64)
    values = torch.logspace(math.log10(least), 0, 5, dtype=torch.float64)
    m = torch.linalg.qr(m).Q * (values / values.norm()) @ torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    gram = m.mT @ m / (1 + EPSILON) ** 2
    assert torch.linalg.matrix_norm(polar_express_gram(gram) - torch.eye(5), 2).max() < 1e-6
    assert torch.linalg.matrix_norm(newton_schulz_gram(gram, 7) - torch.eye(5), 2).min() > 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_balanced_columns_are_short_and_make_the_same_matrix(dtype):
    """The second image has Q = K in one column; in the third a column of Q is zero, and a pair of columns."""
    query, key = torch.randn(2, 3, 11, 5, dtype=dtype)
    query *= torch.logspace(-3, 3, 5, dtype=dtype)
    query[1, :, 0] = key[1, :, 0]
    query[2, :, :2], key[2, :, 1] = 0, 0
    m = balanced(torch.cat([query, key], dim=-1))
    short = m.chunk(2, dim=-1)
    assert m.dtype == dtype and m.isfinite().all()
    error = relative_error(reference.skew(*short, 1.0), reference.skew(query, key, 1.0))
    assert error < 10 * torch.finfo(dtype).eps
    areas = (query.double().square().sum(-2) * key.double().square().sum(-2) - (query * key).double().sum(-2) ** 2).sqrt()
    ordinary = torch.ones(3, 5, dtype=torch.bool)
    ordinary[1, 0] = ordinary[2, :2] = False
    for each in short:
        squares = each.double().square().sum(-2)
        torch.testing.assert_close(squares[ordinary], areas[ordinary], rtol=1e-4, atol=0)
        assert squares[~ordinary].max() < 1e-3


def test_without_float64_exact_keeps_to_float32():
    """MPS, here by tensors without values, has none: every tensor of float64 on it would be an error."""
    with FakeTensorMode(), Results() as results:
        orthogonal_attention(*(torch.empty(2, 7, 3, device="mps") for _ in range(3)))
    types = {tensor.dtype for tensor in results.tensors}
    assert torch.float32 in types and torch.float64 not in types


def skew_symmetric(radius, dtype=torch.float64):
    """(2, 3, 7, 7) with the given spectral radius, as [S] in the methods with a basis."""
    z = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    z = z - z.mT
    return (radius * z / torch.linalg.matrix_norm(z, ord=2, keepdim=True)).to(dtype)


def hamiltonian(radius, dtype=torch.float64):
    """JG (2, 3, 6, 6) with G = MᵀM, of the given spectral radius, as in "exact": imaginary spectrum, but not normal."""
    m = torch.randn(2, 3, 11, 6, dtype=torch.float64)
    gram = m.mT @ m
    z = torch.cat([gram[..., 3:, :], -gram[..., :3, :]], dim=-2)
    return (radius * z / torch.linalg.eigvals(z).abs().amax(-1)[..., None, None]).to(dtype)


def dense_phi1(z):
    """exp [[Z, I], [0, 0]] = [[e^Z, φ₁(Z)], [0, I]] (Higham 2008, Section 10.7.4), in float64."""
    n = z.shape[-1]
    upper = torch.cat([z.double(), torch.eye(n, dtype=torch.float64).expand_as(z)], dim=-1)
    return torch.linalg.matrix_exp(torch.cat([upper, torch.zeros_like(upper)], dim=-2))[..., :n, n:]


@pytest.mark.parametrize("matrices", [skew_symmetric, hamiltonian])
def test_phi1_times_a_block_and_its_gradients(matrices, subtests):
    """The fixed loop of function transforms, where no branch depends on a value, is right too."""
    for radius, dtype in itertools.product(RADII, DTYPES):
        with subtests.test(radius=radius, dtype=dtype):
            z = matrices(radius, dtype).requires_grad_()
            y = torch.randn(*z.shape[:-1], 5, dtype=torch.float64).to(dtype).requires_grad_()
            actual, expected = phi1_times(z, y), dense_phi1(z) @ y.double()
            rounding = 30 * torch.finfo(dtype).eps * (1 + radius)
            assert relative_error(actual, expected) < rounding
            assert relative_error(torch.func.vmap(phi1_times)(z, y), expected) < rounding
            cotangent = torch.randn_like(actual)
            grad_z, grad_y = torch.autograd.grad(actual, (z, y), cotangent)
            expected_z, expected_y = torch.autograd.grad(expected, (z, y), cotangent.double())
            assert relative_error(grad_y, expected_y) < rounding
            # In exp(S) this gradient is multiplied by Z once more, and the degree of the series makes use of that.
            assert min(1, radius) * relative_error(grad_z, expected_z) < rounding


@pytest.mark.parametrize("matrices", [skew_symmetric, hamiltonian])
def test_both_ways_to_the_resolvent(matrices, subtests):
    """CUDA's way, taken on the CPU, is alike in value and gradients, float32 in float64."""
    for radius in (0, 1e-3, 1, 1e3):
        with subtests.test(radius=radius):
            z = matrices(radius, torch.float32).requires_grad_()
            y = torch.randn(*z.shape[:-1], 5, requires_grad=True)
            cotangent = torch.randn_like(y)
            w = torch.eye(z.shape[-1]) - z / 2
            exact = [x.detach().double().requires_grad_() for x in (z, y)]
            expected = torch.linalg.inv(torch.eye(z.shape[-1]) - exact[0] / 2) @ exact[1]
            expected_gradients = torch.autograd.grad(expected, exact, cotangent.double())
            for result, rounding in ((resolvent_times(z, y), 2e-6 * (1 + radius)), (solve_by_cholesky(w, y), 1e-6)):
                assert relative_error(result, expected) < rounding
                gradients = torch.autograd.grad(result, (z, y), cotangent, retain_graph=True)
                for pair in zip(gradients, expected_gradients, strict=True):
                    assert relative_error(*pair) < rounding


@pytest.mark.parametrize("value", [math.nan, math.inf, "large"])
def test_matrices_of_a_batch_do_not_touch_each_other(value, subtests):
    """Small ones lose nothing by the doublings that they share with large ones, and none by one that is lost."""
    for largest, dtype in itertools.product((1, 3.9, 1e3), DTYPES):
        with subtests.test(largest=largest, dtype=dtype):
            radii = 0, 1e-6, 1, largest
            z = torch.stack([skew_symmetric(radius, dtype) for radius in radii])
            y = torch.randn(*z.shape[:-1], 5, dtype=torch.float64).to(dtype)
            expected = dense_phi1(z) @ y.double()
            z[2, 1, 2, 0, 1] = torch.finfo(dtype).max ** 0.65 if value == "large" else value
            actual = phi1_times(z, y)
            assert not actual[2, 1, 2].isfinite().all()
            actual[2, 1, 2] = expected[2, 1, 2]
            for radius, *pair in zip(radii, actual, expected, strict=True):
                assert relative_error(*pair) < 30 * torch.finfo(dtype).eps * (1 + radius)
