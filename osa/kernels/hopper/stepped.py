"""Kernels for the heads that fused.py and parts.py do not compute. The kernels balance M and compute e^Z in steps.

M R replaces M, where R is symplectic, so S stays the same. R balances each pair of columns as `osa.linalg.balanced` does,
but is computed from G alone. With the balanced G and Y = c J MᵀV, the kernels take n steps with ‖Z/n‖ ≤ RADIUS,

    Y_0 = Y,    Y_{j+1} = e^{Z/n} Y_j = Y_0 + Z/n Σ_{i≤j} φ₁(Z/n) Y_i,    T = Σ_j φ₁(Z/n) Y_j / n

(Al-Mohy & Higham 2011). Each step is a Taylor sum as in fused.py. The backward kernel stores the Y_j and goes through the
steps in reverse.

A first launch computes each term with one bfloat16 product. It stores SPLIT_STEPS as a head's state if the head needs more
than MAX_STEPS steps, if Z is highly nonnormal, or if balancing divides ‖G‖_F by more than MAX_CANCELLATION. A second launch,
with SPLIT, computes the heads with this state. It splits operands into a high and a low part in bfloat16, so that a term
takes three products and keeps 16 bits. If Z is so nonnormal that no digit is correct, state and output become NaN.

In names, `shear` and `sigma` are γ and σ of `balance`, and q, k and v mark the halves or blocks of a matrix that belong to
Q, K and V.
"""

import triton
import triton.language as tl

from osa.kernels.hopper.fused import (
    COLUMNS,
    ENTRIES,
    SPLIT_STEPS,
    STEPS,
    D,
    load_m,
    load_rows,
    load_scale,
    o_head,
    p_rows,
    row_mask,
)
from osa.kernels.tiles import high_low

RADIUS = tl.constexpr(2.5)  # maximum norm of Z/n for n steps, so that no term of a step is much larger than the first
MAX_STEPS = tl.constexpr(8)  # maximum number of steps with one product per term
MAX_STEPS_SPLIT = tl.constexpr(8192)  # maximum with SPLIT. If a head needs more, ‖Z‖₂ > 2¹⁴, and no digit is correct
MAX_TERMS = tl.constexpr(18)  # maximum number of terms of a step
# Above this value of ‖Z‖_F / (‖Z⁴Y‖/‖Y‖)^¼, a Taylor term is three matrix products. Independent tokens have 8 to 11
MAX_NONNORMALITY = tl.constexpr(16.0)
# If balancing divides ‖G‖_F by more than this, a Taylor term is three matrix products: with one, gradients lose digits
MAX_CANCELLATION = tl.constexpr(16.0)
TERM_TOLERANCE, TERM_TOLERANCE_SPLIT = tl.constexpr(2.0**-6), tl.constexpr(2.0**-14)  # like `TERM_TOLERANCE` of fused.py
MAX_IMBALANCE = tl.constexpr(2.0**10)  # if ‖Z‖_F² / max(Σ|λ|², 1) is larger, no digit is correct even with SPLIT
MIN_SHARE = tl.constexpr(2.0**-12)  # lower bound of ‖q − γ k‖² / ‖q‖²: rounding errors of G hide a smaller ratio

# Offsets in a program's scratch, in float32 entries. Y, F and A₂ are stored as their transposes. Y has the offset 0
#   O_F          F
#   O_A          A₂
#   O_GRAD_GRAM  grad G
#   O_BALANCE    σ and γ
#   O_Z          Zᵀ, in two bfloat16 parts
#   O_TERMS      the terms t_k of a step, followed by its factors s_k, in bfloat16. With SPLIT, the low parts of t_k and
#                s_k come next. Without SPLIT, the Y_j of all steps come next
O_F, O_A, O_GRAD_GRAM, O_BALANCE = tl.constexpr(8192), tl.constexpr(16384), tl.constexpr(24576), tl.constexpr(36864)
O_Z, O_TERMS = tl.constexpr(37120), tl.constexpr(53504)


def scratch_size(is_split: bool, is_backward: bool) -> int:
    """Number of float32 entries in a program's scratch."""
    slots = 4 * (MAX_TERMS.value + 1) if is_split else 2 * (MAX_TERMS.value + 1) + MAX_STEPS.value
    return O_TERMS.value + is_backward * slots * ENTRIES.value // 2


