"""The layers of the post *Orthogonal Linear Layers in PyTorch*, written from its formulas, step for step as it has them.
Part of its own code cannot run: see docs/errata.md.

Each takes x (tokens, n) and the layer's parameters: n(n − 1)/2 angles of the planes (i, j), i < j, in the order of i and
then j, or m vectors.
"""

import functools

import torch
from torch import Tensor


def givens(x: Tensor, angles: Tensor) -> Tensor:
    """A rotation of each plane, one after the other: columns (p, q) become (cos θ p + sin θ q, −sin θ p + cos θ q)."""
    columns, cos, sin = list(x.unbind(-1)), angles.cos().unbind(), angles.sin().unbind()
    for k, (i, j) in enumerate(zip(*planes(len(columns)).tolist(), strict=True)):
        p, q = columns[i], columns[j]
        columns[i], columns[j] = cos[k] * p + sin[k] * q, cos[k] * q - sin[k] * p
    return torch.stack(columns, dim=-1)


def rotors(x: Tensor, angles: Tensor) -> Tensor:
    """x ↦ R x R̃ of each token with R the product of cos(θ/2) + sin(θ/2) eᵢeⱼ, as multivectors of 2ⁿ components."""
    n = x.shape[-1]
    rotor, vectors = _multivectors(n, {0: x.new_ones(())}), 1 << torch.arange(n)
    for angle, i, j in zip(angles / 2, *planes(n).tolist(), strict=True):
        rotor = geometric_product(rotor, _multivectors(n, {0: angle.cos(), 1 << i | 1 << j: angle.sin()}))
    images = geometric_product(rotor, torch.eye(1 << n, dtype=x.dtype, device=x.device)[vectors])
    images = geometric_product(images, reverse(rotor))[:, vectors]  # row k is R e_k R̃
    return x @ images


def geometric_product(a: Tensor, b: Tensor) -> Tensor:
    """ab in Cl(n), (..., 2ⁿ) each: component k is of the product of those eᵢ, in order, whose bit is set in k."""
    others, signs = _blades(a.shape[-1])
    return (a.unsqueeze(-1) * signs.to(a) * b[..., others]).sum(-2)


def reverse(a: Tensor) -> Tensor:
    """ã, the factors of each blade in reverse order."""
    grades = torch.tensor([k.bit_count() for k in range(a.shape[-1])])
    return a * torch.where(grades * (grades - 1) // 2 % 2 == 0, 1, -1).to(a)


def exponential(x: Tensor, angles: Tensor) -> Tensor:
    """x exp(A) with A_ij = θ."""
    return x @ torch.linalg.matrix_exp(_skew(angles, x.shape[-1]))


def cayley(x: Tensor, angles: Tensor) -> Tensor:
    """x (I − A)⁻¹ (I + A), without the ½ that would give it the exponential's derivative at 0."""
    a, identity = _skew(angles, x.shape[-1]), torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return x @ torch.linalg.solve(identity - a, identity + a)


def householder(x: Tensor, vectors: Tensor) -> Tensor:
    """x H₁ ⋯ H_m, one reflection after the other."""
    for v in vectors / vectors.norm(dim=1, keepdim=True):
        x = x - 2 * torch.einsum("...,d->...d", torch.einsum("...d,d->...", x, v), v)
    return x


def planes(n: int) -> Tensor:
    """i and j of every pair i < j, (2, n(n − 1)/2)."""
    return torch.triu_indices(n, n, 1)


def _skew(angles: Tensor, n: int) -> Tensor:
    a = angles.new_zeros(n, n)
    i, j = planes(n).to(angles.device)
    a[i, j], a[j, i] = angles, -angles
    return a


def _multivectors(n: int, components: dict[int, Tensor]) -> Tensor:
    value = next(iter(components.values()))
    return torch.stack([components.get(k, torch.zeros_like(value)) for k in range(1 << n)])


@functools.cache
def _blades(size: int) -> tuple[Tensor, Tensor]:
    """Gives b and the sign of ab for blades a and ab: one for each eᵢ of b that passes an eⱼ of a with j > i."""
    a = torch.arange(size)[:, None]
    others = a ^ torch.arange(size)
    passed = sum(_bits(a >> shift & others) for shift in range(1, size.bit_length()))
    return others, torch.where(passed % 2 == 0, 1, -1)


def _bits(k: Tensor) -> Tensor:
    return sum(k >> bit & 1 for bit in range(10))
