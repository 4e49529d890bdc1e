"""Means, spreads and intervals, against SciPy."""

import math

import numpy as np
import pytest
from scipy.stats import t, ttest_ind

from pipeline.statistics.intervals import contrast, interval, one_more_run, summary_of

FIRST, SECOND = [96.1, 97.3, 95.0, 98.2], [90.0, 91.0, 90.2]


def test_a_summary_of_many_values_and_of_too_few():
    summary = summary_of(FIRST)
    assert (summary.n, summary.mean, summary.std) == (4, pytest.approx(96.65), pytest.approx(np.std(FIRST, ddof=1)))
    low, high = t.interval(0.95, 3, loc=96.65, scale=np.std(FIRST, ddof=1) / 2)
    assert (summary.low, summary.high) == pytest.approx((low, high))
    assert summary_of([5.0]).mean == 5 and math.isnan(summary_of([5.0]).std) and math.isnan(summary_of([]).mean)


@pytest.mark.parametrize("equal", [False, True])
def test_the_interval_is_that_of_welch_or_of_the_pooled_test(equal):
    theirs = ttest_ind(FIRST, SECOND, equal_var=equal).confidence_interval(0.95)
    assert interval([FIRST, SECOND], (1, -1), equal_spread=equal) == pytest.approx((theirs.low, theirs.high))


def test_a_contrast_of_three_means():
    samples, weights = [[97.0, 97.2, 97.4], [95.0, 95.5, 96.0], [60.0, 66.0, 75.0]], (-1, 2, -1)
    estimate = contrast(samples, weights)
    each = [w**2 * np.var(sample, ddof=1) / 3 for w, sample in zip(weights, samples, strict=True)]
    assert estimate.value == pytest.approx(2 * 95.5 - 97.2 - 67)
    assert estimate.standard_error == pytest.approx(math.sqrt(sum(each)))
    assert estimate.df == pytest.approx(sum(each) ** 2 / sum(np.square(each) / 2))


@pytest.mark.parametrize("samples", [[[1.0], [2.0, 3.0]], [[1.0, 1.0], [2.0, 2.0]]])
def test_without_a_spread_there_is_an_estimate_and_no_interval(samples):
    assert math.isfinite(contrast(samples, (1, -1)).value)
    assert all(map(math.isnan, interval(samples, (1, -1))))


def test_one_more_run_is_expected_around_the_mean():
    half = t.ppf(0.975, 3) * np.std(FIRST, ddof=1) * math.sqrt(1 + 1 / 4)
    assert one_more_run(FIRST) == pytest.approx((96.65 - half, 96.65 + half))
    assert all(map(math.isnan, one_more_run([5.0])))
