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
from collections.abc import Callable, Iterator
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

SHOWN_EVERY, LOGGED_EVERY = 2, 60  # seconds, on a terminal and elsewhere


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
    jobs: list[Job], at_a_time: int | None, no_tracking: bool, address: str | None = None, per_gpu: int = 1
) -> Iterator[list[Run]]:
    """Trains on a cluster or here. Yields the runs that have ended since the last time, which MLflow then shows."""
    if address:
        finished, at_a_time = on_cluster(jobs, address, per_gpu), len(jobs)
    else:
        at_a_time = at_a_time or at_once(per_gpu)
        finished = here(jobs, at_a_time)
    for ended in follow(jobs, finished, at_a_time):
        if not no_tracking:
            tracking.sync_quietly(*ended)
        yield ended


def at_once(per_gpu: int) -> int:
    """Returns how many trainings run at a time on this machine: `per_gpu` a GPU, or where there is no GPU one a core."""
    import torch  # slow, and mostly nothing is left to train

    if count := torch.cuda.device_count():
        return count * per_gpu
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # as on macOS


# progress


def follow(jobs: list[Job], finished: Iterator[list[Run]], at_a_time: int) -> Iterator[list[Run]]:
    """Passes on the runs that have ended, with a line for each. Shows how far all are and how long the rest takes, also
    where none has ended."""
    estimates, left = times.Estimates(record for _, record in recorded()), {str(run): (run, config) for run, config in jobs}
    epochs, line = sum(config.train.epochs for _, config in jobs), "{n_fmt}/{total_fmt} trainings{postfix} [{elapsed}]"
    shown, news = 0.0, None  # epochs, which never fall; how far all were when the time was last forecast
    with contextlib.closing(finished), tqdm(total=len(jobs), bar_format=line) as bar:
        for ended in itertools.chain([[]], finished):
            for run in ended:
                del left[str(run)]
                estimates.add(run.record())
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
                tqdm.write(f"{run}: {result} after {times.spent(run.record())}; {bar.postfix}", file=sys.stderr)
            if ended:
                yield ended


def show_every() -> float:
    """Seconds."""
    return SHOWN_EVERY if sys.stderr.isatty() else LOGGED_EVERY


def progress(run: Run, config: RunConfig, estimates: times.Estimates) -> tuple[float, float | None]:
    """The epochs that a run still has to do, and the seconds that they will take.

    Where it trains on this machine, by its own pace, in which a pause before it was resumed does not count; else by the
    records of others.
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
    return config.train.epochs, estimates.of(run, config)


def time_left(seconds: list[float | None], at_a_time: int, since: float = 0) -> str:
    """The time left for runs of these durations, with so many trainings side by side, `since` seconds after it was forecast.
    A forecast that is past is withdrawn."""
    if None in seconds:
        return "time left unknown"
    left = max(sum(seconds) / max(1, at_a_time), *seconds, 0) - since  # the longest may end last
    return f"{times.duration(left)} left" if left >= 0 else "time left unknown"


# DVC


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
    runs = [job[0] for job in table_2_jobs(settings) if job[0].stage in changed and is_trained(*job)]
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
    targets = [run.stage for run in runs if run.study == TABLE_2]
    if not (targets and has_dvc()):
        return []
    while others := locks.dvc_processes():
        print(f"{' and '.join(others)} works here: waiting to tell DVC of {len(targets)} runs.", file=sys.stderr, flush=True)
        time.sleep(LOGGED_EVERY)
    command = ["dvc", "--wait-for-lock", "commit", "--force", "--quiet", *targets]
    return targets if subprocess.run(command, check=False).returncode else []


# here


def here(jobs: list[Job], at_a_time: int) -> Iterator[list[Run]]:
    """Trains side by side on this machine, and yields the runs that have ended, now and then none. Interrupted, ends all."""
    import torch

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


def on_cluster(jobs: list[Job], address: str, per_gpu: int = 1) -> Iterator[list[Run]]:
    """Trains on a cluster, and yields the runs whose files have come, now and then none."""
    with cluster.submitted(jobs, address, per_gpu) as (tasks, ended, receive):
        yield from as_they_end(tasks, lambda waiting: ended(waiting, show_every()), receive)


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


if __name__ == "__main__":
    main()
