"""Numbers as text: the one place that decides on digits, signs, powers of ten and what stands where there is no number."""

import math
from typing import Any

import pandas as pd

ABSENT = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None) -> str:
    """Three significant digits: 0.0123, 12.3, 4 096, 1.23 × 10⁻⁷; ∞, and a dash for what there is not."""
    if value is None or pd.isna(value):
        return ABSENT
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    rounded = float(f"{value:.3g}") + 0.0  # no negative zero
    if 1000 <= abs(rounded) < 1e5:
        return grouped(value)
    if rounded == 0 or 1e-3 <= abs(rounded) < 1000:
        return f"{rounded:g}".replace("-", "−")
    mantissa, exponent = f"{rounded:.2e}".split("e")
    return f"{float(mantissa):g} × 10{superscript(int(exponent))}".replace("-", "−")


def superscript(exponent: int | str) -> str:
    """The digits of a whole number, raised."""
    return str(exponent).translate(SUPERSCRIPTS)


def fixed(value: float, digits: int) -> str:
    """A fixed number of decimals, a true minus sign, and a dash for what there is not."""
    return ABSENT if pd.isna(value) else f"{value:z.{digits}f}".replace("-", "−")


def signed(value: float, digits: int) -> str:
    """`fixed` with a sign before positive numbers too."""
    return ABSENT if pd.isna(value) else f"{value:+z.{digits}f}".replace("-", "−")


def mean_std(mean: float, std: float, digits: int) -> str:
    """e.g. 96.90 ± 0.73, and the mean alone where there is no spread."""
    return fixed(mean, digits) if pd.isna(std) else f"{fixed(mean, digits)} ± {fixed(std, digits)}"


def interval(low: float, high: float, digits: int) -> str:
    """e.g. 96.1 to 97.5."""
    return ABSENT if pd.isna(low) else f"{fixed(low, digits)} to {fixed(high, digits)}"


def grouped(value: float) -> str:
    """A whole number with narrow spaces between thousands."""
    return ABSENT if pd.isna(value) else f"{value:z,.0f}".replace(",", "\u202f").replace("-", "−")


def per_cent(value: float) -> str:
    """A share as per cent: 0.95 is 95%."""
    return f"{100 * value:g}%"


def plain(value: Any) -> str:
    """A value of params.yaml as it is written there."""
    return str(value).lower() if isinstance(value, bool) else str(value)
