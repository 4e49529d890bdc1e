"""Provenance of a run, and the key of its checkpoints."""

import subprocess
import time

import torch

from pipeline.core import provenance
from pipeline.training import recorder
from pipeline.training.recorder import Recorder
from pipeline.training.run import Run
from tests.pipeline.synthetic import ROOT
from tests.pipeline.trainings import CPU, training, write_data, write_params

CHANGES = (
    (recorder, "NUMERICS", recorder.NUMERICS + 1),
    (torch, "__version__", "1.0"),
    (torch, "get_num_threads", lambda: 7),
)


def test_the_key_of_a_run_depends_on_what_can_change_its_numbers(project, monkeypatch):
    def key(variant="osa_exact", seed=0):
        return Recorder(Run(variant, seed), training(variant, seed)).run_key

    first = key()
    write_params(variants={"vit": {"skip": False}}, labels={"vit": "another"}, run={"seeds": [5]})
    assert key() == first
    others = {key(seed=1), key("osa_qr")}
    write_params(train={"eps": 1e-7})
    others.add(key())
    write_params()
    write_data(seed=4)
    others.add(key())
    write_data()
    for place, name, value in CHANGES:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            others.add(key())
    assert len(others | {first}) == 8
    assert key() == first


def test_the_key_of_a_run_knows_the_devices_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    monkeypatch.setattr(provenance, "_cpu_name", lambda: next(names))
    names, devices = iter(("NVIDIA H100", "NVIDIA A100", "Intel", "AMD")), (torch.device("cuda"), CPU)
    assert len({recorder.run_key({}, 0, "data", device) for device in devices for _ in range(2)}) == 4


def test_the_environment_tells_where_a_run_was_made(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path))  # as a shell may have git set up
    found = provenance.describe_environment(CPU)
    assert (found["device"], found["num_threads"], found["torch"]) == ("cpu", 1, torch.__version__)
    assert found["device_name"]
    commit = provenance.describe_commit()
    monkeypatch.delenv("GIT_DIR")
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    assert commit["git_commit"] == head and isinstance(commit["git_dirty"], bool)


def test_without_a_repository_of_its_own_there_is_no_commit(tmp_path, monkeypatch):
    unknown = {"git_commit": None, "git_dirty": None}
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.describe_commit() == unknown
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "unpacked")
    provenance.ROOT.mkdir()
    assert provenance.describe_commit() == unknown


def test_a_lock_of_dvc_makes_no_run_dirty_and_code_does(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    lock, code = tmp_path / "pipeline/studies/dvc.lock", tmp_path / "pipeline/code.py"
    lock.parent.mkdir(parents=True)
    lock.write_text("a: 1", encoding="utf-8"), code.write_text("A = 1", encoding="utf-8")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    lock.write_text("a: 2", encoding="utf-8")  # as `fan_out` leaves it after each training
    assert provenance.describe_commit()["git_dirty"] is False
    code.write_text("A = 2", encoding="utf-8")
    assert provenance.describe_commit()["git_dirty"] is True


def test_new_code_makes_a_run_dirty_whatever_git_status_shows_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    (tmp_path / "osa").mkdir()
    (tmp_path / "osa/old.py").write_text("A = 1", encoding="utf-8")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    settings = ["config", "status.showUntrackedFiles", "no"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "all"], settings):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert provenance.describe_commit()["git_dirty"] is False
    (tmp_path / "osa/new.py").write_text("A = 2", encoding="utf-8")
    assert provenance.describe_commit()["git_dirty"] is True


def test_a_process_knows_for_how_long_it_has_run(monkeypatch):
    before = provenance.process_seconds()
    assert 0 < before <= provenance.process_seconds() < before + 60
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert 0 < provenance.process_seconds() < before + 60
