"""Trainings with penalties on the orthogonality of attention and weights: what each dose of those of Zhang et al. 2021 (“On
Orthogonality Constraints for Transformers”) does to a ViT, with skips and LN and without.

VAR-I is AM, VAR-II is AM + LA, VAR-III is AM + LA + LF, each times λ. The cross-entropy is recorded alone.
"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.stats import gmean
from torch import nn

from osa.constrained.penalties import attention_matrix
from pipeline.core.params import Section, Seeds
from pipeline.lab import Lab
from pipeline.measures import attention_inputs, condition, effective_rank, norm
from pipeline.report import charts
from pipeline.report.looks import PALETTE, STYLE
from pipeline.report.numbers import ABSENT, fixed, grouped, number, span
from pipeline.statistics import summarise
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import largest
from pipeline.studies._runs import Request
from pipeline.studies._trained import OF_TRAINING, NamedRequest, TrainedResults, collect, judged, left_out
from pipeline.studies.orthogonal.orthogonality import attention_row, weight_row
from pipeline.studies.orthogonal.perturbation import QUARTER, ROUNDING, worst_ratios
from pipeline.studies.paper.section_5 import progress
from pipeline.training import loop

place = 64
gathers = True
PAPER = "Zhang et al. 2021, Section 3"
STATED, STRONG = 1e-6, 1e-2  # the largest λ of the paper, and the least that is called strong
IMAGES, FEW = 32, 2  # test images of what is watched, and those of Theorem 2.1's ratio
ONE_SEED = 9  # of the cells, of which one run is done before three of all
NOISE, NOISES, NOISY_IMAGES = 0.1, (0.1, 0.3, 0.5), 1000  # standard deviations on the pixels: of A's change, of accuracy
VIT, BARE = "vit", "vit_noskip_nonorm"
NAMES = {VIT: "vit", BARE: "nonorm"}
VARIANTS = ("VAR-I", "VAR-II", "VAR-III")
SEPARATE = "VAR-II-separate"  # the other reading of LA
COLUMNS = {  # of what is watched, on average over the layers
    "attention": "‖AᵀA − I‖²/(N − 1)",
    "overlap": "Row overlap",
    "own_token": "Rows at their own token",
    "rank": "Rank of A",
    "entropy": "Entropy of a row",
    "projections": "L_LA",
    "mlp": "L_LF",
    "keys": "‖K‖₂",
    "tokens_rank": "Effective rank of X",
    "weight_norm": "‖W‖₂",
    "weight_kappa": "κ(W)",
    "moved": "Moved by noise",
} | {f"accuracy_{noise:g}": f"Accuracy, noise {noise:g}" for noise in NOISES}


class Cell(NamedTuple):
    """A model with a penalty and its λ, or without, to be watched too."""

    variant: str
    penalty: str = ""
    weight: float = 0.0

    @property
    def name(self) -> str:
        return f"{NAMES[self.variant]} {self.penalty} {self.weight:g}" if self.penalty else f"{NAMES[self.variant]}_alone"

    @property
    def options(self) -> dict:
        return {"penalty": self.penalty, "penalty_weight": self.weight} if self.penalty else {}

    def label(self, lab: Lab) -> str:
        return label(lab, *self)


def label(lab: Lab, variant: str, penalty: str, *weights: float) -> str:
    """Of a model with a penalty and one λ or several, or without."""
    return lab.label(variant) + (f" + {penalty}, λ = {', '.join(map(number, weights))}" if penalty else "")


def cells(variant: str, penalties: tuple[str, ...], weights: tuple[float, ...]) -> list[Cell]:
    return [Cell(*each) for each in itertools.product([variant], penalties, weights)]


ENDS = (VARIANTS[0], VARIANTS[2])
FIRST = (Cell(VIT, "VAR-III", STATED), Cell(VIT), Cell(VIT, "VAR-III", STRONG))  # of these three seeds decide a rule
CELLS = tuple(
    dict.fromkeys(
        [
            *FIRST,
            *cells(VIT, ("VAR-I",), (STRONG, STATED)),
            *cells(BARE, ENDS, (STRONG,)),
            Cell(VIT, "VAR-III", 1.0),
            Cell(VIT, "VAR-III", 1e-10),
            Cell(BARE),
            *cells(VIT, ENDS, (1.0, 1e-4)),
            *cells(VIT, VARIANTS, (1e-10, 1e-8, STATED)),
            *cells(BARE, ENDS, (1.0, 1e-4, 1e-6)),
            *cells(VIT, (SEPARATE,), (STATED, 1e-8, 1e-10)),
        ]
    )
)
IN_ORDER = sorted(CELLS, key=lambda cell: (cell.variant != VIT, *cell[1:]))  # of a table
GROUPS = {  # of cells that a rule speaks of: their label, model, penalties, and λ from and to
    "vit_stated": ("ViT + VAR-III, λ = 1e-6", VIT, ("VAR-III",), STATED, STATED),
    "vit_attention_stated": ("ViT + VAR-I, λ = 1e-6", VIT, ("VAR-I",), STATED, STATED),
    "vit_strong": ("ViT + VAR-III, λ = 0.01", VIT, ("VAR-III",), STRONG, STRONG),
    "vit_var_i": ("ViT + VAR-I, λ ≤ 1e-6", VIT, ("VAR-I",), 0, STATED),
    "vit_var_ii": ("ViT + VAR-II, λ ≤ 1e-6", VIT, ("VAR-II",), 0, STATED),
    "vit_var_iii": ("ViT + VAR-III, λ ≤ 1e-6", VIT, ("VAR-III",), 0, STATED),
    "nonorm_var_i_strong": ("ViT (no skip, no LN) + VAR-I, λ = 0.01", BARE, ("VAR-I",), STRONG, STRONG),
    "nonorm_var_iii_strong": ("ViT (no skip, no LN) + VAR-III, λ = 0.01", BARE, ("VAR-III",), STRONG, STRONG),
}


DOSE = ("attention", "projections", "mlp", "weight_norm", "moved")  # of COLUMNS, beside accuracy and loss; the rest apart
CELL = ("Model", "Penalty", "λ")  # the columns that say which
LAYERED = ("attention", "projections", "mlp", "tokens_rank")  # what is shown layer by layer
NOT_TESTED = (
    "What Zhang et al. measure, BLEU on corpora of translations and metrics of dialogues, and their decoders are not tested "
    "here: these are ViTs on MNIST. Without a validation set no λ is chosen, and all are shown."
)
OF_A_MEAN = "The mean over λ is of a seed that is trained with all three of them; one without counts as missing."
REACH = {  # what a rule leaves out of the sentence that it judges
    "stated_weights_make_orthogonal": "VAR-III has every term of VAR-I and VAR-II, which are not judged by themselves.",
    "penalties_boost": f"VAR-I alone, which the paper calls sufficient, is the first of the comparisons. {OF_A_MEAN}",
    "penalties_order": OF_A_MEAN,
}
DRAWN = (*FIRST, Cell(VIT, "VAR-III", 1.0), Cell(BARE), Cell(BARE, "VAR-III", STRONG))  # by layer


class Settings(Section):
    """Every cell once for each seed, in the order of what decides most."""

    seeds: Seeds


def every(settings: Settings) -> list[NamedRequest]:
    order = [(FIRST[0], seed) for seed in settings.seeds] + [(cell, settings.seeds[0]) for cell in CELLS[:ONE_SEED]]
    order += [(cell, seed) for cells in (FIRST, CELLS) for seed in settings.seeds for cell in cells]
    return [NamedRequest(cell.name, cell.variant, cell.options, seed) for cell, seed in dict.fromkeys(order)]


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return [named.request for named in every(settings)]


def measure(settings: Settings, lab: Lab) -> Tables:
    return collect(every(settings), lab)


@torch.no_grad()
def watch(training: loop.Training) -> list[dict[str, float]]:
    """Attention and weights of each layer, in float64, on the first test images, and the model's accuracy under noise."""
    model, images = copy.deepcopy(training.model).cpu().double(), training.data.test_images[:IMAGES].cpu().double()
    generator = loop.random_stream(0, "penalties/noise")
    noisy = images + NOISE * torch.randn(images.shape, generator=generator, dtype=images.dtype)
    inputs = zip(model.blocks, attention_inputs(model, images), attention_inputs(model, noisy), strict=True)
    rows, accuracies = [], under_noise(training)
    for layer, (block, (attention, x), (_, y)) in enumerate(inputs, 1):
        a = attention_matrix(attention, x)
        change = (attention_matrix(attention, y) - a).norm(dim=-1)  # of each row
        query, key, _ = attention.project(x)
        of_attention = attention_row(a)
        seen = {"layer": layer, "attention": of_attention.pop("penalty"), "moved": change.flatten().quantile(0.9).item()}
        seen |= {"keys": norm(key).median().item(), "worst": worst_ratios(query[:FEW], key[:FEW]).max().item()}
        spectra = torch.linalg.eigvalsh(x @ x.mT).clamp(min=0)  # which rounding may leave below it
        seen |= {"tokens_rank": float(np.mean([effective_rank(values) for values in spectra]))}
        rows.append(seen | of_attention | weight_row(block) | of_weights(block) | accuracies)
    return rows


