"""Theorem 2.2: Σ_l = X_l X_lᵀ = A Σ₀ Aᵀ with A ∈ SO(N), so every depth keeps the rank and eigenvalues of Σ₀.

We stack layers with one head and an orthogonal W^V W^O, without MLP, skip or norm. The methods "qr" and "exact" must keep
the spectrum up to rounding. How do Newton–Schulz, softmax, and softmax with a skip change the spectrum?
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from pydantic import Field, model_validator
from torch import Tensor

from osa.functional import orthogonal_attention
from osa.init import stiefel_uniform
from osa.options import Method
from pipeline.config.params import PositiveFloat, Section, Seeds
from pipeline.results.measures import METHODS, ORTHOGONAL, effective_rank
from pipeline.studies import Study, Tables, charts
from pipeline.studies._summaries import worst_case
from pipeline.studies.lab import Lab

ORTHOGONAL_METHODS = ("qr", "exact")  # methods whose A is orthogonal up to rounding
SOFTMAX_STACKS = ("softmax", "softmax, skip")  # stacks for comparison
# Maximum relative change of an eigenvalue. Rounding alone gives a change of about 64 · eps · cond(X) = 1.4e-11, for 64
# layers and cond(X) ≈ 1,000.
TOLERANCE = 1e-10


class Settings(Section):
    seeds: Seeds
    depths: list[Annotated[int, Field(ge=0)]] = Field(min_length=2)
    alphas: list[PositiveFloat] = Field([0.1, 1], min_length=1)  # the paper's initial α, and an α for which A is far from I

    @model_validator(mode="after")
    def _depths_rise(self):
        if self.depths[0] != 0 or self.depths != sorted(set(self.depths)):
            raise ValueError(f"depths must start at 0 and be in increasing order without repeats, not {self.depths}")
        return self


def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures the spectrum of Σ_l for each input, stack and seed. Lists eigenvalues for the first seed's MNIST input."""
    summary, spectra = [], []
    for seed in settings.seeds:
        image = _image_tokens(lab, seed)  # (N, d)
        width = image.shape[1]
        weights = _weights(settings, lab, seed, width)
        attentions = {
            stack: partial(orthogonal_attention, scale=alpha / math.sqrt(width), method=method)
            for stack, (method, alpha) in orthogonal_stacks(settings).items()
        } | dict.fromkeys(SOFTMAX_STACKS, F.scaled_dot_product_attention)
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
    """Returns the input of an untrained model's first block for one test image, (N, d), float64."""
    config = lab.config(ORTHOGONAL[0])
    images, _ = lab.images(config.data.pixel_scaling)
    return lab.model(config, seed).double().tokens(images[seed % len(images)][None])[0]


def orthogonal_stacks(settings: Settings) -> dict[str, tuple[Method, float]]:
    """Returns the method and the α of each stack of orthogonal attention, by the stack's name."""
    return {f"{method}, alpha {alpha:g}": (method, alpha) for alpha, method in itertools.product(settings.alphas, METHODS)}


