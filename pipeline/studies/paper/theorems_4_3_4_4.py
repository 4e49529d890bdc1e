"""Theorems 4.3 and 4.4, Remark 4.5: a small α keeps the Jacobian of one head well-conditioned.

‖J₁‖₂ and κ(J) of one head are set beside their bounds over α. What the theorems leave out is measured in the models: κ(J)
of a head of each layer, as initialised and trained, and κ(Σᵢ W^Vᵢ W^Oᵢ) of a whole layer.
"""

import itertools
import math

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from osa.functional import orthogonal_attention, orthogonal_attention_matrix
from pipeline.core.params import Section, Seeds
from pipeline.lab import Lab
from pipeline.measures import METHODS, condition, head, head_condition, initialised_layers, jacobian, norm, random_head, skew
from pipeline.report import charts
from pipeline.report.looks import METHOD_LABELS, STYLE
from pipeline.report.numbers import number
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import condition_numbers, largest, log_log_slope, origin, trained_layers, worst_over_seeds

place = 43
SIZES = ((16, 12, 3), (7, 16, 4))  # N, d, h
SIZE = ["tokens", "embed_dim", "num_heads"]
ALPHAS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
FIT_BELOW = 1e-3  # where ‖S‖ is below 0.05 or so, and the next order in α therefore that much smaller
SLOPE_TOLERANCE = 0.01  # next order: log(1.05) over the fitted log(1000)


class Settings(Section):
    seeds: Seeds


def measure(settings: Settings, lab: Lab) -> Tables:
    """One head on Gaussian tokens for each size, seed, method and α.

    And of each layer as initialised: κ(J) and ‖J‖₂ of the first head on one image, and κ(Σᵢ W^Vᵢ W^Oᵢ) of the whole.
    """
    alphas, layers = [], []
    for (tokens, d, heads), seed in itertools.product(SIZES, settings.seeds):
        generator = lab.generator(seed, f"theory/alpha/{tokens}x{d}x{heads}")
        x = torch.randn(tokens, d, generator=generator, dtype=torch.float64)
        weights = random_head(d, heads, generator)
        for method, alpha in itertools.product(METHODS, ALPHAS):
            identity = {"tokens": tokens, "embed_dim": d, "num_heads": heads, "seed": seed, "method": method, "alpha": alpha}
            alphas.append(identity | conditions(x, weights, alpha, method))
    for seed in settings.seeds:
        for identity, attention, x in initialised_layers(lab, seed):
            total = torch.linalg.svdvals(attention.out.weight @ attention.value.weight)
            row = identity | {"seed": seed, "alpha": attention.alpha[0].item()} | head_condition(attention, 0, x[0])
            layers.append(row | {"kappa_sum": condition(total, rank=len(total))})
    return {"alphas": pd.DataFrame(alphas), "layers": pd.DataFrame(layers)}


def conditions(x: Tensor, weights: tuple[Tensor, ...], alpha: float, method: str) -> dict[str, float]:
    """‖S‖₂, ‖J₁‖₂ and the C of its bound Cα, δ = max |σᵢ(A) − 1|, and κ(J) beside its bound.

    Both κ are also given less 1: for small α the digits of κ that a file holds are all zero.
    """
    w_query, w_key, w_value, _ = weights
    width = w_value.shape[1]
    scale = alpha / math.sqrt(width)
    first = norm(first_term(x, weights, scale, method=method)).item()
    whole = jacobian(lambda x: head(x, weights, scale, method=method), x)
    a = orthogonal_attention_matrix(x @ w_query, x @ w_key, scale=scale, method=method)
    deviation = (torch.linalg.svdvals(a) - 1).abs().max().item()
    kappa, bound = condition(torch.linalg.svdvals(whole), rank=len(x) * width), condition_bound(deviation, first)
    return {
        "norm": norm(skew(x @ w_query, x @ w_key, scale)).item(),
        "first_norm": first,
        "constant": first_term_constant(x, width),
        "deviation": deviation,
        "kappa": kappa,
        "bound": bound,
        "excess": kappa - 1,
        "bound_excess": bound - 1,
    }


def first_term(x: Tensor, weights: tuple[Tensor, ...], scale: float, **method) -> Tensor:
    """J₁ of Eq. 13 by itself, (N·d, N·d): the Jacobian of `head` with X W^V held fixed, free of cancellation with J₂."""
    w_query, w_key, w_value, w_out = weights
    value = x @ w_value

    def attend(copies: Tensor) -> Tensor:
        values = value.expand(len(copies), *value.shape)
        return orthogonal_attention(copies @ w_query, copies @ w_key, values, scale=scale, **method) @ w_out

    return jacobian(attend, x)


