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
from pathlib import Path

import mlflow
import pytest
from filelock import FileLock

from pipeline import runs, tracking, train
from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.drawing.looks import look
from pipeline.tracking import records, store
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

    def __init__(self, variant, seed, accuracies, *, key="", minutes=0, diverged=False, study="table_2", **head):
        self.variant, self.seed, self.accuracies, self.diverged = variant, seed, accuracies, diverged
        self.run = runs.Run(variant, seed, study, {"init": head} if head else {})
        self.key = key or f"key-{self.run.name}-{seed}"
        self.config = {"data": {"source": "mnist"}, "init": {"head": "xavier"} | head, "train": {"learning_rate": 0.0003}}
        self.start = START + timedelta(minutes=minutes, seconds=seed)
        self.scratch = Path(".checkpoints") / study / self.run.name / f"{seed}-{self.key[:12]}"

    def write(self, folder, status, count, delay=0):
        rows = [f"{117 * i},{i / 4},{2 - a},{a - 0.01},{2.1 - a},{a}" for i, a in enumerate(self.accuracies[:count])]
        if self.diverged:
            rows[-1] = f"{117 * (count - 1)},{(count - 1) / 4},,,,{self.accuracies[-1]}"
        files.write_text(folder / "history.csv", "\n".join([COLUMNS, *rows]) + "\n")
        record = {key: getattr(self.run, key) for key in ("study", "name", "variant", "overrides", "seed")}
        record |= {"run_key": self.key, "status": status, "config": self.config, "seconds": 300.0 + self.seed}
        record |= {"data_sha256": "da7a" * 16, "numerics": 1, "images_per_second": 1000.0}
        record |= {"environment": {"git_commit": "c0ffee", "torch": "2.11.0", "device": "cpu"}}
        end = (self.start + timedelta(minutes=5)).isoformat()
        record |= {"started_at": self.start.isoformat(), "finished_at": None if status == "running" else end}
        record["timestamps"] = [round(self.start.timestamp() * 1000) + 1000 * i + delay for i in range(count)]
        files.write_json(folder / "record.json", record)
        return self

    def train(self, count, delay=0):
        """The first `count` points, as a training under way leaves them; `delay` as if some were measured again later."""
        return self.write(self.scratch, "running", count, delay)

    def finish(self, base=Path("."), weights=True):
        folder, count = base / self.run.folder, len(self.accuracies)
        metrics = {"diverged": self.diverged, "steps": 117 * (count - 1), "num_parameters": 31}
        files.write_json(folder / "metrics.json", metrics)
        if weights:
            files.write_bytes(base / self.run.weights, b"weights")
        shutil.rmtree(self.scratch, ignore_errors=True)
        return self.write(folder, "diverged" if self.diverged else "finished", count)


def client():
    return mlflow.MlflowClient(store.address())


