"""A tree of code with one small study in it, which takes the place of the repository's studies."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline import sources, studies
from tests.pipeline.synthetic import ROOT

NAME = "small"
TEXT = '''"""How large is A?"""

import torch
from osa.functional import orthogonal_attention_matrix

from pipeline.core.params import Section, Seeds
from pipeline.lab import Lab
from pipeline.report.numbers import number
from pipeline.statistics import LEVEL
from pipeline.studies import OBSERVATION, Finding, Measure, Tables

SIZE = 3  # of A
FACTOR = 1.0
LABEL = "norm of A"


class Settings(Section):
    seeds: Seeds


def measure(settings: Settings, lab: Lab) -> Tables:
    """The norm of A for every seed."""
    import pandas as pd

    return {"norms": pd.DataFrame({"seed": settings.seeds, "norm": [norm(seed, lab) for seed in settings.seeds]})}


def norm(seed: int, lab: Lab) -> float:
    # any Q and K would do
    query, key = lab.normal(seed, "small", 2, 1, 1, SIZE, 1)
    return FACTOR * orthogonal_attention_matrix(query, key, scale=1.0).norm().item()


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    return [Finding(NAME, LABEL, "", OBSERVATION, "", [label(tables["norms"]["norm"].max())])]


def label(value: float) -> Measure:
    return Measure(f"{LABEL} ({number(LEVEL)})", value)


NAME = "small"
'''


@contextmanager
def small_study(folder: Path, text: str = TEXT) -> Iterator[Path]:
    """Inside, the code is that of `folder`: the repository's with this study instead of its own."""
    for path in subprocess.check_output(["find", "osa", "pipeline", "-name", "*.py"], cwd=ROOT, text=True).split():
        if not path.startswith("pipeline/studies/") or path.endswith("__init__.py"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes((ROOT / path).read_bytes())
    (folder / f"pipeline/studies/{NAME}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "ROOT", folder)
        patch.setattr(studies, "__path__", [str(folder / "pipeline/studies")])
        forget()
        yield folder
    forget()


def forget() -> None:
    """What was read of the code before an edit."""
    sys.modules.pop(f"{studies.__name__}.{NAME}", None)
    studies.module.cache_clear()
    sources._imports_of.cache_clear()
