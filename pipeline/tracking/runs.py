"""The runs in MLflow: a parent for each configuration that a study trains, and under it a child for each seed.

A parent holds means over the seeds that did not diverge, as Table 2 does. A child is known by the study, the name and the
`run_key` of its record, and each of its points by its step; so whatever is said twice, and by whomever, stands there once.
"""

import csv
import hashlib
import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from filelock import FileLock, Timeout

from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.core.files import read_json
from pipeline.report.numbers import plain
from pipeline.tracking.notes import EXPERIMENT, TABLE_2, Notes

ENVIRONMENT = {  # set before MLflow is imported, where the user has not set them
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its background jobs are for language models
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "GIT_PYTHON_REFRESH": "quiet",
}
PATIENCE_SECONDS = 60  # with another process that writes
POINTS_PER_BATCH = 100  # MLflow takes 1,000 metrics at once; a point has five
ENDED = ("FINISHED", "FAILED")  # in MLflow's words; the second has diverged
# In the order in which they are logged, which is that of MLflow's pages: the page Compare opens on the first.
CURVES = ("test_accuracy", "test_loss", "train_accuracy", "train_loss", "epoch")
COSTS = ("seconds", "images_per_second")

Point = tuple[int, int, dict[str, float]]  # step, milliseconds since 1970, the values that are finite


