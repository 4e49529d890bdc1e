"""Converts Section 5's comparisons of speed from epochs to seconds, using the ratio of two models' seconds per step.

All models take the same number of steps per epoch. The claims are about epochs, so we do not judge the ratios of seconds.
"""

import itertools
import math

from pipeline.benchmarks.measurements import OURS, TRAINED, measured
from pipeline.core import files, provenance
from pipeline.statistics.claims import NOTHING, Speed, read_claim
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE
from pipeline.studies.paper.benchmarks import gpu_of
from pipeline.studies.paper.section_5 import SPEED, baseline, results_of

MODELS = ("osa_qr", "osa_ns", "osa_exact")


def summarise(settings: None, tables: Tables, lab: Lab) -> dict:
    """Returns a row for each pair of an OSA model and a baseline, with ratios of seconds on each machine.

    A ratio of seconds is NaN unless both models were timed on the machine.
    """
    results, machines, rows = results_of(lab), step_seconds(), []
    claims = [read_claim(CLAIMS_FILE, name, Speed) for name in SPEED]
    for claim, model in itertools.product(claims, MODELS):
        second = baseline(claim)
        epochs = claim.verdict(model, second, results, NOTHING)
        if math.isfinite(epochs.estimate):
            seconds = []
            for times in machines.values():
                step = times.get(model, math.nan) / times.get(second, math.nan)
                ratio = {"estimate": step * epochs.estimate, "low": step * epochs.low, "high": step * epochs.high}
                seconds.append({"step": step} | ratio)
            rows.append({"models": [model, second], "epochs": epochs, "seconds": seconds})
    return {"machines": [*machines], "rows": rows}


def step_seconds() -> dict[str, dict[str, float]]:
    """Returns the seconds of each model's training step, by machine, CPUs first.

    GPU times are for initial weights. CPU times are for trained weights if the table has such times.
    """
    timed = []
    for path in measured("step.csv"):
        table = files.read_csv(path)
        own = table[table["code"] == OURS]
        trained = own[own["weights"] == TRAINED]
        timed.append((files.read_json(path.with_suffix(".json"))["environment"], own if trained.empty else trained))
    for path in measured("gpu_step.csv"):
        table = files.read_csv(path)
        timed.append((gpu_of(table), table))
    return {provenance.short_name(machine): table.set_index("model")["seconds"].to_dict() for machine, table in timed}


STUDY = Study(summarise=summarise)
