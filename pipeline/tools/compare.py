"""An experiment beside the committed results, model by model: `python -m pipeline.tools.compare faster`.

EXPERIMENT is what `dvc exp run --name` called it, a revision of git, or a folder that holds runs/; without one it is the
working directory. What it is compared with, HEAD unless `--with` says otherwise, is named in the same ways. A revision is
read from git without checking it out. Prints a table and writes comparisons/EXPERIMENT.html.
"""

import argparse
import csv
import io
import json
import math
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import matplotlib
from matplotlib.figure import Figure
from ruamel.yaml import YAML, YAMLError

from pipeline.core import files
from pipeline.core.errors import UserError, entry_point
from pipeline.report import figures, pages
from pipeline.report.looks import INK, STYLE, look
from pipeline.report.numbers import ABSENT, interval, mean_std, per_cent, plain, signed
from pipeline.runs import TABLE_2
from pipeline.statistics import CONFIDENCE, LEAST_RUNS, NOT_SUPPORTED, SUPPORTED, judge, summarise
from pipeline.studies import Table

FOLDER = Path("comparisons")


@dataclass(frozen=True)
class Run:
    """One training: its accuracy in per cent, None if it diverged, what it was made with, and its points."""

    accuracy: float | None
    settings: dict[str, str]  # parameters by their key, then data, code and machine
    history: str


@dataclass(frozen=True)
class Results:
    """The runs of Table 2 by model and seed, and what params.yaml calls the models."""

    name: str
    runs: dict[str, dict[int, Run]]
    labels: dict[str, str]


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tools.compare", description=__doc__.splitlines()[0])
    parser.add_argument("experiment", nargs="?", default=".", help="of DVC, or a revision, or a folder with runs/")
    parser.add_argument("--with", dest="other", default="HEAD", help="what to compare it with, named alike (default: HEAD)")
    chosen = parser.parse_args(arguments)
    after, before = read(chosen.experiment), read(chosen.other)
    path = FOLDER / (re.sub(r"[^\w.]+", "-", after.name).strip("-") + ".html")
    table, changed = results_table(before, after), changes_table(before, after)
    files.write_text(path, page(before, after, table, changed))
    print(f"{after.name} beside {before.name}\n")
    print(*(as_text(each) for each in (changed, table) if each.rows), sep="\n\n")
    print(f"\n{path}")


def read(name: str) -> Results:
    """The results that a name stands for. Raises UserError if it stands for none, or for what has no runs."""
    if (base := Path(name) / "runs").is_dir():
        paths = [*base.glob(f"{TABLE_2}/*/*/*.*"), *base.parent.glob("params.yaml")]
        found = {path.relative_to(base.parent).as_posix(): path.read_bytes() for path in paths}
        name = "workspace" if name == "." else name
    else:
        found = _in_git(_revision(name))
    folders = sorted(path.removesuffix("record.json") for path in found if path.endswith("/record.json"))
    if not folders:
        raise UserError(
            f"{name} has no runs of Table 2: `dvc repro` makes them, and git keeps them under paper_outputs/runs/{TABLE_2}."
        )
    runs: dict[str, dict[int, Run]] = {}
    for folder in folders:
        try:
            record, metrics = (json.loads(found[f"{folder}{kind}.json"]) for kind in ("record", "metrics"))
            accuracy = None if metrics["diverged"] else 100 * metrics["test_accuracy"]
            run = Run(accuracy, _settings(record), found[f"{folder}history.csv"].decode())
            runs.setdefault(record["variant"], {})[record["seed"]] = run
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{name}: the run in {folder} is not whole ({error!r}): train it again.") from None
    try:
        settings = YAML(typ="safe").load(found.get("params.yaml", b"{}").decode())
    except (YAMLError, ValueError) as error:
        raise UserError(f"{name}: params.yaml is not valid YAML ({str(error).splitlines()[0]}): mend it.") from None
    settings = settings if isinstance(settings, dict) else {}
    listed = {key: each for key, each in (settings.get("run") or {}).items() if each}  # those of others are there too
    runs = {
        variant: {seed: run for seed, run in of.items() if seed in listed.get("seeds", of)}
        for variant, of in runs.items()
        if variant in listed.get("variants", runs)
    }
    return Results(name, {variant: of for variant, of in runs.items() if of}, settings.get("labels") or {})