def of_weights(block: nn.Module) -> dict[str, float]:
    """‖W‖₂ and κ(W) of the block's six matrices, geometric means."""
    attention, mlp = block.attention, block.mlp
    layers = (attention.query, attention.key, attention.value, attention.out, mlp.fc1, mlp.fc2)
    values = [torch.linalg.svdvals(layer.weight) for layer in layers]
    norms, kappas = [each[0].item() for each in values], [condition(each, rank=len(each)) for each in values]
    return {"weight_norm": gmean(norms), "weight_kappa": gmean(kappas)}


def under_noise(training: loop.Training) -> dict[str, float]:
    """Accuracy on the first test images with Gaussian noise on their pixels, by its standard deviation: the same noise at
    every point, scaled."""
    images, labels = training.data.test_images[:NOISY_IMAGES], training.data.test_labels[:NOISY_IMAGES]
    noise = torch.randn(images.shape, generator=loop.random_stream(0, "penalties/pixels")).to(images)
    predictions = {scale: training.model(images + scale * noise).argmax(-1) for scale in NOISES}
    return {f"accuracy_{scale:g}": (found == labels).double().mean().item() for scale, found in predictions.items()}


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    labels = (
        {cell.name: cell.label(lab) for cell in CELLS} | {group: label for group, (label, *_) in GROUPS.items()} | COLUMNS
    )
    groups = {
        group: [c.name for c in CELLS if c.variant == variant and c.penalty in penalties and least <= c.weight <= most]
        for group, (_, variant, penalties, least, most) in GROUPS.items()
    }
    found = TrainedResults(with_known_ranks(tables), lab, labels, groups)
    observed = [after_training(found, lab), with_depth(found)] if len(found.ended) else []
    observed += [bound(found)] if len(found.watched) else []
    return [*judged("penalties", found, lab, REACH), dose(found, lab), *observed]