@triton.jit
def o_panel():
    """Offsets of a D × COLUMNS matrix."""
    return tl.arange(0, D)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def o_swapped():
    """`o_panel` with the two columns q_j and k_j of each pair swapped."""
    return tl.arange(0, D)[:, None] * COLUMNS + ((tl.arange(0, COLUMNS) + D) % COLUMNS)[None, :]


@triton.jit
def o_left():
    """Offsets of the left half of a D × COLUMNS matrix. In each row, the right half begins D = COLUMNS / 2 entries later."""
    return tl.arange(0, D)[:, None] * COLUMNS + tl.arange(0, D)[None, :]


@triton.jit
def o_square():
    """Offsets of a D × D matrix."""
    return tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def as_bfloat16(p_x):
    return p_x.to(tl.pointer_type(tl.bfloat16))


@triton.jit
def load_z(p_scratch, SPLIT: tl.constexpr):
    """Returns the high and the low part of Zᵀ if SPLIT, and otherwise Zᵀ twice."""
    p_z = as_bfloat16(p_scratch + O_Z) + tl.arange(0, COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    b_z = tl.load(p_z)
    b_z_low = b_z
    if SPLIT:
        b_z_low = tl.load(p_z + COLUMNS * COLUMNS)
    return b_z, b_z_low


@triton.jit
def times_zt(b_x, b_z, b_z_low, SPLIT: tl.constexpr):
    """X Zᵀ by one bfloat16 product. If SPLIT, by three: only the product of the low parts of X and Zᵀ is left out."""
    if SPLIT:
        b_high, b_low = high_low(b_x)
        b_product = tl.dot(b_high, b_z, tl.dot(b_high, b_z_low, tl.dot(b_low, b_z)))
    else:
        b_product = tl.dot(b_x.to(tl.bfloat16), b_z)
    return b_product


@triton.jit
def gram_blocks(p_q, p_k, p_v, row_stride, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """Returns QᵀQ, QᵀK, KᵀK, VᵀQ and VᵀK. Slicing the results of `gram_and_sums` would spill a third more registers."""
    b_qq, b_qk, b_kk = tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32)
    b_vq, b_vk = tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32)
    for start in tl.range(0, tokens, ROWS, num_stages=STAGES):
        o_rows = start + tl.arange(0, ROWS)
        b_q, b_k = load_rows(p_q, row_stride, o_rows, tokens, WIDTH), load_rows(p_k, row_stride, o_rows, tokens, WIDTH)
        b_v = load_rows(p_v, row_stride, o_rows, tokens, WIDTH)
        b_qq = tl.dot(tl.trans(b_q), b_q, b_qq)
        b_qk = tl.dot(tl.trans(b_q), b_k, b_qk)
        b_kk = tl.dot(tl.trans(b_k), b_k, b_kk)
        b_vq = tl.dot(tl.trans(b_v), b_q, b_vq)
        b_vk = tl.dot(tl.trans(b_v), b_k, b_vk)
    return b_qq, b_qk, b_kk, b_vq, b_vk


@triton.jit
def gram_norm(b_qq, b_qk, b_kk):
    """‖G‖_F."""
    return tl.sqrt(tl.sum(b_qq * b_qq) + 2 * tl.sum(b_qk * b_qk) + tl.sum(b_kk * b_kk))


@triton.jit
def balance(b_qq, b_qk, b_kk):
    """Returns γ for the columns of Q, γ for the columns of K, and σ for the columns of Q. They define R.

    Column m_j of M = [Q, K] is paired with m_p, the corresponding column of the other half. Column j of M R is
    σ_j (m_j − γ_j m_p). The longer column of a pair has γ = 0. σ_j is a power of two, and σ_p = 1/σ_j.
    """
    is_diagonal = tl.arange(0, D)[:, None] == tl.arange(0, D)[None, :]
    b_q2, b_k2 = tl.sum(tl.where(is_diagonal, b_qq, 0.0), 0), tl.sum(tl.where(is_diagonal, b_kk, 0.0), 0)
    b_inner = tl.sum(tl.where(is_diagonal, b_qk, 0.0), 0)
    b_ratio = b_inner / tl.maximum(tl.maximum(b_q2, b_k2), 1e-37)
    b_shear_q, b_shear_k = tl.where(b_k2 >= b_q2, b_ratio, 0.0), tl.where(b_k2 >= b_q2, 0.0, b_ratio)
    b_q2 = tl.maximum(b_q2 - b_shear_q * b_inner, MIN_SHARE * b_q2) + 1e-37
    b_k2 = tl.maximum(b_k2 - b_shear_k * b_inner, MIN_SHARE * b_k2) + 1e-37
    return b_shear_q, b_shear_k, tl.exp2(tl.floor(0.25 * (tl.log2(b_k2) - tl.log2(b_q2)) + 0.5))


