"""Activation functions φ shaped for the depth of a network, and moments of φ(z) for z ~ N(0, 1)."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ShapedGELU:
    """φ(x) = c (GELU(a x + b) + e), with four fixed constants (Martens et al. 2021)."""

    input_scale: float  # a
    input_shift: float  # b
    output_scale: float  # c
    output_shift: float  # e

    def __call__(self, x: Tensor) -> Tensor:
        return self.output_scale * (F.gelu(self.input_scale * x + self.input_shift) + self.output_shift)

    def of_number(self, x: float) -> float:
        return self.output_scale * (gelu(self.input_scale * x + self.input_shift) + self.output_shift)


@functools.cache
def dks_gelu(depth: int, slope: float = 5.0) -> ShapedGELU:
    """GELU shaped by Deep Kernel Shaping for `depth` successive MLPs (Martens et al. 2021, Section 8).

    The constants a, b, c and e solve, for z ~ N(0, 1),

        E[φ] = 0,        E[φ²] = 1,        E[φ φ' z] = 1,        E[φ'²] = slope^{1/depth}.

    In the limit of wide layers, the mean square of tokens stays 1, uncorrelated tokens stay uncorrelated, and the cosine map
    of the network without its attention has derivative `slope` at 1. He et al. (2023, H.1) use `slope` = 5.

    Raises:
        ValueError: there are too few MLPs for the slope: no GELU is curved enough. A slope of 5 needs at least 5 MLPs.

    Example:
        >>> round(float(dks_gelu(36)(torch.randn(1_000_000)).square().mean()), 1)
        1.0
    """
    if depth < 1:
        raise ValueError(f"depth must be 1 or more, not {depth}")
    target = slope ** (1 / depth)
    limit = math.pi / (math.pi - 1)  # as a → ∞, φ tends to a ReLU with E[φ] = 0, E[φ²] = 1 and this E[φ'²]
    if not 1 < target < limit:
        raise ValueError(
            f"a GELU cannot have the slope {slope:g} over {depth} layers: use more layers, or a slope above 1 but closer "
            "to it"
        )
    log_scale, shift = 0.0, 0.0
    for _ in range(50):  # Newton's method takes 4 to 9 steps, each of length 1 at most
        residual = [moment - aim for moment, aim in zip(_slopes(log_scale, shift), (1, target), strict=True)]
        if max(map(abs, residual)) < 1e-12:
            scale = math.exp(log_scale)
            mean, variance = _gelu_moments(scale, shift)
            return ShapedGELU(scale, shift, 1 / math.sqrt(variance), -mean)
        step = _newton_step(log_scale, shift, residual)
        damping = max(1.0, *map(abs, step))
        log_scale, shift = log_scale - step[0] / damping, shift - step[1] / damping
    raise ValueError(f"a GELU cannot have the slope {slope:g} over {depth} layers: use more layers, or a smaller slope")


def gain(activation: Callable[[float], float]) -> float:
    """1/√(E[φ(z)²]), z ~ N(0, 1). Scaling the weight after φ by this gain restores mean square 1 (He et al. 2023, H.1)."""
    return 1 / math.sqrt(_mean(lambda z: activation(z) ** 2))


def linear_share(activation: Callable[[float], float]) -> float:
    """κ = E[φ(z) z]/√(E[φ(z)²]) for z ~ N(0, 1): the cosine between φ and the identity."""
    return _mean(lambda z: activation(z) * z) / math.sqrt(_mean(lambda z: activation(z) ** 2))


def gelu_tanh(x: float) -> float:
    """x (1 + tanh(√(2/π) (x + 0.044715 x³)))/2: `F.gelu(x, approximate="tanh")` for a float."""
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


# Points z and weights of the trapezoidal rule on [−12, 12], exact up to rounding for functions as smooth as GELU
QUADRATURE = [(i / 8, math.exp(-((i / 8) ** 2) / 2) / math.sqrt(2 * math.pi) / 8) for i in range(-96, 97)]


def _mean(function: Callable[[float], float]) -> float:
    return math.fsum(weight * function(z) for z, weight in QUADRATURE)


def gelu(x: float) -> float:
    """x Φ(x): `F.gelu` for a float."""
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def _gelu_slope(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2 + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _gelu_moments(scale: float, shift: float) -> tuple[float, float]:
    """Mean and variance of GELU(scale · z + shift), z ~ N(0, 1)."""
    mean = _mean(lambda z: gelu(scale * z + shift))
    return mean, _mean(lambda z: (gelu(scale * z + shift) - mean) ** 2)


def _slopes(log_scale: float, shift: float) -> tuple[float, float]:
    """E[φ φ' z] and E[φ'²] of φ(z) = c (GELU(a z + b) + e) with E[φ] = 0, E[φ²] = 1, a = exp(log_scale) and b = shift."""
    scale = math.exp(log_scale)
    mean, variance = _gelu_moments(scale, shift)
    of_norms = _mean(lambda z: (gelu(scale * z + shift) - mean) * scale * _gelu_slope(scale * z + shift) * z)
    of_cosines = _mean(lambda z: (scale * _gelu_slope(scale * z + shift)) ** 2)
    return of_norms / variance, of_cosines / variance


def _newton_step(log_scale: float, shift: float, residual: list[float], h: float = 1e-6) -> tuple[float, float]:
    """Returns J⁻¹ · residual. Central differences give J, the Jacobian of `_slopes`."""
    right, left = _slopes(log_scale + h, shift), _slopes(log_scale - h, shift)
    upper, lower = _slopes(log_scale, shift + h), _slopes(log_scale, shift - h)
    a, c = (right[0] - left[0]) / (2 * h), (right[1] - left[1]) / (2 * h)
    b, d = (upper[0] - lower[0]) / (2 * h), (upper[1] - lower[1]) / (2 * h)
    determinant = a * d - b * c
    return (d * residual[0] - b * residual[1]) / determinant, (a * residual[1] - c * residual[0]) / determinant
