"""Reproduces the paper: `make reproduce`. Fetches the data, trains missing runs in parallel, and lets DVC do the rest.

At the end it prints the table, the paths of page and figure, the number of runs trained, and how to train again.
"""

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from tqdm import tqdm

from pipeline.config import params
from pipeline.core import git
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.results.runs import recorded
from pipeline.tools import fan_out, times
from pipeline.tools.jobs import digest, missing, table_2_jobs

LOCK, README, OUTPUTS = Path("dvc.lock"), Path("README.md"), Path("paper_outputs")
BEGUN, PASSED = re.compile(r"Running stage '(.+)':"), re.compile(r"Stage '(.+)' (didn't change|is cached)")
OF_DVC = re.compile(
    r"> |(Updat|Generat)ing lock file|Use `dvc push`|Data and pipelines|To (track|enable)|\s*(git add|dvc config) |\s*$"
)


@entry_point
def main(arguments: list[str] | None = None) -> None:
    chosen = fan_out.add_options(command_parser("reproduce", __doc__)).parse_args(arguments)
    settings = params.load()
    trained = bring_up_to_date(
        settings, *[f"--jobs={chosen.jobs}"] * bool(chosen.jobs), *["--no-tracking"] * chosen.no_tracking
    )
    as_a_stage = os.environ | {"DVC_STAGE": "readme"}  # skips the check with DVC, as all is current
    subprocess.run([sys.executable, "-m", "pipeline", "report", "readme"], check=True, env=as_a_stage)
    table = [
        line for line in README.read_text(encoding="utf-8").partition("<!-- /answer -->")[0].splitlines() if line[:1] == "|"
    ]
    print("", *table, "", sep="\n")
    print(f"The page:   {(OUTPUTS / 'report.html').resolve()}")
    print(f"The figure: {(OUTPUTS / 'figure_1.svg').resolve()}")
    print(f"{said_of(trained)} {how_to_train(settings)}")


def bring_up_to_date(settings: params.Params, *options: str) -> int:
    """Brings data, runs and everything that depends on them up to date. Returns the number of runs trained."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if not has_data(settings.data.source):
        repro("fetch")
    fan_out.take_over(settings, "--no-tracking" in options)
    left = missing(table_2_jobs(settings))
    if left:
        fan_out.main([*options])
    repro()
    return len(left)


def has_data(source: str) -> bool:
    """True if a published data set is here and intact. False for a user's folder, which may have changed."""
    with contextlib.suppress(UserError):
        return bool(digest(source)) and source != params.FOLDER
    return False


def repro(*options: str) -> None:
    """Runs `dvc repro` with one line of progress. Shows the output of stages, and DVC's errors, but not its other messages.

    Raises:
        UserError: a stage fails.
    """
    num_stages = len(re.findall(r"^  \S.*:$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)) if LOCK.exists() else 0
    line, ended = "{n_fmt}/{total_fmt} stages{postfix} [{elapsed}]", threading.Event()
    command = [sys.executable, "-m", "dvc", "repro", *options]
    with (
        tqdm(total=num_stages or None, bar_format=line, leave=False, disable=None) as bar,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process,
    ):
        threading.Thread(target=tick, args=(bar, ended), daemon=True).start()
        try:
            for text in process.stdout:
                show(text.rstrip(), bar)
        except BaseException:
            process.terminate()
            raise
        finally:
            ended.set()
    if process.returncode:
        raise UserError("`dvc repro` failed, as it says above: with that mended, the same command goes on from there.")


def tick(bar: tqdm, ended: threading.Event) -> None:
    """Redraws the line of progress every second, so that its clock runs during a long stage."""
    while not ended.wait(1):
        bar.refresh()


def show(text: str, bar: tqdm) -> None:
    """Counts DVC's own lines as progress, and shows the lines that stages print."""
    if begun := BEGUN.match(text):
        bar.set_postfix_str(begun[1])
        bar.update()
        if bar.disable:
            print(begun[1], flush=True)
    elif PASSED.match(text):
        bar.update()
    elif not OF_DVC.match(text):
        tqdm.write(text)


def said_of(trained: int) -> str:
    """A sentence on how many runs were trained, and if the results are as committed."""
    if trained:
        runs_were = "1 run was" if trained == 1 else f"{trained} runs were"
        return f"{runs_were} trained: `git diff --stat` shows what came out otherwise, `make restore` takes it back."
    changed = git.ask("status", "--porcelain", "--", str(OUTPUTS))
    also = (
        ", but some results differ from the committed ones: `git status` lists them"
        if changed
        else ": results are as committed"
    )
    return f"Nothing was trained{also}."


def how_to_train(settings: params.Params) -> str:
    """A sentence with the command that trains one run again, and its time, estimated from records."""
    (run, config), *_ = table_2_jobs(settings)
    seconds = times.Estimates(record for _, record in recorded()).of(run, config)
    time = f" (about {times.duration(seconds)})" if seconds else ""
    return f"To train {settings.label(run.variant)} anew{time}: `. .venv/bin/activate`, then `{run.command}`."


if __name__ == "__main__":
    main()
