"""The small matrices behind orthogonal attention: bases of span[Q, K] (Section 3) and the function φ₁.

Nothing here is N×N, and nothing but the QR basis is larger than 2d_v×2d_v.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor

EPSILON = 1e-7  # Section 3 adds ε > 0 to ‖M‖_F without a value; this one vanishes in float32 next to any ‖M‖_F above 2

POLAR_EXPRESS = (  # Amsel et al. 2025, degree 5, for singular values in [10⁻³, 1]; the last entry is repeated beyond
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

_STEP = 3.0  # largest ‖Z‖₂ of one Taylor step: its terms stay below 3³/3! = 4.5, so that no digit is lost to cancellation
_MAX_STEPS = 4  # beyond, doubling is cheaper
_MAX_DOUBLINGS = 14  # reaches ‖Z‖₁ = 16,384 where the norm cannot be read off the data


def qr_basis(m: Tensor) -> Tensor:
    """Orthonormal basis of the columns of M by the reduced QR decomposition (Section 3).

    Householder's on the CPU, where it is the faster. On CUDA it goes through the batch one by one and waits for the host;
    float32 matrices take `cholesky_qr_basis` there.

    Args:
        m: (..., N, 2d_v).

    Returns:
        B: (..., N, min(N, 2d_v)) with BᵀB = I. Its gradient is undefined where M is rank-deficient.
    """
    if m.device.type == "cuda" and m.dtype == torch.float32 and m.shape[-2] >= m.shape[-1]:
        return cholesky_qr_basis(m)
    return torch.linalg.qr(m, mode="reduced").Q


def cholesky_qr_basis(m: Tensor) -> Tensor:
    """The same from two Cholesky decompositions, B = M R⁻¹ with RᵀR = MᵀM, for whole batches and without a guard to read.

    Householder's Q is that of M + E, ‖E‖ a few eps ‖M‖ (Higham 2002, Theorem 19.4). So an E of that size, added on
    purpose to the diagonal, costs nothing, and no null vector of M is one of M + E. In float64 the Gram matrix holds
    singular values down to 10⁻⁸ ‖M‖, and a shift of the first decomposition makes up for its rounding; the second
    removes what both have left of BᵀB − I (shifted Cholesky-QR of Fukaya et al. 2020).

    Args:
        m: (..., N, n), float32, N ≥ n, of any rank.

    Returns:
        B: (..., N, n) with BᵀB = I.
    """
    x = m.double()
    norm = torch.linalg.matrix_norm(x).clamp(min=torch.finfo(m.dtype).tiny)[..., None, None]  # (..., 1, 1)
    x = x + torch.finfo(m.dtype).eps * norm * torch.eye(*x.shape[-2:], dtype=x.dtype, device=x.device)
    shift = 4 * x.shape[-1] * torch.finfo(x.dtype).eps * norm.square()
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    for added in (shift, torch.zeros_like(shift)):
        gram = x.mT @ x + added * identity  # (..., n, n); not in place, which autograd could not take back
        factor = torch.linalg.cholesky_ex(gram).L
        x = torch.linalg.solve_triangular(factor.mT, x, upper=True, left=False)
    return x.to(m.dtype)


def newton_schulz_gram(gram: Tensor, num_iterations: int = 6) -> Tensor:
    """G_K = M_KᵀM_K of the Newton–Schulz iterate M_K (Eq. 9), given G₀ = M₀ᵀM₀.

    M_{k+1} = M_k T_k with T_k = ½ (3I − G_k), and so G_{k+1} = T_k G_k T_k: the iteration never leaves 2d_v×2d_v
    matrices, where all factors are polynomials in G₀ and commute. Where the singular values of M₀ have converged, G_K is
    the projector onto its row space. Small ones do not converge in few steps; that is part of the method and is not
    corrected here.

    Args:
        gram: (..., n, n), symmetric, of M₀ with ‖M₀‖₂ < √3. Its gradient is the symmetric part of the gradient.
        num_iterations: K ≥ 1. Appendix D: 6.

    Returns:
        (..., n, n), symmetric.
    """
    if _is_readable(gram):
        return _NewtonSchulzGram.apply(flat(gram), num_iterations).view(gram.shape)
    return _newton_schulz_gram(flat(gram), num_iterations)[-1].view(gram.shape)


def _newton_schulz_gram(gram: Tensor, num_iterations: int) -> list[Tensor]:
    """G_0 to G_K, (b, n, n) each."""
    grams = [gram]
    for _ in range(num_iterations):
        product = torch.baddbmm(gram, gram, gram, beta=1.5, alpha=-0.5)  # G T
        gram = torch.baddbmm(product, product, gram, beta=1.5, alpha=-0.5)  # G T T
        grams.append(gram)
    return grams


class _NewtonSchulzGram(torch.autograd.Function):
    """`_newton_schulz_gram` with a backward of two products an iteration.

    G_{k+1} = 3T² − 2T³ with T = ½ (3I − G_k), a polynomial in G_k alone. With E the gradient of G_{k+1}, symmetric, that
    of G_k is therefore T²E + TET + ET² − 3/2 (TE + ET) = R + Rᵀ with Y = ET and R = T (Yᵀ + ½Y) − 3/2 Y.
    """

    @staticmethod
    def forward(ctx, gram: Tensor, num_iterations: int) -> Tensor:
        *grams, result = _newton_schulz_gram(gram, num_iterations)
        ctx.save_for_backward(*grams)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grams = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *recorded_grad(lambda gram: _newton_schulz_gram(gram, len(grams))[-1], grams[:1], grad), None
        grad = grad + grad.mT  # twice the symmetric part
        for gram in reversed(grams):
            t = -0.5 * gram
            t.diagonal(dim1=-2, dim2=-1).add_(1.5)
            y = torch.bmm(grad, t)
            r = torch.baddbmm(y, t, torch.add(y.mT, y, alpha=0.5), beta=-1.5)
            grad = r + r.mT
        return 0.5 * grad, None


def polar_express_gram(gram: Tensor, num_iterations: int = 7) -> Tensor:
    """G_K = M_KᵀM_K of the Polar Express iterate M_K, given G₀ = M₀ᵀM₀: `newton_schulz_gram` with other steps.

    M_{k+1} = M_k T_k with T_k = a_k I + b_k G_k + c_k G_k² (Amsel et al. 2025), and so G_{k+1} = T_k G_k T_k. Seven steps
    take singular values in [10⁻³, 1] to 1 within 10⁻⁶, where Newton–Schulz takes about twenty.

    Args:
        gram: (..., n, n), symmetric, of M₀ with ‖M₀‖₂ ≤ 1. float64, because a Gram matrix squares the condition number:
            float32 does not hold the eigenvalues of 10⁻⁶ that are raised to 1.
        num_iterations: K ≥ 1.

    Returns:
        (..., n, n), symmetric.
    """
    for k in range(num_iterations):
        a, b, c = POLAR_EXPRESS[min(k, len(POLAR_EXPRESS) - 1)]
        t = b * gram + c * gram @ gram
        t = t + a * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        gram = gram @ t @ t
    return gram


def phi1(z: Tensor) -> Tensor:
    """φ₁(Z) = (e^Z − I) Z⁻¹ = Σ Z^k / (k + 1)!, which singular matrices have too.

    Scaling and doubling by matrix products alone: a Taylor polynomial at Z/2^s, then s times
    φ₁(2Z) = ½ (e^Z + I) φ₁(Z) with e^Z = I + Z φ₁(Z) (Higham 2008, Section 10.7.4). s is the least with ‖Z‖₁ ≤ 2^s over
    the batch; where reading it would stop the device or break a trace, every matrix has its own s in a loop of fixed length.

    Args:
        z: (..., n, n), float32 or float64.

    Returns:
        (..., n, n).
    """
    exponent = torch.linalg.matrix_norm(z.detach(), ord=1, keepdim=True).clamp(min=1).log2().ceil()  # (..., 1, 1)
    if _is_readable(z):
        exponent = exponent.nan_to_num(posinf=0.0).amax() if z.numel() else exponent.new_zeros(())
        doublings = int(exponent)
    else:
        doublings, exponent = _MAX_DOUBLINGS, exponent.clamp(max=_MAX_DOUBLINGS)
    z = z * torch.exp2(-exponent)
    identity = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).expand_as(z)
    phi = _taylor(flat(z), flat(identity), flat(z @ z), _degree(1.0, z.dtype))[-1].view(z.shape)
    expm1 = z @ phi  # e^Z − I
    for k in range(doublings):
        phi = torch.where(k < exponent, phi + 0.5 * (expm1 @ phi), phi)
        if k + 1 < doublings:
            expm1 = torch.where(k < exponent, 2 * expm1 + expm1 @ expm1, expm1)
    return phi


def phi1_times(z: Tensor, y: Tensor) -> Tensor:
    """φ₁(Z) Y without φ₁(Z): a Taylor polynomial by Horner's rule in Z² on blocks as narrow as Y.

    The Taylor degree is the least whose remainder, in value and gradient, is below the rounding. What counts is the
    spectral radius ρ of Z, which is ‖S‖₂ (for Z = scale · J MᵀM too: between M and J Mᵀ its series is one in S). For
    ρ > 3, e^Z is applied in equal steps. Where that takes many steps, or ρ cannot be read off the data, `phi1` takes over.

    Args:
        z: (..., n, n) with purely imaginary spectrum, float32 or float64.
        y: (..., n, m), the same batch dimensions.

    Returns:
        (..., n, m).
    """
    if not (_is_readable(z) and _is_readable(y) and z.numel()):
        return phi1(z) @ y
    z, shape, y = flat(z), y.shape, flat(y)
    square = torch.bmm(z.detach(), z.detach())
    radius = _spectral_radius(square)
    if not radius <= _STEP * _MAX_STEPS:  # NaN too
        return (phi1(z) @ y).view(shape)
    steps = max(1, math.ceil(radius / _STEP))
    degree = _degree(radius / steps, z.dtype)
    if steps > 1:
        z, square = z / steps, square / steps**2
    result = _Phi1Times.apply(z, y, square, degree)
    for _ in range(steps - 1):  # e^{kZ} Y = Y + Z · (sum of the k results so far)
        result = result + _Phi1Times.apply(z, y + z @ result, square, degree)
    return (result / steps if steps > 1 else result).view(shape)


@contextmanager
def full_precision(device: torch.device):
    """Products of float32 matrices in float32 on CUDA: TF32, with its 10 bits, would leave A orthogonal to 10⁻³ only."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def flat(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def is_eager(x: Tensor) -> bool:
    """Whether x is neither under a trace nor under a function transform."""
    return not torch.compiler.is_compiling() and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_recorded(*inputs: Tensor) -> bool:
    """Whether autograd, and no trace or function transform, records what is done with the inputs."""
    return all(map(is_eager, inputs)) and torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def _is_readable(x: Tensor) -> bool:
    """Whether a value of x may be read: it exists, and reading it does not stop an accelerator."""
    return x.device.type == "cpu" and is_eager(x)


