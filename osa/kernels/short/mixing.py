"""Within one Triton program, computes the factor T in exp(S) V = V + L T, and the matrices A₁ to A₄ for the gradients.

In the notation of `osa.orthogonal_attention`, let G = LᵀM and X = LᵀV. For "exact", M is balanced (see attention.py). Then

    method           L              T
    "exact"          M              c φ₁(c J G) J X
    "newton_schulz"  M              c φ₁(c Π J G) Π J Π X,    Π = G_K after K iterations from G_0 = G / (‖M‖_F + ε)²
    "qr"             B              φ₁([S]) [S] X,            [S] = c G J Gᵀ

The gradients follow osa/routes.py. The forward kernel saves no terms of φ₁: the backward kernel computes them again.
"""

import triton
import triton.language as tl

from osa.kernels.short import blocks
from osa.kernels.short.phi1 import phi1_gradients, phi1_times
from osa.kernels.tiles import (
    MAX_ROWS,
    NO_DIGIT_ABOVE,
    add,
    apply_j,
    columns_of,
    copy,
    diagonal,
    inner_product,
    load,
    matrix,
    multiply,
    rows_of,
    store,
    times_j,
    transpose,
)

IMBALANCE = tl.constexpr(128.0)  # maximum `osa.linalg.imbalance` of Z for which "exact" is accurate


@triton.jit
def is_balanced(gram, scale, scratch):
    """True if `osa.linalg.imbalance` of Z is at most IMBALANCE. φ₁ is then accurate. Also True for NaN."""
    z, _ = matrix(scratch, gram[3], gram[3])
    apply_j(z, gram, scale)
    spectrum = -inner_product(z, transpose(z))  # Σ|λ|²
    size = tl.sqrt(tl.minimum(tl.maximum(spectrum, 1.0), 64.0 * 64.0))
    return not (inner_product(z, z) - spectrum > IMBALANCE * size)


@triton.jit(noinline=True)
def _projector(gram, grams, ITERATIONS: tl.constexpr):
    """Replaces G = G_0 with Π = G_K, where G_{k+1} = T G_k T and T = ½ (3I − G_k).

    Stores G_0 to G_{K−1} in `grams`, unless `grams` is None.
    """
    b_g = blocks.load_symmetric(gram)
    for i_iteration in range(ITERATIONS):
        if grams is not None:
            blocks.store_symmetric(rows_of(grams, i_iteration * gram[3], gram[3]), b_g)
        b_gt = blocks.combine(1.5, b_g, -0.5, blocks.times_commuting(b_g, b_g))
        b_g = blocks.combine(1.5, b_gt, -0.5, blocks.times_commuting(b_gt, b_g))
    tl.debug_barrier()
    blocks.store_symmetric(gram, b_g)
    tl.debug_barrier()


@triton.jit(noinline=True)
def _projector_gradients(grad, grams, ITERATIONS: tl.constexpr):
    """Replaces the symmetric gradient of G_K with the gradient of G_0.

    Each iteration turns E, the gradient of G_{k+1}, into the gradient of G = G_k, as in `_NewtonSchulzGram` of
    osa/linalg.py: E ← R + Rᵀ with R = ¼ (Y + ½ Yᵀ) G + 9/8 E and Y = E G − 4 E.
    """
    for i_iteration in range(ITERATIONS):
        b_g = blocks.load_square(rows_of(grams, (ITERATIONS - 1 - i_iteration) * grad[3], grad[3]), 1.0)
        b_e = blocks.load_square(grad, 1.0)
        b_y = blocks.times_square(b_e, b_g)
        b_y = (b_y[0] - 4.0 * b_e[0], b_y[1] - 4.0 * b_e[1], b_y[2] - 4.0 * b_e[2], b_y[3] - 4.0 * b_e[3])
        b_yt = blocks.square_transpose(b_y)
        b_sum = (b_y[0] + 0.5 * b_yt[0], b_y[1] + 0.5 * b_yt[1], b_y[2] + 0.5 * b_yt[2], b_y[3] + 0.5 * b_yt[3])
        b_r = blocks.times_square(b_sum, b_g)
        b_rt = blocks.square_transpose(b_r)
        b_e = blocks.load_symmetric(grad)
        b_e = blocks.combine(2.25, b_e, 0.25, (b_r[0] + b_rt[0], b_r[1] + b_rt[1], b_r[3] + b_rt[3]))
        tl.debug_barrier()
        blocks.store_symmetric(grad, b_e)
        tl.debug_barrier()


