"""Tries other parameter values and compares the runs with Table 2: `python -m pipeline try osa_exact --set model.depth=2,3`.

The command trains every combination of values and seeds that has no run yet. Then it compares test accuracies with Table 2,
using the same rank test as for the paper's claims. Records stay under paper_outputs/runs/tries, which git and DVC ignore.
"""

import argparse
import itertools
import math
import re
from typing import NamedTuple

from pipeline.config import params
from pipeline.config.params import Params, as_yaml
from pipeline.config.records import RunRecord
from pipeline.core.errors import command_parser, entry_point
from pipeline.results.runs import accuracy, of_table_2
from pipeline.statistics.claims import GUESS_ACCURACY
from pipeline.statistics.intervals import summary_of
from pipeline.statistics.verdicts import CONTRADICTED, REPRODUCED, TWO_SIDED, judge
from pipeline.tools import fan_out, locks
from pipeline.tools.jobs import Job, missing, source_digest
from pipeline.training.run import TRIES, Run

HEADS = ["Model", "Table 2", "tried", "Difference", f"{TWO_SIDED:.0%} interval", "Reading"]
READINGS = {REPRODUCED: "higher", CONTRADICTED: "lower"}  # verdict on "the tried model is better" → word in the table


class Trained(NamedTuple):
    record: RunRecord
    accuracy: float  # in per cent, NaN if the run diverged


ResultsBySeed = dict[int, Trained]


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("try", __doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name under variants in params.yaml")
    set_help = "values to try, as in model.depth=2,3; with more than one --set, every combination"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUES", help=set_help)
    parser.add_argument("--seeds", type=seeds, default=[0], metavar="0,1", help="default: 0")
    chosen = fan_out.add_options(parser).parse_args(arguments)
    settings = params.load()
    before: dict[str, ResultsBySeed] = {}
    for run in of_table_2(settings):
        if record := run.record():
            before.setdefault(run.variant, {})[run.seed] = result_of(run, record)
    lines = [HEADS]
    for name, runs in train_grid(chosen, settings).items():
        variant = next(iter(runs.values())).record.variant
        old = before.get(variant, {})
        if changes := changed_parameters(old, runs):
            print(f"{name}: {changes}")
        lines.append([name, cell(old), cell(runs), *comparison(old, runs)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print("Test accuracy in per cent: mean ± standard deviation (seeds).")
    print("Differences are medians over all pairs of runs, each judged alone by an exact Mann–Whitney test.")
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


def seeds(text: str) -> list[int]:
    return [params.seed(each) for each in text.split(",")]


def grid(models: list[str], options: list[str], seeds: list[int], settings: Params) -> list[Job]:
    """Returns a run for each combination of model, option values and seed. Raises UserError if a combination is invalid."""
    axes = []
    for option in options:
        key, equals, values = option.partition("=")
        axes.append([f"{key}{equals}{value}" for value in re.split(r",(?![^\[]*\])", values)])  # splits at commas outside []
    jobs = {}
    for model, changes, seed in itertools.product(models, itertools.product(*axes), seeds):
        run = Run(model, seed, TRIES, params.parse_overrides(list(changes)))
        jobs[str(run)] = (run, params.resolve(settings, model, run.overrides))
    return list(jobs.values())


def train_grid(chosen: argparse.Namespace, settings: Params) -> dict[str, ResultsBySeed]:
    """Trains the missing runs of a grid, and deletes their weights. Returns all results of the grid, by model and seed.

    Raises:
        UserError: a combination is impossible, the data are missing, or a run fails.
    """
    jobs = grid(chosen.models, chosen.set, chosen.seeds, settings)
    for _, config in jobs:  # missing data raise an error before any process starts
        if config.data.source == params.USER_FOLDER:
            config.data.description()
        source_digest(config.data.source)
    with fan_out.single_instance(locks.TRY):
        left = missing(jobs)
        try:
            list(fan_out.train_all(left, chosen.jobs, chosen.per_gpu, chosen.no_tracking))
        finally:
            for run, _ in left:
                run.weights.unlink(missing_ok=True)
    options = {run.name: params.as_options(run.overrides)[1::2] for run, _ in jobs}
    common = set.intersection(*map(set, options.values())) if len(options) > 1 else set()
    found: dict[str, ResultsBySeed] = {}
    for run, _ in jobs:
        name = " ".join([run.variant, *(each for each in options[run.name] if each not in common)])
        found.setdefault(name, {})[run.seed] = result_of(run, run.ended_record())
    return found


def result_of(run: Run, record: RunRecord) -> Trained:
    return Trained(record, accuracy(run.metrics()))


def parameters(record: RunRecord) -> dict[str, str]:
    """Returns everything on which the results of a run depend: parameters, data and `osa.NUMERICS`."""
    found: dict[str, str] = {}
    for section, values in record.config.model_dump(mode="json", exclude_defaults=True).items():
        found |= {f"{section}.{key}": as_yaml(value) for key, value in values.items()}
    return found | {"data": record.data_sha256[:8], "numerics": as_yaml(record.numerics)}


def changed_parameters(old: ResultsBySeed, new: ResultsBySeed) -> str:
    """Lists the parameters that differ between old and new runs, as in "train.epochs 10 → 3"."""
    if not old:
        return ""
    was, now = (parameters(next(iter(runs.values())).record) for runs in (old, new))
    keys = [key for key in was | now if was.get(key) != now.get(key)]
    return ", ".join(f"{key} {was.get(key, '–')} → {now.get(key, '–')}" for key in keys)


def comparison(old: ResultsBySeed, new: ResultsBySeed) -> list[str]:
    """Returns three cells of the table: the difference in accuracy, its confidence interval, and the verdict."""
    if not old:
        return ["", "", ""]
    verdict = judge(accuracies(new), accuracies(old))
    difference = f"{verdict.estimate:+.2f}"
    if math.isinf(verdict.low):
        return [difference, "", "too few seeds to tell"]
    return [difference, f"{verdict.low:+.2f} to {verdict.high:+.2f}", READINGS.get(verdict.word, "no difference shown")]


def accuracies(runs: ResultsBySeed) -> list[float]:
    """Returns accuracies in per cent. A diverged run gets the accuracy of random guesses."""
    return [GUESS_ACCURACY if math.isnan(run.accuracy) else run.accuracy for run in runs.values()]


def cell(runs: ResultsBySeed) -> str:
    """Formats accuracies as mean ± standard deviation (number of runs), as in "97.03 ± 0.15 (3), 1 diverged"."""
    found, parts = summary_of([run.accuracy for run in runs.values() if not math.isnan(run.accuracy)]), []
    if found.n:
        spread = "" if math.isnan(found.std) else f" ± {found.std:.2f}"
        parts.append(f"{found.mean:.2f}{spread} ({found.n})")
    if num_diverged := len(runs) - found.n:
        parts.append(f"{num_diverged} diverged")
    return ", ".join(parts) or "not run"


if __name__ == "__main__":
    main()
