"""Trains all runs that are missing or stale, several at once: `python -m pipeline.tools.fan_out`.

They are those of Table 2 and of every study whose stage trains; `--only` also trains those that a stage gathers. Each is a
process of its own with one thread, or on its share of the GPUs, on this machine; or with `--cluster ADDRESS` on the nodes of
a Ray cluster (requirements-cluster.txt), which get code, parameters and data shipped along and give each run's files back
whole. A training that a dying node takes with it begins anew on another one. Killed, the same command goes on where each run
stood at the end of its last epoch, or with a cluster trains anew what had not come back.
"""

import argparse
import contextlib
import fnmatch
import functools
import io
import itertools
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from pipeline import runs, studies
from pipeline.core import files, params, record
from pipeline.core.errors import UserError, entry_point
from pipeline.core.params import Paper, Params, RunConfig
from pipeline.lab import Lab
from pipeline.runs import Run
from pipeline.training import data

LOCK = Path(".checkpoints/fan_out.lock")
SHIPPED = ("osa", "pipeline", "params.yaml", "dvc.yaml")  # to another machine, beside the data
RETRIES = 3  # on other nodes, where one dies
SHOWN_EVERY, LOGGED_EVERY = 2, 60  # seconds, on a terminal and elsewhere
NOT_TOLD = "DVC could not be told of the trainings, which are there: mend what it says, and run this again."
Job = tuple[Run, RunConfig]
STARTED: set[subprocess.Popen] = set()  # and not ended yet
ENDED_BY: list[int] = []  # the signal that ends this process, once there is one


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tools.fan_out", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--jobs", type=positive, help="trainings at a time on this machine; default: one a GPU, or one a core"
    )
    parser.add_argument("--cluster", metavar="ADDRESS", help="of a Ray cluster; auto: the one that runs on this machine")
    parser.add_argument("--no-tracking", action="store_true", help="do not follow the runs in MLflow")
    only_help = "these alone, of whatever study, in this order, as in depth/vit+model.depth=36*/0; * stands for anything"
    parser.add_argument("--only", nargs="+", metavar="RUN", help=only_help)
    chosen = parser.parse_args(arguments)
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(LOCK, timeout=0), ended_together():
            asked = wanted(params.load(), chosen.only)
            left, jobs = [job for job in asked if not is_there(*job)], chosen.jobs or slots()
            try:
                if chosen.cluster:
                    follow(left, on_cluster(left, chosen.cluster), jobs=len(left))
                else:
                    follow(left, here(left, jobs, ["--no-tracking"] if chosen.no_tracking else []), jobs)
            finally:
                is_known = commit([run for run, config in asked if run.study == runs.TABLE_2 and is_there(run, config)])
        if not is_known:
            raise UserError(NOT_TOLD)
    except Timeout:
        raise UserError(f"another process trains these runs already ({LOCK} is locked): wait for it, or end it.") from None
    except KeyboardInterrupt:
        raise UserError("interrupted: the same command goes on at the end of each run's last epoch.") from None


@contextlib.contextmanager
def ended_together() -> Iterator[None]:
    """Inside, a signal that ends this process ends its trainings too, as an interrupt from a terminal does by itself."""

    def end(number: int, _) -> None:
        ENDED_BY.append(number)
        for process in set(STARTED):
            process.terminate()
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heard = [number for number, handler in before.items() if handler != signal.SIG_IGN]  # as under nohup
    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
        ENDED_BY.clear()


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def missing(settings: Params, patterns: list[str] | None = None) -> list[Job]:
    """Of the runs `wanted` those that are not there."""
    return [job for job in wanted(settings, patterns) if not is_there(*job)]


def is_there(run: Run, config: RunConfig) -> bool:
    """Whether a run is, with weights, as today's code, data and parameters make it."""
    if not runs.is_current(run, config, None):  # without a look at data that may be missing
        return False
    return runs.is_current(run, config, digest(config.data.source))


def wanted(settings: Params, patterns: list[str] | None = None) -> list[Job]:
    """What `dvc repro` would train, of Table 2 and of the studies; with `patterns` what matches them, of any study."""
    paper = params.load_paper()
    found = [
        (Run(name, seed), params.resolve(settings, name)) for name in settings.run.variants for seed in settings.run.seeds
    ]
    for name in settings.studies:
        if patterns is not None or not studies.gathers(name):
            found += of_study(name, settings, paper)
    return found if patterns is None else only(found, patterns)


def of_study(name: str, settings: Params, paper: Paper) -> list[Job]:
    """What a study asks for, which is nothing for most."""
    lab = Lab(name, settings, paper)
    asked = studies.trainings(name, settings.studies[name], lab)
    return [(lab.run(variant, overrides, seed), lab.config(variant, overrides)) for variant, overrides, seed in asked]


