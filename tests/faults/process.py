"""Trainings in processes of their own, forked from one that has PyTorch loaded, with what happens to them there."""

import ctypes
import functools
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from pipeline.core.files import ROOT
from pipeline.tools import train
from pipeline.training import recorder
from pipeline.training.run import Run
from tests.pipeline import synthetic
from tests.pipeline.mnist_files import write_mnist

RUN = Run("osa_exact", 0)
PAGE = 4096  # bytes: the least that a file takes of a tmpfs
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.faults.process", "torch._dynamo"])


def write_project() -> None:
    """Parameters and data of a training of a second, which passes its points and epochs evenly."""

    def edit(raw: dict) -> None:
        raw["model"] |= {"patch_size": 14, "embed_dim": 8, "depth": 2, "num_heads": 2}
        raw["train"] |= {"epochs": 3, "batch_size": 26, "points_per_epoch": 2}

    synthetic.write_params(Path(), edit)
    write_mnist("data/mnist", train=130, test=40)


class Training:
    """`python -m pipeline train` in a process of its own, after `before`, which happens there."""

    def __init__(self, before: Callable[[], object] = int) -> None:
        handle, name = tempfile.mkstemp(dir=Path())
        os.close(handle)
        self.log = Path(name)
        self.process = FORKS.Process(target=_train, args=(Path.cwd(), self.log, before))
        with mock.patch.dict(os.environ, {"PYTHONPATH": str(ROOT)}):  # or what starts them would find no module of ours
            self.process.start()

    def end(self) -> tuple[int, list[str]]:
        """Exit status of the process, and its errors, warnings and tracebacks."""
        self.process.join()
        lines = self.log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
        self.log.unlink()
        return self.process.exitcode, [line for line in lines if line.startswith(("error: ", "warning: ", "Traceback"))]


def _train(folder: Path, log: Path, before: Callable[[], object]) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(ROOT))
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    recorder.tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a killed process leaks
    sys.argv = ["train", RUN.variant, str(RUN.seed), "--no-tracking"]
    before()
    train.main()


def after_seconds(seconds: float) -> Callable[[], object]:
    return functools.partial(time.sleep, seconds)


def mount(folder: str, kind: str, pages: int) -> None:
    """Makes a folder read-only, or an empty file system of so many pages, for this process alone.

    Ends with status 77 where the system does not allow that.
    """
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    new_mounts, new_users, read_only, again, bind, private = 0x20000, 0x10000000, 1, 0x20, 0x1000, 0x44000
    failed = libc.unshare(new_mounts | (new_users if user else 0))
    if user and not failed:
        for name, text in {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}.items():
            Path("/proc/self", name).write_text(text, encoding="utf-8")
    Path(folder).mkdir(parents=True, exist_ok=True)
    path, size = folder.encode(), f"size={pages * PAGE}".encode()
    mounts = {
        "full": [(b"tmpfs", path, b"tmpfs", 0, size)],
        "read-only": [(path, path, None, bind, None), (None, path, None, bind | again | read_only, None)],
    }
    if failed or any(libc.mount(*each) for each in [(None, b"/", None, private, None), *mounts[kind]]):
        os._exit(77)


def outputs() -> dict[Path, bytes]:
    """The existing files of the run, but for its record, which has the time of day."""
    return {path: path.read_bytes() for path in RUN.files.values() if path.exists()}


def leftovers() -> list[Path]:
    return [path for pattern in ("**/*.tmp.*", ".checkpoints/**/*.pt") for path in Path().glob(pattern)]


def clear() -> None:
    assert not (Path.cwd() / ".git").exists()  # never the repository's own runs
    for name in ("paper_outputs/runs", "paper_outputs/weights", ".checkpoints"):
        shutil.rmtree(name, ignore_errors=True)
