"""Launches of Triton kernels on a tensor's own device, their numbers of programs and the constants of their compilation."""

import functools

import torch
import triton
from torch import Tensor

from osa.kernels import attention, phi1
from osa.kernels.tiles import BLOCK, SIZE

ENTRIES = 64  # entries of a basis in each thread, which Gram–Schmidt holds in registers
WARP = {"num_warps": 1, "num_stages": 1, "maxnreg": 255}  # one warp for a matrix, in half the time of four on an H100

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # query, key, value, (batch, heads, N, width), and scale (batch, heads, 1, 1)


def forward(method: str, inputs: Inputs, output: Tensor, basis: Tensor, num_iterations: int, epsilon: float) -> None:
    """Fills the output, (batch, heads, N, d_value), and for "qr" the basis, in one launch: a program for a matrix."""
    query, _, value, _ = inputs
    tensors, (size, block) = (*inputs, output, basis), _sizes(query, value)
    scratch_size = (2 * query.shape[-2] + 2) * size + 5 * size**2 + 4 * block
    constants = attention_constants(method, "forward", query, value, num_iterations)
    _launch_heads(attention.forward_kernel, tensors, tensors[:5], scratch_size, epsilon, constants)


def backward(
    method: str, inputs: Inputs, basis: Tensor, grad: Tensor, grads: Inputs, num_iterations: int, epsilon: float
) -> None:
    """Fills the gradients of query, key, value and scale, in one launch."""
    query, _, value, _ = inputs
    size, block = _sizes(query, value)
    constants = attention_constants(method, "backward", query, value, num_iterations)
    squares = 11 + num_iterations  # the iterations store one each
    scratch_size = (3 * query.shape[-2] + 2) * size + squares * size**2 + 9 * block + terms_size(size)
    tensors, with_strides = (*inputs, basis, grad, *grads), (*inputs, grad, grads[0], grads[2])
    _launch_heads(attention.backward_kernel, tensors, with_strides, scratch_size, epsilon, constants)


def phi1_forward(z: Tensor, y: Tensor, output: Tensor) -> None:
    """Fills the output with φ₁(Z) Y, (b, n, n) and (b, n, m), contiguous."""
    constants = {"SIZE": z.shape[-1], "VALUE_WIDTH": y.shape[-1], **WARP}
    launch_resident(phi1.forward_kernel, len(z), (z, y, output), [], 2 * z.shape[-1] ** 2, constants)


def phi1_backward(z: Tensor, y: Tensor, grad: Tensor, grad_z: Tensor, grad_y: Tensor) -> None:
    count, size, width = y.shape
    scratch_size = 4 * size**2 + size * width + terms_size(size)
    constants = {"SIZE": size, "VALUE_WIDTH": width, **WARP}
    launch_resident(phi1.backward_kernel, count, (z, y, grad, grad_z, grad_y), [], scratch_size, constants)


def terms_size(size: int) -> int:
    """Entries of the scratch memory in which `phi1.phi1_gradients` keeps terms, of as many columns as it takes at a time."""
    return phi1.MOST_TERMS.value * BLOCK.value * size


def saved_shape(method: str, query: Tensor, value: Tensor) -> tuple[int, ...]:
    """Shape of the basis, or of a number for each matrix."""
    return (*query.shape[:-1], 2 * query.shape[-1]) if method == "qr" else (*query.shape[:2], 1, 1)


def kept_scale(method: str, query: Tensor, value: Tensor, saved: Tensor) -> Tensor | None:
    """c of each matrix for "exact" without a basis, NaN where φ₁ has no digit; None for all else."""
    has_basis = attention_constants(method, "forward", query, value, 0)["ALL_ROWS"]
    return saved if method == "exact" and not has_basis else None


def _launch_heads(
    kernel, tensors: tuple[Tensor, ...], with_strides: tuple[Tensor, ...], scratch_size: int, epsilon: float, constants: dict
) -> None:
    batch, heads, tokens, _ = tensors[0].shape
    strides, numbers = [x.stride() for x in with_strides], {"heads": heads, "tokens": tokens, "epsilon": epsilon}
    launch_resident(kernel, batch * heads, tensors, strides, scratch_size, constants | numbers)


def has_wgmma(device: torch.device) -> bool:
    """Tells whether a device has Hopper's asynchronous tensor cores, which read shared memory and no later GPU has."""
    return capability(device) == 9


def capability(device: torch.device) -> int:
    """The first number of the compute capability, for "meta" of the current GPU; without a GPU Hopper's."""
    return torch.cuda.get_device_capability(None if device.type == "meta" else device)[0] if _has_gpu(device) else 9


def _sizes(query: Tensor, value: Tensor) -> tuple[int, int]:
    """2d, and the entries of a matrix (2d, d_value)."""
    return 2 * query.shape[-1], 2 * query.shape[-1] * value.shape[-1]


def launch(kernel, programs: int, tensors: tuple[Tensor, ...], strides: list, arguments: dict) -> None:
    """Launches a kernel on the tensors' own device, which need not be the current one; for "meta" compiles it alone."""
    run = functools.partial(kernel.warmup, grid=(programs,)) if tensors[0].is_meta else kernel[(programs,)]
    with torch.cuda.device_of(tensors[0]):
        run(*tensors, *strides, **arguments)


def launch_resident(
    kernel, count: int, tensors: tuple[Tensor, ...], strides: list, scratch_size: int, arguments: dict
) -> None:
    """Launches as many programs as the device holds at a time, each with scratch memory, for `count` pieces of work."""
    device = tensors[0].device
    programs = min(count, resident_programs(device, arguments["num_warps"]))
    scratch = make_scratch(programs, scratch_size, device)
    launch(kernel, programs, (*tensors, scratch), strides, arguments | {"count": count, "scratch_size": scratch.stride(0)})


def make_scratch(programs: int, size: int, device: torch.device) -> Tensor:
    return torch.empty(programs, ratio_up(size, 16) * 16, dtype=torch.float32, device=device)


def resident_programs(device: torch.device, num_warps: int) -> int:
    """Counts the programs of these warps that a device holds at a time: a thread has 128 of a multiprocessor's registers."""
    return multiprocessors(device) * max(1, 16 // num_warps)


def multiprocessors(device: torch.device) -> int:
    """Counts those of a device as `capability` takes it; without a GPU one."""
    if not _has_gpu(device):
        return 1
    return torch.cuda.get_device_properties(None if device.type == "meta" else device).multi_processor_count


def _has_gpu(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available())


def attention_constants(method: str, kernel: str, query: Tensor, value: Tensor, num_iterations: int) -> dict:
    """Constants that a kernel of attention is compiled for: "forward" or "backward".

    Gram–Schmidt holds ALL_ROWS of a basis in registers: "qr" forward takes as many threads as that needs, "exact" has a
    basis only where its threads suffice.
    """
    names = {"WIDTH": query.shape[-1], "VALUE_WIDTH": value.shape[-1], "METHOD": method, "ITERATIONS": num_iterations}
    constants, rows = names | WARP, padded(query.shape[-2])
    warps = rows * SIZE.value // (32 * ENTRIES)
    if (method, kernel) == ("qr", "forward"):
        constants["num_warps"] = max(constants["num_warps"], warps)
    elif method != "exact" or warps > constants["num_warps"]:
        rows = 0
    return constants | {"ALL_ROWS": rows}


def ratio_up(size: int, part: int) -> int:
    """Counts the parts that hold a size."""
    return -(-size // part)


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # pyright: ignore[reportReturnType]  # a number, outside of kernels
