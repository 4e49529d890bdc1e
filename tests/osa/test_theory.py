"""Each check against a known answer, and against something deliberately wrong that it must catch."""

import math

import pytest
import torch
import torch.nn.functional as F

import osa
from osa import reference, theory
from osa.functional import METHODS, orthogonal_attention
from osa.init import init_orthogonal_attention_, stiefel_uniform
from tests.osa.helpers import draw

EXACT = ("qr", "exact")
PRODUCTS = 32


def head_weights(d, d_v, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def sample(n, m):
        return stiefel_uniform(n, m, generator=generator, dtype=torch.float64)

    query_key = sample(d, 2 * d_v)
    return query_key[:, :d_v], query_key[:, d_v:], sample(d, d_v), sample(d, d_v).mT


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("condition", [1, 1e3, 1e8])
def test_matrix_has_the_condition(condition):
    m = theory.matrix_with_condition(13, 6, condition, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(m)
    assert values[0].item() == pytest.approx(1)
    assert (1 / values[-1]).item() == pytest.approx(condition, rel=1e-6)


def test_scale_gives_the_norm():
    query, key, _ = (x[0, 0].detach() for x in draw(11, 5))
    scale = theory.scale_for_norm(query, key, 2.5)
    assert theory.norm(reference.skew(query, key, scale)).item() == pytest.approx(2.5)


@pytest.mark.parametrize("angle", [1e-4, 1e-2, 1, 50])
def test_exponential_of_a_plane_rotation(angle):
    s = torch.tensor([[0, angle], [-angle, 0]], dtype=torch.float64)
    cosine, sine = math.cos(angle), math.sin(angle)
    expected = torch.tensor([[cosine, sine], [-sine, cosine]], dtype=torch.float64)
    torch.testing.assert_close(theory.exponential(s), expected, rtol=0, atol=1e-15 * max(1, 10 * angle))


def test_exponentials_are_the_reference_s():
    query, key, _ = (x.detach() for x in draw(11, 3))
    s = reference.skew(query, key, 0.7)
    torch.testing.assert_close(theory.exponential(s), torch.linalg.matrix_exp(s))
    basis = reference.newton_schulz_basis(query, key, num_iterations=3)
    torch.testing.assert_close(theory.low_rank_exponential(basis, s), reference.low_rank_matrix(query, key, 0.7, basis))


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1, 30])
def test_exponential_stays_in_its_tolerance(method, dtype, size):
    query, key, _ = (x.detach() for x in draw(17, 5, dtype=dtype))
    scale = theory.scale_for_norm(query[0, 0], key[0, 0], size)
    error = theory.exponential_error(query, key, scale, method)
    tolerance = theory.exponential_tolerance(query, key, scale, method, PRODUCTS)
    assert error.shape == tolerance.shape == (2, 3)
    assert (error <= tolerance).all()
    assert (tolerance < (0.05 if dtype is torch.float32 else 1e-9)).all() or size == 30


@pytest.mark.parametrize("method", EXACT)
def test_a_wrong_exponential_leaves_the_tolerance(method, monkeypatch):
    def first_order(query, key, *, scale, **_):
        return torch.eye(query.shape[-2], dtype=query.dtype) + reference.skew(query, key, scale)

    monkeypatch.setattr(theory, "orthogonal_attention_matrix", first_order)
    query, key, _ = (x.detach() for x in draw(17, 5))
    scale = theory.scale_for_norm(query[0, 0], key[0, 0], 1e-3)
    error = theory.exponential_error(query, key, scale, method)
    assert (error > 100 * theory.exponential_tolerance(query, key, scale, method, PRODUCTS)).all()


def test_effective_rank_of_known_spectra():
    assert theory.effective_rank(torch.ones(7)) == pytest.approx(7)
    assert theory.effective_rank(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1)


def spectra(attention, *, skip=False, orthogonal=True, depth=24):
    x, d = gaussian(13, 8), 8
    weights = [[stiefel_uniform(d, d, dtype=torch.float64) for _ in range(3)] for _ in range(depth)]
    if not orthogonal:
        weights = [(q, k, w + 1e-3 * torch.eye(d)) for q, k, w in weights]
    *_, last = theory.attention_stack(x, weights, attention, skip)
    return theory.kernel_eigenvalues(x), theory.kernel_eigenvalues(last)