@triton.jit
def _skew(out, coordinates, scale, half):
    """out ← [S] = c C J Cᵀ (Eq. 7) for coordinates C. The result is exactly skew-symmetric."""
    width = coordinates[4] // 2
    query, key = columns_of(coordinates, 0, width), columns_of(coordinates, width, width)
    multiply(half, query, transpose(key), scale, None, 0.0)
    copy(out, half, 1.0)
    add(out, transpose(half), -1.0)


@triton.jit
def _normaliser(gram, epsilon):
    """‖M‖_F = (tr G)^½ and 1 / (‖M‖_F + ε)."""
    o_rows, o_columns = tl.arange(0, MAX_ROWS), tl.arange(0, 1)
    norm = tl.sqrt(tl.sum(load(diagonal(gram), o_rows, o_columns)))
    return norm, 1.0 / (norm + epsilon)


@triton.jit
def _gram_z(z, y, projector, grams, j_px, g, x, scale, epsilon, scratch, ITERATIONS):
    """Stores Z = c Π J G and Y = Π J Π X, and returns ‖M‖_F and 1 / (‖M‖_F + ε).

    Z is NaN if no digit of Z would be correct. The function also stores what the gradients need: J Π X, Π and, if `grams`
    is given, the iterates G_0 to G_{K−1}.
    """
    norm, inverse = _normaliser(g, epsilon)
    scale = tl.where(tl.abs(scale) * norm * norm > NO_DIGIT_ABOVE, float("nan"), scale)
    copy(projector, g, inverse * inverse)
    _projector(projector, grams, ITERATIONS)
    j_g, scratch = matrix(scratch, g[3], g[3])
    apply_j(j_g, g, 1.0)
    multiply(z, projector, j_g, scale, None, 0.0)
    multiply(y, projector, x, 1.0, None, 0.0)
    apply_j(j_px, y, 1.0)
    multiply(y, projector, j_px, 1.0, None, 0.0)
    return norm, inverse


@triton.jit
def mixing(t, g, x, scale, epsilon, scratch, METHOD, ITERATIONS):
    """Computes and stores T, where exp(S) V = V + L T."""
    z, scratch = matrix(scratch, g[3], g[3])
    y, scratch = matrix(scratch, x[3], x[4])
    if METHOD == "exact":
        apply_j(z, g, scale)
        apply_j(y, x, 1.0)
        phi1_times(t, z, y, scratch)
        copy(t, t, scale)
    elif METHOD == "qr":
        half, _ = matrix(scratch, g[3], g[3])
        _skew(z, g, scale, half)
        multiply(y, z, x, 1.0, None, 0.0)
        phi1_times(t, z, y, scratch)
    else:
        projector, scratch = matrix(scratch, g[3], g[3])
        j_px, scratch = matrix(scratch, x[3], x[4])
        _gram_z(z, y, projector, None, j_px, g, x, scale, epsilon, scratch, ITERATIONS)
        phi1_times(t, z, y, scratch)
        copy(t, t, scale)


