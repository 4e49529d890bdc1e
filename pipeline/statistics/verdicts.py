"""Judges claims by statistical tests. The study `verdicts` estimates the tests' error rates and power by simulation.

A claim says that a number lies above or below a limit. The tests are one-sided at the 5 % level, and exact where possible:

    a difference of two models      Mann–Whitney's rank test, after shifting the first model's runs by the limit. The
                                    estimate is Hodges and Lehmann's, the median of all differences first − second. The
                                    confidence bounds are the values of the limit at which the test's decision changes
    a ratio of two models           the same test, on logarithms
    a contrast of 3 or 4 models     Welch's t-test, because no rank test can decide with three to five runs per model
    a share of runs                 the binomial test, with Clopper and Pearson's bounds

    reproduced              the test of the claim has p ≤ 5 %
    contradicted            the test of the opposite claim has p ≤ 5 %
    open, same direction    neither test has p ≤ 5 %; the estimate lies on the claim's side of the limit
    open, other direction   neither test has p ≤ 5 %; the estimate does not lie on the claim's side
    not testable here       replaces "open" if the test's power at the paper's effect is below one half; the power assumes
                            standard deviations that were declared before training
    not trained             a model has no run

Failed runs count, except for `Measured` claims. A rank test uses only the rank of a failed run, not its value, so a failure
does not outweigh the other runs.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import nctdtr, stdtr
from scipy.stats import binomtest, rankdata

from pipeline.statistics.intervals import Estimate, Samples, Values, contrast, quantile

REPRODUCED, CONTRADICTED = "reproduced", "contradicted"
OPEN_SAME, OPEN_OTHER = "open, same direction", "open, other direction"
NOT_TESTABLE, NOT_TRAINED = "not testable here", "not trained"
WORDS = (REPRODUCED, OPEN_SAME, OPEN_OTHER, CONTRADICTED, NOT_TESTABLE, NOT_TRAINED)
LEVEL = 0.05  # level of each one-sided test
TWO_SIDED = 1 - 2 * LEVEL  # confidence of the two-sided interval; its ends are the one-sided bounds
LEAST_POWER = 0.5
MARGIN_OF_A_START = 0.1  # a run starts to learn if its train loss is at least this many nats below that of uniform guessing
SIMULATED = 10_000  # number of simulated experiments from which a power is estimated
TIE_DECIMALS = 9  # shifted values are rounded to this many decimals, so that 97.1 − 0.5 ties with 96.6
ROUNDING = 1e-12  # tolerance of p ≤ LEVEL, because p can be LEVEL exactly: 1/20 if three runs all exceed three others
_WORST = (REPRODUCED, OPEN_SAME, OPEN_OTHER, CONTRADICTED, NOT_TRAINED)  # verdicts, from best to worst


@dataclass(frozen=True)
class Verdict:
    """The verdict on one comparison.

    word        one of WORDS
    low, high   ends of the two-sided 90 % interval, which are the one-sided 95 % bounds; infinite if there are too few runs
    p           one-sided p-value of the claim
    n           size of the smallest sample
    limit       limit of the claim; the margin if `side` is "within"
    side        side of the limit that the claim states: above, below or within
    power       the test's power at the paper's effect; NaN if unknown
    """

    word: str
    estimate: float
    low: float
    high: float
    p: float
    n: int
    limit: float
    side: str
    power: float = math.nan

    @property
    def bound(self) -> float:
        """The one-sided 95 % bound, which lies on the claim's side of the limit if the claim is reproduced."""
        return self.low if self.side == "above" else self.high

    @property
    def here(self) -> str:
        """The verdict's wording in reports, for claims that we added: confirmed, not confirmed, undecided or not trained."""
        return {REPRODUCED: "confirmed", CONTRADICTED: "not confirmed", NOT_TRAINED: NOT_TRAINED}.get(self.word, "undecided")


def judge(first: Values, second: Values, *, limit: float = 0.0, side: str = "above", power: float = math.nan) -> Verdict:
    """Judges the claim that the difference of two models, first − second, lies "above" or "below" `limit`.

    Each sample has one value per independent run. `power` is the power of the test if the true difference is the
    paper's (see `power_of_ranks`).
    """
    n = min(len(first), len(second))
    if n == 0:
        return _not_trained(limit, side)
    low, estimate, high = _hodges_lehmann(np.asarray(first, float), np.asarray(second, float))
    shifted, other = np.round(np.subtract(first, limit), TIE_DECIMALS), np.round(second, TIE_DECIMALS)
    return _verdict(estimate, (low, high), _mann_whitney(shifted, other), n, limit, side, power)


def judge_ratio(first: Values, second: Values, factor: float) -> Verdict:
    """Judges the claim that the ratio of two models, first / second, lies below `factor`. Values are in [0, ∞]."""
    with np.errstate(divide="ignore"):  # log 0 is −∞: a run takes 0 epochs if its first loss reaches the target
        logs = np.log(first), np.log(second)
    verdict = judge(*logs, limit=math.log(factor), side="below")
    estimate, low, high = (math.exp(value) for value in (verdict.estimate, verdict.low, verdict.high))
    return replace(verdict, estimate=estimate, low=low, high=high, limit=factor)


def judge_within(first: Values, second: Values, *, margin: float) -> Verdict:
    """Judges the claim of equivalence, |first − second| < margin, by two one-sided tests (TOST)."""
    above, below = judge(first, second, limit=-margin), judge(first, second, limit=margin, side="below")
    word = max((above.word, below.word), key=_WORST.index)
    return replace(above, word=word, p=max(above.p, below.p), limit=margin, side="within")


