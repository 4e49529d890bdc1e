"""Is OSA (QR) as accurate as ViT? Eleven new seeds of each model answer the question, or leave it open.

Seeds 10 to 14 of Table 2 leave this claim of Section 5 open. Before the first run of seed 15 we declared that seeds 15 to 25
alone decide the claim, with the rule and limit of `osa_matches_vit`. We neither pool these seeds with earlier seeds nor add
later seeds. The report shows no result until all runs have ended.
"""

from typing import Any

from pydantic import Field

from pipeline import studies
from pipeline.config.params import Name, PositiveFloat
from pipeline.statistics.claims import NOTHING, Accuracy, Results, read_claim
from pipeline.statistics.intervals import summary_of
from pipeline.statistics.verdicts import LEVEL, Verdict, power_of_ranks
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE

CLAIM = "osa_matches_vit"
FAMILY = 5  # number of primary comparisons, for Holm's correction


class Settings(comparison.Settings):
    spreads: dict[Name, PositiveFloat]  # standard deviation of each model's accuracy over seeds 10 to 14, in points
    differences: list[float] = Field(min_length=1)  # true differences, in points, for which we simulate the power


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict[str, Any]:
    """Returns the power of the comparison and, once all runs have ended, both models' accuracies and the verdict."""
    claim, results, rows = read_claim(CLAIMS_FILE, CLAIM, Accuracy), Results(tables), []
    sizes = [len(training.seeds) for training in settings.runs.values()]
    power = powers(claim, settings.spreads, settings.differences, sizes)
    if verdict := judge(claim, results):
        accuracies = {name: summary_of(results.accuracies(name)) for name in settings.runs}
        rows = [{"variant": name, "accuracy": accuracy} for name, accuracy in accuracies.items()]
        first, second = claim.compare[0]
        spreads = accuracies[first].std, accuracies[second].std
        power["observed"] = power_of_ranks(claim.margin_points, spreads, *sizes)
    return {"power": power, "rows": rows, "verdict": verdict}


def verdict(lab: Lab) -> Verdict | None:
    """Returns the verdict on this study's claim, or None until all runs have ended."""
    settings = studies.settings("decision")
    tables = comparison.read(settings, lab.of("decision", settings.reading))
    return judge(read_claim(CLAIMS_FILE, CLAIM, Accuracy), Results(tables))


def judge(claim: Accuracy, results: Results) -> Verdict | None:
    """Returns the verdict on a claim's first comparison, or None if a run is missing."""
    first, second = claim.compare[0]
    if any(results.counts(name)["missing"] or not results.accuracies(name) for name in (first, second)):
        return None
    return claim.verdict(first, second, results, NOTHING)


def powers(claim: Accuracy, spreads: dict[str, float], differences: list[float], sizes: list[int]) -> dict[str, Any]:
    """Simulates how often the rule gives each verdict.

    Returns a dict: `rows` holds the rates of "reproduced" and "contradicted" for each true difference. `together` holds the
    rate of "reproduced" for two equally accurate models under Holm's correction, in two cases: none of the other four
    comparisons in the family is significant, or three of the other four are significant.
    """
    first, second = claim.compare[0]
    own, limit = (spreads[first], spreads[second]), -claim.margin_points
    rows = []
    for difference in differences:
        distance = difference - limit
        words = {"reproduced": power_of_ranks(distance, own, *sizes), "contradicted": power_of_ranks(-distance, own, *sizes)}
        rows.append({"difference": difference} | words)
    together = [power_of_ranks(-limit, own, *sizes, level=LEVEL / rank) for rank in (FAMILY, 2)]
    return {"rows": rows, "together": together}


STUDY = comparison.study(settings=Settings, summarise=summarise)
