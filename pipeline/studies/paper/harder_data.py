"""Footnote 6: whether ViT and ViT (no skip) differ by more on harder data than on MNIST; and whether OSA matches ViT there.

The models are trained by the paper's recipe on CIFAR-10 as JPEG images. MNIST's runs are those of Table 2.
"""

from pipeline.claims import Results, read_claims
from pipeline.lab import Lab
from pipeline.statistics import summarise as summary
from pipeline.studies import Tables, comparison
from pipeline.studies.paper.section_5 import CLAIMS, results_of


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """Accuracies of each model on both data sets, and the verdict."""
    own, mnist = Results(tables), results_of(lab)
    results = Results(tables, {"runs": mnist.runs})
    models = {name: training.variant for name, training in settings.runs.items()}
    claims = read_claims(CLAIMS)
    (gap,) = claims["footnote_6"].judge(results).values()
    claim = claims["osa_matches_vit_on_harder_data"]
    matches = zip([first for first, _ in claim.compare], claim.judge(results).values(), strict=True)
    rows = {
        variant: {"harder": summary(own.accuracies(name)), "mnist": summary(mnist.accuracies(variant))}
        for name, variant in models.items()
    }
    osa = [{"variant": models[name], "verdict": judged} for name, judged in matches if name in models]
    return {"models": rows, "verdict": gap, "osa_matches_vit": osa}


STUDY = comparison.study(summarise=summarise)
