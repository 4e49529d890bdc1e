"""Trains all runs that are missing or stale, several at once: `python -m pipeline fan_out`.

They are those of Table 2; `--only` names others, of any study. Each is a process of its own with one thread, or on its share
of the GPUs, on this machine; or with `--cluster ADDRESS` on the nodes of a Ray cluster, which get code, data
and parameters and send each run's files back (requirements-cluster.txt); a training that a dying node takes with it begins
again on another. Killed, the same command goes on at the last point of each run's curves; a cluster trains again.

`--print` trains nothing: it writes the commands, for whatever else runs them. DVC and MLflow hear of runs together, of those
that ended since the last time, and at the beginning of those that came to be without this command.
"""

import argparse
import contextlib
import fnmatch
import functools
import io
import itertools
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from pipeline import studies, tracking
from pipeline.config import params, records
from pipeline.config.params import Params, RunConfig
from pipeline.config.records import RECORD, RunRecord
from pipeline.core import files, provenance
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.data import idx
from pipeline.results.runs import recorded
from pipeline.studies.lab import Lab
from pipeline.tools import gpus, locks, times
from pipeline.training.run import TABLE_2, Run, matches

SHIPPED = ("osa", "pipeline", "params.yaml", "dvc.yaml")  # sent to another machine, with the data
RETRIES = 3  # on other nodes, where one dies
OF_DEAD_NODES = "Raylet is terminated|node it was running on is dead|has been marked dead"  # messages of Ray
SHOWN_EVERY, LOGGED_EVERY = 2, 60  # seconds, on a terminal and elsewhere
OF_TABLE_2 = (f"{TABLE_2}/*",)
Job = tuple[Run, RunConfig]
PROCESSES: set[subprocess.Popen] = set()  # trainings under way


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("fan_out", __doc__)
    parser.add_argument("--cluster", metavar="ADDRESS", help="of a Ray cluster; auto: the one that runs on this machine")
    parser.add_argument("--print", action="store_true", help="train nothing: write the command of each run, one a line")
    only_help = "these instead, of any study, in this order, as in depth/vit+model.depth=36*/0; * stands for anything"
    parser.add_argument("--only", nargs="+", metavar="RUN", default=OF_TABLE_2, help=only_help)
    chosen = add_options(parser).parse_args(arguments)
    if chosen.print:
        for run, _ in missing(list_jobs(params.load(), chosen.only)):
            print(shlex.join(["python", *command(run), "--no-tracking"]))
        return
    if others := locks.dvc_processes():
        raise UserError(f"{' and '.join(others)} works here, and may train the same runs: wait for it, or end it.")
    if locks.claims() is None:
        raise UserError(f"{locks.RWLOCK} is empty or torn, as a killed process leaves it: `rm {locks.RWLOCK}`.")
    with single_instance(locks.FAN_OUT):
        settings = params.load()
        take_over(settings, chosen.no_tracking)
        jobs = list_jobs(settings, chosen.only)
        left = missing(jobs)
        if not left:
            print(f"Nothing to train: all {len(jobs)} runs are there.")
            return
        uncommitted: list[str] = []
        for ended in train_all(left, chosen.jobs, chosen.no_tracking, chosen.cluster, chosen.per_gpu):
            uncommitted += commit(ended)
        if uncommitted:
            raise UserError(f"`dvc commit` failed: do what it says, and then `dvc commit -f {shlex.join(uncommitted)}`.")


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options of every command that trains side by side."""
    parser.add_argument("--jobs", type=positive, help="trainings at a time on this machine; default: one a core or GPU")
    per_gpu_help = "trainings at a time on one GPU; default: one, or under NVIDIA's MPS as many as fit"
    parser.add_argument("--per-gpu", type=positive, metavar="N", help=per_gpu_help)
    parser.add_argument("--no-tracking", action="store_true", help="do not show the runs in MLflow")
    return parser


def positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


@contextlib.contextmanager
def single_instance(lock: Path) -> Iterator[None]:
    """Inside, a signal that ends this process is an interrupt, as from a terminal.

    Raises:
        UserError: another process holds the lock, or this one is interrupted.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, signal.default_int_handler)
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout:
        raise UserError(f"another {lock.stem} works here ({lock} is locked): wait for it, or end it.") from None
    except KeyboardInterrupt:
        raise UserError("interrupted: the same command goes on at the last point of each run's curves.") from None


def train_all(
    jobs: list[Job], at_a_time: int | None, no_tracking: bool, cluster: str | None = None, per_gpu: int | None = None
) -> Iterator[list[Run]]:
    """Trains on a cluster or here. Yields the runs that have ended since the last time, which MLflow then shows."""
    if cluster:
        finished, at_a_time = on_cluster(jobs, cluster, per_gpu or 1), len(jobs)
    else:
        at_a_time = at_a_time or at_once(jobs, per_gpu)
        finished = here(jobs, at_a_time)
    for ended in follow(jobs, finished, at_a_time):
        if not no_tracking:
            tracking.sync_quietly(*ended)
        yield ended


