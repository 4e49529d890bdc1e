"""MLflow as a view of the run files: nothing doubled, nothing lost, and no training stopped."""

import json
import math
import os
import re
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
import urllib.request
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from pipeline import tracking
from pipeline.config import params, records
from pipeline.config.looks import look_of
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.tools import train
from pipeline.tracking import experiment, store, trainings, ui
from pipeline.tracking.sync import sync
from pipeline.tracking.views import views
from pipeline.training import HISTORY_COLUMNS, recorder
from pipeline.training import run as runs
from tests.pipeline import synthetic

PAPER = params.load_paper()
START = datetime.fromisoformat("2026-11-20T18:00:00+00:00")
COMMIT = "c0ffee" * 6 + "c0ff"

# MLflow 3.17 uses a loader strategy that SQLAlchemy 2.1 deprecates, and torch.export a buffer that is not writable.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint:UserWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def imports():
    """MLflow takes seconds to import: not when tests are collected."""
    global mlflow
    import mlflow


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty project with a space in its path, and no MLflow but its own."""
    folder = tmp_path / "a project"
    folder.mkdir()
    shutil.copy(ROOT / "params.yaml", folder)
    for key in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_ACTIVE_MODEL_ID", "DVC_ROOT", "PORT"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def empty_database(imports, tmp_path_factory):
    """MLflow takes seconds to make a database, and an instant to open one."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def database(folder, empty_database):
    shutil.copy(empty_database, folder)


class Run:
    """A made-up training of `variant` with `seed`, whose k-th point has the test accuracy `accuracies[k]`."""

    def __init__(self, variant, seed, accuracies, *, minutes=0, diverged=False, study="table_2", **head):
        self.accuracies, self.last = accuracies, len(accuracies) - 1
        self.run = runs.Run(variant, seed, study, {"init": head} if head else {})
        changes = {"init": {"head": "xavier"} | head, "train": {"epochs": max(1, self.last), "points_per_epoch": 1}}
        self.config = params.resolve(params.load(ROOT / "params.yaml"), variant, changes).model_dump(mode="json")
        self.start = START + timedelta(minutes=minutes, seconds=seed)
        self.scratch = self.run.scratch.with_name(f"{seed}-0123456789ab")
        points = [(117 * i, i, 2 - a, a / 2, 2.5 - a, a) for i, a in enumerate(accuracies)]
        self.curve = [dict(zip(HISTORY_COLUMNS, point, strict=True)) for point in points]
        if diverged:
            self.curve[-1] |= {"train_loss": math.nan, "test_loss": math.nan}

    def head(self, count, delay=0):
        """The part of the record that is this training's own, up to its first `count` points."""
        times = [round(self.start.timestamp() * 1000) + 1000 * i + delay for i in range(count)]
        times = {"started_at": self.start.isoformat(), "seconds": 300.0 + self.run.seed, "timestamps": times}
        return times | {"run_key": "0123456789abcdef", "data_sha256": "da7a" * 16, "images_per_second": 1000.0}

    def train(self, count, delay=0):
        """The first `count` points, as a training under way leaves them; `delay` as if some were measured again later."""
        files.write_text(self.scratch / "history.csv", recorder.history_csv(self.curve[:count]))
        under_way = {"status": "running", "finished_at": None} | self.head(count, delay)
        records.write_record(self.scratch, synthetic.record(self.config, self.run, **under_way))
        return self

    def finish(self):
        shutil.rmtree(self.scratch, ignore_errors=True)
        end = {"finished_at": (self.start + timedelta(minutes=5)).isoformat()}
        changes = self.head(len(self.curve)) | end
        synthetic.write_ended(self.run, self.config, self.curve, Path(), num_parameters=31, **changes)


def client():
    return mlflow.MlflowClient(store.address())


def by_name(**tags):
    """The runs with these tags by their name, the newest first."""
    (experiment,) = (each for each in client().search_experiments() if each.name != "Default")
    listed = client().search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    listed = [run for run in listed if tags.items() <= run.data.tags.items()]
    assert len({(run.info.run_name, run.info.start_time) for run in listed}) == len(listed)
    return {run.info.run_name: run for run in listed}


def curve(run, key):
    return sorted((metric.step, metric.value) for metric in client().get_metric_history(run.info.run_id, key))


def artifacts(run, folder=None):
    return [file.path for file in client().list_artifacts(run.info.run_id, folder)]


def logged_models():
    return client().search_logged_models([each.experiment_id for each in client().search_experiments()])


