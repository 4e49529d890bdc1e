"""Common parts of the studies that train a list of runs and compare them.

A study's section in params.yaml lists the study's runs. `reading` names the interpretation of the paper's recipe that these
runs follow. Each entry of the list has a name and stands for one run per seed:

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
    """The runs of a variant, one per seed. `set` replaces values of the variant's configuration."""

    variant: Name
    set: Overrides = Field(default_factory=dict)
    seeds: AnySeeds


class Settings(Section):
    reading: Name  # a key of `readings` in pipeline/paper.yaml
    runs: dict[Name, ListedRuns]

    def requests(self) -> Iterator[tuple[str, Request]]:
        """Yields (name of the entry, request) for each run."""
        for name, training in self.runs.items():
            for seed in training.seeds:
                yield name, (training.variant, training.set, seed)


def study(**parts: Any) -> Study:
    """Returns a `Study` with the fields `parts`. By default, the study trains and reads the runs listed in its settings."""
    return Study(**dict[str, Any](settings=Settings, trainings=trainings, read=read) | parts)


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [request for _, request in settings.requests()]


def read(settings: Settings, lab: Lab) -> Tables:
    """Returns the tables of the listed runs. The column `name` holds the name of the run's entry in the list."""
    return tables_of_requests(settings.requests(), lab)


def tables_of_requests(requests: Iterable[tuple[str, Request]], lab: Lab) -> Tables:
    """Returns the tables of the requested runs. Each request comes with a name, which the column `name` holds."""
    return tables_of(
        (name, lab.run(variant, overrides, seed), lab.config(variant, overrides))
        for name, (variant, overrides, seed) in requests
    )


def last_loss(request: Request, curve: str, lab: Lab) -> float | None:
    """Returns a run's last value of `curve`: infinity if the run diverged, None if it is missing, incomplete or outdated."""
    variant, overrides, seed = request
    run = lab.run(variant, overrides, seed)
    if not run.is_current(lab.config(variant, overrides)):
        return None
    metrics = run.metrics()
    return math.inf if metrics["diverged"] else metrics[curve]


def first_reading(lab: Lab) -> Tables:
    """Returns the tables of the study `first_reading`, whose runs are baselines in other studies."""
    own = lab.of("first_reading", FIRST_READING)
    return lab.once("runs of first_reading", lambda: read(studies.settings("first_reading"), own))


def outcome(results: Results, name: str) -> dict:
    """Summarises the runs called `name`. A run succeeds if its last train loss is below half the chance-level loss.

    n, trained, missing   number of existing runs, of successful runs, and of runs that do not exist yet
    loss, accuracy        last train loss and test accuracy (%) of successful runs. A mean over all runs would describe
                          neither success nor failure.
    failed_losses         last train loss of each failed run, NaN for a run that diverged
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
