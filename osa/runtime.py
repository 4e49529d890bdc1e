"""The state of torch at the moment: the one place that leans on names which torch does not document.

A version of torch that changes one of them breaks this file and no other; the scheduled tests run it with the oldest and the
newest.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

VMAP_AND_GRAD = TransformType.Vmap, TransformType.Grad  # transforms of torch.func


def is_eager(x: Tensor, *but: TransformType) -> bool:
    """Tells whether operations on x run now and once: no trace, function transform or forward-mode derivative.

    `but` names function transforms that are allowed. A transform may be under way that does not wrap x itself.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or any(each.key() not in but for each in get_interpreter_stack() or ())
        or get_proxy_mode()
        or forward_ad._current_level >= 0
    )


def constant_to_a_trace(function: Callable[..., bool]) -> Callable[..., bool]:
    """`torch.compiler.assume_constant_result`, which takes seconds to import."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@constant_to_a_trace
def is_transformed() -> bool:
    """Tells whether a function transform or a forward-mode derivative is under way, in code that a compiler traces too."""
    return bool(peek_interpreter_stack()) or forward_ad._current_level >= 0


def known(size: int) -> int:
    """A size that a trace knows as a number, as the length of a range is no symbol: another size makes another graph."""
    return len(range(size))


def has_values(x: Tensor) -> bool:
    """Tells whether x has values: a fake tensor has its shape, type and device alone."""
    return not is_fake(x)


def assert_later(condition: Tensor, message: str) -> None:
    """Raises on the device where the condition, (), is false: nobody waits for its value, and traces keep it."""
    torch._assert_async(condition, message)


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Runs with real tensors and no function transform, inside of any trace or transform."""
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def autograd_in_an_operator() -> AbstractContextManager:
    """Switches autograd on inside an operator, which runs below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def has_hooks(module: nn.Module) -> bool:
    """Tells whether a call of the module does more than its `forward`."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(map(bool, hooks))


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that was given to torch.compile, or the model itself."""
    return dict(model.named_children()).get("_orig_mod", model)
