"""Section 4 initialises the weights of OSA as orthogonal matrices. Should training keep them orthogonal?

Some runs keep the weights orthogonal, with steps along the Stiefel manifold or with a parametrisation. Some add a penalty
instead. Others initialise W^V of all heads together as one orthogonal matrix, and W^O likewise. For comparison, some ViTs
keep their key and value matrices orthogonal during training.
"""

import math

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from osa.constrained.orthogonal import StiefelConstraint
from pipeline.config.looks import LINE_WIDTH, PALETTE
from pipeline.results import measures
from pipeline.statistics.claims import Results, epochs_to_reach, read_claims, target_loss
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Tables, charts, check, comparison
from pipeline.studies.comparison import Settings
from pipeline.studies.lab import Lab
from pipeline.studies.orthogonal import CLAIMS_FILE
from pipeline.training import loop

KEPT_WITHIN = 1e-5  # maximum ‖WᵀW − I‖₂ of constrained weights in float32
REFERENCE, BASELINES = "osa_exact", ("osa_exact", "vit")  # runs of the study `first_reading`
# The target loss is the lowest train loss that REFERENCE reaches in this first fraction of its training.
OF_TRAINING = 0.5
CLAIMS: tuple[str, ...] = ("keeping_helps", "keeping_speeds", "joint_helps", "joint_speeds", "soft_is_enough")
CLAIMS += ("rotations_are_enough", "rotations_replace_norm", "muon_speeds", "muon_helps")
KAPPAS = ("head_kappa", "layer_kappa")
DRAWN = {  # name of a run → the label of its line in the figure
    "osa_watched": "free",
    "osa_kept": "every head kept",
    "osa_joint": "initialised jointly",
    "osa_joint_kept": "joint and kept",
}


@torch.no_grad()
def watch(training: loop.Training) -> list[dict[str, float]]:
    """Returns a row for each head of each layer.

    error          maximum ‖WᵀW − I‖₂ over all constrained weights of the model, NaN if no weights are constrained
    weight_kappa   κ(W̃) of the head
    head_kappa     κ(W^V W^O) of the head
    layer_kappa    κ(Σ W^V W^O), where the sum is over the heads of the layer
    """
    keep = training.config.variant.keep
    error, rows = math.nan, []
    if keep:
        weights = [w.double().cpu() for w in StiefelConstraint(training.model, keep).weights()]
        error = max(measures.orthogonality_error(w).max().item() for w in weights)
    for layer, (_, attention, _) in enumerate(measures.blocks_of(training.model), 1):
        heads = [[w.detach().double().cpu() for w in head] for head in measures.head_weights(attention)]
        products = torch.stack([value @ out for _, _, value, out in heads])  # (h, d, d)
        width = heads[0][0].shape[1]
        layer_kappa = measures.condition(torch.linalg.svdvals(products.sum(0)), rank=products.shape[-1])
        for head, (query, key, _, _) in enumerate(heads):
            head_kappa = measures.condition(torch.linalg.svdvals(products[head]), rank=width)
            kappas = {"weight_kappa": measures.weight_condition(query, key), "head_kappa": head_kappa}
            rows.append({"layer": layer, "head": head, "error": error} | kappas | {"layer_kappa": layer_kappa})
    return rows


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    results, claims = Results(comparison.first_reading(lab), tables), read_claims(CLAIMS_FILE)
    loss = target_loss(results.curves(REFERENCE), OF_TRAINING)
    rows = {name: row(name, loss, results) for name in (*BASELINES, *settings.runs)}
    return {
        "models": {name: each for name, each in rows.items() if each["n"]},
        "claims": {name: claims[name].judge(results) for name in CLAIMS},
        "orthonormal": check(results.watched["error"].max(), KEPT_WITHIN) if "error" in results.watched else None,
    }


def row(name: str, loss: float, results: Results) -> dict:
    """Returns the accuracy, the median epoch at which runs reach `loss`, and the medians of `KAPPAS` after training."""
    accuracy, curves = summary_of(results.accuracies(name)), results.curves(name)
    epochs = float(np.median([epochs_to_reach(curve, loss) for curve in curves])) if curves else math.nan
    last = results.watched[(results.watched["name"] == name) & (results.watched["epoch"] == results.watched["epoch"].max())]
    kappas = {column: last.get(column, pd.Series(dtype=float)).median() for column in KAPPAS}
    return {"n": accuracy.n, "accuracy": accuracy, "epochs": epochs if math.isfinite(epochs) else None} | kappas


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure | None:
    if "watched" not in tables:
        return None
    figure, (axes,) = charts.panels(1, 3.0)
    watched = tables["watched"][tables["watched"]["seed"] == 0]
    for (name, label), colour in zip(DRAWN.items(), (PALETTE[2], PALETTE[0], PALETTE[3], PALETTE[5]), strict=True):
        own = watched[watched["name"] == name].pivot_table(index="epoch", columns="layer", values="layer_kappa")
        axes.plot(own, color=colour, linewidth=0.4, alpha=0.5)
        mean = np.exp(np.log(own).mean(axis=1))
        axes.plot(mean, color=colour, linewidth=LINE_WIDTH, label=label)
    axes.set(title="κ(Σ WⱽWᴼ) of a layer", xlabel="Epoch")
    charts.logarithmic(axes, "y")
    charts.legend(figure, axes.get_legend_handles_labels()[0], 4)
    return figure


STUDY = comparison.study(summarise=summarise, figures={"keeping": draw}, watch=watch)
