"""Signals at initialisation: which models vanish, explode or collapse? Section 4 of He et al. 2023, and of the paper.

Every model at several depths before its first step: what becomes of the tokens from block to block, of what [cls] knows of
the image, and of the gradient on its way back. Then, for OSA shaped for depth, how small α has to be: a bound on the
Jacobian says that it has to fall as 1/(L ‖X‖₂²).
"""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated

import matplotlib
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field
from scipy.stats import gmean
from torch import Tensor

from osa.constrained.penalties import attention_matrix
from osa.deep.shaped import exponential_kernel, uniform_kernel
from osa.init import stiefel_uniform
from osa.vit import VisionTransformer
from pipeline.core.params import PositiveInt, Section, Seeds
from pipeline.lab import Lab, float64
from pipeline.measures import attention_inputs, effective_rank, norm
from pipeline.report import charts
from pipeline.report.looks import PALETTE, STYLE, look
from pipeline.report.numbers import number
from pipeline.statistics import summarise
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import largest, log_log_slope
from pipeline.studies._kernels import kernels_of, picture

place = 52
SHAPED = {  # OSA shaped for depth with one of its changes left out: what is replaced, and how that is called
    "per_head": ({"joint_value_output": False}, "V and O per head"),
    "gelu": ({"activation": "gelu"}, "GELU rescaled, not shaped"),
    "tokens": ({"normalise_tokens": False}, "tokens not normalised"),
    "alpha": ({"alpha_times_depth": None}, "α = 0.1"),
}
THIN = ((1, 1), (4, 1, 1, 1), (9, 2), (3, 3))  # dashes of OSA without one of its changes, in the order of SHAPED
FIRST = ("vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact", "osa_shaped")
REST = ("softmax_shaped", "softmax_shaped_norm", "vskipinit", "uspa", "espa", "uspa_causal", "espa_causal")
SKIPS = ("espa_skip", "softmax_skip", "softmax_skip_nonorm")
MODELS = (*FIRST, *SHAPED, *REST, *SKIPS)
DRAWN = ("vit", "vit_noskip_nonorm", "osa_exact", "osa_shaped", "alpha", "vskipinit", "espa")  # block by block
KEPT = {  # by attention alone and in float64: the variants, and what is kept
    "osa_shaped": "‖X‖_F",
    "vskipinit": "X Xᵀ",
    "uspa": "Σ_L",
    "espa": "Σ_L",
    "uspa_causal": "Σ_L",
    "espa_causal": "Σ_L",
}
BAND = (0.05, 0.95)  # quantiles over tokens
SINGULAR = 1 / torch.finfo(torch.float64).eps  # κ from which on float64 cannot tell a matrix from a singular one
EVERY = 2  # of the tokens, in the pictures
TOLERANCE = 1e-10  # of what is kept: tens of products of small matrices
RATIO = 2.0  # by which the attention may raise the first block's gradient
SMALLEST = 1e-3  # of α L ‖X‖₂²/√d_v, where the attention is as good as none


class Settings(Section):
    seeds: Seeds
    depths: Annotated[list[PositiveInt], Field(min_length=1)]
    images: PositiveInt = 8
    alpha_seeds: Seeds = Field([0, 1, 2], min_length=1)
    alpha_depths: Annotated[list[PositiveInt], Field(min_length=2)] = Field([6, 12, 24, 36], min_length=2)
    alpha_patches: Annotated[list[PositiveInt], Field(min_length=2)] = Field([14, 7, 4, 2], min_length=2)
    alpha_images: PositiveInt = 4


