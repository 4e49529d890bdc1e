"""Theorem 2.1 of Zhang et al. 2021 (“On Orthogonality Constraints for Transformers”): how far a row of softmax attention
moves when its query does, against the paper's bound and against a quarter of it; and the same of orthogonal attention.

One row of Q moves by δ, ‖δ‖ = ε, and K stays. What is measured is the change over the bound.
"""

import itertools
import math
from collections.abc import Iterator

import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Generator, Tensor

from osa.functional import orthogonal_attention_matrix
from osa.modules import OrthogonalSelfAttention
from pipeline.core.params import PositiveInt, Section, Seeds
from pipeline.lab import Lab
from pipeline.measures import attention_inputs, norm
from pipeline.report import charts
from pipeline.report.looks import PALETTE, STYLE, look
from pipeline.report.numbers import number
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import largest

place = 62
PAPER = "Zhang et al. 2021, Theorem 2.1"
GAUSSIAN = "Gaussian"
SIZES = ((2, 1), (7, 3), (50, 16), (11, 13))  # N, d_v of Gaussian queries and keys
KEY_MEANS = (0.0, 3.0)  # added to all keys alike, which changes no softmax attention
MODELS = ("vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact")  # as initialised
EPSILONS = (1e-3, 0.1, 1.0, 10.0)
QUARTER = 0.25  # what the constant 2 may be multiplied by
ROUNDING = 1e-6  # of a ratio, at the smallest ε


class Settings(Section):
    seeds: Seeds
    images: PositiveInt = 2  # test images at which models are measured


@torch.no_grad()
def measure(settings: Settings, lab: Lab) -> Tables:
    """The largest and the median ratio over the rows of each case, with what the keys' mean adds to ‖K‖₂."""
    softmax, orthogonal = [], []
    for seed in settings.seeds:
        for identity, query, key, scale in itertools.chain(gaussian(seed, lab), models(seed, settings, lab)):
            generator = lab.generator(seed, f"perturbation/{'/'.join(map(str, identity.values()))}")
            identity["seed"] = seed
            if scale is None:
                softmax += [identity | row for row in softmax_rows(query, key, generator)]
            if scale is not None or identity["source"] == GAUSSIAN:
                scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
                orthogonal += [identity | row for row in orthogonal_rows(query, key, scale, generator)]
    return {"softmax": pd.DataFrame(softmax), "orthogonal": pd.DataFrame(orthogonal), "attained": attained()}


def gaussian(seed: int, lab: Lab) -> Iterator[tuple[dict, Tensor, Tensor, None]]:
    """What names a case, and its query and key, (2, 1, N, d_v)."""
    for (tokens, width), mean in itertools.product(SIZES, KEY_MEANS):
        query, key = lab.normal(seed, f"perturbation/{tokens}x{width}", 2, 2, 1, tokens, width)
        yield {"source": GAUSSIAN, "case": f"N = {tokens}, d_v = {width}, mean {mean:g}"}, query, key + mean, None


def models(seed: int, settings: Settings, lab: Lab) -> Iterator[tuple[dict, Tensor, Tensor, Tensor | None]]:
    """The same of each layer, (images, h, N, d_v), with α/√d_v where the attention is orthogonal."""
    for variant in MODELS:
        config = lab.config(variant)
        images = lab.images(config.data.pixel_scaling)[0][: settings.images]
        for layer, (attention, x) in enumerate(attention_inputs(lab.model(config, seed).double(), images), 1):
            scale = attention.scale() if isinstance(attention, OrthogonalSelfAttention) else None
            yield {"source": variant, "case": f"layer {layer}"}, *attention.project(x)[:2], scale


