"""All that is to be done on a GPU, in one command that goes on where it was: `make gpu` or `python -m pipeline.benchmarks.gpu`.

The tests that use CUDA, one run of each model, the benchmarks, all other runs that are missing, and the study that measures
on CUDA; then a table of what was measured beside what is aimed at. Each part but the trainings is a process of its own that
takes less than ten minutes. The same command skips what is done and goes on with what was cut off, a training at its last
epoch; with `--minutes 9` it returns in time where no command may take more than ten. All it makes lies in one folder, which
`--import FOLDER` takes over on another machine.

Beyond torch it needs torchvision, numpy, pandas, scipy, matplotlib, pydantic, ruamel-yaml, tqdm and filelock, and for the
tests pytest, hypothesis and pyyaml; neither DVC nor MLflow.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pandas as pd
import torch
from filelock import FileLock, Timeout
from ruamel.yaml import YAML

from pipeline import runs, study
from pipeline.benchmarks import attention, results
from pipeline.benchmarks.step import EXACT, SEED
from pipeline.core import files, params, record
from pipeline.core.errors import UserError, entry_point
from pipeline.core.files import ROOT
from pipeline.core.params import Params
from pipeline.runs import TABLE_2, Run
from pipeline.studies.paper.benchmarks import ALL_MODELS, BEST, FOLDER, TARGETS
from pipeline.studies.paper.complexity import FORWARD
from pipeline.tools import fan_out
from pipeline.tools.fan_out import Job
from pipeline.training import data

STATE = Path("parts.json")  # how each part went
SHALLOW = 6  # blocks of the deep models in a rehearsal
REHEARSAL = ROOT / "pipeline/benchmarks/rehearsal.yaml"
FIRST_RUNS, RUNS = "first_runs", "runs"  # the first are those whose weights the step is timed with
DONE, FAILED, CUT_OFF = "done", "failed", "cut off"
TEST_MODULES = ("pytest", "hypothesis", "yaml")
CODE = ("osa/*.py", "pipeline/cost.py", "pipeline/studies/paper/complexity.py", "pipeline/training/*.py")  # what is measured
LEAST_SECONDS = 5  # left, for a part to begin
NARROW, WIDE = 16, 64  # d_v of the paper's heads, and of the comparison with SDPA
LARGEST_NORM = 8  # ‖S‖₂ up to which orthogonality is aimed at
SDPA_RATIO = f"{BEST} / exact"


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="where everything goes; default: gpu, or gpu_rehearsal")
    parser.add_argument("--minutes", type=float, default=math.inf, help="return after so many; the next call goes on")
    parser.add_argument("--rehearse", action="store_true", help="everything at a tiny size, without a GPU too")
    parser.add_argument("--import", dest="source", type=Path, metavar="FOLDER", help="take over what another machine made")
    chosen = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * chosen.minutes
    if chosen.source:
        take_over(chosen.source)
        return
    if not (chosen.rehearse or torch.cuda.is_available()):
        raise UserError("there is no CUDA device here: run it where there is one, or see it work with --rehearse.")
    folder = chosen.into or Path("gpu_rehearsal" if chosen.rehearse else "gpu")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            settings = prepare(folder, chosen.rehearse)
            lacking = {str(run) for run, _ in fan_out.missing(settings, ["*"])}
            with contextlib.chdir(folder):
                work(settings, lacking, chosen.rehearse, deadline)
    except Timeout:
        raise UserError(f"another process works in {folder} already: wait for it, or end it.") from None


def prepare(folder: Path, is_rehearsal: bool) -> Params:
    """Makes the folder one that every stage can work in: with parameters, and with the data that are here."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if read_state(folder).get("is_rehearsal", is_rehearsal) != is_rehearsal:
        raise UserError(f"{folder} is {'no' if is_rehearsal else 'a'} rehearsal: name another folder with --into.")
    raw = params.read("params.yaml")
    if is_rehearsal:
        raw = params.deep_merge(raw, params.read(REHEARSAL))
        os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))
    text = io.StringIO()
    YAML(typ="safe").dump(raw, text)
    files.write_text(folder / "params.yaml", text.getvalue())
    settings = params.load(folder / "params.yaml")
    here = data.folder(settings.data.source)
    if not (folder / here).exists() and here.exists():
        (folder / here.parent).mkdir(exist_ok=True)
        (folder / here).unlink(missing_ok=True)  # a link that leads nowhere any more
        (folder / here).symlink_to(here.resolve(), target_is_directory=True)
    return settings


