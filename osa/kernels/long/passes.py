"""Kernels for long sequences on CUDA: two passes over query, key and value, with many programs per matrix.

With M = [Q, K], the first pass computes G = MᵀM and X = MᵀV, backend.py computes T from G and X, and the second pass
computes V + M T. In the backward kernels, E is the gradient of the output.

M is balanced as in `osa.linalg.balanced`, but γ and σ are computed from G alone. If subtracting a projection leaves little
of a column, the G of the new columns is inaccurate, and a second launch of gram_kernel computes it from these columns.
"""

import triton
import triton.language as tl

from osa.kernels.long.rows import balanced, product, saved_matrices, sheared, times
from osa.kernels.tiles import head, load, matrix, slice_of, store, transpose

NUMBERS = ["heads", "tokens", "parts", "rows_of_part"]


@triton.jit(do_not_specialize=NUMBERS)
def gram_kernel(
    query, key, value, sums, shears, is_lost, q_strides, k_strides, v_strides, heads, tokens, parts, rows_of_part,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SHEARED: tl.constexpr, TENSOR_CORES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stores QᵀQ, QᵀK, KᵀK, QᵀV and KᵀV of each part of each matrix, (matrices, parts, 3d² + 2d·d_value).

    A first launch uses the columns of Q and K. A second launch, with SHEARED, uses the columns that `sheared` returns, only
    for matrices whose `is_lost` is 1. For the others, backend.py shears the G and X of the first launch.
    """
    ROWS: tl.constexpr = TILE[0]
    LEFT_COLUMNS: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    BLOCKS: tl.constexpr = COLUMNS // LEFT_COLUMNS
    i_sums = tl.program_id(0) // BLOCKS
    i_head, i_part = i_sums // parts, i_sums % parts
    o_left = tl.program_id(0) % BLOCKS * LEFT_COLUMNS + tl.arange(0, LEFT_COLUMNS)
    o_columns, o_value_columns = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    q, k = head(query, q_strides, i_head, heads, tokens, WIDTH), head(key, k_strides, i_head, heads, tokens, WIDTH)
    v = head(value, v_strides, i_head, heads, tokens, VALUE_WIDTH)
    start, stop = i_part * rows_of_part, tl.minimum(tokens, (i_part + 1) * rows_of_part)
    if SHEARED:
        shear, _ = matrix(slice_of(shears, i_head, 2 * WIDTH), 2 * WIDTH, 1)
        stop = tl.where(tl.load(is_lost + i_head) > 0, stop, start)
    b_qq = tl.zeros((LEFT_COLUMNS, COLUMNS), tl.float32)
    b_qk, b_kk = b_qq, b_qq
    b_qv = tl.zeros((LEFT_COLUMNS, VALUE_COLUMNS), tl.float32)
    b_kv = b_qv
    for row in range(start, stop, ROWS):
        o_rows = row + tl.arange(0, ROWS)
        b_v = load(v, o_rows, o_value_columns)
        if SHEARED:
            b_q, b_k = sheared(q, k, shear, o_rows, o_columns, WIDTH)
            b_q_left, b_k_left = sheared(q, k, shear, o_rows, o_left, WIDTH)
        else:
            b_q, b_k = load(q, o_rows, o_columns), load(k, o_rows, o_columns)
            if LEFT_COLUMNS < COLUMNS:
                b_q_left, b_k_left = load(q, o_rows, o_left), load(k, o_rows, o_left)
            else:
                b_q_left, b_k_left = b_q, b_k
        b_q_left, b_k_left = tl.trans(b_q_left), tl.trans(b_k_left)
        b_qq, b_qk = product(b_qq, b_q_left, b_q, TENSOR_CORES), product(b_qk, b_q_left, b_k, TENSOR_CORES)
        b_kk = product(b_kk, b_k_left, b_k, TENSOR_CORES)
        b_qv, b_kv = product(b_qv, b_q_left, b_v, TENSOR_CORES), product(b_kv, b_k_left, b_v, TENSOR_CORES)
    if start < stop:
        free = slice_of(sums, i_sums, 3 * WIDTH * WIDTH + 2 * WIDTH * VALUE_WIDTH)
        block, free = matrix(free, WIDTH, WIDTH)
        store(block, o_left, o_columns, b_qq)
        block, free = matrix(free, WIDTH, WIDTH)
        store(block, o_left, o_columns, b_qk)
        block, free = matrix(free, WIDTH, WIDTH)
        store(block, o_left, o_columns, b_kk)
        block, free = matrix(free, WIDTH, VALUE_WIDTH)
        store(block, o_left, o_value_columns, b_qv)
        block, free = matrix(free, WIDTH, VALUE_WIDTH)
        store(block, o_left, o_value_columns, b_kv)


@triton.jit(do_not_specialize=NUMBERS)
def apply_kernel(
    query, key, value, output, saved, q_strides, k_strides, v_strides, o_strides, heads, tokens, parts,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TENSOR_CORES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stores V + M T. Each program computes a tile of rows."""
    ROWS: tl.constexpr = TILE[0]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    i_head, o_rows = tl.program_id(0) // parts, tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    q, k = head(query, q_strides, i_head, heads, tokens, WIDTH), head(key, k_strides, i_head, heads, tokens, WIDTH)
    v = head(value, v_strides, i_head, heads, tokens, VALUE_WIDTH)
    o = head(output, o_strides, i_head, heads, tokens, VALUE_WIDTH)
    matrices = saved_matrices(saved, i_head, WIDTH, VALUE_WIDTH)
    o_value_columns, b_sums = tl.arange(0, VALUE_COLUMNS), tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    b_sums = times(b_sums, q, k, matrices, matrices[2], o_rows, o_value_columns, WIDTH, TENSOR_CORES, TILE)
    store(o, o_rows, o_value_columns, load(v, o_rows, o_value_columns).to(tl.float32) + b_sums)


@triton.jit(do_not_specialize=NUMBERS)
def products_kernel(
    query, key, grad, sums, saved, q_strides, k_strides, e_strides, heads, tokens, parts, rows_of_part,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TENSOR_CORES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stores F = MᵀE of each part of each matrix, (matrices, parts, 2d, d_value)."""
    ROWS: tl.constexpr = TILE[0]
    LEFT_COLUMNS: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    BLOCKS: tl.constexpr = COLUMNS // LEFT_COLUMNS
    i_sums = tl.program_id(0) // BLOCKS
    o_left, o_columns = tl.program_id(0) % BLOCKS * LEFT_COLUMNS + tl.arange(0, LEFT_COLUMNS), tl.arange(0, VALUE_COLUMNS)
    i_head, i_part = i_sums // parts, i_sums % parts
    q, k = head(query, q_strides, i_head, heads, tokens, WIDTH), head(key, k_strides, i_head, heads, tokens, WIDTH)
    e = head(grad, e_strides, i_head, heads, tokens, VALUE_WIDTH)
    matrices = saved_matrices(saved, i_head, WIDTH, VALUE_WIDTH)
    b_qe = tl.zeros((LEFT_COLUMNS, VALUE_COLUMNS), tl.float32)
    b_ke = b_qe
    for row in range(i_part * rows_of_part, tl.minimum(tokens, (i_part + 1) * rows_of_part), ROWS):
        o_rows = row + tl.arange(0, ROWS)
        b_q, b_k = balanced(q, k, matrices, o_rows, o_left, WIDTH)
        b_e = load(e, o_rows, o_columns)
        b_qe = product(b_qe, tl.trans(b_q), b_e, TENSOR_CORES)
        b_ke = product(b_ke, tl.trans(b_k), b_e, TENSOR_CORES)
    own, rest = matrix(slice_of(sums, i_sums, 2 * WIDTH * VALUE_WIDTH), WIDTH, VALUE_WIDTH)
    store(own, o_left, o_columns, b_qe)
    own, _ = matrix(rest, WIDTH, VALUE_WIDTH)
    store(own, o_left, o_columns, b_ke)


@triton.jit(do_not_specialize=NUMBERS)
def apply_backward_kernel(
    query, key, value, grad, grad_query, grad_key, grad_value, saved, a2s, a3s,
    q_strides, k_strides, v_strides, e_strides, gq_strides, gk_strides, gv_strides, heads, tokens, parts,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TENSOR_CORES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stores grad V = E + M A₂ and, from grad M = E A₁ᵀ + V A₂ᵀ + M A₃, the gradients of Q and K.

    Each program computes a tile of rows. The chain rule through G and X gives A₁ = T, A₂ = grad X and
    A₃ = grad G + (grad G)ᵀ.
    """
    ROWS: tl.constexpr = TILE[0]
    LEFT_COLUMNS: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    i_head, o_rows = tl.program_id(0) // parts, tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    q, k = head(query, q_strides, i_head, heads, tokens, WIDTH), head(key, k_strides, i_head, heads, tokens, WIDTH)
    v = head(value, v_strides, i_head, heads, tokens, VALUE_WIDTH)
    e = head(grad, e_strides, i_head, heads, tokens, VALUE_WIDTH)
    matrices = saved_matrices(saved, i_head, WIDTH, VALUE_WIDTH)
    a1 = matrices[2]
    a2, _ = matrix(slice_of(a2s, i_head, 2 * WIDTH * VALUE_WIDTH), 2 * WIDTH, VALUE_WIDTH)
    a3, _ = matrix(slice_of(a3s, i_head, 4 * WIDTH * WIDTH), 2 * WIDTH, 2 * WIDTH)
    o_value_columns, o_columns, o_first = tl.arange(0, VALUE_COLUMNS), tl.arange(0, COLUMNS), tl.arange(0, 1)
    b_sums = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    b_sums = times(b_sums, q, k, matrices, a2, o_rows, o_value_columns, WIDTH, TENSOR_CORES, TILE)
    grad_v = head(grad_value, gv_strides, i_head, heads, tokens, VALUE_WIDTH)
    store(grad_v, o_rows, o_value_columns, load(e, o_rows, o_value_columns).to(tl.float32) + b_sums)
    b_grad_q = tl.zeros((ROWS, COLUMNS), tl.float32)
    b_grad_k = b_grad_q
    for start in range(0, VALUE_WIDTH, LEFT_COLUMNS):
        o_inner = start + tl.arange(0, LEFT_COLUMNS)
        b_e, b_v = load(e, o_rows, o_inner), load(v, o_rows, o_inner)
        b_grad_q = product(b_grad_q, b_e, load(transpose(a1), o_inner, o_columns), TENSOR_CORES)
        b_grad_k = product(b_grad_k, b_e, load(transpose(a1), o_inner, o_columns + WIDTH), TENSOR_CORES)
        b_grad_q = product(b_grad_q, b_v, load(transpose(a2), o_inner, o_columns), TENSOR_CORES)
        b_grad_k = product(b_grad_k, b_v, load(transpose(a2), o_inner, o_columns + WIDTH), TENSOR_CORES)
    b_grad_q = times(b_grad_q, q, k, matrices, a3, o_rows, o_columns, WIDTH, TENSOR_CORES, TILE)
    b_grad_k = times(b_grad_k, q, k, matrices, a3, o_rows, o_columns + WIDTH, WIDTH, TENSOR_CORES, TILE)
    gamma, sigma = transpose(matrices[0]), transpose(matrices[1])
    b_grad_q, b_grad_k = load(sigma, o_first, o_columns) * b_grad_q, load(sigma, o_first, o_columns + WIDTH) * b_grad_k
    grad_q = head(grad_query, gq_strides, i_head, heads, tokens, WIDTH)
    grad_k = head(grad_key, gk_strides, i_head, heads, tokens, WIDTH)
    store(grad_q, o_rows, o_columns, b_grad_q - load(gamma, o_first, o_columns + WIDTH) * b_grad_k)
    store(grad_k, o_rows, o_columns, b_grad_k - load(gamma, o_first, o_columns) * b_grad_q)
