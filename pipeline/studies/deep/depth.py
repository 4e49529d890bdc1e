"""Depth: which recipe trains at which? Section 4 of He et al. 2023, and OSA beside it. Theirs are language models of
width 1,024 on WikiText-103, these are ViTs of width 64 on MNIST.

Models of 12, 36 and 72 blocks, at each depth all with the same budget, and each with the learning rate that a pilot found
for its kind, at 36 blocks or, of 72, there (pipeline/tools/pilot.py). The stage gathers the runs that are there; `python -m
pipeline.fan_out --only` trains others.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field

from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.core.params import AnySeeds, Name, PositiveInt, Section, Seeds
from pipeline.lab import Lab
from pipeline.report import charts
from pipeline.report.looks import INK, STYLE, look
from pipeline.report.numbers import ABSENT, fixed, mean_std, number, plural, span
from pipeline.statistics import LEAST_RUNS
from pipeline.studies import OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._deep import (
    DOES_NOT,
    GUESSING,
    TRAINS,
    Wanted,
    gather,
    judged_claims,
    outcome,
    read_claims,
)
from pipeline.studies._runs import Request, of_other_code
from pipeline.studies.deep import signals
from pipeline.studies.deep.signals import SHAPED, ends, over_seeds
from pipeline.studies.paper.section_5 import account
from pipeline.tools import pilot

place = 53
gathers = True
OSA, CONTROL, NONE = "osa_shaped", "softmax_shaped", "osa_exact"  # in the same frame; with none of its changes
MODELS = (OSA, "espa", "vskipinit", CONTROL, "softmax_shaped_norm", "uspa", "vit", NONE)  # in this order
MODELS += ("alpha", "per_head", "gelu", "tokens", "vit_noskip_nonorm")  # OSA without one of its changes
SLOWER = "slower"  # OSA with all its changes and the next lower rate of the pilot, where a claim asks for it
PILOTS = {  # whose rate a model without a pilot of its own has: that of the nearest kind
    **dict.fromkeys((*SHAPED, SLOWER), OSA),
    "uspa": "espa",
    "softmax_shaped_norm": "softmax_shaped",
    "vit_noskip_nonorm": "softmax_shaped",
}
PARTS = {  # what each model says of OSA's parts
    NONE: "None of the changes",
    "gelu": "MLP",
    "tokens": "Tokens",
    "per_head": "Attention: V and O",
    "alpha": "Attention: α",
    CONTROL: "Attention: all of it",
    "vskipinit": "Attention: all of it",
    OSA: "All changes",
}
DEVIATIONS = (  # beyond data and size
    "He et al. train with Adam without weight decay, with clipping at 0.1, warm-up and a cosine (Appendix H.1), rotary "
    "positions and RMSNorm; here it is AdamW with the weight decay and clipping of Table 2’s recipe at a constant rate, "
    "learned positions and LayerNorm, and every shaped model divides its tokens once by their RMS."
)
CHANGES = {  # what OSA has in place of what each name of SHAPED leaves out
    "alpha": "α that falls with depth",
    "gelu": "shaped activations",
    "per_head": "V and O drawn jointly",
    "tokens": "normalised tokens",
}
KNOWN = {  # when the rule of a claim was written
    "osa_trains_at_36": "The rule is older than its runs and came with the pilot’s first trainings, in which one seed was "
    "below the limit after 200 steps: it asks whether others get there, and stay.",
    "osa_slower_trains_at_72": "The claim was added when at the pilot’s rate one seed had not trained and another had "
    "diverged. Of this rate the pilot’s training and a few steps of one seed had been seen.",
}
SIGNALS = "paper_outputs/studies/signals"
RESULTS = {"trains": "trains too", "does not": "does not train", "undecided": "is undecided"}
LOSSES, TICKS = (0.1, 1.5 * GUESSING), (0.1, 0.2, 0.5, 1, 2)  # of the figure

Depth = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]  # blocks, epochs


class Settings(Section):
    """Each model at each depth once for each of `seeds`, and for `claim_seeds` where a claim asks about it."""

    models: list[Name] = Field(list(MODELS))
    depths: Annotated[list[Depth], Field(min_length=1)]  # in the order of training
    seeds: AnySeeds
    claim_seeds: Seeds


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return list(wanted(settings, lab).values())


def wanted(settings: Settings, lab: Lab) -> Wanted:
    """Every run whose rate the pilot has found: one of each model, depth by depth, then more of what claims are about."""
    judged = with_slower(settings.models)
    asked = {(model, claim.depth) for claim in read_claims(lab.paper).values() for model in claim.models}
    cells = [(model, *depth, seed) for depth in settings.depths for seed in settings.seeds for model in settings.models]
    cells += [
        (model, *depth, seed)
        for depth in settings.depths
        for seed in settings.claim_seeds
        for model in judged
        if (model, depth[0]) in asked
    ]
    found = {}
    for model, blocks, epochs, seed in dict.fromkeys(cells):
        if chosen := pilot.found(PILOTS.get(model, model), lab.paper.recipe.train.learning_rate, blocks):
            rate, alpha = chosen
            if model == SLOWER:
                rate = pilot.below(rate, blocks)
            if rate:
                found[model, blocks, seed] = training(model, blocks, epochs, seed, rate, alpha)
    return found


def with_slower(models: list[str]) -> list[str]:
    return [*models, SLOWER] if OSA in models else models


def recipe_of(model: str) -> str:
    """The variant of params.yaml that a model is, or that it changes."""
    return OSA if model in (*SHAPED, SLOWER) else model


def training(model: str, blocks: int, epochs: int, seed: int, rate: float, alpha: float) -> Request:
    """One run, of OSA with `alpha`/L unless just that is left out."""
    variant = recipe_of(model)
    changes = ({"alpha_times_depth": alpha} if variant == OSA else {}) | (SHAPED[model][0] if model in SHAPED else {})
    overrides = {"model": {"depth": blocks}, "train": {"epochs": epochs, "learning_rate": rate}}
    return variant, overrides | ({"variant": changes} if changes else {}), seed


def measure(settings: Settings, lab: Lab) -> Tables:
    return gather(wanted(settings, lab), lab)


def label_of(model: str, lab: Lab) -> str:
    return f"{lab.label(OSA)}, next lower rate" if model == SLOWER else signals.label_of(model, lab)


def line_of(model: str) -> dict:
    return look(OSA).line(linewidth=1.3, linestyle=(0, (6, 1))) if model == SLOWER else signals.line_of(model)


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    depths = sorted(blocks for blocks, _ in settings.depths)
    claims = [
        replace(claim, remark=of_a_claim(claim, lab))
        for claim in judged_claims(depths, tables, lab, lambda model: label_of(model, lab))
    ]
    first = replace(who_trains(settings, depths, tables, lab), headlines=headlines(tables["runs"], settings, claims, lab))
    return [first, parts(depths, tables["runs"], lab), *claims, of_the_pilot(lab)]


def of_a_claim(claim: Finding, lab: Lab) -> str:
    """What was known when its rule was written, and whose rates were sought less well than others."""
    depth = pilot.searched(read_claims(lab.paper)[claim.id].depth)
    told = [KNOWN.get(claim.id, "")]
    if borrowed := [model for model in claim.models if PILOTS.get(model, OSA) != OSA]:
        lent = " and ".join(f"{label_of(model, lab)} has the rate of {lab.label(PILOTS[model])}" for model in borrowed)
        told.append(f"Without a pilot of its own, {lent}.")
    rates, names = pilot.SEARCHES[depth].rates, {0: "lowest", -1: "highest"}
    for model, (rate, _) in chosen_at(depth, lab).items():
        told += [
            f"The rate of {lab.label(model)} is the {name} of those tried, so that a better one may lie beyond."
            for end, name in names.items()
            if model in claim.models and rate == rates[end]
        ]
    return " ".join(filter(None, told))


def cell(runs: pd.DataFrame, model: str, depth: int) -> pd.DataFrame:
    return runs[(runs["variant"] == model) & (runs["depth"] == depth)]


def tried(runs: pd.DataFrame, model: str, depth: int) -> pd.DataFrame:
    """The runs of a cell that are there."""
    rows = cell(runs, model, depth)
    return rows[rows["status"] != "missing"]


def is_asked(runs: pd.DataFrame, model: str, depth: int) -> bool:
    """Whether a cell is one of the study's, as all are but those at the lower rate that no claim is about."""
    return model != SLOWER or len(cell(runs, model, depth)) > 0


