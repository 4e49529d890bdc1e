"""Trains a grid of values, to compare with the committed results: `python -m pipeline try osa_exact --set model.depth=2,3`.

Every combination of the values is trained with every seed, side by side; given again, what is missing. A table compares test
accuracies by ranks, as the page's claims do. Records stay under paper_outputs/runs/tries, where neither git nor DVC looks;
weights go.
`--of NAME` trains nothing: it compares the runs of an experiment of DVC, or of a revision.
"""

import argparse
import io
import itertools
import math
import re
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pipeline.config import params, reading
from pipeline.config.params import Params, as_yaml
from pipeline.core import files
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.results.runs import accuracy
from pipeline.statistics.claims import GUESS_ACCURACY
from pipeline.statistics.intervals import summary_of
from pipeline.statistics.verdicts import BOTH, CONTRADICTED, REPRODUCED, judge
from pipeline.tools import fan_out, locks
from pipeline.training.run import FOLDER, TABLE_2, TRIES, Run

HEADS = ["Model", "committed", "tried", "Difference", f"{BOTH:.0%} interval", "Reading"]
READINGS = {REPRODUCED: "higher", CONTRADICTED: "lower"}  # verdicts on the claim that a model is more accurate
Seeds = dict[int, dict[str, Any]]  # seed → its record, and its accuracy in per cent, NaN where it diverged


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("try", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a name under variants in params.yaml")
    set_help = "values to try, as in model.depth=2,3; with more than one --set, every combination"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUES", help=set_help)
    parser.add_argument("--seeds", type=seeds, default=[0], metavar="0,1", help="default: 0")
    parser.add_argument("--of", metavar="NAME", help="train nothing: compare an experiment of DVC, or a revision")
    chosen = fan_out.add_options(parser).parse_args(arguments)
    if bool(chosen.models) == bool(chosen.of):
        parser.error("name a MODEL to train, or with --of the runs to compare")
    settings, before = params.load(), committed("HEAD")
    after = committed(chosen.of) if chosen.of else tried(chosen, settings)
    bases = {name: name if name in before else next(iter(runs.values()))["variant"] for name, runs in after.items()}
    rows = [row(name, before.get(bases[name], {}), runs) for name, runs in after.items()]
    if chosen.of:
        rows += [row(name, runs, {}) for name, runs in before.items() if name not in after]
    lines = [HEADS]
    for each in rows:
        if changes := each.pop("changes"):
            print(f"{each['model']}: {changes}")
        lines.append(list(each.values()))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print("Test accuracy in per cent: mean ± standard deviation (seeds).")
    print("Differences are medians over all pairs of runs, each judged alone by an exact Mann–Whitney test.")
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


def seeds(text: str) -> list[int]:
    return [params.seed(each) for each in text.split(",")]


def grid(models: list[str], options: list[str], seeds: list[int], settings: Params) -> list[fan_out.Job]:
    """A run for each combination of model, values and seed. Raises UserError if one of them is impossible."""
    axes = []
    for option in options:
        key, equals, values = option.partition("=")
        axes.append([f"{key}{equals}{value}" for value in re.split(r",(?![^\[]*\])", values)])  # not inside a list
    jobs = {}
    for model, *values, seed in itertools.product(models, *axes, seeds):
        run = Run(model, seed, TRIES, params.parse_overrides(values))
        jobs[str(run)] = (run, params.resolve(settings, model, run.overrides))
    return list(jobs.values())


def tried(chosen: argparse.Namespace, settings: Params) -> dict[str, Seeds]:
    """The runs of the grid, by model and the values in which they differ. Trains what is missing, without its weights.

    Raises:
        UserError: a combination is impossible, the data are not there, or a training fails.
    """
    jobs = grid(chosen.models, chosen.set, chosen.seeds, settings)
    fan_out.digest(settings.data.source)  # before any process waits for it
    with fan_out.single_instance(locks.TRY):
        left = fan_out.missing(jobs)
        try:
            list(fan_out.train_all(left, chosen.jobs, chosen.no_tracking, per_gpu=chosen.per_gpu))
        finally:
            for run, _ in left:
                run.weights.unlink(missing_ok=True)
    options = {run.name: params.as_options(run.overrides)[1::2] for run, _ in jobs}
    common = set.intersection(*map(set, options.values())) if len(options) > 1 else set()
    found: dict[str, Seeds] = {}
    for run, _ in jobs:
        name = " ".join([run.variant, *(each for each in options[run.name] if each not in common)])
        found.setdefault(name, {})[run.seed] = read(run.folder)
    return found


def read(folder: Path) -> dict[str, Any]:
    """A run's record, with its accuracy."""
    return files.read_json(folder / "record.json") | {"accuracy": accuracy(files.read_json(folder / "metrics.json"))}


def committed(name: str) -> dict[str, Seeds]:
    """The runs of Table 2 that params.yaml lists in a revision, or in an experiment of DVC, which is a commit of git's too.

    Raises:
        UserError: there is no such revision or experiment, or it has no runs.
    """
    refs = subprocess.run(
        ["git", "for-each-ref", "--format=%(refname)", "refs/exps"], capture_output=True, text=True, check=False
    )
    revision = next((ref for ref in refs.stdout.split() if ref.endswith(f"/{name}")), name)
    archive = ["git", "archive", "--format=zip", revision, "params.yaml", str(FOLDER / TABLE_2)]
    packed = subprocess.run(archive, capture_output=True, check=False)
    if packed.returncode:
        why = packed.stderr.decode(errors="replace").strip().splitlines()[-1]
        raise UserError(f"{name} has no runs of Table 2: name a revision, or an experiment of `dvc exp list` ({why}).")
    with zipfile.ZipFile(io.BytesIO(packed.stdout)) as opened, tempfile.TemporaryDirectory() as folder:
        opened.extractall(folder)
        run, found = reading.read(Path(folder, "params.yaml"))["run"], {}
        seeds = [*run["seeds"], *run.get("recorded_seeds", [])]
        for variant in run["variants"]:
            paths = {seed: Path(folder, FOLDER, TABLE_2, variant, str(seed)) for seed in seeds}
            own = {seed: read(path) for seed, path in paths.items() if (path / "record.json").exists()}
            current = [parameters(own[seed]) for seed in run["seeds"] if seed in own]
            if current:  # recorded seeds are of the model as it was then
                found[variant] = {seed: each for seed, each in own.items() if parameters(each) in current}
    return found


def parameters(record: dict[str, Any]) -> dict[str, str]:
    """Parameters of a run by key, with the data and the numerics."""
    found = {}
    for section, values in params.normalised_config(record["config"]).items():
        found |= {f"{section}.{key}": as_yaml(value) for key, value in values.items()}
    return found | {"data": record["data_sha256"][:8], "numerics": as_yaml(record["numerics"])}


def row(name: str, old: Seeds, new: Seeds) -> dict[str, str]:
    """Both accuracies, their difference with its interval, what may be said of it, and which parameters differ."""
    shown = {"model": name, "before": cell(old), "after": cell(new)}
    shown |= dict.fromkeys(("difference", "interval", "reading", "changes"), "")
    if not (old and new):
        return shown
    if trainings(old) == trainings(new):
        return shown | {"reading": "the same runs"}
    was, now = (parameters(next(iter(side.values()))) for side in (old, new))
    keys = [key for key in was | now if was.get(key) != now.get(key)]
    shown["changes"] = ", ".join(f"{key} {was.get(key, '–')} → {now.get(key, '–')}" for key in keys)
    verdict = judge(accuracies(new), accuracies(old))
    shown["difference"] = f"{verdict.estimate:+.2f}"
    if math.isinf(verdict.low):
        return shown | {"reading": "too few seeds to tell"}
    said = READINGS.get(verdict.word, "no difference shown")
    return shown | {"interval": f"{verdict.low:+.2f} to {verdict.high:+.2f}", "reading": said}


def accuracies(runs: Seeds) -> list[float]:
    """The accuracies of the runs; one that diverged is as good as a guess."""
    return [GUESS_ACCURACY if math.isnan(run["accuracy"]) else run["accuracy"] for run in runs.values()]


def trainings(runs: Seeds) -> set[tuple[str, str]]:
    return {(run["run_key"], run["started_at"]) for run in runs.values()}


def cell(runs: Seeds) -> str:
    """97.03 ± 0.15 (3), with the number of runs that diverged."""
    found, parts = summary_of([run["accuracy"] for run in runs.values() if not math.isnan(run["accuracy"])]), []
    if found.n:
        spread = "" if math.isnan(found.std) else f" ± {found.std:.2f}"
        parts.append(f"{found.mean:.2f}{spread} ({found.n})")
    if num_diverged := len(runs) - found.n:
        parts.append(f"{num_diverged} diverged")
    return ", ".join(parts) or "not run"


if __name__ == "__main__":
    main()
