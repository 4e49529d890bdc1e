"""Whether OSA should keep the orthogonality that Section 4 gives its weights: trainings that keep it along the Stiefel
manifold, by a parametrisation, or softly; heads whose W^V and W^O are drawn together; ViTs whose keys and values rotate.
"""

import math

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from osa.constrained.orthogonal import MAPS, Kept
from pipeline import measures
from pipeline.core.params import Section, Seeds
from pipeline.lab import Lab
from pipeline.report import charts
from pipeline.report.looks import LINE_WIDTH, PALETTE, STYLE
from pipeline.report.numbers import ABSENT, fixed, number, span
from pipeline.statistics import summarise
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import largest
from pipeline.studies._runs import Request
from pipeline.studies._trained import OF_TRAINING, NamedRequest, TrainedResults, collect, judged, left_out
from pipeline.studies.paper.section_5 import progress
from pipeline.training import loop

place = 65
gathers = True
PLACE = "Sections 4.1 and 4.2"
KEPT_WITHIN = 1e-5  # ‖WᵀW − I‖₂ of what is kept, in float32
REFERENCE = "osa_exact"
JOINT, RETRACTED = {"joint_value_output": True}, {"keep_by": "retraction"}
JOINT_KEPT = JOINT | {"keep": "whole_value_out"}
BY_MAPS = {f"osa_{name}": (REFERENCE, JOINT_KEPT | {"keep_by": name}, f"OSA, V and O: {name.capitalize()}") for name in MAPS}
BY_DESCENT = {  # that document's own optimiser: plain steps, at the rate of its example and a tenth and ten times of that
    f"osa_descent_{rate:g}": (
        REFERENCE,
        JOINT_KEPT | RETRACTED | {"keep_rate": rate},
        f"OSA, V and O by gradient descent, η = {rate:g}",
    )
    for rate in (1e-3, 1e-2, 1e-1)
}
RUNS = {  # a name, its variant, the options in place of the variant's own, and a label; in the order of what decides first
    "osa_kept": (REFERENCE, {"keep": "attention"} | RETRACTED, "OSA, all kept"),
    "osa_joint": (REFERENCE, JOINT, "OSA, V and O drawn together"),
    "osa_joint_kept": (REFERENCE, JOINT_KEPT | RETRACTED, "OSA, V and O drawn together and kept"),
    "osa_alone": (REFERENCE, {}, "OSA, nothing kept"),
    "vit_rotations": ("vit", {"keep": "whole_key_value"} | RETRACTED, "ViT, rotations"),
    "vit_rotations_nonorm": ("vit", {"norm": False, "keep": "whole_key_value"} | RETRACTED, "ViT (no LN), rotations"),
    "vit_nonorm": ("vit", {"norm": False}, "ViT (no LN)"),
    "osa_kept_vo": (REFERENCE, {"keep": "value_out"} | RETRACTED, "OSA, V and O kept"),
    "osa_kept_qk": (REFERENCE, {"keep": "query_key"} | RETRACTED, "OSA, Q and K kept"),
    "osa_soft_weak": (REFERENCE, {"penalty": "heads", "penalty_weight": 1e-4}, "OSA, soft, λ = 1e-4"),
    "osa_soft_strong": (REFERENCE, {"penalty": "heads", "penalty_weight": 1e-2}, "OSA, soft, λ = 0.01"),
}
RUNS |= BY_MAPS | BY_DESCENT
RUNS |= {"osa_no_decay": (REFERENCE, {"decay_attention": False}, "OSA, no weight decay on attention")}  # as X has none
GROUPS, GROUP_LABELS = {"osa_soft": ("osa_soft_weak", "osa_soft_strong")}, {"osa_soft": "OSA, soft"}
OF_OSA = (REFERENCE, *(name for name, (variant, *_) in RUNS.items() if variant == REFERENCE))
REACH = {"maps_agree": "The retraction stands for the exponential, which it is along the manifold, step by step."}
THREE_SEEDS = ("osa_kept", "osa_joint")
KAPPAS = {
    "weight_kappa": "κ(W̃), a head",
    "head_kappa": "κ(WⱽWᴼ), a head",
    "layer_kappa": "κ(Σ WⱽWᴼ), a layer",
}


class Settings(Section):
    """Every run once for each seed; in the order of training those of `THREE_SEEDS` come first."""

    seeds: Seeds


def every(settings: Settings) -> list[NamedRequest]:
    order = [(name, seed) for name in THREE_SEEDS for seed in settings.seeds]
    order += [(name, seed) for seed in settings.seeds for name in RUNS]
    return [NamedRequest(name, *RUNS[name][:2], seed) for name, seed in dict.fromkeys(order)]


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [named.request for named in every(settings)]


def measure(settings: Settings, lab: Lab) -> Tables:
    return collect(every(settings), lab)


@torch.no_grad()
def watch(training: loop.Training) -> list[dict[str, float]]:
    """Condition numbers of every layer and head, and how far what is kept is from orthonormal, ‖WᵀW − I‖₂."""
    keep = training.config.variant.keep
    error = max(map(error_of, Kept(training.model, keep).read())) if keep else math.nan
    rows = []
    for layer, block in enumerate(training.model.blocks, 1):
        heads = [[w.detach().double().cpu() for w in head] for head in measures.head_weights(block.attention)]
        products = torch.stack([value @ out for _, _, value, out in heads])  # (h, d, d)
        width = heads[0][0].shape[1]
        of_layer = measures.condition(torch.linalg.svdvals(products.sum(0)), rank=products.shape[-1])
        for head, (query, key, _, _) in enumerate(heads):
            of_head = measures.condition(torch.linalg.svdvals(products[head]), rank=width)
            kappas = {"weight_kappa": measures.weight_condition(query, key), "head_kappa": of_head, "layer_kappa": of_layer}
            rows.append({"layer": layer, "head": head, "error": error} | kappas)
    return rows


