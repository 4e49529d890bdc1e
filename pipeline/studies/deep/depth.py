"""Depth: which models train at which depths without skips or LN, and why do the others fail?

We repeat the experiments of Section 4 of He et al. 2023 and add OSA. He et al. train language models of width 1,024 on
WikiText-103; we train ViTs of width 64 on MNIST. All models of one depth train for the same number of epochs, at learning
rates from the study `rates`.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from pipeline.benchmarks.measurements import measured
from pipeline.config.looks import PALETTE
from pipeline.core import files
from pipeline.core.provenance import machine
from pipeline.statistics.claims import GUESS_LOSS, TRAINS, Results, read_claims, trains
from pipeline.studies import Tables, charts, comparison
from pipeline.studies.comparison import Settings, outcome
from pipeline.studies.deep import CLAIMS_FILE
from pipeline.studies.deep.signals import of_tokens
from pipeline.studies.lab import Lab
from pipeline.training.loop import Training

CLAIMS: tuple[str, ...] = ("softmax_does_not_train", "shaped_attention_trains", "espa_lowest_loss", "default_stays_faster")
CLAIMS += ("rival_trains", "osa_trains_at_36", "osa_trains_at_72", "osa_iso_trains_at_72", "osa_iso_trains_at_144")
CLAIMS += ("attention_matters_at_72",)
MLP_DRAWS = {  # name of a run of OSA → how the initial weights of its MLPs are drawn
    "osa_36": "independent",
    "osa_72": "independent",
    "osa_iso_36": "isometric",
    "osa_iso_72": "isometric",
    "osa_iso_144": "isometric",
}
COLOURS = {"independent": PALETTE[4], "isometric": PALETTE[0]}
DASHES = {36: "-", 72: (0, (5, 2)), 144: (0, (1.5, 1.5))}
SHALLOW = 36  # models with more blocks than this train for one epoch instead of two, and have their own panel
HIGHEST = 30.0  # the figure clips train losses at this value
IMAGES = 8  # number of test images that `watch` uses


@torch.no_grad()
def watch(training: Training) -> list[dict[str, float]]:
    """Applies `of_tokens` to the outputs of the middle block and of the last block. Returns a row for each of the two.

    A block has no row if its output has entries that are not finite.
    """
    model, rows = training.model, []
    x = model.tokens(training.data.test_images[:IMAGES])
    for number, block in enumerate(model.blocks, 1):
        x = block(x)
        if number in (len(model.blocks) // 2, len(model.blocks)) and x.isfinite().all():
            rows.append({"block": number} | of_tokens(x.double().cpu()))
    return rows


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    results, claims = Results(tables), read_claims(CLAIMS_FILE)
    runs = {}
    for name, training in settings.runs.items():
        config = lab.config(training.variant, training.set)
        identity = {"variant": training.variant, "depth": config.model.depth, "epochs": config.train.epochs}
        identity |= {"rate": config.train.learning_rate, "alpha": config.variant.alpha_times_depth}
        runs[name] = identity | outcome(results, name)
    return {
        "limit": TRAINS * GUESS_LOSS,
        "runs": runs,
        "tokens": tokens(tables["watched"]) if "watched" in tables else [],
        "steps": [step_times(path) for path in measured("depth.csv")],
        "claims": {name: claims[name].judge(results) for name in CLAIMS},
    }


def tokens(watched: pd.DataFrame) -> list[dict]:
    """Returns a row for each model. The row describes the tokens after the last block.

    n              number of runs
    cosine, rank   [before training, after it]: mean cosine of two tokens, and effective rank, averaged over runs
    """
    last = watched[watched["block"] == watched.groupby(["name", "seed"])["block"].transform("max")]
    runs = last.sort_values("epoch").groupby(["name", "seed"], sort=False)[["cosine", "rank"]]
    before, after = runs.first().groupby("name").mean(), runs.last().groupby("name").mean()
    rows = []
    for name, n in last.groupby("name", sort=False)["seed"].nunique().items():
        row: dict = {"name": name, "n": int(n)}
        for key in before:
            row[key] = [float(before.at[name, key]), float(after.at[name, key])]
        rows.append(row)
    return rows


def step_times(path: Path) -> dict:
    """Returns each model's time per step divided by ViT's, as pipeline/benchmarks/depth.py measured it on one machine."""
    table, facts = files.read_csv(path), files.read_json(path.with_suffix(".json"))
    over_vit = table.set_index("model")["over_vit"]
    return {"machine": machine(facts["environment"]), "depth": facts["depth"], "over_vit": over_vit.to_dict()}


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure | None:
    """Draws OSA's train loss: for each model, the mean over its successful runs and the mean over its failed runs."""
    figure, panels = charts.panels(2, 3.4, sharey=True)
    for name, training in settings.runs.items():
        if name not in MLP_DRAWS:
            continue
        draws, depth = MLP_DRAWS[name], lab.config(training.variant, training.set).model.depth
        axes = panels[depth > SHALLOW]
        for curves in by_outcome(tables, name):
            mean = pd.concat(curves).groupby("step")["train_loss"].mean().clip(upper=HIGHEST)
            label = f"{draws}, {depth}\n(n = {len(curves)})"
            axes.plot(mean, color=COLOURS[draws], linestyle=DASHES[depth], linewidth=1.3, label=label)
    if not any(axes.lines for axes in panels):
        return None
    for axes, title in zip(panels, (f"{SHALLOW} blocks", "More blocks"), strict=True):
        charts.logarithmic(axes, "y")
        axes.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
        axes.axhline(TRAINS * GUESS_LOSS, **charts.EXPECTED)
        axes.set(title=title, xlabel="Step", ylim=(0.18, None))
        axes.margins(x=0)
    panels[0].set_ylabel("Train loss")
    for axes in panels:
        charts.label_ends(axes, gap=0.15)
    return figure


def by_outcome(tables: Tables, name: str) -> list[list[pd.DataFrame]]:
    """Returns the loss curves of the runs called `name`: a list for successful runs, then a list for failed runs.

    A list is left out if it is empty. Losses that are not finite are left out of the curves.
    """
    outcomes: dict[bool, list[pd.DataFrame]] = {True: [], False: []}
    for curve in Results(tables).curves(name):
        outcomes[trains(curve["train_loss"].iloc[-1])].append(curve[np.isfinite(curve["train_loss"])])
    return list(filter(None, outcomes.values()))


STUDY = comparison.study(summarise=summarise, figures={"depth": draw}, watch=watch)
