"""Attention matrices that map the token kernel of one block to that of the next block (He et al. 2023, Eq. 8 to 15)."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from osa.options import KernelKind
from osa.shaped.schedules import (
    KERNEL_KINDS,
    exponential_kernel,
    exponential_schedule,
    eye,
    positions,
    residual_schedule,
    uniform_kernel,
    uniform_schedule,
)

LEAST_ENTRY = 1e-15  # lower bound on the entries of A, because rounding can make entries negative


def attention_between(kernel: KernelKind, num_tokens: int, before: float, after: float, *, causal: bool = False) -> Tensor:
    """A = R(after) R(before)^{-1} with R Rᵀ = Σ, so that attention maps Σ(before) to A Σ(before) Aᵀ = Σ(after) (Eq. 8).

    If causal, R is the Cholesky factor, and A is lower triangular with entries ≥ 0 (Theorems 1 and 2). For exponential
    kernels, Theorem 3 gives A in closed form. If not causal, R is the symmetric square root (Appendix A). The entries of A
    are again ≥ 0: for exponential kernels by numerical evidence, and for uniform kernels because

        A = s₂ I + (s₁ − s₂) 11ᵀ/N,        s₁² = (1 + (N − 1)ρ_l)/(1 + (N − 1)ρ_{l−1}),        s₂² = (1 − ρ_l)/(1 − ρ_{l−1}).

    Returns:
        (N, N), float64.

    Raises:
        ValueError: the kernel is unknown, or its cosines fall from `before` to `after`, so A would need negative entries.
    """
    if kernel not in KERNEL_KINDS:
        raise ValueError(f"kernel {kernel!r} is unknown; choose one of {', '.join(KERNEL_KINDS)}")
    if before > after if kernel == "uniform" else before < after:
        parameter = "ρ falls" if kernel == "uniform" else "γ rises"
        raise ValueError(
            f"the cosines of the {kernel} kernel must not fall from block to block, but its {parameter} from {before:g} to "
            f"{after:g}"
        )
    if kernel == "uniform":
        return (_causal_uniform_attention if causal else _uniform_attention)(num_tokens, before, after)
    if causal:
        return _causal_exponential_attention(num_tokens, before, after)
    forward = _power(exponential_kernel(num_tokens, after), 0.5)
    return (forward @ _power(exponential_kernel(num_tokens, before), -0.5)).clamp(min=LEAST_ENTRY)


def _power(kernel: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(kernel)
    return vectors * values**exponent @ vectors.mT


def _uniform_attention(num_tokens: int, before: float, after: float) -> Tensor:
    alike = math.sqrt((1 + (num_tokens - 1) * after) / (1 + (num_tokens - 1) * before))  # s₁
    apart = math.sqrt((1 - after) / (1 - before))  # s₂
    return apart * eye(num_tokens) + (alike - apart) / num_tokens


def _causal_uniform_attention(num_tokens: int, before: float, after: float) -> Tensor:
    factors = (torch.linalg.cholesky(uniform_kernel(num_tokens, rho)) for rho in (before, after))
    return torch.linalg.solve_triangular(*factors, upper=False, left=False)


def _causal_exponential_attention(num_tokens: int, before: float, after: float) -> Tensor:
    """A of Theorem 3. `expm1` computes differences of exponentials without cancellation."""
    decay = math.exp(-after)
    ratio = math.sqrt(math.expm1(-2 * after) / math.expm1(-2 * before))  # λ
    difference = -decay * math.expm1(after - before)  # e^{−γ'} − e^{−γ}
    distance = positions(num_tokens)[:, None] - positions(num_tokens)
    matrix = ratio * difference * (-after * (distance - 1)).exp()
    matrix[:, 0] = (difference + (1 - ratio) * math.exp(-before)) * (-after * (distance[:, 0] - 1)).exp()
    matrix = matrix.tril(-1) + ratio * eye(num_tokens)
    matrix[0, 0] = 1
    return matrix


def signal_preserving_attention(
    kernel: KernelKind,
    num_tokens: int,
    depth: int,
    last: float,
    *,
    causal: bool = False,
    repeated: float = 0.0,
    shortcut: float = 0.0,
    cls_index: int | None = None,
) -> Tensor:
    """Returns the attention matrices A_1, …, A_L of U-SPA (uniform kernels) or E-SPA (exponential kernels).

    If a fraction r of the tokens repeat other tokens, the average of Σ_0 over inputs is Σ̄_0 = (1 − r) I + r 11ᵀ (Eq. 12).
    U-SPA then starts from ρ_0 = r. E-SPA rescales A_l so that the average of Σ_l has a diagonal of ones (Eq. 15).

    Args:
        kernel: one of `KERNEL_KINDS`.
        num_tokens: N.
        depth: L.
        last: ρ_L or γ_L.
        causal: each token attends only to itself and to earlier tokens.
        repeated: r, the fraction of repeated tokens or the mean cosine between tokens.
        shortcut: α of a normalised skip around the attention; 0 for no skip. It must be 0 if r > 0.
        cls_index: position of [cls], the model's first token, in the kernel's sequence. By default, the middle or,
            if causal, the last position, so that [cls] attends to all tokens.

    Returns:
        (L, N, N), float64. Rows and columns are in the model's order of tokens, with [cls] first.

    Raises:
        ValueError: an argument has an impossible value.
    """
    if num_tokens < 1 or depth < 1:
        raise ValueError(f"num_tokens and depth must be 1 or more, not {num_tokens} and {depth}")
    if not 0 <= repeated < 1:
        raise ValueError(f"repeated must be a fraction of the tokens, in [0, 1), not {repeated}")
    if not 0 <= shortcut < 1 or (shortcut and repeated):
        raise ValueError(
            f"shortcut must be in [0, 1), and must be 0 unless repeated is 0, but shortcut is {shortcut} and repeated is "
            f"{repeated}"
        )
    place = (num_tokens - 1 if causal else (num_tokens - 1) // 2) if cls_index is None else cls_index
    if not 0 <= place < num_tokens:
        raise ValueError(f"cls_index must be from 0 to {num_tokens - 1}, not {place}")
    uniform = kernel == "uniform"
    schedule = uniform_schedule(depth, last, repeated) if uniform else exponential_schedule(depth, last)
    reached = residual_schedule(kernel, schedule, shortcut)
    ends = zip(schedule, reached, strict=False)
    matrices = [attention_between(kernel, num_tokens, before, after, causal=causal) for before, after in ends]
    if not shortcut:
        matrices = list(_rescaled(matrices, uniform_kernel(num_tokens, repeated)))
    order = [place, *range(place), *range(place + 1, num_tokens)]
    return torch.stack(matrices)[:, order][:, :, order]


def _rescaled(matrices: list[Tensor], kernel: Tensor) -> Iterator[Tensor]:
    """Yields D̄_l^{−½} A_l D̄_{l−1}^{½}, where D̄_l is the diagonal of (A_l ⋯ A_1) Σ̄_0 (A_l ⋯ A_1)ᵀ and D̄_0 = I (Eq. 15)."""
    before = kernel.diagonal().sqrt()
    for matrix in matrices:
        kernel = matrix @ kernel @ matrix.mT
        after = kernel.diagonal().sqrt()
        yield matrix * before / after[:, None]
        before = after
