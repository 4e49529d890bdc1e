"""Reads a training run from its files, whether it has ended or is in progress.

A sync reads every run and usually finds nothing new, so slow imports, such as pandas, wait until `starts` needs them.
"""

import csv
import hashlib
import math
import time
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path

from pipeline.config import records
from pipeline.config.records import RunRecord
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.training.run import RUNS, SCRATCH, Run

# MLflow shows metrics in this order. Its Compare page opens on the first metric of the list.
LOGGED_CURVES = ("test_accuracy", "test_loss", "train_accuracy", "train_loss", "epoch")
LOST_SECONDS = 3600  # a run without a new evaluation for this long counts as killed
STATUS = {"running": "RUNNING", "finished": "FINISHED", "diverged": "FAILED"}  # status in a record → status in MLflow

Value = tuple[str, float, int, int]  # key, value, milliseconds since 1970, and step of a metric


class TrackedTraining:
    """A training run, given by the path of its record. The record lies in RUNS if the run has ended, else in SCRATCH."""

    def __init__(self, path: Path) -> None:
        self.path = path
        study, name, seed = path.parts[-4:-1]
        self.family = f"{study}/{name}"  # for instance table_2/osa_qr
        self.name = f"{self.family}/{seed.partition('-')[0]}"  # the folder of a run in progress is named SEED-KEY
        self.has_ended = not path.is_relative_to(SCRATCH)

    @cached_property
    def digest(self) -> str:
        """A digest of all files if the run has ended, or of the record alone if it is in progress.

        Raises:
            UserError: a file is a link, which could expose any file on this machine.
        """
        digest = hashlib.sha256()
        for path in sorted(self.path.parent.iterdir()) if self.has_ended else [self.path]:
            if path.is_symlink():
                raise UserError(f"{path} is a link: run `git checkout {self.path.parent}` to restore the file.")
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    @cached_property
    def record(self) -> RunRecord:
        """The record. Raises UserError if the file is damaged."""
        return records.parse(self.path, records.RunRecord, f"run `git checkout {self.path.parent}`")

    @cached_property
    def run(self) -> Run:
        """The run that the record describes. Raises UserError if the record lies in the folder of another run."""
        if self.has_ended:
            return Run.at(self.path.parent)
        return Run(self.record.variant, self.record.seed, self.record.study, self.record.overrides)

    @property
    def started(self) -> int:
        return _milliseconds(self.record.started_at)

    @property
    def ended(self) -> int:
        """The time of the run's end or, if the run is in progress, of its last evaluation, in milliseconds since 1970."""
        end = self.record.finished_at
        return _milliseconds(end) if end else max(self.record.timestamps, default=self.started)

    @property
    def status(self) -> str:
        """The status for MLflow: RUNNING, FINISHED, FAILED or KILLED. A diverged run counts as FAILED."""
        if not self.has_ended and time.time() - self.path.stat().st_mtime > LOST_SECONDS:
            return "KILLED"
        return STATUS[self.record.status]

    def metrics(self) -> dict:
        """Returns the content of metrics.json, or {} during training. Raises UserError if a file of the run is damaged."""
        if not self.has_ended:
            return {}
        self.run.record()
        return self.run.metrics()

    def values(self) -> list[Value]:
        """Returns each evaluation's metrics (accuracies in per cent). Omits a split's metrics if its loss is not finite."""
        values = []
        # During training, the history may have one more evaluation than the record.
        with open(self.path.with_name("history.csv"), encoding="utf-8", newline="") as history:
            for row, timestamp in zip(csv.DictReader(history), self.record.timestamps, strict=self.has_ended):
                point = {key: float(row[key] or "nan") for key in LOGGED_CURVES}
                for key, value in point.items():
                    loss = point[key.replace("accuracy", "loss")]
                    if math.isfinite(value) and math.isfinite(loss):
                        value *= 100 if "accuracy" in key else 1
                        values.append((key, rounded_metric(key, value), timestamp, int(row["step"])))
        return values

    def starts(self) -> bool:
        """True if an ended run started to learn, as defined by `starts` in pipeline/statistics/claims.py."""
        from pipeline.statistics.claims import starts

        guess_loss = math.log(self.record.config.model.num_classes)
        return starts(files.read_csv(self.path.with_name("history.csv")), guess_loss)


def find(beginnings: Sequence[str] = ()) -> list[TrackedTraining]:
    """Returns the runs whose names begin with one of `beginnings`. By default, returns all runs."""
    paths = sorted(RUNS.glob("*/*/*/record.json")) + sorted(SCRATCH.glob("*/*/*-*/record.json"))
    return [training for training in map(TrackedTraining, paths) if training.name.startswith(tuple(beginnings) or "")]


def rounded_metric(key: str, value: float) -> float:
    """Rounds an accuracy, in per cent, to two decimals, and any other value to five significant digits."""
    return round(value, 2) if "accuracy" in key else float(f"{value:.5g}")


def _milliseconds(moment: str) -> int:
    return round(datetime.fromisoformat(moment).timestamp() * 1000)
