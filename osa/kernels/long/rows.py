"""Tiles of rows of a long sequence: M = [Q, K] balanced, and its products.

Tensor cores take the products of bfloat16, exactly, and sum them in float32; a float32 operand of such a product is the sum
of two bfloat16, 16 bits. All other products are in full float32.
"""

import triton
import triton.language as tl

from osa.kernels.tiles import dot, load, matrix, slice_of, split, transpose


@triton.jit
def product(sums, left, right, SPLIT: tl.constexpr):
    """sums + left · right; for SPLIT by products of bfloat16, where a float32 operand has a high and a low part."""
    if SPLIT:
        high, right_high = left.to(tl.bfloat16), right.to(tl.bfloat16)
        if left.dtype == tl.float32:
            sums = tl.dot(split(left)[1], right_high, sums)
        if right.dtype == tl.float32:
            sums = tl.dot(high, split(right)[1], sums)
        sums = tl.dot(high, right_high, sums)
    else:
        sums = dot(left.to(tl.float32), right.to(tl.float32), sums)
    return sums


@triton.jit
def sheared(q, k, shear, rows, columns, WIDTH: tl.constexpr):
    """Columns of Q − a ∘ K and of K − b ∘ Q, rounded once."""
    q_tile, k_tile = load(q, rows, columns).to(tl.float32), load(k, rows, columns).to(tl.float32)
    a = load(transpose(shear), tl.arange(0, 1), columns) + tl.zeros_like(q_tile)
    b = load(transpose(shear), tl.arange(0, 1), columns + WIDTH) + tl.zeros_like(q_tile)
    return tl.fma(-a, k_tile, q_tile), tl.fma(-b, q_tile, k_tile)


@triton.jit
def balanced(q, k, kept, rows, columns, WIDTH: tl.constexpr):
    """Columns of the two halves of M, balanced."""
    q_tile, k_tile = sheared(q, k, kept[0], rows, columns, WIDTH)
    sigma = transpose(kept[1])
    return (load(sigma, tl.arange(0, 1), columns) * q_tile, load(sigma, tl.arange(0, 1), columns + WIDTH) * k_tile)


@triton.jit
def times(sums, q, k, kept, a, rows, columns, WIDTH: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """sums + M A, for some rows of M and columns of A."""
    PART: tl.constexpr = TILE[1]
    for start in range(0, WIDTH, PART):
        inner = start + tl.arange(0, PART)
        q_tile, k_tile = balanced(q, k, kept, rows, inner, WIDTH)
        sums = product(sums, q_tile, load(a, inner, columns), SPLIT)
        sums = product(sums, k_tile, load(a, inner + WIDTH, columns), SPLIT)
    return sums


@triton.jit
def saved_matrices(pointer, index, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """Finds the γ, σ and T that a pass over a sequence needs in the saved row of a matrix, before G, X, c and R⁻¹."""
    LENGTH: tl.constexpr = 4 * WIDTH + 8 * WIDTH * WIDTH + 4 * WIDTH * VALUE_WIDTH + 1
    scratch = slice_of(pointer, index, (LENGTH + 15) // 16 * 16)
    gamma, scratch = matrix(scratch, 2 * WIDTH, 1)
    sigma, scratch = matrix(scratch, 2 * WIDTH, 1)
    t, _ = matrix(scratch, 2 * WIDTH, VALUE_WIDTH)
    return (gamma, sigma, t)
