"""Brings MLflow up to date with the files: a parent run for each configuration, and under it a child for each seed.

A family is what has one name, as table_2/osa_qr. One search says what MLflow has of it, so a sync may be called at any time,
by several processes and after an interruption, and doubles nothing.
"""

import math
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tqdm import tqdm

from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.tracking import models, records, store
from pipeline.tracking.experiment import Entry, Experiment
from pipeline.tracking.records import CURVES, TABLE_2, Training, rounded

ENDED = ("FINISHED", "FAILED")  # in MLflow's words; the second has diverged
COSTS = ("seconds", "images_per_second")
OWN = ("study", "name", "variant", "seed", "run_key", "data_sha256", "numerics")  # tags, from a record
ENVIRONMENT = ("device", "device_name", "git_commit", "git_dirty", "num_threads", "platform", "python", "torch")
SHARED = ("study", "name", "variant", "data_sha256", "numerics", "configuration")  # a parent's, as its children's
GUARDED = ("run", "level", "configuration", *OWN)  # written again when somebody edits them
REPORT = ("figure_1.svg", "report.html")  # artifacts of each model of Table 2


def sync(
    base: Path = Path(), *, only: str | tuple[str, ...] = "", with_models: bool = False, opened: tuple | None = None
) -> tuple[int, int]:
    """Imports what MLflow lacks of the runs under a folder, and of those that train here.

    Args:
        base: A folder with paper_outputs/runs.
        only: The beginning of names, or several: a sync of one run reads its own family alone.
        with_models: Whether to log the trained models of Table 2 too.
        opened: The client and the lock that `store.connect` gave.

    Returns:
        How many runs were new, of how many.

    Raises:
        UserError: `base` holds no runs, or MLflow is not installed, does not answer or cannot read its store.
    """
    if base != Path() and not (base / records.FOLDER).is_dir():
        raise UserError(f"--from {base} has no {records.FOLDER}: name a folder that does.")
    trainings = records.find(base, only)
    by_family: dict[str, list[Training]] = defaultdict(list)
    for training in trainings:
        by_family[training.family].append(training)
    client, lock = opened or store.connect()
    new = 0
    with store.errors_as_user_errors(), lock, _bar(len(trainings), "run") as bar:
        experiment = Experiment(client)
        known = experiment.search(by_family if only else None)
        for name in sorted({*by_family, *known}, key=lambda name: (not name.startswith(f"{TABLE_2}/"), name)):
            family = Family(experiment, name, known.get(name, ()))
            for training in by_family[name]:
                new += bool(_attempt(training, family.import_run, training))
                bar.update()
            if base == Path() and not only:
                family.end_lost_runs()
            family.settle()
            if base == Path() and name.startswith(f"{TABLE_2}/"):
                family.attach_report()
    if with_models:
        with store.errors_as_user_errors(), lock:
            _log_models(experiment, [training for training in trainings if training.name.startswith(f"{TABLE_2}/")])
    return new, len(trainings)


def _bar(total: int, unit: str) -> tqdm:
    """A progress bar, where it takes longer than a moment."""
    return tqdm(total=total, desc="MLflow", unit=unit, delay=2, mininterval=1 if sys.stderr.isatty() else 10)


def _attempt(training: Training, function: Callable, *arguments: Any) -> Any:
    """Gives what `function` gives. A run that cannot be read, or that MLflow refuses, is named and stops no other."""
    from mlflow.exceptions import MlflowException

    try:
        return function(*arguments)
    except FileNotFoundError:
        if training.path.exists():
            raise
        return None  # the training has ended since
    except UserError as error:
        why = str(error)
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        why = store.cause(error)
    if training.path.exists():
        tqdm.write(f"warning: {training.path} is not imported ({why.rstrip('.')}): `git checkout` restores it.", sys.stderr)
    return None


def _log_models(experiment: Experiment, trainings: list[Training]) -> None:
    """Logs the trained models of the runs that have none."""
    known = experiment.search({training.family for training in trainings})
    entries = {}
    for family in known.values():
        entries |= {entry.name: entry for entry in reversed(family)}  # the newest of a name comes last
    pairs = [(training, entries[training.name]) for training in trainings if training.name in entries]
    pairs = [(training, entry) for training, entry in pairs if entry.status == "FINISHED" and "model" not in entry.tags]
    with _bar(len(pairs), "model") as bar:
        for training, entry in pairs:
            if address := _attempt(training, models.log, experiment, entry, training):
                experiment.write(entry, [], {}, {"model": address})
            bar.update()


