"""Estimates how long training runs take, from records of earlier runs, and how long other stages take, from a table."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

from pipeline.config.params import USER_FOLDER, RunConfig
from pipeline.config.records import RunRecord
from pipeline.core import provenance
from pipeline.core.errors import UserError
from pipeline.data import idx
from pipeline.training.run import Run

TRAIN_IMAGES = {"sample": 4_000, "cifar10": 50_000}  # other published data sets have 60,000
SECONDS = {  # of stages, by group or study; those of 25 s and more were measured on one thread of an AMD EPYC
    "check": 3,
    "complexity": 230,
    "evaluate": 100,
    "fetch": 10,
    "isometry": 100,
    "long_sequences": 25,
    "signals": 190,
    "theorems_4_3_4_4": 35,
    "trainability": 190,
    "transduction": 1400,
    "verdicts": 35,
}
OTHER_SECONDS = 5


def of_stage(name: str) -> float:
    """Estimates the seconds that a stage without training takes: SECONDS[study], else SECONDS[group], else OTHER_SECONDS."""
    group, _, study = name.rpartition(":")[2].partition("@")
    return SECONDS.get(study, SECONDS.get(group, OTHER_SECONDS))


def relative_cost(config: RunConfig, data_sha256: str | None = None) -> float | None:
    """Returns a number proportional to the duration of a training run: the number of patches seen × the number of blocks.

    Returns None if the run uses the user's images, and these are absent or their digest differs from `data_sha256`.
    """
    source, images = config.data.source, TRAIN_IMAGES.get(config.data.source, 60_000)
    try:
        if source == USER_FOLDER:
            if data_sha256 not in (None, config.data.description().sha256):
                return None
            images = idx.num_train_images(idx.folder(source))
        patches = (config.data.images.size // config.model.patch_size) ** 2
    except UserError:
        return None
    return config.train.epochs * images * patches * config.model.depth


class Estimates:
    """Estimates the duration of training runs. Reads the records of earlier runs only when it makes the first estimate."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._unread = iter(records)
        # Seconds per unit of `relative_cost`. Each key is a pair (device, one of `_keys`). Device None means all devices.
        self._paces: dict[tuple[str | None, Any], list[float]] = defaultdict(list)

    def add(self, record: RunRecord) -> None:
        if (cost := relative_cost(record.config, record.data_sha256)) is None:
            return
        for device in (record.environment.device, None):
            for key in _keys(record):
                self._paces[device, key].append(record.seconds / cost)

    def of(self, run: Run, config: RunConfig) -> float | None:
        """Estimates the seconds that a run takes. Returns None if its cost is unknown or there are no earlier runs.

        The estimate is the run's `relative_cost` times the median seconds per unit of cost. The median covers earlier runs
        of the same study and name, else of the same variant, else all runs. If any earlier run used this machine's kind of
        device, CPU or GPU, runs on other devices do not count.
        """
        if (cost := relative_cost(config)) is None:
            return None
        for record in self._unread:
            self.add(record)
        here = provenance.default_device().type
        device = here if (here, None) in self._paces else None
        for key in _keys(run):
            if (device, key) in self._paces:
                return cost * median(self._paces[device, key])
        return None


def _keys(run: Run | RunRecord) -> tuple:
    """Returns the keys of a run in `Estimates._paces`, from the most specific to None, which all runs share."""
    return (run.study, run.name), run.variant, None


def spent(record: RunRecord, **others: float) -> str:
    """Formats the times of a run and of its phases, except very short phases, as in "12 min (start 4 s, steps 10 min)"."""
    phases = record.phases | others
    least = max(0.5, sum(phases.values()) / 100)
    shown = [f"{phase} {duration(seconds)}" for phase, seconds in phases.items() if seconds > least]
    return duration(record.seconds) + (f" ({', '.join(shown)})" if shown else "")


def duration(seconds: float) -> str:
    """Formats seconds, as in "2 h 5 min", "12 min" or "40 s"."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if seconds >= 100 else f"{seconds:.0f} s"