def contents():
    """Everything in the store that a second import could double."""
    tables = ("runs", "metrics", "params", "tags", "experiments", "logged_models", "model_versions")
    with sqlite3.connect("mlflow.db") as database:
        return {table: sorted(database.execute(f"select * from {table}"), key=str) for table in tables}


def until(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.3)


def test_sync_imports_each_run_once_with_statistics_on_its_parent(database, monkeypatch):
    accuracies = {0: [0.1, 0.5, 0.7], 1: [0.2, 0.3, 0.9], 2: [0.1, 0.8, 0.75]}
    for seed, values in accuracies.items():
        Run("osa_qr", seed, values).finish()
    Run("osa_qr", 3, [0.1, 0.3, 0.098], diverged=True).finish()
    Run("vit_noskip", 0, [0.1, 0.2], diverged=True).finish()

    assert sync() == (5, 5)
    before, searches = contents(), []
    search = mlflow.MlflowClient.search_runs
    monkeypatch.setattr(mlflow.MlflowClient, "search_runs", lambda *a, **b: searches.append(a) or search(*a, **b))
    assert sync() == (0, 5)
    assert contents() == before and len(searches) == 1

    shown = by_name()
    parent, child, diverged = (shown[name] for name in ("OSA (QR)", "OSA (QR), seed 1", "ViT (no skip), seed 0"))
    last = [values[-1] for values in accuracies.values()]
    assert curve(child, "test_accuracy") == [(117 * i, 100 * accuracy) for i, accuracy in enumerate(accuracies[1])]
    average, std = round(100 * statistics.mean(last), 2), round(100 * statistics.stdev(last), 2)  # without seed 3
    assert curve(parent, "test_accuracy") == [(0, average)]
    paper = PAPER.table_2["osa_qr"]
    expected = {"test_accuracy": average, "test_accuracy_std": std, "num_seeds": 3, "num_diverged": 1, "epoch": 2}
    expected |= {"paper": paper, "difference_to_paper": round(average - paper, 2), "seconds": 301}
    assert parent.data.metrics.items() >= expected.items()
    assert child.data.metrics["difference_to_paper"] == round(90 - paper, 2)
    for run in (parent, child):  # in this order MLflow shows them, and Compare opens on the first
        assert list(run.data.metrics)[:2] == ["test_accuracy", "test_loss"]
        assert run.data.tags["mlflow.runColor"] == look_of("osa_qr").colour
        assert run.data.tags["mlflow.user"] != "unknown"
        (data,) = run.inputs.dataset_inputs
        assert (data.dataset.name, data.dataset.digest) == ("mnist", ("da7a" * 16)[:36])
        assert "run" not in run.data.params and run.data.params["init.head"] == "xavier"
    assert child.data.params["seed"] == "1" and "seed" not in parent.data.params
    tags = {"mlflow.parentRunId": parent.info.run_id, "mlflow.source.git.commit": COMMIT, "mlflow.source.type": "LOCAL"}
    tags |= {"run": "table_2/osa_qr/1", "variant": "osa_qr", "seed": "1", "current": "true"}
    assert child.data.tags.items() >= tags.items()
    assert f"`{runs.Run('osa_qr', 1).command}`" in child.data.tags["mlflow.note.content"]
    assert (child.info.status, child.info.end_time - child.info.start_time) == ("FINISHED", 300_000)
    assert (parent.info.status, parent.info.end_time - parent.info.start_time) == ("FINISHED", 301_000)
    assert artifacts(child) == ["history.csv", "metrics.json", "record.json"]
    none = shown["ViT (no skip)"].data.metrics
    assert diverged.info.status == "FAILED" and (none["num_seeds"], none["num_diverged"]) == (0, 1)
    assert not {"test_accuracy", "test_accuracy_std", "difference_to_paper"} & none.keys()
    assert curve(diverged, "test_loss") == [(0, 2.4)] and "difference_to_paper" not in diverged.data.metrics


def test_every_model_of_table_2_has_figure_1_and_the_report_as_they_are_now(database):
    files.write_text("paper_outputs/report.html", "the report"), files.write_text("paper_outputs/figure_1.svg", "<svg/>")
    (
        Run("osa_qr", 0, [0.1, 0.5]).finish(),
        Run("vit", 0, [0.1, 0.5]).finish(),
        Run("vit", 0, [0.1, 0.5], study="depth").finish(),
    )
    sync()
    files.write_text("paper_outputs/report.html", "another")
    sync()
    for run in (by_name()["OSA (QR)"], by_name()["ViT"]):
        assert artifacts(run, "report") == ["report/figure_1.svg", "report/report.html"]
        assert Path(client().download_artifacts(run.info.run_id, "report/report.html")).read_bytes() == b"another"
    assert artifacts(by_name()["ViT, depth"]) == artifacts(by_name()["ViT, seed 0"], "report") == []