class Family:
    """The runs in MLflow of one name: a parent for each configuration, and children by the names of their trainings."""

    def __init__(self, experiment: Experiment, name: str, entries: Iterable[Entry]) -> None:
        self.experiment, self.name = experiment, name
        self.parents: dict[str, Entry] = {}  # configuration → parent
        self.children: dict[str, list[Entry]] = defaultdict(list)  # name → children, the newest first
        self.surplus: list[Entry] = []  # parents
        self.seen: set[str] = set()  # children that files tell of
        for entry in entries:
            configuration = entry.tags.get("configuration", "")
            if not entry.is_parent:
                self.children[entry.name].append(entry)
            elif configuration in self.parents or "run" in entry.parameters:
                self.surplus.append(entry)  # in older stores a parent has curves, which would hide its new means
            else:
                self.parents[configuration] = entry

    def import_run(self, training: Training) -> bool:
        """Brings a child up to what the files of its training say. Returns True if it is new."""
        entries = self.children[training.name]
        for entry in entries:
            if entry.status in ENDED and entry.tags.get("checksum") == _checksum(training, entry.tags):
                self.seen.add(entry.id)
                return False
        tags, status = _tags(training), training.status
        entry = next((entry for entry in entries if entry.start == training.started), None)
        if entry and entry.parameters and entry.status == status and tags.items() <= entry.tags.items():  # no new point
            self.seen.add(entry.id)
            return False
        metrics, values = training.metrics(), training.values()  # before anything is written: malformed files leave no run
        if is_new := entry is None:
            parent = self._parent(tags, training.started)
            own = tags | {"current": "true", "mlflow.parentRunId": parent.id}
            entry = self.experiment.create(training.name, training.started, own, training.run.command)
            entries.append(entry)
            entries.sort(key=lambda each: each.start, reverse=True)
        else:
            history = self.experiment.client.get_metric_history(entry.id, "epoch")
            known = {metric.step for metric in history}  # a resumed training repeats some
            values = [value for value in values if value[3] not in known]
        self.seen.add(entry.id)
        if training.has_ended:
            self.experiment.log_files(entry, training.path.parent)
            once = {key: getattr(training.record, key) for key in COSTS}
            once = {key: rounded(key, value) for key, value in once.items() if value is not None}
            if not metrics["diverged"]:
                once["starts"] = float(training.starts())
                once |= self.experiment.against_paper(tags, 100 * metrics["test_accuracy"])
            values += [(key, value, training.ended, 0) for key, value in once.items()]
        self.experiment.write(entry, values, _parameters(training, metrics), tags)
        if entry.status != status:
            self.experiment.end(entry, status, training.ended)
        return is_new

    def end_lost_runs(self) -> None:
        """Marks as killed the runs of this machine that no files tell of."""
        for entries in self.children.values():
            for entry in entries:
                is_ours = entry.tags.get("host") == platform.node()
                if entry.status == "RUNNING" and is_ours and entry.id not in self.seen:
                    self.experiment.end(entry, "KILLED", _now())

    def settle(self) -> None:
        """Says which children are current, the newest finished of each seed, and brings the parents up to date.

        In Table 2 a child is current where it is as params.yaml has its model; where none is, all may be.
        """
        members: dict[str, list[Entry]] = defaultdict(list)
        listed = self._listed()
        for entries in self.children.values():
            ended = [entry for entry in entries if entry.status in ENDED]
            newest = next((entry for entry in ended if not listed or entry.tags.get("configuration") in listed), None)
            for entry in entries:
                self._tag(entry, {"current": _word(entry.status == "RUNNING" or entry is newest)})
                if {*SHARED} <= entry.tags.keys():  # else somebody has deleted one, which the files bring back
                    members[entry.tags["configuration"]].append(entry)
        for configuration in self.parents.keys() - members.keys():
            self.surplus.append(self.parents.pop(configuration))
        for parent in self.surplus:
            self.experiment.client.delete_run(parent.id)
        for children in members.values():
            parent = self._parent(children[0].tags, min(child.start for child in children))
            for child in children:
                self._tag(child, {"mlflow.parentRunId": parent.id})
            self._summarise(parent, children)

    def _listed(self) -> set[str]:
        """The configurations of the children that are as params.yaml has this model of Table 2, where they have several."""
        tags = [entry.tags for entries in self.children.values() for entry in entries if {*SHARED} <= entry.tags.keys()]
        known, (study, variant) = {each["configuration"] for each in tags}, self.name.split("/")
        if study != TABLE_2 or len(known) < 2 or (config := self.experiment.configuration(variant)) is None:
            return set()
        return known & {_configuration(study, variant, each["data_sha256"], config) for each in tags}

    def _parent(self, tags: dict[str, str], start: int) -> Entry:
        """The parent of the children with these tags. Those of Table 2 are as new as the import, so that MLflow lists them
        first where no view is open."""
        configuration = tags["configuration"]
        if configuration not in self.parents:
            shared = {key: tags[key] for key in SHARED} | {"level": "mean"}
            start = _now() if tags["study"] == TABLE_2 else start
            self.parents[configuration] = self.experiment.create(self.name, start, shared)
        return self.parents[configuration]

    def _summarise(self, parent: Entry, children: list[Entry]) -> None:
        """Writes a parent's statistics over the newest finished run of each seed, where these have changed.

        MLflow appends to a metric and shows the last value. It would draw the means of curves in a zigzag, one for each seed
        that came, so a parent has none.
        """
        newest = {_seed(child): child for child in sorted(children, key=lambda child: child.start) if child.status in ENDED}
        finished = [newest[seed] for seed in sorted(newest)]
        known = {_seed(child) for child in finished or children}
        tags = {
            **{key: children[0].tags[key] for key in SHARED},
            "run": self.name,
            "level": "mean",
            "seed": ",".join(map(str, sorted(known))),
            "current": _word(any(child.tags["current"] == "true" for child in children)),
            "children": files.digest([[child.id, child.tags.get("checksum")] for child in finished])[:16],
        }
        if tags.items() <= parent.tags.items():
            return
        constants = {key: value for key, value in children[0].parameters.items() if key not in ("seed", "run")}
        values = self._statistics(finished) if finished else {}
        gone = {key: math.nan for key, value in parent.metrics.items() if key not in values and not math.isnan(value)}
        self.experiment.write(parent, [(key, value, _now(), 0) for key, value in (values | gone).items()], constants, tags)
        if finished:
            self.experiment.end(parent, "FINISHED", parent.start + round(1000 * values.get("seconds", 0)))

    def _statistics(self, finished: list[Entry]) -> dict[str, float]:
        """The means of the last values of the runs that start, as in Table 2, and their standard deviations."""
        ended = [child for child in finished if child.status == "FINISHED"]
        counted = [child for child in ended if child.metrics.get("starts", 1)]  # older stores do not have it
        values, deviations = {}, {}
        for key in (*CURVES, *COSTS):
            last = [child.metrics[key] for child in counted if key in child.metrics]
            if last:
                values[key] = rounded(key, mean(last))
            if len(last) > 1 and key in CURVES[:-1]:
                deviations[f"{key}_std"] = rounded(key, stdev(last))
        if counted:
            values |= self.experiment.against_paper(
                counted[0].tags, mean(child.metrics["test_accuracy"] for child in counted)
            )
        failed = {"num_not_starting": len(ended) - len(counted), "num_diverged": len(finished) - len(ended)}
        return values | deviations | {"num_seeds": len(counted)} | failed

    def attach_report(self) -> None:
        """Attaches Figure 1 and the report to the parents, as artifacts."""
        paths = [path for name in REPORT if (path := Path("paper_outputs", name)).exists()]
        digest = files.digest([files.sha256(path) for path in paths])[:16]
        for parent in self.parents.values():
            if paths and parent.tags.get("report") != digest:
                for path in paths:
                    self.experiment.client.log_artifact(parent.id, str(path), "report")
                self._tag(parent, {"report": digest})

    def _tag(self, entry: Entry, tags: dict[str, str]) -> None:
        if not tags.items() <= entry.tags.items():
            self.experiment.write(entry, [], {}, tags)


