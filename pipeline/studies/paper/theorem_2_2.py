"""Theorem 2.2: Σ_l = X_l X_lᵀ = A Σ₀ Aᵀ with A ∈ SO(N), so that rank and eigenvalues of Σ₀ are kept at every depth.

Of stacks of one-head layers without MLP, skip or norm, with W^V W^O orthogonal: QR and exact must keep the spectrum up to
rounding, which checks the code. What do softmax, with and without a skip, and Newton–Schulz make of it? Measured on Gaussian
tokens and on those of an image.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import matplotlib
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from pydantic import Field, model_validator
from torch import Tensor

from osa.functional import orthogonal_attention
from osa.init import stiefel_uniform
from pipeline.core.params import PositiveFloat, Section, Seeds
from pipeline.lab import Lab
from pipeline.measures import METHODS, ORTHOGONAL, effective_rank
from pipeline.report import charts
from pipeline.report.looks import METHOD_LABELS, STYLE
from pipeline.report.numbers import number, span
from pipeline.statistics import summarise
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import largest

place = 22
IDENTICAL = ("qr", "exact")  # those whose A is orthogonal but for rounding
SOFTMAX = {"softmax": "Softmax, no skip", "softmax, skip": "Softmax with skip"}  # stacks for comparison
TOLERANCE = 1e-10  # relative, of every eigenvalue: 64 layers x n eps x the cond(X) of a thousand or so of real tokens
COLLAPSED = 2  # an effective rank below which fewer than two directions are left
TOKENS = {"gaussian": "Gaussian tokens", "mnist": "Image tokens"}


class Settings(Section):
    seeds: Seeds
    depths: list[Annotated[int, Field(ge=0)]] = Field(min_length=2)
    alphas: list[PositiveFloat] = Field([0.1, 1], min_length=1)  # the paper's initial one, and one that takes A far from I

    @model_validator(mode="after")
    def _depths_rise(self):
        if self.depths[0] != 0 or self.depths != sorted(set(self.depths)):
            raise ValueError("depths must rise from 0")
        return self


def measure(settings: Settings, lab: Lab) -> Tables:
    """What becomes of the spectrum for all tokens and seeds, and every eigenvalue of Σ_l for the first seed's image."""
    summary, spectra = [], []
    for seed in settings.seeds:
        image = _image_tokens(lab, seed)  # (N, d)
        width = image.shape[1]
        weights = _weights(settings, lab, seed, width)
        attentions = {
            stack: partial(orthogonal_attention, scale=alpha / math.sqrt(width), method=method)
            for stack, (method, alpha) in orthogonal_stacks(settings).items()
        } | dict.fromkeys(SOFTMAX, F.scaled_dot_product_attention)
        for tokens, x in {"gaussian": lab.normal(seed, "theory/kernel", *image.shape), "mnist": image}.items():
            for stack, attention in attentions.items():
                identity = {"tokens": tokens, "stack": stack, "seed": seed}
                states = enumerate(attention_stack(x, weights, attention, skip=stack == "softmax, skip"))
                eigenvalues = {depth: kernel_eigenvalues(x) for depth, x in states if depth in settings.depths}
                for depth, values in eigenvalues.items():
                    summary.append(identity | {"depth": depth} | _spectrum_summary(values, eigenvalues[0]))
                    if tokens == "mnist" and seed == settings.seeds[0]:
                        numbered = enumerate(values.tolist(), 1)
                        spectra += [identity | {"depth": depth, "index": i, "eigenvalue": value} for i, value in numbered]
    return {"summary": pd.DataFrame(summary), "spectra": pd.DataFrame(spectra)}


@torch.no_grad()
def _image_tokens(lab: Lab, seed: int) -> Tensor:
    """What enters the first block of an initialised model for one test image, (N, d), float64."""
    config = lab.config(ORTHOGONAL[0])
    images, _ = lab.images(config.data.pixel_scaling)
    return lab.model(config, seed).double().tokens(images[seed % len(images)][None])[0]


def orthogonal_stacks(settings: Settings) -> dict[str, tuple[str, float]]:
    """Method and α of each stack of orthogonal attention."""
    return {f"{method}, alpha {alpha:g}": (method, alpha) for alpha, method in itertools.product(settings.alphas, METHODS)}


