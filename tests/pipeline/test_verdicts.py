"""The rule of a verdict on both sides of every limit, and how often it errs and sees."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_ind

from pipeline.verdicts import (
    CONTRADICTED,
    NOT_TESTABLE,
    NOT_TRAINED,
    OTHER,
    REPRODUCED,
    SAME,
    holm,
    judge,
    judge_share,
    judge_within,
)

BASE = [97.0, 97.1, 97.2]
HALF = 2.131847 * 0.1 * math.sqrt(2 / 3)  # t(0.95, 4) from a table, and the error of a difference of two such samples


def difference(mean: float, limit: float = 0.0, side: str = "above", **options):
    """A model with this mean beside BASE, both with s = 0.1 and n = 3."""
    return judge([[mean - 0.1, mean, mean + 0.1], BASE], (1, -1), limit=limit, side=side, **options)


@pytest.mark.parametrize(
    "distance, word",
    [
        (HALF + 1e-3, REPRODUCED),
        (HALF - 1e-3, SAME),
        (1e-3, SAME),
        (-1e-3, OTHER),
        (1e-3 - HALF, OTHER),
        (-1e-3 - HALF, CONTRADICTED),
    ],
)
@pytest.mark.parametrize("side, sign", [("above", 1), ("below", -1)])
def test_a_difference_on_both_sides_of_its_limit(distance, word, side, sign):
    verdict = difference(97.1 - 0.5 + sign * distance, limit=-0.5, side=side)
    assert verdict.word == word and verdict.n == 3
    assert (verdict.bound < -0.5) == ((word == REPRODUCED) == (side == "below"))


def test_bound_and_p_value_are_those_of_welchs_one_sided_test():
    first = [96.1, 97.3, 95.0, 98.2]
    verdict = judge([first, BASE], (1, -1), limit=0.0, side="above")
    theirs = ttest_ind(first, BASE, equal_var=False, alternative="greater")
    assert verdict.bound == pytest.approx(theirs.confidence_interval(0.95).low)
    assert verdict.p == pytest.approx(theirs.pvalue)


def test_a_single_run_or_none_decides_nothing():
    assert judge([[99.0], BASE], (1, -1), limit=0.0, side="above").word == SAME
    assert judge([[], BASE], (1, -1), limit=0.0, side="above").word == NOT_TRAINED
    assert judge([[99.0, 99.0], [97.0, 97.0]], (1, -1), limit=0.0, side="above").word == SAME  # no spread is known


def test_what_cannot_be_seen_is_not_testable_whatever_comes_out():
    assert difference(99.0, effect=0.05).word == NOT_TESTABLE
    verdict = difference(99.0, effect=2.0)
    assert verdict.word == REPRODUCED and verdict.power > 0.99


def test_power_is_how_often_the_rule_says_reproduced():
    rng, spread, effect = np.random.default_rng(0), 0.5, 1.0
    draws = rng.standard_normal((2000, 2, 5)) * spread + [[effect], [0]]
    words = [judge(draw, (1, -1), limit=0.0, side="above").word for draw in draws]
    sample = spread * np.array((-2, -1, 0, 1, 2)) / np.sqrt(2.5)
    power = judge([sample, sample], (1, -1), limit=0.0, side="above", effect=effect).power
    assert words.count(REPRODUCED) / 2000 == pytest.approx(power, abs=0.04)


@pytest.mark.parametrize(
    "successes, n, word", [(5, 5, REPRODUCED), (4, 4, SAME), (3, 5, SAME), (2, 5, OTHER), (0, 5, CONTRADICTED)]
)
def test_a_share_by_exact_bounds(successes, n, word):
    verdict = judge_share(successes, n)
    assert verdict.word == word
    assert verdict.bound == pytest.approx(binomtest(successes, n, alternative="greater").proportion_ci(0.95).low)


def test_a_share_may_have_to_lie_below():
    assert judge_share(0, 5, side="below").word == REPRODUCED and judge_share(5, 5, side="below").word == CONTRADICTED
    assert judge_share(0, 0).word == NOT_TRAINED


@pytest.mark.parametrize(
    "change, word",
    [(0.0, REPRODUCED), (0.8, REPRODUCED), (0.9, SAME), (1.1, OTHER), (1.3, CONTRADICTED), (-1.3, CONTRADICTED)],
)
def test_equivalence_needs_both_sides(change, word):
    assert judge_within([[value + change for value in BASE], BASE], (1, -1), margin=1.0).word == word


def test_holm_orders_a_family():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})


def test_words_for_claims_of_others():
    assert [difference(m, side="above").here for m in (99.0, 97.1, 90.0)] == ["so here", "open here", "not so here"]
