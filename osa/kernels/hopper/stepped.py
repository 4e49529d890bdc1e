"""Kernels for the heads that fused.py leaves: M balanced, and e^Z in steps.

M R takes the place of M and has the same S: R is symplectic and balances each pair of columns as `osa.linalg.balanced` does,
but from G alone. The balanced G gives e^Z in n steps of norm RADIUS,

    Y_0 = Y,    Y_{j+1} = e^{Z/n} Y_j = Y_0 + Z/n Σ_{i≤j} φ₁(Z/n) Y_i,    T = Σ_j φ₁(Z/n) Y_j / n

(Al-Mohy & Higham 2011). Each step is a Taylor sum as in fused.py. The backward kernel keeps the Y_j and goes through the
steps from the last.

A first launch takes a term by one product of bfloat16, whose error grows with ‖S‖₂ as an error of query and key in bfloat16
would. A head that asks for more than MOST_STEPS steps, whose Z is far from normal, or whose query and key nearly cancel gets
a `state` of −1. A second launch takes such a head by THREE products, which have 16 bits, and sets `state` to NaN where no
digit is left.

Matrices whose columns change places go through a program's scratch memory.
"""

import triton
import triton.language as tl

from osa.kernels.hopper.fused import ENTRIES, SIZE, D, inside, load_m, rows_at, scale_of, tile_of
from osa.kernels.tiles import split

RADIUS = tl.constexpr(2.5)  # norm of a step, whose terms stay near 1
MOST_STEPS = tl.constexpr(8)  # steps by one product
MOST_KEPT = tl.constexpr(8192)  # steps by three products, which have no digit for ‖Z‖₂ beyond 2¹⁴
MOST_TERMS = tl.constexpr(18)  # terms of a step
MOST_SKEWED = tl.constexpr(16.0)  # ‖Z‖_F over (‖Z⁴Y‖/‖Y‖)^¼: 8 to 11 for independent tokens, more where Z is far from normal
MOST_TAKEN = tl.constexpr(16.0)  # ‖G‖_F before balancing over ‖G‖_F after: columns so nearly alike cancel in the gradients
EPS, EPS_OF_THREE = tl.constexpr(2.0**-6), tl.constexpr(2.0**-14)  # share of the output below which a term ends the sum
LOST = tl.constexpr(2.0**10)  # imbalance, as in `osa.linalg.imbalance`, from which on three products have no digit
LEAST = tl.constexpr(2.0**-12)  # share of a column's square norm below which rounding of G hides what balancing leaves

# places in a program's scratch, in entries of float32: Y, F, A₂, grad G, σ and γ, Zᵀ in two parts of bfloat16, then the t_k
# and s_k of a step in bfloat16, in two parts for THREE, and Y_j of each step otherwise
F_AT, A_AT, GRAD_AT, VECTORS_AT = tl.constexpr(8192), tl.constexpr(16384), tl.constexpr(24576), tl.constexpr(36864)
Z_AT, TERMS_AT = tl.constexpr(37120), tl.constexpr(53504)


def scratch_of(three: bool, is_backward: bool) -> int:
    """Entries of a program's scratch."""
    slots = 4 * (MOST_TERMS.value + 1) if three else 2 * (MOST_TERMS.value + 1) + MOST_STEPS.value
    return TERMS_AT.value + is_backward * slots * ENTRIES.value // 2


@triton.jit
def places():
    """Places of a matrix of D rows and SIZE columns."""
    return tl.arange(0, D)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def swapped():
    """Places of the same matrix with each column in its partner's place, q_j in that of k_j."""
    return tl.arange(0, D)[:, None] * SIZE + ((tl.arange(0, SIZE) + D) % SIZE)[None, :]


@triton.jit
def half():
    """Places of the left half of such a matrix; its right half begins D entries on."""
    return tl.arange(0, D)[:, None] * SIZE + tl.arange(0, D)[None, :]