def read_state(folder: Path) -> dict:
    return files.read_json(folder / STATE) if (folder / STATE).exists() else {}


def parts(settings: Params, is_rehearsal: bool) -> dict[str, list[str]]:
    """The command of each part, as arguments for Python, in their order; none for the two that train."""

    def script(name: str, *options: object, largest: int | None = None) -> list[str]:
        """A benchmark; in a rehearsal one round of it, up to this size."""
        small = ["--repeats", 1, *(["--largest", largest] if largest else [])] if is_rehearsal else []
        return ["-m", f"benchmarks.{name}", *map(str, (*options, *small))]

    tests = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "cuda.is_available()" in path.read_text()]
    few = ["-k", "test_cuda_graph or test_any_norm"] if is_rehearsal else []
    fetch = {} if data.folder(settings.data.source).exists() else {"fetch": ["-m", "pipeline.fetch"]}
    return fetch | {
        "tests": ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={Path('pytest').resolve()}", *few, *tests],
        FIRST_RUNS: [],
        "step": script("step"),
        "attention_bfloat16": script("attention", "--dtype", "bfloat16", largest=128),
        "attention_heads": script("attention", "--heads", heads(settings), "--largest", attention.SMALLEST),
        "attention_norm": script("attention", "--norm", LARGEST_NORM, "--largest", attention.MOST_TOKENS_ERROR, largest=128),
        "attention": script("attention", largest=128),
        "profile": script("profile"),
        "depth": script("depth", *(["--depth", SHALLOW] if is_rehearsal else [])),
        "orthogonal": script("orthogonal", largest=8),
        "complexity": ["-m", "pipeline.study", "complexity", "--no-tracking"],
        RUNS: [],
    }


def work(settings: Params, lacking: set[str], is_rehearsal: bool, deadline: float) -> None:
    """Does what is not done, in the working directory, as far as the time allows, and shows what has been measured.

    What failed is tried again after the others. What was cut off although it had as much time as is left would be so again.
    """
    state = read_state(Path()) or {"is_rehearsal": is_rehearsal, "parts": {}}
    commands, went, left = parts(settings, is_rehearsal), state["parts"], []
    for name in sorted(commands, key=lambda name: went.get(name, {}).get("status") == FAILED):
        made_by, before = digest(commands[name], settings), went.get(name, {})
        jobs = [job for job in fan_out.missing(settings, ["*"]) if str(job[0]) in lacking] if not commands[name] else []
        jobs = [job for job in jobs if name == RUNS or (job[0].study, job[0].seed) == (TABLE_2, SEED)]
        is_known = commands[name] and before.get("made_by") == made_by
        if (is_known and before["status"] == DONE) or not (commands[name] or jobs):
            continue
        seconds = deadline - time.monotonic()
        if seconds < LEAST_SECONDS or (is_known and before["status"] == CUT_OFF and before["seconds"] > 0.95 * seconds):
            left.append(name)
            continue
        start = time.monotonic()
        status = execute(name, commands[name], deadline) if commands[name] else train(jobs, deadline)
        went[name] = {"status": status, "seconds": time.monotonic() - start, "made_by": made_by}
        files.write_json(STATE, state)
        print(f"{name}: {status} after {went[name]['seconds']:.0f} s", flush=True)
        left += [name] if status == CUT_OFF else []
    show(state, settings)
    if left:
        longest = max((went[name]["seconds"] for name in left if name in went), default=0)
        longer = f", with --minutes above {longest / 60:.1f}" if longest > 60 else ""
        print(f"Left: {', '.join(left)}. Give the same command again{longer}.")
    if failed := [name for name in commands if went.get(name, {}).get("status") == FAILED]:
        raise UserError(f"{', '.join(failed)} failed: see {Path('logs').resolve()}; the same command tries again.")


