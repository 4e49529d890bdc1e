"""Draws inputs for timing one head's attention and counting its operations. Also computes exp(S) V naively."""

from dataclasses import dataclass

import torch
from torch import Tensor

SEED = 0
NORM = 2.0  # ‖S‖₂. In trained models, the median over a block's heads is 0.7 to 1.7, and the maximum over all heads is 4.2.
DECAY = 1.0  # column k of Q and K has standard deviation k^−DECAY, because a few directions dominate S in trained heads


@dataclass(frozen=True)
class Inputs:
    """Query, key and value of one head, each (1, 1, N, d), and the scale for which ‖S‖₂ has a given value."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    @classmethod
    def draw(cls, tokens: int, width: int, norm: float, device: torch.device) -> "Inputs":
        draws = torch.randn(3, 1, 1, tokens, width, generator=torch.Generator().manual_seed(SEED))
        query, key = draws[:2] * torch.arange(1, width + 1) ** -DECAY
        r = torch.linalg.qr(torch.cat([query, key], dim=-1).double(), mode="r").R  # R gives ‖S‖₂ without the N×N matrix
        scale = norm / torch.linalg.matrix_norm(skew(1.0, *r.chunk(2, dim=-1)), 2).item()
        return cls(query.to(device), key.to(device), draws[2].to(device), scale)


def skew(scale: float, query: Tensor, key: Tensor) -> Tensor:
    """Returns S = scale · (QKᵀ − KQᵀ) of Eq. 5, in the precision of the inputs."""
    half = scale * (query @ key.mT)
    return half - half.mT


def exponential_dense(scale: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns exp(S) V (Eq. 5), computed from the N×N matrix exponential, the naive method of Section 2.1."""
    return torch.linalg.matrix_exp(skew(scale, query, key)) @ value
