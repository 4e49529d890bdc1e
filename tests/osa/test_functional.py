"""The methods against the dense float64 reference: values, gradients, invariants, degenerate and bad inputs."""

import contextlib
import itertools
import math
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from osa import reference, routes
from osa.functional import orthogonal_attention, orthogonal_attention_matrix
from osa.linalg import POLAR_EXPRESS
from tests.osa.helpers import (
    DEGENERATE,
    Results,
    draw,
    orthogonality_error,
    polar_express_basis,
    relative_error,
    with_gradients,
)

REFERENCE = {
    "qr_literal": reference.orthogonal_attention,
    "qr": reference.orthogonal_attention,
    "newton_schulz": reference.newton_schulz_attention,
    "exact": reference.orthogonal_attention,
    "cayley": reference.cayley_attention,
    "polar_express": lambda query, key, value, scale: polar_express_attention(query, key, value, scale),
}
METHODS = list(REFERENCE)
PAPERS = ["qr", "newton_schulz", "exact"]  # methods that users meet
papers_quickly = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in PAPERS else pytest.mark.slow) for name in METHODS]
)
ORTHOGONAL = ["qr_literal", "qr", "exact", "cayley"]  # K = 6 Newton–Schulz iterations leave an orthogonality error
SIZES = [(5, 3), (7, 3), (11, 5), (53, 5)]  # (N, d), with N < 2d and N > 2d; draw() has 2 images, 3 heads, d_value = 7
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}  # ‖S‖ is up to 30


def polar_express_attention(query, key, value, scale):
    basis = polar_express_basis(torch.cat([query, key], dim=-1).double(), 7)
    return reference.low_rank_matrix(query, key, scale, basis) @ value.double()


def attend(query, key, value, scale, method):
    return orthogonal_attention(query, key, value, scale=scale, method=method)


def errors_against_reference(inputs, method, attend=attend):
    """Relative errors of the output and of the gradients of query, key, value and, if it has one, scale."""
    inputs, cotangent = [x.requires_grad_() for x in inputs], torch.randn_like(inputs[2])
    actual = with_gradients(partial(attend, method=method), inputs, cotangent)
    expected = with_gradients(REFERENCE[method], inputs, cotangent)
    assert [x.dtype for x in actual] == [x.dtype for x in (inputs[2], *inputs)]
    return list(map(relative_error, actual, expected))


def head_scales(dtype=torch.float64):
    return torch.tensor([0.2, 0.3, -0.4], dtype=dtype).view(3, 1, 1).requires_grad_()


@pytest.mark.parametrize("method", METHODS)
def test_output_and_gradients_match_the_reference(method, subtests):
    for size, dtype in itertools.product(SIZES, TOLERANCE):
        with subtests.test(size=size, dtype=dtype):
            inputs = *draw(*size, dtype=dtype), head_scales(dtype)
            errors = errors_against_reference(inputs, method)
            assert max(errors) < TOLERANCE[dtype], errors


@pytest.mark.parametrize("method", ["qr", "exact", "cayley"])
def test_few_tokens_take_s_itself(method, monkeypatch):
    """For N < 2d nothing is larger than the inputs or S: no basis, and no matrix of 2d rows."""
    monkeypatch.setattr(routes, "qr_basis", lambda m: pytest.fail("a basis is made"))
    inputs = [*draw(7, 12), head_scales()]
    with Results() as results:
        orthogonal_attention(*inputs[:3], scale=inputs[3], method=method)
    assert not any(x.shape[-2:] in ((24, 24), (24, 7)) for x in results.tensors)


@pytest.mark.parametrize("method", ["exact", "cayley"])
def test_few_tokens_with_a_shared_mean_lose_nothing(method, subtests):
    """Where the entries of S cancel, Gram matrices take its place: float32 errors are theirs, at worst a little above."""
    for mean in (0, 1, 10, 100, 1e3, 1e5):
        with subtests.test(mean=mean), pytest.MonkeyPatch.context() as patch:
            query, key, value = (x.detach() for x in draw(20, 16, dtype=torch.float32))
            query, key = query + mean * torch.randn(1, 16), key + mean * torch.randn(1, 16)
            norm = torch.linalg.matrix_norm(reference.skew(query.double(), key.double(), 1.0), 2)
            inputs = query, key, value, (2 / norm).float()[..., None, None]
            found = errors_against_reference([x.clone() for x in inputs], method)
            patch.setattr(routes, "_keeps_digits", lambda *x: False)
            before = errors_against_reference([x.clone() for x in inputs], method)
            assert all(new < 2 * old + 2e-7 for new, old in zip(found, before, strict=True)), (found, before)