@triton.jit
def square():
    """Places of a matrix of D rows and columns."""
    return tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def halves_of(pointer):
    return pointer.to(tl.pointer_type(tl.bfloat16))


@triton.jit
def z_of(kept, THREE: tl.constexpr):
    """Zᵀ and its low part, or Zᵀ twice without THREE."""
    at = halves_of(kept + Z_AT) + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    z = tl.load(at)
    z_low = z
    if THREE:
        z_low = tl.load(at + SIZE * SIZE)
    return z, z_low


@triton.jit
def times(x, z, z_low, THREE: tl.constexpr):
    """X Zᵀ by one product of bfloat16, or for THREE by all products of high and low parts but low times low."""
    if THREE:
        high, low = split(x)
        product = tl.dot(high, z, tl.dot(high, z_low, tl.dot(low, z)))
    else:
        product = tl.dot(x.to(tl.bfloat16), z)
    return product


@triton.jit
def sums_by_blocks(q, k, v, row_stride, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """QᵀQ, QᵀK and KᵀK, then VᵀQ and VᵀK: cut out of `gram_and_sums` they would spill a third more."""
    qq, qk, kk = tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32)
    vq, vk = tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32)
    for start in tl.range(0, tokens, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        query, key = tile_of(q, row_stride, rows, tokens, WIDTH), tile_of(k, row_stride, rows, tokens, WIDTH)
        value = tile_of(v, row_stride, rows, tokens, WIDTH)
        qq = tl.dot(tl.trans(query), query, qq)
        qk = tl.dot(tl.trans(query), key, qk)
        kk = tl.dot(tl.trans(key), key, kk)
        vq = tl.dot(tl.trans(value), query, vq)
        vk = tl.dot(tl.trans(value), key, vk)
    return qq, qk, kk, vq, vk


@triton.jit
def norm_of(qq, qk, kk):
    """‖G‖_F."""
    return tl.sqrt(tl.sum(qq * qq) + 2 * tl.sum(qk * qk) + tl.sum(kk * kk))


@triton.jit
def balance(qq, qk, kk):
    """γ of the columns of Q and of K, and σ: column j of M R is σ_j (m_j − γ_j m_p), p its partner, and σ_p = 1/σ_j.

    γ is 0 for the longer column of a pair, and σ a power of two.
    """
    is_own = tl.arange(0, D)[:, None] == tl.arange(0, D)[None, :]
    q2, k2 = tl.sum(tl.where(is_own, qq, 0.0), 0), tl.sum(tl.where(is_own, kk, 0.0), 0)
    both = tl.sum(tl.where(is_own, qk, 0.0), 0)
    ratio = both / tl.maximum(tl.maximum(q2, k2), 1e-37)
    q_takes, k_takes = tl.where(k2 >= q2, ratio, 0.0), tl.where(k2 >= q2, 0.0, ratio)
    q2 = tl.maximum(q2 - q_takes * both, LEAST * q2) + 1e-37
    k2 = tl.maximum(k2 - k_takes * both, LEAST * k2) + 1e-37
    return q_takes, k_takes, tl.exp2(tl.floor(0.25 * (tl.log2(k2) - tl.log2(q2)) + 0.5))


@triton.jit
def times_r(left, right, q_takes, k_takes, sigma):
    """[X₁, X₂] R."""
    new = sigma[None, :] * (left - q_takes[None, :] * right)
    return new, (right - k_takes[None, :] * left) / sigma[None, :]


@triton.jit
def vectors(kept):
    """Loads γ and σ, as `balance` returned them."""
    at = kept + VECTORS_AT + tl.arange(0, D)
    return tl.load(at + 2 * D), tl.load(at + 3 * D), tl.load(at)


@triton.jit
def keep(at, x, gap, THREE: tl.constexpr):
    """Stores X in bfloat16, for THREE in two parts, the low one a gap behind."""
    high, low = split(x)
    tl.store(at, high)
    if THREE:
        tl.store(at + gap, low)


@triton.jit
def prepare(qq, qk, kk, vq, vk, c, kept, THREE: tl.constexpr):
    """Stores Y, σ, γ and Zᵀ. Returns ‖Z‖_F, whether columns nearly cancel, and whether no digit is left of any product."""
    tl.store(kept + half(), c * vk)
    tl.store(kept + half() + D, -c * vq)
    before = norm_of(qq, qk, kk)
    q_takes, k_takes, sigma = balance(qq, qk, kk)
    kq_r, kk_r = times_r(tl.trans(qk), kk, q_takes, k_takes, sigma)
    qq_r, qk_r = times_r(qq, qk, q_takes, k_takes, sigma)
    qq = sigma[:, None] * (qq_r - q_takes[:, None] * kq_r)
    qk = sigma[:, None] * (qk_r - q_takes[:, None] * kk_r)
    kk = (kk_r - k_takes[:, None] * qk_r) / sigma[:, None]
    norm = norm_of(qq, qk, kk)
    is_lost = before < 0
    if THREE:
        spectrum = 2 * c * c * (tl.sum(qq * kk) - tl.sum(qk * tl.trans(qk)))
        is_lost = c * c * norm * norm > LOST * tl.maximum(spectrum, 1.0)
    at = kept + VECTORS_AT + tl.arange(0, D)
    tl.store(at, sigma)
    tl.store(at + D, 1 / sigma)
    tl.store(at + 2 * D, q_takes)
    tl.store(at + 3 * D, k_takes)
    z, transposed = halves_of(kept + Z_AT), tl.trans(half())
    keep(z + half(), c * qk, SIZE * SIZE, THREE)
    keep(z + half() + D, -c * qq, SIZE * SIZE, THREE)
    keep(z + half() + D * SIZE, c * kk, SIZE * SIZE, THREE)
    keep(z + transposed + D * SIZE + D, -c * qk, SIZE * SIZE, THREE)
    return tl.abs(c) * norm, before > MOST_TAKEN * norm, is_lost


@triton.jit
def balanced_y(kept):
    """Y R⁻ᵀ, since J Rᵀ = R⁻¹ J."""
    partners = (tl.arange(0, SIZE) + D) % SIZE
    takes, sigma = kept + VECTORS_AT + SIZE, tl.load(kept + VECTORS_AT + partners)[None, :]
    return sigma * (tl.load(kept + places()) + tl.load(takes + partners)[None, :] * tl.load(kept + swapped()))


@triton.jit
def times_rt(kept, at):
    """X Rᵀ of a stored X."""
    columns, partners = tl.arange(0, SIZE), (tl.arange(0, SIZE) + D) % SIZE
    sigma, takes = kept + VECTORS_AT, kept + VECTORS_AT + SIZE
    taken = tl.load(takes + partners) * tl.load(sigma + partners)
    return tl.load(sigma + columns)[None, :] * tl.load(at + places()) - taken[None, :] * tl.load(at + swapped())


@triton.jit
def replace(at, x):
    """Stores X over a matrix that other threads have read, for other threads to read."""
    tl.debug_barrier()
    tl.store(at + places(), x)
    tl.debug_barrier()


@triton.jit
def growth(x, z, norm):
    """(‖Z⁴X‖_F/‖X‖_F)^¼."""
    power, norm = x, tl.maximum(norm, 1.0)
    for _ in range(4):
        power = tl.dot(power.to(tl.bfloat16), z) / norm
    return norm * tl.sqrt(tl.sqrt(tl.sqrt(tl.sum(power * power) / tl.maximum(tl.sum(x * x), 1e-37))))


@triton.jit
def steps_of(radius):
    return tl.maximum(tl.ceil(radius / RADIUS), 1.0).to(tl.int32)


@triton.jit
def limit_of(y, norm, share, THREE: tl.constexpr):
    """‖term‖_F² below which a term no longer matters.

    A term changes the output by |M Zᵏ Y / (k + 1)!| ≤ ‖M‖₂ |Zᵏ Y| / (k + 1)!, and ‖V‖_F ≥ ‖Y‖_F / (c ‖M‖₂); ‖G‖_F stands for
    ‖M‖₂².
    """
    factor = EPS / tl.maximum(norm, 1e-9)
    if THREE:
        factor = EPS_OF_THREE / tl.maximum(norm, 1e-9)
    factor *= share
    return factor * factor * tl.sum(y * y)


@triton.jit
def taylor(total, term, z, z_low, share, least, terms, KEEP: tl.constexpr, THREE: tl.constexpr):
    """Adds Σ_k t_k to a sum, t_k = (Z/n)ᵏ t_0 / (k + 1)!. Returns the sum, how many follow t_0, and whether they suffice.

    KEEP stores all terms but the last.
    """
    total += term
    size, degree = tl.full([], 1.0, tl.float32), 0
    for k in range(MOST_TERMS):
        if size > least:  # no `while`, which Triton 3.6 does not compile, and one place for the norm, or registers spill
            size = tl.sum(term * term)
            if size > least:
                degree += 1
                if KEEP:
                    keep_term(terms, k, term, THREE)
                term = times(term, z, z_low, THREE) * (share / (k + 2))
                total += term
    return total, degree, size <= least  # False where anything is NaN


@triton.jit
def keep_term(slots, k, x, THREE: tl.constexpr):
    """Stores term number k."""
    keep(slots + k * ENTRIES + places(), x, 2 * (MOST_TERMS + 1) * ENTRIES, THREE)


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def stepped_forward_kernel(
    query, key, value, output, scale, state, scratch, strides, out_strides, count, heads, tokens,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, GRAM_ROWS: tl.constexpr, STAGES: tl.constexpr, SCRATCH: tl.constexpr,
    THREE: tl.constexpr,
):  # fmt: skip
    """The output of each head whose `state` is 0, or −1 for THREE, and its `state`."""
    kept = scratch + tl.program_id(0).to(tl.int64) * SCRATCH
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        if tl.load(state + i) == (-1.0 if THREE else 0.0):
            batch, own = (i // heads).to(tl.int64), (i % heads).to(tl.int64)
            first, place = batch * strides[0] + own * strides[1], batch * out_strides[0] + own * out_strides[1]
            q, k_own, v, o = query + first, key + first, value + first, output + place
            c = scale_of(scale, i)
            qq, qk, kk, vq, vk = sums_by_blocks(q, k_own, v, strides[2], tokens, WIDTH, GRAM_ROWS, STAGES)
            norm, cancels, is_lost = prepare(qq, qk, kk, vq, vk, c, kept, THREE)
            tl.debug_barrier()
            y = balanced_y(kept)
            replace(kept, y)
            z, z_low = z_of(kept, THREE)
            radius = growth(y, z, norm)
            if THREE:
                fits = (radius <= MOST_KEPT * RADIUS) & (is_lost == 0)  # False for NaN
                tl.store(state + i, tl.where(is_lost, float("nan"), -1.0))
            else:
                is_normal = norm <= MOST_SKEWED * tl.maximum(radius, 1.0)
                fits = (radius <= MOST_STEPS * RADIUS) & is_normal & (cancels == 0)
            steps = tl.where(fits, steps_of(tl.where(fits, radius, 1.0)), 1 if THREE else 0)
            share = tl.where(fits, 1.0 / tl.maximum(steps, 1), 0.0)
            least, suffices = limit_of(y, norm, share, THREE), fits
            total = tl.zeros((D, SIZE), tl.float32)
            for j in range(steps):
                start = share * tl.load(kept + places())
                if j > 0:
                    start += share * times(total, z, z_low, THREE)
                total, _, is_enough = taylor(total, start, z, z_low, share, least, kept, False, THREE)
                suffices = suffices & is_enough
            if THREE:
                total = tl.where(fits, total, float("nan"))
            else:
                tl.store(state + i, tl.where(suffices, 0.0, -1.0))
            if suffices | THREE:
                replace(kept, total)
                high, low = split(tl.trans(times_rt(kept, kept)))
                for begin in range(0, tokens, ROWS):
                    rows = begin + tl.arange(0, ROWS)
                    m = load_m(q, k_own, strides[2], rows, tokens, WIDTH)
                    out = tl.dot(m, low, tl.dot(m, high))
                    out += tile_of(v, strides[2], rows, tokens, WIDTH).to(tl.float32)
                    tl.store(rows_at(o, out_strides[2], rows), out.to(tl.bfloat16), mask=inside(rows, tokens, WIDTH))
            tl.debug_barrier()  # waits: the next head's matrices take the place of these


@triton.jit
def plus_product(sums, s, t):
    """sums + sᵀ t of stored parts."""
    return tl.dot(tl.trans(tl.load(s)), tl.load(t), sums)


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def stepped_backward_kernel(
    query, key, value, grad, grad_query, grad_key, grad_value, scale, grad_scale, state, scratch,
    strides, e_strides, grad_strides, count, heads, tokens,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, GRAM_ROWS: tl.constexpr, STAGES: tl.constexpr, SCRATCH: tl.constexpr,
    THREE: tl.constexpr,
):  # fmt: skip
    """The gradients of each head whose `state` is 0, or −1 or NaN for THREE.

    The kernel does for each step what fused.py does, from the last step to the first. Let h = c/n Fᵀ J, and let
    a be the gradient of Y_{j+1} times J, zero for the last step. The t_k of a step have the gradients
    u_k = h − a Zᵀ/n − s_k Zᵀ/n with s_k = u_{k+1} / (k + 2), and Y_j has a + u_0; A₂ is the a that is left. grad G sums
    c s_kᵀ t_kᵀ over terms and steps, and aᵀ (Σ t_k)ᵀ over steps.
    THREE stores no Y_j and computes Y_j = e^{−Z/n} Y_{j+1}, since e^{Z/n} keeps norms where M is balanced.
    """
    kept = scratch + tl.program_id(0).to(tl.int64) * SCRATCH
    terms = halves_of(kept + TERMS_AT)
    factors, starts = terms + (MOST_TERMS + 1) * ENTRIES, terms + 2 * (MOST_TERMS + 1) * ENTRIES
    lows: tl.constexpr = 2 * (MOST_TERMS + 1) * ENTRIES
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        known = tl.load(state + i)
        is_own = known == 0.0
        if THREE:
            is_own = (known >= 0.0) == 0
        if is_own:
            batch, own = (i // heads).to(tl.int64), (i % heads).to(tl.int64)
            first, place = batch * strides[0] + own * strides[1], batch * grad_strides[0] + own * grad_strides[1]
            q, k_own, v = query + first, key + first, value + first
            e = grad + batch * e_strides[0] + own * e_strides[1]
            c = scale_of(scale, i)
            qq, qk, kk, vq, vk = sums_by_blocks(q, k_own, v, strides[2], tokens, WIDTH, GRAM_ROWS, STAGES)
            norm, _, is_lost = prepare(qq, qk, kk, vq, vk, c, kept, THREE)
            fq, fk = tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32)
            for begin in tl.range(0, tokens, GRAM_ROWS, num_stages=2):
                rows = begin + tl.arange(0, GRAM_ROWS)
                e_rows = tl.trans(tile_of(e, e_strides[2], rows, tokens, WIDTH))
                fq = tl.dot(e_rows, tile_of(q, strides[2], rows, tokens, WIDTH), fq)
                fk = tl.dot(e_rows, tile_of(k_own, strides[2], rows, tokens, WIDTH), fk)
            tl.debug_barrier()
            q_takes, k_takes, sigma = vectors(kept)
            fq, fk = times_r(fq, fk, q_takes, k_takes, sigma)
            tl.store(kept + F_AT + half(), fq)
            tl.store(kept + F_AT + half() + D, fk)
            y = balanced_y(kept)
            replace(kept, y)
            z, z_low = z_of(kept, THREE)
            radius = tl.maximum(growth(y, z, norm), growth(tl.load(kept + F_AT + swapped()), z, norm))
            if THREE:
                fits = (radius <= MOST_KEPT * RADIUS) & (is_lost == 0) & (known == -1.0)
                steps = steps_of(tl.where(fits, radius, 1.0))
                share, c = tl.where(fits, 1.0 / steps, 0.0), tl.where(fits, c, float("nan"))
            else:
                steps = tl.minimum(steps_of(radius), MOST_STEPS)
                share = 1.0 / steps
            least = limit_of(y, norm, share, THREE)
            total, degree = tl.zeros((D, SIZE), tl.float32), 0
            for j in range(steps):
                start = share * tl.load(kept + places())
                if j > 0:
                    start += share * times(total, z, z_low, THREE)
                    tl.debug_barrier()  # waits: this step's terms take the place of the last one's
                    if not THREE:
                        tl.store(starts + j * ENTRIES + places(), start.to(tl.bfloat16))
                total, degree, _ = taylor(total, start, z, z_low, share, least, terms, True, THREE)
            last = tl.load(kept + places()) + times(total, z, z_low, THREE)  # e^Z Y
            gradient = tl.sum(tl.load(kept + F_AT + places()) * last) / c
            tl.store(grad_scale + i, gradient.to(grad_scale.dtype.element_ty))
            replace(kept + A_AT, total)
            replace(kept + A_AT, times_rt(kept, kept + A_AT))
            tq, tq_low = split(tl.load(kept + A_AT + half()))
            tk, tk_low = split(tl.load(kept + A_AT + D + half()))
            if THREE:
                replace(kept, share * last)
            signs = tl.where(tl.arange(0, SIZE) < D, -c * share, c * share)[None, :]
            for turn in range(steps):
                j = steps - 1 - turn
                h = signs * tl.load(kept + F_AT + swapped())
                if THREE:
                    start = tl.load(kept + places())
                    back, _, _ = taylor(tl.zeros((D, SIZE), tl.float32), start, z, z_low, -share, least, terms, False, True)
                    start -= share * times(back, z, z_low, True)
                    replace(kept, start)
                    total = tl.zeros((D, SIZE), tl.float32)
                    total, degree, _ = taylor(total, start, z, z_low, share, least, terms, True, True)
                elif turn > 0:
                    start = share * tl.load(kept + places())
                    if j > 0:
                        start = tl.load(starts + j * ENTRIES + places()).to(tl.float32)
                    total = tl.zeros((D, SIZE), tl.float32)
                    total, degree, _ = taylor(total, start, z, z_low, share, least, terms, True, False)
                pairs = degree
                if turn > 0:
                    a = tl.load(kept + A_AT + places())
                    keep_term(terms, degree, total, THREE)
                    keep_term(factors, degree, a, THREE)
                    pairs = degree + 1
                    h -= share * times(a, z, z_low, THREE)
                u = h
                for m in range(degree):
                    k = degree - 1 - m
                    s = u * (1.0 / (k + 2))
                    keep_term(factors, k, s, THREE)
                    u = h - share * times(s, z, z_low, THREE)
                if turn > 0:
                    u += tl.load(kept + A_AT + places())
                replace(kept + A_AT, u)
                qq, qk, kk = tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32), tl.zeros((D, D), tl.float32)
                for k in tl.range(0, pairs, num_stages=1 if THREE else 2):
                    s, t = factors + k * ENTRIES + half(), terms + k * ENTRIES + half()
                    qq, qk, kk = plus_product(qq, s, t), plus_product(qk, s, t + D), plus_product(kk, s + D, t + D)
                    qk = plus_product(qk, t, s + D)
                    if THREE:
                        qq, qk = plus_product(qq, s + lows, t), plus_product(qk, s + lows, t + D)
                        kk, qk = plus_product(kk, s + lows + D, t + D), plus_product(qk, t + lows, s + D)
                        qq, qk = plus_product(qq, s, t + lows), plus_product(qk, s, t + lows + D)
                        kk, qk = plus_product(kk, s + D, t + lows + D), plus_product(qk, t, s + lows + D)
                blocks = kept + GRAD_AT + square()
                if turn > 0:  # added last: blocks as first summands keep the loop's products from overlapping
                    qq, qk, kk = qq + tl.load(blocks), qk + tl.load(blocks + D * D), kk + tl.load(blocks + 2 * D * D)
                tl.store(blocks, qq)
                tl.store(blocks + D * D, qk)
                tl.store(blocks + 2 * D * D, kk)
                tl.debug_barrier()
            blocks, flipped = kept + GRAD_AT + square(), kept + GRAD_AT + tl.trans(square())
            qq, qk, kq = tl.load(blocks) + tl.load(flipped), tl.load(blocks + D * D), tl.load(flipped + D * D)
            kk = tl.load(blocks + 2 * D * D) + tl.load(flipped + 2 * D * D)
            q_takes, k_takes, sigma = vectors(kept)
            of_k, of_q = k_takes / sigma, q_takes * sigma
            qq_r, qk_r = sigma[None, :] * qq - of_k[None, :] * qk, qk / sigma[None, :] - of_q[None, :] * qq
            kq_r, kk_r = sigma[None, :] * kq - of_k[None, :] * kk, kk / sigma[None, :] - of_q[None, :] * kq
            qq, qq_low = split(sigma[:, None] * qq_r - of_k[:, None] * kq_r)
            qk, qk_low = split(sigma[:, None] * qk_r - of_k[:, None] * kk_r)
            kk, kk_low = split(kk_r / sigma[:, None] - of_q[:, None] * qk_r)
            replace(kept + A_AT, times_rt(kept, kept + A_AT))
            aq, aq_low = split(tl.load(kept + A_AT + half()))
            ak, ak_low = split(tl.load(kept + A_AT + D + half()))
            gq, gk, gv = grad_query + place, grad_key + place, grad_value + place
            for begin in range(0, tokens, ROWS):
                rows = begin + tl.arange(0, ROWS)
                q_rows, k_rows = tile_of(q, strides[2], rows, tokens, WIDTH), tile_of(k_own, strides[2], rows, tokens, WIDTH)
                v_rows, e_rows = tile_of(v, strides[2], rows, tokens, WIDTH), tile_of(e, e_strides[2], rows, tokens, WIDTH)
                at = tl.arange(0, D)[None, :] + rows[:, None] * grad_strides[2]
                mask = inside(rows, tokens, WIDTH)
                x = tl.dot(k_rows, tl.trans(qk), tl.dot(q_rows, qq, tl.dot(v_rows, aq, tl.dot(e_rows, tq))))
                if THREE:
                    x = tl.dot(v_rows, aq_low, tl.dot(e_rows, tq_low, x))
                    x = tl.dot(k_rows, tl.trans(qk_low), tl.dot(q_rows, qq_low, x))
                tl.store(gq + at, x.to(tl.bfloat16), mask=mask)
                x = tl.dot(k_rows, kk, tl.dot(q_rows, qk, tl.dot(v_rows, ak, tl.dot(e_rows, tk))))
                if THREE:
                    x = tl.dot(v_rows, ak_low, tl.dot(e_rows, tk_low, x))
                    x = tl.dot(k_rows, kk_low, tl.dot(q_rows, qk_low, x))
                tl.store(gk + at, x.to(tl.bfloat16), mask=mask)
                x = tl.dot(k_rows, tl.trans(ak), tl.dot(q_rows, tl.trans(aq)))
                if THREE:
                    x = tl.dot(k_rows, tl.trans(ak_low), tl.dot(q_rows, tl.trans(aq_low), x))
                tl.store(gv + at, (x + e_rows.to(tl.float32)).to(tl.bfloat16), mask=mask)
            tl.debug_barrier()  # waits: the next head's matrices take the place of these
