"""Verdicts on both sides of every threshold, from made-up runs with known answers; and the rules' age in git's history."""

import functools
import math
import os
import subprocess
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from ruamel.yaml import YAML

from pipeline import studies
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.lab import Lab
from pipeline.runs import Run
from pipeline.statistics import NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED, UNDECIDED
from pipeline.studies import CLAIM, OBSERVATION
from pipeline.studies._deep import read_claims
from pipeline.studies.paper import section_5, stability

ROOT = Path(__file__).parents[3]
PAPER = "pipeline/paper.yaml"
TEXT = {"title": "A title", "sentence": "a sentence", "place": "Section 5", "definition": "The first is better."}


def lab_of(claims, accuracies=None, curves=None, diverged=(), missing=()):
    """Runs with these accuracies in per cent, or these train loss curves, by variant and then by seed."""
    given = accuracies or curves or {}
    keys = [(variant, seed) for variant in given for seed in range(len(given[variant]))]
    status = ["diverged" if key in diverged else "missing" if key in missing else "finished" for key in keys]
    percent = [given[variant][seed] if accuracies else 0 for variant, seed in keys]
    runs = pd.DataFrame(keys, columns=["variant", "seed"]).assign(status=status, test_accuracy=np.array(percent) / 100)
    runs.loc[runs["status"] != "finished", "test_accuracy"] = np.nan
    rows = [
        {"variant": variant, "seed": seed, "epoch": epoch, "train_loss": loss, "test_loss": loss}
        for variant, seed in keys
        for epoch, loss in enumerate(curves[variant][seed] if curves else [])
    ]
    tables = {"runs": runs, "histories": pd.DataFrame(rows, columns=section_5.NO_HISTORIES.columns)}
    claims = {name: TEXT | claim for name, claim in claims.items()}
    return SimpleNamespace(label=str.upper, tables=tables, paper=SimpleNamespace(claims=claims))


LISTED = stability.Settings(seeds=list(range(6)))


def judge(claim, *runs, **more):
    """The finding of one claim, of which some are judged on Table 2's runs and some on runs of their own."""
    lab = lab_of({"a_claim": claim}, *runs, **more)
    tables, lab.tables = (lab.tables, {}) if claim["kind"] == "stability" else ({}, lab.tables)
    found = section_5.findings(None, tables, lab) + stability.findings(LISTED, tables, lab)
    (finding,) = (each for each in found if each.kind == CLAIM)
    return finding


def accuracy(tolerance=0.5, pairs=(("a", "b"),)):
    return {"kind": "accuracy", "compare": [list(pair) for pair in pairs], "tolerance_points": tolerance}


@pytest.mark.parametrize("mean, verdict", [(96.8, UNDECIDED), (96.9, SUPPORTED), (96.4, UNDECIDED), (96.3, NOT_SUPPORTED)])
def test_accuracy_on_both_sides_of_its_tolerance(mean, verdict):
    """The interval is ± 0.2267 about the difference to 97.1, which is to be above −0.5."""
    finding = judge(accuracy(), {"a": [mean - 0.1, mean, mean + 0.1], "b": [97.0, 97.1, 97.2]})
    (measure,) = finding.measures
    assert finding.verdict == measure.verdict == verdict
    assert (measure.value, measure.high - measure.low) == pytest.approx((mean - 97.1, 2 * 0.22669), abs=1e-4)
    assert (measure.what, measure.unit, measure.side, measure.limit, measure.n) == ("A − B", "points", "above", -0.5, 3)
    assert (finding.id, finding.title, finding.statement) == ("a_claim", "A title", "“a sentence”")
    assert finding.models == ("a", "b") and finding.rule.startswith("The first is better. Judged by")


def test_runs_are_no_pairs():
    """Far apart from seed to seed, and always one point above: another seed moves both models by much more."""
    finding = judge(accuracy(0), {"a": [90.0, 95.0, 99.0], "b": [89.0, 94.1, 98.0]})
    assert finding.verdict == UNDECIDED and finding.measures[0].high > 10


