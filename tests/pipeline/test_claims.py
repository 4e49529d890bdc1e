"""Verdicts on both sides of every threshold, from made-up runs with known answers."""

import math

import numpy as np
import pandas as pd
import pytest

from pipeline import claims
from pipeline.claims import NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED, UNDECIDED, Results
from pipeline.params import AccuracyClaim, DropsClaim, SpeedClaim, StabilityClaim

TEXT = {"title": "", "sentence": "", "place": "", "definition": ""}


def results(accuracies=None, curves=None, diverged=(), missing=()):
    """Runs with these accuracies in per cent, or these train loss curves, by variant and then by seed."""
    given = accuracies or curves
    keys = [(variant, seed) for variant in given for seed in range(len(given[variant]))]
    status = ["diverged" if key in diverged else "missing" if key in missing else "finished" for key in keys]
    percent = [given[variant][seed] if accuracies else 0 for variant, seed in keys]
    runs = pd.DataFrame(keys, columns=["variant", "seed"]).assign(status=status, test_accuracy=np.array(percent) / 100)
    runs.loc[runs["status"] != "finished", "test_accuracy"] = np.nan
    rows = [
        {"variant": variant, "seed": seed, "epoch": epoch, "train_loss": loss, "test_loss": loss}
        for variant, seed in keys
        if curves
        for epoch, loss in enumerate(curves[variant][seed])
    ]
    return Results(runs, pd.DataFrame(rows, columns=["variant", "seed", "epoch", "train_loss", "test_loss"]), 0.95)


def accuracy_claim(tolerance=0.5, pairs=(("a", "b"),)):
    return AccuracyClaim(kind="accuracy", compare=[list(pair) for pair in pairs], tolerance_points=tolerance, **TEXT)


@pytest.mark.parametrize(
    "first, verdict",
    [
        ([96.9, 97.0, 97.1], SUPPORTED),  # −0.1 ± 0.248 is all above −0.5
        ([96.6, 96.7, 96.8], UNDECIDED),  # −0.4 ± 0.248
        ([96.4, 96.5, 96.6], UNDECIDED),  # −0.6 ± 0.248
        ([96.1, 96.2, 96.3], NOT_SUPPORTED),  # −0.9 ± 0.248
    ],
)
def test_accuracy_on_both_sides_of_its_tolerance(first, verdict):
    found, (measure,) = claims.judge(accuracy_claim(), results({"a": first, "b": [97.1, 97.1, 97.1]}))
    assert found == measure.verdict == verdict
    half = 4.302653 * 0.1 / math.sqrt(3)  # t(0.975, 2) from a table
    assert (measure.value, measure.high - measure.value) == pytest.approx((np.mean(first) - 97.1, half), abs=1e-4)
    assert (measure.n, measure.limit, measure.side) == (3, -0.5, "above")


def test_seeds_are_compared_one_by_one():
    spread = {"a": [90.0, 95.0, 99.0], "b": [89.0, 94.1, 98.0]}  # far apart from seed to seed, always one point above
    verdict, (measure,) = claims.judge(accuracy_claim(0), results(spread))
    assert verdict == SUPPORTED and measure.value == pytest.approx((1 + 0.9 + 1) / 3, rel=1e-5)


@pytest.mark.parametrize("first, side", [(97.0, "for"), (96.0, "against")])
def test_one_seed_is_undecided_and_leans(first, side):
    verdict, (measure,) = claims.judge(accuracy_claim(), results({"a": [first], "b": [97.0]}))
    assert verdict == UNDECIDED and measure.note == f"one seed; the value speaks {side} it"


def test_diverged_and_missing_runs_are_left_out_and_counted():
    runs = {"a": [98.0, 98.1, 98.0, 98.1], "b": [97.0, 97.0, 97.1, 97.0]}
    _, (measure,) = claims.judge(accuracy_claim(), results(runs, diverged={("a", 1)}, missing={("b", 2)}))
    assert measure.n == 2 and measure.note == "2 of 4 seeds left out, diverged or missing"


def test_models_that_were_not_run_are_not_evaluated():
    verdict, (measure,) = claims.judge(accuracy_claim(), results({"a": [98.0, 98.1]}))
    assert verdict == NOT_EVALUATED and measure.n == 0


def test_a_claim_about_two_models_needs_both():
    runs = {"a": [98.0, 98.1], "b": [97.0, 97.1], "c": [60.0, 60.1]}
    assert claims.judge(accuracy_claim(pairs=(("a", "b"), ("a", "c"))), results(runs))[0] == SUPPORTED
    assert claims.judge(accuracy_claim(pairs=(("a", "b"), ("c", "a"))), results(runs))[0] == NOT_SUPPORTED
    assert claims.judge(accuracy_claim(pairs=(("a", "b"), ("a", "absent"))), results(runs))[0] == UNDECIDED


