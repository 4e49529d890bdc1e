"""Linear algebra of orthogonal attention. Only M = [Q, K] and its basis have N rows; other matrices have at most 2d_v."""

import math

import torch
from torch import Tensor

from osa.runtime import in_own_types, is_readable, kernel, recorded_grad

Scale = float | Tensor  # factor of Q Kᵀ − K Qᵀ

# (a_k, b_k, c_k) of Amsel et al. 2025, for singular values in [10⁻³, 1]. Steps after the eighth repeat the last triple
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# Maximum spectral radius ρ for which Z need not be halved: the terms of the series stay below 4⁴/4! = 11, and hardly cancel
_SERIES_RADIUS = 4.0
_MAX_DOUBLINGS = 14  # number of times `plain_phi1_times` halves Z where ρ is unknown, e.g. on a GPU or during tracing
_MAX_RADIUS = 3 * 2.0**_MAX_DOUBLINGS  # maximum spectral radius for which 14 halvings of Z are enough: 49,152
# Maximum `imbalance` of Z for which A = exp(S) is orthogonal up to an error of about 100 eps max(1, ‖S‖₂)
IMBALANCE = 128.0


def qr_basis(m: Tensor) -> Tensor:
    """Returns an orthonormal basis of M's column space, from the reduced QR decomposition (Section 3).

    For float32 on CUDA, `cholesky_qr_basis` replaces Householder QR, which would process a batch one matrix at a time and
    synchronise with the host.

    Args:
        m: (..., N, 2d_v).

    Returns:
        B: (..., N, min(N, 2d_v)) with BᵀB = I. Its gradient is undefined if M is rank-deficient.
    """
    if m.device.type == "cuda" and m.dtype == torch.float32 and m.shape[-2] >= m.shape[-1]:
        return cholesky_qr_basis(m)
    return torch.linalg.qr(m, mode="reduced").Q


def cholesky_qr_basis(m: Tensor) -> Tensor:
    """Orthonormal basis B = M R⁻¹ with RᵀR = MᵀM, from two Cholesky decompositions, batched and without synchronisation.

    First, eps ‖M‖_F times the N×n identity is added to M, to give M full rank. This costs no accuracy: Householder QR
    has a backward error of about the same size (Higham 2002, Theorem 19.4). Adding a multiple of I to MᵀM keeps
    the first decomposition from failing. The second removes the remaining error BᵀB − I (Fukaya et al. 2020). Uses float64.

    Args:
        m: (..., N, n), float32, N ≥ n, of any rank.
    """
    x = m.double()
    norm = torch.linalg.matrix_norm(x).clamp(min=torch.finfo(m.dtype).tiny)[..., None, None]  # (..., 1, 1)
    x = x + torch.finfo(m.dtype).eps * norm * torch.eye(*x.shape[-2:], dtype=x.dtype, device=x.device)
    shift = 4 * x.shape[-1] * torch.finfo(x.dtype).eps * norm.square()
    identity = identity_like(x)
    for added in (shift, torch.zeros_like(shift)):
        gram = x.mT @ x + added * identity  # (..., n, n)
        factor = torch.linalg.cholesky_ex(gram).L
        x = torch.linalg.solve_triangular(factor.mT, x, upper=True, left=False)
    return x.to(m.dtype)


def newton_schulz_gram(gram: Tensor, num_iterations: int = 6) -> Tensor:
    """G_K = M_KᵀM_K of the Newton–Schulz iterate M_K (Eq. 9), given G₀ = M₀ᵀM₀.

    M_{k+1} = M_k T_k with T_k = ½ (3I − G_k), so G_{k+1} = T_k G_k T_k, and all these factors commute.

    Args:
        gram: G₀, (..., n, n), symmetric, with ‖M₀‖₂ < √3. Its gradient is symmetric.
        num_iterations: K ≥ 1. Appendix D: 6.
    """
    if is_readable(gram):
        return _NewtonSchulzGram.apply(as_batch(gram), num_iterations).view(gram.shape)
    return _newton_schulz_gram(as_batch(gram), num_iterations)[-1].view(gram.shape)


