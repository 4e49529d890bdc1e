"""Trainability: does OSA let Transformers without skips and normalisation be trained more easily?

Networks of several depths as initialised, with neither skips nor normalisation: each attention, OSA's two and softmax, with
each initialisation of the MLPs, SUO (the paper's for OSA) and Xavier (its for the ViTs), so that what the attention does is
told from what the MLPs do. ViTs with normalisation are measured beside them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated

import matplotlib
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import AfterValidator
from torch import Generator, Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from osa.vit import VisionTransformer
from pipeline.core.params import PositiveInt, Section, Seeds
from pipeline.lab import Lab, float64
from pipeline.measures import condition, jacobian
from pipeline.report import charts
from pipeline.report.looks import STYLE, look
from pipeline.report.numbers import number, span
from pipeline.statistics import CONFIDENCE, half_width
from pipeline.studies import CLAIM, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies.paper.section_5 import judge_means

place = 48
OSA, SOFTMAX = ("osa_qr", "osa_ns"), "vit_noskip_nonorm"  # without skips and normalisation
MLPS = {"osa": "SUO", "xavier": "Xavier"}  # the values of a variant's key `init`
MODELS = [*itertools.product((*OSA, SOFTMAX), MLPS), ("vit", "xavier"), ("vit_noskip", "xavier")]
MODEL = ["variant", "mlp"]
FAMILY = 2 * len(OSA) * len(MLPS)  # measures of the claim: gain and condition

Samples = dict[tuple, np.ndarray]  # by model, logarithms, one for each seed


def _rising(depths: list[int]) -> list[int]:
    if len(depths) < 2 or depths != sorted(set(depths)):
        raise ValueError("should be two or more that rise")
    return depths


class Settings(Section):
    seeds: Seeds
    depths: Annotated[list[PositiveInt], AfterValidator(_rising)]
    gradient_images: PositiveInt = 16  # test images of the loss whose gradient is measured
    samples: PositiveInt = 8  # of Hutchinson's estimate of a Frobenius norm, which is then good to a few per cent
    power_iterations: PositiveInt = 10  # enough where the largest singular value stands out, as it does in deep products


def measure(settings: Settings, lab: Lab) -> Tables:
    """Of each model, depth and seed: what reaches the tokens from the logits and the loss, and through the attention alone.

    One test image a seed for the Jacobians, several for the loss.
    """
    networks, attentions = [], []
    for (variant, mlp), depth, seed in itertools.product(MODELS, settings.depths, settings.seeds):
        config = lab.config(variant, {"model": {"depth": depth}, "variant": {"init": mlp}})
        images, labels = lab.images(config.data.pixel_scaling)
        few = torch.arange(seed * settings.gradient_images, (seed + 1) * settings.gradient_images) % len(images)
        with float64():
            model = lab.model(config, seed)
        x = model.tokens(images[few[:1]])[0].detach()
        identity = {"variant": variant, "mlp": mlp, "depth": depth, "seed": seed}
        networks.append(identity | logits_jacobian(model, x) | gradient_norms(model, images[few], labels[few]))
        if mlp == lab.config(variant).variant.init:  # the MLPs play no part here
            generator = lab.generator(seed, f"theory/depth/{variant}/{depth}")
            identity = {"variant": variant, "depth": depth, "seed": seed}
            attentions.append(identity | attention_jacobian(model, x, settings, generator))
    return {"networks": pd.DataFrame(networks), "attentions": pd.DataFrame(attentions)}


def logits_jacobian(model: VisionTransformer, x: Tensor) -> dict[str, float]:
    """‖·‖₂, ‖·‖_F and κ of ∂logits/∂X₀, (classes, N·d), dense."""

    def logits(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x)
        return model.head(model.norm(x[:, 0]))  # (batch, classes)

    values = torch.linalg.svdvals(jacobian(logits, x))
    return {
        "logits_spectral": values[0].item(),
        "logits_frobenius": values.norm().item(),
        "logits_kappa": condition(values, rank=len(values)),
    }


def gradient_norms(model: VisionTransformer, images: Tensor, labels: Tensor) -> dict[str, float]:
    """‖∂loss/∂θ‖₂ over the parameters of the first and of the last block."""
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    first, last = (
        torch.stack([p.grad.norm() for p in model.blocks[i].parameters() if p.grad is not None]).norm().item()
        for i in (0, -1)
    )
    return {"first_gradient": first, "last_gradient": last}


def attention_jacobian(model: VisionTransformer, x: Tensor, settings: Settings, generator: Generator) -> dict[str, float]:
    """‖·‖₂ and ‖·‖_F/√(N·d) of ∂X_L/∂X₀ without the MLPs, with the skips and norms that the model has, matrix-free."""

    def attend(x: Tensor) -> Tensor:
        for block in model.blocks:
            y = block.attention(block.norm1(x))
            x = x + y if block.skip else y
        return x  # (batch, N, d)

    with sdpa_kernel(SDPBackend.MATH):  # the one whose gradient has a gradient
        spectral = spectral_norm(attend, x, num_iterations=settings.power_iterations, generator=generator)
    frobenius = frobenius_norm(attend, x, num_samples=settings.samples, generator=generator)
    return {"spectral": spectral, "gain": frobenius / math.sqrt(x.numel())}


def spectral_norm(function: Callable[[Tensor], Tensor], x: Tensor, *, num_iterations: int, generator: Generator) -> float:
    """‖∂f/∂X‖₂ from below by power iteration on JᵀJ, matrix-free: Jᵀu is a backward pass, and J v one through that.

    Args:
        function: (1, N, d) → any shape.
        x: (N, d).
    """
    x = x[None].detach().requires_grad_()
    y = function(x)
    u = torch.zeros_like(y, requires_grad=True)
    (pullback,) = torch.autograd.grad(y, x, u, create_graph=True)  # Jᵀu, linear in u
    v = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    for _ in range(num_iterations):
        (pushed,) = torch.autograd.grad(pullback, u, v / v.norm(), retain_graph=True)  # J v
        (v,) = torch.autograd.grad(y, x, pushed, retain_graph=True)
    return v.norm().sqrt().item()


def frobenius_norm(function: Callable[[Tensor], Tensor], x: Tensor, *, num_samples: int, generator: Generator) -> float:
    """‖∂f/∂X‖_F by Hutchinson's estimator: the root of the mean of ‖Jᵀu‖² over Gaussian u.

    Args:
        function: (batch, N, d) → (batch, ...), each item of the batch by itself.
        x: (N, d).
    """
    copies = x.detach().repeat(num_samples, 1, 1).requires_grad_()
    y = function(copies)
    (pullback,) = torch.autograd.grad(y, copies, torch.randn(y.shape, generator=generator, dtype=y.dtype))
    return pullback.square().sum((1, 2)).mean().sqrt().item()


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    networks, attentions = tables["networks"], tables["attentions"].assign(mlp="")
    ends = networks["depth"].min(), networks["depth"].max()
    asked = {
        "‖∂logits/∂X₀‖_F kept per block": per_block(networks, "logits_frobenius"),
        f"κ(∂logits/∂X₀) at depth {ends[1]}": at_depth(networks, "logits_kappa", ends[1]),
    }
    return [
        attention_helps(networks, ends, asked, lab),
        what_mlps_do(asked, lab),
        vanishing_gradients(networks, ends, lab),
        attention_alone(attentions, lab),
    ]


def per_block(table: pd.DataFrame, column: str) -> Samples:
    """By model, the logarithm of the factor a block: the slope of log(column) over depth, one number for each seed."""
    fit = lambda own: np.polyfit(own["depth"], np.log(own[column]), 1)[0]  # noqa: E731
    slopes = table.groupby([*MODEL, "seed"], sort=False)[["depth", column]].apply(fit)
    return {model: own.to_numpy() for model, own in slopes.groupby(level=MODEL, sort=False)}


def at_depth(table: pd.DataFrame, column: str, depth: int) -> Samples:
    """By model, the logarithm of a column at one depth, one number for each seed."""
    own = table[table["depth"] == depth]
    return {model: np.log(rows[column].to_numpy()) for model, rows in own.groupby(MODEL, sort=False)}


def geometric_mean(logarithms: np.ndarray) -> float:
    return float(np.exp(np.mean(logarithms)))


def against(samples: Sequence[np.ndarray]) -> str:
    """Samples of logarithms by what they are of."""
    return " against ".join(number(geometric_mean(sample)) for sample in samples)


def model_table(columns: dict[str, Samples], lab: Lab) -> Table:
    """A row for each model: the geometric means over seeds."""
    models = list(next(iter(columns.values())))
    rows = [
        [lab.label(variant), MLPS[mlp], *(number(geometric_mean(samples[variant, mlp])) for samples in columns.values())]
        for variant, mlp in models
    ]
    variants = [variant for variant, _ in models]
    return Table(["Model", "MLPs", *columns], rows, align="ll" + "r" * len(columns), variants=variants)


def attention_helps(table: pd.DataFrame, ends: tuple[int, int], asked: dict[str, Samples], lab: Lab) -> Finding:
    """The claim: with the MLPs' initialisation held equal, OSA loses less a block than softmax and is better conditioned."""
    measures = []
    sided = zip(asked.items(), ("above", "below"), strict=True)
    for variant, (mlp, label), ((what, samples), side) in itertools.product(OSA, MLPS.items(), sided):
        pair = samples[variant, mlp], samples[SOFTMAX, mlp]
        judgement = judge_means(pair, (1, -1), limit=0.0, side=side, family=FAMILY, diverged=())
        note = "; ".join(filter(None, (against(pair), judgement.note)))
        text = f"{lab.label(variant)}, {label} MLPs: {what}"
        measures.append(Measure(text, side=side, limit=0.0, **judgement.as_measure() | {"note": note}))
    return Finding(
        id="trainability",
        title="OSA’s attention carries more to the first block than softmax",
        place="Abstract and Section 4",
        kind=CLAIM,
        statement="OSA allows Transformers without skip connections and normalisation layers to be more easily trained",
        measures=measures,
        in_short=carried([m for m in measures if m.side == "above"], next(iter(asked.values())), lab),
        rule="Without skips and normalisation, as initialised, and with SUO or Xavier MLPs in both: ‖∂logits/∂X₀‖_F shrinks "
        "less per block with each of OSA’s methods than with softmax (the slope of its logarithm over depth), and "
        f"κ(∂logits/∂X₀) at depth {ends[1]} is smaller. A value is the logarithm of the ratio of OSA to softmax. Seeds are "
        "independent samples.",
        table=model_table(asked | {f"κ(∂logits/∂X₀) at depth {ends[0]}": at_depth(table, "logits_kappa", ends[0])}, lab),
        figure=draw(table, lab, {"logits_frobenius": "‖∂logits/∂X₀‖_F", "logits_kappa": "κ(∂logits/∂X₀)"}),
        caption="As initialised, over depth: ‖∂logits/∂X₀‖_F and its condition number. Geometric means over seeds.",
        remark="This is about the Jacobian that training begins with, not about how such networks then train. The paper’s "
        "models differ in attention and MLPs at once, and would not tell which of the two it is.",
        models=(*OSA, SOFTMAX),
    )


