"""Trains the missing or stale runs of Table 2 or a study, several at once: `python -m pipeline fan_out`.

Each run is a separate process with one thread or a share of a GPU, on this machine or on a node of a Ray cluster.
fan_out registers runs with DVC and MLflow as they end. After an interruption, the same command resumes each run from its
checkpoint, which is written after each evaluation. On a cluster, an interrupted run starts again at step 0.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from pipeline import tracking
from pipeline.config import params, records
from pipeline.config.params import Params, RunConfig
from pipeline.config.records import RECORD, RunRecord
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.results.runs import recorded
from pipeline.tools import cluster, locks, times
from pipeline.tools.jobs import (
    OF_TABLE_2,
    PROCESSES,
    Job,
    as_completed,
    command,
    execute,
    is_trained,
    list_jobs,
    missing,
    table_2_jobs,
)
from pipeline.training.run import TABLE_2, Run, matches

SHOWN_EVERY, LOGGED_EVERY = 2, 60  # seconds between progress updates, on a terminal and in a log
BAR = "{n_fmt}/{total_fmt} trainings{postfix} [{elapsed}]"


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("fan_out", __doc__)
    cluster_help = "address of a Ray cluster, or auto for the one running on this machine"
    parser.add_argument("--cluster", metavar="ADDRESS", help=cluster_help)
    parser.add_argument("--print", action="store_true", help="train nothing: print the command of each run, one per line")
    only_help = "train only these runs, of any study and in this order (default: those of Table 2), "
    only_help += "as in depth/vit+model.depth=36*/0; * stands for anything"
    parser.add_argument("--only", nargs="+", metavar="RUN", default=OF_TABLE_2, help=only_help)
    chosen = add_options(parser).parse_args(arguments)
    if chosen.print:
        for run, _ in missing(list_jobs(params.load(), chosen.only)):
            print(shlex.join(["python", *command(run), "--no-tracking"]))
        return
    if others := locks.dvc_processes():
        problem = f"DVC is running here ({' and '.join(others)}) and may train the same runs"
        raise UserError(f"{problem}: wait for it to finish, or stop it.")
    if locks.claims() is None:
        raise UserError(f"{locks.DAMAGED}: {locks.REMEDY}.")
    with single_instance(locks.FAN_OUT):
        settings = params.load()
        adopt(settings, chosen.no_tracking)
        jobs = list_jobs(settings, chosen.only)
        left = missing(jobs)
        if not left:
            print(f"Nothing to train: all {len(jobs)} runs exist already.")
            return
        uncommitted: list[str] = []
        for ended in train_all(left, chosen.jobs, chosen.per_gpu, chosen.no_tracking, chosen.cluster):
            uncommitted += commit(ended)
        if uncommitted:
            raise UserError(commit_failed(uncommitted))


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options shared by all commands that train several runs. Returns the parser."""
    parser.add_argument("--jobs", type=positive, help="runs trained at a time on this machine; default: one per core or GPU")
    per_gpu_help = "runs trained at a time on one GPU (default: 1); for more, first start NVIDIA's MPS with "
    per_gpu_help += "`nvidia-cuda-mps-control -d`"
    parser.add_argument("--per-gpu", type=positive, default=1, metavar="N", help=per_gpu_help)
    parser.add_argument("--no-tracking", action="store_true", help="do not show the runs in MLflow")
    return parser


def positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text}")
    return int(text)


