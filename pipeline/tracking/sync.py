"""Brings MLflow up to date with the files of runs. Each configuration becomes a parent run, with a child run for each seed.

A family is all runs with the same study and name, such as table_2/osa_qr. A sync takes a lock, and looks up a family's
runs in MLflow before it creates new ones. Concurrent syncs, or a sync after an interruption, thus create no duplicate runs.
"""

import math
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pipeline.config import params
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.tracking import models, store, trainings
from pipeline.tracking.experiment import Experiment, name_of
from pipeline.tracking.trainings import LOGGED_CURVES, TrackedTraining, Value, rounded_metric
from pipeline.training.run import TABLE_2

if TYPE_CHECKING:
    from mlflow.entities import Run

    from pipeline.config.params import RunConfig

ENDED = ("FINISHED", "FAILED")  # MLflow's status of finished and of diverged runs
COSTS = ("seconds", "images_per_second")
OWN = ("study", "name", "variant", "seed", "run_key", "data_sha256", "numerics")  # record keys that become tags
ENVIRONMENT_TAGS = ("device", "device_name", "num_threads", "platform", "python", "torch")
GUARDED = ("run", "level", "configuration", *OWN)  # tags that a sync writes again if someone edits them
SHARED_TAGS = ("study", "name", "variant", "data_sha256", "numerics", "configuration")  # tags that parent and child share
REPORT = ("figure_1.svg", "report.html")  # artifacts of each model of Table 2


def sync(only: Sequence[str] = (), *, with_models: bool = False, opened: tuple | None = None) -> tuple[int, int]:
    """Imports new runs, and new metrics of runs in training, into MLflow.

    Args:
        only: prefixes of the names of the runs to import. By default, imports all runs.
        with_models: if True, also log the trained models of Table 2.
        opened: result of `store.connect`, if the store is already open.

    Returns:
        The number of new runs, and the number of all runs found.

    Raises:
        UserError: MLflow is not installed, does not answer or cannot read its store.
    """
    found = trainings.find(only)
    by_family: dict[str, list[TrackedTraining]] = defaultdict(list)
    for training in found:
        by_family[training.family].append(training)
    client, lock = opened or store.connect()
    new = 0
    with store.errors_as_user_errors(), lock, _bar(len(found), "run") as bar:
        experiment = Experiment(client)
        known = experiment.search(by_family if only else None)
        for name in sorted({*by_family, *known}, key=lambda name: (not name.startswith(f"{TABLE_2}/"), name)):
            family = Family(experiment, name, known.get(name, []))
            for training in by_family[name]:
                new += bool(_attempt(training, family.import_run, training))
                bar.update()
            if not only:
                family.end_lost_runs()
            family.settle()
    if with_models:
        with store.errors_as_user_errors(), lock:
            _log_models(experiment, [training for training in found if training.name.startswith(f"{TABLE_2}/")])
    return new, len(found)


def _bar(total: int, unit: str) -> tqdm:
    return tqdm(total=total, desc="MLflow", unit=unit, delay=2, mininterval=1 if sys.stderr.isatty() else 10)


def _attempt(training: TrackedTraining, function: Callable, *arguments: Any) -> Any:
    """Calls `function`. If a file cannot be read or MLflow refuses a value, prints a warning and returns None."""
    from mlflow.exceptions import MlflowException

    try:
        return function(*arguments)
    except (UserError, FileNotFoundError) as error:
        why = str(error)
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        why = store.cause(error)
    if training.path.exists():  # otherwise the run has just ended, and its scratch folder is gone
        tqdm.write(f"warning: {training.path} is not imported: {why}", sys.stderr)
    return None


