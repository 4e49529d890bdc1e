"""Does a training repeat? Runs of Table 2, trained once more by another process.

On one kind of machine every bit of the weights and curves is the same. Elsewhere rounding differs, and the accuracy may be
that of one more seed; other studies that trained a model of Table 2 with the same configuration and seed show it.
"""

import pandas as pd

from pipeline.config import params
from pipeline.config.params import Name, Section, Seed
from pipeline.core import provenance
from pipeline.results.runs import accuracy, recorded
from pipeline.statistics.intervals import one_more_run
from pipeline.studies import Request, Study, Tables
from pipeline.studies.lab import Lab
from pipeline.studies.paper.section_5 import results_of
from pipeline.training.run import TABLE_2, TRIES, Run

COLUMNS = ["variant", "seed", "study", "same_recipe", "same_points", "same_weights"]
COLUMNS += [f"{name}{end}" for name in ("machine", "torch", "test_accuracy") for end in ("", "_there")]


class Repeat(Section):
    variant: Name
    seed: Seed


class Settings(Section):
    """The runs that are trained again."""

    runs: list[Repeat]


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [(each.variant, {}, each.seed) for each in settings.runs]


def read(settings: Settings, lab: Lab) -> Tables:
    """A row for each run of a study that repeats one of Table 2, its own first."""
    again = [lab.run(each.variant, seed=each.seed) for each in settings.runs]
    for run, record in recorded():
        if record["status"] == "finished" and not run.overrides and run.study not in (TABLE_2, TRIES, lab.study):
            again.append(run)
    pairs = [(run, Run(run.variant, run.seed)) for run in again]
    rows = [compare(run, there) for run, there in pairs if run.record() and there.record()]
    return {"repeats": pd.DataFrame(rows, columns=COLUMNS)}


def compare(again: Run, there: Run) -> dict:
    """Compares two trainings; accuracies in per cent, as training measured them."""
    after, before = again.record(), there.record()
    configs = [params.normalised_config(each["config"]) for each in (after, before)]
    row = {"variant": again.variant, "seed": again.seed, "study": again.study}
    row["same_recipe"] = configs[0] == configs[1] and after["numerics"] == before["numerics"]
    row["same_points"] = after["history_sha256"] == before["history_sha256"]
    row["same_weights"] = after["weights_sha256"] == before["weights_sha256"]
    for end, of_run, run in (("", after, again), ("_there", before, there)):
        row[f"machine{end}"], row[f"torch{end}"] = provenance.machine(of_run["environment"]), of_run["environment"]["torch"]
        row[f"test_accuracy{end}"] = accuracy(run.metrics())
    return row


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Counts the repeats with the same bits on one kind of machine, and compares the others with one more seed."""
    table = tables["repeats"]
    table = table[table["same_recipe"].astype(bool)]
    here = (table["machine"] == table["machine_there"]) & (table["torch"] == table["torch_there"])
    same = table.loc[here, "same_points"].astype(bool) & table.loc[here, "same_weights"].astype(bool)
    elsewhere = []
    for row in table[~here].to_dict("records"):
        low, high = one_more_run(results_of(lab).accuracies(row["variant"]))
        difference = row["test_accuracy"] - row["test_accuracy_there"]
        elsewhere.append({"difference": difference, "within": low <= row["test_accuracy"] <= high})
    return {"repeated": int(here.sum()), "same_bits": int(same.sum()), "elsewhere": elsewhere}


STUDY = Study(settings=Settings, summarise=summarise, trainings=trainings, read=read)
