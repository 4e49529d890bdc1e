"""Lists of runs with penalties and constraints: values watched in them, and summaries of synthetic runs."""

import math

import pandas as pd
import pytest
import torch

from osa.constrained.penalties import gram_penalty
from pipeline import studies
from pipeline.studies.orthogonal import keeping, penalties
from pipeline.training.loop import Training

EPOCHS = (0, 1)


def tables(settings, **changes):
    """Two epochs of every run, with these values watched at the end; `finished` names the runs that exist."""
    finished = changes.pop("finished", settings.runs)
    runs, histories, watched = [], [], []
    for name, (variant, _, seed) in settings.requests():
        row = {"name": name, "variant": variant, "seed": seed}
        status = "finished" if name in finished else "missing"
        runs.append(row | {"status": status, "test_accuracy": 0.9 + 0.01 * seed, "train_loss": 0.1, "test_loss": 0.1})
        if status == "finished":
            histories += [row | {"epoch": epoch, "train_loss": 2.3 - 2 * epoch} for epoch in EPOCHS]
            watched += [row | {"epoch": e, "layer": 1, "head": 0} | {k: v[e] for k, v in changes.items()} for e in EPOCHS]
    return {"runs": pd.DataFrame(runs), "histories": pd.DataFrame(histories), "watched": pd.DataFrame(watched)}


def test_penalties_are_rows_with_what_was_seen_after_training(lab):
    settings = studies.settings("penalties")
    seen = dict.fromkeys(penalties.SHOWN, (9.0, 0.5)) | {"worst": (0.2, 0.1)}
    made = tables(settings, finished=["vit_watched", "var_iii_1e_2"], **seen)
    summary = penalties.summarise(settings, made, lab)
    row = {each["name"]: each for each in summary["models"]}["var_iii_1e_2"]
    assert (row["penalty"], row["weight"], row["n"]) == ("VAR-III", 0.01, 3)
    assert row["accuracy"].mean == pytest.approx(91) and row["seen"]["attention"] == 0.5
    assert summary["bound"]["value"] == 0.2 and summary["bound"]["holds"]
    assert penalties.draw(settings, made, lab).axes
    made["watched"]["worst"] = 0.26
    assert not penalties.summarise(settings, made, lab)["bound"]["holds"]


def test_constraints_are_rows_with_condition_numbers_after_training(lab):
    settings = studies.settings("keeping")
    seen = dict.fromkeys(keeping.KAPPAS, (1.0, 7.0)) | {"error": (1e-7, 2e-7)}
    made = tables(settings, **seen)
    summary = keeping.summarise(settings, made, lab)
    assert summary["models"]["osa_kept"]["layer_kappa"] == 7 and summary["models"]["osa_kept"]["n"] == 3
    assert summary["orthonormal"]["value"] == 2e-7 and summary["orthonormal"]["holds"]
    assert keeping.draw(settings, made, lab).axes
    made["watched"]["error"] = 1e-4
    assert not keeping.summarise(settings, made, lab)["orthonormal"]["holds"]


@pytest.mark.parametrize("study", [penalties, keeping])
def test_without_runs_there_are_no_rows(study, lab):
    settings = studies.settings(study.__name__.rpartition(".")[2])
    made = {name: table for name, table in tables(settings, finished=()).items() if len(table)}
    summary = study.summarise(settings, made, lab)
    assert not summary["models"] and study.draw(settings, made, lab) is None


@pytest.fixture
def training(lab):
    return lambda **variant: Training(lab.config("osa_exact", {"variant": variant}), 0, torch.device("cpu"))


def test_penalties_watch_attention_and_weights(training):
    run = training(penalty="VAR-III", penalty_weight=1e-6)
    rows = penalties.watch(run)
    assert [row["layer"] for row in rows] == [*range(1, len(run.model.blocks) + 1)]
    mlp = run.model.blocks[0].mlp
    expected = gram_penalty(mlp.fc1.weight.double()) + gram_penalty(mlp.fc2.weight.double())
    assert rows[0]["mlp"] == pytest.approx(expected.item()) and rows[0]["attention"] < 1e-20
    assert 0 < rows[0]["worst"] < 0.25 and 0 <= rows[0]["accuracy_0.1"] <= 1


def test_keeping_watches_condition_numbers_and_errors(training):
    kept, free = keeping.watch(training(keep="attention", keep_by="retraction")), keeping.watch(training())
    assert all(row["error"] < 1e-5 for row in kept) and all(math.isnan(row["error"]) for row in free)
    assert max(row["head_kappa"] for row in kept) < 1.001
    joint = keeping.watch(training(joint_value_output=True))
    assert max(row["layer_kappa"] for row in joint) < 1.001 < min(row["layer_kappa"] for row in free)
