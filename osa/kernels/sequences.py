"""How the kernels of osa/kernels/long.py are launched: four forward, three and a sum backward, of any number of tokens."""

import torch
import triton
from torch import Tensor

from osa.kernels import launch, long, long_backward
from osa.kernels.launch import Inputs, padded

LEAST_ROWS = 256  # of a part of a sequence, of which there are half as many as the device has multiprocessors


def forward(method: str, inputs: Inputs, output: Tensor, saved: Tensor, num_iterations: int, epsilon: float) -> None:
    """Fills the output, (batch, heads, N, d_value), and for the gradients a row for each matrix."""
    query, key, value, scale = inputs
    (count, heads, tokens, width), value_width = _shape(query), value.shape[-1]
    splits, rows = split(query, value)
    length, size = 3 * width**2 + 2 * width * value_width, saved.shape[-1]
    sums, pairs = _floats(query, count, splits + 1, length), _floats(query, count, splits, 3 * width)
    shears = _floats(query, count, splits, 2 * width + 1)
    form, tile = _form(query, value), gram_tile(query, value)
    common = {"heads": heads, "tokens": tokens, "splits": splits, "rows_of_split": rows, **form, **tile}
    strides, blocks = [x.stride() for x in (query, key, value)], tile["TILE"][2] // tile["TILE"][1]
    launch.launch(long.gram_kernel, count * splits * blocks, (query, key, value, sums, pairs), strides, common)
    tensors, common = (query, key, value, sums, pairs, shears), common | small_tile(query, value) | {"METHOD": method}
    launch.launch(long.reduce_kernel, count * splits, tensors, strides, common)
    numbers = {"heads": heads, "splits": splits, "size": size, "epsilon": epsilon}
    constants = mix_constants(method, query, value, num_iterations)
    block = constants["TILES"][1]  # columns of T
    scratch_size = 9 * (2 * width) ** 2 + (5 * block + 2) * 2 * width
    work = count * triton.cdiv(value_width, block)
    tensors = sums, shears, scale, saved
    launch.launch_resident(long.mix_kernel, work, tensors, [scale.stride()], scratch_size, constants | numbers)
    tile = apply_tile(query, value)
    common = {"heads": heads, "tokens": tokens, "size": size, **form, **tile}
    strides.append(output.stride())
    programs = count * triton.cdiv(tokens, tile["TILE"][0])
    launch.launch(long.apply_kernel, programs, (query, key, value, output, saved), strides, common)


