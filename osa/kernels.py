"""Orthogonal attention on CUDA in one launch forward and one backward: Triton kernels, a program for each matrix.

The plain route of osa/functional.py gives the device hundreds of small products. Here a program takes the query, key and
value of one head of one sequence through all of them, and sums as many terms of φ₁ as its own matrix's norm asks for. In
the notation of `orthogonal_attention` all methods have one form,

    exp(S) V = V + L T,        G = LᵀM,        X = LᵀV,

    method           L              T
    "exact"          M, balanced    c φ₁(c J G) J X
    "newton_schulz"  M              c φ₁(c Π J G) Π J Π X,    Π = G_K of G / (‖M‖_F + ε)²; "polar_express" alike
    "qr"             B              [S] φ₁([S]) X,            [S] = c G J Gᵀ

and one form of the gradient, given that of the output, E, and F = LᵀE:

    grad V = E + L A₄,        grad M = E A₁ᵀ + V A₂ᵀ + L A₃.

`_mixing` has T and `_mixing_backward` the A's. Its formulas are those of the autograd functions of osa/functional.py: the
chain rule through G and X, and for "qr" the gradient that does not pass through the decomposition. φ₁ and the iterations
differ, in that nothing is kept for them: see `_phi1_backward` and `_projector_backward`.

A matrix is a tuple (pointer, row stride, column stride, rows, columns, offset), so that a transpose costs nothing, and
intermediate ones lie in memory that only their program sees, which a cache holds. Products are full float32, of any shape,
in tiles that fit the registers; "polar_express" is float64. Nothing is added up by several programs: every run gives the
same bits. What works on entries is called, not inlined: between calls a program holds a few numbers, so that no register
has to be spilled, and a kernel compiles in seconds.
"""

import functools
import math
import warnings

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.errors import TritonError

from osa import functional, linalg

METHODS = ("exact", "newton_schulz", "qr", "polar_express")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 64  # of query, key and value
MAX_TOKENS = 256  # beyond, one program for a matrix is too few: the large products are the library's
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of `_agrees`
MAX_BASIS = 256 * 64  # entries of a basis, which Gram–Schmidt holds in registers

# The kernels. Their constants, in a tuple: rows of a tile (2d or more), its columns, the length of its sums, and the type
RADIUS = tl.constexpr(3.0)  # largest ‖S‖₂ of a single series: its terms stay below 3³/3! = 4.5
LIMIT = tl.constexpr(16384.0)  # beyond this ‖S‖ float32 holds no digit of exp(S)


@triton.jit
def _matrix(space, rows, columns):
    """A matrix at the beginning of a space (pointer, offset), row by row, and the space behind it."""
    return (space[0], columns, 1, rows, columns, space[1]), (space[0], space[1] + rows * columns)


@triton.jit
def _t(a):
    return (a[0], a[2], a[1], a[4], a[3], a[5])


@triton.jit
def _columns(a, start, count):
    return (a[0], a[1], a[2], a[3], count, a[5] + start * a[2])


@triton.jit
def _load(a, rows, columns):
    """Entries of A, zero beyond its sizes."""
    mask = (rows < a[3])[:, None] & (columns < a[4])[None, :]
    return tl.load(a[0] + a[5] + rows[:, None] * a[1] + columns[None, :] * a[2], mask=mask, other=0.0)


@triton.jit
def _store(a, rows, columns, values):
    mask = (rows < a[3])[:, None] & (columns < a[4])[None, :]
    pointers = a[0] + a[5] + rows[:, None] * a[1] + columns[None, :] * a[2]
    tl.store(pointers, values.to(a[0].dtype.element_ty), mask=mask)


