"""Accuracies beside the committed ones, model by model: `python -m pipeline.tools.compare faster`.

EXPERIMENT is the name of `dvc exp run --name`, a revision of git, or a folder with runs, such as quickstart or
paper_outputs/runs/tries; without one it is the working directory. `--with` names what it is compared with, HEAD by default.
A revision is read from git without checking it out. A try is compared with the model that it changes.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dvc.api import DVCFileSystem
from dvc.exceptions import DvcException
from ruamel.yaml import YAML, YAMLError

from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.core.params import plain
from pipeline.runs import FOLDER, TABLE_2
from pipeline.statistics import CONFIDENCE, contrast, quantile, summarise


@dataclass(frozen=True)
class Run:
    """One training: its accuracy in per cent, None if it diverged, and what it was made with."""

    variant: str
    accuracy: float | None
    settings: dict[str, str]
    key: str


Runs = dict[str, dict[int, Run]]  # by name and seed


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("tools.compare", __doc__)
    parser.add_argument("experiment", nargs="?", default=".", help="of DVC, or a revision, or a folder with runs")
    parser.add_argument("--with", dest="other", default="HEAD", help="what to compare it with, named alike (default: HEAD)")
    chosen = parser.parse_args(arguments)
    after, before = read(chosen.experiment), read(chosen.other)
    rows = [["model", chosen.other, chosen.experiment, "difference", f"{CONFIDENCE:.0%} interval", "reading"]]
    for name, runs in after.items():
        variant = next(iter(runs.values())).variant
        old = before.get(name) or before.get(variant, {})
        rows.append([name, *row(old, runs)])
        for key, (was, now) in changes(old, runs).items():
            print(f"{name}: {key} {was} → {now}")
    rows += [[name, accuracy(runs), "not run", "", "", ""] for name, runs in before.items() if name not in after]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("Test accuracy in per cent: mean ± standard deviation (seeds); the interval is Welch's, of that model alone.")
    print(*("  ".join(map(str.ljust, each, widths)).rstrip() for each in rows), sep="\n")


def read(name: str) -> Runs:
    """The runs that a name stands for: those of Table 2 that its params.yaml lists, or all in a folder of others.

    Raises:
        UserError: it stands for none, or one of them is not whole.
    """
    files, base = (None, Path(name)) if Path(name).is_dir() else (_open(name), Path())
    root = base / FOLDER / TABLE_2
    if files is None:
        root = root if root.is_dir() else base
        paths = [path.as_posix() for path in sorted(root.rglob("record.json"))]
    else:
        paths = sorted(files.glob(f"{root.as_posix()}/*/*/record.json"))

    def text(path: str) -> str:
        return files.read_text(path, encoding="utf-8") if files else Path(path).read_text(encoding="utf-8")

    runs: Runs = {}
    for path in paths:
        try:
            record, metrics = json.loads(text(path)), json.loads(text(path.replace("record.json", "metrics.json")))
            percent = None if metrics["diverged"] else 100 * metrics["test_accuracy"]
            run = Run(record["variant"], percent, _settings(record), f"{record['run_key']} {record['started_at']}")
            runs.setdefault(record.get("name", record["variant"]), {})[record["seed"]] = run
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{name}: the run of {path} is not whole ({error!r}): train it again.") from None
    if not runs:
        raise UserError(f"{name} has no runs: name an experiment, a revision or a folder that has {FOLDER}/{TABLE_2}.")
    return _listed(runs, name, text, base) if root == base / FOLDER / TABLE_2 else runs


def _open(name: str) -> DVCFileSystem:
    """The files of a revision or an experiment."""
    try:
        files = DVCFileSystem(".", rev=name)
        files.isdir("")  # it opens the revision when it is first used
        return files
    except DvcException as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{name} is neither a folder nor a revision nor an experiment of `dvc exp list` ({why}).") from None


def _listed(runs: Runs, name: str, text: Any, base: Path) -> Runs:
    """The runs that params.yaml lists: those that it no longer has are still there."""
    try:
        listed = (YAML(typ="safe").load(text(f"{(base / 'params.yaml').as_posix()}")) or {}).get("run") or {}
    except (OSError, YAMLError, AttributeError):
        raise UserError(f"{name}: params.yaml is absent or not valid YAML: put it back as git has it.") from None
    seeds, variants = listed.get("seeds"), listed.get("variants")
    runs = {each: runs[each] for each in variants or runs if each in runs}
    return {each: {seed: run for seed, run in of.items() if not seeds or seed in seeds} for each, of in runs.items()}


def _settings(record: dict) -> dict[str, str]:
    """The parameters by their key, and the data."""
    flat = {f"{section}.{key}": plain(value) for section, keys in record["config"].items() for key, value in keys.items()}
    flat = {key: value for key, value in flat.items() if value != "None"}
    return flat | {"data": record["data_sha256"][:8], "numerics": plain(record.get("numerics"))}


def changes(old: dict[int, Run], new: dict[int, Run]) -> dict[str, tuple[str, str]]:
    """The settings that differ between the first runs of two sides."""
    if not (old and new):
        return {}
    was, now = (next(iter(runs.values())).settings for runs in (old, new))
    keys = [key for key in was | now if was.get(key) != now.get(key)]
    return {key: (was.get(key, "–"), now.get(key, "–")) for key in keys}


def row(old: dict[int, Run], new: dict[int, Run]) -> list[str]:
    """Both accuracies, their difference with Welch's interval, and what may be said of it."""
    sides = [accuracy(old), accuracy(new)]
    if not old:
        return [*sides, "", "", ""]
    if {run.key for run in old.values()} == {run.key for run in new.values()}:
        return [*sides, "", "", "the same runs"]
    samples = [[run.accuracy for run in runs.values() if run.accuracy is not None] for runs in (new, old)]
    if not all(samples):
        return [*sides, "", "", "diverged"]
    estimate = contrast(samples, (1, -1))
    half = quantile(CONFIDENCE, estimate.freedom) * estimate.error
    low, high = estimate.value - half, estimate.value + half
    difference = f"{estimate.value:+.2f}"
    if math.isnan(half):
        return [*sides, difference, "", "one seed, or no spread: no interval"]
    reading = "higher" if low > 0 else "lower" if high < 0 else "no difference shown"
    return [*sides, difference, f"{low:+.2f} to {high:+.2f}", reading]


def accuracy(runs: dict[int, Run]) -> str:
    """97.03 ± 0.15 (3), with the number of runs that diverged."""
    if not runs:
        return "not run"
    found = summarise([run.accuracy for run in runs.values() if run.accuracy is not None])
    spread = "" if math.isnan(found.std) else f" ± {found.std:.2f}"
    diverged = f", {len(runs) - found.n} diverged" * (found.n < len(runs))
    return (f"{found.mean:.2f}{spread} ({found.n}){diverged}") if found.n else f"{len(runs)} diverged"


if __name__ == "__main__":
    main()
