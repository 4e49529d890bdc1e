"""Orthogonal attention by "exact" in bfloat16 on CUDA, a program for each head of any number of tokens: one launch each way.

With M = [Q, K], G = MᵀM, Z = c J G and Y = J MᵀV, the output is V + c M T with T = Σ Zᵏ Y / (k + 1)!. A first loop over the
tokens sums G and (MᵀV)ᵀ in registers. The terms of Tᵀ stay in registers too, each the left operand of its product with Zᵀ in
shared memory, so that no product waits for memory. The sum ends with the first term that no longer matters: each head has a
degree of its own. A second loop reads the tokens again and writes the output.

One product of bfloat16 a term leaves an error near the rounding of the output up to a ‖Z‖_F of MOST_NORM, or where no row of
|Z| sums to more than half of it: that bounds ‖Z‖₂ where tokens are many and independent. A head that asks for more gets a
`state` of 0 and is left to stepped.py; all others get 1. Matrices of WIDTH columns are padded to D in registers.
"""

import triton
import triton.language as tl

from osa.kernels.tiles import split

D = tl.constexpr(64)  # columns of query, key and value in registers
SIZE = tl.constexpr(128)  # columns of M
ENTRIES = tl.constexpr(8192)  # entries of a term, (D, SIZE)
MOST = tl.constexpr(11)  # terms, which end near the norm of a step of stepped.py
MOST_NORM = tl.constexpr(16.0)  # ‖Z‖_F, or twice the largest sum of a row of |Z|, up to which one product a term suffices
SCRATCH = tl.constexpr(23 * 8192)  # entries of a backward program's scratch: s_k and t_k of MOST terms, and Y
EPS = tl.constexpr(2.0**-6)  # share of the output below which a term ends the sum: a quarter of the output's rounding


@triton.jit
def halves(x):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def joined(left, right):
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def times_jt(x):
    """X Jᵀ = [X₂, −X₁]."""
    left, right = halves(x)
    return joined(right, -left)


@triton.jit
def load_m(query, key, row_stride, rows, tokens, WIDTH: tl.constexpr):
    """Rows of M = [Q, K], by copies of 16 bytes: the pointers of both halves are those of one matrix with a gap."""
    columns = tl.arange(0, SIZE)
    gap = (key.to(tl.int64) - query.to(tl.int64)) // 2 - D  # entries
    at = query + tl.where(columns < D, columns, columns + gap)[None, :] + rows[:, None] * row_stride
    at = tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 8))
    mask = (rows < tokens)[:, None]
    if WIDTH < D:
        mask = mask & (columns % D < WIDTH)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def rows_at(pointer, row_stride, rows):
    return pointer + tl.arange(0, D)[None, :] + rows[:, None] * row_stride


@triton.jit
def inside(rows, tokens, WIDTH: tl.constexpr):
    mask = (rows < tokens)[:, None]
    if WIDTH < D:
        mask = mask & (tl.arange(0, D) < WIDTH)[None, :]
    return mask


@triton.jit
def tile_of(pointer, row_stride, rows, tokens, WIDTH: tl.constexpr):
    return tl.load(rows_at(pointer, row_stride, rows), mask=inside(rows, tokens, WIDTH), other=0.0)


