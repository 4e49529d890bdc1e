"""MLflow as a view of the run files: nothing doubled, nothing lost, and no training stopped."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

import mlflow
import pytest

from pipeline import runs
from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.tracking import notes
from pipeline.tracking import runs as tracked
from pipeline.tracking.runs import Tracker, read_points, tracking_uri
from pipeline.tracking.sync import VIEWS, sync, ui
from pipeline.tracking.watcher import GRACE_SECONDS

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
    (folder / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    for key in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "DVC_ROOT", "PORT"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """MLflow takes a second or more to make a database, and an instant to open one."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def database(folder, empty_database):
    shutil.copy(empty_database, folder)


class Run:
    """A made-up training of `variant` with `seed`, whose k-th point has the test accuracy `accuracies[k]`."""

    def __init__(
        self, variant, seed, accuracies, *, key="", minutes=0, rate=0.0003, diverged=False, study="table_2", **head
    ):
        self.variant, self.seed, self.accuracies, self.diverged = variant, seed, accuracies, diverged
        overrides = {"init": head} if head else {}
        self.run = runs.Run(variant, seed, study, overrides)
        self.key = key or f"key-{self.run.name}-{seed}"
        self.config = {"data": {"source": "mnist"}, "init": {"head": "xavier"} | head, "train": {"learning_rate": rate}}
        self.start = START + timedelta(minutes=minutes, seconds=seed)
        self.scratch = self.run.scratch.with_name(f"{seed}-{self.key[:12]}")

    def rows(self, count):
        rows = [f"{117 * i},{i / 4},{2 - a},{a - 0.01},{2.1 - a},{a}" for i, a in enumerate(self.accuracies[:count])]
        if self.diverged:
            rows[-1] = f"{117 * (len(rows) - 1)},{(len(rows) - 1) / 4},,,,{self.accuracies[-1]}"
        return [COLUMNS, *rows]

    def record(self, status, count, delay=0):
        times = [round(self.start.timestamp() * 1000) + 1000 * i + delay for i in range(count)]
        end = (self.start + timedelta(minutes=5)).isoformat()
        environment = {"git_commit": "c0ffee", "git_dirty": False, "torch": "2.11.0", "device": "cpu"}
        return {
            "run_key": self.key,
            "study": self.run.study,
            "name": self.run.name,
            "variant": self.variant,
            "overrides": self.run.overrides,
            "seed": self.seed,
            "status": status,
            "config": self.config,
            "data_sha256": "da7a" * 16,
            "code_sha256": "c0de" * 16,
            "environment": environment,
            "started_at": self.start.isoformat(),
            "finished_at": None if status == "running" else end,
            "seconds": 300.0 + self.seed,
            "images_per_second": 1000.0,
            "resumptions": 0,
            "timestamps": times,
        }

    def train(self, count, delay=0):
        """The first `count` points, as a training under way leaves them; `delay` as if some were measured again later."""
        files.write_text(self.scratch / "history.csv", "\n".join(self.rows(count)) + "\n")
        files.write_json(self.scratch / "record.json", self.record("running", count, delay))
        return self

    def finish(self, base=Path("."), weights=True):
        out, count = base / self.run.folder, len(self.accuracies)
        files.write_text(out / "history.csv", "\n".join(self.rows(count)) + "\n")
        last = dict(zip(COLUMNS.split(","), self.rows(count)[-1].split(","), strict=True))
        metrics = {key: float(value) if value else None for key, value in last.items()}
        steps = int(last["step"])
        metrics |= {"diverged": self.diverged, "diverged_at_step": steps if self.diverged else None}
        files.write_json(out / "metrics.json", metrics | {"steps": steps, "num_parameters": 31})
        if weights:
            files.write_bytes(base / self.run.weights, b"weights")
        status = "diverged" if self.diverged else "finished"
        files.write_json(out / "record.json", self.record(status, count))
        return self


def tracker():
    return opened(os.getcwd())


@cache
def opened(folder):
    return Tracker()


def named(name):
    """The one run of this name that is not deleted."""
    (run,) = (run for run in tracker().runs() if run.info.run_name == name)
    return run


def names():
    return sorted(run.info.run_name for run in tracker().runs())


def curve(run, key):
    history = tracker().client.get_metric_history(run.info.run_id, key)
    return sorted((metric.step, metric.value) for metric in history)


