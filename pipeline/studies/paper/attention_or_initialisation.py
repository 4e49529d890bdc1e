"""Attention or initialisation: which of the two lets OSA train without skips and LN?

The paper's OSA differs from ViT (no skip, no LN) in both its attention and its initialisation. We change one of the two at a
time. This gives four cells: {softmax, OSA (exact)} × {Xavier, Section 4's initialisation}. For the first reading, the study
first_reading trains two cells, and this study trains the other two. For Table 2's reading, Table 2 has two cells, and the
study ablations trains the other two.
"""

from pipeline.statistics.claims import Results, read_claims
from pipeline.statistics.intervals import summary_of
from pipeline.statistics.verdicts import judge_contrast
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE, ablations

# The cells: softmax with Xavier, softmax with Section 4's initialisation, OSA with Xavier, OSA with Section 4's
# initialisation
CELLS = ("vit_noskip_nonorm", "vit_section_4", "osa_xavier", "osa_exact")
# factor → the cell that differs from softmax with Xavier only in this factor
ALONE = {"attention": "osa_xavier", "initialisation": "vit_section_4"}
# Weights of the cells' accuracies. The weighted sum is OSA's gain from Section 4's initialisation minus softmax's gain.
INTERACTION = (1, -1, -1, 1)
CLAIMS: tuple[str, ...] = ("attention_matters", "attention_matters_with_xavier")
CLAIMS += ("initialisation_matters_for_softmax", "initialisation_matters_for_osa")


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """Compares the four cells in the first reading of the recipe and in Table 2's reading."""
    return {
        "first": four_cells(Results(tables, comparison.first_reading(lab))),
        "table_2": four_cells(ablations.results_of_ablations(lab)),
    }


def four_cells(results: Results) -> dict:
    """Compares the four cells.

    Returns:
        is_trained    whether every cell has a run
        cells         the accuracy of each cell
        gap           the mean accuracy of OSA with Section 4's initialisation minus the mean accuracy of softmax with Xavier
        alone         the share of the gap that each change closes by itself. If the changes overlap, the shares add up to
                      more than one.
        interaction   the verdict on the contrast `INTERACTION`
        verdicts      the verdict of each claim
    """
    claims = read_claims(CLAIMS_FILE)
    samples = {cell: results.accuracies(cell) for cell in CELLS}
    cells = {cell: summary_of(sample) for cell, sample in samples.items()}
    start, end = cells[CELLS[0]].mean, cells[CELLS[-1]].mean
    verdicts = {name: next(iter(claims[name].judge(results).values())) for name in CLAIMS}
    return {
        "is_trained": all(samples.values()),
        "cells": cells,
        "gap": end - start,
        "alone": {change: (cells[cell].mean - start) / (end - start) for change, cell in ALONE.items()},
        "interaction": judge_contrast(list(samples.values()), INTERACTION),
        "verdicts": verdicts,
    }


STUDY = comparison.study(summarise=summarise)
