"""Attention by a program a head: its numbers, its launches, and the order of what its threads do."""

import warnings

import pytest
import torch

from osa import reference, runtime
from osa.functional import orthogonal_attention
from tests.osa.helpers import DEGENERATE, relative_error, with_gradients

pytest.importorskip("triton", reason="Triton comes with torch for CUDA on Linux")

from triton.language import core
from triton.runtime import interpreter

from osa.kernels import launch, operators
from osa.kernels.hopper import backend, fused, parts, stepped
from osa.kernels.short import backend as short_backend
from osa.options import EPSILON
from tests.osa.interpreter import DEVICE, assert_barriers_order, quick, random
from tests.osa.test_kernels import attend, attend_and_warn, errors, symmetric_multiple
from tests.osa.test_launch import traffic

INTERPRETED = pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter stands in for the device")
HALF = torch.bfloat16
FUSED, STEPS, SPLIT_STEPS = fused.FUSED.value, fused.STEPS.value, fused.SPLIT_STEPS.value
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Every sequence counts as long."""
    monkeypatch.setattr(short_backend, "MAX_TOKENS", 0)
    if DEVICE.type == "cuda":
        yield
        return
    with quick():
        yield


@pytest.fixture
def in_parts(monkeypatch):
    """As if heads were few: parts of 64 rows, and of what is left. Yields the names of what is launched."""
    launched, start = [], launch.launch
    monkeypatch.setattr(backend, "MIN_ROWS", 1)
    monkeypatch.setattr(backend, "MIN_PARTS", 2)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 12)
    monkeypatch.setattr(launch, "launch", lambda kernel, *others: (launched.append(name_of(kernel)), start(kernel, *others)))
    return launched


def name_of(kernel):
    return kernel.fn.__name__.removesuffix("_kernel")


def inputs_of(tokens, width, norm, *, mean=0.0, decay=0.0, heads=1, seed=0):
    """Tokens that share `mean` times a vector, columns of size k^−decay, and the scale for this ‖S‖₂ of the first head."""
    tensors = random(tokens, width, width, (1, heads), seed)
    shared = random(1, width, width, (1, heads), seed + 1)
    query, key, value = (x + mean * vector for x, vector in zip(tensors, shared, strict=True))
    sizes = torch.arange(1, width + 1, device=DEVICE) ** -decay
    query, key, value = (x.to(HALF) for x in (query * sizes, key * sizes, value))
    scale = norm / torch.linalg.matrix_norm(reference.skew(query[:, :1].double(), key[:, :1].double(), 1.0), 2)
    return query, key, value, scale.float().view(1, 1, 1, 1)


def state(query, key, value, scale):
    """The state of each head after the forward pass: FUSED, STEPS or SPLIT_STEPS."""
    scale = scale.expand(*query.shape[:2], 1, 1)
    return operators.HOPPER["exact"](query, key, value, scale, 0, EPSILON)[1].flatten().tolist()


def allowed(form, norm):
    """The rounding of inputs, output and gradients to bfloat16, and by one product of each step once more, times ‖S‖₂."""
    return 3e-3 if form == SPLIT_STEPS else 5e-3 if form == FUSED else 3e-3 + 2**-8 * norm


@pytest.mark.parametrize(
    "tokens, width, norm, more, form",
    [
        (7, 64, 1.0, {}, FUSED),  # N < 2d, and less than a tile
        (197, 64, 2.0, {}, FUSED),
        (130, 48, 0.3, {"mean": 1.0}, FUSED),
        (67, 32, 1.0, {"decay": 1.0}, FUSED),
        (67, 8, 1.0, {}, FUSED),
        (67, 64, 2.0, {"mean": 1.0}, STEPS),
        (67, 64, 2.0, {"mean": 5.0}, STEPS),
        (67, 32, 6.0, {"decay": 1.0}, STEPS),  # few directions, so that ‖Z‖_F is small and eleven terms are too few
        (197, 64, 6.0, {}, STEPS),
        (130, 40, 10.0, {"decay": 1.0}, STEPS),
        (7, 64, 6.0, {}, STEPS),
        (67, 64, 1.0, {"mean": 20.0}, SPLIT_STEPS),  # columns so nearly alike that gradients cancel
        (67, 16, 40.0, {}, SPLIT_STEPS),
    ],
)
def test_output_and_gradients_match_the_reference(tokens, width, norm, more, form):
    query, key, value, scale = inputs_of(tokens, width, norm, **more)
    assert state(query, key, value, scale) == [form]
    assert max(errors("exact", query, key, value, scale)[:4]) < allowed(form, norm)


@pytest.mark.parametrize(
    "tokens, width, norm, more, form",
    [
        (65, 64, 1.0, {}, FUSED),  # N < 2d, and a part of one row
        (197, 64, 2.0, {}, FUSED),
        (131, 48, 0.3, {"mean": 1.0}, FUSED),
        (131, 8, 0.1, {}, FUSED),
        (131, 64, 6.0, {}, STEPS),  # left to a program a head
        (67, 16, 40.0, {}, SPLIT_STEPS),
    ],
)
def test_output_and_gradients_of_parts_match_the_reference(in_parts, tokens, width, norm, more, form):
    query, key, value, scale = inputs_of(tokens, width, norm, **more)
    assert state(query, key, value, scale) == [form]
    assert max(errors("exact", query, key, value, scale)[:4]) < allowed(form, norm)
    assert {"gram", "mix", "apply", "products", "mix_backward", "apply_backward"} < set(in_parts)


@pytest.mark.parametrize("degenerate", ["equal", "nearly equal", "zeros", "one live token"])
def test_parts_of_dependent_columns(in_parts, degenerate):
    query, key, value, scale = inputs_of(71, 16, 1.0)
    query, key = DEGENERATE[degenerate](query, key)
    assert max(errors("exact", query, key, value, scale)[:4]) < allowed(FUSED, 1.0)
    assert "gram" in in_parts


def test_parts_repeat_their_bits(in_parts):
    """Heads of unequal scales and strides, as one call and as a program a head."""
    *tensors, scale = inputs_of(197, 16, 1.0, heads=3)
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    scale = scale * torch.tensor([1.0, -0.3, 5.0], device=DEVICE).view(1, 3, 1, 1)
    apart = tensors[0], key, tensors[2].mT.contiguous().mT
    assert state(query, key, value, scale) == [FUSED, FUSED, STEPS]
    for inputs in (query, key, value), apart:
        assert max(errors("exact", *inputs, scale)[:4]) < allowed(STEPS, 5.0)
        inputs = [x.requires_grad_() for x in (*inputs, scale)]
        found = [with_gradients(lambda *x: attend(*x, "exact"), inputs, value) for _ in range(2)]
        assert all(map(torch.equal, *found))


def test_orthogonal_columns_take_one_step():
    """As those of many independent tokens nearly do. ‖Z‖_F is 23, and a row of |Z| sums to little more than 2.

    S acts on all of V, so that the error is what the form of steps has in one.
    """
    query, key, value, _ = inputs_of(131, 64, 1.0)
    query, key = torch.linalg.qr(torch.cat([query, key], -1).float()).Q.to(HALF).chunk(2, -1)
    scale = torch.full((1, 1, 1, 1), 2.0, device=DEVICE)
    assert state(query, key, value, scale) == [FUSED]
    assert max(errors("exact", query, key, value, scale)[:4]) < allowed(STEPS, 2.0)


def test_query_that_is_nearly_key_times_a_symmetric_matrix_takes_three_products():
    """No pair of columns is alike, so none is balanced: ‖Z‖_F is a hundred times ‖S‖₂."""
    query, key, _ = symmetric_multiple(100.0, 67, 16)
    query, key, value = query.to(HALF), key.to(HALF), random(67, 16, 16, (1, 1))[2].to(HALF)
    scale = 2 / torch.linalg.matrix_norm(reference.skew(query.double(), key.double(), 1.0), 2)
    scale = scale.float().view(1, 1, 1, 1)
    assert state(query, key, value, scale) == [SPLIT_STEPS]
    assert max(errors("exact", query, key, value, scale)[:4]) < 3e-3


@pytest.mark.parametrize("norm", [0.1, 1.0, 4.0, 20.0, 200.0])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_the_output_over_all_norms(norm, mean):
    """An error of at most 2⁻⁹ ‖S‖₂ by one product, and of 10⁻⁵ ‖S‖₂ by three, on top of the rounding."""
    query, key, value, scale = inputs_of(66, 64, norm, mean=mean)
    expected = reference.orthogonal_attention(*(x.double().cpu() for x in (query, key, value)), scale.double().cpu())
    most = 2e-3 + (1e-5 if state(query, key, value, scale) == [SPLIT_STEPS] else 2**-9) * norm
    assert relative_error(attend(query, key, value, scale, "exact").cpu(), expected) < most


@pytest.mark.parametrize("norm", [0.5, 6.0, 30.0])
def test_heads_have_a_scale_and_strides_of_their_own(norm):
    """Heads lie in one tensor, or in three of unequal strides. The second head's c is 0, with its gradient."""
    *tensors, scale = inputs_of(37, 16, norm, heads=2)
    scale = torch.cat([scale, 0 * scale], 1)
    together = torch.stack(tensors, 2).permute(0, 3, 2, 1, 4)  # (batch, tokens, 3, heads, width)
    projected = [x.transpose(1, 2) for x in together.contiguous().unbind(2)]
    apart = [projected[0], tensors[1], tensors[2].mT.contiguous().mT]
    form = state(*tensors, scale)[0]
    for query, key, value in (projected, apart):
        assert max(errors("exact", query, key, value, scale)[:4]) < allowed(form, norm)
        assert torch.equal(attend(query, key, value, scale, "exact")[:, 1], value[:, 1])


