"""Speed of orthogonal linear layers, machine by machine, from the files of `python -m pipeline benchmarks.orthogonal`.

That command is run by hand. Its ratios are compared with a post's statements on speed."""

from pathlib import Path

import pandas as pd

from pipeline.benchmarks.cost import BOTH
from pipeline.benchmarks.measurements import measured
from pipeline.benchmarks.orthogonal import DENSE, OURS, POST, SMALLEST, TRAINING_TOKENS
from pipeline.core import files
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab

SIZES = (64, 256)  # n between which the goal is set
GOAL = 1.3  # ours over dense
MUCH_SLOWER = 10.0  # the post's “significantly”, as we take it


def summarise(settings: None, tables: Tables, lab: Lab) -> dict:
    return {
        "goal": GOAL,
        "sizes": SIZES,
        "tokens": TRAINING_TOKENS,
        "machines": {path.parent.name: machine(path) for path in measured("orthogonal.csv")},
    }


def machine(path: Path) -> dict:
    """The machine; our layers in training over a dense one, at their slowest in `SIZES`; and the rows at which the post's
    two statements come nearest to failing."""
    table, facts = files.read_csv(path), files.read_json(path.with_suffix(".json"))
    others = table[(table["code"] != DENSE) & (table["n"] >= SMALLEST)]
    training = others[(others["tokens"] == TRAINING_TOKENS) & (others["pass"] == BOTH)]
    ours = training[(training["code"] == OURS) & training["n"].between(*SIZES)]
    literal = others[(others["map"] == "givens") & (others["code"] == POST) & (others["tokens"] == TRAINING_TOKENS)]
    return {
        "environment": facts["environment"],
        "ours": {name: ratio(own.loc[own["seconds_over_dense"].idxmax()]) for name, own in ours.groupby("map", sort=False)},
        "fastest": statement(others, 1.0),
        "literal_givens": statement(literal, MUCH_SLOWER),
    }


def statement(table: pd.DataFrame, limit: float) -> dict:
    """A statement that ratios lie above a limit, at the row that refutes it most, or else at the one nearest to it."""
    refuting = table[table["p90_over_dense"] < limit]
    return ratio(table.loc[refuting["p90_over_dense"].idxmin() if len(refuting) else table["p10_over_dense"].idxmin()])


def ratio(row: pd.Series) -> dict:
    """Time over dense at one size n: the median, and the 10th and 90th percentile of rounds."""
    keys = {"n": "n", "over_dense": "seconds_over_dense", "low": "p10_over_dense", "high": "p90_over_dense"}
    return {name: row[column] for name, column in keys.items()}


STUDY = Study(summarise=summarise)
