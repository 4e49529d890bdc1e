"""Lists the runs that Table 2 and the studies need, finds the missing ones, and starts the processes that train them."""

from __future__ import annotations

import fnmatch
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline import studies
from pipeline.config import params
from pipeline.config.params import Params, RunConfig
from pipeline.core.errors import UserError
from pipeline.data import idx
from pipeline.results.runs import of_table_2
from pipeline.training.run import TABLE_2, Run

OF_TABLE_2 = (f"{TABLE_2}/*",)
Job = tuple[Run, RunConfig]
PROCESSES: set[subprocess.Popen] = set()  # running processes, one for each run in training


def missing(jobs: list[Job]) -> list[Job]:
    return [job for job in jobs if not is_trained(*job)]


def is_trained(run: Run, config: RunConfig) -> bool:
    """True if a run has these settings and the current data. A run of Table 2 must also have weights to evaluate."""
    if not run.is_current(config) or (run.study == TABLE_2 and not run.weights.exists()):
        return False
    return run.ended_record().data_sha256 == source_digest(config.data.source)


def list_jobs(settings: Params, patterns: Iterable[str] = OF_TABLE_2) -> list[Job]:
    """Returns the runs of Table 2 and of studies that match patterns such as table_2/osa_qr/*, in the order of `patterns`.

    Raises:
        UserError: a pattern matches no run.
    """
    parts = [pattern.partition("/")[0] for pattern in patterns]
    jobs = table_2_jobs(settings)
    for name in studies.names():
        if any(fnmatch.fnmatchcase(name, part) for part in parts):
            jobs += jobs_of(name, settings)
    by_name = {str(job[0]): job for job in jobs}
    selected: dict[str, Job] = {}
    for pattern in patterns:
        matching = {name: job for name, job in by_name.items() if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not matching:
            raise UserError(f"--only {pattern} matches no run: give STUDY/NAME/SEED, where * stands for anything.")
        selected |= matching
    return list(selected.values())


def table_2_jobs(settings: Params) -> list[Job]:
    configs = {name: params.resolve(settings, name) for name in settings.run.variants}
    return [(run, configs[run.variant]) for run in of_table_2(settings)]


def jobs_of(study: str, settings: Params) -> list[Job]:
    if (trainings := studies.get(study).trainings) is None:
        return []
    from pipeline.studies.lab import Lab  # imports torch, which is slow

    lab = Lab(study, settings, params.load_paper(), studies.reading_of(study))
    return [
        (lab.run(variant, overrides, seed), lab.config(variant, overrides))
        for variant, overrides, seed in trainings(studies.settings(study), lab)
    ]


@functools.cache
def source_digest(source: str) -> str:
    return idx.data_digest(idx.folder(source))


def command(run: Run) -> list[str]:
    """Returns the arguments of the Python process that trains a run."""
    study = [] if run.study == TABLE_2 else ["--study", run.study, *params.as_options(run.overrides)]
    return ["-m", "pipeline", "train", run.variant, str(run.seed), *study]


def execute(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Runs a Python process on one thread, in a folder with code, parameters and data. Prints the process's warnings.

    Raises:
        RuntimeError: the process fails.
    """
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", **environment}
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=settings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as process:
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


def as_completed(
    tasks: dict[Any, Run], wait: Callable[[list], Iterable], collect: Callable[[Run, Any], None]
) -> Generator[list[Run]]:
    """After each call of `wait`, yields the runs that have just ended. Stops once all tasks have ended.

    Args:
        tasks: the run of each task.
        wait: takes the list of remaining tasks, and returns the tasks in it that have ended, if any.
        collect: stores the results of an ended task, or raises the error of the task.

    Raises:
        UserError: a task failed. The error is raised only after all other tasks have ended.
    """
    left, failure = dict(tasks), None
    while left:
        ended = []
        for task in wait(list(left)):
            run = left.pop(task)
            try:
                collect(run, task)
                ended.append(run)
            except Exception as error:  # noqa: BLE001  a task may raise anything
                why = (str(error).strip() or type(error).__name__).splitlines()[-1].removeprefix("error: ")
                failure = failure or UserError(f"{run} was not trained: {why}")
        yield ended
    if failure:
        raise failure
