"""Functions that load and multiply rows of the balanced M = [Q, K] of a long sequence.

Tensor cores multiply bfloat16 exactly and sum in float32. A float32 operand is split into two bfloat16 parts, whose
sum has about 16 significant bits. Without tensor cores, products are in full float32.
"""

import triton
import triton.language as tl

from osa.kernels.tiles import dot, high_low, load, matrix, slice_of, transpose


@triton.jit
def product(b_sums, b_left, b_right, TENSOR_CORES: tl.constexpr):
    """sums + left · right. With TENSOR_CORES, the product is in bfloat16, and float32 operands are split into two parts."""
    if TENSOR_CORES:
        b_high, b_right_high = b_left.to(tl.bfloat16), b_right.to(tl.bfloat16)
        if b_left.dtype == tl.float32:
            b_sums = tl.dot(high_low(b_left)[1], b_right_high, b_sums)
        if b_right.dtype == tl.float32:
            b_sums = tl.dot(b_high, high_low(b_right)[1], b_sums)
        b_sums = tl.dot(b_high, b_right_high, b_sums)
    else:
        b_sums = dot(b_left.to(tl.float32), b_right.to(tl.float32), b_sums)
    return b_sums


@triton.jit
def sheared(q, k, shear, o_rows, o_columns, WIDTH: tl.constexpr):
    """Returns q_j − γ_j k_j and k_j − γ_{j+d} q_j for each pair of columns. Each difference is rounded only once."""
    b_q, b_k = load(q, o_rows, o_columns).to(tl.float32), load(k, o_rows, o_columns).to(tl.float32)
    b_shear_q = load(transpose(shear), tl.arange(0, 1), o_columns) + tl.zeros_like(b_q)
    b_shear_k = load(transpose(shear), tl.arange(0, 1), o_columns + WIDTH) + tl.zeros_like(b_q)
    return tl.fma(-b_shear_q, b_k, b_q), tl.fma(-b_shear_k, b_q, b_k)


@triton.jit
def balanced(q, k, saved, o_rows, o_columns, WIDTH: tl.constexpr):
    """The columns that `sheared` returns, scaled by σ."""
    b_q, b_k = sheared(q, k, saved[0], o_rows, o_columns, WIDTH)
    sigma = transpose(saved[1])
    return (load(sigma, tl.arange(0, 1), o_columns) * b_q, load(sigma, tl.arange(0, 1), o_columns + WIDTH) * b_k)


@triton.jit
def times(b_sums, q, k, saved, a, o_rows, o_columns, WIDTH: tl.constexpr, TENSOR_CORES: tl.constexpr, TILE: tl.constexpr):
    """Returns sums + M A for the rows `o_rows` of the balanced M and the columns `o_columns` of A."""
    LEFT_COLUMNS: tl.constexpr = TILE[1]
    for start in range(0, WIDTH, LEFT_COLUMNS):
        o_inner = start + tl.arange(0, LEFT_COLUMNS)
        b_q, b_k = balanced(q, k, saved, o_rows, o_inner, WIDTH)
        b_sums = product(b_sums, b_q, load(a, o_inner, o_columns), TENSOR_CORES)
        b_sums = product(b_sums, b_k, load(a, o_inner + WIDTH, o_columns), TENSOR_CORES)
    return b_sums


@triton.jit
def saved_matrices(pointer, index, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """Returns γ, σ and T, the first three matrices in row `index` of the saved tensor."""
    LENGTH: tl.constexpr = 4 * WIDTH + 8 * WIDTH * WIDTH + 4 * WIDTH * VALUE_WIDTH + 1
    scratch = slice_of(pointer, index, (LENGTH + 15) // 16 * 16)
    gamma, scratch = matrix(scratch, 2 * WIDTH, 1)
    sigma, scratch = matrix(scratch, 2 * WIDTH, 1)
    t, _ = matrix(scratch, 2 * WIDTH, VALUE_WIDTH)
    return (gamma, sigma, t)
