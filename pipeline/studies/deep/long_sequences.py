"""More tokens: what do smaller patches cost and bring? Section 3.1 in training, and Section 4.

ViT and OSA with patches of 4, 2 and 1 pixels, where a cost that is linear in N meets a real training. As initialised, α has
to follow N: with ‖W̃‖₂ = 1 (Theorem 4.2)

    ‖S‖₂ ≤ α/√d_v ‖X‖₂²        and        ‖J₁‖₂ ≤ 2 α/√d_v ‖X‖₂²

for a head of Eq. 5. The N tokens have ‖X‖_F² = N d q with the mean square q, and a rank of at most d, so that
N q ≤ ‖X‖₂² ≤ N d q: tokens of a given size let both bounds grow in proportion to N, and α in proportion to 1/N keeps them.
The stage measures this, and gathers the runs that are there; `python -m pipeline.tools.fan_out --only` trains the others.
"""

import itertools
import math
from collections.abc import Iterator

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from pipeline.core.params import AnySeeds, Name, PositiveInt, RunConfig, Section, Seeds
from pipeline.lab import Lab, float64
from pipeline.measures import attention_inputs, head_weights, norm
from pipeline.report import charts
from pipeline.report.looks import STYLE, look
from pipeline.report.numbers import fixed, number
from pipeline.statistics import summarise
from pipeline.studies import OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._deep import Wanted, gather, of_devices
from pipeline.studies._findings import log_log_slope
from pipeline.studies._runs import Request, of_other_code
from pipeline.studies.paper.section_5 import known, progress

place = 55
gathers = True
OSA = "osa_exact"
CASES = {  # tokens and α
    "paper": "the paper’s tokens and α",
    "normalised": "tokens ÷ RMS, the paper’s α",
    "following": "tokens ÷ RMS, α ∝ 1/N",
}
SIZES = {"norm_squared": "‖X‖₂²", "skew": "‖S‖₂", "jacobian": "‖J₁‖₂"}


class Settings(Section):
    models: list[Name] = Field(["vit", "osa_exact"])
    patches: list[PositiveInt]  # pixels a side
    epochs: PositiveInt
    seeds: AnySeeds  # of the trainings
    initial_seeds: Seeds
    images: PositiveInt = 1  # that are measured as initialised
    power_iterations: PositiveInt = 20  # which leave an error of 1 %


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return list(wanted(settings, lab).values())


def wanted(settings: Settings, lab: Lab) -> Wanted:
    """Every run, the cheapest first."""
    found = {}
    for patch, seed, model in itertools.product(settings.patches, settings.seeds, settings.models):
        overrides = {"model": {"patch_size": patch}, "train": {"epochs": settings.epochs}}
        found[model, tokens_of(lab.config(model, overrides)), seed] = (model, overrides, seed)
    return found


