"""The methods of orthogonal attention in plain torch, on any device. `osa.functional` has the equations."""

import math
from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor

from osa.linalg import (
    IMBALANCE,
    Scale,
    apply_j,
    as_batch,
    balanced,
    gram_factor,
    identity_like,
    imbalance,
    is_balanced,
    newton_schulz_gram,
    phi1_times,
    polar_express_gram,
    qr_basis,
    resolvent_times,
    square_moduli,
)
from osa.options import ITERATIONS, Method
from osa.runtime import (
    full_precision,
    goes_to_onnx,
    in_own_types,
    is_readable,
    is_recorded,
    recorded_grad,
    warn_where_lost,
    without_autocast,
)

SMALL_NORM = 64.0  # maximum Frobenius norm of [S] = BᵀSB that `_is_small` accepts
# S itself is used only if scale · ‖Q‖_F ‖K‖_F / max(1, ‖S‖_F) is at most this. Independent Q and K give about √(d/2)
CANCELLATION = 16.0
# Values of eps · scale · ‖M‖_F² above which the iterations run in float64, and above which no digit is correct
FLOAT64_ABOVE, NO_DIGIT_ABOVE = 2.0**-10, 2.0**-3


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: Scale, method: Method, num_iterations: int | None, epsilon: float
) -> Tensor:
    """Computes exp(S) V, (..., N, d_value), with the function that `_ROUTES` lists for the method.

    The function gets tensors of one dtype and batch size: query and key (b, N, d), value (b, N, d_value), scale (b, 1, 1).
    """
    with without_autocast(query.device), full_precision(query.device):
        least = torch.float64 if method == "polar_express" else torch.float32  # `polar_express_gram` needs float64
        dtype = reduce(torch.promote_types, (query.dtype, key.dtype, value.dtype), least)
        batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
        scale = scale.to(dtype) if isinstance(scale, Tensor) else query.new_full((), scale, dtype=dtype)
        shape = *batch, *value.shape[-2:]
        inputs = *(x.to(dtype).expand(*batch, *x.shape[-2:]) for x in (query, key, value)), scale.expand(*batch, 1, 1)
        options = (num_iterations or ITERATIONS[method], epsilon) if method in ITERATIONS else ()
        return _ROUTES[method](*map(as_batch, inputs), *options).view(shape).to(value.dtype)