@triton.jit
def times_r(b_left, b_right, b_shear_q, b_shear_k, b_sigma):
    """[X₁, X₂] R."""
    b_new_left = b_sigma[None, :] * (b_left - b_shear_q[None, :] * b_right)
    return b_new_left, (b_right - b_shear_k[None, :] * b_left) / b_sigma[None, :]


@triton.jit
def load_balance(p_scratch):
    """Loads the γ and σ that `prepare` stored."""
    p_balance = p_scratch + O_BALANCE + tl.arange(0, D)
    return tl.load(p_balance + 2 * D), tl.load(p_balance + 3 * D), tl.load(p_balance)


@triton.jit
def store_parts(p_x, b_x, gap, SPLIT: tl.constexpr):
    """Stores X in bfloat16. If SPLIT, also stores the low part of X, `gap` entries later."""
    b_high, b_low = high_low(b_x)
    tl.store(p_x, b_high)
    if SPLIT:
        tl.store(p_x + gap, b_low)


@triton.jit
def prepare(b_qq, b_qk, b_kk, b_vq, b_vk, c, p_scratch, SPLIT: tl.constexpr):
    """Stores Y, σ, γ and Zᵀ. Returns ‖Z‖_F, whether MAX_CANCELLATION is exceeded and, if SPLIT, whether MAX_IMBALANCE is."""
    tl.store(p_scratch + o_left(), c * b_vk)
    tl.store(p_scratch + o_left() + D, -c * b_vq)
    norm_before = gram_norm(b_qq, b_qk, b_kk)
    b_shear_q, b_shear_k, b_sigma = balance(b_qq, b_qk, b_kk)
    b_kq_r, b_kk_r = times_r(tl.trans(b_qk), b_kk, b_shear_q, b_shear_k, b_sigma)
    b_qq_r, b_qk_r = times_r(b_qq, b_qk, b_shear_q, b_shear_k, b_sigma)
    b_qq = b_sigma[:, None] * (b_qq_r - b_shear_q[:, None] * b_kq_r)
    b_qk = b_sigma[:, None] * (b_qk_r - b_shear_q[:, None] * b_kk_r)
    b_kk = (b_kk_r - b_shear_k[:, None] * b_qk_r) / b_sigma[:, None]
    norm = gram_norm(b_qq, b_qk, b_kk)
    is_lost = norm_before < 0
    if SPLIT:
        spectrum = 2 * c * c * (tl.sum(b_qq * b_kk) - tl.sum(b_qk * tl.trans(b_qk)))
        is_lost = c * c * norm * norm > MAX_IMBALANCE * tl.maximum(spectrum, 1.0)
    p_balance = p_scratch + O_BALANCE + tl.arange(0, D)
    tl.store(p_balance, b_sigma)
    tl.store(p_balance + D, 1 / b_sigma)
    tl.store(p_balance + 2 * D, b_shear_q)
    tl.store(p_balance + 3 * D, b_shear_k)
    p_z, o_transposed = as_bfloat16(p_scratch + O_Z), tl.trans(o_left())
    store_parts(p_z + o_left(), c * b_qk, COLUMNS * COLUMNS, SPLIT)
    store_parts(p_z + o_left() + D, -c * b_qq, COLUMNS * COLUMNS, SPLIT)
    store_parts(p_z + o_left() + D * COLUMNS, c * b_kk, COLUMNS * COLUMNS, SPLIT)
    store_parts(p_z + o_transposed + D * COLUMNS + D, -c * b_qk, COLUMNS * COLUMNS, SPLIT)
    return tl.abs(c) * norm, norm_before > MAX_CANCELLATION * norm, is_lost


@triton.jit
def balanced_y(p_scratch):
    """Returns Yᵀ R⁻ᵀ for the stored Yᵀ. Because J Rᵀ = R⁻¹ J, Yᵀ R⁻ᵀ replaces Yᵀ when M R replaces M."""
    o_partners = (tl.arange(0, COLUMNS) + D) % COLUMNS
    p_shear, b_sigma = p_scratch + O_BALANCE + COLUMNS, tl.load(p_scratch + O_BALANCE + o_partners)[None, :]
    return b_sigma * (
        tl.load(p_scratch + o_panel()) + tl.load(p_shear + o_partners)[None, :] * tl.load(p_scratch + o_swapped())
    )


