"""Converts Section 5's claims of speed from epochs to seconds, by the ratio of two models' seconds per step.

All models take the same number of steps per epoch. The claims are about epochs, so the ratios of seconds have no verdict.
"""

import itertools
import math
from collections.abc import Mapping

import pandas as pd

from pipeline.benchmarks.measurements import OURS, TRAINED, measured
from pipeline.core import files, provenance
from pipeline.statistics.claims import NOTHING, Speed, read_claim
from pipeline.statistics.verdicts import Verdict
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE
from pipeline.studies.paper.section_5 import baseline, results_of

SPEED = ("osa_approaches_vit_speed", "osa_faster_than_noskip")
MODELS = ("osa_qr", "osa_ns", "osa_exact")


def summarise(settings: None, tables: Tables, lab: Lab) -> dict:
    """Returns a row for each OSA model and each baseline.

    `keeps` is the smallest limit with which the claim is reproduced. A ratio of seconds is NaN if the machine lacks a model.
    """
    results, machines, rows = results_of(lab), step_seconds(), []
    claims = [read_claim(CLAIMS_FILE, name, Speed) for name in SPEED]
    for claim, model in itertools.product(claims, MODELS):
        second = baseline(claim)
        epochs = claim.verdict(model, second, results, NOTHING)
        if math.isfinite(epochs.estimate):
            steps = [step.get(model, math.nan) / step.get(second, math.nan) for step in machines.values()]
            seconds = [in_seconds(epochs, step) for step in steps]
            rows.append({"models": [model, second], "epochs": epochs, "keeps": least_limit(epochs), "seconds": seconds})
    return {"machines": [*machines], "rows": rows}


def step_seconds() -> dict[str, Mapping[str, float]]:
    """Returns the seconds of each model's training step, by machine, CPUs first.

    On CPUs, models have trained weights if the benchmark timed trained weights. On GPUs, models have initial weights.
    """
    machines: dict[str, Mapping[str, float]] = {}
    for path in measured("step.csv"):
        table = files.read_csv(path)
        own = table[table["code"] == OURS]
        trained = own[own["weights"] == TRAINED]
        environment = files.read_json(path.with_suffix(".json"))["environment"]
        machines[provenance.short_name(environment)] = seconds_of(own if trained.empty else trained)
    for path in measured("gpu_step.csv"):
        table = files.read_csv(path)
        machines[provenance.short_name({"device_name": table["device"].iloc[0], "num_threads": None})] = seconds_of(table)
    return machines


def seconds_of(table: pd.DataFrame) -> dict[str, float]:
    return table.set_index("model")["seconds"].to_dict()


def in_seconds(epochs: Verdict, step: float) -> dict[str, float]:
    """Converts a ratio of epochs and its interval to seconds, by the ratio of step times."""
    return {"step": step, "estimate": step * epochs.estimate, "low": step * epochs.low, "high": step * epochs.high}


def least_limit(verdict: Verdict) -> float:
    """Returns the smallest limit, to two decimals, at which the test reproduces the claim."""
    return math.floor(100 * verdict.bound + 1) / 100 if math.isfinite(verdict.bound) else math.inf


STUDY = Study(summarise=summarise)
