"""A training as its files tell it: a record, the points of its curves, and in the end all that it leaves."""

import csv
import hashlib
import itertools
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pipeline.core import files

# In the order in which they are logged, which is that of MLflow's pages: the page Compare opens on the first.
CURVES = ("test_accuracy", "test_loss", "train_accuracy", "train_loss", "epoch")
NAMES = ("history.csv", "metrics.json", "record.json", "evaluation.json", "watched.csv")
OUTPUTS = Path("paper_outputs")
LOST_SECONDS = 900  # without a point, or four times the longest time between two, after which a training has ended
STATUS = {"running": "RUNNING", "finished": "FINISHED", "diverged": "FAILED"}  # in MLflow's words

Point = tuple[int, int, dict[str, float]]  # step, milliseconds since 1970, the values that are finite


@dataclass(frozen=True)
class Training:
    """A training that is under way or has ended."""

    path: Path  # of its record
    run: str  # as in table_2/osa_qr/0
    record: dict
    metrics: dict  # none while it trains
    points: list[Point]
    files: list[Path]
    weights: Path | None

    @property
    def started(self) -> int:
        return milliseconds(self.record["started_at"])

    @property
    def ended(self) -> int:
        return milliseconds(self.record["finished_at"]) if self.metrics else self.points[-1][1]

    @property
    def status(self) -> str:
        longest = max((b - a for a, b in itertools.pairwise(self.record["timestamps"])), default=0) / 1000
        is_old = time.time() - self.path.stat().st_mtime > max(LOST_SECONDS, 4 * longest)
        return "KILLED" if is_old and not self.metrics else STATUS[self.record["status"]]

    @property
    def digest(self) -> str:
        """One of all its files, of which weights count as there or not."""
        digest = hashlib.sha256(str(self.weights is not None).encode())
        for path in self.files:
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]


def find(base: Path, run: str | None = None) -> list[Path]:
    """The records of runs under a folder, and in the working directory of those that train."""
    paths = sorted((base / OUTPUTS / "runs").glob("*/*/*/record.json"))
    paths += sorted(Path(".checkpoints").glob("*/*/*-*/record.json")) if base == Path(".") else []
    return [path for path in paths if run in (None, name_of(path))]


def name_of(path: Path) -> str:
    """table_2/osa_qr/0, from the folder of its record."""
    study, name, seed = path.parts[-4:-1]
    return f"{study}/{name}/{seed.partition('-')[0]}"


def read(path: Path, base: Path) -> Training:
    """The training whose record this is.

    Raises:
        OSError, UserError, KeyError, TypeError, ValueError: the record is malformed, or its files are not what it says.
    """
    record, folder, run = files.read_json(path), path.parent, name_of(path)
    if (own := f"{record['study']}/{record['name']}/{int(record['seed'])}") != run:
        raise ValueError(f"it is the record of {own}")
    present = [folder / name for name in NAMES if (folder / name).exists()]
    if outside := [each.name for each in present if each.resolve().parent != folder.resolve()]:
        raise ValueError(f"{outside[0]} is a link to another folder")
    points = read_points(folder / "history.csv", record["timestamps"])
    if record["status"] == "running":
        return Training(path, run, record, {}, points, [path], None)
    metrics = files.read_json(folder / "metrics.json")
    digests = {name: record.get(f"{name.partition('.')[0]}_sha256") for name in ("history.csv", "metrics.json")}
    is_other = any(digest not in (None, files.sha256(folder / name)) for name, digest in digests.items())
    if is_other or len(points) != len(record["timestamps"]) or points[-1][0] != metrics["steps"]:
        raise ValueError("history.csv or metrics.json is of another training")
    weights = base / OUTPUTS / "weights" / f"{run}.safetensors"
    return Training(path, run, record, metrics, points, present, weights if weights.exists() else None)


def read_points(path: Path, timestamps: list[int]) -> list[Point]:
    """The rows of a history. It and the record, which has their times, are not written at the same instant."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    unit = {key: 100 if "accuracy" in key else 1 for key in CURVES}  # files have accuracies as fractions
    return [
        (int(row["step"]), timestamp, {key: rounded(key, unit[key] * float(row[key])) for key in CURVES if row[key]})
        for row, timestamp in zip(rows, timestamps, strict=False)
    ]


def rounded(key: str, value: float) -> float:
    """To two digits of what is in per cent, and to five significant ones of all else."""
    return round(value, 2) if "accuracy" in key else float(f"{value:.5g}")


def milliseconds(timestamp: str) -> int:
    return round(datetime.fromisoformat(timestamp).timestamp() * 1000)