def backward(
    method: str, inputs: Inputs, saved: Tensor, grad: Tensor, grads: Inputs, num_iterations: int, epsilon: float
) -> None:
    """Fills the gradients of query, key, value, and of the scale of each matrix, given that of the output."""
    query, key, value, _ = inputs
    (count, heads, tokens, width), value_width, size = _shape(query), value.shape[-1], saved.shape[-1]
    splits, rows = split(query, value)
    form, tile = _form(query, value), small_tile(query, value)
    constants = mix_constants(method, query, value, num_iterations)
    block = constants["TILES"][1]
    blocks = triton.cdiv(value_width, block)
    sums = _floats(query, count, splits, 2 * width * value_width)
    common = {"heads": heads, "tokens": tokens, "splits": splits, "rows_of_split": rows, "size": size, **form, **tile}
    strides = [x.stride() for x in (query, key, grad)]
    programs = count * splits * (tile["TILE"][2] // tile["TILE"][1])
    launch.launch(long_backward.products_kernel, programs, (query, key, grad, sums, saved), strides, common)
    mixed, parts = _floats(query, count, 6 * width * value_width), _floats(query, count, blocks, (2 * width) ** 2 + 1)
    numbers = {"splits": splits, "size": size, "epsilon": epsilon}
    squares = 13 + num_iterations  # of which the iterations keep theirs
    scratch_size = squares * (2 * width) ** 2 + 11 * 2 * width * block + launch.terms_size(2 * width, constants)
    tensors = sums, saved, mixed, parts
    launch.launch_resident(long_backward.mix_backward_kernel, count * blocks, tensors, [], scratch_size, constants | numbers)
    a3 = parts.sum(1)
    grads[3].copy_(a3[:, -1].view(grads[3].shape))
    tile = apply_tile(query, value)
    common = {"heads": heads, "tokens": tokens, "size": size, **form, **tile}
    tensors = query, key, value, grad, *grads[:3]
    strides = [x.stride() for x in tensors]
    programs = count * triton.cdiv(tokens, tile["TILE"][0])
    launch.launch(long_backward.apply_backward_kernel, programs, (*tensors, saved, mixed, a3), strides, common)


def saved_shape(method: str, query: Tensor, value: Tensor) -> tuple[int, int]:
    """Of what `long.saved_matrices` takes apart."""
    count, _, _, width = _shape(query)
    return count, -(-(4 * width + 4 * width**2 + 4 * width * value.shape[-1] + 1) // 16) * 16


def kept_scale(method: str, query: Tensor, value: Tensor, saved: Tensor) -> Tensor | None:
    """c of each matrix of "exact", NaN where its φ₁ has no digit: the last that `long.saved_matrices` finds."""
    width, value_width = query.shape[-1], value.shape[-1]
    return saved[:, 4 * width * (1 + width + value_width)] if method == "exact" else None


def split(query: Tensor, value: Tensor) -> tuple[int, int]:
    """In how many parts a sequence is taken, and the rows of each."""
    count, _, tokens, _ = _shape(query)
    parts = min(triton.cdiv(launch.multiprocessors(query.device), 2 * count), triton.cdiv(tokens, LEAST_ROWS))
    rows = triton.cdiv(triton.cdiv(tokens, parts), 64) * 64
    return triton.cdiv(tokens, rows), rows


def is_split(*tensors: Tensor) -> bool:
    """Whether products are those of tensor cores."""
    return all(x.dtype == torch.bfloat16 for x in tensors)


def mix_constants(method: str, query: Tensor, value: Tensor, num_iterations: int) -> dict:
    """In tiles of more columns than elsewhere, as the program of each block of T's columns does again what all need."""
    return launch.mix_constants(method, query, value, num_iterations, 64, is_split(query, value))


def gram_tile(query: Tensor, value: Tensor) -> dict:
    """Rows at a time, columns of the left factor and of both right ones, and registers for five products of these."""
    width, value_width = padded(query.shape[-1]), padded(value.shape[-1])
    is_small = max(width, value_width) <= 64 and is_split(query, value)
    if is_small and width == 64 and launch.capability(query.device) >= 9:  # whose tensor cores read shared memory
        return {"TILE": (64, width, width, value_width), "num_warps": 8, "num_stages": 3, "maxnreg": 128}
    tile = (32 if is_split(query, value) else 16, min(width, 32), width, value_width)
    return {"TILE": tile, "num_stages": 3, **_threads(tile, is_small)}


def small_tile(query: Tensor, value: Tensor) -> dict:
    """The same where columns are balanced on their way."""
    tile = 16, min(padded(query.shape[-1]), 32), padded(query.shape[-1]), padded(value.shape[-1])
    return {"TILE": tile, "num_stages": 1, **_threads(tile, False)}


def apply_tile(query: Tensor, value: Tensor) -> dict:
    """Rows, the length of an inner product, and columns."""
    tile = 32, 16, padded(query.shape[-1]), padded(value.shape[-1])
    return {"TILE": tile, "num_stages": 1, **_threads(tile, max(tile) <= 64 and is_split(query, value))}


def _threads(tile: tuple[int, ...], is_small: bool) -> dict:
    if max(tile) <= 32:
        return {"num_warps": 4, "maxnreg": 255}
    return {"num_warps": 8, "maxnreg": 128 if is_small else 255}


def _form(query: Tensor, value: Tensor) -> dict:
    return {"WIDTH": query.shape[-1], "VALUE_WIDTH": value.shape[-1], "SPLIT": is_split(query, value)}


def _shape(query: Tensor) -> tuple[int, int, int, int]:
    batch, heads, tokens, width = query.shape
    return batch * heads, heads, tokens, width


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
