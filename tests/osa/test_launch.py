"""Kernels of CUDA from outside: when they are taken, how they are launched, and the work that they save a device.

Tensors of the CPU stand in for those of CUDA, or have no values; what a kernel computes is tested in test_kernels.py.
"""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import osa
from osa import functional, routes, runtime
from osa.functional import orthogonal_attention
from tests.osa.helpers import relative_error

pytest.importorskip("triton", reason="Triton comes with torch for CUDA on Linux")

from osa.kernels import launch, operators
from osa.kernels.long import backend as long_backend
from osa.kernels.short import backend as short_backend
from tests.osa.interpreter import DEVICE, quick, random

INTERPRETED = pytest.mark.skipif(DEVICE.type == "cuda", reason="tensors of the CPU stand in for those of CUDA")


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Kernels take tensors of every device: of the CPU by the interpreter."""
    if DEVICE.type == "cuda":
        yield
        return
    monkeypatch.setitem(runtime.KERNELS, "attend", [(operators.fits, operators.attend)])
    monkeypatch.setitem(runtime.KERNELS, "phi1_times", [(operators.fits_phi1, operators.phi1_times)])
    with quick():
        yield


class Traffic(TorchDispatchMode):
    """Names and bytes of the operators that give a device something to do: neither views nor allocations, and no read."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.bytes = [], 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name, returns = operator._schema.name, operator._schema.returns
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::item"), "it reads the device"
        result = operator(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        allocates = ("prim::", "profiler::", "aten::promote_types", "aten::empty", "aten::new_empty", "aten::_unsafe_view")
        if not (is_view or name.startswith(allocates)):
            self.names.append(name)
            tensors = (x for x in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor))
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result


def traffic(step) -> Traffic:
    with Traffic() as found:
        step()
    return found


def step_names(name):
    """The operators of a training step of a model, as CUDA takes it, counted on tensors without values."""
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
        return traffic(step).names


@pytest.mark.slow
@INTERPRETED
@pytest.mark.usefixtures("as_on_cuda")
def test_a_step_launches_little_more_than_that_of_a_vit():
    vit = len(step_names("vit"))
    for name, most in {"osa_exact": 1.1, "osa_ns": 1.2, "osa_qr": 1.2}.items():
        names = step_names(name)
        assert len(names) <= most * vit, (name, len(names), vit)
        assert sum(each.startswith("osa::") for each in names) == 12, name


@pytest.mark.parametrize("operator", [operators.SHORT["qr"], operators.LONG["exact"]], ids=["qr", "long"])
def test_the_operator_is_one_for_autograd_and_the_compiler(as_on_cuda, operator):
    arguments = (
        *(x.requires_grad_() for x in random(3, 1, 2)),
        torch.tensor([0.2, 0.3], device=DEVICE).view(1, 2, 1, 1),
        0,
        1e-7,
    )
    utilities = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(operator.attend, arguments, test_utils=utilities)


@pytest.mark.slow
def test_under_a_compiler_without_a_break(as_on_cuda):
    compiled = torch.compile(orthogonal_attention, backend="aot_eager", fullgraph=True)
    for tokens, width in ((5, 2), (7, 2), (7, 3)):  # a compiler takes what changes for unknown
        *inputs, weight = (*(x.requires_grad_() for x in random(tokens, width)), random(tokens, width, seed=1)[2])
        actual, expected = (f(*inputs, scale=0.2) for f in (compiled, orthogonal_attention))
        torch.testing.assert_close(actual, expected)
        both = (torch.autograd.grad((each * weight).sum(), inputs) for each in (actual, expected))
        torch.testing.assert_close(*both)


@pytest.mark.slow
@INTERPRETED
@pytest.mark.usefixtures("as_on_cuda")
def test_a_compiled_program_warns_of_digits_that_are_lost(monkeypatch):
    monkeypatch.setattr(short_backend, "MAX_TOKENS", 0)  # the kernels of long sequences have no basis at hand
    query, key, value = random(7, 2)
    query = key @ torch.tensor([[2.0, 1.0], [1.0, 3.0]]) + 1e-6 * query
    compiled = torch.compile(partial(orthogonal_attention, scale=1e3), backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match='use method="qr"'):
        assert compiled(query, key, value).isnan().all()