def only(wanted: list[Job], patterns: list[str]) -> list[Job]:
    """Those that match a pattern, once each, in the order of the patterns. Raises UserError if one matches none."""
    named, matching = {str(run): (run, config) for run, config in wanted}, {}
    for each in patterns:
        found = {name: job for name, job in named.items() if name == each or fnmatch.fnmatchcase(name, each)}
        if not found:
            raise UserError(f"--only {each} is no run that is asked for: give STUDY/NAME/SEED, where * stands for anything.")
        matching |= found
    return list(matching.values())


@functools.cache
def digest(source: str) -> str:
    """That of a data set, read once."""
    return data.digest(data.folder(source))


def slots() -> int:
    """How many trainings fit this machine."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def follow(wanted: list[Job], finished: Iterator[Run], jobs: int) -> None:
    """Shows one line for the whole: how many trainings have ended, how far all are, and how long the rest will take."""
    made, left = runs.finished(), {str(run): (run, config) for run, config in wanted}
    epochs = sum(config.train.epochs for _, config in wanted)
    line = "{n_fmt}/{total_fmt} trainings{postfix} [{elapsed}]"
    with contextlib.closing(finished), tqdm(total=len(wanted), bar_format=line) as bar:

        def show() -> None:
            to_do = [standing(*job, made) for job in left.copy().values()]
            done = epochs - sum(number for number, _ in to_do)
            bar.n = len(wanted) - len(to_do)
            bar.set_postfix_str(f"{done:.0f} of {epochs} epochs, {remaining([seconds for _, seconds in to_do], jobs)}")

        show()
        with repeatedly(show):
            for run in finished:
                del left[str(run)]
                show()
        show()  # after the thread's last word, which may be of before


@contextlib.contextmanager
def repeatedly(show: Callable[[], None]) -> Iterator[None]:
    """Inside, a thread calls this from time to time."""
    ended, seconds = threading.Event(), SHOWN_EVERY if sys.stderr.isatty() else LOGGED_EVERY

    def repeat() -> None:
        while not ended.wait(seconds):
            show()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def standing(run: Run, config: RunConfig, made: list[dict]) -> tuple[float, float | None]:
    """The epochs that a run has to do yet, and the seconds that they will take.

    Where it trains on this machine, by its own pace from point to point; else by these records, if any is alike.
    """
    for path in run.scratch.parent.glob(f"{run.seed}-*/record.json"):
        with contextlib.suppress(UserError):  # it has ended since
            begun = files.read_json(path)
            steps = np.diff(begun["timestamps"])
            if steps.size and runs.same_config(begun["config"], config) and record.is_of_today(begun):
                left = config.train.epochs * config.train.points_per_epoch - steps.size
                return left / config.train.points_per_epoch, left * float(np.median(steps)) / 1000
    return config.train.epochs, runs.seconds_of(run, made)


def remaining(seconds: list[float | None], jobs: int) -> str:
    """What is left, where each run takes so long, for so many trainings side by side."""
    if None in seconds:
        return "time left unknown"
    minutes = max(sum(seconds) / max(1, jobs), *seconds, 0) / 60  # of the longest, if others end before it
    return f"{minutes / 60:.1f} h left" if minutes >= 60 else f"{minutes:.0f} min left"


def commit(done: list[Run]) -> bool:
    """Tells DVC, where it is, that the stages of these runs are done, or it would train them again. Whether it took that.

    They are all that are there, and not those of this call alone: a call that was killed has told of none.
    """
    if not (done and shutil.which("dvc") and Path(".dvc").is_dir()):
        return True
    stages = [f"train@{run.variant}-{run.seed}" for run in done]
    return subprocess.run(["dvc", "commit", "--force", "--quiet", *stages], check=False).returncode == 0


def command(run: Run) -> list[str]:
    """Arguments for Python that train a run."""
    study = [] if run.study == runs.TABLE_2 else ["--study", run.study, *params.as_options(run.overrides)]
    return ["-m", "pipeline.train", run.variant, str(run.seed), *study]


def execute(arguments: list[str], folder: Path, environment: dict[str, str], deadline: float = math.inf) -> bool:
    """Runs Python with one thread in a folder that has code, parameters and data, until `deadline` by time.monotonic().

    Returns whether it has ended by itself. What it warns of is told. Raises RuntimeError if it fails.
    """
    settings = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"} | environment
    if ENDED_BY or (left := deadline - time.monotonic()) <= 0:
        return False
    options = dict(cwd=folder, env=settings, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, *arguments], **options) as process:
        STARTED.add(process)
        try:
            if ENDED_BY:  # since this one was asked for
                process.terminate()
            said = process.communicate(timeout=None if math.isinf(left) else left)[1].strip().splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            return False
        finally:
            STARTED.discard(process)
    for line in said:
        if line.startswith("warning: "):
            tqdm.write(line, file=sys.stderr)
    if process.returncode and not ENDED_BY:
        raise RuntimeError(why_it_failed(process.returncode, said))
    return not process.returncode


def why_it_failed(status: int, said: list[str]) -> str:
    """The signal that ended a process, or its last word that is no warning."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    last = [line for line in said if not line.startswith("warning: ")][-1:]
    return last[0].removeprefix("error: ") if last else f"exit status {status}"


