"""Attention or initialisation: which of the two lets OSA train without skips and LN?

The paper's OSA differs from ViT (no skip, no LN) in both. Here one changes at a time: {softmax, OSA (exact)} × {Xavier,
Section 4's initialisation}. By the first reading, the study first_reading trains two of the four cells. By Table 2's
reading, Table 2 has two and the study ablations trains the other two.
"""

from pipeline.statistics.claims import Results, read_claims
from pipeline.statistics.intervals import summary_of
from pipeline.statistics.verdicts import judge_contrast
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE, ablations

CELLS = ("vit_noskip_nonorm", "vit_section_4", "osa_xavier", "osa_exact")  # softmax first, Xavier first
ALONE = {"attention": "osa_xavier", "initialisation": "vit_section_4"}  # the cell that changes only this factor
INTERACTION = (1, -1, -1, 1)  # weights of the cells: how much more Section 4's initialisation helps OSA
CLAIMS: tuple[str, ...] = ("attention_matters", "attention_matters_with_xavier")
CLAIMS += ("initialisation_matters_for_softmax", "initialisation_matters_for_osa")


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """Returns `four_cells` for the first reading of the paper and for Table 2's reading."""
    return {
        "first": four_cells(Results(tables, comparison.first_reading(lab))),
        "table_2": four_cells(ablations.results_of_ablations(lab)),
    }


def four_cells(results: Results) -> dict:
    """Returns the four cells, the share of the gap that each change closes by itself, their interaction, and the verdicts.

    If the changes overlap, the shares add up to more than one.
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
