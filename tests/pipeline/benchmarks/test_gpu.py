"""The script for a GPU, rehearsed on a CPU with torch and Triton alone, and its deadlines."""

import csv
import os
import runpy
import subprocess
import sys
import tarfile
import time

import pytest
import torch

from pipeline.benchmarks import measurements
from pipeline.core.files import ROOT

SCRIPT = ROOT / "pipeline/benchmarks/gpu.py"
PARTS = {"machine", "forms", "attention", "split", "vit_b16", "step", "train", "profile"}
# Python imports this module as it starts, in each part's process too.
SITECUSTOMIZE = """
import sys

HIDDEN, FINDERS = "dvc mlflow pandas pydantic ruamel scipy matplotlib tqdm pipeline".split(), sys.meta_path[:]

class Bare:
    @staticmethod
    def find_spec(name, path=None, target=None):
        found = (finder.find_spec(name, path, target) for finder in FINDERS)
        return None if name.partition(".")[0] in HIDDEN else next(filter(None, found), None)

sys.meta_path[:] = [Bare]
"""


def test_no_time_is_negative():
    from pipeline.benchmarks.gpu import rest

    assert rest(3.0, [1.0, 1.5]) == 0.5 and rest(3.0, [2.0, 1.5]) is None
    for path in (ROOT / "paper_outputs/benchmarks").glob("*/gpu_*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            assert all(float(row["seconds"]) >= 0 for row in csv.DictReader(file) if row["seconds"]), path


@pytest.mark.slow
def test_a_rehearsal_with_torch_and_triton_alone_leaves_one_archive_with_its_tables(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    command = [sys.executable, SCRIPT, "--rehearse", "--into", tmp_path / "gpu"]
    bare = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=bare, check=False)
    assert done.returncode == 0 and "out of time" not in done.stdout, done.stdout + done.stderr
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    tables = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "unpacked/gpu").glob("*.csv")}
    rows = {name: list(csv.DictReader(text.splitlines())) for name, text in tables.items()}
    assert rows.keys() == PARTS and all(rows.values())
    bounds = {"float32": 1e-4, "bfloat16": 2e-2}
    kept = [row for row in rows["forms"] if row["norm"] == "2.0" or row["output"] != "nan"]  # NaN says that digits are lost
    errors = [(float(row[name]), bounds[row["dtype"]]) for row in kept for name in ("output", "query", "value")]
    assert all(error < bound for error, bound in errors) and {row["same_bits"] for row in kept} == {"True"}
    found = {(row["method"], row["part"], row["how"]) for row in rows["attention"]}
    assert {("sdpa", "all", "replay"), ("exact", "all", "eager"), ("exact", "rest", "replay")} <= found
    assert {"2.0", "6.0"} <= {row["norm"] for row in rows["attention"]}
    kernels = {row["part"].partition(" ")[2] for row in rows["attention"]} - {""}
    assert len(kernels) > 2 and all(name.endswith("_kernel") for name in kernels)
    assert {(row["method"], row["by"]) for row in rows["split"]} >= {("exact", "kernels"), ("exact", "torch's products")}
    assert {row["attention"] for row in rows["vit_b16"]} == {"softmax", "orthogonal"}
    assert [row["model"] for row in rows["step"]] == ["osa_exact"] and float(rows["step"][0]["seconds"]) > 0
    assert {"import", "first step", "steps", "evaluations", "checkpoints"} <= {row["phase"] for row in rows["train"]}
    assert "orthogonal attention with α = 0.025: " in done.stdout and "as fast as torch's matrix products" in done.stdout
    assert "fail or are not bit-reproducible: 0 of 4" in done.stdout


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(SCRIPT))


def test_a_part_that_fails_is_named_and_the_others_are_done(script, tmp_path, monkeypatch, capsys):
    part = tmp_path / "part.py"
    part.write_text("import sys\nsys.exit(sys.argv[1] == 'train')", encoding="utf-8")
    monkeypatch.setitem(script["main"].__globals__, "__file__", str(part))
    for names, message in ((["train", "machine"], "train failed: see PART.txt"), (["machin"], "part 'machin' is unknown")):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--rehearse", "--into", str(tmp_path / "gpu"), *names])
        with pytest.raises(SystemExit, match=message):
            script["main"]()
    assert capsys.readouterr().out.splitlines()[:2] == ["train: status 1", "machine: done"]


def test_all_shares_fit_the_time(script):
    assert sum(script["SHARES"].values()) + 5 <= script["TOTAL_SECONDS"] == 570
    assert script["SHARES"].keys() == script["PARTS"].keys() == PARTS


def test_a_step_that_is_timed_leaves_the_weights_as_drawn(script):
    model = torch.nn.Linear(4, 10)
    before = [x.detach().clone() for x in model.parameters()]
    (loss,) = script["step_of"](model, torch.randn(3, 4))()
    assert loss > 0 and all(map(torch.equal, before, model.parameters()))
    assert all(x.grad.abs().sum() > 0 for x in model.parameters())


def test_rows_are_written_as_they_come_until_the_deadline(script, tmp_path):
    def rows():
        for i in range(9):
            yield {"row": i}
            assert f"\n{i}," in (tmp_path / "t.csv").read_text(encoding="utf-8")  # before the next is measured

    script["write_rows"](tmp_path / "t.csv", rows(), time.time() + 60)
    assert len(script["read_rows"](tmp_path / "t.csv")) == 9
    script["write_rows"](tmp_path / "t.csv", rows(), time.time() - 1)
    assert [row["row"] for row in script["read_rows"](tmp_path / "t.csv")] == ["0"]


@pytest.mark.slow
def test_what_hangs_is_stopped_and_what_comes_too_late_is_not_begun(script, tmp_path):
    hangs = tmp_path / "hangs.py"
    lines = "import subprocess, sys, time", "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    hangs.write_text("\n".join((*lines, "time.sleep(60)")), encoding="utf-8")
    run, start = script["run_part"], time.monotonic()
    run.__globals__["__file__"] = str(hangs)
    assert run("machine", tmp_path, 5, True) == run("machine", tmp_path, 4, True) == "out of time"
    assert 5 <= time.monotonic() - start < 12


def test_the_peak_is_that_of_tensor_cores(monkeypatch):
    """Torch's attention in float32 uses tensor cores; the setting is restored."""
    seen, product, before = [], torch.Tensor.__matmul__, torch.backends.cuda.matmul.fp32_precision

    def watched(a, b):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    monkeypatch.setattr(measurements, "PEAK_SIZES", {8: 1})
    assert measurements.peak(torch.device("cpu")) > 0 and set(seen) == {"tf32"}
    assert torch.backends.cuda.matmul.fp32_precision == before
