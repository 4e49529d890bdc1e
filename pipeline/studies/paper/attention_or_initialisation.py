"""Attention or initialisation: which of the two lets OSA train without skips and LN?

The paper's OSA differs from ViT (no skip, no LN) in both. Here each is changed alone: {softmax, OSA (exact)} × {Xavier,
Section 4's initialisation}. By the first reading two of the four cells are runs of the study first_reading; by Table 2's,
two are its runs and two those of the study ablations.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.statistics.claims import Results, read_claims
from pipeline.statistics.intervals import summary_of
from pipeline.statistics.verdicts import LEVEL, judge_contrast
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import ablations
from pipeline.studies.paper.section_5 import CLAIMS

CELLS = ("vit_noskip_nonorm", "vit_section_4", "osa_xavier", "osa_exact")  # softmax first, Xavier first
EFFECTS = {  # weights of the cells: the mean effect over the other factor's levels
    "attention": (-0.5, -0.5, 0.5, 0.5),
    "initialisation": (-0.5, 0.5, -0.5, 0.5),
}
INTERACTION = (1, -1, -1, 1)  # weights: how much more Section 4's initialisation helps OSA than softmax
RESAMPLES = 10_000
RULES = ("attention_matters", "attention_matters_with_xavier")
RULES += ("initialisation_matters_for_softmax", "initialisation_matters_for_osa")


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """The comparison by each of the two readings."""
    return {"first": compare(Results(tables, comparison.first_reading(lab))), "table_2": compare(ablations.read(lab))}


def compare(results: Results) -> dict:
    """The four cells, the share of each factor's effect in the gap with its interval, their interaction, the verdicts."""
    claims = read_claims(CLAIMS)
    samples = [results.accuracies(cell) for cell in CELLS]
    is_trained = all(samples)
    means = [summary_of(sample).mean for sample in samples]
    gap, effects = means[-1] - means[0], {}
    for name, weights in EFFECTS.items() if is_trained else ():
        low, high = share_interval(samples, weights)
        effects[name] = {"share": float(np.dot(weights, means)) / gap, "low": low, "high": high}
    verdicts = {name: next(iter(claims[name].judge(results).values())) for name in RULES}
    return {
        "is_trained": is_trained,
        "cells": dict(zip(CELLS, map(summary_of, samples), strict=True)),
        "gap": gap,
        "effects": effects,
        "interaction": judge_contrast(samples, INTERACTION),
        "verdicts": verdicts,
    }


def share_interval(samples: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of a share by resampling the runs of each cell (percentile bootstrap)."""
    rng = np.random.default_rng(0)
    means = np.array([rng.choice(sample, (RESAMPLES, len(sample))).mean(1) for sample in samples])  # (cells, resamples)
    low, high = np.quantile(np.array(weights) @ means / (means[-1] - means[0]), [LEVEL, 1 - LEVEL])
    return float(low), float(high)


STUDY = comparison.study(summarise=summarise)
