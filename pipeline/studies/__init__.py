"""The questions that the project asks, one file each.

A study is a module of this package. It is found by its file; its name is also that of its section in params.yaml, of its
stage in dvc.yaml and of its folder under paper_outputs/studies. It has

    Settings                                       its section of params.yaml, a `Section`
    measure(settings, lab) -> {name: DataFrame}    what is expensive; `python -m pipeline.study NAME` writes it as CSV
    findings(settings, tables, lab) -> [Finding]   cheap, from those tables alone: what was found, judged and drawn

and one that trains lists its `trainings(settings, lab)`, (variant, overrides, seed) each. `pipeline.fan_out` does them side
by side, and its stage those that are missing then; `measure` reads what they left. Where `gathers` is true in its module
they take so long that the stage trains none of them. With a `watch(training)` it sees its models at every point of their
curves: the rows of numbers that this returns are the run's watched.csv.
A study of what is measured elsewhere has `findings` alone, and is given None and {}. `place` in its module, if it has one,
orders the report: studies stand by it, and by name where it is the same. Below 20 are the claims about the experiment, below
50 theorems and costs, below 60 deep models, below 70 orthogonal weights, below 100 what is left open; all others are beyond
the paper.
"""

import functools
import importlib
import math
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pandas as pd
from matplotlib.figure import Figure

from pipeline.core.errors import UserError
from pipeline.core.files import rounded
from pipeline.statistics import NOT_EVALUATED, combine

WINGS = ("paper", "deep", "orthogonal")
CLAIM, CHECK, OBSERVATION = "claim", "check", "observation"
PASSES, FAILS = "passes", "fails"  # of checks; the words of claims are those of pipeline/statistics.py


@dataclass(frozen=True)
class Measure:
    """One number of a finding. It decides where it has to be on one `side` ("above" or "below") of a `limit`.

    `low` and `high` are the ends of its interval, `n` the number of runs behind it. `verdict` is what the rule of
    pipeline/statistics.py says of it alone; checks need none, as a number is either on its side or not.
    """

    what: str
    value: float
    unit: str = ""
    side: str = ""
    limit: float = math.nan
    low: float = math.nan
    high: float = math.nan
    n: int | None = None
    note: str = ""
    verdict: str = ""

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):  # as files hold them
            object.__setattr__(self, name, rounded(float(getattr(self, name))))

    @property
    def is_met(self) -> bool:
        """Whether the value is on its side of its limit; one that is not finite is not."""
        return self.value < self.limit if self.side == "below" else self.value > self.limit


@dataclass(frozen=True)
class Table:
    """A table of text. `align` has l, r or c (code) for each column; a line break in a cell begins a smaller line.

    `variants` marks rows with a model's line, one name or None for each row.
    """

    columns: list[str]
    rows: list[list[str]]
    align: str = ""
    note: str = ""
    variants: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "align", self.align or "l" + "r" * (len(self.columns) - 1))
        if any(len(row) != len(self.columns) for row in self.rows) or len(self.align) != len(self.columns):
            raise ValueError(f"the rows of a table do not fit its columns {self.columns}")


@dataclass(frozen=True)
class Finding:
    """What a study found of one statement.

    A claim could have come out otherwise and is judged over seeds by pipeline/statistics.py, so that each of its measures
    carries a verdict. A check is an identity or a proved bound: it tests the code, and passes if each measure that has a
    limit is on its side. An observation is a number worth knowing, without a verdict.

    Raises:
        ValueError: there is no measure, or none that decides in a claim or a check.
    """

    id: str
    title: str
    place: str  # in the paper
    kind: str
    statement: str
    measures: list[Measure]
    rule: str = ""  # how it is judged; observations have none
    table: Table | None = None
    figure: Figure | None = None
    caption: str = ""
    remark: str = ""
    sources: list[str] = field(default_factory=list)  # files that it reads besides its study's own tables
    models: tuple[str, ...] = ()  # the variants that it speaks of, where it does
    in_short: str = ""  # what came out, in one sentence, where the measures do not tell it best
    allowance: str = "what is allowed"  # of a check: what its limits are
    headlines: tuple[str, ...] = ()  # for the first screen of the report, a line each, where it belongs there
    limitation: str = ""  # for what the report says of how far its results reach

    def __post_init__(self) -> None:
        decides = {CLAIM: lambda m: m.verdict, CHECK: lambda m: m.side, OBSERVATION: lambda m: True}[self.kind]
        if not any(map(decides, self.measures)):
            raise ValueError(f"finding {self.id} is a {self.kind} without a measure that decides")
        if bool(self.rule) != (self.kind != OBSERVATION):
            raise ValueError(f"finding {self.id}: a claim and a check have a rule, and an observation has none")

    @property
    def verdict(self) -> str:
        """Of a claim by the rule over seeds, of a check whether it passes, of an observation nothing."""
        if self.kind == CLAIM:
            return combine([measure.verdict for measure in self.measures if measure.verdict])
        if self.kind == OBSERVATION:
            return ""
        deciding = [measure for measure in self.measures if measure.side]
        if any(math.isnan(measure.value) for measure in deciding):
            return NOT_EVALUATED
        return PASSES if all(measure.is_met for measure in deciding) else FAILS


def names() -> list[str]:
    """The studies, in alphabetical order."""
    return sorted(_wings())


@functools.cache
def _wings() -> dict[str, str]:
    """The wing of each study."""
    folders = {wing: str(Path(__path__[0], wing)) for wing in WINGS}
    return {module.name: wing for wing, folder in folders.items() for module in pkgutil.iter_modules([folder])}


@functools.cache
def module(name: str) -> ModuleType:
    """The module of a study."""
    return importlib.import_module(f"{__name__}.{_wings()[name]}.{name}")


def in_order() -> list[str]:
    """The studies in the order of the report."""
    return sorted(names(), key=lambda name: (place(name), name))


def place(name: str) -> float:
    """Where a study stands in the report."""
    return getattr(module(name), "place", math.inf)


def measuring() -> list[str]:
    """The studies that have something to measure, in the order of the report."""
    return [name for name in in_order() if hasattr(module(name), "measure")]


def trainings(name: str, settings, lab) -> list[tuple[str, dict, int]]:
    """What a study trains, which is nothing for most: (variant, overrides, seed) each."""
    return getattr(module(name), "trainings", lambda *_: [])(settings, lab)


def check_trains(name: str) -> None:
    """Raises UserError if there is no such study, or it trains nothing."""
    trains = [each for each in names() if hasattr(module(each), "trainings")]
    if name not in trains:
        raise UserError(f"--study {name} is no study that trains: name one of {', '.join(trains)}.")


def gathers(name: str) -> bool:
    """Whether the stage of a study leaves its trainings to `pipeline.fan_out --only`."""
    return getattr(module(name), "gathers", False)


Tables = dict[str, pd.DataFrame]