def _log_models(experiment: Experiment, trainings: list[TrackedTraining]) -> None:
    """Logs the trained model of each finished run that has no model in MLflow."""
    runs: dict[str, Run] = {}
    for family in experiment.search({training.family for training in trainings}).values():
        runs |= {name_of(run): run for run in reversed(family)}  # the newest run of each name
    left = []
    for training in trainings:
        run = runs.get(training.name)
        if run and run.info.status == "FINISHED" and "model" not in run.data.tags:
            left.append((training, run))
    with _bar(len(left), "model") as bar:
        for training, run in left:
            if address := _attempt(training, models.log, experiment, run, training):
                experiment.write(run, {"model": address})
            bar.update()


class Family:
    """The MLflow runs of one family: a parent run for each configuration, and a child run for each training run."""

    def __init__(self, experiment: Experiment, name: str, runs: "list[Run]") -> None:
        self.experiment, self.name, self.runs = experiment, name, runs  # newest run first
        self.known = {(name_of(run), run.info.start_time): run for run in runs}
        self.seen: set[str] = set()  # ids of runs whose files exist
        self.has_changed = False  # True if `runs` is out of date
        self.parents: dict[str, Run] = {}  # digest of a configuration → its parent run
        self.surplus: list[Run] = []  # parent runs to delete
        for run in runs:
            if name_of(run) == name:
                configuration = run.data.tags.get("configuration", "")
                if configuration in self.parents:
                    self.surplus.append(run)
                else:
                    self.parents[configuration] = run

    def import_run(self, training: TrackedTraining) -> bool:
        """Creates or updates the child run in MLflow for a training run. Returns True if the child run is new."""
        if run := self.known.get((training.name, training.started)):
            self.seen.add(run.info.run_id)
            if run.data.tags.get("checksum") == _checksum(training, run.data.tags) and run.info.status == training.status:
                return False
        tags, metrics, values = _tags(training), training.metrics(), training.values()
        checksum, self.has_changed = _checksum(training, tags), True  # unreadable files fail here, before a run is created
        if is_new := run is None:
            own = {"mlflow.parentRunId": self._parent(tags, training.started).info.run_id, "current": "true"}
            own["mlflow.note.content"] = f"To make it again: `{training.run.command}`."
            run = self.experiment.create(training.name, training.started, tags | own)
            self.seen.add(run.info.run_id)
        else:
            history = self.experiment.client.get_metric_history(run.info.run_id, "epoch")
            steps = {metric.step for metric in history}  # a resumed run repeats steps that MLflow already has
            values = [value for value in values if value[3] not in steps]
        if training.has_ended:
            self.experiment.client.log_artifacts(run.info.run_id, str(training.path.parent))
            values += self._once(training, metrics)
        self.experiment.write(run, tags | {"checksum": checksum}, values, _parameters(training, metrics))
        if run.info.status != training.status:
            self.experiment.end(run, training.status, training.ended)
        return is_new

    def _once(self, training: TrackedTraining, metrics: dict) -> list[Value]:
        """Returns the metrics that are single values rather than curves."""
        once = {}
        for key in COSTS:
            if (value := getattr(training.record, key)) is not None:
                once[key] = rounded_metric(key, value)
        if not metrics["diverged"]:
            once["starts"] = float(training.starts())
            once |= self._against_paper(100 * metrics["test_accuracy"])
        return [(key, value, training.ended, 0) for key, value in once.items()]

    def _against_paper(self, accuracy: float) -> dict[str, float]:
        """Returns the paper's accuracy and the difference from it, or {} if the runs belong to no row of Table 2."""
        study, name = self.name.split("/")
        number = self.experiment.paper.table_2.get(name) if study == TABLE_2 else None
        return {} if number is None else {"paper": number, "difference_to_paper": round(accuracy - number, 2)}

    def end_lost_runs(self) -> None:
        """Marks a run as killed if MLflow shows it as running on this machine but its files do not exist."""
        for run in self.runs:
            is_ours = run.data.tags.get("host") == platform.node()
            if run.info.status == "RUNNING" and is_ours and run.info.run_id not in self.seen:
                self.experiment.end(run, "KILLED", _now())
                self.has_changed = True

    def settle(self) -> None:
        """Tags each child run as current or not, updates each configuration's parent run, and deletes surplus parents."""
        if self.has_changed:
            self.runs = self.experiment.search([self.name])[self.name]
        children: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            # Skip runs that lack these tags. A user can delete tags, and a sync restores them only if the run's files exist.
            if name_of(run) != self.name and {*SHARED_TAGS} <= run.data.tags.keys():
                children[run.data.tags["configuration"]].append(run)
        for configuration in self.parents.keys() - children.keys():
            self.surplus.append(self.parents.pop(configuration))
        for run in self.surplus:
            self.experiment.client.delete_run(run.info.run_id)
        current = self._current(children)
        for members in children.values():
            parent = self._parent(members[0].data.tags, members[-1].info.start_time)
            for child in members:
                tags = {"mlflow.parentRunId": parent.info.run_id, "current": params.as_yaml(child.info.run_id in current)}
                self.experiment.write(child, tags)
            self._summarise(parent, members, current)
            self._attach_report(parent)

    def _current(self, children: "dict[str, list[Run]]") -> set[str]:
        """Returns the ids of the current runs: all runs in training and, for each seed, the newest run that has ended.

        If a Table 2 model has runs with params.yaml's configuration, its ended runs with other configurations do not count.
        """
        listed = children.keys() & self._listed(children)
        newest: dict[str, str] = {}
        current: set[str] = set()
        for run in self.runs:
            if run.info.status == "RUNNING":
                current.add(run.info.run_id)
            elif run.info.status in ENDED and run.data.tags.get("configuration") in (listed or children):
                newest.setdefault(name_of(run), run.info.run_id)
        return current | {*newest.values()}

    def _listed(self, children: "dict[str, list[Run]]") -> set[str]:
        """Returns the `_configuration` digests of the configuration in params.yaml: one for each data set that the runs use.

        Returns set() unless the runs belong to Table 2, have several configurations, and use a variant in `Params.variants`.
        """
        study, variant = self.name.split("/")
        settings = self.experiment.params if study == TABLE_2 and len(children) > 1 else None
        if settings is None or variant not in settings.variants:
            return set()
        config = params.resolve(settings, variant)
        data = {members[0].data.tags["data_sha256"] for members in children.values()}
        return {_configuration(study, variant, each, config) for each in data}

    def _parent(self, tags: dict[str, str], start: int) -> "Run":
        """Returns the parent run of the child runs with these tags. Creates the parent run if it does not exist."""
        configuration = tags["configuration"]
        if configuration not in self.parents:
            shared = {key: tags[key] for key in SHARED_TAGS} | {"level": "mean"}
            start = _now() if tags["study"] == TABLE_2 else start  # MLflow lists new runs first, so Table 2 is on top
            self.parents[configuration] = self.experiment.create(self.name, start, shared)
        return self.parents[configuration]

    def _summarise(self, parent: "Run", children: "list[Run]", current: set[str]) -> None:
        """Updates a parent run's statistics, which cover, for each seed, the newest run that has ended.

        A parent run has no curves: MLflow can only append to a curve, and a new seed changes every point of a mean curve.
        """
        newest: dict[int, Run] = {}
        for child in children:
            if child.info.status in ENDED:
                newest.setdefault(_seed(child), child)
        finished = [newest[seed] for seed in sorted(newest)]
        seeds = sorted({_seed(child) for child in finished or children})
        tags = {key: children[0].data.tags[key] for key in SHARED_TAGS} | {"run": self.name, "level": "mean"}
        tags["seed"] = ",".join(map(str, seeds))
        tags["current"] = params.as_yaml(any(child.info.run_id in current for child in children))
        tags["children"] = _digest([[child.info.run_id, child.data.tags.get("checksum")] for child in finished])
        if tags.items() <= parent.data.tags.items():
            return
        values = self._statistics(finished) if finished else {}
        seconds = values.get("seconds", 0)
        for key, value in parent.data.metrics.items():
            if key not in values and not math.isnan(value):
                values[key] = math.nan  # NaN hides an old value, since MLflow cannot delete a metric
        parameters = {key: value for key, value in children[0].data.params.items() if key not in ("seed", "run")}
        self.experiment.write(parent, tags, [(key, value, _now(), 0) for key, value in values.items()], parameters)
        if finished:
            self.experiment.end(parent, "FINISHED", parent.info.start_time + round(1000 * seconds))

    def _statistics(self, finished: "list[Run]") -> dict[str, float]:
        """Returns run counts, and final metrics' means and standard deviations over runs that start to learn (`starts`)."""
        ended = [child for child in finished if child.info.status == "FINISHED"]
        counted = [child for child in ended if child.data.metrics.get("starts")]
        values, deviations = {}, {}
        for key in (*LOGGED_CURVES, *COSTS):
            last = [child.data.metrics[key] for child in counted if key in child.data.metrics]
            if last:
                values[key] = rounded_metric(key, mean(last))
            if len(last) > 1 and key in LOGGED_CURVES[:-1]:
                deviations[f"{key}_std"] = rounded_metric(key, stdev(last))
        if counted:
            values |= self._against_paper(values["test_accuracy"])
        failed = {"num_not_starting": len(ended) - len(counted), "num_diverged": len(finished) - len(ended)}
        return values | deviations | {"num_seeds": len(counted)} | failed

    def _attach_report(self, parent: "Run") -> None:
        """Attaches Figure 1 and the report to the parent run of a model of Table 2."""
        paths = [path for name in REPORT if (path := Path("paper_outputs", name)).exists()]
        digest = _digest([files.sha256(path) for path in paths])
        if paths and self.name.startswith(f"{TABLE_2}/") and parent.data.tags.get("report") != digest:
            for path in paths:
                self.experiment.client.log_artifact(parent.info.run_id, str(path), "report")
            self.experiment.write(parent, {"report": digest})


