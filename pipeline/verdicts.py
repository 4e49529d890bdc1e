"""The one rule of a verdict. The study `verdicts` simulates how often it errs and what it can see.

A claim asks a number to lie above or below a limit. It is tested as superiority and non-inferiority are, one-sided at 5 %:

    reproduced              the one-sided 95 % bound lies on the claim's side of the limit
    contradicted            the one-sided 95 % bound of the other side lies wholly on the other side
    open, same direction    neither; the estimate lies on the claim's side
    open, other direction   neither; it does not
    not testable here       the power at the paper's own effect, with our spread and seeds, is below one half. Such a claim
                            is shown and never counted
    not trained             a sample has no run

A run that diverges is a failure and counts as one: as a guess in means of accuracies and losses, as a failure in shares.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import nctdtr, stdtr
from scipy.stats import binomtest

from pipeline.statistics import Estimate, Samples, contrast, quantile

REPRODUCED, CONTRADICTED = "reproduced", "contradicted"
SAME, OTHER = "open, same direction", "open, other direction"
NOT_TESTABLE, NOT_TRAINED = "not testable here", "not trained"
WORDS = (REPRODUCED, SAME, OTHER, CONTRADICTED, NOT_TESTABLE, NOT_TRAINED)
LEVEL = 0.05  # of each one-sided test
BOTH = 1 - 2 * LEVEL  # confidence of the two-sided interval whose ends are the one-sided bounds
LEAST_POWER = 0.5
_WORST = (REPRODUCED, SAME, OTHER, CONTRADICTED, NOT_TRAINED)  # last


@dataclass(frozen=True)
class Verdict:
    """What the rule says of one comparison.

    `low` to `high` is the two-sided 90 % interval, whose ends are the two one-sided 95 % bounds; `p` the one-sided p-value
    towards the claim, `n` the runs of the smallest sample, `power` that at the paper's effect, NaN where none is known.
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
        return {REPRODUCED: "so here", CONTRADICTED: "not so here", NOT_TRAINED: NOT_TRAINED}.get(self.word, "open here")

    @property
    def is_open(self) -> bool:
        return self.word in (SAME, OTHER)


def judge(samples: Samples, weights: Sequence[float], *, limit: float, side: str, effect: float | None = None) -> Verdict:
    """The rule for Σ wᵢ · mean(sampleᵢ), to lie "above" or "below" `limit`, by Welch's t.

    Args:
        samples: values of independent runs, one sequence for each model. Ratios are judged by their logarithms.
        weights: of the means, such as (1, −1) for a difference.
        effect: the paper's own value of the number, for the power.
    """
    estimate, n = contrast(samples, weights), min(map(len, samples))
    half = quantile(BOTH, estimate.freedom) * estimate.error
    sign = 1 if side == "above" else -1
    p = 1 - float(stdtr(estimate.freedom, sign * (estimate.value - limit) / estimate.error)) if half > 0 else math.nan
    power = math.nan if effect is None else power_of_mean(estimate, sign * (effect - limit))
    return _verdict(estimate.value, (estimate.value - half, estimate.value + half), p, n, limit, side, power)


def judge_share(successes: int, n: int, *, limit: float = 0.5, side: str = "above") -> Verdict:
    """The rule for the probability of success, given so many of n independent runs, by Clopper and Pearson's bounds."""
    if n == 0:
        return Verdict(NOT_TRAINED, math.nan, math.nan, math.nan, math.nan, 0, limit, side)
    test = binomtest(successes, n, limit, "greater" if side == "above" else "less")
    ends = binomtest(successes, n).proportion_ci(BOTH, "exact")
    return _verdict(successes / n, (float(ends.low), float(ends.high)), float(test.pvalue), n, limit, side)


def judge_within(samples: Samples, weights: Sequence[float], *, margin: float) -> Verdict:
    """Equivalence: Σ wᵢ · mean(sampleᵢ) is to lie within ±margin of 0. Both one-sided tests decide (TOST)."""
    above, below = (judge(samples, weights, limit=sign * margin, side=side) for sign, side in ((-1, "above"), (1, "below")))
    word = max((above.word, below.word), key=_WORST.index)
    return Verdict(word, above.estimate, above.low, above.high, max(above.p, below.p), above.n, margin, "within")


def _verdict(
    value: float, ends: tuple[float, float], p: float, n: int, limit: float, side: str, power: float = math.nan
) -> Verdict:
    (low, high), is_above = ends, side == "above"
    if n == 0:
        word = NOT_TRAINED
    elif power < LEAST_POWER:
        word = NOT_TESTABLE
    elif low > limit if is_above else high < limit:
        word = REPRODUCED
    elif high < limit if is_above else low > limit:
        word = CONTRADICTED
    else:
        word = SAME if (value > limit if is_above else value < limit) else OTHER
    return Verdict(word, value, low, high, p, n, limit, side, power)


def power_of_mean(estimate: Estimate, distance: float) -> float:
    """How likely `judge` is to say "reproduced" where the true value lies `distance` on the claim's side of the limit, with
    the spread and the numbers of runs that the estimate has: noncentral t."""
    if not estimate.error > 0:
        return math.nan
    t = quantile(BOTH, estimate.freedom)
    return float(1 - nctdtr(estimate.freedom, distance / estimate.error, t))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: which of a family hold together, with a family-wise error of 5 %."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