@triton.jit
def mixing_gradients(a1, a2, a3, a4, g, x, f, scale, epsilon, scratch, METHOD, ITERATIONS):
    """Stores A₁ to A₄, where grad M = E A₁ᵀ + V A₂ᵀ + L A₃ and grad V = E + L A₄. Returns the gradient of c.

    If L = M, the chain rule through G, X and c gives A₁ = T, A₂ = A₄ = grad X and A₃ = grad G + (grad G)ᵀ. For "exact" and
    "qr", grad c is ⟨E, (S/c) e^S V⟩; for "exact" this is ⟨F, J (X + G T)⟩. For "qr", A₁ to A₄ are as in `_ByBasis` of
    osa/routes.py: let U = φ₁([S]) X, Ū = φ₁(−[S]) F and A = D − Dᵀ, where D is the gradient of [S] with B held fixed. Then

        A₁ = −(c G J)ᵀ U,   A₂ = (c G J)ᵀ Ū,   A₃ = (F Uᵀ − X Ūᵀ − A) c G J,   A₄ = −[S] Ū.
    """
    size, width = x[3], x[4]
    z, scratch = matrix(scratch, size, size)
    y, scratch = matrix(scratch, size, width)
    h, scratch = matrix(scratch, size, width)
    grad_y, scratch = matrix(scratch, size, width)
    grad_z, scratch = matrix(scratch, size, size)
    if METHOD == "exact":
        apply_j(z, g, scale)
        apply_j(y, x, 1.0)
        copy(h, f, scale)
        phi1_gradients(a1, grad_y, grad_z, z, y, h, scratch)
        copy(a1, a1, scale)
        multiply(y, g, a1, 1.0, x, 1.0)  # Mᵀ exp(S) V
        apply_j(h, y, 1.0)
        grad_scale = inner_product(f, h)
        apply_j(a2, grad_y, -1.0)
        apply_j(z, grad_z, -scale)
        copy(a3, z, 1.0)
        add(a3, transpose(z), 1.0)
        copy(a4, a2, 1.0)
    elif METHOD == "qr":
        g_j, scratch = matrix(scratch, size, size)
        _skew(z, g, scale, g_j)
        copy(h, f, 1.0)
        phi1_gradients(y, grad_y, grad_z, z, x, h, scratch)  # stores U, Ū, and the gradient of ⟨F, U⟩ with respect to [S]
        multiply(h, z, y, 1.0, x, 1.0)  # Bᵀ exp(S) V
        times_j(g_j, g, 1.0)
        multiply(a1, transpose(g), h, 1.0, None, 0.0)
        multiply(h, g_j, a1, 1.0, None, 0.0)
        grad_scale = inner_product(f, h)
        multiply(a1, transpose(g_j), y, -scale, None, 0.0)
        multiply(a2, transpose(g_j), grad_y, scale, None, 0.0)
        multiply(a4, z, grad_y, -1.0, None, 0.0)
        bar, scratch = matrix(scratch, size, size)
        inside, scratch = matrix(scratch, size, size)
        multiply(inside, f, transpose(y), 1.0, None, 0.0)
        multiply(bar, z, grad_z, -1.0, inside, 1.0)  # D, the gradient of [S] with B held fixed
        multiply(inside, x, transpose(grad_y), -1.0, inside, 1.0)
        add(inside, bar, -1.0)
        add(inside, transpose(bar), 1.0)
        multiply(a3, inside, g_j, scale, None, 0.0)
    else:
        projector, scratch = matrix(scratch, size, size)
        j_px, scratch = matrix(scratch, size, width)
        grams, scratch = matrix(scratch, ITERATIONS * size, size)
        norm, inverse = _gram_z(z, y, projector, grams, j_px, g, x, scale, epsilon, scratch, ITERATIONS)
        copy(h, f, scale)
        phi1_gradients(a1, grad_y, grad_z, z, y, h, scratch)
        half, scratch = matrix(scratch, size, size)
        grad, scratch = matrix(scratch, size, size)
        grad_scale = inner_product(f, a1)
        copy(a1, a1, scale)
        multiply(y, projector, grad_y, 1.0, None, 0.0)
        apply_j(h, y, -1.0)  # h is the gradient with respect to Π X
        multiply(a2, projector, h, 1.0, None, 0.0)
        copy(a4, a2, 1.0)
        multiply(half, grad_y, transpose(j_px), 1.0, None, 0.0)
        multiply(half, h, transpose(x), 1.0, half, 1.0)
        apply_j(z, g, scale)
        multiply(half, grad_z, transpose(z), 1.0, half, 1.0)  # the gradient with respect to Π
        copy(grad, half, 0.5)
        add(grad, transpose(half), 0.5)
        apply_j(z, g, 1.0)
        multiply(half, projector, z, 1.0, None, 0.0)
        grad_scale += inner_product(grad_z, half)
        multiply(half, projector, grad_z, 1.0, None, 0.0)
        apply_j(z, half, -scale)  # the gradient with respect to G, with Π held fixed
        _projector_gradients(grad, grams, ITERATIONS)
        grad_square = -inverse * inverse * inverse * inner_product(grad, g) / tl.where(norm > 0, norm, 1.0)
        add(z, grad, inverse * inverse)
        copy(a3, z, 1.0)
        add(a3, transpose(z), 1.0)
        o_rows, o_columns = tl.arange(0, MAX_ROWS), tl.arange(0, 1)
        store(diagonal(a3), o_rows, o_columns, load(diagonal(a3), o_rows, o_columns) + 2 * grad_square)
        tl.debug_barrier()
    return grad_scale
