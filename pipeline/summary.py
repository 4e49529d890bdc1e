"""What n numbers, one per seed, say about the model behind them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import t

DIGITS = 6  # significant ones in every file: beyond them shows the order of additions, which changes with the threads


@dataclass(frozen=True)
class Summary:
    """n values: mean, standard deviation (ddof 1), the interval of the mean from `low` to `high`, and the range.

    What n is too small for is NaN: everything at n = 0; `std`, `low` and `high` at n = 1.
    """

    n: int
    mean: float
    std: float
    low: float
    high: float
    min: float
    max: float


def summarise(values: Sequence[float], confidence: float) -> Summary:
    """Mean, spread and Student's t-interval of finite values: mean ± t((1 + confidence) / 2, n − 1) std / √n."""
    values = np.asarray(values, dtype=float)
    n = len(values)
    if n == 0:
        return Summary(0, *[math.nan] * 6)
    mean, std, half = values.mean(), math.nan, math.nan
    if n > 1:
        std = values.std(ddof=1)
        half = t.ppf((1 + confidence) / 2, n - 1) * std / math.sqrt(n)
    return Summary(n, *map(float, (mean, std, mean - half, mean + half, values.min(), values.max())))


def rounded(value: float) -> float:
    """`value` to the significant digits that files hold, so that a text made from it and a file agree."""
    return float(f"{value:.{DIGITS}g}")


def rounded_table(table: pd.DataFrame) -> pd.DataFrame:
    return table.apply(lambda column: column.map(rounded) if column.dtype.kind == "f" else column)