def orthogonal(query, key, value):
    return orthogonal_attention(query, key, value, scale=0.5)


def test_an_orthogonal_stack_keeps_its_spectrum():
    first, last = spectra(orthogonal)
    torch.testing.assert_close(last, first, rtol=1e-10, atol=0)
    assert theory.kernel_eigenvalues(gaussian(5, 3)).allclose(
        torch.linalg.eigvalsh(gaussian(5, 3).mT @ gaussian(5, 3)).flip(0)
    )


def test_other_stacks_do_not_keep_it():
    def softmax(query, key, value):
        return F.scaled_dot_product_attention(query, key, value)

    first, last = spectra(orthogonal, orthogonal=False)
    assert (last / first - 1).abs().max() > 1e-6
    first, last = spectra(orthogonal, skip=True)
    assert (last / first - 1).abs().max() > 1
    first, last = spectra(softmax)
    assert theory.effective_rank(last) < 1.1 < 3 < theory.effective_rank(first)


def test_newton_schulz_bases_are_the_paper_s():
    query, key, _ = (x.detach() for x in draw(13, 3))
    bases = theory.newton_schulz_bases(torch.cat([query, key], -1), 6)
    torch.testing.assert_close(bases[-1], reference.newton_schulz_basis(query, key))
    torch.testing.assert_close(bases[1], reference.newton_schulz_basis(query, key, num_iterations=2))


def test_polar_express_converges_where_newton_schulz_does_not():
    m = theory.matrix_with_condition(13, 6, 300, generator=torch.Generator().manual_seed(1))
    classical, express = theory.newton_schulz_bases(m, 8)[-1], theory.polar_express_bases(m, 8)[-1]
    assert theory.orthogonality_error(classical) > 0.5
    assert theory.orthogonality_error(express) < 1e-6
    assert torch.linalg.svdvals(theory.polar_express_bases(m, 1)[0])[0] > 1.1
    polar = torch.linalg.svd(m, full_matrices=False)
    torch.testing.assert_close(express, polar.U @ polar.Vh, atol=1e-6, rtol=0)


@pytest.mark.parametrize("iterations", [1, 4, 12])
def test_orthogonality_stays_below_the_bounds(iterations):
    query, key, _ = (x[0, 0].detach() for x in draw(13, 3))
    scale = theory.scale_for_norm(query, key, 1.0)
    basis = theory.newton_schulz_bases(torch.cat([query, key], -1), iterations)[-1]
    error = theory.orthogonality_error(reference.low_rank_matrix(query, key, scale, basis))
    sharp, blunt, general = theory.orthogonality_bounds(basis, 1.0)
    assert error <= sharp <= blunt
    assert general <= sharp * (1 + 1e-9)
    wrong = reference.low_rank_matrix(query, key, 3 * scale, 1.05 * basis)  # another S, and singular values beyond 1
    if iterations == 12:
        assert error < 1e-3 < theory.orthogonality_error(wrong)
        assert theory.orthogonality_error(wrong) > sharp


def test_bounds_of_a_known_basis():
    basis = torch.diag(torch.tensor([math.sqrt(0.5), 1.0], dtype=torch.float64))
    sharp, blunt, general = theory.orthogonality_bounds(basis, math.log(3))
    assert sharp.item() == pytest.approx(4 * 0.25)
    assert blunt.item() == pytest.approx(1)
    assert general.item() == pytest.approx(1)
    assert theory.orthogonality_bounds(math.sqrt(2) * basis, math.log(3))[2].item() == pytest.approx((9 - 1) ** 2 * 2)


def test_jacobian_of_a_linear_map():
    left, right, x = gaussian(3, 5, seed=1), gaussian(4, 2, seed=2), gaussian(5, 4, seed=3)
    actual = theory.jacobian(lambda x: left @ x @ right, x)
    torch.testing.assert_close(actual, torch.kron(right.mT.contiguous(), left))
    row = theory.jacobian(lambda x: (x @ right)[:, 1], x)
    torch.testing.assert_close(row, torch.kron(right.mT.contiguous(), torch.eye(5, dtype=torch.float64)[1:2]))


