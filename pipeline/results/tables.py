"""Tabulates the runs of Table 2 and summarises them over seeds: `python -m pipeline tables`.

The stage `tables` reads the runs that params.yaml lists, and ignores other runs. A run without results counts as missing.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pipeline.config.params import Params, load
from pipeline.core import files
from pipeline.core.errors import UserError, entry_point
from pipeline.results.runs import FINALS, of_table_2
from pipeline.statistics.intervals import summary_of
from pipeline.training.run import CURVES, RUNS, TABLE_2, Run

TABLES = Path("paper_outputs/tables")
SUMMARISED = ("test_accuracy", "test_loss", "train_loss")
RUN = ["variant", "seed"]
RUN_RESULTS = [*FINALS, "calibration_error"]
RUN_COLUMNS = ["status", "steps", "diverged_at_step", "num_parameters", *RUN_RESULTS]
MEASURED = {
    "per_class": ["class", "images", "accuracy"],
    "confusion": ["label", "prediction", "count"],
    "mistakes": ["image", "prediction"],
    "layers": [
        *("layer", "head", "alpha", "error_max", "error_median", "exp_error_max", "exp_error_median", "norm_max"),
        *("norm_median", "size_max", "condition_median", "weight_kappa", "jacobian_kappa", "layer_kappa"),
    ],
}


@entry_point
def main() -> None:
    params = load()
    runs = find_runs(params)
    tables = {name: evaluation_table(runs, name) for name in MEASURED}
    tables["runs"] = runs_table(runs)
    tables["histories"] = read_histories(tables["runs"])
    tables["summary"] = summarise_runs(tables["runs"], params)
    tables["curves"] = summarise_curves(tables["histories"])
    for curve in ("train_loss", "test_loss"):
        tables[curve] = one_column_per_variant(tables["curves"], curve, params.run.variants)
    tables["accuracy_by_seed"] = accuracy_by_seed(tables["runs"], params.run.variants)
    for name, table in tables.items():
        write_table(TABLES / f"{name}.csv", table)
    written = {TABLES / f"{name}.csv" for name in tables}
    for variant, metrics in for_dvc_metrics(tables["summary"]).items():
        written.add(path := TABLES / "test_accuracy" / f"{variant}.json")
        files.write_json(path, metrics)
    for stale in {*TABLES.rglob("*.csv"), *TABLES.rglob("*.json")} - written:
        stale.unlink()


def find_runs(params: Params) -> list[dict]:
    """Returns the `evaluated_row` of each run of Table 2. Warns about missing runs and about runs not in params.yaml.

    Raises:
        UserError: no run exists, or a run is damaged.
    """
    runs = [evaluated_row(run) for run in of_table_2(params)]
    missing = [f"{run['variant']}/{run['seed']}" for run in runs if run["status"] == "missing"]
    if len(missing) == len(runs):
        raise UserError(f"{RUNS / TABLE_2} holds none of the {len(runs)} runs of params.yaml: train them with `dvc repro`.")
    if missing:
        warn(f"{len(missing)} of {len(runs)} runs of params.yaml are not trained and evaluated yet: {', '.join(missing)}")
    strays = {path.parent for path in (RUNS / TABLE_2).glob("*/*/metrics.json")}
    strays -= {run.folder for run in of_table_2(params)}
    if strays:
        warn(f"left out, because params.yaml does not list them: {', '.join(sorted(map(str, strays)))}")
    return runs


def evaluated_row(run: Run) -> dict:
    """Returns a run's variant, seed, status (finished, diverged or missing) and, if not missing, metrics and evaluation."""
    identity = {"variant": run.variant, "seed": run.seed}
    record = run.record()
    if record is None or not run.evaluated.exists():
        return identity | {"status": "missing"}
    return {**identity, "status": record.status, **run.metrics(), **files.read_json(run.evaluated)}


def warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)


def evaluation_table(runs: list[dict], name: str) -> pd.DataFrame:
    """Concatenates the table called `name` from the evaluations of all finished runs."""
    parts, columns = [], RUN + MEASURED[name]
    for run in runs:
        if run["status"] == "finished" and run[name]:
            parts.append(as_table(name, run[name]).assign(variant=run["variant"], seed=run["seed"]))
    return pd.concat(parts)[columns] if parts else pd.DataFrame(columns=columns)


