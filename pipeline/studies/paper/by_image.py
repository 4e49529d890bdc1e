"""Compares Table 2's models by test loss, calibration, mean accuracy, and the accuracy of a majority vote of the runs.

The stage `evaluate` lists the images that each run gets wrong, and the stage `tables` gathers the lists.
"""

import numpy as np
import pandas as pd

from pipeline.statistics.claims import CONTRAST_WEIGHTS, GUESS_ACCURACY
from pipeline.statistics.intervals import contrast_over_images, summary_of
from pipeline.statistics.verdicts import TWO_SIDED
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab
from pipeline.studies.paper.section_5 import judge_all, results_of


def summarise(settings: None, tables: Tables, lab: Lab) -> dict:
    """Returns a row for each model, and an estimate with its interval for each claimed difference of accuracies."""
    right, comparisons = right_by_model(lab.tables), {}
    for name, rows in judge_all(results_of(lab), lab).items():
        compared = {key: row for key, row in rows.items() if row["kind"] != "speed"}
        comparisons[name] = {key: means(right, row["models"], row["kind"]) for key, row in compared.items()}
    models = [variant for variant in lab.params.run.variants if variant in right]
    return {"models": [model_row(lab.tables, model, right[model]) for model in models], "comparisons": comparisons}


def right_by_model(tables: Tables) -> dict[str, np.ndarray]:
    """Returns an array (runs, images) for each model: 1 if the run classifies the test image correctly, and 0 otherwise.

    For a run that diverged, all entries are 0.1, the accuracy of guessing.
    """
    if "mistakes" not in tables or tables["per_class"].empty:
        return {}
    of_runs = tables["per_class"].groupby(["variant", "seed"])["images"].sum()
    wrong = tables["mistakes"].groupby(["variant", "seed"])["image"].apply(list).to_dict()
    right: dict[str, list[np.ndarray]] = {}
    for run in tables["runs"][tables["runs"]["status"] != "missing"].itertuples():
        own = np.full(of_runs.max(), GUESS_ACCURACY / 100 if run.status == "diverged" else 1.0)
        own[wrong.get((run.variant, run.seed), [])] = 0.0
        right.setdefault(run.variant, []).append(own)
    return {variant: np.array(each) for variant, each in right.items()}


def means(right: dict[str, np.ndarray], models: list[str], kind: str) -> dict[str, float] | None:
    """Returns a contrast of mean accuracies (percentage points). Its interval accounts for variance over runs and images."""
    if min(len(right.get(model, [])) for model in models) < 2:  # too few runs for an interval
        return None
    estimate = contrast_over_images([100 * right[model] for model in models], CONTRAST_WEIGHTS.get(kind, (1, -1)))
    low, high = estimate.interval(TWO_SIDED)
    return {"estimate": estimate.value, "low": low, "high": high}


def model_row(tables: Tables, variant: str, right: np.ndarray) -> dict:
    runs, mistakes = (tables[name][tables[name]["variant"] == variant] for name in ("runs", "mistakes"))
    runs = runs[runs["status"] == "finished"]
    return {
        "variant": variant,
        "runs": len(runs),
        "accuracy": summary_of(100 * runs["test_accuracy"].astype(float)),
        "test_loss": summary_of(runs["test_loss"].astype(float)),
        "calibration_error": summary_of(runs["calibration_error"].astype(float)),
        "vote": 100 * vote(mistakes, len(runs), right.shape[1]) if len(runs) else None,
    }


def vote(mistakes: pd.DataFrame, runs: int, images: int) -> float:
    """Returns the accuracy of a majority vote of the runs. A tie of k classes counts as 1/k if one of them is correct."""
    votes = mistakes.groupby(["image", "prediction"]).size()  # votes for each wrong class of each image
    most = votes.groupby("image").max()
    leaders = (votes == votes.groupby("image").transform("max")).groupby("image").sum()
    for_right = runs - votes.groupby("image").sum()
    won = (for_right > most) + (for_right == most) / (1 + leaders)
    return float(images - len(most) + won.sum()) / images


STUDY = Study(summarise=summarise)
