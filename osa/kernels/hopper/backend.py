"""Launches the kernels of "exact" in bfloat16 on Hopper's tensor cores.

In the kernels of fused.py, a program computes whole heads. If there are few heads, the kernels of parts.py run instead, with
one program per part of a head. In both cases, stepped.py then computes the heads whose ‖Z‖ is too large for these kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from osa.kernels import launch
from osa.kernels.hopper import fused, parts, stepped
from osa.kernels.launch import Inputs, ratio_up

METHODS = ("exact",)

MAX_ENTRIES = 2**31  # a head must span fewer entries, because offsets within a head have 32 bits
MIN_ROWS, MIN_PARTS = 256, 4  # minimum rows per part and parts per head; with fewer, the extra launches outweigh the gain
WARPS = {"num_warps": 4, "maxnreg": 255}
# Launch options of fused.py. Two programs fit on a multiprocessor: see sm_90 in paper_outputs/benchmarks/kernels.csv
FORWARD = {"GRAM_ROWS": 32, "ROWS": 64, "GRAM_STAGES": 8, "STAGES": 2} | WARPS
BACKWARD = {"GRAM_ROWS": 32, "ROWS": 64, "GRAM_STAGES": 5, "STAGES": 1} | WARPS
# Launch options of parts.py. STAGES, the number of loads in flight, is larger than in fused.py, because each part has a
# multiprocessor to itself
GRAM, MIX = {"GRAM_ROWS": 32, "GRAM_STAGES": 8} | WARPS, WARPS | {"num_warps": 8}
APPLY, APPLY_BACKWARD = {"ROWS": 64, "STAGES": 4} | WARPS, {"ROWS": 64, "STAGES": 3} | WARPS
# Launch options of stepped.py. Shared memory per program: up to 115 kB with one product per Taylor term, 156 kB with three
STEPPED = {"ROWS": 64, "GRAM_ROWS": 32, "num_warps": 4, "num_stages": 1, "maxnreg": 255}
ONE_PRODUCT, THREE_PRODUCTS = STEPPED | {"STAGES": 5, "SPLIT": False}, STEPPED | {"STAGES": 2, "SPLIT": True}


@dataclass(frozen=True)
class Hopper:
    """Implements `osa.kernels.operators.Backend` for "exact"."""

    method: str

    def forms(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[str, ...]:
        """Returns "fused" and, for few heads, "parts". "fused" is always included, as vmap may turn few heads into many."""
        tensors, width = (query, key, value), query.shape[-1]
        fits = width % 8 == 0 and width <= fused.D.value and query.shape[-3:].numel() < MAX_ENTRIES
        fits = fits and all(x.dtype == torch.bfloat16 and x.shape[-1] == width for x in tensors)
        if not fits or not launch.has_wgmma(query.device):
            return ()
        count = torch.broadcast_shapes(*(x.shape[:-2] for x in tensors)).numel()
        return ("fused", "parts") if partition(count, query.shape[-2], query.device) else ("fused",)

    def saved_shape(self, query: Tensor, value: Tensor) -> tuple[int, ...]:
        return *query.shape[:2], 1, 1

    def forward(self, inputs: Inputs, output: Tensor, saved: Tensor, num_iterations: int, epsilon: float) -> None:
        """Writes the output, and saves each head's state, which fused.py defines."""
        (query, key, value), scale = _with_equal_strides(*inputs[:3]), inputs[3].contiguous()
        tensors = query, key, value, output, scale, saved
        strides = [query.stride(), output.stride()]
        count, sizes = saved.numel(), _sizes(output)
        if rows := partition(count, output.shape[2], output.device):
            sums = _sums_over_parts(parts.gram_kernel, (query, key, value), strides[:1], parts.PART_SUMS.value, sizes | rows)
            mixed = query.new_empty(count, 2 * fused.ENTRIES.value)
            launch.launch(parts.mix_kernel, count, (sums, scale, saved, mixed), [], MIX)
            tensors_of_parts, programs = (query, key, value, output, saved, mixed), count * rows["parts"]
            launch.launch(parts.apply_kernel, programs, tensors_of_parts, strides, sizes | rows | APPLY)
        else:
            launch.launch(fused.forward_kernel, count, tensors, strides, sizes | FORWARD)
        _launch_steps(stepped.stepped_forward_kernel, tensors, strides, sizes | {"count": count}, is_backward=False)

    def backward(
        self, inputs: Inputs, saved: Tensor, grad: Tensor, grads: Inputs, num_iterations: int, epsilon: float
    ) -> None:
        query, key, value = _with_equal_strides(*inputs[:3])
        scale, (grad,) = inputs[3].contiguous(), _with_equal_strides(grad)
        tensors = query, key, value, grad, *grads[:3], scale, grads[3], saved
        strides = [query.stride(), grad.stride(), grads[0].stride()]
        count, sizes = saved.numel(), _sizes(grad)
        if rows := partition(count, grad.shape[2], grad.device):
            sums = _sums_over_parts(parts.gram_kernel, (query, key, value), strides[:1], parts.PART_SUMS.value, sizes | rows)
            products = _sums_over_parts(
                parts.products_kernel, (query, key, grad), strides[:2], fused.ENTRIES.value, sizes | rows
            )
            scratch = query.new_empty(count, parts.HEAD_SCRATCH.value)
            launch.launch(parts.mix_backward_kernel, count, (sums, products, scale, grads[3], saved, scratch), [], MIX)
            tensors_of_parts, programs = (query, key, value, grad, *grads[:3], saved, scratch), count * rows["parts"]
            launch.launch(parts.apply_backward_kernel, programs, tensors_of_parts, strides, sizes | rows | APPLY_BACKWARD)
        else:
            programs, scratch = _scratch(count, fused.SCRATCH.value, 2, torch.bfloat16, saved.device)
            launch.launch(fused.backward_kernel, programs, (*tensors, scratch), strides, sizes | {"count": count} | BACKWARD)
        _launch_steps(stepped.stepped_backward_kernel, tensors, strides, sizes | {"count": count}, is_backward=True)

    def scale_where_valid(self, query: Tensor, value: Tensor, saved: Tensor) -> Tensor:
        return saved


