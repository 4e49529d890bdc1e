"""Kernels for short sequences on CUDA: orthogonal attention and its gradients. A program computes one head after another.

All methods have the form

    exp(S) V = V + L T,        G = LᵀM,        X = LᵀV,

where mixing.py defines L, and computes T and A₁ to A₄ below. Let E be the gradient of the output and F = LᵀE. Then

    grad V = E + L A₄,        grad M = E A₁ᵀ + V A₂ᵀ + L A₃.

If balancing does not suffice for "exact" (see `osa.linalg.is_balanced`), the program uses the basis of "qr", which gives
the same result. With ALL_ROWS = 0, the registers cannot hold this basis, and the program returns NaN instead.
"""

import triton
import triton.language as tl

from osa.kernels.short.mixing import is_balanced, mixing, mixing_gradients
from osa.kernels.tiles import (
    BLOCK,
    MAX_ROWS,
    columns_of,
    head,
    load,
    matrix,
    multiply,
    scratch_at,
    slice_of,
    store,
    transpose,
)


@triton.jit
def _column_products(q, k, b_shear_q, b_shear_k):
    """Returns ⟨q', q'⟩, ⟨k', k'⟩ and ⟨q', k'⟩ of the sheared columns q' = q − a k and k' = k − b q of each pair."""
    o_columns = tl.arange(0, BLOCK)
    b_qq, b_kk, b_qk = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in range(0, q[3], BLOCK):
        o_rows = row + tl.arange(0, BLOCK)
        b_q, b_k = load(q, o_rows, o_columns).to(tl.float32), load(k, o_rows, o_columns).to(tl.float32)
        b_q, b_k = b_q - b_shear_q * b_k, b_k - b_shear_k * b_q
        b_qq += tl.sum(b_q * b_q, axis=0)
        b_kk += tl.sum(b_k * b_k, axis=0)
        b_qk += tl.sum(b_q * b_k, axis=0)
    return b_qq, b_kk, b_qk


@triton.jit(noinline=True)
def _gather(m, balance, q, k, METHOD: tl.constexpr):
    """Stores M = [Q, K] or, for "exact", the balanced M = [σ (Q − a ∘ K), (K − b ∘ Q) / σ]. Stores a, b and σ in `balance`.

    In each pair (q, k), balancing subtracts from the shorter column its projection onto the longer one. Then σ makes the two
    columns about equally long. The result is M R with R J Rᵀ = J. S = c M J Mᵀ stays the same, so the backward pass treats
    R as a constant. ‖M‖ and the rounding error of "exact" become smaller. σ is a power of two, so scaling is exact.
    Differences are computed in float64, because Q may nearly equal K.
    """
    o_columns = tl.arange(0, BLOCK)
    b_shear_q = tl.zeros((BLOCK,), tl.float32)
    b_shear_k, b_sigma, b_inverse = b_shear_q, b_shear_q + 1.0, b_shear_q + 1.0
    if METHOD == "exact":
        b_qq, b_kk, b_qk = _column_products(q, k, b_shear_q, b_shear_k)
        b_longer = tl.maximum(b_qq, b_kk)
        b_ratio = b_qk / tl.where(b_longer > 0, b_longer, 1.0)
        b_shear_q, b_shear_k = tl.where(b_kk >= b_qq, b_ratio, 0.0), tl.where(b_kk >= b_qq, 0.0, b_ratio)
        b_qq, b_kk, _ = _column_products(q, k, b_shear_q, b_shear_k)
        alive = (b_qq > 0) & (b_kk > 0)
        b_exponent = 0.25 * (tl.log2(tl.where(alive, b_kk, 1.0)) - tl.log2(tl.where(alive, b_qq, 1.0)))
        b_sigma, b_inverse = tl.exp2(tl.floor(b_exponent + 0.5)), tl.exp2(-tl.floor(b_exponent + 0.5))
    store(balance, tl.arange(0, 1), o_columns, b_shear_q[None, :])
    store(balance, 1 + tl.arange(0, 1), o_columns, b_shear_k[None, :])
    store(balance, 2 + tl.arange(0, 1), o_columns, b_sigma[None, :])
    for row in range(0, q[3], BLOCK):
        o_rows = row + tl.arange(0, BLOCK)
        b_q, b_k = load(q, o_rows, o_columns).to(tl.float64), load(k, o_rows, o_columns).to(tl.float64)
        store(columns_of(m, 0, q[4]), o_rows, o_columns, b_sigma * (b_q - b_shear_q * b_k))
        store(columns_of(m, q[4], q[4]), o_rows, o_columns, b_inverse * (b_k - b_shear_k * b_q))
    tl.debug_barrier()


