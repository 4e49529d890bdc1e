"""Signals at initialisation: in which models do they vanish, explode or collapse? (Section 4 of He et al. 2023,
and Section 4 of the paper on OSA.)

For every model at several depths, before the first training step, we measure how the tokens and the gradient change from
block to block, and how much of [cls] depends on the image. For `osa_shaped`, we also search for the α that doubles the first
block's gradient. A bound on the Jacobian suggests that this α is proportional to 1/(L ‖X‖₂²).
"""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field
from torch import Tensor, nn

from osa.constrained.penalties import attention_matrix
from osa.init import stiefel_uniform
from osa.modules import OrthogonalSelfAttention
from osa.shaped.schedules import exponential_kernel, uniform_kernel
from osa.vit import VisionTransformer
from pipeline.config.looks import look_of
from pipeline.config.params import Overrides, PositiveInt, Section, Seeds
from pipeline.results.measures import attention_inputs, blocks_of, effective_rank, gradient_norm, mean_cosine, norm
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Study, Tables, charts, check
from pipeline.studies._summaries import log_log_slope
from pipeline.studies.lab import Lab

SHAPED: dict[str, dict[str, Any]] = {  # name of a model → the setting by which it differs from `osa_shaped`
    "per_head": {"joint_value_output": False},
    "gelu": {"activation": "gelu"},
    "tokens": {"normalise_tokens": False},
    "alpha": {"alpha_times_depth": None},
}
BASIC = ("vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact", "osa_shaped")
REST = ("softmax_shaped", "softmax_shaped_norm", "vskipinit", "uspa", "espa", "uspa_causal", "espa_causal")
SKIPS = ("espa_skip", "softmax_skip", "softmax_skip_nonorm")
MODELS = (*BASIC, *SHAPED, *REST, *SKIPS)
DRAWN = ("vit", "vit_noskip_nonorm", "osa_exact", "osa_shaped", "vskipinit", "espa")
# The attention of these models preserves ‖X‖_F or X Xᵀ, or turns X Xᵀ/d into a given kernel Σ_L.
PRESERVING = ("osa_shaped", "vskipinit", "uspa", "espa", "uspa_causal", "espa_causal")
BAND = (0.05, 0.95)  # quantiles of the tokens' mean squares
SINGULAR = 1 / torch.finfo(torch.float64).eps  # a matrix counts as singular in float64 if its κ is at least this
TOLERANCE = 1e-10  # maximum error after tens of products of small matrices
GRADIENT_RATIO = 2.0  # at the α we search for, the first block's gradient is this many times its value at a very small α
LEAST_ALPHA = 1e-3  # value of α L ‖X‖₂²/√d_v at which attention has practically no effect


class Settings(Section):
    seeds: Seeds
    depths: Annotated[list[PositiveInt], Field(min_length=1)]
    images: PositiveInt = 8
    alpha_seeds: Seeds = Field([0, 1, 2], min_length=1)
    alpha_depths: Annotated[list[PositiveInt], Field(min_length=2)] = Field([6, 12, 24, 36], min_length=2)
    alpha_patches: Annotated[list[PositiveInt], Field(min_length=2)] = Field([14, 7, 4, 2], min_length=2)
    alpha_images: PositiveInt = 4


def measure(settings: Settings, lab: Lab) -> Tables:
    blocks, wholes = [], []
    for name, depth, seed in itertools.product(MODELS, settings.depths, settings.seeds):
        changes: Overrides = {"model": {"depth": depth}, "variant": SHAPED.get(name, {})}
        config = lab.config("osa_shaped" if name in SHAPED else name, changes)
        images, labels = (part[: settings.images] for part in lab.images(config.data.pixel_scaling))
        model = lab.model(config, seed, torch.float64)
        identity = {"model": name, "depth": depth, "seed": seed}
        rows, whole = signals(model, images, labels)
        blocks += [identity | row for row in rows]
        wholes.append(identity | whole)
    return {
        "blocks": pd.DataFrame(blocks),
        "wholes": pd.DataFrame(wholes),
        "kept": pd.DataFrame(kept(settings, lab)),
        "alphas": pd.DataFrame(alphas(settings, lab)),
    }


