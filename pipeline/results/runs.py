"""Finds stored runs and makes tables of them, for Table 2 and for every study that compares runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.params import IMAGE_KEYS, SHARED_SECTIONS, Params, RunConfig, as_yaml
from pipeline.config.records import RECORD, RunRecord
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.training import HISTORY_COLUMNS
from pipeline.training.run import RUNS, Run

if TYPE_CHECKING:
    import pandas as pd  # pandas is slow to import, and is not needed to list runs

IDENTITY = ["name", "run", "variant", "seed"]
FINALS = ["train_loss", "test_loss", "test_accuracy"]
PROVENANCE_COLUMNS = ["numerics", "device", "dirty", "started_at", "seconds", "images_per_second"]


def of_table_2(settings: Params) -> list[Run]:
    """Returns the runs that Table 2, Figure 1 and the verdicts use, in the order of params.yaml."""
    return [Run(*each) for each in itertools.product(settings.run.variants, settings.run.seeds)]


def recorded(study: str = "*", base: Path = Path()) -> Iterator[tuple[Run, RunRecord]]:
    """Yields the stored runs of one study, or of all studies, each with its record.

    Raises:
        UserError: a run is damaged or incomplete.
    """
    for path in sorted((base / RUNS).glob(f"{study}/*/*/{RECORD}")):
        run = Run.at(path.parent)
        yield run, run.ended_record()


def accuracy(metrics: dict) -> float:
    """Returns the test accuracy in per cent from a run's metrics, or NaN if the run diverged."""
    return math.nan if metrics["diverged"] else 100 * metrics["test_accuracy"]


def tables_of(runs: Iterable[tuple[str, Run, RunConfig]]) -> dict[str, pd.DataFrame]:
    """Returns tables of named runs.

    runs        a row for each run, even if the run is missing
    histories   the rows of history.csv of the existing runs
    watched     the rows of watched.csv of the existing runs; absent if no run has the file
    """
    import pandas as pd

    rows, histories, watched = [], [], []
    for name, run, config in runs:
        identity = {"name": name, "run": run.name, "variant": run.variant, "seed": run.seed}
        row = run_row(run, config)
        rows.append(identity | row)
        if row["status"] != "missing":
            histories.append(run.history().assign(**identity))
            if run.files["watched"].exists():
                watched.append(files.read_csv(run.files["watched"]).assign(**identity))
    none = pd.DataFrame(columns=[*IDENTITY, *HISTORY_COLUMNS])
    tables = {
        "runs": pd.DataFrame(rows, columns=[*IDENTITY, "status", *FINALS, *PROVENANCE_COLUMNS]),
        "histories": pd.concat(histories or [none])[none.columns],
    }
    if watched:
        tables["watched"] = pd.concat(watched)
    return tables


def run_row(run: Run, config: RunConfig) -> dict:
    """Returns a run's status and results. The status is "missing" if no run on the images of `config` is stored.

    Raises:
        UserError: the stored run used the images of `config`, but its configuration differs from `config`.
    """
    record = run.record()
    if record is None or any(getattr(record.config.data, key) != getattr(config.data, key) for key in IMAGE_KEYS):
        return {"status": "missing"}
    if change := difference(record.config, config):
        raise UserError(f"{run.folder / RECORD} has {change}: run `git checkout {run.folder}`, or `{run.command}`.")
    row = {key: getattr(record, key, None) for key in PROVENANCE_COLUMNS} | {"device": record.environment.device}
    row["status"] = record.status
    if row["status"] == "finished":
        metrics = run.metrics()
        row |= {key: metrics[key] for key in FINALS}
    return row


def difference(recorded: RunConfig, wanted: RunConfig) -> str:
    """Names the first key in which two configurations differ, with both values. Returns "" if they do not differ."""
    for section in (*SHARED_SECTIONS, "variant"):
        old, new = getattr(recorded, section), getattr(wanted, section)
        for key in type(new).model_fields:
            if getattr(old, key) != getattr(new, key):
                return f"{section}.{key} {as_yaml(getattr(old, key))}, not {as_yaml(getattr(new, key))}"
    return ""
