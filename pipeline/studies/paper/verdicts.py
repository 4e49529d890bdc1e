"""Error rates and power of the rule in pipeline/statistics/verdicts.py, estimated from simulated experiments.

For the error rates, the true difference between two models (in accuracy or log epochs) equals a claim's limit, so every
"reproduced" or "contradicted" is an error. For the power, the true accuracies are those in the paper's Table 2. A run's
accuracy (or log epochs) is normally distributed, with the standard deviation that claims.yaml declares. Some simulated runs
do not start to learn: they fail. For the error rates, both models' runs can fail. For the power, only runs of OSA (NS) can.
"""

import itertools
from collections import Counter

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtri

from pipeline.config.params import PositiveInt, Section
from pipeline.statistics.claims import Accuracy, Spreads, read_claims, read_spreads
from pipeline.statistics.verdicts import CONTRADICTED, LEVEL, REPRODUCED, holm, judge
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE
from pipeline.studies.paper.section_5 import ABOUT_OSA

RUNS_OF_A_MODEL = (3, 5, 10)  # numbers of runs per model
FAILING = (0.0, 0.1)  # assumed probabilities that a run fails, that is, does not start to learn
# Mean and standard deviation of a failing run's accuracy, or of its −log(epochs), relative to the second model's true mean.
FAILED, SCATTER = -50.0, 10.0
PRIMARY_MODELS = ("osa_qr", "vit", "vit_noskip")  # OSA (QR) is compared with each of the ViTs, in accuracy and in speed


class Settings(Section):
    repetitions: PositiveInt  # number of simulated experiments for each error rate and each power


def simulated_runs(normal: NDArray, spread: float, mean: float, failing: float) -> NDArray:
    """Returns the values of n simulated runs. `normal` is (n, 2): two standard normal numbers for each run.

    The first number sets the run's value. The second number decides whether the run fails.
    """
    value, draw = normal.T
    return np.where(draw < ndtri(failing), FAILED + SCATTER * value, mean + spread * value)


def family(normal: NDArray, failing: float, declared: Spreads) -> str:
    """Judges the primary comparisons of one simulated experiment. All true differences and all limits are 0.

    Returns "reproduced" if at least one comparison passes Holm's test, and "" otherwise.
    """
    p_values: dict[str, float] = {}
    parts = ((1, "above", declared.accuracy, normal[:3]), (-1, "below", declared.log_epochs, normal[3:]))
    for sign, side, spreads, own in parts:
        osa, *others = (
            sign * simulated_runs(each, spreads[name], 0.0, failing) for name, each in zip(PRIMARY_MODELS, own, strict=True)
        )
        p_values |= {f"{side} {i}": judge(osa, other, side=side).p for i, other in enumerate(others)}
    return REPRODUCED if min(holm(p_values).values()) <= LEVEL else ""


def measure(settings: Settings, lab: Lab) -> Tables:
    claims, spreads, paper = read_claims(CLAIMS_FILE), read_spreads(CLAIMS_FILE), lab.paper.table_2
    comparisons, rows = [], []
    for claim in (claims[name] for name in ABOUT_OSA):
        if isinstance(claim, Accuracy):
            comparisons += [(first, second, -claim.margin_points) for first, second in claim.compare]

    def add(name: str, truth: str, failing: float, n: int, words: list[str]) -> None:
        rates = {word: Counter(words)[word] / settings.repetitions for word in (REPRODUCED, CONTRADICTED)}
        rows.append({"scenario": name, "truth": truth, "failing": failing, "n": n} | rates)

    for failing, n in itertools.product(FAILING, RUNS_OF_A_MODEL):
        for first, second, limit in comparisons:
            normal = lab.normal(0, f"verdicts/{first}/{second}/{n}", settings.repetitions, 2, n, 2).numpy()
            for truth, mean in (("limit", limit), ("paper", paper[first] - paper[second])):
                a, b = (failing if truth == "limit" or name == "osa_ns" else 0.0 for name in (first, second))
                own, other = spreads.accuracy[first], spreads.accuracy[second]
                pairs = ((simulated_runs(x, own, mean, a), simulated_runs(y, other, 0.0, b)) for x, y in normal)
                add(f"{first}_vs_{second}", truth, failing, n, [judge(*pair, limit=limit).word for pair in pairs])
        normal = lab.normal(0, f"verdicts/family/{n}", settings.repetitions, 6, n, 2).numpy()
        add("family", "limit", failing, n, [family(own, failing, spreads) for own in normal])
    return {"rates": pd.DataFrame(rows)}


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Returns the error rates and the power of the rule: the rates of "reproduced" verdicts in the simulated experiments."""
    errors, power = {}, {}
    for failing, own in tables["rates"].groupby("failing"):
        by_name = own.query("truth == 'limit'").pivot(index="scenario", columns="n", values=REPRODUCED)
        worst, together = by_name.drop("family").max(), by_name.loc["family"]
        errors[f"{failing:g}"] = {"worst": worst.tolist(), "family": together.tolist()}
        pairs = own.query("truth == 'paper'").groupby("scenario", sort=False)[REPRODUCED]
        power[f"{failing:g}"] = {name: rates.tolist() for name, rates in pairs}
    return {"repetitions": settings.repetitions, "sizes": list(RUNS_OF_A_MODEL), "errors": errors, "power": power}


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
