"""What knows a run: the digest of the code that can change its numbers, and the key of its checkpoints."""

import subprocess

import pytest
import torch

from pipeline import sources
from pipeline.core import record
from pipeline.runs import Recorder, Run
from tests.pipeline.synthetic import ROOT
from tests.pipeline.trainings import CPU, training, write_data, write_params

CODE = record.code_files()


def test_dvc_tracks_every_file_that_training_imports():
    """The one list of them, in dvc.yaml, cannot be forgotten."""
    assert set(CODE) == sources.imported_files("pipeline.training.loop")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the code, which is taken for that of the repository."""
    for path in subprocess.check_output(["find", "osa", "pipeline", "-name", "*.py"], cwd=ROOT, text=True).split():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    before = record.code_sha256()
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.code_sha256() == before
    return tmp_path


@pytest.mark.parametrize("path", CODE)
def test_an_edit_of_what_training_is_made_of_changes_the_digest(tree, path):
    before = record.code_sha256()
    (tree / path).write_text((tree / path).read_text() + "\n")
    assert record.code_sha256() != before


def test_the_kernels_count_on_cuda_alone(tree):
    before = {device: record.code_sha256(device) for device in ("cpu", "cuda")}
    made = {device: {"code_sha256": before[device], "environment": {"device": device}} for device in before}
    assert len(set(before.values())) == 2 and all(map(record.is_of_today, made.values()))
    (tree / "osa/kernels.py").write_text("raise NotImplementedError\n")
    assert record.is_of_today(made["cpu"]) and not record.is_of_today(made["cuda"])


def test_an_edit_of_a_progress_bar_an_option_or_of_tracking_does_not(tree):
    """The whole of these files, and of all others that training is not made of."""
    before = record.code_sha256()
    others = {str(path.relative_to(tree)) for path in tree.rglob("*.py")} - set(CODE)
    assert others > {"pipeline/runs.py", "pipeline/train.py", "pipeline/tracking/watcher.py", "pipeline/core/params.py"}
    for path in others:
        (tree / path).write_text("raise NotImplementedError\n")
    assert record.code_sha256() == before


def test_digests_of_a_record_are_those_of_its_training_and_of_its_replays():
    assert record.made_by({"code_sha256": "a"}) == {"a"}
    assert record.made_by({"code_sha256": "a", "replays": [{"code_sha256": "b"}, {"code_sha256": "c"}]}) == {"a", "b", "c"}


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
        patch.setattr(record, "imported_code_sha256", lambda *_: "0" * 64)
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
        keys.add(record.run_key({}, 0, "data", "code", torch.device("cuda")))
    for name in ("Intel", "AMD"):
        monkeypatch.setattr(record, "_cpu_name", lambda name=name: name)
        keys.add(record.run_key({}, 0, "data", "code", CPU))
    assert len(keys) == 4


def test_the_environment_tells_where_a_run_was_made():
    found = record.describe_environment(CPU)
    assert (found["device"], found["num_threads"], found["torch"]) == ("cpu", 1, torch.__version__)
    assert found["device_name"]
    commit = record.describe_commit()
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    assert commit["git_commit"] == head and isinstance(commit["git_dirty"], bool)


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.describe_commit() == {"git_commit": None, "git_dirty": None}