def carried(judged: list[Measure], kept: Samples, lab: Lab) -> str:
    """What a block keeps with OSA's attention and with softmax, and the most by which intervals let OSA's be more."""
    told = []
    for mlp, label in MLPS.items():
        ours, theirs = (f"{number(geometric_mean(kept[v, mlp]))} in {lab.label(v)}" for v in (OSA[0], SOFTMAX))
        told.append(f"{ours} and {theirs} with {label} MLPs")
    most = max(measure.high for measure in judged)
    limit = f" By the upper ends of the intervals OSA keeps at most {100 * math.expm1(most):.1f}% more." if most > 0 else ""
    return f"A block keeps, of ‖∂logits/∂X₀‖_F, {'; '.join(told)}.{limit}"


def what_mlps_do(asked: dict[str, Samples], lab: Lab) -> Finding:
    """The same comparison the other way round: one attention, two initialisations of the MLPs, with 95% intervals."""
    measures = []
    for variant, (what, samples) in itertools.product((*OSA, SOFTMAX), asked.items()):
        pair = [samples[variant, mlp] for mlp in MLPS]
        value, half = np.mean(pair[0]) - np.mean(pair[1]), half_width(pair, (1, -1), CONFIDENCE)
        ratio, low, high = np.exp([value, value - half, value + half])
        text = f"{lab.label(variant)}: {what} with SUO MLPs over that with Xavier’s"
        measures.append(Measure(text, ratio, low=low, high=high, n=min(map(len, pair)), note=against(pair)))
    return Finding(
        id="mlp_initialisation",
        title="What the MLPs’ initialisation does",
        place="Section 4.4",
        kind=OBSERVATION,
        statement="The paper gives OSA’s MLPs the SUO initialisation and the ViTs’ MLPs Xavier’s. This is what that alone "
        "does to ‖∂logits/∂X₀‖_F and its condition number, with the same attention.",
        in_short=f"A block keeps {span(m.value for m in measures[::2])} times as much of ‖∂logits/∂X₀‖_F with SUO as with "
        "Xavier’s.",
        measures=measures,
        models=(*OSA, SOFTMAX),
    )


