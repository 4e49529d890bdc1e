"""Ablations by PyTorch's defaults: what the accuracies of Table 2 depend on, one change at a time.

The learning rate, each of the four details that this reading chooses otherwise than the first, exp, and skip connections
with LN. Every change is compared with runs of Table 2, which are a baseline only where params.yaml has this reading too. Two
changes of initialisation are for attention_or_initialisation. Rules and expectations were written before the first run. A
claim is shown once all its runs are there.
"""

from typing import Any

from pipeline import studies
from pipeline.config import params
from pipeline.statistics.claims import Results, read_claims
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
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
    """A row for each verdict of a claim whose runs are all there."""
    results, claims = with_table_2(tables, lab), read_claims(CLAIMS)
    num_runs = {name: len(results.runs_of(name)) for name in settings.runs}
    whole = {*BASELINES} | {name for name, training in settings.runs.items() if num_runs[name] == len(training.seeds)}
    summary = {"has_baselines": has_baselines(lab), "rows": []}
    for rule in RULES if summary["has_baselines"] else ():
        claim = claims[rule]
        if not whole.issuperset(claim.models):
            continue
        for pair, verdict in zip(claim.compare, claim.judge(results).values(), strict=True):
            first, second = (described(settings, results, name) for name in pair)
            summary["rows"].append({"claim": rule, "verdict": verdict, "first": first, "second": second})
    return summary


def read(lab: Lab) -> Results:
    """The runs of this study with those of Table 2, for another study."""
    settings = studies.settings("ablations")
    own = lab.of("ablations", settings.reading)
    return with_table_2(comparison.read(settings, own), own)


def with_table_2(tables: Tables, lab: Lab) -> Results:
    """This study's runs with their baselines in Table 2, or without them where Table 2 follows another reading."""
    if not has_baselines(lab):
        return Results(tables)
    table_2 = results_of(lab).runs
    return Results(tables, {"runs": table_2[table_2["name"].isin(BASELINES)]})


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