@pytest.fixture
def trained(folder, database):
    """Real weights of OSA (QR) and ViT with seed 0, of which the second has diverged."""

    def two_models_of_a_block(raw):
        raw["run"]["variants"] = ["osa_qr", "vit"]
        raw["model"]["depth"] = 1

    synthetic.write_project(folder, two_models_of_a_block, seeds=[0], diverged=[("vit", 0)])
    for path in folder.glob("paper_outputs/runs/*/*/*/record.json"):
        count = len((path.parent / "history.csv").read_text().splitlines()) - 1
        synthetic.rewrite(path.parent, timestamps=list(range(count)))


def test_models_are_logged_on_demand_under_the_names_of_their_runs(folder, trained):
    sync()
    assert not logged_models()
    sync(with_models=True)
    before = contents()
    sync(with_models=True)
    assert contents() == before
    run, images = by_name()["OSA (QR), seed 0"], torch.rand(5, 1, 28, 28)
    expected = runs.Run("osa_qr", 0).load_model(params.resolve(params.load(), "osa_qr"))(images)
    mlflow.set_tracking_uri(store.address())
    for address in (f"runs:/{run.info.run_id}/osa_qr-0", "models:/osa_qr/1", run.data.tags["model"]):
        torch.testing.assert_close(mlflow.pytorch.load_model(address)(images), expected)
    (model,) = logged_models()
    assert (model.name, model.status, model.source_run_id) == ("osa_qr-0", "READY", run.info.run_id)
    assert {metric.key: metric.value for metric in model.metrics}["test_loss"] == run.data.metrics["test_loss"]
    assert [each.name for each in client().search_registered_models()] == ["osa_qr"]  # the other diverged
    assert not list(folder.glob("mlartifacts/**/*.pth")) and "model" not in by_name()["ViT, seed 0"].data.tags


@pytest.mark.parametrize("call", ["log_model_artifacts", "log_outputs", "create_model_version"])
def test_a_model_whose_import_was_cut_short_is_logged_again_and_none_stays_pending(trained, monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, call, lambda *a, **b: sys.exit("killed"))
        with pytest.raises(SystemExit, match="killed"):
            sync(with_models=True)
    assert "PENDING" not in [model.status for model in logged_models()]
    if call == "log_outputs":  # as if it had been killed
        client().create_logged_model("1", "osa_qr-0", by_name()["OSA (QR), seed 0"].info.run_id)
    sync(with_models=True)
    assert [(model.name, model.status) for model in logged_models()] == [("osa_qr-0", "READY")]
    (version,) = client().search_model_versions()
    assert logged_models()[0].model_id in version.source


def test_the_newest_measurement_of_each_seed_counts(database):
    for seed, last in ((0, 0.5), (1, 0.7)):
        Run("vit", seed, [0.1, last]).finish()
    sync()
    Run("vit", 0, [0.1, 0.6], minutes=10).finish()  # `dvc repro -f`
    assert sync() == (1, 2)
    folder = runs.Run("vit", 0).folder
    files.write_text(folder / "watched.csv", "epoch\n")  # files that come later are added
    synthetic.rewrite(folder, files=records.digests(folder))
    assert sync() == (0, 2)
    explored = Run("vit", 0, [0.1, 0.9], minutes=20)
    explored.config["train"]["learning_rate"] = 0.01
    (folder / "watched.csv").unlink()  # as a training does that is not watched
    explored.finish(), sync()
    single = client().search_runs(["1"], "tags.level = 'single'")
    assert sorted((run.data.metrics["test_accuracy"], run.data.tags["current"]) for run in single) == [
        (50, "false"), (60, "false"), (70, "true"), (90, "true"),
    ]  # fmt: skip
    (watched,) = (run for run in single if run.data.metrics["test_accuracy"] == 60)
    assert "watched.csv" in artifacts(watched)
    parents = client().search_runs(["1"], "tags.level = 'mean'")
    assert {run.data.params.get("train.learning_rate"): run.data.metrics["test_accuracy"] for run in parents} == {
        "0.0003": 65, "0.01": 90,
    }  # fmt: skip


