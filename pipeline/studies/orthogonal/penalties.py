"""Do the penalties of Zhang et al. 2021, *On Orthogonality Constraints for Transformers*, help a ViT? We train ViTs with
and without skips and LN.

VAR-I is the penalty λ AM, VAR-II is λ (AM + LA), and VAR-III is λ (AM + LA + LF). osa/constrained/penalties.py defines the
terms. The recorded loss is the cross-entropy alone.
"""

import copy

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import gmean

from osa.constrained.penalties import attention_matrix
from osa.modules import MLP, SelfAttention
from pipeline.config.looks import PALETTE, look_of
from pipeline.results.measures import attention_inputs, blocks_of, condition, effective_rank, norm
from pipeline.statistics.claims import Results, read_claims
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Tables, charts, check, comparison
from pipeline.studies.comparison import Settings
from pipeline.studies.lab import Lab
from pipeline.studies.orthogonal import CLAIMS_FILE
from pipeline.studies.orthogonal.orthogonality import attention_row, weight_row
from pipeline.studies.orthogonal.perturbation import QUARTER, RATIO_ROUNDING, worst_ratios
from pipeline.training import loop

IMAGES, FEW = 32, 2  # numbers of test images for the statistics of a layer, and for `worst_ratios`
# Standard deviations of noise on the pixels: NOISE to measure how much A changes, NOISES to measure accuracy
NOISE, NOISES, NOISY_IMAGES = 0.1, (0.1, 0.3, 0.5), 1000
CLAIMS = ("stated_weights_make_orthogonal", "strong_weights_show", "penalties_boost", "soft_does_not_replace_hard")
BASELINES = ("vit", "vit_noskip_nonorm")  # runs of the study `first_reading`, without a penalty
SHOWN = ("attention", "projections", "mlp")


@torch.no_grad()
def watch(training: loop.Training) -> list[dict[str, float]]:
    """Returns a row for each layer, measured in float64. Each row also has the model's accuracies on noisy images."""
    model, images = copy.deepcopy(training.model).cpu().double(), training.data.test_images[:IMAGES].cpu().double()
    generator = loop.random_stream(0, "penalties/noise")
    noisy = images + NOISE * torch.randn(images.shape, generator=generator, dtype=images.dtype)
    inputs = zip(blocks_of(model), attention_inputs(model, images), attention_inputs(model, noisy), strict=True)
    rows, accuracies = [], under_noise(training)
    for layer, ((_, attention, mlp), (_, x), (_, y)) in enumerate(inputs, 1):
        a = attention_matrix(attention, x)
        change = (attention_matrix(attention, y) - a).norm(dim=-1)  # change of each row of A
        query, key, _ = attention.project(x)
        attention_numbers = attention_row(a)
        row = {"layer": layer, "attention": attention_numbers.pop("penalty"), "moved": change.flatten().quantile(0.9).item()}
        row |= {"keys": norm(key).median().item(), "worst": worst_ratios(query[:FEW], key[:FEW]).max().item()}
        spectra = torch.linalg.eigvalsh(x @ x.mT).clamp(min=0)  # rounding may give eigenvalues below 0
        row |= {"tokens_rank": float(np.mean([effective_rank(values) for values in spectra]))}
        rows.append(row | attention_numbers | weight_row(attention, mlp) | spectral_row(attention, mlp) | accuracies)
    return rows


def spectral_row(attention: SelfAttention, mlp: MLP) -> dict[str, float]:
    """Returns the geometric means of ‖W‖₂ and κ(W) over a block's six matrices."""
    layers = (attention.query, attention.key, attention.value, attention.out, mlp.fc1, mlp.fc2)
    values = [torch.linalg.svdvals(layer.weight) for layer in layers]
    norms, kappas = [each[0].item() for each in values], [condition(each, rank=len(each)) for each in values]
    return {"weight_norm": gmean(norms), "weight_kappa": gmean(kappas)}


def under_noise(training: loop.Training) -> dict[str, float]:
    """Returns the accuracy under Gaussian pixel noise, for each scale in `NOISES`. All calls scale the same noise."""
    images, labels = training.data.test_images[:NOISY_IMAGES], training.data.test_labels[:NOISY_IMAGES]
    noise = torch.randn(images.shape, generator=loop.random_stream(0, "penalties/pixels")).to(images)
    predictions = {scale: training.model(images + scale * noise).argmax(-1) for scale in NOISES}
    return {f"accuracy_{scale:g}": (each == labels).double().mean().item() for scale, each in predictions.items()}


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    results, claims = Results(comparison.first_reading(lab), tables), read_claims(CLAIMS_FILE)
    rows = [row(name, settings, results) for name in settings.runs]
    return {
        "models": [each for each in rows if each["n"]],
        "beside": {name: summary_of(results.accuracies(name)) for name in BASELINES},
        "claims": {name: claims[name].judge(results) for name in CLAIMS},
        "bound": check(results.watched["worst"].max(), QUARTER + RATIO_ROUNDING) if "worst" in results.watched else None,
    }


def row(name: str, settings: Settings, results: Results) -> dict:
    """Returns model, penalty and accuracy of the runs called `name`, and the mean of each `SHOWN` column's last values."""
    training = settings.runs[name]
    options = training.set.get("variant", {})
    seen = {column: summary_of(results.last_watched(name, column)).mean for column in SHOWN}
    penalty = {"penalty": options.get("penalty", "none"), "weight": options.get("penalty_weight", 0.0)}
    accuracy = summary_of(results.accuracies(name))
    return {"name": name, "variant": training.variant, **penalty, "n": accuracy.n, "accuracy": accuracy, "seen": seen}


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure | None:
    models = [each for each in summarise(settings, tables, lab)["models"] if each["variant"] == "vit"]
    if all(each["penalty"] == "none" for each in models):
        return None
    figure, panels = charts.panels(2, 3.0)
    numbers = {
        "Test accuracy (%)": lambda each: each["accuracy"].mean,
        "‖AᵀA − I‖² / (N − 1)": lambda each: each["seen"]["attention"],
    }
    for axes, (title, value) in zip(panels, numbers.items(), strict=True):
        for penalty, colour in {"VAR-III": PALETTE[5], "VAR-I": PALETTE[0]}.items():
            points = sorted((each["weight"], value(each)) for each in models if each["penalty"] == penalty)
            axes.plot(*np.array(points).reshape(-1, 2).T, "o-", color=colour, markersize=4, label=f"ViT + {penalty}")
        for each in models:
            if each["penalty"] == "none":
                axes.axhline(value(each), **look_of("vit").line(linestyle=(0, (4, 2))))
        charts.logarithmic(axes, "x")
        axes.set(title=title, xlabel="λ")
    charts.legend(figure, panels[0].get_legend_handles_labels()[0], 2)
    return figure


STUDY = comparison.study(summarise=summarise, figures={"penalties": draw}, watch=watch)
