"""Brings MLflow up to date with the files: a parent run for each configuration, and under it a child for each seed.

One search says what MLflow has. The name of a run stands in its parameter `run`, which nobody can edit; tags that somebody
edited or deleted are written again. So it may be called at any time and by several processes, and doubles nothing.
"""

import getpass
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tqdm import tqdm

from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.params import plain
from pipeline.drawing.looks import look
from pipeline.tracking import records, store
from pipeline.tracking.notes import EXPERIMENT, TABLE_2, Notes
from pipeline.tracking.records import CURVES, Point, Training, rounded
from pipeline.tracking.views import views

POINTS_PER_BATCH = 100  # MLflow takes 1,000 metrics at once; a point has five
ENDED = ("FINISHED", "FAILED")  # in MLflow's words; the second has diverged
COSTS = ("seconds", "images_per_second")
OWN = ("study", "name", "variant", "seed", "run_key", "data_sha256", "numerics")  # tags, from a record
ENVIRONMENT = ("device", "device_name", "git_commit", "git_dirty", "num_threads", "platform", "python", "torch")
REPORT = ("figure_1.svg", "figure_1.png", "report.html")  # artifacts of the newest parent
SHOWN = 5  # runs to import, from which on there is a progress bar


def sync(base: Path = Path("."), *, only: str | None = None, opened: tuple | None = None) -> tuple[int, int]:
    """Imports what MLflow lacks of the runs under `base`, and of those that train here; with `only`, of that run alone.

    Returns how many were new, of how many. `opened` is what `store.connect` gave before.

    Raises:
        UserError: `base` holds no runs, or MLflow is not installed, does not answer or cannot read its store.
    """
    if base != Path(".") and not (base / records.OUTPUTS / "runs").is_dir():
        raise UserError(f"--from {base} has no {records.OUTPUTS}/runs: name a folder that does.")
    paths = records.find(base, only)
    client, lock = opened or store.connect()
    with store.explained(), lock:
        experiment = Experiment(client)
        experiment.write_views(paths)
        trainings = list(filter(None, (_attempt(path, records.read, path, base) for path in paths)))
        lacking = [training for training in trainings if _attempt(training.path, experiment.has, training) is False]
        bar = tqdm(lacking, "MLflow", unit="run", disable=len(lacking) < SHOWN, mininterval=1 if sys.stderr.isatty() else 10)
        new = [_attempt(training.path, experiment.write, training) is True for training in bar]
        if only is None:
            experiment.end_lost_runs({training.run for training in trainings})
        experiment.write_parents()
        if base == Path("."):
            experiment.attach_report()
    return sum(new), len(paths)


def _attempt(path: Path, function: Callable, *arguments: Any) -> Any:
    """What `function` gives. A run that cannot be read or written is named, and does not stop the others."""
    from mlflow.exceptions import MlflowException

    malformed = (AttributeError, FileNotFoundError, IndexError, KeyError, TypeError, UserError, ValueError)
    try:
        return function(*arguments)
    except (*malformed, MlflowException) as error:
        if isinstance(error, MlflowException) and error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        if path.exists():  # else its training has ended since
            why = f"{type(error).__name__}: {store.cause(error)}".rstrip(".")
            store.warn(f"{path} is not imported ({why}): `git checkout` restores it and its run.")