def found(**tags):
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

    runs_ = found()
    assert set(runs_) == {
        "OSA (QR)",
        *(f"OSA (QR), seed {seed}" for seed in accuracies),
        "ViT (no skip)",
        "ViT (no skip), seed 0",
    }
    parent, child, diverged = (runs_[name] for name in ("OSA (QR)", "OSA (QR), seed 1", "ViT (no skip), seed 0"))
    columns, steps = [list(column) for column in zip(*accuracies.values(), strict=True)], [0, 117, 234]
    assert curve(child, "test_accuracy") == [(step, 100 * a) for step, a in zip(steps, accuracies[1], strict=True)]
    means = [round(100 * sum(column) / 3, 2) for column in columns]
    assert curve(parent, "test_accuracy") == list(zip(steps, means, strict=True))
    paper = PAPER.table_2["osa_qr"]
    expected = {
        "test_accuracy": means[-1],
        "test_accuracy_std": round(100 * statistics.stdev(columns[-1]), 2),
        "num_seeds": 3,
    }
    expected |= {"paper_test_accuracy": paper, "difference_to_paper": round(means[-1] - paper, 2), "epoch": 0.5}
    assert parent.data.metrics.items() >= expected.items()
    assert child.data.metrics["difference_to_paper"] == round(90 - paper, 2)
    for run in (parent, child):  # in this order MLflow shows them, and Compare opens on the first
        assert list(run.data.metrics)[:2] == ["test_accuracy", "test_loss"]
        assert run.data.tags["mlflow.runColor"] == look("osa_qr").colour
        assert str(paper) in run.data.tags["mlflow.note.content"] and run.data.tags["mlflow.user"] != "unknown"
    assert child.data.params.items() >= {"train.learning_rate": "0.0003", "seed": "1", "run": "table_2/osa_qr/1"}.items()
    tags = {"mlflow.parentRunId": parent.info.run_id, "mlflow.source.git.commit": "c0ffee", "mlflow.source.type": "LOCAL"}
    assert child.data.tags.items() >= (tags | {"variant": "osa_qr", "seed": "1", "current": "true"}).items()
    assert child.inputs.dataset_inputs[0].dataset.digest == ("da7a" * 16)[:36]
    assert (child.info.status, child.info.end_time - child.info.start_time) == ("FINISHED", 300_000)
    assert artifacts(child) == ["history.csv", "metrics.json", "record.json", "weights"]
    assert diverged.info.status == "FAILED" and "difference_to_paper" not in diverged.data.metrics
    assert curve(diverged, "test_loss") == [(0, 2.0)] and artifacts(diverged) == [
        "history.csv",
        "metrics.json",
        "record.json",
    ]
    newest = max((runs_["OSA (QR)"], runs_["ViT (no skip)"]), key=lambda run: run.info.start_time)
    assert artifacts(newest, "report") == ["report/report.html"]


def test_a_newer_measurement_takes_the_place_of_an_older_one(database):
    for seed, last in ((0, 0.5), (1, 0.7)):
        Run("vit", seed, [0.1, last]).finish()
    sync()
    Run("vit", 0, [0.1, 0.6], minutes=10).finish(weights=False)  # `dvc repro -f`: the same key again
    assert sync() == (1, 2)
    assert set(found()) == {"ViT", "ViT, seed 0", "ViT, seed 1"}
    assert curve(found()["ViT, seed 0"], "test_accuracy") == [(0, 10), (117, 60)]
    assert curve(found()["ViT"], "test_accuracy") == [(0, 10), (117, 65)]

    files.write_json(runs.Run("vit", 0).folder / "evaluation.json", {})  # files that come later are added
    assert sync() == (0, 2)
    assert "evaluation.json" in artifacts(found()["ViT, seed 0"])

    older = Path("older")  # an older training with another key, from another machine
    Run("vit", 0, [0.1, 0.2], key="other code", minutes=-10).finish(older)
    assert sync(older) == (1, 1)
    single = client().search_runs(["1"], "tags.level = 'single'")
    current = {run.data.tags["run_key"]: run.data.tags["current"] for run in single}
    assert current == {"key-vit-0": "true", "key-vit-1": "true", "other code": "false"}
    assert curve(found()["ViT"], "test_accuracy") == [(0, 10), (117, 65)]


def test_a_configuration_has_a_parent_of_its_own_and_one_of_fewer_or_former_keys_is_the_same(database):
    older, newer, explored = (
        Run("vit", 0, [0.1, 0.5]),
        Run("vit", 1, [0.1, 0.7]),
        Run("vit", 0, [0.1, 0.9], key="x", minutes=9),
    )
    older.config["init"]["former"], newer.config["train"]["clip_grad_norm"] = 1, None
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
    sync()
    parent = found()["ViT"]
    assert parent.data.metrics["test_accuracy_std"] == round(statistics.stdev([96, 98]), 2)
    assert (parent.data.metrics["num_seeds"], parent.data.metrics["num_diverged"]) == (2, 1)
    assert curve(parent, "test_accuracy") == [(0, 10), (117, 50), (234, 97)]  # beyond the divergence
    for seed in (0, 2):
        Run("vit", seed, [0.1, 0.098], minutes=10, diverged=True).finish()
    sync()
    metrics = found()["ViT"].data.metrics
    assert (metrics["num_seeds"], metrics["num_diverged"]) == (0, 3)
    assert not {"test_accuracy", "test_accuracy_std", "difference_to_paper"} & metrics.keys()


