"""Tells who else works in this folder: processes of DVC and of the pipeline. Needs Python alone."""

import contextlib
import fcntl
import json
import os
import re
from pathlib import Path

FAN_OUT, TRY, DVC = Path(".checkpoints/fan_out.lock"), Path(".checkpoints/try.lock"), Path(".dvc/tmp/lock")
WRITERS = {"check", "fetch", "train", "evaluate", "tables", "study", "report", "fan_out", "try", "tries"}
RWLOCK = Path(".dvc/tmp/rwlock")  # the paths that processes of DVC read and write


def held() -> list[str]:
    """The locks that a process holds, and the processes of DVC."""
    return [str(path) for path in (DVC, FAN_OUT, TRY) if _is_held(path)] + dvc_processes()


def _is_held(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def claims() -> dict | None:
    """Paths that processes of DVC read and write; None where the file is torn, as a killed process leaves it."""
    try:
        content = json.loads(RWLOCK.read_text(encoding="utf-8")) if RWLOCK.exists() else {}
        return content if isinstance(content, dict) else None
    except ValueError:
        return None


def dvc_processes() -> list[str]:
    """The processes of DVC that work here, as in `dvc repro` (process 12). DVC itself forgets those that are dead."""
    known = claims() or {}
    listed = list(known.get("write", {}).values())
    for readers in known.get("read", {}).values():
        listed += readers
    alive = {claim["pid"]: claim["cmd"] for claim in listed if claim["pid"] != os.getpid() and _is_alive(claim["pid"])}
    return [f"`{command}` (process {pid})" for pid, command in sorted(alive.items())]


def stages() -> list[str]:
    """The commands of the pipeline that work here and write results, as in `train osa_qr 0` (process 12).

    A stage may outlive the `dvc repro` that began it, and then holds no lock. Where the system has no /proc, none is found.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            is_here = "python" in words[0] and os.path.samefile(path / "cwd", ".")
            command = re.search(r" -m pipeline[ .](?:\w+\.)?((\w+).*)", " ".join(words).rstrip())
            if is_here and command and command[2] in WRITERS:
                found.append(f"`{command[1]}` (process {path.name})")
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
