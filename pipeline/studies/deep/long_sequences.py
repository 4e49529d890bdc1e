"""More tokens: what do smaller patches cost, and do they improve accuracy?

We train ViT and OSA with patches of 4, 2 and 1 pixels, to see whether the cost of training is linear in N (Section 3.1).
And how should the initial α change with N (Section 4)? If ‖W̃‖₂ = 1 (Theorem 4.2), S (Eq. 5) and J₁ (Theorem 4.1) satisfy

    ‖S‖₂ ≤ α/√d_v ‖X‖₂²        and        ‖J₁‖₂ ≤ 2 α/√d_v ‖X‖₂².

N tokens with mean square q satisfy N q ≤ ‖X‖₂² ≤ N d q, since the rank of X is at most d. An initial α ∝ 1/N therefore keeps
both bounds from growing with N.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from pipeline.config.params import PositiveInt, Seeds
from pipeline.results.measures import attention_inputs, head_weights, norm, power_iteration
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Tables, charts, comparison
from pipeline.studies._summaries import log_log_slope
from pipeline.studies.lab import Lab

OSA = "osa_exact"
# "paper" does not rescale tokens. "normalised" divides each token by its RMS. "following" is "normalised" with α ∝ 1/N.
CASES = ("paper", "normalised", "following")
NORM_COLUMNS = ("norm_squared", "skew", "jacobian")  # ‖X‖₂², ‖S‖₂, ‖J₁‖₂


class Settings(comparison.Settings):
    patches: list[PositiveInt]  # side lengths of patches in pixels, for models at initialisation
    initial_seeds: Seeds
    images: PositiveInt = 1
    power_iterations: PositiveInt = 20  # 20 iterations are enough for an error of 1 % in ‖J₁‖₂


def measure(settings: Settings, lab: Lab) -> Tables:
    return {"initial": pd.DataFrame(initial(settings, lab))}


def initial(settings: Settings, lab: Lab) -> Iterator[dict]:
    """Yields, for each patch size, case and seed, the first block's ‖X‖₂², ‖S‖₂ and ‖J₁‖₂ as means over images and heads."""
    for patch, case, seed in itertools.product(settings.patches, CASES, settings.initial_seeds):
        variant = {"normalise_tokens": case != "paper"}
        config = lab.config(OSA, {"variant": variant, "model": {"patch_size": patch}})
        images = lab.images(config.data.pixel_scaling)[0][: settings.images]
        layer, x = next(attention_inputs(lab.model(config, seed, torch.float64), images))
        x, tokens = x.detach(), config.options.num_tokens
        alpha = config.init.alpha * (lab.config(OSA).options.num_tokens / tokens if case == "following" else 1)
        scale, sizes = alpha / math.sqrt(layer.embed_dim / layer.num_heads), []
        start = lab.normal(seed, "long_sequences/direction", *x.shape[1:])
        for each, weights in itertools.product(x, head_weights(layer)):
            parts = [weight.detach() for weight in weights]
            jacobian = jacobian_norm(each, parts, scale, start, settings.power_iterations)
            sizes.append((norm(each).square().item(), skew_norm(each, parts[0], parts[1], scale), jacobian))
        means = dict(zip(NORM_COLUMNS, np.mean(sizes, axis=0).tolist(), strict=True))
        yield {"case": case, "tokens": tokens, "seed": seed, "alpha": alpha} | means


def skew_norm(x: Tensor, w_query: Tensor, w_key: Tensor, scale: float) -> float:
    """Returns ‖S‖₂ for S = scale · (Q Kᵀ − K Qᵀ), from its 2d_v nonzero eigenvalues."""
    m, m_j = stacked(x @ w_query, x @ w_key)
    return torch.linalg.eigvals(scale * m_j.mT @ m).abs().max().item()


def stacked(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Returns M = [Q, K] and M Jᵀ = [K, −Q], for which S = scale · M (M Jᵀ)ᵀ."""
    return torch.cat([query, key], -1), torch.cat([key, -query], -1)


def jacobian_norm(x: Tensor, weights: list[Tensor], scale: float, start: Tensor, iterations: int) -> float:
    """Computes ‖J₁‖₂ of one head by power iteration, at the tokens x, (N, d).

    J₁ is the derivative of A[X] X W^V W^O through A alone (Theorem 4.1).
    """
    w_query, w_key, w_value, w_out = weights
    value = x @ w_value

    def attend(x: Tensor) -> Tensor:
        m, m_j = stacked(x @ w_query, x @ w_key)
        z, y = scale * m_j.mT @ m, m_j.mT @ value
        block = torch.cat([torch.cat([z, y], 1), z.new_zeros(y.shape[1], z.shape[1] + y.shape[1])])
        phi_y = torch.linalg.matrix_exp(block)[: len(z), len(z) :]  # φ₁(Z) Y
        return (value + scale * m @ phi_y) @ w_out

    pushed, _ = power_iteration(attend, x, start, iterations + 1)
    return pushed.norm().item()


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    table, runs = tables["initial"], tables["runs"]
    slopes: dict = {}
    for case, own in table.groupby("case", sort=False):
        by_seed = [each for _, each in own.groupby("seed")]
        slopes[case] = {}
        for size in NORM_COLUMNS:
            slopes[case][size] = summary_of([log_log_slope(each["tokens"], each[size]) for each in by_seed])
    rows = {}
    for name, training in settings.runs.items():
        config = lab.config(training.variant, training.set)
        own = runs[(runs["name"] == name) & (runs["status"] == "finished")]
        options = config.options
        row = {"variant": training.variant, "tokens": options.num_tokens, "n": len(own)}
        row |= {"normalised": options.normalise_tokens, "alpha": options.alpha}
        row["accuracy"] = 100 * own["test_accuracy"].mean()
        rows[name] = row | {"seconds": (config.train.batch_size / own["images_per_second"]).mean()}
    return {"slopes": slopes, "rows": rows}


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    figure, panels = charts.panels(2, 3.2)
    sizes = tables["initial"].groupby(["case", "tokens"], sort=False)[list(NORM_COLUMNS)].mean()
    labels = {"paper": "the paper’s tokens", "normalised": "tokens ÷ RMS", "following": "tokens ÷ RMS, α ∝ 1/N"}
    for axes, (size, title) in zip(panels, {"skew": "‖S‖₂", "jacobian": "‖J₁‖₂"}.items(), strict=True):
        for case, colour in zip(CASES, charts.ramp(len(CASES)), strict=True):
            axes.plot(sizes.loc[case][size], marker="o", markersize=4, color=colour, label=labels[case])
        axes.set(title=title, xlabel="Tokens N")
        charts.logarithmic(axes, "x", "y")
        axes.set_xticks(sizes.loc["paper"].index, sizes.loc["paper"].index)
    charts.legend(figure, panels[0].get_lines())
    return figure


STUDY = comparison.study(settings=Settings, measure=measure, summarise=summarise, figures={"long_sequences": draw})
