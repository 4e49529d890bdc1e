"""Does OSA without skips and LN match ViT on CIFAR-10? Each model is trained with the better of two optimisers.

For each model and optimiser, short runs search for the learning rate with the lowest train loss. Long runs at this rate
follow, with other seeds. The better optimiser of a model is the one whose long runs end with the lower mean train loss. We
wrote the claim of this study (`CLAIM`) before the first run. The report shows no results until all runs have ended.
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from pipeline.config.params import Name, Overrides, PositiveFloat, PositiveInt, Section, Seed, Seeds
from pipeline.statistics.claims import Results, read_claims
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Request, Study, Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE

CLAIM = "osa_matches_vit_with_better_optimisers"


class Settings(Section):
    """Every optimiser trains every model at every rate with `search_seed`, and then at the best rate with `seeds`."""

    reading: Name  # a key of `readings` in pipeline/paper.yaml
    set: Overrides  # values that override the recipe of `reading` in all runs
    models: dict[Name, Name]  # name in the claim → variant
    optimizers: Annotated[list[str], Field(min_length=1)]
    rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    search_epochs: PositiveInt
    search_seed: Seed
    seeds: Seeds


def request(settings: Settings, model: str, optimizer: str, rate: float, seed: int, **train: Any) -> Request:
    changes = {"optimizer": optimizer, "learning_rate": rate} | train
    return settings.models[model], settings.set | {"train": settings.set.get("train", {}) | changes}, seed


def search_requests(settings: Settings, model: str, optimizer: str) -> dict[float, Request]:
    """Returns the request for the short search run at each rate."""
    epochs = {"epochs": settings.search_epochs}
    return {rate: request(settings, model, optimizer, rate, settings.search_seed, **epochs) for rate in settings.rates}


def best_rate(settings: Settings, model: str, optimizer: str, lab: Lab) -> float | None:
    """Returns the rate whose short run ends with the lowest train loss, or None until all short runs have ended."""
    losses: dict[float, Any] = {}
    for rate, each in search_requests(settings, model, optimizer).items():
        losses[rate] = comparison.last_loss(each, "train_loss", lab)
    return None if None in losses.values() else min(losses, key=losses.__getitem__)


def requests(settings: Settings, lab: Lab) -> Iterator[tuple[str, Request]]:
    """Yields (name, request) for each run.

    For each pair of model and optimiser, the long runs follow once all short runs have ended.
    """
    for model, optimizer in itertools.product(settings.models, settings.optimizers):
        for each in search_requests(settings, model, optimizer).values():
            yield f"{model}_{optimizer}_search", each
        if (rate := best_rate(settings, model, optimizer, lab)) is not None:
            for seed in settings.seeds:
                yield f"{model}_{optimizer}", request(settings, model, optimizer, rate, seed)


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [each for _, each in requests(settings, lab)]


def read(settings: Settings, lab: Lab) -> Tables:
    return comparison.tables_of_requests(requests(settings, lab), lab)


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict[str, Any]:
    """Returns a row for each model and optimiser, and the verdict. If a run is missing: no rows, and None as the verdict."""
    results = Results(tables)
    pairs = list(itertools.product(settings.models, settings.optimizers))
    summary: dict[str, Any] = {"rows": [], "verdict": None}
    if (results.runs["status"] != "missing").sum() < len(pairs) * (len(settings.rates) + len(settings.seeds)):
        return summary
    for model, optimizer in pairs:
        name = f"{model}_{optimizer}"
        rate = best_rate(settings, model, optimizer, lab)
        row = {"variant": settings.models[model], "optimizer": optimizer, "rate": rate}
        summary["rows"].append(row | {"accuracy": summary_of(results.accuracies(name)), "loss": mean_loss(results, name)})
    better = {}
    for model in settings.models:
        names = [f"{model}_{optimizer}" for optimizer in settings.optimizers]
        better[min(names, key=lambda name: mean_loss(results, name))] = model
    chosen = results.runs[results.runs["name"].isin(better)]
    renamed = Results({"runs": chosen.assign(name=chosen["name"].map(better))})
    (verdict,) = read_claims(CLAIMS_FILE)[CLAIM].judge(renamed).values()
    return summary | {"verdict": verdict}


def mean_loss(results: Results, name: str) -> float:
    """Returns the mean of the runs' last train losses. For a diverged run, we take the loss of a uniform guess."""
    losses = results.losses(name)
    return sum(losses) / len(losses)


STUDY = Study(settings=Settings, summarise=summarise, trainings=trainings, read=read)