@triton.jit(noinline=True)
def _multiply(out, a, b, alpha, add, beta, TILES: tl.constexpr):
    """out ← α A B + β C, without C where it is None. `out` may be C, and B where its rows fit one tile."""
    ROWS: tl.constexpr = TILES[0]
    COLUMNS: tl.constexpr = TILES[1]
    INNER: tl.constexpr = TILES[2]
    DTYPE: tl.constexpr = TILES[3]
    for row in range(0, out[3], ROWS):
        rows = row + tl.arange(0, ROWS)
        for column in range(0, out[4], COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            sums = tl.zeros((ROWS, COLUMNS), DTYPE)
            for start in range(0, a[4], INNER):
                inner = start + tl.arange(0, INNER)
                left, right = _load(a, rows, inner).to(DTYPE), _load(b, inner, columns).to(DTYPE)
                sums += tl.dot(left, right, input_precision="ieee", out_dtype=DTYPE)
            sums = alpha * sums
            if add is not None:
                sums += beta * _load(add, rows, columns).to(DTYPE)
            tl.debug_barrier()  # what is overwritten has been read
            _store(out, rows, columns, sums)
    tl.debug_barrier()


@triton.jit(noinline=True)
def _copy(out, a, alpha, TILES: tl.constexpr):
    """out ← α A, of one row of tiles."""
    for column in range(0, out[4], TILES[1]):
        rows, columns = tl.arange(0, TILES[0]), column + tl.arange(0, TILES[1])
        _store(out, rows, columns, alpha * _load(a, rows, columns))
    tl.debug_barrier()


@triton.jit(noinline=True)
def _add(out, a, alpha, TILES: tl.constexpr):
    """out ← out + α A, of one row of tiles."""
    for column in range(0, out[4], TILES[1]):
        rows, columns = tl.arange(0, TILES[0]), column + tl.arange(0, TILES[1])
        _store(out, rows, columns, _load(out, rows, columns) + alpha * _load(a, rows, columns))
    tl.debug_barrier()


@triton.jit(noinline=True)
def _zero(out, TILES: tl.constexpr):
    """out ← 0, of one row of tiles."""
    for column in range(0, out[4], TILES[1]):
        rows, columns = tl.arange(0, TILES[0]), column + tl.arange(0, TILES[1])
        _store(out, rows, columns, tl.zeros_like(_load(out, rows, columns)))
    tl.debug_barrier()


@triton.jit
def _diagonal(a):
    """The diagonal as a column."""
    return (a[0], a[1] + a[2], 1, a[3], 1, a[5])


@triton.jit(noinline=True)
def _inner(a, b, TILES: tl.constexpr):
    """⟨A, B⟩ = Σ A ∘ B."""
    total = tl.full([], 0.0, TILES[3])
    for column in range(0, a[4], TILES[1]):
        rows, columns = tl.arange(0, TILES[0]), column + tl.arange(0, TILES[1])
        total += tl.sum(_load(a, rows, columns) * _load(b, rows, columns))
    return total


@triton.jit(noinline=True)
def _turn(out, a, sign, TILES: tl.constexpr):
    """out ← ± J A."""
    half = a[3] // 2
    for column in range(0, a[4], TILES[1]):
        rows, columns = tl.arange(0, TILES[0]), column + tl.arange(0, TILES[1])
        turned = _load(a, tl.where(rows < half, rows + half, rows - half), columns)
        _store(out, rows, columns, tl.where(rows < half, sign, -sign)[:, None] * turned)
    tl.debug_barrier()


@triton.jit
def _terms(z, TILES: tl.constexpr):
    """How φ₁(Z) Y is summed: how often Z is halved, the Taylor degree m, and 2^−(halvings).

    ρ(Z) = ‖S‖₂ ≤ (½ ‖S‖_F²)^½ = (−½ tr Z²)^½, since the eigenvalues are pairs ±iλ. The second term covers its rounding.
    Halved is until ρ ≤ 3, so that the terms lose no digit, and m the least with ρ^{m+1} / (m + 1)! ≤ eps/4.
    """
    EPS: tl.constexpr = 2.3e-16 if TILES[3] == tl.float64 else 1.2e-7
    square = tl.maximum(-0.5 * _inner(z, _t(z), TILES), 0.0) + EPS * _inner(z, z, TILES)
    radius = tl.sqrt(square).to(tl.float32)
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
    return halvings, degree, tl.where(fits, fraction, float("nan")).to(TILES[3])


@triton.jit
def _taylor(out, z, fraction, y, degree, TILES: tl.constexpr):
    """out ← Σ_{k ≤ m} Z^k Y / (k + 1)! with Z times the fraction, by Horner's rule."""
    _multiply(out, z, y, fraction / (degree + 1), y, 1.0, TILES)
    for k in range(1, degree):
        _multiply(out, z, out, fraction / (degree + 1 - k), y, 1.0, TILES)


@triton.jit
def _halved(phi, expm1, z, degree, fraction, space, TILES: tl.constexpr):
    """φ₁(Z) and e^Z − I = Z φ₁(Z) with Z times the fraction."""
    identity, _ = _matrix(space, z[3], z[3])
    _zero(identity, TILES)
    rows = tl.arange(0, TILES[0])
    _store(_diagonal(identity), rows, tl.arange(0, 1), tl.full([TILES[0], 1], 1.0, TILES[3]))
    tl.debug_barrier()
    _taylor(phi, z, fraction, identity, degree, TILES)
    _multiply(expm1, z, phi, fraction, None, 0.0, TILES)


@triton.jit
def _phi1(out, z, y, space, TILES: tl.constexpr):
    """out ← φ₁(Z) Y; where Z was halved, φ₁(2Z) = φ₁(Z) + ½ (e^Z − I) φ₁(Z) doubles it (Higham 2008, Section 10.7.4)."""
    halvings, degree, fraction = _terms(z, TILES)
    if halvings == 0:
        _taylor(out, z, fraction, y, degree, TILES)
    else:
        phi, space = _matrix(space, z[3], z[3])
        expm1, space = _matrix(space, z[3], z[3])
        _halved(phi, expm1, z, degree, fraction, space, TILES)
        _multiply(out, phi, y, 1.0, None, 0.0, TILES)
        for _ in range(halvings):
            _multiply(out, expm1, out, 0.5, out, 1.0, TILES)
            _multiply(phi, expm1, expm1, 1.0, expm1, 2.0, TILES)
            _copy(expm1, phi, 1.0, TILES)


@triton.jit
def _phi1_backward(u, grad_y, grad_z, z, y, h, space, TILES: tl.constexpr):
    """U = φ₁(Z) Y, and of ⟨H, U⟩ the gradients φ₁(Zᵀ) H of Y and D = Σ_{a,b} (Zᵀ)^a H Yᵀ (Zᵀ)^b / (a + b + 2)! of Z.

    By Horner's rule on both sides, which keeps no term: from the highest degree down

        Q_a = Y + Z Q_{a+1} / (a + 3),        [D_a, F_a] = [H Q_aᵀ, H] + Zᵀ [D_{a+1}, F_{a+1}] / (a + 3),

    and U = Y + ½ Z Q_0, D = ½ D_0, φ₁(Zᵀ) H = H + ½ Zᵀ F_0. Where Z was halved, with e = e^Z − I, Φ = φ₁(Z) and the
    gradient of the exponential, L = Σ (Zᵀ)^a H Yᵀ (Zᵀ)^b / (a + b + 1)! = Zᵀ D + H Uᵀ, that of twice Z comes from

        D ← ¼ (2 D + Φᵀ L + D eᵀ),    L ← L + ½ (eᵀ L + L eᵀ),    Φ ← Φ + ½ e Φ,    e ← 2 e + e²,

    which splits the integral D = ∫_{0 ≤ s ≤ t ≤ 1} e^{(t−s)Zᵀ} H Yᵀ e^{sZᵀ} at ½; finally U = Φ Y and φ₁(Zᵀ) H = Φᵀ H.
    """
    halvings, degree, fraction = _terms(z, TILES)
    size, width = y[3], y[4]
    q, space = _matrix(space, size, width)
    base, space = _matrix(space, size, size + width)
    sums, space = _matrix(space, size, size + width)
    base_d, d = _columns(base, 0, size), _columns(sums, 0, size)
    f = _columns(sums, size, width)
    _copy(q, y, 1.0, TILES)
    _copy(_columns(base, size, width), h, 1.0, TILES)
    _multiply(base_d, h, _t(q), 1.0, None, 0.0, TILES)
    _copy(sums, base, 1.0, TILES)
    for i in range(degree):
        weight = fraction / (degree - i + 2)
        _multiply(q, z, q, weight, y, 1.0, TILES)
        _multiply(base_d, h, _t(q), 1.0, None, 0.0, TILES)
        _multiply(sums, _t(z), sums, weight, base, 1.0, TILES)
    _multiply(u, z, q, 0.5 * fraction, y, 1.0, TILES)
    _multiply(grad_y, _t(z), f, 0.5 * fraction, h, 1.0, TILES)
    _copy(grad_z, d, 0.5, TILES)
    if halvings > 0:
        expm1, space = _matrix(space, size, size)
        phi, space = _matrix(space, size, size)
        of_exp, space = _matrix(space, size, size)
        result, space = _matrix(space, size, size)
        _halved(phi, expm1, z, degree, fraction, space, TILES)
        _multiply(of_exp, _t(z), grad_z, fraction, None, 0.0, TILES)
        _multiply(of_exp, h, _t(u), 1.0, of_exp, 1.0, TILES)
        for _ in range(halvings):
            _multiply(result, _t(phi), of_exp, 0.25, grad_z, 0.5, TILES)
            _multiply(result, grad_z, _t(expm1), 0.25, result, 1.0, TILES)
            _copy(grad_z, result, 1.0, TILES)
            _multiply(result, _t(expm1), of_exp, 0.5, of_exp, 1.0, TILES)
            _multiply(result, of_exp, _t(expm1), 0.5, result, 1.0, TILES)
            _copy(of_exp, result, 1.0, TILES)
            _multiply(phi, expm1, phi, 0.5, phi, 1.0, TILES)
            _multiply(result, expm1, expm1, 1.0, expm1, 2.0, TILES)
            _copy(expm1, result, 1.0, TILES)
        _multiply(u, phi, y, 1.0, None, 0.0, TILES)
        _multiply(grad_y, _t(phi), h, 1.0, None, 0.0, TILES)


@triton.jit
def _coefficients(k, STEPS: tl.constexpr, DTYPE: tl.constexpr):
    """a, b and c of step k of M_{k+1} = M_k (a I + b G_k + c G_k²); the last entry is repeated beyond."""
    LAST: tl.constexpr = len(STEPS) - 1
    a, b, c = tl.full([], STEPS[LAST][0], DTYPE), tl.full([], STEPS[LAST][1], DTYPE), tl.full([], STEPS[LAST][2], DTYPE)
    for i in tl.static_range(LAST):
        a = tl.where(k == i, tl.full([], STEPS[i][0], DTYPE), a)
        b = tl.where(k == i, tl.full([], STEPS[i][1], DTYPE), b)
        c = tl.where(k == i, tl.full([], STEPS[i][2], DTYPE), c)
    return a, b, c


@triton.jit
def _step(w, gram, b, c, STEPS: tl.constexpr, TILES: tl.constexpr):
    """W ← b G + c G²."""
    if STEPS[0][2] == 0:
        _copy(w, gram, b, TILES)
    else:
        _multiply(w, gram, gram, c, gram, b, TILES)


@triton.jit
def _projector(gram, space, ITERATIONS: tl.constexpr, STEPS: tl.constexpr, TILES: tl.constexpr):
    """G ← Π = G_K of G_{k+1} = T G T, where T = a I + W and W = b G + c G²."""
    size = gram[3]
    g_t, space = _matrix(space, size, size)
    w, space = _matrix(space, size, size)
    for k in range(ITERATIONS):
        a, b, c = _coefficients(k, STEPS, TILES[3])
        _step(w, gram, b, c, STEPS, TILES)
        _multiply(g_t, gram, w, 1.0, gram, a, TILES)
        _multiply(gram, g_t, w, 1.0, g_t, a, TILES)


@triton.jit
def _projector_backward(gram, grad, space, ITERATIONS: tl.constexpr, STEPS: tl.constexpr, TILES: tl.constexpr):
    """The gradient of G_0 from the symmetric one of G_K, in place, keeping none of the G_k.

    G_K is a polynomial in the symmetric G_0, and so its Fréchet derivative is self-adjoint: the gradient is its value in
    the direction of the given one (Higham 2008, Chapter 3), and goes along with G, Ġ ← T Ġ T + Ṫ G T + (Ṫ G T)ᵀ.
    """
    size = gram[3]
    g_t, space = _matrix(space, size, size)
    w, space = _matrix(space, size, size)
    half, space = _matrix(space, size, size)
    change, space = _matrix(space, size, size)
    for k in range(ITERATIONS):
        a, b, c = _coefficients(k, STEPS, TILES[3])
        _step(w, gram, b, c, STEPS, TILES)
        _multiply(g_t, gram, w, 1.0, gram, a, TILES)
        _multiply(half, grad, gram, c, grad, 0.5 * b, TILES)
        _copy(change, half, 1.0, TILES)
        _add(change, _t(half), 1.0, TILES)  # Ṫ
        _multiply(half, change, g_t, 1.0, None, 0.0, TILES)  # Ṫ G T
        _multiply(change, w, grad, 1.0, grad, a, TILES)  # T Ġ
        _multiply(grad, change, w, 1.0, change, a, TILES)
        _add(grad, half, 1.0, TILES)
        _add(grad, _t(half), 1.0, TILES)
        _multiply(gram, g_t, w, 1.0, g_t, a, TILES)


@triton.jit
def _skew(out, coordinates, scale, half, TILES: tl.constexpr):
    """out ← [S] = c C J Cᵀ (Eq. 7), skew to the last bit."""
    width = coordinates[4] // 2
    _multiply(half, _columns(coordinates, 0, width), _t(_columns(coordinates, width, width)), scale, None, 0.0, TILES)
    _copy(out, half, 1.0, TILES)
    _add(out, _t(half), -1.0, TILES)


@triton.jit
def _times_j(out, a, alpha, TILES: tl.constexpr):
    """out ← α A J."""
    width = a[4] // 2
    _copy(_columns(out, 0, width), _columns(a, width, width), -alpha, TILES)
    _copy(_columns(out, width, width), _columns(a, 0, width), alpha, TILES)


@triton.jit
def _normaliser(gram, epsilon, TILES: tl.constexpr):
    """‖M‖_F = (tr G)^½ and 1 / (‖M‖_F + ε)."""
    rows, columns = tl.arange(0, TILES[0]), tl.arange(0, 1)
    norm = tl.sqrt(tl.sum(_load(_diagonal(gram), rows, columns)))
    return norm, 1.0 / (norm + epsilon)


@triton.jit
def _gram_z(z, y, projector, j_px, g, x, scale, epsilon, space, ITERATIONS, STEPS, TILES: tl.constexpr):
    """Z = c Π J G and Y = Π J Π X, with Π and J Π X; returns ‖M‖_F and 1 / (‖M‖_F + ε)."""
    norm, inverse = _normaliser(g, epsilon, TILES)
    _copy(projector, g, inverse * inverse, TILES)
    _projector(projector, space, ITERATIONS, STEPS, TILES)
    j_g, space = _matrix(space, g[3], g[3])
    _turn(j_g, g, 1.0, TILES)
    _multiply(z, projector, j_g, scale, None, 0.0, TILES)
    _multiply(y, projector, x, 1.0, None, 0.0, TILES)
    _turn(j_px, y, 1.0, TILES)
    _multiply(y, projector, j_px, 1.0, None, 0.0, TILES)
    return norm, inverse


@triton.jit
def _mixing(t, g, x, scale, epsilon, space, METHOD, ITERATIONS, STEPS, TILES: tl.constexpr):
    """T of exp(S) V = V + L T."""
    z, space = _matrix(space, g[3], g[3])
    y, space = _matrix(space, x[3], x[4])
    if METHOD == "exact":
        _turn(z, g, scale, TILES)
        _turn(y, x, 1.0, TILES)
        _phi1(t, z, y, space, TILES)
        _copy(t, t, scale, TILES)
    elif METHOD == "qr":
        half, _ = _matrix(space, g[3], g[3])
        _skew(z, g, scale, half, TILES)
        _phi1(y, z, x, space, TILES)
        _multiply(t, z, y, 1.0, None, 0.0, TILES)
    else:
        projector, space = _matrix(space, g[3], g[3])
        j_px, space = _matrix(space, x[3], x[4])
        _gram_z(z, y, projector, j_px, g, x, scale, epsilon, space, ITERATIONS, STEPS, TILES)
        _phi1(t, z, y, space, TILES)
        _copy(t, t, scale, TILES)


@triton.jit
def _mixing_backward(a1, a2, a3, a4, g, x, f, scale, epsilon, space, METHOD, ITERATIONS, STEPS, TILES: tl.constexpr):
    """A₁ to A₄ of grad M = E A₁ᵀ + V A₂ᵀ + L A₃ and grad V = E + L A₄; returns the gradient of c.

    By the chain rule through G, X and c, A₁ = T, A₂ = A₄ = grad X and A₃ = grad G + (grad G)ᵀ. For "exact" that of c is
    ⟨E, (S/c) e^S V⟩ = ⟨F, J (X + G T)⟩, for "qr" likewise. The A's of "qr" are those of `_ByBasis` in osa/functional.py:
    with U = φ₁([S]) X, Ū = φ₁(−[S]) F and A twice the skew part of the gradient of [S] for a fixed basis,

        A₁ = −(c G J)ᵀ U,   A₂ = (c G J)ᵀ Ū,   A₃ = (F Uᵀ − X Ūᵀ − A) c G J,   A₄ = −[S] Ū.
    """
    size, width = x[3], x[4]
    z, space = _matrix(space, size, size)
    y, space = _matrix(space, size, width)
    h, space = _matrix(space, size, width)
    grad_y, space = _matrix(space, size, width)
    grad_z, space = _matrix(space, size, size)
    if METHOD == "exact":
        _turn(z, g, scale, TILES)
        _turn(y, x, 1.0, TILES)
        _copy(h, f, scale, TILES)
        _phi1_backward(a1, grad_y, grad_z, z, y, h, space, TILES)
        _copy(a1, a1, scale, TILES)
        _multiply(y, g, a1, 1.0, x, 1.0, TILES)  # Mᵀ exp(S) V
        _turn(h, y, 1.0, TILES)
        grad_scale = _inner(f, h, TILES)
        _turn(a2, grad_y, -1.0, TILES)
        _turn(z, grad_z, -scale, TILES)
        _copy(a3, z, 1.0, TILES)
        _add(a3, _t(z), 1.0, TILES)
        _copy(a4, a2, 1.0, TILES)
    elif METHOD == "qr":
        g_j, space = _matrix(space, size, size)
        _skew(z, g, scale, g_j, TILES)
        _copy(h, f, 1.0, TILES)
        _phi1_backward(y, grad_y, grad_z, z, x, h, space, TILES)  # U, Ū and the gradient of [S] in φ₁
        _multiply(h, z, y, 1.0, x, 1.0, TILES)  # Bᵀ exp(S) V
        _times_j(g_j, g, 1.0, TILES)
        _multiply(a1, _t(g), h, 1.0, None, 0.0, TILES)
        _multiply(h, g_j, a1, 1.0, None, 0.0, TILES)
        grad_scale = _inner(f, h, TILES)
        _multiply(a1, _t(g_j), y, -scale, None, 0.0, TILES)
        _multiply(a2, _t(g_j), grad_y, scale, None, 0.0, TILES)
        _multiply(a4, z, grad_y, -1.0, None, 0.0, TILES)
        bar, space = _matrix(space, size, size)
        inside, space = _matrix(space, size, size)
        _multiply(inside, f, _t(y), 1.0, None, 0.0, TILES)
        _multiply(bar, z, grad_z, -1.0, inside, 1.0, TILES)  # the gradient of [S], B held fixed
        _multiply(inside, x, _t(grad_y), -1.0, inside, 1.0, TILES)
        _add(inside, bar, -1.0, TILES)
        _add(inside, _t(bar), 1.0, TILES)
        _multiply(a3, inside, g_j, scale, None, 0.0, TILES)
    else:
        projector, space = _matrix(space, size, size)
        j_px, space = _matrix(space, size, width)
        norm, inverse = _gram_z(z, y, projector, j_px, g, x, scale, epsilon, space, ITERATIONS, STEPS, TILES)
        _copy(h, f, scale, TILES)
        _phi1_backward(a1, grad_y, grad_z, z, y, h, space, TILES)
        half, space = _matrix(space, size, size)
        grad, space = _matrix(space, size, size)
        grad_scale = _inner(f, a1, TILES)
        _copy(a1, a1, scale, TILES)
        _multiply(y, projector, grad_y, 1.0, None, 0.0, TILES)
        _turn(h, y, -1.0, TILES)  # the gradient of Π X
        _multiply(a2, projector, h, 1.0, None, 0.0, TILES)
        _copy(a4, a2, 1.0, TILES)
        _multiply(half, grad_y, _t(j_px), 1.0, None, 0.0, TILES)
        _multiply(half, h, _t(x), 1.0, half, 1.0, TILES)
        _turn(z, g, scale, TILES)
        _multiply(half, grad_z, _t(z), 1.0, half, 1.0, TILES)  # the gradient of Π
        _copy(grad, half, 0.5, TILES)
        _add(grad, _t(half), 0.5, TILES)
        _turn(z, g, 1.0, TILES)
        _multiply(half, projector, z, 1.0, None, 0.0, TILES)
        grad_scale += _inner(grad_z, half, TILES)
        _multiply(half, projector, grad_z, 1.0, None, 0.0, TILES)
        _turn(z, half, -scale, TILES)  # the gradient of G but for Π
        _copy(projector, g, inverse * inverse, TILES)
        _projector_backward(projector, grad, space, ITERATIONS, STEPS, TILES)
        of_square = -inverse * inverse * inverse * _inner(grad, g, TILES) / tl.where(norm > 0, norm, 1.0)
        _add(z, grad, inverse * inverse, TILES)
        _copy(a3, z, 1.0, TILES)
        _add(a3, _t(z), 1.0, TILES)
        rows, columns = tl.arange(0, TILES[0]), tl.arange(0, 1)
        _store(_diagonal(a3), rows, columns, _load(_diagonal(a3), rows, columns) + 2 * of_square)
        tl.debug_barrier()
    return grad_scale


@triton.jit
def _column_products(q, k, on_key, on_query, TILES: tl.constexpr):
    """⟨q, q⟩, ⟨k, k⟩ and ⟨q, k⟩ of each pair of columns q − on_key · k and k − on_query · q."""
    WIDTH: tl.constexpr = TILES[0] // 2
    columns = tl.arange(0, WIDTH)
    q_q, k_k, q_k = tl.zeros((WIDTH,), TILES[3]), tl.zeros((WIDTH,), TILES[3]), tl.zeros((WIDTH,), TILES[3])
    for row in range(0, q[3], TILES[1]):
        rows = row + tl.arange(0, TILES[1])
        of_q, of_k = _load(q, rows, columns).to(TILES[3]), _load(k, rows, columns).to(TILES[3])
        of_q, of_k = of_q - on_key * of_k, of_k - on_query * of_q
        q_q += tl.sum(of_q * of_q, axis=0)
        k_k += tl.sum(of_k * of_k, axis=0)
        q_k += tl.sum(of_q * of_k, axis=0)
    return q_q, k_k, q_k


@triton.jit(noinline=True)
def _gather(m, taken, q, k, METHOD: tl.constexpr, TILES: tl.constexpr):
    """M ← [Q, K]; for "exact" balanced, M ← [s (Q − a ∘ K), (K − b ∘ Q) / s], and the rows a, b and s of `taken`.

    Of each pair of columns the shorter one takes off its projection on the longer, and s makes them alike. M ← M T with
    T J Tᵀ = J leaves S = c M J Mᵀ as it is, so that T is constant for the backward pass, and makes ‖M‖ small, with which
    the rounding of "exact" grows. s is a power of two: it rounds nothing. The differences are in float64 as Q may nearly
    be K.
    """
    WIDTH: tl.constexpr = TILES[0] // 2
    columns = tl.arange(0, WIDTH)
    a = tl.zeros((WIDTH,), TILES[3])
    b, s, inverse = a, a + 1.0, a + 1.0
    if METHOD == "exact":
        q_q, k_k, q_k = _column_products(q, k, a, b, TILES)
        longer = tl.maximum(q_q, k_k)
        ratio = q_k / tl.where(longer > 0, longer, 1.0)
        a, b = tl.where(k_k >= q_q, ratio, 0.0), tl.where(k_k >= q_q, 0.0, ratio)
        q_q, k_k, _ = _column_products(q, k, a, b, TILES)
        alive = (q_q > 0) & (k_k > 0)
        exponent = 0.25 * (tl.log2(tl.where(alive, k_k, 1.0)) - tl.log2(tl.where(alive, q_q, 1.0)))
        s, inverse = tl.exp2(tl.floor(exponent + 0.5)), tl.exp2(-tl.floor(exponent + 0.5))
    _store(taken, tl.arange(0, 1), columns, a[None, :])
    _store(taken, 1 + tl.arange(0, 1), columns, b[None, :])
    _store(taken, 2 + tl.arange(0, 1), columns, s[None, :])
    for row in range(0, q[3], TILES[1]):
        rows = row + tl.arange(0, TILES[1])
        of_q, of_k = _load(q, rows, columns).to(tl.float64), _load(k, rows, columns).to(tl.float64)
        _store(_columns(m, 0, q[4]), rows, columns, s * (of_q - a * of_k))
        _store(_columns(m, q[4], q[4]), rows, columns, inverse * (of_k - b * of_q))
    tl.debug_barrier()


@triton.jit(noinline=True)
def _scatter(grad_q, grad_k, grad_m, taken, TILES: tl.constexpr):
    """The gradients of Q and K from that of M T, as `_gather` makes it: times Tᵀ."""
    columns = tl.arange(0, TILES[0] // 2)
    a = _load(taken, tl.arange(0, 1), columns)
    b = _load(taken, 1 + tl.arange(0, 1), columns)
    s = _load(taken, 2 + tl.arange(0, 1), columns)
    width = grad_q[4]
    for row in range(0, grad_q[3], TILES[1]):
        rows = row + tl.arange(0, TILES[1])
        of_q = s * _load(_columns(grad_m, 0, width), rows, columns)
        of_k = _load(_columns(grad_m, width, width), rows, columns) / tl.where(columns < width, s, 1.0)
        _store(grad_q, rows, columns, of_q - b * of_k)
        _store(grad_k, rows, columns, of_k - a * of_q)


@triton.jit
def _gram_schmidt(basis, m, ALL_ROWS: tl.constexpr, TILES: tl.constexpr):
    """B of M: orthonormal columns, and zeros where a column depends on those before it.

    Each column takes off its components in the basis twice, which suffices for orthogonality to rounding (Giraud et al.
    2005). What is then left within the rounding of the column is no direction of M: M + E, for an E of that size, lies in
    the span of the others.
    """
    rows, columns = tl.arange(0, ALL_ROWS), tl.arange(0, TILES[0])
    result = _load(m, rows, columns)  # (ALL_ROWS, 2d), of which the first i columns are B's
    for i in range(m[4]):
        column = tl.sum(tl.where(columns[None, :] == i, result, 0.0), axis=1)  # (ALL_ROWS,)
        largest = tl.max(tl.abs(column), axis=0)
        column = column / tl.where(largest > 0, largest, 1.0)
        norm = tl.sqrt(tl.sum(column * column, axis=0))
        for _ in range(2):
            coefficients = tl.where(columns < i, tl.sum(result * column[:, None], axis=0), 0.0)  # (2d,)
            column -= tl.sum(result * coefficients[None, :], axis=1)
        left = tl.sqrt(tl.sum(column * column, axis=0))
        column = tl.where(left > 1e-6 * norm, column / tl.where(left > 0, left, 1.0), 0.0)
        result = tl.where(columns[None, :] == i, column[:, None], result)
    _store(basis, rows, columns, result)
    tl.debug_barrier()


@triton.jit
def _beginning(pointer):
    """A space at a pointer. Offsets from it are numbers of the program's text, which take no register."""
    return (pointer, tl.full([], 0, tl.int32))


@triton.jit
def _part(pointer, size):
    """This program's of consecutive parts of this size."""
    return _beginning(pointer + tl.program_id(0).to(tl.int64) * size)


@triton.jit
def _of_program(pointer, strides, heads, rows, columns):
    """This program's matrix of a tensor (batch, heads, rows, columns)."""
    program = tl.program_id(0).to(tl.int64)
    pointer += program // heads * strides[0] + program % heads * strides[1]
    return (pointer, strides[2], strides[3], rows, columns, 0)


@triton.jit
def _forward(
    query, key, value, scale, output, basis, space, q_strides, k_strides, v_strides, c_strides, o_strides, b_strides,
    heads, tokens, space_size, epsilon, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ALL_ROWS: tl.constexpr,
    METHOD: tl.constexpr, ITERATIONS: tl.constexpr, STEPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """output = V + L T, and for "qr" the basis."""
    SIZE: tl.constexpr = 2 * WIDTH
    q, k = _of_program(query, q_strides, heads, tokens, WIDTH), _of_program(key, k_strides, heads, tokens, WIDTH)
    v = _of_program(value, v_strides, heads, tokens, VALUE_WIDTH)
    scale = tl.load(_of_program(scale, c_strides, heads, 1, 1)[0]).to(TILES[3])
    m, space = _matrix(_part(space, space_size), tokens, SIZE)
    space = _beginning(space[0] + space[1])
    g, space = _matrix(space, SIZE, SIZE)
    x, space = _matrix(space, SIZE, VALUE_WIDTH)
    t, space = _matrix(space, SIZE, VALUE_WIDTH)
    taken, space = _matrix(space, 3, WIDTH)
    _gather(m, taken, q, k, METHOD, TILES)
    if METHOD == "qr":
        left = _of_program(basis, b_strides, heads, tokens, SIZE)
        _gram_schmidt(left, m, ALL_ROWS, TILES)
    else:
        left = m
    _multiply(g, _t(left), m, 1.0, None, 0.0, TILES)
    _multiply(x, _t(left), v, 1.0, None, 0.0, TILES)
    _mixing(t, g, x, scale, epsilon, space, METHOD, ITERATIONS, STEPS, TILES)
    _multiply(_of_program(output, o_strides, heads, tokens, VALUE_WIDTH), left, t, 1.0, v, 1.0, TILES)


@triton.jit
def _backward(
    query, key, value, scale, basis, grad, grad_query, grad_key, grad_value, grad_scale, space,
    q_strides, k_strides, v_strides, c_strides, b_strides, e_strides, gq_strides, gv_strides,
    heads, tokens, space_size, epsilon, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    METHOD: tl.constexpr, ITERATIONS: tl.constexpr, STEPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradients of query, key and value, and of each matrix's own c."""
    SIZE: tl.constexpr = 2 * WIDTH
    q, k = _of_program(query, q_strides, heads, tokens, WIDTH), _of_program(key, k_strides, heads, tokens, WIDTH)
    v = _of_program(value, v_strides, heads, tokens, VALUE_WIDTH)
    e = _of_program(grad, e_strides, heads, tokens, VALUE_WIDTH)
    scale = tl.load(_of_program(scale, c_strides, heads, 1, 1)[0]).to(TILES[3])
    m, space = _matrix(_part(space, space_size), tokens, SIZE)
    grad_m, space = _matrix(space, tokens, SIZE)
    space = _beginning(space[0] + space[1])
    g, space = _matrix(space, SIZE, SIZE)
    a3, space = _matrix(space, SIZE, SIZE)
    x, space = _matrix(space, SIZE, VALUE_WIDTH)
    f, space = _matrix(space, SIZE, VALUE_WIDTH)
    a1, space = _matrix(space, SIZE, VALUE_WIDTH)
    a2, space = _matrix(space, SIZE, VALUE_WIDTH)
    a4, space = _matrix(space, SIZE, VALUE_WIDTH)
    taken, space = _matrix(space, 3, WIDTH)
    _gather(m, taken, q, k, METHOD, TILES)
    left = _of_program(basis, b_strides, heads, tokens, SIZE) if METHOD == "qr" else m
    _multiply(g, _t(left), m, 1.0, None, 0.0, TILES)
    _multiply(x, _t(left), v, 1.0, None, 0.0, TILES)
    _multiply(f, _t(left), e, 1.0, None, 0.0, TILES)
    of_scale = _mixing_backward(a1, a2, a3, a4, g, x, f, scale, epsilon, space, METHOD, ITERATIONS, STEPS, TILES)
    tl.store(grad_scale + tl.program_id(0), of_scale.to(grad_scale.dtype.element_ty))
    _multiply(_of_program(grad_value, gv_strides, heads, tokens, VALUE_WIDTH), left, a4, 1.0, e, 1.0, TILES)
    _multiply(grad_m, e, _t(a1), 1.0, None, 0.0, TILES)
    _multiply(grad_m, v, _t(a2), 1.0, grad_m, 1.0, TILES)
    _multiply(grad_m, left, a3, 1.0, grad_m, 1.0, TILES)
    of_query = _of_program(grad_query, gq_strides, heads, tokens, WIDTH)
    of_key = _of_program(grad_key, gq_strides, heads, tokens, WIDTH)
    _scatter(of_query, of_key, grad_m, taken, TILES)


@triton.jit
def _phi1_forward(z, y, output, space, space_size, SIZE: tl.constexpr, VALUE_WIDTH: tl.constexpr, TILES: tl.constexpr):
    """output = φ₁(Z) Y."""
    z, _ = _matrix(_part(z, SIZE * SIZE), SIZE, SIZE)
    y, _ = _matrix(_part(y, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
    output, _ = _matrix(_part(output, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
    _phi1(output, z, y, _part(space, space_size), TILES)


@triton.jit
def _phi1_gradients(
    z, y, grad, grad_z, grad_y, space, space_size, SIZE: tl.constexpr, VALUE_WIDTH: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The gradients of Z and Y from that of φ₁(Z) Y."""
    z, _ = _matrix(_part(z, SIZE * SIZE), SIZE, SIZE)
    y, _ = _matrix(_part(y, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
    grad, _ = _matrix(_part(grad, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
    grad_z, _ = _matrix(_part(grad_z, SIZE * SIZE), SIZE, SIZE)
    grad_y, _ = _matrix(_part(grad_y, SIZE * VALUE_WIDTH), SIZE, VALUE_WIDTH)
    u, space = _matrix(_part(space, space_size), SIZE, VALUE_WIDTH)
    _phi1_backward(u, grad_y, grad_z, z, y, grad, space, TILES)


# What calls them


def fits(query: Tensor, key: Tensor, value: Tensor, method: str) -> bool:
    """Whether `attend` takes tensors such as these: on CUDA, by a method that has one, and under no function transform.

    A kernel that does not compile, or gives other numbers than the plain route when it is first to be used, does not fit
    either, and says so once. While a CUDA graph is recorded none is tried: what is recorded has to have run before with the
    same shapes, as torch asks of every capture.
    """
    tokens, width = query.shape[-2:]
    return (
        method in METHODS
        and all(x.dtype in TYPES and x.numel() and x.shape[-1] <= MAX_WIDTH and _is_whole(x) for x in (query, key, value))
        and tokens <= MAX_TOKENS
        and (method != "qr" or _padded(tokens) * _padded(2 * width) <= MAX_BASIS)
        and _is_right(method, query.device, value.dtype, width, value.shape[-1])
    )


def fits_phi1(z: Tensor, y: Tensor) -> bool:
    """The same for `phi1_times`."""
    return (
        z.dtype == y.dtype
        and all(x.dtype in (torch.float32, torch.float64) and x.numel() and _is_whole(x) for x in (z, y))
        and z.shape[-1] <= 2 * MAX_WIDTH
        and _is_right("phi1", z.device, z.dtype, z.shape[-1], y.shape[-1])
    )


def phi1_times(z: Tensor, y: Tensor) -> Tensor:
    """`osa.linalg.phi1_times` of (b, n, n) and (b, n, m) that fit."""
    return _phi1_operator(z.contiguous(), y.contiguous())


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | Tensor | None,
    method: str,
    num_iterations: int | None,
    epsilon: float,
) -> Tensor:
    """`orthogonal_attention` of tensors that fit, by one operator, which autograd and torch.compile know as a whole."""
    if isinstance(scale, Tensor) and not _is_whole(scale):  # a function transform holds it alone
        return functional._attend(query, key, value, scale, method, num_iterations, epsilon)
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    if not isinstance(scale, Tensor):
        scale = query.new_full((1, 1), scale, dtype=torch.float32)
    if method == "polar_express":  # for products of float64 the compiler loads nothing of 16 bits
        query, key, value = query.float(), key.float(), value.float()
    inputs = [x.expand(*batch, *x.shape[-2:]) for x in (query, key, value, scale.view(*scale.shape[:-2], 1, 1))]
    if len(batch) != 2:
        inputs = [x.reshape(-1, *batch[-1:], *x.shape[-2:]) if batch else x[None, None] for x in inputs]
    options = functional.ITERATIONS.get(method, 0) if num_iterations is None else num_iterations, epsilon
    output, _ = OPERATORS[method](*inputs, *options)
    return output.view(*batch, *output.shape[-2:]) if len(batch) != 2 else output


def _register(method: str) -> torch.library.CustomOpDef:
    """The operators osa::METHOD, (batch, heads, N, d) and (batch, heads, 1, 1), and osa::METHOD_backward."""

    @torch.library.custom_op(f"osa::{method}", mutates_args=())
    def attention(
        query: Tensor, key: Tensor, value: Tensor, scale: Tensor, num_iterations: int, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        output, basis = empty_output(query, value)
        size, width = 2 * query.shape[-1], value.shape[-1]
        constants = _forward_constants(method, query, value, num_iterations)
        space = _space(query, query.shape[-2] * size + 6 * size**2 + (4 * width + 2) * size, constants)
        tensors = query, key, value, scale, output, basis
        _forward[(math.prod(query.shape[:2]),)](
            *tensors, space, *(x.stride() for x in tensors), *query.shape[1:3], space.stride(0), epsilon, **constants
        )  # fmt: skip
        return output, basis

    @torch.library.custom_op(f"osa::{method}_backward", mutates_args=())
    def gradients(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Tensor,
        basis: Tensor,
        grad: Tensor,
        num_iterations: int,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grads = [x.new_empty(x.shape) for x in (query, key, value, scale)]
        size, width = 2 * query.shape[-1], value.shape[-1]
        constants = _constants(method, query, value, num_iterations)
        space = _space(query, 2 * query.shape[-2] * size + 12 * size**2 + (12 * width + 2) * size, constants)
        tensors = query, key, value, scale, basis, grad
        _backward[(math.prod(query.shape[:2]),)](
            *tensors, *grads, space, *(x.stride() for x in tensors), grads[0].stride(), grads[2].stride(),
            *query.shape[1:3], space.stride(0), epsilon, **constants,
        )  # fmt: skip
        return tuple(grads)

    def empty_output(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, tokens, width = value.shape
        output = value.new_empty(batch, tokens, heads, width).transpose(1, 2)  # as the heads' concatenation wants it
        shape = (batch, heads, tokens, 2 * query.shape[-1]) if method == "qr" else (1, 1, 1, 1)
        return output, query.new_empty(shape, dtype=torch.float32)

    def fake_gradients(query, key, value, scale, basis, grad, num_iterations, epsilon):
        return tuple(x.new_empty(x.shape) for x in (query, key, value, scale))

    def save(ctx, inputs, output) -> None:
        *tensors, ctx.num_iterations, ctx.epsilon = inputs
        ctx.set_materialize_grads(False)  # the basis has none
        ctx.save_for_backward(*tensors, output[1])

    @linalg.in_own_types
    def backward(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:
        *tensors, basis = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            options = method, ctx.num_iterations or None, ctx.epsilon
            return *linalg.recorded_grad(lambda *x: functional._attend(*x, *options), tensors, grad), None, None
        return *gradients(*tensors, basis, grad, ctx.num_iterations, ctx.epsilon), None, None

    attention.register_fake(lambda query, key, value, scale, num_iterations, epsilon: empty_output(query, value))
    gradients.register_fake(fake_gradients)
    attention.register_autograd(backward, setup_context=save)
    return attention


@torch.library.custom_op("osa::phi1", mutates_args=())
def _phi1_operator(z: Tensor, y: Tensor) -> Tensor:
    """φ₁(Z) Y, (b, n, n) and (b, n, m), contiguous."""
    output, constants = torch.empty_like(y), _phi1_constants(z, y)
    space = _space(z, 3 * z.shape[-1] ** 2, constants)
    _phi1_forward[(len(z),)](z, y, output, space, space.stride(0), **constants)
    return output


@torch.library.custom_op("osa::phi1_backward", mutates_args=())
def _phi1_gradients_operator(z: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    (_, size, width), constants = y.shape, _phi1_constants(z, y)
    grad_z, grad_y, space = torch.empty_like(z), torch.empty_like(y), _space(z, 7 * size**2 + 5 * size * width, constants)
    _phi1_gradients[(len(z),)](z, y, grad, grad_z, grad_y, space, space.stride(0), **constants)
    return grad_z, grad_y


def _phi1_constants(z: Tensor, y: Tensor) -> dict:
    dtype = tl.float64 if z.dtype == torch.float64 else tl.float32
    return {"SIZE": z.shape[-1], "VALUE_WIDTH": y.shape[-1], **_tiles(z.shape[-1], dtype)}


@linalg.in_own_types
def _phi1_autograd(ctx, grad: Tensor) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return linalg.recorded_grad(linalg.plain_phi1_times, ctx.saved_tensors, grad)
    return _phi1_gradients_operator(*ctx.saved_tensors, grad.contiguous())


_phi1_operator.register_fake(lambda z, y: torch.empty_like(y))
_phi1_gradients_operator.register_fake(lambda z, y, grad: (torch.empty_like(z), torch.empty_like(y)))
_phi1_operator.register_autograd(_phi1_autograd, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

OPERATORS = {method: _register(method) for method in METHODS}


def _constants(method: str, query: Tensor, value: Tensor, num_iterations: int) -> dict:
    """What a kernel is compiled for."""
    return {
        "WIDTH": query.shape[-1],
        "VALUE_WIDTH": value.shape[-1],
        "METHOD": method,
        "ITERATIONS": num_iterations,
        "STEPS": linalg.POLAR_EXPRESS if method == "polar_express" else ((1.5, -0.5, 0.0),),
        **_tiles(2 * query.shape[-1], tl.float64 if method == "polar_express" else tl.float32),
    }


def _forward_constants(method: str, query: Tensor, value: Tensor, num_iterations: int) -> dict:
    """The same, and for "qr" threads that hold 32 entries or fewer of the basis."""
    constants, rows = _constants(method, query, value, num_iterations), _padded(query.shape[-2])
    least = rows * constants["TILES"][0] // (32 * 32) if method == "qr" else 0
    return constants | {"ALL_ROWS": rows, "num_warps": max(constants["num_warps"], least)}


def _tiles(size: int, dtype: tl.dtype) -> dict:
    """Tiles of the least width that `tl.dot` takes, and threads that hold eight entries or fewer of one.

    So many registers, and loads that are not issued ahead, let two programs of float32 share a multiprocessor. Left alone,
    the compiler takes fewer, and spills.
    """
    launch = {"num_warps": 8 if size > 32 else 4, "num_stages": 1, "maxnreg": 255 if dtype == tl.float64 else 128}
    return {"TILES": (_padded(size), 16, 16, dtype), **launch}


def _space(like: Tensor, size: int, constants: dict) -> Tensor:
    """Memory for the intermediate matrices of each program."""
    dtype = torch.float64 if constants["TILES"][3] == tl.float64 else torch.float32
    return like.new_empty(math.prod(like.shape[:-2]), size, dtype=dtype)


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _is_whole(x: Tensor) -> bool:
    """Whether no function transform holds x, which takes an operator apart."""
    return torch.compiler.is_compiling() or linalg.is_eager(x)


_TRIED: dict[tuple, bool] = {}  # whether a kernel of these types and widths agrees


@torch._dynamo.assume_constant_result
def _is_right(method: str, device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Whether a kernel's numbers are right on this device, which is found out once, and never while a graph is recorded."""
    if not torch.cuda.is_available():
        return True  # the tensors are fake, and so is what follows
    kernel = method, device, dtype, width, value_width
    if kernel not in _TRIED and not torch.cuda.is_current_stream_capturing():
        _TRIED[kernel] = _agrees(*kernel)
    return _TRIED.get(kernel, False)


def _agrees(method: str, device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Whether values and gradients on this device are those of the plain route on the CPU in float64."""
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        generator = torch.Generator().manual_seed(0)
        if method == "phi1":
            *inputs, grad = (
                torch.randn(6, n, m, generator=generator) for n, m in ((width, width), *[(width, value_width)] * 2)
            )
            inputs[0] = 0.2 * (inputs[0] - inputs[0].mT)
            function, plain = _phi1_operator, linalg.plain_phi1_times
        else:
            shapes = [(2, 3, 37, width)] * 2 + [(2, 3, 37, value_width)] * 2
            *inputs, grad = (torch.randn(shape, generator=generator) for shape in shapes)
            inputs.append(torch.tensor([0.02, -0.05, 0.1]).view(3, 1, 1))
            options = {"method": method, "num_iterations": None, "epsilon": linalg.EPSILON}
            function, plain = functools.partial(attend, **options), functools.partial(functional._attend, **options)
        inputs, grad = [x.to(dtype) for x in inputs], grad.to(dtype)
        exact = [x.double().requires_grad_() for x in inputs]
        inputs = [x.to(device).requires_grad_() for x in inputs]
        try:
            found, expected = function(*inputs), plain(*exact)
            grads = torch.autograd.grad(found, inputs, grad.to(device)), torch.autograd.grad(expected, exact, grad.double())
            errors = [
                ((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm()).item()
                for a, b in [(found, expected), *zip(*grads, strict=True)]
            ]
            reason = None if max(errors) < TOLERANCE[dtype] else f"its error is {max(errors):.1e}"
        except (TritonError, RuntimeError, ValueError, TypeError, AssertionError) as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if reason is not None:
        warnings.warn(f'the kernel of "{method}" for d = {width} is not used on {device}: {reason}', stacklevel=2)
    return reason is None
