"""The rule of a verdict on both sides of every limit, and how often it errs and sees, against rules that do worse."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest, norm, t, ttest_ind, ttest_rel

from pipeline import statistics
from pipeline.statistics import NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED, UNDECIDED, judge, judge_share, judge_within

BASE = [97.0, 97.1, 97.2]


def difference(first, second, limit=0.0, side="above", **rule):
    return judge([first, second], (1, -1), limit=limit, side=side, **rule)


@pytest.mark.parametrize(
    "mean, verdict",  # beside 97.1, with s = 0.1 and n = 3 in both: the interval is ± t(0.975, 4) · 0.1 √(2/3) = ± 0.2267
    [(96.83, SUPPORTED), (96.82, UNDECIDED), (96.38, UNDECIDED), (96.37, NOT_SUPPORTED)],
)
def test_a_difference_on_both_sides_of_its_limit(mean, verdict):
    judged = difference([mean - 0.1, mean, mean + 0.1], BASE, limit=-0.5)
    assert judged.verdict == verdict and judged.n == 3
    assert judged.value == pytest.approx(mean - 97.1)
    half = 2.776445 * 0.1 * math.sqrt(2 / 3)  # t(0.975, 4) from a table
    assert (judged.value - judged.low, judged.high - judged.value) == pytest.approx((half, half), rel=1e-6)


def test_below_is_above_turned_round():
    above, below = difference(BASE, [96.0, 96.1, 96.3]), difference([96.0, 96.1, 96.3], BASE, side="below")
    assert (above.verdict, below.verdict) == (SUPPORTED, SUPPORTED)
    assert (above.low, above.high) == pytest.approx((-below.high, -below.low))


def test_the_interval_is_that_of_welch_or_of_the_pooled_test():
    first, second = [96.1, 97.3, 95.0, 98.2], [90.0, 91.0, 90.2]
    within = judge_within([first, second], (1, -1), margin=1)
    for judged, equal in ((difference(first, second), False), (within, True)):
        theirs = ttest_ind(first, second, equal_var=equal).confidence_interval(0.95)
        assert (judged.low, judged.high) == pytest.approx((theirs.low, theirs.high))


def test_a_contrast_of_three_means_with_its_spread():
    samples = [[97.0, 97.2, 97.4], [95.0, 95.5, 96.0], [60.0, 66.0, 75.0]]
    judged = judge(samples, (-1, 2, -1), limit=0, side="above")
    each = [w**2 * np.var(sample, ddof=1) / 3 for w, sample in zip((-1, 2, -1), samples, strict=True)]
    freedom = sum(each) ** 2 / sum(np.square(each) / 2)
    assert judged.value == pytest.approx(2 * 95.5 - 97.2 - 67)
    assert judged.high - judged.value == pytest.approx(t.ppf(0.975, freedom) * math.sqrt(sum(each)))


@pytest.mark.parametrize(
    "change, verdict", [(0.0, SUPPORTED), (0.77, SUPPORTED), (0.78, UNDECIDED), (-1.22, UNDECIDED), (-1.23, NOT_SUPPORTED)]
)
def test_a_change_on_both_sides_of_its_margin(change, verdict):
    changed = [value + change for value in BASE]
    assert judge_within([changed, BASE], (1, -1), margin=1).verdict == verdict


def test_one_run_of_a_choice_has_the_interval_of_one_more_run_and_decides_nothing():
    judged = judge_within([[90.0], BASE], (1, -1), margin=1)
    assert judged.verdict == UNDECIDED and judged.note == "1 run, and fewer than 3 decide nothing"
    assert judged.high - judged.value == pytest.approx(4.302653 * 0.1 * math.sqrt(1 + 1 / 3))  # t(0.975, 2) from a table
    low, high = statistics.one_more_run(BASE)
    assert (low, high) == pytest.approx((97.1 - 0.49682, 97.1 + 0.49682), abs=1e-4)


def test_other_runs_help_to_tell_the_spread_of_one_more():
    low, high = statistics.one_more_run([90.0], [BASE])
    assert high - 90 == pytest.approx(90 - low) and high - 90 == pytest.approx(4.302653 * 0.1 * math.sqrt(2))
    assert all(map(math.isnan, (*statistics.one_more_run([]), *statistics.one_more_run([90.0], [[]]))))


@pytest.mark.parametrize("n", [1, 2])
def test_fewer_than_three_runs_decide_nothing(n):
    assert difference([98.0, 98.1][:n], [90.0, 90.1, 90.2]).verdict == UNDECIDED
    assert difference([98.0, 98.1, 98.2], [90.0, 90.1, 90.2]).verdict == SUPPORTED
    assert judge_share(n, n, limit=0.01).verdict == UNDECIDED


def test_a_diverged_run_caps_a_verdict():
    """Those that did not diverge are the better ones: 8 of 10 lost and two good ones are no reason to believe."""
    for first in (BASE, [90.0, 90.1, 90.2]):
        judged = difference(first, [93.0, 93.1, 93.2], diverged=(1, 0))
        assert judged.verdict == UNDECIDED and judged.note == "1 of the runs diverged"
    assert judge_share(10, 10, diverged=1).verdict == UNDECIDED


def test_no_run_is_not_evaluated():
    assert difference([], BASE).verdict == judge_share(0, 0).verdict == NOT_EVALUATED
    diverged = difference([], BASE, diverged=(3, 0))
    assert diverged.verdict == UNDECIDED and diverged.note == "no run finished; 3 diverged", "which are runs"
    for rule in (difference, lambda first, second, **lost: judge_within([first, second], (1, -1), margin=1, **lost)):
        assert rule([], BASE, diverged=(0, 1)).verdict == NOT_EVALUATED, "the others have runs"
        assert rule([], [], diverged=(1, 2)).note == "no run finished; 3 diverged"


@pytest.mark.parametrize("rule, asked", [(judge, {"limit": 0, "side": "above"}), (judge_within, {"margin": 1})])
def test_runs_that_do_not_differ_tell_no_spread_and_decide_nothing(rule, asked):
    """An interval without width would decide anything, whatever the rounding of the means."""
    judged = rule([[97.1] * 3, [11.35] * 3], (1, -1), **asked)
    assert judged.verdict == UNDECIDED and judged.note == "no run differs from another, which tells no spread"
    assert math.isnan(judged.low) and judged.value == pytest.approx(85.75)


def test_a_model_that_always_scores_the_same_is_compared_by_the_spread_of_the_other():
    """As one does that has learnt to name one digit."""
    judged = difference([97.0, 97.1, 97.2], [11.35] * 3)
    assert judged.verdict == SUPPORTED and judged.high - judged.value == pytest.approx(4.302653 * 0.1 / math.sqrt(3))


def test_what_any_of_many_measures_may_refute_needs_more():
    against = [97.0, 97.1, 97.2], [97.3, 97.4, 97.5]  # − 0.3 ± 0.227
    assert difference(*against).verdict == NOT_SUPPORTED
    judged = difference(*against, family=17)
    assert judged.verdict == UNDECIDED and judged.note == "against it by itself, but not as one of 17 measures"
    assert judged.high < 0, "the interval that is shown is that of 95 %"
    assert difference(*reversed(against), family=17).verdict == SUPPORTED, "for it, all have to hold anyway"


@pytest.mark.parametrize(
    "successes, n, verdict",
    [(6, 6, SUPPORTED), (5, 5, UNDECIDED), (9, 10, SUPPORTED), (8, 10, UNDECIDED), (0, 6, NOT_SUPPORTED), (0, 5, UNDECIDED)],
)
def test_a_share_against_one_half(successes, n, verdict):
    judged = judge_share(successes, n)
    theirs = binomtest(successes, n).proportion_ci(0.95, method="exact")
    assert judged.verdict == verdict and (judged.low, judged.high) == pytest.approx((theirs.low, theirs.high))


def test_all_measures_must_be_supported_and_one_is_enough_against():
    assert statistics.combine([SUPPORTED, SUPPORTED]) == SUPPORTED
    assert statistics.combine([SUPPORTED, NOT_SUPPORTED, NOT_EVALUATED]) == NOT_SUPPORTED
    assert statistics.combine([SUPPORTED, NOT_EVALUATED]) == UNDECIDED
    assert statistics.combine([NOT_EVALUATED, NOT_EVALUATED]) == NOT_EVALUATED
    with pytest.raises(ValueError, match="needs a measure"):
        statistics.combine([])


@pytest.mark.parametrize("family", [1, 2])
@pytest.mark.parametrize("gap", [0.3, -0.3])
def test_the_seeds_that_are_needed_are_those_with_which_the_rule_would_decide(gap, family):
    samples, weights = [[97.0, 97.5, 98.0], [96.9, 97.5, 98.1]], (1, -1)
    needed = statistics.seeds_needed(samples, weights, limit=gap, side="above", family=family)

    def with_seeds(n):
        """Samples of n values with the same means and standard deviations."""
        scores = norm.ppf((np.arange(n) + 0.5) / n)
        scores = (scores - scores.mean()) / scores.std(ddof=1)
        return [np.mean(sample) + np.std(sample, ddof=1) * scores for sample in samples]

    verdicts = [judge(with_seeds(n), weights, limit=gap, side="above", family=family).verdict for n in (needed - 1, needed)]
    assert verdicts == [UNDECIDED, NOT_SUPPORTED if gap > 0 else SUPPORTED]


def test_seeds_that_cannot_be_told():
    assert statistics.seeds_needed([[1.0], [1.0, 2.0]], (1, -1), limit=0, side="above") is None
    assert statistics.seeds_needed([[1.0, 1.0], [2.0, 2.0]], (1, -1), limit=0, side="above") is None
    assert statistics.seeds_needed([[1.0, 2.0], [1.0, 2.0]], (1, -1), limit=0, side="above") is None
    assert statistics.runs_needed(1.0) == 6 and statistics.runs_needed(0.5) is None


@pytest.mark.parametrize("n, std, half", [(1, math.nan, math.nan), (3, 0.1, 4.302653 * 0.1 / math.sqrt(3))])
def test_a_summary_has_what_its_number_of_values_allows(n, std, half):
    summary = statistics.summarise([97.1, 97.0, 97.2][:n])
    assert (summary.n, summary.mean) == (n, pytest.approx(97.1))
    assert (summary.std, summary.high - summary.mean) == pytest.approx((std, half), nan_ok=True, rel=1e-6)
    assert math.isnan(statistics.summarise([]).mean)


# How often the rule errs where nothing is to be found, and what it sees where three standard deviations are, with the spread
# of one model; the rules that it replaced fail one or the other.

EXPERIMENTS = 4000
ERRORS = 0.05 + 3 * math.sqrt(0.05 * 0.95 / EXPERIMENTS)


def the_rule(first, second):
    return difference(first, second).verdict


def paired(first, second):
    """Seed by seed, as if the same seed made models of different blocks alike."""
    low, high = ttest_rel(first, second).confidence_interval(0.95)
    return SUPPORTED if low > 0 else NOT_SUPPORTED if high < 0 else UNDECIDED


def ranges(first, second):
    """A run is another if it is farther from one of the other model than those are from one another."""
    spread, gap = max(second) - min(second), first[0] - second[0]
    return UNDECIDED if abs(gap) <= spread else SUPPORTED if gap > 0 else NOT_SUPPORTED


def rates(rule, n, effect):
    """The shares of experiments in which the rule says supported and not supported."""
    numbers = np.random.default_rng(20260).normal(size=(EXPERIMENTS, 2, n))
    found = [rule((first + effect).tolist(), second.tolist()) for first, second in numbers]
    return found.count(SUPPORTED) / EXPERIMENTS, found.count(NOT_SUPPORTED) / EXPERIMENTS


def errs_at_most_as_often_as_it_says(rule):
    return all(sum(rates(rule, n, 0)) < ERRORS for n in (3, 10))


def sees_three_standard_deviations(rule):
    return rates(rule, 3, 3)[0] > 0.62 and rates(rule, 5, 2)[0] > 0.72


def test_the_rule_errs_at_most_as_often_as_it_says_and_sees_what_is_there():
    assert errs_at_most_as_often_as_it_says(the_rule)
    assert sees_three_standard_deviations(the_rule)


def test_these_two_demands_tell_the_rule_from_others(monkeypatch):
    monkeypatch.setitem(globals(), "EXPERIMENTS", 500)
    assert not errs_at_most_as_often_as_it_says(ranges)
    assert not sees_three_standard_deviations(paired)