def with_known_ranks(tables: Tables) -> Tables:
    """Without the tokens' effective ranks of runs that have one below 1, which is none: an earlier code took an eigenvalue
    that rounding had left below 0, as where all tokens are one, for a rank of 0."""
    watched = tables.get("watched", pd.DataFrame())
    if "tokens_rank" not in watched:
        return tables
    least = watched.groupby(["variant", "seed"])["tokens_rank"].transform("min")
    return tables | {"watched": watched.assign(tokens_rank=watched["tokens_rank"].where(least >= 1))}


def dose(found: TrainedResults, lab: Lab) -> Finding:
    """Accuracy and orthogonality over λ, cell by cell."""
    rows, measures, reached = [], [], defaultdict(list)
    targets = {variant: found.target(variant) for variant in NAMES}
    for cell in trained(found):
        model = cell.name if cell.penalty else cell.variant
        ends = found.rows(model, "finished")["test_loss"].mean(), found.epochs(model, targets[cell.variant])
        rows.append([*parts_of(cell, lab), *found.cells(model), *map(number, ends), *means(found, cell, DOSE)])
        accuracy = summarise(found.accuracies(model))
        if cell.penalty and accuracy.n:
            reached[lab.label(cell.variant)].append(accuracy.mean)
            what = f"{cell.label(lab)}: test accuracy"
            measures.append(Measure(what, accuracy.mean, "per cent", low=accuracy.low, high=accuracy.high, n=accuracy.n))
    columns = [*CELL, "Test accuracy", "Runs", "Test loss", "Epochs to a loss", *(COLUMNS[name] for name in DOSE)]
    told = "; ".join(f"{model} reaches {span(values, lambda value: fixed(value, 2))}%" for model, values in reached.items())
    return Finding(
        id="penalties_dose",
        title="Dose and response of the penalties",
        place=PAPER,
        kind=OBSERVATION,
        statement="ViTs trained with λ from 1e-10, the paper’s smallest and so a negative control, to 1. Those up to 1e-6 "
        "are the paper’s.",
        in_short=progress([found.statuses(cell.name) for cell in CELLS if cell.penalty], "cells")
        + (f"; by cell, {told}." if told else "."),
        measures=measures or [Measure("Cells that are trained", 0)],
        table=Table(
            columns,
            rows,
            "ll" + "r" * (len(columns) - 2),
            note="Test accuracy in per cent; without a penalty accuracy and test loss are those of Table 2. The loss is the "
            "cross-entropy alone. Epochs, the median over runs, to the train loss to which Table 2’s runs without a penalty "
            f"come in the first {OF_TRAINING:.0%} of training. The rest is after training, over layers and seeds on "
            f"average; with noise of {NOISE:g} on the pixels 90% of the rows of A move by less than is said. ‖W‖₂ is the "
            "geometric mean over a block’s six matrices. L_LF is without n − m, which ‖MᵀM − I‖_F² of an m × n matrix has "
            f"at least; the smaller side is {lab.paper.recipe.model.embed_dim} in each matrix of L_LA and L_LF. "
            "‖AᵀA − I‖_F² is a mean over the batch: summed over it, as one may read the paper, the same λ would be "
            f"{lab.paper.recipe.train.batch_size} times what it is here.{left_out(untrained(found, lab))}",
        ),
        figure=draw_dose(found) if measures else None,
        caption="Over λ. Dashed: ViT without a penalty; dotted: ViT (no skip, no LN) without one.",
        remark=f"{found.remark} {NOT_TESTED}".strip(),
        models=(VIT, BARE),
    )