def contents():
    """Everything in the store that a second import could double."""
    with sqlite3.connect("mlflow.db") as database:
        return {
            table: sorted(database.execute(f"select * from {table}"), key=str)
            for table in ("runs", "metrics", "params", "tags", "inputs", "datasets", "experiments")
        }


def watch(scratch, **environment):
    command = [sys.executable, "-m", "pipeline.tracking", "watch", str(scratch)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True, env=os.environ | environment)


def end(*watchers):
    """Closes stdin as a training does at its end; returns what each watcher says."""
    for watcher in watchers:
        watcher.stdin.close()
    deadline = time.monotonic() + GRACE_SECONDS + 30  # a watcher may have to start first
    for watcher in watchers:
        assert watcher.wait(deadline - time.monotonic()) == 0
    said = [watcher.stderr.read() for watcher in watchers]
    for watcher in watchers:
        watcher.stderr.close()
    return said


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.3)


def test_sync_imports_each_run_once_with_statistics_on_its_parent(database, monkeypatch):
    monkeypatch.setattr(tracked, "POINTS_PER_BATCH", 2)
    accuracies = {0: [0.1, 0.5, 0.7], 1: [0.2, 0.3, 0.9], 2: [0.1, 0.8, 0.75, 0.9]}
    for seed, values in accuracies.items():
        Run("osa_qr", seed, values).finish()
    Run("vit_noskip", 0, [0.1, 0.2], diverged=True).finish(weights=False)
    for name in ("figure_1.svg", "table_2.md"):
        files.write_text(Path("paper_outputs") / name, name)

    sync(Path("."))
    before = contents()
    sync(Path("."))
    assert contents() == before

    assert names() == ["OSA (QR)", "ViT (no skip)", "osa_qr/seed0", "osa_qr/seed1", "osa_qr/seed2", "vit_noskip/seed0"]
    parent, child, client = named("OSA (QR)"), named("osa_qr/seed1"), tracker().client
    columns = [list(column) for column in zip(*accuracies.values(), strict=False)]
    steps = [0, 117, 234]
    assert curve(child, "test_accuracy") == list(zip(steps, accuracies[1], strict=True))
    mean, std = curve(parent, "test_accuracy_mean"), curve(parent, "test_accuracy_std")
    assert mean == [(step, pytest.approx(sum(column) / 3)) for step, column in zip(steps, columns, strict=True)]
    assert std == [(step, pytest.approx(statistics.stdev(column))) for step, column in zip(steps, columns, strict=True)]
    assert parent.data.metrics["final_test_accuracy_mean"] == pytest.approx((0.7 + 0.9 + 0.9) / 3)
    assert parent.data.metrics["paper_test_accuracy"] == PAPER.table_2["osa_qr"] / 100
    assert parent.data.metrics["num_seeds"] == 3

    seed2 = named("osa_qr/seed2").data.metrics
    assert (seed2["best_test_accuracy"], seed2["best_step"], seed2["final_test_accuracy"]) == (0.9, 351, 0.9)
    assert child.data.params["train.learning_rate"] == "0.0003"
    assert child.data.params["seed"] == "1"
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert child.data.tags.items() >= {"variant": "osa_qr", "seed": "1", "current": "true", "device": "cpu"}.items()
    assert str(PAPER.table_2["osa_qr"]) in child.data.tags["mlflow.note.content"]
    assert child.inputs.dataset_inputs[0].dataset.digest == ("da7a" * 16)[:36]
    assert (child.info.status, child.info.end_time - child.info.start_time) == ("FINISHED", 300_000)

    def artifacts(run):
        return [file.path for file in client.list_artifacts(run.info.run_id)]

    assert artifacts(child) == ["history.csv", "metrics.json", "record.json", "weights"]
    assert artifacts(parent) == ["figure_1.svg", "table_2.md"]
    diverged = named("vit_noskip/seed0")
    assert (diverged.info.status, diverged.data.tags["diverged"]) == ("FAILED", "true")
    assert "final_test_loss" not in diverged.data.metrics
    assert artifacts(diverged) == ["history.csv", "metrics.json", "record.json"]


