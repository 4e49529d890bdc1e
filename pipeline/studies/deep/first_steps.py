"""First steps: is a deep model lost before its first step, or by it? OSA and E-SPA at several rates, step by step."""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated

import pandas as pd
import torch
from pydantic import Field

from pipeline.core.params import Name, PositiveFloat, PositiveInt, RunConfig, Section, Seeds
from pipeline.lab import Lab
from pipeline.studies import Study, Tables
from pipeline.training.loop import Training

LARGE = 10.0  # a mean square of [cls], for which no MLP is shaped


class Settings(Section):
    seeds: Seeds
    depths: Annotated[list[PositiveInt], Field(min_length=1)]
    rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    models: Annotated[list[Name], Field(min_length=1)] = Field(["osa_shaped", "espa"], min_length=1)
    steps: PositiveInt = 8


def measure(settings: Settings, lab: Lab) -> Tables:
    """The first steps of trainings as the study `depth` has them, from the same draws and over the same images."""
    rows = []
    for model, depth, rate, seed in itertools.product(settings.models, settings.depths, settings.rates, settings.seeds):
        config = lab.config(model, {"model": {"depth": depth}, "train": {"learning_rate": rate}})
        identity = {"model": model, "depth": depth, "rate": rate, "seed": seed}
        rows += [identity | row for row in first_steps(config, seed, settings.steps)]
    return {"steps": pd.DataFrame(rows)}


def first_steps(config: RunConfig, seed: int, steps: int) -> Iterator[dict[str, float]]:
    """Before each step and after the last one, until the loss is not finite:

    loss       of the minibatch of the step that comes next
    gradient   ‖∂loss/∂θ‖₂ over all parameters, before it is clipped
    q          mean square of an entry of [cls] after the last block
    """
    training = Training(config, seed, torch.device("cpu"))
    norms, squares = [], []
    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.double().norm()))
    training.model.blocks[-1].register_forward_hook(lambda *call: squares.append(call[-1][:, 0].detach().square().mean()))
    for step, batch in enumerate(itertools.islice(training.batches(0), steps + 1)):
        norms.clear()
        loss = training.step(*batch)[0].item()
        if not math.isfinite(loss):
            return
        yield {"step": step, "loss": loss, "gradient": torch.stack(norms).norm().item(), "q": squares.pop().item()}


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """By model and depth: the seeds whose [cls] is large before any step, and after the last one at each rate."""
    steps = tables["steps"]
    large = steps.assign(large=steps["q"] >= LARGE).groupby(["model", "depth", "rate", "seed"], sort=False)["large"]
    counts = large.agg(["first", "last"]).groupby(["model", "depth", "rate"], sort=False).sum()
    rows = [
        {"model": model, "depth": depth, "before": int(own["first"].iloc[0]), "after": own["last"].tolist()}
        for (model, depth), own in counts.groupby(["model", "depth"], sort=False)
    ]
    return {"rates": settings.rates, "seeds": len(settings.seeds), "steps": settings.steps, "large": LARGE, "rows": rows}


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