def vanishing_gradients(table: pd.DataFrame, ends: tuple[int, int], lab: Lab) -> Finding:
    """What is left of the loss's gradient in the first block."""
    epsilon = lab.paper.recipe.train.eps
    columns = {
        f"{block} block, depth {depth}": at_depth(table, f"{block.lower()}_gradient", depth)
        for block, depth in itertools.product(("First", "Last"), ends)
    }
    measures, firsts = [], columns[f"First block, depth {ends[1]}"]
    for (variant, mlp), sample in firsts.items():
        what = f"{lab.label(variant)}, {MLPS[mlp]} MLPs: ‖∂loss/∂θ₁‖₂ at depth {ends[1]}"
        note = f"{number(geometric_mean(sample) / epsilon)} times AdamW’s ε"
        measures.append(Measure(what, geometric_mean(sample), n=len(sample), note=note))
    return Finding(
        id="vanishing_gradients",
        title="Gradients that vanish with depth",
        place="Section 4",
        kind=OBSERVATION,
        statement="Norm of the loss’s gradient with respect to the parameters of a block, biases too, as initialised. Far "
        f"below AdamW’s ε = {number(epsilon)} its steps vanish with the gradient.",
        in_short=f"At depth {ends[1]} the first block’s gradient is "
        + "; ".join(
            f"{span(geometric_mean(firsts[v, mlp]) for v in OSA)} with OSA and "
            f"{number(geometric_mean(firsts[SOFTMAX, mlp]))} with softmax, without skips and LN and with {label} MLPs"
            for mlp, label in MLPS.items()
        )
        + ".",
        measures=measures,
        table=model_table(columns, lab),
        figure=draw(table, lab, {"first_gradient": "‖∂loss/∂θ₁‖₂"}, epsilon),
        caption="The first block’s gradient over depth, as initialised; dashed, AdamW’s ε. Geometric means over seeds.",
        remark="GELU halves small signals, and in models with neither layer norm nor skips nothing undoes that.",
    )