def test_a_newer_measurement_takes_the_place_of_an_older_one(database):
    Run("vit", 0, [0.1, 0.5]).finish()
    Run("vit", 1, [0.2, 0.7]).finish()
    sync(Path("."))
    Run("vit", 0, [0.1, 0.6], minutes=10).finish(weights=False)  # `dvc repro -f`: the same key again
    sync(Path("."))
    assert names() == ["ViT", "vit/seed0", "vit/seed1"]
    assert curve(named("vit/seed0"), "test_accuracy") == [(0, 0.1), (117, 0.6)]
    assert curve(named("ViT"), "test_accuracy_mean") == [(0, pytest.approx(0.15)), (117, pytest.approx(0.65))]

    files.write_bytes(runs.Run("vit", 0).weights, b"pulled")  # weights that come later are added
    sync(Path("."))
    run_id = named("vit/seed0").info.run_id
    assert "weights" in [file.path for file in tracker().client.list_artifacts(run_id)]

    older = Path("older")  # an older training with another key, from another machine
    Run("vit", 0, [0.1, 0.2], key="other code", minutes=-10).finish(older)
    sync(older)
    assert {run.data.tags["run_key"]: run.data.tags["current"] for run in tracker().runs(level="seed")} == {
        "key-vit-0": "true",
        "key-vit-1": "true",
        "other code": "false",
    }
    assert curve(named("ViT"), "test_accuracy_mean") == [(0, pytest.approx(0.15)), (117, pytest.approx(0.65))]


def test_another_configuration_has_a_parent_of_its_own(database):
    for seed in (0, 1):
        Run("vit", seed, [0.1, 0.5]).finish()
    sync(Path("."))
    Run("vit", 0, [0.1, 0.9], key="explored", minutes=10, rate=0.01).finish()
    sync(Path("."))
    parents = {run.data.params["train.learning_rate"]: run for run in tracker().runs(level="variant")}
    assert parents["0.0003"].data.metrics["final_test_accuracy_mean"] == 0.5
    assert parents["0.01"].data.metrics["final_test_accuracy_mean"] == 0.9
    assert "final_test_accuracy_std" not in parents["0.01"].data.metrics
    current = {run.data.tags["run_key"]: run.data.tags["current"] for run in tracker().runs(level="seed")}
    assert current == {"key-vit-0": "false", "key-vit-1": "true", "explored": "true"}


def test_the_mean_is_over_the_runs_that_table_2_counts(database):
    for seed, accuracy in ((0, 0.96), (2, 0.98)):
        Run("vit", seed, [0.1, 0.5, accuracy]).finish()
    Run("vit", 1, [0.1, 0.098], diverged=True).finish()
    sync(Path("."))
    parent = named("ViT")
    assert parent.data.metrics["final_test_accuracy_mean"] == pytest.approx(0.97)
    assert parent.data.metrics["final_test_accuracy_std"] == pytest.approx(statistics.stdev([0.96, 0.98]))
    assert (parent.data.metrics["num_seeds"], parent.data.metrics["num_diverged"]) == (2, 1)
    mean = curve(parent, "test_accuracy_mean")  # as far as those runs go, which is beyond the divergence
    assert mean == [(0, pytest.approx(0.1)), (117, pytest.approx(0.5)), (234, pytest.approx(0.97))]
    assert curve(parent, "train_loss_mean")[1] == (117, pytest.approx(1.5))

    for seed in (0, 2):
        Run("vit", seed, [0.1, 0.098], minutes=10, diverged=True).finish()
    sync(Path("."))
    metrics = named("ViT").data.metrics
    assert (metrics["num_seeds"], metrics["num_diverged"]) == (0, 3)
    assert not any(key.endswith("_mean") for key in metrics)


def test_runs_of_studies_stand_beside_those_of_table_2(database):
    """Three of them are the same training, so that they have one key; none takes another's place."""
    Run("vit", 0, [0.1, 0.5], key="same").finish()
    Run("vit", 0, [0.1, 0.5], key="same", minutes=10, study="depth").finish()
    Run("vit", 0, [0.1, 0.6], study="left_open", head="zeros").finish()
    Run("vit", 0, [0.1, 0.7], key="same", minutes=20, study="tries", head="zeros").finish()
    sync(Path("."))
    children = {
        "vit/seed0": 0.5,
        "depth: vit/seed0": 0.5,
        "left_open: vit+init.head=zeros/seed0": 0.6,
        "tries: vit+init.head=zeros/seed0": 0.7,
    }
    parents = ["ViT", "depth: ViT", "left_open: ViT+init.head=zeros", "tries: ViT+init.head=zeros"]
    assert names() == sorted([*children, *parents])
    for name, accuracy in children.items():
        run = named(name)
        assert (run.data.metrics["final_test_accuracy"], run.data.tags["current"]) == (accuracy, "true")
    assert [named(name).data.metrics.get("paper_test_accuracy") for name in parents] == [0.972, None, None, None]
    assert named("left_open: ViT+init.head=zeros").data.tags["study"] == "left_open"


