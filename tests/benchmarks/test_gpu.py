"""The script for a GPU, rehearsed on a CPU with torch alone."""

import csv
import subprocess
import sys
import tarfile

import pytest
import torch

from pipeline.benchmarks import results
from pipeline.core.files import ROOT

SCRIPT = ROOT / "pipeline/benchmarks/gpu.py"
WITHOUT_PACKAGES = """
import importlib.abc, runpy, sys

class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pandas", "pydantic", "ruamel", "scipy", "matplotlib", "tqdm", "pipeline"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Bare())
sys.argv = sys.argv[1:]
sys.path[0] = ""
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def rehearse(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_a_rehearsal_leaves_one_archive_with_its_tables(tmp_path):
    done = rehearse("--rehearse", "--into", tmp_path / "gpu", "check", "attention", "warps", "step")
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    tables = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "unpacked/gpu").glob("*.csv")}
    rows = {name: list(csv.DictReader(text.splitlines())) for name, text in tables.items()}
    assert rows.keys() == {"check", "attention", "warps", "step"}
    bounds = {"torch.float32": 1e-5, "torch.bfloat16": 2e-2}
    errors = [(float(row[name]), bounds[row["dtype"]]) for row in rows["check"] for name in ("output", "query", "value")]
    assert all(error < bound for error, bound in errors) and len(errors) == 18
    assert {row["method"] for row in rows["attention"]} == {"exact", "sdpa", "copy"}
    assert all(float(row["both"]) > 0 for row in rows["attention"]) and float(rows["step"][0]["seconds"]) > 0


@pytest.mark.slow
def test_torch_is_all_that_it_needs(tmp_path):
    command = [sys.executable, "-c", WITHOUT_PACKAGES, SCRIPT, "check", "--inside", "--rehearse", "--into", tmp_path]
    subprocess.run(command, check=True, cwd=ROOT)
    assert (tmp_path / "check.csv").stat().st_size > 500


@pytest.mark.slow
def test_a_step_that_fails_is_named_and_the_others_are_done(tmp_path):
    (tmp_path / "check.csv").mkdir()  # where a table should go
    done = rehearse("--rehearse", "--into", tmp_path, "check", "step")
    assert done.returncode == 1 and "check" in done.stderr and "step: done" in done.stdout
    assert rehearse("--rehearse", "--into", tmp_path, "chek").returncode == 1


def test_the_peak_is_that_of_tensor_cores(monkeypatch):
    """Which torch's attention in float32 uses; the setting is put back."""
    seen, product, before = [], torch.Tensor.__matmul__, torch.backends.cuda.matmul.fp32_precision

    def watched(a, b):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    monkeypatch.setattr(results, "PRODUCTS", {8: 1})
    assert results.peak(torch.device("cpu")) > 0 and set(seen) == {"tf32"}
    assert torch.backends.cuda.matmul.fp32_precision == before
