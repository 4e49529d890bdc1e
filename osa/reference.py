"""Orthogonal self-attention as the paper writes it: dense, in float64, and slow. Tests compare all other code with it.

Every function is differentiable, and computes in float64, or in `dtype` if it has that argument. The module forms the N×N
matrices that the rest of the package avoids, and shares no code with the modules that it checks.

    N           number of tokens
    d           width of the model
    h           number of heads
    d_v         d/h, the width of a head
    query, key  Q and K, (..., N, d_v)
    scale       α/√d_v, a float or a tensor that broadcasts against the batch dimensions, e.g. (h, 1, 1)
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def skew(query: Tensor, key: Tensor, scale: float | Tensor) -> Tensor:
    """S = scale · (QKᵀ − KQᵀ), (..., N, N): the skew-symmetric matrix of Eq. 5."""
    half = query.double() @ key.double().mT
    return scale * (half - half.mT)


def orthogonal_attention_matrix(query: Tensor, key: Tensor, scale: float | Tensor) -> Tensor:
    """A = exp(S) ∈ SO(N), (..., N, N): Eq. 5."""
    return _exponential(skew(query, key, scale))


def orthogonal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | Tensor) -> Tensor:
    """exp(S) V, (..., N, d_value): Eq. 5 without the projections."""
    return orthogonal_attention_matrix(query, key, scale) @ value.double()


def cayley_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | Tensor) -> Tensor:
    """(I − S/2)⁻¹ (I + S/2) V, (..., N, d_value): the Cayley transform of S (Brantner et al. 2023) in place of exp."""
    half = skew(query, key, scale) / 2
    identity = torch.eye(half.shape[-1]).to(half)
    return torch.linalg.solve(identity - half, (identity + half) @ value.double())


def qr_basis(m: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The factor B, (..., N, min(N, 2d_v)), of the reduced QR decomposition M = B R, where M = [Q, K] (Section 3)."""
    return torch.linalg.qr(m.to(dtype)).Q


def newton_schulz_basis(
    m: Tensor, *, num_iterations: int = 6, epsilon: float = 1e-7, dtype: torch.dtype = torch.float64
) -> Tensor:
    """B = M_K, (..., N, 2d_v), the last Newton–Schulz iterate for M = [Q, K]: Eq. 9 as written, on N×2d_v matrices.

    M₀ = M/(‖M‖_F + ε),  M_{k+1} = ½ M_k (3I − M_kᵀM_k).
    After K = 6 steps (Appendix D), small singular values remain below 1, and B is not orthonormal.
    """
    m = m.to(dtype)
    basis = m / (torch.linalg.matrix_norm(m, keepdim=True) + epsilon)
    identity = torch.eye(basis.shape[-1], dtype=dtype, device=m.device)
    for _ in range(num_iterations):
        basis = 0.5 * basis @ (3 * identity - basis.mT @ basis)
    return basis


def low_rank_matrix(query: Tensor, key: Tensor, scale: float | Tensor, basis: Tensor) -> Tensor:
    """I + B (exp[S] − I) Bᵀ with [S] = BᵀSB, (..., N, N): Eq. 6 and 7 (Theorem 2.1).

    This is exp(S) if B's columns are orthonormal and span the columns of Q and K. Otherwise Theorem 3.1 bounds the error.
    """
    small = basis.mT @ skew(query, key, scale) @ basis  # (..., r, r)
    exp_minus_identity = _exponential(small) - torch.eye(small.shape[-1]).to(small)
    return torch.eye(basis.shape[-2]).to(basis) + basis @ exp_minus_identity @ basis.mT


def newton_schulz_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | Tensor, *, num_iterations: int = 6
) -> Tensor:
    """The paper's OSA (NS): Eq. 6 and 7 with B from Eq. 9, applied to V, (..., N, d_value)."""
    basis = newton_schulz_basis(torch.cat([query, key], dim=-1), num_iterations=num_iterations)
    return low_rank_matrix(query, key, scale, basis) @ value.double()


def multi_head_orthogonal_attention(
    x: Tensor,
    query_weights: Tensor,
    key_weights: Tensor,
    value_weights: Tensor,
    out_weights: Tensor,
    alphas: Tensor,
    attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = orthogonal_attention,
) -> Tensor:
    """M-OSA(X) = Σᵢ Aᵢ(X) X Wᵢ^V Wᵢ^O, (..., N, d): Eq. 3 to 5, as a loop over the heads i.

    The weights multiply from the right, as in the paper, so each is a block of the transpose of a `torch.nn.Linear.weight`.

    Args:
        x: X, (..., N, d).
        query_weights, key_weights, value_weights: W^Q, W^K and W^V of all heads, (h, d, d_v).
        out_weights: W^O of all heads, (h, d_v, d).
        alphas: α of all heads, (h,).
        attention: computes the attention of one head from query, key, value and scale.
    """
    x = x.double()
    heads = zip(query_weights, key_weights, value_weights, out_weights, alphas, strict=True)
    total = torch.zeros_like(x)
    for w_query, w_key, w_value, w_out, alpha in heads:
        scale = alpha / math.sqrt(w_query.shape[-1])
        head = attention(x @ w_query.double(), x @ w_key.double(), x @ w_value.double(), scale)
        total = total + head @ w_out.double()
    return total


def _exponential(s: Tensor) -> Tensor:
    """exp(S), computed as a batch of two: on one small matrix, `matrix_exp` errs by up to 3.3e-10 (PyTorch issue 196592)."""
    return torch.linalg.matrix_exp(torch.stack([s, s]))[0]