def softmax_rows(query: Tensor, key: Tensor, generator: Generator) -> Iterator[dict]:
    """‖A'ᵢ − Aᵢ‖ over 2α‖K‖₂ε for a random δ of each row, and, of ε = 0, for the worst: ‖(diag f − ffᵀ) K‖₂ / (2‖K‖₂)."""
    scale, size = 1 / math.sqrt(query.shape[-1]), norm(key)[..., None]
    rows = lambda query: torch.softmax(scale * query @ key.mT, dim=-1)  # noqa: E731
    centred = (norm(key - key.mean(-2, keepdim=True))[..., None] / size).min()
    ratios = {0.0: worst_ratios(query, key)}
    ratios |= {e: moved(rows, query, e, generator) / (2 * scale * e * size) for e in EPSILONS}
    for epsilon, ratio in ratios.items():
        yield {"epsilon": epsilon, **extremes(ratio), "centred_keys": centred.item()}


def worst_ratios(query: Tensor, key: Tensor) -> Tensor:
    """‖(diag f − ffᵀ) K‖₂ / (2‖K‖₂) for each row f of softmax attention, (..., N)."""
    f = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1)  # (..., N, N)
    jacobians = f[..., None] * (key[..., None, :, :] - (f @ key)[..., None, :])  # of each row times K, (..., N, N, d_v)
    return norm(jacobians) / (2 * norm(key)[..., None])


def moved(rows, query: Tensor, epsilon: float, generator: Generator) -> Tensor:
    """How far each row moves, (..., N), when every query moves by a random δ of length ε."""
    delta = torch.randn(query.shape, generator=generator, dtype=query.dtype)
    return (rows(query + epsilon * delta / delta.norm(dim=-1, keepdim=True)) - rows(query)).norm(dim=-1)


def orthogonal_rows(query: Tensor, key: Tensor, scale: Tensor | float, generator: Generator) -> Iterator[dict]:
    """‖A' − A‖₂ over (α/√d_v) ‖K‖₂ε for the whole matrix A = exp(S), with a random δ of one row."""
    a = orthogonal_attention_matrix(query, key, scale=scale)
    factor = torch.as_tensor(scale, dtype=key.dtype).abs().expand(*key.shape[:-2], 1, 1)[..., 0, 0]
    for epsilon in EPSILONS:
        delta = torch.zeros_like(query)
        delta[..., 0, :] = torch.randn(delta[..., 0, :].shape, generator=generator, dtype=query.dtype)
        delta *= epsilon / norm(delta)[..., None, None]
        change = norm(orthogonal_attention_matrix(query + delta, key, scale=scale) - a)
        yield {"epsilon": epsilon} | extremes(change / (factor * norm(key) * epsilon))


def extremes(ratios: Tensor) -> dict[str, float]:
    return {"largest": ratios.max().item(), "median": ratios.median().item()}


def attained() -> pd.DataFrame:
    """The ratio for N = 2, K = (1, −1)ᵀ and q = 0, which tends to ¼ as ε falls."""
    key = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    row = lambda q: torch.softmax(q * key.mT, dim=-1)  # noqa: E731
    ratios = [(row(e) - row(0.0)).norm().item() / (2 * norm(key).item() * e) for e in EPSILONS]
    return pd.DataFrame({"epsilon": EPSILONS, "ratio": ratios})


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    return [bounds(tables, lab), typical(tables["softmax"], lab)]


