"""What a stage found of the paper's statements: measures, the verdict that they give, and the report's files."""

import math
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from pipeline import figures, files
from pipeline.claims import NOT_SUPPORTED, SUPPORTED
from pipeline.summary import DIGITS, rounded


def measure(
    what: str, value: float, unit: str = "", side: str | None = None, limit: float | None = None, note: str = ""
) -> dict:
    """One number of a finding; it decides where it has to be on one `side` of a `limit`. What is not finite is None."""
    value = rounded(float(value)) if math.isfinite(value) else None
    return {"what": what, "value": value, "unit": unit, "side": side, "limit": limit, "note": note}


def is_met(measure: dict) -> bool:
    """Whether a measure that decides is on its side of its limit."""
    value, limit = measure["value"], measure["limit"]
    return value is not None and (value < limit if measure["side"] == "below" else value > limit)


def verdict(measures: list[dict]) -> str:
    return SUPPORTED if all(is_met(measure) for measure in measures if measure["side"]) else NOT_SUPPORTED


def write(folder: Path, tables: dict[str, pd.DataFrame], found: list[dict], drawn: dict[str, Figure]) -> None:
    """The tables as CSV, each figure as SVG and PNG by the name of its finding, and findings.json."""
    for name, table in tables.items():
        files.write_text(folder / f"{name}.csv", table.to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n"))
    for name, figure in drawn.items():
        files.write_text(folder / f"{name}.svg", figures.svg(figure))
        files.write_bytes(folder / f"{name}.png", figures.png(figure))
    files.write_json(folder / "findings.json", found)