@triton.jit
def first_of(i, heads, strides):
    """Entries of a tensor before those of a head."""
    return (i // heads).to(tl.int64) * strides[0] + (i % heads).to(tl.int64) * strides[1]


@triton.jit
def scale_of(scale, head):
    """c of a head, or for 0 a tiny number with the same output: the gradient of c is divided by c."""
    c = tl.load(scale + head).to(tl.float32)
    return tl.where(c == 0, 1e-30, c)


@triton.jit
def gram_and_sums(q, k, v, row_stride, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """G, (SIZE, SIZE), and (MᵀV)ᵀ, (D, SIZE)."""
    gram, sums = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((D, SIZE), tl.float32)
    for start in tl.range(0, tokens, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        m, value = load_m(q, k, row_stride, rows, tokens, WIDTH), tile_of(v, row_stride, rows, tokens, WIDTH)
        gram = tl.dot(tl.trans(m), m, gram)
        sums = tl.dot(tl.trans(value), m, sums)
    return gram, sums


@triton.jit
def products(q, k, e, row_stride, e_stride, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """Fᵀ, (D, SIZE)."""
    f = tl.zeros((D, SIZE), tl.float32)
    for start in tl.range(0, tokens, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        e_rows = tile_of(e, e_stride, rows, tokens, WIDTH)
        f = tl.dot(tl.trans(e_rows), load_m(q, k, row_stride, rows, tokens, WIDTH), f)
    return f


@triton.jit
def term_at(base):
    """Pointers to a matrix of D rows and SIZE columns."""
    return base + tl.arange(0, D)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def sum_terms(gram, sums, c, terms, KEEP: tl.constexpr):
    """Tᵀ, Zᵀ, the number of terms that follow Y, and whether they and one product for each suffice.

    A term changes the output by |c M Zᵏ Y / (k + 1)!| ≤ c ‖M‖₂ |Zᵏ Y| / (k + 1)!, and ‖V‖_F ≥ ‖Y‖_F / ‖M‖₂; ‖G‖_F stands for
    ‖M‖₂². KEEP stores Y and all terms but the last, of a head that they suffice for.
    """
    gram *= c
    total = c * times_jt(sums)
    norm = tl.sqrt(tl.sum(gram * gram))
    factor = EPS / tl.maximum(norm, 1e-9)
    factor, least, size, degree = factor * factor, tl.full([], 0.0, tl.float32), tl.full([], 1.0, tl.float32), 0
    fits = norm <= MOST_NORM
    if not KEEP:
        fits = fits | (tl.sum(tl.where(tl.sum(tl.abs(gram), 1) <= MOST_NORM / 2, 0, 1)) == 0)
        size = tl.where(fits, 1.0, 0.0)
    term, z = total, times_jt(gram).to(tl.bfloat16)
    if KEEP:
        tl.store(terms + 2 * MOST * ENTRIES, term.to(tl.bfloat16))
    for k in range(MOST):
        if size > least:  # no `while`, which Triton 3.6 does not compile, and one place for the norm, or registers spill
            size = tl.sum(term * term)
            least = tl.where(k == 0, factor * size, least)
            if size > least:
                degree += 1
                rounded = term.to(tl.bfloat16)
                if KEEP:
                    tl.store(terms + k * ENTRIES, rounded)
                term = tl.dot(rounded, z) * (1.0 / (k + 2))
                total += term
    return total, z, degree, fits & (size <= least)  # False where anything is NaN


@triton.jit
def apply(
    q, k, v, output, row_stride, out_stride, tokens, high, low, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Stores V + M T, given Tᵀ in two parts."""
    t, t_low = tl.trans(high), tl.trans(low)
    for start in tl.range(0, tokens, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        m = load_m(q, k, row_stride, rows, tokens, WIDTH)
        out = tl.dot(m, t_low, tl.dot(m, t))
        out += tile_of(v, row_stride, rows, tokens, WIDTH).to(tl.float32)
        tl.store(rows_at(output, out_stride, rows), out.to(tl.bfloat16), mask=inside(rows, tokens, WIDTH))


@triton.jit(do_not_specialize=["heads", "tokens"])
def forward_kernel(
    query, key, value, output, scale, state, strides, out_strides, heads, tokens,
    WIDTH: tl.constexpr, GRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, GRAM_STAGES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The output of each head that one product a term suffices for, and its `state`.

    Query, key and value have the same strides, multiples of 8, and adjacent columns.
    """
    i = tl.program_id(0)
    first = first_of(i, heads, strides)
    q, k, v, c = query + first, key + first, value + first, scale_of(scale, i)
    gram, sums = gram_and_sums(q, k, v, strides[2], tokens, WIDTH, GRAM_ROWS, GRAM_STAGES)
    total, _, _, suffices = sum_terms(gram, sums, c, state, False)
    tl.store(state + i, tl.where(suffices, 1.0, 0.0))
    if suffices:
        high, low = split(total)
        out = output + first_of(i, heads, out_strides)
        apply(q, k, v, out, strides[2], out_strides[2], tokens, high, low, WIDTH, ROWS, STAGES)


@triton.jit
def adjoint(f, t, z, degree, c, terms):
    """The gradient of c, A₂ᵀ and A₃, as in `backward_kernel`, given Fᵀ and what `sum_terms` found and kept."""
    tl.debug_barrier()  # waits: other threads have stored the terms
    gradient = tl.sum(f * (tl.dot(t, z) + tl.load(terms + 2 * MOST * ENTRIES).to(tl.float32))) / c
    factors = terms + MOST * ENTRIES
    f = -c * times_jt(f)
    u = f
    for j in range(degree):
        k = degree - 1 - j
        s = (u * (1.0 / (k + 2))).to(tl.bfloat16)
        tl.store(factors + k * ENTRIES, s)
        u = f - tl.dot(s, z)
    a2 = u.to(tl.bfloat16)
    tl.debug_barrier()
    product = tl.zeros((SIZE, SIZE), tl.float32)
    for k in tl.range(0, degree, num_stages=2):
        product = tl.dot(tl.trans(tl.load(factors + k * ENTRIES)), tl.load(terms + k * ENTRIES), product)
    half = product.to(tl.bfloat16)
    return gradient, a2, (half.to(tl.float32) + tl.trans(half).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def apply_backward(
    q, k, v, e, grad_query, grad_key, grad_value, row_stride, e_stride, grad_stride, tokens, t, a2, a3,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of Q, K and V."""
    for start in tl.range(0, tokens, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        m = load_m(q, k, row_stride, rows, tokens, WIDTH)
        v_rows, e_rows = tile_of(v, row_stride, rows, tokens, WIDTH), tile_of(e, e_stride, rows, tokens, WIDTH)
        grad_m = tl.dot(e_rows, t)
        grad_m = tl.dot(v_rows, a2, grad_m)
        grad_m = tl.dot(m, a3, grad_m)
        grad_q, grad_k = halves(grad_m)
        mask = inside(rows, tokens, WIDTH)
        tl.store(rows_at(grad_query, grad_stride, rows), grad_q.to(tl.bfloat16), mask=mask)
        tl.store(rows_at(grad_key, grad_stride, rows), grad_k.to(tl.bfloat16), mask=mask)
        grad_v = tl.dot(m, tl.trans(a2)) + e_rows.to(tl.float32)
        tl.store(rows_at(grad_value, grad_stride, rows), grad_v.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def backward_kernel(
    query, key, value, grad, grad_query, grad_key, grad_value, scale, grad_scale, state, scratch,
    strides, e_strides, grad_strides, count, heads, tokens,
    WIDTH: tl.constexpr, GRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, GRAM_STAGES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of Q, K, V and c of each head whose `state` is 1, from that of the output, E.

    With t_0 = Y, t_{k+1} = Z t_k / (k + 2), T = Σ t_k and F = MᵀE, u = c Fᵀ J and then for k downwards s_k = u / (k + 2) and
    u ← c Fᵀ J − s_k Zᵀ. So A₂ = grad X = uᵀ, grad G = c Σ s_kᵀ t_kᵀ and A₃ = grad G + (grad G)ᵀ, and

        grad V = E + M A₂,        grad M = c E Tᵀ + V A₂ᵀ + M A₃,        grad c = ⟨F, e^Z Y⟩ = ⟨F, Y + Z T⟩.

    A program takes one head after another. All gradients have the same strides. `scratch` holds a program's t_k,
    s_k and Y, (D, SIZE) each, which stay in the caches.
    """
    terms = term_at(scratch + tl.program_id(0).to(tl.int64) * SCRATCH)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        if tl.load(state + i) == 1.0:
            first, place = first_of(i, heads, strides), first_of(i, heads, grad_strides)
            q, k, v, e = query + first, key + first, value + first, grad + first_of(i, heads, e_strides)
            c = scale_of(scale, i)
            gram, sums = gram_and_sums(q, k, v, strides[2], tokens, WIDTH, GRAM_ROWS, GRAM_STAGES)
            total, z, degree, _ = sum_terms(gram, sums, c, terms, True)
            t = total.to(tl.bfloat16)
            f = products(q, k, e, strides[2], e_strides[2], tokens, WIDTH, GRAM_ROWS, 2)
            gradient, a2, a3 = adjoint(f, t, z, degree, c, terms)
            tl.store(grad_scale + i, gradient.to(grad_scale.dtype.element_ty))
            gq, gk, gv = grad_query + place, grad_key + place, grad_value + place
            strides_of_rows = strides[2], e_strides[2], grad_strides[2]
            apply_backward(q, k, v, e, gq, gk, gv, *strides_of_rows, tokens, t, a2, a3, WIDTH, ROWS, STAGES)
            tl.debug_barrier()  # waits: the next head's terms take the place of these