def test_a_run_that_fails_to_start_is_counted_and_left_out_of_the_mean(database):
    """As in Table 2, where one run that never leaves the guess would give a mean and a spread that describe no run."""
    for seed, accuracies in enumerate([[0.1, 0.5, 0.8], [0.1, 0.5, 0.9], [-0.4, -0.4, 0.6]]):
        Run("vit", seed, accuracies).finish()
    sync()
    metrics = by_name()["ViT"].data.metrics
    assert metrics.items() >= {"test_accuracy": 85, "num_seeds": 2, "num_not_starting": 1, "num_diverged": 0}.items()
    assert [by_name()[f"ViT, seed {seed}"].data.metrics["starts"] for seed in range(3)] == [1, 1, 0]


def test_current_are_the_runs_that_are_as_params_yaml_has_them(database):
    """Where a model has two configurations, Table 2 and MLflow's views show the same one, whichever was trained last."""
    listed, other = Run("vit", 0, [0.1, 0.5]), Run("vit", 1, [0.1, 0.7], minutes=10)
    listed.config = params.resolve(params.load(), "vit").model_dump(mode="json")
    other.config = params.resolve(params.load(), "vit", {"train": {"epochs": 3}}).model_dump(mode="json")
    other.finish(), sync()
    assert by_name()["ViT, seed 1"].data.tags["current"] == "true", "nothing else is there"
    listed.finish(), sync()
    assert [by_name()[f"ViT, seed {seed}"].data.tags["current"] for seed in (0, 1)] == ["true", "false"]
    parents = client().search_runs(["1"], "tags.level = 'mean'")
    assert {run.data.metrics["test_accuracy"]: run.data.tags["current"] for run in parents} == {50: "true", 70: "false"}
    shutil.rmtree(runs.Run("vit", 0).folder)
    assert sync() == (0, 1), "MLflow keeps the run whose files went"


def test_a_parent_stays_the_same_run_as_its_seeds_come(database):
    Run("vit", 0, [0.1, 0.5]).finish(), sync()
    parent = by_name()["ViT"].info.run_id
    client().set_tag(parent, "mlflow.note.content", "mine"), client().update_run(parent, name="my ViT")
    Run("vit", 1, [0.1, 0.7]).finish(), sync()
    assert (
        by_name()["my ViT"].data.metrics.items() >= {"test_accuracy": 60, "num_seeds": 2, "test_accuracy_std": 14.14}.items()
    )
    for seed in (0, 1):
        Run("vit", seed, [0.1, 0.1], minutes=10, diverged=True).finish()
    sync()
    last = by_name()["my ViT"]
    assert (last.info.run_id, last.data.tags["mlflow.note.content"]) == (parent, "mine")
    assert math.isnan(last.data.metrics["test_accuracy"]) and last.data.metrics["num_diverged"] == 2
    before = contents()
    assert sync() == (0, 2) and contents() == before


def test_a_sync_of_one_run_reads_its_own_family_alone(database, monkeypatch):
    for variant in ("vit", "vit_noskip", "osa_qr"):
        Run(variant, 0, [0.1, 0.5]).finish()
    Run("vit", 0, [0.1, 0.5], study="it's").finish(), sync()
    Run("vit", 1, [0.1, 0.7]).finish(), Run("vit", 1, [0.1, 0.7], study="it's").finish()
    read, search = [], mlflow.MlflowClient.search_runs
    monkeypatch.setattr(mlflow.MlflowClient, "search_runs", lambda *a, **b: read.append(search(*a, **b)) or read[-1])
    assert sync(["table_2/vit/1"]) == (1, 1)
    assert {run.data.tags["name"] for found in read for run in found} == {"vit"}
    assert {run.data.tags["study"] for found in read for run in found} == {"table_2"}
    assert sync(["it's/vit/1", "table_2/vit/1"]) == (1, 2)
    assert by_name()["ViT"].data.metrics["num_seeds"] == by_name()["ViT, it's"].data.metrics["num_seeds"] == 2


def test_a_sync_with_nothing_new_does_without_torch(database):
    Run("vit", 0, [0.1, 0.5]).finish(), sync()
    code = "import sys; from pipeline.tracking.sync import sync; print(sync(), 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "(0, 1) False\n"
    assert experiment.NAME == PAPER.title  # written twice for that reason