@pytest.fixture
def no_plain_route(monkeypatch):
    for module in (functional, operators):
        monkeypatch.setattr(module, "plain_attention", lambda *arguments: pytest.fail("the plain route is taken"))


def total(query, key, value, scale, method):
    return orthogonal_attention(query, key, value, scale=scale, method=method).square().sum()


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_cuda", "no_plain_route")
@pytest.mark.parametrize(
    "method, most", [*((each, 256) for each in short_backend.METHODS), *((each, 0) for each in long_backend.METHODS)]
)
def test_torch_func_takes_the_kernels(method, most, monkeypatch):
    """vmap of grad and grad of vmap are a loop, whichever dimension of an input is mapped, if any."""
    monkeypatch.setattr(short_backend, "MAX_TOKENS", most)  # 0: all sequences are long
    function, every = partial(total, method=method), (0, 1, 2, 3)
    query, key, value = random(3, 2, batch=(2, 2))
    value, scale = value[0], torch.tensor([0.2, 0.3], device=DEVICE).view(2, 1, 1)  # the same for all
    inputs, where = (query, key.movedim(0, 2), value, scale), (0, 2, None, None)
    leaves = [x.detach().requires_grad_() for x in inputs]
    expected = []
    for i in range(2):
        alone = leaves[0][i], leaves[1][:, :, i], *leaves[2:]
        expected.append(torch.autograd.grad(function(*alone), alone))
    expected = [torch.stack(each) for each in zip(*expected, strict=True)]
    of_each = torch.func.vmap(torch.func.grad(function, every), where)(*inputs)
    torch.testing.assert_close(list(of_each), expected)
    of_all = torch.func.grad(lambda *x: torch.func.vmap(function, where)(*x).sum(), every)(*inputs)
    expected = [expected[0], expected[1].movedim(0, 2), *(x.sum(0) for x in expected[2:])]
    torch.testing.assert_close(list(of_all), expected)
    twice = torch.func.vmap(torch.func.vmap(function, (None, None, None, 0)), where)(
        *inputs[:3], torch.stack([scale, -scale])
    )
    torch.testing.assert_close(twice[1, 0], function(query[1], key[1], value, scale))


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_cuda", "no_plain_route")
def test_gradients_of_each_image_take_the_kernels():
    model = osa.create_model("osa_exact", image_size=8, embed_dim=8, num_heads=2, depth=1).to(DEVICE)
    images, weights = torch.rand(3, 1, 8, 8, device=DEVICE), dict(model.named_parameters())

    def loss(weights, image):
        return torch.func.functional_call(model, weights, image[None]).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, images)
    for i, image in enumerate(images):
        expected = torch.autograd.grad(loss(weights, image), list(weights.values()))
        torch.testing.assert_close([mapped[name][i] for name in weights], list(expected))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # inside torch.func.jvp
