"""Footnote 6: is the gap between ViT and ViT (no skip) wider on harder data than on MNIST? Does OSA match ViT on such data?

We train on a JPEG-encoded copy of CIFAR-10, with the recipe of the study `first_reading`. That study supplies the runs on
MNIST. The gap is measured in percentage points, and also in log-odds, since a percentage point means more near 100 %.
"""

from scipy.special import logit

from pipeline.statistics.claims import CONTRAST_WEIGHTS, Accuracy, Contrast, Results, read_claim
from pipeline.statistics.intervals import summary_of
from pipeline.statistics.verdicts import judge_contrast
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE

MATCHES = ("osa_matches_vit_on_harder_data", "osa_iso_matches_vit_on_harder_data")


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """Returns each model's accuracy on both data sets, and the verdicts."""
    first = comparison.first_reading(lab)
    own, mnist, results = Results(tables), Results(first), Results(tables, first)
    models = {name: training.variant for name, training in settings.runs.items()}
    footnote = read_claim(CLAIMS_FILE, "footnote_6", Contrast)
    (gap,) = footnote.judge(results).values()
    in_log_odds = [[float(logit(value / 100)) for value in results.accuracies(model)] for model in footnote.models]
    osa = []
    for name in MATCHES:
        claim = read_claim(CLAIMS_FILE, name, Accuracy)
        for (model, _), verdict in zip(claim.compare, claim.judge(results).values(), strict=True):
            if model in models:
                osa.append({"variant": models[model], "verdict": verdict})
    rows = {
        variant: {"harder": summary_of(own.accuracies(name)), "mnist": summary_of(mnist.accuracies(variant))}
        for name, variant in models.items()
    }
    log_odds = judge_contrast(in_log_odds, CONTRAST_WEIGHTS[footnote.kind])
    return {"models": rows, "verdict": gap, "log_odds": log_odds, "osa_matches_vit": osa}


STUDY = comparison.study(summarise=summarise)