@pytest.mark.parametrize("num_iterations, epsilon, size", [(1, None, 1.0), (3, None, 1.0), (6, 2e-7, 1e-8), (6, None, 1e-8)])
def test_newton_schulz_runs_as_many_iterations_as_asked_from_the_norm_and_epsilon(num_iterations, epsilon, size):
    """M₀ = M/(‖M‖_F + ε), felt only where ‖M‖_F is as small as ε; six iterations and 1e-7 by default."""
    query, key, value = (tensor.detach() for tensor in draw(11, 3))
    query, key, scale = size * query, size * key, 0.3 / size**2
    basis = reference.newton_schulz_basis(
        torch.cat([query, key], -1), num_iterations=num_iterations, epsilon=epsilon or 1e-7
    )
    call = partial(orthogonal_attention, query, key, value, scale=scale, method="newton_schulz")
    options = {"num_iterations": num_iterations} | ({"epsilon": epsilon} if epsilon else {})
    assert relative_error(call(**options), reference.low_rank_matrix(query, key, scale, basis) @ value) < 1e-12
    assert torch.equal(call(), call(**options)) == (num_iterations == 6 and epsilon is None)


@pytest.mark.parametrize("method", METHODS)
def test_batch_dimensions_and_scales_are_optional_and_broadcast(method):
    query, key, value = draw(7, 3)
    call, number = partial(orthogonal_attention, method=method), 1 / math.sqrt(3)
    expected = call(query, key, value)
    assert relative_error(expected, REFERENCE[method](query, key, value, number)) < 1e-12
    for scale in (number, torch.tensor(number), torch.full((2, 1, 1, 1), number), torch.full((2, 3, 1, 1), number)):
        assert relative_error(call(query, key, value, scale=scale), expected) < 1e-6
    batched = call(query, key, value, scale=head_scales())
    torch.testing.assert_close(call(query[1, 2], key[1, 2], value[1, 2], scale=-0.4), batched[1, 2])
    expanded = call(query, key[:1].expand_as(key), value[:, :1].expand_as(value))
    torch.testing.assert_close(call(query, key[:1], value[:, :1]), expanded)
    stacked = call(query, key, torch.stack([value, 2 * value]))  # more batch dimensions than query and key
    torch.testing.assert_close(stacked[1], 2 * expected)


@pytest.mark.parametrize("method", METHODS)
def test_rank_deficient_inputs(method, subtests):
    """Dependent columns of M = [Q, K] are no hindrance: the output is finite and right, and so are the gradients.

    "qr_literal" is the exception: autograd, which differentiates QR there, has no correct digit.
    """
    for degenerate in sorted(DEGENERATE.keys() - {"nearly equal"}):
        with subtests.test(degenerate=degenerate):
            query, key = DEGENERATE[degenerate](*draw(7, 3)[:2])
            query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
            value = draw(query.shape[-2], 3)[2]
            scale = head_scales()
            inputs, cotangent = (query, key, value, scale), torch.randn_like(value)
            actual, *gradients = with_gradients(partial(attend, method=method), inputs, cotangent)
            expected, *expected_gradients = with_gradients(REFERENCE[method], inputs, cotangent)
            rounding = 1e-12 if degenerate == "one token" else 1e-10
            torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)
            if degenerate not in ("dependent columns", "two tokens"):
                torch.testing.assert_close(actual, value, rtol=rounding, atol=rounding)  # S = 0
            if method == "polar_express" and degenerate != "one token":  # it raises rounding from 0
                rounding = math.prod(a for a, _, _ in POLAR_EXPRESS[:7]) ** 2 * 1e-15
            if method != "qr_literal" or degenerate in ("one token", "two tokens"):
                torch.testing.assert_close(gradients, expected_gradients, rtol=rounding, atol=rounding)


def conditioned(condition):
    """Q and K of 53 tokens with singular values of M = [Q, K] from 1 down to 1/condition."""
    left, right = torch.linalg.qr(torch.randn(53, 10).double()).Q, torch.linalg.qr(torch.randn(10, 10).double()).Q
    return left * torch.logspace(0, -math.log10(condition), 10, dtype=torch.float64) @ right


