"""Brings MLflow up to date with the files: a parent run for each configuration, and under it a child for each seed.

One search says what MLflow has. The name of a run stands in its parameter `run`, which nobody can edit; tags that somebody
edited or deleted are written again. So it may be called at any time and by several processes, and doubles nothing.
"""

import getpass
import os
import platform
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tqdm import tqdm

from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.params import plain
from pipeline.drawing.looks import look
from pipeline.tracking import models, notes, records, store
from pipeline.tracking.records import CURVES, Training, Value, rounded
from pipeline.tracking.views import views
from pipeline.training import run as runs
from pipeline.training.run import TABLE_2

VALUES_PER_BATCH = 1000  # as many as MLflow takes
MOST_RUNS = 50_000  # as many as it finds in one search
ENDED = ("FINISHED", "FAILED")  # in its words; the second has diverged
COSTS = ("seconds", "images_per_second")
OWN = ("study", "name", "variant", "seed", "run_key", "data_sha256", "numerics")  # tags, from a record
ENVIRONMENT = ("device", "device_name", "git_commit", "git_dirty", "num_threads", "platform", "python", "torch")
SHARED = ("configuration", "data_sha256", "numerics", "mlflow.source.name", "mlflow.source.type")  # of a parent too
_start = attrgetter("info.start_time")

REPORT = ("figure_1.svg", "figure_1.png", "report.html")  # artifacts of the newest parent


def sync(base: Path = Path("."), *, only: str = "", register=False, opened: tuple | None = None) -> tuple[int, int]:
    """Imports what MLflow lacks of the runs under `base`, and of those that train here, whose names begin with `only`.

    Returns how many were new, of how many. `opened` is what `store.connect` gave before.

    Raises:
        UserError: `base` holds no runs, or MLflow is not installed, does not answer or cannot read its store.
    """
    if base != Path(".") and not (base / runs.FOLDER).is_dir():
        raise UserError(f"--from {base} has no {runs.FOLDER}: name a folder that does.")
    paths = records.find(base, only)
    client, lock = opened or store.connect()
    with store.explained(), lock:
        experiment = Experiment(client)
        experiment.write_views(paths)
        new = [path for path in _shown(paths, "run") if _attempt(path, experiment.bring, path, base)]
        if not only:
            experiment.end_lost_runs({records.name_of(path) for path in paths})
        experiment.write_parents()
        if base == Path("."):
            experiment.attach_report()
        for training, run in _shown(experiment.without_model(), "model"):
            if address := _attempt(training.path, models.log, training, run, client):
                experiment.tag(run, {"model": address})
        if register:
            models.register(client, [each[0] for _, each in sorted(experiment.children.items())])
    return len(new), len(paths)


def _shown(items: list, unit: str) -> Iterable:
    """The items, with a progress bar where they take longer than a moment."""
    return tqdm(items, "MLflow", unit=unit, delay=2, mininterval=1 if sys.stderr.isatty() else 10)


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
            tqdm.write(f"warning: {path} is not imported ({why}): `git checkout` restores it and its run.", sys.stderr)


