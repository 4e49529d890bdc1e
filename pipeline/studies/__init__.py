"""Studies, each of which answers one question. A study is a file in a wing: one of the folders paper, deep and orthogonal.

Each such file defines `STUDY = Study(...)`. The file's name is also the name of the study's section in params.yaml, its
stage in dvc.yaml, its template, and its folder under paper_outputs/studies.

A name means the same in every file. `Settings` and the functions have the names of the fields of `Study` that they fill;
`draw` draws a study's only figure. MODELS, METHODS, SIZES and DTYPES list what a study measures; OSA lists its orthogonal
models; BASELINES and REFERENCE name models to compare with. CLAIM and CLAIMS name the claims that the study judges; its
wing's CLAIMS_FILE states them. TOLERANCE is the error that a check allows. DRAWN, COLOURS and DASHES describe the lines of a
figure.
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
        settings: the schema of the study's section in params.yaml; None if it has no section.
        measure: (settings, lab) → tables of costly measurements. `python -m pipeline study NAME` writes them as CSV.
        summarise: (settings, tables, lab) → the numbers, rows and verdicts that the study's template shows.
        figures: the name of each figure → a function that draws it from (settings, tables, lab).
        trainings: (settings, lab) → requests of runs, which `python -m pipeline fan_out` trains.
        read: (settings, lab) → tables of these runs, read from their folders. It writes nothing.
        watch: (training) → rows of numbers. A run calls it at every point of its curves, and writes the rows to watched.csv.
    """

    summarise: Callable[..., dict[str, Any]]
    settings: type[Section] | None = None
    measure: Callable[..., Tables] | None = None
    figures: dict[str, Callable[..., Figure | None]] = field(default_factory=dict)
    trainings: Callable[..., list[Request]] | None = None
    read: Callable[..., Tables] | None = None
    watch: Callable[..., list[dict[str, float]]] | None = None


def names(wing: str | None = None) -> list[str]:
    """Returns the names of a wing's studies, or of all studies, in alphabetical order. It imports none of them."""
    return sorted(name for name, of_wing in _wings().items() if wing in (None, of_wing))


def wing(name: str) -> str:
    """Returns the wing of a study. Raises UserError if there is no such study."""
    if name not in _wings():
        raise UserError(ended(f"{name} is no study{hint(name, names())}"))
    return _wings()[name]


@functools.cache
def _wings() -> dict[str, str]:
    folders = {each: str(Path(__path__[0], each)) for each in WINGS}
    return {module.name: each for each, folder in folders.items() for module in pkgutil.iter_modules([folder])}


def get(name: str) -> Study:
    """Imports a study's file and returns its `STUDY`. Raises UserError if there is no such study."""
    return importlib.import_module(f"{__name__}.{wing(name)}.{name}").STUDY


def settings(name: str) -> Any:
    """Returns a study's section in its wing's params.yaml, as the study's `Settings`; None for a study without settings.

    Raises:
        UserError: the section is missing or does not match the schema.
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
    """Returns the key of `readings` in pipeline/paper.yaml that a study's section names; by default, the first reading."""
    return getattr(settings(name), "reading", FIRST_READING)


def check(value: float, limit: float, side: str = "below") -> dict[str, Any]:
    """Checks whether a number lies below (or above) a limit, as an identity or a proved bound demands. NaN never does.

    Returns the arguments, whether the check `holds`, and the `share` of the limit that is used up: value / limit, or
    limit / value if the number should lie above.
    """
    holds = value < limit if side == "below" else value > limit
    used = (value, limit) if side == "below" else (limit, value)
    share = used[0] / used[1] if used[1] else float("nan")
    return {"value": value, "limit": limit, "side": side, "share": share, "holds": bool(holds)}
