"""Launches of a program for each head, by "exact" in bfloat16 on Hopper: of fused.py, then stepped.py for what it leaves."""

import torch
from torch import Tensor

from osa.kernels import fused, launch, stepped
from osa.kernels.launch import Inputs

MOST_ENTRIES = 2**31  # entries from a head's first row to the last, which 32 bits count
# two programs share a multiprocessor, by the compiler's figures for sm_90: paper_outputs/benchmarks/kernels.csv
FORWARD = {"GRAM_ROWS": 32, "ROWS": 64, "GRAM_STAGES": 8, "STAGES": 2, "num_warps": 4, "maxnreg": 255}
BACKWARD = {"GRAM_ROWS": 32, "ROWS": 64, "GRAM_STAGES": 5, "STAGES": 1, "num_warps": 4, "maxnreg": 255}
# shared memory, by the compiler's figures: 110 kB for one product, 156 for three
STEPPED = {"ROWS": 64, "GRAM_ROWS": 32, "num_warps": 4, "num_stages": 1, "maxnreg": 255}
BY_ONE, BY_THREE = STEPPED | {"STAGES": 5, "THREE": False}, STEPPED | {"STAGES": 2, "THREE": True}


def is_fused(method: str, *tensors: Tensor) -> bool:
    """Tells whether a program takes a head of query, key and value."""
    width, device = tensors[0].shape[-1], tensors[0].device
    fits = width % 8 == 0 and width <= fused.D.value and tensors[0].shape[-3:].numel() < MOST_ENTRIES
    fits = fits and all(x.dtype == torch.bfloat16 and x.shape[-1] == width for x in tensors)
    return method == "exact" and fits and launch.has_wgmma(device)


def forward(method: str, inputs: Inputs, output: Tensor, saved: Tensor, num_iterations: int, epsilon: float) -> None:
    """Fills the output, (batch, heads, N, d), and each head's state: 1, 0 or −1 by its form, NaN where no digit is left."""
    tensors = *_alike(*inputs[:3]), output, inputs[3].contiguous(), saved
    strides = [tensors[0].stride(), output.stride()]
    count, sizes = saved.numel(), _sizes(output)
    launch.launch(fused.forward_kernel, count, tensors, strides, sizes | FORWARD)
    _launch_steps(stepped.stepped_forward_kernel, tensors, strides, sizes | {"count": count}, is_backward=False)


def backward(
    method: str, inputs: Inputs, saved: Tensor, grad: Tensor, grads: Inputs, num_iterations: int, epsilon: float
) -> None:
    """Fills the gradients of query, key, value and each matrix's scale, given the output's."""
    query, key, value = _alike(*inputs[:3])
    scale, (grad,) = inputs[3].contiguous(), _alike(grad)
    tensors = query, key, value, grad, *grads[:3], scale, grads[3], saved
    strides = [query.stride(), grad.stride(), grads[0].stride()]
    count, sizes = saved.numel(), _sizes(grad) | {"count": saved.numel()}
    programs, scratch = _scratch(count, fused.SCRATCH.value, 2, torch.bfloat16, saved.device)
    launch.launch(fused.backward_kernel, programs, (*tensors, scratch), strides, sizes | BACKWARD)
    _launch_steps(stepped.stepped_backward_kernel, tensors, strides, sizes, is_backward=True)


def _launch_steps(kernel, tensors: tuple[Tensor, ...], strides: list, sizes: dict, *, is_backward: bool) -> None:
    """Launches a kernel for the heads of one product a term, then for the heads that ask for three."""
    for options, share in ((BY_ONE, 2), (BY_THREE, 1)):
        size = stepped.scratch_of(bool(options["THREE"]), is_backward)
        programs, scratch = _scratch(sizes["count"], size, share, torch.float32, tensors[0].device)
        launch.launch(kernel, programs, (*tensors, scratch), strides, sizes | options | {"SCRATCH": size})


def saved_shape(method: str, query: Tensor, value: Tensor) -> tuple[int, ...]:
    return *query.shape[:2], 1, 1


def kept_scale(method: str, query: Tensor, value: Tensor, saved: Tensor) -> Tensor:
    """A number for each matrix, NaN where φ₁ has no digit."""
    return saved


def _sizes(x: Tensor) -> dict:
    return {"heads": x.shape[1], "tokens": x.shape[2], "WIDTH": x.shape[3]}


def _scratch(count: int, size: int, share: int, dtype: torch.dtype, device: torch.device) -> tuple[int, Tensor]:
    """Counts programs, `share` for each multiprocessor and at most one a head, and makes the memory of each."""
    programs = max(1, min(count, share * launch.multiprocessors(device)))
    return programs, torch.empty(programs, size, dtype=dtype, device=device)


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors if they have the same strides, adjacent columns and rows at multiples of 16 bytes; else copies."""

    def is_aligned(x: Tensor) -> bool:
        is_near = x.shape[-2] * x.stride(-2) < MOST_ENTRIES
        return x.stride(-1) == 1 and is_near and x.data_ptr() % 16 == 0 and all(each % 8 == 0 for each in x.stride()[:-1])

    if all(is_aligned(x) and x.stride() == tensors[0].stride() for x in tensors):
        return tensors
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