def _newton_schulz_gram(gram: Tensor, num_iterations: int) -> list[Tensor]:
    """Returns G_0 to G_K, (b, n, n) each."""
    grams = [gram]
    for _ in range(num_iterations):
        square = torch.bmm(gram, gram)
        difference = torch.sub(gram, square, alpha=2 / 3)
        gram = torch.baddbmm(difference, gram, square, beta=2.25, alpha=0.25)  # ¼ (9G − 6G² + G³) = G T²
        grams.append(gram)
    return grams


class _NewtonSchulzGram(torch.autograd.Function):
    """`_newton_schulz_gram` with a backward pass of two products per iteration.

    Let G = G_k, so that G_{k+1} = ¼ (9G − 6G² + G³), and let the symmetric E be the gradient of G_{k+1}. The gradient of
    G_k is then ¼ (9E − 6 (EG + GE) + EG² + GEG + G²E) = R + Rᵀ with Y = EG − 4E and R = ¼ (Y + ½Yᵀ) G + 9/8 E.
    """

    @staticmethod
    def forward(ctx, gram: Tensor, num_iterations: int) -> Tensor:
        *grams, result = _newton_schulz_gram(gram, num_iterations)
        ctx.save_for_backward(*grams)
        return result

    @staticmethod
    @in_own_types
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grams = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *recorded_grad(lambda gram: _newton_schulz_gram(gram, len(grams))[-1], grams[:1], grad), None
        grad = grad + grad.mT  # twice the symmetric part of the gradient
        for gram in reversed(grams):
            y = torch.baddbmm(grad, grad, gram, beta=-4)
            r = grad.baddbmm_(torch.add(y, y.mT, alpha=0.5), gram, beta=1.125, alpha=0.25)
            grad = r + r.mT
        return 0.5 * grad, None


def polar_express_gram(gram: Tensor, num_iterations: int = 7) -> Tensor:
    """G_K = M_KᵀM_K of the Polar Express iterate M_K, given G₀ = M₀ᵀM₀: `newton_schulz_gram` with other polynomials.

    M_{k+1} = M_k T_k with T_k = a_k I + b_k G_k + c_k G_k² (Amsel et al. 2025). Seven steps bring singular values in
    [10⁻³, 1] to within 10⁻⁶ of 1; Newton–Schulz needs about twenty.

    Args:
        gram: G₀, (..., n, n), symmetric, in float64, with ‖M₀‖₂ ≤ 1. float32 could not resolve eigenvalues of 10⁻⁶.
        num_iterations: K ≥ 1.
    """
    for k in range(num_iterations):
        a, b, c = POLAR_EXPRESS[min(k, len(POLAR_EXPRESS) - 1)]
        t = b * gram + c * gram @ gram
        t = t + a * identity_like(gram)
        gram = gram @ t @ t
    return gram


def phi1_times(z: Tensor, y: Tensor) -> Tensor:
    """φ₁(Z) Y with φ₁(Z) = (e^Z − I) Z⁻¹ = Σ Z^k / (k + 1)!, a series that also defines φ₁ for singular Z.

    Computes a Taylor polynomial by Horner's rule in Z², with products only as wide as Y. The degree depends on the spectral
    radius ρ of Z. If Z is [S] = BᵀSB or scale · J MᵀM, ρ equals ‖S‖₂.

    If ρ > 4, Z is halved s times, until ρ ≤ 1, and doubled again in s steps: φ₁(2Z) Y = φ₁(Z) Y + ½ (e^Z − I) φ₁(Z) Y
    with e^{2Z} − I = 2 (e^Z − I) + (e^Z − I)² (Higham 2008, Section 10.7.4). Without a kernel, s is 14 on a GPU or during
    tracing, and the result is NaN unless the bound 2ρ² ≤ Σ|λ|² = −tr Z² guarantees ρ ≤ 49,152.

    Args:
        z: (..., n, n) with purely imaginary spectrum, float32 or float64.
        y: (..., n, m), with the batch dimensions of z.
    """
    shape, z, y = y.shape, as_batch(z), as_batch(y)
    return (kernel("phi1_times", z, y) or plain_phi1_times)(z, y).view(shape)


