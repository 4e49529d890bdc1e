"""Orthogonal attention of long sequences on CUDA, by two passes over query, key and value, each by many programs a matrix.

With M = [Q, K], the first pass gives G = MᵀM and X = MᵀV, backend.py finds T from G and X, and the second pass
gives V + M T:

    gram_kernel            partial sums of G and X, for each part of a sequence; a second time where the first lose digits
    apply_kernel           V + M T
    products_kernel        partial sums of F = MᵀE, given the gradient E of the output
    apply_backward_kernel  the gradients of Q, K and V, once those of G and X are known

M is balanced as in `osa.linalg.balanced`, M T = M diag(σ) sheared by γ, with γ and σ from G, which costs no pass: the
shorter column of each pair loses its projection on the longer. Where little is left of a column, G has lost its digits, and
a second call of gram_kernel sums the products of the sheared columns.
"""

import triton
import triton.language as tl

from osa.kernels.long.rows import balanced, product, saved_matrices, sheared, times
from osa.kernels.tiles import head, load, matrix, slice_of, store, transpose

NUMBERS = ["heads", "tokens", "splits", "rows_of_split"]


@triton.jit(do_not_specialize=NUMBERS)
def gram_kernel(
    query, key, value, sums, shears, is_lost, q_strides, k_strides, v_strides, heads, tokens, splits, rows_of_split,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SHEARED: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """QᵀQ, QᵀK, KᵀK, QᵀV and KᵀV of each part of each matrix, (matrices, splits, 3d² + 2d·d_value).

    SHEARED takes the columns that γ has sheared, of the matrices whose first sums have lost digits.
    """
    ROWS: tl.constexpr = TILE[0]
    PART: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    BLOCKS: tl.constexpr = COLUMNS // PART
    part = tl.program_id(0) // BLOCKS
    i, split = part // splits, part % splits
    lefts = tl.program_id(0) % BLOCKS * PART + tl.arange(0, PART)
    columns, value_columns = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
    v = head(value, v_strides, i, heads, tokens, VALUE_WIDTH)
    start, stop = split * rows_of_split, tl.minimum(tokens, (split + 1) * rows_of_split)
    if SHEARED:
        shear, _ = matrix(slice_of(shears, i, 2 * WIDTH), 2 * WIDTH, 1)
        stop = tl.where(tl.load(is_lost + i) > 0, stop, start)
    q_q = tl.zeros((PART, COLUMNS), tl.float32)
    q_k, k_k = q_q, q_q
    q_v = tl.zeros((PART, VALUE_COLUMNS), tl.float32)
    k_v = q_v
    for row in range(start, stop, ROWS):
        rows = row + tl.arange(0, ROWS)
        v_tile = load(v, rows, value_columns)
        if SHEARED:
            q_tile, k_tile = sheared(q, k, shear, rows, columns, WIDTH)
            q_left, k_left = sheared(q, k, shear, rows, lefts, WIDTH)
        else:
            q_tile, k_tile = load(q, rows, columns), load(k, rows, columns)
            if PART < COLUMNS:
                q_left, k_left = load(q, rows, lefts), load(k, rows, lefts)
            else:
                q_left, k_left = q_tile, k_tile
        q_left, k_left = tl.trans(q_left), tl.trans(k_left)
        q_q, q_k = product(q_q, q_left, q_tile, SPLIT), product(q_k, q_left, k_tile, SPLIT)
        k_k = product(k_k, k_left, k_tile, SPLIT)
        q_v, k_v = product(q_v, q_left, v_tile, SPLIT), product(k_v, k_left, v_tile, SPLIT)
    if start < stop:
        own = slice_of(sums, part, 3 * WIDTH * WIDTH + 2 * WIDTH * VALUE_WIDTH)
        block, own = matrix(own, WIDTH, WIDTH)
        store(block, lefts, columns, q_q)
        block, own = matrix(own, WIDTH, WIDTH)
        store(block, lefts, columns, q_k)
        block, own = matrix(own, WIDTH, WIDTH)
        store(block, lefts, columns, k_k)
        block, own = matrix(own, WIDTH, VALUE_WIDTH)
        store(block, lefts, value_columns, q_v)
        block, own = matrix(own, WIDTH, VALUE_WIDTH)
        store(block, lefts, value_columns, k_v)


@triton.jit(do_not_specialize=NUMBERS)
def apply_kernel(
    query, key, value, output, saved, q_strides, k_strides, v_strides, o_strides, heads, tokens, splits,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """output = V + M T, a tile of rows a program."""
    ROWS: tl.constexpr = TILE[0]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    i, rows = tl.program_id(0) // splits, tl.program_id(0) % splits * ROWS + tl.arange(0, ROWS)
    q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
    v, o = head(value, v_strides, i, heads, tokens, VALUE_WIDTH), head(output, o_strides, i, heads, tokens, VALUE_WIDTH)
    kept = saved_matrices(saved, i, WIDTH, VALUE_WIDTH)
    value_columns, sums = tl.arange(0, VALUE_COLUMNS), tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    sums = times(sums, q, k, kept, kept[2], rows, value_columns, WIDTH, SPLIT, TILE)
    store(o, rows, value_columns, load(v, rows, value_columns).to(tl.float32) + sums)


@triton.jit(do_not_specialize=NUMBERS)
def products_kernel(
    query, key, grad, sums, saved, q_strides, k_strides, e_strides, heads, tokens, splits, rows_of_split,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The summand of F = MᵀE from each part of each matrix, (matrices, splits, 2d, d_value)."""
    ROWS: tl.constexpr = TILE[0]
    PART: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    BLOCKS: tl.constexpr = COLUMNS // PART
    part = tl.program_id(0) // BLOCKS
    lefts, columns = tl.program_id(0) % BLOCKS * PART + tl.arange(0, PART), tl.arange(0, VALUE_COLUMNS)
    i, split = part // splits, part % splits
    q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
    e, kept = head(grad, e_strides, i, heads, tokens, VALUE_WIDTH), saved_matrices(saved, i, WIDTH, VALUE_WIDTH)
    q_e = tl.zeros((PART, VALUE_COLUMNS), tl.float32)
    k_e = q_e
    for row in range(split * rows_of_split, tl.minimum(tokens, (split + 1) * rows_of_split), ROWS):
        rows = row + tl.arange(0, ROWS)
        q_tile, k_tile = balanced(q, k, kept, rows, lefts, WIDTH)
        e_tile = load(e, rows, columns)
        q_e = product(q_e, tl.trans(q_tile), e_tile, SPLIT)
        k_e = product(k_e, tl.trans(k_tile), e_tile, SPLIT)
    own, rest = matrix(slice_of(sums, part, 2 * WIDTH * VALUE_WIDTH), WIDTH, VALUE_WIDTH)
    store(own, lefts, columns, q_e)
    own, _ = matrix(rest, WIDTH, VALUE_WIDTH)
    store(own, lefts, columns, k_e)


@triton.jit(do_not_specialize=NUMBERS)
def apply_backward_kernel(
    query, key, value, grad, grad_query, grad_key, grad_value, saved, a2s, a3s,
    q_strides, k_strides, v_strides, e_strides, gq_strides, gk_strides, gv_strides, heads, tokens, splits,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """grad V = E + M A₂, and of grad M = E A₁ᵀ + V A₂ᵀ + M A₃ the gradients of Q and K; a tile of rows a program.

    The chain rule through G and X gives A₁ = T, A₂ = grad X and A₃ = grad G + (grad G)ᵀ.
    """
    ROWS: tl.constexpr = TILE[0]
    PART: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    i, rows = tl.program_id(0) // splits, tl.program_id(0) % splits * ROWS + tl.arange(0, ROWS)
    q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
    v, e = head(value, v_strides, i, heads, tokens, VALUE_WIDTH), head(grad, e_strides, i, heads, tokens, VALUE_WIDTH)
    kept = saved_matrices(saved, i, WIDTH, VALUE_WIDTH)
    a1 = kept[2]
    a2, _ = matrix(slice_of(a2s, i, 2 * WIDTH * VALUE_WIDTH), 2 * WIDTH, VALUE_WIDTH)
    a3, _ = matrix(slice_of(a3s, i, 4 * WIDTH * WIDTH), 2 * WIDTH, 2 * WIDTH)
    value_columns, columns, one = tl.arange(0, VALUE_COLUMNS), tl.arange(0, COLUMNS), tl.arange(0, 1)
    sums = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    sums = times(sums, q, k, kept, a2, rows, value_columns, WIDTH, SPLIT, TILE)
    grad_v = head(grad_value, gv_strides, i, heads, tokens, VALUE_WIDTH)
    store(grad_v, rows, value_columns, load(e, rows, value_columns).to(tl.float32) + sums)
    grad_q = tl.zeros((ROWS, COLUMNS), tl.float32)
    grad_k = grad_q
    for start in range(0, VALUE_WIDTH, PART):
        inner = start + tl.arange(0, PART)
        e_tile, v_tile = load(e, rows, inner), load(v, rows, inner)
        grad_q = product(grad_q, e_tile, load(transpose(a1), inner, columns), SPLIT)
        grad_k = product(grad_k, e_tile, load(transpose(a1), inner, columns + WIDTH), SPLIT)
        grad_q = product(grad_q, v_tile, load(transpose(a2), inner, columns), SPLIT)
        grad_k = product(grad_k, v_tile, load(transpose(a2), inner, columns + WIDTH), SPLIT)
    grad_q = times(grad_q, q, k, kept, a3, rows, columns, WIDTH, SPLIT, TILE)
    grad_k = times(grad_k, q, k, kept, a3, rows, columns + WIDTH, WIDTH, SPLIT, TILE)
    gamma, sigma = transpose(kept[0]), transpose(kept[1])
    grad_q, grad_k = load(sigma, one, columns) * grad_q, load(sigma, one, columns + WIDTH) * grad_k
    gq, gk = head(grad_query, gq_strides, i, heads, tokens, WIDTH), head(grad_key, gk_strides, i, heads, tokens, WIDTH)
    store(gq, rows, columns, grad_q - load(gamma, one, columns + WIDTH) * grad_k)
    store(gk, rows, columns, grad_k - load(gamma, one, columns) * grad_q)