@triton.jit(noinline=True)
def _scatter(grad_q, grad_k, grad_m, balance):
    """Stores the gradients of Q and K, which are the two halves of `grad_m` Rᵀ, with R from `_gather`."""
    o_columns = tl.arange(0, BLOCK)
    b_shear_q = load(balance, tl.arange(0, 1), o_columns)
    b_shear_k = load(balance, 1 + tl.arange(0, 1), o_columns)
    b_sigma = load(balance, 2 + tl.arange(0, 1), o_columns)
    width = grad_q[4]
    for row in range(0, grad_q[3], BLOCK):
        o_rows = row + tl.arange(0, BLOCK)
        b_q = b_sigma * load(columns_of(grad_m, 0, width), o_rows, o_columns)
        b_k = load(columns_of(grad_m, width, width), o_rows, o_columns) / tl.where(o_columns < width, b_sigma, 1.0)
        store(grad_q, o_rows, o_columns, b_q - b_shear_k * b_k)
        store(grad_k, o_rows, o_columns, b_k - b_shear_q * b_q)
    tl.debug_barrier()  # waits until all threads have read `grad_m`, which the next head overwrites


@triton.jit
def _gram_schmidt(basis, m, ALL_ROWS: tl.constexpr):
    """Stores B, an orthonormal basis of M's columns. Column j of B is zero if column j of M depends on earlier columns.

    Each column's components along the basis are subtracted twice, which makes B orthogonal up to rounding (Giraud et al.
    2005). A column counts as dependent if its remainder is as small as its rounding error.
    """
    o_rows, o_columns = tl.arange(0, ALL_ROWS), tl.arange(0, MAX_ROWS)
    b_basis = load(m, o_rows, o_columns)  # (ALL_ROWS, 2d): M at first. Step i replaces column i of M with column i of B
    for i_column in range(m[4]):
        b_column = tl.sum(tl.where(o_columns[None, :] == i_column, b_basis, 0.0), axis=1)  # (ALL_ROWS,)
        largest = tl.max(tl.abs(b_column), axis=0)
        b_column = b_column / tl.where(largest > 0, largest, 1.0)
        norm = tl.sqrt(tl.sum(b_column * b_column, axis=0))
        for _ in range(2):
            b_coefficients = tl.where(o_columns < i_column, tl.sum(b_basis * b_column[:, None], axis=0), 0.0)  # (2d,)
            b_column -= tl.sum(b_basis * b_coefficients[None, :], axis=1)
        rest = tl.sqrt(tl.sum(b_column * b_column, axis=0))
        b_column = tl.where(rest > 1e-6 * norm, b_column / tl.where(rest > 0, rest, 1.0), 0.0)
        b_basis = tl.where(o_columns[None, :] == i_column, b_column[:, None], b_basis)
    store(basis, o_rows, o_columns, b_basis)
    tl.debug_barrier()


@triton.jit(noinline=True)
def _gram_schmidt_apart(basis, m, ALL_ROWS: tl.constexpr):
    """Calls `_gram_schmidt` without inlining, so that a program that seldom needs a basis reserves no registers for it."""
    _gram_schmidt(basis, m, ALL_ROWS)


