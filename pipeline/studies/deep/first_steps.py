"""First steps: what stops a deep model from training? OSA and E-SPA at several rates, step by step.

A model whose MLPs are shaped for depth has signals that neither grow nor fade as it is initialised. The weights of the first
steps are not initialised ones any more: the more blocks there are, the more each step changes what comes out of them.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated

import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field

from pipeline.core.params import Name, PositiveFloat, PositiveInt, RunConfig, Section, Seeds
from pipeline.lab import Lab
from pipeline.report import charts
from pipeline.report.looks import STYLE
from pipeline.report.numbers import number, plural, span
from pipeline.studies import OBSERVATION, Finding, Measure, Table, Tables
from pipeline.training.loop import Training

place = 53.5
LARGE = 10.0  # a mean square of [cls], for which no MLP is shaped
CELL = ["model", "depth", "rate"]


class Settings(Section):
    seeds: Seeds
    depths: Annotated[list[PositiveInt], Field(min_length=1)]
    rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    models: Annotated[list[Name], Field(min_length=1)] = Field(["osa_shaped", "espa"], min_length=1)
    steps: PositiveInt = 8


def measure(settings: Settings, lab: Lab) -> Tables:
    """The first steps of trainings as the study `depth` has them, from the same draws and over the same images."""
    rows = []
    for model, depth, rate, seed in itertools.product(settings.models, settings.depths, settings.rates, settings.seeds):
        config = lab.config(model, {"model": {"depth": depth}, "train": {"learning_rate": rate}})
        identity = {"model": model, "depth": depth, "rate": rate, "seed": seed}
        rows += [identity | row for row in first_steps(config, seed, settings.steps)]
    return {"steps": pd.DataFrame(rows)}


def first_steps(config: RunConfig, seed: int, steps: int) -> Iterator[dict[str, float]]:
    """Before each step and after the last one, until the loss is not finite:

    loss       of the minibatch of the step that comes next
    gradient   ‖∂loss/∂θ‖₂ over all parameters, before it is clipped
    q          mean square of an entry of [cls] after the last block
    """
    training = Training(config, seed, torch.device("cpu"))
    norms, squares = [], []
    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.double().norm()))
    training.model.blocks[-1].register_forward_hook(lambda *call: squares.append(call[-1][:, 0].detach().square().mean()))
    for step, batch in enumerate(itertools.islice(training.batches(0), steps + 1)):
        norms.clear()
        loss = training.step(*batch)[0].item()
        if not math.isfinite(loss):
            return
        yield {"step": step, "loss": loss, "gradient": torch.stack(norms).norm().item(), "q": squares.pop().item()}


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    steps, what = tables["steps"], plural(settings.steps, "step")
    first = steps[(steps["step"] == 0) & (steps["rate"] == settings.rates[0])]  # as it is at every rate
    starts = {cell: own[["gradient", "q"]] for cell, own in first.groupby(CELL[:2], sort=False)}
    ends = steps.groupby([*CELL, "seed"], sort=False).last()
    left = (ends["q"] >= LARGE).groupby(CELL, sort=False).sum()
    rows = []
    for (model, depth, rate), own in ends.groupby(CELL, sort=False):
        start = starts[model, depth]
        gradient, before, q, loss = map(by_seed, (start["gradient"], start["q"], own["q"], own["loss"]))
        rows.append([lab.label(model), str(depth), gradient, before, number(rate), q, loss])
    depth = settings.depths[-1]
    at_depth = {cell: own for cell, own in starts.items() if cell[1] == depth}
    headline = told(settings, at_depth, left[left.index.get_level_values("depth") == depth], lab)
    return [
        Finding(
            id="first_steps",
            title="What the first steps do to deep models",
            place="Section 4; He et al. 2023, Appendix H.1",
            kind=OBSERVATION,
            statement="The gradient of models as initialised, and how large [cls] is after the last block when the first "
            f"{what} of a training are done, by the learning rate. The MLPs are shaped for a mean square of 1.",
            measures=[
                Measure(f"{lab.label(model)}, {depth} blocks, rate {number(rate)}: seeds with a mean square ≥ {LARGE:g}", n)
                for (model, depth, rate), n in left.items()
            ],
            table=Table(
                ["Model", "Blocks", "First gradient", "Mean square", "Learning rate", "Mean square then", "Train loss then"],
                rows,
                "lrllrll",
                note=f"Seeds {', '.join(map(str, settings.seeds))}, in this order. The gradient is ‖∂loss/∂θ‖₂ over all "
                "parameters and, as the mean square, of the model as initialised and the first minibatch; then is after the "
                f"{what}, or with the last minibatch whose loss is finite.",
            ),
            figure=draw(settings, steps, lab),
            caption="Mean square of an entry of [cls] after the last block, before each step, a line for each seed.",
            in_short=told(settings, starts, left, lab),
            remark="Adam’s first steps move every weight by about the rate whatever the gradient is, so that clipping does "
            "not shorten them, and what the blocks change multiplies. These trainings are the beginnings of those of the "
            "study depth, where their rate is the same.",
            headlines=(headline,),
        )
    ]


def by_seed(values: pd.Series) -> str:
    return ", ".join(map(number, values))


def told(settings: Settings, starts: dict[tuple[str, int], pd.DataFrame], left: pd.Series, lab: Lab) -> str:
    """The gradients with which trainings begin, and with how many seeds [cls] is large, before any step and at each rate."""
    begun = [f"{span(own['gradient'])} in {of(*cell, lab)}" for cell, own in starts.items()]
    ended = []
    for cell, counts in left.groupby(CELL[:2], sort=False):
        before = (starts[cell]["q"] >= LARGE).sum()
        after = ", ".join(f"{count} at {number(rate)}" for (*_, rate), count in counts.items() if count)
        if before or after:
            ended.append(f"in {of(*cell, lab)} {before or 'none'} before any step, then {after or 'none'}")
    others = ["none in any other" if ended else "none"] * (len(ended) < left.groupby(CELL[:2]).ngroups)
    return (
        f"The norm of the first gradient, over all parameters, is by seed {'; '.join(begun)}. The mean square of [cls], "
        f"which is to be near 1, is {LARGE:g} or more with so many of {plural(len(settings.seeds), 'seed')}, before and "
        f"after {plural(settings.steps, 'step')} at each rate: {'; '.join([*ended, *others])}."
    )


def of(model: str, depth: int, lab: Lab) -> str:
    return f"{lab.label(model)} of {depth} blocks"


@matplotlib.rc_context(STYLE)
def draw(settings: Settings, steps: pd.DataFrame, lab: Lab) -> Figure:
    """A panel for each model and depth."""
    cells = list(itertools.product(settings.models, settings.depths))
    figure, panels = charts.panels(len(cells), 3.2, sharey=True)
    colours = dict(zip(settings.rates, charts.ramp(len(settings.rates)), strict=True))
    for axes, (model, depth) in zip(panels, cells, strict=True):
        own = steps[(steps["model"] == model) & (steps["depth"] == depth)]
        for (rate, _), run in own.groupby(["rate", "seed"]):
            axes.plot(run["step"], run["q"], color=colours[rate])
        axes.set(title=f"{lab.label(model)}, {depth}", xlabel="Step", xticks=[0, settings.steps // 2, settings.steps])
        charts.logarithmic(axes, "y")
    panels[0].set_ylabel("Mean square of [cls]")
    charts.legend(figure, [Line2D([], [], color=colour, label=f"Rate {number(rate)}") for rate, colour in colours.items()])
    return figure
