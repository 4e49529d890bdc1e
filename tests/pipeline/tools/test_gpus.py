"""As many trainings share a GPU as fit there, where MPS runs; where it does not, a line says how to start it."""

import os
from pathlib import Path

import pytest
import torch

from pipeline.config import params
from pipeline.tools import fan_out, gpus
from pipeline.training.run import Run
from tests.pipeline.trainings import write_params


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two GPUs with 20 and 30 GB free, 16 cores, and MPS, which one can start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script(gpus.CONTROL, 'read command; test "$command" = get_server_list && test -e daemon')
    script("nvidia-smi", 'echo "$@" >asked; printf "20000\\n30000\\n"')
    write_params()
    return [(Run("vit", seed), params.resolve(params.load(), "vit")) for seed in range(30)]


def script(name: str, text: str) -> None:
    Path(name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    Path(name).chmod(0o755)


def test_under_mps_as_many_as_memory_takes_share_a_gpu(machine, monkeypatch, capsys):
    assert fan_out.at_once(machine, None) == 2
    said = capsys.readouterr().err
    assert "`nvidia-cuda-mps-control -d`" in said and "under which 16 share one" in said and said.count("\n") == 1
    Path("daemon").touch()
    assert fan_out.at_once(machine, None) == 2 * 16  # a core each
    deep = params.resolve(params.load(), "vit", {"model": {"depth": 144, "embed_dim": 192}, "train": {"batch_size": 128}})
    fit = 20000 * 2**20 // gpus.need(deep)
    assert 1 < fit < 16 and fan_out.at_once([*machine, (Run("vit", 0), deep)], None) == 2 * fit
    assert fan_out.at_once(machine, 3) == 6 and capsys.readouterr().err == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-8a")
    assert gpus.free_bytes() == 20000 * 2**20 and "--id=1,GPU-8a" in Path("asked").read_text(encoding="utf-8")
    script("nvidia-smi", "exit 9")
    assert fan_out.at_once(machine, None) == 2 and fan_out.at_once([], None) == 2


def test_nothing_is_advised_that_cannot_be_done(machine, capsys):
    Path(gpus.CONTROL).unlink()
    assert fan_out.at_once(machine, None) == 2 and not gpus.has_mps()
    assert capsys.readouterr().err == ""


def test_where_the_system_tells_no_affinity_all_cores_train(machine, monkeypatch):
    """As on macOS."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert fan_out.at_once(machine, None) == 16
    monkeypatch.delattr(os, "sched_getaffinity")
    assert fan_out.at_once(machine, None) == os.cpu_count()
