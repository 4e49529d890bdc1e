"""A lab of the repository's parameters, with runs that are made up."""

from collections.abc import Mapping, Sequence

import pandas as pd
import pytest

from pipeline.config import params
from pipeline.studies.lab import Lab
from tests.pipeline.synthetic import ROOT

RUN = ["name", "variant", "seed", "status", "test_accuracy", "train_loss"]


def runs(accuracies: Mapping[str, Sequence[float | None]]) -> pd.DataFrame:
    """A run for each accuracy in per cent, by name and then by seed; None where it diverged."""
    rows = [
        (name, name, seed, "finished" if value else "diverged", (value or 0) / 100, 0.1)
        for name, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows, columns=RUN)


def histories(curves: Mapping[str, Sequence[Sequence[float]]]) -> pd.DataFrame:
    """Train losses at epochs 0, 1, 2, … of each run, by name and then by seed."""
    rows = [
        (name, name, seed, epoch, loss, loss)
        for name, of_name in curves.items()
        for seed, curve in enumerate(of_name)
        for epoch, loss in enumerate(curve)
    ]
    return pd.DataFrame(rows, columns=["name", "variant", "seed", "epoch", "train_loss", "test_loss"])


@pytest.fixture(scope="session")
def repository() -> tuple:
    """The repository's parameters and paper.yaml, read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return params.load(), params.load_paper()


@pytest.fixture
def paper_lab(repository, monkeypatch) -> Lab:
    """Without a run."""
    monkeypatch.chdir(ROOT)
    lab = Lab("a_study", *(each.model_copy(deep=True) for each in repository))
    lab.tables = {}
    return lab
