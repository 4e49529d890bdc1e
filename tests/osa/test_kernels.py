"""The kernels of CUDA: their numbers, on a GPU or by Triton's interpreter on the CPU, and what surrounds them."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial

import pandas as pd
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import osa
from osa import functional, linalg, reference
from osa.functional import orthogonal_attention
from tests.osa.helpers import draw, polar_express_basis, relative_error

pytest.importorskip("triton", reason="Triton comes with torch for CUDA on Linux")

from osa import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the latter by the interpreter: see conftest.py


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    """Triton's interpreter, made fit for NumPy 2.4 and quick.

    It keeps a scalar as an array of one entry, which NumPy no longer takes for an index; it looks for the overflow of each
    sum of integers; it patches Triton's language again whenever a function is called; and it finds the type of every tuple,
    which nothing asks for.
    """
    if DEVICE.type == "cuda":
        yield
        return
    from triton.language import core
    from triton.runtime import interpreter

    patch_tensor, patch_lang, run = (
        interpreter._patch_lang_tensor,
        interpreter._patch_lang,
        interpreter.GridExecutor.__call__,
    )
    builder, patched, no_type = interpreter.interpreter_builder, set(), core.tuple_type([])

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_once(function):
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch_lang(function)

    def run_afresh(self, *args, **kwargs):
        patched.clear()
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_afresh)
        patch.setattr(core, "_type_for_tuple_values", lambda values, fields=None: no_type)
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture
def tiles_of_a_gpu():
    return kernels._tiles


@pytest.fixture(autouse=True)
def large_tiles(tiles_of_a_gpu, monkeypatch):
    """Few steps for the interpreter."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels, "_tiles", lambda size, dtype: {"TILES": (64, 64, 64, dtype), "num_warps": 4})


def polar_express_attention(query, key, value, scale, *, num_iterations=7):
    basis = polar_express_basis(torch.cat([query, key], dim=-1).double(), num_iterations)
    return reference.low_rank_matrix(query, key, scale, basis) @ value.double()


REFERENCE = {
    "exact": reference.orthogonal_attention,
    "qr": reference.orthogonal_attention,
    "newton_schulz": reference.newton_schulz_attention,
    "polar_express": polar_express_attention,
}
METHODS = list(REFERENCE)


def attend(query, key, value, scale, method, num_iterations=None):
    return kernels.attend(query, key, value, scale, method, num_iterations, osa.linalg.EPSILON)


def errors(method, query, key, value, scale, num_iterations=None):
    """Relative errors of the output and of the gradients of query, key, value and scale; K is for methods that iterate.

    Where S and so a gradient is zero they are absolute: with the size of S for query and key. The gradient of scale is the
    product of a normal cotangent with the derivative of the output, about (output − V)/scale, and has its size on average:
    the error is relative to that where the two are nearly orthogonal.
    """
    inputs = [x.detach().requires_grad_() for x in (query, key, value, scale)]
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    options = {"num_iterations": num_iterations} if num_iterations and method in functional.ITERATIONS else {}
    actual, expected = attend(*inputs, method, **options), REFERENCE[method](*exact, **options)
    cotangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(actual, inputs, cotangent.to(actual))
    expected_gradients = torch.autograd.grad(expected, exact, cotangent)
    assert [x.dtype for x in (actual, *gradients)] == [x.dtype for x in (value, *inputs)]
    size = scale.abs().max().item()
    typical = max(1.0, (expected - exact[2]).norm().item() / size)
    pairs = zip((actual, *gradients), (expected, *expected_gradients), (1, size, size, 1, typical), strict=True)
    return [((a.cpu().double() - b).norm() / b.norm().clamp(min=least)).item() for a, b, least in pairs]


def random(tokens, width, value_width=3, batch=(1, 2), seed=0):
    return [x.detach().to(DEVICE) for x in draw(tokens, width, value_width, batch=batch, dtype=torch.float32, seed=seed)]


def scales(*values):
    return torch.tensor(values, device=DEVICE).view(-1, 1, 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "tokens, width, value_width", [(1, 3, 5), (7, 5, 3), (50, 2, 11), (64, 3, 1), (128, 1, 2), (197, 2, 3)]
)
def test_output_and_gradients_match_the_reference(method, tokens, width, value_width):
    """N < 2d, and N of whole and of broken tiles; two iterations stand for the default number but at N = 50."""
    query, key, value = random(tokens, width, value_width, (2, 1) if tokens == 7 else (1, 1))
    scale = scales(0.5 / (tokens + 1))  # ‖S‖ about 1
    assert max(errors(method, query, key, value, scale, None if tokens == 50 else 2)) < 2e-5


