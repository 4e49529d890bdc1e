"""Attention or initialisation: which of the two lets OSA train without skips and LN?

The paper's OSA differs from ViT (no skip, no LN) in both its attention and its initialisation. We train all four
combinations, or cells: {softmax, OSA (exact)} × {Xavier, Section 4's initialisation}. Under `first_reading`'s recipe,
this study supplies two cells, and `first_reading` two. Under Table 2's recipe, Table 2 supplies two, and `ablations` two.
"""

from pipeline.statistics.claims import Results, read_claims
from pipeline.statistics.intervals import summary_of
from pipeline.statistics.verdicts import judge_contrast
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE, ablations

# softmax with Xavier, softmax with Section 4's initialisation, OSA with Xavier, OSA with Section 4's initialisation
CELLS = ("vit_noskip_nonorm", "vit_section_4", "osa_xavier", "osa_exact")
# factor → the model that differs from softmax with Xavier only in this factor
ALONE = {"attention": "osa_xavier", "initialisation": "vit_section_4"}
# contrast of the cells' accuracies: OSA's gain from Section 4's initialisation minus softmax's gain
INTERACTION = (1, -1, -1, 1)
CLAIMS = (
    "attention_matters",
    "attention_matters_with_xavier",
    "initialisation_matters_for_softmax",
    "initialisation_matters_for_osa",
)


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """Compares the four pairs of attention and initialisation, for the recipes of `first_reading` and Table 2."""
    return {
        "first": four_cells(Results(tables, comparison.first_reading(lab))),
        "table_2": four_cells(ablations.results_of_ablations(lab)),
    }


def four_cells(results: Results) -> dict:
    """Compares the accuracies of the four `CELLS`.

    `gap` is the mean accuracy of OSA with Section 4's initialisation minus the mean accuracy of softmax with Xavier. `alone`
    holds the share of the gap that each factor closes by itself. If the effects overlap, the shares sum to more than one.
    """
    claims = read_claims(CLAIMS_FILE)
    samples = {cell: results.accuracies(cell) for cell in CELLS}
    cells = {cell: summary_of(sample) for cell, sample in samples.items()}
    start, end = cells[CELLS[0]].mean, cells[CELLS[-1]].mean
    return {
        "is_trained": all(samples.values()),
        "cells": cells,
        "gap": end - start,
        "alone": {change: (cells[cell].mean - start) / (end - start) for change, cell in ALONE.items()},
        "interaction": judge_contrast(list(samples.values()), INTERACTION),
        "verdicts": {name: next(iter(claims[name].judge(results).values())) for name in CLAIMS},
    }


STUDY = comparison.study(summarise=summarise)
