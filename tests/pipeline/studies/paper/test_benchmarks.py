"""The benchmarks as the report has them: ratios of each machine, and what the kernels take."""

import pandas as pd
import pytest

from pipeline.core import files
from pipeline.studies.paper import benchmarks

RATIOS = {"initialised": {"over_vit": {"osa_qr": 1.8}}, "trained": {"over_vit": {"osa_qr": 1.9, "osa_ns": 2.1}}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_trained_weights_come_first():
    environment = {"device_name": "A", "num_threads": 1}
    files.write_json(benchmarks.FOLDER / "a/step.json", {"environment": environment, "ratios": RATIOS})
    only_initialised = {"initialised": RATIOS["initialised"]}
    files.write_json(benchmarks.FOLDER / "b/step.json", {"environment": environment, "ratios": only_initialised})
    trained, initialised = benchmarks.summarise(None, {}, None)["steps"]
    assert {"variant": "osa_qr", "over_vit": 1.9} in trained["rows"] and initialised["ns_over_qr"] is None
    assert trained["ns_over_qr"] == pytest.approx(2.1 / 1.9)


def test_the_worst_kernel_is_reported():
    assert benchmarks.kernels() == {}
    files.write_csv(benchmarks.KERNELS, pd.DataFrame({"spilled_bytes": [0, 8, 0]}))
    assert benchmarks.kernels() == {"compiled": 3, "spilled_bytes": 8}