def test_notes_count_the_runs_and_say_how_many_would_decide():
    runs = {"a": [98.0, 98.4, 97.8, 98.2], "b": [97.7, 98.1, 97.7, 98.3]}
    (measure,) = judge(accuracy(0), runs, missing={("b", 2)}).measures
    assert measure.note.startswith("A n = 4; B n = 3, 1 missing; the interval contains the limit; about ")
    assert measure.note.endswith(" seeds would decide it")
    (measure,) = judge(accuracy(0), runs, diverged={("a", 1)}).measures
    assert measure.note == "A n = 3, 1 diverged; B n = 4; 1 of the runs diverged", "more seeds do not help"
    (measure,) = judge(accuracy(0), {"a": [98.0, 99.0], "b": [97.7, 98.1, 97.7]}).measures
    assert measure.note.endswith("2 runs, and fewer than 3 decide nothing"), "of two runs no spread is known to reckon with"


def test_a_claim_without_tolerance_says_what_becomes_of_equal_models():
    told = "of equal models it is undecided"
    assert told in judge(accuracy(0), {}).rule and told not in judge(accuracy(0.5), {}).rule


def test_verdicts_are_told_as_they_were_with_fewer_seeds():
    """The interval of A − B is 0.5 ± 2.5, 1.3, 0.9 and 0.7 with 3, 4, 5 and 6 seeds, to be above −0.5; B is far above C."""
    runs = {"a": [95.0, 97.0, 96.0, 96.0, 96.0, 96.0], "b": [95.5, 95.51, 95.49] * 2, "c": [80.0, 80.1] * 3}
    lab = lab_of({"first": accuracy(0.5), "second": accuracy(0, [("b", "c")])}, runs)
    *claims, fewer = section_5.findings(None, {}, lab)
    assert [claim.verdict for claim in claims] == [SUPPORTED, SUPPORTED] and fewer.kind == OBSERVATION
    assert fewer.table.columns == ["Claim", "First 3 seeds", "First 4 seeds", "First 5 seeds", "All 6"]
    assert [row[1:] for row in fewer.table.rows] == [[UNDECIDED] * 2 + [SUPPORTED] * 2, [SUPPORTED] * 4]
    assert [measure.value for measure in fewer.measures] == [1, 1, 0] and fewer.limitation == fewer.in_short
    assert fewer.in_short == (
        "With fewer than the 6 seeds 1 of 2 claims came out otherwise: “A title”, undecided with the first 3, undecided "
        "with the first 4."
    )


def test_without_a_change_or_without_more_than_three_seeds_there_is_little_to_tell():
    claims, runs = {"a_claim": accuracy(0)}, {"a": [97.2, 97.3, 97.2, 97.3], "b": [90.2, 90.3, 90.2, 90.3]}
    *_, fewer = section_5.findings(None, {}, lab_of(claims, runs))
    assert fewer.in_short == "With fewer than the 4 seeds no claim came out otherwise." and not fewer.limitation
    assert len(section_5.findings(None, {}, lab_of(claims, {name: own[:3] for name, own in runs.items()}))) == 1


def test_a_model_that_mostly_diverges_is_not_supported_by_the_runs_that_did_not():
    runs = {"a": [97.2, 97.25, 97.3, 0, 0, 0, 0, 0], "b": [97.0, 97.0, 97.05]}
    lost = {("a", seed) for seed in range(3, 8)}
    assert judge(accuracy(0), {"a": runs["a"][:3], "b": runs["b"]}).verdict == SUPPORTED
    assert judge(accuracy(0), runs, diverged=lost).verdict == UNDECIDED


def test_models_that_were_not_run_are_not_evaluated():
    finding = judge(accuracy(), {"a": [98.0, 98.1, 98.2]})
    assert finding.verdict == NOT_EVALUATED and finding.measures[0].note == "A n = 3; B n = 0; no run"
    lab = lab_of({"a_claim": accuracy(), "speed": SPEED, "drops": DROPS, "stable": STABLE})
    lab.tables = {}
    assert {finding.verdict for finding in section_5.findings(None, {}, lab)} == {NOT_EVALUATED}


def test_a_claim_about_two_models_needs_both():
    runs = {"a": [98.0, 98.1, 98.2], "b": [97.0, 97.1, 97.2], "c": [60.0, 60.1, 60.2]}
    assert judge(accuracy(pairs=(("a", "b"), ("a", "c"))), runs).verdict == SUPPORTED
    assert judge(accuracy(pairs=(("a", "b"), ("c", "a"))), runs).verdict == NOT_SUPPORTED
    assert judge(accuracy(pairs=(("a", "b"), ("a", "absent"))), runs).verdict == UNDECIDED