def _weights(settings: Settings, lab: Lab, seed: int, width: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns orthogonal W^Q, W^K and W = W^V W^O for each layer, each (d, d). All stacks with this seed use them."""
    generator, weights = lab.generator(seed, "theory/stack"), []
    for _ in range(settings.depths[-1]):
        query, key, value, out = (stiefel_uniform(width, width, generator=generator, dtype=torch.float64) for _ in range(4))
        weights.append((query, key, value @ out))
    return weights


def attention_stack(
    x: Tensor, weights: list[tuple[Tensor, Tensor, Tensor]], attention: Callable[..., Tensor], skip: bool
) -> Iterator[Tensor]:
    """Yields X₀ = x, and then X_l = attention(X W^Q_l, X W^K_l, X W_l) for each layer l, with X = X_{l−1}. Each is (N, d).

    If `skip` is true, X is added to each X_l. `weights` holds W^Q, W^K and W = W^V W^O of each layer, each (d, d).
    """
    yield x
    for w_query, w_key, w_value in weights:
        y = attention(x @ w_query, x @ w_key, x @ w_value)  # (N, d)
        x = x + y if skip else y
        yield x


def kernel_eigenvalues(x: Tensor) -> Tensor:
    """Returns the min(N, d) largest eigenvalues of Σ = X Xᵀ, in descending order, for X (N, d).

    We square the singular values of X, since an eigendecomposition of X Xᵀ would lose eigenvalues below eps · λ₁.
    """
    return torch.linalg.svdvals(x).square()


def _spectrum_summary(values: Tensor, first: Tensor) -> dict[str, float]:
    """Returns effective rank, λ₁/Σλ, Σλ, and the largest relative change of an eigenvalue since depth 0."""
    kept = first > len(first) * torch.finfo(first.dtype).eps ** 2 * first[0]  # drops eigenvalues that may be rounding errors
    return {
        "effective_rank": effective_rank(values),
        "largest_share": (values[0] / values.sum()).item(),
        "trace": values.sum().item(),
        "change": (values[kept] / first[kept] - 1).abs().max().item(),
    }


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Returns the largest change of an eigenvalue for "qr" and "exact", and, on image tokens, for Newton–Schulz at each α.

    Also returns the mean effective rank of the image tokens: at depth 0, and after all layers of each softmax stack.
    """
    summary = tables["summary"].assign(method=tables["summary"]["stack"].str.split(",").str[0])
    images = summary[summary["tokens"] == "mnist"]
    newton_schulz = []
    for stack, (method, alpha) in orthogonal_stacks(settings).items():
        if method == "newton_schulz":
            newton_schulz.append({"alpha": alpha, "change": images.loc[images["stack"] == stack, "change"].max()})
    ranks = images[images["depth"] == settings.depths[-1]].groupby("stack")["effective_rank"].mean()
    return {
        "float64": worst_case(summary.loc[summary["method"].isin(ORTHOGONAL_METHODS), "change"], TOLERANCE),
        "newton_schulz": newton_schulz,
        "layers": settings.depths[-1],
        "rank": {
            "first": images.loc[images["depth"] == 0, "effective_rank"].mean(),
            "softmax": ranks["softmax"],
            "softmax_skip": ranks["softmax, skip"],
        },
    }


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    """Draws each eigenvalue of Σ_l against depth l, for one image. Panels: orthogonal, softmax with a skip, softmax."""
    floor, deepest, spectra = 1e-16, settings.depths[-1], tables["spectra"]
    stacks = {
        list(orthogonal_stacks(settings))[-1]: "Orthogonal attention",
        "softmax, skip": "Softmax with skips",
        "softmax": "Softmax",
    }
    ticks = [0, *(4**k for k in range(deepest.bit_length()) if 4**k <= deepest)]
    figure, panels = charts.panels(3, 2.1, sharey=True)
    for axes, (stack, title) in zip(panels, stacks.items(), strict=True):
        wide = spectra[spectra["stack"] == stack].pivot(index="depth", columns="index", values="eigenvalue")
        relative = wide.div(wide[1], axis=0)
        # Each line ends at its first point below the lower limit of the y-axis.
        relative = relative.where(relative.shift(fill_value=1) > floor).clip(lower=floor / 1e3)
        for (i, line), colour in zip(relative.items(), charts.ramp(wide.shape[1]), strict=True):
            axes.plot(line, color=colour, linewidth=0.9, solid_capstyle="round", zorder=100 - i)
        charts.logarithmic(axes, "y", numticks=4)
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks(ticks, ticks)
        axes.set_xticks([], minor=True)
        axes.set(title=title, xlabel="Layers", xlim=(0, deepest), ylim=(floor, 3))
    panels[0].set_ylabel("Eigenvalue / largest")
    return figure


STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"theorem_2_2": draw})
