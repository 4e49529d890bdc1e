"""Who else works in this folder: processes of DVC, and a fan_out. Needs Python alone."""

import contextlib
import fcntl
import json
import os
from pathlib import Path

FAN_OUT, DVC = Path(".checkpoints/fan_out.lock"), Path(".dvc/tmp/lock")
RWLOCK = Path(".dvc/tmp/rwlock")  # the paths that processes of DVC read and write


def held() -> list[str]:
    """The locks that a process holds, and the processes of DVC."""
    return [str(path) for path in (DVC, FAN_OUT) if _is_held(path)] + dvc_processes()


def _is_held(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def claims() -> dict | None:
    """What processes of DVC read and write; None where the file is torn, as a killed process leaves it."""
    try:
        content = json.loads(RWLOCK.read_text(encoding="utf-8")) if RWLOCK.exists() else {}
        return content if isinstance(content, dict) else None
    except ValueError:
        return None


def dvc_processes() -> list[str]:
    """The processes of DVC that work here, as in `dvc repro` (process 12). DVC itself forgets those that are dead."""
    known = claims() or {}
    each = [*known.get("write", {}).values(), *(claim for listed in known.get("read", {}).values() for claim in listed)]
    alive = {claim["pid"]: claim["cmd"] for claim in each if claim["pid"] != os.getpid() and _is_alive(claim["pid"])}
    return [f"`{command}` (process {pid})" for pid, command in sorted(alive.items())]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