def note(run):
    return named(run).data.tags["mlflow.note.content"]


def test_notes_say_what_is_changed_and_how_to_repeat_it(database):
    for seed in (0, 1):
        Run("vit", seed, [0.1, 0.5]).finish()
    Run("osa_exact", 0, [0.1, 0.6], study="left_open", head="zeros").finish()
    Run("vit", 2, [0.1, 0.7], study="tries", head="zeros", alpha="0.2").finish()
    sync(Path("."))
    stages = params.read(ROOT / "dvc.yaml")["stages"]
    assert "`dvc repro -f train@vit-1`" in note("vit/seed1") and "`dvc repro -f train@vit-0 train@vit-1`" in note("ViT")
    assert {"train", "left_open"} <= stages.keys()
    assert "at commit `c0ffee`." in note("vit/seed1")
    changed = note("left_open: osa_exact+init.head=zeros/seed0")
    assert "`init.head=zeros`" in changed and "`dvc repro left_open`" in changed
    assert f"`{runs.Run('osa_exact', 0, 'left_open', {'init': {'head': 'zeros'}}).folder}`" in changed
    tried = note("tries: vit+init.alpha=0.2+init.head=zeros/seed2")
    assert "`python -m pipeline.train vit 2 --set init.alpha=0.2 --set init.head=zeros`" in tried
    assert (notes.TABLE_2, notes.TRIES) == (runs.TABLE_2, "tries")


