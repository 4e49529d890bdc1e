"""The rule of a verdict on both sides of every limit, against SciPy's tests, and on the runs that were known before it."""

import csv
import math

import numpy as np
import pytest
from scipy.stats import PermutationMethod, binomtest, mannwhitneyu, ttest_ind

from pipeline.config import params
from pipeline.core import files
from pipeline.statistics.claims import Declared, read_claims, read_spreads
from pipeline.statistics.verdicts import (
    CONTRADICTED,
    NOT_TESTABLE,
    NOT_TRAINED,
    OPEN_OTHER,
    OPEN_SAME,
    REPRODUCED,
    critical_rank,
    holm,
    judge,
    judge_contrast,
    judge_ratio,
    judge_share,
    judge_within,
    power_of_contrast,
    power_of_ranks,
)
from pipeline.studies.paper import CLAIMS_FILE
from pipeline.studies.paper.section_5 import RULES_FILE

FIVE = [0.0, 0.1, 0.2, 0.3, 0.4]
INF = math.inf


def shifted(by: float) -> list[float]:
    return [value + by for value in FIVE]


@pytest.mark.parametrize(
    "by, word",
    [
        (0.5, REPRODUCED),
        (0.15, OPEN_SAME),
        (0.05, OPEN_SAME),
        (-0.05, OPEN_OTHER),
        (-0.15, OPEN_OTHER),
        (-0.5, CONTRADICTED),
    ],
)
@pytest.mark.parametrize("limit", [0.0, -0.5, 3.0])
def test_a_difference_on_both_sides_of_its_limit(by, word, limit):
    verdict = judge(shifted(limit + by), FIVE, limit=limit)
    assert verdict.word == word and verdict.n == 5 and verdict.estimate == pytest.approx(limit + by)
    assert (verdict.low > limit) == (word == REPRODUCED) and (verdict.high < limit) == (word == CONTRADICTED)
    mirrored = judge(FIVE, shifted(limit + by), limit=-limit, side="below")
    assert mirrored.word == word and mirrored.p == pytest.approx(verdict.p)


@pytest.mark.parametrize("n, m", [(3, 3), (5, 5), (4, 7), (2, 10)])
@pytest.mark.parametrize("ties", [False, True])
def test_p_values_are_scipys(n, m, ties):
    rng = np.random.default_rng(n)
    first, second = (rng.integers(0, 5, size).astype(float) if ties else rng.normal(size=size) for size in (n, m))
    method = PermutationMethod(n_resamples=10**6) if ties else "exact"  # as many as there are arrangements
    for side, alternative in (("above", "greater"), ("below", "less")):
        theirs = mannwhitneyu(first, second, alternative=alternative, method=method).pvalue
        assert judge(first, second, side=side).p == pytest.approx(theirs)


def test_the_bounds_are_the_differences_at_which_the_test_turns():
    first, second = np.random.default_rng(0).normal(size=(2, 5))
    verdict, differences = judge(first, second), np.sort(np.subtract.outer(first, second).ravel())
    assert (verdict.low, verdict.estimate, verdict.high) == (differences[4], differences[12], differences[-5])
    for bound, side, inside in ((verdict.low, "above", -1), (verdict.high, "below", 1)):
        assert judge(first, second, limit=bound + inside * 1e-6, side=side).word == REPRODUCED
        assert judge(first, second, limit=bound - inside * 1e-6, side=side).word != REPRODUCED


@pytest.mark.parametrize("n, m, rank", [(5, 5, 5), (3, 3, 1), (10, 10, 28), (2, 2, 0), (1, 19, 1)])
def test_critical_ranks_are_those_of_tables(n, m, rank):
    assert critical_rank(n, m) == critical_rank(m, n) == rank


def test_three_runs_against_three_decide_only_where_all_are_apart():
    assert judge([4.0, 5.0, 6.0], [1.0, 2.0, 3.0]).word == REPRODUCED
    assert judge([3.0, 5.0, 6.0], [1.0, 2.0, 4.0]).word == OPEN_SAME


def test_a_run_that_fails_counts_as_the_last_and_hides_nothing():
    assert judge([*shifted(1)[:4], -30.0], FIVE).word == OPEN_SAME  # one of five
    assert judge([*shifted(1), *shifted(2)[:4], -30.0], [*FIVE, *FIVE]).word == REPRODUCED  # one of ten
    assert judge(shifted(1), [-30.0, *FIVE[1:]]).estimate == pytest.approx(1.0)


def test_a_shift_by_a_limit_is_exact():
    assert judge([97.1 - 0.5, 97.2], [96.6, 97.0]).p == judge([96.6, 97.2], [96.6, 97.0]).p
    assert judge([0.1 + 0.2], [0.3]).p == judge([0.3], [0.1 + 0.2]).p == 1


def test_a_ratio_whose_runs_may_take_for_ever():
    slower = judge_ratio([2.0, 3.0, 4.0, 5.0, INF], [1.0, 1.1, 1.2, 1.3, 1.4], 1.5)
    assert slower.word == CONTRADICTED and math.isfinite(slower.estimate) and slower.high == INF
    assert judge_ratio([INF] * 5, [1.0, 1.1, 1.2, 1.3, 1.4], 1.5).word == CONTRADICTED
    assert judge_ratio([1.0, 1.1, 1.2, 1.3, 1.4], [INF] * 5, 0.5).word == REPRODUCED
    tied = judge_ratio([INF] * 5, [INF] * 5, 1.0)
    assert (tied.estimate, tied.low, tied.high, tied.p) == (1.0, 0.0, INF, 1.0)
    assert judge_ratio([0.0, 1.0, 2.0], [1.0, 2.0, 3.0], 1.0).word == OPEN_SAME  # there before the first step


