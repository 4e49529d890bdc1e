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
        trainings = list(filter(None, (_attempt(path, records.read, path, base) for path in paths)))
        experiment.write_views(paths)
        lacking = [training for training in trainings if _attempt(training.path, experiment.has, training) is False]
        bar = tqdm(lacking, "MLflow", unit="run", disable=len(lacking) < SHOWN, mininterval=1 if sys.stderr.isatty() else 10)
        done = [_attempt(training.path, experiment.write, training) is True for training in bar]
        if only is None:
            experiment.end_lost_runs({training.run for training in trainings})
        experiment.write_parents()
        if base == Path("."):
            experiment.attach_report()
    return sum(done), len(paths)


def _attempt(path: Path, function: Callable, *arguments: Any) -> Any:
    """What `function` gives. A run that cannot be read or written is named, and does not stop the others."""
    from mlflow.exceptions import MlflowException

    try:
        return function(*arguments)
    except FileNotFoundError as error:
        if path.exists():  # else its training has ended since
            store.warn(f"{path} is not imported, without {Path(error.filename).name}: `git checkout` restores both.")
    except (AttributeError, IndexError, KeyError, TypeError, UserError, ValueError) as error:
        why = f"{type(error).__name__}: {error}".removeprefix("UserError: ").rstrip(".")
        store.warn(f"{path} is not imported ({why}): `git checkout` restores it and its run.")
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        store.warn(f"{path} is not imported ({store.cause(error)}): `git checkout` restores it.")
    return None


