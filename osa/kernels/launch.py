"""How Triton kernels are launched: on a tensor's own device, by how many programs, and what they are compiled for."""

import torch
import triton
from torch import Tensor

from osa.kernels import attention, blocks, phi1

MAX_BASIS = 256 * 64  # entries of a basis, which Gram–Schmidt holds in registers
ENTRIES = {"qr": (64, 32), "exact": (64, 16)}  # of it in each thread, where matrices are held in blocks and where not


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # query, key, value, (batch, heads, N, width), and scale (batch, heads, 1, 1)


def forward(method: str, inputs: Inputs, output: Tensor, basis: Tensor, num_iterations: int, epsilon: float) -> None:
    """Fills the output, (batch, heads, N, d_value), and for "qr" the basis, in one launch: a program for a matrix."""
    query, _, value, _ = inputs
    tensors, (size, block) = (*inputs, output, basis), _sizes(query, value)
    scratch_size = (2 * query.shape[-2] + 2) * size + 9 * size**2 + 4 * block
    constants = attention_constants(method, "forward", query, value, num_iterations)
    _launch_heads(attention.forward_kernel, tensors, tensors[:5], scratch_size, epsilon, constants)


def backward(
    method: str, inputs: Inputs, basis: Tensor, grad: Tensor, grads: Inputs, num_iterations: int, epsilon: float
) -> None:
    """Fills the gradients of query, key, value and scale, in one launch."""
    query, _, value, _ = inputs
    size, block = _sizes(query, value)
    constants = attention_constants(method, "backward", query, value, num_iterations)
    squares = 13 + num_iterations  # of which the iterations keep theirs
    scratch_size = (3 * query.shape[-2] + 2) * size + squares * size**2 + 9 * block + terms_size(size, constants)
    tensors, with_strides = (*inputs, basis, grad, *grads), (*inputs, grad, grads[0], grads[2])
    _launch_heads(attention.backward_kernel, tensors, with_strides, scratch_size, epsilon, constants)


def phi1_forward(z: Tensor, y: Tensor, output: Tensor) -> None:
    """Fills the output with φ₁(Z) Y, (b, n, n) and (b, n, m), contiguous."""
    launch_resident(phi1.forward_kernel, len(z), (z, y, output), [], 6 * z.shape[-1] ** 2, phi1_constants(z, y))


def phi1_backward(z: Tensor, y: Tensor, grad: Tensor, grad_z: Tensor, grad_y: Tensor) -> None:
    count, size, width = y.shape
    constants = phi1_constants(z, y)
    scratch_size = 8 * size**2 + size * width + terms_size(size, constants)
    launch_resident(phi1.backward_kernel, count, (z, y, grad, grad_z, grad_y), [], scratch_size, constants)


def terms_size(size: int, constants: dict) -> int:
    """Of the scratch memory in which `phi1.phi1_gradients` keeps terms."""
    return 2 * phi1.MOST_TERMS.value * constants["TILES"][1] * size


def saved_shape(method: str, query: Tensor, value: Tensor) -> tuple[int, ...]:
    """Of the basis, or of a number for each matrix."""
    return (*query.shape[:-1], 2 * query.shape[-1]) if method == "qr" else (*query.shape[:2], 1, 1)


def kept_scale(method: str, query: Tensor, value: Tensor, saved: Tensor) -> Tensor | None:
    """c of each matrix, NaN where its φ₁ has no digit: of "exact" where no basis is at hand."""
    has_basis = attention_constants(method, "forward", query, value, 0)["ALL_ROWS"]
    return saved if method == "exact" and not has_basis else None


def _launch_heads(
    kernel, tensors: tuple[Tensor, ...], with_strides: tuple[Tensor, ...], scratch_size: int, epsilon: float, constants: dict
) -> None:
    batch, heads, tokens, _ = tensors[0].shape
    strides, numbers = [x.stride() for x in with_strides], {"heads": heads, "tokens": tokens, "epsilon": epsilon}
    launch_resident(kernel, batch * heads, tensors, strides, scratch_size, constants | numbers)


