"""Trains Table 2's models with our first interpretation of the recipe: pixels in [0, 1], Xavier for Q, K and V separately.

We knew the results before we wrote the present rule for verdicts. Other studies with the same recipe use these runs as
their baseline. CHANGELOG names the commit that holds the weights of these runs.
"""

from typing import Any

from pipeline.statistics.claims import Results
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import section_5


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict[str, Any]:
    judged = section_5.judge_all(Results(tables), lab)
    return {"claims": judged, "headline": section_5.headline(judged, fresh={})}


STUDY = comparison.study(summarise=summarise)
