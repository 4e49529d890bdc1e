"""The compiler's report on the kernels, against its report in paper_outputs/benchmarks/kernels.csv."""

import csv
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton comes with torch for CUDA on Linux")

from pipeline.benchmarks.kernels import TABLE, is_worse
from pipeline.core.files import ROOT

KEY = "method", "kernel", "width", "dtype", "architecture"


def rows_of(path):
    with path.open(encoding="utf-8") as file:
        return {tuple(row[name] for name in KEY): row for row in csv.DictReader(file)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods, widths, architectures",
    [
        (["exact", "newton_schulz", "phi1"], ["16"], ["90"]),
        (["long exact"], ["64"], ["80", "90"]),
        (["fused exact", "parts exact"], ["64"], ["90"]),
    ],
    ids=["short", "long", "fused"],
)
def test_the_compiler_finds_no_kernel_worse_than_it_did(methods, widths, architectures, tmp_path):
    """Runs in a process without the interpreter."""
    output, names = tmp_path / "new.csv", ("methods", "widths", "architectures")
    chosen = ["--output", output]
    for name, values in zip(names, (methods, widths, architectures), strict=True):
        chosen += [f"--{name}", *values]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-m", "pipeline", "benchmarks.kernels", *chosen], env=environment, cwd=ROOT, check=True)
    before, now = (rows_of(path) for path in (ROOT / TABLE, output))
    assert now and now.keys() <= before.keys()
    assert not [(row, before[key]) for key, row in now.items() if is_worse(row, before[key])]
    assert all(row["warnings"] == "" for row in now.values())
    assert all(row["spilled_bytes"] == "0" for row in now.values() if row["method"] != "fused exact")


def test_the_compiler_warns_of_no_kernel_and_hopper_alone_has_its_instruction():
    rows = rows_of(ROOT / TABLE).values()
    assert {row["warnings"] for row in rows} == {""}
    assert all(row["hgmma"] == "0" for row in rows if row["architecture"] == "sm_80")


def test_a_program_a_head_is_what_the_design_asks_of_it():
    """No warning; a wait for at least four products; few bytes spilled; two programs share a multiprocessor."""
    rows = rows_of(ROOT / TABLE)
    forward, backward = (rows["fused exact", name, "64", "bfloat16", "sm_90"] for name in ("forward", "backward"))
    for row, spilled in ((forward, 300), (backward, 1000)):
        assert row["warnings"] == "" and int(row["spilled_bytes"]) <= spilled and int(row["programs"]) == 2
        assert int(row["hgmma"]) >= 4 * int(row["waits"]) > 0
    assert forward["spilled_bytes"] == "0"  # no loop reloads anything
    own = [row for (method, *_), row in rows.items() if method == "fused exact"]
    assert {row["width"] for row in own} == {"16", "32", "64"} and all(row["warnings"] == "" for row in own)


def test_a_program_a_part_waits_for_nothing_in_vain():
    """No warning and no byte spilled. One program needs a multiprocessor, as many share the heads."""
    rows = [row for (method, *_), row in rows_of(ROOT / TABLE).items() if method == "parts exact"]
    assert {row["width"] for row in rows} == {"16", "32", "64"} and len(rows) == 18
    assert all((row["warnings"], row["spilled_bytes"]) == ("", "0") and int(row["programs"]) >= 1 for row in rows)


@pytest.mark.parametrize(
    "change, worse",
    [
        ({}, False),
        ({"warnings": ""}, False),
        ({"warnings": "C7510 C7512"}, True),
        ({"spilled_bytes": 9}, True),
        ({"shared_bytes": 2048}, True),
        ({"programs": 1}, True),
        ({"waits": 11}, True),
        ({"hgmma": 40}, False),
    ],
    ids=str,
)
def test_a_row_is_worse_where_a_kernel_takes_more_or_waits_more(change, worse):
    row = {"warnings": "C7510", "spilled_bytes": 8, "shared_bytes": 1024, "programs": 2, "hgmma": 20, "waits": 10}
    assert is_worse(row | change, row) == worse