@pytest.mark.parametrize("method", METHODS)
def test_tiles_memory_and_strides(method, tiles_of_a_gpu, monkeypatch):
    """As on a GPU: small tiles; tensors that lie between NaN, in any order, with a scale and a batch that are broadcast."""
    monkeypatch.setattr(kernels, "_tiles", tiles_of_a_gpu)
    spaces, allocate = [], kernels._space

    def with_a_guard(like, size, constants):
        spaces.append((allocate(like, size + 5, constants).fill_(torch.nan), size))
        return spaces[-1][0]

    monkeypatch.setattr(kernels, "_space", with_a_guard)

    def among_nans(x):
        around = torch.full([n + 2 for n in x.shape[::-1]], torch.nan, device=DEVICE)
        around[tuple(slice(1, -1) for _ in x.shape)] = x.permute(*reversed(range(x.dim())))
        return around.permute(*reversed(range(x.dim())))[tuple(slice(1, -1) for _ in x.shape)]

    query, key, value = random(19, 9, 5, (1, 2))
    views = [among_nans(x) for x in (query[:, :1].expand(1, 2, -1, -1), key, value)]
    assert max(errors(method, *views, torch.tensor(0.02, device=DEVICE), 2)) < 2e-5
    assert spaces and all(space[:, size:].isnan().all() for space, size in spaces)


def equal(query, key):
    return query, query


def nearly_equal(query, key):
    return query, query + 1e-3 * key


def dependent(query, key):
    return torch.cat([query[..., :2], query[..., :1]], -1), torch.cat([2 * query[..., :1], key[..., 1:]], -1)


def zeros(query, key):
    return 0 * query, 0 * key


@pytest.mark.parametrize("degenerate", [equal, nearly_equal, dependent, zeros])
@pytest.mark.parametrize("method", METHODS)
def test_dependent_columns(method, degenerate):
    query, key, value = random(11, 3, batch=(1, 1))
    query, key = degenerate(query, key)
    scale = scales(0.1)
    if degenerate is nearly_equal and method == "exact":
        scale = 300 * scale  # c‖M‖² about 1,000
    elif degenerate is zeros and method != "exact":
        query, key = query + 1e-12, key  # where the derivative of ‖M‖_F exists
    tolerance = 1e-4 if degenerate is nearly_equal else 2e-5
    assert max(errors(method, query, key, value, scale, None if degenerate is dependent else 2)) < tolerance


@pytest.mark.parametrize(
    "method, norm", [("exact", 1e-6), ("exact", 4.0), ("exact", 30.0), ("exact", 1e3), ("qr", 1e-6), ("qr", 1e3)]
)
def test_any_norm(method, norm):
    """‖S‖₂ up to where float32 loses three digits: by the series alone, and with up to nine doublings."""
    query, key, value = random(5, 2, 3, (1, 1))
    scale = norm / torch.linalg.matrix_norm(reference.skew(query, key, 1.0), 2).float().view(1, 1, 1)
    assert max(errors(method, query, key, value, scale)) < 1e-5 * max(1, norm / 10)


def test_phi1_alone():
    """As of a long sequence; values and gradients, with and without doublings, against torch's exponential."""
    z, y, cotangent = torch.randn(2, 3, 3), torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    z = (z - z.mT) * torch.tensor([0.3, 4.0]).view(2, 1, 1)
    inputs, exact = ([x.detach().to(kind).requires_grad_() for x in (z, y)] for kind in (DEVICE, torch.float64))
    blocks = torch.cat([torch.cat([exact[0], torch.eye(3).expand(2, 3, 3)], -1), torch.zeros(2, 3, 6)], -2)
    expected = torch.linalg.matrix_exp(blocks)[:, :3, 3:] @ exact[1]  # Higham 2008, Section 10.7.4
    actual = kernels.phi1_times(*inputs)
    grads = torch.autograd.grad(actual, inputs, cotangent.to(DEVICE))
    expected_grads = torch.autograd.grad(expected, exact, cotangent.double())
    for a, b in zip((actual, *grads), (expected, *expected_grads), strict=True):
        assert relative_error(a.cpu(), b) < 1e-5


def test_lower_precision_is_that_of_inputs_and_outputs_alone():
    query, key, value = (x.bfloat16() for x in random(7, 3))
    assert max(errors("exact", query, key, value, scales(0.3, -0.2))) < 1e-2  # two heads with a scale each


def test_beyond_every_digit_the_result_is_nan():
    query, key, value = random(5, 2, 3, (1, 1))
    assert attend(query, key, value, 1e9, "exact").isnan().all()


