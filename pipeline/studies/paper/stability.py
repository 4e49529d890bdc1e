"""Does OSA train stably with gradients through a QR decomposition? Section 5 reports that it does.

We train `osa_qr_literal`. The variant `osa_qr` computes the same function but never differentiates a decomposition, so its
runs cannot answer the question.
"""

from pipeline.statistics.claims import Results, Stability, largest_rise, read_claim
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """Returns the number of stable runs, the lower 95 % bound on their share, and the largest rise of the train loss."""
    results, claim = Results(tables), read_claim(CLAIMS_FILE, "qr_is_stable", Stability)
    (model,) = claim.models
    verdict = claim.judge(results)[model]
    rises = [largest_rise(curve) for curve in results.curves(model)]
    return {
        "runs": verdict.n,
        "stable": round(verdict.n * verdict.estimate) if verdict.n else 0,
        "largest_rise": max(rises, default=None),
        "at_least": verdict.low,
    }


STUDY = comparison.study(summarise=summarise)