def test_views_show_the_models_first_and_each_study_beside_them(database):
    """Three of the runs are the same training, so that they have one key; none takes another's place."""
    Run("vit", 0, [0.1, 0.5], key="same").finish()
    Run("osa_qr", 0, [0.1, 0.6]).finish()
    Run("vit", 0, [0.1, 0.7], study="left_open", head="zeros").finish()
    Run("vit", 0, [0.1, 0.8], key="same", minutes=10, study="depth").finish()
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
    assert list(found(level="mean"))[:2] == ["OSA (QR)", "ViT"]  # the newest first, as without any view


def test_notes_name_commands_that_exist():
    listed = params.load(ROOT / "params.yaml").run
    notes = Notes(PAPER, params.read(ROOT / "params.yaml"))
    committed = [files.read_json(path) for path in ROOT.glob("paper_outputs/runs/*/*/*/record.json")]
    committed = [record for record in committed if record["study"] != TRIES]
    assert {record["study"] for record in committed} >= {"table_2", "left_open", "depth"}
    for record in committed:
        note = notes.note(record | {"changes": notes.changes(record)}, [record["seed"]])
        run = runs.Run(record["variant"], record["seed"], record["study"], record["overrides"])
        is_stage = run.study == TABLE_2 and run.variant in listed.variants and run.seed in listed.seeds
        other = f"python -m pipeline.train {run.variant} {run.seed}" if run.study == TABLE_2 else run.command
        assert f"`{run.command if is_stage else other}`" in note
        for section, values in record["overrides"].items() if run.study == "left_open" else ():
            for key, value in values.items():
                before, after = re.search(rf"{section}.{key}: (\S+) → (\S+)\. The paper leaves this open", note).groups()
                assert before not in ("None", after) and after == str(value).lower()
    tried = {"variant": "vit", "study": TRIES, "name": "vit+init.alpha=0.2+init.head=None", "changes": ""}
    assert "`python -m pipeline.train vit 2 --set init.alpha=0.2 --set init.head=null`" in notes.note(tried, [2])
    assert (TABLE_2, TRIES) == (runs.TABLE_2, runs.TRIES)


def test_a_running_training_moves_survives_a_kill_and_ends(database):
    first, second = Run("vit", 0, [0.1, 0.4, 0.5, 0.6]).train(3), Run("vit", 1, [0.2, 0.3, 0.4, 0.5]).train(2)
    assert sync() == (2, 2)
    run = found()["ViT, seed 0"]
    assert run.info.status == "RUNNING" and len(curve(run, "epoch")) == 3 and run.data.tags["current"] == "true"
    assert run.data.tags["mlflow.parentRunId"] == found()["ViT"].info.run_id

    old = time.time() - 2 * records.LOST_SECONDS
    os.utime(first.scratch / "record.json", (old, old))  # the power failed long ago
    shutil.rmtree(second.scratch)
    sync()
    assert [found()[f"ViT, seed {seed}"].info.status for seed in (0, 1)] == ["KILLED", "KILLED"]
    assert found()["ViT, seed 0"].data.tags["current"] == "false"

    first.train(2), sync()  # resumed from an earlier epoch: the third point is measured again, later
    assert found()["ViT, seed 0"].info.status == "RUNNING"
    first.train(4, delay=60_000).finish(), second.finish()
    assert sync() == (0, 2)
    assert found()["ViT, seed 0"].info.run_id == run.info.run_id
    for seed, training in enumerate((first, second)):
        assert found()[f"ViT, seed {seed}"].info.status == "FINISHED"
        points = [(117 * i, 100 * a) for i, a in enumerate(training.accuracies)]
        assert curve(found()[f"ViT, seed {seed}"], "test_accuracy") == points
    assert curve(found()["ViT"], "test_accuracy")[-1] == (351, 55)


