"""Finds other DVC and pipeline processes that are running in this folder. Needs only Python's standard library."""

import contextlib
import fcntl
import json
import os
import re
from pathlib import Path

from pipeline.core.files import is_alive

FAN_OUT, TRY, DVC = Path(".checkpoints/fan_out.lock"), Path(".checkpoints/try.lock"), Path(".dvc/tmp/lock")
WRITERS = {"check", "fetch", "train", "evaluate", "tables", "study", "report", "fan_out", "try", "tries"}
RWLOCK = Path(".dvc/tmp/rwlock")  # DVC's list of the paths that its processes read and write
DAMAGED = f"{RWLOCK} is empty or damaged, probably because a process was killed"  # message if `claims` returns None
REMEDY = f"run `rm {RWLOCK}`"  # remedy if RWLOCK is damaged


def held() -> list[str]:
    """Returns the paths of locks that other processes hold, and descriptions of other running DVC processes."""
    return [str(path) for path in (DVC, FAN_OUT, TRY) if _is_held(path)] + dvc_processes()


def _is_held(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def claims() -> dict | None:
    """Returns the content of RWLOCK, or None if a killed process has left the file damaged."""
    try:
        content = json.loads(RWLOCK.read_text(encoding="utf-8")) if RWLOCK.exists() else {}
        return content if isinstance(content, dict) else None
    except ValueError:
        return None


def dvc_processes() -> list[str]:
    """Returns a description, such as "`dvc repro` (process 12)", of every other running DVC process that RWLOCK lists."""
    known = claims() or {}
    listed = list(known.get("write", {}).values())
    for readers in known.get("read", {}).values():
        listed += readers
    alive = {claim["pid"]: claim["cmd"] for claim in listed if claim["pid"] != os.getpid() and is_alive(claim["pid"])}
    return [f"`{command}` (process {pid})" for pid, command in sorted(alive.items())]


def stages() -> list[str]:
    """Describes each running pipeline command that writes results in this folder, as in "`train osa_qr 0` (process 12)".

    Also finds a stage that has outlived its `dvc repro` and therefore holds no lock. Returns [] on systems without /proc.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            is_here = "python" in words[0] and os.path.samefile(path / "cwd", ".")
            command = re.search(r" -m pipeline[ .](?:\w+\.)?((\w+).*)", " ".join(words).rstrip())
            if is_here and command and command[2] in WRITERS:
                found.append(f"`{command[1]}` (process {path.name})")
    return found
