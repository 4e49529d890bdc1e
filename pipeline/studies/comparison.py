"""Common parts of the studies that train a list of runs and compare them.

In params.yaml a study's section lists its runs, and names the reading of the paper's recipe that they follow. Tables, claims
and templates call a run by its name in the list:
    reading: first
    runs:
      osa_iso_72: {variant: osa_iso, set: {model: {depth: 72}}, seeds: [0, 1, 2]}
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import Field

from pipeline import studies
from pipeline.config.params import FIRST_READING, AnySeeds, Name, Overrides, Section
from pipeline.results.runs import tables_of
from pipeline.statistics.claims import Results, trains
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Request, Study, Tables
from pipeline.studies.lab import Lab


class ListedRuns(Section):
    """Trains a variant once for each seed; `set` replaces values of its configuration."""

    variant: Name
    set: Overrides = Field(default_factory=dict)
    seeds: AnySeeds


class Settings(Section):
    reading: Name  # a key of readings in pipeline/paper.yaml
    runs: dict[Name, ListedRuns]

    def requests(self) -> Iterator[tuple[str, Request]]:
        """Returns the name and request of each run, in the order of the list."""
        for name, training in self.runs.items():
            for seed in training.seeds:
                yield name, (training.variant, training.set, seed)


def study(**parts: Any) -> Study:
    """Returns a `Study` that trains and reads the runs in its section. `parts` adds fields, or replaces the defaults."""
    return Study(**dict[str, Any](settings=Settings, trainings=trainings, read=read) | parts)


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [request for _, request in settings.requests()]


def read(settings: Settings, lab: Lab) -> Tables:
    """Returns the tables of the listed runs. The column `name` has a run's name in the list."""
    return tables_of_requests(settings.requests(), lab)


def tables_of_requests(requests: Iterable[tuple[str, Request]], lab: Lab) -> Tables:
    """Returns the tables of the requested runs. Each request comes with a name, which goes into the column `name`."""
    return tables_of(
        (name, lab.run(variant, overrides, seed), lab.config(variant, overrides))
        for name, (variant, overrides, seed) in requests
    )


def last_loss(request: Request, curve: str, lab: Lab) -> float | None:
    """Returns the last value of a run's loss curve: infinite if the run diverged, None until it has ended."""
    variant, overrides, seed = request
    run = lab.run(variant, overrides, seed)
    if not run.is_current(lab.config(variant, overrides)):
        return None
    metrics = run.metrics()
    return math.inf if metrics["diverged"] else metrics[curve]


def first_reading(lab: Lab) -> Tables:
    """Returns the tables of the study first_reading, the baseline of studies that follow the first reading."""
    own = lab.of("first_reading", FIRST_READING)
    return lab.once("runs of first_reading", lambda: read(studies.settings("first_reading"), own))


def outcome(results: Results, name: str) -> dict:
    """Counts the runs of a name: how many exist (`n`), how many of these train (`trained`), and how many are `missing`.

    `loss` and `accuracy` (%) summarise only the runs that train, since a mean over all would describe neither group.
    `failed_losses` lists the last train losses of the runs that fail, with None for a run that diverged.
    """
    runs = results.runs_of(name)
    is_trained = ((runs["status"] == "finished") & runs["train_loss"].map(trains)).astype(bool)
    trained = runs[is_trained]
    return {
        "n": len(runs),
        "trained": len(trained),
        "missing": results.counts(name)["missing"],
        "loss": summary_of(trained["train_loss"].astype(float)),
        "accuracy": summary_of(100 * trained["test_accuracy"].astype(float)),
        "failed_losses": runs.loc[~is_trained, "train_loss"].tolist(),
    }