def test_what_somebody_edited_in_mlflow_is_written_again(database, capsys):
    Run("vit", 0, [0.1, 0.5]).finish(), Run("vit", 1, [0.1, 0.7]).finish(), sync()
    before = {name: run.data for name, run in found().items()}
    ids = {name: run.info.run_id for name, run in found().items()}
    for key in ("study", "name", "seed", "configuration", "files"):
        client().delete_tag(ids["ViT, seed 0"], key)
    client().set_tag(ids["ViT, seed 1"], "seed", "word")
    client().set_tag(ids["ViT, seed 1"], "mlflow.note.content", "mine")
    client().delete_tag(ids["ViT"], "configuration")
    assert sync() == (0, 2)
    after = found()
    for name in before:
        ours = {key: value for key, value in before[name].tags.items() if not key.startswith("mlflow.")}
        assert after[name].data.tags.items() >= ours.items() and after[name].data.metrics == before[name].metrics
    assert after["ViT, seed 1"].data.tags["mlflow.note.content"] == "mine"

    client().rename_experiment("1", "mine")
    assert sync() == (2, 2)  # into an experiment of the right name
    shutil.rmtree("paper_outputs")
    client().delete_tag(client().search_runs(["2"], "params.run = 'table_2/vit/0'")[0].info.run_id, "configuration")
    assert sync() == (0, 0) and "table_2/vit/0" in capsys.readouterr().err


def test_one_bad_record_is_one_sentence_and_the_rest_is_imported(database, capsys):
    base = Path("foreign")
    for seed in range(8):
        Run("vit", seed, [0.1, 0.2]).finish(base)
    Run("vit", 0, [0.1, 0.2], study="it's").finish(base)
    secret = Path("secret/vit/0")
    Run("vit", 0, [0.1, 0.2]).finish(Path("other")), shutil.copytree("other/paper_outputs/runs/table_2/vit/0", secret)
    files.write_text(secret / "key.txt", "secret")
    folder = base / "paper_outputs/runs/table_2/vit"
    whole = files.read_json(folder / "1/record.json")
    changes = {
        1: {"study": "../../../../secret"},
        2: {"seed": "two"},
        3: {"environment": 3},
        4: {"history_sha256": "0" * 64},
    }
    for seed, change in changes.items():
        files.write_json(folder / f"{seed}/record.json", whole | {"seed": seed} | change)
    files.write_text(folder / "5/record.json", "{")
    (folder / "6/history.csv").unlink()
    (folder / "7/metrics.json").unlink(), (folder / "7/metrics.json").symlink_to(Path("other").resolve() / "params.yaml")
    assert sync(base) == (2, 9)
    warnings = capsys.readouterr().err.splitlines()
    assert sorted(line.split()[1] for line in warnings) == [f"{folder}/{seed}/record.json" for seed in range(1, 8)]
    assert set(found(level="single")) == {"ViT, seed 0", "ViT, it's, seed 0"}
    assert not list(Path("mlartifacts").rglob("key.txt"))


def test_a_store_that_cannot_be_used_says_why_and_is_never_to_be_deleted(database, monkeypatch):
    def said(uri=None):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri) if uri else monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with pytest.raises(UserError) as caught:
            sync()
        text = str(caught.value)
        assert "delete" not in text and "secret" not in text and "\n" not in text
        return text

    Run("vit", 0, [0.1, 0.2]).finish()
    with pytest.raises(UserError, match="--from nowhere"):
        sync(Path("nowhere"))
    assert "create it" in said(f"sqlite:///{Path('typo/mlflow.db').absolute()}")
    for uri in ("postgresql+nothing://me:secret@127.0.0.1/runs", "sqlte:///mlflow.db", "ftp://me:s/e@secret@there"):
        assert "MLFLOW_TRACKING_URI" in said(uri)
    assert "psycopg" in said("postgresql://me:secret@127.0.0.1/runs")
    with sqlite3.connect("mlflow.db") as opened:
        opened.execute("update alembic_version set version_num = '451aebb31d03'")
    assert "mlflow db upgrade" in said() and "mlflow db upgrade" in said(f"sqlite:///{Path().absolute()}/./mlflow.db")
    Path("mlflow.db").write_bytes(b"no database" * 100)
    assert "not a database" in said() and "move it away" in said()
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0.1)
    with FileLock("mlflow.db.lock"):
        assert "wait" in said()


@pytest.mark.parametrize("fault", ["Connection refused", "timed out", "too many 500 error responses"])
def test_an_outage_says_what_it_is_and_stops_no_training(folder, monkeypatch, capsys, fault):
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
        tracking.sync_quietly(Run("vit", 0, [0.1]).finish().run)
        if fault.startswith("too many"):
            server.shutdown()
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("warning: table_2/vit/0") and fault in sentence and "secret" not in sentence


