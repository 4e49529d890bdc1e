"""Computes means, spreads and intervals over seeds.

Models are compared as independent samples: with the same seed, models with different blocks share only the order of batches,
and the correlations that we measured across seeds are negative as often as positive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

CONFIDENCE = 0.95  # confidence level of the intervals in tables
LEAST_RUNS = 3  # minimum number of runs for a prediction interval
Values = Sequence[float] | NDArray
Samples = Sequence[Values]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """Statistics of n values: mean, standard deviation (ddof 1), confidence interval of the mean (`low`, `high`) and range.

    If n = 0, all statistics are NaN. If n = 1, `std`, `low` and `high` are NaN.
    """

    n: int
    mean: float
    std: float
    low: float
    high: float
    min: float
    max: float


def summary_of(values: Values) -> Summary:
    """Summarises finite values. The interval is Student's: mean ± t(0.975, n − 1) std / √n."""
    array = np.asarray(values, dtype=float)
    n = len(array)
    if n == 0:
        return Summary(0, *[math.nan] * 6)
    mean, std = array.mean(), array.std(ddof=1) if n > 1 else math.nan
    half = quantile(CONFIDENCE, n - 1) * std / math.sqrt(n)
    return Summary(n, *map(float, (mean, std, mean - half, mean + half, array.min(), array.max())))


def quantile(confidence: float, df: float) -> float:
    """Returns the quantile of Student's t for a two-sided interval of this confidence, or NaN if df ≤ 0."""
    return float(stdtrit(df, (1 + confidence) / 2)) if df > 0 else math.nan


@dataclass(frozen=True)
class Estimate:
    """Σ wᵢ · mean(sampleᵢ), with its standard error and its degrees of freedom (Welch's or pooled).

    The standard error and the degrees of freedom are NaN if the spread is unknown. The spread is unknown if all samples are
    constant, or if a sample has only one value and the samples are not assumed to have the same spread.
    """

    value: float
    standard_error: float = math.nan
    df: float = math.nan

    @classmethod
    def of_spreads(
        cls, value: float, weights: Sequence[float], variances: Sequence[float], sizes: Sequence[int]
    ) -> "Estimate":
        """Returns an estimate with Welch's degrees of freedom, from `value` and the samples' variances and sizes."""
        each = [weight**2 * variance / size for weight, variance, size in zip(weights, variances, sizes, strict=True)]
        variance = sum(each)
        df = variance**2 / sum(part**2 / (size - 1) for part, size in zip(each, sizes, strict=True))
        return cls(value, math.sqrt(variance), df)

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """Returns the t-interval of the estimate, or (NaN, NaN) if the spread is unknown."""
        half = quantile(confidence, self.df) * self.standard_error
        return self.value - half, self.value + half


def contrast(samples: Samples, weights: Sequence[float], *, equal_spread: bool = False) -> Estimate:
    """Estimates Σ wᵢ · mean(sampleᵢ), such as the difference of two means for the weights (1, −1).

    Args:
        equal_spread: assume that all samples have the same variance, and pool it. A sample may then have a single value.
    """
    sizes = [len(sample) for sample in samples]
    if 0 in sizes:
        return Estimate(math.nan)
    value = float(sum(weight * _mean(sample) for weight, sample in zip(weights, samples, strict=True)))
    squares = [_squares(sample) for sample in samples]
    if (1 in sizes and not equal_spread) or not any(squares):
        return Estimate(value)
    if equal_spread:
        parts = [weight**2 / size for weight, size in zip(weights, sizes, strict=True)]
        df = sum(sizes) - len(sizes)
        return Estimate(value, math.sqrt(sum(parts) * sum(squares) / df), df)
    variances = [square / (size - 1) for square, size in zip(squares, sizes, strict=True)]
    return Estimate.of_spreads(value, weights, variances, sizes)


def contrast_over_images(samples: Sequence[np.ndarray], weights: Sequence[float]) -> Estimate:
    """Estimates a contrast of mean accuracies, with a standard error that includes the variance over runs and images.

    All models see the same images. For the variance over images, we therefore add one more sample: each image's contrast,
    averaged over runs. This variance and each variance over runs include the interaction of run and image. A bootstrap over
    runs and images sums the same variances, but with five runs it underestimates the variance over runs by a fifth.

    Args:
        samples: an array (runs ≥ 2, images) for each model: 1 if the run classifies the image correctly, else 0.
    """
    on_images = sum(weight * sample.mean(axis=0) for weight, sample in zip(weights, samples, strict=True))  # (images,)
    variances = [float(sample.mean(axis=1).var(ddof=1)) for sample in samples] + [float(on_images.var(ddof=1))]
    value, sizes = float(on_images.mean()), [*map(len, samples), len(on_images)]
    return Estimate.of_spreads(value, [*weights, 1.0], variances, sizes) if any(variances) else Estimate(value)


def one_more_run(values: Values) -> Interval:
    """Returns the prediction interval for one more run, mean ± t s √(1 + 1/n), for normally distributed runs.

    A single value gives (NaN, NaN).
    """
    low, high = contrast([[0.0], values], (1, -1), equal_spread=True).interval()
    return -high, -low


def _mean(sample: Values) -> float:
    """Returns the mean, in plain Python: NumPy is much slower for a few values, and simulations call this function often."""
    return sum(sample) / len(sample)


def _squares(sample: Values) -> float:
    """Returns Σ (x − mean)², which is exactly 0 for equal values, even if their mean is rounded."""
    mean = _mean(sample)
    return sum([(value - mean) ** 2 for value in sample]) if len(set(sample)) > 1 else 0.0  # noqa: C419  a list is faster
