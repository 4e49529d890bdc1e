"""Registers the kernels as operators, which autograd, torch.func and torch.compile treat as black boxes.

A call goes to the first backend that accepts its tensors, in the order short/, hopper/, long/.
"""

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from osa import linalg, runtime
from osa.compiled import INPUTS
from osa.kernels.hopper import backend as hopper
from osa.kernels.launch import Inputs, padded
from osa.kernels.long import backend as long
from osa.kernels.short import backend as short
from osa.linalg import Scale
from osa.options import EPSILON, ITERATIONS
from osa.routes import plain_attention
from osa.runtime import VMAP_AND_GRAD, TransformType, constant_to_a_trace, is_eager, is_transformed, known, outside_of_modes

TYPES = (torch.float32, torch.bfloat16, torch.float16)
TRIED_TOKENS = 1024  # sequence length at which `_agrees` tests hopper/ and long/; the result is used for all lengths
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # maximum relative errors for `_agrees`
HOPPER_TOLERANCE = 1e-2  # above the rounding errors (3e-3 to 6e-3), below the error if a matrix product is missing (2e-2)
PHI1_TOLERANCE = 1e-5


class Backend(Protocol):
    """Launches the kernels of one method, for tensors (batch, heads, N, width) and a scale (batch, heads, 1, 1)."""

    @property
    def method(self) -> str: ...

    def forms(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[str, ...]:
        """Returns the names of the kernels that a call with these tensors may launch, or () if the backend rejects them."""

    def saved_shape(self, query: Tensor, value: Tensor) -> tuple[int, ...]:
        """Shape of the float32 tensor that the forward pass saves for the backward pass."""

    def forward(self, inputs: Inputs, output: Tensor, saved: Tensor, num_iterations: int, epsilon: float) -> None:
        """Writes the output, (batch, heads, N, d_value), and the tensor saved for the backward pass."""

    def backward(
        self, inputs: Inputs, saved: Tensor, grad: Tensor, grads: Inputs, num_iterations: int, epsilon: float
    ) -> None:
        """Writes the gradients of query, key, value and scale to `grads`, given `grad`, the gradient of the output."""

    def scale_where_valid(self, query: Tensor, value: Tensor, saved: Tensor) -> Tensor | None:
        """Returns a number per matrix, which is NaN if precision was lost. Returns None if the backend cannot tell."""


def fits(query: Tensor, key: Tensor, value: Tensor, scale: Scale, method: str) -> bool:
    """True if `attend` accepts these CUDA tensors.

    The first call that needs a kernel tests it. If it does not compile or differs from the plain route, `fits` warns once,
    and this and later calls return False. No test runs while a CUDA graph is captured, so call `fits` beforehand.
    """
    tensors = query, key, value
    if not all(x.dtype in TYPES and x.numel() and x.shape[-1] <= long.MAX_WIDTH for x in tensors):
        return False
    if not _is_whole(*VMAP_AND_GRAD):
        return False
    dtypes = query.dtype, key.dtype, value.dtype
    operator = _find(method, *tensors)
    if operator is None:
        return False
    for form in operator.backend.forms(*tensors):
        rows = padded(query.shape[-2]) if form == "short" else TRIED_TOKENS
        if not _is_verified(form, method, query.device, dtypes, *map(known, (rows, query.shape[-1], value.shape[-1]))):
            return False
    return True


def fits_phi1(z: Tensor, y: Tensor) -> bool:
    """True if `phi1_times` accepts these matrices."""
    if not (_is_whole() and all(x.dtype == torch.float32 and x.numel() for x in (z, y))):
        return False
    if z.shape[-1] > short.MAX_PHI1_ROWS:
        return False
    return _is_verified("phi1", "", z.device, (z.dtype,), 0, known(z.shape[-1]), known(y.shape[-1]))


def phi1_times(z: Tensor, y: Tensor) -> Tensor:
    """φ₁(Z) Y for matrices Z (b, n, n) and Y (b, n, m) that `fits_phi1` accepts."""
    return _phi1_operator(z.contiguous(), y.contiguous())


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: Scale, method: str, num_iterations: int | None, epsilon: float
) -> Tensor:
    """`osa.orthogonal_attention` for tensors that `fits` accepts."""
    if not isinstance(scale, Tensor):
        scale = query.new_full((1, 1), scale, dtype=torch.float32)
    batch, inputs = _as_heads(query, key, value, scale)
    options = ITERATIONS.get(method, 0) if num_iterations is None else num_iterations, epsilon
    operator = _find(method, *inputs[:3])
    assert operator is not None  # because `fits` accepts these tensors
    output, _ = operator(*inputs, *options)
    return output.view(*batch, *output.shape[-2:]) if len(batch) != 2 else output


