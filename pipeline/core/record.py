"""What made a run: its code, its environment, and the key that knows it. The numbers themselves are made in training/."""

import functools
import hashlib
import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch
from ruamel.yaml import YAML

from pipeline.core import files
from pipeline.core.files import ROOT

CUDA_ONLY = ("osa/kernels.py",)  # makes numbers there alone: among the stage's files, its tuning would void runs of CPUs


@functools.cache
def code_files() -> tuple[str, ...]:
    """The files that can change a number of a training: those that dvc.yaml's stage `train` depends on."""
    stages = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return tuple(path for path in stages["train"]["deps"] if path.endswith(".py"))


def code_sha256(device: str = "cpu") -> str:
    """One digest over `code_files` as they are now, and on CUDA over its own."""
    paths = code_files() + CUDA_ONLY * (device == "cuda")
    return hashlib.sha256("".join(files.sha256(ROOT / path) for path in paths).encode()).hexdigest()


@functools.cache
def imported_code_sha256(device: str) -> str:
    """`code_sha256` as it was when this was first asked for: an edit changes no code that a process has imported."""
    return code_sha256(device)


def run_key(config: dict, seed: int, data_sha256: str, code: str, device: torch.device) -> str:
    """What a checkpoint belongs to: configuration, seed, data, code, and the machine as far as bits hang on it."""
    machine = [_device_name(device), torch.get_num_threads(), torch.__version__]
    identity = [config, seed, data_sha256, code, *machine]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def made_by(record: dict) -> set[str]:
    """The digests of the code that trained a run, and of those that replays have seen begin it with the same bits."""
    return {record["code_sha256"], *(replay["code_sha256"] for replay in record.get("replays", []))}


def is_of_today(record: dict) -> bool:
    """Whether today's code is known to give a run's numbers, on the device that it was trained on."""
    return code_sha256(record["environment"]["device"]) in made_by(record)


def describe_environment(device: torch.device) -> dict:
    """Device, threads, platform and versions, as records keep them."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "device_name": _device_name(device),
        "num_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def machine(environment: dict) -> str:
    """What was described, for a reader: e.g. AMD EPYC, 2 threads."""
    threads = environment["num_threads"]
    return f"{environment['device_name']}, {threads} {'thread' if threads == 1 else 'threads'}"


def describe_commit() -> dict:
    """The commit, and whether anything that it could have changed in a run differs from it; None without git."""
    dirty = _git("status", "--porcelain", "--", "osa", "pipeline", "params.yaml", "dvc.yaml", "requirements.txt")
    return {"git_commit": _git("rev-parse", "HEAD"), "git_dirty": None if dirty is None else bool(dirty)}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def default_device() -> torch.device:
    """CUDA if there is a device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    """The processor's name: Linux tells it in /proc/cpuinfo, elsewhere Python knows as much as there is to know."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "--no-optional-locks", *arguments]  # a training must not get in the way of a commit
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
