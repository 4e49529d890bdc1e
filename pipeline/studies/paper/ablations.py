"""Ablations by PyTorch's defaults: what the accuracies of Table 2 depend on, one change at a time.

Initialisation, the learning rate, each of the four details that this reading chooses otherwise than the first, exp, and skip
connections with LN. Every change is compared with runs of Table 2, which are a baseline only where params.yaml has this
reading too. Rules and expectations were written before the first run. Until all are there, only their number is shown.
"""

from typing import Any

from pipeline.config import params
from pipeline.statistics.claims import Results, read_claims
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import attention_or_initialisation
from pipeline.studies.paper.section_5 import CLAIMS, results_of

RULES = (
    "rate_is_fair",
    "osa_matches_vit_at_other_rates",
    "detail_matters",
    "exp_is_not_needed",
    "osa_matches_vit_with_skips",
)
BASELINES = ("osa_qr", "osa_exact", "vit", "vit_noskip_nonorm")  # models of Table 2


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """The number of runs; once all are there, a row for each verdict, and the four cells of attention × initialisation."""
    own = Results(tables)
    runs = sum(len(training.seeds) for training in settings.runs.values())
    trained = sum(len(own.runs_of(name)) for name in settings.runs)
    summary = {"runs": runs, "trained": trained, "has_baselines": has_baselines(lab), "rows": []}
    if trained < runs or not summary["has_baselines"]:
        return summary
    results, claims = Results(tables, {"runs": results_of(lab).runs}), read_claims(CLAIMS)
    for rule in RULES:
        claim = claims[rule]
        for pair, verdict in zip(claim.compare, claim.judge(results).values(), strict=True):
            first, second = (described(settings, results, name) for name in pair)
            summary["rows"].append({"claim": rule, "verdict": verdict, "first": first, "second": second})
    return summary | {"attention_or_initialisation": attention_or_initialisation.compare(results)}


def has_baselines(lab: Lab) -> bool:
    """Tells whether Table 2 is trained by the study's reading, as params.yaml is now."""
    table_2 = results_of(lab)
    return all(len(table_2.runs_of(model)) and params.resolve(lab.params, model) == lab.config(model) for model in BASELINES)


def described(settings: comparison.Settings, results: Results, name: str) -> dict[str, Any]:
    """A model's variant, what is changed of it, and its accuracy. A name that the study does not list is Table 2's."""
    training = settings.runs.get(name)
    return {
        "variant": training.variant if training else name,
        "changes": params.leaves(training.set) if training else {},
        "accuracy": summary_of(results.accuracies(name)),
    }


STUDY = comparison.study(summarise=summarise)