def _qr_literal(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """exp(S) V as in Section 3, with torch's QR and matrix exponential. Autograd differentiates through both.

    The derivative of QR contains R⁻¹, so the gradient is undefined if M is rank-deficient. If the batch has only one
    matrix, `matrix_exp` has an error of up to 2·10⁻³ ‖[S]‖⁵ (PyTorch issue 196592).
    """
    m = torch.cat([query, key], dim=-1)  # M, (..., N, 2d)
    basis = torch.linalg.qr(m, mode="reduced").Q  # B, (..., N, r), r = min(N, 2d)
    query, key = (basis.mT @ m).chunk(2, dim=-1)  # BᵀQ and BᵀK, (..., r, d): Eq. 7 without the N×N matrix S
    small = scale * (query @ key.mT - key @ query.mT)  # [S] = BᵀSB, (..., r, r)
    return value + basis @ ((torch.linalg.matrix_exp(small) - identity_like(small)) @ (basis.mT @ value))  # Eq. 6, times V


# A function of Z and Y that computes f(Z) Y, where A = I + S f(S): φ₁(Z) Y, or (I − Z/2)⁻¹ Y for the Cayley transform
PhiTimes = Callable[[Tensor, Tensor], Tensor]


def _by_basis(function: PhiTimes, query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    if query.shape[-2] <= 2 * query.shape[-1]:  # N ≤ 2d: B would be square, and [S] as large as S
        return value + _moved(function, _skew(query, scale * key), value)
    m = torch.cat([query, scale * key], dim=-1)  # M, (b, N, 2d): S = M J Mᵀ
    return (_ByBasis.apply if is_recorded(m, value) else _by_differentiable_basis)(m, value, function)


def _by_any_gram(function: PhiTimes, query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """Computes A V from MᵀM, or from the Gram matrix of `balanced(m)` if MᵀM is not accurate, or else with a basis.

    If N < 2d, it uses S (smaller than MᵀM) instead, unless Q Kᵀ and K Qᵀ nearly cancel. If m is not readable
    (on GPUs, in traces and in transforms), it always calls `_by_cholesky`.
    """
    m = torch.cat([query, key], dim=-1)  # (b, N, 2d)
    if not is_readable(m):
        dtype = _safe_dtype(m)
        limit = IMBALANCE * torch.finfo(m.dtype).eps / torch.finfo(dtype).eps
        return _by_cholesky(function, m.to(dtype), value.to(dtype), scale.to(dtype), limit)
    if m.shape[-2] < m.shape[-1]:
        skew = _skew(query, scale * key)
        if _keeps_digits(skew, query, key, scale):
            return value + _moved(function, skew, value)
    gram = _gram(m)
    if not is_balanced(gram, scale):
        m = balanced(m)
        gram = _gram(m)
        if not is_balanced(gram, scale):
            return _by_basis(function, *(x.double() for x in (query, key, value, scale)))
    return _by_gram(m, value, scale, partial(_mixing, function), gram)


@torch.no_grad()
def _keeps_digits(skew: Tensor, query: Tensor, key: Tensor, scale: Tensor) -> bool:
    """True if the rounding error of S, eps · scale · ‖Q‖_F ‖K‖_F, is at most CANCELLATION · eps · max(1, ‖S‖_F)."""
    q, k, s = (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (query, key, skew))
    return bool((scale.abs() * q * k <= CANCELLATION * s.clamp(min=1)).all())


def _mixing(function: PhiTimes, gram: Tensor, products: Tensor, scale: Tensor) -> Tensor:
    return scale * function(apply_j(scale * gram), apply_j(products))


def _by_cholesky(function: PhiTimes, m: Tensor, value: Tensor, scale: Tensor, limit: float = math.inf) -> Tensor:
    """Computes A V with M R⁻¹, whose columns are nearly orthonormal, in place of M. Returns NaN where precision is lost.

    For every invertible R, A V = V + scale · M R⁻¹ f(Z) R J MᵀV with Z = scale · R J MᵀM R⁻¹. Since A V does not depend on
    R, derivatives of every order may treat R as a constant. With R from `gram_factor`, the error is at most about
    eps · scale · ‖M‖_F². For ONNX, which has no Cholesky decomposition, R is I.
    """
    m = balanced(m)
    if goes_to_onnx():
        is_lost = imbalance(apply_j(scale * _gram(m))) > limit
        return _by_differentiable_gram(m, value, _nan_where(is_lost, scale), partial(_mixing, function))
    r = gram_factor(_gram(m.detach()))
    basis = torch.linalg.solve_triangular(r, m, upper=True, left=False)
    z, y = (torch.bmm(r, scale * apply_j(torch.bmm(m.mT, x))) for x in (basis, value))
    if limit < math.inf:
        y = _nan_where(2 * _square_size(m, scale) > limit * square_moduli(z).clamp(min=1).sqrt(), y)
    return torch.baddbmm(value, basis, function(z, y))


def _safe_dtype(m: Tensor) -> torch.dtype:
    """Returns the dtype for steps that may lose precision: float64 on the CPU, where it only doubles the time, else m's."""
    return torch.float64 if m.device.type == "cpu" else m.dtype


def _nan_where(is_lost: Tensor, x: Tensor) -> Tensor:
    """Warns if any entry of `is_lost` is true, and multiplies x by NaN at these entries, so that gradients are NaN too."""
    if not goes_to_onnx():
        is_lost = warn_where_lost(is_lost)
    return x * torch.where(is_lost, math.nan, 1.0).to(x.dtype)


def _iterated(
    iterate: Callable[[Tensor, int], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: Tensor,
    num_iterations: int,
    epsilon: float,
) -> Tensor:
    def mixing(gram: Tensor, products: Tensor, scale: Tensor) -> Tensor:
        square_norm = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        square_norm = square_norm.clamp(min=torch.finfo(gram.dtype).tiny)  # the root's derivative at M = 0 is infinite
        inverse_norm = 1 / (square_norm.sqrt() + epsilon)  # 1 / (‖M‖_F + ε)
        projector = iterate(inverse_norm.square() * gram, num_iterations)  # G_K
        z = torch.bmm(projector, apply_j(scale * gram))
        return scale * phi1_times(z, torch.bmm(projector, apply_j(torch.bmm(projector, products))))

    m = torch.cat([query, key], dim=-1)
    if not is_readable(m) or (_square_size(m, scale) * torch.finfo(m.dtype).eps > FLOAT64_ABOVE).any():
        m, value, scale = (x.to(_safe_dtype(m)) for x in (m, value, scale))
        scale = _nan_where(_square_size(m, scale) * torch.finfo(m.dtype).eps > NO_DIGIT_ABOVE, scale)
    return _by_gram(m, value, scale, mixing)


def _square_size(m: Tensor, scale: Tensor) -> Tensor:
    """scale · ‖M‖_F², (b, 1, 1), without a gradient."""
    return scale.detach().abs() * torch.linalg.vector_norm(m.detach(), dim=(-2, -1), keepdim=True).square()


_ROUTES: dict[str, Callable[..., Tensor]] = {
    "qr_literal": _qr_literal,
    "qr": partial(_by_basis, phi1_times),
    "exact": partial(_by_any_gram, phi1_times),
    "cayley": partial(_by_any_gram, resolvent_times),
    "newton_schulz": partial(_iterated, newton_schulz_gram),
    "polar_express": partial(_iterated, polar_express_gram),
}

Mixing = Callable[[Tensor, Tensor, Tensor], Tensor]  # computes the factor T in A V = V + M T, given MᵀM, MᵀV and scale


@torch.no_grad()
def _gram(m: Tensor) -> Tensor:
    return torch.bmm(m.mT, m)


def _by_gram(m: Tensor, v: Tensor, scale: Tensor, mixing: Mixing, gram: Tensor | None = None) -> Tensor:
    return (_ByGram.apply if is_recorded(m, v, scale) else _by_differentiable_gram)(m, v, scale, mixing, gram)


def _by_differentiable_gram(m: Tensor, v: Tensor, scale: Tensor, mixing: Mixing, gram: Tensor | None = None) -> Tensor:
    """Computes A V from M (b, N, 2d), V (b, N, d_value) and Gram matrices. `gram` is MᵀM, if known."""
    gram = torch.bmm(m.mT, m) if gram is None else gram
    return torch.baddbmm(v, m, mixing(gram, torch.bmm(m.mT, v), scale))


class _ByGram(torch.autograd.Function):
    """`_by_differentiable_gram` with a backward pass of five large products. Autograd handles the small matrices."""

    @staticmethod
    def forward(ctx, m: Tensor, v: Tensor, scale: Tensor, mixing: Mixing, gram: Tensor | None) -> Tensor:
        gram = _gram(m) if gram is None else gram
        with torch.enable_grad():
            small = [x.detach().requires_grad_() for x in (gram, torch.bmm(m.mT, v), scale)]
            mixed = mixing(*small)
        ctx.save_for_backward(m, v, scale)
        ctx.mixing, ctx.small, ctx.mixed = mixing, small, mixed
        return torch.baddbmm(v, m, mixed.detach())

    @staticmethod
    @in_own_types
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        m, v, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            grads = recorded_grad(partial(_by_differentiable_gram, mixing=ctx.mixing), (m, v, scale), grad)
            return *grads, None, None
        with full_precision(m.device):
            grad_mixed = torch.bmm(m.mT, grad)
            grad_gram, grad_products, grad_scale = torch.autograd.grad(ctx.mixed, ctx.small, grad_mixed, retain_graph=True)
            grad_m = torch.bmm(grad, ctx.mixed.detach().mT)  # (b, N, 2d)
            grad_m.baddbmm_(v, grad_products.mT).baddbmm_(m, grad_gram + grad_gram.mT)
            return grad_m, torch.baddbmm(grad, m, grad_products), grad_scale, None, None


def _by_differentiable_basis(m: Tensor, v: Tensor, function: PhiTimes) -> Tensor:
    """Computes A V with an orthonormal basis of M's columns, for S = M J Mᵀ, M (b, N, 2d) and V (b, N, d_value)."""
    basis = qr_basis(m)  # (b, N, r), r = min(N, 2d)
    skew, w = _skew(*torch.bmm(basis.mT, m).chunk(2, dim=-1)), torch.bmm(basis.mT, v)  # (b, r, r), (b, r, d_value)
    return torch.baddbmm(v, basis, _moved(function, skew, w))


def _moved(function: PhiTimes, skew: Tensor, w: Tensor) -> Tensor:
    """Returns A W − W, as [S] (f([S]) W) if [S] is small, else as f([S]) ([S] W), which is more accurate if [S] is large."""
    return torch.bmm(skew, function(skew, w)) if _is_small(skew) else function(skew, torch.bmm(skew, w))


def _is_small(skew: Tensor) -> bool:
    """True if [S] (f([S]) W) is as accurate as f([S]) ([S] W). In the former, a large [S] amplifies rounding errors of f."""
    return is_readable(skew) and bool((torch.linalg.vector_norm(skew, dim=(-2, -1)) <= SMALL_NORM).all())


def _skew(query: Tensor, key: Tensor) -> Tensor:
    """S = Q Kᵀ − K Qᵀ, or [S] from BᵀQ and BᵀK (Eq. 7), exactly skew-symmetric."""
    half = query @ key.mT
    return half - half.mT


class _ByBasis(torch.autograd.Function):
    """`_by_differentiable_basis`, but the backward pass does not differentiate B, because every basis gives the same result.

    With C = BᵀM, W = BᵀV and U = f([S]) W, the output is V + B [S] U. Let G be the gradient of the output, H = BᵀG and
    Ū = f(−[S]) H. Let E be D − Dᵀ, where D is the gradient of [S] with B held fixed. A change dM outside the span of B
    changes B. To first order, the output then changes by (I − BBᵀ) dM J CᵀU + B f([S]) C J dMᵀ (I − BBᵀ) V, so that

        grad V = G − B [S] Ū,        grad M = (V Ūᵀ − G Uᵀ − B (W Ūᵀ − H Uᵀ + E)) C J.

    No inverse of C occurs, so these gradients also hold for a rank-deficient M. With create_graph=True, they come from
    `_by_cholesky` in float64, because that function has derivatives of every order.
    """

    @staticmethod
    def forward(ctx, m: Tensor, v: Tensor, function: PhiTimes) -> Tensor:
        basis = qr_basis(m)  # (b, N, r), r = min(N, 2d)
        coordinates = torch.bmm(basis.mT, m)  # C, (b, r, 2d)
        with torch.enable_grad():
            small = [x.requires_grad_() for x in (_skew(*coordinates.chunk(2, dim=-1)), torch.bmm(basis.mT, v))]
            u = function(*small)
        ctx.save_for_backward(m, v, basis, coordinates)
        ctx.function, ctx.small, ctx.u = function, small, u
        skew, w, u = (x.detach() for x in (*small, u))
        moved = torch.bmm(skew, u) if _is_small(skew) else function(skew, torch.bmm(skew, w))
        return torch.baddbmm(v, basis, moved)

    @staticmethod
    @in_own_types
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        m, v, basis, coordinates = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *recorded_grad(partial(_in_double, ctx.function), (m, v), grad), None
        with full_precision(m.device):
            h = torch.bmm(basis.mT, grad)  # (b, r, d_value)
            grad_skew, u_bar = torch.autograd.grad(ctx.u, ctx.small, h, retain_graph=True)
            skew, w, u = (x.detach() for x in (*ctx.small, ctx.u))
            outer = torch.bmm(h, u.mT)
            bar = torch.baddbmm(outer, skew, grad_skew, alpha=-1)  # gradient of [S] with B fixed, (b, r, r)
            inside = outer.baddbmm_(w, u_bar.mT, alpha=-1) - (bar - bar.mT)  # H Uᵀ − W Ūᵀ − E
            c_j = _times_j(coordinates)  # (b, r, 2d)
            grad_m = torch.bmm(basis, torch.bmm(inside, c_j))  # (b, N, 2d)
            grad_m.baddbmm_(v, torch.bmm(u_bar.mT, c_j)).baddbmm_(grad, torch.bmm(u.mT, c_j), alpha=-1)
            return grad_m, torch.baddbmm(grad, basis, torch.bmm(skew, u_bar), alpha=-1), None


def _in_double(function: PhiTimes, m: Tensor, v: Tensor) -> Tensor:
    """Computes A V in float64, with S = M J Mᵀ, by `_by_cholesky`, which has derivatives of every order."""
    one = m.new_ones(m.shape[0], 1, 1, dtype=torch.float64)
    return _by_cholesky(function, m.double(), v.double(), one).to(v.dtype)


def _times_j(x: Tensor) -> Tensor:
    """X J."""
    query, key = x.chunk(2, dim=-1)
    return torch.cat([-key, query], dim=-1)
