"""Seconds to a loss, from made-up curves and step times with known answers."""

import pandas as pd
import pytest

from pipeline.benchmarks.measurements import BENCHMARKS
from pipeline.config import records
from pipeline.core import files
from pipeline.report import page
from pipeline.studies.paper import time_to_loss
from tests.pipeline.studies.paper.conftest import histories, runs
from tests.pipeline.studies.paper.test_section_5 import around

MODELS = ("osa_qr", "osa_ns", "osa_exact", "vit", "vit_noskip")
EPOCHS = {"osa_qr": 1.2, "osa_ns": 1.4, "vit": 1.0, "vit_noskip": 2.0}
STEPS = {"osa_qr": 3.0, "osa_ns": 4.0, "osa_exact": 2.5, "vit": 2.0, "vit_noskip": 1.0}


def write(machine: str, name: str, table: pd.DataFrame, environment: dict | None = None) -> None:
    path = BENCHMARKS / machine / name
    files.write_csv(path, table)
    if environment:
        files.write_json(path.with_suffix(".json"), {"environment": environment})
    records.seal(path.parent)


def steps(weights: str, code: str = "ours", factor: float = 1.0) -> pd.DataFrame:
    seconds = [factor * STEPS[model] for model in MODELS]
    return pd.DataFrame({"model": MODELS, "code": code, "weights": weights, "seconds": seconds})


@pytest.fixture
def trained(paper_lab, tmp_path, monkeypatch):
    """Two machines: one of trained weights besides others, and a GPU that has not timed OSA (NS)."""
    paper_lab.tables = {
        "runs": runs({name: [90.0] * 5 for name in EPOCHS}),
        "histories": histories({name: around(ratio) for name, ratio in EPOCHS.items()}),
    }
    monkeypatch.chdir(tmp_path)
    others = [steps("initialised").assign(seconds=9.0), steps("trained", "straightforward").assign(seconds=9.0)]
    write("a", "step.csv", pd.concat([steps("trained"), *others]), {"device_name": "A", "num_threads": 1})
    gpu = steps("")[["model", "seconds"]].assign(device="NVIDIA B", seconds=[1.0, 1.0, 1.0, 1.0, 1.0])
    write("b", "gpu_step.csv", gpu[gpu["model"] != "osa_ns"])
    return paper_lab


def row(summary, *models):
    return next(each for each in summary["rows"] if each["models"] == [*models])


def test_seconds_are_epochs_times_a_step_of_the_machine_that_is_named(trained):
    summary = time_to_loss.summarise(None, {}, trained)
    assert summary["machines"] == ["A, 1 thread", "B"]
    qr = row(summary, "osa_qr", "vit")
    assert qr["epochs"].estimate == pytest.approx(1.2, rel=0.01)
    a, b = qr["seconds"]
    assert (a["step"], b["step"]) == (1.5, 1.0)
    for end, of_epochs in (("estimate", qr["epochs"].estimate), ("low", qr["epochs"].low), ("high", qr["epochs"].high)):
        assert (a[end], b[end]) == pytest.approx((1.5 * of_epochs, of_epochs))
    slower = row(summary, "osa_ns", "vit_noskip")
    assert slower["epochs"].high < 1 < slower["seconds"][0]["low"]  # ahead in epochs, behind in seconds


def test_what_is_not_timed_or_not_trained_has_no_number(trained):
    summary = page.to_json(time_to_loss.summarise(None, {}, trained))
    assert row(summary, "osa_ns", "vit")["seconds"][1] == dict.fromkeys(("step", "estimate", "low", "high"))
    assert not [each for each in summary["rows"] if "osa_exact" in each["models"]]
    trained.tables = {}
    assert time_to_loss.summarise(None, {}, trained)["rows"] == []