def test_views_show_the_models_and_their_seeds(database):
    Run("vit", 0, [0.1, 0.5]).finish(), Run("vit", 1, [0.1, 0.6]).finish()
    Run("osa_qr", 0, [0.1, 0.6]).finish()
    Run("vit", 0, [0.1, 0.7], study="left_open", head="zeros").finish()
    Run("vit", 0, [0.1, 0.8], minutes=10, study="depth").finish()
    sync()
    saved, shown, ages = client().get_experiment("1").tags, {}, {}
    for key, view in views().items():
        assert saved[f"mlflow.sharedViewState.{key}"] == view
        state, name = json.loads(json.loads(view)["state"]), json.loads(view)["name"]
        ages[name] = json.loads(view)["createdAt"]
        order = [f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"]
        listed = client().search_runs(["1"], state["searchFilter"], order_by=order)
        shown[name] = [run.info.run_name for run in listed]
        columns = {column.split("`")[1] for column in state["selectedColumns"]}
        assert columns <= {key for run in listed for key in run.data.metrics}
        assert {*state["selectedColumns"]} < {*state["columnOrder"]} == state["columnWidths"].keys()
        assert sum(state["columnWidths"].values()) <= 740
    scales = {chart["metricKey"]: chart["scaleType"] for chart in state["compareRunCharts"]}
    assert scales["train_loss"] == scales["test_loss"] == "log" and scales["test_accuracy"] == "linear"
    assert shown == {
        "Models": ["OSA (QR)", "ViT"],
        "Models, seed by seed": ["OSA (QR), seed 0", "ViT, seed 0", "ViT, seed 1"],
    }
    assert by_name()["ViT"].data.tags["mlflow.runColor"] == experiment.GREY  # Figure 1's ink is hidden on a dark page
    assert sorted(ages, key=ages.get, reverse=True) == list(shown)  # as MLflow's menu sorts them
    assert list(by_name(level="mean"))[:2] == ["ViT", "OSA (QR)"]  # the newest first, as without any view


def test_a_running_training_moves_survives_a_kill_and_ends(database):
    first, second = Run("vit", 0, [0.1, 0.4, 0.5, 0.6]).train(3), Run("vit", 1, [0.2, 0.3, 0.4, 0.5]).train(2)
    assert sync() == (2, 2)
    run = by_name()["ViT, seed 0"]
    assert run.info.status == "RUNNING" and len(curve(run, "epoch")) == 3 and run.data.tags["current"] == "true"
    assert run.data.tags["mlflow.parentRunId"] == by_name()["ViT"].info.run_id

    old = time.time() - 2 * trainings.LOST_SECONDS
    os.utime(first.scratch / "record.json", (old, old))  # the power failed long ago
    shutil.rmtree(second.scratch)
    sync()
    assert [by_name()[f"ViT, seed {seed}"].info.status for seed in (0, 1)] == ["KILLED", "KILLED"]
    assert by_name()["ViT, seed 0"].data.tags["current"] == "false"

    first.train(2), sync()  # resumed from an earlier epoch: the third point is measured again, later
    assert by_name()["ViT, seed 0"].info.status == "RUNNING"
    first.train(4, delay=60_000).finish(), second.finish()
    assert sync() == (0, 2)
    assert by_name()["ViT, seed 0"].info.run_id == run.info.run_id
    for seed, training in enumerate((first, second)):
        assert by_name()[f"ViT, seed {seed}"].info.status == "FINISHED"
        points = [(117 * i, 100 * a) for i, a in enumerate(training.accuracies)]
        assert curve(by_name()[f"ViT, seed {seed}"], "test_accuracy") == points
    assert by_name()["ViT"].data.metrics["test_accuracy"] == 55


def test_a_run_whose_files_are_another_s_now_was_killed(database):
    training = Run("vit", 0, [0.1, 0.4, 0.5]).train(2)
    sync()
    training.start += timedelta(minutes=1)
    training.train(1), sync()  # started again, and nothing says so any longer
    single = client().search_runs(["1"], "tags.variant = 'vit' and tags.level = 'single'")
    assert sorted(run.info.status for run in single) == ["KILLED", "RUNNING"]


@pytest.mark.parametrize("call", ["create_run", "log_inputs", "log_batch", "set_terminated"])
def test_an_import_cut_short_is_made_whole(database, monkeypatch, call):
    Run("vit", 0, [0.1, 0.5]).finish(), Run("vit", 1, [0.1, 0.7]).finish()
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, call, lambda *a, **b: sys.exit("killed"))
        with pytest.raises(SystemExit, match="killed"):
            sync()
    sync()
    assert set(by_name()) == {"ViT", "ViT, seed 0", "ViT, seed 1"}
    assert by_name()["ViT"].data.metrics["test_accuracy"] == 60
    for run in by_name().values():
        assert run.info.status == "FINISHED" and run.data.params["init.head"] == "xavier" and run.inputs.dataset_inputs
    assert curve(by_name()["ViT, seed 0"], "test_accuracy") == [(0, 10), (117, 50)]


