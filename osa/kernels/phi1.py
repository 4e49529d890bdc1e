"""φ₁(Z) Y = (e^Z − I) Z⁻¹ Y and its gradients within one Triton program, and as kernels of their own."""

import triton
import triton.language as tl

from osa.kernels import blocks
from osa.kernels.tiles import (
    add,
    columns_of,
    copy,
    inner_product,
    load,
    matrix,
    multiply,
    set_identity,
    slice_of,
    store,
    transpose,
)

RADIUS = tl.constexpr(3.0)  # largest ‖S‖₂ of a single series: its terms stay below 3³/3! = 4.5
LIMIT = tl.constexpr(16384.0)  # beyond this ‖S‖ float32 holds no digit of exp(S)
EPS = tl.constexpr(1.2e-7)
MOST_TERMS = tl.constexpr(20)  # of ρ = 3: 3¹⁹/19! is below EPS/4, so that the degree is 18; one more for powers


@triton.jit
def _terms(z, TILES: tl.constexpr):
    """How φ₁(Z) Y is summed: how often Z is halved, the Taylor degree m, and 2^−(halvings).

    ρ(Z) = ‖S‖₂ ≤ (½ ‖S‖_F²)^½ = (−½ tr Z²)^½, since the eigenvalues are pairs ±iλ. The second term covers its rounding.
    Z is halved until ρ ≤ 3, so that the terms lose no digit; m is the least with ρ^{m+1} / (m + 1)! ≤ eps/4.
    """
    square = tl.maximum(-0.5 * inner_product(z, transpose(z), TILES), 0.0) + EPS * inner_product(z, z, TILES)
    radius = tl.sqrt(square)
    fits = radius <= LIMIT  # NaN does not
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


@triton.jit
def _taylor(out, z, fraction, y, degree, TILES: tl.constexpr):
    """out ← Σ_{k ≤ m} Z^k Y / (k + 1)! with Z times the fraction, by Horner's rule."""
    if TILES[0] == blocks.SIZE:
        _taylor_in_registers(out, z, fraction, y, degree)
    else:
        multiply(out, z, y, fraction / (degree + 1), y, 1.0, TILES)
        for k in range(1, degree):
            multiply(out, z, out, fraction / (degree + 1 - k), y, 1.0, TILES)


@triton.jit(noinline=True)
def _taylor_in_registers(out, z, fraction, y, degree):
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
def _halved(phi, expm1, z, degree, fraction, scratch, TILES: tl.constexpr):
    """φ₁(Z) and e^Z − I = Z φ₁(Z) with Z times the fraction."""
    if TILES[0] == blocks.SIZE:
        identity, _ = matrix(scratch, z[3], z[3])
        set_identity(identity, TILES)
        _taylor_in_registers(phi, z, fraction, identity, degree)
    else:
        _by_fourth_powers(phi, z, fraction, scratch, TILES)
    multiply(expm1, z, phi, fraction, None, 0.0, TILES)


@triton.jit
def _by_fourth_powers(phi, z, fraction, scratch, TILES: tl.constexpr):
    """Σ_{k ≤ 19} Z^k / (k + 1)! with Z times the fraction, in seven products: Σ_j B_j Z^{4j} by Horner's rule, each B_j of
    I, Z, Z² and Z³ (Paterson and Stockmeyer 1973)."""
    second, scratch = matrix(scratch, z[3], z[3])
    third, scratch = matrix(scratch, z[3], z[3])
    fourth, scratch = matrix(scratch, z[3], z[3])
    block, scratch = matrix(scratch, z[3], z[3])
    multiply(second, z, z, fraction * fraction, None, 0.0, TILES)
    multiply(third, second, z, fraction, None, 0.0, TILES)
    multiply(fourth, second, second, 1.0, None, 0.0, TILES)
    weight = tl.full([], 1 / 355687428096000, tl.float32)  # 1/17!
    _cubic(phi, z, second, third, fraction, weight, 18.0, TILES)
    for i in range(4):
        first = 14.0 - 4 * i  # of B_j, 1/(4j + 1)! comes from that of B_{j+1}
        weight *= first * (first + 1) * (first + 2) * (first + 3)
        _cubic(block, z, second, third, fraction, weight, first, TILES)
        multiply(phi, fourth, phi, 1.0, block, 1.0, TILES)


