"""Random inputs of unequal prime sizes, and the errors that the tests bound."""

import math

import torch
from torch import Tensor


def draw(
    tokens: int,
    width: int,
    value_width: int = 7,
    *,
    batch: tuple[int, ...] = (2, 3),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal query, key and value, (*batch, tokens, width or value_width): leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*batch, tokens, width), (*batch, tokens, width), (*batch, tokens, value_width)]
    return tuple(torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖, over all entries and in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return ((actual - expected).norm() / expected.norm()).item()


def orthogonality_error(matrix: Tensor) -> float:
    """max ‖AᵀA − I‖₂ over the batch, in float64."""
    matrix = matrix.detach().double()
    gram = matrix.mT @ matrix
    return torch.linalg.matrix_norm(gram - torch.eye(matrix.shape[-1], dtype=gram.dtype), ord=2).max().item()


def assert_uniform(weight: Tensor, bound: float) -> None:
    """Within ±bound, close to it, and with the variance bound²/3, to within five standard errors."""
    assert 0.98 * bound < weight.abs().max() <= bound
    assert abs(weight.square().mean() * 3 / bound**2 - 1) < 5 * math.sqrt(0.8 / weight.numel())
