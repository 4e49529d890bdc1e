"""The small matrices behind orthogonal attention: bases of span[Q, K] (Section 3) and the function φ₁.

Nothing here is N×N, and nothing but the QR basis is larger than 2d_v×2d_v.
"""

import math

import torch
from torch import Tensor

EPSILON = 1e-7  # Section 3 adds ε > 0 to ‖M‖_F without a value; this one vanishes in float32 next to any real ‖M‖_F

_STEP = 3.0  # largest ‖Z‖₂ of one Taylor step: its terms stay below 3³/3! = 4.5, so that no digit is lost to cancellation
_MAX_STEPS = 4  # beyond, doubling is cheaper
_MAX_DOUBLINGS = 14  # reaches ‖Z‖₁ = 16,384 where the norm cannot be read off the data


def qr_basis(m: Tensor) -> Tensor:
    """Orthonormal basis of the columns of M by the reduced QR decomposition (Section 3).

    Args:
        m: (..., N, 2d_v).

    Returns:
        B: (..., N, min(N, 2d_v)) with BᵀB = I. Its gradient is undefined where M is rank-deficient.
    """
    return torch.linalg.qr(m, mode="reduced").Q


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
    if not _is_readable(gram):
        return _newton_schulz_gram(gram, num_iterations)[0]
    return _NewtonSchulzGram.apply(_flat(gram), num_iterations).view(gram.shape)


def _newton_schulz_gram(gram: Tensor, num_iterations: int) -> tuple[Tensor, list[Tensor]]:
    """G_K, and G_k and T_k of each iteration."""
    trail = []
    for _ in range(num_iterations):
        t = -0.5 * gram
        t.diagonal(dim1=-2, dim2=-1).add_(1.5)
        trail += [gram, t]
        gram = gram @ t @ t
    return gram, trail


class _NewtonSchulzGram(torch.autograd.Function):
    """`_newton_schulz_gram` for (b, n, n) with a backward of three products an iteration."""

    @staticmethod
    def forward(ctx, gram: Tensor, num_iterations: int) -> Tensor:
        result, trail = _newton_schulz_gram(gram, num_iterations)
        ctx.save_for_backward(*trail)
        ctx.num_iterations = num_iterations
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        trail = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for: leave it to autograd
            result, _ = _newton_schulz_gram(trail[0], ctx.num_iterations)
            return *torch.autograd.grad(result, trail[0], grad, create_graph=True), None
        # With E the symmetric gradient of G_{k+1} = G T T and U = E T: that of T is G (U + Uᵀ), because G and T commute,
        # and that of G the symmetric part of U T − ½ G (U + Uᵀ). Sums with the transpose are not halved: each doubles E.
        grad = grad + grad.mT
        for gram, t in zip(trail[-2::-2], trail[::-2], strict=True):
            half = torch.bmm(grad, t)
            grad = torch.bmm(gram, half + half.mT).mul_(-0.5).baddbmm_(half, t)
            grad = grad + grad.mT
        return grad * 0.5 ** (ctx.num_iterations + 1), None


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
    phi = _horner(_flat(z), _flat(identity), _degree(1.0, z.dtype))[-1].view(z.shape)
    expm1 = z @ phi  # e^Z − I
    for k in range(doublings):
        phi = torch.where(k < exponent, phi + 0.5 * (expm1 @ phi), phi)
        if k + 1 < doublings:
            expm1 = torch.where(k < exponent, 2 * expm1 + expm1 @ expm1, expm1)
    return phi


def phi1_times(z: Tensor, y: Tensor) -> Tensor:
    """φ₁(Z) Y without φ₁(Z): Horner's rule on the block Y, half the work of `phi1` for d_v columns.

    The Taylor degree is the least whose remainder, in value and gradient, is below the rounding. What counts is the
    spectral radius ρ of Z, which is ‖S‖₂ (for Z = scale · J MᵀM too: between M and J Mᵀ its series is one in S). For
    ρ > 3, e^Z is applied in equal steps. Where that takes many steps, or ρ cannot be read off the data, `phi1` takes over.

    Args:
        z: (..., n, n) with purely imaginary spectrum, float32 or float64.
        y: (..., n, m), the same batch dimensions.

    Returns:
        (..., n, m).
    """
    readable = _is_readable(z) and _is_readable(y) and z.numel()
    radius = _spectral_radius(z.detach()) if readable else math.inf
    if not radius <= _STEP * _MAX_STEPS:  # NaN too
        return phi1(z) @ y
    steps = max(1, math.ceil(radius / _STEP))
    degree = _degree(radius / steps, z.dtype)
    z, shape, y = _flat(z) / steps if steps > 1 else _flat(z), y.shape, _flat(y)
    result = _Phi1Times.apply(z, y, degree)
    for _ in range(steps - 1):  # e^{kZ} Y = Y + Z · (sum of the k results so far)
        result = result + _Phi1Times.apply(z, y + z @ result, degree)
    return (result / steps if steps > 1 else result).view(shape)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _is_readable(x: Tensor) -> bool:
    """Whether a value of x may be read: not under a trace or a function transform, and without stopping an accelerator."""
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _spectral_radius(z: Tensor) -> float:
    """A bound of the spectral radius over the batch, within 1.2 or so for spectra that occur in attention.

    Eigenvalues come in pairs ±iλ, so ½ tr(Z⁴) = Σ λ⁴ ≥ ρ⁴. The second term covers the rounding of the first.
    """
    square = z @ z
    eps = z.shape[-1] * torch.finfo(z.dtype).eps
    fourth = (square * square.mT).sum((-2, -1)).clamp(min=0) / 2 + eps * square.square().sum((-2, -1))
    return fourth.amax().item() ** 0.25


def _degree(radius: float, dtype: torch.dtype) -> int:
    """The least degree m with ρ^{m+1} / (m + 1)! ≤ eps / 4: the remainder's leading term after one derivative."""
    degree, term = 1, radius**2 / 2
    while term > torch.finfo(dtype).eps / 4:
        degree += 1
        term *= radius / (degree + 1)
    return degree


def _horner(z: Tensor, y: Tensor, degree: int) -> list[Tensor]:
    """Horner's rule for Σ_{k ≤ degree} Z^k Y / (k + 1)!, step by step, for (b, n, n) and (b, n, m)."""
    partial = [y]
    for k in range(degree, 0, -1):
        partial.append(torch.baddbmm(y, z, partial[-1], alpha=1 / (k + 1)))
    return partial


class _Phi1Times(torch.autograd.Function):
    """`_horner` with a backward of two products per degree that accumulates in place."""

    @staticmethod
    def forward(ctx, z: Tensor, y: Tensor, degree: int) -> Tensor:
        partial = _horner(z, y, degree)
        ctx.save_for_backward(z, *partial)
        return partial[-1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        z, y, *rest = ctx.saved_tensors
        partial = [y, *rest]
        degree = len(partial) - 1
        add_product = torch.Tensor.baddbmm_
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for: the same products, recorded
            partial, add_product = _horner(z, y, degree), torch.baddbmm
        grad_z, grad_y = torch.zeros_like(z), grad
        for k in range(1, degree + 1):
            grad_z = add_product(grad_z, grad, partial[degree - k].mT, alpha=1 / (k + 1))
            grad = torch.bmm(z.mT, grad) / (k + 1)
            grad_y = grad_y + grad
        return grad_z, grad_y, None