def error_of(weight: Tensor) -> float:
    """The largest ‖WᵀW − I‖₂ of a batch, or ‖WWᵀ − I‖₂ where W is wide."""
    w = weight.detach().double().cpu()
    return measures.orthogonality_error(w.mT if w.shape[-2] < w.shape[-1] else w).max().item()


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    labels = {name: label for name, (_, _, label) in RUNS.items()} | GROUP_LABELS
    found = TrainedResults(tables, lab, labels, GROUPS)
    observed = [along_training(found)] if len(found.ended) else []
    kept = found.watched.dropna(subset=["error"]) if len(found.watched) else found.watched
    return [*judged("keeping", found, lab, REACH), outcome(found, lab), *([is_kept(kept)] if len(kept) else []), *observed]


def outcome(found: TrainedResults, lab: Lab) -> Finding:
    """Accuracy, speed and condition numbers of every model, beside the references of Table 2."""
    loss, rows, seen = found.target(REFERENCE), [], []
    for name in filter(found.is_trained, (REFERENCE, "vit", *RUNS)):
        medians = found.ended.loc[found.ended["variant"] == name].reindex(columns=[*KAPPAS]).median()
        kappas = [
            ABSENT if column == "weight_kappa" and name not in OF_OSA else number(medians[column]) for column in KAPPAS
        ]
        rows.append([found.label(name), *found.cells(name), number(found.epochs(name, loss)), *kappas])
        accuracy = summarise(found.accuracies(name))
        if name in RUNS and accuracy.n:
            interval = {"low": accuracy.low, "high": accuracy.high, "n": accuracy.n}
            seen.append(Measure(f"{found.label(name)}: test accuracy", accuracy.mean, "per cent", **interval))
    return Finding(
        id="keeping_outcome",
        title="What becomes of models that keep their orthogonality",
        place=PLACE,
        kind=OBSERVATION,
        statement="Accuracy, speed of convergence and condition numbers after training. The first two rows are Table 2’s; "
        f"“{found.label('osa_alone')}” trains the first of them once more, for its condition numbers. On another kind of "
        "machine its bits differ, and so can its accuracy.",
        in_short=progress([found.statuses(name) for name in RUNS], "models")
        + (f"; by model, they reach {span((m.value for m in seen), lambda value: fixed(value, 2))}%." if seen else "."),
        measures=seen or [Measure("Models that are trained", 0)],
        table=Table(
            ["Model", "Test accuracy", "Runs", f"Epochs to {lab.label(REFERENCE)}’s loss", *KAPPAS.values()],
            rows,
            note=f"The loss is the lowest of the first {OF_TRAINING:.0%} of training, the geometric mean of runs. Of epochs "
            "the median, ∞ where it is not reached; of condition numbers the median over layers, heads and seeds; κ(W̃) is "
            f"OSA’s alone.{left_out([found.label(name) for name in RUNS if not found.is_trained(name)])}",
        ),
        remark=found.remark,
        models=(REFERENCE, "vit"),
    )


def is_kept(watched: pd.DataFrame) -> Finding:
    return Finding(
        id="keeping_is_kept",
        title="What is kept orthonormal is so at every point",
        place=PLACE,
        kind=CHECK,
        statement="The weights that a training keeps are orthonormal before it, along it and after it.",
        measures=[largest("‖WᵀW − I‖₂ of any weight that is kept", watched["error"], KEPT_WITHIN)],
        rule=f"At every point of every training that keeps weights: below {number(KEPT_WITHIN)}, in float32.",
    )


def along_training(found: TrainedResults) -> Finding:
    """How condition numbers grow, model by model."""
    seen = []
    for name, own in found.ended.groupby("variant", sort=False):
        kappa = own["layer_kappa"]
        spread = f"between {number(kappa.min())} and {number(kappa.max())}"
        seen.append(Measure(f"{found.label(name)}: median {KAPPAS['layer_kappa']}", kappa.median(), note=spread))
    return Finding(
        id="keeping_condition",
        title="Condition numbers along training",
        place=PLACE,
        kind=OBSERVATION,
        statement="κ of the weights of each layer and head at every point of the training curves.",
        measures=seen,
        figure=draw(found),
        caption="κ over epochs: a thin line for each layer or head, and for each model a thick one, their geometric mean. "
        "W̃ is that of Theorem 4.2.",
    )


@matplotlib.rc_context(STYLE)
def draw(found: TrainedResults) -> Figure:
    """A panel for each kind of κ, with the first seed of each orthogonal model; of ways to keep V and O one is drawn."""
    drawn = set(OF_OSA) - BY_MAPS.keys() - BY_DESCENT.keys()
    watched = found.watched[found.watched["variant"].isin(drawn)]
    first = watched[watched["seed"] == watched.groupby("variant")["seed"].transform("min")]
    names = list(dict.fromkeys(first["variant"]))
    figure, panels = charts.panels(len(KAPPAS), 4.6)
    lines = {}
    for axes, (column, title) in zip(panels, KAPPAS.items(), strict=True):
        for name, colour in zip(names, PALETTE, strict=False):
            values = first[first["variant"] == name].pivot_table(index="epoch", columns=["layer", "head"], values=column)
            axes.plot(values, color=colour, linewidth=0.3, alpha=0.4)
            mean = np.exp(np.log(values).mean(axis=1))
            (lines[name],) = axes.plot(mean, color=colour, linewidth=LINE_WIDTH, label=found.label(name))
        axes.set(title=title, xlabel="Epoch")
    charts.logarithmic(panels[-1], "y")
    charts.legend(figure, list(lines.values()), 2)
    return figure