def _tags(training: TrackedTraining) -> dict[str, str]:
    record = training.record
    tags = {key: getattr(record, key) for key in OWN}
    tags |= {key: getattr(record.environment, key) for key in ENVIRONMENT_TAGS}
    tags["configuration"] = _configuration(record.study, record.name, record.data_sha256, record.config)
    tags |= {"run": training.name, "level": "single"}
    tags |= {"mlflow.source.name": "pipeline/tools/train.py", "mlflow.source.type": "LOCAL"}
    if record.commit is not None:
        tags |= {"git_commit": record.commit, "git_dirty": record.dirty, "mlflow.source.git.commit": record.commit}
    if not training.has_ended:
        tags["host"] = platform.node()
    return {key: params.as_yaml(value) for key, value in tags.items()}


def _checksum(training: TrackedTraining, tags: Mapping[str, str]) -> str:
    """Returns a digest of the GUARDED tags and of a training run's files."""
    return _digest([training.digest, [tags.get(key) for key in GUARDED]])


def _configuration(study: str, name: str, data_sha256: str, config: "RunConfig") -> str:
    """Returns a digest of a configuration and its data. In MLflow, runs with the same digest share a parent run."""
    return _digest([study, name, data_sha256, config.model_dump(mode="json", exclude_defaults=True)])


def _digest(value: object) -> str:
    return files.json_digest(value)[:16]


def _parameters(training: TrackedTraining, metrics: dict) -> dict[str, str]:
    parameters = {"seed": str(training.record.seed)}
    for section, values in training.record.config.model_dump(mode="json", exclude_none=True).items():
        parameters |= {f"{section}.{key}": params.as_yaml(value) for key, value in values.items()}
    if metrics:
        parameters["num_parameters"] = str(metrics["num_parameters"])
    return parameters


def _seed(child: "Run") -> int:
    return int(name_of(child).split("/")[2])


def _now() -> int:
    return time.time_ns() // 1_000_000