def test_too_few_runs_decide_nothing():
    assert judge([99.0], [97.0, 97.1, 97.2]).word == OPEN_SAME
    assert judge([99.0, 99.1], [97.0, 97.1]).low == -INF
    assert judge([], [97.0]).word == judge_contrast([[], [97.0]], (1, -1)).word == NOT_TRAINED


def test_what_cannot_be_seen_is_not_testable_only_where_it_is_open():
    assert judge(shifted(0.05), FIVE, power=0.4).word == NOT_TESTABLE
    assert judge(shifted(0.05), FIVE, power=0.6).word == OPEN_SAME
    assert judge(shifted(0.5), FIVE, power=0.4).word == REPRODUCED
    assert judge(shifted(-0.5), FIVE, power=0.4).word == CONTRADICTED


def test_power_is_how_often_the_rule_says_reproduced():
    rng, spreads, distance = np.random.default_rng(1), (0.5, 0.2), 0.6
    draws = rng.standard_normal((2000, 2, 5)) * np.array(spreads)[:, None] + [[distance], [0]]
    seen = np.mean([judge(*draw).word == REPRODUCED for draw in draws])
    assert seen == pytest.approx(power_of_ranks(distance, spreads, 5, 5), abs=0.03)
    assert power_of_ranks(100.0, spreads, 2, 2) == 0  # no two runs can show it
    seen = np.mean([judge_contrast(draw, (1, -1)).word == REPRODUCED for draw in draws])
    assert seen == pytest.approx(power_of_contrast(distance, (1, -1), spreads, (5, 5)), abs=0.03)


def test_a_contrast_is_welchs_one_sided_test():
    first, second = [96.1, 97.3, 95.0, 98.2], [97.0, 97.1, 97.2]
    verdict = judge_contrast([first, second], (1, -1))
    theirs = ttest_ind(first, second, equal_var=False, alternative="greater")
    assert verdict.bound == pytest.approx(theirs.confidence_interval(0.95).low)
    assert verdict.p == pytest.approx(theirs.pvalue)
    assert judge_contrast([[99.0, 99.0], [97.0, 97.0]], (1, -1)).word == OPEN_SAME  # no spread is known


@pytest.mark.parametrize(
    "successes, n, word",
    [(5, 5, REPRODUCED), (4, 4, OPEN_SAME), (3, 5, OPEN_SAME), (2, 5, OPEN_OTHER), (0, 5, CONTRADICTED)],
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
    [(0.0, REPRODUCED), (0.5, REPRODUCED), (0.8, OPEN_SAME), (1.1, OPEN_OTHER), (1.5, CONTRADICTED), (-1.5, CONTRADICTED)],
)
def test_equivalence_needs_both_sides(change, word):
    assert judge_within(shifted(change), FIVE, margin=1.0).word == word


def test_holm_orders_a_family():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})


def test_words_for_claims_of_others():
    assert [judge(shifted(by), FIVE).here for by in (1.0, 0.0, -1.0)] == ["confirmed", "undecided", "not confirmed"]


def test_a_level_of_five_per_cent_holds_where_both_models_scatter_alike():
    rng = np.random.default_rng(0)
    errors = sum(judge(*rng.standard_normal((2, 5))).word == REPRODUCED for _ in range(2000))
    assert errors <= 2000 * 0.05 + 3 * math.sqrt(2000 * 0.05 * 0.95) and errors > 2000 * 0.03


def test_the_verdicts_of_the_known_seeds(known):
    declared, claims = Declared(params.load_paper().table_2, read_spreads(CLAIMS_FILE).accuracy), read_claims(CLAIMS_FILE)
    with RULES_FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 14
    for row in rows:
        assert claims[row["claim"]].judge(known, declared)[row["comparison"]].word == row["third"], row


@pytest.mark.parametrize(
    "claim, comparison, estimate, low, high",
    [
        ("qr_above_ns", "osa_qr_vs_osa_ns", 0.77, 0.48, 1.32),
        ("osa_beats_noskip", "osa_ns_vs_vit_noskip", 0.66, 0.23, 1.19),
        ("osa_matches_vit", "osa_ns_vs_vit", -0.30, -0.93, 0.02),
    ],
)
def test_the_estimates_of_the_known_seeds(known, claim, comparison, estimate, low, high):
    verdict = read_claims(CLAIMS_FILE)[claim].judge(known)[comparison]
    assert (verdict.estimate, verdict.low, verdict.high) == pytest.approx((estimate, low, high), abs=0.006)


def test_of_the_known_seeds_one_fails_to_start(known):
    failing = {name: set(range(10)) - set(known.starting(name)) for name in known.runs["name"].unique()}
    assert {name: seeds for name, seeds in failing.items() if seeds} == {"osa_ns": {5}}


def test_declared_spreads_are_those_of_the_recipe_to_be_confirmed():
    folder = files.ROOT / "paper_outputs/runs/recipes"
    changes = ["data.pixel_scaling=standard", "init.head=torch", "init.patch_embedding=torch"]
    changes += ["init.xavier_fused_qkv=true", "train.points_per_epoch=1"]
    for variant, spread in read_spreads(CLAIMS_FILE).accuracy.items():
        name = "+".join([variant, *changes])
        metrics = [files.read_json(path) for path in sorted((folder / name).glob("*/metrics.json"))]
        assert len(metrics) == 3
        digits = 1 if spread > 1 else 2
        assert round(float(np.std([100 * each["test_accuracy"] for each in metrics], ddof=1)), digits) == spread
