"""Checks installation, data and results, and suggests remedies: `make doctor`, or `python3 -m pipeline doctor`.

The command needs only Python, changes nothing, and exits with status 1 if `make reproduce` would fail.
"""

import contextlib
import importlib.metadata
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.tools import install, locks

LEAST_DISK = 2e9  # bytes that data, weights and DVC's copies take
Line = tuple[str, str, str, bool]  # subject, state, remedy ("" if all is well), and whether a problem stops `make reproduce`


def main() -> None:
    needed = []
    for check in CHECKS:
        for what, state, remedy, is_needed in guarded(check):
            mark = "ok" if not remedy else "NO" if is_needed else "--"
            print(f"{mark}  {what:<9} {state}{f': {remedy}' if remedy else ''}", flush=True)
            if mark == "NO":
                needed.append(what)
    print(f"\n`make reproduce` needs: {', '.join(needed)}." if needed else "\n`make reproduce` has all that it needs.")
    sys.exit(bool(needed))


def guarded(check: Callable[[], Iterator[Line]]) -> list[Line]:
    """Returns the lines of a check or, if the check raises an exception, one line with the exception."""
    what = check.__name__.rstrip("_")
    try:
        return list(check())
    except ImportError as error:
        return [(what, f"not checked, because {error.name or error} is not installed", "run `make setup`", False)]
    except Exception as error:  # noqa: BLE001  the other checks must still run
        return [(what, "cannot be checked", str(error).partition("\n")[0] or repr(error), True)]


def system() -> Iterator[Line]:
    fits = install.OLDEST <= sys.version_info[:2] <= install.NEWEST
    fitting = "{}.{} to {}.{}".format(*install.OLDEST, *install.NEWEST)
    remedy = "" if fits else f"install Python {fitting}, then run, for example, `make setup PYTHON=python3.12`"
    yield "Python", f"{sys.version.split()[0]} at {sys.executable}", remedy, True
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)$", Path("requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    present = {}
    for name, _ in pins:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            present[name] = importlib.metadata.version(name)
    other = [name for name, pin in pins if present.get(name, "").partition("+")[0] != pin]
    remedy = f"run `make setup`, and put .venv/bin first on PATH; not as pinned: {', '.join(other[:3])}" if other else ""
    is_needed = not {"dvc", "torch", "pydantic"} <= present.keys()
    yield "packages", f"{len(pins) - len(other)} of {len(pins)} as pinned", remedy, is_needed
    free = shutil.disk_usage(".").free
    remedy = "" if free > LEAST_DISK else f"free up disk space: at least {LEAST_DISK / 1e9:g} GB must be free"
    yield "disk", f"{free / 1e9:.1f} GB free", remedy, True


def dvc() -> Iterator[Line]:
    text = Path("dvc.lock").read_text(encoding="utf-8") if Path("dvc.lock").exists() else ""
    is_torn = re.search("^(<{7}|>{7})", text, re.MULTILINE)
    yield "dvc.lock", "in conflict" if is_torn else "intact", "run `git checkout HEAD dvc.lock`" if is_torn else "", True
    held = locks.held()
    remedy = "wait until they are released, or run `dvc --wait-for-lock repro`" if held else ""
    yield "locks", f"held: {', '.join(held)}" if held else "free", remedy, True
    if not held and locks.claims() is None:
        yield "rwlock", locks.DAMAGED, locks.REMEDY, True


def torch() -> Iterator[Line]:
    import torch

    build = f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'for CPUs'}"
    is_unused = shutil.which("nvidia-smi") and not torch.cuda.is_available()
    remedy = "it cannot use the GPU: move .venv away, then run `make setup TORCH=cuda`" if is_unused else ""
    yield "torch", f"{build}; {torch.cuda.device_count()} GPUs", remedy, False


def data() -> Iterator[Line]:
    from pipeline.config import params
    from pipeline.data import idx

    source = params.load().data.source
    if idx.folder(source).exists():
        idx.data_digest(idx.folder(source))  # raises an error if a file is damaged
        yield "data", f"{source}, intact", "", True
    else:
        mirror = f"; set OSA_{source.upper()}_MIRROR=/path/to/folder to fetch it from a local copy"
        copy = "" if source == params.USER_FOLDER else mirror
        yield "data", f"{source}, which params.yaml names, is not here", f"`make reproduce` fetches it{copy}", False


def runs() -> Iterator[Line]:
    from pipeline.config import params
    from pipeline.tools.jobs import table_2_jobs

    jobs = table_2_jobs(params.load())
    weights = sum(run.weights.exists() for run, _ in jobs)
    remedy = "run `git checkout paper_outputs/weights` if git has them, or `make reproduce`" if weights < len(jobs) else ""
    yield "weights", f"{weights} of {len(jobs)} runs of Table 2 have weights here", remedy, False
    current = sum(run.is_current(config) for run, config in jobs)
    remedy = "run `make plan` to see why, and `make reproduce` to train the others" if current < len(jobs) else ""
    yield "records", f"{current} of {len(jobs)} match the current numerics and parameters", remedy, False


CHECKS = (system, dvc, torch, data, runs)


if __name__ == "__main__":
    main()
