"""The questions that the project asks, one file each, in three wings: the paper, deep models, orthogonal weights.

Each file defines one study, `STUDY = Study(...)`. Its name is also the name of its section in params.yaml, its stage in
dvc.yaml, its template, and its folder under paper_outputs/studies.

A name that recurs has one meaning in all files. The class `Settings` and the functions have the names of the parts of
`Study` that they are; `draw` draws a study's only figure. MODELS, METHODS, SIZES and DTYPES list what a study measures, OSA
is its orthogonal models; BASELINES and REFERENCE are models to compare with. CLAIM and CLAIMS name the claims that it
judges, which its wing's CLAIMS_FILE holds. TOLERANCE is the error that a check allows. DRAWN, COLOURS and DASHES belong to a
figure's lines.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import reading
from pipeline.config.params import FIRST_READING, Overrides, Section
from pipeline.core.errors import UserError, ended, hint

if TYPE_CHECKING:  # slow to import, and training draws no figures
    import pandas as pd
    from matplotlib.figure import Figure

WINGS = ("paper", "deep", "orthogonal")
Tables = dict[str, "pd.DataFrame"]
Request = tuple[str, Overrides, int]  # variant, overrides of its configuration, seed


@dataclass(frozen=True)
class Study:
    """The parts of a study.

    Args:
        settings: the schema of its section in params.yaml; None if it has no section.
        measure: (settings, lab) → tables: what is expensive. `python -m pipeline study NAME` writes them as CSV.
        summarise: (settings, tables, lab) → the numbers, rows and verdicts that its template shows, from its tables alone.
        figures: by name, (settings, tables, lab) → a figure.
        trainings: (settings, lab) → the runs that it compares. `python -m pipeline fan_out` trains them.
        read: (settings, lab) → tables of those runs, from their folders. Nothing is written.
        watch: (training) → rows of numbers, at every point of the curves of its runs: their watched.csv.
    """

    summarise: Callable[..., dict[str, Any]]
    settings: type[Section] | None = None
    measure: Callable[..., Tables] | None = None
    figures: dict[str, Callable[..., Figure | None]] = field(default_factory=dict)
    trainings: Callable[..., list[Request]] | None = None
    read: Callable[..., Tables] | None = None
    watch: Callable[..., list[dict[str, float]]] | None = None


def names(wing: str | None = None) -> list[str]:
    """The studies of a wing, or of all, in alphabetical order. No study is imported."""
    return sorted(name for name, of_wing in _wings().items() if wing in (None, of_wing))


def wing(name: str) -> str:
    """The wing of a study. Raises UserError if there is no such study."""
    if name not in _wings():
        raise UserError(ended(f"{name} is no study{hint(name, names())}"))
    return _wings()[name]


@functools.cache
def _wings() -> dict[str, str]:
    folders = {each: str(Path(__path__[0], each)) for each in WINGS}
    return {module.name: each for each, folder in folders.items() for module in pkgutil.iter_modules([folder])}


def get(name: str) -> Study:
    """A study, whose file is imported. Raises UserError if there is no such study."""
    return importlib.import_module(f"{__name__}.{wing(name)}.{name}").STUDY


def settings(name: str) -> Any:
    """The section of a study, of the params.yaml of its wing, as its `Settings`; None if it has no section.

    Raises:
        UserError: it is missing or not as the study's schema says.
    """
    schema = get(name).settings
    if schema is None:
        return None
    path = reading.in_repository(f"pipeline/studies/{wing(name)}/params.yaml")
    section = reading.read_yaml(path).get(name)
    if section is None:
        raise UserError(f"{path} has no section {name}: write the study's settings there, or put back those that git has.")
    return reading.validate(schema, section, f"{path}: {name}")


def reading_of(name: str) -> str:
    """The reading of the paper's recipe that a study names in its section."""
    return getattr(settings(name), "reading", FIRST_READING)


def check(value: float, limit: float, side: str = "below") -> dict[str, Any]:
    """An identity or a proved bound: whether a number is on its side of a limit, and which share of the limit it uses up.

    A number that is not finite holds nothing.
    """
    holds = value < limit if side == "below" else value > limit
    used = (value, limit) if side == "below" else (limit, value)
    share = used[0] / used[1] if used[1] else float("nan")
    return {"value": value, "limit": limit, "side": side, "share": share, "holds": bool(holds)}