def first_term_constant(x: Tensor, width: int) -> float:
    """C = 2‖X‖₂²/√d_v, with which ‖J₁‖₂ ≤ C α for A = exp(S) at the initialisation of Section 4, whatever the rank of M.

    ‖J₁‖₂ ≤ ‖X W^V W^O‖₂ ‖∂vec A/∂vec S‖₂ ‖∂vec S/∂vec X‖₂, where the first factor is at most ‖X‖₂, the second 1 (Eq. 80
    for S itself) and the third 2α‖X‖₂/√d_v (Eq. 83). No basis enters: A does not depend on the choice of one.
    """
    return 2 * norm(x).item() ** 2 / math.sqrt(width)


def condition_bound(deviation: float, first_norm: float) -> float:
    """(1 + δ + Cα)/(1 − δ − Cα) of Eq. 16, ∞ where its denominator is not positive."""
    rest = 1 - deviation - first_norm
    return (1 + deviation + first_norm) / rest if rest > 0 else math.inf


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    layers = tables["layers"]
    return [bounds(tables["alphas"]), heads_of_models(layers, lab), whole_layers(layers, lab)]


def bounds(table: pd.DataFrame) -> Finding:
    """Both theorems, on one head."""
    measures = []
    for method, own in table.groupby("method", sort=False):
        name = METHOD_LABELS[method]
        deviations = (slopes(own[own["alpha"] <= FIT_BELOW]) - 1).abs()
        measures.append(largest(f"{name}: |slope − 1| of ‖J₁‖₂ against α", deviations, SLOPE_TOLERANCE))
        bounded = own[np.isfinite(own["bound_excess"])]
        note = f"the largest of the {len(bounded)} of {len(own)} cases in which δ + ‖J₁‖₂ < 1"
        ratios = bounded["excess"] / bounded["bound_excess"]
        measures.append(largest(f"{name}: κ(J) − 1 over that of the bound", ratios, note=note))
        if method != "newton_schulz":  # whose A is not exp(S)
            ratios = own["first_norm"] / (own["constant"] * own["alpha"])
            measures.append(largest(f"{name}: ‖J₁‖₂ over Cα with C = 2‖X‖₂²/√d_v", ratios))
    return Finding(
        id="theorems_4_3_4_4",
        title="A small α keeps one head's Jacobian well-conditioned",
        place="Theorems 4.3 and 4.4, Remark 4.5",
        kind=CHECK,
        statement="‖J₁‖₂ ≤ Cα, and therefore 1 ≤ κ(J) ≤ (1 + δ + Cα)/(1 − δ − Cα) where |σᵢ(A) − 1| ≤ δ. That ‖J₁‖₂ grows "
        "as α where α is small holds for any weights and tests the code's gradients; the bounds also test the weights of "
        "Section 4.",
        measures=measures,
        rule=f"For α ≤ {FIT_BELOW:g} the log–log slope of ‖J₁‖₂ against α is within {SLOPE_TOLERANCE:g} of 1, for every "
        "size and seed; for every α κ(J) is below the bound with the measured ‖J₁‖₂ and δ, and for QR and exact ‖J₁‖₂ below "
        "2‖X‖₂²α/√d_v.",
        figure=draw_bounds(table),
        caption="Left: ‖J₁‖₂ against α on Gaussian tokens; dashed, Cα. Right: κ(J) − 1; dashed, the bound of Theorem 4.4 "
        "with measured δ and ‖J₁‖₂. Medians over seeds.",
        remark="For QR the paper has no proof (Remark 4.5), but exp(S) does not depend on the basis: C needs no assumption "
        "on M.",
    )


def slopes(points: pd.DataFrame) -> pd.Series:
    """The least-squares slope of log ‖J₁‖₂ against log α, for each size and seed."""
    grouped = points.groupby([*SIZE, "seed"])[["alpha", "first_norm"]]
    return grouped.apply(lambda own: log_log_slope(own["alpha"], own["first_norm"]))


