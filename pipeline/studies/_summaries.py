"""Helpers of summaries: the worst case of a check, the exponent of a power, and the trained layers of Table 2."""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from pipeline.statistics.intervals import Summary, summary_of
from pipeline.studies import check
from pipeline.studies.lab import Lab


def worst_case(values: ArrayLike, limits: ArrayLike) -> dict:
    """Returns the `check` of the value with the largest value / limit, or of the first NaN if there is one."""
    values, limits = np.broadcast_arrays(np.asarray(values, float), np.asarray(limits, float))
    worst = np.argmax(values / limits)  # the first NaN, if there is one
    return check(float(values[worst]), float(limits[worst]))


def log_log_slope(x: ArrayLike, y: ArrayLike) -> float:
    """Returns p in y ∝ xᵖ: the least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def trained_layers(lab: Lab, *columns: str) -> pd.DataFrame:
    """Returns variant, seed and `columns` of the table `layers`, without the rows that lack a value. It can be empty."""
    table = lab.tables.get("layers", pd.DataFrame())
    return table.reindex(columns=["variant", "seed", *columns]).dropna()


def worst_of_seeds(layers: pd.DataFrame, column: str) -> dict[str, Summary]:
    """Takes a column's largest value over the layers and heads of each run. Returns its summary over seeds, by variant."""
    return {name: summary_of(own.groupby("seed")[column].max()) for name, own in layers.groupby("variant", sort=False)}
