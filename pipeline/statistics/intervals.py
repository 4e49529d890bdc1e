"""Means, spreads and intervals over seeds. What they decide is the rule of pipeline/statistics/verdicts.py.

Models are compared as independent samples: a seed gives models of different blocks nothing in common but the batches, and
measured correlations over seeds are negative as often as positive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95  # level of intervals that are shown
LEAST_RUNS = 3  # behind a prediction interval
UNKNOWN = (math.nan, math.nan)  # standard error and degrees of freedom where no spread is known
Samples = Sequence[Sequence[float]]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """n values: mean, standard deviation (ddof 1), the interval of the mean from `low` to `high`, and the range.

    What n is too small for is NaN: everything at n = 0; `std`, `low` and `high` at n = 1.
    """

    n: int
    mean: float
    std: float
    low: float
    high: float
    min: float
    max: float


def summary_of(values: Sequence[float]) -> Summary:
    """Mean, spread and Student's t-interval of finite values: mean ± t(0.975, n − 1) std / √n."""
    values = np.asarray(values, dtype=float)
    n = len(values)
    if n == 0:
        return Summary(0, *[math.nan] * 6)
    mean, std = values.mean(), values.std(ddof=1) if n > 1 else math.nan
    half = quantile(CONFIDENCE, n - 1) * std / math.sqrt(n)
    return Summary(n, *map(float, (mean, std, mean - half, mean + half, values.min(), values.max())))


def quantile(confidence: float, df: float) -> float:
    """The t that a two-sided interval of this confidence reaches to; NaN without degrees of freedom."""
    return float(stdtrit(df, (1 + confidence) / 2)) if df > 0 else math.nan


@dataclass(frozen=True)
class Estimate:
    """Σ wᵢ · mean(sampleᵢ) with its standard error and Welch's (or the pooled) degrees of freedom; NaN where no spread is
    known: a sample has one value only, or no value differs from another of its sample."""

    value: float
    standard_error: float
    df: float

    @classmethod
    def of_spreads(
        cls, value: float, weights: Sequence[float], variances: Sequence[float], sizes: Sequence[int]
    ) -> "Estimate":
        """Welch's, given the variances of the samples."""
        each = [weight**2 * variance / size for weight, variance, size in zip(weights, variances, sizes, strict=True)]
        variance = sum(each)
        df = variance**2 / sum(part**2 / (size - 1) for part, size in zip(each, sizes, strict=True))
        return cls(value, math.sqrt(variance), df)

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """The t-interval; (NaN, NaN) where no spread is known."""
        half = quantile(confidence, self.df) * self.standard_error
        return self.value - half, self.value + half


def contrast(samples: Samples, weights: Sequence[float], *, equal_spread: bool = False) -> Estimate:
    """Σ wᵢ · mean(sampleᵢ), such as a difference of two means for the weights (1, −1).

    Args:
        equal_spread: the samples share one spread, as those of one model do, so that one of them may have a single value.
    """
    sizes = [len(sample) for sample in samples]
    if 0 in sizes:
        return Estimate(math.nan, *UNKNOWN)
    value = float(sum(weight * _mean(sample) for weight, sample in zip(weights, samples, strict=True)))
    squares = [_squares(sample) for sample in samples]
    if min(sizes) < (1 if equal_spread else 2) or not any(squares):
        return Estimate(value, *UNKNOWN)
    if equal_spread:
        parts = [weight**2 / size for weight, size in zip(weights, sizes, strict=True)]
        df = sum(sizes) - len(sizes)
        return Estimate(value, math.sqrt(sum(parts) * sum(squares) / df), df)
    variances = [square / (size - 1) for square, size in zip(squares, sizes, strict=True)]
    return Estimate.of_spreads(value, weights, variances, sizes)


def interval(samples: Samples, weights: Sequence[float], confidence: float = CONFIDENCE, **options) -> Interval:
    """The t-interval of a `contrast`; (NaN, NaN) where no spread is known."""
    return contrast(samples, weights, **options).interval(confidence)


def contrast_over_images(samples: Sequence[np.ndarray], weights: Sequence[float]) -> Estimate:
    """A `contrast` of mean accuracies whose error is that of other runs on other images.

    Every model sees the same images, which are a sample of their own: of the contrast on each image, over all runs. Welch's
    standard error takes its variance with those of the runs; what a run does to an image alone counts in both. A bootstrap
    over runs and images adds the same parts up, but of five runs it sees four fifths of the variance, and it has no t.

    Args:
        samples: of each model 1 where a run gets an image right, else 0, (runs, images); two runs or more.
    """
    on_images = sum(weight * sample.mean(axis=0) for weight, sample in zip(weights, samples, strict=True))  # (images,)
    variances = [float(sample.mean(axis=1).var(ddof=1)) for sample in samples] + [float(on_images.var(ddof=1))]
    value, sizes = float(on_images.mean()), [*map(len, samples), len(on_images)]
    return Estimate.of_spreads(value, [*weights, 1.0], variances, sizes) if any(variances) else Estimate(value, *UNKNOWN)


def one_more_run(values: Sequence[float]) -> Interval:
    """Prediction interval of one more run, if runs are normal: mean ± t s √(1 + 1/n); (NaN, NaN) of a single value."""
    low, high = interval([[0.0], values], (1, -1), equal_spread=True)
    return -high, -low


def _mean(sample: Sequence[float]) -> float:
    """Mean in plain Python: many times faster than NumPy for a few values, and simulations take many."""
    return sum(sample) / len(sample)


def _squares(sample: Sequence[float]) -> float:
    """Σ (x − mean)², and exactly 0 for equal values, whatever the rounding of their mean."""
    mean = _mean(sample)
    return sum([(value - mean) ** 2 for value in sample]) if len(set(sample)) > 1 else 0.0  # noqa: C419  a list is faster