def _weights(settings: Settings, lab: Lab, seed: int, width: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """W^Q, W^K and W = W^V W^O of each layer, (d, d) each and orthogonal: the same for all stacks of a seed."""
    generator = lab.generator(seed, "theory/stack")
    draw = lambda: stiefel_uniform(width, width, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(), draw(), draw() @ draw()) for _ in range(settings.depths[-1])]


def attention_stack(
    x: Tensor, weights: list[tuple[Tensor, Tensor, Tensor]], attention: Callable[..., Tensor], skip: bool
) -> Iterator[Tensor]:
    """X₀ = x and then X_l = attention(X W^Q_l, X W^K_l, X W_l) [+ X for `skip`] of each layer l, as they are computed.

    Args:
        x: (N, d).
        weights: for each layer W^Q, W^K and W = W^V W^O, (d, d) each: one head, no MLP (Theorem 2.2).
        attention: (query, key, value) → (N, d).
    """
    yield x
    for w_query, w_key, w_value in weights:
        y = attention(x @ w_query, x @ w_key, x @ w_value)  # (N, d)
        x = x + y if skip else y
        yield x


def kernel_eigenvalues(x: Tensor) -> Tensor:
    """The eigenvalues of Σ = X Xᵀ in descending order, min(N, d) of them: squared singular values of X (N, d).

    The others are zero. Eigenvalues of the product itself would lose those below eps · λ₁.
    """
    return torch.linalg.svdvals(x).square()


def _spectrum_summary(values: Tensor, first: Tensor) -> dict[str, float]:
    """Effective rank, λ₁/Σλ, Σλ, and the largest change of an eigenvalue relative to itself at depth 0."""
    kept = first > len(first) * torch.finfo(first.dtype).eps ** 2 * first[0]  # not zero: squares of singular values
    return {
        "effective_rank": effective_rank(values),
        "largest_share": (values[0] / values.sum()).item(),
        "trace": values.sum().item(),
        "change": (values[kept] / first[kept] - 1).abs().max().item(),
    }


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    stacks, summary = orthogonal_stacks(settings), tables["summary"]
    labels = {stack: f"OSA ({METHOD_LABELS[method]}), α = {alpha:g}" for stack, (method, alpha) in stacks.items()} | SOFTMAX
    summary = summary.assign(label=summary["stack"].map(labels), method=summary["stack"].str.split(",").str[0])
    return [_kept(settings, summary, tables["spectra"]), _softmax(settings, summary), _newton_schulz(settings, summary)]


def _kept(settings: Settings, summary: pd.DataFrame, spectra: pd.DataFrame) -> Finding:
    deepest = settings.depths[-1]
    identical = summary[summary["method"].isin(IDENTICAL)].groupby("label", sort=False)["change"]
    ranks = summary.groupby(["label", "tokens", "depth"])["effective_rank"].mean()
    rows = []
    for label, change in summary.groupby("label", sort=False)["change"].max().items():
        kept = [" → ".join(number(ranks[label, name, depth]) for depth in (0, deepest)) for name in TOKENS]
        rows.append([label, *kept, number(change)])
    columns = ["Attention", *(f"Effective rank, {name}" for name in TOKENS.values()), "Largest change of an eigenvalue"]
    return Finding(
        id="theorem_2_2",
        title="Orthogonal attention keeps the spectrum",
        place="Theorem 2.2",
        kind=CHECK,
        statement="Σ_l = X_l X_lᵀ = A Σ₀ Aᵀ with A ∈ SO(N): rank and eigenvalues of Σ₀ are preserved at every depth",
        rule="In a stack of one-head layers without MLP, skip or norm, with W^V W^O orthogonal, QR and exact in float64 "
        f"keep every non-zero eigenvalue of Σ_l within a relative {TOLERANCE:g}, up to depth {deepest}.",
        measures=[largest(f"{label}: relative change of an eigenvalue", own, TOLERANCE) for label, own in identical],
        table=Table(columns, rows),
        figure=_figure(settings, spectra),
        caption="Each line is an eigenvalue of the kernel matrix of one image's tokens, relative to the largest, through "
        "the layers of an attention-only stack. Orthogonal attention keeps them all; softmax sends all but one to zero.",
    )