def here(wanted: list[Job], jobs: int, options: list[str], deadline: float = math.inf) -> Iterator[Run]:
    """Trains side by side on this machine, and yields each run as it ends. At the deadline the others are cut off: each goes
    on at its last epoch's end when it is next asked for."""
    free: queue.SimpleQueue = queue.SimpleQueue()
    for device in itertools.islice(itertools.cycle(gpus() or [""]), jobs):
        free.put(device)

    def train(run: Run) -> bool:
        device = free.get()
        try:
            environment = {"CUDA_VISIBLE_DEVICES": device} if device else {}
            return execute(command(run) + options, Path(), environment, deadline)
        finally:
            free.put(device)

    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(train, run): run for run, _ in wanted}
        try:
            for future in as_completed(started):
                with told_of(started[future]):
                    has_ended = future.result()
                if has_ended:
                    yield started[future]
        finally:
            pool.shutdown(cancel_futures=True)


def gpus() -> list[str]:
    """The devices of this process as CUDA_VISIBLE_DEVICES names them, numbers where it does not."""
    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] or list(map(str, range(count)))


def on_cluster(wanted: list[Job], address: str) -> Iterator[Run]:
    """Trains on the nodes of a Ray cluster, and yields each run when its files have come."""
    try:
        import ray
    except ImportError:
        raise UserError("--cluster needs Ray: install it with `pip install -r requirements-cluster.txt`.") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError:
        raise UserError(f"there is no Ray cluster at {address}: start one with `ray start --head`.") from None
    try:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the nodes have no copy of this repository
        work = ray.remote(num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD")(execute_shipped)
        bundle = ray.put(shipment({config.data.source for _, config in wanted}))
        pending = {work.remote(bundle, [*command(run), "--no-tracking"], written(run)): run for run, _ in wanted}
        failed = []
        while pending:
            (ready,), _ = ray.wait(list(pending))
            run = pending.pop(ready)
            try:
                with told_of(run, ray.exceptions.RayError):
                    receive(run, ray.get(ready))
            except UserError as error:  # which the others, hours under way, are not to be lost for
                failed.append(error)
            else:
                yield run
        if failed:
            raise failed[0]
    finally:
        ray.shutdown()


@contextlib.contextmanager
def told_of(run: Run, *others: type[Exception]) -> Iterator[None]:
    """Names the run whose training fails inside, with a RuntimeError or one of these others."""
    try:
        yield
    except (RuntimeError, *others) as error:
        raise UserError(f"{run} was not trained: {str(error).strip().splitlines()[-1]}") from None


def written(run: Run) -> list[str]:
    """The files of a run, its record last."""
    return [str(path) for path in run.outputs]


def receive(run: Run, content: list[bytes]) -> None:
    """Puts the files of a run in their places. Where its machine knows no commit it is the one here."""
    *others, made = zip(written(run), content, strict=True)
    for path, each in others:
        files.write_bytes(path, each)
    known = json.loads(made[1])
    if known["environment"].get("git_commit") is None:
        known["environment"] |= record.describe_commit()
    files.write_json(made[0], known)


def shipment(sources: set[str]) -> bytes:
    """An archive of what a training needs."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for name in (*SHIPPED, *map(data.folder, sources)):
            for path in sorted(Path(name).rglob("*")) if Path(name).is_dir() else [Path(name)]:
                if path.is_file() and "__pycache__" not in path.parts:
                    opened.write(path)
    return archive.getvalue()


def execute_shipped(bundle: bytes, arguments: list[str], paths: list[str]) -> list[bytes]:
    """`execute` in a folder of its own on whatever machine this is; what it wrote to these paths."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(io.BytesIO(bundle)).extractall(folder)
        execute(arguments, Path(folder), {"PYTHONPATH": folder})
        return [Path(folder, path).read_bytes() for path in paths]


if __name__ == "__main__":
    main()
