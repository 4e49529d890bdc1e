"""What is there and what is missing, each with its remedy, on one screen: `make doctor`, or `python3 -m pipeline.tools.doctor`.

It needs Python alone, changes nothing, and ends with status 1 if something is missing that `make reproduce` needs.
"""

import contextlib
import fcntl
import importlib.metadata
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PYTHONS = ((3, 11), (3, 12))
LEAST_DISK, LEAST_MEMORY = 2e9, 2e9  # bytes: for data, weights and DVC's copies of both; for two trainings
NEEDED = {"dvc", "filelock", "jinja2", "matplotlib", "numpy", "pandas", "pydantic", "ruamel-yaml", "scipy", "torch", "tqdm"}
LOCKS = (".dvc/tmp/lock", ".checkpoints/fan_out.lock")
SHOWN = 3  # packages that are named
WIDTH = 9
LAST_PORT = 65535


class Line(NamedTuple):
    """One thing, and how it is found; what is missing has a remedy."""

    what: str
    found: str
    remedy: str = ""
    is_needed: bool = False  # by `make reproduce`

    def __str__(self) -> str:
        mark = "ok" if not self.remedy else "NO" if self.is_needed else "--"
        return f"{mark}  {self.what:{WIDTH}} {self.found}{f': {self.remedy}' if self.remedy else ''}"


def main() -> None:
    lines = [line for check in CHECKS for line in guarded(check)]
    print("\n".join(map(str, lines)))
    needed = [line.what for line in lines if line.remedy and line.is_needed]
    print(f"\n`make reproduce` needs: {', '.join(needed)}." if needed else "\n`make reproduce` has all that it needs.")
    sys.exit(bool(needed))


def guarded(check: Callable[[], Iterable[Line]]) -> list[Line]:
    """What a check finds. One that cannot be made is itself something that is missing."""
    what = check.__name__.rstrip("_")
    try:
        return list(check())
    except ImportError as error:
        return [Line(what, f"not looked at, without {error.name or error}", "`make setup`")]
    except Exception as error:  # noqa: BLE001  whatever is broken, the rest is worth knowing
        return [Line(what, "cannot be told", str(error).partition("\n")[0] or repr(error), is_needed=True)]


# With Python alone


def python() -> Iterator[Line]:
    fits = sys.version_info[:2] in PYTHONS
    remedy = "" if fits else "install 3.11 or 3.12, and `make setup PYTHON=python3.11`"
    yield Line("Python", f"{sys.version.split()[0]} at {sys.executable}", remedy, is_needed=True)


def packages() -> Iterator[Line]:
    """The pinned packages that every platform has."""
    pins = re.findall(r"^([\w.-]+)==(\S+)$", Path("requirements.txt").read_text(), re.MULTILINE)
    absent, other = [], []
    for name, pinned in pins:
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
        else:
            other += [f"{name} {there}, not {pinned}"] * (there.partition("+")[0] != pinned)
    absent.sort(key=lambda name: name not in NEEDED)
    found = f"{len(pins) - len(absent) - len(other)} of {len(pins)} as pinned"
    found += "".join(f"; {say}{named(names)}" for say, names in (("without ", absent), ("", other)) if names)
    remedy = "`make setup`, and .venv/bin first on PATH" if absent or other else ""
    yield Line("packages", found, remedy, is_needed=not NEEDED.isdisjoint(absent))


def named(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def disk() -> Iterator[Line]:
    free = shutil.disk_usage(".").free
    yield Line("disk", f"{free / 1e9:.1f} GB free", "" if free > LEAST_DISK else f"make room: {LEAST_DISK / 1e9:g} GB", True)


def memory() -> Iterator[Line]:
    if not Path("/proc/meminfo").exists():
        yield Line("memory", "not known on this system")
        return
    free = 1024 * int(re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)[1])
    remedy = "" if free > LEAST_MEMORY else f"end something, or JOBS=1: a training takes up to {LEAST_MEMORY / 2e9:g} GB"
    yield Line("memory", f"{free / 1e9:.1f} GB free, {os.cpu_count()} cores", remedy, is_needed=True)


def gpu() -> Iterator[Line]:
    if not shutil.which("nvidia-smi"):
        yield Line("GPU", "none: trainings run on the CPU")
        return
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    if told.returncode:
        yield Line("GPU", "nvidia-smi fails", "mend the driver, or train on the CPU")
    else:
        yield Line("GPU", "; ".join(line.replace(", ", ", driver ") for line in told.stdout.splitlines()))


