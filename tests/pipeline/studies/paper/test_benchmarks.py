"""The benchmarks as the report has them: ratios of each machine."""

import pandas as pd
import pytest

from pipeline.benchmarks.results import FOLDER
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.studies.paper import benchmarks

RATIOS = {"initialised": {"over_vit": {"osa_qr": 1.8}}, "trained": {"over_vit": {"osa_qr": 1.9, "osa_ns": 2.1}}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(machine: str, name: str, content: dict | pd.DataFrame) -> None:
    """What a benchmark leaves of a machine."""
    path = FOLDER / machine / name
    files.write_json(path, content) if isinstance(content, dict) else files.write_csv(path, content)
    files.write_record(path.parent, {})


def test_trained_weights_come_first():
    environment = {"device_name": "A", "num_threads": 1}
    write("a", "step.json", {"environment": environment, "ratios": RATIOS})
    only_initialised = {"initialised": RATIOS["initialised"]}
    write("b", "step.json", {"environment": environment, "ratios": only_initialised})
    trained, initialised = benchmarks.summarise(None, {}, None)["steps"]
    assert {"variant": "osa_qr", "over_vit": 1.9} in trained["rows"] and initialised["ns_over_qr"] is None
    assert trained["ns_over_qr"] == pytest.approx(2.1 / 1.9)


def test_a_gpu_comes_after_the_cpus():
    environment = {"device_name": "B", "num_threads": 1}
    write("b", "step.json", {"environment": environment, "ratios": RATIOS})
    table = pd.DataFrame({"model": ["vit", "osa_qr", "osa_ns"], "seconds": [2.0, 2.5, 5.0], "device": "A"})
    write("a", "gpu_step.csv", table)
    cpu, gpu = benchmarks.summarise(None, {}, None)["steps"]
    assert cpu["environment"] == environment and gpu["environment"] == {"device_name": "A", "num_threads": None}
    assert {"variant": "osa_qr", "over_vit": 1.25} in gpu["rows"] and gpu["ns_over_qr"] == 2


@pytest.mark.parametrize(
    "ratios, word",
    [
        ((), "not trained"),
        ((1.2,), "open, other direction"),
        ((1.1, 1.2, 1.15), "contradicted"),
        ((0.9, 0.8, 0.85), "reproduced"),
        ((0.5, 0.9, 1.3), "open, same direction"),
    ],
)
def test_machines_decide_whether_newton_schulz_is_cheaper(ratios, word):
    for i, ratio in enumerate(ratios):
        made = {"trained": {"over_vit": {"osa_qr": 2.0, "osa_ns": 2 * ratio}}}
        environment = {"device_name": "A", "num_threads": 1}
        write(f"{i}", "step.json", {"environment": environment, "ratios": made})
    assert benchmarks.summarise(None, {}, None)["ns_below_qr"].word == word


def test_files_of_another_machine_reach_no_page():
    environment = {"device_name": "A", "num_threads": 1}
    for machine in ("a", "b"):
        write(machine, "step.json", {"environment": environment | {"device_name": machine}, "ratios": RATIOS})
    for name in ("step.json", "record.json"):
        (FOLDER / "b" / name).write_bytes((FOLDER / "a" / name).read_bytes())
        with pytest.raises(UserError, match=r"benchmarks/b"):
            benchmarks.summarise(None, {}, None)
