"""Is OSA (QR) as accurate as ViT if each model has its own learning rate? The paper gives both models the same rate.

We declared the following before the first run. A search trains each model with Table 2's recipe at three rates with one
seed, and holds out 5,000 training images. The best rate has the lowest loss on these images. If the highest rate is the
best, the search also tries a higher rate. We then train each model at its best rate with five new seeds, and compare the
accuracies. The test and the limit on the difference in accuracy are those of the study `decision`.
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from pipeline import studies
from pipeline.config.params import Name, PositiveFloat, PositiveInt, Section, Seed, Seeds
from pipeline.statistics.claims import Accuracy, Results, read_claim
from pipeline.statistics.intervals import summary_of
from pipeline.statistics.verdicts import Verdict
from pipeline.studies import Request, Study, Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE, decision

CLAIM = "osa_matches_vit_at_own_rates"


class Settings(Section):
    """Each model is trained at every rate with `search_seed`, and then at its best rate with `seeds`."""

    reading: Name  # a key of `readings` in pipeline/paper.yaml
    models: Annotated[list[Name], Field(min_length=1)]
    rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    last_rate: PositiveFloat  # the search tries this rate if the highest of `rates` is the best
    held_out: PositiveInt  # number of held-out training images; the search picks the rate with the lowest loss on them
    search_seed: Seed
    seeds: Seeds
    spreads: dict[Name, PositiveFloat]  # standard deviation of each model's accuracy, in points, as in the study `decision`
    differences: list[float]


def request(model: str, rate: float, seed: int, **train: Any) -> Request:
    return model, {"train": {"learning_rate": rate, "points_per_epoch": 1} | train}, seed


def searches(settings: Settings, model: str, lab: Lab) -> dict[float, float | None]:
    """Returns the held-out loss at each rate of a search: infinite if the run diverged, None if it has not ended."""
    losses = {rate: search_loss(settings, model, rate, lab) for rate in settings.rates}
    if None not in losses.values() and best(losses) == max(settings.rates):
        losses[settings.last_rate] = search_loss(settings, model, settings.last_rate, lab)
    return losses


def search_loss(settings: Settings, model: str, rate: float, lab: Lab) -> float | None:
    """Returns the last loss on the held-out images, which a run of the search records as its test loss."""
    return comparison.last_loss(search_request(settings, model, rate), "test_loss", lab)


def search_request(settings: Settings, model: str, rate: float) -> Request:
    return request(model, rate, settings.search_seed, held_out=settings.held_out)


def best(losses: dict[float, Any]) -> float:
    return min(losses, key=losses.__getitem__)


def requests(settings: Settings, lab: Lab) -> Iterator[tuple[str, Request]]:
    """Yields (name, request) for each run. Runs at a model's best rate follow once the model's search has ended."""
    for model in settings.models:
        losses = searches(settings, model, lab)
        for rate in losses:
            yield f"{model}_search", search_request(settings, model, rate)
        if None not in losses.values():
            for seed in settings.seeds:
                yield model, request(model, best(losses), seed)


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [each for _, each in requests(settings, lab)]


def read(settings: Settings, lab: Lab) -> Tables:
    return comparison.tables_of_requests(requests(settings, lab), lab)


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict[str, Any]:
    """Returns the power of the comparison and, once all runs have ended, the verdict and a row for each model."""
    claim, results, rows = read_claim(CLAIMS_FILE, CLAIM, Accuracy), Results(tables), []
    power = decision.powers(claim, settings.spreads, settings.differences, [len(settings.seeds)] * 2)
    verdict = decision.judge(claim, results)
    for model in settings.models if verdict else []:
        losses = searches(settings, model, lab)
        rate = best(losses)
        searched = [{"rate": each, "loss": loss} for each, loss in losses.items()]
        row = {"variant": model, "rate": rate, "is_at_the_edge": rate in (min(losses), max(losses))}
        rows.append(row | {"searched": searched, "accuracy": summary_of(results.accuracies(model))})
    return {"power": power, "rows": rows, "verdict": verdict}


def verdict(lab: Lab) -> Verdict | None:
    """Returns the verdict on this study's claim, or None until all runs have ended."""
    settings = studies.settings("own_rate")
    tables = read(settings, lab.of("own_rate", settings.reading))
    return decision.judge(read_claim(CLAIMS_FILE, CLAIM, Accuracy), Results(tables))


STUDY = Study(settings=Settings, summarise=summarise, trainings=trainings, read=read)
