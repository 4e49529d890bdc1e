"""Products of matrices of at most 32 rows, held in registers as blocks of 16 × 16, the smallest that `tl.dot` accepts.

Each term of a series is a product with the previous term. If the terms were in scratch memory, products would mostly wait
for loads and barriers. A square matrix has four blocks, a symmetric matrix three, and a panel of 16 columns two.
"""

import triton
import triton.language as tl

from osa.kernels.tiles import BLOCK, dot, load, store


@triton.jit
def load_square(a, alpha):
    """The blocks (A₁₁, A₁₂, A₂₁, A₂₂) of α A."""
    o_upper, o_lower = tl.arange(0, BLOCK), BLOCK + tl.arange(0, BLOCK)
    return (
        alpha * load(a, o_upper, o_upper),
        alpha * load(a, o_upper, o_lower),
        alpha * load(a, o_lower, o_upper),
        alpha * load(a, o_lower, o_lower),
    )


@triton.jit
def store_square(out, a):
    o_upper, o_lower = tl.arange(0, BLOCK), BLOCK + tl.arange(0, BLOCK)
    store(out, o_upper, o_upper, a[0])
    store(out, o_upper, o_lower, a[1])
    store(out, o_lower, o_upper, a[2])
    store(out, o_lower, o_lower, a[3])


@triton.jit
def load_symmetric(a):
    """The blocks (A₁₁, A₁₂, A₂₂) of a symmetric A."""
    o_upper, o_lower = tl.arange(0, BLOCK), BLOCK + tl.arange(0, BLOCK)
    return load(a, o_upper, o_upper), load(a, o_upper, o_lower), load(a, o_lower, o_lower)


@triton.jit
def store_symmetric(out, a):
    store_square(out, as_square(a))


@triton.jit
def load_panel(a, o_columns):
    """Loads the columns `o_columns` of A as a panel: its upper and its lower block."""
    return load(a, tl.arange(0, BLOCK), o_columns), load(a, BLOCK + tl.arange(0, BLOCK), o_columns)


@triton.jit
def store_panel(out, o_columns, a):
    store(out, tl.arange(0, BLOCK), o_columns, a[0])
    store(out, BLOCK + tl.arange(0, BLOCK), o_columns, a[1])


@triton.jit
def combine(alpha, a, beta, b):
    """The sum α A + β B of two symmetric matrices."""
    return alpha * a[0] + beta * b[0], alpha * a[1] + beta * b[1], alpha * a[2] + beta * b[2]


@triton.jit
def as_square(a):
    """Returns all four blocks of a symmetric matrix, given A₁₁, A₁₂ and A₂₂."""
    return a[0], a[1], tl.trans(a[1]), a[2]


@triton.jit
def times_commuting(a, b):
    """The product A B of two commuting symmetric matrices. It is symmetric."""
    zero = tl.zeros((BLOCK, BLOCK), tl.float32)
    return (
        dot(a[1], tl.trans(b[1]), dot(a[0], b[0], zero)),
        dot(a[1], b[2], dot(a[0], b[1], zero)),
        dot(a[2], b[2], dot(tl.trans(a[1]), b[1], zero)),
    )


@triton.jit
def square_transpose(a):
    return tl.trans(a[0]), tl.trans(a[2]), tl.trans(a[1]), tl.trans(a[3])


@triton.jit
def times_panel(a, b):
    """The product A B of a square matrix and a panel."""
    zero = tl.zeros((BLOCK, BLOCK), tl.float32)
    return dot(a[1], b[1], dot(a[0], b[0], zero)), dot(a[3], b[1], dot(a[2], b[0], zero))


@triton.jit
def times_square(a, b):
    """The product A B of two square matrices."""
    left, right = times_panel(a, (b[0], b[2])), times_panel(a, (b[1], b[3]))
    return left[0], right[0], left[1], right[1]


@triton.jit
def add_outer(sums, a, b):
    """The sum Σ + A Bᵀ, where Σ is a square matrix, and A and B are panels."""
    upper, lower = tl.trans(b[0]), tl.trans(b[1])
    return dot(a[0], upper, sums[0]), dot(a[0], lower, sums[1]), dot(a[1], upper, sums[2]), dot(a[1], lower, sums[3])
