"""The command for a GPU, rehearsed without one: every part, cut off and gone on with, and taken over elsewhere."""

import importlib
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from pipeline import studies
from pipeline.benchmarks import attention, gpu, orthogonal, results, step
from pipeline.core import files, params
from pipeline.runs import Run
from pipeline.studies.orthogonal import orthogonal_speed
from pipeline.studies.paper import benchmarks
from pipeline.tools import fan_out
from tests.pipeline import synthetic
from tests.pipeline.mnist_files import write_mnist

VIT = Run("vit", 0)
SCRIPTS = ("step", "attention_bfloat16", "attention_heads", "attention_norm", "attention", "profile", "depth", "orthogonal")
MEASURED = {"exact", "literal, forward", "literal, forward and backward", "epochs", "orthogonality"}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A working directory of one small model, and benchmarks of few samples. Parts but for trainings run in this process."""

    def edit(raw):
        raw["run"]["variants"] = ["vit"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(synthetic.ROOT))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(results, "PRODUCTS", {256: 3})
    monkeypatch.setattr(step, "PEAK_SIZE", 256)
    for name, few in {"WIDTHS": [16], "METHODS": ["exact"], "BACKENDS": {}}.items():
        monkeypatch.setattr(attention, name, few)
    monkeypatch.setattr(orthogonal, "TOKENS", [7])
    for module in (orthogonal, orthogonal_speed):
        monkeypatch.setattr(module, "TRAINING_TOKENS", 7)
    for script in (attention, orthogonal, step):
        monkeypatch.setattr(script, "SAMPLE_SECONDS", 1e-9)
    synthetic.write_params(tmp_path, edit)
    shutil.rmtree("pipeline")  # that of the repository is everybody's
    write_mnist("data/sample", train=300, test=31)
    write_mnist("data/mnist", train=23, test=5)
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield tmp_path
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def called(monkeypatch):
    """The commands that were run, those in `failing` without success."""
    started, failing, run = [], [], subprocess.run

    def in_process(command, **options):
        if command[0] != sys.executable or "pipeline.train" in command:
            return run(command, **options)
        started.append(command[2])
        if "pytest" in command or command[2] in failing:
            return SimpleNamespace(returncode=int(command[2] in failing))
        importlib.import_module(command[2]).main(command[3:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", in_process)
    return SimpleNamespace(started=started, failing=failing)


def status() -> dict[str, str]:
    return {name: part["status"] for name, part in files.read_json("gpu_rehearsal/parts.json")["parts"].items()}


def test_all_of_it_and_elsewhere(called, project, monkeypatch, capsys):
    called.failing += ["pytest", "benchmarks.profile"]
    with pytest.raises(SystemExit):
        gpu.main(["--rehearse"])
    assert "error: tests, profile failed" in capsys.readouterr().err
    assert {*SCRIPTS, "tests", gpu.FIRST_RUNS, "complexity"} == status().keys()
    called.started.clear(), called.failing.clear()
    gpu.main(["--rehearse"])  # what failed, and nothing else
    assert called.started == ["pytest", "benchmarks.profile"] and set(status().values()) == {gpu.DONE}
    shown = capsys.readouterr().out
    (folder,) = Path("gpu_rehearsal/paper_outputs/benchmarks").iterdir()
    table = pd.read_csv(folder / "targets.csv").set_index("key")
    assert set(table.index[table["measured"].notna()]) == MEASURED and (table["verdict"] == "not measured").sum() == 8
    assert all(what in shown for what in table["what"])
    assert 0 < table.loc["orthogonality", "measured"] < 1e-4
    facts = files.read_json(folder / "targets.json")
    assert facts["environment"]["torch"] and facts["parts"]["step"]["seconds"] > 0
    assert {path.name for path in project.iterdir()} == {"params.yaml", "data", "gpu_rehearsal"}

    moved, other = project / "moved", project / "other"
    shutil.move("gpu_rehearsal", moved)
    other.mkdir()
    monkeypatch.chdir(other)
    shutil.copy(project / "params.yaml", other)
    shutil.copytree(project / "data", other / "data")
    gpu.main(["--import", str(moved)])
    assert "0 runs and 0 files" in (told := capsys.readouterr().out)
    assert f"{VIT} is not whole, or not of this code" in told and "benchmarks are of other parameters" in told
    shutil.copy(moved / "params.yaml", other)
    committed, known = [], [True]
    monkeypatch.setattr(fan_out, "commit", lambda done: committed.extend(done) or known[0])
    weights = moved / VIT.weights
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    gpu.main(["--import", str(moved)])
    assert "0 runs" in (told := capsys.readouterr().out) and f"{VIT} is not whole" in told and committed == []
    weights.write_bytes(whole)
    known[0] = False
    with pytest.raises(SystemExit):
        gpu.main(["--import", str(moved)])
    told = capsys.readouterr()
    assert "1 runs" in told.out and "DVC could not be told" in told.err and committed == [VIT]
    known[0] = True
    assert fan_out.missing(params.load()) == []
    gpu.main(["--import", str(moved)])
    assert f"{VIT} is not missing here" in capsys.readouterr().out
    assert (benchmarks.FOLDER / folder.name / "complexity/times.csv").exists()
    (finding,) = (each for each in studies.module("benchmarks").findings(None, {}, Lab()) if each.id.startswith("targets"))
    verdicts = {row[0]: row[-1] for row in finding.table.rows}
    assert verdicts == dict(zip(table["what"], table["verdict"], strict=True)) and "rehearsal" in finding.remark


class Lab:
    label = staticmethod(str)


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still but while a command is waited for that is cut off, however busy the machine is."""
    now, run = [0.0], subprocess.run

    def waited(command, timeout=None, **options):
        try:
            return run(command, timeout=timeout, **options)
        except subprocess.TimeoutExpired:
            now[0] += timeout + 0.01
            raise

    for module in (gpu, fan_out):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(subprocess, "run", waited)