def test_two_pairs_need_more_against_them_than_one():
    runs = {"a": [97.0, 97.1, 97.2], "b": [97.25, 97.35, 97.45], "c": [90.0, 90.1, 90.2]}  # − 0.25 ± 0.227
    assert judge(accuracy(0), runs).verdict == NOT_SUPPORTED
    finding = judge(accuracy(0, (("a", "b"), ("a", "c"))), runs)
    assert finding.verdict == UNDECIDED and "not as one of 2 measures" in finding.measures[0].note


DROPS = {"kind": "drops", "models": ["a", "b", "c"]}


@pytest.mark.parametrize("last, verdict", [(80.0, SUPPORTED), (92.9, UNDECIDED), (94.0, NOT_SUPPORTED)])
def test_the_second_step_of_a_chain_against_the_first(last, verdict):
    runs = {"a": [96.9, 97.0, 97.1], "b": [94.9, 95.0, 95.1], "c": [last - 0.1, last, last + 0.1]}  # the first step costs 2
    finding = judge(DROPS, runs)
    assert finding.verdict == verdict and finding.measures[0].value == pytest.approx((95 - last) - 2)


SPEED = {"kind": "speed", "compare": [["a", "b"]], "of_training": 0.5, "at_most_factor": 1.5}


def halving(epochs_per_halving, epochs=8):
    return [2.0 * 0.5 ** (epoch / epochs_per_halving) for epoch in range(epochs + 1)]


def around(ratio, n=3):
    """Curves of n runs whose halving times have this geometric mean."""
    return [halving(ratio * 1.01 ** (seed - (n - 1) / 2)) for seed in range(n)]


@pytest.mark.parametrize("ratio, verdict", [(0.5, SUPPORTED), (1.45, SUPPORTED), (1.5, UNDECIDED), (1.56, NOT_SUPPORTED)])
def test_speed_on_both_sides_of_its_factor(ratio, verdict):
    (measure,) = judge(SPEED, curves={"a": around(ratio), "b": around(1)}).measures
    assert measure.verdict == verdict and measure.value == pytest.approx(ratio, rel=1e-4)
    assert (measure.what, measure.unit, measure.side, measure.limit) == ("A / B", "× the epochs", "below", 1.5)
    assert measure.low * measure.high == pytest.approx(measure.value**2, rel=1e-4), "symmetric in its logarithm"
    freedom_4 = 2.776445 * math.log(1.01) * math.sqrt(2 / 3)
    assert math.log(measure.high / measure.value) == pytest.approx(freedom_4, rel=1e-3)


@pytest.mark.parametrize("n, verdict", [(3, UNDECIDED), (6, NOT_SUPPORTED)])
def test_a_run_that_never_gets_there_makes_it_a_question_of_shares(n, verdict):
    (measure,) = judge(SPEED, curves={"a": around(20, n), "b": around(1, n)}).measures
    assert measure.verdict == verdict and measure.value == 0 and measure.side == "above" and measure.limit == 0.5
    assert f"{n} of {n} runs never get there" in measure.note


def test_of_the_runs_that_get_there_only_those_count_that_are_fast_enough():
    first = [halving(each) for each in (1, 1, 1, 1.6, 1.6, 20)]
    (measure,) = judge(SPEED, curves={"a": first, "b": around(1, 6)}).measures
    assert measure.value == 0.5 and measure.verdict == UNDECIDED and math.isfinite(measure.low)


def test_speed_is_measured_at_the_lowest_loss_and_not_at_a_bump():
    bump = [2.0, 1.0, 0.5, 0.25, 1.9, 0.2, 0.2, 0.2, 0.2]  # at epoch 4 it is back up; the lowest was at epoch 3
    finding = judge(SPEED, curves={"a": [halving(1)] * 3, "b": [bump] * 3})
    (measure,) = finding.measures
    assert measure.value == pytest.approx(1)
    assert measure.verdict == UNDECIDED and measure.note.endswith("tells no spread")


def test_the_target_is_the_geometric_mean_over_the_runs():
    curves = [pd.DataFrame({"epoch": range(9), "train_loss": halving(each)}) for each in (1, 2)]
    assert section_5.target_loss(curves, 0.5) == pytest.approx(2 * math.sqrt(0.5**4 * 0.5**2))