def _softmax(settings: Settings, summary: pd.DataFrame) -> Finding:
    """The effective rank that softmax leaves at the last depth, and the depth at which it has lost the spectrum."""
    measures = []
    for (label, tokens), own in summary[summary["stack"].isin(SOFTMAX)].groupby(["label", "tokens"], sort=False):
        what = f"{label}, {TOKENS[tokens]}"
        ranks = own.pivot(index="seed", columns="depth", values="effective_rank")
        last = summarise(ranks[settings.depths[-1]])
        note = f"from {number(ranks[0].mean())} at depth 0; mean over seeds"
        text = f"{what}: effective rank at depth {settings.depths[-1]}"
        measures.append(Measure(text, last.mean, low=last.low, high=last.high, n=last.n, note=note))
        collapsed = [depth for depth in ranks if ranks[depth].max() < COLLAPSED]
        if collapsed:
            text = f"{what}: depth from which every effective rank is below {COLLAPSED}"
            measures.append(Measure(text, collapsed[0], n=len(ranks)))
    return Finding(
        id="theorem_2_2_softmax",
        title="Softmax attention alone loses rank with depth",
        place="Section 2.2",
        kind=OBSERVATION,
        statement="What softmax attention makes of the same tokens with the same weights, without MLP and layer norm",
        in_short=f"At depth {settings.depths[-1]} every effective rank is down to "
        f"{span(m.value for m in measures if 'effective rank at' in m.what)}.",
        measures=measures,
    )


def _newton_schulz(settings: Settings, summary: pd.DataFrame) -> Finding:
    measures = []
    for label, own in summary[summary["method"] == "newton_schulz"].groupby("label", sort=False):
        what = f"{label}, depth {settings.depths[-1]}"
        by_depth = own.set_index(["tokens", "seed", "depth"])[["change", "effective_rank"]].unstack()
        change = by_depth["change"][settings.depths[-1]].max()
        ratio = (by_depth["effective_rank"][settings.depths[-1]] / by_depth["effective_rank"][0]).max()
        measures.append(Measure(f"{what}: largest relative change of an eigenvalue", change))
        measures.append(Measure(f"{what}: effective rank over that at depth 0, largest", ratio))
    return Finding(
        id="theorem_2_2_newton_schulz",
        title="Newton–Schulz lets the spectrum drift",
        place="Theorem 2.2 and Eq. 9",
        kind=OBSERVATION,
        statement="The proof takes A to be orthogonal. After K iterations of Newton–Schulz it contracts some directions, "
        "and the eigenvalues drift with depth.",
        in_short=f"By depth {settings.depths[-1]} an eigenvalue has changed by up to "
        f"{number(100 * max(m.value for m in measures[::2]))}%.",
        measures=measures,
    )


@matplotlib.rc_context(STYLE)
def _figure(settings: Settings, spectra: pd.DataFrame) -> Figure:
    """Every eigenvalue through depth: orthogonal attention, softmax with skip, softmax."""
    floor, deepest = 1e-17, settings.depths[-1]
    stacks = {list(orthogonal_stacks(settings))[-1]: "Orthogonal", "softmax, skip": "Softmax + skip", "softmax": "Softmax"}
    ticks = [0, *(4**k for k in range(deepest.bit_length()) if 4**k <= deepest)]
    figure, panels = charts.panels(3, 3.7, sharey=True)
    for axes, (stack, title) in zip(panels, stacks.items(), strict=True):
        wide = spectra[spectra["stack"] == stack].pivot(index="depth", columns="index", values="eigenvalue")
        relative = wide.div(wide[1], axis=0).clip(lower=floor / 1e3)
        for (i, line), colour in zip(relative.items(), charts.ramp(wide.shape[1]), strict=True):
            axes.plot(line, color=colour, linewidth=1.1, solid_capstyle="round", zorder=100 - i)
        charts.logarithmic(axes, "y", numticks=7)
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks(ticks, ticks)
        axes.set_xticks([], minor=True)
        ranks = [number(effective_rank(torch.tensor(wide.loc[depth].to_numpy()))) for depth in wide.index[[0, -1]]]
        axes.set(title=title, xlabel=f"Layers\neffective rank {ranks[0]} → {ranks[1]}", xlim=(0, deepest), ylim=(floor, 6))
    panels[0].set_ylabel("Eigenvalues λᵢ/λ₁ of X Xᵀ")
    return figure
