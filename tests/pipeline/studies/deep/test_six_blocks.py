"""The table beside Table 2's runs, and the claims about six blocks, from made-up runs."""

import math

import pandas as pd
import pytest

from pipeline.statistics import NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED
from pipeline.studies._deep import RUN
from pipeline.studies.deep import six_blocks
from pipeline.studies.deep.six_blocks import Settings, findings, measure, wanted
from pipeline.tools import pilot
from pipeline.training.loop import COLUMNS

SETTINGS = Settings(models=["vskipinit", "osa_shaped", "espa_skip"], seeds=[0, 1], choice_seeds=[])
DEPTH = 6


@pytest.fixture
def lab(lab, monkeypatch):
    lab.study = "six_blocks"
    recipe = lab.paper.recipe.model_copy(update={"model": lab.paper.recipe.model.model_copy(update={"depth": DEPTH})})
    monkeypatch.setattr(lab, "paper", lab.paper.model_copy(update={"recipe": recipe}))
    monkeypatch.setattr(lab, "params", lab.params.model_copy(update=dict(recipe)))
    return lab


def runs_of(accuracies: dict[str, list[float]], rates: dict[str, float], columns: list[str]) -> dict[str, pd.DataFrame]:
    """Runs with these accuracies, whose losses fall by a factor each epoch."""
    cells = [(model, seed, accuracy) for model, each in accuracies.items() for seed, accuracy in enumerate(each)]
    runs = [
        {"variant": model, "seed": seed, "depth": DEPTH, "status": "finished", "test_accuracy": accuracy}
        | {"train_loss": 0.1, "codes": "c0de", "device": "cpu"}
        for model, seed, accuracy in cells
    ]
    histories = [
        {"variant": model, "seed": seed, "depth": DEPTH, "epoch": epoch}
        | dict.fromkeys(("train_loss", "test_loss"), (2.3 + 0.01 * seed) * rates.get(model, 0.5) ** epoch)
        for model, seed, _ in cells
        for epoch in range(11)
    ]
    return {
        "runs": pd.DataFrame(runs, columns=[*columns, *RUN]),
        "histories": pd.DataFrame(histories, columns=[*columns, *COLUMNS]),
    }


def test_runs_are_wanted_seed_by_seed_and_osa_waits_for_the_pilot(lab, monkeypatch):
    assert list(wanted(SETTINGS, lab)) == [(m, DEPTH, seed) for seed in (0, 1) for m in ("vskipinit", "espa_skip")]
    monkeypatch.setattr(pilot, "found", lambda model, usual: {"osa_shaped": (3e-5, 1.0)}.get(model))
    found = wanted(SETTINGS, lab)
    assert found["osa_shaped", DEPTH, 1] == ("osa_shaped", {"variant": {"alpha_times_depth": 1.0}}, 1)
    assert found["vskipinit", DEPTH, 0] == ("vskipinit", {}, 0) and len(found) == 6
    assert set(measure(SETTINGS, lab)["runs"]["status"]) == {"missing"}


def test_each_choice_is_one_run_that_the_recipe_knows(lab):
    found = wanted(Settings(models=["espa", "uspa"], seeds=[], choice_seeds=[0]), lab)
    assert [name for name, *_ in found] == list(six_blocks.CHOICES)
    for model, changes, _ in found.values():
        assert lab.config(model, changes) != lab.config(model)
        lab.model(lab.config(model, changes), 0)


def test_what_a_choice_changes_stands_beside_its_model(lab):
    accuracies = {"espa": [0.96, 0.962, 0.964], "espa_norm": [0.952], "espa_gelu": [0.965]}
    tables = runs_of(accuracies | {"espa_small": [0.9]}, {}, ["variant", "depth", "seed"])
    tables["runs"].loc[tables["runs"]["variant"] == "espa_small", ["status", "test_accuracy"]] = ["diverged", math.nan]
    finding = findings(SETTINGS, tables, lab)[1]
    assert finding.in_short == (
        "3 of 11 choices trained so far, 1 of which diverged; they change the accuracy by −0.80 to +0.50 points, 1 of 1 as "
        "He et al. expect."
    )
    nothing = findings(SETTINGS, runs_of({"espa": [0.96]}, {}, ["variant", "depth", "seed"]), lab)[1]
    assert nothing.in_short == "None of 11 choices trained so far." and nothing.table is None
    choices = {row[1]: row[2:] for row in finding.table.rows}
    assert choices["LN"] == ["95.20", "96.00", "−0.80", "at most +0.5", "1"], "beside the run of the same seed"
    assert "No weight decay" not in choices and "E-SPA: No weight decay" in finding.table.note
    assert choices["W^Q and W^K small, not W^Q = 0"] == ["–", "–", "–", "within ±0.5", "0, 1 diverged"]


def test_side_by_side_with_the_runs_of_table_2(lab):
    lab.tables = runs_of({"vit": [0.97, 0.971, 0.972]}, {}, ["variant", "seed"])
    tables = runs_of({"espa_skip": [0.96, 0.962, 0.964]}, {"espa_skip": 0.45}, ["variant", "depth", "seed"])
    table, _, *claims = findings(SETTINGS, tables, lab)
    rows = {row[0].split("\n")[0]: row[1:] for row in table.table.rows}
    assert rows["ViT"][0] == "97.10 ± 0.10" and rows["E-SPA (normalised skip)"][0] == "96.20 ± 0.20"
    assert rows["V-SkipInit"] == ["–", "–", "–", "not evaluated"] and rows["ViT"][-1] == "3"
    other = lab.params.train.model_copy(update={"epochs": 1})
    lab.params = lab.params.model_copy(update={"train": other})  # than the recipe has, with which Table 2 is no reference
    assert {row[0].split("\n")[0]: row[1:] for row in findings(SETTINGS, tables, lab)[0].table.rows}["ViT"][0] == "–"
    assert (
        table.in_short == "1 of 3 models trained so far; the most accurate is E-SPA (normalised skip) with 96.20% (n = 3)."
    )
    verdicts = {claim.id: claim.verdict for claim in claims}
    assert verdicts["espa_skip_matches_default"] == SUPPORTED
    assert {verdicts[name] for name in ("espa_fastest", "osa_not_below_espa", "softmax_skip_needs_norm")} == {NOT_EVALUATED}


@pytest.mark.parametrize("rate, matches, needs_norm", [(0.5, SUPPORTED, NOT_SUPPORTED), (0.7, NOT_SUPPORTED, SUPPORTED)])
def test_softmax_with_normalised_skips_is_judged_both_ways(lab, rate, matches, needs_norm):
    """As fast as ViT, or half as fast."""
    lab.tables = runs_of({"vit": [0.97, 0.971, 0.972]}, {}, ["variant", "seed"])
    models = ("softmax_skip", "softmax_skip_nonorm")
    tables = runs_of(
        {key: [0.96, 0.962, 0.964] for key in models}, dict.fromkeys(models, rate), ["variant", "depth", "seed"]
    )
    verdicts = {claim.id: claim.verdict for claim in six_blocks.findings(SETTINGS, tables, lab)[1:]}
    assert verdicts["softmax_skip_matches_default"] == matches
    assert verdicts["softmax_skip_needs_norm"] == needs_norm
