"""Studies that train: what they order is trained once and watched, what is not trained is not evaluated, and rules judge."""

import math

import pandas as pd
import pytest
import torch

from pipeline import runs
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.lab import Lab
from pipeline.runs import Run
from pipeline.statistics import NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED, UNDECIDED
from pipeline.studies import _trained
from pipeline.studies._trained import TrainedResults, at_end, predictions
from pipeline.studies.orthogonal import keeping, penalties
from tests.pipeline.trainings import training, write_data, write_params

MODULES = {"penalties": penalties, "keeping": keeping}
REFERENCES = {"osa_exact": [0.970, 0.972, 0.974], "vit": [0.968, 0.970, 0.972]}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A lab by the name of its study, of trainings of a second."""
    monkeypatch.chdir(tmp_path)
    write_params()
    write_data()
    paper = params.load_paper()
    small = params.load()
    recipe = paper.recipe.model_copy(update={"model": small.model, "train": small.train})

    def make(study: str) -> Lab:
        lab = Lab(study, small, paper.model_copy(update={"recipe": recipe}))
        rows = [(v, s, "finished", a) for v, each in REFERENCES.items() for s, a in enumerate(each)]
        lab.tables = {"runs": pd.DataFrame(rows, columns=["variant", "seed", "status", "test_accuracy"])}
        lab.is_tracked = False
        return lab

    return make


def findings(study: str, lab: Lab, tables) -> dict:
    return {each.id: each for each in MODULES[study].findings(MODULES[study].Settings(seeds=[0, 1, 2]), tables, lab)}


@pytest.mark.parametrize("study", MODULES)
def test_with_nothing_trained_nothing_is_evaluated_and_nothing_fails(bench, study, monkeypatch):
    lab = bench(study)
    monkeypatch.setattr(lab, "train", lambda *_: pytest.fail("trains"))
    tables = MODULES[study].measure(MODULES[study].Settings(seeds=[0, 1, 2]), lab)
    assert tables["histories"].empty and set(tables["runs"]["status"]) == {"missing"}
    assert (runs.FOLDER / study).is_dir() and (runs.WEIGHTS / study).is_dir()
    found = findings(study, lab, tables)
    ours = {name: each.verdict for name, each in found.items() if each.kind == "claim"}
    assert set(ours) == set(predictions(lab, study)) and set(ours.values()) == {NOT_EVALUATED}
    (outcome,) = (each for each in found.values() if each.table)
    assert {row[0] for row in outcome.table.rows} <= {"OSA (exact)", "ViT"}, "Table 2’s"
    named = {each.name for each in MODULES[study].every(MODULES[study].Settings(seeds=[0]))}
    listed = outcome.table.note.split("Not evaluated: ")[1].split("; ")  # a penalty with each λ
    assert sum(each.partition("λ = ")[2].count(", ") + 1 for each in listed) == len(named - {"vit_alone", "nonorm_alone"})
    assert all("It is still open." in each.remark for each in found.values() if each.kind == "claim")


@pytest.mark.parametrize("study", MODULES)
def test_what_is_trained_is_watched_at_every_point(bench, study):
    lab, settings = bench(study), MODULES[study].Settings(seeds=[0, 1, 2])
    lab.train(*MODULES[study].trainings(settings, lab)[0])
    tables = MODULES[study].measure(settings, lab)
    assert (tables["runs"]["status"] == "finished").sum() == 1
    watched, history = tables["watched"], tables["histories"]
    assert sorted(set(watched["epoch"])) == pytest.approx(sorted(history["epoch"])) and len(history) == 5
    assert set(at_end(watched)["epoch"]) == {2.0}
    found = findings(study, lab, tables)
    assert {each.verdict for each in found.values() if each.kind == "check"} == {"passes"}
    assert all(each.figure is not None for each in found.values() if each.caption)
    judged = {name: each.verdict for name, each in found.items() if each.kind == "claim"}
    assert {UNDECIDED, NOT_EVALUATED} >= set(judged.values()) and UNDECIDED in judged.values()


@pytest.mark.parametrize("study", MODULES)
def test_a_resumed_training_is_watched_as_one_that_was_not(bench, monkeypatch, study):
    lab = bench(study)
    variant, overrides, seed = MODULES[study].every(MODULES[study].Settings(seeds=[0]))[0].request
    run, config = lab.run(variant, overrides, seed), lab.config(variant, overrides)
    runs.train(run, config, track=False)
    whole = (run.folder / "watched.csv").read_bytes()

    class Killed(Exception):
        pass

    def killed(self):
        on_epoch(self)
        raise Killed

    epoch_ended = runs.Recorder.epoch_ended
    with monkeypatch.context() as patch:
        patch.setattr(runs.Recorder, "on_epoch", killed)
        with pytest.raises(Killed):
            runs.train(run, config, track=False)
    runs.train(run, config, track=False)
    assert (run.folder / "watched.csv").read_bytes() == whole and run.outputs[-2].name == "watched.csv"
    assert [path.name for path in Run("vit", 0).outputs] == ["0.pt", "history.csv", "metrics.json", "record.json"]


@pytest.mark.parametrize("study", MODULES)
def test_every_training_is_a_configuration_and_every_rule_is_about_models_that_there_are(bench, study):
    lab, module = bench(study), MODULES[study]
    every = module.every(module.Settings(seeds=[0, 1, 2]))
    assert len({lab.run(*each.request).folder for each in every}) == len(every)
    for variant, overrides, _ in (each.request for each in every):
        assert lab.config(variant, overrides) and params.parse_overrides(params.as_options(overrides)[1::2]) == overrides
    known = {each.name for each in every} | set(module.GROUPS) | set(lab.params.variants)
    for prediction in predictions(lab, study).values():
        assert set(prediction.rule.models) <= known and "{" not in prediction.rule.rule()


def test_what_is_kept_is_seen_and_what_is_not_has_no_error(bench):
    write_params(variants={"osa_exact": {"keep": "attention", "keep_by": "retraction"}})
    kept = pd.DataFrame(keeping.watch(training("osa_exact")))
    assert kept["error"].max() < 1e-5 and len(kept) == 2 * 3
    assert kept[["weight_kappa", "head_kappa"]].to_numpy() == pytest.approx(1, abs=1e-3), "as Section 4 draws each head"
    assert pd.DataFrame(keeping.watch(training("vit")))["error"].isna().all()
    changed = training("osa_exact")
    with torch.no_grad():
        changed.model.blocks[1].attention.value.weight[0] *= 1.1
    assert pd.DataFrame(keeping.watch(changed))["error"].min() > 0.1


def test_accuracy_under_noise_is_the_model_s_and_the_same_each_time(bench, monkeypatch):
    trained = training("vit")
    data = trained.data
    expected = (trained.model(data.test_images).argmax(-1) == data.test_labels).double().mean().item()
    monkeypatch.setattr(penalties, "NOISES", (0.0, 0.5))
    with torch.no_grad():
        first, second = penalties.under_noise(trained), penalties.under_noise(trained)
    assert first == second and first["accuracy_0"] == pytest.approx(expected) and 0 <= first["accuracy_0.5"] <= 1


def made_up(**accuracies: list[float]) -> dict[str, pd.DataFrame]:
    """The tables of runs with these accuracies, whose attention is 0.5 · their seed's number + 0.5."""
    rows = [(name, seed, "finished", each) for name, of in accuracies.items() for seed, each in enumerate(of)]
    table = pd.DataFrame(rows, columns=["variant", "seed", "status", "test_accuracy"])
    table = table.assign(test_loss=0.1, device="cpu", codes="c0de")
    watched = pd.concat([table.assign(epoch=epoch, layer=1, attention=table["test_accuracy"] * epoch) for epoch in (0, 1)])
    return {"runs": table, "watched": watched[["variant", "seed", "epoch", "layer", "attention"]]}


