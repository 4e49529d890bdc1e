"""Helpers for torch at run time: traces and transforms, autocast and TF32, warnings about precision, a registry of kernels.

Only this file uses undocumented names of torch, so that a new version of torch can break no other file.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

VMAP_AND_GRAD = TransformType.Vmap, TransformType.Grad  # transforms of torch.func
# For each function's name, pairs of a test and a kernel. The test is True for arguments that the kernel accepts
KERNELS: dict[str, list[tuple[Callable[..., bool], Callable[..., Tensor]]]] = {}


def kernel(name: str, *arguments) -> Callable[..., Tensor] | None:
    """Returns the first kernel under `name` in `KERNELS` whose test accepts the arguments, or None if there is none."""
    return next((function for fits, function in KERNELS.get(name, ()) if fits(*arguments)), None)


def is_eager(*but: TransformType) -> bool:
    """True outside traces, forward-mode derivatives and function transforms. The transforms in `but` do not count."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or any(each.key() not in but for each in get_interpreter_stack() or ())
        or get_proxy_mode()
        or forward_ad._current_level >= 0
    )


def constant_to_a_trace(function: Callable[..., bool]) -> Callable[..., bool]:
    """Decorates a function so that tracing treats its result as a constant."""
    function.__dict__["_dynamo_marked_constant"] = True  # torch.compiler.assume_constant_result takes seconds to import
    return function


@constant_to_a_trace
def is_transformed() -> bool:
    """True inside a function transform or a forward-mode derivative, even in code that a compiler traces."""
    return bool(peek_interpreter_stack()) or forward_ad._current_level >= 0


@constant_to_a_trace  # otherwise torch.compile treats `is_in_onnx_export` as False
def goes_to_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


def known(size: int) -> int:
    """Returns the size as an int. During tracing, this makes a symbolic size a constant, so each size gets its own trace."""
    return len(range(size))


def has_values(x: Tensor) -> bool:
    """False for a fake tensor, which has a shape, a dtype and a device, but no values."""
    return not is_fake(x)


def is_captured(x: Tensor) -> bool:
    """True while a CUDA graph captures the operations on x instead of running them."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def is_recorded(*inputs: Tensor) -> bool:
    """True if autograd records operations on the inputs. Always False in traces and function transforms."""
    return is_eager() and torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def is_readable(x: Tensor) -> bool:
    """True if x has values that can be read without waiting for an accelerator."""
    return x.device.type == "cpu" and is_eager() and has_values(x)


def assert_later(condition: Tensor, message: str) -> None:
    """Raises an error on the device if a scalar tensor is false, without synchronisation. Traced graphs keep this check."""
    torch._assert_async(condition, message)


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Runs code on real tensors, outside the trace or function transform in progress."""
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def autograd_in_an_operator() -> AbstractContextManager:
    """Switches autograd on inside an operator of torch.library, where it is off by default."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Switches autocast off for the device, so that operators run in the dtypes of their inputs."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # "meta" has no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def in_own_types(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorates a backward pass, which then runs `without_autocast`, because its operators need operands of one dtype."""

    @wraps(backward)
    def plain(ctx, grad: Tensor, *others: Tensor) -> tuple:
        with without_autocast(grad.device):
            return backward(ctx, grad, *others)

    return plain


def full_precision(device: torch.device) -> AbstractContextManager:
    """Switches TF32 off on CUDA. With TF32's 10-bit mantissa, A would be orthogonal only to about 10⁻³."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return nullcontext()
    return _ieee_products()


@contextmanager
def _ieee_products() -> Iterator[None]:
    """Switches TF32 off in both of torch's settings, the newer `fp32_precision` and the older `float32_matmul_precision`."""
    matmul = torch.backends.cuda.matmul
    before, legacy = matmul.fp32_precision, None
    with suppress(RuntimeError):  # torch raises this if only `fp32_precision` was changed
        legacy = torch.get_float32_matmul_precision()
    if legacy is None:
        matmul.fp32_precision = "ieee"
    else:
        matmul.allow_tf32 = False
    try:
        yield
    finally:
        if legacy not in (None, "highest"):
            torch.set_float32_matmul_precision(legacy)
        matmul.fp32_precision = before


def recorded_grad(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of function(*inputs) by autograd, with a graph, so that the gradients can be differentiated."""
    views = [x.view_as(x) for x in inputs]  # views separate the gradients of inputs, even if one input depends on another
    needed = [x for x in views if x.requires_grad]
    grads = iter(torch.autograd.grad(function(*views), needed, grad, create_graph=True))
    return tuple(next(grads) if x.requires_grad else None for x in views)


def warn_of_loss(is_lost: Tensor) -> None:
    """Warns of lost precision if any entry is true.

    On CUDA the check does not wait for the device: the warning comes with a later call. A CUDA graph gives no warning.
    """
    answers = []
    if not is_lost.is_cuda:
        answers = [is_lost.any()]
    elif not is_captured(is_lost):
        while _UNREAD and _UNREAD[0][0].query():
            answers.append(_UNREAD.pop(0)[1])
        event, answer = torch.cuda.Event(), torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(is_lost.any(), non_blocking=True)
        event.record(torch.cuda.current_stream(is_lost.device))
        _UNREAD.append((event, answer))
    if any(answers):
        cause = (
            "orthogonal attention returns NaN where S is so large, or query and key cancel so completely, that no digit "
            "would be correct"
        )
        warnings.warn(f'{cause}: use method="qr"', stacklevel=2)


_UNREAD: list[tuple[torch.cuda.Event, Tensor]] = []  # checks on CUDA whose results have not been read


@torch.library.custom_op("osa::warn_where_lost", mutates_args=())
def warn_where_lost(is_lost: Tensor) -> Tensor:
    """`warn_of_loss` as an operator, so that traces and function transforms keep it."""
    warn_of_loss(is_lost)
    return is_lost.clone()


warn_where_lost.register_fake(torch.empty_like)
warn_where_lost.register_vmap(lambda _, in_dims, is_lost: (warn_where_lost(is_lost), in_dims[0]))


def has_hooks(module: nn.Module) -> bool:
    """True if calling the module runs hooks besides `forward`."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(map(bool, hooks))


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns the model without the wrapper of torch.compile, if it has one."""
    return dict(model.named_children()).get("_orig_mod", model)