@pytest.mark.parametrize("last, verdict", [(80.0, SUPPORTED), (93.0, UNDECIDED), (94.0, NOT_SUPPORTED)])
def test_the_second_step_of_a_chain_against_the_first(last, verdict):
    runs = {"a": [97.0, 97.0], "b": [95.0, 95.0], "c": [last, last]}  # the first step costs 2
    found, (measure,) = claims.judge(DropsClaim(kind="drops", models=["a", "b", "c"], **TEXT), results(runs))
    assert found == verdict and measure.value == pytest.approx((95 - last) - 2)


def halving(epochs_per_halving, epochs=8):
    return [2.0 * 0.5 ** (epoch / epochs_per_halving) for epoch in range(epochs + 1)]


def speed(first, second, factor=1.5):
    claim = SpeedClaim(kind="speed", compare=[["a", "b"]], of_training=0.5, at_most_factor=factor, **TEXT)
    verdict, (measure,) = claims.judge(claim, results(curves={"a": [first, first], "b": [second, second]}))
    return verdict, measure


@pytest.mark.parametrize(
    "halving_time, ratio, verdict", [(0.5, 0.5, SUPPORTED), (1.45, 1.45, SUPPORTED), (1.55, 1.55, NOT_SUPPORTED)]
)
def test_speed_on_both_sides_of_its_factor(halving_time, ratio, verdict):
    found, measure = speed(halving(halving_time), halving(1))
    assert found == verdict and measure.value == pytest.approx(ratio, rel=1e-5) and measure.note == ""


def test_a_model_that_never_gets_there_counts_with_all_its_epochs():
    verdict, measure = speed(halving(20), halving(1))
    assert verdict == NOT_SUPPORTED and measure.value == 2  # eight epochs, where the other needed four
    assert measure.note == "2 of 2 runs never got there and count with all their epochs"


def test_speed_is_measured_at_the_lowest_loss_and_not_at_a_bump():
    second = [2.0, 1.0, 0.5, 0.25, 1.9, 0.2, 0.2, 0.2, 0.2]  # at epoch 4 it is back up; the lowest was at epoch 3
    _, measure = speed(halving(1), second)
    assert measure.value == pytest.approx(1)


def test_a_baseline_that_learns_nothing_gives_no_speed():
    verdict, measure = speed(halving(1), [2.3] * 9)
    assert verdict == NOT_EVALUATED and measure.n == 0


@pytest.mark.parametrize(
    "loss, epoch",
    [(5.0, 0.0), (4.0, 0.0), (2.0, 0.5), (1.0, 1.0), (math.sqrt(0.5), 2.25), (0.5, 2.5), (0.24, math.inf)],
)
def test_epochs_to_a_loss_are_log_linear_between_points(loss, epoch):
    curve = pd.DataFrame({"epoch": [0.0, 1.0, 2.0, 3.0], "train_loss": [4.0, 1.0, 1.0, 0.25]})
    assert claims.epochs_to_reach(curve, loss) == pytest.approx(epoch)


def stability(curves, **status):
    claim = StabilityClaim(kind="stability", models=["a"], at_most_rise=2, at_least_runs=2, **TEXT)
    verdict, (measure,) = claims.judge(claim, results(curves={"a": curves}, **status))
    return verdict, measure


CALM, BUMP, SPIKE = [2.0, 1.0, 0.5], [2.0, 0.5, 0.9], [2.0, 0.5, 1.1]  # rises of 1, 1.8 and 2.2


@pytest.mark.parametrize(
    "curves, verdict, rise",
    [
        ([CALM, BUMP], SUPPORTED, 1.8),
        ([CALM, SPIKE], NOT_SUPPORTED, 2.2),
        ([SPIKE], NOT_SUPPORTED, 2.2),  # one fault is enough
        ([CALM], UNDECIDED, 1.0),  # one run without a fault is not
        ([CALM, [2.0, math.nan]], NOT_SUPPORTED, 1.0),
    ],
)
def test_stability_on_both_sides_of_its_limit(curves, verdict, rise):
    found, measure = stability(curves)
    assert found == verdict and measure.value == pytest.approx(rise)


def test_a_diverged_run_is_not_stable():
    verdict, measure = stability([CALM, CALM, CALM], diverged={("a", 1)})
    assert verdict == NOT_SUPPORTED and measure.note == "1 of 3 runs diverged"


def test_stability_of_a_model_without_runs_is_not_evaluated():
    assert stability([CALM], missing={("a", 0)})[0] == NOT_EVALUATED