def _settings(record: dict) -> dict[str, str]:
    flat = {f"{section}.{key}": plain(value) for section, of in record["config"].items() for key, value in of.items()}
    flat |= {name: record[f"{name}_sha256"][:8] for name in ("data", "code")}
    return flat | {key: plain(record["environment"].get(key)) for key in ("device_name", "num_threads", "torch")}


def _revision(name: str) -> str:
    """The commit of the newest experiment of that name, or else of that revision."""
    experiments = _git("for-each-ref", "--sort=-committerdate", "--format=%(objectname) %(refname)", "refs/exps").decode()
    by_name: dict[str, str] = {}
    for commit, ref in (line.split(" ", 1) for line in experiments.splitlines() if line.count("/") == 4):
        by_name.setdefault(ref.rpartition("/")[2], commit)  # refs/exps/AB/CDEF…/NAME
    revision = by_name.get(name) or _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()
    if not revision:
        known = f"the experiments here are {', '.join(sorted(by_name))}" if by_name else "there are no experiments here"
        raise UserError(f"{name} is neither an experiment of DVC, nor a revision of git, nor a folder with runs/: {known}.")
    return revision


def _in_git(revision: str) -> dict[str, bytes]:
    """The files that matter here, as they are in that commit."""
    listed = _git("ls-tree", "--name-only", revision, "params.yaml", f"paper_outputs/runs/{TABLE_2}").decode().split()
    if not listed:
        return {}
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", revision, *listed))) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}


def _git(*arguments: str) -> bytes:
    try:
        return subprocess.run(["git", *arguments], capture_output=True).stdout
    except OSError as error:
        raise UserError(f"git cannot be run ({error}), which reads revisions: install it, or name folders.") from None


# --- what it says


def changes_table(before: Results, after: Results) -> Table:
    """Every setting that differs for some model that both have, and for which."""
    shared = [variant for variant in models(before, after) if variant in before.runs and variant in after.runs]
    found: dict[tuple[str, str, str], list[str]] = {}
    for variant in shared:
        old, new = (_together(of.runs[variant]) for of in (before, after))
        for key in sorted(old.keys() | new.keys(), key=lambda key: ("." not in key, key)):
            if old.get(key) != new.get(key):
                change = key, old.get(key, ABSENT), new.get(key, ABSENT)
                found.setdefault(change, []).append(label(variant, before, after))
    rows = [[*change, "all" if len(of) == len(shared) else ", ".join(of)] for change, of in found.items()]
    return Table(["Changed", before.name, after.name, "Models"], rows, "clll")


def _together(runs: dict[int, Run]) -> dict[str, str]:
    """The settings of a model's runs, side by side where they differ."""
    each = [run.settings for run in runs.values()]
    return {key: " or ".join(dict.fromkeys(settings.get(key, ABSENT) for settings in each)) for key in each[0]}


def models(before: Results, after: Results) -> list[str]:
    """All models, first those that params.yaml labels, in its order."""
    known = dict.fromkeys([*before.labels, *after.labels, *sorted({*before.runs, *after.runs})])
    return [variant for variant in known if variant in before.runs or variant in after.runs]


def label(variant: str, before: Results, after: Results) -> str:
    return (before.labels | after.labels).get(variant, variant)


