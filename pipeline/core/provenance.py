"""Provenance of numbers: the machine, its versions, and the commit of the code."""

from __future__ import annotations

import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core import git
from pipeline.core.files import ROOT

if TYPE_CHECKING:
    import torch  # slow to import, and who reads records needs none

MAKES_NUMBERS = ("osa", "pipeline", "params.yaml", "dvc.yaml", "requirements.txt", ":(exclude)*.lock")


def describe_environment(device: torch.device) -> dict:
    """Device, threads, platform and versions, as records keep them."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "device_name": device_name(device),
        "num_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def machine(environment: dict) -> str:
    """Short label of a machine, e.g. "AMD EPYC, 2 threads". A GPU's has no number of threads."""
    if environment["device"] == "cuda":
        return environment["device_name"]
    threads = environment["num_threads"]
    return f"{environment['device_name']}, {threads} {'thread' if threads == 1 else 'threads'}"


def describe_commit() -> dict:
    """The commit, and whether anything that could have changed a run's numbers differs from it. None without git, and where
    the folder lies in the repository of something else."""
    top = git.ask("rev-parse", "--show-toplevel", folder=ROOT)
    if top is None or Path(top).resolve() != ROOT:
        return {"git_commit": None, "git_dirty": None}
    changed = git.ask("status", "--porcelain", "--", *MAKES_NUMBERS, folder=ROOT)
    return {"git_commit": git.ask("rev-parse", "HEAD", folder=ROOT), "git_dirty": bool(changed)}


def committed(path: Path) -> str | None:
    """A text file as the last commit has it; None where that has none, without git, and outside this repository."""
    path = path.resolve()
    if not path.is_relative_to(ROOT):
        return None
    return git.ask("cat-file", "blob", f"HEAD:./{path.relative_to(ROOT).as_posix()}", folder=ROOT)


def process_seconds() -> float:
    """The time since this process began; where the system does not tell, the time of the CPU that it has taken."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])  # proc(5): starttime
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def default_device() -> torch.device:
    """CUDA if there is a device, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
    if device.type != "cuda":
        return _cpu_name()
    import torch

    return torch.cuda.get_device_name(device)


def _cpu_name() -> str:
    """The processor's name: Linux tells it in /proc/cpuinfo, elsewhere Python knows as much as there is to know."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
