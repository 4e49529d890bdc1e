"""Compares three methods in the first training steps of OSA: QR, and Newton–Schulz with the paper's K = 6 and with K = 10.

All methods start from the same weights and see the same images. Section 3 prefers Newton–Schulz for its stable gradients.
But the error of Newton–Schulz grows with ‖S‖₂, and nothing bounds ‖S‖₂ during training. We repeat each failing run in
float64, to see the effect of rounding.

The study takes 1.5 hours on one core, so no DVC stage runs it; the command is `python -m pipeline study first_steps`.
"""

from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from osa.functional import orthogonal_attention_matrix
from osa.modules import OrthogonalSelfAttention
from osa.reference import skew
from pipeline.config.looks import look_of
from pipeline.config.params import PositiveInt
from pipeline.results.measures import LAYER_IMAGES, attention_inputs, norm
from pipeline.statistics.claims import GUESS_LOSS
from pipeline.studies import Study, Tables, comparison
from pipeline.studies.charts import legend, logarithmic, panels
from pipeline.studies.lab import Lab, first_steps
from pipeline.training.loop import Training

LEARNT = GUESS_LOSS - 0.1  # a run learns if the mean loss of its last steps is below this value
LAST_STEPS = 20


class Settings(comparison.Settings):
    steps: PositiveInt


def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures loss, gradient norm and `extremes` at each step. A run that fails to learn is repeated in float64."""
    tables = []
    for name, (variant, overrides, seed) in settings.requests():
        config = lab.config(variant, overrides)
        for dtype in (torch.float32, torch.float64):
            training = as_dtype(lab.training(config, seed), dtype)
            identity = {"name": name, "seed": seed, "dtype": str(dtype).removeprefix("torch.")}
            own = pd.DataFrame([identity | step | extremes(training) for step in first_steps(training, settings.steps)])
            tables.append(own)
            if learns(own["loss"], settings.steps):
                break
    return {"steps": pd.concat(tables, ignore_index=True)}


def as_dtype(training: Training, dtype: torch.dtype) -> Training:
    """Converts the weights and images of a `Training` to another dtype."""
    data = training.data
    train, test = (replace(images, levels=images.levels.to(dtype)) for images in (data.train_images, data.test_images))
    training.data = replace(data, train_images=train, test_images=test)
    training.model.to(dtype)
    return training


@torch.no_grad()
def extremes(training: Training) -> dict[str, float]:
    """Returns the maxima of ‖S‖₂ and ‖A‖₂ and the minimum of σ_min(A) over layers, heads and `LAYER_IMAGES` images."""
    norms, largest, smallest = [], [], []
    for layer, x in attention_inputs(training.model, training.data.test_images[:LAYER_IMAGES]):
        assert isinstance(layer, OrthogonalSelfAttention)
        query, key, _ = layer.project(x)  # (images, heads, N, d_v)
        a = orthogonal_attention_matrix(query, key, scale=layer.scale(), **layer.options).double()
        values = torch.linalg.svdvals(a)  # (images, heads, N)
        norms.append(norm(skew(query, key, layer.scale().double())).max())
        largest.append(values.max())
        smallest.append(values.min())
    return {
        "skew_norm": torch.stack(norms).max().item(),
        "largest": torch.stack(largest).max().item(),
        "smallest": torch.stack(smallest).min().item(),
    }


def learns(losses: pd.Series, steps: int) -> bool:
    """Returns whether the mean loss of a run's last steps is below `LEARNT`. A run that diverged does not learn."""
    return len(losses) == steps and losses.iloc[-LAST_STEPS:].mean() < LEARNT


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Returns each model's failing seeds. Applies `extremes_of` to the float32 runs that learn, and to those that fail."""
    models: dict[str, dict[str, Any]] = {}
    table = tables["steps"]
    for name, training in settings.runs.items():
        own = table[table["name"] == name]
        failing: dict[str, list[int]] = {"float32": [], "float64": []}
        for (dtype, seed), run in own.groupby(["dtype", "seed"]):
            if not learns(run["loss"], settings.steps):
                failing[dtype].append(seed)
        single = own[own["dtype"] == "float32"]
        fails = single["seed"].isin(failing["float32"])
        models[name] = {
            "label": label_with_count(settings, lab, name),
            "seeds": len(training.seeds),
            "failing": failing["float32"],
            "failing_double": failing["float64"],
            "learning": extremes_of(single[~fails]),
            "lost": extremes_of(single[fails]),
        }
    totals = {key: sum(len(model[key]) for model in models.values()) for key in ("failing", "failing_double")}
    return {"models": models, "steps": settings.steps} | totals


def extremes_of(rows: pd.DataFrame) -> dict[str, float] | None:
    """Returns the largest ‖S‖₂ and the smallest σ_min(A) in the rows, or None if there are no rows."""
    return None if rows.empty else {"skew_norm": rows["skew_norm"].max(), "smallest": rows["smallest"].min()}


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    """Draws ‖S‖₂ and the gradient norm at each step: the median over runs that learn, and a line for each run that fails."""
    figure, axes = panels(2, height=2.9)
    titles = {"skew_norm": "‖S‖₂, largest head", "gradient": "Gradient of the loss"}
    handles, single = [], tables["steps"][tables["steps"]["dtype"] == "float32"]
    for name in settings.runs:
        look = look_of(name, among=settings.runs)
        learning: list[pd.DataFrame] = []
        failing: list[pd.DataFrame] = []
        for _, run in single[single["name"] == name].groupby("seed"):
            (learning if learns(run["loss"], settings.steps) else failing).append(run)
        median = pd.concat(learning).groupby("step")[[*titles]].median()
        for column, ax in zip(titles, axes, strict=True):
            ax.plot(median.index, median[column], **look.line())
            for run in failing:
                ax.plot(run["step"], run[column], color=look.colour, linewidth=0.8)
        handles.append(Line2D([], [], label=label_with_count(settings, lab, name), **look.line()))
    for title, ax in zip(titles.values(), axes, strict=True):
        ax.set(title=title, xlabel="Step")
        logarithmic(ax, "y")
    legend(figure, handles)
    return figure


def label_with_count(settings: Settings, lab: Lab, name: str) -> str:
    """Returns a model's label, followed by its number of iterations K if the settings override the default."""
    training = settings.runs[name]
    iterations = training.set.get("variant", {}).get("num_iterations")
    return lab.label(training.variant) + (f", K = {iterations}" if iterations else "")


STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"first_steps": draw})
