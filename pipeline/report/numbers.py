"""Formats numbers and formulas as text. A missing number becomes a dash."""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping

import pandas as pd

from pipeline.core.files import rounded

ABSENT = "–"
SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
NOTATION = re.compile(
    r"(?<![\w.])(?P<mantissa>\d(?:\.\d+)?)e(?P<exponent>[-+]?\d{1,3})(?!\w)"  # 1e-5
    r"|\^(?:\{(?P<raised>[^{}]*)\}|(?P<up>[-−]?\d+(?:\.\d+)?|[A-Za-z]))"  # W^V, N^1.98, e^{‖S‖₂}
    r"|(?:(?<=[‖)\]])|(?<=(?<![A-Za-z_])[^\W\d_]))_"
    r"(?:\{(?P<lowered>[^{}]*)\}|(?P<down>[A-Z]{2}|[A-Za-zα-ω]|\d+)(?![A-Za-z0-9_]))"  # d_v, L_LF
    r"|(?P<superscripts>[²³¹⁰-ⁿᴬ-ᵡⱽ]+)|(?P<subscripts>[₀-ₜᵢ-ᵪⱼ]+)"
)


def number(value: float | None) -> str:
    """Formats a number with three significant digits: 1.23 × 10⁻⁷. From 1000 to 10⁵, rounds to whole numbers: 4 096."""
    if value is None or math.isnan(value):
        return ABSENT
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    shown = float(f"{value:.3g}") + 0.0  # no negative zero
    if 1000 <= abs(shown) < 1e5:
        return grouped(value)
    if shown == 0 or 1e-3 <= abs(shown) < 1000:
        return f"{shown:g}".replace("-", "−")
    mantissa, exponent = f"{shown:.2e}".split("e")
    return f"{float(mantissa):g} × 10{str(int(exponent)).translate(SUPERSCRIPTS)}".replace("-", "−")


def scripted(text: str, up: str = "<sup>{}</sup>", down: str = "<sub>{}</sub>") -> str:
    """Marks up superscripts with `up`, subscripts with `down`: d_v, ‖J‖₂, 1e-5, e^{‖S‖₂}. `text` must be escaped already."""

    def write(found: re.Match) -> str:
        part = found.groupdict()
        if part["exponent"]:
            factor = "" if part["mantissa"] == "1" else f"{part['mantissa']} × "
            return f"{factor}10{up.format(str(int(part['exponent'])).replace('-', '−'))}"
        kind = str(found.lastgroup)
        if kind in ("raised", "lowered"):
            inner = scripted(part[kind], up, down)
        else:
            inner = unicodedata.normalize("NFKC", part[kind]).replace("-", "−")
        return (up if kind in ("raised", "up", "superscripts") else down).format(inner)

    return NOTATION.sub(write, text)


def fixed(value: float, digits: int) -> str:
    """Formats `rounded(value)` with `digits` decimals, and with − as the minus sign."""
    return ABSENT if pd.isna(value) else f"{rounded(value):z.{digits}f}".replace("-", "−")


def signed(value: float, digits: int) -> str:
    """Formats a number as `fixed` does, but always with a sign: +0.30."""
    return ABSENT if pd.isna(value) else f"{rounded(value):+z.{digits}f}".replace("-", "−")


def grouped(value: float) -> str:
    """Formats a whole number, with narrow spaces between groups of three digits."""
    return ABSENT if pd.isna(value) else f"{value:z,.0f}".replace(",", "\u202f").replace("-", "−")


def percent(share: float, digits: int = 0) -> str:
    """Formats a share as a percentage: 0.95 becomes 95%."""
    return ABSENT if pd.isna(share) else f"{fixed(100 * share, digits)}%"


def mean_sd(summary: Mapping[str, float], digits: int = 2) -> str:
    """Formats mean and standard deviation: 96.90 ± 0.73. Formats the mean alone if the deviation is missing."""
    mean, std = summary["mean"], summary["std"]
    return fixed(mean, digits) if pd.isna(std) else f"{fixed(mean, digits)} ± {fixed(std, digits)}"


def interval(ends: Mapping[str, float], digits: int = 2) -> str:
    """Formats an interval: 96.1 to 97.5. A single null end means ±∞ (JSON lacks ∞). If both are null, returns a dash."""
    low, high = ends["low"], ends["high"]
    if pd.isna(low) and pd.isna(high):
        return ABSENT
    return f"{'−∞' if pd.isna(low) else fixed(low, digits)} to {'∞' if pd.isna(high) else fixed(high, digits)}"


def times(ratio: float, digits: int = 2) -> str:
    """Formats a ratio: 1.22 ×."""
    return ABSENT if pd.isna(ratio) else f"{fixed(ratio, digits)} ×"


def words(count: int) -> str:
    """Formats a whole number: in words from zero to twelve, and in digits above."""
    return SMALL[int(count)] if 0 <= count < len(SMALL) else grouped(count)


def span(counts: Iterable[int]) -> str:
    """Formats the range of `counts` in words: "one to three", or "three" if all are equal."""
    least_first = sorted(counts)
    return " to ".join(dict.fromkeys(map(words, least_first[:1] + least_first[-1:])))


def ranges(numbers: Iterable[int]) -> str:
    """Lists whole numbers, with ranges for consecutive numbers: "0 to 4 and 7"."""
    groups: list[list[int]] = []
    for value in sorted(numbers):
        if groups and value == groups[-1][-1] + 1:
            groups[-1].append(value)
        else:
            groups.append([value])
    return listing(f"{group[0]} to {group[-1]}" if len(group) > 1 else f"{group[0]}" for group in groups)


def listing(items: Iterable[str]) -> str:
    """Joins items with commas and a final "and": "a, b and c"."""
    *others, last = list(items)
    return f"{', '.join(others)} and {last}" if others else last
