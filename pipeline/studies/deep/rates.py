"""A grid search with short runs, for the learning rates of deep models and for α of `osa_shaped`.

We used the results to choose the learning rates and α of the study `depth`. No other study uses the seed of these runs.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated

import pandas as pd
from pydantic import Field

from pipeline.config.params import Name, Overrides, PositiveFloat, PositiveInt, Section, Seed
from pipeline.statistics.claims import GUESS_LOSS
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab, first_steps

OSA = "osa_shaped"  # the model for which we also search for the best product α · L
ALPHA_TIMES_DEPTH = 0.36  # the product α · L in the search for the learning rate
LEARNS = 0.01  # a model learns if the loss of its best run is more than this many nats below the chance-level loss


class Search(Section):
    depth: PositiveInt
    rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    steps: PositiveInt  # number of steps of each run
    last: PositiveInt  # number of last steps over which the loss is averaged


class Settings(Section):
    reading: Name  # a key of `readings` in pipeline/paper.yaml
    seed: Seed
    models: list[Name]
    alphas: list[PositiveFloat]
    searches: list[Search]


def measure(settings: Settings, lab: Lab) -> Tables:
    return {"trainings": pd.DataFrame(short_trainings(settings, lab))}


def short_trainings(settings: Settings, lab: Lab) -> Iterator[dict]:
    """Yields a row for each search, model and rate. For OSA, also tries each α · L in `settings.alphas` at the best rate."""
    for search, model in itertools.product(settings.searches, settings.models):
        alpha = ALPHA_TIMES_DEPTH if model == OSA else math.nan
        rows = [short_training(search, settings.seed, model, rate, alpha, lab) for rate in search.rates]
        yield from rows
        if model == OSA:
            best = min(rows, key=loss_of)["learning_rate"]
            for alpha in settings.alphas:
                if alpha != ALPHA_TIMES_DEPTH:
                    yield short_training(search, settings.seed, OSA, best, alpha, lab)


def short_training(search: Search, seed: int, model: str, rate: float, alpha: float, lab: Lab) -> dict:
    """Trains a model. Returns its settings and its mean loss over the last steps: not finite if the run diverged."""
    changes: Overrides = {"model": {"depth": search.depth}, "train": {"learning_rate": rate}}
    if model == OSA:
        changes["variant"] = {"alpha_times_depth": alpha}
    losses = [step["loss"] for step in first_steps(lab.training(lab.config(model, changes), seed), search.steps)]
    last = losses[-search.last :]
    row = {"model": model, "depth": search.depth, "learning_rate": rate, "alpha_times_depth": alpha}
    return row | {"steps": search.steps, "seed": seed, "loss": sum(last) / len(last)}


def loss_of(row: dict) -> float:
    return row["loss"] if math.isfinite(row["loss"]) else math.inf


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Lists the runs of each model at each depth, in ascending order of loss."""
    trainings = tables["trainings"].fillna({"loss": math.inf})
    trainings = trainings.rename(columns={"learning_rate": "rate", "alpha_times_depth": "alpha"})
    searches = []
    for search in settings.searches:
        own = trainings[(trainings["depth"] == search.depth) & (trainings["steps"] == search.steps)]
        models = []
        for model, rows in own.sort_values("loss").groupby("model", sort=False):
            learns = rows["loss"].iloc[0] < GUESS_LOSS - LEARNS
            models.append({"model": model, "learns": learns, "tried": rows[["rate", "alpha", "loss"]].to_dict("records")})
        searches.append({"depth": search.depth, "models": models})
    return {"searches": searches}


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