def kernel_count(step):
    """Operators of a step that give a device something to do: no views, no allocations."""
    counted = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name, returns = operator._schema.name, operator._schema.returns
            is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
            assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::item"), "it reads the device"
            idle = is_view or name.startswith(
                ("prim::", "profiler::", "aten::empty", "aten::new_empty", "aten::_unsafe_view")
            )
            if not idle:
                counted.append(name)
            return operator(*args, **(kwargs or {}))

    with Count():
        step()
    return counted


@pytest.fixture
def counts(monkeypatch):
    """The operators of a training step of a model by name, as CUDA takes it, counted on tensors without values."""

    def of(name):
        with FakeTensorMode():
            model = osa.create_model(name)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            images, labels = torch.randn(2, 1, 28, 28), torch.tensor([3, 7])

            def step():
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)  # CUDA's default
                optimizer.step()

            step()  # the first makes the optimizer's state
            return kernel_count(step)

    monkeypatch.setattr(functional, "has_kernels", lambda x: True)
    return of


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tensors of the CPU stand in for those of CUDA")
def test_a_step_launches_little_more_than_that_of_a_vit(counts):
    vit = len(counts("vit"))
    for name, most in {"osa_exact": 1.1, "osa_ns": 1.2, "osa_qr": 1.2}.items():
        found = counts(name)
        assert len(found) <= most * vit, (name, len(found), vit)
        assert sum(each.startswith("osa::") for each in found) == 12, name


@pytest.mark.parametrize("name", ["vit", *(name for name in osa.MODELS if name.startswith("osa") and "literal" not in name)])
def test_a_forward_pass_keeps_to_the_device_and_reads_nothing_of_it(name):
    """With tensors on CUDA that have no values, on any machine; all other models are tested so in test_models.py."""
    model = osa.create_model(name)
    shapes = {key: each.shape for key, each in (*model.named_parameters(), *model.named_buffers())}
    with FakeTensorMode():
        parameters = {key: torch.empty(shape, device="cuda") for key, shape in shapes.items()}
        images = torch.empty(2, 1, 28, 28, device="cuda")
        found = kernel_count(lambda: torch.func.functional_call(model, parameters, images))
    assert found and ("osa" in name) == any(each.startswith("osa::") for each in found)


def test_the_operator_is_one_for_autograd_and_the_compiler():
    arguments = *(x.requires_grad_() for x in random(3, 1, 2)), scales(0.2, 0.3).expand(1, 2, 1, 1), 0, 1e-7
    utilities = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(kernels.OPERATORS["qr"], arguments, test_utils=utilities)


def test_under_a_compiler_without_a_break(monkeypatch):
    for module in (functional, osa.linalg):
        monkeypatch.setattr(module, "has_kernels", lambda x: True)
    *inputs, weight = (*(x.requires_grad_() for x in random(5, 2)), random(5, 2, seed=1)[2])
    compiled = torch.compile(orthogonal_attention, backend="aot_eager", fullgraph=True)
    actual, expected = (f(*inputs, scale=0.2) for f in (compiled, orthogonal_attention))
    torch.testing.assert_close(actual, expected)
    both = (torch.autograd.grad((each * weight).sum(), inputs) for each in (actual, expected))
    torch.testing.assert_close(*both)


def test_derivatives_of_derivatives_and_transforms_are_the_plain_routes(monkeypatch):
    for module in (functional, osa.linalg):
        monkeypatch.setattr(module, "has_kernels", lambda x: True)
    *inputs, weight = (x.requires_grad_() for x in (*random(5, 2), random(5, 2, seed=1)[2]))

    def second(function):
        grads = torch.autograd.grad((function(*inputs) * weight).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs)

    def plain(*inputs):
        return functional._attend(*inputs, 0.2, "exact", None, 1e-7)

    fused = partial(orthogonal_attention, scale=0.2)
    for actual, expected in zip(second(fused), second(plain), strict=True):
        assert relative_error(actual, expected) < 1e-4
    torch.testing.assert_close(torch.vmap(fused)(*inputs), plain(*inputs))


