"""φ₁(Z) Y = (e^Z − I) Z⁻¹ Y and its gradients within one Triton program, and as kernels of their own.

Registers hold Z, which has up to 32 rows (blocks.py).
"""

import triton
import triton.language as tl

from osa.kernels.short import blocks
from osa.kernels.tiles import (
    LARGEST_NORM,
    columns_of,
    copy,
    inner_product,
    matrix,
    multiply,
    set_identity,
    slice_of,
    transpose,
)

RADIUS = tl.constexpr(3.0)  # largest ‖S‖₂ of a single series: its terms stay below 3³/3! = 4.5
EPS = tl.constexpr(1.2e-7)
MOST_TERMS = tl.constexpr(19)  # terms for ρ = 3: 3¹⁹/19! is below EPS/4, so that the degree is 18


@triton.jit
def _terms(z):
    """Plans the sum φ₁(Z) Y: how often Z is halved, the Taylor degree m, and 2^−(halvings).

    ρ(Z) = ‖S‖₂ ≤ (½ ‖S‖_F²)^½ = (−½ tr Z²)^½, since the eigenvalues are pairs ±iλ. The second term covers its rounding.
    Z is halved until ρ ≤ 3, so that the terms lose no digit; m is the least with ρ^{m+1} / (m + 1)! ≤ eps/4.
    """
    square = tl.maximum(-0.5 * inner_product(z, transpose(z)), 0.0) + EPS * inner_product(z, z)
    radius = tl.sqrt(square)
    fits = radius <= LARGEST_NORM  # False for NaN
    radius = tl.where(fits, radius, 0.0)
    halvings, fraction = 0, tl.full([], 1.0, tl.float32)
    while radius > RADIUS:
        radius *= 0.5
        fraction *= 0.5
        halvings += 1
    degree, term = 1, radius * radius / 2
    while term > EPS / 4:
        degree += 1
        term *= radius / (degree + 1)
    return halvings, degree, tl.where(fits, fraction, float("nan"))


@triton.jit(noinline=True)
def _taylor(out, z, fraction, y, degree):
    """out ← Σ_{k ≤ m} Z^k Y / (k + 1)! with Z times the fraction, by Horner's rule."""
    z_blocks = blocks.load_square(z, fraction)
    for column in range(0, out[4], blocks.BLOCK):
        columns = column + tl.arange(0, blocks.BLOCK)
        y_upper, y_lower = blocks.load_panel(y, columns)
        upper, lower = y_upper, y_lower
        for k in range(degree):
            z_upper, z_lower = blocks.times_panel(z_blocks, (upper, lower))
            weight = 1.0 / (degree + 1 - k)
            upper, lower = y_upper + weight * z_upper, y_lower + weight * z_lower
        tl.debug_barrier()  # `out` may be Y
        blocks.store_panel(out, columns, (upper, lower))
    tl.debug_barrier()


@triton.jit
def _halved(phi, expm1, z, degree, fraction):
    """φ₁(Z) and e^Z − I = Z φ₁(Z) with Z times the fraction."""
    set_identity(expm1)
    _taylor(phi, z, fraction, expm1, degree)
    multiply(expm1, z, phi, fraction, None, 0.0)


@triton.jit
def phi1_times(out, z, y, scratch):
    """out ← φ₁(Z) Y; where Z was halved, φ₁(2Z) = φ₁(Z) + ½ (e^Z − I) φ₁(Z) doubles it (Higham 2008, Section 10.7.4)."""
    halvings, degree, fraction = _terms(z)
    if halvings == 0:
        _taylor(out, z, fraction, y, degree)
    else:
        phi, scratch = matrix(scratch, z[3], z[3])
        expm1, scratch = matrix(scratch, z[3], z[3])
        _halved(phi, expm1, z, degree, fraction)
        multiply(out, phi, y, 1.0, None, 0.0)
        for _ in range(halvings):
            multiply(out, expm1, out, 0.5, out, 1.0)
            multiply(phi, expm1, expm1, 1.0, expm1, 2.0)
            copy(expm1, phi, 1.0)


