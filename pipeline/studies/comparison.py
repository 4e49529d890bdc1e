"""Studies that train lists of runs and compare them: what they share.

The section of such a study names its reading of the paper's recipe, and lists its runs by the names that tables, claims and
templates have for them:

    reading: first
    runs:
      osa_iso_72: {variant: osa_iso, set: {model: {depth: 72}}, seeds: [0, 1, 2]}
"""

from collections.abc import Iterator

from pydantic import Field

from pipeline import studies
from pipeline.config.params import FIRST, AnySeeds, Name, Overrides, Section
from pipeline.results.runs import tables_of
from pipeline.statistics.claims import Results, trains
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Request, Study, Tables
from pipeline.studies.lab import Lab


class Training(Section):
    """A variant with something replaced, or nothing, once for each seed."""

    variant: Name
    set: Overrides = Field(default_factory=dict)
    seeds: AnySeeds


class Settings(Section):
    reading: Name  # a key of readings in pipeline/paper.yaml
    runs: dict[Name, Training]

    def requests(self) -> Iterator[tuple[str, Request]]:
        """Name and request of each run, in the order of the list."""
        for name, training in self.runs.items():
            for seed in training.seeds:
                yield name, (training.variant, training.set, seed)


def study(**parts) -> Study:
    """A `Study` that trains and reads what its section lists."""
    return Study(**{"settings": Settings, "trainings": trainings, "read": read} | parts)


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [request for _, request in settings.requests()]


def read(settings: Settings, lab: Lab) -> Tables:
    """The tables of the runs that are listed, by the names of the list."""
    return tables_of(
        (name, lab.run(variant, overrides, seed), lab.config(variant, overrides))
        for name, (variant, overrides, seed) in settings.requests()
    )


def first_reading(lab: Lab) -> Tables:
    """Runs and histories of the paper's models by the first reading, which studies of that reading compare theirs with."""
    own = lab.of("first_reading", FIRST)
    return lab.once("runs of first_reading", lambda: read(studies.settings("first_reading"), own))


def outcome(results: Results, name: str) -> dict:
    """Counts the runs of a name that are there, that train and that are missing.

    `loss` and `accuracy` (%) are summaries over the runs that train, as a mean over all would describe neither those nor the
    others. `failed_losses` are the last train losses of the others, None where one diverged.
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