def trained(found: TrainedResults) -> list[Cell]:
    """The cells of which there is a run, in the order of a table; of a model without a penalty Table 2’s will do."""
    return [cell for cell in IN_ORDER if found.is_trained(cell.name if cell.penalty else cell.variant)]


def parts_of(cell: Cell, lab: Lab) -> list[str]:
    """Model, penalty and λ."""
    return [lab.label(cell.variant), cell.penalty or "none", number(cell.weight) if cell.penalty else ABSENT]


def means(found: TrainedResults, cell: Cell, columns: Iterable[str]) -> list[str]:
    """What was seen of a cell after training, over layers and seeds on average."""
    return [number(summarise(found.values(cell.name, column)).mean) for column in columns]


def after_training(found: TrainedResults, lab: Lab) -> Finding:
    """What else was seen of the trained models."""
    shown = [column for column in COLUMNS if column not in DOSE]
    watched = [cell for cell in IN_ORDER if found.values(cell.name, "overlap")]
    rows = [[*parts_of(cell, lab), *means(found, cell, shown)] for cell in watched]
    measures = [
        Measure(f"{cell.label(lab)}: row overlap", summarise(found.values(cell.name, "overlap")).mean) for cell in watched
    ]
    return Finding(
        id="penalties_after",
        title="Attention, weights and tokens of trained models with penalties",
        place="Zhang et al. 2021, Section 2.2",
        kind=OBSERVATION,
        statement="How diverse the rows of A are, how large the keys, of what rank the tokens, how well the weights are "
        "conditioned, and what noise on the pixels leaves of the accuracy, after training.",
        measures=measures,
        table=Table(
            [*CELL, *(COLUMNS[column] for column in shown)],
            rows,
            "ll" + "r" * (len(shown) + 1),
            note="Means over layers and seeds; κ(W) is a geometric mean over a block’s six matrices. Accuracy under noise, "
            f"a share, is that on {grouped(NOISY_IMAGES)} test images. A dash for the effective rank: rounding spoilt "
            "what was seen of tokens that are all but one.",
        ),
    )


def untrained(found: TrainedResults, lab: Lab) -> list[str]:
    """Each model and penalty with the λ that are missing."""
    missing = [cell for cell in IN_ORDER if cell.penalty and not found.is_trained(cell.name)]
    groups = itertools.groupby(missing, key=lambda cell: cell[:2])
    return [label(lab, *model, *(cell.weight for cell in of_model)) for model, of_model in groups]