def plain_phi1_times(z: Tensor, y: Tensor) -> Tensor:
    """`phi1_times` with torch's operators, for Z (b, n, n) and Y (b, n, m). Derivatives of every order exist."""
    radius, doublings = _MAX_RADIUS / 2**_MAX_DOUBLINGS, _MAX_DOUBLINGS
    if is_readable(z) and is_readable(y) and z.numel():
        square = torch.bmm(z.detach(), z.detach())
        radius = _spectral_radius(square)
        if radius <= _SERIES_RADIUS:
            return _Phi1Times.apply(z, y, square, _degree(radius, z.dtype))
        doublings = math.ceil(math.log2(radius))
        radius /= 2**doublings
    else:
        is_lost = square_moduli(z) > 2 * _MAX_RADIUS**2
        y = y * torch.where(is_lost, math.nan, 1.0).to(y.dtype)  # NaN if ρ may exceed _MAX_RADIUS
    z = z / 2**doublings
    phi = _taylor(identity_like(z), z, torch.bmm(z, z), _degree(radius, z.dtype))[-1]
    result, expm1 = torch.bmm(phi, y), torch.bmm(z, phi)  # φ₁(Z) Y and e^Z − I
    for k in range(doublings):
        if k > 0:
            expm1 = torch.baddbmm(expm1, expm1, expm1, beta=2)
        result = torch.baddbmm(result, expm1, result, alpha=0.5)
    return result


def resolvent_times(z: Tensor, y: Tensor) -> Tensor:
    """(I − Z/2)⁻¹ Y, for the Cayley transform (I − S/2)⁻¹ (I + S/2) = I + S (I − S/2)⁻¹.

    Solves by LU decomposition of W = I − Z/2. On CUDA, LU decomposition of a batch would synchronise with the host, so the
    Cholesky decomposition of WᵀW replaces it, in float64 because the condition number of WᵀW is the square of W's.

    Args:
        z: (..., n, n) with purely imaginary spectrum, so that W is not singular.
        y: (..., n, m), with the batch dimensions of z.
    """
    w = identity_like(z) - z / 2
    return solve_by_cholesky(w, y) if z.device.type == "cuda" else torch.linalg.solve_ex(w, y).result


def solve_by_cholesky(w: Tensor, y: Tensor) -> Tensor:
    """W⁻¹ Y = (WᵀW)⁻¹ WᵀY."""
    w = w.double()
    factor = torch.linalg.cholesky_ex(w.mT @ w).L
    inner = torch.linalg.solve_triangular(factor, w.mT @ y.double(), upper=False)
    return torch.linalg.solve_triangular(factor.mT, inner, upper=True).to(y.dtype)


@torch.no_grad()
def is_balanced(gram: Tensor, scale: Tensor) -> bool:
    """True if every Z = scale · J MᵀM is nearly normal (`imbalance` ≤ 128), so that φ₁(Z) is accurate.

    Args:
        gram: MᵀM, (b, 2d, 2d). If a value has overflowed, the result is False.
        scale: (b, 1, 1).
    """
    norm = scale.abs() * torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True)  # ‖Z‖_F, (b, 1, 1)
    return bool((norm <= IMBALANCE**0.5).all() or (imbalance(apply_j(scale * gram)) <= IMBALANCE).all())