class Experiment:
    """The experiment in MLflow, and what it had when it was opened."""

    def __init__(self, client: Any) -> None:
        self.client = client
        # Unchecked: an edit of params.yaml that is under way must not stop it.
        self.notes = Notes(params.load_paper(), params.read("params.yaml") or {})
        self._open()
        self.children: dict[str, list] = defaultdict(list)  # by the parameter `run`, the newest first
        self.parents: dict[str, list] = defaultdict(list)  # by configuration
        token = ""
        while token is not None:
            page = client.search_runs([self.id], order_by=["attributes.start_time DESC"], page_token=token or None)
            for run in page:
                slashes = run.data.params.get("run", "").count("/")  # none of a run that somebody else made
                if slashes == 2:
                    self.children[run.data.params["run"]].append(run)
                elif slashes == 1:
                    self.parents[run.data.tags.get("configuration", "")].append(run)
            token = page.token or None

    def _open(self) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.notes.paper.title
        present = self.client.get_experiment_by_name(name)
        if present is None:
            location = None if store.address().startswith("http") else store.artifacts()
            tags = {"mlflow.note.content": EXPERIMENT, "mlflow.experimentKind": "custom_model_development"}
            self.id, self.tags = self.client.create_experiment(name, location, tags), {}
            return
        self.id, self.tags = present.experiment_id, present.tags
        if present.lifecycle_stage == "deleted":
            self.client.restore_experiment(self.id)

    def write_views(self, paths: Iterable[Path]) -> dict[str, str]:
        """Saves the views of these records and of the runs that are there; the name of each by the end of its address."""
        studies = {name.split("/")[0] for name in [*map(records.name_of, paths), *self.children]}
        saved = views(study for study in studies if re.fullmatch(r"[\w.-]+", study))
        for key, (_, view) in saved.items():
            if self.tags.get(f"mlflow.sharedViewState.{key}") != view:
                self.client.set_experiment_tag(self.id, f"mlflow.sharedViewState.{key}", view)
        return {key: name for key, (name, _) in saved.items()}

    # children

    def has(self, training: Training) -> bool:
        """Whether MLflow has a training as its files are now."""
        run = self._find(training)
        if run is None or run.info.status != training.status:
            return False
        return (self._tags(training) | {"files": training.digest}).items() <= run.data.tags.items()

    def _find(self, training: Training) -> Any:
        return next((run for run in self.children[training.run] if run.info.start_time == training.started), None)

    def write(self, training: Training) -> bool:
        """Brings the run of a training up to its last point. Returns True if the run is new."""
        tags, once, run = self._tags(training), self._once(training), self._find(training)
        if run is None:
            title = f"{self.notes.title(training.record)}, seed {training.record['seed']}"
            run_id = self.client.create_run(self.id, training.started, tags | self._labels(tags), title).info.run_id
        else:
            run_id = run.info.run_id
        known = {metric.step for metric in self.client.get_metric_history(run_id, "epoch")}
        points = [point for point in training.points if point[0] not in known]  # a resumed training repeats some later
        self._log(run_id, points + once, params=self._params(training), tags=tags)
        for path in training.files if training.metrics else ():
            self.client.log_artifact(run_id, str(path))
        if training.weights and training.record.get("weights_sha256") in (None, files.sha256(training.weights)):
            self.client.log_artifact(run_id, str(training.weights), "weights")
        if training.status == "RUNNING":
            self.client.update_run(run_id, "RUNNING")
        else:
            self.client.set_terminated(run_id, training.status, training.ended)
        self._log(run_id, tags={"files": training.digest})  # last: an import cut short is not taken for a whole one
        others = [each for each in self.children[training.run] if each is not run]
        self.children[training.run] = sorted([*others, self.client.get_run(run_id)], key=_start, reverse=True)
        return run is None

    def _tags(self, training: Training) -> dict[str, str]:
        """The tags of a child; `configuration` is what the seeds under one parent have in common."""
        record, environment = training.record, training.record["environment"]
        tags = {key: record[key] for key in OWN}
        tags |= {key: environment[key] for key in ENVIRONMENT if environment.get(key) is not None}
        family = [record["study"], record["name"], record["data_sha256"], params.written_config(record["config"])]
        tags |= {"level": "single", "configuration": _digest(family)}
        tags |= {"mlflow.source.name": "pipeline/train.py", "mlflow.source.type": "LOCAL"}
        tags |= {"mlflow.source.git.commit": tags["git_commit"]} if "git_commit" in tags else {}
        tags |= {} if training.metrics else {"host": platform.node()}
        return {key: plain(value) for key, value in tags.items()}

    def _labels(self, tags: dict) -> dict[str, str]:
        """The tags that a run has from the start and that stay as they are edited: its note, its colour of Figure 1."""
        colour = look(tags["variant"], among=self.notes.settings.get("variants", ())).colour
        note = self.notes.note(tags, [int(seed) for seed in tags["seed"].split(",")])
        return {"mlflow.note.content": note, "mlflow.runColor": colour, "mlflow.user": getpass.getuser()}

    def _params(self, training: Training) -> dict[str, object]:
        config = training.record["config"]
        values = {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
        values = {key: value for key, value in values.items() if value is not None}
        values |= {key: training.metrics[key] for key in ("num_parameters",) if training.metrics}
        return values | {"run": training.run, "seed": training.record["seed"]}

    def _once(self, training: Training) -> list[Point]:
        """What a finished training has once, as a point at step 0."""
        if not training.metrics:
            return []
        accuracy = None if training.metrics["diverged"] else training.points[-1][2]["test_accuracy"]
        costs = {key: rounded(key, training.record[key]) for key in COSTS if training.record[key] is not None}
        return [(0, training.ended, self._beside_paper(training.record, accuracy) | costs)]

    def _beside_paper(self, run: dict, accuracy: float | None) -> dict[str, float]:
        """The paper's accuracy and the difference to it, of its models in Table 2."""
        number = self.notes.paper.table_2.get(run["variant"]) if run["study"] == TABLE_2 else None
        if number is None or accuracy is None:
            return {}
        return {"difference_to_paper": round(accuracy - number, 2), "paper_test_accuracy": number}

    def end_lost_runs(self, present: set[str]) -> None:
        """Marks as killed the runs of this machine whose training left no files."""
        for name in self.children.keys() - present:
            for place, run in enumerate(self.children[name]):
                if run.info.status == "RUNNING" and run.data.tags.get("host") == platform.node():
                    self.client.set_terminated(run.info.run_id, "KILLED")
                    self.children[name][place] = self.client.get_run(run.info.run_id)

    # parents

    def write_parents(self) -> None:
        """Says which children are current, the newest finished of each seed, and replaces the parents that changed."""
        families: dict[str, list] = defaultdict(list)
        for runs in self.children.values():
            newest = next((run for run in runs if run.info.status in ENDED), None)
            for run in runs:
                self._tag(run, current=run.info.status == "RUNNING" or run is newest)
                families[run.data.tags.get("configuration")].append(run)
        families.pop(None, None)  # without the tag, which their files bring back
        for configuration in self.parents.keys() - families.keys():
            for parent in self.parents.pop(configuration):
                self.client.delete_run(parent.info.run_id)
        for configuration, family in sorted(families.items(), key=self._place, reverse=True):  # the models last: the newest
            parent = self._parent(configuration, family)
            self._tag(parent, current=any(run.data.tags["current"] == "true" for run in family))
            for run in family:
                self._tag(run, **{"mlflow.parentRunId": parent.info.run_id})

    def _place(self, item: tuple[str, list]) -> tuple:
        """Where a family stands among others: first the models, as params.yaml lists them."""
        study, name, _ = item[1][0].data.params["run"].split("/")
        listed = (self.notes.settings.get("run") or {}).get("variants") or []
        return study != TABLE_2, study, [*listed, name].index(name), name

    def _parent(self, configuration: str, family: list) -> Any:
        """The parent run of one configuration, with statistics over the newest finished run of each seed.

        MLflow appends to a metric and never replaces it, so new statistics take a new parent, and the old one goes.
        """
        newest = {_seed(run): run for run in sorted(family, key=_start) if run.info.status in ENDED}
        finished = [newest[seed] for seed in sorted(newest)]
        digest = _digest([[run.info.run_id, run.data.tags.get("files")] for run in finished])
        parents = self.parents[configuration]
        if len(parents) == 1 and parents[0].data.tags.get("children") == digest:
            return parents[0]
        run_id = self._create_parent(finished or family)
        self._log(run_id, list(self._statistics(finished)) if finished else [])
        for parent in parents:
            self.client.delete_run(parent.info.run_id)
        self._log(run_id, tags={"children": digest})  # last, so that statistics cut short are made again
        self.parents[configuration] = [self.client.get_run(run_id)]
        return self.parents[configuration][0]

    def _create_parent(self, children: list) -> str:
        """A parent run with what its children have in common: a heading, so never under way.

        A model's begins now, when its mean is taken: MLflow lists the newest first, and so the models before the others.
        """
        tags, values = dict(children[0].data.tags), dict(children[0].data.params)
        tags = {key: value for key, value in tags.items() if all(run.data.tags.get(key) == value for run in children)}
        tags = {
            key: value for key, value in tags.items() if key not in ("run_key", "files", "host") and "mlflow." not in key
        }
        study, name, _ = values["run"].split("/")
        seeds = ",".join(str(_seed(run)) for run in children)
        tags |= {"study": study, "name": name, "level": "mean", "seed": seeds}
        tags |= self._labels(tags)
        times = [at for run in children for at in (run.info.start_time, run.info.end_time) if at]
        times = [time.time_ns() // 1_000_000] if study == TABLE_2 else times
        run_id = self.client.create_run(self.id, min(times), tags, self.notes.title(tags)).info.run_id
        del values["seed"]
        self._log(run_id, params=values | {"run": f"{study}/{name}"})
        self.client.set_terminated(run_id, "FINISHED", max(times))
        return run_id

    def _statistics(self, finished: list) -> Iterator[Point]:
        """The points of a parent run: at each step of all runs that did not diverge, and at step 0 what it has once."""
        runs = [run for run in finished if run.info.status == "FINISHED"]
        histories, last = [self._history(run.info.run_id) for run in runs], [run.data.metrics for run in runs]
        for step in sorted(set.intersection(*map(set, histories))) if runs else []:
            timestamp = max(history[step][0] for history in histories)
            yield step, timestamp, _over_runs(mean, [history[step][1] for history in histories], CURVES)
        spread = _over_runs(stdev, last, CURVES[:-1]) if len(last) > 1 else {}
        once = {f"{key}_std": value for key, value in spread.items()} | _over_runs(mean, last, COSTS)
        once |= self._beside_paper(finished[0].data.tags, _over_runs(mean, last, CURVES).get("test_accuracy"))
        once |= {"num_seeds": len(runs), "num_diverged": len(finished) - len(runs)}
        yield 0, max(run.info.end_time for run in finished), once

    def _history(self, run_id: str) -> dict[int, tuple[int, dict[str, float]]]:
        """The points of a run by their step."""
        points: dict[int, tuple[int, dict[str, float]]] = {}
        for key in CURVES:
            for metric in self.client.get_metric_history(run_id, key):
                points.setdefault(metric.step, (metric.timestamp, {}))[1][key] = metric.value
        return points

    def attach_report(self) -> None:
        """Figure 1 and the report, as artifacts of the newest parent of a model."""
        parents = [run for runs in self.parents.values() for run in runs if run.data.params["run"].startswith(f"{TABLE_2}/")]
        paths = [path for name in REPORT if (path := records.OUTPUTS / name).exists()]
        if parents and paths:
            newest, digest = max(parents, key=_start), _digest([files.sha256(path) for path in paths])
            if newest.data.tags.get("report") != digest:
                for path in paths:
                    self.client.log_artifact(newest.info.run_id, str(path), "report")
                self._tag(newest, report=digest)

    # writing

    def _log(self, run_id: str, points: list[Point] = (), **texts: dict[str, object]) -> None:
        """Batches of points, the first with `texts`, which are the dictionaries `params` and `tags`."""
        from mlflow.entities import Metric, Param, RunTag

        values = [Param(key, plain(value)) for key, value in texts.get("params", {}).items()]
        tags = [RunTag(key, plain(value)) for key, value in texts.get("tags", {}).items()]
        for first in range(0, max(1, len(points)), POINTS_PER_BATCH):
            batch = points[first : first + POINTS_PER_BATCH]
            metrics = [Metric(key, value, at, step) for step, at, row in batch for key, value in row.items()]
            self.client.log_batch(run_id, metrics, *((values, tags) if first == 0 else ()))

    def _tag(self, run: Any, **tags: object) -> None:
        """Sets the tags that differ, in MLflow and in `run`."""
        changed = {key: plain(value) for key, value in tags.items() if run.data.tags.get(key) != plain(value)}
        if changed:
            self._log(run.info.run_id, tags=changed)
            run.data.tags.update(changed)


def _start(run: Any) -> int:
    return run.info.start_time


def _seed(run: Any) -> int:
    return int(run.data.params["run"].split("/")[2])


def _over_runs(statistic: Callable, rows: list[dict[str, float]], keys: Iterable[str]) -> dict[str, float]:
    """The statistic of each key that all rows have."""
    shared = set.intersection(*map(set, rows)) if rows else ()
    return {key: rounded(key, statistic(row[key] for row in rows)) for key in keys if key in shared}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