@pytest.mark.parametrize(
    "first, second, why",
    [
        ([halving(1)] * 3, [[2.3] * 9] * 3, "before any training"),  # the second learns nothing
        ([[0.01] * 9] * 3, [halving(1)] * 3, "before any training"),  # the first has nothing to learn
        ([halving(1)] * 3, [halving(1), halving(1), [1.0] * 9], "1 of 3 runs of the second model never come down"),
        ([halving(1)] * 3, [[math.nan] * 9] * 3, "no train loss"),
    ],
)
def test_speeds_that_cannot_be_compared_are_undecided(first, second, why):
    (measure,) = judge(SPEED, curves={"a": first, "b": second}).measures
    assert measure.verdict == UNDECIDED and math.isnan(measure.value) and why in measure.note and measure.n == 3


@pytest.mark.parametrize(
    "runs, verdict",
    [({"b": 3}, NOT_EVALUATED), ({"a": 2, "b": 3}, UNDECIDED), ({"a": 1}, NOT_EVALUATED), ({}, NOT_EVALUATED)],
)
def test_a_speed_without_a_model_is_not_evaluated_whatever_the_other_did(runs, verdict):
    """Of each model that is there one more run diverged."""
    curves = {model: [halving(1)] * n for model, n in runs.items()}
    (measure,) = judge(SPEED, curves=curves, diverged={(model, n) for model, n in runs.items()}).measures
    assert measure.verdict == verdict


@pytest.mark.parametrize(
    "loss, epoch",
    [(5.0, 0.0), (4.0, 0.0), (2.0, 0.5), (1.0, 1.0), (math.sqrt(0.5), 2.25), (0.5, 2.5), (0.24, math.inf)],
)
def test_epochs_to_a_loss_are_log_linear_between_points(loss, epoch):
    curve = pd.DataFrame({"epoch": [0.0, 1.0, 2.0, 3.0], "train_loss": [4.0, 1.0, 1.0, 0.25]})
    assert section_5.epochs_to_reach(curve, loss) == pytest.approx(epoch)


STABLE = {"kind": "stability", "models": ["a"], "at_most_rise": 2, "share": 0.5}
CALM, BUMP, SPIKE = [2.0, 1.0, 0.5], [2.0, 0.5, 0.9], [2.0, 0.5, 1.1]  # rises of 1, 1.8 and 2.2


@pytest.mark.parametrize(
    "curves, value, verdict",
    [
        ([CALM] * 5 + [BUMP], 1, SUPPORTED),
        ([CALM] * 5, 1, UNDECIDED),  # five in five may be chance
        ([CALM] * 5 + [SPIKE], 5 / 6, UNDECIDED),
        ([SPIKE] * 6, 0, NOT_SUPPORTED),
        ([CALM, [2.0, math.nan]], 0.5, UNDECIDED),
    ],
)
def test_stability_is_a_share_of_the_runs(curves, value, verdict):
    finding = judge(STABLE, curves={"a": curves})
    assert finding.verdict == verdict and finding.measures[0].value == pytest.approx(value)


def test_a_diverged_run_is_not_stable_and_is_what_is_counted():
    (measure,) = judge(STABLE, curves={"a": [CALM] * 6}, diverged={("a", seed) for seed in range(6)}).measures
    assert measure.verdict == NOT_SUPPORTED and measure.value == 0


def test_how_many_runs_would_tell_stability():
    (measure,) = judge(STABLE, curves={"a": [CALM, BUMP, CALM]}).measures
    assert measure.note == (
        "A n = 3; largest rise 1.8 × the lowest loss before; the interval contains the limit; about 6 seeds would decide it"
    )


@pytest.mark.parametrize("listed, told", [(5, "needs 6 runs or more that all agree, and 5 are listed"), (6, "")])
def test_runs_too_few_to_decide_stability_are_a_limitation(listed, told):
    reach = stability.reach(section_5.StabilityClaim(**TEXT, **STABLE), listed)
    assert told in reach and bool(reach) == bool(told)


def test_stability_without_a_run_is_not_evaluated():
    assert judge(STABLE, curves={"a": [CALM]}, missing={("a", 0)}).verdict == NOT_EVALUATED


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "accurate"}, "claims.a_claim has the unknown 'kind' 'accurate': write one of"),
        ({"tolerance": 1}, "claims.a_claim.tolerance is not a known key; did you mean 'tolerance_points'?"),
        ({"compare": [["a"]]}, "claims.a_claim.compare.0 should have 2 or more entries"),
        ({"definition": "below {limit}"}, "claims.a_claim: definition cannot be filled in ('limit')"),
    ],
)
def test_a_claim_that_is_not_as_its_rule_needs_it(change, message):
    with pytest.raises(UserError, match=r"^pipeline/paper\.yaml: ") as caught:
        judge(accuracy() | change)
    assert message in str(caught.value)


