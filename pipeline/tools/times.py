"""Estimates how long a training takes, by the records of earlier ones, and a stage, as measured once on one thread."""

from collections.abc import Sequence
from statistics import median

from pipeline.config.params import RunConfig
from pipeline.config.records import RunRecord
from pipeline.core import provenance
from pipeline.training.run import Run

TRAIN_IMAGES = {"sample": 4_000, "cifar10": 50_000}  # 60,000 elsewhere

SECONDS = {"check": 3, "fetch": 10, "evaluate": 30, "tables": 5, "report": 30}  # other stages: by their study, or OTHER
OTHER = 5


def of_stage(name: str) -> float:
    """Seconds of a stage that trains nothing, by its study or else by its group."""
    group, _, study = name.rpartition(":")[2].partition("@")
    return SECONDS.get(study, SECONDS.get(group, OTHER))


def relative_cost(config: RunConfig) -> float:
    """A number in proportion to a training's time: images seen times blocks."""
    return config.train.epochs * TRAIN_IMAGES.get(config.data.source, 60_000) * config.model.depth


def estimate(run: Run, config: RunConfig, records: Sequence[RunRecord]) -> float | None:
    """Seconds, the median by the records of the same run, or else of the same variant, or else of all; None without any.

    Records of the kind of device that is here, a CPU or a GPU, come before all others.
    """
    planned, here = relative_cost(config), provenance.default_device().type
    records = [record for record in records if record.environment.device == here] or records
    of_variant = [record for record in records if record.variant == run.variant]
    of_name = [record for record in of_variant if (record.study, record.name) == (run.study, run.name)]
    if alike := of_name or of_variant or records:
        return median(record.seconds * planned / relative_cost(record.config) for record in alike)
    return None


def spent(record: RunRecord, **others: float) -> str:
    """Says how long a run took and on what, as in 12 min (start 4 s, steps 10 min), without phases below a hundredth or half
    a second."""
    phases = record.phases | others
    least = max(0.5, sum(phases.values()) / 100)
    shown = [f"{phase} {duration(seconds)}" for phase, seconds in phases.items() if seconds > least]
    return duration(record.seconds) + (f" ({', '.join(shown)})" if shown else "")


def duration(seconds: float) -> str:
    """2 h 5 min, 12 min or 40 s."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if seconds >= 100 else f"{seconds:.0f} s"
