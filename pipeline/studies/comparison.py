"""Studies that train lists of runs and compare them: what they share.

The section of such a study lists its runs by the names that tables, claims and templates have for them:

    runs:
      osa_iso_72: {variant: osa_iso, set: {model: {depth: 72}}, seeds: [0, 1, 2]}
"""

from collections.abc import Iterator

import pandas as pd
from pydantic import Field

from pipeline.claims import Results, trains
from pipeline.core import files
from pipeline.core.params import AnySeeds, Name, Overrides, RunConfig, Section
from pipeline.lab import Lab
from pipeline.runs import Run, same_config
from pipeline.statistics import summarise
from pipeline.studies import Request, Study, Tables
from pipeline.training.loop import COLUMNS

IDENTITY = ["name", "run", "variant", "seed"]
FINALS = ["train_loss", "test_loss", "test_accuracy"]
MADE = ["numerics", "device", "git_dirty", "started_at", "seconds", "images_per_second"]


class Training(Section):
    """A variant with something replaced, or nothing, once for each seed."""

    variant: Name
    set: Overrides = Field(default_factory=dict)
    seeds: AnySeeds


class Settings(Section):
    runs: dict[Name, Training]

    def requests(self) -> Iterator[tuple[str, Request]]:
        """Name and request of each run, in the order of the list."""
        for name, training in self.runs.items():
            for seed in training.seeds:
                yield name, (training.variant, training.set, seed)


def study(**parts) -> Study:
    """A `Study` that trains and measures what its section lists, or measures more."""
    return Study(**{"settings": Settings, "measure": measure, "trainings": trainings} | parts)


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [request for _, request in settings.requests()]


def measure(settings: Settings, lab: Lab) -> Tables:
    """`runs`: a row for each run of the list. `histories`: the points of those that are there. `watched`: what the study saw
    of them, if it watches."""
    rows, histories, watched = [], [], []
    for name, (variant, overrides, seed) in settings.requests():
        run = lab.run(variant, overrides, seed)
        identity = {"name": name, "run": run.name, "variant": variant, "seed": seed}
        row = run_row(run, lab.config(variant, overrides))
        rows.append(identity | row)
        if row["status"] != "missing":
            histories.append(run.points().assign(**identity))
            if (path := run.folder / "watched.csv").exists():
                watched.append(files.read_csv(path).assign(**identity))
    none = pd.DataFrame(columns=[*IDENTITY, *COLUMNS])
    tables = {"runs": pd.DataFrame(rows, columns=[*IDENTITY, "status", *FINALS, *MADE])}
    tables["histories"] = pd.concat(histories or [none])[none.columns]
    watched = [table for table in watched if len(table)]  # nothing is seen of what diverges at step 0
    return tables | ({"watched": pd.concat(watched)} if watched else {})


def run_row(run: Run, config: RunConfig) -> dict:
    """What a run's files hold: finished, diverged, or missing, also where the run is of another configuration."""
    record = run.record()
    if not (record and same_config(record["config"], config)):
        return {"status": "missing"}
    metrics = run.read("metrics")
    row = {key: record.get(key, record["environment"].get(key)) for key in MADE}
    if metrics["diverged"]:
        return row | {"status": "diverged"}
    return row | {"status": "finished"} | {key: metrics[key] for key in FINALS}


def outcome(results: Results, name: str) -> dict:
    """How many runs of a name are there, train, and are missing; mean last train loss and test accuracy (%) of those that
    train, as a mean with runs that fail would describe neither; and the last losses of those, None where one diverged."""
    runs = results.runs_of(name)
    is_trained = ((runs["status"] == "finished") & runs["train_loss"].map(trains)).astype(bool)
    trained = runs[is_trained]
    return {
        "n": len(runs),
        "trained": len(trained),
        "missing": results.counts(name)["missing"],
        "loss": summarise(trained["train_loss"].astype(float)),
        "accuracy": summarise(100 * trained["test_accuracy"].astype(float)),
        "failed_losses": runs.loc[~is_trained, "train_loss"].tolist(),
    }