def test_another_experiment_by_name(database, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    Run("vit", 0, [0.1, 0.5]).finish()
    sync(Path("."))
    client = tracker().client
    assert client.get_experiment_by_name("mine") and not client.get_experiment_by_name(tracked.EXPERIMENT)
    assert names() == ["ViT", "vit/seed0"]


def test_two_syncs_at_once_on_a_fresh_machine(folder):
    for seed in (0, 1):
        Run("vit", seed, [0.1, 0.5]).finish()
    command = [sys.executable, "-m", "pipeline.tracking", "sync"]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert sum(int(text.split()[0]) for text in said) == 2
    assert names() == ["ViT", "vit/seed0", "vit/seed1"]
    assert curve(named("ViT"), "num_seeds") == [(0, 2)]


def test_runs_are_visible_while_they_train_and_survive_kills(folder):
    first, second = Run("vit", 0, [0.1, 0.4, 0.5, 0.6]), Run("vit", 1, [0.2, 0.3, 0.4, 0.5])
    watchers = [watch(run.train(3).scratch) for run in (first, second)]  # both at once, on a fresh machine
    until(lambda: Path("mlflow.db").exists() and names() == ["ViT", "vit/seed0", "vit/seed1"])
    until(lambda: [len(curve(named(f"vit/seed{seed}"), "epoch")) for seed in (0, 1)] == [3, 3])
    run = named("vit/seed0")
    assert run.info.status == "RUNNING"
    until(lambda: named("vit/seed0").data.tags.get("mlflow.parentRunId") == named("ViT").info.run_id)

    os.kill(watchers[0].pid, signal.SIGINT)  # Ctrl-C in the terminal reaches the watcher too
    watchers[1].kill()
    watchers[1].communicate()
    assert end(watchers[0]) == [""]
    assert named("vit/seed0").info.status == "KILLED"

    watchers = [watch(run.scratch) for run in (first, second)]
    first.train(2)  # resumed from an earlier epoch: the third point is measured again, later
    first.train(4, delay=60_000).finish()
    second.train(4, delay=60_000).finish()
    until(lambda: [len(curve(named(f"vit/seed{seed}"), "epoch")) for seed in (0, 1)] == [4, 4])
    assert end(*watchers) == ["", ""]
    for name, trained in (("vit/seed0", first), ("vit/seed1", second)):
        assert named(name).info.status == "FINISHED"
        assert curve(named(name), "test_accuracy") == list(zip((0, 117, 234, 351), trained.accuracies, strict=True))
    assert named("vit/seed0").info.run_id == run.info.run_id
    assert curve(named("ViT"), "test_accuracy_mean")[-1] == (351, pytest.approx(0.55))

    third = Run("vit", 2, [0.1, 0.2]).train(2)
    points = read_points(third.scratch / "history.csv", third.record("running", 2))
    tracker().publish(third.record("running", 2), points, third.scratch)  # and then the power fails
    sync(Path("."))
    assert named("vit/seed2").info.status == "RUNNING"  # it can resume
    for path in third.scratch.iterdir():
        path.unlink()
    third.scratch.rmdir()
    sync(Path("."))
    assert named("vit/seed2").info.status == "KILLED"
    assert curve(named("ViT"), "num_seeds") == [(0, 2)]


def test_a_watcher_outlives_every_outage_with_one_warning(folder):
    run = Run("vit", 0, [0.1, 0.2]).train(2)
    files.write_text("without/mlflow/__init__.py", "raise ImportError('no such thing')\n")
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        uris = [f"http://127.0.0.1:{server.getsockname()[1]}" for server in (closed, silent)]
        closed.close()
        without = f"{folder / 'without'}{os.pathsep}{ROOT}"
        watchers = [watch(run.scratch, MLFLOW_TRACKING_URI=uris[0]), watch(run.scratch, MLFLOW_TRACKING_URI=uris[1])]
        watchers.append(watch(run.scratch, PYTHONPATH=without))
        said = end(*watchers)
    for text in said:
        assert text.startswith("warning: ")
        assert text.count("\n") == 1
    assert "no such thing" in said[2]
    assert not Path("mlflow.db").exists()


def test_sync_says_in_one_sentence_what_is_wrong(database, monkeypatch, capsys):
    Run("vit", 0, [0.1, 0.2]).finish()
    Run("vit", 1, [0.1, 0.2]).finish()
    files.write_text("runs/table_2/vit/0/history.csv", COLUMNS + "\n")
    files.write_text("runs/table_2/vit/2/record.json", json.dumps({"status": "finished"}))
    files.write_text("runs/table_2/vit/3/record.json", "{")
    sync(Path("."))
    warnings = capsys.readouterr().err.splitlines()
    assert names() == ["ViT", "vit/seed1"]
    assert [line.split()[1] for line in warnings] == [f"runs/table_2/vit/{seed}/record.json" for seed in (0, 2, 3)]
    with pytest.raises(UserError, match="holds runs/"):
        sync(Path("nowhere"))

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI") as caught:
        sync(Path("."))
    assert "secret" not in str(caught.value)


def test_the_store_is_at_the_root_of_the_repository_unless_the_user_says_otherwise(folder, monkeypatch):
    assert tracking_uri() == f"sqlite:///{folder}/mlflow.db"
    monkeypatch.setenv("DVC_ROOT", str(folder.parent))  # as in an experiment, which DVC runs in a temporary copy
    assert tracking_uri() == f"sqlite:///{folder.parent}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert tracking_uri() == "http://127.0.0.1:9"


def test_ui_imports_and_then_serves_on_this_machine_alone(database, monkeypatch, capsys):
    Run("vit", 0, [0.1, 0.2]).finish()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    monkeypatch.setenv("PORT", port)
    commands = []
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(" ".join(command)))
    ui()
    assert names() == ["ViT", "vit/seed0"]
    (command,) = commands
    assert f"--host 127.0.0.1 --port {port} " in command and tracking_uri() in command
    assert f"http://127.0.0.1:{port}/#/experiments/{tracker().experiment}/runs" in capsys.readouterr().out
    columns = {column.split("`")[1] for column in VIEWS["table"]["selectedColumns"]}
    assert columns - named("ViT").data.metrics.keys() == {"final_test_accuracy_std"}  # one seed has none


def test_ui_refuses_a_port_that_is_taken(folder, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("PORT", str(server.getsockname()[1]))
        with pytest.raises(UserError, match="PORT="):
            ui()