class Tracker:
    """The experiment in MLflow. Every method may be called again, or by two processes at once, and doubles nothing."""

    def __init__(self) -> None:
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        from mlflow import MlflowClient, entities  # here and not above: a watcher must live without it

        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)
        # Unchecked: the schema imports every study, and an edit under way must not stop a watcher.
        self.entities, self.notes = entities, Notes(params.load_paper(), params.read("params.yaml") or {})
        uri = tracking_uri()
        is_sqlite = uri.startswith("sqlite:///")
        database = Path(uri.removeprefix("sqlite:///").partition("?")[0]) if is_sqlite else root() / "mlflow.db"
        if not database.parent.is_dir():
            raise UserError(f"MLFLOW_TRACKING_URI names {database}, but there is no folder {database.parent}: create it.")
        self.lock = FileLock(f"{database}.lock", timeout=PATIENCE_SECONDS)
        with self.lock:  # two processes must create neither the database nor the experiment at once
            if is_sqlite and not (database.exists() and database.stat().st_size):
                # Half a migration cannot be mended, so that a kill must not leave one: made aside, then renamed.
                partial = database.with_name(f"{database.name}.partial")
                partial.unlink(missing_ok=True)
                MlflowClient(f"sqlite:///{partial}").search_experiments()
                os.replace(partial, database)
            self.client = MlflowClient(uri)
            self.experiment = self._open_experiment(is_remote=uri.startswith("http"))

    def _open_experiment(self, *, is_remote: bool) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.notes.paper.title
        found = self.client.get_experiment_by_name(name)
        if found is None:
            artifacts = None if is_remote else (root() / "mlartifacts").as_uri()
            tags = {
                "mlflow.note.content": EXPERIMENT,
                "mlflow.experimentKind": "custom_model_development",
            }  # not language models
            return self.client.create_experiment(name, artifacts, tags)
        if found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def runs(self, **tags: str) -> list:
        """The runs with these tags, newest first."""
        query, order = " and ".join(f"tags.{key} = '{value}'" for key, value in tags.items()), ["attributes.start_time DESC"]
        return list(self.client.search_runs([self.experiment], query, max_results=50_000, order_by=order))

    def publish(self, record: dict, points: list[Point], folder: Path, status: str = "RUNNING") -> None:
        """Brings the run of an unfinished training up to its last point. `folder` is where the training can resume."""
        with self.lock:
            run = self._run(record)
        if run is None:
            return
        self._log_points(run.info.run_id, points)
        if run.info.status != status or "checkpoint" not in run.data.tags:
            (self.client.set_terminated if status == "KILLED" else self.client.update_run)(run.info.run_id, status)
            self._tag(run, checkpoint=f"{platform.node()}:{folder.resolve()}")
            self.refresh(record["study"], record["name"])

    def finish(self, record: dict, base: Path) -> bool:
        """Imports a finished training from `base`/runs. Returns False if there was nothing to import."""
        folder, weights = outputs(record, base), outputs(record, base, "weights").with_suffix(".pt")
        metrics, points = read_json(folder / "metrics.json"), read_points(folder / "history.csv", record)
        if len(points) != len(record["timestamps"]) or points[-1][0] != metrics["steps"]:
            raise UserError(f"{folder} is not what its record tells of: `git checkout` or `dvc repro` mends it.")
        once = {key: _shown(key, record[key]) for key in COSTS if record[key] is not None}
        accuracy = None if metrics["diverged"] else points[-1][2]["test_accuracy"]
        ended = _milliseconds(record["finished_at"])
        with self.lock:
            run = self._run(record)
            if run is None or (run.info.status in ENDED and (run.data.tags["weights"] == "true" or not weights.exists())):
                return False
            run_id = run.info.run_id
            self._log(run_id, params={"num_parameters": metrics["num_parameters"]})
            self._log_points(run_id, points)
            self._log(run_id, points=[(0, ended, self._beside_paper(record, accuracy) | once)])
            self.client.log_artifacts(run_id, str(folder))
            if weights.exists():
                self.client.log_artifact(run_id, str(weights), "weights")
            self._tag(run, weights=weights.exists())
            # Last, so that an import cut short is not taken for a whole one.
            self.client.set_terminated(run_id, "FAILED" if metrics["diverged"] else "FINISHED", ended)
            return True

    def refresh(self, study: str, name: str) -> None:
        """Settles which runs of a name are current, the newest finished of each seed, and makes its parent runs."""
        with self.lock:
            children = self.runs(level="single", study=study, name=name)
            newest = _newest_finished(children)
            families: dict[str, list] = {}
            for run in children:
                self._tag(run, current=run.info.status == "RUNNING" or run is newest.get(run.data.tags["seed"]))
                families.setdefault(run.data.tags["configuration"], []).append(run)
            for family in families.values():
                parent = self._parent(family)
                self._tag(parent, current=any(run.data.tags["current"] == "true" for run in family))
                for run in family:
                    self._tag(run, **{"mlflow.parentRunId": parent.info.run_id})

    def sweep(self) -> None:
        """Marks as killed the runs of this machine whose training died along with its watcher."""
        for run in self.runs(level="single"):
            host, _, folder = run.data.tags.get("checkpoint", "").partition(":")
            if run.info.status == "RUNNING" and host == platform.node() and not is_alive(Path(folder)):
                self.client.set_terminated(run.info.run_id, "KILLED")

    def _run(self, record: dict) -> Any:
        """The run of this training, made if it is new; None if there is a later training of the same numbers and name."""
        started = _milliseconds(record["started_at"])
        same = self.runs(level="single", **{key: record[key] for key in ("run_key", "study", "name")})
        if same and same[0].info.start_time >= started:
            return same[0] if same[0].info.start_time == started else None
        for earlier in same:  # `dvc repro -f` leaves no twins
            self.client.delete_run(earlier.info.run_id)
        name = f"{self.notes.title(record)}, seed {record['seed']}"
        run_id = self.client.create_run(self.experiment, started, self._tags(record), name).info.run_id
        values = {f"{section}.{key}": value for section, of in record["config"].items() for key, value in of.items()}
        self._log(
            run_id, params={key: value for key, value in values.items() if value is not None} | {"seed": record["seed"]}
        )
        digest = record["data_sha256"][:36]  # as long as MLflow takes; the tag has it whole
        source = record["config"]["data"]["source"]
        dataset = self.entities.Dataset(source, digest, "local", json.dumps({"uri": f"data/{source}"}))
        context = self.entities.InputTag("mlflow.data.context", "training")
        self.client.log_inputs(run_id, [self.entities.DatasetInput(dataset, [context])])
        return self.client.get_run(run_id)

    def _tags(self, record: dict) -> dict[str, str]:
        """The tags of a child run; `configuration` is what the seeds under one parent have in common."""
        copied = ("study", "name", "variant", "seed", "run_key", "data_sha256", "code_sha256")
        tags = record["environment"] | {key: record[key] for key in copied} | {"changes": self.notes.changes(record)}
        family = [record[key] for key in ("study", "name", "data_sha256")] + [params.written_config(record["config"])]
        tags |= {"level": "single", "configuration": _digest(family), "current": True}
        tags |= {"mlflow.note.content": self.notes.note(tags, [record["seed"]])}
        return {key: plain(value) for key, value in tags.items()}

    def _parent(self, family: list) -> Any:
        """The parent run of one configuration, with statistics over the newest finished run of each seed.

        MLflow appends to a metric and never replaces it, so new statistics take a new parent, and the old one goes.
        """
        finished = sorted(_newest_finished(family).values(), key=lambda run: int(run.data.tags["seed"]))
        digest = _digest([run.info.run_id for run in finished])
        parents = self.runs(level="mean", configuration=family[0].data.tags["configuration"])
        if len(parents) == 1 and parents[0].data.tags.get("children") == digest:
            return parents[0]
        run_id = self._create_parent(finished or family)
        if finished:
            self._log_points(run_id, list(self._statistics(finished)))
        for parent in parents:
            self.client.delete_run(parent.info.run_id)
        self._log(run_id, tags={"children": digest})  # last, so that statistics cut short are made again
        return self.client.get_run(run_id)

    def _create_parent(self, children: list) -> str:
        """A parent run with what its children have in common: a heading, so never under way.

        A model's begins now, when its mean is taken: MLflow lists the newest first, and so the models before their seeds
        and studies.
        """
        tags = {
            key: value if all(run.data.tags.get(key) == value for run in children) else "mixed"
            for key, value in children[0].data.tags.items()
            if key not in ("run_key", "weights", "checkpoint") and not key.startswith("mlflow.")
        }
        seeds = [int(run.data.tags["seed"]) for run in children]
        tags |= {"level": "mean", "seed": ",".join(map(str, seeds)), "mlflow.note.content": self.notes.note(tags, seeds)}
        of_children = [at for run in children for at in (run.info.start_time, run.info.end_time) if at]
        times = [time.time_ns() // 1_000_000] if tags["study"] == TABLE_2 else of_children
        run_id = self.client.create_run(self.experiment, min(times), tags, self.notes.title(tags)).info.run_id
        self._log(run_id, params={key: value for key, value in children[0].data.params.items() if key != "seed"})
        self.client.set_terminated(run_id, "FINISHED", max(times))
        return run_id

    def _statistics(self, finished: list) -> Iterator[Point]:
        """The points of a parent run: at each step of all runs that did not diverge, and at step 0 what it has once."""
        runs = [run for run in finished if run.info.status == "FINISHED"]
        histories, last = [self._points(run) for run in runs], [run.data.metrics for run in runs]
        for step in sorted(set.intersection(*map(set, histories))) if runs else []:
            timestamp = max(history[step][0] for history in histories)
            yield step, timestamp, _over_runs(mean, [history[step][1] for history in histories], CURVES)
        once = {f"{key}_std": value for key, value in _over_runs(stdev, last if len(last) > 1 else [], CURVES[:-1]).items()}
        accuracy = _over_runs(mean, last, CURVES).get("test_accuracy")
        once |= self._beside_paper(finished[0].data.tags, accuracy) | _over_runs(mean, last, COSTS)
        once |= {"num_seeds": len(runs), "num_diverged": len(finished) - len(runs)}
        yield 0, max(run.info.end_time for run in finished), once

    def _beside_paper(self, run: dict, accuracy: float | None) -> dict[str, float]:
        """The paper's accuracy and the difference to it, of its models in Table 2."""
        number = self.notes.paper.table_2.get(run["variant"]) if run["study"] == TABLE_2 else None
        if number is None or accuracy is None:
            return {}
        return {"difference_to_paper": round(accuracy - number, 2), "paper_test_accuracy": number}

    def _points(self, run: Any) -> dict[int, tuple[int, dict[str, float]]]:
        points: dict[int, tuple[int, dict[str, float]]] = {}
        for key in CURVES:
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
        values = [self.entities.Param(key, plain(value)) for key, value in texts.get("params", {}).items()]
        tags = [self.entities.RunTag(key, plain(value)) for key, value in texts.get("tags", {}).items()]
        self.client.log_batch(run_id, metrics, values, tags)

    def _tag(self, run: Any, **tags: object) -> None:
        """Sets the tags that differ, in MLflow and in `run`."""
        changed = {key: plain(value) for key, value in tags.items() if run.data.tags.get(key) != plain(value)}
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


def alive(scratch: Path) -> FileLock:
    """The lock that a training holds for as long as it lives."""
    return FileLock(scratch / "alive")


def is_alive(scratch: Path) -> bool:
    """Whether the training that writes to `scratch` still runs, or another of the same."""
    if not scratch.exists():
        return False
    try:
        with alive(scratch).acquire(blocking=False):
            return False
    except Timeout:
        return True


def read_points(path: Path, record: dict) -> list[Point]:
    """The rows of a history. It and the record, which has their times, are not written at the same instant."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    unit = {key: 100 if "accuracy" in key else 1 for key in CURVES}  # files have accuracies as fractions
    return [
        (int(row["step"]), timestamp, {key: _shown(key, unit[key] * float(row[key])) for key in CURVES if row[key]})
        for row, timestamp in zip(rows, record["timestamps"], strict=False)
    ]


def _over_runs(statistic: Callable, rows: list[dict[str, float]], keys: Iterable[str]) -> dict[str, float]:
    """Of each key that all rows have, the statistic."""
    shared = set.intersection(*map(set, rows)) if rows else ()
    return {key: _shown(key, statistic(row[key] for row in rows)) for key in keys if key in shared}


def _shown(key: str, value: float) -> float:
    """With two digits of what is in per cent, and five significant ones of all else."""
    return round(value, 2) if "accuracy" in key else float(f"{value:.5g}")


def _newest_finished(runs: list) -> dict[str, Any]:
    """The newest finished run of each seed, of runs in the order newest first."""
    return {run.data.tags["seed"]: run for run in reversed(runs) if run.info.status in ENDED}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _milliseconds(timestamp: str) -> int:
    return round(datetime.fromisoformat(timestamp).timestamp() * 1000)


def without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)  # of an address


def cause(error: BaseException) -> str:
    """What is behind an error, on one line: MLflow's own message is a URL, and what was wrong with it comes last of all."""
    while behind := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = behind
    return without_password((str(error).splitlines() or [type(error).__name__])[0])


def warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)
