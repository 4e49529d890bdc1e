"""The first steps of OSA from the same weights and images, with bases from Newton–Schulz and from QR. Section 3 prefers
Newton–Schulz for its stable gradients. Its error grows with ‖S‖₂, which nothing bounds during training.
"""

import itertools
from typing import Annotated

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field
from scipy.stats import fisher_exact

from osa.functional import orthogonal_attention_matrix
from osa.reference import skew
from pipeline.config.looks import look_of
from pipeline.config.params import PositiveInt, Section, Seeds
from pipeline.results.measures import LAYER_IMAGES, attention_inputs, norm, orthogonality_error
from pipeline.statistics.claims import GUESS_LOSS
from pipeline.studies import Study, Tables
from pipeline.studies.charts import legend, logarithmic, panels
from pipeline.studies.lab import Lab, first_steps
from pipeline.training.loop import Training

LEARNT = GUESS_LOSS - 0.1  # the mean loss of the last steps of a model that has left the guess
LAST_STEPS = 20


class Settings(Section):
    variants: Annotated[list[str], Field(min_length=1)]
    seeds: Seeds
    steps: PositiveInt


def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures each step of each run: loss and gradient, and after the step the largest ‖S‖₂ and ‖AᵀA − I‖₂ of any head."""
    rows = []
    for variant, seed in itertools.product(settings.variants, settings.seeds):
        training = lab.training(lab.config(variant), seed)
        steps = first_steps(training, settings.steps)
        rows += [{"variant": variant, "seed": seed, **step, **largest(training)} for step in steps]
    return {"steps": pd.DataFrame(rows)}


@torch.no_grad()
def largest(training: Training) -> dict[str, float]:
    """‖S‖₂ and ‖AᵀA − I‖₂, each of the layer, head and test image where it is largest."""
    skew_norm = error = 0.0
    for layer, x in attention_inputs(training.model, training.data.test_images[:LAYER_IMAGES]):
        query, key, _ = layer.project(x)  # (images, heads, N, d_v)
        a = orthogonal_attention_matrix(query, key, scale=layer.scale(), **layer.options).double()
        skew_norm = max(skew_norm, norm(skew(query, key, layer.scale().double())).max().item())
        error = max(error, orthogonality_error(a).max().item())
    return {"skew_norm": skew_norm, "error": error}


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Lists the seeds of each model that do not learn, and the largest gradient, ‖S‖₂ and ‖AᵀA − I‖₂ of both groups.

    Fisher's exact test compares how often the first two models fail.
    """
    models = {}
    for variant in settings.variants:
        own = tables["steps"][tables["steps"]["variant"] == variant]
        last = own[own["step"] >= settings.steps - LAST_STEPS].groupby("seed")["loss"].mean().reindex(settings.seeds)
        failing = [seed for seed in settings.seeds if not last[seed] < LEARNT]  # one whose loss is no number fails too
        groups = {"failing": own[own["seed"].isin(failing)], "learning": own[~own["seed"].isin(failing)]}
        worst = {key: group[["gradient", "skew_norm", "error"]].max().to_dict() for key, group in groups.items()}
        models[variant] = {"seeds": len(settings.seeds), "failing": failing, "worst": worst}
    failing = [[len(model["failing"]), model["seeds"] - len(model["failing"])] for model in models.values()]
    return {"models": models, "steps": settings.steps, "p": float(fisher_exact(failing[:2]).pvalue)}


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    """‖S‖₂ and the gradient over steps, a line for each seed."""
    figure, axes = panels(2, height=2.9)
    titles = {"skew_norm": "‖S‖₂, largest head", "gradient": "Gradient of the loss"}
    for (column, title), ax in zip(titles.items(), axes, strict=True):
        for (variant, _), own in tables["steps"].groupby(["variant", "seed"], sort=False):
            own = own.iloc[::2]  # else the figure is above 100 kB
            ax.plot(own["step"], own[column], **look_of(variant).line(linewidth=0.8))
        ax.set(title=title, xlabel="Step")
        logarithmic(ax, "y")
    legend(figure, [Line2D([], [], label=lab.label(variant), **look_of(variant).line()) for variant in settings.variants])
    return figure


STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"first_steps": draw})
