"""Describes the provenance of results: the machine, the versions of packages, and the commit of the code."""

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
    import torch  # slow to import, and not needed to read records

MAKES_NUMBERS = ("osa", "pipeline", "params.yaml", "dvc.yaml", "requirements.txt", ":(exclude)*.lock")
WORDLESS = ("AMD", "Intel", "NVIDIA", "Processor", "80GB", "HBM3")  # words omitted from a short name


def describe_environment(device: torch.device) -> dict:
    """Returns the fields of `records.Environment` for this process."""
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
    """Labels a machine: "AMD EPYC, 2 threads" for a CPU, the name alone for a GPU."""
    name, threads = environment["device_name"], environment["num_threads"]
    if threads is None or environment.get("device") == "cuda":
        return name
    return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}"


def short_name(environment: dict) -> str:
    """Labels a machine briefly, for the heading of a column: "EPYC, 1 thread"."""
    words = environment["device_name"].replace("(R)", "").split()
    return machine(environment | {"device_name": " ".join(word for word in words if word not in WORDLESS)})


def describe_commit() -> dict:
    """Returns the current commit, and whether a file that affects results differs from this commit.

    Both values are None if git is missing, or ROOT is not the root of a git repository.
    """
    top = git.ask("rev-parse", "--show-toplevel", folder=ROOT)
    if top is None or Path(top).resolve() != ROOT:
        return {"git_commit": None, "git_dirty": None}
    changed = git.ask("status", "--porcelain", "--", *MAKES_NUMBERS, folder=ROOT)
    return {"git_commit": git.ask("rev-parse", "HEAD", folder=ROOT), "git_dirty": bool(changed)}


def committed(path: Path) -> str | None:
    """Returns the text of a file in the last commit, or None if the commit lacks the file or git fails."""
    path = path.resolve()
    if not path.is_relative_to(ROOT):
        return None
    return git.ask("cat-file", "blob", f"HEAD:./{path.relative_to(ROOT).as_posix()}", folder=ROOT)


def process_seconds() -> float:
    """Returns the seconds since this process started. On a system without /proc, returns the process's CPU time."""
    try:
        # proc(5): the field `starttime` holds the clock ticks from boot to the start of this process.
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def default_device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return _cpu_name()
    import torch

    return torch.cuda.get_device_name(device)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
