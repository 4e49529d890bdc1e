"""Two kernels, and functions for other kernels, that compute φ₁(Z) Y = (e^Z − I) Z⁻¹ Y and its gradients.

Z has up to 32 rows and stays in registers (see blocks.py).
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

RADIUS = tl.constexpr(3.0)  # maximum ‖S‖₂ for a single series: its terms are then at most 3³/3! = 4.5
EPS = tl.constexpr(1.2e-7)
MAX_TERMS = tl.constexpr(19)  # number of terms for ‖S‖₂ = RADIUS, because RADIUS¹⁹/19! is below EPS/4


@triton.jit
def _terms(z):
    """Returns the number of halvings of Z, the Taylor degree m, and the fraction 2^−halvings.

    ρ(Z) = ‖S‖₂ ≤ (½ ‖S‖_F²)^½ = (−½ tr Z²)^½, since the eigenvalues are pairs ±iλ. To allow for rounding errors, the code
    adds EPS ‖Z‖_F² to −½ tr Z². Z is halved until ρ ≤ RADIUS, so that terms hardly cancel. m is the smallest degree with
    ρ^{m+1} / (m + 1)! ≤ EPS/4. If ρ > LARGEST_NORM, the fraction is NaN.
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
    """out ← Σ_{k ≤ degree} (fZ)^k Y / (k + 1)! by Horner's rule, where f is the fraction."""
    b_z = blocks.load_square(z, fraction)
    for column in range(0, out[4], blocks.BLOCK):
        o_columns = column + tl.arange(0, blocks.BLOCK)
        b_y_upper, b_y_lower = blocks.load_panel(y, o_columns)
        b_upper, b_lower = b_y_upper, b_y_lower
        for i_term in range(degree):
            b_z_upper, b_z_lower = blocks.times_panel(b_z, (b_upper, b_lower))
            weight = 1.0 / (degree + 1 - i_term)
            b_upper, b_lower = b_y_upper + weight * b_z_upper, b_y_lower + weight * b_z_lower
        tl.debug_barrier()  # waits until all threads have read Y, because `out` may be Y
        blocks.store_panel(out, o_columns, (b_upper, b_lower))
    tl.debug_barrier()


@triton.jit
def _halved(phi, expm1, z, degree, fraction):
    """Stores φ₁(fZ) and e^{fZ} − I = fZ φ₁(fZ), where f is the fraction."""
    set_identity(expm1)
    _taylor(phi, z, fraction, expm1, degree)
    multiply(expm1, z, phi, fraction, None, 0.0)