@pytest.mark.parametrize(
    "accuracies, verdict",  # beside 97 ± 0.2 of the reference
    [
        ([0.969, 0.971, 0.970], SUPPORTED),
        ([0.940, 0.942, 0.941], NOT_SUPPORTED),
        ([0.970, 0.971], UNDECIDED),
    ],
)
def test_a_prediction_is_judged_on_both_sides_of_its_margin(bench, accuracies, verdict):
    lab = bench("penalties")
    tables = made_up(**{penalties.FIRST[0].name: accuracies})
    tables["watched"] = tables["watched"][:0]
    finding = findings("penalties", lab, tables)["stated_weights_show_nothing"]
    assert finding.verdict == verdict
    came = "It is still open." if verdict == UNDECIDED else "It came out otherwise."
    assert finding.remark.startswith("Expected before the first run: undecided.") and finding.remark.endswith(came)


def test_what_is_trained_is_told_in_short_cell_by_cell(bench):
    cells = [penalties.FIRST[0], penalties.FIRST[2], penalties.Cell(penalties.BARE)]
    tables = made_up(**{cell.name: [0.95 + 0.01 * i, 0.97 + 0.01 * i] for i, cell in enumerate(cells)})
    seen = tables["watched"]["attention"]
    tables["watched"] = tables["watched"].assign(**dict.fromkeys(penalties.COLUMNS, seen) | {"tokens_rank": 2.0}, worst=0.1)
    found = findings("penalties", bench("penalties"), tables)
    assert found["penalties_dose"].in_short == "2 of 26 cells trained so far; by cell, ViT reaches 96.00 to 97.00%."
    by_depth = found["penalties_with_depth"]
    assert by_depth.table.rows[0] == ["ViT + VAR-III, λ = 1 × 10⁻⁶", *["0", "0.96"] * 3, "2", "2"]
    assert [row[0] for row in by_depth.table.rows][-1] == "ViT (no skip, no LN)" and len(by_depth.measures) == 3 * 8
    after = found["penalties_after"].table
    assert after.columns[8] == "Effective rank of X" and [row[8] for row in after.rows] == ["2"] * 3
    tables["runs"].loc[1, "status"] = "diverged"
    ended = findings("penalties", bench("penalties"), tables)["penalties_with_depth"]
    assert ended.table.rows[0][2] == "0.95", "where a run diverged is not after training"
    assert by_depth.in_short == "‖AᵀA − I‖²/(N − 1) is 0 before training and 0.96 to 0.98 after it, by cell."
    tables["watched"].loc[tables["watched"]["seed"] == 0, "tokens_rank"] = 0.9
    ranks = {row[8] for row in findings("penalties", bench("penalties"), tables)["penalties_after"].table.rows}
    assert ranks == {"–", "2"}, "an effective rank below 1 is none"
    kept = made_up(osa_kept=[0.96, 0.98], osa_joint=[0.95])
    kept["watched"] = kept["watched"][:0]
    found = findings("keeping", bench("keeping"), kept)
    assert {name for name in found if name.startswith("maps")} == {"maps_agree"} and len(found["maps_agree"].measures) == 4
    outcome = found["keeping_outcome"]
    assert outcome.in_short == f"2 of {len(keeping.RUNS)} models trained so far; by model, they reach 95.00 to 97.00%."


