"""Launches of a program a head, for "exact" in bfloat16 on Hopper: fused.py, and stepped.py for the heads that it leaves."""

import math

import torch
from torch import Tensor

from osa.kernels import fused, launch, stepped
from osa.kernels.launch import Inputs

FEW_TOKENS = 4096  # of which one program a head is estimated to be the faster, however few heads there are
MOST_ENTRIES = 2**31  # from a head's first row to the last, which 32 bits count
# By the compiler's figures for sm_90 two programs share a multiprocessor: paper_outputs/benchmarks/kernels.csv
FORWARD = {"GRAM_ROWS": 32, "ROWS": 64, "GRAM_STAGES": 8, "STAGES": 2, "num_warps": 4, "maxnreg": 255}
BACKWARD = {"GRAM_ROWS": 32, "ROWS": 64, "GRAM_STAGES": 5, "STAGES": 1, "num_warps": 4, "maxnreg": 255}
STEPPED = {"ROWS": 64, "num_warps": 8, "num_stages": 1, "maxnreg": 255}


def may_fuse(method: str, *tensors: Tensor) -> bool:
    """Whether a program can take a head of query, key and value."""
    width = tensors[0].shape[-1]
    fits = width % 8 == 0 and width <= fused.D.value
    fits = fits and all(x.dtype == torch.bfloat16 and x.shape[-1] == width for x in tensors)
    return method == "exact" and fits and _device(tensors[0].device)[0]


def is_fused(method: str, *tensors: Tensor) -> bool:
    """Whether that is the form to take: not of few heads of long sequences, which leave most of a device idle."""
    if not may_fuse(method, *tensors) or tensors[0].shape[-3:].numel() >= MOST_ENTRIES:
        return False
    count = math.prod(torch.broadcast_shapes(*(x.shape[:-2] for x in tensors)))
    return tensors[0].shape[-2] <= FEW_TOKENS or 2 * count >= _device(tensors[0].device)[1]


@torch.compiler.assume_constant_result
def _device(device: torch.device) -> tuple[bool, int]:
    """Whether it has the instructions, and how many multiprocessors."""
    return launch.has_wgmma(device), launch.multiprocessors(device)


def forward(method: str, inputs: Inputs, output: Tensor, saved: Tensor, num_iterations: int, epsilon: float) -> None:
    """Fills the output, (batch, heads, N, d), and the state of each head: 1, 0, or NaN where no digit is left."""
    *tensors, scale = inputs
    tensors = [*_alike(*tensors), output, scale, saved]
    strides = [tensors[0].stride(), output.stride(), scale.stride()]
    count, sizes = saved.numel(), _sizes(output)
    launch.launch(fused.forward_kernel, count, tuple(tensors), strides, sizes | FORWARD)
    programs, scratch = _scratch(count, stepped.SCRATCH.value, 0.5, torch.float32, saved.device)
    launch.launch(stepped.stepped_forward_kernel, programs, (*tensors, scratch), strides, sizes | {"count": count} | STEPPED)


def backward(
    method: str, inputs: Inputs, saved: Tensor, grad: Tensor, grads: Inputs, num_iterations: int, epsilon: float
) -> None:
    """Fills the gradients of query, key, value, and of the scale of each matrix, given that of the output."""
    query, key, value = _alike(*inputs[:3])
    scale, (grad,) = inputs[3], _alike(grad)
    tensors = query, key, value, grad, *grads[:3], scale, grads[3], saved
    strides = [query.stride(), grad.stride(), grads[0].stride(), scale.stride()]
    count, sizes = saved.numel(), _sizes(grad) | {"count": saved.numel()}
    for kernel, size, share, dtype, options in (
        (fused.backward_kernel, fused.SCRATCH.value, 2, torch.bfloat16, BACKWARD),
        (stepped.stepped_backward_kernel, stepped.SCRATCH.value, 0.5, torch.float32, STEPPED),
    ):
        programs, scratch = _scratch(count, size, share, dtype, saved.device)
        launch.launch(kernel, programs, (*tensors, scratch), strides, sizes | options)


def saved_shape(method: str, query: Tensor, value: Tensor) -> tuple[int, ...]:
    return *query.shape[:2], 1, 1


def kept_scale(method: str, query: Tensor, value: Tensor, saved: Tensor) -> Tensor:
    """NaN where φ₁ has no digit."""
    return saved


def _sizes(x: Tensor) -> dict:
    return {"heads": x.shape[1], "tokens": x.shape[2], "WIDTH": x.shape[3]}


def _scratch(count: int, size: int, share: float, dtype: torch.dtype, device: torch.device) -> tuple[int, Tensor]:
    """So many programs for each multiprocessor, at most one a head, and the memory of each."""
    programs = max(1, min(count, int(share * launch.multiprocessors(device))))
    return programs, torch.empty(programs, size, dtype=dtype, device=device)


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As they are if they have the same strides, columns side by side and rows at multiples of 16 bytes; else copies."""

    def is_aligned(x: Tensor) -> bool:
        is_near = x.shape[-2] * x.stride(-2) < MOST_ENTRIES
        return x.stride(-1) == 1 and is_near and x.data_ptr() % 16 == 0 and all(each % 8 == 0 for each in x.stride()[:-1])

    if all(is_aligned(x) and x.stride() == tensors[0].stride() for x in tensors):
        return tensors
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