def heads_of_models(layers: pd.DataFrame, lab: Lab) -> Finding:
    """κ(J) of one head of each layer, which the theorems bound as initialised and nothing bounds in training."""
    trained = trained_layers(lab, "layer", "alpha", "jacobian_kappa")
    largest_initially = layers.groupby("source", sort=False)["kappa"].max()
    names = {"variant": "source", "jacobian_kappa": "kappa"}
    after = trained.assign(layer=trained["layer"] + 1).rename(columns=names)  # evaluate counts layers from 0 on
    states = pd.concat([layers.assign(state="initialised"), after.assign(state="trained")])
    medians = states.groupby(["source", "layer", "state"])[["alpha", "kappa"]].median()
    sources = list(largest_initially.index)
    return Finding(
        id="head_jacobians",
        title="κ(J) of one head in the models",
        place="Theorem 4.4",
        kind=OBSERVATION,
        statement="The theorem speaks of the initialisation and of any X. In a model X is what the layers before make of an "
        "image, and training moves α and the weights.",
        in_short=f"κ(J) of a layer’s first head is at most {number(largest_initially.max())} as initialised"
        + (f", and {number(trained['jacobian_kappa'].max())} as trained." if len(trained) else "."),
        measures=[
            *(
                Measure(f"{lab.label(v)}, as initialised: largest κ(J) of first heads", k)
                for v, k in largest_initially.items()
            ),
            *worst_over_seeds(lab, trained, "jacobian_kappa", "largest κ(J) of first heads"),
        ],
        table=layer_table(medians, sources, lab),
        figure=draw_layers(medians, sources, lab),
        caption="κ(J) of the first head of each layer on one test image. Medians over seeds. Without skips and LN tokens "
        "shrink from layer to layer as initialised, and S with them: near 1 in a late layer tells of A ≈ I, whatever α is.",
        **origin(trained),
    )


def layer_table(medians: pd.DataFrame, sources: list[str], lab: Lab) -> Table:
    """For each layer α and κ(J) of each model, in the states that there are."""
    present = medians.index.unique("state")
    columns = list(itertools.product(sources, {"alpha": "α", "kappa": "κ(J)"}.items()))
    rows = []
    for layer in medians.index.unique("layer").sort_values():
        cells = [medians[column].reindex([(source, layer, state) for state in present]) for source, (column, _) in columns]
        rows.append([str(layer), *(" → ".join(map(number, cell)) for cell in cells)])
    header = ["Layer", *(f"{symbol}, {lab.label(source)}" for source, (_, symbol) in columns)]
    return Table(header, rows, note="The first head of each layer, as initialised → trained. Medians over seeds.")


def whole_layers(layers: pd.DataFrame, lab: Lab) -> Finding:
    """κ(Σᵢ W^Vᵢ W^Oᵢ): what the theorems' one head leaves out."""
    drawn = layers.drop_duplicates(["seed", "layer"])  # a seed gives all models the same weights
    trained = trained_layers(lab, "layer", "layer_kappa").drop_duplicates()  # which stands beside each head
    return Finding(
        id="layer_products",
        title="κ of a whole layer",
        place="Section 4, Theorem 4.4",
        kind=OBSERVATION,
        statement="The theorems are about one head. A layer of h heads with small α does to its tokens about what "
        "Σᵢ W^Vᵢ W^Oᵢ does. As initialised each term has condition number 1, and their sum has not.",
        **condition_numbers(lab, "κ(Σᵢ W^Vᵢ W^Oᵢ)", {"As initialised": drawn["kappa_sum"]}, trained, "layer_kappa"),
    )


@matplotlib.rc_context(STYLE)
def draw_bounds(table: pd.DataFrame) -> Figure:
    """‖J₁‖₂ and κ(J) over α for the first size, with their bounds."""
    figure, panels = charts.panels(2)
    own = table[(table[SIZE] == table[SIZE].iloc[0]).all(axis=1)].assign(limit=table["constant"] * table["alpha"])
    columns = ["first_norm", "limit", "excess", "bound_excess"]
    medians = own.groupby(["method", "alpha"])[columns].median().replace(math.inf, math.nan)
    described = (("First term", "‖J₁‖₂"), ("Condition", "κ(J) − 1"))
    for axes, (title, name), (column, bound) in zip(panels, described, (columns[:2], columns[2:]), strict=True):
        for method in METHODS:
            axes.plot(medians.loc[method][column], **charts.method_style(method, alpha=0.85))
        axes.plot(medians.loc["exact"][bound], **charts.EXPECTED)
        axes.set(title=title, xlabel="α", ylabel=name)
        charts.logarithmic(axes, "x", "y", numticks=5)
    charts.legend(figure, [*map(charts.method_line, METHODS), charts.expected_line("bound")], 4)
    return figure


@matplotlib.rc_context(STYLE)
def draw_layers(medians: pd.DataFrame, sources: list[str], lab: Lab) -> Figure:
    """κ(J) of a head over the layers, for each model in each state."""
    figure, (axes,) = charts.panels(1, 3.4)
    handles = []
    for source in sources:
        style = charts.method_style(lab.params.variants[source].method, linewidth=0.9)
        for state, own in medians.loc[source].groupby("state"):
            changes = {"markerfacecolor": "#ffffff", "linestyle": ":"} if state == "initialised" else {}
            axes.plot(own["kappa"].droplevel("state"), **style | changes)
        handles.append(Line2D([], [], label=lab.label(source), **style))
    axes.set(title="Heads of the models", xlabel="Layer", ylabel="κ(J) of a head", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    charts.legend(figure, [*handles, *charts.fills("trained", "as initialised")], 5)
    return figure