def test_what_somebody_edited_in_mlflow_is_written_again(database):
    Run("vit", 0, [0.1, 0.5]).finish(), Run("vit", 1, [0.1, 0.7]).finish(), sync()
    before = {name: run.data for name, run in by_name().items()}
    ids = {name: run.info.run_id for name, run in by_name().items()}
    for key in ("study", "name", "seed", "configuration", "checksum", "variant"):
        client().delete_tag(ids["ViT, seed 0"], key)
    client().set_tag(ids["ViT, seed 1"], "seed", "word"), client().set_tag(ids["ViT, seed 1"], "mlflow.note.content", "mine")
    client().delete_tag(ids["ViT"], "level"), client().set_tag(ids["ViT"], "seed", "word")
    assert sync() == (0, 2)
    after = by_name()
    for name in before:
        ours = {key: value for key, value in before[name].tags.items() if not re.match("mlflow.(note|parent)", key)}
        assert after[name].data.tags.items() >= ours.items() and after[name].data.metrics == before[name].metrics
    assert after["ViT, seed 1"].data.tags["mlflow.note.content"] == "mine"
    client().delete_run(after["ViT, seed 0"].info.run_id), client().delete_run(after["ViT"].info.run_id)
    assert sync() == (1, 2) and set(by_name()) == set(before)
    shutil.rmtree("paper_outputs/runs")
    for key in ("variant", "configuration", "study"):
        client().delete_tag(by_name()["ViT, seed 1"].info.run_id, key)
    assert sync() == (0, 0)
    Run("vit", 0, [0.1, 0.5]).finish(), Run("vit", 1, [0.1, 0.7]).finish()
    client().rename_experiment("1", "mine")
    assert sync() == (2, 2)  # into an experiment of the right name


def test_parameters_that_are_none_stop_no_import(database):
    Run("vit", 0, [0.1, 0.2]).finish()
    files.write_text("params.yaml", "labels: {vit: [a]}\n")
    assert sync() == (1, 1) and set(by_name(level="single")) == {"vit, seed 0"}


def test_one_bad_record_is_one_sentence_and_the_rest_is_imported(database, capsys):
    for seed in range(9):
        Run("vit", seed, [0.1, 0.2]).finish()
    Run("vit", 0, [0.1, 0.2], study="it's").finish()
    folder = Path("paper_outputs/runs/table_2/vit")
    for seed, change in enumerate(({"study": "depth"}, {"seed": "two"}, {"files": {"history.csv": "0" * 64}}), start=1):
        synthetic.rewrite(folder / str(seed), **change)
    files.write_text(folder / "4/record.json", "{")
    (folder / "5/history.csv").unlink()
    files.write_text(folder / "6/metrics.json", "{}")
    (folder / "7/metrics.json").rename("metrics.json")  # the same bytes, behind a link
    (folder / "7/metrics.json").symlink_to(Path("metrics.json").resolve())
    whole = files.read_json(folder / "8/record.json")
    files.write_json(folder / "8/record.json", {key: value for key, value in whole.items() if key != "started_at"})
    assert sync() == (2, 10)
    named = re.findall(r"warning: (\S+) is not imported", capsys.readouterr().err)
    assert sorted(named) == [f"{folder}/{seed}/record.json" for seed in range(1, 9)]
    assert set(by_name(level="single")) == {"ViT, seed 0", "ViT, it's, seed 0"}


def test_a_store_that_cannot_be_used_says_why_and_is_never_to_be_deleted(database, monkeypatch):
    def error(uri=None):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri) if uri else monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with pytest.raises(UserError) as caught:
            sync()
        text = str(caught.value)
        assert "delete" not in text and "secret" not in text and "\n" not in text
        return text

    assert "create it" in error(f"sqlite:///{Path('typo/mlflow.db').absolute()}")
    for uri in ("postgresql+nothing://me:secret@127.0.0.1/runs", "sqlte:///mlflow.db", "ftp://me:s/e@secret@there"):
        assert "MLFLOW_TRACKING_URI" in error(uri)
    for uri in ("postgresql://me:secret@127.0.0.1/runs", "postgresql://127.0.0.1/runs?user=me&password=secret"):
        assert "psycopg" in error(uri)
    with sqlite3.connect("mlflow.db") as opened:
        opened.execute("update alembic_version set version_num = '451aebb31d03'")
    assert "mlflow db upgrade" in error()
    Path("mlflow.db").write_bytes(b"no database" * 100)
    assert "not a database" in error() and "move it away" in error()
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.1)
    with FileLock("mlflow.db.lock"):
        assert "wait" in error()


