"""Operators of the kernels, each a whole to autograd, torch.func and torch.compile, and the tensors that they take."""

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from osa import functional, linalg
from osa.compiled import INPUTS
from osa.kernels import heads, launch, sequences
from osa.kernels.launch import padded
from osa.kernels.tiles import SIZE
from osa.linalg import Scale
from osa.runtime import VMAP_AND_GRAD, TransformType, constant_to_a_trace, is_eager, is_transformed, known, outside_of_modes

METHODS = ("exact", "newton_schulz", "qr")
HEADS = ("fused", "parts")  # forms of osa/kernels/heads.py: a program a head, and a program a part of a head
TYPES = (torch.float32, torch.bfloat16, torch.float16)
LONG_METHODS = ("exact", "newton_schulz")  # methods that need Gram matrices alone
MAX_TOKENS, MAX_WIDTH = 256, 16  # most of query and key, whose matrices one program holds in its registers
MAX_LONG_WIDTH = 128  # columns of query, key and value
TRIED_TOKENS = 1024  # tokens that `_agrees` tries for all numbers above MAX_TOKENS
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative errors that `_agrees` allows
HEADS_TOLERANCE = 1e-2  # rounding leaves 3e-3 to 6e-3, and a product too few 2e-2
PHI1_TOLERANCE = 1e-5  # no input or output of φ₁ alone is rounded


def fits(query: Tensor, key: Tensor, value: Tensor, scale: Scale, method: str) -> bool:
    """Tells whether `attend` takes these tensors of CUDA: by a method with a kernel, and in no forward-mode derivative.

    A kernel that does not compile, or gives other numbers than the plain route when it is first used, does not fit either,
    and warns once. No kernel is tried while a CUDA graph is recorded: a captured call has to have run before with the same
    shapes, as torch asks of every capture.
    """
    tokens, width = query.shape[-2:]
    tensors, is_short = (query, key, value), _is_short(query)
    dtypes, rows = tuple(x.dtype for x in tensors), padded(tokens) if is_short else TRIED_TOKENS
    forms: tuple[str, ...] = (method,)
    if not is_short and heads.is_fused(method, *tensors):
        count = torch.broadcast_shapes(*(x.shape[:-2] for x in tensors)).numel()
        forms = HEADS if heads.parts_of(count, tokens, query.device) > 1 else HEADS[:1]  # both: vmap adds heads
    return (
        method in (METHODS if is_short else LONG_METHODS)
        and all(x.dtype in TYPES and x.numel() and x.shape[-1] <= MAX_LONG_WIDTH for x in tensors)
        and all(_is_whole(x, *VMAP_AND_GRAD) for x in (*tensors, scale) if isinstance(x, Tensor))
        and all(_is_right(form, query.device, dtypes, *map(known, (rows, width, value.shape[-1]))) for form in forms)
    )


def _is_short(query: Tensor) -> bool:
    """Tells whether one program takes a whole matrix."""
    return query.shape[-2] <= MAX_TOKENS and query.shape[-1] <= MAX_WIDTH


def fits_phi1(z: Tensor, y: Tensor) -> bool:
    """Tells whether `phi1_times` takes these matrices."""
    is_usual = all(x.dtype == torch.float32 and x.numel() and _is_whole(x) for x in (z, y))
    return (
        is_usual
        and z.shape[-1] <= SIZE.value
        and _is_right("phi1", z.device, (z.dtype,), 0, known(z.shape[-1]), known(y.shape[-1]))
    )


def phi1_times(z: Tensor, y: Tensor) -> Tensor:
    """`osa.linalg.phi1_times` of (b, n, n) and (b, n, m) that fit."""
    return _phi1_operator(z.contiguous(), y.contiguous())


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: Scale, method: str, num_iterations: int | None, epsilon: float
) -> Tensor:
    """`orthogonal_attention` of tensors that fit."""
    if not isinstance(scale, Tensor):
        scale = query.new_full((1, 1), scale, dtype=torch.float32)
    batch, inputs = _as_heads(query, key, value, scale)
    options = functional.ITERATIONS.get(method, 0) if num_iterations is None else num_iterations, epsilon
    output, _ = _operator(method, *inputs[:3])(*inputs, *options)
    return output.view(*batch, *output.shape[-2:]) if len(batch) != 2 else output


