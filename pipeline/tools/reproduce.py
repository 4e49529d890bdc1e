"""Reproduces the paper: `make reproduce`. Fetches the data, trains missing runs in parallel, and lets DVC do the rest.

At the end, it prints Table 2 and the path of the report.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from pipeline.config import params
from pipeline.core import git
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.results.runs import recorded
from pipeline.tools import fan_out, times
from pipeline.tools.jobs import missing, source_digest, table_2_jobs

README, OUTPUTS = Path("README.md"), Path("paper_outputs")
UNSHOWN = ("didn't change, skipping", "ing lock file", "dvc push")  # DVC's lines that contain these words are not printed


@entry_point
def main(arguments: list[str] | None = None) -> None:
    chosen = fan_out.add_options(command_parser("reproduce", __doc__)).parse_args(arguments)
    settings = params.load()
    options = [f"--per-gpu={chosen.per_gpu}"]
    if chosen.jobs:
        options.append(f"--jobs={chosen.jobs}")
    if chosen.no_tracking:
        options.append("--no-tracking")
    trained = bring_up_to_date(settings, options)
    as_a_stage = os.environ | {"DVC_STAGE": "readme"}  # tells the command that DVC has already checked the inputs
    subprocess.run([sys.executable, "-m", "pipeline", "report", "readme"], check=True, env=as_a_stage)
    table = [
        line for line in README.read_text(encoding="utf-8").partition("<!-- /answer -->")[0].splitlines() if line[:1] == "|"
    ]
    print("", *table, "", sep="\n")
    print(f"The page:   {(OUTPUTS / 'report.html').resolve()}")
    print(f"The figure: {(OUTPUTS / 'figure_1.svg').resolve()}")
    print(f"{summary_line(trained)} {how_to_train(settings)}")


def bring_up_to_date(settings: params.Params, options: list[str]) -> int:
    """Brings data and results up to date. Passes `options` to fan_out. Returns the number of runs trained."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if not has_data(settings.data.source):
        repro("fetch")
    fan_out.adopt(settings, "--no-tracking" in options)
    left = missing(table_2_jobs(settings))
    if left:
        fan_out.main(options)
    print("DVC is looking for stages whose inputs have changed.", flush=True)
    repro()
    return len(left)


def has_data(source: str) -> bool:
    """True for a readable published data set. False for the user's images, so that `fetch` runs and checks them."""
    with contextlib.suppress(UserError):
        return bool(source_digest(source)) and source != params.USER_FOLDER
    return False


def repro(*options: str) -> None:
    """Runs `dvc repro`, and prints its output except for uninformative lines.

    Raises:
        UserError: a stage fails.
    """
    command = [sys.executable, "-m", "dvc", "repro", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            for line in process.stdout or ():
                if not any(words in line for words in UNSHOWN):
                    print(line, end="", flush=True)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise UserError("`dvc repro` failed: fix the error reported above, then run the same command again to resume.")


def summary_line(trained: int) -> str:
    if trained:
        runs_were = "1 run was" if trained == 1 else f"{trained} runs were"
        return f"{runs_were} trained: `git diff --stat` shows which results changed, and `make restore` undoes the changes."
    if git.ask("status", "--porcelain", "--", str(OUTPUTS)):
        return "Nothing was trained, but some results differ from the committed ones: `git status` lists them."
    return "Nothing was trained: results are as committed."


def how_to_train(settings: params.Params) -> str:
    (run, config), *_ = table_2_jobs(settings)
    seconds = times.Estimates(record for _, record in recorded()).of(run, config)
    time = f" (about {times.duration(seconds)})" if seconds else ""
    return f"To train {settings.label(run.variant)} anew{time}: `. .venv/bin/activate`, then `{run.command}`."


if __name__ == "__main__":
    main()
