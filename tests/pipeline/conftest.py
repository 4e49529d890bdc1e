"""Fixtures that tests of the pipeline share."""

import itertools

import pandas as pd
import pytest

from pipeline.config import params
from pipeline.core import files
from pipeline.statistics.claims import Results
from pipeline.training.run import Run
from tests.pipeline.trainings import write_data, write_params


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory of its own, with small parameters and data."""
    monkeypatch.chdir(tmp_path)
    write_params()
    write_data()
    return tmp_path


@pytest.fixture(scope="session")
def known() -> Results:
    """Seeds 0 to 9 of the paper's five models by the first reading, which were known before the rule of verdicts."""
    runs, histories = [], []
    for variant, seed in itertools.product(params.load_paper().table_2, range(10)):
        folder, identity = Run(variant, seed, "first_reading", base=files.ROOT).folder, {"name": variant, "seed": seed}
        runs.append(identity | {"status": "finished"} | files.read_json(folder / "metrics.json"))
        histories.append(files.read_csv(folder / "history.csv").assign(**identity))
    return Results({"runs": pd.DataFrame(runs), "histories": pd.concat(histories)})
