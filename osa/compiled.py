"""Orthogonal attention on the CPU under torch.compile, as one operator that may read the values of its inputs.

Traced tensors have no values, so without the operator `phi1_times` would always apply its maximum number of doubling steps.
With the operator, a compiled training step of osa_exact with 128 images on one core takes 0.30 s instead of 2.8 s.
"""

import itertools
import weakref

import torch
from torch import Tensor

from osa.linalg import Scale
from osa.routes import plain_attention
from osa.runtime import KERNELS, autograd_in_an_operator, constant_to_a_trace, in_own_types, is_transformed

# Identifier of an autograd graph → inputs and output of that graph, while a backward pass may still need the graph
GRAPHS: dict[int, tuple[list[Tensor], Tensor]] = {}
GRAPH_NUMBERS = itertools.count()
INPUTS, OPTIONS = "Tensor query, Tensor key, Tensor value, Tensor scale", "str method, int? num_iterations, float epsilon"


def fits(query: Tensor, key: Tensor, value: Tensor, scale: Scale, method: str) -> bool:
    """True if the tensors are on the CPU, torch.compile is tracing, and the method is not "qr_literal".

    False in function transforms, which need torch's individual operations, and in torch.export and ONNX, whose programs
    must run without this package.
    """
    return torch.compiler.is_compiling() and query.device.type == "cpu" and method != "qr_literal" and not _goes_elsewhere()


@constant_to_a_trace  # otherwise torch.compile treats is_exporting() as True
def _goes_elsewhere() -> bool:
    return is_transformed() or torch.compiler.is_exporting()


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: Scale, method: str, num_iterations: int | None, epsilon: float
) -> Tensor:
    """`osa.orthogonal_attention` for arguments that `fits` accepts."""
    if not isinstance(scale, Tensor):
        scale = query.new_full((), scale, dtype=torch.promote_types(query.dtype, torch.float32))
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, scale))
    return _operator(query, key, value, scale, method, num_iterations, epsilon, keep)[0]


@torch.library.custom_op(
    "osa::attend_by_value", mutates_args=(), schema=f"({INPUTS}, {OPTIONS}, bool keep) -> (Tensor, Tensor)"
)
def _operator(query, key, value, scale, method, num_iterations, epsilon, keep):
    """Returns exp(S) V, and a tensor that holds the identifier of the autograd graph in `GRAPHS`.

    `GRAPHS` keeps the graph only if `keep` is true, and only until the tensor with the graph's identifier is freed.
    """
    options, number = (method, num_iterations, epsilon), torch.tensor(next(GRAPH_NUMBERS), device="cpu")
    if not keep:
        return plain_attention(query, key, value, scale, *options).contiguous(), number
    if method == "qr":
        key = key.clone()  # autograd saves key, value and scale, and the compiled program may reuse their memory
    inputs, output = _recorded(query, key, value.clone(), scale.clone(), *options)
    entry = int(number)
    GRAPHS[entry] = inputs, output
    weakref.finalize(number, lambda: GRAPHS.pop(entry, None))
    return output.detach().contiguous(), number


@torch.library.custom_op(
    "osa::attend_by_value_backward", mutates_args=(), schema=f"({INPUTS}, Tensor number, Tensor grad, {OPTIONS}) -> Tensor[]"
)
def _gradients(query, key, value, scale, number, grad, *options):
    """Returns the gradients from the graph in `GRAPHS`, or from a new graph if the old one has been freed."""
    inputs, output = GRAPHS.get(number.item()) or _recorded(query, key, value, scale, *options)
    with autograd_in_an_operator():
        grads = torch.autograd.grad(output, inputs, grad, retain_graph=True)
    return [x.clone(memory_format=torch.contiguous_format) for x in grads]  # copies, because some gradients share memory


def _recorded(query: Tensor, key: Tensor, value: Tensor, scale: Tensor, *options) -> tuple[list[Tensor], Tensor]:
    with autograd_in_an_operator(), torch.enable_grad():
        query, key, value, scale = (x.detach().requires_grad_() for x in (query, key, value, scale))
        return [query, key, value, scale], plain_attention(query, key, value, scale, *options)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.method, ctx.num_iterations, ctx.epsilon, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


@in_own_types
def _backward(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:
    grads = _gradients(*ctx.saved_tensors, grad, ctx.method, ctx.num_iterations, ctx.epsilon)
    return *grads, None, None, None, None


@_operator.register_fake
def _(query, key, value, *others):
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    return value.new_empty(*batch, *value.shape[-2:]), torch.empty((), dtype=torch.int64, device="cpu")


@_gradients.register_fake
def _(query, key, value, scale, *others):
    return [x.new_empty(x.shape) for x in (query, key, value, scale)]


_operator.register_autograd(_backward, setup_context=_save)
KERNELS.setdefault("attend", []).append((fits, attend))