def judge_contrast(samples: Samples, weights: Sequence[float], *, power: float = math.nan) -> Verdict:
    """Judges the claim that Σ wᵢ · mean(sampleᵢ), a contrast of several models, lies above 0, by Welch's t-test."""
    n = min(map(len, samples))
    if n == 0:
        return _not_trained(0.0, "above")
    estimate = contrast(samples, weights)
    t = estimate.value / estimate.standard_error if estimate.standard_error > 0 else math.nan
    p = {"above": float(stdtr(estimate.df, -t)), "below": float(stdtr(estimate.df, t))}
    return _verdict(estimate.value, estimate.interval(TWO_SIDED), p, n, 0.0, "above", power)


def judge_share(successes: int, n: int, *, limit: float = 0.5, side: str = "above") -> Verdict:
    """Judges a claim about the probability of success, from the number of successes in n independent runs."""
    if n == 0:
        return _not_trained(limit, side)
    alternatives = {"above": "greater", "below": "less"}
    p = {each: float(binomtest(successes, n, limit, word).pvalue) for each, word in alternatives.items()}
    ends = binomtest(successes, n).proportion_ci(TWO_SIDED, "exact")
    return _verdict(successes / n, (float(ends.low), float(ends.high)), p, n, limit, side)


def _verdict(
    estimate: float,
    ends: tuple[float, float],
    p: Mapping[str, float],
    n: int,
    limit: float,
    side: str,
    power: float = math.nan,
) -> Verdict:
    """Returns the verdict that follows from the p-values of both one-sided tests."""
    other = "below" if side == "above" else "above"
    if p[side] <= LEVEL + ROUNDING:
        word = REPRODUCED
    elif p[other] <= LEVEL + ROUNDING:
        word = CONTRADICTED
    else:
        word = OPEN_SAME if (estimate > limit if side == "above" else estimate < limit) else OPEN_OTHER
        word = NOT_TESTABLE if power < LEAST_POWER else word
    return Verdict(word, estimate, *ends, p[side], n, limit, side, power)


def _not_trained(limit: float, side: str) -> Verdict:
    return Verdict(NOT_TRAINED, math.nan, math.nan, math.nan, math.nan, 0, limit, side)


def _mann_whitney(first: NDArray, second: NDArray) -> dict[str, float]:
    """Returns the exact p-values for first > second ("above") and first < second ("below"). Ties share their mean rank.

    We do not use SciPy's test: with ties, its p-values are exact only if it enumerates all permutations.
    """
    doubled = np.rint(2 * rankdata([*first, *second])).astype(int)
    ways, own = _rank_sums(tuple(doubled.tolist()), len(first)), doubled[: len(first)].sum()
    return {"above": float(ways[own:].sum() / ways.sum()), "below": float(ways[: own + 1].sum() / ways.sum())}


@functools.cache
def _rank_sums(ranks: tuple[int, ...], n: int) -> NDArray:
    """Returns an array whose entry s is the number of ways to choose n of the ranks so that they sum to s."""
    ways = np.zeros((n + 1, sum(ranks) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    return ways[n]


def _hodges_lehmann(first: NDArray, second: NDArray) -> tuple[float, float, float]:
    """Returns (lower confidence bound, median, upper confidence bound) of the differences first − second.

    A difference ∞ − ∞ counts as −∞ in the lower bound, as 0 in the median, and as ∞ in the upper bound.
    """
    with np.errstate(invalid="ignore"):
        differences = np.subtract.outer(first, second).ravel()
    is_tie, rank = np.isnan(differences), critical_rank(len(first), len(second))
    estimate = float(np.median(np.where(is_tie, 0.0, differences)))
    if rank == 0:
        return -math.inf, estimate, math.inf
    lowest = np.sort(np.where(is_tie, -math.inf, differences))
    highest = np.sort(np.where(is_tie, math.inf, differences))
    return float(lowest[rank - 1]), estimate, float(highest[-rank])


@functools.cache
def critical_rank(n: int, m: int, level: float = LEVEL) -> int:
    """Returns the largest k with P(U ≤ k − 1) ≤ level, or 0 if there is none.

    U is the number of pairs (first, second) with first > second, for samples of n and m runs from the same distribution.
    """
    ways = _rank_sums(tuple(range(1, n + m + 1)), n)[n * (n + 1) // 2 :]  # the index is U, the rank sum minus its minimum
    return int((np.cumsum(ways) / ways.sum() <= level + ROUNDING).sum())


@functools.cache
def power_of_ranks(distance: float, spreads: tuple[float, float], n: int, m: int, level: float = LEVEL) -> float:
    """Estimates the power of the test in `judge` by simulation, for samples of n and m normally distributed values.

    `spreads` are their standard deviations. For the claim first − second > limit, the true difference is limit + `distance`.
    """
    rng = np.random.default_rng(0)
    first = distance + spreads[0] * rng.standard_normal((SIMULATED, n, 1))
    second = spreads[1] * rng.standard_normal((SIMULATED, 1, m))
    against = (first <= second).sum((1, 2))
    return float((against < critical_rank(n, m, level)).mean())


def power_of_contrast(distance: float, weights: Sequence[float], spreads: Sequence[float], sizes: Sequence[int]) -> float:
    """Returns the power of `judge_contrast`, from the noncentral t distribution.

    The true contrast is `distance`; the limit is 0. `spreads` and `sizes` hold each model's standard deviation and number
    of runs.
    """
    estimate = Estimate.of_spreads(0.0, weights, [spread**2 for spread in spreads], sizes)
    return float(1 - nctdtr(estimate.df, distance / estimate.standard_error, quantile(TWO_SIDED, estimate.df)))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Returns Holm's adjusted p-values, by name. Rejecting at adjusted p ≤ 5 % keeps the family-wise error ≤ 5 %."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
