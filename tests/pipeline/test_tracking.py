"""MLflow as a view of the run files: nothing doubled, nothing lost, and no training stopped."""

import http.server
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

import mlflow
import pytest
from filelock import FileLock

from pipeline import runs
from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.report.numbers import plain
from pipeline.tracking import runs as tracked
from pipeline.tracking.notes import TABLE_2, TRIES, Notes
from pipeline.tracking.runs import Tracker, read_points, tracking_uri
from pipeline.tracking.sync import sync, ui
from pipeline.tracking.views import views
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
    deadline = time.monotonic() + GRACE_SECONDS + 600  # a watcher may have to start first
    for watcher in watchers:
        assert watcher.wait(deadline - time.monotonic()) == 0
    said = [watcher.stderr.read() for watcher in watchers]
    for watcher in watchers:
        watcher.stderr.close()
    return said


def until(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.3)


def test_sync_imports_each_run_once_with_statistics_on_its_parent(database, monkeypatch):
    monkeypatch.setattr(tracked, "POINTS_PER_BATCH", 2)
    accuracies = {0: [0.1, 0.5, 0.7], 1: [0.2, 0.3, 0.9], 2: [0.1, 0.8, 0.75]}
    for seed, values in accuracies.items():
        Run("osa_qr", seed, values).finish()
    Run("vit_noskip", 0, [0.1, 0.2], diverged=True).finish(weights=False)

    sync(Path("."))
    before = contents()
    sync(Path("."))
    assert contents() == before

    seeds = [f"OSA (QR), seed {seed}" for seed in accuracies]
    assert names() == ["OSA (QR)", *seeds, "ViT (no skip)", "ViT (no skip), seed 0"]
    parent, child, client = named("OSA (QR)"), named("OSA (QR), seed 1"), tracker().client
    columns = [list(column) for column in zip(*accuracies.values(), strict=True)]
    steps = [0, 117, 234]
    assert curve(child, "test_accuracy") == [(step, 100 * a) for step, a in zip(steps, accuracies[1], strict=True)]
    means = [round(100 * sum(column) / 3, 2) for column in columns]
    assert curve(parent, "test_accuracy") == list(zip(steps, means, strict=True))
    paper = PAPER.table_2["osa_qr"]
    assert (
        parent.data.metrics.items()
        >= {
            "test_accuracy": means[-1],
            "test_accuracy_std": round(100 * statistics.stdev(columns[-1]), 2),
            "paper_test_accuracy": paper,
            "difference_to_paper": round(means[-1] - paper, 2),
            "num_seeds": 3,
            "epoch": 0.5,
        }.items()
    )
    assert child.data.metrics["difference_to_paper"] == round(90 - paper, 2)
    for run in (parent, child):  # in this order MLflow shows them, and Compare opens on the first
        assert list(client.get_run(run.info.run_id).data.metrics)[:2] == ["test_accuracy", "test_loss"]
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
    diverged = named("ViT (no skip), seed 0")
    assert diverged.info.status == "FAILED"
    assert curve(diverged, "test_loss") == [(0, 2.0)] and "difference_to_paper" not in diverged.data.metrics
    assert artifacts(diverged) == ["history.csv", "metrics.json", "record.json"]


def test_a_newer_measurement_takes_the_place_of_an_older_one(database):
    Run("vit", 0, [0.1, 0.5]).finish()
    Run("vit", 1, [0.2, 0.7]).finish()
    sync(Path("."))
    Run("vit", 0, [0.1, 0.6], minutes=10).finish(weights=False)  # `dvc repro -f`: the same key again
    sync(Path("."))
    assert names() == ["ViT", "ViT, seed 0", "ViT, seed 1"]
    assert curve(named("ViT, seed 0"), "test_accuracy") == [(0, 10), (117, 60)]
    assert curve(named("ViT"), "test_accuracy") == [(0, 15), (117, 65)]

    files.write_bytes(runs.Run("vit", 0).weights, b"pulled")  # weights that come later are added
    sync(Path("."))
    run_id = named("ViT, seed 0").info.run_id
    assert "weights" in [file.path for file in tracker().client.list_artifacts(run_id)]

    older = Path("older")  # an older training with another key, from another machine
    Run("vit", 0, [0.1, 0.2], key="other code", minutes=-10).finish(older)
    sync(older)
    assert {run.data.tags["run_key"]: run.data.tags["current"] for run in tracker().runs(level="single")} == {
        "key-vit-0": "true",
        "key-vit-1": "true",
        "other code": "false",
    }
    assert curve(named("ViT"), "test_accuracy") == [(0, 15), (117, 65)]


