"""The one rule of a verdict, and the statistics under it. How often it errs is simulated by the study `verdicts`.

A claim asks a number to be in a region: on one side of a limit, or within a margin of 0. Models are compared as independent
samples: a seed gives models of different blocks nothing in common but the batches, and measured correlations over seeds are
negative as often as not.

    supported       the whole 95 % interval is in the region; of several measures, that of every one
    not supported   the whole interval is outside, for some measure; with k measures each interval is then one of
                    1 − 0.05/k, because any of them refutes (Bonferroni)
    undecided       otherwise; with fewer than three runs in a sample; where no run differs from another, as that tells no
                    spread; and wherever a run diverged, as those that did not are then no fair sample
    not evaluated   of some sample there is no run
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.special import betaincinv, stdtrit

SUPPORTED, NOT_SUPPORTED, UNDECIDED, NOT_EVALUATED = "supported", "not supported", "undecided", "not evaluated"
VERDICTS = (SUPPORTED, NOT_SUPPORTED, UNDECIDED, NOT_EVALUATED)
LEVEL = 0.05  # of both errors together, for one claim
CONFIDENCE = 1 - LEVEL  # of every interval that is shown
LEAST_RUNS = 3  # in each sample
MOST_SEEDS = 1000  # that `seeds_needed` looks up to

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


def summarise(values: Sequence[float]) -> Summary:
    """Mean, spread and Student's t-interval of finite values: mean ± t(0.975, n − 1) std / √n."""
    values = np.asarray(values, dtype=float)
    n = len(values)
    if n == 0:
        return Summary(0, *[math.nan] * 6)
    mean, std = values.mean(), values.std(ddof=1) if n > 1 else math.nan
    half = stdtrit(n - 1, (1 + CONFIDENCE) / 2) * std / math.sqrt(n)
    return Summary(n, *map(float, (mean, std, mean - half, mean + half, values.min(), values.max())))


@dataclass(frozen=True)
class Judgement:
    """What the rule says of one number: its value and 95 % interval, the runs of the smallest sample, verdict and why."""

    value: float
    low: float
    high: float
    n: int
    verdict: str
    note: str = ""

    def as_measure(self, *notes: str) -> dict:
        """Its fields by the names of those of `Measure`, with these notes before its own."""
        return asdict(self) | {"note": "; ".join(filter(None, (*notes, self.note)))}


def judge(
    samples: Samples,
    weights: Sequence[float],
    *,
    limit: float,
    side: str,
    family: int = 1,
    diverged: Sequence[int] = (),
) -> Judgement:
    """The rule for Σ wᵢ · mean(sampleᵢ), to be "above" or "below" `limit`, by Welch's interval.

    Args:
        samples: values of independent runs, one sequence for each model. Ratios are judged by their logarithms.
        weights: of the means, such as (1, −1) for a difference.
        family: how many measures share the claim, of which any one refutes it.
        diverged: how many runs of each model did; none is told of where it is empty.
    """
    region = {"above": (limit, math.inf), "below": (-math.inf, limit)}[side]
    return _judge_means(samples, weights, region, family, diverged, equal_spread=False)


def judge_within(
    samples: Samples,
    weights: Sequence[float],
    *,
    margin: float,
    family: int = 1,
    diverged: Sequence[int] = (),
    equal_spread: bool = True,
) -> Judgement:
    """The rule for what is to be within ±margin of 0. The samples share one spread, as those of one model do, or not."""
    return _judge_means(samples, weights, (-margin, margin), family, diverged, equal_spread)


def judge_share(successes: int, n: int, *, limit: float = 0.5, family: int = 1, diverged: int = 0) -> Judgement:
    """The rule for a probability that is to be above `limit`, given `successes` of n independent runs.

    Its interval is Clopper and Pearson's, which errs at most as often as it says. Six successes in six decide for one half.
    """

    def interval(level: float) -> Interval:
        low = betaincinv(successes, n - successes + 1, level / 2) if successes else 0.0
        high = betaincinv(successes + 1, n - successes, 1 - level / 2) if successes < n else 1.0
        return float(low), float(high)

    return _rule(successes / n if n else math.nan, n, (limit, math.inf), interval, family, diverged)


def _judge_means(
    samples: Samples, weights: Sequence[float], region: Interval, family: int, diverged: Sequence[int], equal_spread: bool
) -> Judgement:
    value, diverged = combination(samples, weights), diverged or [0] * len(samples)
    is_missing = any(len(sample) + lost == 0 for sample, lost in zip(samples, diverged, strict=True))

    def interval(level: float) -> Interval:
        half = half_width(samples, weights, 1 - level, equal_spread=equal_spread)
        return value - half, value + half

    return _rule(value, min(map(len, samples)), region, interval, family, 0 if is_missing else sum(diverged))


