"""The runs in MLflow: a parent for each configuration that a study trains, and under it a child for each seed.

A parent holds mean and standard deviation over those seeds that did not diverge, as Table 2 does. A child is known by the
study, the name and the `run_key` of its record, and each of its points by its step; so whatever is said twice, and by
whomever, stands there once.
"""

import csv
import hashlib
import json
import logging
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.core.files import read_json, sha256
from pipeline.tracking import notes
from pipeline.tracking.notes import TABLE_2

EXPERIMENT = "Orthogonal Self-Attention"  # unless MLFLOW_EXPERIMENT_NAME is set
SOURCE = "pipeline/training/loop.py"
ENVIRONMENT = {  # set before MLflow is imported, where the user has not set them
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its background jobs are for language models
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "GIT_PYTHON_REFRESH": "quiet",
}
POINTS_PER_BATCH = 100  # MLflow takes 1,000 metrics at once; a point of a parent run has nine
FINISHED, DIVERGED = "FINISHED", "FAILED"  # in MLflow's words for a run that has ended
CURVES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
FIGURES = ("figure_1.svg", "figure_1.png", "table_2.md")

Point = tuple[int, int, dict[str, float]]  # step, milliseconds since 1970, the values that are finite


class Tracker:
    """The experiment in MLflow. Every method may be called again, or by two processes at once, and doubles nothing."""

    def __init__(self) -> None:
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        # Here and not above: a watcher must live without them, and importing them takes a second.
        from filelock import FileLock
        from mlflow import MlflowClient, entities

        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self.entities, self.paper = entities, params.load_paper()
        # Unchecked: the schema imports every study, and an edit under way must not stop a watcher.
        self.labels = (params.read("params.yaml") or {}).get("labels") or {}
        uri = tracking_uri()
        is_sqlite = uri.startswith("sqlite:///")
        database = Path(uri.removeprefix("sqlite:///").partition("?")[0]) if is_sqlite else root() / "mlflow.db"
        database.parent.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(f"{database}.lock", timeout=60)
        with self.lock:  # two processes must create neither the database nor the experiment at once
            if is_sqlite and not database.exists():
                # Half a migration cannot be mended, so that a kill must not leave one: made aside, then renamed.
                partial = database.with_name(f"{database.name}.partial")
                partial.unlink(missing_ok=True)
                MlflowClient(f"sqlite:///{partial}").search_experiments()
                os.replace(partial, database)
            self.client = MlflowClient(uri)
            self.experiment = self._open_experiment(is_remote=uri.startswith("http"))

    def _open_experiment(self, *, is_remote: bool) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self.client.get_experiment_by_name(name)
        if found is None:
            artifacts = None if is_remote else (root() / "mlartifacts").as_uri()
            tags = {"mlflow.experimentKind": "custom_model_development"}  # not for language models, the default
            return self.client.create_experiment(name, artifacts, tags)
        if found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def runs(self, **tags: str) -> list:
        """The runs with these tags, newest first."""
        query = " and ".join(f"tags.{key} = '{value}'" for key, value in tags.items())
        order = ["attributes.start_time DESC"]
        return list(self.client.search_runs([self.experiment], query, max_results=50_000, order_by=order))

    def publish(self, record: dict, points: list[Point], folder: Path, status: str = "RUNNING") -> None:
        """Brings the run of an unfinished training up to its last point. `folder` is where the training can resume."""
        with self.lock:
            run = self._find(record) or self._create_child(record)
        if run.info.start_time > _milliseconds(record["started_at"]):
            return
        self._log_points(run.info.run_id, points)
        if run.info.status != status or "checkpoint" not in run.data.tags:
            (self.client.set_terminated if status == "KILLED" else self.client.update_run)(run.info.run_id, status)
            self._tag(run, status=status.lower(), checkpoint=f"{platform.node()}:{folder.resolve()}")
            self.refresh(record["study"], record["name"])

    def finish(self, record: dict, base: Path) -> bool:
        """Imports a finished training from `base`/runs. Returns False if there was nothing to import."""
        folder, weights = outputs(record, base), outputs(record, base, "weights").with_suffix(".pt")
        with self.lock:
            run = self._find(record)
            if run and (run.info.start_time > _milliseconds(record["started_at"]) or _is_whole(run, weights)):
                return False
            metrics, points = read_json(folder / "metrics.json"), read_points(folder / "history.csv", record)
            if len(points) != len(record["timestamps"]) or points[-1][0] != metrics["steps"]:
                raise UserError(f"{folder} is not what its record tells of: `git checkout` or `dvc repro` mends it.")
            run = run or self._create_child(record)
            run_id, ended = run.info.run_id, _milliseconds(record["finished_at"])
            self._describe(run_id, record | {"num_parameters": metrics["num_parameters"]})
            self._log_points(run_id, points)
            self._log(run_id, points=[(0, ended, _scalars(record, metrics, points))])
            for name in ("history.csv", "metrics.json"):
                self.client.log_artifact(run_id, str(folder / name))
            if weights.exists():
                self.client.log_artifact(run_id, str(weights), "weights")
            self.client.log_text(run_id, json.dumps(record, indent=2, sort_keys=True), "record.json")
            self._tag(run, status=record["status"], diverged=metrics["diverged"], weights=weights.exists())
            # Last, so that an import cut short is not taken for a whole one.
            self.client.set_terminated(run_id, DIVERGED if metrics["diverged"] else FINISHED, ended)
            return True

    def refresh(self, study: str, name: str) -> None:
        """Settles which runs of a name are current, the newest finished of each seed, and makes its parent runs."""
        with self.lock:
            children = self.runs(level="seed", study=study, name=name)
            newest = _newest_finished(children)
            families: dict[str, list] = {}
            for run in children:
                is_current = run.info.status == "RUNNING" or run is newest.get(run.data.tags["seed"])
                self._tag(run, current=is_current)
                families.setdefault(run.data.tags["configuration"], []).append(run)
            for family in families.values():
                parent = self._parent(family)
                self._tag(parent, current=any(run.data.tags["current"] == "true" for run in family))
                for run in family:
                    self._tag(run, **{"mlflow.parentRunId": parent.info.run_id})

    def sweep(self) -> None:
        """Marks as killed the runs of this machine whose training died along with its watcher and cannot resume."""
        for run in self.runs(level="seed", status="running"):
            host, _, folder = run.data.tags.get("checkpoint", "").partition(":")
            if host == platform.node() and not Path(folder).exists():
                self.client.set_terminated(run.info.run_id, "KILLED")
                self._tag(run, status="killed")

    def attach_figures(self, folder: Path) -> None:
        """Puts the report's figure and table beside the parent runs that they show, those of Table 2."""
        paths = [path for name in FIGURES if (path := folder / name).exists()]
        digest = _digest([sha256(path) for path in paths])
        for run in self.runs(level="variant", current="true", study=TABLE_2):
            if paths and run.data.tags.get("figures") != digest:
                for path in paths:
                    self.client.log_artifact(run.info.run_id, str(path))
                self._tag(run, figures=digest)

    def _same(self, record: dict) -> list:
        """The runs of trainings that are to give the same numbers under the same name."""
        return self.runs(**{key: record[key] for key in ("run_key", "study", "name")})

    def _find(self, record: dict) -> Any:
        """The run of this training or of a later one of the same; None if there is neither."""
        started = _milliseconds(record["started_at"])
        return next((run for run in self._same(record) if run.info.start_time >= started), None)

    def _create_child(self, record: dict) -> Any:
        for earlier in self._same(record):  # `dvc repro -f` leaves no twins
            self.client.delete_run(earlier.info.run_id)
        name = f"{notes.full_name(record)}/seed{record['seed']}"
        tags, started = _tags(record), _milliseconds(record["started_at"])
        run_id = self.client.create_run(self.experiment, started, tags, name).info.run_id
        self._describe(run_id, record)
        return self.client.get_run(run_id)

    def _describe(self, run_id: str, record: dict) -> None:
        """Parameters and data set of a child run, and a note on it."""
        values = dict(_flat({key: record[key] for key in ("config", "seed", "num_parameters") if key in record}))
        note = notes.of_seed(record, self.labels, self.paper)
        self._log(run_id, params=values, tags={"mlflow.note.content": note})
        digest = record["data_sha256"][:36]  # as long as MLflow takes; the tag has it whole
        dataset = self.entities.Dataset(record["config"]["data"]["source"], digest, "local", '{"uri": "data/mnist"}')
        context = self.entities.InputTag("mlflow.data.context", "training")
        self.client.log_inputs(run_id, [self.entities.DatasetInput(dataset, [context])])

    def _parent(self, family: list) -> Any:
        """The parent run of one configuration, with statistics over the newest finished run of each seed.

        MLflow appends to a metric and never replaces it, so new statistics take a new parent, and the old one goes.
        """
        finished = sorted(_newest_finished(family).values(), key=lambda run: int(run.data.tags["seed"]))
        digest = _digest([run.info.run_id for run in finished])
        parents = self.runs(level="variant", configuration=family[0].data.tags["configuration"])
        if len(parents) == 1 and parents[0].data.tags.get("children") == digest:
            return parents[0]
        run_id = self._create_parent(finished or family)
        self._log_points(run_id, list(self._statistics(finished)))
        for parent in parents:
            self.client.delete_run(parent.info.run_id)
        self._log(run_id, tags={"children": digest})  # last, so that statistics cut short are made again
        return self.client.get_run(run_id)

    def _create_parent(self, children: list) -> str:
        """A parent run with what its children have in common: a heading, so never under way."""
        tags = {
            key: value if all(run.data.tags.get(key) == value for run in children) else "mixed"
            for key, value in children[0].data.tags.items()
            if key not in ("run_key", "weights", "checkpoint") and not key.startswith("mlflow.")
        }
        seeds = [run.data.tags["seed"] for run in children]
        note = notes.of_family(tags, seeds, self.labels, self.paper)
        tags |= {"level": "variant", "seed": ",".join(seeds), "mlflow.note.content": note}
        start = min(run.info.start_time for run in children)
        name = notes.full_name(tags, self.labels)
        run_id = self.client.create_run(self.experiment, start, tags, name).info.run_id
        self._log(run_id, params={key: value for key, value in children[0].data.params.items() if key != "seed"})
        self.client.set_terminated(run_id, FINISHED, max(run.info.end_time or start for run in children))
        return run_id

    def _statistics(self, finished: list) -> Iterator[Point]:
        """The points of a parent run: at each step of all runs that did not diverge, and at step 0 for their scalars."""
        if not finished:
            return
        runs = [run for run in finished if run.info.status == FINISHED]
        histories = [self._points(run) for run in runs]
        for step in sorted(set.intersection(*map(set, histories))) if histories else []:
            rows = [history[step][1] for history in histories]
            timestamp = max(history[step][0] for history in histories)
            yield step, timestamp, {"epoch": rows[0]["epoch"]} | _mean_and_std(rows, CURVES)
        rows = [run.data.metrics for run in runs]
        once = [key for row in rows[:1] for key in row if key.startswith(("final_", "seconds", "images_"))]
        scalars = _mean_and_std(rows, once) | {"num_seeds": len(runs), "num_diverged": len(finished) - len(runs)}
        tags = finished[0].data.tags
        if tags["study"] == TABLE_2 and tags["variant"] in self.paper.table_2:
            scalars["paper_test_accuracy"] = round(self.paper.table_2[tags["variant"]] / 100, 6)
        yield 0, max(run.info.end_time for run in finished), scalars

    def _points(self, run: Any) -> dict[int, tuple[int, dict[str, float]]]:
        points: dict[int, tuple[int, dict[str, float]]] = {}
        for key in ("epoch", *CURVES):
            for metric in self.client.get_metric_history(run.info.run_id, key):
                points.setdefault(metric.step, (metric.timestamp, {}))[1][key] = metric.value
        return points

    def _log_points(self, run_id: str, points: list[Point]) -> None:
        """Logs the points whose step the run lacks: a resumed training repeats some steps, at a later time."""
        known = {metric.step for metric in self.client.get_metric_history(run_id, "epoch")}
        points = [point for point in points if point[0] not in known]
        for first in range(0, len(points), POINTS_PER_BATCH):
            self._log(run_id, points=points[first : first + POINTS_PER_BATCH])

    def _log(self, run_id: str, *, points: Iterable[Point] = (), **texts: dict[str, object]) -> None:
        """One batch; `texts` are the dictionaries `params` and `tags`."""
        metrics = [self.entities.Metric(key, value, at, step) for step, at, row in points for key, value in row.items()]
        values = [self.entities.Param(key, _text(value)) for key, value in texts.get("params", {}).items()]
        tags = [self.entities.RunTag(key, _text(value)) for key, value in texts.get("tags", {}).items()]
        self.client.log_batch(run_id, metrics, values, tags)

    def _tag(self, run: Any, **tags: object) -> None:
        """Sets the tags that differ, in MLflow and in `run`."""
        changed = {key: _text(value) for key, value in tags.items() if run.data.tags.get(key) != _text(value)}
        if changed:
            self._log(run.info.run_id, tags=changed)
            run.data.tags.update(changed)