def test_another_configuration_has_a_parent_of_its_own(database):
    for seed in (0, 1):
        Run("vit", seed, [0.1, 0.5]).finish()
    sync(Path("."))
    Run("vit", 0, [0.1, 0.9], key="explored", minutes=10, rate=0.01).finish()
    sync(Path("."))
    parents = {run.data.params["train.learning_rate"]: run for run in tracker().runs(level="mean")}
    assert parents["0.0003"].data.metrics["test_accuracy"] == 50
    assert parents["0.01"].data.metrics["test_accuracy"] == 90
    assert "test_accuracy_std" not in parents["0.01"].data.metrics
    current = {run.data.tags["run_key"]: run.data.tags["current"] for run in tracker().runs(level="single")}
    assert current == {"key-vit-0": "false", "key-vit-1": "true", "explored": "true"}


def test_a_configuration_of_fewer_or_former_keys_is_the_same(database):
    older, newer = Run("vit", 0, [0.1, 0.5]), Run("vit", 1, [0.1, 0.7])
    older.config["init"]["former"] = 1
    newer.config["train"]["clip_grad_norm"] = None
    older.finish(), newer.finish()
    sync(Path("."))
    assert named("ViT").data.metrics["test_accuracy"] == 60


def test_the_mean_is_over_the_runs_that_table_2_counts(database):
    for seed, accuracy in ((0, 0.96), (2, 0.98)):
        Run("vit", seed, [0.1, 0.5, accuracy]).finish()
    Run("vit", 1, [0.1, 0.098], diverged=True).finish()
    sync(Path("."))
    parent = named("ViT")
    assert parent.data.metrics["test_accuracy_std"] == round(statistics.stdev([96, 98]), 2)
    assert (parent.data.metrics["num_seeds"], parent.data.metrics["num_diverged"]) == (2, 1)
    # as far as those runs go, which is beyond the divergence
    assert curve(parent, "test_accuracy") == [(0, 10), (117, 50), (234, 97)]
    assert curve(parent, "train_loss")[1] == (117, 1.5)

    for seed in (0, 2):
        Run("vit", seed, [0.1, 0.098], minutes=10, diverged=True).finish()
    sync(Path("."))
    metrics = named("ViT").data.metrics
    assert (metrics["num_seeds"], metrics["num_diverged"]) == (0, 3)
    assert not {"test_accuracy", "test_accuracy_std", "difference_to_paper"} & metrics.keys()


def test_runs_of_studies_stand_beside_those_of_table_2(database):
    """Three of them are the same training, so that they have one key; none takes another's place."""
    Run("vit", 0, [0.1, 0.5], key="same").finish()
    Run("vit", 0, [0.1, 0.5], key="same", minutes=10, study="depth").finish()
    Run("vit", 0, [0.1, 0.6], study="left_open", head="zeros").finish()
    Run("vit", 0, [0.1, 0.7], key="same", minutes=20, study="tries", head="zeros").finish()
    sync(Path("."))
    found = {
        (run.data.tags["study"], run.info.run_name): run.data.metrics["test_accuracy"]
        for run in tracker().runs(level="mean", current="true")
    }
    changed = "ViT, init.head=zeros"
    assert found == {("table_2", "ViT"): 50, ("depth", "ViT, depth"): 50, ("left_open", changed): 60, ("tries", changed): 70}
    assert {run.info.run_name for run in tracker().runs(level="single", current="true")} == {
        f"{name}, seed 0" for _, name in found
    }
    compared = [run for run in tracker().runs() if "difference_to_paper" in run.data.metrics]
    assert {run.data.tags["study"] for run in compared} == {"table_2"}


