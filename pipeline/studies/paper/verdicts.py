"""How often the rule of pipeline/verdicts.py errs, and what it can see: simulated experiments with the spreads of Table 2.

In one part the truth is at the limit of a claim, so that every "reproduced" and "contradicted" is an error; in the other it
is the paper's Table 2. Runs are normal.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import pandas as pd

from pipeline.claims import read_claims
from pipeline.core.params import PositiveInt, Section
from pipeline.lab import Lab
from pipeline.studies import Study, Tables, check
from pipeline.studies.paper.section_5 import ABOUT_OSA, CLAIMS
from pipeline.verdicts import CONTRADICTED, LEVEL, REPRODUCED, holm, judge, judge_share

SIZES = (3, 5, 10, 50)  # runs of each model
# Standard deviations over the exploratory seeds of Table 2, as known when the rule was fixed (a test compares them): of
# accuracies in points, and of the logarithm of the epochs to the losses at which the speed claims are judged.
SPREADS = {"osa_qr": 0.43, "osa_ns": 0.73, "vit": 0.26, "vit_noskip": 0.62}
LOG_SPREADS = {"osa_qr": 0.1, "vit": 0.095, "vit_noskip": 0.087}
FEWEST_WATCHED, MOST_WATCHED = 3, 10  # runs at which someone looks who stops at the first "reproduced"

Draw = Callable[[float, int, float], list[float]]  # (spread, n, mean) → values of n runs
Experiment = Callable[[Draw, int], str]  # (draw, n) → the word


class Settings(Section):
    """How many experiments are behind each rate."""

    repetitions: PositiveInt


def scenarios(lab: Lab) -> Iterator[tuple[str, str, Experiment]]:
    """Name, truth and experiment of each."""
    claims, paper = read_claims(CLAIMS), lab.paper.table_2
    pairs = [(pair, -claims[name].margin_points) for name in ABOUT_OSA if claims[name].kind == "accuracy"
             for pair in claims[name].compare]  # fmt: skip
    for (first, second), limit in pairs:
        name = f"{first}_vs_{second}"
        yield name, "limit", accuracy(first, second, limit, limit)
        yield name, "paper", accuracy(first, second, limit, paper[first] - paper[second])
    yield "family", "limit", family
    yield "share", "limit", share
    yield "watched", "limit", watched


def accuracy(first: str, second: str, limit: float, difference: float) -> Experiment:
    """Two models whose accuracies differ by this much."""

    def experiment(draw: Draw, n: int) -> str:
        samples = [draw(SPREADS[first], n, difference), draw(SPREADS[second], n, 0.0)]
        return judge(samples, (1, -1), limit=limit, side="above").word

    return experiment


def family(draw: Draw, n: int) -> str:
    """The four primary comparisons, each at its limit; "reproduced" if any is after Holm's correction."""
    p_values = {}
    for kind, spreads, side in (("accuracy", SPREADS, "above"), ("speed", LOG_SPREADS, "below")):
        osa = draw(spreads["osa_qr"], n, 0.0)
        for second in ("vit", "vit_noskip"):
            p_values[kind + second] = judge([osa, draw(spreads[second], n, 0.0)], (1, -1), limit=0, side=side).p
    return REPRODUCED if min(holm(p_values).values()) <= LEVEL else ""


def share(draw: Draw, n: int) -> str:
    """Runs of which one in two succeeds."""
    return judge_share(sum(value > 0 for value in draw(1.0, n, 0.0)), n).word


def watched(draw: Draw, n: int) -> str:
    """OSA (QR) and ViT, judged after each seed from the third on, until the word is "reproduced" or there are n."""
    first, second = draw(SPREADS["osa_qr"], n, 0.0), draw(SPREADS["vit"], n, 0.0)
    words = (judge([first[:k], second[:k]], (1, -1), limit=0, side="above").word for k in range(FEWEST_WATCHED, n + 1))
    return REPRODUCED if REPRODUCED in words else ""


def measure(settings: Settings, lab: Lab) -> Tables:
    rows = []
    for name, truth, experiment in scenarios(lab):
        for n in SIZES if name != "watched" else range(FEWEST_WATCHED, MOST_WATCHED + 1):
            normal = lab.normal(0, f"verdicts/{name}/{n}", settings.repetitions, 6 * n).tolist()
            words = Counter(experiment(drawing(numbers), n) for numbers in normal)
            rates = {word: words[word] / settings.repetitions for word in (REPRODUCED, CONTRADICTED)}
            rows.append({"scenario": name, "truth": truth, "n": n} | rates)
    return {"rates": pd.DataFrame(rows)}


def drawing(numbers: list[float]) -> Draw:
    """Runs made of these standard normal numbers, each used once."""
    stream = iter(numbers)
    return lambda spread, n, mean: [mean + spread * next(stream) for _ in range(n)]


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Rates by the number of runs: of errors, of the paper's effects seen, and of errors by looking after every seed."""
    rates = tables["rates"]

    def by_scenario(truth: str) -> dict[str, list[float]]:
        chosen = rates[(rates["truth"] == truth) & (rates["scenario"] != "watched")]
        return {name: own[REPRODUCED].tolist() for name, own in chosen.groupby("scenario", sort=False)}

    errors, looked = by_scenario("limit"), rates[rates["scenario"] == "watched"]
    of_means = [own for name, own in errors.items() if name not in ("family", "share")]
    errors["largest"] = [max(each) for each in zip(*of_means, strict=True)]
    rounding = 3 * math.sqrt(LEVEL * (1 - LEVEL) / settings.repetitions)
    return {
        "repetitions": settings.repetitions,
        "sizes": list(SIZES),
        "errors": errors,
        "power": by_scenario("paper"),
        "watched": {"sizes": looked["n"].tolist(), "rates": looked[REPRODUCED].tolist()},
        "worst": check(max(max(own) for own in errors.values()), LEVEL + rounding),
    }


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