class Experiment:
    """The experiment in MLflow, and what it had when it was opened."""

    def __init__(self, client: Any) -> None:
        self.client = client
        # Unchecked: an edit of params.yaml that is under way must not stop it.
        self.notes = Notes(params.load_paper(), params.read("params.yaml") or {})
        self.id = self._open()
        self.children: dict[str, list] = defaultdict(list)  # by the parameter `run`, the newest first
        self.parents: dict[str, list] = defaultdict(list)  # by configuration
        for run in self._search():
            name = run.data.params.setdefault("run", _former_name(run.data.tags))
            if name.count("/") == 2:
                self.children[name].append(run)
            elif name:
                self.parents[run.data.tags.get("configuration", "")].append(run)

    def _open(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.notes.paper.title
        found = self.client.get_experiment_by_name(name)
        self.tags = {} if found is None else found.tags
        if found is None:
            location = None if store.address().startswith("http") else store.artifacts()
            kind = "custom_model_development"  # not language models
            return self.client.create_experiment(
                name, location, {"mlflow.note.content": EXPERIMENT, "mlflow.experimentKind": kind}
            )
        if found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def _search(self) -> list:
        """All runs, the newest first."""
        runs, token, order = [], None, ["attributes.start_time DESC"]
        while found := self.client.search_runs([self.id], max_results=1000, order_by=order, page_token=token):
            runs, token = runs + found, found.token
            if not token:
                break
        return runs

    # children

    def has(self, training: Training) -> bool:
        """Whether MLflow has a training as its files are now, or a later one of the same numbers."""
        run = self._find(training)
        if run is None:
            same = self._same(training)
            return bool(same) and same[0].info.start_time > training.started
        tags = self._tags(training) | {"files": training.digest}
        return run.info.status == training.status and tags.items() <= run.data.tags.items()

    def _find(self, training: Training) -> Any:
        return next((run for run in self.children[training.run] if run.info.start_time == training.started), None)

    def _same(self, training: Training) -> list:
        key = training.record["run_key"]
        return [run for run in self.children[training.run] if run.data.tags.get("run_key") == key]

    def write(self, training: Training) -> bool:
        """Brings the run of a training up to its last point. Returns True if the run is new."""
        tags, values, once = self._tags(training), self._params(training), self._once(training)
        run = self._find(training)
        known = set()
        if run is None:
            for earlier in self._same(training):  # `dvc repro -f` leaves no twins
                self.client.delete_run(earlier.info.run_id)
                self.children[training.run].remove(earlier)
            title = f"{self.notes.title(training.record)}, seed {training.record['seed']}"
            run_id = self.client.create_run(self.id, training.started, tags | self._labels(tags), title).info.run_id
            self._log_data(run_id, training.record)
        else:
            run_id = run.info.run_id
            self.children[training.run].remove(run)
            known = {metric.step for metric in self.client.get_metric_history(run_id, "epoch")}
        points = [point for point in training.points if point[0] not in known]  # a resumed training repeats some later
        self._log(run_id, points + once, params=values, tags=tags)
        if training.metrics:
            for path in training.files:
                self.client.log_artifact(run_id, str(path))
            if training.weights and training.record.get("weights_sha256") in (None, files.sha256(training.weights)):
                self.client.log_artifact(run_id, str(training.weights), "weights")
        if training.status == "RUNNING":
            self.client.update_run(run_id, "RUNNING")
        else:
            ended = once[0][1] if once else training.points[-1][1]
            self.client.set_terminated(run_id, training.status, ended)
        self._log(run_id, tags={"files": training.digest})  # last: an import cut short is not taken for a whole one
        runs = self.children[training.run]
        self.children[training.run] = sorted([*runs, self.client.get_run(run_id)], key=_start, reverse=True)
        return run is None

    def _tags(self, training: Training) -> dict[str, str]:
        """The tags of a child; `configuration` is what the seeds under one parent have in common."""
        record, environment = training.record, training.record["environment"]
        tags = {key: record[key] for key in ("study", "name", "variant", "seed", "run_key", "data_sha256", "numerics")}
        tags |= {key: environment[key] for key in ENVIRONMENT if environment.get(key) is not None}
        family = [record["study"], record["name"], record["data_sha256"], params.written_config(record["config"])]
        tags |= {"level": "single", "configuration": _digest(family), "changes": self.notes.changes(record)}
        tags |= {"mlflow.source.name": "pipeline/train.py", "mlflow.source.type": "LOCAL"}
        if environment.get("git_commit"):
            tags["mlflow.source.git.commit"] = environment["git_commit"]
        if not training.metrics:
            tags["host"] = platform.node()
        return {key: plain(value) for key, value in tags.items()}

    def _labels(self, tags: dict) -> dict[str, str]:
        """The tags that a run has from the start and that stay as they are edited: its note, its colour of Figure 1."""
        colour = look(tags["variant"], among=self.notes.settings.get("variants", ())).colour
        note = self.notes.note(tags, [int(seed) for seed in tags["seed"].split(",")])
        return {"mlflow.note.content": note, "mlflow.runColor": colour, "mlflow.user": getpass.getuser()}

    def _params(self, training: Training) -> dict[str, object]:
        record = training.record
        values = {f"{section}.{key}": value for section, keys in record["config"].items() for key, value in keys.items()}
        values = {key: value for key, value in values.items() if value is not None}
        count = {key: training.metrics[key] for key in ("num_parameters",) if training.metrics}
        return values | {"run": training.run, "seed": record["seed"]} | count

    def _once(self, training: Training) -> list[Point]:
        """What a finished training has once, as a point at step 0."""
        record, metrics = training.record, training.metrics
        if not metrics:
            return []
        accuracy = None if metrics["diverged"] else training.points[-1][2]["test_accuracy"]
        costs = {key: rounded(key, record[key]) for key in COSTS if record[key] is not None}
        return [(0, records.milliseconds(record["finished_at"]), self._beside_paper(record, accuracy) | costs)]

    def _log_data(self, run_id: str, record: dict) -> None:
        from mlflow import entities

        source, digest = record["config"]["data"]["source"], record["data_sha256"][:36]  # as long as MLflow takes
        dataset = entities.Dataset(source, digest, "local", json.dumps({"uri": f"data/{source}"}))
        context = entities.InputTag("mlflow.data.context", "training")
        self.client.log_inputs(run_id, [entities.DatasetInput(dataset, [context])])

    def end_lost_runs(self, present: set[str]) -> None:
        """Marks as killed the runs of this machine whose training left no files."""
        for name in self.children.keys() - present:
            for place, run in enumerate(self.children[name]):
                if run.info.status == "RUNNING" and run.data.tags.get("host") == platform.node():
                    self.client.set_terminated(run.info.run_id, "KILLED")
                    self.children[name][place] = self.client.get_run(run.info.run_id)

    # parents

    def write_parents(self) -> None:
        """Says which children are current, the newest finished of each seed, and makes the parents anew that changed."""
        families: dict[str, list] = defaultdict(list)
        for name, runs in self.children.items():
            newest = next((run for run in runs if run.info.status in ENDED), None)
            for run in runs:
                self._tag(run, current=run.info.status == "RUNNING" or run is newest)
                if "configuration" in run.data.tags:
                    families[run.data.tags["configuration"]].append(run)
                else:
                    store.warn(f"{name} in MLflow lost a tag, and counts again after `sync --from` the folder of its runs.")
        for configuration in self.parents.keys() - families.keys():
            for parent in self.parents[configuration]:
                self.client.delete_run(parent.info.run_id)
        in_order = sorted(families.items(), key=lambda item: self.notes.place(_name(item[1][0])), reverse=True)
        for configuration, family in in_order:  # the models last, and so the newest
            parent = self._parent(configuration, family)
            self._tag(parent, current=any(run.data.tags["current"] == "true" for run in family))
            for run in family:
                self._tag(run, **{"mlflow.parentRunId": parent.info.run_id})

    def write_views(self, paths: Iterable[Path]) -> dict[str, str]:
        """Saves the views of these records and of the runs that are there; the name of each by the end of its address."""
        studies = {records.name_of(path).split("/")[0] for path in paths} | {name.split("/")[0] for name in self.children}
        found = views(study for study in studies if re.fullmatch(r"[\w.-]+", study))
        for key, (_, view) in found.items():
            if self.tags.get(f"mlflow.sharedViewState.{key}") != view:
                self.client.set_experiment_tag(self.id, f"mlflow.sharedViewState.{key}", view)
        return {key: name for key, (name, _) in found.items()}

    def _parent(self, configuration: str, family: list) -> Any:
        """The parent run of one configuration, with statistics over the newest finished run of each seed.

        MLflow appends to a metric and never replaces it, so new statistics take a new parent, and the old one goes.
        """
        newest = {run.data.params["run"]: run for run in sorted(family, key=_start) if run.info.status in ENDED}
        finished = sorted(newest.values(), key=_seed)
        digest = _digest([[run.info.run_id, run.data.tags.get("files")] for run in finished])
        parents = self.parents[configuration]
        if len(parents) == 1 and parents[0].data.tags.get("children") == digest:
            return parents[0]
        run_id = self._create_parent(finished or family)
        if finished:
            self._log(run_id, list(self._statistics(finished)))
        for parent in parents:
            self.client.delete_run(parent.info.run_id)
        self._log(run_id, tags={"children": digest})  # last, so that statistics cut short are made again
        self.parents[configuration] = [self.client.get_run(run_id)]
        return self.parents[configuration][0]

    def _create_parent(self, children: list) -> str:
        """A parent run with what its children have in common: a heading, so never under way.

        A model's begins now, when its mean is taken: MLflow lists the newest first, and so the models before their seeds
        and studies.
        """
        own = ("run_key", "files", "host")
        shared = {key: value for key, value in children[0].data.tags.items() if key not in own and "mlflow." not in key}
        shared = {key: value for key, value in shared.items() if all(run.data.tags.get(key) == value for run in children)}
        (study, name), seeds = _name(children[0]), [_seed(run) for run in children]
        tags = shared | {"study": study, "name": name, "level": "mean", "seed": ",".join(map(str, seeds))}
        tags |= self._labels(tags)
        times = [at for run in children for at in (run.info.start_time, run.info.end_time) if at]
        times = [time.time_ns() // 1_000_000] if study == TABLE_2 else times
        run_id = self.client.create_run(self.id, min(times), tags, self.notes.title(tags)).info.run_id
        values = {key: value for key, value in children[0].data.params.items() if key != "seed"}
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
        once = {f"{key}_std": value for key, value in _over_runs(stdev, last if len(last) > 1 else [], CURVES[:-1]).items()}
        accuracy = _over_runs(mean, last, CURVES).get("test_accuracy")
        once |= self._beside_paper(finished[0].data.tags, accuracy) | _over_runs(mean, last, COSTS)
        once |= {"num_seeds": len(runs), "num_diverged": len(finished) - len(runs)}
        yield 0, max(run.info.end_time for run in finished), once

    def _history(self, run_id: str) -> dict[int, tuple[int, dict[str, float]]]:
        """The points of a run by their step."""
        points: dict[int, tuple[int, dict[str, float]]] = {}
        for key in CURVES:
            for metric in self.client.get_metric_history(run_id, key):
                points.setdefault(metric.step, (metric.timestamp, {}))[1][key] = metric.value
        return points

    def _beside_paper(self, run: dict, accuracy: float | None) -> dict[str, float]:
        """The paper's accuracy and the difference to it, of its models in Table 2."""
        number = self.notes.paper.table_2.get(run["variant"]) if run["study"] == TABLE_2 else None
        if number is None or accuracy is None:
            return {}
        return {"difference_to_paper": round(accuracy - number, 2), "paper_test_accuracy": number}

    def attach_report(self) -> None:
        """Figure 1 and the report, as artifacts of the newest parent of a model."""
        parents = [run for runs in self.parents.values() for run in runs if _name(run)[0] == TABLE_2]
        paths = [path for name in REPORT if (path := records.OUTPUTS / name).exists()]
        if not (parents and paths):
            return
        newest = max(parents, key=_start)
        digest = _digest([files.sha256(path) for path in paths])
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


def _former_name(tags: dict) -> str:
    """The parameter `run` of a run that was written before there was one."""
    known = ("study", "name", "seed") if tags.get("level") == "single" else ("study", "name")
    return "/".join(tags[key] for key in known) if "level" in tags and all(key in tags for key in known) else ""


def _start(run: Any) -> int:
    return run.info.start_time


def _name(run: Any) -> tuple[str, str]:
    """Study and name of a child or a parent."""
    study, name = run.data.params["run"].split("/")[:2]
    return study, name


def _seed(run: Any) -> int:
    return int(run.data.params["run"].split("/")[2])


def _over_runs(statistic: Callable, rows: list[dict[str, float]], keys: Iterable[str]) -> dict[str, float]:
    """The statistic of each key that all rows have."""
    shared = set.intersection(*map(set, rows)) if rows else ()
    return {key: rounded(key, statistic(row[key] for row in rows)) for key in keys if key in shared}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
