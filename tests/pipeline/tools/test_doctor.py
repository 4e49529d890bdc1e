"""The doctor names what is missing and what helps, with nothing installed too."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from pipeline.core import files
from pipeline.core.files import ROOT
from pipeline.tools import doctor, locks
from tests.pipeline.trainings import trained, write_data, write_params


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_params(run={"variants": ["vit"], "seeds": [0]})
    shutil.copy(ROOT / "requirements.txt", tmp_path)


def remedies(check) -> dict[str, str]:
    return {what: remedy for what, _, remedy, _ in doctor.guarded(check)}


def test_it_needs_python_alone_and_its_status_says_what_is_missing(monkeypatch, capsys):
    done = subprocess.run([sys.executable, "-S", "-m", "pipeline.tools.doctor"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"^NO  packages  0 of \d+ as pinned: run `make setup`", done.stdout, re.MULTILINE)
    assert "packages" in done.stdout.splitlines()[-1]
    for is_needed in (False, True):
        monkeypatch.setattr(doctor, "CHECKS", [lambda needed=is_needed: [("thing", "gone", "buy one", needed)]])
        with pytest.raises(SystemExit) as caught:
            doctor.main()
        assert caught.value.code == is_needed and f"{'NO' if is_needed else '--'}  thing" in capsys.readouterr().out


@pytest.mark.parametrize("version, fits", [((3, 10), False), ((3, 11), True), ((3, 14), True), ((3, 15), False)])
def test_which_pythons_fit(monkeypatch, version, fits):
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    assert ("3.11 to 3.14" not in remedies(doctor.system)["Python"]) == fits


def test_data_and_runs(monkeypatch):
    assert "OSA_MNIST_MIRROR" in remedies(doctor.data)["data"] and all(remedies(doctor.runs).values())
    write_data()
    run = trained("vit")
    assert not remedies(doctor.data)["data"] and not any(remedies(doctor.runs).values())
    run.weights.unlink(), Path("data/mnist/t10k-labels-idx1-ubyte.gz").unlink()
    assert remedies(doctor.runs)["weights"] and "pipeline fetch mnist" in remedies(doctor.data)["data"]
    write_params(run={"variants": ["vit"], "seeds": [0]}, train={"eps": 1e-7})
    assert remedies(doctor.runs)["records"]
    Path("params.yaml").write_text("run: [", encoding="utf-8")
    ((_, _, why, is_needed),) = doctor.guarded(doctor.data)
    assert "params.yaml" in why and is_needed


def test_locks_and_stores(monkeypatch):
    Path("dvc.lock").write_text("<<<<<<< HEAD\n", encoding="utf-8")
    assert remedies(doctor.dvc) == {"dvc.lock": "run `git checkout HEAD dvc.lock`", "locks": ""}
    claims = {"write": {"/x": {"pid": 999999999, "cmd": "dvc repro"}}, "read": {"/y": [{"pid": os.getppid(), "cmd": "dvc"}]}}
    files.write_json(locks.RWLOCK, claims)
    assert locks.dvc_processes() == [f"`dvc` (process {os.getppid()})"] and "wait" in remedies(doctor.dvc)["locks"]
    for torn in ("", '{"write": ', "[]"):  # as a kill leaves it
        locks.RWLOCK.write_text(torn, encoding="utf-8")
        assert locks.dvc_processes() == [] and remedies(doctor.dvc)["rwlock"] == f"run `rm {locks.RWLOCK}`"
        with FileLock(".dvc/tmp/lock"):
            assert remedies(doctor.dvc).keys() == {"dvc.lock", "locks"}  # a process that writes it now
