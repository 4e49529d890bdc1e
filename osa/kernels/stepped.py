"""The heads that osa/kernels/fused.py leaves, for which one product of bfloat16 a term does not suffice.

M is balanced as `osa.linalg.balanced` does it: of each pair of columns the shorter one takes off its projection on the
other, and powers of two make them alike. Products have 16 bits, by three of bfloat16. e^Z is taken in n steps of norm 3,

    Y_0 = Y,    Y_{j+1} = e^{Z/n} Y_j,    T = 1/n Σ_j φ₁(Z/n) Y_j

(Al-Mohy & Higham 2011), with the sums Σ t_k of t_k = (Z/n)ᵏ Y_j / (k + 1)! for φ₁ and Σ (k + 1) t_k for e^{Z/n}: no power of
Z, and nothing kept. Backward, Y_j = e^{−Z/n} Y_{j+1} comes from the last, as e^{Z/n} keeps norms where M is balanced.

A program has scratch memory, through which matrices go where their columns change places: G, which grad G replaces, two of
(D, SIZE), two vectors, and the t_k of a step.
"""

import triton
import triton.language as tl

from osa.kernels.fused import ENTRIES, SIZE, D, inside, rows_at, rows_of, rows_of_m, scale_of

RADIUS = tl.constexpr(3.0)  # of a step: its terms stay below 3³/4! = 1.2
MOST_TERMS = tl.constexpr(18)  # of a step: 3¹⁸/19! is below 2⁻²⁸
TAIL = tl.constexpr(2.0**-14)  # of the output, below which terms end the sum of a step
LIMIT = tl.constexpr(16384.0)  # ‖Z‖₂ beyond which these products hold no digit of e^Z
LOST = tl.constexpr(2.0**10)  # imbalance from which on they have none
LEAST = tl.constexpr(2.0**-46)  # of a pair's square norms, to which the smaller one is raised


SCRATCH = tl.constexpr(23 * 8192)  # entries of a program's: five terms' worth, and MOST_TERMS