def _tags(training: Training) -> dict[str, str]:
    """The tags of a child; `configuration` is what the seeds under one parent have in common."""
    from pipeline.config import params

    record = training.record
    tags = {key: getattr(record, key) for key in OWN}
    tags |= {key: record.environment[key] for key in ENVIRONMENT if record.environment.get(key) is not None}
    configuration = _configuration(record.study, record.name, record.data_sha256, record.config)
    tags |= {"run": training.name, "level": "single", "configuration": configuration}
    tags |= {"mlflow.source.name": "pipeline/tools/train.py", "mlflow.source.type": "LOCAL"}
    if "git_commit" in tags:
        tags["mlflow.source.git.commit"] = tags["git_commit"]
    if not training.has_ended:
        tags["host"] = platform.node()
    tags = {key: params.as_yaml(value) for key, value in tags.items()}
    return tags | {"checksum": _checksum(training, tags)}


def _configuration(study: str, name: str, data_sha256: str, config: dict) -> str:
    """The digest of what the seeds under one parent have in common."""
    from pipeline.config import params

    return files.digest([study, name, data_sha256, params.normalised_config(config)])[:16]


def _checksum(training: Training, tags: dict[str, str]) -> str:
    """The digest of a training's files and of the tags that a sync guards."""
    return files.digest([training.digest, [tags.get(key) for key in GUARDED]])[:16]


def _parameters(training: Training, metrics: dict[str, Any]) -> dict[str, str]:
    from pipeline.config.params import as_yaml

    parameters = {"seed": str(training.record.seed)}
    for section, values in training.record.config.items():
        parameters |= {f"{section}.{key}": as_yaml(value) for key, value in values.items() if value is not None}
    if metrics:
        parameters["num_parameters"] = str(metrics["num_parameters"])
    return parameters


def _seed(child: Entry) -> int:
    return int(child.name.split("/")[2])


def _now() -> int:
    return time.time_ns() // 1_000_000


def _word(flag: bool) -> str:
    return "true" if flag else "false"