def at_once(jobs: list[Job], per_gpu: int | None) -> int:
    """Returns the number of trainings at a time on this machine: one a core, or one a GPU, or as many as fit under MPS.
    Where MPS does not run, a line says how to start it and what that saves."""
    count = torch.cuda.device_count()
    if not count:
        return len(os.sched_getaffinity(0))
    if per_gpu:
        return count * per_gpu
    fit = gpus.that_fit(config for _, config in jobs)
    if gpus.has_mps():
        return count * fit
    if fit > 1 and len(jobs) > count and gpus.can_start_mps():
        known = [record for _, record in recorded()]
        seconds = [times.estimate(*job, known) for job in jobs]
        left = [time_left(seconds, at_a_time).removesuffix(" left") for at_a_time in (count, count * fit)]
        print(
            f"One training leaves most of a GPU idle: `{gpus.CONTROL} -d` starts NVIDIA's MPS, under which {fit} share one "
            f"({left[0]} as it is, {left[1]} at best).",
            file=sys.stderr,
        )
    return count


# Choice of runs


def missing(jobs: list[Job]) -> list[Job]:
    return [job for job in jobs if not is_trained(*job)]


def is_trained(run: Run, config: RunConfig) -> bool:
    """Tells whether a run is current, data included, and has the weights where Table 2 evaluates them."""
    if not run.is_current(config) or (run.study == TABLE_2 and not run.weights.exists()):
        return False
    return run.record().data_sha256 == digest(config.data.source)


def list_jobs(settings: Params, patterns: Iterable[str] = OF_TABLE_2) -> list[Job]:
    """The runs of Table 2 and of studies that match these patterns, in the patterns' order.

    Raises:
        UserError: a pattern matches none.
    """
    parts = [pattern.partition("/")[0] for pattern in patterns]
    jobs = table_2_jobs(settings)
    for name in studies.names():
        if any(fnmatch.fnmatchcase(name, part) for part in parts):
            jobs += jobs_of(name, settings)
    selected: dict[str, Job] = {}
    for pattern in patterns:
        matching = {str(job[0]): job for job in jobs if pattern == str(job[0]) or fnmatch.fnmatchcase(str(job[0]), pattern)}
        if not matching:
            raise UserError(f"--only {pattern} matches no run: give STUDY/NAME/SEED, where * stands for anything.")
        selected |= matching
    return list(selected.values())


def table_2_jobs(settings: Params) -> list[Job]:
    jobs = []
    for name in settings.run.variants:
        config = params.resolve(settings, name)
        jobs += [(Run(name, seed), config) for seed in settings.run.seeds]
    return jobs


def jobs_of(study: str, settings: Params) -> list[Job]:
    """The runs that a study compares, which are none for most."""
    if (trainings := studies.get(study).trainings) is None:
        return []
    lab = Lab(study, settings, params.load_paper(), studies.reading_of(study))
    return [
        (lab.run(variant, overrides, seed), lab.config(variant, overrides))
        for variant, overrides, seed in trainings(studies.settings(study), lab)
    ]


@functools.cache
def digest(source: str) -> str:
    """The digest of a data set, read once."""
    return idx.digest(idx.folder(source))


# progress


def follow(jobs: list[Job], finished: Iterator[list[Run]], at_a_time: int) -> Iterator[list[Run]]:
    """Passes on the runs that have ended, with a line for each. Shows how far all are and how long the rest takes, also
    where none has ended."""
    known, left = [record for _, record in recorded()], {str(run): (run, config) for run, config in jobs}
    epochs, line = sum(config.train.epochs for _, config in jobs), "{n_fmt}/{total_fmt} trainings{postfix} [{elapsed}]"
    shown, news = 0.0, None  # epochs, which never fall; how far all were when the time was last forecast
    with contextlib.closing(finished), tqdm(total=len(jobs), bar_format=line) as bar:
        for ended in itertools.chain([[]], finished):
            for run in ended:
                del left[str(run)]
                known.append(run.record())
            standing = [progress(*job, known) for job in left.values()]
            shown = max(shown, epochs - sum(number for number, _ in standing))
            bar.n = len(jobs) - len(standing)
            if (len(left), shown) != news:
                news, seconds, told = (len(left), shown), [each for _, each in standing], time.monotonic()
            forecast = time_left(seconds, at_a_time, time.monotonic() - told)
            bar.set_postfix_str(f"{round(shown, 2):g} of {epochs} epochs, {forecast}")
            for run, made in zip(ended, known[len(known) - len(ended) :], strict=True):
                metrics = run.metrics()
                result = "diverged" if metrics["diverged"] else f"{metrics['test_accuracy']:.1%}"
                tqdm.write(f"{run}: {result} after {times.spent(made)}; {bar.postfix}", file=sys.stderr)
            if ended:
                yield ended