@torch.no_grad()
def imbalance(z: Tensor, spectrum: Tensor | None = None) -> Tensor:
    """(‖Z‖_F² − Σ|λ|²) / c of each Z with imaginary spectrum, (b, n, n) → (b, 1, 1), with c = (Σ|λ|²)^½ clamped to [1, 64].

    The numerator is the squared departure of Z from normality (Henrici 1962), and eps times the numerator is about the error
    in exp(S) due to rounding in φ₁(Z). Dividing by c makes this error relative to ‖S‖_F = (Σ|λ|²)^½. For ‖S‖_F > 64, the
    error that a non-normal Z causes in exp(S) grows faster than ‖S‖_F, so c is at most 64. `spectrum` is Σ|λ|², if known.
    """
    spectrum = square_moduli(z) if spectrum is None else spectrum
    norm = torch.linalg.vector_norm(z, dim=(-2, -1), keepdim=True)
    return (norm.square() - spectrum) / spectrum.clamp(1, 64**2).sqrt()


def square_moduli(z: Tensor) -> Tensor:
    """Σ|λ|² = −tr Z² of a Z with imaginary spectrum, (b, 1, 1), without a gradient."""
    z = z.detach()
    return -(z * z.mT).sum((-2, -1), keepdim=True)


@torch.no_grad()
def gram_factor(gram: Tensor) -> Tensor:
    """Upper triangular R (b, 2d, 2d). M R⁻¹ has nearly orthonormal columns, but some have norm < 1 if M is rank-deficient.

    R is the Cholesky factor, RᵀR = MᵀM + δI, with δ slightly larger than the rounding error of `gram` = MᵀM.
    """
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True).unsqueeze(-1)  # ‖M‖_F²
    shift = gram.shape[-1] * torch.finfo(gram.dtype).eps * size + torch.finfo(gram.dtype).tiny
    return torch.linalg.cholesky_ex(gram + shift * identity_like(gram)).L.mT


def balanced(m: Tensor) -> Tensor:
    """Returns M T for a symplectic T (T J Tᵀ = J): S stays the same, and the columns q_j, k_j become as short as possible.

    S/scale = M J Mᵀ is the sum of q_j k_jᵀ − k_j q_jᵀ over pairs of columns. Multiplying a pair by a 2×2 matrix of
    determinant 1 leaves its term unchanged. First, the shorter column's projection on the longer is subtracted from the
    shorter. Then one column is multiplied by s and the other by 1/s, which makes both equally long.

    Derivatives treat T as a constant, since exp(S) does not depend on it. The subtraction is in float64, so that no
    precision is lost if Q ≈ K in float32. On Apple's GPUs (MPS), which have no float64, the subtraction is in M's own dtype.

    Args:
        m: [Q, K], (b, N, 2d).
    """
    query, key = (m if m.device.type == "mps" else m.double()).chunk(2, dim=-1)  # (b, N, d)
    tiny, eps = torch.finfo(query.dtype).tiny, torch.finfo(m.dtype).eps
    q2, k2, qk = ((x.detach() * y.detach()).sum(-2, keepdim=True) for x, y in ((query, query), (key, key), (query, key)))
    is_longer = k2 >= q2
    query, key = (
        query - torch.where(is_longer, qk / k2.clamp(min=tiny), 0) * key,
        key - torch.where(is_longer, 0, qk / q2.clamp(min=tiny)) * query,
    )
    # If columns are parallel, subtracting the projection leaves only rounding errors, so squared lengths get lower bounds
    least = (eps**2 * x2 + tiny for x2 in (q2, k2))
    q2, k2 = (x.detach().square().sum(-2, keepdim=True).clamp(min=low) for x, low in zip((query, key), least, strict=True))
    s = ((k2 / q2) ** 0.25).clamp(1e-20, 1e20)  # if one column is zero, the limits keep the other from overflowing float32
    return torch.cat([s * query, key / s], dim=-1).to(m.dtype)


def apply_j(x: Tensor) -> Tensor:
    """J X with J = [[0, I], [−I, 0]]."""
    upper, lower = x.chunk(2, dim=-2)
    return torch.cat([lower, -upper], dim=-2)