@triton.jit
def phi1_gradients(u, grad_y, grad_z, z, y, h, scratch):
    """U = φ₁(Z) Y, and of ⟨H, U⟩ the gradients φ₁(Zᵀ) H of Y and D = Σ_{a,b} (Zᵀ)^a H Yᵀ (Zᵀ)^b / (a + b + 2)! of Z.

    With one term more than the value needs, Horner's rule gives W_k = (Y + Z W_{k+1}) / (k + 2), and H_0 = H gives
    H_k = Zᵀ H_{k−1} / (k + 1), for a block of columns at a time:

        U = Y + Z W_0,        φ₁(Zᵀ) H = Σ H_k,        D = Σ H_k W_kᵀ.

    Where Z was halved, let e = e^Z − I, Φ = φ₁(Z), and let L = Σ (Zᵀ)^a H Yᵀ (Zᵀ)^b / (a + b + 1)! = Zᵀ D + H Uᵀ be the
    gradient of the exponential. The gradients for twice Z come from

        D ← ¼ (2 D + Φᵀ L + D eᵀ),    L ← L + ½ (eᵀ L + L eᵀ),    Φ ← Φ + ½ e Φ,    e ← 2 e + e²,

    which splits the integral D = ∫_{0 ≤ s ≤ t ≤ 1} e^{(t−s)Zᵀ} H Yᵀ e^{sZᵀ} at ½; finally U = Φ Y and φ₁(Zᵀ) H = Φᵀ H.
    """
    halvings, degree, fraction = _terms(z)
    size = y[3]
    terms, scratch = matrix(scratch, size, MOST_TERMS * blocks.BLOCK)
    _gradients(u, grad_y, grad_z, z, y, h, degree, fraction, terms)
    if halvings > 0:
        expm1, scratch = matrix(scratch, size, size)
        phi, scratch = matrix(scratch, size, size)
        grad_exp, scratch = matrix(scratch, size, size)
        result, scratch = matrix(scratch, size, size)
        _halved(phi, expm1, z, degree, fraction)
        multiply(grad_exp, transpose(z), grad_z, fraction, None, 0.0)
        multiply(grad_exp, h, transpose(u), 1.0, grad_exp, 1.0)
        for _ in range(halvings):
            multiply(result, transpose(phi), grad_exp, 0.25, grad_z, 0.5)
            multiply(result, grad_z, transpose(expm1), 0.25, result, 1.0)
            copy(grad_z, result, 1.0)
            multiply(result, transpose(expm1), grad_exp, 0.5, grad_exp, 1.0)
            multiply(result, grad_exp, transpose(expm1), 0.5, result, 1.0)
            copy(grad_exp, result, 1.0)
            multiply(phi, expm1, phi, 0.5, phi, 1.0)
            multiply(result, expm1, expm1, 1.0, expm1, 2.0)
            copy(expm1, result, 1.0)
        multiply(u, phi, y, 1.0, None, 0.0)
        multiply(grad_y, transpose(phi), h, 1.0, None, 0.0)


@triton.jit(noinline=True)
def _gradients(u, grad_y, grad_z, z, y, h, degree, fraction, terms):
    """Does what `phi1_gradients` does, for Z times the fraction, with the W_k in scratch memory, where nothing waits."""
    zero = tl.zeros((blocks.BLOCK, blocks.BLOCK), tl.float32)
    sums = (zero, zero, zero, zero)
    z_blocks = blocks.load_square(z, fraction)
    transposed = blocks.square_transpose(z_blocks)
    for column in range(0, y[4], blocks.BLOCK):
        columns, own = column + tl.arange(0, blocks.BLOCK), tl.arange(0, blocks.BLOCK)
        y_upper, y_lower = blocks.load_panel(y, columns)
        upper, lower = y_upper / (degree + 2), y_lower / (degree + 2)
        for i in range(degree + 1):
            k = degree - i
            blocks.store_panel(columns_of(terms, k * blocks.BLOCK, blocks.BLOCK), own, (upper, lower))
            z_upper, z_lower = blocks.times_panel(z_blocks, (upper, lower))
            weight = 1.0 / (k + 1)
            upper, lower = weight * (y_upper + z_upper), weight * (y_lower + z_lower)
        blocks.store_panel(u, columns, (upper, lower))
        tl.debug_barrier()
        upper, lower = blocks.load_panel(h, columns)
        sum_upper, sum_lower = upper, lower
        for k in range(degree + 1):
            term = blocks.load_panel(columns_of(terms, k * blocks.BLOCK, blocks.BLOCK), own)
            sums = blocks.add_outer(sums, (upper, lower), term)
            z_upper, z_lower = blocks.times_panel(transposed, (upper, lower))
            weight = 1.0 / (k + 2)
            upper, lower = weight * z_upper, weight * z_lower
            sum_upper, sum_lower = sum_upper + upper, sum_lower + lower
        blocks.store_panel(grad_y, columns, (sum_upper, sum_lower))
        tl.debug_barrier()
    blocks.store_square(grad_z, sums)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["count"])
def forward_kernel(z, y, output, scratch, count, scratch_size, SIZE: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """output = φ₁(Z) Y of `count` contiguous matrices."""
    own = slice_of(scratch, tl.program_id(0), scratch_size)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        z_i, _ = matrix(slice_of(z, i, SIZE * SIZE), SIZE, SIZE)
        y_i, _ = matrix(slice_of(y, i, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
        output_i, _ = matrix(slice_of(output, i, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
        phi1_times(output_i, z_i, y_i, own)


@triton.jit(do_not_specialize=["count"])
def backward_kernel(z, y, grad, grad_z, grad_y, scratch, count, scratch_size, SIZE: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """The gradients of Z and Y from the gradient of φ₁(Z) Y."""
    u, own = matrix(slice_of(scratch, tl.program_id(0), scratch_size), SIZE, VALUE_WIDTH)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        z_i, _ = matrix(slice_of(z, i, SIZE * SIZE), SIZE, SIZE)
        y_i, _ = matrix(slice_of(y, i, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
        grad_i, _ = matrix(slice_of(grad, i, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
        grad_z_i, _ = matrix(slice_of(grad_z, i, SIZE * SIZE), SIZE, SIZE)
        grad_y_i, _ = matrix(slice_of(grad_y, i, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
        phi1_gradients(u, grad_y_i, grad_z_i, z_i, y_i, grad_i, own)