def tokens_of(config: RunConfig) -> int:
    return (config.data.image_size // config.model.patch_size) ** 2 + 1


def measure(settings: Settings, lab: Lab) -> Tables:
    return gather(wanted(settings, lab), lab, "tokens") | {"initial": pd.DataFrame(initial(settings, lab))}


def initial(settings: Settings, lab: Lab) -> Iterator[dict]:
    """‖X‖₂², ‖S‖₂ and ‖J₁‖₂ in the first block, means over images and heads, for each case."""
    for patch, case, seed in itertools.product(settings.patches, CASES, settings.initial_seeds):
        changes = {"variant": {"normalise_tokens": case != "paper"}}
        config = lab.config(OSA, changes | {"model": {"patch_size": patch}})
        images = lab.images(config.data.pixel_scaling)[0][: settings.images]
        with float64():
            layer, x = next(attention_inputs(lab.model(config, seed), images))
        x, tokens = x.detach(), tokens_of(config)
        alpha = config.init.alpha * (tokens_of(lab.config(OSA)) / tokens if case == "following" else 1)
        scale, found = alpha / math.sqrt(layer.embed_dim / layer.num_heads), []
        start = lab.normal(seed, "long_sequences/direction", *x.shape[1:])
        for each, weights in itertools.product(x, head_weights(layer)):
            parts = [weight.detach() for weight in weights]
            jacobian = jacobian_norm(each, parts, scale, start, settings.power_iterations)
            found.append((norm(each).square().item(), skew_norm(each, *parts[:2], scale), jacobian))
        sizes = dict(zip(SIZES, np.mean(found, axis=0).tolist(), strict=True))
        yield {"case": case, "tokens": tokens, "seed": seed, "alpha": alpha} | sizes


def skew_norm(x: Tensor, w_query: Tensor, w_key: Tensor, scale: float) -> float:
    """‖S‖₂ of scale · (Q Kᵀ − K Qᵀ), from the 2d_v eigenvalues that are not zero."""
    m, m_j = stacked(x @ w_query, x @ w_key)
    return torch.linalg.eigvals(scale * m_j.mT @ m).abs().max().item()


def stacked(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """M = [Q, K] and M Jᵀ = [K, −Q], so that S = scale · M (M Jᵀ)ᵀ."""
    return torch.cat([query, key], -1), torch.cat([key, -query], -1)


def jacobian_norm(x: Tensor, weights: list[Tensor], scale: float, start: Tensor, iterations: int) -> float:
    """‖J₁‖₂ of one head at x (N, d), the derivative of A[X] X W^V W^O by way of A (Theorem 4.1), by power iteration."""
    w_query, w_key, w_value, w_out = weights
    value = x @ w_value

    def attend(x: Tensor) -> Tensor:
        m, m_j = stacked(x @ w_query, x @ w_key)
        z, y = scale * m_j.mT @ m, m_j.mT @ value
        block = torch.cat([torch.cat([z, y], 1), z.new_zeros(y.shape[1], z.shape[1] + y.shape[1])])
        phi_y = torch.linalg.matrix_exp(block)[: len(z), len(z) :]  # φ₁(Z) Y
        return (value + scale * m @ phi_y) @ w_out

    x = x.detach().requires_grad_()
    output = attend(x)
    cotangent = torch.zeros_like(output, requires_grad=True)
    (pulled,) = torch.autograd.grad(output, x, cotangent, create_graph=True)  # J₁ᵀ of it, whose derivative is J₁ᵀ
    direction = start
    for _ in range(iterations + 1):
        direction = direction / direction.norm()
        (pushed,) = torch.autograd.grad(pulled, cotangent, direction, retain_graph=True)
        (direction,) = torch.autograd.grad(output, x, pushed, retain_graph=True)
    return pushed.norm().item()


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    return [costs(settings, tables["runs"], lab), how_alpha_follows(tables["initial"])]


def costs(settings: Settings, runs: pd.DataFrame, lab: Lab) -> Finding:
    rows, measures = [], []
    for (model, tokens), own in runs.groupby(["variant", "tokens"], sort=False):
        accuracy, seconds = 100 * own["test_accuracy"].mean(), own["seconds_per_step"].mean()
        done = own["test_accuracy"].notna().sum()
        measures.append(Measure(f"{lab.label(model)}, N = {tokens}: test accuracy", accuracy, "%", n=int(done)))
        measures.append(Measure(f"{lab.label(model)}, N = {tokens}: time", seconds, "s a step"))
        rows.append([lab.label(model), str(tokens), fixed(seconds, 2), fixed(accuracy, 2), known(own["status"])])
    there = runs[runs["status"] == "finished"]
    return Finding(
        id="long_sequences",
        title="Smaller patches: what more tokens cost and bring",
        place="Section 3.1",
        kind=OBSERVATION,
        statement=f"Seconds a training step takes and the test accuracy after {settings.epochs} epoch"
        f"{'s' if settings.epochs > 1 else ''}, by the number of tokens N.",
        measures=measures or [Measure("Trainings", 0)],
        table=Table(["Model", "N", "Seconds a step", "Accuracy, %", "n"], rows) if rows else None,
        figure=draw(there, lab) if there["tokens"].nunique() > 1 else None,  # of one number there are no lines
        caption="A line for each model, a point for each number of tokens, which stands beside it.",
        in_short=f"{progress([run for _, run in runs['status'].groupby(level=0)], 'runs')}{ends(there, lab)}.",
        remark=" ".join(filter(None, (of_devices(runs), of_other_code(runs)))),
        models=tuple(settings.models),
    )


def ends(runs: pd.DataFrame, lab: Lab) -> str:
    """What the fewest and the most tokens cost each model, and bring it."""
    told = ""
    for model, own in runs.groupby("variant", sort=False):
        means = own.groupby("tokens")[["seconds_per_step", "test_accuracy"]].mean()
        points = [
            f"{fixed(means['seconds_per_step'][n], 2)} s a step for {fixed(100 * means['test_accuracy'][n], 2)}% at N = {n}"
            for n in dict.fromkeys([means.index[0], means.index[-1]])
        ]
        told += f"; {lab.label(model)}: {', '.join(points)}"
    return told


def how_alpha_follows(table: pd.DataFrame) -> Finding:
    measures, rows, powers = [], [], {}
    for (case, rule), (column, what) in itertools.product(CASES.items(), SIZES.items()):
        own = table[table["case"] == case]
        slope = summarise([log_log_slope(each["tokens"], each[column]) for _, each in own.groupby("seed")])
        text = f"Slope of log {what} over log N, {rule}"
        measures.append(Measure(text, slope.mean, low=slope.low, high=slope.high, n=slope.n))
        powers[case, column] = f"N^{{{fixed(slope.mean, 2)}}}"
    for (case, tokens), own in table.groupby(["case", "tokens"], sort=False):
        rows.append([CASES[case], str(tokens), *(number(own[column].mean()) for column in ("alpha", *SIZES))])
    return Finding(
        id="alpha_with_tokens",
        title="How α has to follow N",
        place="Section 4.3; Theorem 4.3",
        kind=OBSERVATION,
        statement="‖S‖₂ and ‖J₁‖₂ of a head are at most in proportion to α ‖X‖₂². In the first block of OSA (exact) as "
        "initialised, by the patches’ size: with the paper’s tokens, which are the smaller the fewer pixels they have; with "
        "each token divided by its RMS, as deep models have them; and with α in proportion to 1/N besides.",
        measures=measures,
        table=Table(["Tokens and α", "N", "α", *SIZES.values()], rows, note="Means over heads, images and seeds."),
        in_short=f"With the paper’s tokens and α ‖S‖₂ goes as {powers['paper', 'skew']} and ‖J₁‖₂ as "
        f"{powers['paper', 'jacobian']}; with tokens of one size as {powers['normalised', 'skew']} and "
        f"{powers['normalised', 'jacobian']}, which α ∝ 1/N turns into {powers['following', 'skew']} and "
        f"{powers['following', 'jacobian']}.",
    )


@matplotlib.rc_context(STYLE)
def draw(runs: pd.DataFrame, lab: Lab) -> Figure:
    figure, (axes,) = charts.panels(1, 3.6)
    for model, own in runs.groupby("variant", sort=False):
        means = own.groupby("tokens")[["seconds_per_step", "test_accuracy"]].mean()
        x, y = means["seconds_per_step"], 100 * means["test_accuracy"]
        axes.plot(x, y, marker="o", markersize=4, label=lab.label(model), **look(model).line())
        for tokens in means.index:
            axes.annotate(f"N = {tokens}", (x[tokens], y[tokens]), textcoords="offset points", xytext=(5, 4))
    charts.logarithmic(axes, "x")
    axes.set(xlabel="Seconds a step", ylabel="Test accuracy (per cent)")
    charts.legend(figure, axes.get_lines())
    return figure