def as_batch(x: Tensor) -> Tensor:
    """(..., N, d) → (b, N, d)."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def identity_like(x: Tensor) -> Tensor:
    """Returns the identity matrix of the size of x's last dimension, with x's dtype and device."""
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def _spectral_radius(square: Tensor) -> float:
    """Returns an upper bound on the spectral radii ρ of all Z in the batch, given Z².

    Eigenvalues come in pairs ±iλ, so ½ tr(Z⁴) = Σ λ⁴ ≥ ρ⁴. The term in eps covers the rounding error of the trace. If Z⁴ is
    NaN or overflows, `phi1_times` fails with any bound, so the bound is `_SERIES_RADIUS`.
    """
    eps = square.shape[-1] * torch.finfo(square.dtype).eps
    fourth = (square * square.mT).sum((-2, -1)).clamp(min=0) / 2 + eps * square.square().sum((-2, -1))
    limit = _SERIES_RADIUS**4
    return fourth.nan_to_num(nan=limit, posinf=limit).amax().item() ** 0.25


def _degree(radius: float, dtype: torch.dtype) -> int:
    """Returns the least odd degree m with ρ^{m+1}/(m + 1)! ≤ eps/4. The left side is the first omitted term of d(e^Z)/dZ."""
    degree, term = 1, radius**2 / 2
    while term > torch.finfo(dtype).eps / 4:
        degree += 2
        term *= radius**2 / (degree * (degree + 1))
    return degree


def _taylor(y: Tensor, first: Tensor, square: Tensor, degree: int) -> list[Tensor]:
    """Returns P_J to P_0, with J = (degree − 1)/2 and P_0 = Σ_{k ≤ degree} Z^k Y / (k + 1)!, given Y, ZY and Z².

    P_j = Y + ZY / (2j + 2) + Z² P_{j+1} / ((2j + 2)(2j + 3)) adds two terms with one product (Paterson & Stockmeyer 1973).
    """
    last = degree // 2
    partial = [torch.add(y, first, alpha=1 / (2 * last + 2))]
    for j in range(last, 0, -1):
        pair = torch.add(y, first, alpha=1 / (2 * j))
        partial.append(torch.baddbmm(pair, square, partial[-1], alpha=1 / (2 * j * (2 * j + 1))))
    return partial


class _Phi1Times(torch.autograd.Function):
    """The Taylor polynomial of φ₁(Z) Y, given Z² as `square`. `backward` accumulates in place.

    With the partial sums P_j of `_taylor`, let E be the gradient of the result P_0, and H_j = (Zᵀ)^{2j} E / (2j + 1)!. If Y,
    ZY and Z² are treated as separate inputs, their gradients are ΣH_j, ΣH_j / (2j + 2) and ΣH_{j−1} P_jᵀ / (2j (2j + 1)).
    The chain rule through ZY and Z² then gives the gradients of Z and Y.
    """

    @staticmethod
    def forward(ctx, z: Tensor, y: Tensor, square: Tensor, degree: int) -> Tensor:
        partial = _taylor(y, torch.bmm(z, y), square, degree)
        ctx.save_for_backward(z, y, square, *partial)
        ctx.degree = degree
        return partial[-1]

    @staticmethod
    @in_own_types
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, y, square, *partial = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *recorded_grad(lambda z, y: _taylor(y, z @ y, z @ z, ctx.degree)[-1], (z, y), grad), None, None
        grad_y, grad_first, grad_square = grad.clone(), 0.5 * grad, grad.new_zeros(z.shape)
        power, factorial = grad, 1.0  # (Zᵀ)^{2j} E and (2j + 1)!
        for j, later in enumerate(reversed(partial[:-1]), 1):
            factorial *= 2 * j * (2 * j + 1)
            grad_square.baddbmm_(power, later.mT, alpha=1 / factorial)
            power = torch.bmm(square.mT, power)
            grad_y.add_(power, alpha=1 / factorial)
            grad_first.add_(power, alpha=1 / (factorial * (2 * j + 2)))
        grad_z = torch.bmm(grad_first, y.mT)
        if len(partial) > 1:
            grad_z.baddbmm_(z.mT, grad_square).baddbmm_(grad_square, z.mT)
        return grad_z, grad_y.baddbmm_(z.mT, grad_first), None, None
