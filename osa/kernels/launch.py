"""The kernels as operators of torch, which autograd and torch.compile know as a whole, and when they are taken."""

import functools
import math
import warnings

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from osa import functional, linalg
from osa.kernels import attention, phi1

METHODS = ("exact", "newton_schulz", "qr")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 64  # of query, key and value
MAX_TOKENS = 256  # beyond, one program for a matrix is too few: the large products are the library's
MAX_BASIS = 256 * 64  # entries of a basis, which Gram–Schmidt holds in registers
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of `_agrees`


def fits(query: Tensor, key: Tensor, value: Tensor, scale: float | Tensor | None, method: str) -> bool:
    """Whether `attend` takes tensors such as these of CUDA: by a method that has a kernel, and under no function transform.

    A kernel that does not compile, or gives other numbers than the plain route when it is first used, does not fit either,
    and warns once. While a CUDA graph is recorded none is tried: what is recorded has to have run before with the same
    shapes, as torch asks of every capture.
    """
    tokens, width = query.shape[-2:]
    tensors = query, key, value
    return (
        method in METHODS
        and all(x.dtype in TYPES and x.numel() and x.shape[-1] <= MAX_WIDTH and _is_whole(x) for x in tensors)
        and not (isinstance(scale, Tensor) and not _is_whole(scale))
        and tokens <= MAX_TOKENS
        and (method != "qr" or padded(tokens) * padded(2 * width) <= MAX_BASIS)
        and _is_right(method, query.device, tuple(x.dtype for x in tensors), padded(tokens), width, value.shape[-1])
    )


def fits_phi1(z: Tensor, y: Tensor) -> bool:
    """The same for `phi1_times`."""
    return (
        all(x.dtype == torch.float32 and x.numel() and _is_whole(x) for x in (z, y))
        and z.shape[-1] <= 2 * MAX_WIDTH
        and _is_right("phi1", z.device, (z.dtype,), 0, z.shape[-1], y.shape[-1])
    )


def phi1_times(z: Tensor, y: Tensor) -> Tensor:
    """`osa.linalg.phi1_times` of (b, n, n) and (b, n, m) that fit."""
    return _phi1_operator(z.contiguous(), y.contiguous())


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | Tensor | None,
    method: str,
    num_iterations: int | None,
    epsilon: float,
) -> Tensor:
    """`orthogonal_attention` of tensors that fit."""
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    if not isinstance(scale, Tensor):
        scale = query.new_full((1, 1), scale, dtype=torch.float32)
    inputs = [x.expand(*batch, *x.shape[-2:]) for x in (query, key, value, scale.view(*scale.shape[:-2], 1, 1))]
    if len(batch) != 2:
        inputs = [x.reshape(-1, *batch[-1:], *x.shape[-2:]) if batch else x[None, None] for x in inputs]
    options = functional.ITERATIONS.get(method, 0) if num_iterations is None else num_iterations, epsilon
    output, _ = OPERATORS[method](*inputs, *options)
    return output.view(*batch, *output.shape[-2:]) if len(batch) != 2 else output