def results_table(before: Results, after: Results) -> Table:
    """Test accuracy of each model in both, the difference, and what may be said of it."""
    columns = ["Model", before.name, after.name, "Difference", f"{per_cent(CONFIDENCE)} interval", "Reading"]
    rows = [[label(variant, before, after), *_row(variant, before, after)] for variant in models(before, after)]
    note = (
        "Test accuracy, per cent: mean ± standard deviation, and how many seeds. Difference: "
        f"{after.name} minus {before.name}, points, with Welch’s interval for that model alone: of many models, one in "
        f"twenty misses by chance. Higher or lower is said where 0 is outside, and each side has {LEAST_RUNS} seeds or "
        "more, none of which diverged."
    )
    return Table(columns, rows, "lrrrrl", note, models(before, after))


def _row(variant: str, before: Results, after: Results) -> list[str]:
    old, new = before.runs.get(variant, {}), after.runs.get(variant, {})
    sides = [_accuracy(runs) for runs in (old, new)]
    if not (old and new):
        return [*sides, "", "", ""]
    if {seed: run.history for seed, run in old.items()} == {seed: run.history for seed, run in new.items()}:
        return [*sides, "", "", "the same runs"]
    diverged = [sum(run.accuracy is None for run in runs.values()) for runs in (new, old)]
    found = judge([_accuracies(new), _accuracies(old)], (1, -1), limit=0, side="above", diverged=diverged)
    between = interval(found.low, found.high, 2)
    if math.isnan(found.low) and found.n:
        between = "one seed: no interval" if found.n == 1 else "no spread: no interval"
    is_open = not any(diverged) and found.n >= LEAST_RUNS and found.low <= 0 <= found.high
    reading = {SUPPORTED: "higher", NOT_SUPPORTED: "lower"}.get(
        found.verdict, "no difference shown" if is_open else found.note
    )
    return [*sides, signed(found.value, 2), between, reading]


def _accuracies(runs: dict[int, Run]) -> list[float]:
    return [run.accuracy for run in runs.values() if run.accuracy is not None]


def _accuracy(runs: dict[int, Run]) -> str:
    if not runs:
        return "not run"
    found = summarise(_accuracies(runs))
    diverged = f"\n{len(runs) - found.n} diverged" if found.n < len(runs) else ""
    return f"{mean_std(found.mean, found.std, 2)} ({found.n}){diverged}"


# --- the page and the terminal


def page(before: Results, after: Results, table: Table, changed: Table) -> str:
    """The comparison as a page in the report's style."""
    drawing = figures.inline(figures.svg(curves(before, after)), "curves", "Test loss by epoch of each model in both")
    template = pages.environment().get_template("compare.html.j2")
    return template.render(before=before.name, after=after.name, table=table, changed=changed, drawing=drawing)


def curves(before: Results, after: Results) -> Figure:
    """Test loss by epoch, a panel for each model: the mean over seeds, dashed for `before`."""
    shown = models(before, after)
    rows = math.ceil(len(shown) / 3)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.3 + 2 * rows), layout="constrained")
        panels = figure.subplots(rows, 3, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, variant in zip(panels, shown, strict=False):
            axes.plot(*_mean_curve(before.runs.get(variant, {})), color=INK, linestyle=(0, (4, 2)), linewidth=1)
            axes.plot(*_mean_curve(after.runs.get(variant, {})), **look(variant).line(linestyle="-"))
            axes.set(title=label(variant, before, after))
            figures.of_losses(axes)
        for axes in panels[len(shown) :]:
            axes.set_visible(False)
        figure.supxlabel("Epoch", fontsize=9)
        return figure


def _mean_curve(runs: dict[int, Run]) -> tuple[list[float], list[float]]:
    """Epochs, and the mean test loss over those runs that have one there."""
    losses: dict[float, list[float]] = {}
    for row in (row for run in runs.values() for row in csv.DictReader(io.StringIO(run.history)) if row["test_loss"]):
        losses.setdefault(float(row["epoch"]), []).append(float(row["test_loss"]))
    return sorted(losses), [mean(losses[epoch]) for epoch in sorted(losses)]


def as_text(table: Table) -> str:
    """A table for a terminal."""
    rows = [[cell.replace("\n", ", ") for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if align == "r" else "<" for align in table.align]
    return "\n".join("  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    main()
