"""Trains Table 2's models by the first reading of the recipe: pixels in [0, 1], and Xavier for each matrix separately.

We knew the results of seeds 0 to 4 before we wrote the second rule of verdicts, and the results of all ten seeds before we
wrote the present rule. The runs are the baseline of the studies that follow this reading. Git has the records of the runs.
CHANGELOG names the commit that has their weights.
"""

from typing import Any

from pipeline.statistics.claims import Results, read_claims
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE, section_5


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict[str, Any]:
    """Returns the verdicts of the paper's claims in these runs."""
    judged = section_5.judge_all(read_claims(CLAIMS_FILE), Results(tables), lab)
    return {"claims": judged, "headline": section_5.headline(judged, fresh={})}


STUDY = comparison.study(summarise=summarise)
