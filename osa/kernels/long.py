"""Orthogonal attention of long sequences on CUDA, by two passes over query, key and value, each by many programs a matrix.

With M = [Q, K], the first pass has G = MᵀM and X = MᵀV, T is that of osa/kernels/mixing.py, and the second pass V + M T:

    gram_kernel    partial sums of G and X, for each part of a sequence
    reduce_kernel  their sums, in a fixed order; and the part again where those have lost digits
    mix_kernel     T, a block of columns a program
    apply_kernel   V + M T

M is balanced as `osa.linalg.balanced` does it, M T = M diag(σ) sheared by γ, with a T found from G, which costs no pass: of
each pair of columns the shorter one takes off its projection on the longer. Where little is left of it, the digits of G are
lost, and the sums are taken again of the sheared columns.
"""

import triton
import triton.language as tl

from osa.kernels.mixing import LOST, is_balanced, mixing
from osa.kernels.rows import product, saved_matrices, sheared, times
from osa.kernels.tiles import columns_of, copy, diagonal, head, load, matrix, slice_of, store, transpose

NUMBERS = ["count", "heads", "tokens", "splits", "rows_of_split", "size"]
LEAST = tl.constexpr(2.0**-46)  # of the larger square norm
KEPT = tl.constexpr(2.0**-5)  # of a column's square norm, below which float32 has lost five bits of what is left


@triton.jit
def _gram(sums, q, k, v, start, stop, lefts, shear, WIDTH, VALUE_WIDTH, SHEARED, SPLIT, TILE: tl.constexpr):
    """sums ← QᵀQ, QᵀK, KᵀK, QᵀV and KᵀV of the rows from start to stop, for the columns `lefts` of the left factor.

    Returns the square norms of these columns of Q and K, and the inner products of their pairs.
    """
    ROWS: tl.constexpr = TILE[0]
    PART: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    columns, value_columns = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
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
    block, sums = matrix(sums, WIDTH, WIDTH)
    store(block, lefts, columns, q_q)
    block, sums = matrix(sums, WIDTH, WIDTH)
    store(block, lefts, columns, q_k)
    block, sums = matrix(sums, WIDTH, WIDTH)
    store(block, lefts, columns, k_k)
    block, sums = matrix(sums, WIDTH, VALUE_WIDTH)
    store(block, lefts, value_columns, q_v)
    block, sums = matrix(sums, WIDTH, VALUE_WIDTH)
    store(block, lefts, value_columns, k_v)
    same = lefts[:, None] == columns[None, :]
    q_q, k_k, q_k = tl.where(same, q_q, 0.0), tl.where(same, k_k, 0.0), tl.where(same, q_k, 0.0)
    return tl.sum(q_q, axis=1), tl.sum(k_k, axis=1), tl.sum(q_k, axis=1)