def _rule(
    value: float, n: int, region: Interval, interval: Callable[[float], Interval], family: int, diverged: int
) -> Judgement:
    """The rule itself, of a number with the interval that it has at a level."""
    if n == 0:
        verdict, note = (UNDECIDED, f"no run finished; {diverged} diverged") if diverged else (NOT_EVALUATED, "no run")
        return Judgement(math.nan, math.nan, math.nan, 0, verdict, note)
    low, high = interval(LEVEL)
    least, most = interval(LEVEL / family) if family > 1 else (low, high)
    verdict, note = UNDECIDED, "the interval contains the limit"
    if diverged:
        note = f"{diverged} of the runs diverged"
    elif n < LEAST_RUNS:
        note = f"{n} {'run' if n == 1 else 'runs'}, and fewer than {LEAST_RUNS} decide nothing"
    elif math.isnan(low):
        note = "no run differs from another, which tells no spread"
    elif region[0] < low and high < region[1]:
        verdict, note = SUPPORTED, ""
    elif most < region[0] or region[1] < least:
        verdict, note = NOT_SUPPORTED, ""
    elif high < region[0] or region[1] < low:
        note = f"against it by itself, but not as one of {family} measures"
    return Judgement(value, low, high, n, verdict, note)


def combination(samples: Samples, weights: Sequence[float]) -> float:
    """Σ wᵢ · mean(sampleᵢ); NaN where a sample is empty."""
    return float(sum(weight * _mean(sample) for weight, sample in zip(weights, samples, strict=True)))


def half_width(samples: Samples, weights: Sequence[float], confidence: float, *, equal_spread: bool = False) -> float:
    """Half the t-interval of Σ wᵢ · mean(sampleᵢ): Welch's for samples with spreads of their own, or the pooled one.

    NaN where no spread can be told: every sample has one value, or one of those with a spread of its own; and where no value
    differs from another of its sample, as an interval without width would decide anything.
    """
    sizes, squares = [len(sample) for sample in samples], [_squares(sample) for sample in samples]
    if min(sizes) < (1 if equal_spread else 2) or not any(squares):
        return math.nan
    parts = [weight**2 / size for weight, size in zip(weights, sizes, strict=True)]
    if equal_spread:
        freedom = sum(sizes) - len(sizes)
        variance = sum(parts) * sum(squares) / freedom
    else:
        each = [part * square / (size - 1) for part, square, size in zip(parts, squares, sizes, strict=True)]
        variance = sum(each)
        freedom = variance**2 / sum(e**2 / (size - 1) for e, size in zip(each, sizes, strict=True))
    return float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance)


def _mean(sample: Sequence[float]) -> float:
    """In plain Python: many times faster than NumPy for a few values, and simulated often."""
    return sum(sample) / len(sample) if len(sample) else math.nan


def _squares(sample: Sequence[float]) -> float:
    """Σ (x − mean)², and exactly 0 for equal values, whatever the rounding of their mean."""
    mean = _mean(sample)
    return sum([(value - mean) ** 2 for value in sample]) if len(set(sample)) > 1 else 0.0


def one_more_run(values: Sequence[float], others: Samples = ()) -> Interval:
    """Where the next run is expected with 95 % confidence, as far as runs are normal: mean ± t s √(1 + 1/n).

    The `others` are of the same spread and help to tell it. (NaN, NaN) where nothing does.
    """
    others = [sample for sample in others if len(sample)]
    half = half_width([[0.0], values, *others], [1, -1, *[0] * len(others)], CONFIDENCE, equal_spread=True)
    mean = float(_mean(values))
    return mean - half, mean + half


def seeds_needed(samples: Samples, weights: Sequence[float], *, limit: float, side: str, family: int = 1) -> int | None:
    """With how many seeds for each model `judge` would decide, were value and spreads what they are now.

    None where nothing can be told: a sample has fewer than two runs, none has a spread, or `MOST_SEEDS` are not enough.
    """
    if min(map(len, samples)) < 2:
        return None
    value = combination(samples, weights)
    level = LEVEL if (value > limit if side == "above" else value < limit) else LEVEL / family
    variances = np.array([w**2 * _squares(sample) / (len(sample) - 1) for sample, w in zip(samples, weights, strict=True)])
    if not variances.any():
        return None
    n = np.arange(LEAST_RUNS, MOST_SEEDS + 1)
    freedom = (n - 1) * variances.sum() ** 2 / np.sum(variances**2)
    decides = stdtrit(freedom, 1 - level / 2) * np.sqrt(variances.sum() / n) < abs(value - limit)
    return int(n[decides.argmax()]) if decides.any() else None


def runs_needed(share: float, *, limit: float = 0.5, family: int = 1) -> int | None:
    """With how many runs `judge_share` would decide, were the share of successes what it is now; None as above."""
    whole = math.floor if share > limit else math.ceil  # so many as leave the share no further from the limit than it is
    for n in range(LEAST_RUNS, MOST_SEEDS + 1):
        if judge_share(whole(round(share * n, 9)), n, limit=limit, family=family).verdict != UNDECIDED:
            return n
    return None


def combine(verdicts: Sequence[str]) -> str:
    """Of the measures of one claim: all must be supported for the claim to be; one that is not supported is enough against.

    Raises:
        ValueError: there is no verdict.
    """
    if not verdicts:
        raise ValueError("a claim needs a measure")
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return NOT_SUPPORTED if NOT_SUPPORTED in verdicts else UNDECIDED
