"""Theorems 4.3 and 4.4, Remark 4.5: a small α keeps the Jacobian of one head well-conditioned.

We vary α, and compare ‖J₁‖₂ and κ(J) of one head with their bounds. Beyond the theorems, we measure two numbers for
each layer of untrained and trained models: κ(J) of the first head, and κ(Σᵢ W^Vᵢ W^Oᵢ), where i runs over heads.
"""

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from osa.functional import orthogonal_attention, orthogonal_attention_matrix
from osa.options import Method
from osa.reference import skew
from pipeline.config.looks import PALETTE
from pipeline.config.params import Section, Seeds
from pipeline.results.measures import METHODS, condition, head, head_condition, jacobian, norm, random_head
from pipeline.studies import Study, Tables, charts
from pipeline.studies._summaries import log_log_slope, trained_layers, worst_case
from pipeline.studies.lab import Lab, initialised_layers

SIZES = ((16, 12, 3), (7, 16, 4))  # N, d, h
SIZE = ["tokens", "embed_dim", "num_heads"]
ALPHAS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
# We fit slopes to the points with α up to this value. There, ‖S‖ < 0.05, so the α² term of ‖J₁‖ is below 5 % of the α term.
FIT_BELOW = 1e-3
# The fitted α span a factor of 1000. The α² term of ‖J₁‖ adds at most 5 %, so slopes change by up to log(1.05) / log(1000).
SLOPE_TOLERANCE = 0.01
MODEL, DOTTED = "osa_qr", (0, (1.5, 1.5))  # the model whose layers are drawn, and the line style for untrained layers


class Settings(Section):
    seeds: Seeds


def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures one head on Gaussian tokens for each size, seed, method and α. Also measures layers of untrained models."""
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


def conditions(x: Tensor, weights: tuple[Tensor, ...], alpha: float, method: Method) -> dict[str, float]:
    """Returns the quantities of both theorems for one head.

    `deviation` is δ = maxᵢ |σᵢ(A) − 1|. `excess` is κ(J) − 1, because κ(J) itself is close to 1 for small α, and files keep
    only 6 significant digits.
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
    """Returns J₁ of Eq. 13, (N·d, N·d): the Jacobian of `head` with X W^V fixed. We avoid J − J₂, which is less accurate."""
    w_query, w_key, w_value, w_out = weights
    value = x @ w_value

    def attend(copies: Tensor) -> Tensor:
        values = value.expand(len(copies), *value.shape)
        return orthogonal_attention(copies @ w_query, copies @ w_key, values, scale=scale, **method) @ w_out

    return jacobian(attend, x)


def first_term_constant(x: Tensor, width: int) -> float:
    """Returns C = 2‖X‖₂²/√d_v, for the bound ‖J₁‖₂ ≤ Cα. The bound holds for A = exp(S) at Section 4's initialisation.

    ‖J₁‖₂ ≤ ‖X W^V W^O‖₂ ‖∂vec A/∂vec S‖₂ ‖∂vec S/∂vec X‖₂. The first factor is at most ‖X‖₂. The second factor is at most 1
    (Eq. 80, applied to S itself). The third factor is at most 2α‖X‖₂/√d_v (Eq. 83). M may have any rank, because
    A = exp(S) does not depend on the basis of M.
    """
    return 2 * norm(x).item() ** 2 / math.sqrt(width)


def condition_bound(deviation: float, first_norm: float) -> float:
    """Returns (1 + δ + ‖J₁‖₂)/(1 − δ − ‖J₁‖₂), Eq. 16 with ‖J₁‖₂ in place of Cα, or ∞ if the denominator is not positive."""
    rest = 1 - deviation - first_norm
    return (1 + deviation + first_norm) / rest if rest > 0 else math.inf


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Checks the slope of log ‖J₁‖₂ against log α, the bound on ‖J₁‖₂, and the bound on κ(J) of one head.

    Also returns the largest κ(J) of a layer's first head, and the median of κ(Σᵢ W^Vᵢ W^Oᵢ) over layers.
    """
    alphas, layers = tables["alphas"], tables["layers"]
    identical = alphas[alphas["method"] != "newton_schulz"]
    bounded = alphas[np.isfinite(alphas["bound_excess"])]
    trained = trained_layers(lab, "jacobian_kappa").groupby("variant", sort=False)["jacobian_kappa"].max()
    return {
        "slope": worst_case((slopes_over_alpha(alphas[alphas["alpha"] <= FIT_BELOW]) - 1).abs(), SLOPE_TOLERANCE),
        "first_term": worst_case(identical["first_norm"], identical["constant"] * identical["alpha"]),
        "condition": worst_case(bounded["excess"], bounded["bound_excess"]),
        "head": {"initial": layers["kappa"].max(), "trained": trained.to_dict()},
        "layer": {"initial": _once(layers)["kappa_sum"].median()},
    }


def slopes_over_alpha(points: pd.DataFrame) -> pd.Series:
    """Returns the least-squares slope of log ‖J₁‖₂ against log α, for each method, size and seed."""
    grouped = points.groupby(["method", *SIZE, "seed"])[["alpha", "first_norm"]]
    return grouped.apply(lambda own: log_log_slope(own["alpha"], own["first_norm"]))


def _once(layers: pd.DataFrame) -> pd.DataFrame:
    """Keeps one row for each seed and layer, since a seed gives all models the same initial weights."""
    return layers.drop_duplicates(["seed", "layer"])


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    """Draws two panels.

    Left: κ(J) − 1 of one head and its bound, against α. Right: κ(J) of the first head and κ(Σᵢ W^Vᵢ W^Oᵢ), for each layer.
    """
    figure, (left, right) = charts.panels(2, 3.2)
    alphas = tables["alphas"]
    own = alphas[(alphas["method"] == "exact") & (alphas[SIZE] == alphas[SIZE].iloc[0]).all(axis=1)]
    medians = own.groupby("alpha")[["excess", "bound_excess"]].median().replace(math.inf, math.nan)
    left.plot(medians["excess"], color=PALETTE[0])
    left.plot(medians["bound_excess"], **charts.EXPECTED)
    left.set(title="One head, over α", xlabel="α", ylabel="κ(J) − 1")
    charts.logarithmic(left, "x", "y", numticks=5)

    initial = tables["layers"]
    lines: dict[str, tuple[pd.Series, str, Any]] = {
        "whole layer": (_once(initial).groupby("layer")["kappa_sum"].median(), PALETTE[4], DOTTED),
        "one head": (initial[initial["source"] == MODEL].groupby("layer")["kappa"].median(), PALETTE[0], DOTTED),
    }
    trained = trained_layers(lab, "layer", "layer_kappa", "jacobian_kappa")
    trained = trained[trained["variant"] == MODEL].groupby("layer")[["layer_kappa", "jacobian_kappa"]].median()
    trained.index += 1  # the figure counts layers from 1, and the stage `evaluate` from 0
    if len(trained):
        lines |= {
            "whole layer, trained": (trained["layer_kappa"], PALETTE[4], "-"),
            "one head, trained": (trained["jacobian_kappa"], PALETTE[0], "-"),
        }
    for label, (values, colour, dashes) in lines.items():
        right.plot(values, label=label, color=colour, linestyle=dashes, marker="o", markersize=3.5)
    right.set(title="The layers of a model", xlabel="Layer", ylabel="κ")
    right.set_xticks(initial["layer"].unique())
    charts.logarithmic(right, "y")
    charts.label_ends(right)
    return figure


STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"theorems_4_3_4_4": draw})