def capability(device: torch.device) -> int:
    """The first number of the compute capability."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8


def _sizes(query: Tensor, value: Tensor) -> tuple[int, int]:
    """2d, and the entries of a matrix (2d, d_value)."""
    return 2 * query.shape[-1], 2 * query.shape[-1] * value.shape[-1]


def launch(kernel, programs: int, tensors: tuple[Tensor, ...], strides: list, arguments: dict) -> None:
    """On the tensors' own device, which need not be the current one."""
    with torch.cuda.device_of(tensors[0]):
        kernel[(programs,)](*tensors, *strides, **arguments)


def launch_resident(
    kernel, count: int, tensors: tuple[Tensor, ...], strides: list, scratch_size: int, arguments: dict
) -> None:
    """By as many programs as the device holds at a time, each with scratch memory of its own, for `count` pieces of work."""
    device = tensors[0].device
    programs = min(count, resident_programs(device, arguments["num_warps"]))
    scratch = make_scratch(programs, scratch_size, device)
    launch(kernel, programs, (*tensors, scratch), strides, arguments | {"count": count, "scratch_size": scratch.stride(0)})


def make_scratch(programs: int, size: int, device: torch.device) -> Tensor:
    return torch.empty(programs, -(-size // 16) * 16, dtype=torch.float32, device=device)


def resident_programs(device: torch.device, num_warps: int) -> int:
    """How many programs of these warps a device holds at a time: a thread has 128 of a multiprocessor's registers."""
    return multiprocessors(device) * max(1, 16 // num_warps)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def phi1_constants(z: Tensor, y: Tensor) -> dict:
    """What a kernel of φ₁ is compiled for."""
    return {"SIZE": z.shape[-1], "VALUE_WIDTH": y.shape[-1], **tile_constants(*y.shape[1:])}


def attention_constants(method: str, kernel: str, query: Tensor, value: Tensor, num_iterations: int) -> dict:
    """What a kernel of attention is compiled for: "forward" or "backward".

    Gram–Schmidt holds ALL_ROWS of a basis in registers: "qr" forward takes as many threads as that needs, "exact" has a
    basis only where its threads suffice.
    """
    constants, rows = mix_constants(method, query, value, num_iterations), padded(query.shape[-2])
    padded_size = constants["TILES"][0]
    warps = rows * padded_size // (32 * ENTRIES.get(method, (1, 1))[padded_size > blocks.SIZE.value])
    if (method, kernel) == ("qr", "forward"):
        constants["num_warps"] = max(constants["num_warps"], warps)
    elif method != "exact" or warps > constants["num_warps"]:
        rows = 0
    return constants | {"ALL_ROWS": rows}


def mix_constants(
    method: str, query: Tensor, value: Tensor, num_iterations: int, columns: int = 32, is_split: bool = False
) -> dict:
    """The same of what lies between Gram matrices alone, in tiles of so many columns; `is_split` as in `tile_constants`."""
    names = {"WIDTH": query.shape[-1], "VALUE_WIDTH": value.shape[-1], "METHOD": method, "ITERATIONS": num_iterations}
    return names | tile_constants(2 * query.shape[-1], value.shape[-1], columns, is_split)


def tile_constants(size: int, width: int, columns: int = 32, is_split: bool = False) -> dict:
    """The tiles of products, whose columns are as many as the registers take, and whether their operands are split.

    Where `tl.dot` takes its operands from memory, a thread holds sixteen entries of a tile or more: it multiplies more than
    it loads. 128 registers a thread, and loads that are not issued ahead, let two programs share a multiprocessor. Left
    alone, the compiler takes fewer, and spills. Matrices that are held in blocks have one warp, whose threads wait for no
    others: on an H100 it took half the time of four. Split operands are each the sum of two of tensor cores' TF32, 22 bits.
    """
    is_held, rows = size <= blocks.SIZE.value, padded(size)
    columns = 16 if is_held else min(columns, 8192 // rows, padded(width))
    warps, registers = (1, 255) if is_held else (8 if size <= 128 else 16, 128)
    return {"TILES": (rows, columns, 16, is_split), "num_warps": warps, "num_stages": 1, "maxnreg": registers}


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