def _spectral_radius(square: Tensor) -> float:
    """A bound of the spectral radius of Z over the batch from Z², within 1.2 or so for spectra that occur in attention.

    Eigenvalues come in pairs ±iλ, so ½ tr(Z⁴) = Σ λ⁴ ≥ ρ⁴. The second term covers the rounding of the first.
    """
    eps = square.shape[-1] * torch.finfo(square.dtype).eps
    fourth = (square * square.mT).sum((-2, -1)).clamp(min=0) / 2 + eps * square.square().sum((-2, -1))
    return fourth.amax().item() ** 0.25


def _degree(radius: float, dtype: torch.dtype) -> int:
    """The least odd m with ρ^{m+1} / (m + 1)! ≤ eps / 4: the remainder's leading term after one derivative."""
    degree, term = 1, radius**2 / 2
    while term > torch.finfo(dtype).eps / 4:
        degree += 2
        term *= radius**2 / (degree * (degree + 1))
    return degree


def _taylor(z: Tensor, y: Tensor, square: Tensor, degree: int) -> list[Tensor]:
    """Σ_{k ≤ degree} Z^k Y / (k + 1)! for odd degrees, (b, n, n) and (b, n, m), by Horner's rule in Z².

    Two terms at a time (Paterson & Stockmeyer 1973): P_j = Y + ZY / (2j + 2) + Z² P_{j+1} / ((2j + 2)(2j + 3)), and P_0 is
    the sum.

    Returns:
        P_J to P_0, with J = (degree − 1)/2.
    """
    first = torch.bmm(z, y)
    last = degree // 2
    partial = [torch.add(y, first, alpha=1 / (2 * last + 2))]
    for j in range(last, 0, -1):
        pair = torch.add(y, first, alpha=1 / (2 * j))
        partial.append(torch.baddbmm(pair, square, partial[-1], alpha=1 / (2 * j * (2 * j + 1))))
    return partial