def with_depth(found: TrainedResults) -> Finding:
    """Each layer before and after training."""
    ends = pd.concat([found.watched[found.watched["epoch"] == 0].assign(when="before"), found.ended.assign(when="after")])
    over_layers = ends.groupby(["variant", "when"], sort=False)[list(LAYERED)].mean().unstack("when")
    measures, rows, columns = [], [], list(itertools.product(LAYERED, ("before", "after")))
    for name in [cell.name for cell in IN_ORDER if cell.name in over_layers.index]:
        row = over_layers.loc[name]
        for column, when in columns:
            what = f"{found.label(name)}, {when} training: {COLUMNS[column]}, mean over layers"
            measures.append(Measure(what, row[column, when]))
        rows.append([found.label(name), *(number(row[column]) for column in columns)])
    return Finding(
        id="penalties_with_depth",
        title="Orthogonality with depth, before and after training",
        place=PAPER,
        kind=OBSERVATION,
        statement="How far attention matrices, projections and MLPs are from orthogonal in each layer, and the effective "
        "rank of its tokens, on average over seeds.",
        measures=measures,
        table=Table(
            ["Model", *itertools.chain(*((f"{COLUMNS[column]}, before", "after") for column in LAYERED))],
            rows,
            note="Means over layers and seeds: before training over all runs, after it over those that finished.",
        ),
        in_short=f"{COLUMNS['attention']} is {span(over_layers['attention', 'before'])} before training and "
        f"{span(over_layers['attention', 'after'].dropna())} after it, by cell.",
        figure=draw_depth(ends, found),
        caption="By layer: after training, and before it thin.",
    )


def bound(found: TrainedResults) -> Finding:
    """Theorem 2.1 in every model at every point of its training."""
    return Finding(
        id="penalties_perturbation",
        title="Theorem 2.1 of Zhang et al. 2021 along training",
        place="Zhang et al. 2021, Theorem 2.1",
        kind=CHECK,
        statement="The most that a row of A can move with its query stays within a quarter of the stated 2‖K‖₂ε/√d_v, at "
        f"every point of every training here, in {FEW} test images. It is so of any weights: this checks the code.",
        measures=[largest("‖(diag f − ffᵀ)K‖₂ over 2‖K‖₂", found.watched["worst"], QUARTER + ROUNDING)],
        rule="In every layer, head and row: at most ¼.",
    )


@matplotlib.rc_context(STYLE)
def draw_dose(found: TrainedResults) -> Figure:
    """A panel for each number, a colour for each penalty, dots hollow for the model without skips and LN."""
    figure, panels = charts.panels(6, 5.8, rows=2)
    there = {cell.penalty for cell in CELLS if found.is_trained(cell.name)}
    colours = zip((*VARIANTS, SEPARATE), (PALETTE[0], PALETTE[3], PALETTE[5], PALETTE[6]), strict=True)
    colours = {penalty: colour for penalty, colour in colours if penalty in there}
    numbers = {"Test accuracy (per cent)": found.accuracies}
    numbers |= {"Test loss": lambda name: found.rows(name, "finished")["test_loss"].dropna().tolist()}
    numbers |= {COLUMNS[column]: lambda name, column=column: found.values(name, column) for column in DOSE[:4]}
    for axes, (title, values) in zip(panels, numbers.items(), strict=True):
        for variant, penalty in itertools.product((VIT, BARE), colours):
            doses = sorted(cell.weight for cell in CELLS if cell[:2] == (variant, penalty))
            means = [summarise(values(Cell(variant, penalty, dose).name)).mean for dose in doses]
            fill = colours[penalty] if variant == VIT else "#ffffff"
            axes.plot(doses, means, "o-", color=colours[penalty], markerfacecolor=fill, markersize=4, linewidth=1.2)
        for variant, line in ((VIT, charts.EXPECTED), (BARE, charts.EXPECTED | {"linestyle": ":"})):
            reference = values(variant if title.startswith("Test") else Cell(variant).name)
            if reference:
                axes.axhline(summarise(reference).mean, **line)
        charts.logarithmic(axes, "x")
        axes.set(title=title, xlabel="λ", xlim=(3e-11, 3))
    lines = [Line2D([], [], color=colour, label=penalty) for penalty, colour in colours.items()]
    charts.legend(figure, [*lines, *charts.fills("ViT", "ViT (no skip, no LN)")], 5)
    return figure


@matplotlib.rc_context(STYLE)
def draw_depth(ends: pd.DataFrame, found: TrainedResults) -> Figure:
    figure, panels = charts.panels(len(LAYERED), 6.2, rows=2)
    names = [cell.name for cell in DRAWN if cell.name in set(ends["variant"])]
    for axes, column in zip(panels, LAYERED, strict=True):
        for name, colour in zip(names, PALETTE, strict=False):
            for when, width in (("before", 0.6), ("after", 1.6)):
                own = ends[(ends["variant"] == name) & (ends["when"] == when)].groupby("layer")[column].mean()
                axes.plot(own, color=colour, linewidth=width, label=found.label(name))
        axes.set(title=COLUMNS[column], xlabel="Layer", xticks=sorted(set(ends["layer"])))
    charts.legend(figure, panels[0].get_legend_handles_labels()[0][1::2], 2)
    return figure
