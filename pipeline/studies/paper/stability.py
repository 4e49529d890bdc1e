"""Stability: whether OSA trains stably where each gradient goes through a QR decomposition, as Section 5 found it.

`osa_qr` computes the same function and never differentiates a decomposition, so its runs say nothing of this. The models of
the claim, with its rule in pipeline/paper.yaml, do: they are trained here, and are no rows of Table 2.
"""

from pipeline.core.params import Section, Seeds
from pipeline.lab import Lab
from pipeline.statistics import runs_needed
from pipeline.studies import Finding, Tables
from pipeline.studies._runs import Request, collect_runs
from pipeline.studies.paper.section_5 import Results, StabilityClaim, judged_claim, read_claims

place = 5


class Settings(Section):
    seeds: Seeds


def claims(lab: Lab) -> dict[str, StabilityClaim]:
    """The claims of paper.yaml that are about stability."""
    return {name: claim for name, claim in read_claims(lab.paper).items() if isinstance(claim, StabilityClaim)}


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    models = dict.fromkeys(model for claim in claims(lab).values() for model in claim.models)
    return [(model, {}, seed) for seed in settings.seeds for model in models]


def measure(settings: Settings, lab: Lab) -> Tables:
    return collect_runs(trainings(settings, lab), lab)


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    results = Results(lab, tables)
    return [
        judged_claim(name, claim, claim.measures(results), limitation=reach(claim, len(settings.seeds)))
        for name, claim in claims(lab).items()
    ]


def reach(claim: StabilityClaim, listed: int) -> str:
    """That so many runs cannot decide the claim, if so."""
    least = runs_needed(1.0, limit=claim.share, family=len(claim.models))
    if least is None or least <= listed:
        return ""
    return f"“{claim.title}” needs {least} runs or more that all agree, and {listed} are listed, which cannot decide it."
