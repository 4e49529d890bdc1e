"""Whether a training repeats: a run of Table 2, trained once more by a process of its own.

On the same kind of machine every bit is to be the same, of the weights and of every point of the curves. Elsewhere rounding
differs, and the accuracy is to be as one more seed's would be: so it is asked of whatever runs of other studies have the
configuration and the seed of a run of Table 2.
"""

import math
from typing import NamedTuple

import pandas as pd

from pipeline.core import files, params, record
from pipeline.core.params import Name, Section, Seed
from pipeline.lab import Lab
from pipeline.report.numbers import fixed, interval
from pipeline.runs import TABLE_2, TRIES, Run, finished
from pipeline.statistics import one_more_run
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._runs import Request
from pipeline.studies.paper.section_5 import Results

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
        metrics = run.read("metrics")
        row[f"test_accuracy{end}"] = math.nan if metrics["diverged"] else 100 * metrics.get("test_accuracy", math.nan)
    points = [files.sha256(run.folder / "history.csv") for run in (again, there)]  # which older records do not have
    return row | {
        "same_points": points[0] == points[1],
        "same_weights": made["weights_sha256"] == before.get("weights_sha256"),
    }


class Pair(NamedTuple):
    """A run of Table 2 and the same one of a study, on another kind of machine or with another version of PyTorch."""

    variant: str
    label: str
    machine_there: str
    accuracy_there: float  # per cent
    machine: str
    accuracy: float
    expected: tuple[float, float]  # where one more seed's accuracy would be

    @property
    def is_inside(self) -> bool:
        low, high = self.expected
        return low <= self.accuracy <= high


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    repeats = tables["repeats"]
    rows = list(repeats[repeats["same_recipe"].astype(bool)].itertuples())  # of other code or settings it need not agree
    there = Run(settings.variant, settings.seed)
    again = [pair_of(there, row._asdict(), lab) for row in rows if not on_one_machine(row._asdict())]
    pairs = [*again, *twins(lab)]
    bits = [] if again else [same_bits(name_of(there, lab), rows, settings)]
    return [*bits, elsewhere(pairs)] if pairs else bits


def on_one_machine(row: dict) -> bool:
    return (row["machine"], row["torch"]) == (row["machine_there"], row["torch_there"])


def name_of(run: Run, lab: Lab) -> str:
    return f"{lab.label(run.variant)}, seed {run.seed}"


def pair_of(there: Run, row: dict, lab: Lab) -> Pair:
    expected = one_more_run(Results(lab).accuracies(there.variant))
    machines = [(row[f"machine{end}"], row[f"test_accuracy{end}"]) for end in ("_there", "")]
    return Pair(there.variant, name_of(there, lab), *machines[0], *machines[1], expected)


def twins(lab: Lab) -> list[Pair]:
    """What other studies trained by the recipe and with the seed of a run of Table 2, not on the kind of machine of that."""
    found = []
    for made in finished():
        run, there = Run(made["variant"], made["seed"], made["study"]), Run(made["variant"], made["seed"])
        if made["overrides"] or made["study"] in (TABLE_2, TRIES, lab.study) or not (run.is_there() and there.is_there()):
            continue
        row = compare(run, there)
        if row["same_recipe"] and not on_one_machine(row):
            found.append(pair_of(there, row, lab))
    return found


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


def elsewhere(pairs: list[Pair]) -> Finding:
    """On another kind of machine, or with another version of PyTorch."""
    inside = sum(pair.is_inside for pair in pairs)
    told = [
        f"{of.label}: {fixed(of.accuracy_there, 2)}% on {of.machine_there}, {fixed(of.accuracy, 2)}% on {of.machine}"
        for of in pairs
    ]
    return Finding(
        id="repeats_elsewhere",
        title="The same run on another machine",
        place="Section 5",
        kind=OBSERVATION,
        statement="Rounding differs between kinds of machines and versions of PyTorch, and training lets it grow: the "
        "accuracy of a run of Table 2, trained with the same seed elsewhere, may be that of one more seed.",
        in_short=f"{'; '.join(told)}. {inside} of {len(pairs)} {'is' if inside == 1 else 'are'} where one more seed is "
        "expected.",
        measures=[Measure(f"{pair.label}: difference", pair.accuracy - pair.accuracy_there, "points") for pair in pairs],
        table=Table(
            ["Run", "Table 2", "Accuracy", "Elsewhere", "Accuracy", "One more seed"],
            [
                [
                    pair.label,
                    pair.machine_there,
                    fixed(pair.accuracy_there, 2),
                    pair.machine,
                    fixed(pair.accuracy, 2),
                    interval(*pair.expected, 2),
                ]
                for pair in pairs
            ],
            "llrlrr",
            note="Test accuracy in per cent. One more seed’s is expected there (95%) by the spread of Table 2’s runs. Those "
            "elsewhere are runs of other studies with the recipe of Table 2.",
        ),
        sources=SOURCES,
        models=tuple(dict.fromkeys(pair.variant for pair in pairs)),
    )