def signals(model: VisionTransformer, images: Tensor, labels: Tensor) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Measures a model's tokens and gradients. Returns a row for each block, and a row for the whole model.

    The row of a block has the keys of `of_tokens` and

    gradient      ‖∂loss/∂W‖₂ over the block's weight matrices only: a bias has a gradient even if all tokens vanish

    The row of the model has the keys

    loss          cross-entropy
    image_share   Σ |x − x̄|² / Σ |x|² over images, where x is [cls] after the last block and x̄ its mean
    kappa         κ(A_L ⋯ A_1), from `attention_condition`
    """
    model.zero_grad()
    x, outputs = model.tokens(images), []
    for block in model.blocks:
        x = block(x)  # (images, N, d)
        outputs.append(x.detach())
    loss = F.cross_entropy(model.head(model.norm(x[:, 0])), labels)
    loss.backward()
    rows = [
        {"block": i} | of_tokens(output) | {"gradient": gradient_norm(block, least_dimensions=2)}
        for i, (block, output) in enumerate(zip(model.blocks, outputs, strict=True), 1)
    ]
    cls = outputs[-1][:, 0]  # (images, d)
    share = (cls - cls.mean(0)).square().sum() / cls.square().sum()
    return rows, {"loss": loss.item(), "image_share": share.item(), "kappa": attention_condition(model, images)}


def of_tokens(x: Tensor) -> dict[str, float]:
    """Returns numbers that describe tokens x, (images, N, d).

    q               mean square of all tokens
    q_low, q_high   the quantiles `BAND` of the tokens' mean squares
    cosine          mean cosine of two tokens of an image
    rank            effective rank of the matrix of cosines, as a mean over images
    """
    unit = F.normalize(x, dim=-1, eps=0)
    cosines = unit @ unit.mT  # (images, N, N)
    ranks = [effective_rank(values) for values in torch.linalg.eigvalsh(cosines).clamp(min=0)]
    squares = x.square().mean(-1)  # (images, N)
    low, high = squares.flatten().quantile(squares.new_tensor(BAND)).tolist()
    square = {"q": squares.mean().item(), "q_low": low, "q_high": high}
    return square | {"cosine": mean_cosine(cosines).mean().item(), "rank": float(np.mean(ranks))}


@torch.no_grad()
def attention_condition(model: VisionTransformer, images: Tensor) -> float:
    """Returns κ(A_L ⋯ A_1) of the attention matrices, as a geometric mean over heads and images.

    A κ of at least `SINGULAR` counts as ∞. The result is NaN for a model with skips, since tokens bypass its attention.
    """
    if model.blocks[0].skip:
        return math.nan
    product = torch.eye(model.tokens(images).shape[1], dtype=images.dtype)
    for attention, x in attention_inputs(model, images):
        product = attention_matrix(attention, x) @ product  # (images, h, N, N)
    kappas = torch.linalg.cond(product)
    return kappas.where(kappas < SINGULAR, math.inf).log().mean().exp().item()


# Kernels X Xᵀ/d of the tokens after the last attention layer


@torch.no_grad()
def kept(settings: Settings, lab: Lab) -> Iterator[dict]:
    """Applies each model's attention layers without its MLPs. Yields the error of Σ_L, the kernel after the last layer.

    The tokens start with X Xᵀ/d = I. This needs d ≥ N, so we set d to the smallest multiple of h that is at least N. For
    `osa_shaped`, which preserves only ‖X‖_F, the error is the relative error of tr Σ_L.
    """
    for variant, depth in itertools.product(PRESERVING, settings.depths[:2]):
        config = lab.config(variant)
        n, heads = config.options.num_tokens, config.model.num_heads
        width = heads * math.ceil(n / heads)
        changes = {"variant": {"repeated": 0.0}} if "spa" in variant else {}
        config = lab.config(variant, changes | {"model": {"depth": depth, "embed_dim": width}})
        model = lab.model(config, settings.seeds[0], torch.float64)
        generator = lab.generator(settings.seeds[0], "signals/tokens")
        x = math.sqrt(width) * stiefel_uniform(width, n, generator=generator, dtype=torch.float64).mT[None]
        for _, attention, _ in blocks_of(model):
            x = attention(x)
        kernel = (x @ x.mT / width)[0]
        if variant == "osa_shaped":
            error = abs(kernel.trace().item() / n - 1)
        else:
            error = (kernel - wanted_kernel(config.variant, n)).abs().max().item()
        yield {"variant": variant, "depth": depth, "error": error}


def wanted_kernel(variant, n: int) -> Tensor:
    """Returns the target Σ_L of a variant, with [cls] as the first token."""
    if variant.kernel is None:
        return torch.eye(n, dtype=torch.float64)
    if variant.kernel == "uniform":
        return uniform_kernel(n, variant.kernel_last)
    cls = n - 1 if variant.causal else (n - 1) // 2
    order = [cls, *range(cls), *range(cls + 1, n)]
    return exponential_kernel(n, variant.kernel_last)[order][:, order]


# Size of α


def alphas(settings: Settings, lab: Lab) -> Iterator[dict]:
    """Yields the α from `doubling_alpha` for each depth and each patch size. We vary the patch size to change ‖X‖₂²."""
    sizes: list[tuple[str, int, int | None]] = [("depth", depth, None) for depth in settings.alpha_depths]
    sizes += [("patch", settings.alpha_depths[0], patch) for patch in settings.alpha_patches]
    for (over, depth, patch), seed in itertools.product(sizes, settings.alpha_seeds):
        changes = {"depth": depth} | ({"patch_size": patch} if patch else {})
        config = lab.config("osa_shaped", {"model": changes})
        model = lab.model(config, seed, torch.float64)
        images = lab.images(config.data.pixel_scaling)[0][: settings.alpha_images]
        with torch.no_grad():
            x = model.tokens(images)
        squared = norm(x).square().mean().item()
        cotangent = torch.randn(x.shape, generator=lab.generator(seed, "signals/alpha"), dtype=x.dtype)
        unit = math.sqrt(config.model.embed_dim / config.model.num_heads) / (depth * squared)  # α with α L ‖X‖₂²/√d_v = 1
        alpha = doubling_alpha(model, images, cotangent, unit)
        row = {"over": over, "depth": depth, "tokens": x.shape[1], "seed": seed, "norm_squared": squared, "alpha": alpha}
        yield row | {"bound": 2 * alpha / unit}  # L times the upper bound on ‖J₁‖₂ of one head


def doubling_alpha(model: VisionTransformer, images: Tensor, cotangent: Tensor, unit: float) -> float:
    """Returns the minimum α at which the gradient is twice as large as at a very small α.

    We raise α by factors of √2 until the gradient has doubled. Then we interpolate between the last two values of α,
    linearly in the logarithms of α and of the gradient.
    """
    base = first_gradient(model, images, cotangent, LEAST_ALPHA * unit)
    below, alpha = (0.0, LEAST_ALPHA * unit), unit
    while True:
        ratio = math.log(first_gradient(model, images, cotangent, alpha) / base)
        if not ratio < math.log(GRADIENT_RATIO):  # unlike ratio >= …, this is also true if the ratio is NaN
            share = (math.log(GRADIENT_RATIO) - below[0]) / (ratio - below[0])
            return math.exp(math.log(below[1]) + share * math.log(alpha / below[1]))
        below, alpha = (ratio, alpha), alpha * math.sqrt(2)


def first_gradient(model: VisionTransformer, images: Tensor, cotangent: Tensor, alpha: float) -> float:
    """Returns ‖∂⟨U, X_L⟩/∂θ‖₂ over the first block's value, output and MLP weights, where U is `cotangent`, (images, N, d).

    ⟨U, X_L⟩ is linear in the last block's output X_L. Unlike a loss, it never saturates, and all images have equal weight.
    """
    model.zero_grad()
    blocks = blocks_of(model)
    with torch.no_grad():
        for _, attention, _ in blocks:
            assert isinstance(attention, OrthogonalSelfAttention)
            attention.alpha.fill_(alpha)
    (nn.Sequential(*model.blocks)(model.tokens(images)) * cotangent).sum().backward()
    _, attention, mlp = blocks[0]
    return gradient_norm(nn.ModuleList([attention.value, attention.out, mlp.fc1, mlp.fc2]), least_dimensions=2)


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    blocks, wholes, deepest = over_seeds(tables["blocks"]), over_seeds(tables["wholes"]), settings.depths[-1]
    models = []
    for name in blocks.index.unique("model"):
        last = blocks.loc[(name, deepest, deepest)]
        whole = wholes.loc[(name, deepest)]
        gradients = [blocks.loc[(name, depth, 1), "gradient"] for depth in settings.depths]
        row = {"model": name, "gradients": gradients, "image_share": round(whole["image_share"], 9), "kappa": whole["kappa"]}
        models.append(row | last[["q", "q_low", "q_high", "cosine", "rank"]].to_dict())
    kept = tables["kept"].groupby("variant", sort=False)["error"].max()
    return {
        "depths": settings.depths,
        "models": models,
        "kept": {variant: check(error, TOLERANCE) for variant, error in kept.items()},
        "alpha": of_alpha(tables["alphas"]),
    }


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Returns means over seeds: geometric means of columns that span orders of magnitude, arithmetic means of all others."""
    keys = [key for key in ("model", "depth", "block") if key in table]
    logs = {name: np.log(table[name]) for name in ("q", "q_low", "q_high", "gradient") if name in table}
    means = table.assign(**logs).drop(columns="seed").groupby(keys, sort=False).mean()
    return means.assign(**{name: np.exp(means[name]) for name in logs})


