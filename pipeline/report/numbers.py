"""Numbers and formulas as text: the one place that decides on digits, signs, powers of ten, raised and lowered letters, and
what stands where there is no number."""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from pipeline.core.files import rounded

ABSENT = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
NOTATION = re.compile(
    r"(?<![\w.])(?P<mantissa>\d(?:\.\d+)?)e(?P<exponent>[-+]?\d{1,3})(?!\w)"  # 1e-5
    r"|\^(?:\{(?P<raised>[^{}]*)\}|(?P<up>[-−]?\d+(?:\.\d+)?|[A-Za-z]))"  # W^V, N^1.98, e^{‖S‖₂}
    r"|(?:(?<=[‖)\]])|(?<=(?<![A-Za-z_])[^\W\d_]))_"
    r"(?:\{(?P<lowered>[^{}]*)\}|(?P<down>[A-Z]{2}|[A-Za-zα-ω]|\d+)(?![A-Za-z0-9_]))"  # d_v, L_LF
    r"|(?P<superscripts>[²³¹⁰-ⁿᴬ-ᵡⱽ]+)|(?P<subscripts>[₀-ₜᵢ-ᵪⱼ]+)"
)


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


def scripted(text: str, up: str = "<sup>{}</sup>", down: str = "<sub>{}</sub>") -> str:
    """Escaped text whose powers and indices, d_v or ‖J‖₂ or 1e-5 or e^{‖S‖₂}, are as `up` and `down` write them."""

    def write(found: re.Match) -> str:
        part = found.groupdict()
        if part["exponent"]:
            factor = "" if part["mantissa"] == "1" else f"{part['mantissa']} × "
            return f"{factor}10{up.format(str(int(part['exponent'])).replace('-', '−'))}"
        kind = found.lastgroup
        if kind in ("raised", "lowered"):
            inner = scripted(part[kind], up, down)
        else:
            inner = unicodedata.normalize("NFKC", part[kind]).replace("-", "−")
        return (up if kind in ("raised", "up", "superscripts") else down).format(inner)

    return NOTATION.sub(write, text)


def fixed(value: float, digits: int) -> str:
    """A fixed number of decimals of what files hold, a true minus sign, and a dash for what there is not."""
    return ABSENT if pd.isna(value) else f"{rounded(value):z.{digits}f}".replace("-", "−")


def signed(value: float, digits: int) -> str:
    """`fixed` with a sign before positive numbers too."""
    return ABSENT if pd.isna(value) else f"{rounded(value):+z.{digits}f}".replace("-", "−")


def mean_std(mean: float, std: float, digits: int) -> str:
    """e.g. 96.90 ± 0.73, and the mean alone where there is no spread."""
    return fixed(mean, digits) if pd.isna(std) else f"{fixed(mean, digits)} ± {fixed(std, digits)}"


def interval(low: float, high: float, digits: int) -> str:
    """e.g. 96.1 to 97.5."""
    return ABSENT if pd.isna(low) else f"{fixed(low, digits)} to {fixed(high, digits)}"


def plural(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def span(values: Iterable[float], text: Callable[[float], str] = number) -> str:
    """The smallest and the largest of numbers, e.g. 94 to 232, and one of them where they read the same."""
    values = list(values)
    return " to ".join(dict.fromkeys(map(text, (min(values), max(values)))))


def grouped(value: float) -> str:
    """A whole number with narrow spaces between thousands."""
    return ABSENT if pd.isna(value) else f"{value:z,.0f}".replace(",", "\u202f").replace("-", "−")


def per_cent(value: float) -> str:
    """A share as per cent: 0.95 is 95%."""
    return f"{100 * value:g}%"


def plain(value: Any) -> str:
    """A value of params.yaml as it is written there."""
    return str(value).lower() if isinstance(value, bool) else str(value)