@triton.jit
def times_rt(p_scratch, p_x):
    """Returns X Rᵀ for a stored X."""
    o_columns, o_partners = tl.arange(0, COLUMNS), (tl.arange(0, COLUMNS) + D) % COLUMNS
    p_sigma, p_shear = p_scratch + O_BALANCE, p_scratch + O_BALANCE + COLUMNS
    b_shear_sigma = tl.load(p_shear + o_partners) * tl.load(p_sigma + o_partners)
    b_sigma = tl.load(p_sigma + o_columns)
    return b_sigma[None, :] * tl.load(p_x + o_panel()) - b_shear_sigma[None, :] * tl.load(p_x + o_swapped())


@triton.jit
def overwrite(p_x, b_x):
    """Waits until all threads have read the old matrix, stores X over it, and waits until all threads can read X."""
    tl.debug_barrier()
    tl.store(p_x + o_panel(), b_x)
    tl.debug_barrier()


@triton.jit
def growth(b_x, b_z, norm):
    """(‖Z⁴X‖_F/‖X‖_F)^¼."""
    b_power, norm = b_x, tl.maximum(norm, 1.0)
    for _ in range(4):
        b_power = tl.dot(b_power.to(tl.bfloat16), b_z) / norm
    return norm * tl.sqrt(tl.sqrt(tl.sqrt(tl.sum(b_power * b_power) / tl.maximum(tl.sum(b_x * b_x), 1e-37))))


@triton.jit
def step_count(radius):
    return tl.maximum(tl.ceil(radius / RADIUS), 1.0).to(tl.int32)


@triton.jit
def least_term(b_y, norm, fraction, SPLIT: tl.constexpr):
    """Returns the squared norm below which a term is too small to change the output.

    The relative change of the output due to a term t is at most |c| ‖M‖₂² ‖t‖_F / ‖Y‖_F, because ‖V‖_F ≥ ‖Y‖_F / (|c| ‖M‖₂).
    The code uses ‖G‖_F in place of ‖M‖₂². With n steps, each step may use `fraction` = 1/n of the total tolerance.
    """
    factor = TERM_TOLERANCE / tl.maximum(norm, 1e-9)
    if SPLIT:
        factor = TERM_TOLERANCE_SPLIT / tl.maximum(norm, 1e-9)
    factor *= fraction
    return factor * factor * tl.sum(b_y * b_y)


@triton.jit
def taylor(b_total, b_term, b_z, b_z_low, fraction, least, p_terms, STORE: tl.constexpr, SPLIT: tl.constexpr):
    """Adds the terms t_k = (fZ)ᵏ t_0 / (k + 1)! to `b_total` until a term is too small to change the output.

    t_0 is `b_term`, and f is `fraction`. Returns the total, the number of terms after t_0, and whether these terms suffice.
    If STORE, the function stores all terms except the last.
    """
    b_total += b_term
    size, degree = tl.full([], 1.0, tl.float32), 0
    for i_term in range(MAX_TERMS):
        # `for` and `if` replace `while`, which Triton 3.6 cannot compile here. The code computes the norm in one place,
        # because a second copy of this computation would spill registers.
        if size > least:
            size = tl.sum(b_term * b_term)
            if size > least:
                degree += 1
                if STORE:
                    store_term(p_terms, i_term, b_term, SPLIT)
                b_term = times_zt(b_term, b_z, b_z_low, SPLIT) * (fraction / (i_term + 2))
                b_total += b_term
    return b_total, degree, size <= least  # comparisons with NaN are False