@pytest.mark.parametrize("study", MODULES)
def test_where_every_run_diverged_so_it_is_told(bench, study):
    names = [each.name for each in MODULES[study].every(MODULES[study].Settings(seeds=[0, 1, 2]))]
    tables = made_up(**{name: [math.nan] * 3 for name in names})
    tables["runs"]["status"] = "diverged"
    tables["watched"] = tables["watched"].assign(**dict.fromkeys(keeping.KAPPAS, 1.0), error=0.0, worst=0.1)
    found = findings(study, bench(study), tables)
    assert {each.verdict for each in found.values() if each.kind == "claim"} == {UNDECIDED}
    assert "trained so far, " in (told := next(each for each in found.values() if each.table).in_short)
    assert told.split(" ")[0] == told.split("so far, ")[1].split(" ")[0], "all of them diverged"
    assert {each.id for each in found.values() if each.kind == "check"}, "what was seen until then is checked"


@pytest.mark.parametrize(
    "accuracies, came",
    [
        ([0.969, 0.973, 0.971], "It came out so."),  # undecided, as expected
        ([0.969, 0.973], "It is still open."),
        ([0.969, 0.973, None], "It is still open."),
        ([0.991, 0.992, 0.993], "It came out otherwise."),
        ([], "It is still open."),
    ],
)
def test_what_is_expected_to_stay_undecided_comes_out_so_once_its_runs_are_there(bench, accuracies, came):
    tables = made_up(osa_kept=[math.nan if each is None else each for each in accuracies])
    tables["runs"].loc[tables["runs"]["test_accuracy"].isna(), "status"] = "diverged"
    tables["watched"] = tables["watched"][:0]
    finding = findings("keeping", bench("keeping"), tables)["keeping_helps"]
    assert "Expected before the first run: undecided." in finding.remark and finding.remark.endswith(came)


@pytest.mark.parametrize("values, verdict", [([0.5, 0.51, 0.52], SUPPORTED), ([0.99, 1.0, 1.01], NOT_SUPPORTED)])
def test_what_was_seen_is_judged_by_its_ratio(bench, values, verdict):
    lab, prediction = bench("penalties"), predictions(bench("penalties"), "penalties")["strong_weights_show"]
    tables = made_up(first=values, vit_alone=[1.0, 1.01, 0.99])
    found = TrainedResults(tables, lab, {}, {"vit_strong": ["first"]})
    judged = _trained.finding("strong_weights_show", prediction, found)
    assert judged.verdict == verdict
    (measure,) = judged.measures
    assert measure.value == pytest.approx(math.prod(values) ** (1 / 3), rel=1e-4) and measure.limit == 0.9


def test_runs_of_one_seed_are_one_run_of_their_group(bench):
    tables = made_up(a=[0.2, 0.4, 0.6], b=[0.4, 0.6], c=[0.9])
    tables["runs"].loc[3, ["status", "test_accuracy"]] = ["diverged", math.nan]
    tables["runs"].loc[len(tables["runs"])] = ["d", 0, "missing", math.nan, math.nan, "", ""]
    groups = {"all": ["a", "b", "c"], "last": ["a", "c"], "none": ["e"], "partly": ["a", "d"]}
    found = TrainedResults(tables, bench("penalties"), {}, groups)
    assert found.accuracies("partly") == pytest.approx([40, 60]), "one of two is no mean of two"
    assert found.accuracies("all") == pytest.approx([50, 60]) and found.diverged(["all", "last"]) == [1, 0]
    assert found.accuracies("last") == pytest.approx([55, 40, 60]) and found.accuracies("none") == []
    assert found.values("last", "attention") == pytest.approx([0.55, 0.4, 0.6])


def test_a_rule_that_does_not_read_is_refused(bench):
    lab = bench("keeping")
    raw = {"keeping": {"maps_agree": lab.paper.predictions["keeping"]["maps_agree"] | {"expected": "yes"}}}
    lab.paper = lab.paper.model_copy(update={"predictions": raw})
    with pytest.raises(UserError, match="maps_agree.expected"):
        predictions(lab, "keeping")
