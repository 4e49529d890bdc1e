"""Summaries of runs by depth and six_blocks: shares of seeds, and means of those that train alone."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from pipeline import studies
from pipeline.benchmarks import measurements
from pipeline.config import records
from pipeline.core import files
from pipeline.core.files import ROOT
from pipeline.statistics.claims import Results
from pipeline.studies import comparison
from pipeline.studies.deep import depth, six_blocks
from pipeline.training.loop import Training
from pipeline.training.run import RUNS, Run
from tests.pipeline.mnist_files import write_mnist

LOSSES = {"osa_36": [0.4, 0.6], "osa_72": [0.7, 25.7, None], "osa_iso_72": []}  # None: it diverged


def tables(losses, epochs=1):
    runs = [
        {"name": name, "seed": seed, "status": "finished" if loss else "diverged", "train_loss": loss or math.nan}
        | {"test_accuracy": 0.9 - seed / 10 if loss else math.nan}
        for name, each in losses.items()
        for seed, loss in enumerate(each)
    ]
    runs.append({"name": "osa_iso_72", "seed": 0, "status": "missing", "train_loss": math.nan, "test_accuracy": math.nan})
    histories = [
        {"name": name, "seed": seed, "step": step, "epoch": step / 2, "train_loss": value}
        for name, each in losses.items()
        for seed, loss in enumerate(each)
        for step, value in enumerate((2.3, 1.9, loss or math.nan))
    ]
    return {"runs": pd.DataFrame(runs), "histories": pd.DataFrame(histories)}


def test_what_fails_is_never_averaged_with_what_trains():
    outcome = comparison.outcome(Results(tables(LOSSES)), "osa_72")
    assert (outcome["n"], outcome["trained"], outcome["missing"]) == (3, 1, 0)
    assert outcome["loss"].mean == 0.7 and outcome["accuracy"].mean == pytest.approx(90)
    assert outcome["failed_losses"][0] == 25.7 and math.isnan(outcome["failed_losses"][1])
    assert comparison.outcome(Results(tables(LOSSES)), "osa_36")["accuracy"].mean == pytest.approx(85)


def test_runs_that_are_not_there_are_not_counted(lab):
    found = depth.summarise(studies.settings("depth"), tables(LOSSES), lab)
    assert found["runs"]["osa_iso_72"]["n"] == 0 and found["runs"]["osa_72"]["depth"] == 72
    assert found["claims"]["osa_iso_trains_at_72"]["osa_iso_72"].word == "not trained"
    assert found["claims"]["osa_trains_at_72"]["osa_72"].estimate == pytest.approx(1 / 3)


def test_the_figure_has_a_line_for_each_outcome_and_labels_where_lines_end_together(lab):
    shallow, deep = depth.draw(studies.settings("depth"), tables(LOSSES), lab).axes
    assert [text.get_text() for text in shallow.texts] == ["independent, 36\n(n = 2)"]
    assert sorted(text.get_text()[-7:] for text in deep.texts) == ["(n = 1)", "(n = 2)"], "72 that train, 72 that fail"
    for axes in (shallow, deep):
        ends = {line.get_xdata()[-1] for line in axes.lines if not line.get_label().startswith("_")}
        assert len(ends) == 1, "no label lies over a line that goes on"
    assert depth.draw(studies.settings("depth"), tables({}), lab) is None


@pytest.mark.parametrize("study", ["depth", "six_blocks", "long_sequences"])
def test_every_committed_run_is_in_a_list(study):
    requests = [request for _, request in studies.settings(study).requests()]
    listed = {Run(variant, seed, study, overrides).folder for variant, overrides, seed in requests}
    there = {path.parent.relative_to(ROOT) for path in (ROOT / RUNS / study).glob("*/*/record.json")}
    assert there and there <= listed


def test_six_blocks_stand_beside_table_2_and_the_most_accurate_comes_first(lab):
    runs = [("espa", 0, "finished", 0.05, 0.97), ("espa", 1, "finished", 0.05, 0.98), ("osa_iso", 0, "missing", None, None)]
    columns = ["name", "seed", "status", "train_loss", "test_accuracy"]
    own = {
        "runs": pd.DataFrame(runs, columns=columns),
        "histories": pd.DataFrame(columns=["name", "seed", "epoch", "train_loss"]),
    }
    table_2 = pd.DataFrame(
        [("vit", 0, "finished", 0.07, 0.99), ("osa_qr", 0, "finished", 0.07, 0.5)], columns=["variant", *columns[1:]]
    )
    lab.tables = {"runs": table_2}
    section = comparison.Settings.model_validate(
        {"reading": "first", "runs": {name: {"variant": name, "seeds": [0]} for name in ("espa", "osa_iso")}}
    )
    found = six_blocks.summarise(section, own, lab)
    assert [row["name"] for row in found["models"]] == ["vit", "espa"]
    assert found["models"][1]["accuracy"].mean == pytest.approx(97.5)


def test_tokens_are_watched_while_they_are_finite(lab):
    write_mnist(Path("data/mnist"), train=23, test=11)
    training = Training(lab.config("osa_iso", {"model": {"depth": 6}}), 0, torch.device("cpu"))
    rows = depth.watch(training)
    assert [row["block"] for row in rows] == [3, 6]
    assert all(1 <= row["rank"] <= 50 and -1 <= row["cosine"] <= 1 and row["q"] > 0 for row in rows)
    with torch.no_grad():
        training.model.blocks[4].mlp.fc1.weight.fill_(math.nan)
    assert [row["block"] for row in depth.watch(training)] == [3]


def test_tokens_are_those_after_the_last_block_before_training_and_after_it():
    rows = [
        {"name": "osa_iso_72", "seed": seed, "epoch": epoch, "block": block, "cosine": seed + block, "rank": 10.0 * epoch}
        for seed in (0, 1)
        for epoch in (0, 0.5, 1)
        for block in (36, 72)
    ]
    (found,) = depth.tokens(pd.DataFrame(rows).sample(frac=1, random_state=0))
    assert found == {"name": "osa_iso_72", "n": 2, "cosine": [72.5, 72.5], "rank": [0, 10]}


def test_a_step_is_shown_for_each_machine_that_timed_it(lab):
    folder = measurements.BENCHMARKS / "a-machine"
    files.write_csv(folder / "depth.csv", pd.DataFrame({"model": ["osa_iso", "vit"], "over_vit": [1.5, 1.0]}))
    environment = {"device": "cpu", "device_name": "A processor", "num_threads": 1}
    files.write_json(folder / "depth.json", {"environment": environment, "depth": 5})
    records.seal(folder)
    (steps,) = depth.summarise(studies.settings("depth"), tables(LOSSES), lab)["steps"]
    assert steps == {"machine": "A processor, 1 thread", "depth": 5, "over_vit": {"osa_iso": 1.5, "vit": 1.0}}