@pytest.mark.usefixtures("clock")
def test_in_parts_that_end_in_time(monkeypatch, capsys):
    """A part that was cut off is begun again only with more time, so that what comes after it is done."""
    few = {"tests": ["-c", "import time; time.sleep(60)"], gpu.FIRST_RUNS: [], gpu.RUNS: []}
    monkeypatch.setattr(gpu, "parts", lambda *_: few)
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0)
    gpu.main(["--rehearse", "--minutes", "0.01"])
    assert status() == {"tests": gpu.CUT_OFF} and "Left: tests, first_runs, runs." in capsys.readouterr().out
    gpu.main(["--rehearse", "--minutes", "0.01"])
    assert "tests: cut off" not in capsys.readouterr().out and status()[gpu.FIRST_RUNS] == gpu.CUT_OFF
    assert not Path("gpu_rehearsal", VIT.weights).exists()
    few["tests"] = ["-c", "pass"]
    del few[gpu.FIRST_RUNS], few[gpu.RUNS]
    gpu.main(["--rehearse"])
    assert status()["tests"] == gpu.DONE


def test_what_changes_is_done_again():
    settings = params.load()
    command = ["-m", "benchmarks.step"]
    before = gpu.digest(command, settings)
    more_seeds = settings.model_copy(update={"run": settings.run.model_copy(update={"seeds": [5]})})
    deeper = settings.model_copy(update={"model": settings.model.model_copy(update={"depth": 7})})
    assert gpu.digest(command, more_seeds) == before != gpu.digest(command, deeper)
    assert len({before, gpu.digest(["-m", "benchmarks.profile"], settings), gpu.digest([*command, "x"], settings)}) == 3


def test_bad_folders_are_told(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files.write_json("real/parts.json", {"is_rehearsal": False, "parts": {}})
    for arguments, words in {
        (): "there is no CUDA device here",
        ("--import", "data"): "data was not made by",
        ("--rehearse", "--into", "real"): "real is no rehearsal: name another folder",
    }.items():
        with pytest.raises(SystemExit):
            gpu.main(list(arguments))
        assert words in capsys.readouterr().err


def test_targets_are_read_as_they_are_meant(tmp_path):
    for name, ratios in {
        "attention_bfloat16": [
            {"pass": "forward", "width": 64, "tokens": n, gpu.SDPA_RATIO: ratio}
            for n, ratio in ((512, 1.5), (1024, 0.9), (2048, 2.0), (4096, 4.0))
        ]
        + [{"pass": "forward", "width": 16, "tokens": 256, gpu.SDPA_RATIO: 9.0}],
        "step": {
            "initialised": {"over_vit": {"osa_exact": 9.0}, "straightforward_over_ours": {}},
            "trained": {
                "eager_over_ours": {"vit": 8.5},
                "over_vit": {"osa_exact": 1.2, "osa_ns": 1.6},
                "straightforward_over_ours": {"all models of the paper": 12.0},
            },
        },
    }.items():
        files.write_json(tmp_path / f"{name}.json", {"ratios": ratios})
    found = gpu.gather(tmp_path, heads=512)
    verdicts = {
        target.key: target.row(found.get(target.key, math.nan))["verdict"]
        for target in benchmarks.TARGETS
        if target.key in found or target.key == "qr"
    }
    assert found["crossover"] == 2048  # the smallest N from which it stays faster
    assert verdicts == {
        "graph": "goal is met",
        "exact": "must is met",
        "ns": "missed",
        "qr": "not measured",
        "all": "must is met",
        "crossover": "missed",
        "sdpa, 4096": "must is met",
    }


def test_ten_epochs_leave_the_capture_out():
    points = 2
    times = [0, 9000, *(9000 + 100 * i for i in range(1, 4))]  # milliseconds: 0.1 s a point but for the first
    made = {"environment": {"device_name": "GPU"}, "config": {"train": {"points_per_epoch": points}}}
    made |= {"variant": "vit", "timestamps": times}
    files.write_json("paper_outputs/runs/table_2/vit/0/record.json", made | {"resumptions": 0})
    files.write_json("paper_outputs/runs/table_2/vit/1/record.json", made | {"resumptions": 1, "timestamps": [0, 1, 10**6]})
    assert gpu.ten_epochs("GPU") == pytest.approx(10 * points * 0.1)
    assert math.isnan(gpu.ten_epochs("another GPU"))


def test_the_parts_are_commands_that_exist():
    settings = params.load()
    commands = gpu.parts(settings, is_rehearsal=False)
    assert [name for name, command in commands.items() if not command] == [gpu.FIRST_RUNS, gpu.RUNS]
    assert {path.split("/")[-1] for path in commands["tests"] if path.endswith(".py")} >= {"test_cuda_graph.py"}
    names = {attention.file_name(attention.parse(command[2:])) for command in commands.values() if attention_of(command)}
    assert names == {"attention", "attention_bfloat16", f"attention_{gpu.heads(settings)}_heads", "attention_norm_8"}


def attention_of(command: list[str]) -> bool:
    return command[1:2] == ["benchmarks.attention"]
