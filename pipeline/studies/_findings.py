"""What findings of several studies share: the largest case of a check, the exponent of a power, and Table 2's orthogonal
layers as trained.
"""

import numpy as np
import pandas as pd

from pipeline.lab import Lab
from pipeline.report.numbers import number
from pipeline.statistics import summarise
from pipeline.studies import Measure, Table

LAYERS = "paper_outputs/tables/layers.csv"  # what the stage evaluate measured of them


def largest(what: str, values: pd.Series, limit: float = 1.0, note: str = "") -> Measure:
    """A check of every case: the largest value has to be below the limit, and is NaN where one of them is."""
    return Measure(
        what, values.max(skipna=False), side="below", limit=limit, note=note or f"the largest of {len(values)} cases"
    )


def log_log_slope(x: pd.Series, y: pd.Series) -> float:
    """Of y as a power of x: the least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def trained_layers(lab: Lab, *columns: str) -> pd.DataFrame:
    """Variant, seed and these columns of the table `layers`: the rows that have them all, which may be none."""
    table = lab.tables.get("layers", pd.DataFrame())
    return table.reindex(columns=["variant", "seed", *columns]).dropna()


def worst_over_seeds(lab: Lab, layers: pd.DataFrame, column: str, what: str) -> list[Measure]:
    """For each model the largest value of a column over layers and heads: the mean over seeds, and their range."""
    measures = []
    for variant, own in layers.groupby("variant", sort=False):
        worst = summarise(own.groupby("seed")[column].max())
        text, spread = (
            f"{lab.label(variant)}, trained: {what}, mean over seeds",
            f"{number(worst.min)} to {number(worst.max)}",
        )
        measures.append(Measure(text, worst.mean, n=worst.n, note=f"from {spread}" if worst.n > 1 else ""))
    return measures


def origin(layers: pd.DataFrame) -> dict:
    """The fields of a Finding that say where trained layers are from, or that there are none."""
    return {"sources": [LAYERS]} if len(layers) else {"remark": "Trained layers are not evaluated: run `dvc repro tables`."}


def condition_numbers(lab: Lab, what: str, initial: dict[str, pd.Series], trained: pd.DataFrame, column: str) -> dict:
    """The fields of a Finding about condition numbers: medians and extremes as initialised, and of each trained model."""
    groups = initial | {f"{lab.label(v)}, trained": own[column] for v, own in trained.groupby("variant", sort=False)}
    measures, rows = [], []
    for name, own in groups.items():
        measures.append(
            Measure(f"{name}: median {what}", own.median(), note=f"the largest of {len(own)} is {number(own.max())}")
        )
        rows.append([name, str(len(own)), *map(number, (own.min(), own.median(), own.max()))])
    table = Table(["Weights", "Number", "Smallest κ", "Median κ", "Largest κ"], rows)
    medians = "; ".join(f"{name}: a median of {number(own.median())}" for name, own in groups.items())
    return {"measures": measures, "table": table, "in_short": f"{medians}."} | origin(trained)
