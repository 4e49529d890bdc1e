"""A training as its files tell it, whether it is under way or has ended.

A sync looks at every training and mostly finds nothing new. So nothing here imports torch before a curve is read.
"""

import csv
import hashlib
import math
import time
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core import files
from pipeline.core.errors import UserError

if TYPE_CHECKING:
    from pipeline.config.records import RunRecord
    from pipeline.training.run import Run

FOLDER, UNDER_WAY, TABLE_2 = Path("paper_outputs", "runs"), Path(".checkpoints"), "table_2"  # as in pipeline.training.run
# MLflow's pages show metrics in the order in which they are logged, and Compare opens on the first.
CURVES = ("test_accuracy", "test_loss", "train_accuracy", "train_loss", "epoch")
LOST_SECONDS = 3600  # without a point, after which a training counts as killed until it has one
STATUS = {"running": "RUNNING", "finished": "FINISHED", "diverged": "FAILED"}  # in MLflow's words

Value = tuple[str, float, int, int]  # a metric's key and value, milliseconds since 1970, step


class Training:
    """A training, by the path of its record: paper_outputs/runs/STUDY/NAME/SEED/record.json once it has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        study, name, seed = path.parts[-4:-1]
        self.family = f"{study}/{name}"  # table_2/osa_qr
        self.name = f"{self.family}/{seed.partition('-')[0]}"  # table_2/osa_qr/0; while it trains the folder is 0-KEY
        self.has_ended = not path.is_relative_to(UNDER_WAY)

    @cached_property
    def digest(self) -> str:
        """The digest of its files; while it trains of its record alone, which each point changes.

        Raises:
            UserError: one is a link, which could show any file of this machine.
        """
        digest = hashlib.sha256()
        for path in sorted(self.path.parent.iterdir()) if self.has_ended else [self.path]:
            if path.is_symlink():
                raise UserError(f"{path} is a link: `git checkout {self.path.parent}` brings the file back.")
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    @cached_property
    def record(self) -> "RunRecord":
        """Raises UserError if it is damaged."""
        from pipeline.config import records

        return records.parse(self.path, records.RunRecord, f"`git checkout {self.path.parent}`")

    @cached_property
    def run(self) -> "Run":
        """The run, for its other files. Raises UserError if the record is another run's."""
        from pipeline.training.run import Run

        if self.has_ended:
            return Run.at(self.path.parent)
        return Run(self.record.variant, self.record.seed, self.record.study, self.record.overrides)

    @property
    def started(self) -> int:
        return _milliseconds(self.record.started_at)

    @property
    def ended(self) -> int:
        """When it ended, or while it trains the time of its last point."""
        end = self.record.finished_at
        return _milliseconds(end) if end else max(self.record.timestamps, default=self.started)

    @property
    def status(self) -> str:
        """RUNNING, FINISHED, FAILED if it diverged, or KILLED if it came to no next point."""
        if not self.has_ended and time.time() - self.path.stat().st_mtime > LOST_SECONDS:
            return "KILLED"
        return STATUS[self.record.status]

    def metrics(self) -> dict:
        """Content of metrics.json; {} while it trains. Raises UserError if a file is not the one that the record knows."""
        if not self.has_ended:
            return {}
        self.run.record()
        return self.run.metrics()

    def values(self) -> list[Value]:
        """The points of its curves, accuracies in per cent. Where a loss is not finite the accuracy is that of no model.

        While it trains, the history may have a point more than the record, which has the times.
        """
        values = []
        with open(self.path.with_name("history.csv"), encoding="utf-8", newline="") as history:
            for row, timestamp in zip(csv.DictReader(history), self.record.timestamps, strict=self.has_ended):
                point = {key: float(row[key] or "nan") for key in CURVES}
                for key, value in point.items():
                    loss = point[key.replace("accuracy", "loss")]
                    if math.isfinite(value) and math.isfinite(loss):
                        value *= 100 if "accuracy" in key else 1
                        values.append((key, rounded(key, value), timestamp, int(row["step"])))
        return values

    def starts(self) -> bool:
        """Tells whether a run that has ended starts, as pipeline/statistics/verdicts.py has it."""
        from pipeline.statistics.claims import starts

        guess_loss = math.log(self.record.config.model.num_classes)
        return starts(files.read_csv(self.path.with_name("history.csv")), guess_loss)


def find(beginnings: Sequence[str] = ()) -> list[Training]:
    """The trainings whose names begin with one of these, or all."""
    paths = sorted(FOLDER.glob("*/*/*/record.json")) + sorted(UNDER_WAY.glob("*/*/*-*/record.json"))
    return [training for training in map(Training, paths) if training.name.startswith(tuple(beginnings) or "")]


def rounded(key: str, value: float) -> float:
    """A value to two digits if it is in per cent, else to five significant ones."""
    return round(value, 2) if "accuracy" in key else float(f"{value:.5g}")


def _milliseconds(moment: str) -> int:
    return round(datetime.fromisoformat(moment).timestamp() * 1000)
