"""Trains all missing or stale runs, several at once: `python -m pipeline fan_out`.

Each run trains in a separate process: on this machine, with one thread or a share of a GPU, or on a node of a Ray cluster.
fan_out registers ended runs with DVC and MLflow. After an interruption, the same command resumes each run at the last point
of its curves. On a cluster, an interrupted run starts again at step 0.
"""

import argparse
import contextlib
import itertools
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

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
    command,
    execute,
    is_trained,
    list_jobs,
    missing,
    table_2_jobs,
)
from pipeline.training.run import TABLE_2, Run, matches

SHOWN_EVERY, LOGGED_EVERY = 2, 60  # seconds between updates of the progress, on a terminal and in a log


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
        adopt(settings, chosen.no_tracking)
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
    """Adds to a parser the options of every command that trains several runs at once. Returns the parser."""
    parser.add_argument("--jobs", type=positive, help="trainings at a time on this machine; default: one a core or GPU")
    per_gpu_help = "trainings at a time on one GPU; default: 1; for more, start NVIDIA's MPS by `nvidia-cuda-mps-control -d`"
    parser.add_argument("--per-gpu", type=positive, default=1, metavar="N", help=per_gpu_help)
    parser.add_argument("--no-tracking", action="store_true", help="do not show the runs in MLflow")
    return parser


def positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