def as_table(name: str, value: Any) -> pd.DataFrame:
    """Converts the value of the key `name` in evaluation.json to a table."""
    if name == "confusion":  # the table has a row for each pair of label and prediction
        counts = np.array(value)
        label, prediction = np.indices(counts.shape)
        return pd.DataFrame({"label": label.ravel(), "prediction": prediction.ravel(), "count": counts.ravel()})
    if name == "mistakes":
        return pd.DataFrame({"image": [*map(int, value)], "prediction": [*value.values()]}).sort_values("image")
    return pd.DataFrame(value)


def runs_table(runs: list[dict]) -> pd.DataFrame:
    """Returns a row for each run. Test results come from the evaluation; all results are NaN if a run did not finish."""
    table = pd.DataFrame(runs).reindex(columns=RUN + RUN_COLUMNS)
    table[RUN_RESULTS] = table[RUN_RESULTS].astype(float).where(table["status"] == "finished")
    whole = dict.fromkeys(("steps", "diverged_at_step", "num_parameters"), "Int64")  # Int64 allows missing values
    return table.astype(whole)


def summarise_runs(runs: pd.DataFrame, params: Params) -> pd.DataFrame:
    """Returns a row for each variant: the numbers of runs by status, and statistics of the finished runs."""
    rows = []
    for variant in params.run.variants:
        group = runs[runs["variant"] == variant]
        count = group["status"].value_counts()
        row = {"variant": variant} | {f"n_{status}": count.get(status, 0) for status in ("finished", "diverged", "missing")}
        for quantity in SUMMARISED:
            summary = asdict(summary_of(group[quantity].dropna()))
            row |= {f"{quantity}_{name}": value for name, value in summary.items() if name != "n"}
        rows.append(row)
    return pd.DataFrame(rows)


def read_histories(runs: pd.DataFrame) -> pd.DataFrame:
    """Concatenates the curves of all existing runs."""
    there = runs.loc[runs["status"] != "missing", RUN].itertuples(index=False)
    return pd.concat(Run(*run).history().assign(**run._asdict()) for run in there)


def summarise_curves(histories: pd.DataFrame) -> pd.DataFrame:
    """Returns statistics over seeds for each point of each curve, in long format, without missing values."""
    long = histories.melt(id_vars=["variant", "step", "epoch"], value_vars=list(CURVES), var_name="curve").dropna()
    groups = long.groupby(["variant", "curve", "step", "epoch"], sort=False)["value"]
    rows = []
    for group, values in groups:
        summary = summary_of(values)
        row = dict(zip(groups.keys, group, strict=True))
        row |= {name: getattr(summary, name) for name in ("n", "mean", "std", "min", "max")}
        rows.append(row)
    return pd.DataFrame(rows)


def one_column_per_variant(curves: pd.DataFrame, curve: str, variants: list[str]) -> pd.DataFrame:
    """Tabulates the mean of one curve for `dvc plots`: a column of epochs, then a column for each variant."""
    wide = curves[curves["curve"] == curve].pivot(index="epoch", columns="variant", values="mean")
    return wide.reindex(columns=variants).reset_index()


def accuracy_by_seed(runs: pd.DataFrame, variants: list[str]) -> pd.DataFrame:
    """Tabulates test accuracies in per cent for `dvc plots`: a column of seeds, then a column for each variant."""
    wide = (100 * runs.set_index(["seed", "variant"])["test_accuracy"]).unstack()
    return wide.reindex(columns=variants).reset_index()


def for_dvc_metrics(summary: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Returns the test accuracy of each variant for `dvc metrics`: mean and sd in per cent, and the number of runs n."""
    found = {}
    for row in summary.to_dict("records"):
        mean, std = row["test_accuracy_mean"], row["test_accuracy_std"]
        found[row["variant"]] = {"mean": round(100 * mean, 2), "sd": round(100 * std, 2), "n": row["n_finished"]}
    return found


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Writes a table, with variant and seed as its first columns."""
    identity = [name for name in RUN if name in table]
    files.write_csv(path, table[identity + [name for name in table if name not in identity]])


if __name__ == "__main__":
    main()
