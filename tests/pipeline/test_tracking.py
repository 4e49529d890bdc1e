"""MLflow as a view of the run files: nothing doubled, nothing lost, and no training stopped."""

import json
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

import mlflow
import pytest
from filelock import FileLock

from pipeline import runs, tracking, train
from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.drawing.looks import look
from pipeline.tracking import records, store, ui
from pipeline.tracking.notes import TABLE_2, TRIES, Notes
from pipeline.tracking.sync import sync
from pipeline.tracking.views import views

PAPER = params.load_paper()
START = datetime.fromisoformat("2026-11-20T18:00:00+00:00")
COLUMNS = "step,epoch,train_loss,train_accuracy,test_loss,test_accuracy"

# MLflow 3.17 uses a loader strategy that SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty project with a space in its path, and no MLflow but its own."""
    folder = tmp_path / "a project"
    folder.mkdir()
    (folder / "params.yaml").write_text((ROOT / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    for key in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "DVC_ROOT", "PORT"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
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
        self.accuracies, self.diverged = accuracies, diverged
        self.run = runs.Run(variant, seed, study, {"init": head} if head else {})
        self.config = {"data": {"source": "mnist"}, "init": {"head": "xavier"} | head, "train": {"learning_rate": 0.0003}}
        self.start = START + timedelta(minutes=minutes, seconds=seed)
        self.scratch = self.run.scratch.with_name(f"{seed}-0123456789ab")

    def write(self, folder, status, count, delay=0):
        rows = [f"{117 * i},{i / 4},{2 - a},{a - 0.01},{2.1 - a},{a}" for i, a in enumerate(self.accuracies[:count])]
        if self.diverged:
            rows[-1] = f"{117 * (count - 1)},{(count - 1) / 4},,,,{self.accuracies[-1]}"
        files.write_text(folder / "history.csv", "\n".join([COLUMNS, *rows]) + "\n")
        end = None if status == "running" else (self.start + timedelta(minutes=5)).isoformat()
        record = {key: getattr(self.run, key) for key in ("study", "name", "variant", "overrides", "seed")}
        record |= {"run_key": "0123456789abcdef", "status": status, "config": self.config, "data_sha256": "da7a" * 16}
        record |= {"seconds": 300.0 + self.run.seed, "images_per_second": 1000.0, "numerics": 1}
        record |= {"environment": {"git_commit": "c0ffee", "torch": "2.11.0", "device": "cpu"}}
        record |= {"started_at": self.start.isoformat(), "finished_at": end}
        record["timestamps"] = [round(self.start.timestamp() * 1000) + 1000 * i + delay for i in range(count)]
        files.write_json(folder / "record.json", record)

    def train(self, count, delay=0):
        """The first `count` points, as a training under way leaves them; `delay` as if some were measured again later."""
        self.write(self.scratch, "running", count, delay)
        return self

    def finish(self, base=Path("."), weights=True):
        folder, count = base / self.run.folder, len(self.accuracies)
        metrics = {"diverged": self.diverged, "steps": 117 * (count - 1), "num_parameters": 31}
        files.write_json(folder / "metrics.json", metrics)
        if weights:
            files.write_bytes(base / self.run.weights, b"weights")
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.write(folder, "diverged" if self.diverged else "finished", count)
        return base


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


def contents():
    """Everything in the store that a second import could double."""
    with sqlite3.connect("mlflow.db") as database:
        tables = ("runs", "metrics", "params", "tags", "inputs", "datasets", "experiments")
        return {table: sorted(database.execute(f"select * from {table}"), key=str) for table in tables}


def until(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.3)


def test_sync_imports_each_run_once_with_statistics_on_its_parent(database, monkeypatch):
    monkeypatch.setattr("pipeline.tracking.sync.POINTS_PER_BATCH", 2)
    accuracies = {0: [0.1, 0.5, 0.7], 1: [0.2, 0.3, 0.9], 2: [0.1, 0.8, 0.75]}
    for seed, values in accuracies.items():
        Run("osa_qr", seed, values).finish()
    Run("vit_noskip", 0, [0.1, 0.2], diverged=True).finish(weights=False)
    files.write_text("paper_outputs/report.html", "the report")

    assert sync() == (4, 4)
    before, searches = contents(), []
    search = mlflow.MlflowClient.search_runs
    monkeypatch.setattr(mlflow.MlflowClient, "search_runs", lambda *a, **b: searches.append(a) or search(*a, **b))
    assert sync() == (0, 4)
    assert contents() == before and len(searches) == 1

    shown = by_name()
    seeds = {f"OSA (QR), seed {seed}" for seed in accuracies}
    assert shown.keys() == {"OSA (QR)", "ViT (no skip)", "ViT (no skip), seed 0"} | seeds
    parent, child, diverged = (shown[name] for name in ("OSA (QR)", "OSA (QR), seed 1", "ViT (no skip), seed 0"))
    columns, steps = [list(column) for column in zip(*accuracies.values(), strict=True)], [0, 117, 234]
    assert curve(child, "test_accuracy") == [(step, 100 * a) for step, a in zip(steps, accuracies[1], strict=True)]
    means = [round(100 * sum(column) / 3, 2) for column in columns]
    assert curve(parent, "test_accuracy") == list(zip(steps, means, strict=True))
    paper, std = PAPER.table_2["osa_qr"], round(100 * statistics.stdev(columns[-1]), 2)
    expected = {"test_accuracy": means[-1], "test_accuracy_std": std, "num_seeds": 3, "epoch": 0.5}
    expected |= {"paper_test_accuracy": paper, "difference_to_paper": round(means[-1] - paper, 2)}
    assert parent.data.metrics.items() >= expected.items()
    assert child.data.metrics["difference_to_paper"] == round(90 - paper, 2)
    for run in (parent, child):  # in this order MLflow shows them, and Compare opens on the first
        assert list(run.data.metrics)[:2] == ["test_accuracy", "test_loss"]
        assert run.data.tags["mlflow.runColor"] == look("osa_qr").colour
        assert str(paper) in run.data.tags["mlflow.note.content"] and run.data.tags["mlflow.user"] != "unknown"
    assert child.data.params.items() >= {"train.learning_rate": "0.0003", "seed": "1", "run": "table_2/osa_qr/1"}.items()
    tags = {"mlflow.parentRunId": parent.info.run_id, "mlflow.source.git.commit": "c0ffee", "mlflow.source.type": "LOCAL"}
    assert child.data.tags.items() >= (tags | {"variant": "osa_qr", "seed": "1", "current": "true"}).items()
    assert (child.info.status, child.info.end_time - child.info.start_time) == ("FINISHED", 300_000)
    assert artifacts(child) == ["history.csv", "metrics.json", "record.json", "weights"]
    assert diverged.info.status == "FAILED" and "difference_to_paper" not in diverged.data.metrics
    assert curve(diverged, "test_loss") == [(0, 2.0)] and "weights" not in artifacts(diverged)
    newest = max((shown["OSA (QR)"], shown["ViT (no skip)"]), key=lambda run: run.info.start_time)
    assert artifacts(newest, "report") == ["report/report.html"]


def test_the_newest_measurement_of_each_seed_counts(database):
    for seed, last in ((0, 0.5), (1, 0.7)):
        Run("vit", seed, [0.1, last]).finish()
    sync()
    Run("vit", 0, [0.1, 0.6], minutes=10).finish()  # `dvc repro -f`
    assert sync() == (1, 2)
    files.write_json(runs.Run("vit", 0).folder / "evaluation.json", {})  # files that come later are added
    assert sync() == (0, 2)
    assert sync(Run("vit", 0, [0.1, 0.2], minutes=-10).finish(Path("older"))) == (1, 1)
    single = client().search_runs(["1"], "tags.level = 'single'")
    assert sorted((run.data.metrics["test_accuracy"], run.data.tags["current"]) for run in single) == [
        (20, "false"), (50, "false"), (60, "true"), (70, "true"),
    ]  # fmt: skip
    (newest,) = client().search_runs(["1"], "tags.current = 'true' and params.run = 'table_2/vit/0'")
    assert "evaluation.json" in artifacts(newest)
    (parent,) = client().search_runs(["1"], "tags.level = 'mean'")
    assert curve(parent, "test_accuracy") == [(0, 10), (117, 65)]


def test_a_configuration_has_a_parent_of_its_own(database):
    older, newer, explored = Run("vit", 0, [0.1, 0.5]), Run("vit", 1, [0.1, 0.7]), Run("vit", 0, [0.1, 0.9], minutes=9)
    newer.config["train"]["clip_grad_norm"] = None  # as if it had no such key
    explored.config["train"]["learning_rate"] = 0.01
    older.finish(), newer.finish(), sync()
    explored.finish(), sync()
    parents = {run.data.params["train.learning_rate"]: run for run in client().search_runs(["1"], "tags.level = 'mean'")}
    assert parents["0.0003"].data.metrics["test_accuracy"] == 60
    assert parents["0.01"].data.metrics["test_accuracy"] == 90 and "test_accuracy_std" not in parents["0.01"].data.metrics


def test_the_mean_is_over_the_runs_that_table_2_counts(database):
    for seed, accuracy in ((0, 0.96), (2, 0.98)):
        Run("vit", seed, [0.1, 0.5, accuracy]).finish()
    Run("vit", 1, [0.1, 0.098], diverged=True).finish()
    for seed in (0, 1):
        Run("osa_qr", seed, [0.1, 0.098], diverged=True).finish()
    sync()
    parent, none = by_name()["ViT"], by_name()["OSA (QR)"].data.metrics
    assert parent.data.metrics["test_accuracy_std"] == round(statistics.stdev([96, 98]), 2)
    assert (parent.data.metrics["num_seeds"], parent.data.metrics["num_diverged"]) == (2, 1)
    assert curve(parent, "test_accuracy") == [(0, 10), (117, 50), (234, 97)]  # beyond the divergence
    assert (none["num_seeds"], none["num_diverged"]) == (0, 2)
    assert not {"test_accuracy", "test_accuracy_std", "difference_to_paper"} & none.keys()


def test_views_show_the_models_first_and_each_study_beside_them(database):
    Run("vit", 0, [0.1, 0.5]).finish()
    Run("osa_qr", 0, [0.1, 0.6]).finish()
    Run("vit", 0, [0.1, 0.7], study="left_open", head="zeros").finish()
    Run("vit", 0, [0.1, 0.8], minutes=10, study="depth").finish()
    sync()
    saved, shown, ages = client().get_experiment("1").tags, {}, {}
    for key, (name, view) in views(["table_2", "left_open", "depth"]).items():
        assert saved[f"mlflow.sharedViewState.{key}"] == view
        state = json.loads(json.loads(view)["state"])
        ages[name] = json.loads(view)["createdAt"]
        order = [f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"]
        listed = client().search_runs(["1"], state["searchFilter"], order_by=order)
        shown[name] = [run.info.run_name for run in listed]
        columns = {column.split("`")[1] for column in state["selectedColumns"]}
        assert columns - {key for run in listed for key in run.data.metrics} <= {"test_accuracy_std"}  # one seed has none
    assert shown == {
        "Models": ["OSA (QR)", "ViT"],
        "Models, seed by seed": ["OSA (QR), seed 0", "ViT, seed 0"],
        "Depth": ["OSA (QR)", "ViT", "ViT, depth"],
        "Left open": ["OSA (QR)", "ViT", "ViT, init.head=zeros"],
    }
    assert sorted(ages, key=ages.get, reverse=True) == list(shown)  # as MLflow's menu sorts them
    assert list(by_name(level="mean"))[:2] == ["OSA (QR)", "ViT"]  # the newest first, as without any view


def test_notes_name_commands_that_exist():
    listed = params.load(ROOT / "params.yaml").run
    notes = Notes(PAPER, params.read(ROOT / "params.yaml"))
    committed = [files.read_json(path) for path in ROOT.glob("paper_outputs/runs/*/*/*/record.json")]
    committed = [record for record in committed if record["study"] != TRIES]
    assert {record["study"] for record in committed} >= {"table_2", "left_open", "depth"}
    for record in committed:
        note = notes.note(record, [record["seed"]])
        run = runs.Run(record["variant"], record["seed"], record["study"], record["overrides"])
        is_stage = run.study != TABLE_2 or (run.variant in listed.variants and run.seed in listed.seeds)
        assert f"`{run.command if is_stage else f'python -m pipeline.train {run.variant} {run.seed}'}`" in note
        assert ("leaves this open" in note) >= (run.study == "left_open" and bool(run.overrides))
    tried = {"variant": "vit", "study": TRIES, "name": "vit+init.alpha=0.2+init.head=None"}
    assert "`python -m pipeline.train vit 2 --set init.alpha=0.2 --set init.head=null`" in notes.note(tried, [2])
    assert (TABLE_2, TRIES) == (runs.TABLE_2, runs.TRIES)


def test_a_running_training_moves_survives_a_kill_and_ends(database):
    first, second = Run("vit", 0, [0.1, 0.4, 0.5, 0.6]).train(3), Run("vit", 1, [0.2, 0.3, 0.4, 0.5]).train(2)
    assert sync() == (2, 2)
    run = by_name()["ViT, seed 0"]
    assert run.info.status == "RUNNING" and len(curve(run, "epoch")) == 3 and run.data.tags["current"] == "true"
    assert run.data.tags["mlflow.parentRunId"] == by_name()["ViT"].info.run_id

    old = time.time() - 2 * records.LOST_SECONDS
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
    assert curve(by_name()["ViT"], "test_accuracy")[-1] == (351, 55)


def test_what_somebody_edited_in_mlflow_is_written_again(database):
    Run("vit", 0, [0.1, 0.5]).finish(), Run("vit", 1, [0.1, 0.7]).finish(), sync()
    before = {name: run.data for name, run in by_name().items()}
    ids = {name: run.info.run_id for name, run in by_name().items()}
    for key in ("study", "name", "seed", "configuration", "files"):
        client().delete_tag(ids["ViT, seed 0"], key)
    client().set_tag(ids["ViT, seed 1"], "seed", "word")
    client().set_tag(ids["ViT, seed 1"], "mlflow.note.content", "mine")
    client().delete_tag(ids["ViT"], "configuration")
    assert sync() == (0, 2)
    after = by_name()
    for name in before:
        ours = {key: value for key, value in before[name].tags.items() if not key.startswith("mlflow.")}
        assert after[name].data.tags.items() >= ours.items() and after[name].data.metrics == before[name].metrics
    assert after["ViT, seed 1"].data.tags["mlflow.note.content"] == "mine"
    client().rename_experiment("1", "mine")
    assert sync() == (2, 2)  # into an experiment of the right name


def test_one_bad_record_is_one_sentence_and_the_rest_is_imported(database, capsys):
    base = Path("foreign")
    for seed in range(8):
        Run("vit", seed, [0.1, 0.2]).finish(base)
    Run("vit", 0, [0.1, 0.2], study="it's").finish(base)
    folder = base / "paper_outputs/runs/table_2/vit"
    shutil.copytree(folder / "0", "secret/vit/0")
    whole, wrong = files.read_json(folder / "1/record.json"), {"study": "../../../../secret"}
    for seed, change in enumerate((wrong, {"seed": "two"}, {"environment": 3}, {"history_sha256": "0" * 64}), start=1):
        files.write_json(folder / f"{seed}/record.json", whole | {"seed": seed} | change)
    files.write_text(folder / "5/record.json", "{")
    (folder / "6/history.csv").unlink()
    (folder / "7/metrics.json").unlink(), (folder / "7/metrics.json").symlink_to(Path("params.yaml").resolve())
    assert sync(base) == (2, 9)
    warnings = capsys.readouterr().err.splitlines()
    assert sorted(line.split()[1] for line in warnings) == [f"{folder}/{seed}/record.json" for seed in range(1, 8)]
    assert set(by_name(level="single")) == {"ViT, seed 0", "ViT, it's, seed 0"}


def test_a_store_that_cannot_be_used_says_why_and_is_never_to_be_deleted(database, monkeypatch):
    def error(uri=None):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri) if uri else monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with pytest.raises(UserError) as caught:
            sync()
        text = str(caught.value)
        assert "delete" not in text and "secret" not in text and "\n" not in text
        return text

    with pytest.raises(UserError, match="--from nowhere"):
        sync(Path("nowhere"))
    assert "create it" in error(f"sqlite:///{Path('typo/mlflow.db').absolute()}")
    for uri in ("postgresql+nothing://me:secret@127.0.0.1/runs", "sqlte:///mlflow.db", "ftp://me:s/e@secret@there"):
        assert "MLFLOW_TRACKING_URI" in error(uri)
    assert "psycopg" in error("postgresql://me:secret@127.0.0.1/runs")
    with sqlite3.connect("mlflow.db") as opened:
        opened.execute("update alembic_version set version_num = '451aebb31d03'")
    assert "mlflow db upgrade" in error()
    Path("mlflow.db").write_bytes(b"no database" * 100)
    assert "not a database" in error() and "move it away" in error()
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0.1)
    with FileLock("mlflow.db.lock"):
        assert "wait" in error()


def test_a_training_that_has_ended_is_brought_alone_or_a_warning_says_why_not(folder, monkeypatch, capfd):
    for seed in (0, 1):
        Run("vit", seed, [0.1, 0.5]).finish()
    tracking.sync_quietly("table_2/vit/0")
    assert set(by_name()) == {"ViT", "ViT, seed 0"} and capfd.readouterr() == ("", "")
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


def test_the_ui_serves_on_this_machine_alone_follows_and_ends_whole(database, monkeypatch):
    Run("vit", 0, [0.1, 0.2]).finish()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("PORT", str(port))
        with pytest.raises(UserError, match="PORT="):
            ui.start_server(str(port))
    command = [sys.executable, "-m", "pipeline.tracking", "ui"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process.stdout:
        printed = [re.split(r"  +", process.stdout.readline().strip()) for _ in range(4)]
        assert [name for name, _ in printed] == ["MLflow", "Models", "Models, seed by seed", "Curves of the models"]
        site = f"http://127.0.0.1:{port}"
        assert printed[0][1] == site and printed[1][1].startswith(f"{site}/#/experiments/1/")
        until(lambda: set(by_name()) == {"ViT", "ViT, seed 0"} and "record.json" in artifacts(by_name()["ViT, seed 0"]))
        with urllib.request.urlopen(site) as answer:
            assert b"static-files/" in answer.read()
        name = by_name()["ViT, seed 0"].info.run_id
        with urllib.request.urlopen(f"{site}/get-artifact?path=history.csv&run_uuid={name}") as answer:
            assert answer.read().decode().startswith(COLUMNS)
        Run("vit", 1, [0.1, 0.2, 0.3]).train(2)
        until(lambda: "ViT, seed 1" in by_name())
        process.terminate()
        assert process.wait(600) == 0
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", port)) != 0  # nothing that it started is left


@pytest.mark.parametrize("options", [[], ["--no-tracking"]])
def test_a_training_is_brought_at_its_end_unless_it_is_not_to_be(monkeypatch, options):
    brought = []
    monkeypatch.setattr(train, "train", lambda run, config, **_: None)
    monkeypatch.setattr(train, "make_deterministic", lambda: None)
    monkeypatch.setattr(tracking, "sync_quietly", brought.append)
    monkeypatch.setattr(sys, "argv", ["train", "vit", "3", *options])
    train.main()
    assert brought == ([] if options else [runs.Run("vit", 3)])
