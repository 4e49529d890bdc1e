"""How long a training takes, by the records of those that have ended."""

from collections.abc import Sequence
from statistics import median

from pipeline.core.params import RunConfig
from pipeline.training.run import Run

TRAIN_IMAGES = {"sample": 4_000, "cifar10": 50_000}  # 60,000 elsewhere


def work(config: dict) -> float:
    """What a training's time is proportional to: images seen times blocks."""
    return config["train"]["epochs"] * TRAIN_IMAGES.get(config["data"]["source"], 60_000) * config["model"]["depth"]


def estimate(run: Run, config: RunConfig, records: Sequence[dict]) -> float | None:
    """Seconds, the median by the records of the same run, or else of the same variant, or else of all; None without any."""
    planned = work(config.model_dump())
    for known in ({"study": run.study, "name": run.name}, {"variant": run.variant}, {}):
        if alike := [record for record in records if known.items() <= record.items()]:
            return median(record["seconds"] * planned / work(record["config"]) for record in alike)
    return None


def duration(seconds: float) -> str:
    """2 h 5 min, 12 min or 40 s."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if seconds >= 100 else f"{seconds:.0f} s"
