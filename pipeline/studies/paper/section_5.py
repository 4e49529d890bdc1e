"""Do the claims of Section 5 hold in our runs of Table 2? claims.yaml states the claims.

pipeline/statistics/verdicts.py defines the rule that judges the claims, and the stage `tables` gathers the runs.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from pipeline.config import looks
from pipeline.core import files
from pipeline.statistics.claims import (
    CONTRAST_WEIGHTS,
    AnyClaim,
    Comparison,
    Declared,
    Results,
    Speed,
    epochs_to_reach,
    read_claim,
    read_claims,
    read_spreads,
    target_loss,
)
from pipeline.statistics.verdicts import LEVEL, REPRODUCED, WORDS, Verdict, holm, judge_ratio
from pipeline.studies import Study, Tables, charts
from pipeline.studies.lab import Lab
from pipeline.studies.paper import CLAIMS_FILE, decision, own_rate

RULES_FILE = Path(__file__).with_name("rules.csv")  # the verdicts on seeds 0 to 9 under each of three rules
PRIMARY = ("osa_matches_vit", "osa_approaches_vit_speed", "osa_beats_noskip", "osa_faster_than_noskip")
FRESH = {decision.CLAIM: decision.verdict, own_rate.CLAIM: own_rate.verdict}  # claim → function that judges it on new seeds
SPEED = ("osa_approaches_vit_speed", "osa_faster_than_noskip")
ABOUT_OSA = (*PRIMARY, "qr_above_ns")
ABLATIONS = ("norm_matters_most", "removal_costs_accuracy", "removal_costs_speed")
MODELS = ("osa_qr", "osa_ns")
BASELINES = ("vit", "vit_noskip")
WIDEST = {"accuracy": (-8, 8), "speed": (0, 5)}  # largest range drawn: accuracy difference in points, and ratio of epochs
TICKS = (50, 70, 80, 90, 95, 97, 98, 99)  # per cent
FRACTIONS = np.arange(1, 39) / 40  # fractions of training; `epoch_ratios` computes a target loss for each


def results_of(lab: Lab) -> Results:
    """Returns Table 2's runs."""
    tables: Tables = {name: lab.tables[name] for name in ("runs", "histories") if name in lab.tables}
    return Results(tables, guess_loss=math.log(lab.params.model.num_classes))


def summarise(settings: None, tables: Tables, lab: Lab) -> dict:
    claims, judged = read_claims(CLAIMS_FILE), judge_table_2(lab)
    return {
        "seeds": sorted({*lab.tables["runs"]["seed"].tolist()}) if "runs" in lab.tables else [],
        "claims": judged,
        "headline": headline(judged, fresh(lab)),
        "all": count(row["verdict"] for rows in judged.values() for row in rows.values()),
        "second_line": count(judged[name]["osa_ns_vs_" + baseline(claims[name])]["verdict"] for name in PRIMARY),
        "ahead_from_epoch": {model: ahead_from_epoch(results_of(lab), model, "vit_noskip") for model in MODELS},
        "rules": files.read_csv(RULES_FILE).to_dict("records"),
    }


def judge_all(results: Results, lab: Lab) -> dict[str, dict[str, dict]]:
    """Returns a row for each comparison of each claim: the verdict, and the paper's value if the paper gives one."""
    claims, declared = read_claims(CLAIMS_FILE), Declared(lab.paper.table_2, read_spreads(CLAIMS_FILE).accuracy)
    judged: dict[str, dict[str, dict]] = {}
    for name in (*ABOUT_OSA, *ABLATIONS):
        claim, judged[name] = claims[name], {}
        models = claim.compare if isinstance(claim, Comparison) else [claim.models]
        for own, (key, verdict) in zip(models, claim.judge(results, declared).items(), strict=True):
            weights = (1, -1) if claim.kind == "accuracy" else CONTRAST_WEIGHTS.get(claim.kind)
            paper = declared.effect(own, weights) if weights else None
            judged[name][key] = {"models": own, "kind": claim.kind, "paper": paper, "verdict": verdict}
    return judged


def judge_table_2(lab: Lab) -> dict[str, dict[str, dict]]:
    """Judges Table 2's runs.

    Once a claim has been judged on new seeds, the new verdict replaces the verdict on Table 2's runs, and `before` holds the
    old verdict.
    """
    judged = judge_all(results_of(lab), lab)
    for name, verdict in fresh(lab).items():
        if name in judged:
            row = next(iter(judged[name].values()))
            row |= {"verdict": verdict, "before": row["verdict"]}
    return judged