@triton.jit(do_not_specialize=NUMBERS)
def gram_kernel(
    query, key, value, sums, pairs, q_strides, k_strides, v_strides, heads, tokens, splits, rows_of_split,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums of each part of each matrix, (matrices, splits + 1, 3d² + 2d·d_value), and the pairs', (…, splits, 3, d)."""
    PART: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    BLOCKS: tl.constexpr = COLUMNS // PART
    part = tl.program_id(0) // BLOCKS
    lefts = tl.program_id(0) % BLOCKS * PART + tl.arange(0, PART)
    i, split = part // splits, part % splits
    q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
    v = head(value, v_strides, i, heads, tokens, VALUE_WIDTH)
    own = slice_of(sums, part + i, 3 * WIDTH * WIDTH + 2 * WIDTH * VALUE_WIDTH)
    start, stop = split * rows_of_split, tl.minimum(tokens, (split + 1) * rows_of_split)
    q_q, k_k, q_k = _gram(own, q, k, v, start, stop, lefts, q, WIDTH, VALUE_WIDTH, False, SPLIT, TILE)
    own_pairs, _ = matrix(slice_of(pairs, part, 3 * WIDTH), WIDTH, 3)
    store(own_pairs, lefts, tl.arange(0, 1), q_q[:, None])
    store(own_pairs, lefts, 1 + tl.arange(0, 1), k_k[:, None])
    store(own_pairs, lefts, 2 + tl.arange(0, 1), q_k[:, None])


@triton.jit(do_not_specialize=NUMBERS)
def reduce_kernel(
    query, key, value, sums, pairs, shears, q_strides, k_strides, v_strides, heads, tokens, splits, rows_of_split,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, METHOD: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """γ, and the sums of all parts behind them; or the parts anew, sheared, where a pair's columns are nearly multiples."""
    PART: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    LENGTH: tl.constexpr = 3 * WIDTH * WIDTH + 2 * WIDTH * VALUE_WIDTH
    part = tl.program_id(0)
    i, split = part // splits, part % splits
    columns, one = tl.arange(0, COLUMNS), tl.arange(0, 1)
    a = tl.zeros((COLUMNS, 1), tl.float32)
    b = a
    is_lost = tl.full([], 0, tl.int32)
    if METHOD == "exact":
        q_q, k_k, q_k = a, a, a
        for each in range(splits):
            own_pairs, _ = matrix(slice_of(pairs, i * splits + each, 3 * WIDTH), WIDTH, 3)
            q_q += load(own_pairs, columns, one)
            k_k += load(own_pairs, columns, 1 + one)
            q_k += load(own_pairs, columns, 2 + one)
        longer, shorter = tl.maximum(q_q, k_k), tl.minimum(q_q, k_k)
        ratio = q_k / tl.where(longer > 0, longer, 1.0)
        a, b = tl.where(k_k >= q_q, ratio, 0.0), tl.where(k_k >= q_q, 0.0, ratio)
        is_lost = tl.max((shorter - ratio * q_k < KEPT * shorter).to(tl.int32))
    shear, _ = matrix(slice_of(shears, part, 2 * WIDTH + 1), 2 * WIDTH + 1, 1)
    store(shear, tl.where(columns < WIDTH, columns, 2 * WIDTH + 1), one, a)
    store(shear, tl.where(columns < WIDTH, columns + WIDTH, 2 * WIDTH + 1), one, b)
    store(shear, 2 * WIDTH + one, one, is_lost + tl.zeros((1, 1), tl.float32))
    tl.debug_barrier()
    if is_lost:
        q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
        v = head(value, v_strides, i, heads, tokens, VALUE_WIDTH)
        start, stop = split * rows_of_split, tl.minimum(tokens, (split + 1) * rows_of_split)
        own = slice_of(sums, part + i, LENGTH)
        for left in range(0, COLUMNS, PART):
            lefts = left + tl.arange(0, PART)
            _gram(own, q, k, v, start, stop, lefts, shear, WIDTH, VALUE_WIDTH, True, SPLIT, TILE)
    else:
        result, _ = matrix(slice_of(sums, (i + 1) * (splits + 1) - 1, LENGTH), 1, LENGTH)
        for first in range(split * 256, LENGTH, splits * 256):
            entries, total = first + tl.arange(0, 256), tl.zeros((1, 256), tl.float32)
            for each in range(splits):
                own_sums, _ = matrix(slice_of(sums, i * (splits + 1) + each, LENGTH), 1, LENGTH)
                total += load(own_sums, one, entries)
            store(result, one, entries, total)


@triton.jit
def _partner(i, WIDTH: tl.constexpr):
    return tl.where(i < WIDTH, i + WIDTH, i - WIDTH)


@triton.jit
def _entries(sums, rows, columns, WIDTH: tl.constexpr):
    """Entries of G, of which QᵀQ, QᵀK and KᵀK lie one behind the other."""
    row_half, column_half = (rows >= WIDTH).to(tl.int32)[:, None], (columns >= WIDTH).to(tl.int32)[None, :]
    i, j = rows[:, None] - WIDTH * row_half, columns[None, :] - WIDTH * column_half
    first, second = tl.where(row_half > column_half, j, i), tl.where(row_half > column_half, i, j)
    mask = (rows < 2 * WIDTH)[:, None] & (columns < 2 * WIDTH)[None, :]
    offsets = (row_half + column_half) * WIDTH * WIDTH + first * WIDTH + second
    return tl.load(sums[0] + sums[1] + offsets, mask=mask, other=0.0)


@triton.jit(noinline=True)
def _collect(
    g, x, sigma, sums, number, gamma, column,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, METHOD: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """G and a block of columns of X of the balanced M from `number` sums, of columns that γ is still to shear; and σ."""
    ROWS: tl.constexpr = TILES[0]
    LENGTH: tl.constexpr = 3 * WIDTH * WIDTH + 2 * WIDTH * VALUE_WIDTH
    STEP: tl.constexpr = TILES[2]
    rows, one = tl.arange(0, ROWS), tl.arange(0, 1)
    others, by_row = _partner(rows, WIDTH), load(gamma, rows, one)
    for first in range(0, g[4], STEP):
        columns, total = first + tl.arange(0, STEP), tl.zeros((ROWS, STEP), tl.float32)
        beside, by_column = _partner(columns, WIDTH), load(transpose(gamma), one, columns)
        for each in range(number):
            own = slice_of(sums, each, LENGTH)
            total += _entries(own, rows, columns, WIDTH) - by_row * _entries(own, others, columns, WIDTH)
            both = _entries(own, rows, beside, WIDTH) - by_row * _entries(own, others, beside, WIDTH)
            total -= by_column * both
        store(g, rows, columns, total)
    tl.debug_barrier()
    sign, scales = tl.where(rows < WIDTH, 1.0, -1.0)[:, None], tl.full((ROWS, 1), 1.0, tl.float32)
    if METHOD == "exact":
        norm, other = load(diagonal(g), rows, one), load(diagonal(g), others, one)
        least = LEAST * (norm + other) + 1e-37  # bounds the ratio where one is a multiple of the other
        exponent = sign * 0.25 * (tl.log2(tl.maximum(other, least)) - tl.log2(tl.maximum(norm, least)))
        scales = tl.exp2(sign * tl.floor(exponent + 0.5))
    store(sigma, rows, one, scales)
    for first in range(0, x[4], STEP):
        columns, total = first + tl.arange(0, STEP), tl.zeros((ROWS, STEP), tl.float32)
        for each in range(number):
            own, _ = matrix(slice_of(sums + 3 * WIDTH * WIDTH, each, LENGTH), 2 * WIDTH, VALUE_WIDTH)
            total += load(own, rows, column + columns) - by_row * load(own, others, column + columns)
        store(x, rows, columns, scales * total)
    tl.debug_barrier()
    for first in range(0, g[4], STEP):
        columns = first + tl.arange(0, STEP)
        store(g, rows, columns, scales * load(g, rows, columns) * load(transpose(sigma), one, columns))
    tl.debug_barrier()


@triton.jit(do_not_specialize=NUMBERS)
def mix_kernel(
    sums, shears, scale, saved, scratch, c_strides, count, heads, splits, size, scratch_size, epsilon,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, METHOD: tl.constexpr, ITERATIONS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A block of columns of T, and what else is kept of a matrix: see `saved_matrices`."""
    ROWS: tl.constexpr = TILES[0]
    LENGTH: tl.constexpr = 3 * WIDTH * WIDTH + 2 * WIDTH * VALUE_WIDTH
    BLOCK: tl.constexpr = TILES[1]
    BLOCKS: tl.constexpr = (VALUE_WIDTH + BLOCK - 1) // BLOCK
    SIZE: tl.constexpr = 2 * WIDTH
    g, own = matrix(slice_of(scratch, tl.program_id(0), scratch_size), SIZE, SIZE)
    x, own = matrix(own, SIZE, BLOCK)
    t, own = matrix(own, SIZE, BLOCK)
    gamma, own = matrix(own, SIZE, 1)
    sigma, own = matrix(own, SIZE, 1)
    rows, one = tl.arange(0, ROWS), tl.arange(0, 1)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        i, column = item // BLOCKS, item % BLOCKS * BLOCK
        kept = saved_matrices(saved, i, size, WIDTH, VALUE_WIDTH)
        shear, behind = matrix(slice_of(shears, i * splits, SIZE + 1), SIZE, 1)
        is_lost = tl.load(behind[0] + behind[1])
        store(gamma, rows, one, tl.where(is_lost > 0, 0.0, load(shear, rows, one)))
        tl.debug_barrier()
        first = i * (splits + 1) + tl.where(is_lost > 0, 0, splits)
        parts, number = slice_of(sums, first, LENGTH), tl.where(is_lost > 0, splits, 1)
        _collect(g, x, sigma, parts[0], number, gamma, column, WIDTH, VALUE_WIDTH, METHOD, TILES)
        c = tl.load(head(scale, c_strides, i, heads, 1, 1)[0]).to(tl.float32)
        if METHOD == "exact":
            c = tl.where(is_balanced(g, c, LOST, own, TILES), c, float("nan"))
            tl.debug_barrier()  # `mixing` overwrites what that has read
        mixing(t, g, x, c, epsilon, own, METHOD, ITERATIONS, TILES)
        width = tl.minimum(BLOCK, VALUE_WIDTH - column)
        copy(columns_of(kept[4], column, width), t, 1.0, TILES)
        copy(columns_of(kept[3], column, width), x, 1.0, TILES)
        if column == 0:
            copy(kept[0], shear, 1.0, TILES)
            copy(kept[1], sigma, 1.0, TILES)
            copy(kept[2], g, 1.0, TILES)
            tl.store(kept[5], c)


@triton.jit(do_not_specialize=NUMBERS)
def apply_kernel(
    query, key, value, output, saved, q_strides, k_strides, v_strides, o_strides, heads, tokens, size,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """output = V + M T, a tile of rows a program."""
    ROWS: tl.constexpr = TILE[0]
    VALUE_COLUMNS: tl.constexpr = TILE[3]
    tiles = tl.cdiv(tokens, ROWS)
    i, rows = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
    v, o = head(value, v_strides, i, heads, tokens, VALUE_WIDTH), head(output, o_strides, i, heads, tokens, VALUE_WIDTH)
    kept = saved_matrices(saved, i, size, WIDTH, VALUE_WIDTH)
    value_columns, sums = tl.arange(0, VALUE_COLUMNS), tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    sums = times(sums, q, k, kept, kept[4], rows, value_columns, WIDTH, SPLIT, TILE)
    store(o, rows, value_columns, load(v, rows, value_columns).to(tl.float32) + sums)
