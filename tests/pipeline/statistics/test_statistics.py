"""Means, spreads and intervals, against SciPy."""

import math

import numpy as np
import pytest
from scipy.stats import t, ttest_ind

from pipeline.statistics.intervals import contrast, contrast_over_images, one_more_run, summary_of

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
    interval = contrast([FIRST, SECOND], (1, -1), equal_spread=equal).interval()
    assert interval == pytest.approx((theirs.low, theirs.high))


def test_a_contrast_of_three_means():
    samples, weights = [[97.0, 97.2, 97.4], [95.0, 95.5, 96.0], [60.0, 66.0, 75.0]], (-1, 2, -1)
    estimate = contrast(samples, weights)
    each = [w**2 * np.var(sample, ddof=1) / 3 for w, sample in zip(weights, samples, strict=True)]
    assert estimate.value == pytest.approx(2 * 95.5 - 97.2 - 67)
    assert estimate.standard_error == pytest.approx(math.sqrt(sum(each)))
    assert estimate.df == pytest.approx(sum(each) ** 2 / sum(np.square(each) / 2))


@pytest.mark.parametrize("samples", [[[1.0], [2.0, 3.0]], [[1.0, 1.0], [2.0, 2.0]]])
def test_without_a_spread_there_is_an_estimate_and_no_interval(samples):
    estimate = contrast(samples, (1, -1))
    assert math.isfinite(estimate.value) and all(map(math.isnan, estimate.interval()))


def test_an_error_over_runs_and_images_adds_up_the_parts_of_both():
    first = np.array([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]])
    second = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0]])
    estimate = contrast_over_images([first, second], (1, -1))
    parts = [np.var([0.75, 0.5], ddof=1) / 2, np.var([0.25, 0.75], ddof=1) / 2, np.var([0.0, 0.5, -0.5, 0.5], ddof=1) / 4]
    assert estimate.value == pytest.approx(0.625 - 0.5)
    assert estimate.standard_error == pytest.approx(math.sqrt(sum(parts)))
    assert estimate.df == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 + parts[1] ** 2 + parts[2] ** 2 / 3))
    assert all(map(math.isnan, contrast_over_images([np.ones((2, 3))] * 2, (1, -1)).interval()))


@pytest.mark.parametrize("of_runs, of_images", [(1.0, 0.3), (0.3, 3.0), (1.0, 3.0)])
def test_an_interval_over_runs_and_images_covers_the_truth(of_runs, of_images):
    """Runs and images have normal effects, those of the images on each model, and each pair an effect of its own."""
    rng, runs, images, experiments = np.random.default_rng(0), 5, 40, 1000
    covered = {"both": 0, "runs": 0}
    for _ in range(experiments):
        samples = [
            of_runs * rng.standard_normal((runs, 1))
            + of_images * rng.standard_normal(images)
            + 0.3 * rng.standard_normal((runs, images))
            for _ in range(2)
        ]
        ends = {"both": contrast_over_images(samples, (1, -1)).interval(0.9)}
        ends["runs"] = contrast([sample.mean(axis=1) for sample in samples], (1, -1)).interval(0.9)
        for name, (low, high) in ends.items():
            covered[name] += low < 0 < high
    assert 0.88 < covered["both"] / experiments < 0.95
    assert of_images < 1 or covered["runs"] / experiments < 0.86  # as it takes the images for all there are


def test_one_more_run_is_expected_around_the_mean():
    half = t.ppf(0.975, 3) * np.std(FIRST, ddof=1) * math.sqrt(1 + 1 / 4)
    assert one_more_run(FIRST) == pytest.approx((96.65 - half, 96.65 + half))
    assert all(map(math.isnan, one_more_run([5.0])))
