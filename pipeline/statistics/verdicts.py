"""The rule of a verdict. The study `verdicts` simulates how often it errs and what it can see.

A claim asks a number to lie above or below a limit. Each test of it is exact where one exists, and one-sided at 5 %:

    a difference of two models      Mann–Whitney's test of the runs' ranks, the first model's shifted by the limit. The
                                    estimate is Hodges and Lehmann's, the median of all differences between a run of the
                                    one and a run of the other; its bounds are those differences at which the test turns
                                    (five runs against five: the 5th smallest and the 5th largest of 25)
    a ratio of two models           the same by logarithms. A run that never arrives takes infinitely long; two such runs tie
    a contrast of three or four     Welch's t, as no test of ranks can decide it with three to five runs of each
    a share of runs                 the binomial test, with Clopper and Pearson's bounds

    reproduced              the test towards the claim's side of the limit has p ≤ 5 %
    contradicted            the test towards the other side has
    open, same direction    neither has; the estimate lies on the claim's side
    open, other direction   neither has; it does not
    not testable here       in place of open, where runs with the spreads that were declared beforehand would reproduce the
                            paper's own effect less than half of the time
    not trained             a sample has no run

A run that fails is the last in rank, whatever it ends with, so that it counts and leaves the others to be seen. A run that
diverges is as good as a guess. A run fails to start if it diverges, or if its mean train loss at the first point in the
second half of its training is above log(classes) − 0.1: tables show how many runs start and the mean of those, and a target
loss is one of the second model's runs that start. Verdicts of differences and contrasts are of all runs.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import nctdtr, stdtr
from scipy.stats import binomtest, rankdata

from pipeline.statistics.intervals import Estimate, Samples, contrast, quantile

REPRODUCED, CONTRADICTED = "reproduced", "contradicted"
SAME, OTHER = "open, same direction", "open, other direction"
NOT_TESTABLE, NOT_TRAINED = "not testable here", "not trained"
WORDS = (REPRODUCED, SAME, OTHER, CONTRADICTED, NOT_TESTABLE, NOT_TRAINED)
LEVEL = 0.05  # level of each one-sided test
BOTH = 1 - 2 * LEVEL  # confidence of the two-sided interval whose ends are the one-sided bounds
LEAST_POWER = 0.5
MARGIN_OF_A_START = 0.1  # nats below the loss of a guess
SIMULATED = 10_000  # experiments behind a power
DIGITS = 9  # decimals of a shifted value: 97.1 − 0.5 ties with 96.6
ROUNDING = 1e-12  # rounding of a p-value: all of three runs above all of three others is 1 in 20
_WORST = (REPRODUCED, SAME, OTHER, CONTRADICTED, NOT_TRAINED)  # last


@dataclass(frozen=True)
class Verdict:
    """One comparison as the rule sees it.

    `low` to `high` is the two-sided 90 % interval, whose ends are the two one-sided 95 % bounds, infinite where so few runs
    have none; `p` the one-sided p-value towards the claim, `n` the runs of the smallest sample, `power` that at the paper's
    effect, NaN where none is known.
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
        """The one-sided 95 % bound that has to lie on the claim's side of the limit."""
        return self.low if self.side == "above" else self.high

    @property
    def here(self) -> str:
        """The word for claims of other papers and our own: in our setting it is so, it is not, or it is open."""
        return {REPRODUCED: "confirmed", CONTRADICTED: "not confirmed", NOT_TRAINED: NOT_TRAINED}.get(self.word, "undecided")


def judge(
    first: Sequence[float], second: Sequence[float], *, limit: float = 0.0, side: str = "above", power: float = math.nan
) -> Verdict:
    """The rule for the difference of two models, first − second, to lie "above" or "below" `limit`.

    Args:
        first: a value of each independent run of one model.
        second: those of the other.
        power: of this test at the paper's effect, from `power_of_ranks`.
    """
    n = min(len(first), len(second))
    if n == 0:
        return _not_trained(limit, side)
    low, estimate, high = _hodges_lehmann(np.asarray(first, float), np.asarray(second, float))
    shifted, other = np.round(np.subtract(first, limit), DIGITS), np.round(second, DIGITS)
    return _verdict(estimate, (low, high), _mann_whitney(shifted, other), n, limit, side, power)


def judge_ratio(first: Sequence[float], second: Sequence[float], factor: float) -> Verdict:
    """The rule for the ratio of two models, first / second, to lie below a factor. Values are positive, or infinite."""
    with np.errstate(divide="ignore"):  # a loss that is there before the first step takes no epoch
        first, second = np.log(first), np.log(second)
    verdict = judge(first, second, limit=math.log(factor), side="below")
    estimate, low, high = (math.exp(value) for value in (verdict.estimate, verdict.low, verdict.high))
    return replace(verdict, estimate=estimate, low=low, high=high, limit=factor)


