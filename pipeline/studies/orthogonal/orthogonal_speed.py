"""Speed of orthogonal linear layers, machine by machine, from the files of `python -m pipeline benchmarks.orthogonal`.

The command is run by hand. We compare its ratios with the speeds that a post states."""

from pathlib import Path

import pandas as pd

from pipeline.benchmarks.cost import BOTH
from pipeline.benchmarks.measurements import measured
from pipeline.benchmarks.orthogonal import DENSE, OURS, POST, SMALLEST, TRAINING_TOKENS
from pipeline.core import files
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab

GOAL_RANGE = (64, 256)  # the goal holds for n in this range
GOAL = 1.3  # goal: the time of ours over dense
MUCH_SLOWER = 10.0  # our reading of the post's “significantly”


def summarise(settings: None, tables: Tables, lab: Lab) -> dict:
    return {
        "goal": GOAL,
        "sizes": GOAL_RANGE,
        "tokens": TRAINING_TOKENS,
        "machines": {path.parent.name: speed_on(path) for path in measured("orthogonal.csv")},
    }


def speed_on(path: Path) -> dict:
    """Returns the machine, the slowest training time of each of our layers over dense in `GOAL_RANGE`, and for each of the
    post's two statements the row that decides it."""
    table, facts = files.read_csv(path), files.read_json(path.with_suffix(".json"))
    others = table[(table["code"] != DENSE) & (table["n"] >= SMALLEST)]
    training = others[(others["tokens"] == TRAINING_TOKENS) & (others["pass"] == BOTH)]
    ours = training[(training["code"] == OURS) & training["n"].between(*GOAL_RANGE)]
    literal = others[(others["map"] == "givens") & (others["code"] == POST) & (others["tokens"] == TRAINING_TOKENS)]
    return {
        "environment": facts["environment"],
        "ours": {name: ratio(own.loc[own["seconds_over_dense"].idxmax()]) for name, own in ours.groupby("map", sort=False)},
        "fastest": statement(others, 1.0),
        "literal_givens": statement(literal, MUCH_SLOWER),
    }


def statement(table: pd.DataFrame, limit: float) -> dict:
    """Returns the row that most refutes “all ratios lie above `limit`”, or, if none does, the row nearest to the limit."""
    refuting = table[table["p90_over_dense"] < limit]
    return ratio(table.loc[refuting["p90_over_dense"].idxmin() if len(refuting) else table["p10_over_dense"].idxmin()])


def ratio(row: pd.Series) -> dict:
    """Returns time over dense at one size n: the median, and the 10th and 90th percentile over rounds."""
    keys = {"n": "n", "over_dense": "seconds_over_dense", "low": "p10_over_dense", "high": "p90_over_dense"}
    return {name: row[column] for name, column in keys.items()}


STUDY = Study(summarise=summarise)
