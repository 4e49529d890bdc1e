"""He et al. 2023, Section 4, and OSA beside it: which recipe trains at which depth? Theirs are language models of
width 1,024 on WikiText-103, these are ViTs of width 64 on MNIST.

Models of 12, 36 and 72 blocks, at each depth all with the same budget, and each with the learning rate that a pilot found
for its kind at 36 blocks (pipeline/pilot.py). The stage gathers the runs that are there; `python -m pipeline.fan_out --only`
trains others.
"""

import itertools
import math
from dataclasses import replace
from typing import Annotated

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field

from pipeline import pilot
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.core.params import Name, PositiveInt, Section, Seed, Seeds
from pipeline.lab import Lab
from pipeline.reporting import charts
from pipeline.reporting.looks import INK, STYLE, look
from pipeline.reporting.numbers import ABSENT, fixed, number, span
from pipeline.statistics import LEAST_RUNS
from pipeline.studies import OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._deep import (
    DOES_NOT,
    GUESSING,
    TRAINS,
    Wanted,
    gather,
    judged_claims,
    of_devices,
    outcome,
    read_claims,
)
from pipeline.studies._runs import Request, of_other_code
from pipeline.studies.section_5 import account
from pipeline.studies.signals import SHAPED, label_of

place = 53
gathers = True
OSA, CONTROL = "osa_shaped", "softmax_shaped"
MODELS = (OSA, "espa", "vskipinit", "softmax_shaped", "softmax_shaped_norm", "uspa", "vit", "osa_exact")  # in this order
MODELS += ("alpha", "per_head", "gelu", "tokens", "vit_noskip_nonorm")  # OSA without one of its changes
PILOTS = {  # whose rate a model without a pilot of its own has: that of the nearest kind
    **dict.fromkeys(SHAPED, OSA),
    "uspa": "espa",
    "softmax_shaped_norm": "softmax_shaped",
    "vit_noskip_nonorm": "softmax_shaped",
}
PARTS = {  # what each model says of OSA's parts
    "osa_exact": "None of the changes",
    "gelu": "MLP",
    "tokens": "Tokens",
    "per_head": "Attention: V and O",
    "alpha": "Attention: α",
    "softmax_shaped": "Attention: all of it",
    "vskipinit": "Attention: all of it",
    OSA: "All changes",
}
DEVIATIONS = (  # beyond data and size
    "He et al. train with Adam without weight decay, with clipping at 0.1, warm-up and a cosine (Appendix H.1), rotary "
    "positions and RMSNorm; here it is AdamW with the weight decay and clipping of Table 2’s recipe at a constant rate, "
    "learned positions and LayerNorm, and every shaped model divides its tokens once by their RMS."
)
THIN = ((1, 1), (4, 1, 1, 1), (9, 2), (3, 3))  # dashes of OSA without one of its changes, in the order of SHAPED
SIGNALS = "paper_outputs/studies/signals"

Depth = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]  # blocks, epochs


class Settings(Section):
    """Each model at each depth once for each of `seeds`, and for `claim_seeds` where a claim asks about it."""

    models: list[Name] = Field(list(MODELS))
    depths: Annotated[list[Depth], Field(min_length=1)]  # in the order of training
    seeds: list[Seed]
    claim_seeds: Seeds


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return list(wanted(settings, lab).values())


def wanted(settings: Settings, lab: Lab) -> Wanted:
    """Every run whose rate the pilot has found: one of each model, depth by depth, then more of what claims are about."""
    asked = {(model, claim.depth) for claim in read_claims(lab.paper).values() for model in claim.models}
    cells = [(model, *depth, seed) for depth in settings.depths for seed in settings.seeds for model in settings.models]
    cells += [
        (model, *depth, seed)
        for depth in settings.depths
        for seed in settings.claim_seeds
        for model in settings.models
        if (model, depth[0]) in asked
    ]
    found = {}
    for model, blocks, epochs, seed in dict.fromkeys(cells):
        if chosen := pilot.found(PILOTS.get(model, model), lab.paper.recipe.train.learning_rate):
            found[model, blocks, seed] = training(model, blocks, epochs, seed, *chosen)
    return found