def _register(method: str) -> torch.library.CustomOpDef:
    """The operators osa::METHOD, (batch, heads, N, d) and (batch, heads, 1, 1), and osa::METHOD_backward."""

    @torch.library.custom_op(f"osa::{method}", mutates_args=())
    def attend_heads(
        query: Tensor, key: Tensor, value: Tensor, scale: Tensor, num_iterations: int, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        output, basis = empty_output(query, value)
        tensors, (size, block) = (query, key, value, scale, output, basis), _sizes(query, value)
        scratch_size = (2 * query.shape[-2] + 2) * size + 6 * size**2 + 4 * block
        constants = attention_constants(method, "forward", query, value, num_iterations)
        _launch_heads(attention.forward_kernel, tensors, tensors[:5], scratch_size, epsilon, constants)
        return output, basis

    @torch.library.custom_op(f"osa::{method}_backward", mutates_args=())
    def gradients(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Tensor,
        basis: Tensor,
        grad: Tensor,
        num_iterations: int,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grads = [x.new_empty(x.shape) for x in (query, key, value, scale)]
        tensors, (size, block) = (query, key, value, scale, basis, grad), _sizes(query, value)
        scratch_size = (3 * query.shape[-2] + 2) * size + 12 * size**2 + 12 * block
        constants = attention_constants(method, "backward", query, value, num_iterations)
        with_strides = query, key, value, scale, grad, grads[0], grads[2]
        _launch_heads(attention.backward_kernel, (*tensors, *grads), with_strides, scratch_size, epsilon, constants)
        return tuple(grads)

    def empty_output(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, tokens, width = value.shape
        output = value.new_empty(batch, tokens, heads, width).transpose(1, 2)  # as the heads' concatenation wants it
        shape = (batch, heads, tokens, 2 * query.shape[-1]) if method == "qr" else (1, 1, 1, 1)
        return output, query.new_empty(shape, dtype=torch.float32)

    def fake_gradients(query, key, value, scale, basis, grad, num_iterations, epsilon):
        return tuple(x.new_empty(x.shape) for x in (query, key, value, scale))

    def save(ctx, inputs, output) -> None:
        *tensors, ctx.num_iterations, ctx.epsilon = inputs
        ctx.set_materialize_grads(False)  # the basis has none
        ctx.save_for_backward(*tensors, output[1])

    @linalg.in_own_types
    def backward(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:
        *tensors, basis = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            options = method, ctx.num_iterations or None, ctx.epsilon
            return *linalg.recorded_grad(lambda *x: functional.plain_attention(*x, *options), tensors, grad), None, None
        return *gradients(*tensors, basis, grad, ctx.num_iterations, ctx.epsilon), None, None

    attend_heads.register_fake(lambda query, key, value, scale, num_iterations, epsilon: empty_output(query, value))
    gradients.register_fake(fake_gradients)
    attend_heads.register_autograd(backward, setup_context=save)
    return attend_heads


@torch.library.custom_op("osa::phi1", mutates_args=())
def _phi1_operator(z: Tensor, y: Tensor) -> Tensor:
    """φ₁(Z) Y, (b, n, n) and (b, n, m), contiguous."""
    output, constants = torch.empty_like(y), phi1_constants(z, y)
    _launch(phi1.forward_kernel, (z, y, output), (), len(z), 3 * z.shape[-1] ** 2, constants)
    return output


@torch.library.custom_op("osa::phi1_backward", mutates_args=())
def _phi1_gradients_operator(z: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    (count, size, width), constants = y.shape, phi1_constants(z, y)
    grad_z, grad_y = torch.empty_like(z), torch.empty_like(y)
    scratch_size = 7 * size**2 + 5 * size * width
    _launch(phi1.backward_kernel, (z, y, grad, grad_z, grad_y), (), count, scratch_size, constants)
    return grad_z, grad_y


@linalg.in_own_types
def _phi1_autograd(ctx, grad: Tensor) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return linalg.recorded_grad(linalg.plain_phi1_times, ctx.saved_tensors, grad)
    return _phi1_gradients_operator(*ctx.saved_tensors, grad.contiguous())


_phi1_operator.register_fake(lambda z, y: torch.empty_like(y))
_phi1_gradients_operator.register_fake(lambda z, y, grad: (torch.empty_like(z), torch.empty_like(y)))
_phi1_operator.register_autograd(_phi1_autograd, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

OPERATORS = {method: _register(method) for method in METHODS}


def _launch_heads(
    kernel, tensors: tuple[Tensor, ...], with_strides: tuple[Tensor, ...], scratch_size: int, epsilon: float, constants: dict
) -> None:
    batch, heads, tokens, _ = tensors[0].shape
    strides, numbers = [x.stride() for x in with_strides], {"heads": heads, "tokens": tokens, "epsilon": epsilon}
    _launch(kernel, tensors, strides, batch * heads, scratch_size, constants | numbers)


def _launch(kernel, tensors: tuple[Tensor, ...], strides: list, count: int, scratch_size: int, arguments: dict) -> None:
    """On the tensors' own device, by as many programs as it holds at a time, each with scratch memory of its own."""
    device = tensors[0].device
    programs = min(count, resident_programs(device, arguments["num_warps"]))
    with torch.cuda.device_of(tensors[0]):
        scratch = make_scratch(programs, scratch_size, device)
        kernel[(programs,)](*tensors, scratch, *strides, count=count, scratch_size=scratch.stride(0), **arguments)


def make_scratch(programs: int, size: int, device: torch.device) -> Tensor:
    return torch.empty(programs, -(-size // 16) * 16, dtype=torch.float32, device=device)


def resident_programs(device: torch.device, num_warps: int) -> int:
    """How many programs of these warps a device holds at a time: a thread has 128 of a multiprocessor's registers."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return multiprocessors * max(1, 16 // num_warps)


def _sizes(query: Tensor, value: Tensor) -> tuple[int, int]:
    """2d, and the entries of a matrix (2d, d_value)."""
    return 2 * query.shape[-1], 2 * query.shape[-1] * value.shape[-1]


def phi1_constants(z: Tensor, y: Tensor) -> dict:
    """What a kernel of φ₁ is compiled for."""
    return {"SIZE": z.shape[-1], "VALUE_WIDTH": y.shape[-1], **tile_constants(z.shape[-1])}


def attention_constants(method: str, kernel: str, query: Tensor, value: Tensor, num_iterations: int) -> dict:
    """What a kernel of attention is compiled for: "forward" or "backward".

    Gram–Schmidt holds ALL_ROWS of a basis, 32 entries a thread: "qr" forward takes as many threads as that needs, "exact"
    has a basis only where its threads suffice.
    """
    constants, rows = tile_constants(2 * query.shape[-1]), padded(query.shape[-2])
    warps = rows * constants["TILES"][0] // (32 * 32)
    if (method, kernel) == ("qr", "forward"):
        constants["num_warps"] = max(constants["num_warps"], warps)
    elif method != "exact" or 2 * warps > constants["num_warps"]:
        rows = 0
    names = {"WIDTH": query.shape[-1], "VALUE_WIDTH": value.shape[-1], "METHOD": method, "ITERATIONS": num_iterations}
    return names | {"ALL_ROWS": rows, **constants}


def tile_constants(size: int) -> dict:
    """Tiles of the least width that `tl.dot` takes, and threads that hold eight entries or fewer of one.

    128 registers a thread, and loads that are not issued ahead, let two programs share a multiprocessor. Left alone, the
    compiler takes fewer, and spills.
    """
    return {"TILES": (padded(size), 16, 16), "num_warps": 8 if size > 32 else 4, "num_stages": 1, "maxnreg": 128}


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _is_whole(x: Tensor) -> bool:
    """Whether no function transform holds x, which takes an operator apart."""
    return torch.compiler.is_compiling() or linalg.is_eager(x)


_TRIED: dict[tuple, bool] = {}  # whether a kernel of these types, rows and widths agrees


@torch._dynamo.assume_constant_result
def _is_right(
    method: str, device: torch.device, dtypes: tuple[torch.dtype, ...], rows: int, width: int, value_width: int
) -> bool:
    """Whether a kernel's numbers are right on this device: tried once, and never while a graph is recorded."""
    if not torch.cuda.is_available():
        return True  # the tensors are fake, and so is what follows
    form = method, device, dtypes, rows, width, value_width
    if form not in _TRIED and not torch.cuda.is_current_stream_capturing():
        _TRIED[form] = _agrees(*form)
    return _TRIED.get(form, False)


def _agrees(
    method: str, device: torch.device, dtypes: tuple[torch.dtype, ...], rows: int, width: int, value_width: int
) -> bool:
    """Whether values and gradients on this device are those of the plain route on the CPU in float64.

    Whatever goes wrong between Triton, the C compiler, its cache on the disk and the driver is a reason to do without it.
    """
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        generator = torch.Generator().manual_seed(0)
        if method == "phi1":
            shapes = (6, width, width), (6, width, value_width), (6, width, value_width)
            *inputs, grad = (torch.randn(shape, generator=generator) for shape in shapes)
            inputs[0] = 0.2 * (inputs[0] - inputs[0].mT)
            function, plain = phi1_times, linalg.plain_phi1_times
        else:
            tokens = rows - rows // 4 + 1  # the last of its tiles is not whole
            shapes = (2, 3, tokens, width), (2, 3, tokens, width), (2, 3, tokens, value_width)
            *inputs, grad = (torch.randn(shape, generator=generator) for shape in (*shapes, shapes[-1]))
            inputs = [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
            inputs.append(torch.tensor([0.02, -0.05, 0.1]).view(3, 1, 1))
            options = {"method": method, "num_iterations": None, "epsilon": linalg.EPSILON}
            function, plain = (functools.partial(each, **options) for each in (attend, functional.plain_attention))
        grad = grad.to(dtypes[-1])
        exact = [x.double().requires_grad_() for x in inputs]
        try:
            inputs = [x.to(device).requires_grad_() for x in inputs]
            actual, expected = function(*inputs), plain(*exact)
            grads = torch.autograd.grad(actual, inputs, grad.to(device)), torch.autograd.grad(expected, exact, grad.double())
            errors = [
                ((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm()).item()
                for a, b in [(actual, expected), *zip(*grads, strict=True)]
            ]
            reason = None if max(errors) < max(TOLERANCE[x] for x in dtypes) else f"its error is {max(errors):.1e}"
        except Exception as error:  # noqa: BLE001
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if reason is not None:
        warnings.warn(f'the kernel of "{method}" for d = {width} is not used on {device}: {reason}', stacklevel=2)
    return reason is None