def nearly_equal(tokens):
    """Q ≈ K with ‖M‖₂ = 1, so that ‖S‖ ≪ c‖M‖²."""
    key, other = torch.randn(2, tokens, 5, dtype=torch.float64)
    m = torch.cat([key + 1e-3 * other, key], dim=-1)
    return m / torch.linalg.matrix_norm(m, ord=2)


STACKED = {f"condition {condition:g}": partial(conditioned, condition) for condition in (1, 1e3, 1e8)}
STACKED |= {f"Q ≈ K of {tokens} tokens": partial(nearly_equal, tokens) for tokens in (1, 2, 5, 53)}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("method", ORTHOGONAL)
def test_rounding_grows_as_the_rotation_does(method, dtype):
    """Errors of order eps · c‖M‖², with ‖S‖₂ from 1e-6 to 1e3; also where M is as good as rank-deficient."""
    for name, norm in itertools.product(STACKED, (1e-6, 1.0, 1e1, 1e3)):
        query, key = STACKED[name]().to(dtype).split(5, dim=-1)
        scale = norm / max(1e-2, torch.linalg.matrix_norm(reference.skew(query, key, 1.0), ord=2).item())
        matrix = orthogonal_attention_matrix(query, key, scale=scale, method=method)
        rounding = torch.finfo(dtype).eps * (1 + scale)  # c‖M‖² = scale
        expected = REFERENCE[method](query, key, torch.eye(query.shape[-2], dtype=torch.float64), scale)
        errors = torch.linalg.matrix_norm(matrix - expected, ord=2), orthogonality_error(matrix)
        assert max(errors) < 100 * rounding, (name, norm)


SYMMETRIC = {  # Q = K W with W symmetric: S = 0
    "Q ≈ K": torch.eye(5),
    "Q ≈ K D": torch.diag(torch.tensor([0.2, -1, 3, 1, 0.5])),
    "Q ≈ K W": torch.tensor([[2.0, 1, 0, 0, -1], [1, 0, 2, 0, 0], [0, 2, 1, 1, 0], [0, 0, 1, -1, 1], [-1, 0, 0, 1, 1]]),
}


def cancelling(name, mu, tokens, dtype, norm=0.5):
    """Query, key, value and the scale 1 with ‖S‖₂ = 0.5 and ‖M‖₂² near μ; for μ = inf, S = 0."""
    other, key, value = (tensor.detach() for tensor in draw(tokens, 5, batch=(3,)))
    near = key @ SYMMETRIC[name].double()

    def size(query):
        return torch.linalg.matrix_norm(torch.cat([query, key], dim=-1), ord=2).square().max().item()

    one = torch.ones(3, 1, 1, dtype=dtype)
    if mu == math.inf:
        return 5 * near.to(dtype), 5 * key.to(dtype), value.to(dtype), one
    query = near + norm * size(near) / mu / torch.linalg.matrix_norm(reference.skew(other, key, 1.0), ord=2).min() * other
    factor = (norm / torch.linalg.matrix_norm(reference.skew(query, key, 1.0), ord=2).max()).sqrt()
    assert mu / 8 < factor**2 * size(query) < 8 * mu
    return (factor * query).to(dtype), (factor * key).to(dtype), value.to(dtype), one


MUS = [1, 10, 1e2, 1e3, 1e4, 1e5]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("method", ["exact", "cayley"])
def test_no_digit_is_lost_where_query_and_key_nearly_cancel(method, dtype):
    """Float64 loses the digits that Q − K itself takes, in the reference as well, and no others.

    With fewer and more tokens than 2d = 10.
    """
    for name, mu, tokens in itertools.product(SYMMETRIC, MUS, (7, 53)):
        errors = errors_against_reference(cancelling(name, mu, tokens, dtype), method)
        assert max(errors) < (5e-6 if dtype == torch.float32 else 1e-12 + 1e-14 * mu), (name, mu, tokens, errors)