def told(runs: pd.DataFrame, model: str, depth: int) -> str:
    """e.g. trains, with its loss and accuracy on a smaller line, and how many runs where it is not one."""
    if not is_asked(runs, model, depth):
        return ABSENT
    rows = tried(runs, model, depth)
    word, there = outcome(rows), rows[rows["status"] == "finished"]
    numbers = [account(rows["status"])] if len(rows) > 1 or len(rows) > len(there) else []
    if len(there):
        numbers = [*reached(there), *numbers]
    return "\n".join(filter(None, (word, "; ".join(numbers))))


def initial(column: str) -> Callable[[str, int], float]:
    """What the study `signals` has of a model and depth, the mean over seeds, as a function that is NaN where it has none:
    of the last block or, the gradient, of the first."""
    try:
        if column == "image_share":
            values = over_seeds(files.read_csv(f"{SIGNALS}/wholes.csv"))[column]
        else:
            values = ends(files.read_csv(f"{SIGNALS}/blocks.csv"))[column != "gradient"][column]
    except UserError:
        values = pd.Series(dtype=float)
    return lambda model, depth: float(values.get((model, depth), math.nan))


def who_trains(settings: Settings, depths: list[int], tables: Tables, lab: Lab) -> Finding:
    """The answer: models by depths."""
    runs, budget = tables["runs"], dict(settings.depths)
    models = [model for model in with_slower(settings.models) if any(is_asked(runs, model, depth) for depth in depths)]
    rows, measures = [], []
    for model in models:
        label = label_of(model, lab)
        for depth in [each for each in depths if is_asked(runs, model, each)]:
            losses = cell(runs, model, depth)["train_loss"].dropna()
            note = outcome(cell(runs, model, depth))
            measures.append(Measure(f"{label}, {depth} blocks: last train loss", losses.mean(), n=len(losses), note=note))
        theirs = f"{lab.paper.deep_losses[model]:g}" if model in lab.paper.deep_losses else ABSENT
        rate = " or ".join(map(number, runs.loc[runs["variant"] == model, "learning_rate"].unique())) or ABSENT
        rows.append([label, rate, *(told(runs, model, depth) for depth in depths), theirs])
    epochs = [f"{depth} blocks, {plural(budget[depth], 'epoch')}" for depth in depths]
    return Finding(
        id="depth",
        title="Which recipe trains at which depth",
        place="He et al. 2023, Section 4",
        kind=OBSERVATION,
        statement=f"Whether each model trains: its last recorded train loss is below {TRAINS:g} × ln 10 = "
        f"{TRAINS * GUESSING:.2f}; above {DOES_NOT:g} × ln 10 = {DOES_NOT * GUESSING:.2f}, or if it diverges, it does not. "
        "A run that diverges leaves a claim undecided. These words describe the runs that are there: of fewer than "
        f"{LEAST_RUNS} of a model no claim is decided.",
        measures=measures,
        table=Table(
            ["Model", "Rate", *epochs, "Theirs, 36 blocks"],
            rows,
            "lr" + "l" * len(depths) + "r",
            note="Below each answer: last train loss and test accuracy of one run, of two or, where there are more, means "
            "over seeds, and the accuracy’s standard deviation."
            f"{of_accuracy(tables['histories'], lab)} Theirs is the train loss on WikiText-103 (Table 1, Section 4, "
            "Appendix G), where a guess has more to choose from: compare the order alone. What a step costs is told with "
            "the benchmarks.",
        ),
        figure=draw(tables["histories"], depths, models, lab) if len(tables["histories"]) else None,
        caption="Train loss, a line for each run, cut where it is higher, even if throughout. A model trains if it ends "
        "below the lower dotted line, and does not if it ends above the upper one.",
        in_short=answer(runs, settings.models, depths, lab),
        remark=" ".join(filter(None, (DEVIATIONS, of_the_task(depths[len(depths) // 2], lab), *of_the_runs(budget, runs)))),
        models=tuple(model for model in settings.models if model not in SHAPED),
        sources=[f"{SIGNALS}/wholes.csv"],
        limitation=f"Deep models have {span(budget.values())} epochs on the same data, one seed or, where a claim is about "
        f"them, up to {len(settings.claim_seeds)}, and rates from a pilot of "
        f"{span(search.steps for search in pilot.SEARCHES.values())} steps, of their own or of the nearest kind.",
    )


def of_the_task(depth: int, lab: Lab) -> str:
    """Why the order may differ from that of language models: what [cls] knows of the image, as initialised."""
    share = initial("image_share")
    softmax, skipinit = (
        f"{number(round(share(model, depth), 9))} in {lab.label(model)}"  # without rounding's share
        for model in (CONTROL, "vskipinit")
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
    theirs = (
        "Theirs, of E-SPA alone and of width 512, end higher the more of 36, 72 and 108 blocks they have after 100,000 "
        "steps; after 1,000,000 that of 72 ends lowest (Table 3)."
    )
    return [*told, theirs if told else "", of_other_code(runs)]


def answer(runs: pd.DataFrame, models: list[str], depths: list[int], lab: Lab) -> str:
    """Which models train at each depth and which do not, as far as they were trained."""
    sentences = []
    for depth in depths:
        by_word = {word: [] for word in ("trains", "undecided", "does not", "not evaluated")}
        for model in models:
            by_word[outcome(cell(runs, model, depth))].append(label_of(model, lab))
        trained, done = by_word["trains"], len(models) - len(by_word.pop("not evaluated"))
        if done:
            count = f"{len(trained)} train{'s' * (len(trained) == 1)}" if trained else "none is shown to train"
            listed = count + (f": {'; '.join(trained)}" if trained else "")
            for start, word in (("Undecided", "undecided"), ("Does not", "does not")):
                listed += f". {start}: {'; '.join(by_word[word])}" if by_word[word] else ""
            sentences.append(f"At {depth} blocks, with {done} of {len(models)} models tried, {listed}.")
    if sentences:
        return " ".join(sentences)
    gradient, deepest = initial("gradient"), depths[-1]
    first = " and ".join(f"{number(gradient(model, deepest))} in {label_of(model, lab)}" for model in (OSA, NONE))
    return (
        f"None of {len(models)} models is trained yet. As initialised with {deepest} blocks, the first block’s gradient is "
        f"{first}."
    )


def headlines(runs: pd.DataFrame, settings: Settings, claims: list[Finding], lab: Lab) -> tuple[str, ...]:
    """For the report's first screen: the greatest depth at which OSA trains, and a greater one at which it was tried."""
    budget = dict(settings.depths)
    depths = sorted(budget)
    words = {depth: outcome(cell(runs, OSA, depth)) for depth in depths}
    ours = [depth for depth in depths if words[depth] != "not evaluated"]
    if not ours:
        return ()
    label, deepest = f"{label_of(OSA, lab)}, our OSA made for depth,", ours[-1]
    trained = max((depth for depth in ours if words[depth] == "trains"), default=None)

    def what(depth: int) -> str:
        return f"{depth} blocks without skips and LN in {plural(budget[depth], 'epoch')}"

    said = []
    if trained:
        rows = tried(runs, OSA, trained)
        got, last = got_to(rows)
        rest = beside(runs, trained, depths, lab)
        said.append(f"{label} {got} at {what(trained)} ({last}; {decided(rows, trained, claims)}){rest}")
    if deepest != trained:
        rows = tried(runs, OSA, deepest)
        name = label_of(OSA, lab) if trained else label
        ended = f"{ended_at(rows)} ({decided(rows, deepest, claims)})"
        lower, others = at_lower_rate(runs, deepest), where_others_get(runs, deepest, lab)
        said.append(f"{name} is not shown to train at {what(deepest)}: {ended}{lower}.{others}")
    return tuple(said)


def decided(rows: pd.DataFrame, depth: int, claims: list[Finding]) -> str:
    """Of how many seeds OSA's runs at a depth are, and what these decide."""
    seeds = number_of_seeds(rows)
    if len(rows) < LEAST_RUNS:
        return f"{seeds}, which decide{'s' * (len(rows) == 1)} nothing"
    return seeds + "".join(f": {claim.verdict}" for claim in claims if claim.id == f"osa_trains_at_{depth}")


def got_to(rows: pd.DataFrame) -> tuple[str, str]:
    """That runs train, which few of them do not show, and their last numbers."""
    loss, accuracy = reached(rows)
    if len(rows) >= LEAST_RUNS:
        return "trains", f"last train loss {loss}, where below {TRAINS * GUESSING:.2f} is asked; test accuracy {accuracy}"
    return f"gets to a train loss of {loss}", f"test accuracy {accuracy}"


def ended_at(rows: pd.DataFrame) -> str:
    """The last train losses of runs, and how many diverged."""
    losses, diverged = rows["train_loss"].dropna(), int((rows["status"] == "diverged").sum())
    ended = [f"its train loss ends at {span(losses, lambda loss: fixed(loss, 2))}"] if len(losses) else []
    ended += [f"{diverged} of its runs diverge{'s' * (diverged == 1)}"] if diverged else []
    return ", and ".join(ended)


def at_lower_rate(runs: pd.DataFrame, depth: int) -> str:
    """Where OSA's runs at the next lower rate end, if there are any."""
    rows = tried(runs, SLOWER, depth)
    if rows.empty:
        return ""
    rate = number(rows["learning_rate"].iloc[0])
    return f"; at the next lower rate, {rate}, {ended_at(rows)} ({number_of_seeds(rows)})"


def where_others_get(runs: pd.DataFrame, depth: int, lab: Lab) -> str:
    """The models that train where OSA is not shown to, and what they get to."""
    others = [model for model in runs["variant"].unique() if model != SLOWER]
    there = [model for model in others if outcome(cell(runs, model, depth)) == "trains"]
    told = [f"{in_full(model, lab)} gets to {numbers_of(runs, model, depth)}" for model in there]
    return f" At that depth {', '.join(told)}." if told else ""


def first_gradients(depth: int) -> pd.Series:
    """The gradient of OSA's first block as initialised, by seed, as the study `signals` has it; empty where it has none."""
    try:
        blocks = files.read_csv(f"{SIGNALS}/blocks.csv")
    except UserError:
        return pd.Series(dtype=float)
    first = blocks[(blocks["model"] == OSA) & (blocks["block"] == 1) & (blocks["depth"] == depth)]
    return first.set_index("seed")["gradient"]


def number_of_seeds(rows: pd.DataFrame) -> str:
    return "one seed" if len(rows) == 1 else f"{len(rows)} seeds"


def reached(rows: pd.DataFrame) -> tuple[str, str]:
    """Last train loss and test accuracy of the runs of a cell: those of two, which may be opposites, or the means, with the
    spread of accuracies."""
    accuracies = 100 * rows["test_accuracy"]
    if len(accuracies.dropna()) == 2:
        losses, accuracies = (
            [fixed(value, digits) for value in own.dropna()] for own, digits in ((rows["train_loss"], 2), (accuracies, 1))
        )
        return " and ".join(losses), " and ".join(f"{each}%" for each in accuracies)
    return fixed(rows["train_loss"].mean(), 2), f"{mean_std(accuracies.mean(), accuracies.std(), 1)}%"


def numbers_of(runs: pd.DataFrame, model: str, depth: int, known: int | None = None) -> str:
    """Loss and accuracy of a cell, and the number of seeds unless it is the one that is known."""
    rows = tried(runs, model, depth)
    loss, accuracy = reached(rows)
    seeds = f"; {number_of_seeds(rows)}" if len(rows) != known else ""
    return f"{loss} ({accuracy}{seeds})"


def beside(runs: pd.DataFrame, depth: int, depths: list[int], lab: Lab) -> str:
    """What the control does there, as what a model reaches with OSA is not OSA's doing if softmax reaches it too; and which
    models, none of whose runs diverged, have a lower loss or a higher accuracy. Numbers of seeds are told where they are
    others than OSA's."""
    ours, control = tried(runs, OSA, depth), f"softmax attention with the same MLPs, {lab.label(CONTROL)}"
    lesser = [each for each in depths if each < depth and outcome(cell(runs, CONTROL, each)) == "trains"]
    reached_by = numbers_of(runs, CONTROL, depth, len(ours))
    said = {
        "not evaluated": f"; {control}, is not tried there, and trains at {lesser[-1]}" if lesser else "",
        "trains": f"; so does {control}: {reached_by}" if len(ours) >= LEAST_RUNS else f"; {control}, gets to {reached_by}",
        "undecided": f"; of {control}, it is undecided",
        "does not": f"; {control}, does not",
    }
    there = runs[runs["depth"] == depth]
    ended = there[~there["variant"].isin(there.loc[there["status"] == "diverged", "variant"])]
    columns = ["train_loss", "test_accuracy"]
    means, own = ended.groupby("variant", sort=False)[columns].mean().round(9), ours[columns].mean().round(9)
    is_better = (means["train_loss"] < own["train_loss"]) | (means["test_accuracy"] > own["test_accuracy"])
    better = means[is_better & (means.index != OSA)].sort_values("train_loss")
    listed = ", ".join(f"{in_full(model, lab)} {numbers_of(runs, model, depth, len(ours))}" for model in better.index)
    rest = f" Lower in loss or higher in accuracy, untested: {listed}." if listed else ""
    return f"{said[outcome(cell(runs, CONTROL, depth))]}.{rest}"


def in_full(model: str, lab: Lab) -> str:
    """The label of a model, and that it has skips and LN where it stands among those without."""
    variant = lab.config(recipe_of(model)).variant
    return label_of(model, lab) + " with skips and LN" * (variant.skip and variant.norm)


def of_accuracy(histories: pd.DataFrame, lab: Lab) -> str:
    """By how much test accuracy falls within the last half epoch of a run, at the most, and of which one."""
    if histories.empty:
        return ""
    keys = ["variant", "depth", "seed"]
    last = histories.groupby(keys)["epoch"].transform("max")
    late = histories[histories["epoch"] >= last - 0.5].groupby(keys)["test_accuracy"]
    falls = (late.max() - late.last()).dropna()
    if not (falls > 0).any():
        return ""
    model, depth, seed = falls.idxmax()
    return (
        f" Accuracies are those of the last step, not of the best: in one run, {label_of(model, lab)} at {depth} blocks "
        f"with seed {seed}, it falls by {fixed(100 * falls.max(), 1)} points within the last half epoch, the most of all."
    )


def parts(depths: list[int], runs: pd.DataFrame, lab: Lab) -> Finding:
    """What of it is attention, and what MLP: as initialised, and trained at that depth and at lesser ones."""
    middle = len(depths) // 2
    depth, deepest, shown = depths[middle], depths[-1], depths[: middle + 1]
    gradient, q, rank = map(initial, ("gradient", "q", "rank"))
    rows, measures = [], []
    for model, part in PARTS.items():
        what = f"{label_of(model, lab)}, {depth} blocks: ‖∂loss/∂W₁‖₂ as initialised"
        measures.append(Measure(what, gradient(model, depth)))
        numbers = [number(each(model, depth)) for each in (gradient, q, rank)]
        rows.append([label_of(model, lab), part, *numbers, *(told(runs, model, blocks) for blocks in shown)])
    return Finding(
        id="depth_parts",
        title="What is attention, and what is MLP",
        place="Sections 2 and 4; He et al. 2023, Section 4",
        kind=OBSERVATION,
        statement=f"OSA of {depth} blocks with one of its changes left out, and the same frame around other attention: the "
        "gradient that reaches the first block at initialisation, what the last one leaves of the tokens, and what trains.",
        measures=measures,
        table=Table(
            ["Model", "What differs", "‖∂loss/∂W₁‖₂", "q", "Effective rank", *(f"Trained, {blocks}" for blocks in shown)],
            rows,
            "llrrr" + "l" * len(shown),
            note="As initialised, means over seeds, from the study signals: the first block’s gradient, mean square q and "
            "effective rank of the last one’s tokens. Below what was trained: last train loss and test accuracy.",
        ),
        in_short=" ".join(filter(None, (needed(runs, blocks) for blocks in shown)))
        or f"As initialised, the tokens’ effective rank is {number(rank(OSA, depth))} after OSA of {depth} blocks and "
        f"{number(rank(CONTROL, depth))} after softmax in the same frame.",
        remark="In this frame signals and gradients keep their size around softmax too, although its tokens become alike. "
        "Around OSA the gradient explodes if α does not fall with depth, or GELU is rescaled to keep q and not "
        "shaped; and tokens that are not normalised lose their rank. With none of the changes signals vanish. With "
        f"{deepest} blocks, ‖∂loss/∂W₁‖₂ of OSA on a few test images is "
        f"{number(gradient(OSA, deepest) / gradient(OSA, depth))} times that with {depth}, by geometric means over seeds "
        f"that are far apart{apart(deepest, depth)}. First steps has the gradient over all parameters and a minibatch. All "
        "that is at initialisation: what trains is another question.",
        sources=[f"{SIGNALS}/blocks.csv"],
        models=tuple(model for model in PARTS if model not in SHAPED),
    )


def apart(*depths: int) -> str:
    """The ranges over seeds of OSA's first gradient."""
    ranges = [f"{span(found)} at {depth}" for depth in depths if len(found := first_gradients(depth))]
    return f", {' and '.join(ranges)}" * bool(ranges)


def needed(runs: pd.DataFrame, depth: int) -> str:
    """Which of its changes OSA trains without, by runs that left out one, and whether others train beside it; nothing where
    OSA does not train with all of them."""
    words = {model: outcome(cell(runs, model, depth)) for model in (OSA, CONTROL, NONE, *CHANGES)}
    if words[OSA] != "trains":
        return ""
    told = {"does not": "does not train without {}", "trains": "trains without {}", "undecided": "is undecided without {}"}
    said = []
    for word, text in told.items():
        if left_out := [change for model, change in CHANGES.items() if words[model] == word]:
            said.append(text.format(" or without ".join(left_out)))
    if not said:
        return ""
    clauses = [f"At {depth} blocks OSA (shaped), with one change left out at a time and the same rate, {', '.join(said)}"]
    if words[NONE] in RESULTS:
        clauses.append(f"OSA (exact), which has none of them, {RESULTS[words[NONE]]} at another rate")
    if words[CONTROL] in RESULTS:
        so = ", so that training does not need OSA’s attention" if words[CONTROL] == "trains" else ""
        clauses.append(f"softmax in the same frame {RESULTS[words[CONTROL]]}{so}")
    return "; ".join(clauses) + "."


def of_the_pilot(lab: Lab) -> Finding:
    """What the pilot tried, and what it chose, at each depth with a search."""
    rows, measures, said, remarks = [], [], [], []
    for depth, search in pilot.SEARCHES.items():
        table, chosen = pilot.tried(depth), chosen_at(depth, lab)
        for each in table.sort_values(["model", "learning_rate", "alpha_times_depth"]).itertuples():
            label, alpha = lab.label(each.model), number(each.alpha_times_depth)
            of = pilot.FIRST_ALPHA if math.isnan(each.alpha_times_depth) else each.alpha_times_depth  # others have none
            is_chosen = chosen.get(each.model) == (each.learning_rate, of)
            what = f"{label}, {depth} blocks, rate {number(each.learning_rate)}, α L {alpha}: loss"
            measures.append(Measure(what, each.loss))
            rate, loss = number(each.learning_rate), fixed(each.loss, 3) if math.isfinite(each.loss) else "diverged"
            rows.append([str(depth), label, rate, alpha, loss, "chosen" if is_chosen else ""])
        if chosen:
            rates = "; ".join(f"{lab.label(model)} {number(rate)}" for model, (rate, _) in chosen.items())
            alpha = f"; OSA (shaped) has α = {chosen[OSA][1]:g}/L" if OSA in chosen else ""
            said.append(f"Rates at {depth} blocks: {rates}{alpha}.")
        remarks += [f"At {depth} blocks {remark}" for remark in of_the_search(search, table, chosen, lab)]
    users = {of: [label_of(model, lab) for model in PILOTS if PILOTS[model] == of] for of in dict.fromkeys(PILOTS.values())}
    borrowed = "; ".join(f"that of {lab.label(of)} serves {' and '.join(models)}" for of, models in users.items())
    first, deeper = pilot.SEARCHES[pilot.DEPTH], [depth for depth in pilot.SEARCHES if depth != pilot.DEPTH]
    lengths = " and ".join(f"{each.last} of {each.steps} steps at {depth}" for depth, each in pilot.SEARCHES.items())
    return Finding(
        id="depth_pilot",
        title="How the rates were chosen",
        place="He et al. 2023, Appendix H.1",
        kind=OBSERVATION,
        statement=f"Mean train loss of the last {lengths} blocks, with the seed {pilot.SEED}, which no study has. The rate "
        f"is the one with the least loss: the search begins at the middle of {len(first.rates)} and goes up, or else down, "
        f"while the loss falls. α L is sought so at that rate, from {pilot.FIRST_ALPHA:g} on. Where no rate ends more than "
        f"{pilot.LEARNS:g} below a guess’s loss, ln 10, it is the paper’s, {number(lab.paper.recipe.train.learning_rate)}. "
        f"What is found at {pilot.DEPTH} blocks serves at fewer.",
        measures=measures or [Measure("Trainings of the pilot", 0)],
        table=Table(["Blocks", "Model", "Learning rate", "α L", "Train loss", ""], rows, "rlrrrl") if rows else None,
        in_short=" ".join(said) or "No search is over yet.",
        remark=" ".join(
            [
                "A model without a pilot of its own takes the rate of the nearest kind, and may do better with another: "
                f"{borrowed}.",
                *remarks,
                f"The search at {span(deeper)} blocks was added, for every model, when OSA had not trained there with what "
                f"was found at {pilot.DEPTH}.",
            ]
        ),
        sources=[str(pilot.TABLE)],
    )


def chosen_at(depth: int, lab: Lab) -> dict[str, tuple[float, float]]:
    """The rate and α L of each model whose search at a depth is over."""
    found = {model: pilot.found(model, lab.paper.recipe.train.learning_rate, depth) for model in pilot.MODELS}
    return {model: each for model, each in found.items() if each}


def of_the_search(search: pilot.Search, table: pd.DataFrame, chosen: dict[str, tuple[float, float]], lab: Lab) -> list[str]:
    """Which models learn with no rate of a search, and whose best one has no neighbour on one side."""
    least = table.groupby("model")["loss"].min()
    unlearned = [model for model in least.index if model in chosen and not pilot.learns(least[model])]
    ends = min(search.rates), max(search.rates)
    edge = [model for model, (rate, _) in chosen.items() if model not in unlearned and rate in ends]
    told = {
        "no rate learns, so that it is the paper’s": unlearned,
        "at an end of the rates tried, so that a better one may lie beyond": edge,
    }
    return [f"{what}: {'; '.join(map(lab.label, models))}." for what, models in told.items() if models]


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
        if own["train_loss"].min() > LOSSES[1]:
            axes.text(0.5, 0.5, "higher throughout", transform=axes.transAxes, horizontalalignment="center")
        axes.set(title=f"{depth} blocks", xlabel="Epoch")
        charts.logarithmic(axes, "y")
        axes.set_ylim(*LOSSES)
        axes.set_yticks(TICKS, TICKS)
    panels[0].set_ylabel("Train loss")
    drawn = [model for model in models if (histories["variant"] == model).any()]
    charts.legend(figure, [Line2D([], [], label=label_of(model, lab), **line_of(model)) for model in drawn])
    return figure