def root() -> Path:
    """The repository root, also where DVC runs a stage in a temporary copy of the repository."""
    return Path(os.environ.get("DVC_ROOT") or ".").resolve()


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or the SQLite database at the repository root."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(root() / 'mlflow.db').as_posix()}"


def outputs(record: dict, base: Path, kind: str = "runs") -> Path:
    """Where the files of a record's run lie under `base`; its weights, without .pt, with the kind weights."""
    return base / kind / record["study"] / record["name"] / str(record["seed"])


def read_points(path: Path, record: dict) -> list[Point]:
    """The rows of a history. It and the record, which has their times, are not written at the same instant."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        (int(row.pop("step")), timestamp, {key: float(value) for key, value in row.items() if value})
        for row, timestamp in zip(rows, record["timestamps"], strict=False)
    ]


def _tags(record: dict) -> dict[str, str]:
    """The tags of a child run; `configuration` is what the seeds under one parent have in common."""
    copied = ("study", "name", "variant", "seed", "run_key", "data_sha256", "code_sha256", "status")
    family = [record[key] for key in ("study", "name", "config", "data_sha256")]
    tags = record["environment"] | {key: record[key] for key in copied}
    tags |= {"level": "seed", "configuration": _digest(family)}
    tags |= {"current": True, "diverged": False, "mlflow.source.type": "LOCAL"}
    tags |= {"mlflow.source.name": SOURCE, "mlflow.source.git.commit": record["environment"]["git_commit"]}
    return {key: _text(value) for key, value in tags.items()}


def _scalars(record: dict, metrics: dict, points: list[Point]) -> dict[str, float]:
    """The numbers that a child run has once, logged at step 0, which MLflow draws as bars."""
    scalars = {f"final_{key}": metrics[key] for key in CURVES}
    scalars |= {key: record[key] for key in ("seconds", "images_per_second")}
    measured = [(row["test_accuracy"], -step) for step, _, row in points if "test_accuracy" in row]
    if measured:
        scalars["best_test_accuracy"], negated_step = max(measured)
        scalars["best_step"] = -negated_step  # the first of equals
    return {key: value for key, value in scalars.items() if value is not None}


def _mean_and_std(rows: list[dict[str, float]], keys: Iterable[str]) -> dict[str, float]:
    """Of each key that all rows have: its mean, and its standard deviation (n - 1) over two rows or more."""
    table = pd.DataFrame(rows, columns=list(keys)).dropna(axis="columns")
    return dict(table.mean().add_suffix("_mean")) | dict(table.std().dropna().add_suffix("_std"))


def _is_whole(run: Any, weights: Path) -> bool:
    return run.info.status in (FINISHED, DIVERGED) and (run.data.tags["weights"] == "true" or not weights.exists())


def _newest_finished(runs: list) -> dict[str, Any]:
    """The newest finished run of each seed, of runs in the order newest first."""
    newest: dict[str, Any] = {}
    for run in runs:
        if run.info.status in (FINISHED, DIVERGED):
            newest.setdefault(run.data.tags["seed"], run)
    return newest


def _flat(tree: dict) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{rest}".removeprefix("config."), leaf) for rest, leaf in _flat(value))
        else:
            yield key, value


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _milliseconds(timestamp: str) -> int:
    return round(datetime.fromisoformat(timestamp).timestamp() * 1000)


def without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)  # of an address


def first_line(error: Exception) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return without_password(line if len(line) < 200 else f"{line[:200]}…")


def warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)