def show_every() -> float:
    """Seconds."""
    return SHOWN_EVERY if sys.stderr.isatty() else LOGGED_EVERY


def progress(run: Run, config: RunConfig, known: list[RunRecord]) -> tuple[float, float | None]:
    """The epochs that a run still has to do, and the seconds that they will take.

    Where it trains on this machine, by its own pace, in which a pause before it was resumed does not count; else by the
    known records of others.
    """
    for path in run.scratch.parent.glob(f"{run.seed}-*/{RECORD}"):
        with contextlib.suppress(UserError):  # it has ended since
            own = records.parse(path, RunRecord, f"delete {path.parent}")
            done = len(own.timestamps) - 1  # points after that of step 0
            if done > 0 and matches(own, config):
                left = config.train.epochs * config.train.points_per_epoch - done
                return left / config.train.points_per_epoch, left * own.seconds / done
    with contextlib.suppress(UserError):
        if is_trained(run, config):  # it has ended, and its process is about to
            return 0, 0
    return config.train.epochs, times.estimate(run, config, known)


def time_left(seconds: list[float | None], at_a_time: int, since: float = 0) -> str:
    """The time left for runs of these durations, with so many trainings side by side, `since` seconds after it was forecast.
    A forecast that is past is withdrawn."""
    if None in seconds:
        return "time left unknown"
    left = max(sum(seconds) / max(1, at_a_time), *seconds, 0) - since  # the longest may end last
    return f"{times.duration(left)} left" if left >= 0 else "time left unknown"


# DVC


def target(run: Run) -> str:
    """The name of a run of Table 2 in DVC."""
    return f"train@{run.variant}-{run.seed}"


def has_dvc() -> bool:
    return bool(shutil.which("dvc")) and Path(".dvc").is_dir()


def take_over(settings: Params, no_tracking: bool) -> None:
    """Tells DVC and MLflow of the runs of Table 2 that are there and that DVC does not know: trained by hand, by what
    `--print` wrote, on another machine, or before a kill. DVC would train them again.

    Raises:
        UserError: `dvc commit` fails.
    """
    if not has_dvc():
        return
    done = subprocess.run(["dvc", "status", "--json", "train"], stdout=subprocess.PIPE, check=False, encoding="utf-8")
    if done.returncode:
        raise UserError("`dvc status train` failed: do what it says.")
    changed = json.loads(done.stdout)
    runs = [job[0] for job in table_2_jobs(settings) if target(job[0]) in changed and is_trained(*job)]
    if not runs:
        return
    print(f"Telling DVC of runs that it does not know: {', '.join(map(str, runs))}", file=sys.stderr)
    if refused := commit(runs):
        raise UserError(f"`dvc commit` failed: do what it says, and then `dvc commit -f {shlex.join(refused)}`.")
    if not no_tracking:
        tracking.sync_quietly(*runs)


def commit(runs: list[Run]) -> list[str]:
    """Tells DVC of runs that have just been trained, or it would train them again. Runs of studies it does not know.

    Returns what DVC did not take.
    """
    targets = [target(run) for run in runs if run.study == TABLE_2]
    if not (targets and has_dvc()):
        return []
    while others := locks.dvc_processes():
        print(f"{' and '.join(others)} works here: waiting to tell DVC of {len(targets)} runs.", file=sys.stderr, flush=True)
        time.sleep(LOGGED_EVERY)
    command = ["dvc", "--wait-for-lock", "commit", "--force", "--quiet", *targets]
    return targets if subprocess.run(command, check=False).returncode else []


# here


def command(run: Run) -> list[str]:
    """Arguments for Python that train a run."""
    study = [] if run.study == TABLE_2 else ["--study", run.study, *params.as_options(run.overrides)]
    return ["-m", "pipeline", "train", run.variant, str(run.seed), *study]