def training(model: str, blocks: int, epochs: int, seed: int, rate: float, alpha: float) -> Request:
    """One run, of OSA with `alpha`/L unless just that is left out."""
    variant = OSA if model in SHAPED else model
    changes = ({"alpha_times_depth": alpha} if variant == OSA else {}) | (SHAPED[model][0] if model in SHAPED else {})
    overrides = {"model": {"depth": blocks}, "train": {"epochs": epochs, "learning_rate": rate}}
    return variant, overrides | ({"variant": changes} if changes else {}), seed


def measure(settings: Settings, lab: Lab) -> Tables:
    return gather(wanted(settings, lab), lab)


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    depths = sorted(blocks for blocks, _ in settings.depths)
    claims = judged_claims(depths, tables, lab, lambda model: label_of(model, lab))
    first = replace(who_trains(settings, depths, tables, lab), headline=headline(tables["runs"], depths, claims, lab))
    return [first, parts(depths, tables["runs"], lab), *claims, of_the_pilot(lab)]


def cell(runs: pd.DataFrame, model: str, depth: int) -> pd.DataFrame:
    return runs[(runs["variant"] == model) & (runs["depth"] == depth)]


def tried(runs: pd.DataFrame, model: str, depth: int) -> pd.DataFrame:
    """The runs of a cell that are there."""
    rows = cell(runs, model, depth)
    return rows[rows["status"] != "missing"]


def told(runs: pd.DataFrame, model: str, depth: int) -> str:
    """e.g. trains, with its loss, accuracy and cost on a smaller line, and how many runs where it is not one."""
    rows = tried(runs, model, depth)
    word, there = outcome(rows), rows[rows["status"] == "finished"]
    numbers = [account(rows["status"])] if len(rows) > 1 or len(rows) > len(there) else []
    if len(there):
        accuracy, seconds = fixed(100 * there["test_accuracy"].mean(), 1), fixed(there["seconds_per_step"].median(), 2)
        numbers = [reached(there), f"{accuracy}%", f"{seconds} s", *numbers]
    return "\n".join(filter(None, (word, "; ".join(numbers))))


def initial(model: str, depth: int, column: str) -> float:
    """A number of the study `signals`, of the last block or, the gradient, of the first; NaN where it has none."""
    path = f"{SIGNALS}/{'wholes' if column == 'image_share' else 'blocks'}.csv"
    try:
        rows = files.read_csv(path).query("model == @model and depth == @depth")
    except UserError:
        return math.nan
    return float(rows[column].iloc[0 if column == "gradient" else -1]) if len(rows) else math.nan


