"""Ablations: what do Table 2's accuracies depend on? PyTorch's defaults fill in what the paper's recipe leaves open.

Each ablation changes one thing: the learning rate, one of four details of the recipe, the map from S to A, skip connections
and LN together, or the initial α. We compare ablations with Table 2's runs or with each other. Before the first run, we
fixed the claims and wrote down what we expect. The research page shows a claim once all its runs have ended.
"""

from typing import Any

from pipeline import studies
from pipeline.config import params
from pipeline.statistics.claims import Comparison, Results, read_claims
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE
from pipeline.studies.paper.section_5 import results_of

CLAIMS = (
    "rate_is_fair",
    "osa_matches_vit_at_other_rates",
    "detail_matters",
    "exp_is_not_needed",
    "osa_matches_vit_with_skips",
    "start_of_alpha_is_free",
)
BASELINES = ("osa_qr", "osa_exact", "vit", "vit_noskip_nonorm")  # models of Table 2


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """Returns a row for each comparison of each claim. A claim has rows once all its runs have ended.

    There are no rows if Table 2 cannot supply the baselines (`has_baselines`).
    """
    if not has_baselines(lab):
        return {"has_baselines": False, "rows": []}
    results, claims, rows = with_table_2(tables, lab), read_claims(CLAIMS_FILE), []
    waiting = {name for name, training in settings.runs.items() if len(results.runs_of(name)) < len(training.seeds)}
    for rule in CLAIMS:
        claim = claims[rule]
        assert isinstance(claim, Comparison)
        if not waiting.isdisjoint(claim.models):
            continue
        for pair, verdict in zip(claim.compare, claim.judge(results).values(), strict=True):
            first, second = (described(settings, results, name) for name in pair)
            rows.append({"claim": rule, "verdict": verdict, "first": first, "second": second})
    return {"has_baselines": True, "rows": rows}


def results_of_ablations(lab: Lab) -> Results:
    """Returns this study's runs and their baselines in Table 2. The study `attention_or_initialisation` reads them."""
    settings = studies.settings("ablations")
    own = lab.of("ablations", settings.reading)
    return with_table_2(comparison.read(settings, own), own)


def with_table_2(tables: Tables, lab: Lab) -> Results:
    """Returns this study's runs and, if `has_baselines` is true, Table 2's runs of the baselines."""
    if not has_baselines(lab):
        return Results(tables)
    table_2 = results_of(lab).runs
    return Results(tables, {"runs": table_2[table_2["name"].isin(BASELINES)]})


def has_baselines(lab: Lab) -> bool:
    """Returns whether Table 2 has runs of all `BASELINES`, in the configurations that this study assumes."""
    table_2 = results_of(lab)
    return all(len(table_2.runs_of(model)) and params.resolve(lab.params, model) == lab.config(model) for model in BASELINES)


def described(settings: comparison.Settings, results: Results, name: str) -> dict[str, Any]:
    """Returns the variant, the changed settings and the accuracy of the runs called `name`, from this study or Table 2."""
    training = settings.runs.get(name)
    return {
        "variant": training.variant if training else name,
        "changes": params.leaves(training.set) if training else {},
        "accuracy": summary_of(results.accuracies(name)),
    }


STUDY = comparison.study(summarise=summarise)
