"""A training as its files tell it, whether it is under way or has ended."""

import hashlib
import itertools
import math
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.training import run as runs

# In the order in which they are logged, which is that of MLflow's pages: the page Compare opens on the first.
CURVES = ("test_accuracy", "test_loss", "train_accuracy", "train_loss", "epoch")
NAMES = ("history.csv", "metrics.json", "record.json", "watched.csv")
LOST_SECONDS = 900  # without a point, or four times the longest time between two, after which a training has ended
STATUS = {"running": "RUNNING", "finished": "FINISHED", "diverged": "FAILED"}  # in MLflow's words

Value = tuple[str, float, int, int]  # of a metric: its key, the value, milliseconds since 1970, the step


@dataclass(frozen=True)
class Training:
    """A training, by its record."""

    run: runs.Run
    path: Path  # of the record
    record: dict

    @classmethod
    def read(cls, path: Path, base: Path) -> "Training":
        """Of the record at a path. Raises UserError, KeyError, TypeError or AttributeError if it is malformed."""
        record = files.read_json(path)
        run = runs.Run(*(record[key] for key in ("variant", "seed", "study", "overrides")), base)
        training = cls(run, path, record)
        if training.has_ended and run.folder != path.parent:
            raise UserError(f"it is the record of {run}")
        return training

    @property
    def has_ended(self) -> bool:
        return self.record["status"] != "running"

    @property
    def files(self) -> list[Path]:
        if not self.has_ended:
            return [self.path]
        places = [*map(self.path.with_name, NAMES), *([self.run.evaluated] if self.run.study == runs.TABLE_2 else [])]
        present = [path for path in places if path.exists()]
        for path in present:
            if path.is_symlink():  # which could show any file of this machine
                raise UserError(f"{path.name} is a link")
        return present

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    @property
    def started(self) -> int:
        return _milliseconds(self.record["started_at"])

    @property
    def ended(self) -> int:
        return _milliseconds(self.record["finished_at"]) if self.has_ended else self.record["timestamps"][-1]

    @property
    def status(self) -> str:
        longest = max((b - a for a, b in itertools.pairwise(self.record["timestamps"])), default=0) / 1000
        is_old = time.time() - self.path.stat().st_mtime > max(LOST_SECONDS, 4 * longest)
        return "KILLED" if is_old and not self.has_ended else STATUS[self.record["status"]]

    def values(self) -> list[Value]:
        """Its curves. While it trains, the history and the record, which has the times, are not written at one instant.

        Raises:
            UserError, KeyError, TypeError, ValueError: a file is malformed, or not what the record says.
        """
        if self.has_ended:
            self.run.record()  # which checks the digests
        table = self.run.history() if self.has_ended else files.read_csv(self.path.with_name("history.csv"))
        unit = {key: 100 if "accuracy" in key else 1 for key in CURVES}  # files have accuracies as fractions
        return [
            (key, rounded(key, unit[key] * row[key]), timestamp, int(row["step"]))
            for row, timestamp in zip(table.to_dict("records"), self.record["timestamps"], strict=self.has_ended)
            for key in CURVES
            if math.isfinite(row[key])
        ]


def find(base: Path, beginning: str = "") -> list[Path]:
    """The records of runs under a folder whose names begin so, and in the working directory of those that train."""
    paths = sorted((base / runs.FOLDER).glob("*/*/*/record.json"))
    paths += sorted(Path(".checkpoints").glob("*/*/*-*/record.json")) if base == Path(".") else []
    return [path for path in paths if name_of(path).startswith(beginning)]


def name_of(path: Path) -> str:
    """table_2/osa_qr/0, from the folder of its record."""
    study, name, seed = path.parts[-4:-1]
    return f"{study}/{name}/{seed.partition('-')[0]}"


def rounded(key: str, value: float) -> float:
    """To two digits of what is in per cent, and to five significant ones of all else."""
    return round(value, 2) if "accuracy" in key else float(f"{value:.5g}")


def _milliseconds(timestamp: str) -> int:
    return round(datetime.fromisoformat(timestamp).timestamp() * 1000)
