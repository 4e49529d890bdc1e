"""The benchmarks as the report has them: ratios of each machine."""

import pandas as pd
import pytest

from pipeline.benchmarks.measurements import BENCHMARKS
from pipeline.config import records
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.studies.paper import benchmarks

RATIOS = {"initialised": {"over_vit": {"osa_qr": 1.8}}, "trained": {"over_vit": {"osa_qr": 1.9, "osa_ns": 2.1}}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(machine: str, name: str, content: dict | pd.DataFrame) -> None:
    """Writes the files that a benchmark leaves of a machine."""
    path = BENCHMARKS / machine / name
    files.write_json(path, content) if isinstance(content, dict) else files.write_csv(path, content)
    records.seal(path.parent)


def test_trained_weights_come_first():
    environment = {"device_name": "A", "num_threads": 1}
    write("a", "step.json", {"environment": environment, "ratios": RATIOS})
    write("b", "step.json", {"environment": environment, "ratios": {"initialised": RATIOS["initialised"]}})
    trained, initialised = benchmarks.summarise(None, {}, None)["steps"]
    assert {"variant": "osa_qr", "over_vit": 1.9} in trained["rows"]
    assert initialised["rows"] == [{"variant": "osa_qr", "over_vit": 1.8}]


def test_a_gpu_comes_after_the_cpus():
    environment = {"device_name": "B", "num_threads": 1}
    write("b", "step.json", {"environment": environment, "ratios": RATIOS})
    table = pd.DataFrame({"model": ["vit", "osa_qr", "osa_ns"], "seconds": [2.0, 2.5, 5.0], "device": "A"})
    write("a", "gpu_step.csv", table)
    cpu, gpu = benchmarks.summarise(None, {}, None)["steps"]
    assert cpu["environment"] == environment and gpu["environment"] == {"device_name": "A", "num_threads": None}
    assert {"variant": "osa_qr", "over_vit": 1.25} in gpu["rows"]


def test_newton_schulz_is_compared_in_literal_forms_and_in_ours():
    seconds = {"literal_newton_schulz": 3.0, "literal_qr": 2.0, "newton_schulz": 1.1, "qr": 1.0}
    rows = [("forward and backward", 50, 16, name, each) for name, each in seconds.items()]
    rows += [("forward", 50, 16, "qr", 9.0), ("forward and backward", 100, 16, "qr", 9.0)]
    table = pd.DataFrame(rows, columns=["pass", "tokens", "width", "method", "seconds"])
    write("a", "attention.csv", table)
    write("a", "attention.json", {"environment": {"device": "cpu", "device_name": "A CPU", "num_threads": 2}})
    (found,) = benchmarks.summarise(None, {}, None)["attention"]
    assert found == {"machine": "A CPU, 2 threads", "literal": 1.5, "ours": pytest.approx(1.1)}


def test_a_call_on_a_gpu_is_set_against_the_fastest_softmax_at_each_norm():
    whole = {"part": "all", "how": "replay", "work": "both"}
    rows = [
        whole | {"norm": 2.0, "method": "exact", "seconds": 4.0},
        whole | {"norm": 40.0, "method": "exact", "seconds": 20.0},
        whole | {"norm": 2.0, "method": "exact", "seconds": 1.0, "part": "1 kernel"},
        whole | {"norm": 2.0, "method": "exact", "seconds": 1.0, "how": "eager"},
        whole | {"norm": 2.0, "method": "exact, torch's products", "seconds": 9.0},
        whole | {"method": "sdpa", "seconds": 2.0},
        whole | {"method": "cudnn", "seconds": 1.0},
        whole | {"method": "copy", "seconds": 0.1},
    ]
    many = pd.DataFrame(rows).assign(batch=2, heads=3, tokens=5, device="A GPU")
    write("a", "gpu_attention.csv", pd.concat([many.assign(tokens=7, seconds=1.0), many]))
    (found,) = benchmarks.summarise(None, {}, None)["calls"]
    assert [row["tokens"] for row in found["rows"]] == [5, 7]
    assert found["rows"][0]["heads"] == 6
    assert found["rows"][0]["speeds"] == [{"norm": 2.0, "speed": 0.25}, {"norm": 40.0, "speed": 0.05}]


def test_files_of_another_machine_reach_no_page():
    environment = {"device_name": "A", "num_threads": 1}
    for machine in ("a", "b"):
        write(machine, "step.json", {"environment": environment | {"device_name": machine}, "ratios": RATIOS})
    for name in ("step.json", "record.json"):
        (BENCHMARKS / "b" / name).write_bytes((BENCHMARKS / "a" / name).read_bytes())
        with pytest.raises(UserError, match=r"benchmarks/b"):
            benchmarks.summarise(None, {}, None)