@pytest.fixture
def untried(monkeypatch):
    """As on a GPU with which no kernel was used yet, where no graph is recorded."""
    monkeypatch.setattr(kernels, "_TRIED", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_a_kernel_is_tried_once_and_left_with_one_warning_if_it_fails_or_errs(monkeypatch, untried):
    arguments = "exact", DEVICE, torch.float32, 2, 3
    with torch.inference_mode(), FakeTensorMode():  # wherever the first use is, the kernel is tried on true tensors
        assert kernel_count(lambda: kernels._is_right(*arguments)) == [] and kernels._is_right(*arguments)

    def breaks(*args, **kwargs):
        raise RuntimeError("no such architecture\nand more")

    def errs(query, key, value, scale, **options):
        return value + 0 * (query.sum() + key.sum() + scale.sum())

    for function, reason in ((breaks, "RuntimeError: no such architecture$"), (errs, r"its error is \d")):
        kernels._TRIED.clear()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "attend", function)
            with pytest.warns(UserWarning, match=reason):
                assert not kernels._is_right(*arguments)
            assert not kernels._is_right(*arguments)


def test_while_a_graph_is_recorded_kernels_that_were_tried_go_into_it_and_no_other_is_tried(monkeypatch, untried):
    used, unused = (torch.randn(2, 3, 5, width, device=DEVICE) for width in (2, 3))
    assert kernels.fits(used, used, used, "exact")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(kernels, "_agrees", lambda *_: pytest.fail("tries"))
    assert kernels.fits(used, used, used, "exact") and not kernels.fits(unused, unused, unused, "exact")


@pytest.mark.parametrize("method", kernels.METHODS)
def test_a_transform_of_the_scale_alone_goes_the_plain_way(monkeypatch, method):
    for module in (functional, osa.linalg):
        monkeypatch.setattr(module, "has_kernels", lambda x: True)
    query, key, value = (torch.randn(2, 3, 5, 2, device=DEVICE) for _ in range(3))

    def total(scale, function=orthogonal_attention):
        return function(query, key, value, scale=scale, method=method).square().sum()

    scale = torch.tensor(0.2, device=DEVICE)
    plain = partial(functional._attend, num_iterations=None, epsilon=linalg.EPSILON)
    torch.testing.assert_close(torch.func.grad(total)(scale), torch.func.grad(total)(scale, plain))


@pytest.fixture(scope="module")
def compiled():
    """What two kernels take of a GPU, from a process without the interpreter, which looks at the library alone at first."""
    of = [("exact", "forward", 16, "float32", 90), ("newton_schulz", "backward", 64, "bfloat16", 80)]
    script = (
        "import json, sys, osa; alone = not {'triton', 'osa.kernels'} & sys.modules.keys()\n"
        "import torch; from pipeline.benchmarks.kernels import resources\n"
        f"print(json.dumps([alone, [resources(*a, getattr(torch, dtype), b) for *a, dtype, b in {of}]]))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_without_triton_nothing_changes(compiled):
    """And with it, the library alone imports neither it nor the kernels."""
    assert compiled[0]


def test_what_kernels_take_of_a_gpu(compiled):
    """The part of `python -m pipeline.benchmarks.kernels` that takes seconds, and its table of all, as committed."""
    import triton

    from pipeline.benchmarks.kernels import grid
    from pipeline.core.files import ROOT, sha256
    from pipeline.studies.paper.benchmarks import CODE, KERNELS

    table = pd.read_csv(ROOT / KERNELS)
    assert set(table["code_sha256"]) == {sha256(ROOT / CODE)}, "run python -m pipeline.benchmarks.kernels again"
    identity = ["method", "kernel", "width", "dtype", "architecture"]
    expected = {(*case, str(dtype).removeprefix("torch."), f"sm_{number}") for *case, dtype, number in grid()}
    assert set(table[identity].itertuples(index=False, name=None)) == expected and len(table) == len(expected)
    assert (table["spilled_bytes"] == 0).all() and (table["programs_by_memory"] >= 2).all()
    committed = table.set_index(identity).to_dict("index")
    assert len(compiled[1]) == 2
    for found in compiled[1]:
        assert found["spilled_bytes"] == 0 and found["programs"] >= 2, found
        of = committed[*(found.pop(key) for key in identity)]
        assert of["triton"] != triton.__version__ or found.items() <= of.items()


def test_the_products_of_an_operator_are_counted_as_those_of_the_plain_route(monkeypatch):
    from pipeline import cost

    call = cost.Call(partial(orthogonal_attention, scale=0.05), tuple(random(3, 2, 2))).with_backward()
    with monkeypatch.context() as patch:
        patch.setattr(osa.linalg, "_HAS_TRITON", False)
        plain = cost.cost(call, DEVICE)
    monkeypatch.setattr(functional, "has_kernels", lambda x: osa.linalg._HAS_TRITON)
    fused = cost.cost(call, DEVICE)
    assert fused.multiply_adds == plain.multiply_adds > 0 and fused.peak_bytes != plain.peak_bytes
