"""Each study answers one question. A study is a Python file in one of the folders paper, deep and orthogonal.

We call these folders wings. A study's file defines `STUDY = Study(...)`. The file's name is also the name of the study's
section in params.yaml, its stage in dvc.yaml, its report template, and its folder under paper_outputs/studies.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config import reading
from pipeline.config.params import FIRST_READING, Overrides, Section
from pipeline.core.errors import UserError, ended, hint

if TYPE_CHECKING:  # pandas and matplotlib are slow to import, and training draws no figures
    import pandas as pd
    from matplotlib.figure import Figure

WINGS = ("paper", "deep", "orthogonal")
Tables = dict[str, "pd.DataFrame"]
Request = tuple[str, Overrides, int]  # variant, overrides of the variant's configuration, seed


@dataclass(frozen=True)
class Study:
    """The parts of a study.

    Args:
        settings: the schema of the study's section in params.yaml; None if it has no section.
        measure: (settings, lab) → tables of costly measurements. `python -m pipeline study NAME` writes them as CSV.
        summarise: (settings, tables, lab) → the numbers, rows and verdicts that the study's template shows.
        figures: maps the name of each figure to the function of (settings, tables, lab) that draws the figure.
        trainings: (settings, lab) → requests for the runs that `python -m pipeline fan_out` trains.
        read: (settings, lab) → tables of the runs that `trainings` requests, read from the runs' folders.
        watch: (training) → rows of numbers. A run calls `watch` at each point of its curves and writes watched.csv.
    """

    summarise: Callable[..., dict[str, Any]]
    settings: type[Section] | None = None
    measure: Callable[..., Tables] | None = None
    figures: dict[str, Callable[..., Figure | None]] = field(default_factory=dict)
    trainings: Callable[..., list[Request]] | None = None
    read: Callable[..., Tables] | None = None
    watch: Callable[..., list[dict[str, float]]] | None = None


def names(wing: str | None = None) -> list[str]:
    """Returns the names of all studies, or of the studies in the folder `wing`, in alphabetical order."""
    return sorted(name for name, of_wing in _wings().items() if wing in (None, of_wing))


def wing(name: str) -> str:
    """Returns the folder of a study: paper, deep or orthogonal. Raises UserError if there is no such study."""
    if name not in _wings():
        raise UserError(ended(f"study {name!r} is unknown{hint(name, names())}"))
    return _wings()[name]


@functools.cache
def _wings() -> dict[str, str]:
    wing_of = {}
    for each in WINGS:
        for module in pkgutil.iter_modules([f"{__path__[0]}/{each}"]):
            wing_of[module.name] = each
    return wing_of


def get(name: str) -> Study:
    """Imports a study's file and returns its `STUDY`. Raises UserError if there is no such study."""
    return importlib.import_module(f"{__name__}.{wing(name)}.{name}").STUDY


def settings(name: str) -> Any:
    """Returns a study's settings, from the params.yaml in its folder, or None if the study has no settings.

    Raises:
        UserError: params.yaml has no section for the study, or the section does not match the schema.
    """
    schema = get(name).settings
    if schema is None:
        return None
    path = reading.in_repository(f"pipeline/studies/{wing(name)}/params.yaml")
    section = reading.read_yaml(path).get(name)
    if section is None:
        raise UserError(f"{path} has no section {name}: write the study's settings there, or restore them from git.")
    return reading.validate(schema, section, f"{path}: {name}")


def reading_of(name: str) -> str:
    """Returns which interpretation of the paper a study follows: a key of `readings` in pipeline/paper.yaml."""
    return getattr(settings(name), "reading", FIRST_READING)


def check(value: float, limit: float, side: str = "below") -> dict[str, Any]:
    """Checks whether a number lies below a limit, or above the limit if `side` is "above". The check fails for NaN.

    The result's `share` is value / limit, or limit / value if `side` is "above".
    """
    low, high = (value, limit) if side == "below" else (limit, value)
    share = low / high if high else float("nan")
    return {"value": value, "limit": limit, "side": side, "share": share, "holds": bool(low < high)}