class _Phi1Times(torch.autograd.Function):
    """`_taylor` of z and y, given square = z², with a backward that accumulates in place.

    With E the gradient of P_0 and H_j = (Zᵀ)^{2j} E / (2j + 1)!, those of Y and ZY are ΣH_j and ΣH_j / (2j + 2) to begin
    with, and that of Z² is ΣH_{j−1} P_jᵀ / (2j (2j + 1)).
    """

    @staticmethod
    def forward(ctx, z: Tensor, y: Tensor, square: Tensor, degree: int) -> Tensor:
        partial = _taylor(z, y, square, degree)
        ctx.save_for_backward(z, y, square, *partial)
        ctx.degree = degree
        return partial[-1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, y, square, *partial = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *recorded_grad(lambda z, y: _taylor(z, y, z @ z, ctx.degree)[-1], (z, y), grad), None, None
        grad_y, grad_first, grad_square = grad.clone(), 0.5 * grad, torch.zeros_like(z)
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


def recorded_grad(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of function(*inputs) as autograd finds it, for a backward pass that is itself to be differentiated."""
    inputs = [x.view_as(x) for x in inputs]  # where one input was made from another, the gradients stay apart
    needed = [x for x in inputs if x.requires_grad]
    grads = iter(torch.autograd.grad(function(*inputs), needed, grad, create_graph=True))
    return tuple(next(grads) if x.requires_grad else None for x in inputs)