def test_a_factor_that_outlasts_training_is_refused():
    with pytest.raises(UserError, match="at_most_factor × of_training must be below 1"):
        judge(SPEED | {"at_most_factor": 2.0})


def test_the_papers_claims_have_rules_and_are_about_models_that_there_are(lab):
    claims = section_5.read_claims(lab.paper)
    assert {name for claim in claims.values() for name in claim.models} <= lab.params.variants.keys()
    assert all("{" not in claim.rule() for claim in claims.values())
    assert "at most 0.5 percentage points" in claims["osa_matches_vit"].rule()


def changed_rules(repository: Path, since: str, *keys: str) -> list[str]:
    """The commits after `since` that have something else under these keys than paper.yaml has now, or nothing."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=True).stdout

    def rule(text: str) -> object:
        return functools.reduce(lambda part, key: part.get(key, {}), keys, YAML(typ="safe").load(text))

    today = rule((repository / PAPER).read_text())
    lines = git("log", "--diff-filter=AM", "--format=%H %cI", "--", PAPER).splitlines()
    commits = [
        commit for commit, date in map(str.split, lines) if datetime.fromisoformat(date) > datetime.fromisoformat(since)
    ]
    return [commit for commit in commits if rule(git("show", f"{commit}:{PAPER}")) != today]


@pytest.fixture
def whole_history():
    probe = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if probe.stdout.strip() != "false":
        pytest.skip("needs git and the whole history")


@pytest.mark.usefixtures("whole_history")
def test_no_rule_has_changed_since_the_date_that_the_report_gives():
    assert changed_rules(ROOT, params.load_paper().rules_since, "claims") == []


def judged_runs(study: str) -> dict[tuple[str, ...], list[Run]]:
    """The runs of a study that a rule judges, by the rule's place in paper.yaml; all of them where rules stand together."""
    lab = Lab(study, params.load(), params.load_paper())
    module, settings = studies.module(study), lab.params.studies[study]
    if study in lab.paper.predictions:
        return {("predictions", study): [lab.run(*request) for request in module.trainings(settings, lab)]}
    wanted = module.wanted(settings, lab).items()
    return {
        ("deep_claims", name): [
            lab.run(*request) for (model, depth, _), request in wanted if model in claim.models and depth == claim.depth
        ]
        for name, claim in read_claims(lab.paper).items()
    }


@pytest.mark.usefixtures("whole_history")
@pytest.mark.parametrize("study", ["depth", "six_blocks", "penalties", "keeping"])
def test_no_rule_has_changed_since_the_first_run_that_it_judges(study, monkeypatch):
    monkeypatch.chdir(ROOT)
    judged = judged_runs(study)
    assert any(judged.values()), "every one of these has rules"
    for keys, runs in judged.items():
        starts = [record["started_at"] for run in runs if (record := run.record_if_there())]
        assert not starts or changed_rules(ROOT, min(starts), *keys) == [], keys


def test_a_rule_that_was_changed_later_is_noticed(tmp_path):
    def commit(day: int, tolerance: float) -> None:
        paper = tmp_path / PAPER
        paper.parent.mkdir(exist_ok=True)
        paper.write_text(f"claims: {{a: {{tolerance_points: {tolerance}}}}}\nday: {day}\n")
        date = f"2026-11-{day}T12:00:00+00:00"
        who = {
            f"GIT_{role}_{key}": value
            for role in ("AUTHOR", "COMMITTER")
            for key, value in (("NAME", "A"), ("EMAIL", "a@b.c"), ("DATE", date))
        }
        for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "paper"]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True, env={**os.environ, **who})

    for day, tolerance in ((20, 1), (22, 0.5), (23, 0.5)):
        commit(day, tolerance)
    assert changed_rules(tmp_path, "2026-11-22T00:00:00+00:00", "claims") == []
    assert len(changed_rules(tmp_path, "2026-11-19T00:00:00+00:00", "claims", "a")) == 1
    assert changed_rules(tmp_path, "2026-11-22T00:00:00+00:00", "claims", "added") == []
    commit(24, 2)
    assert len(changed_rules(tmp_path, "2026-11-22T00:00:00+00:00")) == 2, "both that had another tolerance"