def attention_alone(table: pd.DataFrame, lab: Lab) -> Finding:
    """The networks without their MLPs."""
    deepest, measures = table["depth"].max(), []
    for (variant, _), gain in per_block(table, "gain").items():
        note = f"between {number(np.exp(gain.min()))} and {number(np.exp(gain.max()))} over {len(gain)} seeds"
        measures.append(Measure(f"{lab.label(variant)}: factor per block", geometric_mean(gain), n=len(gain), note=note))
    for (variant, _), spread in at_depth(table.assign(spread=table["spectral"] / table["gain"]), "spread", deepest).items():
        what = f"{lab.label(variant)}, depth {deepest}: ‖J‖₂ over its root mean square singular value"
        measures.append(Measure(what, geometric_mean(spread), n=len(spread), note="1 for an isometry"))
    return Finding(
        id="attention_alone",
        title="What the attention layers do by themselves",
        place="Section 4",
        kind=OBSERVATION,
        statement="Without the MLPs, and with the skips and norms that each model has: the factor by which a block changes "
        "‖J‖_F, J = ∂X_L/∂X₀, and how unequal the singular values of J become.",
        in_short=f"A block changes ‖J‖_F by a factor of {span(m.value for m in measures if 'factor' in m.what)}, by model.",
        measures=measures,
        models=tuple(dict.fromkeys(table["variant"])),
    )


@matplotlib.rc_context(STYLE)
def draw(table: pd.DataFrame, lab: Lab, columns: dict[str, str], limit: float | None = None) -> Figure:
    """Columns over depth: a line for each model, its points filled for SUO MLPs and hollow for Xavier's."""
    figure, panels = charts.panels(len(columns), 3.9)
    for axes, (column, name) in zip(panels, columns.items(), strict=True):
        for (variant, mlp), own in table.groupby(MODEL, sort=False):
            line = np.exp(np.log(own.set_index("depth")[column]).groupby("depth").mean())
            fill = look(variant).colour if mlp == "osa" else "#ffffff"
            axes.plot(line, marker="o", markersize=4, markerfacecolor=fill, **look(variant).line(linewidth=1.2))
        if limit is not None:
            axes.axhline(limit, **charts.EXPECTED)
        charts.logarithmic(axes, "y")
        axes.set(title=name, xlabel="Depth", xticks=sorted(set(table["depth"])))
    models = [
        Line2D([], [], label=lab.label(variant), **look(variant).line()) for variant in dict.fromkeys(table["variant"])
    ]
    charts.legend(figure, [*models, *charts.fills("SUO MLPs", "Xavier MLPs")], 4)
    return figure
