"""Token kernels, Σ = X Xᵀ/d, and their schedules over the blocks (He et al. 2023, Section 3.2 and Appendix C).

All tensors are float64 and on the CPU, whatever the default device is.
"""

import itertools
import math
from typing import get_args

import torch
from torch import Tensor

from osa.options import KernelKind

KERNEL_KINDS = get_args(KernelKind)
MAX_GAMMA = 12.0  # maximum γ: above 12, 1 − e^{−2γ} is so near 1 that float64 gives an inaccurate schedule


def eye(num_tokens: int) -> Tensor:
    """I, (N, N)."""
    return torch.eye(num_tokens, dtype=torch.float64, device="cpu")


def positions(num_tokens: int) -> Tensor:
    """0, …, N − 1."""
    return torch.arange(num_tokens, dtype=torch.float64, device="cpu")


def uniform_kernel(num_tokens: int, rho: float) -> Tensor:
    """Σ(ρ) = (1 − ρ) I + ρ 11ᵀ, (N, N), in which any two tokens have the cosine ρ (Section 3.2)."""
    return (1 - rho) * eye(num_tokens) + rho


def exponential_kernel(num_tokens: int, gamma: float) -> Tensor:
    """Σ(γ)_ij = exp(−γ|i − j|), (N, N) (Section 3.2); γ = ∞ gives I."""
    if math.isinf(gamma):
        return eye(num_tokens)
    place = positions(num_tokens)
    return (-gamma * (place[:, None] - place).abs()).exp()


def uniform_schedule(depth: int, last: float, first: float = 0.0) -> list[float]:
    """Returns ρ_0, …, ρ_L from `first` to `last`, linear in depth (Appendix C)."""
    if not 0 <= first <= last < 1:
        raise ValueError(f"a uniform kernel needs 0 <= first <= last < 1, not {first} and {last}")
    return [first + (last - first) * block / depth for block in range(depth + 1)]


def exponential_schedule(depth: int, last: float) -> list[float]:
    """Returns γ_0 = ∞, …, γ_L such that a(γ_l) = a(γ_L)^{l/L}, where a(γ) = √(1 − e^{−2γ}) (Appendix C).

    All diagonal entries of A_l, except the first token's, then equal a(γ_L)^{1/L} for every l (Theorem 3).
    """
    if not 0 < last <= MAX_GAMMA:
        raise ValueError(f"an exponential kernel needs a positive rate of decay, {MAX_GAMMA:g} at most, not {last}")
    squared = -math.expm1(-2 * last)  # a(γ_L)²
    return [math.inf, *(-math.log1p(-(squared ** (block / depth))) / 2 for block in range(1, depth + 1))]


def residual_schedule(kernel: KernelKind, schedule: list[float], shortcut: float) -> list[float]:
    """Returns the schedule that attention f must follow so that the normalised skip α x + √(1 − α²) f(x) follows `schedule`.

    For uniform kernels the result is exactly (ρ_l − α² ρ_{l−1})/(1 − α²) (Section 3.4). For exponential kernels, the
    result γ satisfies a(γ) = λ_α a(γ_{l−1}), with a(γ) as in `exponential_schedule`, λ_α² = (λ_0² − α²)/(1 − α²) and
    λ_0 = a(γ_l)/a(γ_{l−1}). This equation neglects a term of Eq. 23 (Appendix F, Eq. 24 and 26). The paper prints Eq. 25
    with λ_α² instead of λ_α, which contradicts Eq. 24.

    Args:
        schedule: ρ or γ for blocks 0 to L. The result is for blocks 1 to L.
        shortcut: α, or 0 for no skip.

    Raises:
        ValueError: α is so large that no kernel solves the equation.
    """
    residual = 1 - shortcut**2
    if kernel == "uniform":
        reached = [(after - shortcut**2 * before) / residual for before, after in itertools.pairwise(schedule)]
        if max(reached) >= 1:
            raise ValueError(
                f"a skip of weight {shortcut:g} needs an attention kernel with cosines of 1 or more: use a smaller weight"
            )
        return reached
    reached = []
    for before, after in itertools.pairwise(schedule):
        squared = -math.expm1(-2 * before)
        factor = (math.expm1(-2 * after) / -squared - shortcut**2) / residual  # λ_α²
        if factor <= 0:
            raise ValueError(f"a skip of weight {shortcut:g} needs a kernel that changes less: use a larger rate of decay")
        reached.append(-math.log1p(-factor * squared) / 2)
    return reached
