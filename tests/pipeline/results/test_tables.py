"""The tables hold every run that params.yaml lists, as training and evaluate left it, and statistics over the seeds."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest

from pipeline.core import files
from pipeline.results import tables
from tests.pipeline import synthetic

FOLDER, RUNS, EVALUATIONS = (Path("paper_outputs", name) for name in ("tables", "runs/table_2", "evaluations"))
DIVERGED = ("vit", 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A project with all runs of two models, one of them diverged, measured once. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    synthetic.write_project(folder, lambda raw: raw["run"].update(variants=["vit", "osa_ns"]), diverged={DIVERGED})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        synthetic.measure()
    return folder


@pytest.fixture
def project(finished, tmp_path, monkeypatch):
    """A copy of it, as working directory, that a test may change."""
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / "project"))


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(FOLDER / f"{name}.csv")


def row(name: str, variant: str, seed: int | None = None) -> pd.Series:
    found = table(name)
    return found[(found["variant"] == variant) & (seed is None or found["seed"] == seed)].iloc[0]


@pytest.mark.slow
def test_tables_hold_what_evaluate_measured(project):
    measured = files.read_json(EVALUATIONS / "osa_ns/1/evaluation.json")
    of_run = row("runs", "osa_ns", 1)
    assert {name: of_run[name] for name in ("test_loss", "test_accuracy", "calibration_error")}.items() <= measured.items()
    own = {name: table(name).query("variant == 'osa_ns' and seed == 1") for name in tables.MEASURED}
    counts = own["confusion"].pivot(index="label", columns="prediction", values="count")
    assert counts.to_numpy().tolist() == measured["confusion"]
    mistakes = own["mistakes"].set_index("image")["prediction"]
    assert {str(image): prediction for image, prediction in mistakes.items()} == measured["mistakes"]
    assert mistakes.index.is_monotonic_increasing and len(mistakes) > 0
    for name in ("per_class", "layers"):
        expected = pd.DataFrame(measured[name])[tables.MEASURED[name]].astype(float)
        pd.testing.assert_frame_equal(own[name][expected.columns].astype(float).reset_index(drop=True), expected)
    assert set(table("layers")["variant"]) == {"osa_ns"}  # softmax attention has no orthogonality
    assert len(table("layers")) == 3 * 3 * 2  # seeds, layers, heads


def test_a_summary_is_over_the_runs_that_finished(project):
    accuracies = table("runs").query("variant == 'vit' and seed != 2")["test_accuracy"]
    summary = row("summary", "vit")
    assert summary[["n_finished", "n_diverged", "n_missing"]].tolist() == [2, 1, 0]
    assert summary["test_accuracy_mean"] == pytest.approx(accuracies.mean(), rel=1e-5)
    assert summary["test_accuracy_std"] == pytest.approx(accuracies.std(ddof=1), rel=1e-4)
    metrics = files.read_json(FOLDER / "test_accuracy/vit.json")
    percent = {key: round(100 * summary[f"test_accuracy_{name}"], 2) for key, name in (("mean", "mean"), ("sd", "std"))}
    assert metrics == pytest.approx(percent | {"n": 2}, abs=0.011)


def test_a_diverged_run_is_counted_and_its_curve_goes_up_to_there(project):
    of_run = row("runs", *DIVERGED)
    assert of_run["status"] == "diverged" and of_run["diverged_at_step"] == 117 * 7
    assert math.isnan(of_run["test_accuracy"]) and math.isnan(of_run["train_loss"])
    counts = table("curves").query("variant == 'vit' and curve == 'test_loss'").set_index("step")["n"]
    assert counts[117 * 6] == 3 and counts[117 * 7] == 2
    assert DIVERGED not in set(zip(*table("per_class")[["variant", "seed"]].to_numpy().T, strict=True))


def test_curves_by_hand():
    histories = pd.DataFrame({"seed": [0, 0, 1, 1], "step": [0, 1, 0, 1], "train_loss": [2.0, 1.0, 4.0, math.nan]})
    histories["epoch"] = histories["step"] / 7
    histories = histories.assign(variant="a", train_accuracy=0.5, test_loss=1.0, test_accuracy=0.5)
    curves = tables.summarise_curves(histories).query("curve == 'train_loss'").set_index("step")
    assert curves.loc[0, ["n", "mean", "min", "max"]].tolist() == [2, 3.0, 2.0, 4.0]
    assert curves.loc[0, "std"] == pytest.approx(math.sqrt(2))
    assert curves.loc[1, ["n", "mean"]].tolist() == [1, 1.0]  # the diverged seed has no value there
    wide = tables.one_column_per_variant(curves.reset_index(), "train_loss", ["b", "a"])
    assert wide.columns.tolist() == ["epoch", "b", "a"] and wide["a"].tolist() == [3.0, 1.0]


def test_a_second_time_and_without_weights_the_bytes_are_the_same(project):
    before = {path: path.read_bytes() for path in FOLDER.rglob("*.*")}
    shutil.rmtree("paper_outputs/weights")
    tables.main()
    assert {path: path.read_bytes() for path in FOLDER.rglob("*.*")} == before


def test_missing_and_unlisted_runs_are_named(project, capsys):
    shutil.rmtree(RUNS / "vit/1")
    (EVALUATIONS / "osa_ns/2/evaluation.json").unlink()
    shutil.copytree(RUNS / "osa_ns/0", RUNS / "osa_ns/5")
    tables.main()
    missing, unlisted = capsys.readouterr().err.splitlines()
    assert "vit/1, osa_ns/2" in missing and str(RUNS / "osa_ns/5") in unlisted
    assert row("runs", "vit", 1)["status"] == "missing" and 5 not in set(table("runs")["seed"])
    summary = row("summary", "vit")
    assert summary[["n_finished", "n_diverged", "n_missing"]].tolist() == [1, 1, 1]
    assert math.isnan(summary["test_accuracy_std"])
    text = (FOLDER / "runs.csv").read_text(encoding="utf-8")  # whole numbers stay whole next to empty fields
    assert f",{files.read_json(RUNS / 'vit/0/metrics.json')['num_parameters']}," in text


def test_an_evaluation_that_measured_less_leaves_its_columns_empty(project):
    path = EVALUATIONS / "osa_ns/1/evaluation.json"
    measured = files.read_json(path)
    for layer in measured["layers"]:
        del layer["layer_kappa"]
    path.write_text(json.dumps(measured), encoding="utf-8")
    tables.main()
    layers = table("layers")
    assert layers["layer_kappa"].isna().equals(layers["seed"] == 1)


def test_without_a_single_run_the_earlier_tables_stay(project, capsys):
    shutil.rmtree(RUNS)
    with pytest.raises(SystemExit):
        tables.main()
    assert str(RUNS) in (message := capsys.readouterr().err) and "dvc repro" in message
    assert len(table("runs")) == 6


def test_runs_without_a_finished_one_have_empty_tables(project):
    synthetic.write_params(Path(), lambda raw: raw["run"].update(variants=["vit"]), seeds=[2])
    tables.main()
    assert len(table("per_class")) == len(table("layers")) == 0
    assert table("summary")["n_diverged"].tolist() == [1]