def test_views_show_the_models_first_and_each_study_beside_them(database):
    Run("vit", 0, [0.1, 0.5]).finish()
    Run("osa_qr", 0, [0.1, 0.6]).finish()
    Run("vit", 0, [0.1, 0.7], study="left_open", head="zeros").finish()
    Run("vit", 0, [0.1, 0.8], minutes=10, study="depth").finish()
    tracker_ = sync(Path("."))
    saved = tracker_.client.get_experiment(tracker_.experiment).tags
    shown, ages = {}, {}
    for key, (name, view) in views(["table_2", "left_open", "depth"]).items():
        assert saved[f"mlflow.sharedViewState.{key}"] == view
        view = json.loads(view)
        state, ages[name] = json.loads(view["state"]), view["createdAt"]
        order = [f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"]
        runs_ = tracker_.client.search_runs([tracker_.experiment], state["searchFilter"], order_by=order)
        shown[name] = [run.info.run_name for run in runs_]
        columns = {column.split("`")[1] for column in state["selectedColumns"]}
        assert columns - {key for run in runs_ for key in run.data.metrics} <= {"test_accuracy_std"}  # one seed has none
    assert shown == {
        "Models": ["OSA (QR)", "ViT"],
        "Models, seed by seed": ["OSA (QR), seed 0", "ViT, seed 0"],
        "Depth": ["OSA (QR)", "ViT", "ViT, depth"],
        "Left open": ["OSA (QR)", "ViT", "ViT, init.head=zeros"],
    }
    assert sorted(ages, key=ages.get, reverse=True) == list(shown)  # as MLflow's menu sorts them
    unsorted = [run.info.run_name for run in tracker_.runs(level="mean")]  # the newest first, as without any view
    assert unsorted[:2] == ["OSA (QR)", "ViT"] and len(unsorted) == 4


def test_notes_say_what_is_changed_and_name_commands_that_exist(database):
    stages, listed = params.read(ROOT / "dvc.yaml")["stages"], params.load(ROOT / "params.yaml").run
    stages |= {f"train@{variant}-{seed}": {} for variant in listed.variants for seed in listed.seeds}
    notes = Notes(PAPER, params.read(ROOT / "params.yaml"))
    committed = [
        record
        for path in ROOT.glob("paper_outputs/runs/*/*/*/record.json")
        if (record := files.read_json(path))["study"] != TRIES
    ]
    assert {record["study"] for record in committed} >= {"table_2", "left_open", "depth"}
    for record in committed:
        note = notes.note(record | {"changes": notes.changes(record)}, [record["seed"]])
        if record["study"] == "table_2":
            variant, seed = record["variant"], record["seed"]
            stage = f"train@{variant}-{seed}"
            command = f"dvc repro -f {stage}" if stage in stages else f"python -m pipeline.train {variant} {seed}"
            assert re.findall(r"`((?:dvc repro -f|python -m) [^`]+)`", note) == [command]
            continue
        run = runs.Run(record["variant"], record["seed"], record["study"], record["overrides"])
        assert f"delete `{run.folder}`, then `python -m pipeline.tools.fan_out --only '{run}'`" in note
        if record["study"] != "left_open":
            continue
        for section, values in record["overrides"].items():
            for key, value in values.items():
                before, after = re.search(
                    rf"Changed: {section}.{key}: (\S+) → (\S+)\. The paper leaves this open", note
                ).groups()
                assert before not in ("None", after) and after == plain(value)

    Run("osa_exact", 0, [0.1, 0.6], study="left_open", head="zeros").finish()
    Run("vit", 77, [0.1, 0.7]).finish()
    tried = Run("vit", 2, [0.1, 0.7], study=TRIES, head="zeros", alpha="0.2").finish().record("finished", 2)
    sync(Path("."))
    parent, unlisted = (
        named(name).data.tags["mlflow.note.content"] for name in ("OSA (exact), init.head=zeros", "ViT, seed 77")
    )
    assert "Changed: init.head: xavier → zeros. The paper leaves this open: Output layer, not stated." in parent
    assert f"delete `{runs.Run('osa_exact', 0, 'left_open', {'init': {'head': 'zeros'}}).folder}`, then" in parent
    assert "`python -m pipeline.train vit 77`" in unlisted
    assert "`python -m pipeline.train vit 2 --set init.alpha=0.2 --set init.head=zeros`" in notes.note(
        tried | {"changes": ""}, [2]
    )
    assert (TABLE_2, TRIES) == (runs.TABLE_2, runs.TRIES)


def test_another_experiment_by_name(database, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    Run("vit", 0, [0.1, 0.5]).finish()
    sync(Path("."))
    client = tracker().client
    assert client.get_experiment_by_name("mine") and not client.get_experiment_by_name(PAPER.title)
    assert names() == ["ViT", "ViT, seed 0"]


def test_two_syncs_at_once_on_a_fresh_machine(folder):
    for seed in (0, 1):
        Run("vit", seed, [0.1, 0.5]).finish()
    command = [sys.executable, "-m", "pipeline.tracking", "sync"]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=600)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert sum(int(text.split()[0]) for text in said) == 2
    assert names() == ["ViT", "ViT, seed 0", "ViT, seed 1"]
    assert curve(named("ViT"), "num_seeds") == [(0, 2)]


def test_runs_are_visible_while_they_train_and_survive_kills(folder):
    first, second = Run("vit", 0, [0.1, 0.4, 0.5, 0.6]), Run("vit", 1, [0.2, 0.3, 0.4, 0.5])
    watchers = [watch(run.train(3).scratch) for run in (first, second)]  # both at once, on a fresh machine
    until(lambda: Path("mlflow.db").exists() and names() == ["ViT", "ViT, seed 0", "ViT, seed 1"])
    until(lambda: [len(curve(named(f"ViT, seed {seed}"), "epoch")) for seed in (0, 1)] == [3, 3])
    run = named("ViT, seed 0")
    assert run.info.status == "RUNNING"
    until(lambda: named("ViT, seed 0").data.tags.get("mlflow.parentRunId") == named("ViT").info.run_id)

    os.kill(watchers[0].pid, signal.SIGINT)  # Ctrl-C in the terminal reaches the watcher too
    watchers[1].kill()
    watchers[1].communicate()
    assert end(watchers[0]) == [""]
    assert named("ViT, seed 0").info.status == "KILLED"

    watchers = [watch(run.scratch) for run in (first, second)]
    first.train(2)  # resumed from an earlier epoch: the third point is measured again, later
    first.train(4, delay=60_000).finish()
    second.train(4, delay=60_000).finish()
    until(lambda: [len(curve(named(f"ViT, seed {seed}"), "epoch")) for seed in (0, 1)] == [4, 4])
    assert end(*watchers) == ["", ""]
    for name, trained in (("ViT, seed 0", first), ("ViT, seed 1", second)):
        assert named(name).info.status == "FINISHED"
        assert curve(named(name), "test_accuracy") == [(117 * i, 100 * a) for i, a in enumerate(trained.accuracies)]
    assert named("ViT, seed 0").info.run_id == run.info.run_id
    assert curve(named("ViT"), "test_accuracy")[-1] == (351, 55)


def test_a_run_whose_training_and_watcher_died_is_killed_and_may_resume(database):
    run = Run("vit", 0, [0.1, 0.2, 0.3]).train(2)

    def publish(count):
        record = run.train(count).record("running", count)
        tracker().publish(record, read_points(run.scratch / "history.csv", record), run.scratch)

    publish(2)
    lock = tracked.alive(run.scratch)
    with lock.acquire():  # as the training does that lives
        sync(Path("."))
        assert named("ViT, seed 0").info.status == "RUNNING"
    sync(Path("."))  # the power has failed; its checkpoint is there
    assert (named("ViT, seed 0").info.status, named("ViT, seed 0").data.tags["current"]) == ("KILLED", "false")
    publish(3)
    assert (named("ViT, seed 0").info.status, named("ViT, seed 0").data.tags["current"]) == ("RUNNING", "true")
    shutil.rmtree(run.scratch)
    sync(Path("."))
    assert named("ViT, seed 0").info.status == "KILLED"


def test_a_training_is_known_to_live_by_sigkill_proof_means(folder):
    """Another process finds the lock taken while a training is tracked, and free once it was killed."""
    script = "import time; from pathlib import Path; from pipeline.tracking.watcher import tracked\n"
    script += "with tracked(Path('scratch')): print('up', flush=True); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with process.stdout:
        assert process.stdout.readline() == "up\n"
        assert tracked.is_alive(Path("scratch"))
        process.kill()
        process.wait()
    assert not tracked.is_alive(Path("scratch"))


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
    files.write_text("paper_outputs/runs/table_2/vit/0/history.csv", COLUMNS + "\n")
    files.write_text("paper_outputs/runs/table_2/vit/2/record.json", json.dumps({"status": "finished"}))
    files.write_text("paper_outputs/runs/table_2/vit/3/record.json", "{")
    sync(Path("."))
    warnings = capsys.readouterr().err.splitlines()
    assert names() == ["ViT", "ViT, seed 1"]
    assert [line.split()[1] for line in warnings] == [
        f"paper_outputs/runs/table_2/vit/{seed}/record.json" for seed in (0, 2, 3)
    ]
    with pytest.raises(UserError, match="a folder with runs/"):
        sync(Path("nowhere"))

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{Path('typo/mlflow.db').absolute()}")
    with pytest.raises(UserError, match="no folder .*typo: create it"):
        sync(Path("."))
    assert not Path("typo").exists()
    Path("mlflow.db").write_bytes(b"no database" * 100)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(UserError, match="file is not a database.*: delete it"):
        sync(Path("."))


def test_a_store_that_another_process_writes_to_is_waited_for_and_not_deleted(folder, monkeypatch):
    monkeypatch.setattr(tracked, "PATIENCE_SECONDS", 0.1)
    with FileLock("mlflow.db.lock"), pytest.raises(UserError, match="another process writes to it, so wait for that"):
        sync(Path("."))


@pytest.mark.parametrize("fault", ["Connection refused", "timed out", "too many 500 error responses"])
def test_an_outage_says_what_it_is(folder, monkeypatch, fault):
    class Broken(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(500)

        do_POST = do_GET
        log_message = lambda *_: None  # noqa: E731

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with http.server.HTTPServer(("127.0.0.1", 0), Broken) as server:
        if fault.startswith("too many"):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        elif fault == "Connection refused":
            server.server_close()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{server.server_port}/{'long/' * 60}")
        with pytest.raises(UserError, match=f"{fault}.*start it, or unset MLFLOW_TRACKING_URI") as caught:
            sync(Path("."))
        if fault.startswith("too many"):
            server.shutdown()
    assert "secret" not in str(caught.value)


def test_the_store_is_at_the_root_of_the_repository_unless_the_user_says_otherwise(folder, monkeypatch):
    assert tracking_uri() == f"sqlite:///{folder}/mlflow.db"
    monkeypatch.setenv("DVC_ROOT", str(folder.parent))  # as in an experiment, which DVC runs in a temporary copy
    assert tracking_uri() == f"sqlite:///{folder.parent}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert tracking_uri() == "http://127.0.0.1:9"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_ui_imports_serves_on_this_machine_alone_and_ends_whole(folder, database, monkeypatch, ending):
    if ending == signal.SIGINT:
        Run("vit", 0, [0.1, 0.2]).finish()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("PORT", str(port))
    (recipe,) = re.findall(r"^\t\$\(RUN\) (.*tracking ui)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (folder / "Makefile").write_text(f"ui:\n\tPATH={Path(sys.executable).parent}:$$PATH {recipe}\n")
    command = ["make", "--silent", "ui"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests themselves may run under nohup
    )
    with process.stdout:
        said = [process.stdout.readline() for _ in range(4)]
        assert [line.split("  ")[0] for line in said[1:]] == ["Models", "Models, seed by seed", "Curves of the models"]
        page = f"http://127.0.0.1:{port}/#/experiments/1/runs?workflowType=machine_learning&viewStateShareKey="
        assert said[1].split()[-1] == f"{page}models"
        until(lambda: is_served(port))
        if ending == signal.SIGINT:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
                opening, rest = answer.read().decode().split("</script>", 1)
            address = said[1].split()[-1].removeprefix(f"http://127.0.0.1:{port}/")
            assert f'location.replace("{address}")' in opening and "static-files/" in rest  # MLflow's own page follows
            query = json.dumps({"experiment_ids": ["1"]}).encode()
            search = f"http://127.0.0.1:{port}/api/2.0/mlflow/runs/search"
            request = urllib.request.Request(search, query, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                found = {run["info"]["run_name"]: run["info"]["run_id"] for run in json.load(answer)["runs"]}
            assert found.keys() == {"ViT", "ViT, seed 0"}
            artifact = f"http://127.0.0.1:{port}/get-artifact?path=history.csv&run_uuid={found['ViT, seed 0']}"
            with urllib.request.urlopen(artifact) as answer:
                assert answer.read().decode().startswith(COLUMNS)
        if ending == signal.SIGTERM:
            os.kill(process.pid, ending)  # make alone
        else:
            os.killpg(process.pid, ending)  # as the terminal does for Ctrl-C, and where it is closed
        process.wait(600)
        until(lambda: not is_served(port))
    assert not is_served(port)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nothing that it started is left


def is_served(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_ui_refuses_a_port_that_is_taken(folder, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("PORT", str(server.getsockname()[1]))
        with pytest.raises(UserError, match="PORT="):
            ui()