def bounds(tables: Tables, lab: Lab) -> Finding:
    """The theorem, the bound that is four times as sharp, and that of orthogonal attention."""
    softmax, orthogonal, sharpest = tables["softmax"], tables["orthogonal"], tables["attained"]["ratio"].max()
    case = "N = 2, K = (1, −1)ᵀ, q = 0"
    reached = Measure(
        f"The case {case}: change over the stated bound, over ¼", 4 * sharpest, side="above", limit=1 - 4 * ROUNDING
    )
    return Finding(
        id="perturbation",
        title="A row of attention follows its query, four times as closely as stated",
        place=PAPER,
        kind=CHECK,
        statement="‖A'ᵢ − Aᵢ‖ ≤ 2‖K‖₂ε/√d_v for softmax. It holds, and so does a quarter of it: the softmax’s Jacobian "
        "diag f − ffᵀ has norm ≤ ½ (Gershgorin), which N = 2 reaches. For all of A = exp(S), ‖A' − A‖₂ ≤ ‖S' − S‖₂ ≤ "
        "(α/√d_v)‖K‖₂ε.",
        measures=[
            largest("Softmax: change over the stated bound", softmax["largest"], 1 + ROUNDING),
            largest("Softmax: change over the stated bound, against ¼", softmax["largest"], QUARTER + ROUNDING),
            reached,
            largest("Orthogonal attention: change over its bound", orthogonal["largest"], 1 + ROUNDING),
        ],
        rule="In float64 and in every case: softmax's ratios are ≤ ¼ and so ≤ 1, one case comes to ¼, and orthogonal "
        f"attention's are ≤ 1, but for a rounding of {number(ROUNDING)}.",
        figure=draw(tables, lab),
        caption="The largest change over its bound and, dotted, the median, over ε; dashed, the bound and a quarter of it. "
        "Medians below the panels’ edge are of keys that are all but alike, whose mean moves no attention.",
        remark="The bound has ‖K‖₂ in it and not AᵀA: it is no reason to penalise AᵀA − I. It speaks of Q alone, while a "
        "token that changes moves K and V too.",
        models=MODELS,
    )


def typical(table: pd.DataFrame, lab: Lab) -> Finding:
    """How far below the bound rows are, and what the keys' mean adds to it."""
    columns = ["Queries and keys", "Worst direction", "Largest, random", "Median, random", "Least ‖K − 1k̄ᵀ‖₂ / ‖K‖₂"]
    measures, rows = [], []
    for source, own in table.groupby("source", sort=False):
        name = source if source == GAUSSIAN else f"{lab.label(source)}, as initialised"
        worst, random = own[own["epsilon"] == 0], own[own["epsilon"] > 0]
        measures.append(Measure(f"{name}: median of random changes over the bound", random["median"].median()))
        numbers = worst["largest"].max(), random["largest"].max(), random["median"].median(), own["centred_keys"].min()
        rows.append([name, *map(number, numbers)])
    return Finding(
        id="perturbation_typical",
        title="How loose the bound is",
        place=PAPER,
        kind=OBSERVATION,
        statement="The change of a row over 2‖K‖₂ε/√d_v. A vector added to all keys raises ‖K‖₂ and moves no attention: "
        "‖K − 1k̄ᵀ‖₂, with the keys’ mean k̄, bounds as well.",
        measures=measures,
        table=Table(columns, rows),
        remark="Of trained models the worst direction alone is known, from the study penalties.",
        models=MODELS,
    )


@matplotlib.rc_context(STYLE)
def draw(tables: Tables, lab: Lab) -> Figure:
    """The largest and the median ratio of each model over ε."""
    figure, panels = charts.panels(2, 3.9, sharey=True)
    titles = {"softmax": "Softmax, a row", "orthogonal": "Orthogonal attention, all rows"}
    colours = {GAUSSIAN: PALETTE[6]} | {variant: look(variant).colour for variant in MODELS}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        table = tables[name][tables[name]["epsilon"] > 0]
        for source, own in table.groupby("source", sort=False):
            of = own.groupby("epsilon")
            axes.plot(of["largest"].max(), color=colours[source], marker="o", markersize=4)
            axes.plot(of["median"].median(), color=colours[source], linestyle=":", marker="o", markersize=3)
        for bound in (1.0, QUARTER)[: 2 if name == "softmax" else 1]:
            axes.axhline(bound, **charts.EXPECTED)
        charts.logarithmic(axes, "x", "y")
        axes.set(title=title, xlabel="ε", ylim=(1e-5, 2))
    panels[0].set_ylabel("Change over its bound")
    names = {source: source if source == GAUSSIAN else lab.label(source) for source in colours}
    handles = [Line2D([], [], color=colours[source], label=name) for source, name in names.items()]
    charts.legend(figure, [*handles, charts.expected_line("the bound, and ¼ of it")], 3)
    return figure
