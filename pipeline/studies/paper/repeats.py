"""Does a repeated run give the same result? Some runs of Table 2 and of the study `first_reading` were trained again:
by this study, by another study, or by the user since the last commit.

On the same kind of machine, every bit of the weights and curves is the same. On another kind of machine, rounding differs,
and the accuracies of a run and its repeat can differ as much as the accuracies of two seeds.
"""

import json
from collections.abc import Iterable

import pandas as pd

from pipeline.config import records
from pipeline.config.params import Name, Section, Seed
from pipeline.config.records import RECORD, RunRecord
from pipeline.core import provenance
from pipeline.results.runs import accuracy, of_table_2, recorded
from pipeline.statistics.claims import Results
from pipeline.statistics.intervals import one_more_run
from pipeline.studies import Request, Study, Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper.section_5 import results_of
from pipeline.training.run import TABLE_2, TRIES, Run

COLUMNS = ["variant", "seed", "of", "same_recipe", "same_points", "same_weights", "machine", "machine_there"]
COLUMNS += ["torch", "torch_there", "test_accuracy", "test_accuracy_there", "difference"]
COMPARED = ["variant", "seed", "same_weights", "test_accuracy", "test_accuracy_there", "difference"]
REPEATED = (TABLE_2, "first_reading")

EndedRun = tuple[RunRecord, dict]  # record and metrics of a run that has ended


class Repeat(Section):
    variant: Name
    seed: Seed


class Settings(Section):
    reading: Name
    runs: list[Repeat]


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [(each.variant, {}, each.seed) for each in settings.runs]


def read(settings: Settings, lab: Lab) -> Tables:
    """Returns two tables, with a row for each pair of runs of the same variant and seed.

    repeats     a run of this or another study, and the original run from Table 2 or from the study `first_reading`
    replaced    a run of Table 2 trained since the last commit, and the committed run that it replaces
    """
    again = [lab.run(each.variant, seed=each.seed) for each in settings.runs]
    for run, record in recorded():
        if record.status == "finished" and not run.overrides and run.study not in (*REPEATED, TRIES, lab.study):
            again.append(run)
    repeats = [(run, ended_run(run), ended_run(Run(run.variant, run.seed, study))) for run in again for study in REPEATED]
    replaced = [(run, ended_run(run), committed_run(run)) for run in of_table_2(lab.params)]
    return {"repeats": compared(repeats), "replaced": compared(replaced)}


def ended_run(run: Run) -> EndedRun | None:
    """Returns the record and metrics of a run, or None if the run has not ended."""
    record = run.record()
    return (record, run.metrics()) if record else None


def committed_run(run: Run) -> EndedRun | None:
    """Returns a run's record and metrics as of the last commit, or None if the commit lacks either file."""
    record, metrics = (provenance.committed(run.folder / name) for name in (RECORD, "metrics.json"))
    if not (record and metrics):
        return None
    return records.parse(run.folder / RECORD, RunRecord, f"run `{run.command}`", record), json.loads(metrics)


def compared(pairs: Iterable[tuple[Run, EndedRun | None, EndedRun | None]]) -> pd.DataFrame:
    """Returns a row for each pair of runs that have both ended, except for a run paired with itself."""
    rows = [compare_runs(run, after, before) for run, after, before in pairs if after and before and after != before]
    return pd.DataFrame(rows, columns=COLUMNS)


def compare_runs(run: Run, after: EndedRun, before: EndedRun) -> dict:
    """Returns a row that compares two runs. Accuracies are in per cent, as measured during training."""
    (new, new_metrics), (old, old_metrics) = after, before
    return {
        "variant": run.variant,
        "seed": run.seed,
        "of": old.study,
        "same_recipe": (new.config, new.numerics) == (old.config, old.numerics),
        "same_points": new.files["history.csv"] == old.files["history.csv"],
        "same_weights": new.weights == old.weights,
        "machine": provenance.machine(new.environment.model_dump()),
        "machine_there": provenance.machine(old.environment.model_dump()),
        "torch": new.environment.torch,
        "torch_there": old.environment.torch,
        "test_accuracy": accuracy(new_metrics),
        "test_accuracy_there": accuracy(old_metrics),
        "difference": accuracy(new_metrics) - accuracy(old_metrics),
    }


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Summarises the pairs of runs with the same recipe.

    repeated     the number of repeats on the same kind of machine, with the same version of torch
    same_bits    how many of these repeats have the same curves and weights as the original run, bit for bit
    elsewhere    the other repeats, and whether their accuracies lie in the prediction interval for one more seed
    """
    table = tables["repeats"]
    table = table[table["same_recipe"].astype(bool)]
    here = (table["machine"] == table["machine_there"]) & (table["torch"] == table["torch_there"])
    same = table.loc[here, "same_points"].astype(bool) & table.loc[here, "same_weights"].astype(bool)
    results = {TABLE_2: results_of(lab), "first_reading": Results(comparison.first_reading(lab))}
    elsewhere = []
    for row in table[~here].to_dict("records"):
        low, high = one_more_run(results[row["of"]].accuracies(row["variant"]))
        elsewhere.append({"difference": row["difference"], "within": low <= row["test_accuracy"] <= high})
    return {
        "repeated": int(here.sum()),
        "same_bits": int(same.sum()),
        "other_bits": table[here][~same][COMPARED].to_dict("records"),
        "elsewhere": elsewhere,
        "replaced": tables["replaced"][COMPARED].to_dict("records"),
    }


STUDY = Study(settings=Settings, summarise=summarise, trainings=trainings, read=read)