def test_a_training_that_has_ended_is_brought_alone(folder, monkeypatch, capfd):
    ended = Run("vit", 0, [0.1, 0.5]).finish()
    Run("vit", 1, [0.1, 0.5]).finish()
    tracking.sync_quietly(ended.run)
    assert set(found()) == {"ViT", "ViT, seed 0"} and capfd.readouterr() == ("", "")
    monkeypatch.setattr(tracking, "PATIENCE_SECONDS", 0.01)
    tracking.sync_quietly(ended.run)
    files.write_text("without/mlflow/__init__.py", "raise ImportError('no such thing')\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'without'}{os.pathsep}{ROOT}")
    monkeypatch.setattr(tracking, "PATIENCE_SECONDS", 600)
    tracking.sync_quietly(ended.run)
    slow, without = capfd.readouterr().err.splitlines()
    assert slow.startswith("warning: ") and "no such thing" in without


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
    assert set(found()) == {"ViT", "ViT, seed 0", "ViT, seed 1"} and curve(found()["ViT"], "num_seeds") == [(0, 2)]
    assert "history.csv" in artifacts(found()["ViT, seed 0"])
    made = {"mlflow.db", "mlflow.db.lock", "mlartifacts", "paper_outputs", "params.yaml"}
    assert {path.name for path in folder.iterdir()} == made and len(list(folder.parent.iterdir())) == 1


def test_the_store_is_at_the_root_of_the_repository_unless_the_user_says_otherwise(folder, monkeypatch):
    assert store.address() == f"sqlite:///{folder}/mlflow.db"
    monkeypatch.setenv("DVC_ROOT", str(folder.parent))  # as in an experiment, which DVC runs in a temporary copy
    assert store.address() == f"sqlite:///{folder.parent}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert store.address() == "http://127.0.0.1:9"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_ui_serves_on_this_machine_alone_follows_and_ends_whole(folder, database, monkeypatch, ending):
    Run("vit", 0, [0.1, 0.2]).finish()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("PORT", str(port))
    command = [sys.executable, "-m", "pipeline.tracking", "ui"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process.stdout:
        printed = [process.stdout.readline() for _ in range(4)]
        assert [line.split("  ")[0] for line in printed] == [
            "MLflow",
            "Models",
            "Models, seed by seed",
            "Curves of the models",
        ]
        site = f"http://127.0.0.1:{port}"
        assert printed[0].split()[-1] == site and printed[1].split()[-1].startswith(f"{site}/#/experiments/1/")
        until(lambda: set(found()) == {"ViT", "ViT, seed 0"})
        if ending == signal.SIGINT:
            with urllib.request.urlopen(site) as answer:
                assert b"static-files/" in answer.read()
            name = found()["ViT, seed 0"].info.run_id
            until(lambda: "record.json" in artifacts(found()["ViT, seed 0"]))
            with urllib.request.urlopen(f"{site}/get-artifact?path=history.csv&run_uuid={name}") as answer:
                assert answer.read().decode().startswith(COLUMNS)
            Run("vit", 1, [0.1, 0.2, 0.3]).train(2)
            until(lambda: "ViT, seed 1" in found())
        os.kill(process.pid, ending)
        assert process.wait(600) == 0
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", port)) != 0  # nothing that it started is left


def test_ui_refuses_a_port_that_is_taken(folder, monkeypatch):
    from pipeline.tracking.ui import ui

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("PORT", str(server.getsockname()[1]))
        with pytest.raises(UserError, match="PORT="):
            ui()


@pytest.mark.parametrize("options", [[], ["--no-tracking"]])
def test_a_training_is_brought_at_its_end_unless_it_is_not_to_be(monkeypatch, options):
    brought = []
    monkeypatch.setattr(train, "train", lambda run, config, **_: None)
    monkeypatch.setattr(train, "make_deterministic", lambda: None)
    monkeypatch.setattr(tracking, "sync_quietly", brought.append)
    monkeypatch.setattr(sys, "argv", ["train", "vit", "3", *options])
    train.main()
    assert brought == ([] if options else [runs.Run("vit", 3)])
