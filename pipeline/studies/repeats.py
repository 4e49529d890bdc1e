"""Whether a training repeats: a run of Table 2, trained once more by a process of its own.

On the same kind of machine every bit is to be the same, of the weights and of every point of the curves. Elsewhere rounding
differs, and the accuracy is to be as one more seed's would be.
"""

import math

import pandas as pd

from pipeline.core import files, params, record
from pipeline.core.params import Name, Section, Seed
from pipeline.lab import Lab
from pipeline.reporting.numbers import fixed, interval
from pipeline.runs import Run
from pipeline.statistics import one_more_run
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Tables
from pipeline.studies._runs import Request
from pipeline.studies.section_5 import Results

place = 98
COLUMNS = ["machine", "machine_there", "torch", "torch_there", "test_accuracy", "test_accuracy_there"]
COLUMNS += ["same_recipe", "same_points", "same_weights"]
SOURCES = ["paper_outputs/tables/runs.csv"]


class Settings(Section):
    """Which run."""

    variant: Name
    seed: Seed


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [(settings.variant, {}, settings.seed)]


def measure(settings: Settings, lab: Lab) -> Tables:
    """What both trainings have in common, in one row where both are there. Accuracies are those that training measured."""
    again, there = lab.run(settings.variant, seed=settings.seed), Run(settings.variant, settings.seed)
    rows = [compare(again, there)] if again.is_there() and there.is_there() else []
    return {"repeats": pd.DataFrame(rows, columns=COLUMNS)}


def compare(again: Run, there: Run) -> dict:
    made, before = again.read("record"), there.read("record")
    configs = [params.written_config(of["config"]) for of in (made, before)]
    row = {"same_recipe": configs[0] == configs[1] and bool(record.made_by(made) & record.made_by(before))}
    for end, of, run in (("", made, again), ("_there", before, there)):
        row[f"machine{end}"], row[f"torch{end}"] = record.machine(of["environment"]), of["environment"]["torch"]
        row[f"test_accuracy{end}"] = 100 * run.read("metrics").get("test_accuracy", math.nan)
    points = [files.sha256(run.folder / "history.csv") for run in (again, there)]  # which older records do not have
    return row | {
        "same_points": points[0] == points[1],
        "same_weights": made["weights_sha256"] == before.get("weights_sha256"),
    }


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    what, repeats = f"{lab.label(settings.variant)}, seed {settings.seed}", tables["repeats"]
    rows = list(repeats[repeats["same_recipe"].astype(bool)].itertuples())  # of other code or settings it need not agree
    if rows and (rows[0].machine, rows[0].torch) != (rows[0].machine_there, rows[0].torch_there):
        return [elsewhere(what, rows[0], settings, lab)]
    return [same_bits(what, rows, settings)]


def same_bits(what: str, rows: list, settings: Settings) -> Finding:
    """On the same kind of machine."""
    measures = [
        Measure(f"{what}: {kind} that differ", float(not same), side="below", limit=0.5)
        for row in rows
        for kind, same in (("digests of the curves", row.same_points), ("digests of the weights", row.same_weights))
    ]
    return Finding(
        id="repeats_bits",
        title="A training repeats, bit by bit",
        place="Section 5",
        kind=CHECK,
        statement="A second process that trains a run of Table 2 again makes the same curves and the same weights.",
        measures=measures or [Measure(f"{what} is not repeated yet by today's code", math.nan, side="below", limit=0.5)],
        rule="On the same kind of machine, with the same version of PyTorch, the digests are the same.",
        in_short="No digest differs." if rows and not any(measure.value for measure in measures) else "",
        remark=f"Trained twice on {rows[0].machine}." if rows else "",
        models=(settings.variant,),
    )


def elsewhere(what: str, row, settings: Settings, lab: Lab) -> Finding:
    """On another kind of machine, or with another version of PyTorch."""
    low, high = one_more_run(Results(lab).accuracies(settings.variant))
    is_inside = low <= row.test_accuracy <= high
    return Finding(
        id="repeats_elsewhere",
        title="The same run on another machine",
        place="Section 5",
        kind=OBSERVATION,
        statement="Rounding differs between kinds of machines and versions of PyTorch, and training lets it grow.",
        in_short=f"{what}: {fixed(row.test_accuracy_there, 2)} % on {row.machine_there}, {fixed(row.test_accuracy, 2)} % on "
        f"{row.machine}, {'within' if is_inside else 'outside'} {interval(low, high, 2)}, where one more seed is expected.",
        measures=[Measure(f"{what}: difference", row.test_accuracy - row.test_accuracy_there, "points")],
        sources=SOURCES,
        models=(settings.variant,),
    )
