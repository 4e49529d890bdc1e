"""The gradients of osa/kernels/long.py: A₁ to A₄ of osa/kernels/attention.py between two passes over Q, K, V and E.

products_kernel        partial sums of F = MᵀE, for each part of a sequence
mix_backward_kernel    a block of columns of A₁, A₂ and A₄, and what it adds to A₃ and to the gradient of c
apply_backward_kernel  grad V and grad M, once these are summed
"""

import triton
import triton.language as tl

from osa.kernels.long import NUMBERS
from osa.kernels.mixing import mixing_gradients
from osa.kernels.rows import balanced, product, saved_matrices, times
from osa.kernels.tiles import columns_of, copy, head, load, matrix, slice_of, store, transpose


@triton.jit(do_not_specialize=NUMBERS)
def products_kernel(
    query, key, grad, sums, saved, q_strides, k_strides, e_strides, heads, tokens, splits, rows_of_split, size,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The part of F = MᵀE that each part of each matrix makes, (matrices, splits, 2d, d_value)."""
    ROWS: tl.constexpr = TILE[0]
    PART: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    BLOCKS: tl.constexpr = COLUMNS // PART
    part = tl.program_id(0) // BLOCKS
    lefts, columns = tl.program_id(0) % BLOCKS * PART + tl.arange(0, PART), tl.arange(0, VALUE_COLUMNS)
    i, split = part // splits, part % splits
    q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
    e, kept = head(grad, e_strides, i, heads, tokens, VALUE_WIDTH), saved_matrices(saved, i, size, WIDTH, VALUE_WIDTH)
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
def mix_backward_kernel(
    sums, saved, blocks, parts, scratch, count, splits, size, scratch_size, epsilon,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, METHOD: tl.constexpr, ITERATIONS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A block of columns of A₁, A₂ and A₄, and its part of A₃ and of the gradient of c, which are linear in it."""
    ROWS: tl.constexpr = TILES[0]
    BLOCK: tl.constexpr = TILES[1]
    BLOCKS: tl.constexpr = (VALUE_WIDTH + BLOCK - 1) // BLOCK
    SIZE: tl.constexpr = 2 * WIDTH
    x, own = matrix(slice_of(scratch, tl.program_id(0), scratch_size), SIZE, BLOCK)
    f, own = matrix(own, SIZE, BLOCK)
    a1, own = matrix(own, SIZE, BLOCK)
    a2, own = matrix(own, SIZE, BLOCK)
    a4, own = matrix(own, SIZE, BLOCK)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        i, column = item // BLOCKS, item % BLOCKS * BLOCK
        kept = saved_matrices(saved, i, size, WIDTH, VALUE_WIDTH)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for each in range(splits):
            own_sums, _ = matrix(slice_of(sums, i * splits + each, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
            total += load(own_sums, rows, column + columns)
        store(f, rows, columns, total)
        store(x, rows, columns, load(kept[3], rows, column + columns))
        a3, behind = matrix(slice_of(parts, item, SIZE * SIZE + 1), SIZE, SIZE)
        tl.debug_barrier()
        c = tl.load(kept[5])
        grad_c = mixing_gradients(a1, a2, a3, a4, kept[2], x, f, c, epsilon, own, METHOD, ITERATIONS, TILES)
        tl.store(behind[0] + behind[1], grad_c)
        width = tl.minimum(BLOCK, VALUE_WIDTH - column)
        b1, b2, b4 = _blocks(blocks, i, WIDTH, VALUE_WIDTH)
        copy(columns_of(b1, column, width), a1, 1.0, TILES)
        copy(columns_of(b2, column, width), a2, 1.0, TILES)
        copy(columns_of(b4, column, width), a4, 1.0, TILES)


@triton.jit
def _blocks(blocks, i, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """A₁, A₂ and A₄ of one matrix."""
    a1, rest = matrix(slice_of(blocks, i, 6 * WIDTH * VALUE_WIDTH), 2 * WIDTH, VALUE_WIDTH)
    a2, rest = matrix(rest, 2 * WIDTH, VALUE_WIDTH)
    a4, _ = matrix(rest, 2 * WIDTH, VALUE_WIDTH)
    return a1, a2, a4


@triton.jit(do_not_specialize=NUMBERS)
def apply_backward_kernel(
    query, key, value, grad, grad_query, grad_key, grad_value, saved, blocks, a3s,
    q_strides, k_strides, v_strides, e_strides, gq_strides, gk_strides, gv_strides, heads, tokens, size,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """grad V = E + M A₄, and of grad M = E A₁ᵀ + V A₂ᵀ + M A₃ the gradients of Q and K; a tile of rows a program."""
    ROWS: tl.constexpr = TILE[0]
    PART: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    tiles = tl.cdiv(tokens, ROWS)
    i, rows = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
    v, e = head(value, v_strides, i, heads, tokens, VALUE_WIDTH), head(grad, e_strides, i, heads, tokens, VALUE_WIDTH)
    kept = saved_matrices(saved, i, size, WIDTH, VALUE_WIDTH)
    a1, a2, a4 = _blocks(blocks, i, WIDTH, VALUE_WIDTH)
    a3, _ = matrix(slice_of(a3s, i, 4 * WIDTH * WIDTH + 1), 2 * WIDTH, 2 * WIDTH)
    value_columns, columns, one = tl.arange(0, VALUE_COLUMNS), tl.arange(0, COLUMNS), tl.arange(0, 1)
    sums = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    sums = times(sums, q, k, kept, a4, rows, value_columns, WIDTH, SPLIT, TILE)
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
