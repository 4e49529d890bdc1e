"""A pilot of deep models: some hundred steps of few images, with MLPs drawn independently or as isometries, at other rates,
with a warm-up, a tighter clipping and other α. It tells which of them fail at once, before a run takes an hour.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated

import pandas as pd
import torch
from pydantic import Field

from pipeline.core import record
from pipeline.core.params import PositiveInt, RunConfig
from pipeline.lab import Lab
from pipeline.studies import Study, Tables, comparison
from pipeline.training.loop import Training


class Settings(comparison.Settings):
    steps: PositiveInt  # of each training
    windows: list[Annotated[list[int], Field(min_length=2, max_length=2)]]  # first and last step of a mean


def measure(settings: Settings, lab: Lab) -> Tables:
    rows = []
    for name, (variant, overrides, seed) in settings.requests():
        steps = short_training(lab.config(variant, overrides), seed, settings.steps)
        rows += [{"name": name, "variant": variant, "seed": seed, **row} for row in steps]
    return {"steps": pd.DataFrame(rows)}


def short_training(config: RunConfig, seed: int, steps: int) -> Iterator[dict[str, float]]:
    """The first steps of a training, from the draws and over the images of a whole one, up to a loss that is not finite.

    loss       of the step's minibatch, before the step
    gradient   ‖∂loss/∂θ‖₂ over all parameters, before it is clipped
    """
    training, norms = Training(config, seed, record.default_device()), []
    training.with_graph = False  # in whose replay no hook runs
    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.double().norm()))
    for step, batch in enumerate(itertools.islice(training.batches(0), steps)):
        norms.clear()
        loss = training.step(*batch)[0].item()
        yield {"step": step, "loss": loss, "gradient": torch.stack(norms).norm().item()}
        if not math.isfinite(loss):
            return


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """For each training what it was given, its first gradient and its mean loss in each window, NaN once it has diverged."""
    rows = []
    for name, (variant, overrides, seed) in settings.requests():
        config, steps = lab.config(variant, overrides), tables["steps"]
        own = steps[(steps["name"] == name) & (steps["seed"] == seed)]
        losses = own.set_index("step")["loss"].reindex(range(settings.steps))
        rows.append(
            {"name": name, "variant": variant, "seed": seed, "depth": config.model.depth, "rate": config.train.learning_rate}
            | {"warmup": config.train.warmup_steps, "clip": config.train.clip_grad_norm}
            | {"alpha": config.variant.alpha_times_depth, "gradient": own["gradient"].iloc[0]}
            | {"losses": [losses.loc[first:last].mean(skipna=False) for first, last in settings.windows]}
        )
    return {"rows": rows, "windows": settings.windows, "steps": settings.steps, "batch": config.train.batch_size}


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