@pytest.mark.parametrize("method", ["exact", "cayley"])
def test_where_no_value_can_be_read_the_result_is_right_or_nan(method, subtests):
    """A transform on the CPU gives the right result; the inputs' own precision, as on CUDA, NaN where digits are lost."""
    each = lambda *inputs, method: torch.func.vmap(partial(attend, method=method))(*inputs)  # noqa: E731
    for name, mu in itertools.product(SYMMETRIC, MUS):
        with subtests.test(name=name, mu=mu), pytest.MonkeyPatch.context() as patch:
            inputs = cancelling(name, mu, 53, torch.float32)
            assert max(errors_against_reference(inputs, method, each)) < 5e-6 + 5e-15 * mu**2
            patch.setattr(routes, "is_readable", lambda x: False)
            patch.setattr(routes, "_safe_dtype", lambda m: m.dtype)
            is_lost = name == "Q ≈ K W" and mu >= 1e2
            with pytest.warns(UserWarning, match='method="qr"') if is_lost else contextlib.nullcontext():
                errors = errors_against_reference(inputs, method)
            assert all(map(math.isnan, errors)) if is_lost else max(errors) < 1e-3, errors


LOST = {  # calls of a function where no value of its inputs can be read
    "vmap": lambda function, inputs: torch.func.vmap(function)(*inputs),
    "grad": lambda function, inputs: torch.func.grad(lambda query: function(query, *inputs[1:]).sum())(inputs[0]),
    "jvp": lambda function, inputs: torch.func.jvp(function, inputs, inputs)[1],
    "make_fx": lambda function, inputs: make_fx(function)(*map(torch.randn_like, inputs))(*inputs),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("way", LOST)
def test_digits_that_are_lost_in_a_transform_are_nan_with_a_warning_whose_remedy_works(way):
    query, key, value, _ = cancelling("Q ≈ K W", 1e9, 53, torch.float64)
    with pytest.warns(UserWarning, match='use method="qr"'):
        assert LOST[way](partial(orthogonal_attention, scale=1.0), (query, key, value)).isnan().all()
    followed = partial(orthogonal_attention, scale=1.0, method="qr")
    assert LOST[way](followed, (query, key, value)).isfinite().all()
    expected = reference.orthogonal_attention(query, key, value, 1.0)
    assert relative_error(torch.func.vmap(followed)(query, key, value), expected) < 1e-5


def test_a_transform_is_right_or_nan_however_large_s_is(subtests):
    for norm in (1e3, 1e4, 3e4, 5e4, 7e4, 1e5, 1.6e5, 1e6):
        with subtests.test(norm=norm):
            query, key, value = torch.randn(3, 2, 11, 4)
            size = torch.linalg.matrix_norm(reference.skew(query, key, 1.0), 2).max()
            scale = (norm / size).float()  # as it is computed with
            expected = reference.orthogonal_attention(query, key, value, scale)
            ours = torch.func.vmap(partial(orthogonal_attention, scale=scale))(query, key, value)
            assert norm > 1e4 or not ours.isnan().any()
            assert all(y.isnan().all() or relative_error(y, right) < 1e-4 for y, right in zip(ours, expected, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_rounds_inputs_and_results_and_nothing_between(method, subtests):
    for dtype in (torch.bfloat16, torch.float16):
        with subtests.test(dtype=dtype):
            query, key, value = draw(53, 5, dtype=dtype)
            query, key = ((40 * x).detach().requires_grad_() for x in (query, key))  # the Gram matrix overflows float16
            scale = (head_scales(torch.float32) / 40**2).detach()
            *errors, _ = errors_against_reference((query, key, value, scale), method)  # the scale is float32
            assert max(errors) < torch.finfo(dtype).eps / 2


def errors_of_second_derivatives(method, norm, differentiable):
    """Errors of the gradients, and of their derivatives, also by the cotangent, over 1 + ‖expected‖."""
    inputs = dict(zip(("query", "key", "value"), (tensor.detach() for tensor in draw(11, 3)), strict=True))
    if norm in SYMMETRIC:
        inputs = dict(zip(inputs, (x[:, :3] for x in cancelling(norm, 1e2, 53, torch.float64)), strict=False))
    skew = reference.skew(inputs["query"], inputs["key"], 1.0)
    inputs["scale"] = (1.0 if norm in SYMMETRIC else norm) / torch.linalg.matrix_norm(skew, ord=2)[..., None, None]
    for name in differentiable.split():
        inputs[name].requires_grad_()
    leaves = [tensor for tensor in inputs.values() if tensor.requires_grad]
    cotangent = torch.randn_like(inputs["value"]).requires_grad_()
    directions = [torch.randn_like(leaf) for leaf in leaves]

    def derivatives(attention):
        first = torch.autograd.grad(attention(**inputs), leaves, cotangent, create_graph=True)
        along = sum((gradient * direction).sum() for gradient, direction in zip(first, directions, strict=True))
        return *first, *torch.autograd.grad(along, [*leaves, cotangent], materialize_grads=True)

    pairs = zip(derivatives(partial(attend, method=method)), derivatives(REFERENCE[method]), strict=True)
    return [((actual - expected).norm() / (1 + expected.norm())).item() for actual, expected in pairs]


@pytest.mark.parametrize("method", METHODS)
def test_gradients_that_are_differentiated_again(method, subtests):
    """create_graph=True gives the same gradients, and their derivatives match the reference.

    For queries and keys that cancel, these take balanced columns and a basis.
    """
    norms = [1.0, 30.0, *(SYMMETRIC if method in ("exact", "cayley") else ())]
    for norm, differentiable in itertools.product(norms, ("query key value scale", "query", "value", "scale")):
        with subtests.test(norm=norm, differentiable=differentiable):
            errors = errors_of_second_derivatives(method, norm, differentiable)
            assert all(error < (1e-9 if norm in SYMMETRIC else 1e-10) for error in errors), errors


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # inside torch.func.jvp
@pytest.mark.parametrize("norm", [pytest.param(1.0, marks=pytest.mark.slow), 30.0])
@pytest.mark.parametrize("method", METHODS)
def test_function_transforms(method, norm):
    """vmap and derivatives forward and backward, of all inputs and of each alone, where the transform wraps no other."""
    inputs = [tensor.detach() for tensor in draw(11, 3)]
    scale = norm * head_scales().detach() / torch.linalg.matrix_norm(reference.skew(*inputs[:2], 1.0), ord=2).max()
    ours, expected = partial(attend, scale=scale, method=method), partial(REFERENCE[method], scale=scale)
    tangents = tuple(map(torch.randn_like, inputs))
    values, derivatives = torch.func.jvp(expected, tuple(inputs), tangents)
    assert relative_error(torch.func.vmap(ours)(*inputs), values) < 1e-12
    assert relative_error(torch.func.jvp(ours, tuple(inputs), tangents)[1], derivatives) < 1e-11
    few = [x[:1, :, :5] for x in inputs]
    jacobians = [torch.autograd.functional.jacobian(f, tuple(few), vectorize=f is ours) for f in (ours, expected)]
    assert all(relative_error(*pair) < 1e-11 for pair in zip(*jacobians, strict=True))
    single = dict(zip(("query", "key", "value", "scale"), (*(x[0] for x in inputs), scale), strict=True))
    for name, several in zip(single, (*inputs, torch.stack([scale, -scale / 3])), strict=True):
        alone, others = dict(single), single.keys() - {name}
        ours, expected = (partial(f, **{key: alone[key] for key in others}) for f in (attend, REFERENCE[method]))
        ours, expected = (lambda x, f=f, name=name: f(**{name: x}) for f in (partial(ours, method=method), expected))
        assert relative_error(torch.func.vmap(ours)(several), torch.stack([expected(x) for x in several])) < 1e-12
        gradients = (torch.func.grad(lambda x, f=f: f(x).sum())(several[0]) for f in (ours, expected))
        assert relative_error(*gradients) < 1e-11


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean:torch.jit.TracerWarning")  # where shapes are
@pytest.mark.parametrize("trace", [torch.jit.trace, lambda function, inputs: make_fx(function)(*inputs)])
@papers_quickly
def test_a_trace_of_small_inputs_is_right_for_large_ones(method, trace):
    """No degree and no number of doublings is baked into it."""
    inputs, function = [tensor.detach() for tensor in draw(11, 3)], partial(orthogonal_attention, scale=0.3, method=method)
    traced = trace(lambda *x: function(*x), tuple(1e-3 * tensor for tensor in inputs))
    large = [3 * tensor for tensor in inputs]
    assert relative_error(traced(*large), function(*large)) < 1e-11


@pytest.mark.parametrize("method", METHODS)
def test_shapes_without_values_and_queries_of_no_width(method):
    for setting in (torch.device("meta"), FakeTensorMode()):
        with setting:
            x = torch.empty(2, 7, 3)
            assert orthogonal_attention(x, x, x, method=method).shape == x.shape
    query, value = torch.empty(2, 7, 0), torch.randn(2, 7, 3)
    assert torch.equal(orthogonal_attention(query, query, value, method=method), value)


@pytest.mark.parametrize("method", METHODS)
def test_types_that_differ_are_computed_in_the_widest(method, subtests):
    narrow = dict(zip(("query", "key", "value"), (x.detach().float() for x in draw(11, 3)), strict=True))
    for wide in narrow:
        with subtests.test(wide=wide):
            inputs = narrow | {wide: narrow[wide].double()}
            actual = orthogonal_attention(**inputs, scale=0.3, method=method)
            assert actual.dtype == inputs["value"].dtype
            tolerance = 1e-12 if wide == "value" else torch.finfo(torch.float32).eps / 2  # the one rounding at the end
            assert relative_error(actual, REFERENCE[method](**inputs, scale=0.3)) < tolerance


BAD_INPUTS = {  # shapes of query, key and value; options; the key that the error names
    "tokens of query and key": ([(5, 3), (7, 3), (5, 3)], {}, "query and key"),
    "widths of query and key": ([(5, 3), (5, 2), (5, 3)], {}, "query and key"),
    "tokens of value": ([(5, 3), (5, 3), (7, 3)], {}, "value"),
    "one dimension": ([(3,), (3,), (3,)], {}, "two dimensions"),
    "batch of key": ([(2, 5, 3), (3, 5, 3), (2, 5, 3)], {}, "batch"),
    "batch of value": ([(2, 5, 3), (2, 5, 3), (3, 5, 3)], {}, "batch"),
    "method": ([(5, 3)] * 3, {"method": "givens"}, "givens.*exact"),
    "iterations of exact": ([(5, 3)] * 3, {"method": "exact", "num_iterations": 6}, "num_iterations"),
    "no iterations": ([(5, 3)] * 3, {"method": "newton_schulz", "num_iterations": 0}, "num_iterations"),
    # Some of these would broadcast against the small matrices and turn S into another matrix without a word.
    **{f"scale of {shape}": ([(2, 3, 7, 3)] * 3, {"scale": torch.ones(shape)}, "scale") for shape in [(6,), (7, 1), (7, 7)]},
}


@pytest.mark.parametrize("shapes, options, cause", BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_inputs_are_refused(shapes, options, cause):
    inputs = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=cause):
        orthogonal_attention(*inputs, **options)
    if "value" not in cause and shapes[2][0] == shapes[0][0]:
        with pytest.raises(ValueError, match=cause):
            orthogonal_attention_matrix(*inputs[:2], **options)


@pytest.mark.parametrize("method", METHODS)
def test_autocast_leaves_the_small_matrices_alone(method):
    """The backward pass leaves them alone too, except autograd's of "qr_literal"."""
    inputs, cotangent = draw(53, 5, dtype=torch.float32), torch.randn(2, 3, 53, 7)
    expected = with_gradients(partial(attend, scale=0.3, method=method), inputs, cotangent)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = with_gradients(partial(attend, scale=0.3, method=method), inputs, cotangent)
    assert all(map(torch.equal, actual[: 1 if method == "qr_literal" else 4], expected))


@pytest.mark.parametrize("method", METHODS)
def test_memory_is_linear_in_the_tokens(method):
    """Forward and backward, no tensor is larger than M = [Q, K] or the values; the dense reference trips the wire."""
    inputs = draw(101, 3, batch=())
    largest = []
    for attention in (reference.orthogonal_attention, partial(attend, method=method)):
        with Results() as results:
            attention(*inputs, scale=0.3).sum().backward()
        largest.append(max(tensor.numel() for tensor in results.tensors))
    assert largest[0] >= 101**2 and 101 * 3 <= largest[1] <= 101 * 7


@pytest.mark.parametrize("method", METHODS)
def test_the_matrix_is_the_one_that_is_applied(method):
    query, key, value = draw(7, 3)
    matrix = orthogonal_attention_matrix(query, key, scale=0.3, method=method)
    assert relative_error(matrix, REFERENCE[method](query, key, torch.eye(7).double(), 0.3)) < 1e-12
    assert relative_error(matrix @ value, orthogonal_attention(query, key, value, scale=0.3, method=method)) < 1e-12