@triton.jit
def store_term(p_terms, i_term, b_x, SPLIT: tl.constexpr):
    """Stores X in slot number `i_term`."""
    store_parts(p_terms + i_term * ENTRIES + o_panel(), b_x, 2 * (MAX_TERMS + 1) * ENTRIES, SPLIT)


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def stepped_forward_kernel(
    query, key, value, output, scale, state, scratch, strides, out_strides, count, heads, tokens,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, GRAM_ROWS: tl.constexpr, STAGES: tl.constexpr, SCRATCH: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Computes the output of heads with state STEPS or, if SPLIT, of heads with state SPLIT_STEPS.

    Without SPLIT, a head that needs three products per term gets the state SPLIT_STEPS. With SPLIT, a head that exceeds
    MAX_IMBALANCE gets the state NaN.
    """
    p_scratch = scratch + tl.program_id(0).to(tl.int64) * SCRATCH
    for i_head in range(tl.program_id(0), count, tl.num_programs(0)):
        if tl.load(state + i_head) == (SPLIT_STEPS if SPLIT else STEPS):
            o_input, o_output = o_head(i_head, heads, strides), o_head(i_head, heads, out_strides)
            p_q, p_k, p_v, p_out = query + o_input, key + o_input, value + o_input, output + o_output
            c = load_scale(scale, i_head)
            b_qq, b_qk, b_kk, b_vq, b_vk = gram_blocks(p_q, p_k, p_v, strides[2], tokens, WIDTH, GRAM_ROWS, STAGES)
            norm, cancels, is_lost = prepare(b_qq, b_qk, b_kk, b_vq, b_vk, c, p_scratch, SPLIT)
            tl.debug_barrier()
            b_y = balanced_y(p_scratch)
            overwrite(p_scratch, b_y)
            b_z, b_z_low = load_z(p_scratch, SPLIT)
            radius = growth(b_y, b_z, norm)
            if SPLIT:
                fits = (radius <= MAX_STEPS_SPLIT * RADIUS) & (is_lost == 0)  # False for NaN
                tl.store(state + i_head, tl.where(is_lost, float("nan"), SPLIT_STEPS))
            else:
                is_normal = norm <= MAX_NONNORMALITY * tl.maximum(radius, 1.0)
                fits = (radius <= MAX_STEPS * RADIUS) & is_normal & (cancels == 0)
            steps = tl.where(fits, step_count(tl.where(fits, radius, 1.0)), 1 if SPLIT else 0)
            fraction = tl.where(fits, 1.0 / tl.maximum(steps, 1), 0.0)
            least, suffices = least_term(b_y, norm, fraction, SPLIT), fits
            b_total = tl.zeros((D, COLUMNS), tl.float32)
            for i_step in range(steps):
                b_start = fraction * tl.load(p_scratch + o_panel())
                if i_step > 0:
                    b_start += fraction * times_zt(b_total, b_z, b_z_low, SPLIT)
                b_total, _, is_enough = taylor(b_total, b_start, b_z, b_z_low, fraction, least, p_scratch, False, SPLIT)
                suffices = suffices & is_enough
            if SPLIT:
                b_total = tl.where(fits, b_total, float("nan"))
            else:
                tl.store(state + i_head, tl.where(suffices, STEPS, SPLIT_STEPS))
            if suffices | SPLIT:
                overwrite(p_scratch, b_total)
                b_high, b_low = high_low(tl.trans(times_rt(p_scratch, p_scratch)))
                for begin in range(0, tokens, ROWS):
                    o_rows = begin + tl.arange(0, ROWS)
                    b_m = load_m(p_q, p_k, strides[2], o_rows, tokens, WIDTH)
                    b_out = tl.dot(b_m, b_low, tl.dot(b_m, b_high))
                    b_out += load_rows(p_v, strides[2], o_rows, tokens, WIDTH).to(tl.float32)
                    tl.store(
                        p_rows(p_out, out_strides[2], o_rows), b_out.to(tl.bfloat16), mask=row_mask(o_rows, tokens, WIDTH)
                    )
            tl.debug_barrier()  # waits until all threads have read these matrices, which the next head overwrites


@triton.jit
def plus_product(b_sums, p_s, p_t):
    """Returns sums + sᵀ t. `p_s` and `p_t` point to s and t."""
    return tl.dot(tl.trans(tl.load(p_s)), tl.load(p_t), b_sums)


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def stepped_backward_kernel(
    query, key, value, grad, grad_query, grad_key, grad_value, scale, grad_scale, state, scratch,
    strides, e_strides, grad_strides, count, heads, tokens,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, GRAM_ROWS: tl.constexpr, STAGES: tl.constexpr, SCRATCH: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of heads with state STEPS or, if SPLIT, of heads with state SPLIT_STEPS or NaN.

    The kernel differentiates each step as fused.py does, from the last step to the first. Let n be the number of steps,
    h = c/n Fᵀ J (`b_direct`) and a = (grad Y_{j+1})ᵀ c J (`b_later`). For the last step, a = 0. The terms t_k of a step
    have the gradients u_k = h − a Zᵀ/n − s_k Zᵀ/n (`b_grad`), where s_k = u_{k+1} / (k + 2). Y_j has the gradient a + u_0.
    Y_0 has the gradient A₂ᵀ of fused.py. grad G is the sum of s_kᵀ t_kᵀ over terms and steps, and of aᵀ (Σ t_k)ᵀ over steps.

    With SPLIT, the kernel stores no Y_j, but recomputes Y_j = e^{−Z/n} Y_{j+1}. Errors do not grow, because e^{Z/n}
    preserves norms if M is balanced.
    """
    p_scratch = scratch + tl.program_id(0).to(tl.int64) * SCRATCH
    p_terms = as_bfloat16(p_scratch + O_TERMS)
    p_factors, p_starts = p_terms + (MAX_TERMS + 1) * ENTRIES, p_terms + 2 * (MAX_TERMS + 1) * ENTRIES
    o_low: tl.constexpr = 2 * (MAX_TERMS + 1) * ENTRIES
    for i_head in range(tl.program_id(0), count, tl.num_programs(0)):
        head_state = tl.load(state + i_head)
        is_ours = head_state == STEPS
        if SPLIT:
            is_ours = (head_state >= STEPS) == 0  # True if the state is SPLIT_STEPS or NaN
        if is_ours:
            o_input, o_grad = o_head(i_head, heads, strides), o_head(i_head, heads, grad_strides)
            p_q, p_k, p_v = query + o_input, key + o_input, value + o_input
            p_e = grad + o_head(i_head, heads, e_strides)
            c = load_scale(scale, i_head)
            b_qq, b_qk, b_kk, b_vq, b_vk = gram_blocks(p_q, p_k, p_v, strides[2], tokens, WIDTH, GRAM_ROWS, STAGES)
            norm, _, is_lost = prepare(b_qq, b_qk, b_kk, b_vq, b_vk, c, p_scratch, SPLIT)
            b_fq, b_fk = tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32)
            for begin in tl.range(0, tokens, GRAM_ROWS, num_stages=2):
                o_rows = begin + tl.arange(0, GRAM_ROWS)
                b_e = tl.trans(load_rows(p_e, e_strides[2], o_rows, tokens, WIDTH))
                b_fq = tl.dot(b_e, load_rows(p_q, strides[2], o_rows, tokens, WIDTH), b_fq)
                b_fk = tl.dot(b_e, load_rows(p_k, strides[2], o_rows, tokens, WIDTH), b_fk)
            tl.debug_barrier()
            b_shear_q, b_shear_k, b_sigma = load_balance(p_scratch)
            b_fq, b_fk = times_r(b_fq, b_fk, b_shear_q, b_shear_k, b_sigma)
            tl.store(p_scratch + O_F + o_left(), b_fq)
            tl.store(p_scratch + O_F + o_left() + D, b_fk)
            b_y = balanced_y(p_scratch)
            overwrite(p_scratch, b_y)
            b_z, b_z_low = load_z(p_scratch, SPLIT)
            radius = tl.maximum(growth(b_y, b_z, norm), growth(tl.load(p_scratch + O_F + o_swapped()), b_z, norm))
            if SPLIT:
                fits = (radius <= MAX_STEPS_SPLIT * RADIUS) & (is_lost == 0) & (head_state == SPLIT_STEPS)
                steps = step_count(tl.where(fits, radius, 1.0))
                fraction, c = tl.where(fits, 1.0 / steps, 0.0), tl.where(fits, c, float("nan"))
            else:
                steps = tl.minimum(step_count(radius), MAX_STEPS)
                fraction = 1.0 / steps
            least = least_term(b_y, norm, fraction, SPLIT)
            b_total, degree = tl.zeros((D, COLUMNS), tl.float32), 0
            for i_step in range(steps):
                b_start = fraction * tl.load(p_scratch + o_panel())
                if i_step > 0:
                    b_start += fraction * times_zt(b_total, b_z, b_z_low, SPLIT)
                    tl.debug_barrier()  # waits until all threads have read the previous terms
                    if not SPLIT:
                        tl.store(p_starts + i_step * ENTRIES + o_panel(), b_start.to(tl.bfloat16))
                b_total, degree, _ = taylor(b_total, b_start, b_z, b_z_low, fraction, least, p_terms, True, SPLIT)
            b_last = tl.load(p_scratch + o_panel()) + times_zt(b_total, b_z, b_z_low, SPLIT)  # e^Z Y
            grad_c = tl.sum(tl.load(p_scratch + O_F + o_panel()) * b_last) / c
            tl.store(grad_scale + i_head, grad_c.to(grad_scale.dtype.element_ty))
            overwrite(p_scratch + O_A, b_total)
            overwrite(p_scratch + O_A, times_rt(p_scratch, p_scratch + O_A))
            b_tq, b_tq_low = high_low(tl.load(p_scratch + O_A + o_left()))
            b_tk, b_tk_low = high_low(tl.load(p_scratch + O_A + D + o_left()))
            if SPLIT:
                overwrite(p_scratch, fraction * b_last)
            b_signs = tl.where(tl.arange(0, COLUMNS) < D, -c * fraction, c * fraction)[None, :]
            for i_turn in range(steps):
                i_step = steps - 1 - i_turn
                b_direct = b_signs * tl.load(p_scratch + O_F + o_swapped())
                if SPLIT:
                    b_start = tl.load(p_scratch + o_panel())
                    b_back, _, _ = taylor(
                        tl.zeros((D, COLUMNS), tl.float32), b_start, b_z, b_z_low, -fraction, least, p_terms, False, True
                    )
                    b_start -= fraction * times_zt(b_back, b_z, b_z_low, True)
                    overwrite(p_scratch, b_start)
                    b_total = tl.zeros((D, COLUMNS), tl.float32)
                    b_total, degree, _ = taylor(b_total, b_start, b_z, b_z_low, fraction, least, p_terms, True, True)
                elif i_turn > 0:
                    b_start = fraction * tl.load(p_scratch + o_panel())
                    if i_step > 0:
                        b_start = tl.load(p_starts + i_step * ENTRIES + o_panel()).to(tl.float32)
                    b_total = tl.zeros((D, COLUMNS), tl.float32)
                    b_total, degree, _ = taylor(b_total, b_start, b_z, b_z_low, fraction, least, p_terms, True, False)
                pairs = degree
                if i_turn > 0:
                    b_later = tl.load(p_scratch + O_A + o_panel())
                    store_term(p_terms, degree, b_total, SPLIT)
                    store_term(p_factors, degree, b_later, SPLIT)
                    pairs = degree + 1
                    b_direct -= fraction * times_zt(b_later, b_z, b_z_low, SPLIT)
                b_grad = b_direct
                for i_back in range(degree):
                    i_term = degree - 1 - i_back
                    b_factor = b_grad * (1.0 / (i_term + 2))
                    store_term(p_factors, i_term, b_factor, SPLIT)
                    b_grad = b_direct - fraction * times_zt(b_factor, b_z, b_z_low, SPLIT)
                if i_turn > 0:
                    b_grad += tl.load(p_scratch + O_A + o_panel())
                overwrite(p_scratch + O_A, b_grad)
                b_qq, b_qk, b_kk = tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32)
                for i_term in tl.range(0, pairs, num_stages=1 if SPLIT else 2):
                    p_factor, p_term = p_factors + i_term * ENTRIES + o_left(), p_terms + i_term * ENTRIES + o_left()
                    b_qq = plus_product(b_qq, p_factor, p_term)
                    b_qk = plus_product(b_qk, p_factor, p_term + D)
                    b_kk = plus_product(b_kk, p_factor + D, p_term + D)
                    b_qk = plus_product(b_qk, p_term, p_factor + D)
                    if SPLIT:
                        b_qq = plus_product(b_qq, p_factor + o_low, p_term)
                        b_qk = plus_product(b_qk, p_factor + o_low, p_term + D)
                        b_kk = plus_product(b_kk, p_factor + o_low + D, p_term + D)
                        b_qk = plus_product(b_qk, p_term + o_low, p_factor + D)
                        b_qq = plus_product(b_qq, p_factor, p_term + o_low)
                        b_qk = plus_product(b_qk, p_factor, p_term + o_low + D)
                        b_kk = plus_product(b_kk, p_factor + D, p_term + o_low + D)
                        b_qk = plus_product(b_qk, p_term, p_factor + o_low + D)
                p_blocks = p_scratch + O_GRAD_GRAM + o_square()
                # The loop starts from zeros. If it started from the stored sums, its products could not overlap one another.
                if i_turn > 0:
                    b_qq = b_qq + tl.load(p_blocks)
                    b_qk = b_qk + tl.load(p_blocks + D * D)
                    b_kk = b_kk + tl.load(p_blocks + 2 * D * D)
                tl.store(p_blocks, b_qq)
                tl.store(p_blocks + D * D, b_qk)
                tl.store(p_blocks + 2 * D * D, b_kk)
                tl.debug_barrier()
            p_blocks, p_flipped = p_scratch + O_GRAD_GRAM + o_square(), p_scratch + O_GRAD_GRAM + tl.trans(o_square())
            b_qq, b_qk, b_kq = tl.load(p_blocks) + tl.load(p_flipped), tl.load(p_blocks + D * D), tl.load(p_flipped + D * D)
            b_kk = tl.load(p_blocks + 2 * D * D) + tl.load(p_flipped + 2 * D * D)
            b_shear_q, b_shear_k, b_sigma = load_balance(p_scratch)
            b_shear_k_sigma, b_shear_q_sigma = b_shear_k / b_sigma, b_shear_q * b_sigma
            b_qq_r = b_sigma[None, :] * b_qq - b_shear_k_sigma[None, :] * b_qk
            b_qk_r = b_qk / b_sigma[None, :] - b_shear_q_sigma[None, :] * b_qq
            b_kq_r = b_sigma[None, :] * b_kq - b_shear_k_sigma[None, :] * b_kk
            b_kk_r = b_kk / b_sigma[None, :] - b_shear_q_sigma[None, :] * b_kq
            b_qq, b_qq_low = high_low(b_sigma[:, None] * b_qq_r - b_shear_k_sigma[:, None] * b_kq_r)
            b_qk, b_qk_low = high_low(b_sigma[:, None] * b_qk_r - b_shear_k_sigma[:, None] * b_kk_r)
            b_kk, b_kk_low = high_low(b_kk_r / b_sigma[:, None] - b_shear_q_sigma[:, None] * b_qk_r)
            overwrite(p_scratch + O_A, times_rt(p_scratch, p_scratch + O_A))
            b_aq, b_aq_low = high_low(tl.load(p_scratch + O_A + o_left()))
            b_ak, b_ak_low = high_low(tl.load(p_scratch + O_A + D + o_left()))
            p_grad_q, p_grad_k, p_grad_v = grad_query + o_grad, grad_key + o_grad, grad_value + o_grad
            for begin in range(0, tokens, ROWS):
                o_rows = begin + tl.arange(0, ROWS)
                b_q = load_rows(p_q, strides[2], o_rows, tokens, WIDTH)
                b_k = load_rows(p_k, strides[2], o_rows, tokens, WIDTH)
                b_v = load_rows(p_v, strides[2], o_rows, tokens, WIDTH)
                b_e = load_rows(p_e, e_strides[2], o_rows, tokens, WIDTH)
                o_rows_grad = tl.arange(0, D)[None, :] + o_rows[:, None] * grad_strides[2]
                mask = row_mask(o_rows, tokens, WIDTH)
                b_x = tl.dot(b_k, tl.trans(b_qk), tl.dot(b_q, b_qq, tl.dot(b_v, b_aq, tl.dot(b_e, b_tq))))
                if SPLIT:
                    b_x = tl.dot(b_v, b_aq_low, tl.dot(b_e, b_tq_low, b_x))
                    b_x = tl.dot(b_k, tl.trans(b_qk_low), tl.dot(b_q, b_qq_low, b_x))
                tl.store(p_grad_q + o_rows_grad, b_x.to(tl.bfloat16), mask=mask)
                b_x = tl.dot(b_k, b_kk, tl.dot(b_q, b_qk, tl.dot(b_v, b_ak, tl.dot(b_e, b_tk))))
                if SPLIT:
                    b_x = tl.dot(b_v, b_ak_low, tl.dot(b_e, b_tk_low, b_x))
                    b_x = tl.dot(b_k, b_kk_low, tl.dot(b_q, b_qk_low, b_x))
                tl.store(p_grad_k + o_rows_grad, b_x.to(tl.bfloat16), mask=mask)
                b_x = tl.dot(b_k, tl.trans(b_ak), tl.dot(b_q, tl.trans(b_aq)))
                if SPLIT:
                    b_x = tl.dot(b_k, tl.trans(b_ak_low), tl.dot(b_q, tl.trans(b_aq_low), b_x))
                tl.store(p_grad_v + o_rows_grad, (b_x + b_e.to(tl.float32)).to(tl.bfloat16), mask=mask)
            tl.debug_barrier()  # waits until all threads have read these matrices, which the next head overwrites
