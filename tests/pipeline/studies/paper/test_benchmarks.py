"""The benchmarks in the report: an observation for each machine and script, with the numbers of its files."""

from pathlib import Path

import pandas as pd
import pytest

from pipeline.benchmarks import results
from pipeline.core import files
from pipeline.studies.paper import benchmarks

STEP = """model,code,weights,seconds,p10,p90,compile_seconds
vit,ours,initialised,0.1,0.09,0.11,
vit,straightforward,initialised,0.2,0.19,0.21,
osa_exact,ours,initialised,0.12,0.11,0.13,
"""
PROFILE = """model,part,seconds,p10,p90,tflops
vit,linear layers,0.08,0.07,0.09,0.15
vit,QR decomposition,0,0,0,
osa_qr,linear layers,0.09,0.08,0.1,0.1
osa_qr,QR decomposition,0.0604,0.06,0.07,0.006
"""
ATTENTION = """method,tokens,width,pass,dtype,seconds
exact,4096,16,forward,float32,0.001
sdpa,4096,16,forward,float32,0.02
sdpa_flash,4096,16,forward,float32,0.0123
exact,8192,16,forward,float32,0.002
exact,50,16,forward and backward,float32,0.005
exact,4096,16,forward and backward,float32,0.004
sdpa,50,16,forward and backward,float32,0.001
sdpa,4096,16,forward and backward,float32,0.04
"""
RATIOS = {
    "initialised": {
        "over_vit": {"osa_exact": 1.2},
        "straightforward_over_ours": {"vit": 2.0, "the paper's OSA models": 4.5, "all models of the paper": 3.25},
    }
}
ATTENTION_RATIOS = [
    {"pass": "forward", "width": 16, "tokens": 8192, "literal_qr / qr": 3.3},
    {"pass": "forward", "width": 16, "tokens": 4096, "best SDPA / exact": 12.34, "literal_qr / qr": 3.2},
]


def write_machine(name: str = "AMD EPYC", threads: int = 2) -> Path:
    environment = {"device_name": name, "num_threads": threads, "torch": "2.11.0", "platform": "Linux"}
    folder = benchmarks.FOLDER / results.slug(environment)
    for kind, table in (("step", STEP), ("profile", PROFILE), ("attention", ATTENTION)):
        files.write_text(folder / f"{kind}.csv", table)
    facts = {"environment": environment, "options": {"dtype": "float32"}, "batch_size": 128}
    files.write_json(folder / "step.json", facts | {"ratios": RATIOS})
    files.write_json(folder / "profile.json", facts | {"weights": "trained", "peak": {"tflops": 0.2}})
    files.write_json(folder / "attention.json", facts | {"ratios": ATTENTION_RATIOS})
    return folder


@pytest.fixture
def findings(lab):
    return lambda: benchmarks.findings(None, {}, lab)


def values(finding):
    return {measure.what: (measure.value, measure.note) for measure in finding.measures}


def test_a_machine_has_an_observation_for_each_script(findings):
    folder = write_machine()
    step, profile, attention = findings()
    for finding, name in ((step, "step"), (profile, "profile"), (attention, "attention")):
        assert finding.id == f"{name}-amd-epyc-2-threads" and finding.title.endswith("AMD EPYC, 2 threads")
        assert finding.kind == "observation" and finding.verdict == "" and bool(finding.figure) == (name == "attention")
        assert finding.sources == [str(folder / f"{name}.csv"), str(folder / f"{name}.json")]
        assert finding.remark.endswith("PyTorch 2.11.0, Linux.")


def test_the_step(findings):
    write_machine()
    step = findings()[0]
    assert "OSA (exact) 1.20." in step.in_short
    assert step.in_short.endswith(
        "takes 3.25 times as long for the paper’s models together, and 4.50 times for its OSA models."
    )
    assert step.table.rows == [
        ["ViT", "initialised", "100.0\n90.0 to 110.0", "200.0\n190.0 to 210.0", "–", "2.00"],
        ["OSA (exact)", "initialised", "120.0\n110.0 to 130.0", "–", "1.20", "–"],
        ["The paper's OSA models", "initialised", "–", "–", "–", "4.50"],
        ["All models of the paper", "initialised", "–", "–", "–", "3.25"],
    ]
    assert step.table.columns[2:4] == ["Ours, ms", "Straightforward, ms"]
    assert step.table.variants == ["vit", "osa_exact", None, None] and step.models == ("vit", "osa_exact")
    assert values(step) == {
        "OSA (exact): a step in units of ViT's": (1.2, "initialised weights"),
        "ViT: straightforward over ours": (2.0, "initialised weights"),
        "the paper's OSA models: straightforward over ours": (4.5, "initialised weights"),
        "all models of the paper: straightforward over ours": (3.25, "initialised weights"),
    }