@triton.jit
def split(x):
    """A high and a low part in bfloat16, 16 bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def times(x, high, low):
    """X (high + low), by all products but that of the low parts."""
    x_high, x_low = split(x)
    return tl.dot(x_high, high, tl.dot(x_high, low, tl.dot(x_low, high)))


@triton.jit
def places(ROWS: tl.constexpr):
    return tl.arange(0, ROWS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def keep(x, pointer):
    """Where other threads read it."""
    tl.debug_barrier()  # what it overwrites has been read
    tl.store(pointer + places(x.shape[0]), x)
    tl.debug_barrier()


@triton.jit
def times_jt(pointer, ROWS: tl.constexpr):
    """X Jᵀ = [X₂, −X₁] of an X that is kept."""
    columns = tl.arange(0, SIZE)[None, :]
    at = tl.arange(0, ROWS)[:, None] * SIZE + (columns + D) % SIZE
    return tl.where(columns < D, 1.0, -1.0) * tl.load(pointer + at)


@triton.jit
def balance(q, k, row_stride, tokens, kept, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """γ and σ of each column: how much of its partner it takes off, 0 for the longer one of a pair, and a power of two."""
    own, other, both = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    for start in range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        m = rows_of_m(q, k, row_stride, rows, tokens, WIDTH).to(tl.float32)
        partner = rows_of_m(k, q, row_stride, rows, tokens, WIDTH).to(tl.float32)
        own, other, both = own + tl.sum(m * m, 0), other + tl.sum(partner * partner, 0), both + tl.sum(m * partner, 0)
    columns = tl.arange(0, SIZE)
    is_shorter = (other > own) | ((other == own) & (columns < D))
    ratio = both / tl.maximum(tl.maximum(own, other), 1e-37)
    shear, partners = tl.where(is_shorter, ratio, 0.0), tl.where(is_shorter, 0.0, ratio)
    own, other = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    for start in range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        m = rows_of_m(q, k, row_stride, rows, tokens, WIDTH).to(tl.float32)
        partner = rows_of_m(k, q, row_stride, rows, tokens, WIDTH).to(tl.float32)
        m, partner = m - shear[None, :] * partner, partner - partners[None, :] * m
        own, other = own + tl.sum(m * m, 0), other + tl.sum(partner * partner, 0)
    least = LEAST * (own + other) + 1e-37  # bounds the ratio where one is a multiple of the other
    exponent = 0.25 * (tl.log2(tl.maximum(other, least)) - tl.log2(tl.maximum(own, least)))
    sigma = tl.exp2(tl.where(columns < D, tl.floor(exponent + 0.5), -tl.floor(0.5 - exponent)))
    tl.store(kept + columns, shear)
    tl.store(kept + SIZE + columns, sigma)
    return shear, sigma


@triton.jit
def balanced(q, k, row_stride, rows, tokens, shear, sigma, WIDTH: tl.constexpr):
    """Rows of M, balanced, in float32."""
    m = rows_of_m(q, k, row_stride, rows, tokens, WIDTH).to(tl.float32)
    partner = rows_of_m(k, q, row_stride, rows, tokens, WIDTH).to(tl.float32)
    return sigma[None, :] * (m - shear[None, :] * partner)


@triton.jit
def products_of(x, q, k, x_stride, row_stride, tokens, shear, sigma, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """(MᵀX)ᵀ, (D, SIZE), of the balanced M."""
    sums = tl.zeros((D, SIZE), tl.float32)
    for start in range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        x_rows = tl.trans(rows_of(x, x_stride, rows, tokens, WIDTH))
        high, low = split(balanced(q, k, row_stride, rows, tokens, shear, sigma, WIDTH))
        sums = tl.dot(x_rows, high, tl.dot(x_rows, low, sums))
    return sums


@triton.jit
def gram_of(q, k, row_stride, tokens, shear, sigma, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """G of the balanced M."""
    gram = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        high, low = split(balanced(q, k, row_stride, rows, tokens, shear, sigma, WIDTH))
        gram = tl.dot(tl.trans(high), high, tl.dot(tl.trans(high), low, tl.dot(tl.trans(low), high, gram)))
    return gram


@triton.jit
def steps_of(gram, c, kept):
    """Zᵀ/n in two parts, n, c/n, (TAIL/‖Z‖_F)², and whether no digit is left: c/n is NaN then, or where ‖Z‖₂ is too large.

    ‖Z‖₂ = |c| ‖G‖₂ ≤ |c| (Σλ⁸)^⅛ over the eigenvalues of G, at most 1.9 times as large. φ₁ of a Z that is not normal loses
    digits as `osa.linalg.imbalance` grows.
    """
    keep(gram, kept)
    norm = tl.sqrt(tl.sum(gram * gram))
    unit = (gram / tl.where(norm > 0, norm, 1.0)).to(tl.bfloat16)
    square = tl.dot(unit, unit).to(tl.bfloat16)
    fourth = tl.dot(square, square)
    radius = tl.abs(c) * norm * tl.sqrt(tl.sqrt(tl.sqrt(tl.sum(fourth * fourth))))
    norm *= tl.abs(c)
    z, rows = times_jt(kept, SIZE), tl.arange(0, SIZE)[:, None]
    other = tl.load(kept + (rows + D) % SIZE * SIZE + tl.arange(0, SIZE)[None, :])  # J G, but for signs
    spectrum = -c * c * tl.sum(z * tl.where(rows < D, other, -other))
    is_lost = norm * norm > LOST * tl.maximum(spectrum, 1.0)
    fits = (radius <= LIMIT) & (is_lost == 0)  # NaN does not
    count = tl.maximum(tl.where(fits, tl.ceil(radius / RADIUS), 1.0).to(tl.int32), 1)
    c = tl.where(fits, c / count, float("nan"))
    high, low = split(c * z)
    tail = TAIL / tl.maximum(norm, 1e-9)
    return high, low, count, c, tail * tail, is_lost


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def stepped_forward_kernel(
    query, key, value, output, scale, state, scratch, strides, out_strides, scale_strides, count, heads, tokens,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The output of each head whose `state` is 0, which becomes NaN where no digit is left of the output."""
    square = scratch + tl.program_id(0).to(tl.int64) * SCRATCH
    first_term, vectors = square + 2 * ENTRIES, square + 4 * ENTRIES
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        if tl.load(state + i) == 0.0:
            batch, own = (i // heads).to(tl.int64), (i % heads).to(tl.int64)
            first, place = batch * strides[0] + own * strides[1], batch * out_strides[0] + own * out_strides[1]
            q, k_own, v, o = query + first, key + first, value + first, output + place
            c = scale_of(scale, scale_strides, batch, own)
            shear, sigma = balance(q, k_own, strides[2], tokens, vectors, WIDTH, ROWS)
            gram = gram_of(q, k_own, strides[2], tokens, shear, sigma, WIDTH, ROWS)
            high, low, steps, c, tail, is_lost = steps_of(gram, c, square)
            keep(products_of(v, q, k_own, strides[2], strides[2], tokens, shear, sigma, WIDTH, ROWS), first_term)
            y = times_jt(first_term, D)
            tl.store(state + i, tl.where(is_lost, float("nan"), 0.0))
            total = tl.zeros((D, SIZE), tl.float32)
            for _ in range(steps):
                term, size, least = y, tl.full([], 1.0, tl.float32), tl.full([], 0.0, tl.float32)
                total += term
                for k in range(MOST_TERMS):
                    if size > least:
                        size = tl.sum(term * term)
                        least = tl.where(k == 0, tail * size, least)
                        if size > least:
                            term = times(term, high, low) * (1.0 / (k + 2))
                            total += term
                            y += (k + 2) * term
            t_high, t_low = split(tl.trans(c * total))
            for start in range(0, tokens, ROWS):
                rows = start + tl.arange(0, ROWS)
                out = times(balanced(q, k_own, strides[2], rows, tokens, shear, sigma, WIDTH), t_high, t_low)
                out += rows_of(v, strides[2], rows, tokens, WIDTH).to(tl.float32)
                tl.store(rows_at(o, out_strides[2], rows), out.to(tl.bfloat16), mask=inside(rows, tokens, WIDTH))


@triton.jit
def half_of_gradient(m, v_rows, e_rows, a1, a2, a3, vectors, FIRST: tl.constexpr):
    """Columns from FIRST on of σ (E A₁ᵀ + V A₂ᵀ + M (A₃ + A₃ᵀ))."""
    inner, wide, columns = tl.arange(0, D)[:, None], tl.arange(0, SIZE)[:, None], FIRST + tl.arange(0, D)[None, :]
    high, low = split(tl.load(a3 + wide * SIZE + columns) + tl.load(a3 + columns * SIZE + wide))
    sums = times(m, high, low)
    high, low = split(tl.load(a1 + inner * SIZE + columns))
    sums = tl.dot(e_rows, high, tl.dot(e_rows, low, sums))
    high, low = split(tl.load(a2 + inner * SIZE + columns))
    return tl.load(vectors + SIZE + columns) * tl.dot(v_rows, high, tl.dot(v_rows, low, sums))


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def stepped_backward_kernel(
    query, key, value, grad, grad_query, grad_key, grad_value, scale, grad_scale, state, scratch,
    strides, e_strides, grad_strides, scale_strides, count, heads, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of each head whose `state` is 0 or NaN.

    As in osa/kernels/fused.py, step by step from the last. With y that of Y_{j+1} times J and h = c/n Fᵀ J, the gradient of
    t_k, times J, is u_k = h + (k + 1) y − s_k Zᵀ/n with s_k = u_{k+1} / (k + 2), and u_0 is the y of the step before.
    `scratch` holds a program's t_k.
    """
    square = scratch + tl.program_id(0).to(tl.int64) * SCRATCH
    first_term, other_term, vectors = square + 2 * ENTRIES, square + 3 * ENTRIES, square + 4 * ENTRIES
    terms = square + 5 * ENTRIES + places(D)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        known = tl.load(state + i)
        if known != 1.0:
            batch, own = (i // heads).to(tl.int64), (i % heads).to(tl.int64)
            first, place = batch * strides[0] + own * strides[1], batch * grad_strides[0] + own * grad_strides[1]
            q, k_own, v = query + first, key + first, value + first
            e = grad + batch * e_strides[0] + own * e_strides[1]
            c = scale_of(scale, scale_strides, batch, own) + known
            shear, sigma = balance(q, k_own, strides[2], tokens, vectors, WIDTH, ROWS)
            gram = gram_of(q, k_own, strides[2], tokens, shear, sigma, WIDTH, ROWS)
            high, low, steps, c, tail, _ = steps_of(gram, c, square)
            keep(products_of(v, q, k_own, strides[2], strides[2], tokens, shear, sigma, WIDTH, ROWS), first_term)
            keep(products_of(e, q, k_own, e_strides[2], strides[2], tokens, shear, sigma, WIDTH, ROWS), other_term)
            y = times_jt(first_term, D)
            total = tl.zeros((D, SIZE), tl.float32)
            for _ in range(steps):
                term, size, least = y, tl.full([], 1.0, tl.float32), tl.full([], 0.0, tl.float32)
                total += term
                for k in range(MOST_TERMS):
                    if size > least:
                        size = tl.sum(term * term)
                        least = tl.where(k == 0, tail * size, least)
                        if size > least:
                            term = times(term, high, low) * (1.0 / (k + 2))
                            total += term
                            y += (k + 2) * term
            gradient = tl.sum(tl.load(other_term + places(D)) * y) + 0.0 * c  # NaN where c is
            tl.store(grad_scale + i, gradient.to(grad_scale.dtype.element_ty))
            h = -c * times_jt(other_term, D)
            following, product = tl.zeros((D, SIZE), tl.float32), tl.zeros((SIZE, SIZE), tl.float32)
            for _ in range(steps):
                term, size, least = y, tl.full([], 1.0, tl.float32), tl.full([], 0.0, tl.float32)
                for k in range(MOST_TERMS):
                    if size > least:
                        size = tl.sum(term * term)
                        least = tl.where(k == 0, tail * size, least)
                        if size > least:
                            term = times(term, high, low) * (-1.0 / (k + 2))
                            y += (k + 2) * term
                term, size, least, degree = y, tl.full([], 1.0, tl.float32), tl.full([], 0.0, tl.float32), 0
                for k in range(MOST_TERMS):
                    if size > least:
                        size = tl.sum(term * term)
                        least = tl.where(k == 0, tail * size, least)
                        if size > least:
                            degree += 1
                            tl.store(terms + k * ENTRIES, term)
                            term = times(term, high, low) * (1.0 / (k + 2))
                tl.debug_barrier()
                u = h + (degree + 1) * following
                for j in range(degree):
                    k = degree - 1 - j
                    s = u * (1.0 / (k + 2))
                    t_high, t_low = split(tl.load(terms + k * ENTRIES))
                    s_high, s_low = split(tl.trans(s))
                    product = tl.dot(s_high, t_high, tl.dot(s_high, t_low, tl.dot(s_low, t_high, product)))
                    u = h + (k + 1) * following - times(s, high, low)
                following = u
                tl.debug_barrier()  # before the terms of the next step
            keep(c * total, first_term)
            keep(following, other_term)
            keep(c * product, square)
            wide, narrow = tl.arange(0, SIZE)[:, None], tl.arange(0, D)[None, :]
            a2_high, a2_low = split(tl.load(other_term + narrow * SIZE + wide))
            for start in range(0, tokens, ROWS):
                rows = start + tl.arange(0, ROWS)
                m = balanced(q, k_own, strides[2], rows, tokens, shear, sigma, WIDTH)
                v_rows, e_rows = rows_of(v, strides[2], rows, tokens, WIDTH), rows_of(e, e_strides[2], rows, tokens, WIDTH)
                grad_q = half_of_gradient(m, v_rows, e_rows, first_term, other_term, square, vectors, 0)
                grad_k = half_of_gradient(m, v_rows, e_rows, first_term, other_term, square, vectors, D)
                at, mask = narrow + rows[:, None] * grad_strides[2], inside(rows, tokens, WIDTH)
                grad_v = times(m, a2_high, a2_low) + e_rows.to(tl.float32)
                tl.store(grad_value + place + at, grad_v.to(tl.bfloat16), mask=mask)
                q_shear, k_shear = tl.load(vectors + narrow), tl.load(vectors + D + narrow)
                tl.store(grad_query + place + at, (grad_q - k_shear * grad_k).to(tl.bfloat16), mask=mask)
                tl.store(grad_key + place + at, (grad_k - q_shear * grad_q).to(tl.bfloat16), mask=mask)
            tl.debug_barrier()  # before the next head
