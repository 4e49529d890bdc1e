"""Functions that the summaries of several studies share."""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from pipeline.statistics.intervals import Summary, summary_of
from pipeline.studies import check
from pipeline.studies.lab import Lab


def worst_case(values: ArrayLike, limits: ArrayLike) -> dict:
    """Returns check(value, limit) for the value with the largest ratio value / limit. A NaN ratio counts as the largest."""
    values, limits = np.broadcast_arrays(np.asarray(values, float), np.asarray(limits, float))
    worst = np.argmax(values / limits)  # the first NaN, if there is one
    return check(float(values[worst]), float(limits[worst]))


def log_log_slope(x: ArrayLike, y: ArrayLike) -> float:
    """Returns the least-squares slope of log y against log x: the exponent p of a power law y ∝ xᵖ."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def trained_layers(lab: Lab, *columns: str) -> pd.DataFrame:
    """Returns the columns variant, seed and `columns` of the table `layers`, without rows that lack a value."""
    table = lab.tables.get("layers", pd.DataFrame())
    return table.reindex(columns=["variant", "seed", *columns]).dropna()


def worst_of_seeds(layers: pd.DataFrame, column: str) -> dict[str, Summary]:
    """Takes each run's maximum of `column` over layers and heads. Returns a summary over seeds for each variant."""
    return {name: summary_of(own.groupby("seed")[column].max()) for name, own in layers.groupby("variant", sort=False)}