def judge_within(first: Sequence[float], second: Sequence[float], *, margin: float) -> Verdict:
    """Equivalence: first − second is to lie within ±margin of 0. Both one-sided tests decide (TOST)."""
    above, below = judge(first, second, limit=-margin), judge(first, second, limit=margin, side="below")
    word = max((above.word, below.word), key=_WORST.index)
    return replace(above, word=word, p=max(above.p, below.p), limit=margin, side="within")


def judge_contrast(
    samples: Samples, weights: Sequence[float], *, limit: float = 0.0, side: str = "above", power: float = math.nan
) -> Verdict:
    """The rule for Σ wᵢ · mean(sampleᵢ), by Welch's t: a contrast of several models, or the mean of one sample."""
    n = min(map(len, samples))
    if n == 0:
        return _not_trained(limit, side)
    estimate = contrast(samples, weights)
    half = quantile(BOTH, estimate.df) * estimate.standard_error
    t = (estimate.value - limit) / estimate.standard_error if estimate.standard_error > 0 else math.nan
    p = {"above": float(stdtr(estimate.df, -t)), "below": float(stdtr(estimate.df, t))}
    return _verdict(estimate.value, (estimate.value - half, estimate.value + half), p, n, limit, side, power)


def judge_share(successes: int, n: int, *, limit: float = 0.5, side: str = "above") -> Verdict:
    """The rule for the probability of success, given the number of successes in n independent runs."""
    if n == 0:
        return _not_trained(limit, side)
    alternatives = {"above": "greater", "below": "less"}
    p = {each: float(binomtest(successes, n, limit, word).pvalue) for each, word in alternatives.items()}
    ends = binomtest(successes, n).proportion_ci(BOTH, "exact")
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
    """The word, given the p-values of the tests towards both sides."""
    other = "below" if side == "above" else "above"
    if p[side] <= LEVEL + ROUNDING:
        word = REPRODUCED
    elif p[other] <= LEVEL + ROUNDING:
        word = CONTRADICTED
    else:
        word = SAME if (estimate > limit if side == "above" else estimate < limit) else OTHER
        word = NOT_TESTABLE if power < LEAST_POWER else word
    return Verdict(word, estimate, *ends, p[side], n, limit, side, power)


def _not_trained(limit: float, side: str) -> Verdict:
    return Verdict(NOT_TRAINED, math.nan, math.nan, math.nan, math.nan, 0, limit, side)


def _mann_whitney(first: NDArray, second: NDArray) -> dict[str, float]:
    """The exact p-values of first > second, "above", and of first < second, "below". Equal values share their mean rank,
    which SciPy's test allows only by drawing or listing every arrangement."""
    doubled = np.rint(2 * rankdata([*first, *second])).astype(int)
    ways, own = _rank_sums(tuple(doubled.tolist()), len(first)), doubled[: len(first)].sum()
    return {"above": float(ways[own:].sum() / ways.sum()), "below": float(ways[: own + 1].sum() / ways.sum())}


@functools.cache
def _rank_sums(ranks: tuple[int, ...], n: int) -> NDArray:
    """Counts the choices of n of these ranks that have the sum s, at index s."""
    ways = np.zeros((n + 1, sum(ranks) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    return ways[n]


def _hodges_lehmann(first: NDArray, second: NDArray) -> tuple[float, float, float]:
    """Lower bound, median and upper bound of first − second. What two infinite values differ by is 0 in the median, and
    unknown to the bounds."""
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
    """The largest k for which P(U ≤ k − 1) is at most the level, 0 where there is none.

    U counts the pairs of n and m runs of one distribution in which the first is larger.
    """
    ways = _rank_sums(tuple(range(1, n + m + 1)), n)[n * (n + 1) // 2 :]  # index U, the rank sum less its least value
    return int((np.cumsum(ways) / ways.sum() <= level + ROUNDING).sum())


@functools.cache
def power_of_ranks(distance: float, spreads: tuple[float, float], n: int, m: int, level: float = LEVEL) -> float:
    """The share of experiments in which the test of `judge` rejects at a level, where the true difference lies `distance` on
    the claim's side of the limit: simulated with n and m normal runs of these standard deviations."""
    rng = np.random.default_rng(0)
    first = distance + spreads[0] * rng.standard_normal((SIMULATED, n, 1))
    second = spreads[1] * rng.standard_normal((SIMULATED, 1, m))
    against = (first <= second).sum((1, 2))
    return float((against < critical_rank(n, m, level)).mean())


def power_of_contrast(distance: float, weights: Sequence[float], spreads: Sequence[float], sizes: Sequence[int]) -> float:
    """The share of experiments in which `judge_contrast` says "reproduced" at this distance, with these standard deviations
    and numbers of runs: noncentral t."""
    estimate = Estimate.of_spreads(0.0, weights, [spread**2 for spread in spreads], sizes)
    return float(1 - nctdtr(estimate.df, distance / estimate.standard_error, quantile(BOTH, estimate.df)))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: which of a family hold together, with a family-wise error of 5 %."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