@pytest.mark.parametrize("method", METHODS)
def test_jacobian_is_the_sum_of_its_terms(method):
    x, weights, scale = gaussian(7, 6), head_weights(6, 2), 0.7
    w_query, w_key, w_value, w_out = weights
    whole = theory.jacobian(lambda x: theory.head(x, weights, scale, method=method), x)
    matrix = lambda x: theory.orthogonal_attention_matrix(x @ w_query, x @ w_key, scale=scale, method=method)  # noqa: E731
    derivative = theory.exponential_jacobian(x, w_query, w_key, scale) if method in EXACT else theory.jacobian(matrix, x)
    first, second = theory.jacobian_terms(x, matrix(x), derivative, w_value @ w_out)
    assert (whole - first - second).norm() < 1e-12 * whole.norm()
    torch.testing.assert_close(theory.first_term(x, weights, scale, method=method), first, rtol=1e-9, atol=1e-12)
    wrong, _ = theory.jacobian_terms(x, matrix(x), theory.exponential_jacobian(x, w_query, w_query, scale), w_value @ w_out)
    assert (whole - wrong - second).norm() > 1e-2 * whole.norm()
    assert (whole - second).norm() > 1e-2 * whole.norm()


def test_query_key_product_at_initialisation():
    torch.set_default_dtype(torch.float64)
    try:
        attention = osa.OrthogonalSelfAttention(12, 3)
        init_orthogonal_attention_(attention)
    finally:
        torch.set_default_dtype(torch.float32)
    query, key = attention.query.weight[:4].mT, attention.key.weight[:4].mT
    product = theory.query_key_product(query, key)
    values = torch.linalg.svdvals(product)
    torch.testing.assert_close(values[:8], torch.ones(8, dtype=torch.float64), rtol=1e-13, atol=0)
    assert values[8:].max() < 1e-13
    assert theory.condition(values) == pytest.approx(1, abs=1e-13)
    dependent = theory.query_key_product(query, key + query.roll(1, 1))
    assert theory.condition(torch.linalg.svdvals(dependent)) > 1.5


def test_condition_leaves_out_zeros():
    values = torch.tensor([6.0, 3.0, 2.0, 1e-9])
    assert theory.condition(values) == pytest.approx(3)
    assert theory.condition(values, rank=2) == pytest.approx(2)


@pytest.mark.parametrize("method", METHODS)
def test_first_term_is_linear_in_alpha_and_bounds_the_condition(method):
    x, weights = gaussian(7, 6), head_weights(6, 2)
    small, large = (theory.norm(theory.first_term(x, weights, a / math.sqrt(2), method=method)).item() for a in (1e-5, 1e-4))
    assert large / small == pytest.approx(10, rel=1e-3)
    if method in EXACT:
        assert large < theory.first_term_constant(x, 2) * 1e-4 < 100 * large
    whole = theory.jacobian(lambda x: theory.head(x, weights, 1e-4 / math.sqrt(2), method=method), x)
    kappa = theory.condition(torch.linalg.svdvals(whole), rank=14)
    assert 1 < kappa <= theory.condition_bound(1e-9, large) < 1.01


def test_condition_bound():
    assert theory.condition_bound(0.1, 0.3) == pytest.approx(1.4 / 0.6)
    assert theory.condition_bound(0.5, 0.5) == math.inf


def test_matrix_free_norms_are_those_of_the_dense_jacobian():
    x, weights = gaussian(5, 4), head_weights(4, 2)
    function = lambda x: theory.head(x, weights, 0.8, method="exact") ** 2  # noqa: E731
    dense, generator = theory.jacobian(function, x), torch.Generator().manual_seed(0)
    spectral = theory.spectral_norm(function, x, num_iterations=60, generator=generator)
    assert spectral == pytest.approx(theory.norm(dense).item(), rel=1e-3)
    frobenius = theory.frobenius_norm(function, x, num_samples=4000, generator=generator)
    assert frobenius == pytest.approx(dense.norm().item(), rel=0.03)