def of_alpha(table: pd.DataFrame) -> dict:
    """Returns statistics of the α at which the gradient is twice as large as at a very small α.

    slopes                  the exponent a of α ∝ Lᵃ over depths, and the exponent b of α ∝ (‖X‖₂²)ᵇ over patch sizes
    bound_low, bound_high   minimum and maximum of 2 L ‖X‖₂² α/√d_v
    """
    slopes = {}
    for over, column in (("depth", "depth"), ("patch", "norm_squared")):
        own = table[table["over"] == over]
        slopes[over] = summary_of([log_log_slope(rows[column], rows["alpha"]) for _, rows in own.groupby("seed")])
    bound = table.drop_duplicates(["depth", "tokens", "seed"])["bound"]  # the two sweeps have one network per seed in common
    return {"slopes": slopes, "bound_low": bound.min(), "bound_high": bound.max(), "log_ratio": math.log(GRADIENT_RATIO)}


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    depth = settings.depths[-2:][0]
    own = over_seeds(tables["blocks"][tables["blocks"]["depth"] == depth]).droplevel("depth")
    figure, panels = charts.panels(3, 3.6)
    columns = {"gradient": "‖∂loss/∂W_l‖₂", "q": "Mean square q", "rank": "Effective rank"}
    for axes, (column, title) in zip(panels, columns.items(), strict=True):
        for model in DRAWN:
            axes.plot(own.loc[model][column], **look_of(model).line(linewidth=1.3))
        axes.set(title=title, xlabel="Block")
    charts.logarithmic(panels[0], "y")
    charts.logarithmic(panels[1], "y")
    panels[2].set_ylim(0, None)
    charts.legend(figure, [Line2D([], [], label=lab.label(model), **look_of(model).line(linewidth=1.3)) for model in DRAWN])
    return figure


STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"signals": draw})