def test_a_training_that_has_ended_is_brought_alone_or_a_warning_says_why_not(folder, database, monkeypatch, capfd):
    for seed in (0, 1):
        Run("vit", seed, [0.1, 0.5]).finish()
    tracking.sync_quietly("table_2/vit/0")
    assert set(by_name()) == {"ViT", "ViT, seed 0"} and capfd.readouterr() == ("", "")
    tracking.sync_quietly(*map("table_2/vit/{}".format, (0, 1)))
    assert by_name()["ViT"].data.metrics["num_seeds"] == 2
    with monkeypatch.context() as patch:
        patch.setattr(tracking, "PATIENCE_SECONDS", 0.01)
        tracking.sync_quietly("table_2/vit/0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{server.getsockname()[1]}/")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracking.sync_quietly("table_2/vit/0")
    files.write_text("without/mlflow/__init__.py", "raise ImportError('no such thing')\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'without'}{os.pathsep}{ROOT}")
    tracking.sync_quietly("table_2/vit/0")
    slow, refused, without = capfd.readouterr().err.splitlines()
    assert all(line.startswith("warning: table_2/vit/0") for line in (slow, refused, without))
    assert "Connection refused" in refused and "secret" not in refused and "no such thing" in without


def test_two_syncs_at_once_on_a_fresh_machine_whose_path_needs_quoting(folder, monkeypatch):
    folder = folder.rename(folder.with_name("100% a?b#c é %20"))
    monkeypatch.chdir(folder)
    for seed in (0, 1):
        Run("vit", seed, [0.1, 0.5]).finish()
    command = [sys.executable, "-m", "pipeline.tracking", "sync"]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=600)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert sum(int(text.split()[0]) for text in printed) == 2
    assert set(by_name()) == {"ViT", "ViT, seed 0", "ViT, seed 1"} and curve(by_name()["ViT"], "num_seeds") == [(0, 2)]
    assert "history.csv" in artifacts(by_name()["ViT, seed 0"])
    expected = {"mlflow.db", "mlflow.db.lock", "mlartifacts", "paper_outputs", "params.yaml"}
    assert {path.name for path in folder.iterdir()} == expected and len(list(folder.parent.iterdir())) == 1


def test_the_store_is_at_the_root_of_the_repository_unless_the_user_says_otherwise(folder, monkeypatch):
    assert store.address() == f"sqlite:///{folder}/mlflow.db"
    monkeypatch.setenv("DVC_ROOT", str(folder.parent))  # as in an experiment, which DVC runs in a temporary copy
    assert store.address() == f"sqlite:///{folder.parent}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert store.address() == "http://127.0.0.1:9"


def test_artifacts_lie_beside_the_database_that_several_clones_share(folder, monkeypatch):
    shared = folder.parent / "shared"
    shared.mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{shared}/mlflow.db")
    for name, seed in (("first", 0), ("second", 1)):
        clone = folder.parent / name
        clone.mkdir(), monkeypatch.chdir(clone)
        Run("vit", seed, [0.1, 0.5]).finish(), sync()
    shutil.rmtree(folder.parent / "first")
    singles = client().search_runs(["1"], "tags.level = 'single'")
    assert len(singles) == 2 and all("history.csv" in artifacts(run) for run in singles)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert store.artifacts() == (folder.parent / "second/mlartifacts").as_uri()


