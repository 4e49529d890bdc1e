"""Orthogonal attention on CUDA in one launch forward and one backward: Triton kernels, a program for a matrix at a time.

The plain route of osa/functional.py gives the device hundreds of small products. Here a program takes the query, key and
value of one head of one sequence through all products, sums as many terms of φ₁ as the norm of the head's matrix asks for,
and goes on with its next head. All methods have one form,

    exp(S) V = V + L T,        G = LᵀM,        X = LᵀV,

with L and T of mixing.py, and one form of the gradient, given that of the output, E, and F = LᵀE:

    grad V = E + L A₄,        grad M = E A₁ᵀ + V A₂ᵀ + L A₃.

Where balancing does not suffice for "exact" (see `osa.linalg.is_balanced`), the program takes the basis of "qr" instead,
for the same S; where a basis does not fit the registers, ALL_ROWS is 0 and the result is NaN. One program adds up each sum,
so that every run gives the same bits.
"""

import triton
import triton.language as tl

from osa.kernels.short.mixing import is_balanced, mixing, mixing_gradients
from osa.kernels.tiles import (
    BLOCK,
    SIZE,
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
def _column_products(q, k, on_key, on_query):
    """⟨q, q⟩, ⟨k, k⟩ and ⟨q, k⟩ of each pair of columns q − on_key · k and k − on_query · q."""
    columns = tl.arange(0, BLOCK)
    q_q, k_k, q_k = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in range(0, q[3], BLOCK):
        rows = row + tl.arange(0, BLOCK)
        q_tile, k_tile = load(q, rows, columns).to(tl.float32), load(k, rows, columns).to(tl.float32)
        q_tile, k_tile = q_tile - on_key * k_tile, k_tile - on_query * q_tile
        q_q += tl.sum(q_tile * q_tile, axis=0)
        k_k += tl.sum(k_tile * k_tile, axis=0)
        q_k += tl.sum(q_tile * k_tile, axis=0)
    return q_q, k_k, q_k


@triton.jit(noinline=True)
def _gather(m, balance, q, k, METHOD: tl.constexpr):
    """M ← [Q, K]; for "exact" balanced, M ← [s (Q − a ∘ K), (K − b ∘ Q) / s], and the rows a, b and s of `balance`.

    The shorter column of each pair loses its projection on the longer, and s makes the lengths of the two alike. M ← M T
    with T J Tᵀ = J leaves S = c M J Mᵀ as it is, so that T is constant for the backward pass, and makes ‖M‖ small, with
    which the rounding of "exact" grows. s is a power of two, which rounds nothing. The differences are in float64 as Q may
    nearly be K.
    """
    columns = tl.arange(0, BLOCK)
    a = tl.zeros((BLOCK,), tl.float32)
    b, s, inverse = a, a + 1.0, a + 1.0
    if METHOD == "exact":
        q_q, k_k, q_k = _column_products(q, k, a, b)
        longer = tl.maximum(q_q, k_k)
        ratio = q_k / tl.where(longer > 0, longer, 1.0)
        a, b = tl.where(k_k >= q_q, ratio, 0.0), tl.where(k_k >= q_q, 0.0, ratio)
        q_q, k_k, _ = _column_products(q, k, a, b)
        alive = (q_q > 0) & (k_k > 0)
        exponent = 0.25 * (tl.log2(tl.where(alive, k_k, 1.0)) - tl.log2(tl.where(alive, q_q, 1.0)))
        s, inverse = tl.exp2(tl.floor(exponent + 0.5)), tl.exp2(-tl.floor(exponent + 0.5))
    store(balance, tl.arange(0, 1), columns, a[None, :])
    store(balance, 1 + tl.arange(0, 1), columns, b[None, :])
    store(balance, 2 + tl.arange(0, 1), columns, s[None, :])
    for row in range(0, q[3], BLOCK):
        rows = row + tl.arange(0, BLOCK)
        q_tile, k_tile = load(q, rows, columns).to(tl.float64), load(k, rows, columns).to(tl.float64)
        store(columns_of(m, 0, q[4]), rows, columns, s * (q_tile - a * k_tile))
        store(columns_of(m, q[4], q[4]), rows, columns, inverse * (k_tile - b * q_tile))
    tl.debug_barrier()


@triton.jit(noinline=True)
def _scatter(grad_q, grad_k, grad_m, balance):
    """The gradients of Q and K from that of M T, as `_gather` makes it: times Tᵀ."""
    columns = tl.arange(0, BLOCK)
    a = load(balance, tl.arange(0, 1), columns)
    b = load(balance, 1 + tl.arange(0, 1), columns)
    s = load(balance, 2 + tl.arange(0, 1), columns)
    width = grad_q[4]
    for row in range(0, grad_q[3], BLOCK):
        rows = row + tl.arange(0, BLOCK)
        q_tile = s * load(columns_of(grad_m, 0, width), rows, columns)
        k_tile = load(columns_of(grad_m, width, width), rows, columns) / tl.where(columns < width, s, 1.0)
        store(grad_q, rows, columns, q_tile - b * k_tile)
        store(grad_k, rows, columns, k_tile - a * q_tile)
    tl.debug_barrier()  # the next matrix overwrites what has been read


@triton.jit
def _gram_schmidt(basis, m, ALL_ROWS: tl.constexpr):
    """B of M: orthonormal columns, and zeros where a column depends on those before it.

    Each column loses its components in the basis twice, which suffices for orthogonality to rounding (Giraud et al. 2005).
    A remainder within the rounding of the column is no direction of M: the column of M + E, for some E of that size, lies
    in the span of the others.
    """
    rows, columns = tl.arange(0, ALL_ROWS), tl.arange(0, SIZE)
    result = load(m, rows, columns)  # (ALL_ROWS, 2d), of which the first i columns are B's
    for i in range(m[4]):
        column = tl.sum(tl.where(columns[None, :] == i, result, 0.0), axis=1)  # (ALL_ROWS,)
        largest = tl.max(tl.abs(column), axis=0)
        column = column / tl.where(largest > 0, largest, 1.0)
        norm = tl.sqrt(tl.sum(column * column, axis=0))
        for _ in range(2):
            coefficients = tl.where(columns < i, tl.sum(result * column[:, None], axis=0), 0.0)  # (2d,)
            column -= tl.sum(result * coefficients[None, :], axis=1)
        rest = tl.sqrt(tl.sum(column * column, axis=0))
        column = tl.where(rest > 1e-6 * norm, column / tl.where(rest > 0, rest, 1.0), 0.0)
        result = tl.where(columns[None, :] == i, column[:, None], result)
    store(basis, rows, columns, result)
    tl.debug_barrier()


@triton.jit(noinline=True)
def _gram_schmidt_apart(basis, m, ALL_ROWS: tl.constexpr):
    """Calls `_gram_schmidt`, so that a program which seldom needs a basis keeps no register for one."""
    _gram_schmidt(basis, m, ALL_ROWS)


@triton.jit
def _either(a, b, is_first):
    """One of two matrices of one shape in one memory."""
    return (a[0], a[1], a[2], a[3], a[4], tl.where(is_first, a[5], b[5]))


@triton.jit
def _mix(t, left, v, g, scale, epsilon, scratch, METHOD: tl.constexpr, ITERATIONS: tl.constexpr):
    """T of V + L T, given G."""
    x, scratch = matrix(scratch, g[3], v[4])
    multiply(x, transpose(left), v, 1.0, None, 0.0)
    mixing(t, g, x, scale, epsilon, scratch, METHOD, ITERATIONS)


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def forward_kernel(
    query, key, value, scale, output, basis, scratch, q_strides, k_strides, v_strides, c_strides, o_strides,
    count, heads, tokens, scratch_size, epsilon, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ALL_ROWS: tl.constexpr,
    METHOD: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """output = exp(S) V of `count` matrices; `basis` has the bases of "qr", or the c of "exact" without a basis."""
    own = slice_of(scratch, tl.program_id(0), scratch_size)
    m, own = matrix(own, tokens, 2 * WIDTH)
    own_basis, own = matrix(own, tokens, 2 * WIDTH)
    own = scratch_at(own[0] + own[1])
    balance, own = matrix(own, 3, WIDTH)
    g, own = matrix(own, 2 * WIDTH, 2 * WIDTH)
    t, own = matrix(own, 2 * WIDTH, VALUE_WIDTH)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
        _gather(m, balance, q, k, METHOD)
        if METHOD == "qr":
            left, _ = matrix(slice_of(basis, i, 2 * tokens * WIDTH), tokens, 2 * WIDTH)
            _gram_schmidt(left, m, ALL_ROWS)
        else:
            left = m
        multiply(g, transpose(left), m, 1.0, None, 0.0)
        v = head(value, v_strides, i, heads, tokens, VALUE_WIDTH)
        c = tl.load(head(scale, c_strides, i, heads, 1, 1)[0]).to(tl.float32)
        if METHOD != "exact":
            _mix(t, left, v, g, c, epsilon, own, METHOD, ITERATIONS)
        elif ALL_ROWS == 0:
            c = tl.where(is_balanced(g, c, own), c, float("nan"))
            tl.store(basis + i, c)
            _mix(t, left, v, g, c, epsilon, own, METHOD, ITERATIONS)
        else:
            keeps_digits = is_balanced(g, c, own)
            if keeps_digits:
                _mix(t, m, v, g, c, epsilon, own, "exact", ITERATIONS)
            else:
                _gram_schmidt_apart(own_basis, m, ALL_ROWS)
                multiply(g, transpose(own_basis), m, 1.0, None, 0.0)
                _mix(t, own_basis, v, g, c, epsilon, own, "qr", ITERATIONS)
            left = _either(m, own_basis, keeps_digits)
        multiply(head(output, o_strides, i, heads, tokens, VALUE_WIDTH), left, t, 1.0, v, 1.0)


@triton.jit
def _mix_backward(
    a1, a2, a3, a4, grad_scale, left, v, e, g, scale, epsilon, scratch,
    METHOD: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """A₁ to A₄ and the gradient of c, given G."""
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
    """The gradients of query, key and value, and of each matrix's own c."""
    own = slice_of(scratch, tl.program_id(0), scratch_size)
    m, own = matrix(own, tokens, 2 * WIDTH)
    grad_m, own = matrix(own, tokens, 2 * WIDTH)
    own_basis, own = matrix(own, tokens, 2 * WIDTH)
    own = scratch_at(own[0] + own[1])
    balance, own = matrix(own, 3, WIDTH)
    g, own = matrix(own, 2 * WIDTH, 2 * WIDTH)
    a1, own = matrix(own, 2 * WIDTH, VALUE_WIDTH)
    a2, own = matrix(own, 2 * WIDTH, VALUE_WIDTH)
    a3, own = matrix(own, 2 * WIDTH, 2 * WIDTH)
    a4, own = matrix(own, 2 * WIDTH, VALUE_WIDTH)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        q, k = head(query, q_strides, i, heads, tokens, WIDTH), head(key, k_strides, i, heads, tokens, WIDTH)
        _gather(m, balance, q, k, METHOD)
        v = head(value, v_strides, i, heads, tokens, VALUE_WIDTH)
        e = head(grad, e_strides, i, heads, tokens, VALUE_WIDTH)
        c, grad_c = tl.load(head(scale, c_strides, i, heads, 1, 1)[0]).to(tl.float32), grad_scale + i
        if METHOD == "qr":
            left, _ = matrix(slice_of(basis, i, 2 * tokens * WIDTH), tokens, 2 * WIDTH)
        else:
            left = m
        multiply(g, transpose(left), m, 1.0, None, 0.0)
        if METHOD != "exact":
            _mix_backward(a1, a2, a3, a4, grad_c, left, v, e, g, c, epsilon, own, METHOD, ITERATIONS)
        elif ALL_ROWS == 0:
            c = tl.where(is_balanced(g, c, own), c, float("nan"))
            _mix_backward(a1, a2, a3, a4, grad_c, left, v, e, g, c, epsilon, own, METHOD, ITERATIONS)
        else:
            keeps_digits = is_balanced(g, c, own)
            if keeps_digits:
                _mix_backward(a1, a2, a3, a4, grad_c, m, v, e, g, c, epsilon, own, "exact", ITERATIONS)
            else:
                _gram_schmidt_apart(own_basis, m, ALL_ROWS)
                multiply(g, transpose(own_basis), m, 1.0, None, 0.0)
                _mix_backward(a1, a2, a3, a4, grad_c, own_basis, v, e, g, c, epsilon, own, "qr", ITERATIONS)
            left = _either(m, own_basis, keeps_digits)
        multiply(head(grad_value, gv_strides, i, heads, tokens, VALUE_WIDTH), left, a4, 1.0, e, 1.0)
        multiply(grad_m, e, transpose(a1), 1.0, None, 0.0)
        multiply(grad_m, v, transpose(a2), 1.0, grad_m, 1.0)
        multiply(grad_m, left, a3, 1.0, grad_m, 1.0)
        grad_q = head(grad_query, gq_strides, i, heads, tokens, WIDTH)
        grad_k = head(grad_key, gq_strides, i, heads, tokens, WIDTH)
        _scatter(grad_q, grad_k, grad_m, balance)
