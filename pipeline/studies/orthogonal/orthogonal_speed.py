"""How fast are orthogonal linear layers on each machine? We test what a blog post says about their speed.

This study reads the files that `python -m pipeline benchmarks.orthogonal` writes. That command is run by hand.
The post is *Orthogonal Linear Layers in PyTorch* (pipeline/benchmarks/post.py).
"""

from pathlib import Path

import pandas as pd

from pipeline.benchmarks.cost import BOTH
from pipeline.benchmarks.measurements import measured
from pipeline.benchmarks.orthogonal import DENSE, OURS, POST, SMALLEST, TRAINING_TOKENS
from pipeline.core import files
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab

GOAL_RANGE = (64, 256)  # minimum and maximum size n of the layers that should meet GOAL
GOAL = 1.3  # maximum ratio of our layers' time to the dense layer's time
MUCH_SLOWER = 10.0  # we take “significantly” in the blog post under study to mean at least this ratio of times


def summarise(settings: None, tables: Tables, lab: Lab) -> dict:
    return {
        "goal": GOAL,
        "sizes": GOAL_RANGE,
        "tokens": TRAINING_TOKENS,
        "machines": {path.parent.name: speed_on(path) for path in measured("orthogonal.csv")},
    }


def speed_on(path: Path) -> dict:
    """Returns numbers from the table of one machine.

    ours             for each of our layers, the row with the largest ratio of times, ours / dense, over n in `GOAL_RANGE`
    fastest          the row that decides whether the dense layer is the fastest, as the blog post under study claims
    literal_givens   the row that decides whether the post's Givens layer is much slower than the dense layer, as claimed
    """
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
    """Returns the row that decides whether all ratios lie above `limit`.

    A row is a counterexample if the 90th percentile of its ratio lies below `limit`. The result is the counterexample with
    the lowest 90th percentile. If there is no counterexample, it is the row with the lowest 10th percentile.
    """
    refuting = table[table["p90_over_dense"] < limit]
    decides = refuting["p90_over_dense"].idxmin() if len(refuting) else table["p10_over_dense"].idxmin()
    return ratio(table.loc[decides])


def ratio(row: pd.Series) -> dict:
    """Returns a layer's size, and its time divided by the dense layer's: median, 10th and 90th percentile over rounds."""
    keys = {"n": "n", "over_dense": "seconds_over_dense", "low": "p10_over_dense", "high": "p90_over_dense"}
    return {name: row[column] for name, column in keys.items()}


STUDY = Study(summarise=summarise)