def test_a_model_that_a_notebook_left_active_takes_no_metrics(folder, database, empty_database, monkeypatch):
    Run("vit", 0, [0.1, 0.5]).finish()
    mlflow.tracking.fluent._set_active_model_id("m-0123456789abcdef0123456789abcdef")  # as load_model does
    assert sync() == (1, 1)
    shutil.copy(empty_database, folder)
    for variable in ("MLFLOW_ACTIVE_MODEL_ID", "_MLFLOW_ACTIVE_MODEL_ID"):
        monkeypatch.setenv(variable, "m-0123456789abcdef0123456789abcdef")
    done = subprocess.run([sys.executable, "-m", "pipeline.tracking", "sync"], capture_output=True, text=True)
    assert done.returncode == 0 and "1 of 1" in done.stdout, done.stderr
    Path("mlflow.db").write_bytes(b"no database" * 100)
    sync_again = subprocess.run([sys.executable, "-m", "pipeline.tracking", "sync"], capture_output=True, text=True)
    assert "move it away" in sync_again.stderr and "MLFLOW_TRACKING_URI" not in sync_again.stderr


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_artifacts_move_along_with_their_clone(folder, monkeypatch, how):
    Run("vit", 0, [0.1, 0.5]).finish(), sync()
    other = folder.with_name("another place é")
    folder.rename(other) if how == "moved" else shutil.copytree(folder, other)
    monkeypatch.chdir(other)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    Run("vit", 1, [0.1, 0.5]).finish(), sync()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    for run in by_name(level="single").values():
        assert "history.csv" in artifacts(run) and run.info.artifact_uri.startswith(store.artifacts())
    contained = contents()
    sync()
    assert contents() == contained


SETTINGS = {
    "MLFLOW_STATIC_PREFIX": "/prefix",
    "MLFLOW_HOST": "0.0.0.0",
    "MLFLOW_PORT": "1",
    "MLFLOW_UVICORN_OPTS": "--root-path /other",
    "MLFLOW_SERVER_ALLOWED_HOSTS": "example.org",
    "MLFLOW_ARTIFACTS_ONLY": "true",
    "MLFLOW_BACKEND_STORE_URI": "sqlite:///other.db",
    "MLFLOW_REGISTRY_STORE_URI": "sqlite:///other.db",
    "MLFLOW_REGISTRY_URI": "sqlite:///other.db",
    "MLFLOW_ENABLE_WORKSPACES": "true",
    "MLFLOW_WORKSPACE": "other",
    "UVICORN_ROOT_PATH": "/third",
    "UVICORN_SSL_KEYFILE": "none.pem",
    "PORT": "0",
}


def test_the_ui_serves_on_this_machine_alone_follows_and_ends_whole(database):
    """Whatever the user's settings of MLflow are, and on a port that the system chooses."""
    Run("vit", 0, [0.1, 0.2]).finish()
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UserError, match="PORT="):
        ui.start_server(str(server.getsockname()[1]))
    command, streams = [sys.executable, "-m", "pipeline.tracking", "ui"], {"stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=os.environ | SETTINGS, stdout=subprocess.PIPE, **streams)
    with process.stdout:
        printed = [re.split(r"  +", process.stdout.readline().strip()) for _ in range(2)]
        assert [name for name, _ in printed] == ["Models", "Their curves"]
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/", printed[0][1])[1])
        site = f"http://127.0.0.1:{port}"
        assert port > 0 and all(address.startswith(f"{site}/#/experiments/1/runs?") for _, address in printed)
        until(lambda: set(by_name()) == {"ViT", "ViT, seed 0"} and "record.json" in artifacts(by_name()["ViT, seed 0"]))
        with urllib.request.urlopen(site) as answer:
            assert b"static-files/" in answer.read()
        name = by_name()["ViT, seed 0"].info.run_id
        with urllib.request.urlopen(f"{site}/get-artifact?path=history.csv&run_uuid={name}") as answer:
            assert answer.read().decode().startswith("step,epoch,train_loss,")
        Run("vit", 1, [0.1, 0.2, 0.3]).train(2)
        until(lambda: "ViT, seed 1" in by_name())
        process.terminate()
        assert process.wait(600) == 0
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", port)) != 0  # nothing that it started is left
    assert not Path("other.db").exists()


@pytest.mark.parametrize("options", [[], ["--no-tracking"]])
def test_a_training_is_brought_at_its_end_unless_it_is_not_to_be(monkeypatch, options):
    brought = []
    record = synthetic.record(params.resolve(params.load(), "vit"), runs.Run("vit", 0))
    monkeypatch.setattr(recorder, "train", lambda run, config, **_: record)
    monkeypatch.setattr("pipeline.training.loop.configure_torch", lambda: None)
    monkeypatch.setattr(tracking, "sync_quietly", brought.append)
    monkeypatch.setattr(sys, "argv", ["train", "vit", "3", *options])
    train.main()
    assert brought == ([] if options else [runs.Run("vit", 3)])