def digest(command: list[str], settings: Params) -> str:
    """Of the code that is measured, the part's own, its options, and the parameters but for which runs are wanted."""
    words = [word if word.endswith(".py") else f"{word.replace('.', '/')}.py" for word in command]
    paths = {path for word in words if (path := ROOT / word).is_file()} | {p for glob in CODE for p in ROOT.glob(glob)}
    made_by = [command, comparable(settings), *map(files.sha256, sorted(paths))]
    return hashlib.sha256(json.dumps(made_by).encode()).hexdigest()


def execute(name: str, command: list[str], deadline: float) -> str:
    """Runs a part into logs/NAME.txt, and says how it went."""
    if lacks := [each for each in TEST_MODULES if name == "tests" and importlib.util.find_spec(each) is None]:
        return f"not run, as there is no {', '.join(lacks)},"
    Path("logs").mkdir(exist_ok=True)
    left = deadline - time.monotonic()
    with open(Path("logs", f"{name}.txt"), "w") as log:
        options = dict(stdout=log, stderr=subprocess.STDOUT, cwd=ROOT if name == "tests" else None, check=False)
        try:
            done = subprocess.run([sys.executable, *command], timeout=None if math.isinf(left) else left, **options)
        except subprocess.TimeoutExpired:
            return CUT_OFF
    return FAILED if done.returncode else DONE


def train(jobs: list[Job], deadline: float) -> str:
    """Trains runs until the deadline, one on each GPU at a time, and says how it went."""
    at_a_time, came = fan_out.slots(), []
    finished = fan_out.here(jobs, at_a_time, ["--no-tracking"], deadline)
    try:
        fan_out.follow(jobs, (came.append(run) or run for run in finished), at_a_time)
    except UserError as error:
        files.write_text("logs/runs.txt", f"{error}\n")
        return FAILED
    return DONE if len(came) == len(jobs) else CUT_OFF


def show(state: dict, settings: Params) -> None:
    """Writes what was measured beside what is aimed at, as targets.csv and .json among the benchmarks, and prints it."""
    device = record.default_device()
    environment = record.describe_environment(device)
    measured = gather(FOLDER / results.slug(environment), heads(settings))
    measured["epochs"] = ten_epochs(environment["device_name"])
    table = pd.DataFrame([target.row(measured.get(target.key, math.nan)) for target in TARGETS])
    print(table.drop(columns="key").to_string(index=False, na_rep="–", float_format="{:.4g}".format))
    results.write("targets", table, device, argparse.Namespace(rehearse=state["is_rehearsal"]), parts=state["parts"])


def heads(settings: Params) -> int:
    """How many heads a layer has in one step."""
    return settings.train.batch_size * settings.model.num_heads


def gather(folder: Path, heads: int) -> dict[str, float]:
    """What the benchmarks in a machine's folder say of each target; what was not measured is absent."""

    def ratios(name: str) -> dict | list:  # of the step by weights, sorted, and of attention by size
        return files.read_json(folder / f"{name}.json")["ratios"] if (folder / f"{name}.json").exists() else {}

    def step(kind: str) -> dict:
        """Ratios of steps, with trained weights where they were there."""
        return {name: ratio for of in ratios("step").values() for name, ratio in of.get(kind, {}).items()}

    over_vit = step("over_vit")
    found = {"graph": step("eager_over_ours").get("vit"), "all": step("straightforward_over_ours").get(ALL_MODELS)}
    found |= {"exact": over_vit.get(EXACT), "ns": over_vit.get("osa_ns"), "qr": over_vit.get("osa_qr")}
    of_heads = [row for row in ratios(f"attention_{heads}_heads") if row["width"] == NARROW]
    found |= {f"literal, {row['pass']}": row.get("literal_qr / exact") for row in of_heads}
    wide = [row for row in ratios("attention_bfloat16") if (row["width"], row["pass"]) == (WIDE, FORWARD)]
    over_sdpa = {row["tokens"]: row[SDPA_RATIO] for row in wide if SDPA_RATIO in row}
    found |= {f"sdpa, {tokens}": ratio for tokens, ratio in over_sdpa.items()}
    if over_sdpa:
        slower = max((tokens for tokens, ratio in over_sdpa.items() if ratio < 1), default=0)
        found["crossover"] = min((tokens for tokens in over_sdpa if tokens > slower), default=math.inf)
    if (path := folder / f"attention_norm_{LARGEST_NORM}.csv").exists():
        table = files.read_csv(path)
        found["orthogonality"] = table.loc[table["method"] == "exact", "orthogonality_error"].max()
    return {key: value for key, value in found.items() if value is not None}