def partition(count: int, tokens: int, device: torch.device) -> dict[str, int]:
    """Divides each of `count` heads into parts if one program per head would leave most of the device idle.

    Heads stay whole if they keep more than a quarter of the multiprocessors busy. Half of an H100's multiprocessors read
    memory at nearly full speed, and a quarter at about half speed. So dividing such heads would at most double the speed.

    Returns:
        "parts", the number of parts of a head, and "rows", the number of rows of a part. The dict is empty if one program
        computes a whole head.
    """
    parts = min(launch.multiprocessors(device) // max(count, 1), tokens // MIN_ROWS)
    if parts < MIN_PARTS:
        return {}
    rows = ratio_up(ratio_up(tokens, parts), APPLY["ROWS"]) * APPLY["ROWS"]
    return {"parts": ratio_up(tokens, rows), "rows": rows} if rows < tokens else {}


def _sums_over_parts(kernel, tensors: tuple[Tensor, ...], strides: list, entries: int, sizes: dict) -> Tensor:
    """Launches a program for each part, and returns each head's results, summed over its parts, (heads, entries)."""
    count = tensors[0].shape[:2].numel()
    found = torch.empty(count, sizes["parts"], entries, device=tensors[0].device)
    launch.launch(kernel, count * sizes["parts"], (*tensors, found), strides, sizes | GRAM)
    return found.sum(1)


def _launch_steps(kernel, tensors: tuple[Tensor, ...], strides: list, sizes: dict, *, is_backward: bool) -> None:
    """Launches a kernel of stepped.py with one product per Taylor term, and then, for heads that need it, with three."""
    for options, share in ((ONE_PRODUCT, 2), (THREE_PRODUCTS, 1)):
        size = stepped.scratch_size(bool(options["SPLIT"]), is_backward)
        programs, scratch = _scratch(sizes["count"], size, share, torch.float32, tensors[0].device)
        launch.launch(kernel, programs, (*tensors, scratch), strides, sizes | options | {"SCRATCH": size})


def _sizes(x: Tensor) -> dict:
    return {"heads": x.shape[1], "tokens": x.shape[2], "WIDTH": x.shape[3]}


def _scratch(count: int, size: int, share: int, dtype: torch.dtype, device: torch.device) -> tuple[int, Tensor]:
    """Returns the number of programs (at most one per head, and at most `share` per multiprocessor), and their scratch."""
    programs = max(1, min(count, share * launch.multiprocessors(device)))
    return programs, torch.empty(programs, size, dtype=dtype, device=device)


def _with_equal_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies the tensors unless all have the same strides, the last stride is 1, and all rows are aligned to 16 bytes."""

    def is_aligned(x: Tensor) -> bool:
        is_near = x.shape[-2] * x.stride(-2) < MAX_ENTRIES
        return x.stride(-1) == 1 and is_near and x.data_ptr() % 16 == 0 and all(each % 8 == 0 for each in x.stride()[:-1])

    if all(is_aligned(x) and x.stride() == tensors[0].stride() for x in tensors):
        return tensors
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
