"""Kernels of "exact" in bfloat16 on CUDA: one program computes a head with any number of tokens.

With M = [Q, K], G = MᵀM, Z = c J G and Y = J MᵀV, the output is V + c M T with T = Σ Zᵏ Y / (k + 1)!. A first loop over the
tokens sums G and (MᵀV)ᵀ. Then the program adds up the terms of Tᵀ until a term is too small to change the output. Terms stay
in registers, so that no product waits for memory. A second loop reads the tokens again and writes the output.

One bfloat16 product per term gives an error near the output's rounding error if ‖Z‖_F ≤ MAX_NORM, or if the largest row sum
of |Z| is at most MAX_NORM / 2. ‖Z‖_F and the row sum are upper bounds on ‖Z‖₂. For many independent tokens, the row sum
is the closer bound. If one of the two conditions holds and MAX_TERMS terms suffice, a head has the state FUSED. Otherwise it
has the state STEPS, and stepped.py computes the head. Matrices of WIDTH columns are padded to D columns in registers.
"""

import triton
import triton.language as tl

from osa.kernels.tiles import high_low

D = tl.constexpr(64)  # query, key and value are each padded to this number of columns in registers
COLUMNS = tl.constexpr(128)  # number of columns of M
ENTRIES = tl.constexpr(8192)  # number of entries of a term, (D, COLUMNS)
MAX_TERMS = tl.constexpr(11)  # maximum number of terms, which suffices if ‖Z‖₂ is at most about `stepped.RADIUS`
# One bfloat16 product per term of the series suffices if ‖Z‖_F, or twice the maximum row sum of |Z|, is at most this number
MAX_NORM = tl.constexpr(16.0)
# Scratch entries of a program of `backward_kernel`: MAX_TERMS matrices t_k, MAX_TERMS matrices s_k, and Y
SCRATCH = tl.constexpr(23 * 8192)
TERM_TOLERANCE = tl.constexpr(2.0**-6)  # the sum ends at a term that changes the output by at most this fraction
# The `state` of a head names the kernel that computes it:
#   FUSED        a kernel of this file, or of parts.py
#   STEPS        a kernel of stepped.py that computes each term with one product
#   SPLIT_STEPS  a kernel of stepped.py that computes each term with three products
#   NaN          the kernel of SPLIT_STEPS. It writes NaN for this head, because no digit would be correct
FUSED, STEPS, SPLIT_STEPS = tl.constexpr(1.0), tl.constexpr(0.0), tl.constexpr(-1.0)