@triton.jit(noinline=True)
def _cubic(out, z, second, third, fraction, weight, divisor, TILES: tl.constexpr):
    """out ← w (I + f Z / k + Z² / k(k + 1) + Z³ / k(k + 1)(k + 2)), of one row of tiles."""
    for column in range(0, out[4], TILES[2]):
        rows, columns = tl.arange(0, TILES[0]), column + tl.arange(0, TILES[2])
        inner = load(second, rows, columns) + load(third, rows, columns) / (divisor + 2)
        inner = fraction * load(z, rows, columns) + inner / (divisor + 1)
        store(out, rows, columns, weight * (tl.where(rows[:, None] == columns[None, :], 1.0, 0.0) + inner / divisor))
    tl.debug_barrier()


@triton.jit
def phi1_times(out, z, y, scratch, TILES: tl.constexpr):
    """out ← φ₁(Z) Y; where Z was halved, φ₁(2Z) = φ₁(Z) + ½ (e^Z − I) φ₁(Z) doubles it (Higham 2008, Section 10.7.4)."""
    halvings, degree, fraction = _terms(z, TILES)
    if halvings == 0:
        _taylor(out, z, fraction, y, degree, TILES)
    else:
        phi, scratch = matrix(scratch, z[3], z[3])
        expm1, scratch = matrix(scratch, z[3], z[3])
        _halved(phi, expm1, z, degree, fraction, scratch, TILES)
        multiply(out, phi, y, 1.0, None, 0.0, TILES)
        for _ in range(halvings):
            multiply(out, expm1, out, 0.5, out, 1.0, TILES)
            multiply(phi, expm1, expm1, 1.0, expm1, 2.0, TILES)
            copy(expm1, phi, 1.0, TILES)


@triton.jit
def phi1_gradients(u, grad_y, grad_z, z, y, h, scratch, TILES: tl.constexpr):
    """U = φ₁(Z) Y, and of ⟨H, U⟩ the gradients φ₁(Zᵀ) H of Y and D = Σ_{a,b} (Zᵀ)^a H Yᵀ (Zᵀ)^b / (a + b + 2)! of Z.

    With one term more than the value needs, W_k = (Y + Z W_{k+1}) / (k + 2) by Horner's rule and H_k = Zᵀ H_{k−1} / (k + 1)
    from H_0 = H lie side by side, for a block of columns at a time:

        U = Y + Z W_0,        φ₁(Zᵀ) H = Σ H_k,        D = Σ H_k W_kᵀ.

    Where Z was halved, with e = e^Z − I, Φ = φ₁(Z) and the gradient of the exponential,
    L = Σ (Zᵀ)^a H Yᵀ (Zᵀ)^b / (a + b + 1)! = Zᵀ D + H Uᵀ, that of twice Z comes from

        D ← ¼ (2 D + Φᵀ L + D eᵀ),    L ← L + ½ (eᵀ L + L eᵀ),    Φ ← Φ + ½ e Φ,    e ← 2 e + e²,

    which splits the integral D = ∫_{0 ≤ s ≤ t ≤ 1} e^{(t−s)Zᵀ} H Yᵀ e^{sZᵀ} at ½; finally U = Φ Y and φ₁(Zᵀ) H = Φᵀ H.
    """
    halvings, degree, fraction = _terms(z, TILES)
    size = y[3]
    left, scratch = matrix(scratch, size, MOST_TERMS * TILES[1])
    right, scratch = matrix(scratch, size, MOST_TERMS * TILES[1])
    if TILES[0] == blocks.SIZE:
        _gradients_in_registers(u, grad_y, grad_z, z, y, h, degree, fraction, right)
    else:
        _gradients_in_scratch(u, grad_y, grad_z, z, y, h, degree, fraction, left, right, TILES)
    if halvings > 0:
        expm1, scratch = matrix(scratch, size, size)
        phi, scratch = matrix(scratch, size, size)
        grad_exp, scratch = matrix(scratch, size, size)
        result, scratch = matrix(scratch, size, size)
        _halved(phi, expm1, z, degree, fraction, scratch, TILES)
        multiply(grad_exp, transpose(z), grad_z, fraction, None, 0.0, TILES)
        multiply(grad_exp, h, transpose(u), 1.0, grad_exp, 1.0, TILES)
        for _ in range(halvings):
            multiply(result, transpose(phi), grad_exp, 0.25, grad_z, 0.5, TILES)
            multiply(result, grad_z, transpose(expm1), 0.25, result, 1.0, TILES)
            copy(grad_z, result, 1.0, TILES)
            multiply(result, transpose(expm1), grad_exp, 0.5, grad_exp, 1.0, TILES)
            multiply(result, grad_exp, transpose(expm1), 0.5, result, 1.0, TILES)
            copy(grad_exp, result, 1.0, TILES)
            multiply(phi, expm1, phi, 0.5, phi, 1.0, TILES)
            multiply(result, expm1, expm1, 1.0, expm1, 2.0, TILES)
            copy(expm1, result, 1.0, TILES)
        multiply(u, phi, y, 1.0, None, 0.0, TILES)
        multiply(grad_y, transpose(phi), h, 1.0, None, 0.0, TILES)