def dvc() -> Iterator[Line]:
    text = Path("dvc.lock").read_text() if Path("dvc.lock").exists() else ""
    in_conflict = re.search("^(<{7}|>{7})", text, re.MULTILINE)
    yield Line("dvc.lock", *(("in conflict", "`git checkout HEAD dvc.lock`", True) if in_conflict else ("whole",)))
    claims = Path(".dvc/tmp/rwlock")  # of processes, of which DVC forgets those that are dead
    pids = set(re.findall(r'"pid": (\d+)', claims.read_text())) if claims.exists() else set()
    held = [path for path in LOCKS if is_held(Path(path))] + [
        f"process {pid}" for pid in pids if Path("/proc", pid).exists()
    ]
    remedy = "wait for it, or `dvc --wait-for-lock repro`" if held else ""
    yield Line("locks", f"held: {', '.join(held)}" if held else "free", remedy, is_needed=True)


def is_held(path: Path) -> bool:
    """Whether a process has locked a file."""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def mlflow() -> Iterator[Line]:
    uri, store = os.environ.get("MLFLOW_TRACKING_URI"), Path("mlflow.db")
    if uri:
        yield Line("MLflow", f"at {re.sub(r'//[^/@]*@', '//', uri)}, as MLFLOW_TRACKING_URI says")
    elif not store.exists():
        yield Line("MLflow", "no store yet", "`make ui` makes it")
    else:
        with contextlib.closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)) as database:
            try:
                ((count,),) = database.execute("SELECT COUNT(*) FROM runs")
                yield Line("MLflow", f"{count} runs in {store}")
            except sqlite3.DatabaseError as error:
                yield Line("MLflow", f"{store} cannot be read ({error})", f"delete {store}, and `make ui`")
    port = os.environ.get("PORT") or "5000"
    if not port.isdecimal() or int(port) > LAST_PORT:
        yield Line("port", f"{port} is none", "choose another, as in `PORT=5001 make ui`")
        return
    with socket.socket() as client:
        taken = client.connect_ex(("127.0.0.1", int(port))) == 0
    yield Line("port", f"{port} {'taken' if taken else 'free'}", f"`make ui PORT={int(port) + 1}`" if taken else "")


# With the packages


def torch_() -> Iterator[Line]:
    import torch

    build = f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'for CPUs'}"
    unused = shutil.which("nvidia-smi") and not torch.cuda.is_available()
    remedy = "it cannot use the GPU; `rm -r .venv && make setup`, without TORCH=cpu" if unused else ""
    yield Line("torch", build, remedy)


def data_() -> Iterator[Line]:
    from pipeline.core import params
    from pipeline.training import data

    asked = params.load().data.source
    sources = dict.fromkeys([*params.IMAGES, asked])
    absent = [source for source in sources if not data.folder(source).exists()]
    for source in sources:
        if source not in absent:
            yield digested(source, is_asked=source == asked)
    if asked in absent:
        copy = "" if asked == params.FOLDER else f", or from a copy with OSA_{asked.upper()}_MIRROR=/path/to/it"
        remedy = f"`make reproduce` fetches it{copy}"
        yield Line("data", f"{asked}, which params.yaml asks for, is not here", remedy)
    if others := [source for source in absent if source != asked]:
        yield Line("data", f"not here, nor asked for: {', '.join(others)}")


def digested(source: str, is_asked: bool) -> Line:
    """Whether the files of a data set are whole."""
    from pipeline.core.errors import UserError
    from pipeline.training import data

    try:
        data.digest(data.folder(source))
    except UserError as error:
        return Line("data", str(error).partition(";")[0], f"`python -m pipeline.fetch {source}`", is_needed=is_asked)
    return Line("data", f"{source}, whole{', as params.yaml asks' if is_asked else ''}")


def runs_() -> Iterator[Line]:
    from pipeline import runs
    from pipeline.core import params
    from pipeline.core.errors import UserError
    from pipeline.tools import fan_out

    jobs = fan_out.wanted(params.load())
    digests = {}
    for source in {config.data.source for _, config in jobs}:
        with contextlib.suppress(UserError):  # which is said of the data
            digests[source] = fan_out.digest(source)
    trained = [run for run, _ in jobs if run.weights.exists()]
    remedy = "`dvc pull` where there is a remote, or `make reproduce`" if len(trained) < len(jobs) else ""
    yield Line("weights", f"{len(trained)} of {len(jobs)} runs have theirs", remedy)
    there = [(run, config) for run, config in jobs if run.is_there()]
    current = [run for run, config in there if runs.is_recorded(run, config, digests.get(config.data.source))]
    found = f"{len(there)} of {len(jobs)} runs have theirs, {len(current)} of today's code, data and parameters"
    remedy = "`make plan` says why, `make reproduce` trains them" if len(current) < len(jobs) else ""
    yield Line("records", found, remedy)


CHECKS = (python, packages, disk, memory, gpu, torch_, dvc, mlflow, data_, runs_)


if __name__ == "__main__":
    main()
