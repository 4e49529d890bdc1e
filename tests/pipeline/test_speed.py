"""The benchmarks in the report: one section for each machine, with the numbers of its files."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import results as benchmarks
from pipeline import files, params, report, speed
from pipeline.results import Inputs
from tests.pipeline import synthetic

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
RATIOS = {
    "initialised": {
        "over_vit": {"osa_exact": 1.2},
        "straightforward_over_ours": {"vit": 2.0, "all models of the paper": 3.25},
    }
}
ATTENTION = [{"pass": "forward", "width": 16, "tokens": 4096, "best SDPA / exact": 12.34, "literal_qr / qr": 3.2}]


def write_machine(name: str = "AMD EPYC", threads: int = 2) -> Path:
    environment = {"device_name": name, "num_threads": threads, "torch": "2.11.0", "platform": "Linux"}
    folder = speed.FOLDER / benchmarks.slug(environment)
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([1, 2])
    for kind in ("step", "profile", "attention"):
        files.write_text(folder / f"{kind}.svg", report.figures.svg(figure))
    files.write_text(folder / "step.csv", STEP)
    files.write_text(folder / "profile.csv", PROFILE)
    facts = {"environment": environment, "options": {"dtype": "float32"}, "batch_size": 128}
    files.write_json(folder / "step.json", facts | {"ratios": RATIOS})
    files.write_json(folder / "profile.json", facts | {"weights": "trained", "peak": {"tflops": 0.2}})
    files.write_json(folder / "attention.json", facts | {"ratios": ATTENTION})
    return folder


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.write_params(tmp_path)
    return Inputs(params.load(), {}, {}, [])


def test_a_machine_is_a_section_with_the_numbers_of_its_files(inputs):
    folder = write_machine()
    (machine,) = speed.machines(inputs)
    assert machine["title"] == "AMD EPYC, 2 threads" and machine["anchor"] == folder.name == "amd-epyc-2-threads"
    assert "OSA (exact) 1.20." in machine["sentence"] and "3.25 times as long" in machine["sentence"]
    step, profile, attention = (part["table"] for part in machine["parts"])
    assert step.rows == [
        ("vit", ["ViT", "initialised", "100.0", "–", "200.0", "2.00"]),
        ("osa_exact", ["OSA (exact)", "initialised", "120.0", "1.20", "–", "–"]),
        (None, ["All models of the paper", "initialised", "–", "–", "–", "3.25"]),
    ]
    assert profile.columns == ["Part", "ViT", "OSA (QR)"] and "trained" in profile.note and "200 GFLOP/s" in profile.note
    assert profile.rows == [
        (None, ["Linear layers", "80.0\n75% of peak", "90.0\n50% of peak"]),
        (None, ["QR decomposition", "–", "60.4\n3% of peak"]),
        (None, ["Whole step", "80.0", "150.4"]),
    ]
    assert attention.rows == [(None, ["4\u202f096", "16", "forward", "12.3", "3.20"])]
    assert Path(step.source).exists() and all(part["path"].exists() for part in machine["parts"])


def test_several_machines_and_one_that_measured_the_step_alone(inputs):
    write_machine()
    alone = write_machine("NVIDIA H100", 16)
    for name in ("attention", "profile"):
        (alone / f"{name}.json").unlink()
    machines = speed.machines(inputs)
    assert [len(machine["parts"]) for machine in machines] == [3, 1]
    assert len({machine["anchor"] for machine in machines}) == 2


def test_both_types_of_input_are_shown(inputs):
    folder = write_machine()
    for kind in ("json", "svg"):
        text = (folder / f"attention.{kind}").read_text().replace("float32", "bfloat16").replace("12.34", "2.5")
        (folder / f"attention_bfloat16.{kind}").write_text(text)
    wide, narrow = (part["table"] for part in speed.machines(inputs)[0]["parts"][-2:])
    assert wide.title.endswith("float32") and wide.rows[0][1][3] == "12.3"
    assert narrow.title.endswith("bfloat16") and narrow.rows[0][1][3] == "2.50"
    assert narrow.source == str(folder / "attention_bfloat16.json")


def test_no_machine_no_section(inputs):
    assert speed.machines(inputs) == []


def test_the_pages_show_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.write_project(tmp_path, lambda raw: raw["run"].update(variants=["vit"]), seeds=[0])
    synthetic.measure()
    write_machine()
    report.main([])
    for page, text in (("report.html", "AMD EPYC, 2 threads"), ("report.md", "### AMD EPYC, 2 threads")):
        assert text in Path("paper_outputs", page).read_text()
    assert "3.25 times as long" in Path("paper_outputs/result.md").read_text()
