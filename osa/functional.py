"""Orthogonal self-attention as a function of query, key and value (Section 2), linear in the number of tokens."""

import math

import torch
from torch import Tensor

from osa.linalg import EPSILON, newton_schulz_gram, phi1_times, qr_basis

METHODS = ("qr", "newton_schulz", "exact")


def orthogonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | Tensor | None = None,
    method: str = "exact",
    num_iterations: int | None = None,
) -> Tensor:
    """exp(S) V with S = scale · (Q Kᵀ − K Qᵀ) (Eq. 5), where exp(S) is orthogonal.

    With M = [Q, K] (N×2d) and J = [[0, I], [−I, 0]], S = scale · M J Mᵀ has rank ≤ 2d, and every method reads

        exp(S) V = V + L φ₁(Z) Y,        φ₁(Z) = (e^Z − I) Z⁻¹ = Σ Z^k / (k + 1)!,

        method           L             Z                     Y
        "exact"          scale · M     scale · J G           J MᵀV
        "qr"             B             [S] = BᵀSB            [S] BᵀV
        "newton_schulz"  scale · M     scale · G_K J G       G_K J G_K MᵀV

    with G = MᵀM and Z at most 2d×2d. No N×N matrix is formed: time O(N d² + d³), memory O(N d + d²).

    "qr" is Theorem 2.1, exp(S) = I + B (exp[S] − I) Bᵀ with exp[S] − I = φ₁([S]) [S] and B of the reduced QR of M.
    "exact" needs no orthonormal basis because f(AB) A = A f(BA) (Higham 2008, Section 1.8; for the exponential of a
    low-rank matrix see Xiao & Liu, ICML 2020). "newton_schulz" is Theorem 2.1 with B = M_K of Eq. 9: by the same identity
    its B = M h(G) enters through the Gram matrix G_K = BᵀB = G h(G)² alone. It runs K iterations and no more, so that the
    result is orthogonal only as far as those have converged (Theorem 3.1); where they have, G_K is a projector that
    changes nothing, and the result that of "exact".

    The rounding error grows with scale · ‖M‖₂², which can exceed ‖S‖₂ (for Q ≈ K); with "qr" it grows with ‖S‖₂.

    Args:
        query: (..., N, d).
        key: (..., N, d).
        value: (..., N, d_value).
        scale: α/√d_v of Eq. 5; a number or a tensor that broadcasts against the batch dimensions followed by two
            dimensions of size 1, e.g. (num_heads, 1, 1). Default 1/√d.
        method: "exact", "qr" or "newton_schulz".
        num_iterations: K of Eq. 9, for "newton_schulz" alone. Default 6 (Appendix D).

    Returns:
        (..., N, d_value), of value's type. With bfloat16 or float16 inputs the small matrices are float32.

    Raises:
        ValueError: the shapes do not match, or the method is unknown.
    """
    _check(query, key, value, scale, method, num_iterations)
    return _attend(query, key, value, scale, method, num_iterations)


def orthogonal_attention_matrix(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | Tensor | None = None,
    method: str = "exact",
    num_iterations: int | None = None,
) -> Tensor:
    """The attention matrix A = exp(S) that `orthogonal_attention` applies, for figures and tests: O(N²) memory.

    Args and errors: as for `orthogonal_attention`.

    Returns:
        (..., N, N).
    """
    _check(query, key, query, scale, method, num_iterations)
    identity = torch.eye(query.shape[-2], dtype=query.dtype, device=query.device)
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    return _attend(query, key, identity.expand(*batch, *identity.shape), scale, method, num_iterations)


def _check(
    query: Tensor, key: Tensor, value: Tensor, scale: float | Tensor | None, method: str, num_iterations: int | None
) -> None:
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    if num_iterations is not None and (method != "newton_schulz" or num_iterations < 1):
        raise ValueError(f"num_iterations must be 1 or more and belongs to newton_schulz, not {num_iterations} to {method}")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError("query, key and value need at least two dimensions, (..., N, d)")
    if not all(x.is_floating_point() for x in (query, key, value)):
        raise ValueError("query, key and value must be real floating-point tensors")
    if query.shape[-2:] != key.shape[-2:]:
        raise ValueError(f"query and key must agree in (N, d), not {tuple(query.shape[-2:])} and {tuple(key.shape[-2:])}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value must have as many tokens as key, {key.shape[-2]}, not {value.shape[-2]}")
    batches = [tuple(x.shape[:-2]) for x in (query, key, value)]
    try:
        batch = torch.broadcast_shapes(*batches)
    except RuntimeError:
        raise ValueError(f"the batch dimensions of query, key and value must broadcast, not {batches}") from None
    if isinstance(scale, Tensor) and scale.dim():
        try:
            fits = scale.shape[-2:] == (1, 1) and torch.broadcast_shapes(scale.shape[:-2], batch) == batch
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                f"scale must broadcast against {(*batch, 1, 1)} with two last dimensions of 1, not {tuple(scale.shape)}"
            )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float | Tensor | None, method: str, num_iterations: int | None
) -> Tensor:
    with torch.autocast(query.device.type, enabled=False):
        m = torch.cat(torch.broadcast_tensors(query, key), dim=-1)  # (..., N, 2d)
        m = m.to(torch.promote_types(m.dtype, torch.float32))
        if isinstance(scale, Tensor):
            scale = scale.to(m.dtype)
        elif scale is None:
            scale = 1 / math.sqrt(query.shape[-1])
        v = value.to(m.dtype)
        if method == "qr":
            output = _by_basis(m, v, scale)
        else:
            output = _by_gram(m, v, scale, (num_iterations or 6) if method == "newton_schulz" else None)
        return output.to(value.dtype)  # (..., N, d_value)


def _by_gram(m: Tensor, v: Tensor, scale: float | Tensor, num_iterations: int | None) -> Tensor:
    """By Gram matrices alone: "newton_schulz", or "exact" where there are no iterations."""
    d = m.shape[-1] // 2
    gram = m.mT @ m  # (..., 2d, 2d)
    products = m.mT @ v  # (..., 2d, d_value)
    z = _apply_j(scale * gram, d)
    if num_iterations is None:
        y = _apply_j(products, d)
    else:
        inverse_norm = 1 / (torch.linalg.matrix_norm(m, keepdim=True) + EPSILON)  # (..., 1, 1)
        projector = newton_schulz_gram(inverse_norm.square() * gram, num_iterations)  # G_K
        z, y = projector @ z, projector @ _apply_j(projector @ products, d)
    return v + m @ (scale * phi1_times(z, y))


def _by_basis(m: Tensor, v: Tensor, scale: float | Tensor) -> Tensor:
    basis = qr_basis(m)  # (..., N, r), r = min(N, 2d)
    query, key = (basis.mT @ m).chunk(2, dim=-1)  # (..., r, d) each
    half = scale * (query @ key.mT)
    skew = half - half.mT  # [S] (Eq. 7), (..., r, r), skew to the last bit
    return v + basis @ phi1_times(skew, skew @ (basis.mT @ v))


def _apply_j(x: Tensor, d: int) -> Tensor:
    """J X with J = [[0, I], [−I, 0]]."""
    return torch.cat([x[..., d:, :], -x[..., :d, :]], dim=-2)
