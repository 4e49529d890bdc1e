"""Helpers that launch Triton kernels."""

import functools

import torch
import triton
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # query, key, value (batch, heads, N, width), scale (batch, heads, 1, 1)


def launch(kernel, programs: int, tensors: tuple[Tensor, ...], strides: list, arguments: dict) -> None:
    """Launches a kernel on the device of its tensors. If the tensors are on "meta", only compiles the kernel."""
    run = functools.partial(kernel.warmup, grid=(programs,)) if tensors[0].is_meta else kernel[(programs,)]
    with torch.cuda.device_of(tensors[0]):
        run(*tensors, *strides, **arguments)


def launch_resident(
    kernel, count: int, tensors: tuple[Tensor, ...], strides: list, scratch_size: int, arguments: dict
) -> None:
    """Launches a kernel for `count` matrices, with at most as many programs as can run at once, each with scratch memory."""
    device = tensors[0].device
    programs = min(count, resident_programs(device, arguments["num_warps"]))
    scratch = make_scratch(programs, scratch_size, device)
    launch(kernel, programs, (*tensors, scratch), strides, arguments | {"count": count, "scratch_size": scratch.stride(0)})


def make_scratch(programs: int, size: int, device: torch.device) -> Tensor:
    """Returns scratch memory, (programs, size), with `size` rounded up to a multiple of 16."""
    return torch.empty(programs, ratio_up(size, 16) * 16, dtype=torch.float32, device=device)


def resident_programs(device: torch.device, num_warps: int) -> int:
    """Number of programs that run on the device at once if each thread uses 128 registers."""
    return multiprocessors(device) * max(1, 16 // num_warps)


def has_wgmma(device: torch.device) -> bool:
    """True on Hopper. Only its tensor cores have the instruction wgmma, which reads operands from shared memory."""
    return capability(device) == 9


def capability(device: torch.device) -> int:
    """Major compute capability of a GPU. "meta" stands for the current GPU. Without a GPU, the result is 9 (Hopper)."""
    return torch.cuda.get_device_capability(None if device.type == "meta" else device)[0] if _has_gpu(device) else 9


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU. "meta" stands for the current GPU. Without a GPU, the result is 1."""
    if not _has_gpu(device):
        return 1
    return torch.cuda.get_device_properties(None if device.type == "meta" else device).multi_processor_count


def _has_gpu(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available())


def ratio_up(size: int, part: int) -> int:
    """size / part, rounded up."""
    return -(-size // part)


def padded(size: int) -> int:
    """Rounds a size up to a power of two, as Triton requires of blocks, and to at least 16, as `tl.dot` requires."""
    return max(16, triton.next_power_of_2(size))  # pyright: ignore[reportReturnType]  # next_power_of_2 returns an int here
