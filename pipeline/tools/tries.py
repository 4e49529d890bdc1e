"""Trains a grid of values beside the committed results: `python -m pipeline try osa_exact --set model.depth=2,3`.

Every combination of the values is trained with every seed, side by side; given again, what is missing. A table shows test
accuracies with intervals, and paper_outputs/runs/tries/index.html the losses too. Records stay there, which neither git nor
DVC looks at; weights go. `--of` trains nothing: it compares the runs of an experiment of DVC, of a revision or of a folder.
"""

import argparse
import io
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
from dvc.api import DVCFileSystem
from dvc.exceptions import DvcException
from fsspec.implementations.local import LocalFileSystem
from markupsafe import Markup
from ruamel.yaml import YAML, YAMLError

from pipeline.core import files, params
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.core.params import Params, plain
from pipeline.report import figures, page
from pipeline.statistics import CONFIDENCE, interval, summarise
from pipeline.tools import fan_out, locks
from pipeline.training.run import CURVES, FOLDER, TABLE_2, TRIES, Run

PAGE = FOLDER / TRIES / "index.html"
Seeds = dict[int, dict[str, Any]]  # of each: record, accuracy in per cent or None, and points
NOTHING = {"difference": "", "interval": "", "reading": "", "changes": ""}


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("try", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a name under variants in params.yaml")
    set_help = "values to try, as in model.depth=2,3; with more than one --set, every combination"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUES", help=set_help)
    parser.add_argument("--seeds", type=seeds, default=[0], metavar="0,1", help="default: 0")
    parser.add_argument("--of", metavar="NAME", help="train nothing: compare an experiment, a revision or a folder")
    parser.add_argument(
        "--beside", default="HEAD", metavar="NAME", help="what to compare with, named likewise; default: HEAD"
    )
    chosen = fan_out.add_options(parser).parse_args(arguments)
    if bool(chosen.models) == bool(chosen.of):
        parser.error("name a MODEL to train, or with --of the runs to compare")
    settings, before = params.load(), read(chosen.beside)
    if chosen.of:
        after = read(chosen.of)
        left_out = [row(name, runs, {}) for name, runs in before.items() if name not in after]
    else:
        jobs = grid(chosen.models, chosen.set, chosen.seeds, settings)
        train(jobs, chosen)
        after, left_out = {}, []
        there, options = read(FOLDER / TRIES), {run.name: params.as_options(run.overrides)[1::2] for run, _ in jobs}
        common = set.intersection(*map(set, options.values())) if len(options) > 1 else set()
        for run, _ in jobs:
            name = " ".join([run.variant, *(each for each in options[run.name] if each not in common)])
            after.setdefault(name, {})[run.seed] = there[run.name][run.seed]
    bases = {name: name if name in before else first(runs)["variant"] for name, runs in after.items()}
    rows = [row(name, before.get(bases[name], {}), runs) for name, runs in after.items()] + left_out
    heads = ["Model", chosen.beside, chosen.of or "tried", "Difference", f"{CONFIDENCE:.0%} interval", "Reading"]
    for each in rows:
        print(f"{each['model']}: {each['changes']}\n" * bool(each["changes"]), end="")
    lines = [heads, *([value for key, value in each.items() if key != "changes"] for each in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print("Test accuracy in per cent: mean ± standard deviation (seeds); the interval is Welch's, of that model alone.")
    print(*("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines), sep="\n")
    curves = {f"{name}, {chosen.beside}": before[name] for name in bases.values() if name in before} | after
    write_page(heads, rows, curves, settings)
    print(f"The page, with losses, is {PAGE.resolve()}")


def seeds(text: str) -> list[int]:
    return [params.seed(each) for each in text.split(",")]


def grid(models: list[str], options: list[str], seeds: list[int], settings: Params) -> list[fan_out.Job]:
    """A run for each combination of model, values and seed. Raises UserError if one of them is impossible."""
    axes = []
    for key, equals, values in (option.partition("=") for option in options):
        axes.append([f"{key}{equals}{value}" for value in re.split(r",(?![^\[]*\])", values)])  # not inside a list
    jobs = {}
    for model, *values, seed in itertools.product(models, *axes, seeds):
        run = Run(model, seed, TRIES, params.parse_overrides(values))
        jobs[str(run)] = (run, params.resolve(settings, model, run.overrides))
    return list(jobs.values())


def train(jobs: list[fan_out.Job], chosen: argparse.Namespace) -> None:
    """Trains what is missing, and leaves no weights of it."""
    with fan_out.alone(locks.TRY):
        left = [job for job in jobs if not fan_out.is_there(*job)]
        try:
            list(fan_out.train(left, chosen.jobs, chosen.no_tracking))
        finally:
            for run, _ in left:
                run.weights.unlink(missing_ok=True)


def read(name: str | Path) -> dict[str, Seeds]:
    """The runs that a name stands for: those of Table 2 that its params.yaml lists, or all in a folder of others.

    Raises:
        UserError: it stands for none, or one of them is not whole.
    """
    is_folder = Path(name).is_dir()
    try:
        system, base = (LocalFileSystem(), Path(name).absolute()) if is_folder else (DVCFileSystem(".", rev=name), Path())
        is_table_2 = not is_folder or (base / FOLDER / TABLE_2).is_dir()
        root = base / FOLDER / TABLE_2 if is_table_2 else base
        paths = sorted(path for path in system.find(root.as_posix()) if path.endswith("/record.json"))
    except DvcException as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{name} is neither a folder nor a revision nor an experiment of `dvc exp list` ({why}).") from None
    runs, path = {}, (base / "params.yaml").as_posix()
    try:
        listed = YAML(typ="safe").load(system.read_text(path))["run"] if is_table_2 and paths else None
        for path in paths:
            record, metrics = (
                json.loads(system.read_text(path.replace("record.", f"{each}."))) for each in ("record", "metrics")
            )
            points = pd.read_csv(io.StringIO(system.read_text(path.replace("record.json", "history.csv"))))
            accuracy = None if metrics["diverged"] else 100 * metrics["test_accuracy"]
            if not listed or record["variant"] in listed["variants"]:
                run = record | {"accuracy": accuracy, "points": points[["step", "epoch", *CURVES]]}
                runs.setdefault(record["name"], {})[record["seed"]] = run
        if listed:
            kept = {*listed["seeds"], *listed.get("recorded_seeds", [])}
            for name, own in runs.items():
                runs[name] = {seed: run for seed, run in own.items() if seed in kept}
            runs = {name: own for name, own in runs.items() if own}
    except (OSError, AttributeError, KeyError, TypeError, ValueError, YAMLError) as error:
        raise UserError(f"{name}: {path} or a file beside it is not whole ({error!r}): put it back as git has it.") from None
    if not runs:
        raise UserError(f"{name} has no runs: name an experiment, a revision or a folder that has {FOLDER}/{TABLE_2}.")
    return runs


def first(runs: Seeds) -> dict[str, Any]:
    return next(iter(runs.values()))


def parameters(record: dict[str, Any]) -> dict[str, str]:
    """By their key, with the data."""
    config = params.written_config(record["config"])
    keys = {f"{section}.{key}": plain(value) for section, values in config.items() for key, value in values.items()}
    return keys | {"data": record["data_sha256"][:8], "numerics": plain(record["numerics"])}


def row(name: str, old: Seeds, new: Seeds) -> dict[str, str]:
    """Both accuracies, their difference with Welch's interval, what may be said of it, and which parameters differ."""
    finished = [[run["accuracy"] for run in side.values() if run["accuracy"] is not None] for side in (new, old)]
    shown = {"model": name, "before": accuracy(old, finished[1]), "after": accuracy(new, finished[0])} | NOTHING
    if not (old and new):
        return shown
    trainings = [{(run["run_key"], run["started_at"]) for run in side.values()} for side in (old, new)]
    if trainings[0] == trainings[1]:
        return shown | {"reading": "the same runs"}
    was, now = parameters(first(old)), parameters(first(new))
    keys = [key for key in was | now if was.get(key) != now.get(key)]
    shown["changes"] = ", ".join(f"{key} {was.get(key, '–')} → {now.get(key, '–')}" for key in keys)
    if not all(finished):
        return shown | {"reading": "diverged"}
    shown["difference"] = f"{summarise(finished[0]).mean - summarise(finished[1]).mean:+.2f}"
    low, high = interval(finished, (1, -1))
    if math.isnan(low):
        return shown | {"reading": "one seed, or no spread: no interval"}
    said = "higher" if low > 0 else "lower" if high < 0 else "no difference shown"
    return shown | {"interval": f"{low:+.2f} to {high:+.2f}", "reading": said}


def accuracy(runs: Seeds, finished: list[float]) -> str:
    """97.03 ± 0.15 (3), with the number of runs that diverged."""
    found, num_diverged = summarise(finished), len(runs) - len(finished)
    spread = "" if math.isnan(found.std) else f" ± {found.std:.2f}"
    parts = [f"{found.mean:.2f}{spread} ({found.n})"] * bool(finished) + [f"{num_diverged} diverged"] * bool(num_diverged)
    return ", ".join(parts) or "not run"


def write_page(heads: list[str], rows: list[dict[str, str]], sides: dict[str, Seeds], settings: Params) -> None:
    """The table and the losses of all that was compared."""
    points = [run["points"].assign(variant=name, seed=seed) for name, runs in sides.items() for seed, run in runs.items()]
    drawn = settings.model_copy(update={"run": settings.run.model_copy(update={"variants": list(sides)})})
    drawing = figures.svg(figures.figure_1(pd.concat(points), drawn))
    environment, paper = page.environment(str), {"title": params.load_paper().title}
    markdown = environment.get_template("try.md.j2").render(heads=heads, rows=rows, paper=paper)
    body, sections = page.to_html(markdown, {"losses.svg": figures.inline(drawing, "losses")}, lambda path: "")
    frame = {"body": Markup(body), "sections": sections, "page": "try", "paper": paper}
    files.write_text(PAGE, environment.get_template("page.html.j2").render(frame))


if __name__ == "__main__":
    main()
