"""Computes the numbers of Table 2, and the cost and provenance of its runs."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.special import stdtr
from scipy.stats import combine_pvalues

from pipeline import studies
from pipeline.config import params
from pipeline.config.records import RECORD, RunRecord
from pipeline.core import files, provenance
from pipeline.core.errors import UserError
from pipeline.results.runs import of_table_2, recorded
from pipeline.results.tables import TABLES
from pipeline.statistics.claims import Results
from pipeline.statistics.intervals import LEAST_RUNS, contrast, one_more_run, summary_of
from pipeline.statistics.verdicts import judge_share
from pipeline.studies.lab import Lab
from pipeline.training.run import Run

OUTPUTS = Path("paper_outputs")
TABLE_2_CSV = OUTPUTS / "table_2.csv"
PROPERTIES = ("device_name", "python", "torch", "num_threads", "data_sha256", "numerics", "commit")


def read_records(lab: Lab) -> dict[tuple[str, int], RunRecord]:
    """Returns the records of Table 2's runs. Raises UserError if a run or the table of runs does not match params.yaml."""
    if "runs" not in lab.tables:
        raise UserError(f"{TABLES / 'runs.csv'} is missing: run `dvc repro tables`.")
    listed = lab.tables["runs"]
    identities = list(listed[["variant", "seed"]].itertuples(index=False, name=None))
    if identities != [(run.variant, run.seed) for run in of_table_2(lab.params)]:
        raise UserError(f"the runs in {TABLES}/runs.csv differ from those that params.yaml lists: run `dvc repro tables`.")
    records = {run: Run(*run).ended_record() for run in itertools.compress(identities, listed["status"] != "missing")}
    for run, record in records.items():
        if record.config != params.resolve(lab.params, run[0]):
            path = Run(*run).folder / RECORD
            raise UserError(f"the parameters in {path} differ from those in params.yaml: run `dvc repro`.")
    return records


def rows(lab: Lab) -> list[dict[str, Any]]:
    """Returns a dictionary for each model of Table 2. Accuracies are in per cent.

    paper             test accuracy in the paper, or None
    ours              statistics of our test accuracies, over the runs that start to learn
    accuracies        test accuracies of the runs that start to learn
    runs              number of existing runs
    starts_at_least   one-sided 95 % lower bound on the share of runs that start to learn
    others            test accuracies of the runs that do not start to learn
    difference        our mean test accuracy minus the paper's
    one_more_run      prediction interval for one more run; NaN if fewer than LEAST_RUNS runs start to learn
    is_within         whether the paper's accuracy lies inside `one_more_run`; None if unknown
    finished, diverged, missing    number of runs with each status
    """
    results, rows = Results(lab.tables, guess_loss=math.log(lab.params.model.num_classes)), []
    for variant in lab.params.run.variants:
        own, starting = results.accuracies_of_starting(variant), results.starting(variant)
        accuracies = dict(zip(results.runs_of(variant)["seed"], results.accuracies(variant), strict=True))
        low, high = one_more_run(own) if len(own) >= LEAST_RUNS else (math.nan, math.nan)
        ours, paper = summary_of(own), lab.paper.table_2.get(variant)
        rows.append(
            {
                "variant": variant,
                "paper": paper,
                "ours": asdict(ours),
                "accuracies": own,
                "runs": len(accuracies),
                "starts_at_least": judge_share(len(own), len(accuracies)).low,
                "others": [value for seed, value in accuracies.items() if seed not in starting],
                "difference": None if paper is None else ours.mean - paper,
                "one_more_run": {"low": low, "high": min(high, 100.0)},
                "is_within": None if paper is None or math.isnan(low) else low <= paper <= high,
                **results.counts(variant),
            }
        )
    return rows


def share_above(values: Sequence[float], level: float) -> float:
    """Returns the probability that a new run's normally distributed value exceeds `level`; NaN if all `values` are equal."""
    estimate = contrast([[0.0], values], (1, -1), equal_spread=True)  # 0 is the new run, so standard_error is s √(1 + 1/n)
    return float(stdtr(estimate.df, -(level + estimate.value) / estimate.standard_error))