@pytest.mark.parametrize("method", short_backend.METHODS)
def test_derivatives_of_derivatives_and_forward_ones_are_the_plain_routes(as_on_cuda, method):
    *inputs, weight = (x.requires_grad_() for x in (*random(5, 2), random(5, 2, seed=1)[2]))

    def second(function):
        grads = torch.autograd.grad((function(*inputs) * weight).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs)

    def plain(*inputs):
        return routes.plain_attention(*inputs, 0.2, method, None, 1e-7)

    fused = partial(orthogonal_attention, scale=0.2, method=method)
    for actual, expected in zip(second(fused), second(plain), strict=True):
        assert relative_error(actual, expected) < 1e-4

    def size(function):
        return lambda query: torch.func.grad(lambda x: (function(x, *inputs[1:]) * weight).sum())(query).square().sum()

    fused_twice, twice = (torch.func.grad(size(function))(inputs[0]) for function in (fused, plain))
    assert relative_error(fused_twice, twice) < 1e-4
    torch.testing.assert_close(*(torch.func.jvp(f, tuple(inputs), tuple(inputs)) for f in (fused, plain)))
    traced = torch.compile(torch.vmap(fused), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(traced(*inputs), fused(*inputs))


@pytest.fixture
def untried(monkeypatch):
    """State of a GPU on which no kernel was used yet, and no graph is recorded."""
    monkeypatch.setattr(operators, "_VERDICTS", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


KERNEL = "short", "exact", DEVICE, (torch.float32,) * 3, 16, 2, 3


@pytest.mark.slow
@pytest.mark.usefixtures("untried", "as_on_cuda")
@pytest.mark.parametrize("form, rows", [("short", 16), ("long", 400)])
def test_a_kernel_is_tried_once_wherever_it_is_first_used(form, rows):
    kernel = form, *KERNEL[1:4], rows, *KERNEL[5:]
    with torch.inference_mode(), FakeTensorMode():  # on true tensors all the same
        assert traffic(lambda: operators._is_verified(*kernel)).names == [] and operators._is_verified(*kernel)


@pytest.mark.slow
@pytest.mark.usefixtures("untried", "as_on_cuda")
def test_a_kernel_may_be_tried_in_a_transform():
    assert torch.func.vmap(lambda x: x + operators._is_verified(*KERNEL))(torch.zeros(2)).all()


ALL_AT_ONCE = """
import functools, json, multiprocessing, sys, threading
from unittest import mock
import torch
from triton import compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from osa.kernels import launch, operators

def compile_ahead(form, count, dtype, shape):
    launch.multiprocessors = lambda device: 132
    operators.ThreadPoolExecutor = functools.partial(operators.ThreadPoolExecutor, count)  # however few the cores are
    target = {"get_current_target.return_value": GPUTarget("cuda", 90, 32), "get_current_device.return_value": 0}
    driver.set_active(mock.Mock(**target))
    everyone, compiled = threading.Barrier(count), []

    def compile(source, **options):
        compiled.append(source.name)
        everyone.wait(timeout=30)
        return mock.MagicMock()

    compiler.compile = compile
    if form == "phi1":
        inputs, options = [torch.zeros(shape), torch.zeros(shape)], {}
        call = operators.phi1_times
    else:
        inputs = [torch.zeros(shape, dtype=getattr(torch, dtype)) for _ in range(3)] + [torch.zeros(3, 1, 1)]
        options = {"method": form, "num_iterations": None, "epsilon": 1e-7}
        call = functools.partial(operators.attend, **options)
    operators._compile_ahead(form, inputs, options)
    assert len(compiled) == count, compiled
    output = call(*(x.requires_grad_() for x in inputs))
    output.backward(torch.zeros(output.shape, dtype=output.dtype))
    assert len(compiled) == count, compiled

for case in json.loads(sys.argv[1]):
    process = multiprocessing.get_context("fork").Process(target=compile_ahead, args=case)
    process.start()
    process.join()
    assert process.exitcode == 0, case
"""


@pytest.mark.slow
@INTERPRETED
def test_what_a_first_use_launches_is_compiled_side_by_side():
    """Each compilation waits for all of them, and the call itself compiles nothing more. It needs no device.

    Each case is a process that has compiled nothing, forked from one that has imported Triton.
    """
    cases = [
        ("exact", 6, "bfloat16", (2, 3, 300, 64)),
        ("exact", 10, "bfloat16", (1, 3, 1024, 64)),
        ("exact", 5, "float32", (2, 3, 300, 24)),
        ("qr", 2, "float32", (2, 3, 50, 16)),
        ("phi1", 2, "float32", (6, 32, 32)),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", ALL_AT_ONCE, json.dumps(cases)]
    subprocess.run(command, env=environment, check=True)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no such architecture\nand more"),
        subprocess.CalledProcessError(1, ["gcc"]),  # the stub that launches a kernel is compiled
        ImportError("no driver"),
        None,  # its numbers are wrong
    ],
    ids=repr,
)
def test_a_kernel_that_fails_is_left_with_one_warning(monkeypatch, error):
    def fails(query, key, value, scale, **options):
        if error is not None:
            raise error
        return value + 0 * (query.sum() + key.sum() + scale.sum())

    monkeypatch.setattr(operators, "attend", fails)
    with pytest.warns(UserWarning, match="its relative error is" if error is None else type(error).__name__) as warned:
        assert not operators._is_verified(*KERNEL)
    assert len(warned) == 1 and "and more" not in str(warned[0].message)
    assert not operators._is_verified(*KERNEL)


@pytest.mark.parametrize("capability", [8, 9, 10, 12])
def test_hopper_alone_has_the_form_of_asynchronous_products(monkeypatch, capability):
    """Instructions that are neither in the GPUs before it nor in those after it."""
    monkeypatch.setattr(launch, "capability", lambda device: capability)
    inputs = torch.empty(2, 1, 1, 300, 64, dtype=torch.bfloat16)
    assert (long_backend.gram_tile(*inputs)["TILE"][1] == 64) == (capability == 9)
    assert long_backend.apply_backward_tile(*inputs)["TILE"][0] == (128 if capability == 9 else 32)


@pytest.mark.usefixtures("untried")
def test_each_form_of_a_kernel_is_tried_before_it_is_taken(monkeypatch):
    """Types, rows and widths make another program, which may fail where the first one did not."""
    forms = []
    monkeypatch.setattr(operators, "_agrees", lambda *form: forms.append(form) or True)
    x, y = torch.randn(1, 1, 20, 4), torch.randn(1, 1, 200, 4)
    for inputs in ((x, x, x), (x, x, x.bfloat16()), (y, y, y), (x, x, x[..., :2])):
        assert all(operators.fits(*inputs, None, "qr") for _ in range(2))
    long, longer = torch.randn(1, 1, 300, 4), torch.randn(1, 1, 5000, 4)
    assert not operators.fits(long, long, long, None, "qr")
    assert all(operators.fits(each, each, each, None, "exact") for each in (long, longer))  # one form
    assert len(forms) == len(set(forms)) == 5
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # no kernel is tried in a graph
    assert operators.fits(x, x, x, None, "qr") and not operators.fits(y, y, y.bfloat16(), None, "qr")


@INTERPRETED
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("most", [256, 2])
def test_rows_may_lie_2_to_the_31_entries_apart(monkeypatch, most):
    """The memory is reserved, and next to nothing of it touched."""
    monkeypatch.setattr(short_backend, "MAX_TOKENS", most)
    key, value = (x.bfloat16() for x in random(3, 2, 2, (1, 1))[1:])
    query = torch.empty(2**31 + 8, dtype=torch.bfloat16).as_strided(key.shape, (1, 1, 2**30, 1)).copy_(-key)
    query[..., 0] += 1
    actual, expected = (operators.attend(x, key, value, 0.2, "newton_schulz", 1, 1e-7) for x in (query, query.contiguous()))
    assert torch.equal(actual, expected)


@pytest.mark.slow
def test_the_library_knows_its_kernels_only_when_they_are_imported():
    """The library imports them only where there is a device."""
    script = "import sys, osa.functional; assert not {'triton', 'osa.kernels'} & sys.modules.keys()\n"
    script += "known = osa.runtime.KERNELS; before = len(known)\n"
    script += "import osa.kernels; assert len(known) == before + 1 and len(known['attend']) == 2"
    if DEVICE.type == "cpu":
        subprocess.run([sys.executable, "-c", script], check=True)


def test_the_products_of_an_operator_are_counted_as_those_of_the_plain_route(monkeypatch, as_on_cuda):
    from pipeline.benchmarks import cost

    call = cost.Call(partial(orthogonal_attention, scale=0.05), tuple(random(3, 2, 2))).with_backward()
    fused = cost.cost(call, DEVICE)
    monkeypatch.setattr(runtime, "KERNELS", {})
    plain = cost.cost(call, DEVICE)
    assert fused.multiply_adds == plain.multiply_adds > 0 and fused.peak_bytes != plain.peak_bytes
