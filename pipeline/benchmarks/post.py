"""The layers of the blog post *Orthogonal Linear Layers in PyTorch*, implemented from its formulas, step by step.

Part of the blog post's code does not run: docs/errata.md lists the errors. A layer maps x (tokens, n) and its parameters to
x W. The parameters of `householder` are m vectors. Every other layer has n(n − 1)/2 angles, one for each plane of `planes`.
"""

import torch
from torch import Tensor


def givens(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates x in each plane in turn: columns (p, q) become (cos θ p + sin θ q, −sin θ p + cos θ q)."""
    columns, cos, sin = list(x.unbind(-1)), angles.cos().unbind(), angles.sin().unbind()
    for k, (i, j) in enumerate(zip(*planes(len(columns)).tolist(), strict=True)):
        p, q = columns[i], columns[j]
        columns[i], columns[j] = cos[k] * p + sin[k] * q, cos[k] * q - sin[k] * p
    return torch.stack(columns, dim=-1)


def exponential(x: Tensor, angles: Tensor) -> Tensor:
    """Returns x exp(A), where A is skew-symmetric and the angles are its entries above the diagonal."""
    return x @ torch.linalg.matrix_exp(_skew(angles, x.shape[-1]))


def cayley(x: Tensor, angles: Tensor) -> Tensor:
    """Returns x (I − A)⁻¹ (I + A), with A as in `exponential`. To first order, this is x (I + 2A)."""
    a, identity = _skew(angles, x.shape[-1]), torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return x @ torch.linalg.solve(identity - a, identity + a)


def householder(x: Tensor, vectors: Tensor) -> Tensor:
    """Returns x H₁ ⋯ H_m, where Hᵢ = I − 2 vᵢvᵢᵀ/‖vᵢ‖² is the reflection for the i-th vector."""
    for v in vectors / vectors.norm(dim=1, keepdim=True):
        x = x - 2 * torch.einsum("...,d->...d", torch.einsum("...d,d->...", x, v), v)
    return x


def planes(n: int) -> Tensor:
    """Returns all pairs i < j, ordered by i and then by j, as the columns of a tensor (2, n(n − 1)/2)."""
    return torch.triu_indices(n, n, 1)


def _skew(angles: Tensor, n: int) -> Tensor:
    a = angles.new_zeros(n, n)
    i, j = planes(n).to(angles.device)
    a[i, j], a[j, i] = angles, -angles
    return a
