"""The tables hold every run that params.yaml lists, as training and evaluate left it, and statistics over the seeds."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest

from pipeline import tables
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.statistics import summarise
from tests.pipeline import synthetic


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A project with all its runs, measured once. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    synthetic.write_project(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        synthetic.measure()
    return folder


@pytest.fixture
def project(finished, tmp_path, monkeypatch):
    """A copy of it that a test may change."""
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / "project"))
    return tmp_path / "project"


def table(folder, name):
    return pd.read_csv(folder / "paper_outputs/tables" / f"{name}.csv")


def run_row(folder, variant, seed):
    runs = table(folder, "runs")
    return runs[(runs["variant"] == variant) & (runs["seed"] == seed)].iloc[0]


def test_statistics_by_hand():
    s = summarise([1.0, 2.0, 4.0, 9.0])
    half = 3.182446305 * math.sqrt(38 / 3) / 2  # t(0.975, 3) from a table
    assert (s.n, s.mean, s.min, s.max) == (4, 4.0, 1.0, 9.0)
    assert s.std == pytest.approx(math.sqrt(38 / 3))
    assert (s.low, s.high) == pytest.approx((4 - half, 4 + half), rel=1e-8)


def test_statistics_of_one_value_have_no_spread_and_of_none_no_mean():
    one, none = summarise([0.5]), summarise([])
    assert (one.n, one.mean, one.min, one.max) == (1, 0.5, 0.5, 0.5)
    assert all(map(math.isnan, (one.std, one.low, one.high)))
    assert none.n == 0 and all(map(math.isnan, (none.mean, none.std, none.low, none.min, none.max)))


def test_tables_hold_what_evaluate_measured(finished):
    measured = json.loads((finished / "paper_outputs/runs/table_2/vit_noskip/1/evaluation.json").read_text())
    row = run_row(finished, "vit_noskip", 1)
    assert (row["test_loss"], row["test_accuracy"]) == (measured["test_loss"], measured["test_accuracy"])
    mine = {
        name: table(finished, name).query("variant == 'vit_noskip' and seed == 1") for name in ("confusion", "per_class")
    }
    counts = mine["confusion"].pivot(index="label", columns="prediction", values="count")
    assert counts.to_numpy().tolist() == measured["confusion"]
    assert mine["per_class"].drop(columns=["variant", "seed"]).to_dict("records") == measured["per_class"]


def test_softmax_attention_has_no_orthogonality(finished):
    assert set(table(finished, "layers")["variant"]) == {"osa_qr", "osa_ns", "osa_exact"}
    assert len(table(finished, "layers")) == 3 * 3 * 3 * 2  # models, seeds, layers, heads
    assert table(finished, "layers").columns.tolist() == ["variant", "seed", *tables.MEASURED["layers"]]


def test_summary_is_over_the_runs(finished):
    accuracies = table(finished, "runs").query("variant == 'vit'")["test_accuracy"]
    row = table(finished, "summary").set_index("variant").loc["vit"]
    assert (row["n_finished"], row["n_diverged"], row["n_missing"]) == (3, 0, 0)
    assert row["test_accuracy_mean"] == pytest.approx(accuracies.mean(), rel=1e-5)
    assert row["test_accuracy_std"] == pytest.approx(accuracies.std(ddof=1), rel=1e-4)
    metrics = json.loads((finished / "paper_outputs/tables/summary.json").read_text())
    assert len(metrics) == 6 and metrics["vit"] == round(100 * row["test_accuracy_mean"], 2)


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


def test_wide_curves_have_a_column_for_each_variant(finished):
    wide = table(finished, "train_loss")
    assert wide.columns.tolist() == ["epoch", "osa_qr", "osa_ns", "vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact"]
    assert len(wide) == synthetic.EPOCHS * synthetic.POINTS + 1


def test_a_second_time_the_bytes_are_the_same(project):
    before = {path.name: path.read_bytes() for path in (project / "paper_outputs/tables").iterdir()}
    tables.main()
    assert {path.name: path.read_bytes() for path in (project / "paper_outputs/tables").iterdir()} == before


def test_runs_need_no_weights(project):
    before = (project / "paper_outputs/tables/layers.csv").read_bytes()
    shutil.rmtree("weights")
    tables.main()
    assert (project / "paper_outputs/tables/layers.csv").read_bytes() == before


def test_missing_and_unlisted_runs_are_named(project, capsys):
    shutil.rmtree("paper_outputs/runs/table_2/vit/1")
    (project / "paper_outputs/runs/table_2/vit/2/evaluation.json").unlink()
    shutil.copytree("paper_outputs/runs/table_2/osa_qr/0", "paper_outputs/runs/table_2/osa_qr/5")
    tables.main()
    warnings = capsys.readouterr().err
    assert "2 of 18 runs of params.yaml are not trained and evaluated yet: vit/1, vit/2" in warnings
    assert "left out, because params.yaml does not list them: paper_outputs/runs/table_2/osa_qr/5" in warnings
    assert run_row(project, "vit", 1)["status"] == "missing"
    row = table(project, "summary").set_index("variant").loc["vit"]
    assert (row["n_finished"], row["n_missing"]) == (1, 2)
    assert math.isnan(row["test_accuracy_std"])
    assert 5 not in set(table(project, "runs")["seed"])


def test_whole_numbers_stay_whole_beside_missing_runs(project):
    shutil.rmtree("paper_outputs/runs/table_2/vit/1")
    tables.main()
    assert (
        f",{json.loads(Path('paper_outputs/runs/table_2/vit/0/metrics.json').read_text())['num_parameters']},"
        in (project / "paper_outputs/tables/runs.csv").read_text()
    )


def test_an_evaluation_that_measured_less_leaves_its_columns_empty(project):
    path = project / "paper_outputs/runs/table_2/osa_ns/1/evaluation.json"
    measured = json.loads(path.read_text())
    for row in measured["layers"]:
        del row["layer_kappa"]
    path.write_text(json.dumps(measured))
    tables.main()
    layers = table(project, "layers")
    without = (layers["variant"] == "osa_ns") & (layers["seed"] == 1)
    assert layers["layer_kappa"].isna().equals(without)


def test_no_run_at_all_is_an_error_with_the_remedy(project, capsys):
    shutil.rmtree("runs")
    with pytest.raises(SystemExit):
        tables.main()
    assert "`dvc repro`" in capsys.readouterr().err
    assert len(table(project, "runs")) == 18  # the results before are still there


def test_diverged_runs_are_counted_and_not_averaged(tmp_path, monkeypatch):
    synthetic.write_project(tmp_path, diverged={("vit", 2)})
    monkeypatch.chdir(tmp_path)
    synthetic.measure()
    row = table(tmp_path, "summary").set_index("variant").loc["vit"]
    finished = table(tmp_path, "runs").query("variant == 'vit' and seed != 2")
    assert (row["n_finished"], row["n_diverged"]) == (2, 1)
    assert row["test_accuracy_mean"] == pytest.approx(finished["test_accuracy"].mean(), rel=1e-5)
    diverged = run_row(tmp_path, "vit", 2)
    assert diverged["status"] == "diverged" and diverged["diverged_at_step"] == 117 * 7
    assert math.isnan(diverged["test_accuracy"]) and math.isnan(diverged["train_loss"])
    counts = table(tmp_path, "curves").query("variant == 'vit' and curve == 'test_loss'").set_index("step")["n"]
    assert counts[117 * 6] == 3 and counts[117 * 7] == 2  # its curve counts up to there
    assert ("vit", 2) not in set(zip(*table(tmp_path, "per_class")[["variant", "seed"]].to_numpy().T, strict=True))


def test_an_evaluation_of_an_earlier_training_is_refused(project, capsys):
    path = project / "paper_outputs/runs/table_2/osa_ns/1/metrics.json"
    path.write_text(path.read_text().replace("}", ' , "again": 1}'))
    with pytest.raises(SystemExit):
        tables.main()
    message = capsys.readouterr().err
    assert (
        "paper_outputs/runs/table_2/osa_ns/1/evaluation.json is of an earlier training: run `dvc repro evaluate@osa_ns-1`"
        in message
    )


def test_runs_without_a_single_finished_one_have_empty_tables(tmp_path, monkeypatch):
    def one_variant(raw):
        raw["run"]["variants"] = ["vit"]

    synthetic.write_project(tmp_path, one_variant, seeds=[0], diverged={("vit", 0)})
    monkeypatch.chdir(tmp_path)
    synthetic.measure()
    assert len(table(tmp_path, "per_class")) == 0 and len(table(tmp_path, "layers")) == 0
    assert table(tmp_path, "summary")["n_diverged"].tolist() == [1]


def test_find_runs_raises_a_user_error(tmp_path, monkeypatch):
    synthetic.write_params(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="none of the 18 runs"):
        tables.find_runs(params.load())
