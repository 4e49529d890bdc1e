"""Trainings on the nodes of a Ray cluster, which have neither code nor data: an archive brings both to each node, once.

A node unpacks the archive into a folder that is named by its digest, and every training there reads that folder. The driver
writes the archive to a file and gives Ray the pages of the file: its own memory never holds the data.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from pipeline.config import records
from pipeline.config.records import RECORD, RunRecord
from pipeline.core import files, provenance
from pipeline.core.errors import UserError
from pipeline.data import idx
from pipeline.tools import jobs
from pipeline.tools.jobs import Job, command, execute
from pipeline.training.run import Run

SHIPPED = ("osa", "pipeline", "params.yaml", "dvc.yaml")  # sent to another machine, with the data
RETRIES = 3  # on other nodes, where one dies
OF_DEAD_NODES = "Raylet is terminated|node it was running on is dead|has been marked dead"  # messages of Ray

Ended = Callable[[list, float], list]  # (tasks, seconds) → the tasks that have ended within these seconds
Receive = Callable[[Run, Any], None]  # (run, task): puts the files of a run in their places


@contextmanager
def submitted(listed: list[Job], address: str, per_gpu: int = 1) -> Iterator[tuple[dict[Any, Run], Ended, Receive]]:
    """Gives the trainings to the nodes of a cluster, on a share of a GPU each where it has GPUs.

    Returns:
        The run of each task, and functions that wait for tasks and receive the files of one.

    Raises:
        UserError: Ray is not installed, or there is no cluster at this address.
    """
    ray = import_ray()
    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError:
        raise UserError(f"there is no Ray cluster at {address}: start one with `ray start --head`.") from None
    try:
        for module in (jobs, sys.modules[__name__]):  # the nodes have no copy of this repository
            ray.cloudpickle.register_pickle_by_value(module)
        share = 1 / per_gpu if ray.cluster_resources().get("GPU") else 0
        options = dict(num_cpus=1, num_gpus=share, max_retries=RETRIES, scheduling_strategy="SPREAD")
        work = ray.remote(**options)(execute_shipped)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "shipped.zip")
            digest = ship({config.data.source for _, config in listed}, path)
            pages = ray.put(np.memmap(path, mode="r").view(np.ndarray))  # Ray takes the pages of an array of this very type
        tasks = {work.remote(pages, digest, [*command(run), "--no-tracking"], files_of(run)): run for run, _ in listed}

        known = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}

        def ended(waiting: list, seconds: float) -> list:
            ray.wait(waiting, timeout=seconds)  # for the first
            name_lost_nodes(ray.nodes(), known)
            return ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]

        yield tasks, ended, lambda run, task: receive(run, ray.get(task))
    finally:
        ray.shutdown()


def import_ray() -> ModuleType:
    """Ray, without telemetry and without the pages that it prints when a node dies. Raises UserError if it is absent."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", OF_DEAD_NODES)
    try:
        import ray
    except ImportError:
        raise UserError("--cluster needs Ray: install it with `pip install -r requirements-cluster.txt`.") from None
    return ray


def name_lost_nodes(nodes: list[dict[str, Any]], known: set[str]) -> None:
    """Says once of each node that is not alive that it is gone, and adds it to the `known` ones."""
    for node in nodes:
        if not node["Alive"] and node["NodeID"] not in known:
            known.add(node["NodeID"])
            address = node["NodeManagerAddress"]
            tqdm.write(f"warning: the node {address} is gone: what it trained begins again on another.", file=sys.stderr)


def files_of(run: Run) -> list[Path]:
    """Files that a training may leave, its record last."""
    return [*run.files.values(), run.folder / RECORD]


def receive(run: Run, contents: dict[Path, bytes]) -> None:
    """Puts the files of a run in their places, its record last, with the commit that only this machine knows."""
    *others, record_path = files_of(run)
    for path in others:
        if path in contents:
            files.write_bytes(path, contents[path])
    record = records.parse(record_path, RunRecord, f"run `{run.command}`", contents[record_path].decode())
    commit = provenance.describe_commit()
    known = {"commits": [commit["git_commit"]] * len(record.commits), "dirty": commit["git_dirty"]}
    records.write(run.folder, record.model_copy(update=known))


def ship(sources: set[str], path: Path) -> str:
    """Writes an archive of what a training needs, and returns its digest. Stored data are compressed already."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in (*SHIPPED, *map(idx.folder, sorted(sources))):
            for file in sorted(Path(name).rglob("*")) if Path(name).is_dir() else [Path(name)]:
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file)
    return files.sha256(path)


def execute_shipped(pages: np.ndarray, digest: str, arguments: list[str], paths: list[Path]) -> dict[Path, bytes]:
    """`execute` on whatever machine this is, in a folder of its own that links to what was shipped.

    Returns:
        The content of these paths that are there then.
    """
    shipped = unpacked(pages, digest)
    with tempfile.TemporaryDirectory() as folder:
        for each in shipped.iterdir():
            Path(folder, each.name).symlink_to(each)
        execute(arguments, Path(folder), {"PYTHONPATH": str(shipped)})
        return {path: Path(folder, path).read_bytes() for path in paths if Path(folder, path).exists()}


def unpacked(pages: np.ndarray, digest: str) -> Path:
    """The folder of this machine with the content of an archive: the first training unpacks it, and the others wait."""
    folder = Path(tempfile.gettempdir(), f"osa-{digest}")
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            begun = Path(tempfile.mkdtemp(dir=folder.parent))  # readable by this user alone; a killed process leaves it
            archive = begun / "shipped.zip"
            pages.tofile(archive)
            zipfile.ZipFile(archive).extractall(begun)
            archive.unlink()
            begun.rename(folder)
    return folder