def test_the_step_of_deep_models(findings):
    folder = write_machine()
    files.write_text(
        folder / "depth.csv", "model,seconds,over_vit,low,high\nvit,1,1,1,1\ngelu,3,3.1,3,3.2\nespa,1.5,1.5,1.4,1.6\n"
    )
    facts = files.read_json(folder / "profile.json") | {"depth": 36, "rounds": 9, "batch_size": 128}
    files.write_json(folder / "depth.json", facts)
    deep = findings()[1]
    assert deep.in_short == "With 36 blocks as initialised a step takes in multiples of ViT's: E-SPA 1.50."
    assert deep.table.rows[1:] == [
        ["E-SPA", "1.50", "1.50", "1.40 to 1.60"],
        ["OSA (shaped), GELU rescaled, not shaped", "3.00", "3.10", "3.00 to 3.20"],
    ]
    assert deep.models == ("vit", "espa")


def test_the_share_of_the_peak_that_a_step_reaches(findings):
    folder = write_machine()
    assert "was not measured" in findings()[0].table.note  # as in files from before it was
    table = STEP.replace("compile_seconds", "compile_seconds,tflops").replace(",\n", ",,0.05\n")
    files.write_text(folder / "step.csv", table)
    facts = files.read_json(folder / "step.json") | {"peak": {"tflops": 0.2}}
    files.write_json(folder / "step.json", facts)
    step = findings()[0]
    assert step.table.rows[0][2] == "100.0\n90.0 to 110.0\n25% of peak"
    assert "200 GFLOP/s" in step.table.note and "not measured" not in step.table.note


def test_its_parts(findings):
    write_machine()
    profile = findings()[1]
    assert profile.table.columns == ["Part", "ViT", "OSA (QR)"]
    assert "trained" in profile.table.note and "200 GFLOP/s" in profile.table.note
    assert profile.table.rows == [
        ["Linear layers", "80.0\n75% of peak", "90.0\n50% of peak"],
        ["QR decomposition", "–", "60.4\n3% of peak"],
        ["Whole step", "80.0", "150.4"],
    ]


def test_attention(findings):
    write_machine()
    attention = findings()[2]
    assert values(attention) == {  # each at the largest N at which both were measured
        "Time of softmax, best SDPA / exact": (12.34, "N = 4\u202f096, d_v = 16, forward"),
        "Time of literal QR / QR": (3.3, "N = 8\u202f192, d_v = 16, forward"),
    }
    lines = {line.get_label(): list(line.get_ydata()) for line in attention.figure.axes[0].lines}
    assert lines["exact"] == [0.001, 0.002] and lines["softmax, best SDPA"] == [0.0123]
    told = "Time of exact / softmax, best SDPA: 5 at N = 50, 0.1 at N = 4\u202f096 (d_v = 16, forward and backward)."
    assert attention.in_short == told


def test_several_machines_and_one_that_measured_the_step_alone(findings):
    write_machine()
    alone = write_machine("NVIDIA H100", 1)
    for name in ("attention", "profile"):
        (alone / f"{name}.json").unlink()
    found = findings()
    assert [finding.title.split(": ")[1] for finding in found] == ["AMD EPYC, 2 threads"] * 3 + ["NVIDIA H100, 1 thread"]
    assert len({finding.id for finding in found}) == 4


def test_both_types_of_input_are_shown(findings):
    folder = write_machine()
    facts = (folder / "attention.json").read_text().replace("float32", "bfloat16").replace("12.34", "2.5")
    (folder / "attention_bfloat16.json").write_text(facts)
    (folder / "attention_bfloat16.csv").write_text(ATTENTION)
    wide, narrow = findings()[-2:]
    best = "Time of softmax, best SDPA / exact"
    assert "float32" in wide.title and values(wide)[best][0] == 12.34
    assert "bfloat16" in narrow.title and values(narrow)[best][0] == 2.5


def write_kernels(**changes) -> None:
    row = {"method": "exact", "kernel": "forward", "width": 8, "dtype": "float32", "warps": 4, "registers": 68}
    row |= {"spilled_bytes": 0, "shared_bytes": 2048, "programs_by_memory": 53, "programs": 7, "triton": "3.6.0"}
    rows = [
        row | {"architecture": "sm_80", "width": 64, "registers": 128},
        row | {"architecture": "sm_80"} | changes,
        row | {"architecture": "sm_90", "method": "phi1"},
    ]
    code = files.sha256(files.ROOT / benchmarks.CODE)
    files.write_csv(benchmarks.KERNELS, pd.DataFrame(rows).assign(**({"code_sha256": code} | changes)))


def test_what_kernels_take(findings):
    write_kernels()
    (found,) = findings()
    assert found.verdict == "passes" and found.remark == "Compiled by Triton 3.6.0."
    assert found.table.columns[2:4] == ["sm_80: registers", "sm_80: shared, KiB"]
    assert found.table.rows[0] == ["exact", "forward", "68 to 128", "2", "7", "–", "–", "–"]
    assert found.table.rows[1] == ["φ₁ alone", "forward", "–", "–", "–", "68", "2", "7"]


@pytest.mark.parametrize("changes", [{"spilled_bytes": 4}, {"programs_by_memory": 1}])
def test_a_kernel_that_spills_or_takes_all_memory_fails(findings, changes):
    write_kernels(**changes)
    assert findings()[0].verdict == "fails"


def test_kernels_that_were_compiled_from_other_code_say_so(findings):
    write_kernels(code_sha256="0" * 64)
    assert findings()[0].remark.endswith("The kernels have changed since.")


def test_no_machine_no_observation(findings):
    assert findings() == []