def _as_heads(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> tuple[torch.Size, list[Tensor]]:
    """Returns the batch shape, and a list: query, key and value (batch, heads, N, width), and scale (batch, heads, 1, 1)."""
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    inputs = [x.expand(*batch, *x.shape[-2:]) for x in (query, key, value, scale.view(*scale.shape[:-2], 1, 1))]
    if len(batch) != 2:
        inputs = [x.reshape(-1, *batch[-1:], *x.shape[-2:]) if batch else x[None, None] for x in inputs]
    return batch, inputs


class Operator:
    """The operators osa::NAME and osa::NAME_backward of a backend, callable under autograd and torch.func."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.backend = backend
        options = "int num_iterations, float epsilon"
        forward = f"({INPUTS}, {options}) -> (Tensor, Tensor)"
        backward = f"({INPUTS}, Tensor saved, Tensor grad, {options}) -> (Tensor, Tensor, Tensor, Tensor)"
        self.attend = torch.library.custom_op(f"osa::{name}", self._attend, mutates_args=(), schema=forward)
        self.gradients = torch.library.custom_op(f"osa::{name}_backward", self._gradients, mutates_args=(), schema=backward)
        self.attend.register_fake(self._empty_output)
        self.gradients.register_fake(_empty_grads)
        self.attend.register_autograd(runtime.in_own_types(self._differentiate), setup_context=_save)

    def __call__(self, *arguments) -> tuple[Tensor, Tensor]:
        """Calls osa::NAME: directly under torch.compile, otherwise through `_Attention`, which torch.func supports."""
        return self.attend(*arguments) if torch.compiler.is_compiling() else _Attention.apply(self, *arguments)

    def compile_both(self, query, key, value, scale, *options) -> None:
        """Compiles the forward and the backward kernels for tensors on "meta"."""
        inputs = query, key, value, scale
        output, saved = self._empty_output(*inputs)
        self.backend.forward(inputs, output, saved, *options)
        self.backend.backward(inputs, saved, output.contiguous(), _empty_grads(*inputs), *options)

    def _empty_output(self, query, key, value, *others):
        batch, heads, tokens, width = value.shape
        # With the tokens before the heads in memory, the heads can be concatenated without a copy.
        output = value.new_empty(batch, tokens, heads, width).transpose(1, 2)
        return output, query.new_empty(self.backend.saved_shape(query, value), dtype=torch.float32)

    def _attend(self, query, key, value, scale, *options):
        output, saved = self._empty_output(query, key, value)
        self.backend.forward((query, key, value, scale), output, saved, *options)
        valid = self.backend.scale_where_valid(query, value, saved)
        # The operator itself warns, because a compiler would drop a warning outside of the operator.
        if valid is not None and not runtime.is_captured(valid):
            runtime.warn_of_loss(valid.view(scale.shape).isnan() & ~scale.isnan())
        return output, saved

    def _gradients(self, query, key, value, scale, saved, grad, *options):
        grads = _empty_grads(query, key, value, scale)
        self.backend.backward((query, key, value, scale), saved, grad, grads, *options)
        return grads

    def _differentiate(self, ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:
        return *self.gradients(*ctx.saved_tensors, grad, ctx.num_iterations, ctx.epsilon), None, None


def _empty_grads(query, key, value, scale, *others):
    return tuple(x.new_empty(x.shape) for x in (query, key, value, scale))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.num_iterations, ctx.epsilon = inputs
    ctx.set_materialize_grads(False)  # allocates no zeros for the gradient of the saved tensor
    ctx.save_for_backward(*tensors, output[1])


class _Attention(torch.autograd.Function):
    """Calls osa::NAME under autograd and torch.func. Returns the output, and the tensor saved for the backward pass."""

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
    @runtime.in_own_types
    def backward(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:
        grads = _Gradients.apply(ctx.operator, *ctx.saved_tensors, grad, ctx.num_iterations, ctx.epsilon)
        return None, *grads, None, None

    @staticmethod
    def vmap(info, in_dims: tuple, *arguments) -> tuple[tuple, tuple]:
        return _mapped(_Attention, info.batch_size, in_dims, arguments)


class _Gradients(torch.autograd.Function):
    """Computes the gradients of query, key, value and scale. Second derivatives come from plain PyTorch code."""

    @staticmethod
    def forward(operator: Operator, *arguments) -> tuple[Tensor, ...]:
        return operator.gradients(*arguments)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        operator, *tensors, _, grad, num_iterations, epsilon = inputs
        ctx.options = operator.backend.method, num_iterations or None, epsilon
        ctx.save_for_backward(*tensors, grad)

    @staticmethod
    @runtime.in_own_types
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        def gradients(query: Tensor, key: Tensor, value: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(plain, query, key, value, scale)[1](grad)

        def plain(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
            return plain_attention(query, key, value, scale, *ctx.options)

        *tensors, grad = torch.func.vjp(gradients, *ctx.saved_tensors)[1](grads)
        return None, *tensors, None, grad, None, None

    @staticmethod
    def vmap(info, in_dims: tuple, *arguments) -> tuple[tuple, tuple]:
        return _mapped(_Gradients, info.batch_size, in_dims, arguments)


def _mapped(function: type[torch.autograd.Function], size: int, in_dims: tuple, arguments: tuple) -> tuple[tuple, tuple]:
    """Implements vmap by folding mapped dimensions into the batch. Returns the outputs, and the mapped dimension of each."""
    operator, *tensors, num_iterations, epsilon = arguments
    folded = []
    for x, dim in zip(tensors, in_dims[1:-2], strict=True):
        mapped = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        folded.append(mapped.flatten(0, 1))
    outputs = function.apply(operator, *folded, num_iterations, epsilon)
    return tuple(x.unflatten(0, (size, -1)) for x in outputs), (0,) * len(outputs)


@torch.library.custom_op("osa::phi1", mutates_args=())
def _phi1_operator(z: Tensor, y: Tensor) -> Tensor:
    output = torch.empty_like(y)
    short.phi1_forward(z, y, output)
    return output


@torch.library.custom_op("osa::phi1_backward", mutates_args=())
def _phi1_gradients_operator(z: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_z, grad_y = torch.empty_like(z), torch.empty_like(y)
    short.phi1_backward(z, y, grad, grad_z, grad_y)
    return grad_z, grad_y


@runtime.in_own_types
def _phi1_autograd(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return runtime.recorded_grad(linalg.plain_phi1_times, ctx.saved_tensors, grad)
    return _phi1_gradients_operator(*ctx.saved_tensors, grad.contiguous())


_phi1_operator.register_fake(lambda z, y: torch.empty_like(y))
_phi1_gradients_operator.register_fake(lambda z, y, grad: (torch.empty_like(z), torch.empty_like(y)))
_phi1_operator.register_autograd(_phi1_autograd, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

SHORT = {method: Operator(method, short.Short(method)) for method in short.METHODS}
HOPPER = {method: Operator(f"fused_{method}", hopper.Hopper(method)) for method in hopper.METHODS}
LONG = {method: Operator(f"long_{method}", long.Long(method)) for method in long.METHODS}


def _find(method: str, query: Tensor, key: Tensor, value: Tensor) -> Operator | None:
    """The first operator of `method` that accepts these tensors, or None."""
    for operators in (SHORT, HOPPER, LONG):
        if method in operators and operators[method].backend.forms(query, key, value):
            return operators[method]
    return None


def _is_whole(*but: TransformType) -> bool:
    """Returns `is_eager(*but)` or, under torch.compile, True outside transforms."""
    return not is_transformed() if torch.compiler.is_compiling() else is_eager(*but)


_VERDICTS: dict[tuple, bool] = {}  # arguments of `_agrees` → result


@constant_to_a_trace
def _is_verified(*kernel) -> bool:
    """True if a kernel has passed `_agrees`. `_agrees` runs once per kernel, and never while a CUDA graph is captured."""
    if not torch.cuda.is_available():
        return True  # the tensors are fake, and nothing will run
    if kernel not in _VERDICTS and not torch.cuda.is_current_stream_capturing():
        _VERDICTS[kernel] = _agrees(*kernel)
    return _VERDICTS.get(kernel, False)


def _compile_ahead(form: str, inputs: list[Tensor], options: dict[str, Any]) -> None:
    """Compiles the kernels of a call and of its gradients in parallel. Ignores errors, which a launch raises again."""
    meta = [x.detach().to("meta") for x in inputs]
    with torch.cuda.device_of(inputs[0]), ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        if form == "phi1":
            z, y = meta
            short.phi1_forward(z, y, y)
            short.phi1_backward(z, y, y, z, y)
        else:
            _, tensors = _as_heads(*meta)
            num_iterations = ITERATIONS.get(options["method"], 0)
            operator = _find(options["method"], *tensors[:3])
            assert operator is not None
            operator.compile_both(*tensors, num_iterations, options["epsilon"])


def _agrees(
    form: str, method: str, device: torch.device, dtypes: tuple[torch.dtype, ...], rows: int, width: int, value_width: int
) -> bool:
    """True if a kernel's output and gradients on this device match those of the plain route on the CPU in float64.

    The result is also False if Triton, the C compiler or the driver raises an error.
    """
    batch, is_hopper = 2, form in ("fused", "parts")
    if form == "parts":  # few heads and a long sequence, so that "parts" runs, not "fused"
        batch, rows = 1, 2 * rows
    with outside_of_modes(), torch.inference_mode(False), torch.enable_grad(), runtime.without_autocast(device):
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {}
        if form == "phi1":
            z, y, grad = (torch.randn(6, width, each, generator=generator) for each in (width, value_width, value_width))
            inputs = [0.2 * (z - z.mT), y]
            function, plain, tolerance = phi1_times, linalg.plain_phi1_times, PHI1_TOLERANCE
        else:
            tokens = rows - rows // 4 + 1  # the last tile is incomplete
            widths = width, width, value_width, value_width
            *inputs, grad = (torch.randn(batch, 3, tokens, each, generator=generator) for each in widths)
            inputs = [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
            scales = torch.tensor([0.02, -0.05, 0.1])
            if form != "short":
                # With these scales, ‖S‖₂ is about 0.5, 5 and, on Hopper, 50. At 50, each Taylor term takes three products.
                scales = torch.tensor([0.3, -3.0, 30.0 if is_hopper else 1.0]) / tokens
            inputs.append(scales.view(3, 1, 1))
            options = {"method": method, "num_iterations": None, "epsilon": EPSILON}
            function, plain = (functools.partial(each, **options) for each in (attend, plain_attention))
            tolerance = HOPPER_TOLERANCE if is_hopper else max(TOLERANCE[x] for x in dtypes)
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
            if max(errors) < tolerance:
                return True
            reason = f"its relative error is {max(errors):.1e}, not below {tolerance:.1e}"
        except Exception as error:  # noqa: BLE001
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    warnings.warn(f'the kernel of "{method or form}" for d = {width} is not used on {device}: {reason}', stacklevel=2)
    return False