@triton.jit
def phi1_times(out, z, y, scratch):
    """out ← φ₁(Z) Y. The rule φ₁(2Z) = φ₁(Z) + ½ (e^Z − I) φ₁(Z) undoes each halving of Z (Higham 2008, Section 10.7.4)."""
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
    """Stores U = φ₁(Z) Y, and the gradients of ⟨H, U⟩: φ₁(Zᵀ) H with respect to Y, and D with respect to Z.

    D = Σ_{a,b} (Zᵀ)^a H Yᵀ (Zᵀ)^b / (a + b + 2)!. The code processes a block of columns at a time, and sums one more term
    than U needs. Let W_k = (Y + Z W_{k+1}) / (k + 2) by Horner's rule, H_0 = H and H_k = Zᵀ H_{k−1} / (k + 1). Then

        U = Y + Z W_0,        φ₁(Zᵀ) H = Σ H_k,        D = Σ H_k W_kᵀ.

    If ‖S‖₂ > RADIUS, Z is first halved several times. Let e = e^Z − I and Φ = φ₁(Z). With respect to Z, ⟨H, e^Z Y⟩ has the
    gradient L = Σ (Zᵀ)^a H Yᵀ (Zᵀ)^b / (a + b + 1)! = Zᵀ D + H Uᵀ. Each doubling of Z updates:

        D ← ¼ (2 D + Φᵀ L + D eᵀ),    L ← L + ½ (eᵀ L + L eᵀ),    Φ ← Φ + ½ e Φ,    e ← 2 e + e².

    The rule for D splits the integral D = ∫_{0 ≤ s ≤ t ≤ 1} e^{(t−s)Zᵀ} H Yᵀ e^{sZᵀ} at ½. Finally,
    U = Φ Y and φ₁(Zᵀ) H = Φᵀ H.
    """
    halvings, degree, fraction = _terms(z)
    size = y[3]
    terms, scratch = matrix(scratch, size, MAX_TERMS * blocks.BLOCK)
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
    """Stores the results of `phi1_gradients` for fraction · Z. `terms` is scratch memory for the W_k defined there."""
    zero = tl.zeros((blocks.BLOCK, blocks.BLOCK), tl.float32)
    b_sums = (zero, zero, zero, zero)
    b_z = blocks.load_square(z, fraction)
    b_zt = blocks.square_transpose(b_z)
    for column in range(0, y[4], blocks.BLOCK):
        o_columns, o_term = column + tl.arange(0, blocks.BLOCK), tl.arange(0, blocks.BLOCK)
        b_y_upper, b_y_lower = blocks.load_panel(y, o_columns)
        b_upper, b_lower = b_y_upper / (degree + 2), b_y_lower / (degree + 2)
        for i_back in range(degree + 1):
            i_term = degree - i_back
            blocks.store_panel(columns_of(terms, i_term * blocks.BLOCK, blocks.BLOCK), o_term, (b_upper, b_lower))
            b_z_upper, b_z_lower = blocks.times_panel(b_z, (b_upper, b_lower))
            weight = 1.0 / (i_term + 1)
            b_upper, b_lower = weight * (b_y_upper + b_z_upper), weight * (b_y_lower + b_z_lower)
        blocks.store_panel(u, o_columns, (b_upper, b_lower))
        tl.debug_barrier()
        b_upper, b_lower = blocks.load_panel(h, o_columns)
        b_sum_upper, b_sum_lower = b_upper, b_lower
        for i_term in range(degree + 1):
            b_term = blocks.load_panel(columns_of(terms, i_term * blocks.BLOCK, blocks.BLOCK), o_term)
            b_sums = blocks.add_outer(b_sums, (b_upper, b_lower), b_term)
            b_z_upper, b_z_lower = blocks.times_panel(b_zt, (b_upper, b_lower))
            weight = 1.0 / (i_term + 2)
            b_upper, b_lower = weight * b_z_upper, weight * b_z_lower
            b_sum_upper, b_sum_lower = b_sum_upper + b_upper, b_sum_lower + b_lower
        blocks.store_panel(grad_y, o_columns, (b_sum_upper, b_sum_lower))
        tl.debug_barrier()
    blocks.store_square(grad_z, b_sums)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["count"])
def forward_kernel(z, y, output, scratch, count, scratch_size, N: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """output ← φ₁(Z) Y for `count` contiguous matrices."""
    free = slice_of(scratch, tl.program_id(0), scratch_size)
    for i_matrix in range(tl.program_id(0), count, tl.num_programs(0)):
        z_i, _ = matrix(slice_of(z, i_matrix, N * N), N, N)
        y_i, _ = matrix(slice_of(y, i_matrix, N * VALUE_WIDTH), N, VALUE_WIDTH)
        output_i, _ = matrix(slice_of(output, i_matrix, N * VALUE_WIDTH), N, VALUE_WIDTH)
        phi1_times(output_i, z_i, y_i, free)


@triton.jit(do_not_specialize=["count"])
def backward_kernel(z, y, grad, grad_z, grad_y, scratch, count, scratch_size, N: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """Stores the gradients of Z and Y, given the gradient of φ₁(Z) Y."""
    u, free = matrix(slice_of(scratch, tl.program_id(0), scratch_size), N, VALUE_WIDTH)
    for i_matrix in range(tl.program_id(0), count, tl.num_programs(0)):
        z_i, _ = matrix(slice_of(z, i_matrix, N * N), N, N)
        y_i, _ = matrix(slice_of(y, i_matrix, N * VALUE_WIDTH), N, VALUE_WIDTH)
        grad_i, _ = matrix(slice_of(grad, i_matrix, N * VALUE_WIDTH), N, VALUE_WIDTH)
        grad_z_i, _ = matrix(slice_of(grad_z, i_matrix, N * N), N, N)
        grad_y_i, _ = matrix(slice_of(grad_y, i_matrix, N * VALUE_WIDTH), N, VALUE_WIDTH)
        phi1_gradients(u, grad_y_i, grad_z_i, z_i, y_i, grad_i, free)