def measure(settings: Settings, lab: Lab) -> Tables:
    """Of each model and depth block by block, as a whole, and pictured; what the attention keeps; the α that doubles the
    gradient."""
    blocks, wholes, pictures = [], [], []
    for name, depth, seed in itertools.product(MODELS, settings.depths, settings.seeds):
        changes = {"model": {"depth": depth}} | ({"variant": SHAPED[name][0]} if name in SHAPED else {})
        config = lab.config("osa_shaped" if name in SHAPED else name, changes)
        images, labels = (part[: settings.images] for part in lab.images(config.data.pixel_scaling))
        with float64():
            model = lab.model(config, seed)
        identity = {"model": name, "depth": depth, "seed": seed}
        found, whole = signals(model, images, labels)
        blocks += [identity | row for row in found]
        wholes.append(identity | whole)
        if name in DRAWN and (depth, seed) == (pictured_depth(settings), settings.seeds[0]):
            kernels = kernels_along(model, images[:1])
            pictures += [picture(kernel, EVERY).assign(row=name, depth=block) for block, kernel in kernels.items()]
    return {
        "blocks": pd.DataFrame(blocks),
        "wholes": pd.DataFrame(wholes),
        "pictures": pd.concat(pictures),
        "kept": pd.DataFrame(kept(settings, lab)),
        "alphas": pd.DataFrame(alphas(settings, lab)),
    }


def signals(model: VisionTransformer, images: Tensor, labels: Tensor) -> tuple[list[dict[str, float]], dict[str, float]]:
    """A row for each block, and one for the whole model.

    q                mean square of an entry of the block's output; q_low and q_high, of its tokens', are `BAND`'s quantiles
    cosine, rank     mean cosine of two tokens, and effective rank of their cosines; means over images
    gradient         ‖∂loss/∂W‖₂ over the block's weight matrices; a bias has a gradient however small the tokens are
    image_share      of [cls]'s energy after the last block: the part that differs between images
    kappa            of A_L ⋯ A_1
    """
    model.zero_grad()
    x, outputs = model.tokens(images), []
    for block in model.blocks:
        x = block(x)  # (images, N, d)
        outputs.append(x.detach())
    loss = F.cross_entropy(model.head(model.norm(x[:, 0])), labels)
    loss.backward()
    rows = []
    for i, (block, output) in enumerate(zip(model.blocks, outputs, strict=True), 1):
        gradients = [p.grad.norm() for p in block.parameters() if p.ndim > 1 and p.grad is not None]
        gradient = torch.stack(gradients).norm().item()
        rows.append({"block": i} | of_tokens(output) | {"gradient": gradient})
    cls = outputs[-1][:, 0]  # (images, d)
    share = (cls - cls.mean(0)).square().sum() / cls.square().sum()
    return rows, {"loss": loss.item(), "image_share": share.item(), "kappa": attention_condition(model, images)}


def of_tokens(x: Tensor) -> dict[str, float]:
    """q, mean cosine and effective rank of (images, N, d)."""
    unit = F.normalize(x, dim=-1, eps=0)
    cosines = unit @ unit.mT  # (images, N, N)
    n = cosines.shape[-1]
    ranks = [effective_rank(values) for values in torch.linalg.eigvalsh(cosines).clamp(min=0)]
    mean = (cosines.sum((1, 2)) - n) / (n * n - n)
    squares = x.square().mean(-1)  # (images, N)
    low, high = squares.flatten().quantile(squares.new_tensor(BAND)).tolist()
    square = {"q": squares.mean().item(), "q_low": low, "q_high": high}
    return square | {"cosine": mean.mean().item(), "rank": float(np.mean(ranks))}


@torch.no_grad()
def attention_condition(model: VisionTransformer, images: Tensor) -> float:
    """κ(A_L ⋯ A_1) of a head's attention matrices, the geometric mean over heads and images; ∞ from `SINGULAR` on.

    With skips tokens do not come through this product alone: NaN.
    """
    if model.blocks[0].skip:
        return math.nan
    product = torch.eye(model.tokens(images).shape[1], dtype=images.dtype)
    for attention, x in attention_inputs(model, images):
        product = attention_matrix(attention, x) @ product  # (images, h, N, N)
    kappas = torch.linalg.cond(product)
    return kappas.where(kappas < SINGULAR, math.inf).log().mean().exp().item()


