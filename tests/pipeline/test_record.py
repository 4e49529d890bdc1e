"""What a run was made with, and the key of its checkpoints."""

import subprocess

import torch

from pipeline.core import record
from pipeline.runs import Run
from pipeline.training.recorder import Recorder
from tests.pipeline.synthetic import ROOT
from tests.pipeline.trainings import CPU, training, write_data, write_params


def test_the_key_of_a_run_depends_on_what_can_change_its_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_params()
    write_data()

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
    with monkeypatch.context() as patch:
        patch.setattr(record, "NUMERICS", record.NUMERICS + 1)
        others.add(key())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "1.0")
        others.add(key())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 7)
        others.add(key())
    assert len(others | {first}) == 8
    assert key() == first


def test_the_key_of_a_run_knows_the_devices_name(monkeypatch):
    keys = set()
    for name in ("NVIDIA H100", "NVIDIA A100"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        keys.add(record.run_key({}, 0, "data", torch.device("cuda")))
    for name in ("Intel", "AMD"):
        monkeypatch.setattr(record, "_cpu_name", lambda name=name: name)
        keys.add(record.run_key({}, 0, "data", CPU))
    assert len(keys) == 4


def test_the_environment_tells_where_a_run_was_made():
    found = record.describe_environment(CPU)
    assert (found["device"], found["num_threads"], found["torch"]) == ("cpu", 1, torch.__version__)
    assert found["device_name"]
    commit = record.describe_commit()
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    assert commit["git_commit"] == head and isinstance(commit["git_dirty"], bool)


def test_without_a_repository_of_its_own_there_is_no_commit(tmp_path, monkeypatch):
    unknown = {"git_commit": None, "git_dirty": None}
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.describe_commit() == unknown
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(record, "ROOT", tmp_path / "unpacked")
    record.ROOT.mkdir()
    assert record.describe_commit() == unknown


def test_git_as_a_shell_has_it_set_up_is_not_asked(tmp_path, monkeypatch):
    before = record.describe_commit()
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert record.describe_commit() == before