def baseline(claim: AnyClaim) -> str:
    """Returns the model with which a claim compares OSA."""
    assert isinstance(claim, Comparison)
    return claim.compare[0][1]


def fresh(lab: Lab) -> dict[str, Verdict]:
    """Judges the claims in `FRESH` on new seeds. Omits claims that still wait for runs."""
    found = lab.once("fresh verdicts", lambda: {name: verdict(lab) for name, verdict in FRESH.items()})
    return {name: verdict for name, verdict in found.items() if verdict is not None}


def headline(judged: dict[str, dict[str, dict]], fresh: Mapping[str, Verdict]) -> dict:
    """Counts the verdicts on the primary comparisons. Verdicts in `fresh` replace the verdicts on Table 2's runs.

    adjusted   Holm's adjusted p-value of each comparison
    together   the number of comparisons that hold at a family-wise error rate of 5 %
    family_p   the maximum adjusted p-value of these comparisons; None if no comparison holds
    """
    verdicts: dict[str, Verdict] = {name: next(iter(judged[name].values()))["verdict"] for name in PRIMARY}
    verdicts |= fresh
    p_values = {name: verdict.p if verdict.n else 1.0 for name, verdict in verdicts.items()}
    # Comparisons whose runs are missing still belong to the declared family, so they count with p = 1.
    waiting = dict.fromkeys(FRESH, 1.0) if fresh else {}
    adjusted = holm(waiting | p_values)
    together = {name: p for name, p in adjusted.items() if p <= LEVEL}
    return count(verdicts.values()) | {
        "reproduces": [name for name, verdict in verdicts.items() if verdict.word == REPRODUCED],
        "leaves_open": [name for name, verdict in verdicts.items() if verdict.here == "undecided"],
        "together": len(together),
        "family_p": max(together.values(), default=None),
        "adjusted": adjusted,
    }


def count(verdicts) -> dict[str, int]:
    """Counts all verdicts (`total`), the open verdicts (`open`), and, for each of `WORDS`, the verdicts with this word."""
    words = [verdict.word for verdict in verdicts]
    named = {word.replace(", ", "_").replace(" ", "_"): words.count(word) for word in WORDS}
    return {"total": len(words), "open": sum(n for word, n in named.items() if word.startswith("open")), **named}


def epoch_ratios(results: Results, first: str, second: str) -> pd.DataFrame:
    """Compares how soon two models reach given train losses.

    For each fraction in `FRACTIONS`, `target_loss` returns the second model's lowest loss in that first part of training.
    Returns a row for each loss. `epoch` is the median epoch at which the second model reaches the loss. `ratio` is the
    first model's number of epochs to the loss, divided by the second model's, estimated as in claims about speed. A loss has
    no row if `epoch` or `ratio` is 0 or infinite, as when most runs never reach the loss.
    """
    rows = []
    starting, curves = results.curves_of_starting(second), [results.curves(name) for name in (first, second)]
    for fraction in FRACTIONS if starting and curves[0] else []:
        loss = target_loss(starting, fraction)
        ours, theirs = ([epochs_to_reach(curve, loss) for curve in own] for own in curves)
        ratio, epoch = judge_ratio(ours, theirs, 1.0).estimate, float(np.median(theirs))
        if 0 < ratio < math.inf and 0 < epoch < math.inf:
            rows.append({"loss": loss, "epoch": epoch, "ratio": ratio})
    return pd.DataFrame(rows, columns=["loss", "epoch", "ratio"])


def ahead_from_epoch(results: Results, first: str, second: str) -> float | None:
    """Returns the first `epoch` of `epoch_ratios` from which all ratios are below 1, so that the first model stays ahead.

    Returns None if the last ratio is not below 1, or if there are no ratios.
    """
    table = epoch_ratios(results, first, second)
    behind = np.flatnonzero(table["ratio"] >= 1)
    since = behind[-1] + 1 if len(behind) else 0
    return float(table["epoch"].iloc[since]) if since < len(table) else None