def against_paper(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compares the paper's accuracies with ours, for models in the paper for which we have a prediction interval.

    models   number of models
    below    number of models whose mean accuracy in our runs lies below the paper's
    p        two-sided p-value (Stouffer's method) of the hypothesis that the paper's accuracies are distributed like ours
    widest   width of the widest prediction interval
    """
    judged = [row for row in rows if row["is_within"] is not None]
    widths = [row["one_more_run"]["high"] - row["one_more_run"]["low"] for row in judged]
    p = [share_above(row["accuracies"], row["paper"]) for row in judged]
    above = combine_pvalues(p, "stouffer").pvalue if p else math.nan
    return {
        "models": len(judged),
        "below": sum(row["difference"] < 0 for row in judged),
        "p": float(2 * min(above, 1 - above)),
        "widest": max(widths, default=None),
    }


def as_csv(rows: list[dict[str, Any]], lab: Lab) -> pd.DataFrame:
    """Returns Table 2, with accuracies in per cent and differences in percentage points."""
    listed = []
    for row in rows:
        ours, difference = row["ours"], row["difference"]
        listed.append(
            {
                "variant": row["variant"],
                "model": lab.label(row["variant"]),
                "paper": row["paper"],
                **{name: ours[name] for name in ("mean", "std", "low", "high", "min", "max")},
                "difference": None if difference is None else round(difference, files.DIGITS) + 0.0,
                "n_starting": ours["n"],
                **{f"n_{status}": row[status] for status in ("finished", "diverged", "missing")},
            }
        )
    return pd.DataFrame(listed)


def cost_of_runs(lab: Lab, records: dict[tuple[str, int], RunRecord]) -> dict[str, Any]:
    """Returns the cost of Table 2's runs.

    parameters   minimum and maximum number of parameters of a model
    machines     for each kind of machine, the seeds of its runs, and the `least` and `most` minutes of a run
    """
    parameters, machines = lab.tables["runs"]["num_parameters"].dropna().astype(int), defaultdict(list)
    for (_, seed), record in records.items():
        machines[provenance.short_name(record.environment.model_dump())].append((seed, record.seconds / 60))
    rows = []
    for name, runs in machines.items():
        seeds, minutes = zip(*runs, strict=True)
        rows.append({"machine": name, "seeds": sorted({*seeds}), "least": min(minutes), "most": max(minutes)})
    return {
        "parameters": [int(parameters.min()), int(parameters.max())] if len(parameters) else None,
        "machines": sorted(rows, key=lambda row: row["seeds"]),
    }


def compute(records: dict[tuple[str, int], RunRecord]) -> dict[str, dict]:
    """Counts runs and hours, and lists the variants trained on each machine, for Table 2 and each study with runs."""
    trained = {"table_2": [(variant, record) for (variant, _), record in records.items()]}
    trained |= {name: [(run.variant, record) for run, record in recorded(name)] for name in studies.names()}
    summary = {}
    for name, own in trained.items():
        machines = defaultdict(set)
        for variant, record in own:
            machines[provenance.short_name(record.environment.model_dump())].add(variant)
        if own:
            hours = sum(record.seconds for _, record in own) / 3600
            variants = {machine: sorted(of_machine) for machine, of_machine in sorted(machines.items())}
            summary[name] = {"runs": len(own), "hours": hours, "machines": variants}
    return summary


def made_with(records: dict[tuple[str, int], RunRecord]) -> dict[str, Any]:
    """Summarises the provenance of Table 2's runs. For each of PROPERTIES, counts the runs with each value."""
    listed = list(records.values())
    counts: dict[str, Counter[str]] = {key: Counter() for key in PROPERTIES}
    for record in listed:
        for key, count in counts.items():
            count[str(getattr(record, key, None) or getattr(record.environment, key))] += 1
    newest = max(listed, key=lambda each: each.finished_at or "", default=None)
    return {
        **{key: dict(sorted(count.items())) for key, count in counts.items()},
        "newest_commit": newest and newest.commit,
        "dirty": sum(bool(each.dirty) for each in listed),
        "resumptions": sum(each.resumptions for each in listed),
    }
