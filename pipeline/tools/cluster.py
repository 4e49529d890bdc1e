"""Executes training runs on the nodes of a Ray cluster. Each node unpacks an archive of the code and the data."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from collections.abc import Generator
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
from pipeline.tools.jobs import Job, as_completed, command, execute
from pipeline.training.run import Run

SHIPPED = ("osa", "pipeline", "params.yaml", "dvc.yaml")  # paths in the archive, which also holds the data
RETRIES = 3  # how many times Ray restarts a run whose node has died
OF_DEAD_NODES = "Raylet is terminated|node it was running on is dead|has been marked dead"  # regex for Ray's messages


def train(listed: list[Job], address: str, per_gpu: int, seconds: float) -> Generator[list[Run]]:
    """Executes runs on a cluster. At least every `seconds` seconds, yields the runs that have ended since the last yield.

    Raises:
        UserError: Ray is not installed, there is no cluster at the address, or a run failed.
    """
    ray = import_ray()
    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError:
        raise UserError(f"there is no Ray cluster at {address}: start one with `ray start --head`.") from None
    try:
        for module in (jobs, sys.modules[__name__]):  # nodes cannot import these modules, so Ray sends their code
            ray.cloudpickle.register_pickle_by_value(module)
        options = needs(ray.cluster_resources(), per_gpu)
        work = ray.remote(**options, max_retries=RETRIES, scheduling_strategy="SPREAD")(execute_shipped)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "shipped.zip")
            digest = ship({config.data.source for _, config in listed}, path)
            # The archive is memory-mapped: it may not fit in memory. Pickling copies a memmap, but not its ndarray view.
            pages = ray.put(np.memmap(path, mode="r").view(np.ndarray))
        tasks = {work.remote(pages, digest, [*command(run), "--no-tracking"], files_of(run)): run for run, _ in listed}

        known = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}

        def wait(waiting: list) -> list:
            ray.wait(waiting, timeout=seconds)
            name_lost_nodes(ray.nodes(), known)
            return ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]

        yield from as_completed(tasks, wait, lambda run, task: receive(run, ray.get(task)))
    finally:
        ray.shutdown()


def needs(resources: dict[str, float], per_gpu: int) -> dict[str, float]:
    """Returns the resources that each run needs: one core and, if the cluster has GPUs, 1 / `per_gpu` of a GPU."""
    return {"num_cpus": 1, "num_gpus": 1 / per_gpu if resources.get("GPU") else 0}


def import_ray() -> ModuleType:
    """Imports Ray without telemetry. Raises UserError if Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", OF_DEAD_NODES)
    try:
        import ray
    except ImportError:
        raise UserError("--cluster needs Ray: install it with `pip install -r requirements-cluster.txt`.") from None
    return ray


def name_lost_nodes(nodes: list[dict[str, Any]], known: set[str]) -> None:
    """Warns of each dead node whose id is not in `known`. Adds the id, so that the next call does not warn again."""
    for node in nodes:
        if not node["Alive"] and node["NodeID"] not in known:
            known.add(node["NodeID"])
            address = node["NodeManagerAddress"]
            tqdm.write(f"warning: lost the node {address}: its runs start again on another node.", file=sys.stderr)


def files_of(run: Run) -> list[Path]:
    """Returns the paths of the files that a run may write. The record comes last."""
    return [*run.files.values(), run.folder / RECORD]


def receive(run: Run, contents: dict[Path, bytes]) -> None:
    """Stores the files of a run, the record last. Adds the commit to the record, since nodes have no git repository."""
    *others, record_path = files_of(run)
    for path in others:
        if path in contents:
            files.write_bytes(path, contents[path])
    record = records.parse(record_path, RunRecord, f"run `{run.command}`", contents[record_path].decode())
    commit = provenance.describe_commit()
    known = {"commits": [commit["git_commit"]] * len(record.commits), "dirty": commit["git_dirty"]}
    records.write_record(run.folder, record.model_copy(update=known))


def ship(sources: set[str], path: Path) -> str:
    """Writes code, parameters and data to an archive. Returns the SHA-256 of the archive."""
    with zipfile.ZipFile(path, "w") as archive:  # uncompressed, since most data files are already compressed
        for root in (*map(Path, SHIPPED), *map(idx.folder, sorted(sources))):
            for file in (root, *sorted(root.rglob("*"))):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file)
    return files.sha256(path)


def execute_shipped(pages: np.ndarray, digest: str, arguments: list[str], paths: list[Path]) -> dict[Path, bytes]:
    """Executes a run on this node, in a temporary folder. Returns the contents of those files in `paths` that exist."""
    shipped = unpacked(pages, digest)
    with tempfile.TemporaryDirectory() as folder:
        for each in shipped.iterdir():
            Path(folder, each.name).symlink_to(each)
        execute(arguments, Path(folder), {"PYTHONPATH": str(shipped)})
        return {path: Path(folder, path).read_bytes() for path in paths if Path(folder, path).exists()}


def unpacked(pages: np.ndarray, digest: str) -> Path:
    """Returns the folder of the unpacked archive on this node. The first run on the node unpacks the archive."""
    folder = Path(tempfile.gettempdir(), f"osa-{digest}")
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            begun = Path(tempfile.mkdtemp(dir=folder.parent))  # readable by this user alone
            archive = begun / "shipped.zip"
            pages.tofile(archive)
            zipfile.ZipFile(archive).extractall(begun)
            archive.unlink()
            begun.rename(folder)
    return folder
