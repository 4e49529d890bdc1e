"""Six blocks: how well does each method of removing skips or LN perform in the paper's setting?

Models have six blocks and train for ten epochs with our first interpretation of the paper's recipe. We compare them with
the models of Table 2, which the study `first_reading` trains. For E-SPA we try the choices that He et al. 2023 leave open
or call unimportant.
"""

from pipeline.statistics.claims import Results, read_claims
from pipeline.studies import Tables, comparison
from pipeline.studies.comparison import Settings, outcome
from pipeline.studies.deep import CLAIMS_FILE
from pipeline.studies.lab import Lab

BASELINES = ("vit", "vit_noskip_nonorm", "osa_exact")  # runs of the study `first_reading`
CLAIMS: tuple[str, ...] = ("espa_fastest", "espa_skip_matches_default", "softmax_skip_matches_default")
CLAIMS += ("softmax_skip_needs_norm", "osa_not_below_espa", "iso_helps_six_blocks", "osa_not_below_rival")
CLAIMS += ("espa_norm_is_unimportant", "zero_query_and_key_alike", "orthogonal_above_gaussian")


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    results, claims = Results(tables, comparison.first_reading(lab)), read_claims(CLAIMS_FILE)
    rows = [{"name": name} | outcome(results, name) for name in (*settings.runs, *BASELINES)]
    trained = [row for row in rows if row["trained"]]
    return {
        "models": sorted(trained, key=lambda row: -row["accuracy"].mean),
        "claims": {name: claims[name].judge(results) for name in CLAIMS},
    }


STUDY = comparison.study(summarise=summarise)