@torch.no_grad()
def kernels_along(model: VisionTransformer, image: Tensor) -> dict[int, Tensor]:
    """X Xᵀ/d of one image (1, C, H, W) after the first block, the middle one and the last."""
    x, kernels, depth = model.tokens(image), {}, len(model.blocks)
    for i, block in enumerate(model.blocks, 1):
        x = block(x)
        if i in (1, depth // 2, depth):
            (kernels[i],) = kernels_of(x)
    return kernels


# What the attention keeps


@torch.no_grad()
def kept(settings: Settings, lab: Lab) -> Iterator[dict]:
    """How far the attention layers of real models, by themselves, are from what their initialisation is made for.

    They start from tokens with X Xᵀ/d = I, for which d has to be N or more.
    """
    for variant, depth in itertools.product(KEPT, settings.depths[:2]):
        config = lab.config(variant)
        recipe, n = config.model, (config.data.image_size // config.model.patch_size) ** 2 + 1
        width = recipe.num_heads * math.ceil(n / recipe.num_heads)
        changes = {"variant": {"repeated": 0.0}} if "spa" in variant else {}
        config = lab.config(variant, changes | {"model": {"depth": depth, "embed_dim": width}})
        with float64():
            model = lab.model(config, settings.seeds[0])
        generator = lab.generator(settings.seeds[0], "signals/tokens")
        x = math.sqrt(width) * stiefel_uniform(width, n, generator=generator, dtype=torch.float64).mT[None]
        for block in model.blocks:
            x = block.attention(x)
        kernel = (x @ x.mT / width)[0]
        if variant == "osa_shaped":
            error = abs(kernel.trace().item() / n - 1)
        else:
            error = (kernel - wanted_kernel(config.variant, n)).abs().max().item()
        yield {"variant": variant, "depth": depth, "error": error}


def wanted_kernel(variant, n: int) -> Tensor:
    """Σ_L in the order of tokens, [cls] first."""
    if variant.kernel is None:
        return torch.eye(n, dtype=torch.float64)
    if variant.kernel == "uniform":
        return uniform_kernel(n, variant.kernel_last)
    cls = n - 1 if variant.causal else (n - 1) // 2
    order = [cls, *range(cls), *range(cls + 1, n)]
    return exponential_kernel(n, variant.kernel_last)[order][:, order]


# How small α has to be


def alphas(settings: Settings, lab: Lab) -> Iterator[dict]:
    """The α at which the first block's gradient is twice that of a small α, over depth, and over ‖X‖₂² by other patches."""
    sizes = [("depth", depth, None) for depth in settings.alpha_depths]
    sizes += [("patch", settings.alpha_depths[0], patch) for patch in settings.alpha_patches]
    for (over, depth, patch), seed in itertools.product(sizes, settings.alpha_seeds):
        changes = {"depth": depth} | ({"patch_size": patch} if patch else {})
        config = lab.config("osa_shaped", {"model": changes})
        with float64():
            model = lab.model(config, seed)
        images = lab.images(config.data.pixel_scaling)[0][: settings.alpha_images]
        with torch.no_grad():
            x = model.tokens(images)
        squared = norm(x).square().mean().item()
        cotangent = torch.randn(x.shape, generator=lab.generator(seed, "signals/alpha"), dtype=x.dtype)
        unit = math.sqrt(config.model.embed_dim / config.model.num_heads) / (depth * squared)  # of α, by the bound
        alpha = doubling_alpha(model, images, cotangent, unit)
        yield {"over": over, "depth": depth, "tokens": x.shape[1], "seed": seed, "norm_squared": squared} | {
            "alpha": alpha,
            "bound": 2 * alpha / unit,  # L times the bound on ‖J₁‖ of one head
        }


def doubling_alpha(model: VisionTransformer, images: Tensor, cotangent: Tensor, unit: float) -> float:
    """The least α of a ladder of halves and doubles at which the gradient has doubled, interpolated in logarithms."""
    base = first_gradient(model, images, cotangent, SMALLEST * unit)
    below, alpha = (0.0, SMALLEST * unit), unit
    while True:
        ratio = math.log(first_gradient(model, images, cotangent, alpha) / base)
        if not ratio < math.log(RATIO):  # which NaN is not either
            share = (math.log(RATIO) - below[0]) / (ratio - below[0])
            return math.exp(math.log(below[1]) + share * math.log(alpha / below[1]))
        below, alpha = (ratio, alpha), alpha * math.sqrt(2)


def first_gradient(model: VisionTransformer, images: Tensor, cotangent: Tensor, alpha: float) -> float:
    """‖∂⟨U, X_L⟩/∂θ‖₂ over the first block's value, output and MLP weights, for U = `cotangent` (images, N, d).

    Of a random linear function of all tokens: a loss would saturate, and has its own opinion of each image.
    """
    model.zero_grad()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.alpha.fill_(alpha)
    x = model.tokens(images)
    for block in model.blocks:
        x = block(x)
    (x * cotangent).sum().backward()
    first = model.blocks[0]
    layers = (first.attention.value, first.attention.out, first.mlp.fc1, first.mlp.fc2)
    return torch.stack([layer.weight.grad.norm() for layer in layers]).norm().item()


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    return [
        at_a_glance(settings, tables["blocks"], tables["wholes"], lab),
        through_the_blocks(settings, tables["blocks"], lab),
        pictured(settings, tables["pictures"], lab),
        what_is_kept(tables["kept"], lab),
        how_small_alpha(tables["alphas"]),
    ]


def label_of(model: str, lab: Lab) -> str:
    return f"{lab.label('osa_shaped')}, {SHAPED[model][1]}" if model in SHAPED else lab.label(model)


def line_of(model: str) -> dict:
    """The look of a model; of OSA without one of its changes its colour, thin, and dashes by what is left out."""
    if model in SHAPED:
        return look("osa_shaped").line(linewidth=1, linestyle=(0, THIN[list(SHAPED).index(model)]))
    return look(model).line(linewidth=1.3)


def pictured_depth(settings: Settings) -> int:
    return settings.depths[-2] if len(settings.depths) > 1 else settings.depths[-1]


def over_seeds(table: pd.DataFrame, logarithmic: tuple[str, ...] = ("q", "q_low", "q_high", "gradient")) -> pd.DataFrame:
    """Means over seeds by model, depth and block, geometric where a number spans orders of magnitude."""
    keys = [key for key in ("model", "depth", "block") if key in table]
    logs = {name: np.log(table[name]) for name in logarithmic if name in table}
    means = table.assign(**logs).drop(columns="seed").groupby(keys, sort=False).mean()
    return means.assign(**{name: np.exp(means[name]) for name in logs})


def ends(blocks: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The first block and the last of each model and depth."""
    means = over_seeds(blocks).reset_index("block")
    last = means.groupby(["model", "depth"], sort=False)["block"].transform("max")
    return means[means["block"] == 1], means[means["block"] == last]


def at_a_glance(settings: Settings, blocks: pd.DataFrame, wholes: pd.DataFrame, lab: Lab) -> Finding:
    (first, last), whole, deepest = ends(blocks), over_seeds(wholes), settings.depths[-1]
    measures, rows = [], []
    for model in MODELS:
        at = (model, deepest)
        gradients = [first.loc[(model, depth), "gradient"] for depth in settings.depths]
        note = f"last block {number(last.loc[at, 'gradient'])}; loss {number(whole.loc[at, 'loss'])}"
        what = f"{label_of(model, lab)}, {deepest} blocks: ‖∂loss/∂W₁‖₂"
        measures.append(Measure(what, gradients[-1], n=len(settings.seeds), note=note))
        share = round(whole.loc[at, "image_share"], 9)  # without what rounding leaves of 0
        state = [*last.loc[at, ["q", "q_low", "q_high", "cosine", "rank"]], share, whole.loc[at, "kappa"]]
        rows.append([label_of(model, lab), *map(number, (*gradients, *state))])
    columns = ["Model", *(f"‖∂W₁‖, {depth}" for depth in settings.depths), "q", *(f"q, {share:.0%}" for share in BAND)]
    columns += ["Mean cosine", "Effective rank", "Share of the image in [cls]", "κ(A_L ⋯ A_1)"]
    return Finding(
        id="signals",
        title="Who vanishes, explodes or collapses",
        place="He et al. 2023, Section 4; Section 4",
        kind=OBSERVATION,
        statement="Every model as initialised: the norm of the loss’s gradient over the first block’s weight matrices at "
        f"several depths, and, at {deepest} blocks, mean square q, mean cosine and effective rank of the tokens that leave "
        "the last one, the part of [cls] that differs between images, and the condition number κ of a head’s attention "
        "matrices multiplied.",
        measures=measures,
        in_short=f"With {deepest} blocks the gradient of the first one’s weights is "
        + "; ".join(
            f"{number(first.loc[(model, deepest), 'gradient'])} in {label_of(model, lab)}"
            for model in FIRST
            if (model, deepest) in first.index
        )
        + ".",
        table=Table(
            columns,
            rows,
            note="Biases are left out of the gradient, as theirs needs no tokens that come through. q: the "
            f"mean, and the range that holds {BAND[1] - BAND[0]:.0%} of the tokens. κ is the geometric mean "
            "over heads and images, ∞ where float64 cannot tell the product from a singular matrix; with skips tokens go "
            "past it.",
        ),
        figure=draw_glance(settings, first, last, lab),
        caption="A point for each depth, dark to light; of q with a line over most of the tokens. Triangles lie beyond the "
        "axis. Left of the first panel’s dashed line the gradient is smaller than AdamW’s ε.",
        remark="The four rows below OSA (shaped) each leave one of its changes out. In V-SkipInit [cls] sees no patch "
        "at first. In softmax without skips all tokens become one, with LN or without; with both, ViT’s have a mean "
        f"cosine of {number(last.loc[('vit', deepest), 'cosine'])}.",
    )


def through_the_blocks(settings: Settings, blocks: pd.DataFrame, lab: Lab) -> Finding:
    depth = pictured_depth(settings)
    own = over_seeds(blocks[blocks["depth"] == depth]).droplevel("depth")
    measures = []
    for model in DRAWN:
        gradient = own.loc[model]["gradient"]
        ratio = gradient.iloc[0] / gradient.iloc[-1]
        measures.append(Measure(f"{label_of(model, lab)}: ‖∂loss/∂W₁‖₂ over that of the last block", ratio))
    return Finding(
        id="signals_by_block",
        title=f"Block by block, {depth} of them",
        place="He et al. 2023, Section 4; Section 4",
        kind=OBSERVATION,
        statement="How the gradient grows or shrinks on its way back, the tokens’ mean square and their effective rank on "
        "their way forth. A ratio near 1 does not make a gradient large: a weight’s is the product of what comes forth and "
        "what comes back, and where both vanish alike, it is small in every block.",
        measures=measures,
        figure=draw_blocks(own, lab),
        caption=f"Models of {depth} blocks as initialised.",
    )


def pictured(settings: Settings, pictures: pd.DataFrame, lab: Lab) -> Finding:
    depth = pictured_depth(settings)
    last = pictures[pictures["depth"] == depth].set_index("row").drop(columns="depth")
    return Finding(
        id="signals_pictured",
        title="What real models make of an image’s tokens",
        place="He et al. 2023, Figure 15",
        kind=OBSERVATION,
        statement=f"Cosines of every second token of one test image with every other, in models of {depth} blocks as "
        "initialised. [cls] comes first, then the patches, row by row.",
        measures=[
            Measure(f"{label_of(model, lab)}: median cosine after {depth} blocks", float(np.median(last.loc[model])))
            for model in DRAWN
        ],
        figure=charts.pictures(pictures, {model: label_of(model, lab) for model in DRAWN}),
        caption="Black is a cosine of 1, white 0 or less. Blank patches differ by their positions alone.",
    )


def what_is_kept(table: pd.DataFrame, lab: Lab) -> Finding:
    measures = [
        largest(f"{lab.label(variant)}: change of {KEPT[variant]}", own["error"], TOLERANCE)
        for variant, own in table.groupby("variant", sort=False)
    ]
    return Finding(
        id="attention_as_initialised",
        title="Attention starts as it is meant to",
        place="He et al. 2023, Eq. 6 to 9; Theorem 2.2",
        kind=CHECK,
        statement="The attention layers of each model, by themselves, take tokens with X Xᵀ/d = I to the kernel of the "
        "schedule’s last block. V-SkipInit leaves them as they are, and OSA with V and O drawn jointly keeps ‖X‖_F",
        rule=f"In float64, at {' and '.join(map(str, table['depth'].unique()))} blocks: every entry of X_L X_Lᵀ/d, or for "
        f"OSA the trace, is right to {TOLERANCE:g}.",
        measures=measures,
        remark="It takes W^V W^O of the layer as a whole to be orthogonal, which draws per head are not.",
    )


def how_small_alpha(table: pd.DataFrame) -> Finding:
    measures = []
    for over, column, what in (("depth", "depth", "L"), ("patch", "norm_squared", "‖X‖₂²")):
        own = table[table["over"] == over]
        slope = summarise([log_log_slope(rows[column], rows["alpha"]) for _, rows in own.groupby("seed")])
        text = f"Slope of log α over log {what}"
        measures.append(Measure(text, slope.mean, low=slope.low, high=slope.high, n=slope.n, note="−1 by the bound"))
    networks = table.drop_duplicates(["depth", "tokens", "seed"])  # both sweeps have one of them
    bound = networks["bound"]
    note = f"geometric mean of {len(bound)} networks, from {number(bound.min())} to {number(bound.max())}"
    measures.append(Measure("2 L ‖X‖₂² α/√d_v where the gradient has doubled", gmean(bound), note=note))
    columns = ["norm_squared", "alpha", "bound"]
    rows = [
        [*map(str, size), *(number(gmean(own[column])) for column in columns)]
        for size, own in networks.groupby(["depth", "tokens"])
    ]
    return Finding(
        id="alpha_with_depth",
        title="How small α has to be",
        place="Section 4; Theorem 4.3",
        kind=OBSERVATION,
        statement="‖J₁‖ ≤ 2 ‖X‖₂² α/√d_v adds up over L blocks, so that α should fall as 1/(L ‖X‖₂²). In OSA shaped for "
        "depth: the α at which attention has doubled the first block’s gradient, of a random linear function of the last "
        "block’s tokens, over depth, and over ‖X‖₂² by way of the number of tokens.",
        measures=measures,
        table=Table(["Blocks", "Tokens", "‖X‖₂²", "α", "2 L ‖X‖₂² α/√d_v"], rows, align="rrrrr"),
        figure=draw_alphas(table),
        caption="A point for each network; dashed, α in proportion to 1/L and 1/‖X‖₂².",
        in_short="By the bound log α has the slope −1. Over log L it has "
        f"{with_interval(measures[0])}{included(measures[0])}; over log ‖X‖₂² "
        f"{with_interval(measures[1])}{included(measures[1])}.",
        remark="The norms of J₁ do not all add up: the gradient doubles at an α that is "
        f"{number(bound.min() / math.log(RATIO))} to {number(bound.max() / math.log(RATIO))} times that at which the bound "
        "first allows for it. The bound is that of one head. Over ‖X‖₂² the number of tokens varies too.",
    )


def included(measure: Measure) -> str:
    """Whether the interval of a slope has the bound's −1; nothing of one seed, which has none."""
    if math.isnan(measure.low):
        return ""
    return ", an interval with −1" if measure.low <= -1 <= measure.high else ", an interval without −1"


def with_interval(measure: Measure) -> str:
    """e.g. −0.785 (−1.14 to −0.433); without an interval where there is none."""
    interval = "" if math.isnan(measure.low) else f" ({number(measure.low)} to {number(measure.high)})"
    return f"{number(measure.value)}{interval}"


# Figures


@matplotlib.rc_context(STYLE)
def draw_glance(settings: Settings, first: pd.DataFrame, last: pd.DataFrame, lab: Lab) -> Figure:
    """Rows of models, a point for each depth."""
    figure = Figure(figsize=(7.2, 6.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    drawn = (
        (first, "gradient", "‖∂loss/∂W₁‖₂", "vanishes ← → explodes", (1e-12, 1e9)),
        (last, "q", "Mean square q", "vanishes ← → explodes", (1e-12, 1e9)),
        (last, "rank", "Effective rank", "collapses ←", None),
    )
    colours = dict(zip(settings.depths, charts.ramp(len(settings.depths)), strict=True))
    for axes, (values, column, title, meaning, limits) in zip(panels, drawn, strict=True):
        for (y, model), (depth, colour) in itertools.product(enumerate(MODELS), colours.items()):
            row = values.loc[model, depth]
            draw_point(axes, row[column], y, colour, limits)
            if column == "q":
                axes.plot(np.clip(row[["q_low", "q_high"]], *limits), (y, y), color=colour, linewidth=0.8)
        axes.set(title=title, xlabel=meaning)
        if limits:
            charts.logarithmic(axes, "x", numticks=4)
            axes.set_xlim(limits[0] / 10, limits[1] * 10)
    panels[0].axvline(lab.paper.recipe.train.eps, **charts.EXPECTED)
    panels[2].set_xlim(0, None)
    panels[0].set_yticks(range(len(MODELS)), [label_of(model, lab) for model in MODELS])
    panels[0].invert_yaxis()
    style = {"linestyle": "", "marker": "o", "markersize": 4}
    handles = [Line2D([], [], color=colour, label=f"{depth} blocks", **style) for depth, colour in colours.items()]
    charts.legend(figure, handles, columns=len(handles))
    return figure


def draw_point(axes: Axes, value: float, y: int, colour, limits: tuple[float, float] | None) -> None:
    marker = "o" if limits is None or limits[0] <= value <= limits[1] else "<" if value < limits[0] else ">"
    axes.plot(np.clip(value, *limits) if limits else value, y, marker=marker, color=colour, markersize=5, linestyle="")


@matplotlib.rc_context(STYLE)
def draw_blocks(table: pd.DataFrame, lab: Lab) -> Figure:
    figure, panels = charts.panels(3, 3.8)
    columns = {"gradient": "‖∂loss/∂W_l‖₂", "q": "q", "rank": "Effective rank"}
    for axes, (column, title) in zip(panels, columns.items(), strict=True):
        for model in DRAWN:
            axes.plot(table.loc[model][column], **line_of(model))
        axes.set(title=title, xlabel="Block")
    charts.logarithmic(panels[0], "y")
    charts.logarithmic(panels[1], "y")
    panels[2].set_ylim(0, None)
    charts.legend(figure, [Line2D([], [], label=label_of(model, lab), **line_of(model)) for model in DRAWN])
    return figure


@matplotlib.rc_context(STYLE)
def draw_alphas(table: pd.DataFrame) -> Figure:
    figure, panels = charts.panels(2, 3.3, sharey=True)
    sides = (("depth", "depth", "Blocks L"), ("patch", "norm_squared", "‖X‖₂²"))
    for axes, (over, column, title) in zip(panels, sides, strict=True):
        own = table[table["over"] == over]
        axes.plot(own[column], own["alpha"], color=PALETTE[0], marker="o", markersize=4, linestyle="")
        x = np.array([own[column].min(), own[column].max()])
        axes.plot(x, gmean(own[column] * own["alpha"]) / x, **charts.EXPECTED)
        axes.set(xlabel=title, xscale="log", yscale="log")
        axes.yaxis.set_minor_formatter("")
    ticks = sorted(table[table["over"] == "depth"]["depth"].unique())
    panels[0].set_xticks(ticks, ticks)
    panels[0].set_xticks([], minor=True)
    panels[0].set_ylabel("α that doubles the gradient")
    return figure
