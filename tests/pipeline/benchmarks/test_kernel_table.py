"""The compiler's report on the kernels, against its report in paper_outputs/benchmarks/kernels.csv."""

import pytest

pytest.importorskip("triton", reason="Triton comes with torch for CUDA on Linux")

import triton.language as tl

from osa.kernels import tiles
from osa.kernels.hopper import fused
from pipeline.benchmarks import kernels


@pytest.fixture
def rows():
    return kernels.committed_rows()


@pytest.mark.slow
def test_every_row_is_of_the_kernels_as_they_are(rows):
    now = {key: kernels.source(launched, architecture) for key, launched, architecture in kernels.cases()}
    assert {key: row["source"] for key, row in rows.items()} == now, "run `python -m pipeline benchmarks.kernels`"


def test_the_compiler_warns_of_no_kernel_and_hopper_alone_has_its_instruction(rows):
    assert {row["warnings"] for row in rows.values()} == {""}
    assert all(row["hgmma"] == "0" for row in rows.values() if row["architecture"] == "sm_80")


def test_besides_a_program_a_head_one_kernel_spills_and_not_on_hopper(rows):
    spilled = {key for key, row in rows.items() if row["spilled_bytes"] != "0" and key[0] != "fused exact"}
    assert spilled == {("newton_schulz", "backward", "16", dtype, "sm_80") for dtype in ("float32", "bfloat16")}


def test_a_program_a_head_is_what_the_design_asks_of_it(rows):
    """A wait for at least four products; few bytes spilled; two programs share a multiprocessor."""
    forward, backward = (rows["fused exact", name, "64", "bfloat16", "sm_90"] for name in ("forward", "backward"))
    for row in (forward, backward):
        assert int(row["programs"]) == 2 and int(row["hgmma"]) >= 4 * int(row["waits"]) > 0
    assert forward["spilled_bytes"] == "0"  # no loop reloads anything
    assert int(backward["spilled_bytes"]) <= 1000
    assert {width for method, _, width, *_ in rows if method == "fused exact"} == {"16", "32", "64"}


def test_a_program_a_part_takes_at_most_a_multiprocessor(rows):
    own = {key: row for key, row in rows.items() if key[0] == "parts exact"}
    assert {width for _, _, width, *_ in own} == {"16", "32", "64"} and len(own) == 18
    assert all(int(row["programs"]) >= 1 for row in own.values())


@pytest.mark.parametrize(
    "name, other", [("MAX_TERMS", tl.constexpr(12)), ("sum_terms", fused.adjoint), ("high_low", tiles.transpose)]
)
def test_a_kernel_changes_with_the_functions_and_constants_that_it_uses(name, other, monkeypatch):
    before = kernels.code.__wrapped__(fused.forward_kernel)
    assert before == kernels.code(fused.forward_kernel)
    monkeypatch.setattr(fused, name, other)
    assert before != kernels.code.__wrapped__(fused.forward_kernel)


@pytest.mark.slow
def test_what_changed_is_compiled_and_a_warning_names_what_takes_more(rows, tmp_path, monkeypatch, capsys):
    chosen = [case for case in kernels.cases() if case[0][0] == "phi1"]
    same, changed = chosen[:-1], chosen[-1][0]
    monkeypatch.setattr(kernels, "cases", lambda: chosen)
    monkeypatch.setattr(kernels, "committed_rows", lambda: {**rows, changed: rows[changed] | {"source": ""}})
    worse = {name: value for name, value in rows[changed].items() if name not in kernels.KEY} | {"spilled_bytes": 8}
    monkeypatch.setattr(kernels, "resources", lambda launched, architecture: worse)
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    kernels.main([])
    assert capsys.readouterr().err.count("needs more") == 1
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    written = kernels.committed_rows()
    assert written == {key: rows[key] for key, *_ in same} | {changed: rows[changed] | {"spilled_bytes": "8"}}


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
    assert kernels.is_worse(row | change, row) == worse