def _as_heads(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> tuple[torch.Size, list[Tensor]]:
    """The shape of the batch, and the inputs as (batch, heads, N, width) and (batch, heads, 1, 1)."""
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    inputs = [x.expand(*batch, *x.shape[-2:]) for x in (query, key, value, scale.view(*scale.shape[:-2], 1, 1))]
    if len(batch) != 2:
        inputs = [x.reshape(-1, *batch[-1:], *x.shape[-2:]) if batch else x[None, None] for x in inputs]
    return batch, inputs


@dataclass(frozen=True)
class Operator:
    """The kernels of a method: osa::NAME and osa::NAME_backward, and the same as functions of autograd and torch.func."""

    method: str
    attend: Callable[..., tuple[Tensor, Tensor]]  # takes query, key, value, scale, iterations and ε
    gradients: Callable[..., tuple[Tensor, ...]]  # takes query, key, value, scale, `saved`, E, iterations and ε
    launch_both: Callable[..., None]  # takes what `attend` does, and gives no output

    def __call__(self, *arguments) -> tuple[Tensor, Tensor]:
        """Calls the operator itself for a compiler, and otherwise through the function that torch.func takes."""
        return self.attend(*arguments) if torch.compiler.is_compiling() else _Attention.apply(self, *arguments)


class _Attention(torch.autograd.Function):
    """The two outputs of an operator: the heads, and a tensor that their gradients need."""

    @staticmethod
    def forward(operator: Operator, *arguments) -> tuple[Tensor, Tensor]:
        return operator.attend(*arguments)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.operator, *tensors, ctx.num_iterations, ctx.epsilon = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    @linalg.in_own_types
    def backward(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:
        grads = _Gradients.apply(ctx.operator, *ctx.saved_tensors, grad, ctx.num_iterations, ctx.epsilon)
        return None, *grads, None, None

    @staticmethod
    def vmap(info, in_dims: tuple, *arguments) -> tuple[tuple, tuple]:
        return _mapped(_Attention, info.batch_size, in_dims, arguments)


class _Gradients(torch.autograd.Function):
    """The gradients of query, key, value and scale; their own derivatives are the plain route's."""

    @staticmethod
    def forward(operator: Operator, *arguments) -> tuple[Tensor, ...]:
        return operator.gradients(*arguments)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        operator, *tensors, _, grad, num_iterations, epsilon = inputs
        ctx.options = operator.method, num_iterations or None, epsilon
        ctx.save_for_backward(*tensors, grad)

    @staticmethod
    @linalg.in_own_types
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        def gradients(query: Tensor, key: Tensor, value: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(plain, query, key, value, scale)[1](grad)

        def plain(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
            return functional.plain_attention(query, key, value, scale, *ctx.options)

        *tensors, grad = torch.func.vjp(gradients, *ctx.saved_tensors)[1](grads)
        return None, *tensors, None, grad, None, None

    @staticmethod
    def vmap(info, in_dims: tuple, *arguments) -> tuple[tuple, tuple]:
        return _mapped(_Gradients, info.batch_size, in_dims, arguments)


def _mapped(function: type[torch.autograd.Function], size: int, in_dims: tuple, arguments: tuple) -> tuple[tuple, tuple]:
    """Outputs of a function mapped over dimensions of `size` entries, which join the batch, and their mapped dimensions."""
    operator, *tensors, num_iterations, epsilon = arguments
    folded = []
    for x, dim in zip(tensors, in_dims[1:-2], strict=True):
        mapped = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        folded.append(mapped.flatten(0, 1))
    outputs = function.apply(operator, *folded, num_iterations, epsilon)
    return tuple(x.unflatten(0, (size, -1)) for x in outputs), (0,) * len(outputs)


def _register(method: str, name: str, kernels) -> Operator:
    """A module's kernels as operators of (batch, heads, N, d) and (batch, heads, 1, 1)."""

    options = "int num_iterations, float epsilon"
    forward = f"({INPUTS}, {options}) -> (Tensor, Tensor)"
    backward = f"({INPUTS}, Tensor saved, Tensor grad, {options}) -> (Tensor, Tensor, Tensor, Tensor)"

    def empty_output(query, key, value, *others):
        batch, heads, tokens, width = value.shape
        output = value.new_empty(batch, tokens, heads, width).transpose(1, 2)  # strides for the heads' concatenation
        return output, query.new_empty(kernels.saved_shape(method, query, value), dtype=torch.float32)

    def empty_grads(query, key, value, scale, *others):
        return tuple(x.new_empty(x.shape) for x in (query, key, value, scale))

    @torch.library.custom_op(f"osa::{name}", mutates_args=(), schema=forward)
    def attend_heads(query, key, value, scale, *options):
        output, saved = empty_output(query, key, value, scale, *options)
        kernels.forward(method, (query, key, value, scale), output, saved, *options)
        kept = kernels.kept_scale(method, query, value, saved)
        if kept is not None and not linalg.is_captured(kept):  # warns inside the operator, where a compiler keeps it
            linalg.warn_of_loss(kept.view(scale.shape).isnan() & ~scale.isnan())
        return output, saved

    @torch.library.custom_op(f"osa::{name}_backward", mutates_args=(), schema=backward)
    def gradients(query, key, value, scale, saved, grad, *options):
        grads = empty_grads(query, key, value, scale)
        kernels.backward(method, (query, key, value, scale), saved, grad, grads, *options)
        return grads

    def save(ctx, inputs, output) -> None:
        *tensors, ctx.num_iterations, ctx.epsilon = inputs
        ctx.set_materialize_grads(False)  # the saved output has no gradient
        ctx.save_for_backward(*tensors, output[1])

    @linalg.in_own_types
    def differentiate(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:
        return *gradients(*ctx.saved_tensors, grad, ctx.num_iterations, ctx.epsilon), None, None

    def launch_both(*arguments) -> None:
        (*inputs, num_iterations, epsilon), (output, saved) = arguments, empty_output(*arguments)
        kernels.forward(method, inputs, output, saved, num_iterations, epsilon)
        kernels.backward(method, inputs, saved, output.contiguous(), empty_grads(*inputs), num_iterations, epsilon)

    attend_heads.register_fake(empty_output)
    gradients.register_fake(empty_grads)
    attend_heads.register_autograd(differentiate, setup_context=save)
    return Operator(method, attend_heads, gradients, launch_both)


@torch.library.custom_op("osa::phi1", mutates_args=())
def _phi1_operator(z: Tensor, y: Tensor) -> Tensor:
    """φ₁(Z) Y, (b, n, n) and (b, n, m), contiguous."""
    output = torch.empty_like(y)
    launch.phi1_forward(z, y, output)
    return output


@torch.library.custom_op("osa::phi1_backward", mutates_args=())
def _phi1_gradients_operator(z: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_z, grad_y = torch.empty_like(z), torch.empty_like(y)
    launch.phi1_backward(z, y, grad, grad_z, grad_y)
    return grad_z, grad_y


@linalg.in_own_types
def _phi1_autograd(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return linalg.recorded_grad(linalg.plain_phi1_times, ctx.saved_tensors, grad)
    return _phi1_gradients_operator(*ctx.saved_tensors, grad.contiguous())


_phi1_operator.register_fake(lambda z, y: torch.empty_like(y))
_phi1_gradients_operator.register_fake(lambda z, y, grad: (torch.empty_like(z), torch.empty_like(y)))
_phi1_operator.register_autograd(_phi1_autograd, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

OPERATORS = {method: _register(method, method, launch) for method in METHODS}
LONG_OPERATORS = {method: _register(method, f"long_{method}", sequences) for method in LONG_METHODS}
_fused_operator = _register("exact", "fused_exact", heads)


def _operator(method: str, query: Tensor, key: Tensor, value: Tensor) -> Operator:
    """The operator of a method that takes (batch, heads, N, d)."""
    if _is_short(query):
        return OPERATORS[method]
    return _fused_operator if heads.is_fused(method, query, key, value) else LONG_OPERATORS[method]


def _is_whole(x: Tensor, *but: TransformType) -> bool:
    """Tells whether an operator on x stays whole: in no trace but a compiler's, and in no transform but the ones named."""
    return not is_transformed() if torch.compiler.is_compiling() else is_eager(x, *but)


_TRIED: dict[tuple, bool] = {}  # verdicts of `_agrees` by a kernel's form, device, types, rows and widths


@constant_to_a_trace
def _is_right(*form) -> bool:
    """Tells whether a form of a kernel agrees with the plain route: tried once, and never while a graph is recorded."""
    if not torch.cuda.is_available():
        return True  # the tensors are fake, and so is what follows
    if form not in _TRIED and not torch.cuda.is_current_stream_capturing():
        _TRIED[form] = _agrees(*form)
    return _TRIED.get(form, False)


def _compile_ahead(form: str, inputs: list[Tensor], options: dict[str, Any]) -> None:
    """Compiles side by side what a call of inputs and its gradients launch, from tensors of "meta", which have no memory.

    Triton compiles outside of Python's lock. What fails to compile fails again, with its error, where it is launched.
    """
    meta = [x.detach().to("meta") for x in inputs]
    with torch.cuda.device_of(inputs[0]), ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        if form == "phi1":
            z, y = meta
            launch.phi1_forward(z, y, y)
            launch.phi1_backward(z, y, y, z, y)
        else:
            _, tensors = _as_heads(*meta)
            num_iterations = functional.ITERATIONS.get(options["method"], 0)
            _operator(options["method"], *tensors[:3]).launch_both(*tensors, num_iterations, options["epsilon"])


def _agrees(
    form: str, device: torch.device, dtypes: tuple[torch.dtype, ...], rows: int, width: int, value_width: int
) -> bool:
    """Tells whether values and gradients on this device are those of the plain route on the CPU in float64.

    Any failure of Triton, the C compiler, its cache on the disk or the driver is a reason to do without the kernel.
    """
    method, batch = "exact" if form in HEADS else form, 2
    if form == "parts":  # few heads of a length that has parts
        batch, rows = 1, 2 * rows
    with (
        outside_of_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        linalg.without_autocast(device),
    ):
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {}
        shapes: tuple[tuple[int, ...], ...]
        if method == "phi1":
            shapes = (6, width, width), (6, width, value_width), (6, width, value_width)
            *inputs, grad = (torch.randn(shape, generator=generator) for shape in shapes)
            inputs[0] = 0.2 * (inputs[0] - inputs[0].mT)
            function, plain = phi1_times, linalg.plain_phi1_times
        else:
            tokens = rows - rows // 4 + 1  # the last of its tiles is not whole
            shapes = (batch, 3, tokens, width), (batch, 3, tokens, width), (batch, 3, tokens, value_width)
            *inputs, grad = (torch.randn(shape, generator=generator) for shape in (*shapes, shapes[-1]))
            inputs = [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
            scales = torch.tensor([0.02, -0.05, 0.1])
            if rows >= TRIED_TOKENS:  # ‖S‖₂ of 0.5, 5 and, for heads that go by three products then, 50
                scales = torch.tensor([0.3, -3.0, 30.0 if form in HEADS else 1.0]) / tokens
            inputs.append(scales.view(3, 1, 1))
            options = {"method": method, "num_iterations": None, "epsilon": linalg.EPSILON}
            function, plain = (functools.partial(each, **options) for each in (attend, functional.plain_attention))
        grad = grad.to(dtypes[-1])
        exact = [x.double().requires_grad_() for x in inputs]
        try:
            inputs = [x.to(device).requires_grad_() for x in inputs]
            if device.type == "cuda":
                _compile_ahead(form, inputs, options)
            actual, expected = function(*inputs), plain(*exact)
            grads = torch.autograd.grad(actual, inputs, grad.to(device)), torch.autograd.grad(expected, exact, grad.double())
            errors = [
                ((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm()).item()
                for a, b in [(actual, expected), *zip(*grads, strict=True)]
            ]
            most = max(TOLERANCE[x] for x in dtypes)
            most = {"phi1": PHI1_TOLERANCE, **dict.fromkeys(HEADS, HEADS_TOLERANCE)}.get(form, most)
            reason = None if max(errors) < most else f"its error is {max(errors):.1e}"
        except Exception as error:  # noqa: BLE001
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if reason is not None:
        warnings.warn(f'the kernel of "{method}" for d = {width} is not used on {device}: {reason}', stacklevel=2)
    return reason is None