def ten_epochs(device_name: str) -> float:
    """Seconds of ten epochs of the slowest model, by the median over its runs here: from point to point, evaluations and
    checkpoints included, without the start and the first interval, in which the step is captured. NaN if there is no run."""
    seconds = defaultdict(list)
    for made in map(files.read_json, runs.FOLDER.glob(f"{TABLE_2}/*/*/record.json")):
        times, points = made["timestamps"], made["config"]["train"]["points_per_epoch"]
        if made["environment"]["device_name"] == device_name and not made["resumptions"] and len(times) > 2:
            seconds[made["variant"]].append((times[-1] - times[1]) / 1000 / (len(times) - 2) * 10 * points)
    return max(map(statistics.median, seconds.values()), default=math.nan)


def take_over(source: Path) -> None:
    """Copies runs that are missing here, if they are of today's code, data and parameters, and the benchmarks into place.

    Every digest is checked, a run's record comes last, and DVC is told where there is DVC. What is left is named.
    """
    if not (source / STATE).exists():
        raise UserError(f"{source} was not made by `python -m pipeline.benchmarks.gpu`: name the folder that it wrote to.")
    settings = params.load()
    wanted = fan_out.missing(settings, ["*"])
    digests = {each: data.digest(data.folder(each)) for each in {config.data.source for _, config in wanted}}
    with contextlib.chdir(source):
        whole = [run for run, config in wanted if runs.is_current(run, config, digests[config.data.source])]
        content = {str(run): [Path(path).read_bytes() for path in fan_out.written(run)] for run in whole if is_whole(run)}
        there = {"/".join(path.parts[-4:-1]) for path in runs.FOLDER.glob("*/*/*/record.json")}
        same_params = comparable(settings) == comparable(params.load())
        made = {path: path.read_bytes() for path in FOLDER.glob("**/*") if path.is_file() and same_params}
        for path in study.FOLDER.glob(f"*/{study.RECORD}") if same_params else ():
            machine = FOLDER / results.slug(files.read_json(path)["environment"])  # not where the study itself lies here
            made |= {machine / each.parent.name / each.name: each.read_bytes() for each in path.parent.iterdir()}
    came = [run for run, _ in wanted if str(run) in content]
    for run in came:
        fan_out.receive(run, content[str(run)])
    for path, each in made.items():
        files.write_bytes(path, each)
    is_known = fan_out.commit([run for run in came if run.study == TABLE_2])
    print(f"{len(came)} runs and {len(made)} files of benchmarks are in their places.")
    asked = {str(run) for run, _ in wanted}
    for run in sorted(there - content.keys()):
        why = "is not whole, or not of this code, these data and parameters" if run in asked else "is not missing here"
        print(f"{run} {why}: left there.")
    if not same_params:
        print("The benchmarks are of other parameters: left there.")
    if not is_known:
        raise UserError(fan_out.COMMIT_FAILED)


def is_whole(run: Run) -> bool:
    """Whether the weights of a run are there, as its record knows them."""
    return run.weights.exists() and files.sha256(run.weights) == run.read("record")["weights_sha256"]


def comparable(settings: Params) -> dict:
    """The parameters that a benchmark depends on."""
    return settings.model_dump(mode="json", exclude={"run", "labels"})


if __name__ == "__main__":
    main()
