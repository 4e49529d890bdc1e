"""A training as its files tell it, whether it is under way or has ended.

A sync looks at every training and mostly finds nothing new. So nothing here imports torch before a curve is read.
"""

import csv
import hashlib
import itertools
import math
import time
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, NonNegativeInt, ValidationError

from pipeline.core import files
from pipeline.core.errors import UserError

if TYPE_CHECKING:
    from pipeline.training.run import Run

FOLDER, TABLE_2 = Path("paper_outputs", "runs"), "table_2"  # as in pipeline.training.run
UNDER_WAY = Path(".checkpoints")
# MLflow's pages show metrics in the order in which they are logged, and Compare opens on the first.
CURVES = ("test_accuracy", "test_loss", "train_accuracy", "train_loss", "epoch")
LOST_SECONDS = 900  # without a point, or four times the longest time between two: the training was killed
STATUS = {"running": "RUNNING", "finished": "FINISHED", "diverged": "FAILED"}  # in MLflow's words

Value = tuple[str, float, int, int]  # a metric's key and value, milliseconds since 1970, step


class Record(BaseModel):
    """The part of record.json that MLflow shows."""

    study: str
    name: str
    variant: str
    overrides: dict[str, dict[str, Any]]
    seed: NonNegativeInt
    run_key: str
    status: Literal["running", "finished", "diverged"]
    config: dict[str, dict[str, Any]]
    data_sha256: str
    numerics: int
    environment: dict[str, Any]
    started_at: datetime
    finished_at: datetime | None
    seconds: float
    images_per_second: float | None
    timestamps: list[int]  # times of the points, in milliseconds since 1970


class Training:
    """A training, by the path of its record: paper_outputs/runs/STUDY/NAME/SEED/record.json once it has ended."""

    def __init__(self, path: Path, base: Path = Path()) -> None:
        self.path, self.base = path, base
        study, name, seed = path.parts[-4:-1]
        self.family = f"{study}/{name}"  # table_2/osa_qr
        self.name = f"{self.family}/{seed.partition('-')[0]}"  # table_2/osa_qr/0; while it trains the folder is 0-KEY
        self.has_ended = not path.is_relative_to(UNDER_WAY)

    @cached_property
    def digest(self) -> str:
        """The digest of its folder's files. Raises UserError if one is a link, which could show any file of this machine."""
        digest = hashlib.sha256()
        for path in sorted(self.path.parent.iterdir()) if self.has_ended else [self.path]:
            if path.is_symlink():
                raise UserError(f"{path.name} is a link")
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    @cached_property
    def record(self) -> Record:
        """Its record. Raises UserError if it is malformed, or that of another run."""
        try:
            record = Record.model_validate(files.read_json(self.path))
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if self.name != (name := f"{record.study}/{record.name}/{record.seed}"):
            raise UserError(f"it is the record of {name}")
        if self.has_ended != (record.status != "running"):
            raise UserError(f"its status is {record.status}")
        return record

    @cached_property
    def run(self) -> "Run":
        from pipeline.training.run import Run

        return Run(self.record.variant, self.record.seed, self.record.study, self.record.overrides, self.base)

    @property
    def started(self) -> int:
        return round(self.record.started_at.timestamp() * 1000)

    @property
    def ended(self) -> int:
        """When it ended, or while it trains the time of its last point."""
        end = self.record.finished_at
        return round(end.timestamp() * 1000) if end else max(self.record.timestamps, default=self.started)

    @property
    def status(self) -> str:
        """RUNNING, FINISHED, FAILED if it diverged, or KILLED if it came to no next point."""
        longest = max((b - a for a, b in itertools.pairwise(self.record.timestamps)), default=0) / 1000
        is_old = time.time() - self.path.stat().st_mtime > max(LOST_SECONDS, 4 * longest)
        return "KILLED" if is_old and not self.has_ended else STATUS[self.record.status]

    def metrics(self) -> dict[str, Any]:
        """Content of metrics.json; empty while it trains. Raises UserError if a file is not the record's."""
        if not self.has_ended:
            return {}
        if self.run.record() is None:  # checks them all
            raise UserError("history.csv or metrics.json is missing")
        return files.read_json(self.path.with_name("metrics.json"))

    def values(self) -> list[Value]:
        """The points of its curves, accuracies in per cent. Where a loss is not finite the accuracy is that of no model.

        While it trains, the history may have a point more than the record, which has the times.

        Raises:
            UserError: the history is malformed, or has not as many points as the record.
        """
        listed, times = [], self.record.timestamps
        try:
            text = self.path.with_name("history.csv").read_text(encoding="utf-8")
            rows = list(csv.DictReader(text.splitlines(), strict=True))
            for row, timestamp in zip(rows, times, strict=self.has_ended):
                point = {key: float(row[key] or "nan") for key in CURVES}
                for key, value in point.items():
                    if math.isfinite(value) and math.isfinite(point[key.replace("accuracy", "loss")]):
                        value *= 100 if "accuracy" in key else 1
                        listed.append((key, rounded(key, value), timestamp, int(row["step"])))
        except (KeyError, ValueError, csv.Error) as error:
            raise UserError(f"history.csv is malformed, or not the record's: {error}") from None
        return listed

    def starts(self) -> bool:
        """Tells whether a run that has ended starts, as pipeline/statistics/verdicts.py has it."""
        from pipeline.statistics.claims import starts

        num_classes = self.record.config.get("model", {}).get("num_classes", 10)
        return starts(files.read_csv(self.path.with_name("history.csv")), math.log(num_classes))


def find(base: Path, beginnings: str | tuple[str, ...] = "") -> list[Training]:
    """The trainings under a folder whose names begin so; under the working directory also those under way."""
    paths = sorted((base / FOLDER).glob("*/*/*/record.json"))
    if base == Path():
        paths += sorted(UNDER_WAY.glob("*/*/*-*/record.json"))
    trainings = [Training(path, base) for path in paths]
    return [training for training in trainings if training.name.startswith(beginnings)]


def rounded(key: str, value: float) -> float:
    """A value to two digits if it is in per cent, else to five significant ones."""
    return round(value, 2) if "accuracy" in key else float(f"{value:.5g}")
