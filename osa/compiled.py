"""Orthogonal attention on the CPU as torch.compile sees it: one operator, which chooses its route by the values it is given.

A trace has no values, and the routes of osa/functional.py then take a fixed number of doublings where one series would do.
"""

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from osa import functional, linalg


def fits(query: Tensor, key: Tensor, value: Tensor, scale: float | Tensor | None, method: str) -> bool:
    """Whether torch.compile traces these tensors on the CPU, outside of function transforms, which take operators apart."""
    return torch.compiler.is_compiling() and query.device.type == "cpu" and method != "qr_literal" and not _transforms()


def _transforms() -> bool:
    return bool(torch._C._functorch.peek_interpreter_stack()) or torch.autograd.forward_ad._current_level >= 0


_transforms._dynamo_marked_constant = True  # `torch.compiler.assume_constant_result`, which takes seconds to import


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
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1] or 1)
    if not isinstance(scale, Tensor):
        scale = query.new_full((), scale, dtype=torch.promote_types(query.dtype, torch.float32))
    return _operator(query, key, value, scale, method, num_iterations, epsilon)


@torch.library.custom_op("osa::attend_by_value", mutates_args=())
def _operator(
    query: Tensor, key: Tensor, value: Tensor, scale: Tensor, method: str, num_iterations: int | None, epsilon: float
) -> Tensor:
    return functional.plain_attention(query, key, value, scale, method, num_iterations, epsilon).contiguous()


@torch.library.custom_op("osa::attend_by_value_backward", mutates_args=())
def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: Tensor,
    grad: Tensor,
    method: str,
    num_iterations: int | None,
    epsilon: float,
) -> list[Tensor]:
    """The forward pass is made again: what it kept has no shape that a trace could know."""
    with _autograd_in_an_operator(), torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (query, key, value, scale)]
        output = functional.plain_attention(*inputs, method, num_iterations, epsilon)
        grads = torch.autograd.grad(output, inputs, grad)
    return [x.contiguous() for x in grads]  # which parts those of query and key, that share memory


def _autograd_in_an_operator() -> AbstractContextManager:
    """Operators run below autograd, which this switches on again."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.method, ctx.num_iterations, ctx.epsilon = inputs
    ctx.save_for_backward(*tensors)


@linalg.in_own_types
def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = _gradients(*ctx.saved_tensors, grad, ctx.method, ctx.num_iterations, ctx.epsilon)
    return *grads, None, None, None


@_operator.register_fake
def _(query, key, value, scale, method, num_iterations, epsilon):
    return value.new_empty(*torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value))), *value.shape[-2:])


@_gradients.register_fake
def _(query, key, value, scale, grad, method, num_iterations, epsilon):
    return [x.new_empty(x.shape) for x in (query, key, value, scale)]


_operator.register_autograd(_backward, setup_context=_save)
linalg.KERNELS.setdefault("attend", []).append((fits, attend))