@INTERPRETED
def test_rows_may_lie_2_to_the_31_entries_apart():
    """The memory is reserved, and next to nothing of it touched."""
    query, key, value, scale = inputs_of(3, 8, 1.0)
    far = torch.empty(2**31 + 8, dtype=HALF).as_strided(query.shape, (8, 8, 2**30, 1)).copy_(query)
    assert torch.equal(*(attend(x, key, value, scale, "exact") for x in (far, query)))


def test_what_has_no_digit_is_nan_and_leaves_the_others_alone():
    query, key, value, scale = inputs_of(70, 16, 1.0, heads=2)
    expected = attend(query, key, value, scale, "exact")
    broken = query.clone()
    broken[0, 0, 2, 1] = torch.nan
    symmetric = query.clone()
    near, other, _ = symmetric_multiple(1e6, 70, 16)
    keys = torch.cat([other.to(HALF), key[:, 1:]], 1)
    symmetric[:, :1] = near
    for tensors, factor, warns in (
        ((broken, key), 1.0, False),
        ((query, key), torch.nan, False),
        ((query, key), 1e9, False),
        ((symmetric, keys), 1e3, True),
    ):
        own = torch.cat([factor * scale, scale], 1)
        actual, warned = attend_and_warn(*tensors, value, own, "exact")
        assert actual[0, 0].isnan().all() and torch.equal(actual[0, 1], expected[0, 1]) and warned == warns, (factor, warned)
        inputs = [x.requires_grad_() for x in (*tensors, value, own)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            grads = torch.autograd.grad(attend(*inputs, "exact")[0].float().sum(), inputs)
        assert all(x[0, 0].isnan().all() and not x[0, 1].isnan().any() for x in grads)
        query, key, value = (x.detach() for x in (query, key, value))


def in_order(monkeypatch, inputs):
    """Returns a function that launches the kernels of a call and its gradients one after the other."""
    start = launch.launch

    def run(races):
        monkeypatch.setattr(launch, "launch", lambda *x: (races.forget(), start(*x)))
        torch.autograd.grad(attend(*inputs, "exact").float().sum(), inputs)

    return run


@INTERPRETED
@pytest.mark.parametrize(
    "norm, more, form", [(0.3, {}, FUSED), (3.0, {"mean": 6.0}, STEPS), (0.3, {"mean": 30.0}, SPLIT_STEPS)]
)
def test_barriers_order_all_that_threads_read_of_each_other(monkeypatch, norm, more, form):
    """One program takes two heads in turn. Without barriers kernels race."""
    inputs = [x.requires_grad_() for x in inputs_of(9, 8, norm, heads=2, **more)]
    assert state(*inputs)[0] == form
    assert_barriers_order(in_order(monkeypatch, inputs), at_least=5)


@INTERPRETED
def test_under_a_compiler_without_a_break(monkeypatch):
    monkeypatch.setitem(runtime.KERNELS, "attend", [(operators.fits, operators.attend)])
    *inputs, scale = (x.requires_grad_() for x in inputs_of(9, 8, 1.0))
    compiled = torch.compile(orthogonal_attention, backend="aot_eager", fullgraph=True)
    actual, expected = (f(*inputs, scale=scale) for f in (compiled, orthogonal_attention))
    assert torch.equal(actual, expected) and actual.grad_fn is not None
    both = (torch.autograd.grad(each.float().sum(), (*inputs, scale)) for each in (actual, expected))
    assert all(map(torch.equal, *both))


@INTERPRETED
def test_barriers_in_parts(monkeypatch, in_parts):
    inputs = [x.requires_grad_() for x in inputs_of(67, 8, 0.3, heads=2)]
    assert_barriers_order(in_order(monkeypatch, inputs), at_least=3)
    assert "mix_backward" in in_parts


@INTERPRETED
def test_launches_and_operators_in_parts(in_parts):
    """Three and four launches, and one and two operators that add the parts up; then those for other heads."""
    query, key, value, scale = inputs_of(67, 8, 1.0)
    inputs, saved = (query, key, value, scale), torch.ones(1, 1, 1, 1)
    forward = traffic(lambda: operators.HOPPER["exact"](*inputs, 0, EPSILON)).names
    assert in_parts == ["gram", "mix", "apply", *["stepped_forward"] * 2] and len(forward) <= 10, forward
    in_parts.clear()
    backward = traffic(lambda: torch.ops.osa.fused_exact_backward(*inputs, saved, value, 0, EPSILON)).names
    own = ["gram", "products", "mix_backward", "apply_backward"]
    assert in_parts == [*own, *["stepped_backward"] * 2] and len(backward) <= 10, backward


@INTERPRETED
def test_launches_and_operators(monkeypatch):
    """Three launches each way, and nothing else but the question whether a digit was lost."""
    query, key, value, scale = inputs_of(9, 64, 1.0)
    launched, saved = [], torch.ones(1, 1, 1, 1)
    monkeypatch.setattr(launch, "launch", lambda kernel, *others: launched.append(kernel.fn.__name__))
    inputs = query, key, value, scale
    forward = traffic(lambda: operators.HOPPER["exact"](*inputs, 0, EPSILON)).names
    assert launched == ["forward_kernel", *["stepped_forward_kernel"] * 2] and len(forward) <= 10, forward
    launched.clear()
    backward = traffic(lambda: torch.ops.osa.fused_exact_backward(*inputs, saved, value, 0, EPSILON)).names
    assert launched == ["backward_kernel", *["stepped_backward_kernel"] * 2] and len(backward) <= 10, backward


@INTERPRETED
@pytest.mark.parametrize("name", ["fused", "parts"])
def test_the_first_use_would_notice_a_product_too_few(monkeypatch, request, name):
    monkeypatch.setattr(operators, "TRIED_TOKENS", 64)  # few for the interpreter
    launched = request.getfixturevalue("in_parts") if name == "parts" else []
    kernel = name, "exact", DEVICE, (HALF,) * 3, 64, 16, 16  # types, rows and widths
    assert operators._agrees(*kernel) and ("mix_backward" in launched) == (name == "parts")

    def without_the_lower_half(x):
        high = x.to(core.bfloat16)
        return high, high * 0.0

    monkeypatch.setattr(stepped, "high_low", interpreter.InterpretedFunction(without_the_lower_half))
    with pytest.warns(UserWarning, match="its relative error is"):
        assert not operators._agrees(*kernel)


def test_the_form_is_chosen_by_type_width_and_device(monkeypatch):
    monkeypatch.setattr(launch, "capability", lambda device: 9)

    def is_fused(count, tokens, width=64, dtype=HALF, method="exact"):
        tensors = torch.empty(3, 1, count, tokens, width, dtype=dtype, device="meta")
        found = operators._find(method, *tensors)
        return "fused" in (found.backend.forms(*tensors) if found else ())

    assert is_fused(1536, 197) and is_fused(1, 65536) and is_fused(1, 300, 8)
    assert not any((is_fused(99, 197, 72), is_fused(99, 197, 60), is_fused(1024, 32768)))
    assert not is_fused(99, 197, dtype=torch.float16) and not is_fused(99, 197, method="newton_schulz")
    for capability in (8, 10):
        monkeypatch.setattr(launch, "capability", lambda device, capability=capability: capability)
        assert not is_fused(1536, 197)


def test_heads_have_parts_where_they_leave_a_device_idle(monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    shapes = {(1, 4096): 16, (1, 65536): 128, (8, 16384): 16, (33, 1024): 4, (34, 65536): 1, (1, 1023): 1, (1536, 197): 1}
    assert {shape: backend.partition(*shape, DEVICE).get("parts", 1) for shape in shapes} == shapes
    monkeypatch.setattr(launch, "capability", lambda device: 9)
    forms = []
    monkeypatch.setattr(operators, "_is_verified", lambda form, *others: forms.append(form) or True)
    for count in (2, 99):
        assert operators.fits(*torch.empty(3, 1, count, 4096, 64, dtype=HALF), 1.0, "exact")
    assert forms == ["fused", "parts", "fused"]


def test_constants_agree():
    assert fused.ENTRIES.value == fused.D.value * fused.COLUMNS.value and fused.COLUMNS.value == 2 * fused.D.value
    assert fused.SCRATCH.value == (2 * fused.MAX_TERMS.value + 1) * fused.ENTRIES.value
    assert parts.PART_SUMS.value == fused.COLUMNS.value**2 + fused.ENTRIES.value
    assert parts.HEAD_SCRATCH.value == fused.SCRATCH.value + 2 * fused.ENTRIES.value + fused.COLUMNS.value**2
    offsets = (stepped.O_F, stepped.O_A, stepped.O_GRAD_GRAM, stepped.O_BALANCE, stepped.O_Z, stepped.O_TERMS)
    sizes = (fused.ENTRIES.value,) * 3 + (3 * fused.D.value**2, 2 * fused.COLUMNS.value, fused.COLUMNS.value**2)
    assert [x.value for x in offsets] == [sum(sizes[: i + 1]) for i in range(len(sizes))]