@contextlib.contextmanager
def single_instance(lock: Path) -> Iterator[None]:
    """Holds a lock file during a `with` block. Also makes SIGTERM and SIGHUP interrupt this process as Ctrl-C does.

    Raises:
        UserError: another process holds the lock, or the user interrupts the command.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            signal.signal(number, signal.default_int_handler)
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout:
        problem = f"another {lock.stem} is running here ({lock} is locked)"
        raise UserError(f"{problem}: wait for it to finish, or stop it.") from None
    except KeyboardInterrupt:
        raise UserError(
            "interrupted: run the same command again to resume each run from the last saved point of its curves."
        ) from None


def train_all(
    jobs: list[Job], at_a_time: int | None, per_gpu: int, no_tracking: bool, address: str | None = None
) -> Iterator[list[Run]]:
    """Executes runs on a cluster at `address` or, without an address, on this machine. Yields groups of runs as they end."""
    if address:
        finished, at_a_time = cluster.train(jobs, address, per_gpu, show_every()), len(jobs)
    else:
        at_a_time = at_a_time or at_once(per_gpu)
        finished = train_here(jobs, at_a_time)
    for ended in follow(jobs, finished, at_a_time):
        if not no_tracking:
            tracking.sync_quietly(*ended)
        yield ended


def at_once(per_gpu: int) -> int:
    """Returns how many runs this machine trains at once: `per_gpu` on each GPU or, without a GPU, one on each core."""
    import torch  # slow to import

    if count := torch.cuda.device_count():
        return count * per_gpu
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Progress


def follow(jobs: list[Job], finished: Generator[list[Run]], at_a_time: int) -> Iterator[list[Run]]:
    """Yields the non-empty groups of runs from `finished`. Updates the progress bar after every group."""
    estimates = times.Estimates(record for _, record in recorded())
    left = {str(run): (run, config) for run, config in jobs}
    epochs = sum(config.train.epochs for _, config in jobs)
    shown, end = -1.0, math.nan  # number of finished epochs, and time at which the last run is expected to end
    with contextlib.closing(finished), tqdm(total=len(jobs), bar_format=BAR) as bar:
        for ended in itertools.chain([[]], finished):  # start with an empty group, to show progress before any run ends
            for run in ended:
                del left[str(run)]
                estimates.add(run.ended_record())
            remaining = [progress(*job, estimates) for job in left.values()]
            done = epochs - sum(number for number, _ in remaining)
            now = time.monotonic()
            if ended or done > shown:  # otherwise the last forecast stands
                shown = max(shown, done)
                end = now + time_left([seconds for _, seconds in remaining], at_a_time)
            forecast = f"{times.duration(end - now)} left" if end >= now else "time left unknown"
            bar.n = len(jobs) - len(left)
            bar.set_postfix_str(f"{round(shown, 2):g} of {epochs} epochs, {forecast}")
            for run in ended:
                spent = times.spent(run.ended_record())
                tqdm.write(f"{run}: {outcome(run)} after {spent}; {bar.postfix}", file=sys.stderr)
            if ended:
                yield ended


def outcome(run: Run) -> str:
    """Returns a Table 2 run's accuracy, or "trained" for a study's run: some studies hide results until all runs end."""
    if run.study != TABLE_2:
        return "trained"
    metrics = run.metrics()
    return "diverged" if metrics["diverged"] else f"{metrics['test_accuracy']:.1%}"


def show_every() -> float:
    return SHOWN_EVERY if sys.stderr.isatty() else LOGGED_EVERY


def progress(run: Run, config: RunConfig, estimates: times.Estimates) -> tuple[float, float | None]:
    """Returns the remaining epochs of a run, and an estimate of the remaining seconds (None if unknown).

    The estimate uses the run's own pace if the run is training on this machine, and otherwise the pace of earlier runs.
    """
    for path in run.scratch.parent.glob(f"{run.seed}-*/{RECORD}"):
        with contextlib.suppress(UserError):  # if the run has just ended, its scratch folder is gone
            own = records.parse(path, RunRecord, f"delete {path.parent}")
            done = len(own.timestamps) - 1  # number of points after step 0
            if done > 0 and matches(own, config):
                left = config.train.epochs * config.train.points_per_epoch - done
                return left / config.train.points_per_epoch, left * own.seconds / done
    with contextlib.suppress(UserError):
        if is_trained(run, config):  # the run is complete, but its process has not ended
            return 0, 0
    return config.train.epochs, estimates.of(run, config)


def time_left(seconds: list[float | None], at_a_time: int) -> float:
    """Estimates the seconds until all runs end, given the remaining seconds of each. Returns NaN if any of these is None."""
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        return math.nan
    return max(sum(known) / at_a_time, *known, 0)


# DVC


def has_dvc() -> bool:
    return bool(shutil.which("dvc")) and Path(".dvc").is_dir()


def adopt(settings: Params, no_tracking: bool) -> None:
    """Registers with DVC and MLflow the runs of Table 2 that DVC has not recorded, such as runs from another machine.

    Raises:
        UserError: a DVC command fails.
    """
    if not has_dvc():
        return
    done = subprocess.run(["dvc", "status", "--json", "train"], stdout=subprocess.PIPE, check=False, encoding="utf-8")
    if done.returncode:
        raise UserError("`dvc status train` failed: fix the error reported above.")
    changed = json.loads(done.stdout)
    runs = [run for run, config in table_2_jobs(settings) if run.stage in changed and is_trained(run, config)]
    if not runs:
        return
    print(f"Registering with DVC the runs that it has not recorded: {', '.join(map(str, runs))}", file=sys.stderr)
    if refused := commit(runs):
        raise UserError(commit_failed(refused))
    if not no_tracking:
        tracking.sync_quietly(*runs)


def commit_failed(stages: list[str]) -> str:
    return f"`dvc commit` failed: fix the error reported above, then run `dvc commit -f {shlex.join(stages)}`."


def commit(runs: list[Run]) -> list[str]:
    """Registers runs of Table 2 with DVC. Ignores runs of studies, which have no DVC stage.

    Returns the stages of the runs if `dvc commit` fails, else [].
    """
    targets = [run.stage for run in runs if run.study == TABLE_2]
    if not (targets and has_dvc()):
        return []
    while others := locks.dvc_processes():
        user = f"which is running here ({' and '.join(others)})"
        print(f"Waiting to register {len(targets)} runs with DVC, {user}.", file=sys.stderr, flush=True)
        time.sleep(LOGGED_EVERY)
    command = ["dvc", "--wait-for-lock", "commit", "--force", "--quiet", *targets]
    return targets if subprocess.run(command, check=False).returncode else []


# Training on this machine


def train_here(jobs: list[Job], at_a_time: int) -> Generator[list[Run]]:
    """Executes runs on this machine, `at_a_time` of them at once. An interrupt stops all of them.

    At least every `show_every()` seconds, yields the runs that have ended since the last yield.
    """
    import torch

    count = torch.cuda.device_count()
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    environments = [{"CUDA_VISIBLE_DEVICES": str(name)} for name in given[:count] or range(count)] or [{}]
    free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for environment in itertools.islice(itertools.cycle(environments), at_a_time):
        free.put(environment)

    def train_one(run: Run) -> None:
        environment = free.get()
        try:
            execute([*command(run), "--no-tracking"], Path(), environment)
        finally:
            free.put(environment)

    def collect(run: Run, future: Future) -> None:
        if error := future.exception():
            for other in futures:  # cancels runs that have not started
                other.cancel()
            raise error

    with ThreadPoolExecutor(at_a_time) as pool:
        futures = {}
        try:
            for run, _ in jobs:
                futures[pool.submit(train_one, run)] = run
            yield from as_completed(futures, lambda left: wait(left, show_every(), FIRST_COMPLETED).done, collect)
        except (KeyboardInterrupt, GeneratorExit):
            pool.shutdown(wait=False, cancel_futures=True)
            while PROCESSES or not all(future.done() for future in futures):  # a task may still start a process
                for process in set(PROCESSES):
                    process.terminate()
                time.sleep(0.05)
            raise


if __name__ == "__main__":
    main()
