"""The numbers of the kernels of CUDA, on a GPU or by Triton's interpreter on the CPU, and what a GPU gives them to do."""

import contextlib
import itertools
import warnings

import pytest
import torch

from osa import reference, runtime
from tests.osa.helpers import DEGENERATE, orthogonality_error, relative_error

pytest.importorskip("triton", reason="Triton comes with torch for CUDA on Linux")


from osa.kernels import launch, operators
from osa.kernels.short.backend import Short
from osa.options import EPSILON, ITERATIONS
from tests.osa.interpreter import DEVICE, assert_barriers_order, quick, random
from tests.osa.test_orthogonality import KINDS, ROUNDINGS, of_norm


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    if DEVICE.type == "cuda":
        yield
        return
    with quick():
        yield


REFERENCE = {
    "exact": reference.orthogonal_attention,
    "qr": reference.orthogonal_attention,
    "newton_schulz": reference.newton_schulz_attention,
}
METHODS = list(REFERENCE)
pytestmark = pytest.mark.slow


def attend(query, key, value, scale, method, num_iterations=None):
    return operators.attend(query, key, value, scale, method, num_iterations, EPSILON)


def attend_and_warn(*arguments):
    """Output of `attend`, and the number of its warnings of lost digits: on CUDA when the next call asks."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        output = attend(*arguments)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        runtime.warn_of_loss(torch.tensor(False, device=DEVICE))
    assert all('use method="qr"' in str(each.message) for each in found)
    return output, len(found)


def errors(method, query, key, value, scale, num_iterations=None):
    """Relative errors of the output and of the gradients of query, key, value and scale; K is for methods that iterate.

    Where S and so a gradient is zero they are absolute: with the size of S for query and key. The gradient of scale is the
    product of a normal cotangent with the derivative of the output, about (output − V)/scale, and has its size on average:
    the error is relative to that where the two are nearly orthogonal.
    """
    inputs = [x.detach().requires_grad_() for x in (query, key, value, scale)]
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    options = {"num_iterations": num_iterations} if num_iterations and method in ITERATIONS else {}
    actual, expected = attend(*inputs, method, **options), REFERENCE[method](*exact, **options)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=expected.dtype)
    gradients = torch.autograd.grad(actual, inputs, cotangent.to(actual))
    expected_gradients = torch.autograd.grad(expected, exact, cotangent)
    assert [x.dtype for x in (actual, *gradients)] == [x.dtype for x in (value, *inputs)]
    size = scale.abs().max().item()
    typical = max(1.0, ((expected - exact[2]) / exact[3].detach().where(exact[3] != 0, 1.0)).norm().item())
    pairs = zip((actual, *gradients), (expected, *expected_gradients), (1, size, size, 1, typical), strict=True)
    return [((a.cpu().double() - b).norm() / b.norm().clamp(min=least)).item() for a, b, least in pairs]


def scales(*values):
    return torch.tensor(values, device=DEVICE).view(-1, 1, 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens, width, value_width", [(1, 3, 5), (7, 5, 3), (50, 2, 11), (64, 3, 1), (197, 2, 3)])
def test_output_and_gradients_match_the_reference(method, tokens, width, value_width):
    """N < 2d, and N of whole and of broken tiles; two iterations stand for the default number but at N = 50."""
    query, key, value = random(tokens, width, value_width, (2, 1) if tokens == 7 else (1, 1))
    scale = scales(0.5 / (tokens + 1))  # ‖S‖ about 1
    assert max(errors(method, query, key, value, scale, None if tokens == 50 else 2)) < 2e-5


@pytest.fixture
def one_program(monkeypatch):
    """Runs one program for all matrices, one after the other."""
    monkeypatch.setattr(launch, "resident_programs", lambda device, num_warps: 1)


@contextlib.contextmanager
def guarded_scratch():
    """Scratch memory that is NaN, and more of it behind, which nobody may write to. Yields each with its size."""
    scratches, allocate = [], launch.make_scratch

    def with_a_guard(programs, size, device):
        scratches.append((allocate(programs, size + 16, device).fill_(torch.nan), size))
        return scratches[-1][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "make_scratch", with_a_guard)
        yield scratches
    assert all(scratch[:, size:].isnan().all() for scratch, size in scratches)


@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("method", METHODS)
def test_tiles_memory_and_strides(method):
    """Tensors that lie between NaN, in any order, with a scale and a batch that are broadcast; scratch memory that ends."""

    def among_nans(x):
        around = torch.full([n + 2 for n in x.shape[::-1]], torch.nan, device=DEVICE)
        around[tuple(slice(1, -1) for _ in x.shape)] = x.permute(*reversed(range(x.dim())))
        return around.permute(*reversed(range(x.dim())))[tuple(slice(1, -1) for _ in x.shape)]

    query, key, value = random(19, 9, 5, (1, 2))
    views = [among_nans(x) for x in (query[:, :1].expand(1, 2, -1, -1), key, value)]
    with guarded_scratch() as scratches:
        assert max(errors(method, *views, torch.tensor(0.02, device=DEVICE), 2)) < 2e-5
    assert len(scratches) == 2 and all(len(scratch) == 1 for scratch, _ in scratches)


@pytest.mark.usefixtures("one_program")
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter's loads and stores are watched")
@pytest.mark.parametrize(
    "method, norm", [("exact", 0.3), ("exact", 9.0), ("qr", 9.0), ("newton_schulz", 1.0), ("basis", 1.0)]
)
def test_barriers_order_all_that_threads_read_of_each_other(method, norm):
    """ "basis" is the route of "exact" for inputs that no balancing helps. Without its barriers a kernel races."""
    query, key, value = symmetric_multiple(1e4, 19, 5) if method == "basis" else random(19, 5, 3, (1, 2))
    query, key, value = (x.requires_grad_() for x in (query, key, value))
    scale = norm / torch.linalg.matrix_norm(reference.skew(query, key, 1.0), 2).float().max().detach().view(1, 1, 1)
    method = "exact" if method == "basis" else method

    def run(races):
        output = attend(query, key, value, scale, method, 2 if method == "newton_schulz" else None)
        torch.autograd.grad(output.sum(), (query, key, value))

    assert_barriers_order(run, at_least=50)


@pytest.mark.parametrize("degenerate", ["equal", "nearly equal", "dependent columns", "zeros"])
@pytest.mark.parametrize("method", METHODS)
def test_dependent_columns(method, degenerate):
    query, key, value = random(11, 3, batch=(1, 1))
    query, key = DEGENERATE[degenerate](query, key)
    scale = scales(0.1)
    if degenerate == "nearly equal" and method == "exact":
        scale = 300 * scale  # c‖M‖² about 1,000
    elif degenerate == "zeros" and method != "exact":
        query, key = query + 1e-12, key  # where the derivative of ‖M‖_F exists
    tolerance = 1e-4 if degenerate == "nearly equal" else 2e-5
    assert max(errors(method, query, key, value, scale, None if degenerate == "dependent columns" else 2)) < tolerance


def symmetric_multiple(mu, tokens, width, norm=1.0):
    """Query and key with Q ≈ K W for a symmetric W, ‖S‖₂ = 1 at scale 1, and c‖M‖² near μ, which no balancing lowers."""
    key, other, value = random(tokens, width, 3, (1, 1))
    w = torch.randn(width, width, device=DEVICE)
    near = key @ (w + w.mT)
    m2 = torch.linalg.matrix_norm(torch.cat([near, key], -1), 2).square()
    query = near + m2 / mu / torch.linalg.matrix_norm(reference.skew(other, key, 1.0), 2) * other
    c = (norm / torch.linalg.matrix_norm(reference.skew(query, key, 1.0), 2)).sqrt().float()
    return c * query, c * key, value


@pytest.mark.parametrize("mu", [30, 1e3, 1e4])
def test_exact_takes_a_basis_where_no_balancing_helps(mu, monkeypatch):
    """The error is that of S itself, μ eps, and not μ² eps; where no basis fits the result is NaN, never a wrong number."""
    query, key, value = symmetric_multiple(mu, 17, 5)
    assert max(errors("exact", query, key, value, scales(1.0))) < 1e-6 + 3e-7 * mu
    constants = Short.constants
    monkeypatch.setattr(Short, "constants", lambda *arguments: constants(*arguments) | {"ALL_ROWS": 0})
    inputs = [x.requires_grad_() for x in (query, key, value)]
    output, warned = attend_and_warn(*inputs, scales(1.0), "exact")
    grads = torch.autograd.grad(output.sum(), inputs[:2])
    assert warned == output.isnan().any()
    if mu >= 1e4:
        assert all(x.isnan().all() for x in (output, *grads))
    elif not output.isnan().any():
        assert relative_error(output.cpu(), reference.orthogonal_attention(query, key, value, 1.0).cpu()) < 1e-3


@pytest.mark.parametrize("rows", [0, 16])
def test_a_head_that_is_nan_leaves_the_others_alone(rows, monkeypatch):
    """No warning names a NaN head, with a basis at hand or without."""
    constants = Short.constants
    monkeypatch.setattr(Short, "constants", lambda *arguments: constants(*arguments) | {"ALL_ROWS": rows})
    query, key, value = random(7, 3, 3, (1, 2))
    expected = attend(query, key, value, scales(0.1, 0.1), "exact")
    query[0, 0, 2, 1] = torch.nan
    for scale in (scales(0.1, 0.1), scales(torch.nan, 0.1)):
        actual, warned = attend_and_warn(query, key, value, scale, "exact")
        assert actual[0, 0].isnan().all() and torch.equal(actual[0, 1], expected[0, 1]) and not warned


@pytest.mark.parametrize(
    "method, norm", [("exact", 1e-6), ("exact", 4.0), ("exact", 30.0), ("exact", 1e3), ("qr", 1e-6), ("qr", 1e3)]
)
def test_any_norm(method, norm):
    """‖S‖₂ up to where float32 loses three digits: by the series alone, and with up to nine doublings."""
    query, key, value = random(5, 2, 3, (1, 1))
    scale = norm / torch.linalg.matrix_norm(reference.skew(query, key, 1.0), 2).float().view(1, 1, 1)
    assert max(errors(method, query, key, value, scale)) < 1e-5 * max(1, norm / 10)


@pytest.mark.filterwarnings("ignore:orthogonal attention returns NaN")
@pytest.mark.parametrize("method, rows", [("exact", 32), ("exact", 0), ("qr", 32), ("newton_schulz", 0)])
def test_lengths_are_kept_at_any_norm_or_the_result_is_nan(method, rows, monkeypatch):
    """All kinds and norms in one launch; `rows` of a basis at hand. Newton–Schulz is as its equations have it."""
    constants = Short.constants
    monkeypatch.setattr(Short, "constants", lambda *arguments: constants(*arguments) | {"ALL_ROWS": rows})
    tokens, cases = 19, list(itertools.product(sorted(KINDS.keys() - {"unequal size"}), (1.0, 1e3)))
    drawn = [of_norm(kind, norm, tokens, 3, torch.float32) for kind, norm in cases]
    query, key = (torch.stack(x)[:, None].to(DEVICE) for x in list(zip(*drawn, strict=True))[:2])
    scale = torch.tensor([c for _, _, c in drawn], device=DEVICE).view(-1, 1, 1, 1)
    identity, found = torch.eye(tokens, device=DEVICE), 0
    matrices = attend(query, key, identity[None, None], scale, method)[:, 0].cpu()
    for a, (_, norm), (q, k, c) in zip(matrices, cases, drawn, strict=True):
        if a.isnan().all():
            continue
        found += 1
        if method == "newton_schulz":
            size = c * torch.linalg.matrix_norm(torch.cat([q, k], -1).double(), 2).item() ** 2
            error = torch.linalg.matrix_norm(a - reference.newton_schulz_attention(q, k, identity.cpu(), c), 2).item()
            assert error < 64 * 1.2e-7 * max(1, size), (norm, size)
        else:
            assert orthogonality_error(a) < ROUNDINGS * 1.2e-7 * max(1, norm)
    assert found == len(cases) if method in ("qr", "exact") and rows else found > len(cases) / 3, found


@pytest.mark.parametrize("size, width", [(3, 5), (19, 35), (32, 3)])
def test_phi1_alone(size, width):
    """Values and gradients, with and without doublings, against torch's exponential."""
    z, y, cotangent = torch.randn(2, size, size), torch.randn(2, size, width), torch.randn(2, size, width)
    norms = torch.tensor([0.9, 12.0]).view(2, 1, 1)
    z = (z - z.mT) * norms / torch.linalg.matrix_norm(z - z.mT, 2)[:, None, None]
    inputs, exact = ([x.detach().to(kind).requires_grad_() for x in (z, y)] for kind in (DEVICE, torch.float64))
    blocks = torch.cat([exact[0], torch.eye(size).expand(2, size, size)], -1)
    blocks = torch.cat([blocks, torch.zeros(2, size, 2 * size)], -2)
    expected = torch.linalg.matrix_exp(blocks)[:, :size, size:] @ exact[1]  # Higham 2008, Section 10.7.4
    actual = operators.phi1_times(*inputs)
    grads = torch.autograd.grad(actual, inputs, cotangent.to(DEVICE))
    expected_grads = torch.autograd.grad(expected, exact, cotangent.double())
    for a, b in zip((actual, *grads), (expected, *expected_grads), strict=True):
        assert relative_error(a.cpu(), b) < 1e-5


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter's loads and stores are watched")
def test_phi1_alone_waits_where_threads_exchange():
    z, y = torch.randn(1, 29, 29), torch.randn(1, 29, 19)
    z = (9 * (z - z.mT) / torch.linalg.matrix_norm(z - z.mT, 2)).requires_grad_()
    assert_barriers_order(lambda races: torch.autograd.grad(operators.phi1_times(z, y).sum(), z), at_least=20)


def test_lower_precision_is_that_of_inputs_and_outputs_alone():
    query, key, value = (x.bfloat16() for x in random(7, 3))
    assert max(errors("exact", query, key, value, scales(0.3, -0.2))) < 1e-2  # two heads with a scale each


def test_beyond_every_digit_the_result_is_nan():
    query, key, value = random(5, 2, 3, (1, 1))
    assert attend(query, key, value, 1e9, "exact").isnan().all()