@contextlib.contextmanager
def single_instance(lock: Path) -> Iterator[None]:
    """Holds a lock file. From now on, SIGTERM and SIGHUP interrupt this process as Ctrl-C does.

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
        raise UserError(f"another {lock.stem} works here ({lock} is locked): wait for it, or end it.") from None
    except KeyboardInterrupt:
        raise UserError("interrupted: the same command goes on at the last point of each run's curves.") from None


def train_all(
    jobs: list[Job], at_a_time: int | None, no_tracking: bool, address: str | None = None, per_gpu: int = 1
) -> Iterator[list[Run]]:
    """Trains runs on the cluster at `address`, or on this machine if `address` is None. Yields groups of ended runs."""
    if address:
        finished, at_a_time = on_cluster(jobs, address, per_gpu), len(jobs)
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
    """Yields the groups of ended runs from `finished`, and prints a line for each run.

    After every group, even an empty one, shows the progress of all trainings and the time left.
    """
    estimates, left = times.Estimates(record for _, record in recorded()), {str(run): (run, config) for run, config in jobs}
    epochs, line = sum(config.train.epochs for _, config in jobs), "{n_fmt}/{total_fmt} trainings{postfix} [{elapsed}]"
    # `shown` is the displayed number of finished epochs, which never decreases. `news` holds the number of runs left and the
    # value of `shown` at the last forecast.
    shown, news = 0.0, None
    with contextlib.closing(finished), tqdm(total=len(jobs), bar_format=line) as bar:
        for ended in itertools.chain([[]], finished):
            for run in ended:
                del left[str(run)]
                estimates.add(run.ended_record())
            standing = [progress(*job, estimates) for job in left.values()]
            shown = max(shown, epochs - sum(number for number, _ in standing))
            bar.n = len(jobs) - len(standing)
            if (len(left), shown) != news:
                news, seconds, told = (len(left), shown), [each for _, each in standing], time.monotonic()
            forecast = time_left(seconds, at_a_time, time.monotonic() - told)
            bar.set_postfix_str(f"{round(shown, 2):g} of {epochs} epochs, {forecast}")
            for run in ended:
                metrics = run.metrics()
                result = "diverged" if metrics["diverged"] else f"{metrics['test_accuracy']:.1%}"
                tqdm.write(f"{run}: {result} after {times.spent(run.ended_record())}; {bar.postfix}", file=sys.stderr)
            if ended:
                yield ended


def show_every() -> float:
    return SHOWN_EVERY if sys.stderr.isatty() else LOGGED_EVERY


def progress(run: Run, config: RunConfig, estimates: times.Estimates) -> tuple[float, float | None]:
    """Returns the remaining epochs of a run, and an estimate of the remaining seconds, or None if it is unknown.

    If the run trains on this machine, the estimate continues the pace of the run. If not, earlier runs give the estimate.
    """
    for path in run.scratch.parent.glob(f"{run.seed}-*/{RECORD}"):
        with contextlib.suppress(UserError):  # the run may have just ended, and its record moved
            own = records.parse(path, RunRecord, f"delete {path.parent}")
            done = len(own.timestamps) - 1  # points after step 0
            if done > 0 and matches(own, config):
                left = config.train.epochs * config.train.points_per_epoch - done
                return left / config.train.points_per_epoch, left * own.seconds / done
    with contextlib.suppress(UserError):
        if is_trained(run, config):  # the run is complete, but its process has not ended
            return 0, 0
    return config.train.epochs, estimates.of(run, config)


def time_left(seconds: list[float | None], at_a_time: int, since: float = 0) -> str:
    """Formats the time left for several runs. This time is unknown if a duration is None or `since` exceeds the forecast.

    Args:
        seconds: forecast duration of each run in seconds, or None if it is unknown.
        at_a_time: number of runs that train at once.
        since: age of the forecast in seconds.
    """
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        return "time left unknown"
    left = max(sum(known) / max(1, at_a_time), *known, 0) - since  # at least as long as the longest run
    return f"{times.duration(left)} left" if left >= 0 else "time left unknown"


# DVC


def has_dvc() -> bool:
    return bool(shutil.which("dvc")) and Path(".dvc").is_dir()


def adopt(settings: Params, no_tracking: bool) -> None:
    """Registers with DVC and MLflow the runs of Table 2 that another command or another machine has trained.

    Raises:
        UserError: a command of DVC fails.
    """
    if not has_dvc():
        return
    done = subprocess.run(["dvc", "status", "--json", "train"], stdout=subprocess.PIPE, check=False, encoding="utf-8")
    if done.returncode:
        raise UserError("`dvc status train` failed: do what it says.")
    changed = json.loads(done.stdout)
    runs = [job[0] for job in table_2_jobs(settings) if job[0].stage in changed and is_trained(*job)]
    if not runs:
        return
    print(f"Telling DVC of runs that it does not know: {', '.join(map(str, runs))}", file=sys.stderr)
    if refused := commit(runs):
        raise UserError(f"`dvc commit` failed: do what it says, and then `dvc commit -f {shlex.join(refused)}`.")
    if not no_tracking:
        tracking.sync_quietly(*runs)


def commit(runs: list[Run]) -> list[str]:
    """Registers runs of Table 2 with DVC. Ignores runs of studies, which have no DVC stage.

    Returns the stages of the runs if `dvc commit` fails, else [].
    """
    targets = [run.stage for run in runs if run.study == TABLE_2]
    if not (targets and has_dvc()):
        return []
    while others := locks.dvc_processes():
        print(f"{' and '.join(others)} works here: waiting to tell DVC of {len(targets)} runs.", file=sys.stderr, flush=True)
        time.sleep(LOGGED_EVERY)
    command = ["dvc", "--wait-for-lock", "commit", "--force", "--quiet", *targets]
    return targets if subprocess.run(command, check=False).returncode else []


# Training on this machine or on a cluster


def train_here(jobs: list[Job], at_a_time: int) -> Generator[list[Run]]:
    """Trains runs on this machine, `at_a_time` runs at once. An interrupt ends all trainings.

    At least every `show_every()` seconds, yields the list of the runs that have ended since the last list.
    """
    import torch

    count = torch.cuda.device_count()
    free: queue.SimpleQueue[str | int | None] = queue.SimpleQueue()
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
            for other in futures:  # cancels runs that have not started
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
            while PROCESSES or not all(future.done() for future in futures):  # a task may still start a process
                for process in set(PROCESSES):
                    process.terminate()
                time.sleep(0.05)
            raise


def on_cluster(jobs: list[Job], address: str, per_gpu: int = 1) -> Generator[list[Run]]:
    """Trains runs on a cluster.

    At least every `show_every()` seconds, yields the list of the runs that have ended and sent their files since the last
    list.
    """
    with cluster.submitted(jobs, address, per_gpu) as (tasks, ended, receive):
        yield from as_they_end(tasks, lambda waiting: ended(waiting, show_every()), receive)


def as_they_end(tasks: dict[Any, Run], wait: Callable, take: Callable) -> Iterator[list[Run]]:
    """Waits for tasks with the function `wait`, and passes each ended task with its run to the function `take`.

    After each call of `wait`, yields the list of the runs whose tasks have just ended without an error.

    Raises:
        UserError: a task failed. The error is raised only after all other tasks, which may take hours, have ended.
    """
    waiting, failures = dict(tasks), []
    while waiting:
        ended = []
        for task in wait(list(waiting)):
            run = waiting.pop(task)
            try:
                take(run, task)
            except Exception as error:  # noqa: BLE001  a task may raise anything
                why = str(error).strip().splitlines()[-1:] or [type(error).__name__]
                failures.append(UserError(f"{run} was not trained: {why[0].removeprefix('error: ')}"))
            else:
                ended.append(run)
        yield ended
    if failures:
        raise failures[0]


if __name__ == "__main__":
    main()