def who_trains(settings: Settings, depths: list[int], tables: Tables, lab: Lab) -> Finding:
    """The answer: models by depths, and what a step costs."""
    runs, budget = tables["runs"], dict(settings.depths)
    rows, measures = [], []
    for model in settings.models:
        label = label_of(model, lab)
        for depth in depths:
            losses = cell(runs, model, depth)["train_loss"].dropna()
            note = outcome(cell(runs, model, depth))
            measures.append(Measure(f"{label}, {depth} blocks: last train loss", losses.mean(), n=len(losses), note=note))
        gradient = number(initial(model, depths[-1], "gradient"))
        theirs = f"{lab.paper.deep_losses[model]:g}" if model in lab.paper.deep_losses else ABSENT
        rate = " or ".join(f"{rate:g}" for rate in runs.loc[runs["variant"] == model, "learning_rate"].unique()) or ABSENT
        rows.append([label, rate, *(told(runs, model, depth) for depth in depths), theirs, gradient])
    epochs = [f"{depth} blocks, {budget[depth]} epoch{'s' if budget[depth] > 1 else ''}" for depth in depths]
    return Finding(
        id="depth",
        title="Which recipe trains at which depth",
        place="He et al. 2023, Section 4",
        kind=OBSERVATION,
        statement=f"Whether each model trains: its last recorded train loss is below {TRAINS:g} × ln 10 = "
        f"{TRAINS * GUESSING:.2f}; above {DOES_NOT:g} × ln 10 = {DOES_NOT * GUESSING:.2f}, or if it diverges, it does not. "
        "A run that diverges leaves a claim undecided.",
        measures=measures,
        table=Table(
            ["Model", "Rate", *epochs, "Theirs, 36 blocks", f"‖∂loss/∂θ₁‖₂ at first, {depths[-1]}"],
            rows,
            "lr" + "l" * len(depths) + "rr",
            note="Below each answer: last train loss, test accuracy, means over seeds, and seconds a training step by the "
            f"clock, in which the machine may have done other things.{of_accuracy(tables['histories'])} Theirs is the train "
            "loss on WikiText-103 (Table 1 and Section 4), where a guess has more to choose from: compare the order alone. "
            f"The gradient of the first block as initialised is of the study signals (`{SIGNALS}/blocks.csv`), of one seed.",
        ),
        figure=draw(tables["histories"], depths, settings.models, lab) if len(tables["histories"]) else None,
        caption="Train loss, a line for each run, cut where it is higher, even if throughout. A model trains if it ends "
        "below the lower dotted line, and does not if it ends above the upper one.",
        in_short=answer(runs, settings.models, depths, lab),
        remark=" ".join(filter(None, (DEVIATIONS, of_the_task(depths[len(depths) // 2], lab), *of_the_runs(budget, runs)))),
        models=tuple(model for model in settings.models if model not in SHAPED),
        sources=[f"{SIGNALS}/blocks.csv", f"{SIGNALS}/wholes.csv"],
    )


def of_the_task(depth: int, lab: Lab) -> str:
    """Why the order may differ from that of language models: what [cls] knows of the image, as initialised."""
    softmax, skipinit = (
        f"{number(round(initial(model, depth, 'image_share'), 9))} in {lab.label(model)}"  # without rounding's share
        for model in ("softmax_shaped", "vskipinit")
    )
    return (
        "Theirs predict a word at every token, these one digit from [cls] alone. So tokens that all become one need not "
        "stop a model, as long as that one differs between images, and a [cls] that no patch reaches at first has to open "
        f"its attention before it learns of images at all: the share of [cls] that differs between images, at {depth} "
        f"blocks as initialised, is {softmax} and {skipinit}."
    )


def of_the_runs(budget: dict[int, int], runs: pd.DataFrame) -> list[str]:
    """Whether more blocks end higher after as many epochs, and remarks on what made the runs."""
    losses = runs.groupby(["variant", "depth"])["train_loss"].mean().unstack("depth").reindex(columns=sorted(budget))
    told = []
    for few, more in itertools.pairwise(sorted(budget)):
        both = losses[[few, more]].dropna()
        if len(both) and budget[few] == budget[more]:
            higher = int((both[more] > both[few]).sum())
            told.append(f"{higher} of {len(both)} models that were trained at {few} and {more} blocks end higher at {more}.")
    theirs = "Theirs of 72 and 108 blocks end higher than those of 36 after 100,000 steps (Table 3)." if told else ""
    return [*told, theirs, of_devices(runs), of_other_code(runs)]


def answer(runs: pd.DataFrame, models: list[str], depths: list[int], lab: Lab) -> str:
    """Which models train at each depth, as far as they were trained."""
    sentences = []
    for depth in depths:
        words = {model: outcome(cell(runs, model, depth)) for model in models}
        done = [model for model in models if words[model] != "not evaluated"]
        trained = [label_of(model, lab) for model in done if words[model] == "trains"]
        if done:
            count = f"{len(trained)} train{'s' * (len(trained) == 1)}" if trained else "none is shown to train"
            is_open = [label_of(model, lab) for model in done if words[model] == "undecided"]
            listed = [f": {'; '.join(trained)}" if trained else "", f"; undecided: {'; '.join(is_open)}" if is_open else ""]
            sentences.append(f"At {depth} blocks, with {len(done)} of {len(models)} models tried, {count}{''.join(listed)}.")
    if sentences:
        return " ".join(sentences)
    deepest, labels = depths[-1], (label_of(OSA, lab), lab.label("osa_exact"))
    first = [number(initial(model, deepest, "gradient")) for model in (OSA, "osa_exact")]
    return (
        f"None of {len(models)} models is trained yet. As initialised with {deepest} blocks, the first block’s gradient is "
        f"{first[0]} in {labels[0]} and {first[1]} in {labels[1]}."
    )


def headline(runs: pd.DataFrame, depths: list[int], claims: list[Finding], lab: Lab) -> str:
    """For the report's first screen: whether OSA trains at the greatest depth that was tried, and if not, where it stops."""
    words = {depth: outcome(cell(runs, OSA, depth)) for depth in depths}
    ours = [depth for depth in depths if words[depth] != "not evaluated"]
    if not ours:
        return ""
    deepest, label = ours[-1], label_of(OSA, lab)
    rows = tried(runs, OSA, deepest)
    seeds = number_of_seeds(rows)
    if len(rows) < LEAST_RUNS:
        seeds += f", which decide{'s' * (len(rows) == 1)} nothing"
    else:
        seeds += "".join(f": {claim.verdict}" for claim in claims if claim.id == f"osa_trains_at_{deepest}")
    without = f"{deepest} blocks without skips and LN"
    if words[deepest] == "trains":
        return f"{label} trains at {without} (last train loss {reached(rows)}; {seeds}){beside(runs, deepest, depths, lab)}"
    least = [depth for depth in depths if words[depth] == "trains"]
    where = f"; it does at {least[-1]}" if least else ""
    losses, diverged = rows["train_loss"].dropna(), int((rows["status"] == "diverged").sum())
    ended = [f"its train loss ends at {span(losses, lambda loss: fixed(loss, 2))}"] if len(losses) else []
    ended += [f"{diverged} of its runs diverge{'s' * (diverged == 1)}"] if diverged else []
    return f"{label} is not shown to train at {without}: {', and '.join(ended)} ({seeds}){where}."


def number_of_seeds(rows: pd.DataFrame) -> str:
    return "one seed" if len(rows) == 1 else f"{len(rows)} seeds"


def reached(rows: pd.DataFrame) -> str:
    """Mean last train loss of the runs of a cell."""
    return fixed(rows["train_loss"].mean(), 2)


def beside(runs: pd.DataFrame, depth: int, depths: list[int], lab: Lab) -> str:
    """What the control does there, as what a model reaches with OSA is not OSA's doing if softmax reaches it too; and which
    models end lower, none of whose runs diverged. Numbers of seeds are told where they are others than OSA's."""
    ours, control = tried(runs, OSA, depth), f"softmax attention with the same MLPs, {lab.label(CONTROL)}"

    def loss_of(model: str) -> str:
        rows = tried(runs, model, depth)
        return f"({reached(rows)}{f'; {number_of_seeds(rows)}' if len(rows) != len(ours) else ''})"

    lesser = [each for each in depths if each < depth and outcome(cell(runs, CONTROL, each)) == "trains"]
    said = {
        "not evaluated": f"; {control}, is not tried there, and trains at {lesser[-1]}" if lesser else "",
        "trains": f"; so does {control} {loss_of(CONTROL)}",
        "undecided": f"; of {control}, it is undecided",
        "does not": f"; {control}, does not",
    }
    there = runs[runs["depth"] == depth]
    ended = there[~there["variant"].isin(there.loc[there["status"] == "diverged", "variant"])]
    losses = ended.groupby("variant", sort=False)["train_loss"].mean()
    lower = losses[losses < ours["train_loss"].mean()].sort_values()
    listed = ", ".join(f"{label_of(model, lab)} {loss_of(model)}" for model in lower.index)
    return f"{said[outcome(cell(runs, CONTROL, depth))]}." + (f" Lower losses: {listed}." if listed else "")


def of_accuracy(histories: pd.DataFrame) -> str:
    """By how much the test accuracy of one run differs within its last half epoch, at the most."""
    if histories.empty:
        return ""
    last = histories.groupby(["variant", "depth", "seed"])["epoch"].transform("max")
    late = histories[histories["epoch"] >= last - 0.5].groupby(["variant", "depth", "seed"])["test_accuracy"]
    swing = fixed(100 * (late.max() - late.min()).max(), 1)
    return f" Accuracies are those of the last step and order no models: one moved by {swing} points in the last half epoch."


def parts(depths: list[int], runs: pd.DataFrame, lab: Lab) -> Finding:
    """What of it is attention, and what MLP: as initialised, and trained at that depth and at lesser ones."""
    middle = len(depths) // 2
    depth, deepest, shown = depths[middle], depths[-1], depths[: middle + 1]
    rows, measures = [], []
    for model, part in PARTS.items():
        numbers = {column: initial(model, depth, column) for column in ("gradient", "q", "rank")}
        what = f"{label_of(model, lab)}, {depth} blocks: ‖∂loss/∂θ₁‖₂ as initialised"
        measures.append(Measure(what, numbers["gradient"]))
        outcomes = [told(runs, model, blocks) for blocks in shown]
        rows.append([label_of(model, lab), part, *map(number, numbers.values()), *outcomes])
    gradient, rank = ({model: initial(model, depth, c) for model in PARTS} for c in ("gradient", "rank"))
    trained = []
    for blocks in shown:
        words = {label_of(model, lab): outcome(cell(runs, model, blocks)) for model in PARTS}
        said = "; ".join(f"{label}: {word}" for label, word in words.items() if word != "not evaluated")
        trained += [f" Trained at {blocks} blocks – {said}."] if said else []
    return Finding(
        id="depth_parts",
        title="What is attention, and what is MLP",
        place="Sections 2 and 4; He et al. 2023, Section 4",
        kind=OBSERVATION,
        statement=f"OSA of {depth} blocks with one of its changes left out, and the same frame around other attention: the "
        "gradient that reaches the first block at initialisation, what the last one leaves of the tokens, and what trains.",
        measures=measures,
        table=Table(
            ["Model", "What differs", "‖∂loss/∂θ₁‖₂", "q", "Effective rank", *(f"Trained, {blocks}" for blocks in shown)],
            rows,
            "llrrr" + "l" * len(shown),
            note="As initialised, with one seed, from the study signals: mean square q and effective rank of the tokens of "
            "the last block. Below what was trained: last train loss, test accuracy, seconds a step.",
        ),
        in_short=f"In the same frame the tokens’ effective rank is {number(rank[OSA])} after OSA and "
        f"{number(rank['softmax_shaped'])} after softmax. The gradient of OSA’s first block is {number(gradient[OSA])}, and "
        f"{number(gradient['gelu'])} where GELU is rescaled and not shaped." + "".join(trained),
        remark="In this frame neither signals nor gradients vanish or explode around softmax either, where tokens do not "
        "stay apart. Around OSA the gradient explodes if α does not fall with depth, or GELU is rescaled to keep q and not "
        "shaped (left as it is, signals vanish: OSA (exact)); it grows where V and O are drawn per head; and tokens that "
        f"are not normalised lose their rank. With {deepest} blocks, OSA’s own first gradient is "
        f"{number(initial(OSA, deepest, 'gradient') / gradient[OSA])} times that with {depth}. All that is at "
        "initialisation: what trains is another question.",
        sources=[f"{SIGNALS}/blocks.csv"],
        models=tuple(model for model in PARTS if model not in SHAPED),
    )


def of_the_pilot(lab: Lab) -> Finding:
    """What the pilot tried, and what it chose."""
    usual, table = lab.paper.recipe.train.learning_rate, pilot.read()
    chosen = {model: pilot.found(model, usual) for model in pilot.MODELS}
    rows, measures = [], []
    for each in table.sort_values(["model", "learning_rate", "alpha_times_depth"]).itertuples():
        label, alpha = lab.label(each.model), number(each.alpha_times_depth)
        of = pilot.FIRST_ALPHA if math.isnan(each.alpha_times_depth) else each.alpha_times_depth  # of others than OSA none
        is_chosen = chosen[each.model] == (each.learning_rate, of)
        measures.append(Measure(f"{label}, rate {each.learning_rate:g}, α L {alpha}: loss", each.loss))
        rows.append([label, f"{each.learning_rate:g}", alpha, fixed(each.loss, 3), "chosen" if is_chosen else ""])
    rates = "; ".join(f"{lab.label(model)} {found[0]:g}" for model, found in chosen.items() if found)
    ends = min(pilot.RATES), max(pilot.RATES)
    losses = {model: own.tolist() for model, own in table.groupby("model")["loss"]}
    alike = [model for model in losses if chosen[model] and pilot.tells_nothing(losses[model])]
    edge = [lab.label(model) for model, found in chosen.items() if found and model not in alike and found[0] in ends]
    equal = "; ".join(map(lab.label, alike))
    users = {of: [label_of(model, lab) for model in PILOTS if PILOTS[model] == of] for of in dict.fromkeys(PILOTS.values())}
    borrowed = "; ".join(f"that of {lab.label(of)} serves {' and '.join(models)}" for of, models in users.items())
    alpha = f" OSA (shaped) has α = {chosen[OSA][1]:g}/L." if chosen[OSA] else ""
    return Finding(
        id="depth_pilot",
        title="How the rates were chosen",
        place="He et al. 2023, Appendix H.1",
        kind=OBSERVATION,
        statement=f"Mean train loss of the last {pilot.LAST} of {pilot.STEPS} steps at {pilot.DEPTH} blocks, with the seed "
        f"{pilot.SEED}, which no study has. The rate, which serves at every depth, is the one with the least loss, sought "
        f"from the middle of three up or down; α L likewise, with that rate, from {pilot.FIRST_ALPHA:g}. Where the losses "
        f"of all rates are within {pilot.TELLS:g} of one another, it is the paper’s, {usual:g}.",
        measures=measures or [Measure("Trainings of the pilot", 0)],
        table=Table(["Model", "Learning rate", "α L", "Train loss", ""], rows, "lrrrl") if rows else None,
        in_short=f"Rates: {rates}.{alpha}" if rates else "No search is over yet.",
        remark=f"A model without a pilot of its own takes the rate of the nearest kind, and may do better with another: "
        f"{borrowed}."
        + (f" No rate is better than another, so that it is the paper’s: {equal}." if equal else "")
        + (f" At an end of the rates tried, so that a better one may lie beyond: {'; '.join(edge)}." if edge else ""),
        sources=[str(pilot.TABLE)],
    )


@matplotlib.rc_context(STYLE)
def draw(histories: pd.DataFrame, depths: list[int], models: list[str], lab: Lab) -> Figure:
    """A panel for each depth with runs."""
    there = [depth for depth in depths if (histories["depth"] == depth).any()]
    figure, panels = charts.panels(len(there), 4.2, sharey=True)
    for axes, depth in zip(panels, there, strict=True):
        own = histories[histories["depth"] == depth]
        for (model, _), curve in own.groupby(["variant", "seed"], sort=False):
            axes.plot(curve["epoch"], curve["train_loss"], **line_of(model))
        for share in (TRAINS, DOES_NOT):
            axes.axhline(share * GUESSING, color=INK, linestyle=":", linewidth=0.8)
        axes.set(title=f"{depth} blocks", xlabel="Epoch", ylim=(0, 1.5 * GUESSING))
    panels[0].set_ylabel("Train loss")
    drawn = [model for model in models if (histories["variant"] == model).any()]
    charts.legend(figure, [Line2D([], [], label=label_of(model, lab), **line_of(model)) for model in drawn])
    return figure


def line_of(model: str) -> dict:
    """The look of a model; of OSA without one of its changes its colour, thin, and dashes by what is left out."""
    if model in SHAPED:
        return look(OSA).line(linewidth=1, linestyle=(0, THIN[list(SHAPED).index(model)]))
    return look(model).line(linewidth=1.3)