def draw_comparisons(settings: None, tables: Tables, lab: Lab) -> Figure | None:
    """Draws a forest plot: estimate, interval, limit and the paper's value for each comparison of OSA with another model."""
    judged = judge_table_2(lab)
    rows = [row for name in ABOUT_OSA for row in judged[name].values() if row["verdict"].n]
    if not rows:
        return None
    figure, panels = charts.panels(2, 2.9)
    kinds = {"accuracy": ("Accuracy difference (points)", " − "), "speed": ("Ratio of epochs", " / ")}
    for axes, (kind, (title, sign)) in zip(panels, kinds.items(), strict=True):
        own = [row for row in rows if row["kind"] == kind]
        for y, row in enumerate(own):
            verdict, colour = row["verdict"], looks.look_of(row["models"][0]).colour
            charts.draw_interval(axes, verdict.low, verdict.high, y, colour, WIDEST[kind])
            if WIDEST[kind][0] <= verdict.estimate <= WIDEST[kind][1]:
                axes.plot(verdict.estimate, y, "o", color=colour, markersize=5)
            axes.plot([verdict.limit] * 2, [y - 0.35, y + 0.35], **charts.EXPECTED)
            if row["paper"] is not None:
                axes.plot(row["paper"], y, "D", color=looks.INK, markerfacecolor="#ffffff", markersize=4.5)
        axes.set_yticks(range(len(own)), [sign.join(map(lab.label, row["models"])) for row in own])
        axes.set(xlabel=title, ylim=(len(own) - 0.5, -0.5))
    return figure


def draw_seeds(settings: None, tables: Tables, lab: Lab) -> Figure | None:
    """Draws a dot for each run of Table 2 and a stroke for the paper's value. A log-odds axis spreads values near 100 %."""
    results, models = results_of(lab), list(lab.params.run.variants)
    found = {model: results.accuracies(model) for model in models}
    if not any(found.values()):
        return None
    figure, (axes,) = charts.panels(1, 0.7 + 0.24 * len(models))
    axes.set_xscale("logit")
    for y, model in enumerate(models):
        shares = [accuracy / 100 for accuracy in found[model]]
        axes.plot(shares, [y] * len(shares), "o", color=looks.look_of(model).colour, markersize=4, alpha=0.8)
        if model in lab.paper.table_2:
            axes.plot(lab.paper.table_2[model] / 100, y, "|", color=looks.INK, markersize=13, markeredgewidth=1.6)
    axes.set_xticks([tick / 100 for tick in TICKS], [f"{tick}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_yticks(range(len(models)), map(lab.label, models))
    axes.set(ylim=(len(models) - 0.5, -0.5), xlabel="Test accuracy (per cent)")
    return figure


def draw_speed(settings: None, tables: Tables, lab: Lab) -> Figure | None:
    """Draws the ratio of epochs, OSA / ViT, against the train loss reached. A vertical line marks a claim's target loss."""
    results = results_of(lab)
    if not all(results.starting(model) for model in BASELINES):
        return None
    figure, panels = charts.panels(2, 2.7, sharey=True)
    for axes, name in zip(panels, SPEED, strict=True):
        claim = read_claim(CLAIMS_FILE, name, Speed)
        second = baseline(claim)
        for model in MODELS:
            table = epoch_ratios(results, model, second)
            axes.plot(table["loss"], table["ratio"], **looks.look_of(model).line())
            if len(table):
                last = table[["loss", "ratio"]].iloc[-1]
                axes.plot(*last, ".", color=looks.look_of(model).colour)  # makes a curve of one point visible
                side = "bottom" if last["ratio"] > claim.at_most_factor else "top"  # the label avoids the dashed line
                axes.annotate(lab.label(model), last, xytext=(3, 0), textcoords="offset points", va=side)
        axes.axhline(claim.at_most_factor, **charts.EXPECTED)
        judged_at = target_loss(results.curves_of_starting(second), claim.of_training)
        axes.axvline(judged_at, color=looks.GRID, linewidth=1.6, zorder=0)
        axes.set(title=f"Against {lab.label(second)}", xlabel="Train loss reached", yscale="log", xscale="log")
        axes.set_xticks(ticks := [2, 1, 0.5, 0.2, 0.1], [f"{tick:g}" for tick in ticks], minor=False)
        axes.set_yticks(ticks := [0.5, 0.7, 1, 1.5, 2, 3], [f"{tick:g}" for tick in ticks], minor=False)
        axes.minorticks_off()
        axes.invert_xaxis()
        axes.margins(x=0.25, y=0.12)
    panels[0].set_ylabel("Epochs of OSA / epochs of ViT")
    return figure


STUDY = Study(
    summarise=summarise,
    figures={
        "section_5_comparisons": draw_comparisons,
        "section_5_seeds": draw_seeds,
        "section_5_speed": draw_speed,
    },
)