def execute(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Runs Python with one thread in a folder that has code, parameters and data, and passes its warnings on.

    Raises:
        RuntimeError: it fails.
    """
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", **environment}
    streams = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
    with subprocess.Popen([sys.executable, *arguments], cwd=folder, env=settings, **streams) as process:
        PROCESSES.add(process)
        lines = process.communicate()[1].strip().splitlines()
        PROCESSES.discard(process)
    warnings = [line for line in lines if line.startswith("warning: ")]
    for line in warnings:
        tqdm.write(line, file=sys.stderr)
    if process.returncode:
        others = [line for line in lines if line not in warnings] or [f"exit status {process.returncode}"]
        is_killed = process.returncode < 0
        raise RuntimeError(f"ended by {signal.Signals(-process.returncode).name}" if is_killed else others[-1])


def here(jobs: list[Job], at_a_time: int) -> Iterator[list[Run]]:
    """Trains side by side on this machine, and yields the runs that have ended, now and then none. Interrupted, ends all."""
    count, free = torch.cuda.device_count(), queue.SimpleQueue()
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    for i in range(at_a_time):
        free.put((given[:count] or range(count))[i % count] if count else None)

    def train_one(run: Run) -> None:
        device = free.get()
        try:
            chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
            execute([*command(run), "--no-tracking"], Path(), chosen)
        finally:
            free.put(device)

    def take(run: Run, future: Future) -> None:
        if error := future.exception():
            for other in futures:  # runs under way go on, and no other begins
                other.cancel()
            raise error

    with ThreadPoolExecutor(at_a_time) as pool:
        futures = {}
        try:
            for run, _ in jobs:
                futures[pool.submit(train_one, run)] = run
            yield from as_they_end(futures, lambda tasks: wait(tasks, show_every(), FIRST_COMPLETED).done, take)
        except (KeyboardInterrupt, GeneratorExit):
            pool.shutdown(wait=False, cancel_futures=True)
            while PROCESSES or not all(future.done() for future in futures):  # one may be about to start
                for process in set(PROCESSES):
                    process.terminate()
                time.sleep(0.05)
            raise


def as_they_end(tasks: dict[Any, Run], wait: Callable, take: Callable) -> Iterator[list[Run]]:
    """Yields the runs whose tasks `wait` gives, which have ended, once `take` has taken their results. They may be none.

    Raises:
        UserError: one failed; it is named when the others, hours under way, have ended.
    """
    waiting, failures = dict(tasks), []
    while waiting:
        ended = []
        for task in wait(list(waiting)):
            run = waiting.pop(task)
            try:
                take(run, task)
            except Exception as error:  # noqa: BLE001  of whatever a task does
                why = str(error).strip().splitlines()[-1:] or [type(error).__name__]
                failures.append(UserError(f"{run} was not trained: {why[0].removeprefix('error: ')}"))
            else:
                ended.append(run)
        yield ended
    if failures:
        raise failures[0]


# on a cluster


def import_ray() -> ModuleType:
    """Ray, without telemetry and without the pages that it prints when a node dies. Raises UserError if it is absent."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", OF_DEAD_NODES)
    try:
        import ray
    except ImportError:
        raise UserError("--cluster needs Ray: install it with `pip install -r requirements-cluster.txt`.") from None
    return ray


def on_cluster(jobs: list[Job], address: str, per_gpu: int = 1) -> Iterator[list[Run]]:
    """Trains on the nodes of a Ray cluster, on a share of a GPU each where it has GPUs. Yields the runs whose files have
    come, now and then none."""
    ray = import_ray()
    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError:
        raise UserError(f"there is no Ray cluster at {address}: start one with `ray start --head`.") from None
    try:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the nodes have no copy of this repository
        share = 1 / per_gpu if ray.cluster_resources().get("GPU") else 0
        options = dict(num_cpus=1, num_gpus=share, max_retries=RETRIES, scheduling_strategy="SPREAD")
        work = ray.remote(**options)(execute_shipped)
        bundle = ray.put(shipment({config.data.source for _, config in jobs}))
        tasks = {work.remote(bundle, [*command(run), "--no-tracking"], files_of(run)): run for run, _ in jobs}

        gone = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}

        def ended(waiting: list) -> list:
            ray.wait(waiting, timeout=show_every())  # for the first
            for node in ray.nodes():
                if not node["Alive"] and node["NodeID"] not in gone:
                    gone.add(node["NodeID"])
                    lost = (
                        f"warning: the node {node['NodeManagerAddress']} is gone: what it trained begins again on another."
                    )
                    tqdm.write(lost, file=sys.stderr)
            return ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]

        yield from as_they_end(tasks, ended, lambda run, task: receive(run, ray.get(task)))
    finally:
        ray.shutdown()


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


def shipment(sources: set[str]) -> bytes:
    """An archive of what a training needs."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for name in (*SHIPPED, *map(idx.folder, sources)):
            for path in sorted(Path(name).rglob("*")) if Path(name).is_dir() else [Path(name)]:
                if path.is_file() and "__pycache__" not in path.parts:
                    opened.write(path)
    return archive.getvalue()


def execute_shipped(bundle: bytes, arguments: list[str], paths: list[Path]) -> dict[Path, bytes]:
    """`execute` in a folder of its own on whatever machine this is; the content of these paths that are there then."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(io.BytesIO(bundle)).extractall(folder)
        execute(arguments, Path(folder), {"PYTHONPATH": folder})
        return {path: Path(folder, path).read_bytes() for path in paths if Path(folder, path).exists()}


if __name__ == "__main__":
    main()