@triton.jit
def _gradients_in_scratch(u, grad_y, grad_z, z, y, h, degree, fraction, left, right, TILES: tl.constexpr):
    """What `phi1_gradients` does for Z times the fraction."""
    width = y[4]
    copy(grad_z, z, 0.0, TILES)
    copy(grad_y, h, 1.0, TILES)
    for column in range(0, width, TILES[1]):
        count = tl.minimum(TILES[1], width - column)
        y_block, h_block = columns_of(y, column, count), columns_of(h, column, count)
        copy(columns_of(right, degree * count, count), y_block, 1.0 / (degree + 2), TILES)
        copy(columns_of(left, 0, count), h_block, 1.0, TILES)
        for i in range(degree):
            k = degree - 1 - i
            later, weight = columns_of(right, (k + 1) * count, count), 1.0 / (k + 2)
            multiply(columns_of(right, k * count, count), z, later, weight * fraction, y_block, weight, TILES)
        multiply(columns_of(u, column, count), z, columns_of(right, 0, count), fraction, y_block, 1.0, TILES)
        for k in range(1, degree + 2):
            power, before = columns_of(left, k * count, count), columns_of(left, (k - 1) * count, count)
            multiply(power, transpose(z), before, fraction / (k + 1), None, 0.0, TILES)
            add(columns_of(grad_y, column, count), power, 1.0, TILES)
        factors = (degree + 1) * count
        multiply(grad_z, columns_of(left, 0, factors), transpose(columns_of(right, 0, factors)), 1.0, grad_z, 1.0, TILES)


@triton.jit(noinline=True)
def _gradients_in_registers(u, grad_y, grad_z, z, y, h, degree, fraction, terms):
    """The same, with the W_k of a block of columns in scratch memory, where nothing waits for them."""
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
def forward_kernel(
    z, y, output, scratch, count, scratch_size, SIZE: tl.constexpr, VALUE_WIDTH: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """output = φ₁(Z) Y of `count` contiguous matrices."""
    own = slice_of(scratch, tl.program_id(0), scratch_size)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        z_i, _ = matrix(slice_of(z, i, SIZE * SIZE), SIZE, SIZE)
        y_i, _ = matrix(slice_of(y, i, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
        output_i, _ = matrix(slice_of(output, i, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
        phi1_times(output_i, z_i, y_i, own, TILES)


@triton.jit(do_not_specialize=["count"])
def backward_kernel(
    z, y, grad, grad_z, grad_y, scratch, count, scratch_size,
    SIZE: tl.constexpr, VALUE_WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradients of Z and Y from that of φ₁(Z) Y."""
    u, own = matrix(slice_of(scratch, tl.program_id(0), scratch_size), SIZE, VALUE_WIDTH)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        z_i, _ = matrix(slice_of(z, i, SIZE * SIZE), SIZE, SIZE)
        y_i, _ = matrix(slice_of(y, i, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
        grad_i, _ = matrix(slice_of(grad, i, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
        grad_z_i, _ = matrix(slice_of(grad_z, i, SIZE * SIZE), SIZE, SIZE)
        grad_y_i, _ = matrix(slice_of(grad_y, i, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
        phi1_gradients(u, grad_y_i, grad_z_i, z_i, y_i, grad_i, own, TILES)