@triton.jit
def halves(b_x):
    """Splits a matrix into the left and the right half of its columns."""
    return tl.split(tl.permute(tl.reshape(b_x, (b_x.shape[0], 2, b_x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def join(b_left, b_right):
    return tl.reshape(tl.permute(tl.join(b_left, b_right), (0, 2, 1)), (b_left.shape[0], 2 * b_left.shape[1]))


@triton.jit
def times_jt(b_x):
    """X Jᵀ = [X₂, −X₁]."""
    b_left, b_right = halves(b_x)
    return join(b_right, -b_left)


@triton.jit
def load_m(p_q, p_k, row_stride, o_rows, tokens, WIDTH: tl.constexpr):
    """Loads rows of M = [Q, K], 16 bytes at a time. Q and K are addressed as one matrix with a gap between them."""
    o_columns = tl.arange(0, COLUMNS)
    o_gap = (p_k.to(tl.int64) - p_q.to(tl.int64)) // 2 - D  # in bfloat16 entries, which take two bytes
    p_m = p_q + tl.where(o_columns < D, o_columns, o_columns + o_gap)[None, :] + o_rows[:, None] * row_stride
    p_m = tl.max_contiguous(tl.multiple_of(p_m, (1, 16)), (1, 8))
    mask = (o_rows < tokens)[:, None]
    if WIDTH < D:
        mask = mask & (o_columns % D < WIDTH)[None, :]
    return tl.load(p_m, mask=mask, other=0.0)


@triton.jit
def p_rows(p_x, row_stride, o_rows):
    return p_x + tl.arange(0, D)[None, :] + o_rows[:, None] * row_stride


@triton.jit
def row_mask(o_rows, tokens, WIDTH: tl.constexpr):
    mask = (o_rows < tokens)[:, None]
    if WIDTH < D:
        mask = mask & (tl.arange(0, D) < WIDTH)[None, :]
    return mask


@triton.jit
def load_rows(p_x, row_stride, o_rows, tokens, WIDTH: tl.constexpr):
    return tl.load(p_rows(p_x, row_stride, o_rows), mask=row_mask(o_rows, tokens, WIDTH), other=0.0)


@triton.jit
def o_head(i_head, heads, strides):
    """Offset of a head in a tensor."""
    return (i_head // heads).to(tl.int64) * strides[0] + (i_head % heads).to(tl.int64) * strides[1]


@triton.jit
def load_scale(scale, i_head):
    """Loads c of a head. Because `adjoint` divides by c, 0 becomes 1e-30, which leaves the output unchanged."""
    c = tl.load(scale + i_head).to(tl.float32)
    return tl.where(c == 0, 1e-30, c)


@triton.jit
def gram_and_sums(p_q, p_k, p_v, row_stride, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """Returns G, (COLUMNS, COLUMNS), and (MᵀV)ᵀ, (D, COLUMNS)."""
    b_gram, b_vm = tl.zeros((COLUMNS, COLUMNS), tl.float32), tl.zeros((D, COLUMNS), tl.float32)
    for start in tl.range(0, tokens, ROWS, num_stages=STAGES):
        o_rows = start + tl.arange(0, ROWS)
        b_m, b_v = load_m(p_q, p_k, row_stride, o_rows, tokens, WIDTH), load_rows(p_v, row_stride, o_rows, tokens, WIDTH)
        b_gram = tl.dot(tl.trans(b_m), b_m, b_gram)
        b_vm = tl.dot(tl.trans(b_v), b_m, b_vm)
    return b_gram, b_vm


@triton.jit
def products(p_q, p_k, p_e, row_stride, e_stride, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """Returns Fᵀ = EᵀM, (D, COLUMNS)."""
    b_f = tl.zeros((D, COLUMNS), tl.float32)
    for start in tl.range(0, tokens, ROWS, num_stages=STAGES):
        o_rows = start + tl.arange(0, ROWS)
        b_e = load_rows(p_e, e_stride, o_rows, tokens, WIDTH)
        b_f = tl.dot(tl.trans(b_e), load_m(p_q, p_k, row_stride, o_rows, tokens, WIDTH), b_f)
    return b_f


@triton.jit
def p_panel(p_x):
    """Pointers to a D × COLUMNS matrix."""
    return p_x + tl.arange(0, D)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def sum_terms(b_gram, b_vm, c, p_terms, STORE: tl.constexpr):
    """Returns c Tᵀ, Zᵀ, the number of terms after Y, and whether the head has the state FUSED.

    The relative change of the output due to a term t is at most |c| ‖M‖₂² ‖t‖_F / ‖Y‖_F, because ‖V‖_F ≥ ‖Y‖_F / ‖M‖₂. The
    code uses ‖G‖_F in place of ‖M‖₂². If STORE, the function stores Y and all terms except the last, each times c. Callers
    set STORE only for heads that are known to have the state FUSED.
    """
    b_gram *= c
    b_total = c * times_jt(b_vm)
    norm = tl.sqrt(tl.sum(b_gram * b_gram))
    factor = TERM_TOLERANCE / tl.maximum(norm, 1e-9)
    factor, least, size, degree = factor * factor, tl.full([], 0.0, tl.float32), tl.full([], 1.0, tl.float32), 0
    fits = norm <= MAX_NORM
    if not STORE:
        fits = fits | (tl.sum(tl.where(tl.sum(tl.abs(b_gram), 1) <= MAX_NORM / 2, 0, 1)) == 0)
        size = tl.where(fits, 1.0, 0.0)
    b_term, b_z = b_total, times_jt(b_gram).to(tl.bfloat16)
    if STORE:
        tl.store(p_terms + 2 * MAX_TERMS * ENTRIES, b_term.to(tl.bfloat16))
    for i_term in range(MAX_TERMS):
        # `for` and `if` replace `while`, which Triton 3.6 cannot compile here. `size` is computed in one place, because
        # a second copy of this computation would spill registers.
        if size > least:
            size = tl.sum(b_term * b_term)
            least = tl.where(i_term == 0, factor * size, least)
            if size > least:
                degree += 1
                b_rounded = b_term.to(tl.bfloat16)
                if STORE:
                    tl.store(p_terms + i_term * ENTRIES, b_rounded)
                b_term = tl.dot(b_rounded, b_z) * (1.0 / (i_term + 2))
                b_total += b_term
    return b_total, b_z, degree, fits & (size <= least)  # comparisons with NaN are False


@triton.jit
def apply(
    p_q, p_k, p_v, p_out, row_stride, out_stride, tokens, b_high, b_low,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Stores V + c M T, given the high and the low part of c Tᵀ."""
    b_t, b_t_low = tl.trans(b_high), tl.trans(b_low)
    for start in tl.range(0, tokens, ROWS, num_stages=STAGES):
        o_rows = start + tl.arange(0, ROWS)
        b_m = load_m(p_q, p_k, row_stride, o_rows, tokens, WIDTH)
        b_out = tl.dot(b_m, b_t_low, tl.dot(b_m, b_t))
        b_out += load_rows(p_v, row_stride, o_rows, tokens, WIDTH).to(tl.float32)
        tl.store(p_rows(p_out, out_stride, o_rows), b_out.to(tl.bfloat16), mask=row_mask(o_rows, tokens, WIDTH))


@triton.jit(do_not_specialize=["heads", "tokens"])
def forward_kernel(
    query, key, value, output, scale, state, strides, out_strides, heads, tokens,
    WIDTH: tl.constexpr, GRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, GRAM_STAGES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sets the state of every head to FUSED or STEPS, and computes the output of heads with state FUSED.

    Query, key and value must have equal strides: 1 in the last dimension, and multiples of 8 in the others.
    """
    i_head = tl.program_id(0)
    o_input = o_head(i_head, heads, strides)
    p_q, p_k, p_v, c = query + o_input, key + o_input, value + o_input, load_scale(scale, i_head)
    b_gram, b_vm = gram_and_sums(p_q, p_k, p_v, strides[2], tokens, WIDTH, GRAM_ROWS, GRAM_STAGES)
    b_total, _, _, suffices = sum_terms(b_gram, b_vm, c, state, False)
    tl.store(state + i_head, tl.where(suffices, FUSED, STEPS))
    if suffices:
        b_high, b_low = high_low(b_total)
        p_out = output + o_head(i_head, heads, out_strides)
        apply(p_q, p_k, p_v, p_out, strides[2], out_strides[2], tokens, b_high, b_low, WIDTH, ROWS, STAGES)


@triton.jit
def adjoint(b_f, b_t, b_z, degree, c, p_terms):
    """Returns grad c, A₂ᵀ and A₃ (see `backward_kernel`), given Fᵀ and the results of `sum_terms`."""
    tl.debug_barrier()  # waits until all threads have stored their terms
    grad_c = tl.sum(b_f * (tl.dot(b_t, b_z) + tl.load(p_terms + 2 * MAX_TERMS * ENTRIES).to(tl.float32))) / c
    p_factors = p_terms + MAX_TERMS * ENTRIES
    b_f = -c * times_jt(b_f)
    b_u = b_f
    for i_back in range(degree):
        i_term = degree - 1 - i_back
        b_s = (b_u * (1.0 / (i_term + 2))).to(tl.bfloat16)
        tl.store(p_factors + i_term * ENTRIES, b_s)
        b_u = b_f - tl.dot(b_s, b_z)
    b_a2 = b_u.to(tl.bfloat16)
    tl.debug_barrier()
    b_product = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    for i_term in tl.range(0, degree, num_stages=2):
        b_product = tl.dot(tl.trans(tl.load(p_factors + i_term * ENTRIES)), tl.load(p_terms + i_term * ENTRIES), b_product)
    b_grad_gram = b_product.to(tl.bfloat16)
    return grad_c, b_a2, (b_grad_gram.to(tl.float32) + tl.trans(b_grad_gram).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def apply_backward(
    p_q, p_k, p_v, p_e, p_grad_q, p_grad_k, p_grad_v, row_stride, e_stride, grad_stride, tokens, b_t, b_a2, b_a3,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of Q, K and V."""
    for start in tl.range(0, tokens, ROWS, num_stages=STAGES):
        o_rows = start + tl.arange(0, ROWS)
        b_m = load_m(p_q, p_k, row_stride, o_rows, tokens, WIDTH)
        b_v, b_e = load_rows(p_v, row_stride, o_rows, tokens, WIDTH), load_rows(p_e, e_stride, o_rows, tokens, WIDTH)
        b_grad_m = tl.dot(b_e, b_t)
        b_grad_m = tl.dot(b_v, b_a2, b_grad_m)
        b_grad_m = tl.dot(b_m, b_a3, b_grad_m)
        b_grad_q, b_grad_k = halves(b_grad_m)
        mask = row_mask(o_rows, tokens, WIDTH)
        tl.store(p_rows(p_grad_q, grad_stride, o_rows), b_grad_q.to(tl.bfloat16), mask=mask)
        tl.store(p_rows(p_grad_k, grad_stride, o_rows), b_grad_k.to(tl.bfloat16), mask=mask)
        b_grad_v = tl.dot(b_m, tl.trans(b_a2)) + b_e.to(tl.float32)
        tl.store(p_rows(p_grad_v, grad_stride, o_rows), b_grad_v.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def backward_kernel(
    query, key, value, grad, grad_query, grad_key, grad_value, scale, grad_scale, state, scratch,
    strides, e_strides, grad_strides, count, heads, tokens,
    WIDTH: tl.constexpr, GRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, GRAM_STAGES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of Q, K, V and c of heads with state FUSED, given the gradient E of the output.

    Let X = MᵀV, t_0 = Y, t_{k+1} = Z t_k / (k + 2), T = Σ t_k and F = MᵀE. Starting from u = c Fᵀ J, each k from the last to
    0 gives s_k = u / (k + 2) and u ← c Fᵀ J − s_k Zᵀ. Then A₂ = grad X = uᵀ, grad G = c Σ s_kᵀ t_kᵀ,
    A₃ = grad G + (grad G)ᵀ, and

        grad V = E + M A₂,        grad M = c E Tᵀ + V A₂ᵀ + M A₃,        grad c = ⟨F, e^Z Y⟩ = ⟨F, Y + Z T⟩.

    A program computes one head after another. The gradients of Q, K and V have the same strides. `scratch` holds each
    program's matrices t_k, s_k and Y, (D, COLUMNS), which stay in the caches.
    """
    p_terms = p_panel(scratch + tl.program_id(0).to(tl.int64) * SCRATCH)
    for i_head in range(tl.program_id(0), count, tl.num_programs(0)):
        if tl.load(state + i_head) == FUSED:
            o_input, o_grad = o_head(i_head, heads, strides), o_head(i_head, heads, grad_strides)
            p_q, p_k, p_v, p_e = query + o_input, key + o_input, value + o_input, grad + o_head(i_head, heads, e_strides)
            c = load_scale(scale, i_head)
            b_gram, b_vm = gram_and_sums(p_q, p_k, p_v, strides[2], tokens, WIDTH, GRAM_ROWS, GRAM_STAGES)
            b_total, b_z, degree, _ = sum_terms(b_gram, b_vm, c, p_terms, True)
            b_t = b_total.to(tl.bfloat16)
            b_f = products(p_q, p_k, p_e, strides[2], e_strides[2], tokens, WIDTH, GRAM_ROWS, 2)
            grad_c, b_a2, b_a3 = adjoint(b_f, b_t, b_z, degree, c, p_terms)
            tl.store(grad_scale + i_head, grad_c.to(grad_scale.dtype.element_ty))
            p_grad_q, p_grad_k, p_grad_v = grad_query + o_grad, grad_key + o_grad, grad_value + o_grad
            row_strides = strides[2], e_strides[2], grad_strides[2]
            apply_backward(
                p_q, p_k, p_v, p_e, p_grad_q, p_grad_k, p_grad_v, *row_strides, tokens, b_t, b_a2, b_a3, WIDTH, ROWS, STAGES
            )
            tl.debug_barrier()  # waits until all threads have read this head's terms, which the next head overwrites
