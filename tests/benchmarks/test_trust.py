"""Campaigns count what is survived and what is not, and the report shows it."""

import contextlib
import json
from pathlib import Path
from unittest import mock

import pytest

from pipeline import fetch, runs
from pipeline.benchmarks import trust
from pipeline.core import params
from pipeline.core.files import ROOT
from pipeline.report.numbers import grouped
from pipeline.studies import FAILS, NOT_EVALUATED, PASSES
from pipeline.studies.paper import trust as study
from tests.pipeline.mnist_files import write_mnist
from tests.pipeline.studies.conftest import lab, small_project  # noqa: F401  fixtures


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A working directory to write to, and digits that are there at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "write_sample", lambda folder: write_mnist(folder, train=130, test=30))
    monkeypatch.setitem(trust.TINY["train"], "batch_size", 13)
    monkeypatch.setitem(trust.LIMITS, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setitem(trust.LIMITS, "DEADLINE_SECONDS", 0.2)
    download = fetch._download

    def patient(url, *arguments):
        """An honest answer may take its time on a busy machine."""
        *_, about, name = url.split("/")
        is_honest = about not in name or "/honest/" in url
        limits = {"TIMEOUT_SECONDS": 60, "DEADLINE_SECONDS": 60} if is_honest else {}
        with mock.patch.multiple(fetch, **limits) if limits else contextlib.nullcontext():
            return download(url, *arguments)

    monkeypatch.setattr(fetch, "_download", patient)


def campaign(name: str, trials: int) -> dict:
    trust.main([name, "--trials", str(trials), "--seed", "3"])
    return json.loads(Path(study.FOLDER, f"{name}.json").read_text())


@pytest.mark.parametrize(
    "name, trials", {"kills": 1, "twice": 1, "flips": 2, "disk": 2, "mutations": 20, "mirrors": 30}.items()
)
def test_every_trial_is_survived(name, trials):
    counted = campaign(name, trials)
    if any("mounted" in failure for failure in counted["failures"]):
        pytest.skip("needs the right to mount")
    assert counted["failures"] == [] and counted["survived"] == counted["trials"] == sum(counted["ends"].values()) == trials
    assert counted["command"] == f"python -m pipeline.benchmarks.trust {name} --trials {trials} --seed 3"


def test_what_goes_unnoticed_is_counted(monkeypatch):
    monkeypatch.setattr(runs.files, "sha256", lambda path: "any")
    monkeypatch.setattr(runs.Run, "is_there", lambda self: True)
    monkeypatch.setattr(runs.Run, "load_model", lambda self, config: None)
    counted = campaign("flips", 1)
    assert (counted["survived"], counted["trials"], len(counted["failures"])) == (0, 1, 1)


def test_a_mirror_that_is_believed_is_counted(monkeypatch):
    monkeypatch.setattr(fetch, "_fault", lambda content, expected: None)
    assert campaign("mirrors", 2)["survived"] < 2


def test_values_are_taken_as_they_stand():
    raw = {"a": [1, {"b": 0.5}], "study": False}
    assert trust.echoes(raw, {"a": [1, {"b": 0.5, "c": None}], "d": 1})
    for other in ({"a": [True, {"b": 0.5}]}, {"a": [1]}, {"a": [1, {}]}, {}):
        assert not trust.echoes(raw, other)
    settings = params.load(ROOT / "params.yaml").model_dump()
    assert trust.echoes(params.read(ROOT / "params.yaml"), settings)


def test_the_report_passes_what_was_survived_throughout(lab):  # noqa: F811
    assert study.findings(None, {}, lab) == []
    environment = {"device_name": "CPU", "num_threads": 1, "torch": "2.11", "git_commit": "c0ffee" * 6}
    for name in study.CAMPAIGNS:
        counted = {"trials": 1200, "survived": 1200, "ends": {"refused": 1200}, "environment": environment}
        trust.files.write_json(study.FOLDER / f"{name}.json", counted)
    (finding,) = study.findings(None, {}, lab)
    assert finding.verdict == PASSES and "CPU, 1 thread, PyTorch 2.11, at commit c0ffeec0ff." in finding.remark
    assert finding.table.rows[0][1:] == [
        f"{grouped(1200)} of {grouped(1200)}",
        "the same bits as undisturbed",
        "1200 × refused",
    ]
    trust.files.write_json(study.FOLDER / "kills.json", counted | {"survived": 1199})
    (finding,) = study.findings(None, {}, lab)
    assert finding.verdict == FAILS and finding.measures[0].value == 1
    Path(study.FOLDER, "kills.json").unlink()
    (finding,) = study.findings(None, {}, lab)
    assert finding.verdict == NOT_EVALUATED