class Experiment:
    """The experiment in MLflow, and what it had when it was opened."""

    def __init__(self, client: Any) -> None:
        self.client, self.paper = client, params.load_paper()
        self.settings = {}
        with suppress(UserError):  # an edit that is under way must not stop it
            self.settings = params.load().model_dump()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.paper.title
        if (present := client.get_experiment_by_name(name)) is None:
            location = None if store.address().startswith("http") else store.artifacts()
            tags = {"mlflow.note.content": notes.EXPERIMENT, "mlflow.experimentKind": "custom_model_development"}
            present = client.get_experiment(client.create_experiment(name, location, tags))
        elif present.lifecycle_stage == "deleted":
            client.restore_experiment(present.experiment_id)
        self.id, self.tags = present.experiment_id, present.tags
        self.children: dict[str, list] = defaultdict(list)  # by the parameter `run`, the newest first
        self.parents: dict[str, list] = defaultdict(list)  # by configuration
        self.brought: list[Training] = []
        for run in client.search_runs([self.id], max_results=MOST_RUNS, order_by=["attributes.start_time DESC"]):
            if (slashes := _name(run).count("/")) == 2:  # none of a run that somebody else made
                self.children[_name(run)].append(run)
            elif slashes == 1:
                self.parents[run.data.tags.get("configuration", "")].append(run)

    def write_views(self, paths: Iterable[Path]) -> dict[str, str]:
        """Saves the views of these records and of the runs that are there; the name of each by the end of its address."""
        names = [*map(records.name_of, paths), *self.children]
        studies = {name.split("/")[0] for name in names}
        saved = views(study for study in studies if re.fullmatch(r"[\w.-]+", study))
        for key, (_, view) in saved.items():
            if self.tags.get(f"mlflow.sharedViewState.{key}") != view:
                self.client.set_experiment_tag(self.id, f"mlflow.sharedViewState.{key}", view)
        return {key: name for key, (name, _) in saved.items()}

    # children

    def bring(self, path: Path, base: Path) -> bool:
        """Brings the run of a training up to what its files say. Returns True if the run is new."""
        training = Training.read(path, base)
        tags, run = self._tags(training), self._child(training)
        if run is None or run.info.status != training.status or not tags.items() <= run.data.tags.items():
            others = [each for each in self.children[str(training.run)] if each is not run]
            others += [self._write_child(training, run, tags)]
            self.children[str(training.run)] = sorted(others, key=_start, reverse=True)
        self.brought.append(training)
        return run is None

    def _child(self, training: Training) -> Any:
        return next((run for run in self.children[str(training.run)] if run.info.start_time == training.started), None)

    def _write_child(self, training: Training, run: Any, tags: dict[str, str]) -> Any:
        record, name, values = training.record, str(training.run), training.values()
        known = {metric.step for metric in self.client.get_metric_history(run.info.run_id, CURVES[-1])} if run else ()
        values = [value for value in values if value[-1] not in known]  # a resumed training repeats some later
        constants = {f"{section}.{key}": value for section, keys in record["config"].items() for key, value in keys.items()}
        if training.has_ended:
            metrics = training.run.metrics()
            once = {key: rounded(key, record[key]) for key in COSTS if record[key] is not None}
            once |= {} if metrics["diverged"] else self._beside_paper(name, 100 * metrics["test_accuracy"])
            values += [(key, value, training.ended, 0) for key, value in once.items()]
            constants["num_parameters"] = metrics["num_parameters"]
        constants = {key: value for key, value in constants.items() if value is not None}
        constants |= {"run": name, "seed": training.run.seed}
        title = f"{notes.title(record | tags, self.settings)}, seed {training.run.seed}"
        note = f"{notes.note(record | tags, self.settings, self.paper)}\n\nTo make it again: `{training.run.command}`."
        artifacts = training.files if training.has_ended else []
        span = training.started, training.ended
        return self._write(run, (title, note), span, values, constants, tags, artifacts, training.status)

    def _tags(self, training: Training) -> dict[str, str]:
        """The tags of a child; `configuration` is what the seeds under one parent have in common."""
        record, environment = training.record, training.record["environment"]
        tags = {key: record[key] for key in OWN}
        tags |= {key: environment[key] for key in ENVIRONMENT if environment.get(key) is not None}
        family = [tags["study"], record["name"], record["data_sha256"], params.written_config(record["config"])]
        tags |= {"level": "single", "configuration": files.digest(family)[:16], "files": training.digest}
        tags |= {"mlflow.source.name": "pipeline/train.py", "mlflow.source.type": "LOCAL"}
        tags |= {"mlflow.source.git.commit": tags["git_commit"]} if "git_commit" in tags else {}
        tags |= {} if training.has_ended else {"host": platform.node()}
        return {key: plain(value) for key, value in tags.items()}

    def _beside_paper(self, name: str, accuracy: float) -> dict[str, float]:
        """The paper's accuracy and the difference to it, of its models in Table 2."""
        study, variant = name.split("/")[:2]
        number = self.paper.table_2.get(variant) if study == TABLE_2 else None
        return {} if number is None else {"difference_to_paper": round(accuracy - number, 2), "paper_test_accuracy": number}

    def end_lost_runs(self, present: set[str]) -> None:
        """Marks as killed the runs of this machine whose training left no files."""
        for name in self.children.keys() - present:
            for place, run in enumerate(self.children[name]):
                if run.info.status == "RUNNING" and run.data.tags.get("host") == platform.node():
                    self.client.set_terminated(run.info.run_id, "KILLED")
                    self.children[name][place] = self.client.get_run(run.info.run_id)

    def without_model(self) -> list[tuple[Training, Any]]:
        """The finished trainings of Table 2 whose weights are here and whose run has no model."""
        finished = [each for each in self.brought if each.run.study == TABLE_2 and each.record["status"] == "finished"]
        pairs = [(each, self._child(each)) for each in finished if each.run.weights.exists()]
        return [(training, run) for training, run in pairs if "model" not in run.data.tags]

    # parents

    def write_parents(self) -> None:
        """Says which children are current, the newest finished of each seed, and replaces the parents that changed."""
        families: dict[str, list] = defaultdict(list)
        for each in self.children.values():
            newest = next((run for run in each if run.info.status in ENDED), None)
            for run in each:
                self.tag(run, {"current": run.info.status == "RUNNING" or run is newest})
                families[run.data.tags.get("configuration", "")].append(run)
        families.pop("", None)  # without the tag, which their files bring back
        for configuration in self.parents.keys() - families.keys():
            for parent in self.parents.pop(configuration):
                self.client.delete_run(parent.info.run_id)
        for configuration, family in sorted(families.items(), key=lambda item: _name(item[1][0]), reverse=True):
            parent = self._parent(self.parents[configuration], family)
            self.parents[configuration] = [parent]
            for run in family:
                self.tag(run, {"mlflow.parentRunId": parent.info.run_id})

    def _parent(self, present: list, family: list) -> Any:
        """The parent run of one configuration, with statistics over the newest finished run of each seed.

        MLflow appends to a metric and never replaces it, so new statistics take a new parent, and the old one goes.
        """
        newest = {_seed(run): run for run in sorted(family, key=_start) if run.info.status in ENDED}
        finished = [newest[seed] for seed in sorted(newest)]
        members = finished or family
        study, name = members[0].data.tags["study"], _name(members[0]).split("/")[1]
        tags = {key: value for key, value in members[0].data.tags.items() if key in SHARED}
        tags |= {"study": study, "name": name, "variant": name.partition("+")[0], "level": "mean"}
        tags |= {"seed": ",".join(str(_seed(run)) for run in members)}
        tags |= {"current": plain(any(run.data.tags["current"] == "true" for run in family))}
        tags |= {"children": files.digest([[run.info.run_id, run.data.tags.get("files")] for run in finished])[:16]}
        if len(present) == 1 and tags.items() <= present[0].data.tags.items():
            return present[0]
        constants = members[0].data.params | {"run": f"{study}/{name}"}
        constants.pop("seed", None)
        texts = notes.title(tags, self.settings), notes.note(tags, self.settings, self.paper)
        times = [at for run in members for at in (run.info.start_time, run.info.end_time) if at]
        times = [time.time_ns() // 1_000_000] if study == TABLE_2 else times  # now, so newer than the others
        values = self._statistics(constants["run"], finished) if finished else []
        parent = self._write(None, texts, (min(times), max(times)), values, constants, tags)
        for old in present:
            self.client.delete_run(old.info.run_id)
        return parent

    def _statistics(self, name: str, finished: list) -> list[Value]:
        """The values of a parent: curves where all runs that did not diverge have a point, and at step 0 the rest."""
        counted = [run for run in finished if run.info.status == "FINISHED"]
        groups, last = defaultdict(list), defaultdict(list)
        for run in counted:
            for key in CURVES:
                for metric in self.client.get_metric_history(run.info.run_id, key):
                    groups[key, metric.step].append(metric)
            for key, value in run.data.metrics.items():
                last[key].append(value)
        curves = [
            (key, rounded(key, mean(metric.value for metric in group)), max(metric.timestamp for metric in group), step)
            for (key, step), group in groups.items()
            if len(group) == len(counted)
        ]
        once = {key: rounded(key, mean(last[key])) for key in COSTS if last[key]}
        once |= {f"{key}_std": rounded(key, stdev(last[key])) for key in CURVES[:-1] if len(last[key]) > 1}
        once |= self._beside_paper(name, mean(last["test_accuracy"])) if counted else {}
        once |= {"num_seeds": len(counted), "num_diverged": len(finished) - len(counted)}
        return curves + [(key, value, max(run.info.end_time for run in finished), 0) for key, value in once.items()]

    def attach_report(self) -> None:
        """Figure 1 and the report, as artifacts of the newest parent of a model."""
        parents = [run for each in self.parents.values() for run in each if _name(run).startswith(f"{TABLE_2}/")]
        paths = [path for name in REPORT if (path := Path("paper_outputs", name)).exists()]
        if parents and paths:
            newest, digest = max(parents, key=_start), files.digest([files.sha256(path) for path in paths])[:16]
            if newest.data.tags.get("report") != digest:
                for path in paths:
                    self.client.log_artifact(newest.info.run_id, str(path), "report")
                self.tag(newest, {"report": digest})

    # writing

    def _write(self, run, texts, span, values, constants, tags, artifacts=(), status="FINISHED") -> Any:
        """Writes a run, or what is new of it, the tags and the status last: what is cut short is written again.

        The title, the note and the colour, which is that of Figure 1, stay as somebody edits them.
        """
        from mlflow.entities import Metric, Param, RunTag

        run_id = run.info.run_id if run else self._create(texts, span[0], constants["run"], tags["variant"])
        for path in artifacts:
            self.client.log_artifact(run_id, str(path))
        metrics = [Metric(*value) for value in values]
        while len(metrics) > VALUES_PER_BATCH:
            self.client.log_batch(run_id, metrics[:VALUES_PER_BATCH])
            del metrics[:VALUES_PER_BATCH]
        constants = [Param(key, plain(value)) for key, value in constants.items()]
        self.client.log_batch(run_id, metrics, constants, [RunTag(key, value) for key, value in tags.items()])
        if status != "RUNNING":
            self.client.set_terminated(run_id, status, span[1])
        elif run and run.info.status != "RUNNING":
            self.client.update_run(run_id, "RUNNING")
        return self.client.get_run(run_id)

    def _create(self, texts: tuple[str, str], start: int, name: str, variant: str) -> str:
        colour = look(variant, among=self.settings.get("variants", ())).colour
        tags = {"run": name, "mlflow.note.content": texts[1], "mlflow.runColor": colour}
        with suppress(KeyError, OSError):  # of a user without a name, as in a container
            tags["mlflow.user"] = getpass.getuser()
        return self.client.create_run(self.id, start, tags, texts[0]).info.run_id

    def tag(self, run: Any, tags: dict[str, object]) -> None:
        """Sets the tags that differ, in MLflow and in `run`."""
        for key, value in tags.items():
            if run.data.tags.get(key) != plain(value):
                self.client.set_tag(run.info.run_id, key, plain(value))
                run.data.tags[key] = plain(value)


def _name(run: Any) -> str:
    """table_2/osa_qr/0, or table_2/osa_qr of a parent; of a run cut short at its start the tag says it."""
    return run.data.params.get("run") or run.data.tags.get("run", "")


def _seed(run: Any) -> int:
    return int(_name(run).split("/")[2])