@triton.jit
def _either(a, b, is_first):
    """Returns `a` if `is_first`, and otherwise `b`. Both matrices must lie in the same scratch memory."""
    return (a[0], a[1], a[2], a[3], a[4], tl.where(is_first, a[5], b[5]))


@triton.jit
def _mix(t, left, v, g, scale, epsilon, scratch, METHOD: tl.constexpr, ITERATIONS: tl.constexpr):
    """Given G = LᵀM, computes and stores T, where exp(S) V = V + L T."""
    x, scratch = matrix(scratch, g[3], v[4])
    multiply(x, transpose(left), v, 1.0, None, 0.0)
    mixing(t, g, x, scale, epsilon, scratch, METHOD, ITERATIONS)


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def forward_kernel(
    query, key, value, scale, output, basis, scratch, q_strides, k_strides, v_strides, c_strides, o_strides,
    count, heads, tokens, scratch_size, epsilon, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ALL_ROWS: tl.constexpr,
    METHOD: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Stores exp(S) V for `count` matrices.

    For "qr", `basis` receives an orthonormal basis of the columns of each M, for the backward pass. For "exact" with
    ALL_ROWS = 0, `basis` receives the scale c of each matrix, or NaN if the output is NaN, so that the operator can warn.
    """
    free = slice_of(scratch, tl.program_id(0), scratch_size)
    m, free = matrix(free, tokens, 2 * WIDTH)
    own_basis, free = matrix(free, tokens, 2 * WIDTH)
    free = scratch_at(free[0] + free[1])
    balance, free = matrix(free, 3, WIDTH)
    g, free = matrix(free, 2 * WIDTH, 2 * WIDTH)
    t, free = matrix(free, 2 * WIDTH, VALUE_WIDTH)
    for i_head in range(tl.program_id(0), count, tl.num_programs(0)):
        q, k = head(query, q_strides, i_head, heads, tokens, WIDTH), head(key, k_strides, i_head, heads, tokens, WIDTH)
        _gather(m, balance, q, k, METHOD)
        if METHOD == "qr":
            left, _ = matrix(slice_of(basis, i_head, 2 * tokens * WIDTH), tokens, 2 * WIDTH)
            _gram_schmidt(left, m, ALL_ROWS)
        else:
            left = m
        multiply(g, transpose(left), m, 1.0, None, 0.0)
        v = head(value, v_strides, i_head, heads, tokens, VALUE_WIDTH)
        c = tl.load(head(scale, c_strides, i_head, heads, 1, 1)[0]).to(tl.float32)
        if METHOD != "exact":
            _mix(t, left, v, g, c, epsilon, free, METHOD, ITERATIONS)
        elif ALL_ROWS == 0:
            c = tl.where(is_balanced(g, c, free), c, float("nan"))
            tl.store(basis + i_head, c)
            _mix(t, left, v, g, c, epsilon, free, METHOD, ITERATIONS)
        else:
            keeps_digits = is_balanced(g, c, free)
            if keeps_digits:
                _mix(t, m, v, g, c, epsilon, free, "exact", ITERATIONS)
            else:
                _gram_schmidt_apart(own_basis, m, ALL_ROWS)
                multiply(g, transpose(own_basis), m, 1.0, None, 0.0)
                _mix(t, own_basis, v, g, c, epsilon, free, "qr", ITERATIONS)
            left = _either(m, own_basis, keeps_digits)
        multiply(head(output, o_strides, i_head, heads, tokens, VALUE_WIDTH), left, t, 1.0, v, 1.0)


@triton.jit
def _mix_backward(
    a1, a2, a3, a4, grad_scale, left, v, e, g, scale, epsilon, scratch,
    METHOD: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of c and the matrices A₁ to A₄, from which `backward_kernel` computes the other gradients."""
    x, scratch = matrix(scratch, g[3], v[4])
    f, scratch = matrix(scratch, g[3], v[4])
    multiply(x, transpose(left), v, 1.0, None, 0.0)
    multiply(f, transpose(left), e, 1.0, None, 0.0)
    gradient = mixing_gradients(a1, a2, a3, a4, g, x, f, scale, epsilon, scratch, METHOD, ITERATIONS)
    tl.store(grad_scale, gradient.to(grad_scale.dtype.element_ty))


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def backward_kernel(
    query, key, value, scale, basis, grad, grad_query, grad_key, grad_value, grad_scale, scratch,
    q_strides, k_strides, v_strides, c_strides, e_strides, gq_strides, gv_strides,
    count, heads, tokens, scratch_size, epsilon, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ALL_ROWS: tl.constexpr,
    METHOD: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of query, key, value and scale."""
    free = slice_of(scratch, tl.program_id(0), scratch_size)
    m, free = matrix(free, tokens, 2 * WIDTH)
    grad_m, free = matrix(free, tokens, 2 * WIDTH)
    own_basis, free = matrix(free, tokens, 2 * WIDTH)
    free = scratch_at(free[0] + free[1])
    balance, free = matrix(free, 3, WIDTH)
    g, free = matrix(free, 2 * WIDTH, 2 * WIDTH)
    a1, free = matrix(free, 2 * WIDTH, VALUE_WIDTH)
    a2, free = matrix(free, 2 * WIDTH, VALUE_WIDTH)
    a3, free = matrix(free, 2 * WIDTH, 2 * WIDTH)
    a4, free = matrix(free, 2 * WIDTH, VALUE_WIDTH)
    for i_head in range(tl.program_id(0), count, tl.num_programs(0)):
        q, k = head(query, q_strides, i_head, heads, tokens, WIDTH), head(key, k_strides, i_head, heads, tokens, WIDTH)
        _gather(m, balance, q, k, METHOD)
        v = head(value, v_strides, i_head, heads, tokens, VALUE_WIDTH)
        e = head(grad, e_strides, i_head, heads, tokens, VALUE_WIDTH)
        c, grad_c = tl.load(head(scale, c_strides, i_head, heads, 1, 1)[0]).to(tl.float32), grad_scale + i_head
        if METHOD == "qr":
            left, _ = matrix(slice_of(basis, i_head, 2 * tokens * WIDTH), tokens, 2 * WIDTH)
        else:
            left = m
        multiply(g, transpose(left), m, 1.0, None, 0.0)
        if METHOD != "exact":
            _mix_backward(a1, a2, a3, a4, grad_c, left, v, e, g, c, epsilon, free, METHOD, ITERATIONS)
        elif ALL_ROWS == 0:
            c = tl.where(is_balanced(g, c, free), c, float("nan"))
            _mix_backward(a1, a2, a3, a4, grad_c, left, v, e, g, c, epsilon, free, METHOD, ITERATIONS)
        else:
            keeps_digits = is_balanced(g, c, free)
            if keeps_digits:
                _mix_backward(a1, a2, a3, a4, grad_c, m, v, e, g, c, epsilon, free, "exact", ITERATIONS)
            else:
                _gram_schmidt_apart(own_basis, m, ALL_ROWS)
                multiply(g, transpose(own_basis), m, 1.0, None, 0.0)
                _mix_backward(a1, a2, a3, a4, grad_c, own_basis, v, e, g, c, epsilon, free, "qr", ITERATIONS)
            left = _either(m, own_basis, keeps_digits)
        multiply(head(grad_value, gv_strides, i_head, heads, tokens, VALUE_WIDTH), left, a4, 1.0, e, 1.0)
        multiply(grad_m, e, transpose(a1), 1.0, None, 0.0)
        multiply(grad_m, v, transpose(a2), 1.0, grad_m, 1.0)
        multiply(grad_m, left, a3, 1.0, grad_m, 1.0)
        grad_q = head(grad_query, gq_strides, i_head, heads, tokens, WIDTH)
        grad_k = head(grad_key, gq_strides, i_head, heads, tokens, WIDTH)
        _scatter(grad_q, grad_k, grad_m, balance)
