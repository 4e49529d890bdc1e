"""How verdicts err: the rule of pipeline/statistics.py on simulated experiments, with spreads such as those of Table 2.

In the null scenarios the truth is at the limit, or nothing matters, so that every decision is wrong. The rule itself judges
the simulated runs, which are normal. The same random numbers serve every effect, so that curves of power are smooth.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from pipeline.core.params import PositiveInt, Section
from pipeline.lab import Lab
from pipeline.report import charts, looks
from pipeline.report.numbers import grouped, number, per_cent
from pipeline.statistics import LEAST_RUNS, LEVEL, UNDECIDED, VERDICTS, combine, judge, judge_share, judge_within
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables

place = 10
SIZES = (3, 4, 5, 10)  # runs of each model
# Standard deviations of the test accuracy over seeds in points, as Table 2 has them with three seeds.
QR, NS, EXACT, VIT, NO_SKIP, NO_NORM = 0.53, 1.0, 0.47, 0.33, 0.79, 2.8
SPREADS = dict(osa_qr=QR, osa_ns=NS, osa_exact=EXACT, vit=VIT, vit_noskip=NO_SKIP, vit_noskip_nonorm=NO_NORM)
CHOICES = (VIT, NO_SKIP, NS, *[NO_NORM] * 7, *[EXACT] * 7)  # the models of the 17 runs of the study left_open
MARGIN = 1.0  # of left_open, in points
WORST = -1.0  # spreads: a run that would have scored less diverges, where runs do
NUMBERS = 128  # more than any experiment draws

Runs = Callable[..., list[float]]  # runs(spread, n, mean=0): accuracies of n runs, from the limit on
Experiment = Callable[[Runs, int, float], str]  # (runs, n, effect): the verdict


class Settings(Section):
    """How many experiments stand behind each rate."""

    repetitions: PositiveInt


def pair(first: float, second: float, runs: Runs, n: int, effect: float) -> str:
    """Two models of these spreads, the first of which is better by the effect."""
    return judge([runs(first, n, effect), runs(second, n)], (1, -1), limit=0, side="above").verdict


def two_pairs(clear: float, runs: Runs, n: int, effect: float) -> str:
    """Both OSA models against one ViT; QR is better by `clear`."""
    vit, models = runs(VIT, n), (runs(QR, n, clear), runs(NS, n, effect))
    return combine([judge([each, vit], (1, -1), limit=0, side="above", family=2).verdict for each in models])


def drops(runs: Runs, n: int, effect: float) -> str:
    """ViT and its ablations, the second of which costs as much as the first."""
    return judge([runs(VIT, n), runs(NO_SKIP, n), runs(NO_NORM, n)], (-1, 2, -1), limit=effect, side="above").verdict


def choices(runs_each: int, runs: Runs, n: int, effect: float) -> str:
    """Every choice of left_open, each of which changes its model by the effect."""
    default = {spread: runs(spread, n) for spread in set(CHOICES)}
    tried = [(runs(spread, runs_each, effect), default[spread]) for spread in CHOICES]
    return combine([judge_within(each, (1, -1), margin=MARGIN, family=len(CHOICES)).verdict for each in tried])


def share(runs: Runs, n: int, effect: float) -> str:
    """Runs of which one in two succeeds."""
    return judge_share(sum(value > 0 for value in runs(1, n, effect)), n).verdict


def diverging(runs: Runs, n: int, effect: float) -> str:
    """Two models, and the runs of the first that would have been worst diverge."""
    there = [value for value in runs(NS, n, effect) if value > WORST * NS]
    return judge([there, runs(VIT, n)], (1, -1), limit=0, side="above", diverged=(n - len(there), 0)).verdict


def looking(runs: Runs, n: int, effect: float) -> str:
    """Two models, judged after each seed from the third on, until that decides or there are n."""
    first, second = runs(QR, n, effect), runs(VIT, n)
    found = (judge([first[:k], second[:k]], (1, -1), limit=0, side="above").verdict for k in range(LEAST_RUNS, n + 1))
    return next((verdict for verdict in found if verdict != UNDECIDED), UNDECIDED)


NULLS: dict[str, tuple[Experiment, float]] = {  # and the effect at which nothing is to be found
    "Two models of like spread": (partial(pair, QR, VIT), 0.0),
    "Two models of unlike spread": (partial(pair, NO_NORM, VIT), 0.0),
    "A claim of two pairs": (partial(two_pairs, 0.0), 0.0),
    "A claim of two pairs, one of which is clear": (partial(two_pairs, 50.0), 0.0),
    "The drops of three models": (drops, 0.0),
    "17 choices, three runs each, that change nothing": (partial(choices, 3), 0.0),
    "17 choices, one run each, that change nothing": (partial(choices, 1), 0.0),
    "17 choices, three runs each, that change the margin": (partial(choices, 3), MARGIN),
    "A share of one half": (share, 0.0),
    "Two models, the worst runs of one diverging": (diverging, 0.0),
}
LOOKS: dict[str, tuple[Experiment, float]] = {"Two models, until the rule decides": (looking, 0.0)}
POWERS: dict[str, tuple[Experiment, str, tuple[float, ...]]] = {
    "Two models of one spread": (partial(pair, 1.0, 1.0), "spreads", (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)),
    "OSA (QR) and ViT": (partial(pair, QR, VIT), "points", (0.25, 0.5, 1.0, 1.5, 2.0)),
    "OSA (NS) and ViT": (partial(pair, NS, VIT), "points", (0.25, 0.5, 1.0, 1.5, 2.0)),
}


def measure(settings: Settings, lab: Lab) -> Tables:
    cases = [(name, "points", experiment, effect) for name, (experiment, effect) in (NULLS | LOOKS).items()]
    cases += [(name, unit, experiment, e) for name, (experiment, unit, effects) in POWERS.items() for e in effects]
    rows = []
    for (name, unit, experiment, effect), n in itertools.product(cases, SIZES):
        normal = lab.normal(0, f"verdicts/{name}/{n}", settings.repetitions, NUMBERS).tolist()
        count = Counter(experiment(drawing(numbers), n, effect) for numbers in normal)
        rates = {verdict.replace(" ", "_"): count[verdict] / settings.repetitions for verdict in VERDICTS}
        rows.append({"scenario": name, "unit": unit, "effect": effect, "n": n, "repetitions": settings.repetitions} | rates)
    return {"rates": pd.DataFrame(rows)}


def drawing(numbers: list[float]) -> Runs:
    """Runs made of these standard normal numbers, each used once."""
    stream = iter(numbers)
    return lambda spread, n, mean=0.0: [mean + spread * next(stream) for _ in range(n)]


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    rates = tables["rates"]
    rates = rates.assign(wrong=rates["supported"] + rates["not_supported"])
    nulls, looks, powers = (rates[rates["scenario"].isin(kind)] for kind in (NULLS, LOOKS, POWERS))
    return [errors(nulls, lab), stopping(looks), power(powers)]


def errors(rates: pd.DataFrame, lab: Lab) -> Finding:
    """Whether the rule decides where nothing is to be found."""
    repetitions = rates["repetitions"].min()
    limit = LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / repetitions)
    worst = rates.loc[rates.groupby("scenario", sort=False)["wrong"].idxmax()]
    return Finding(
        id="verdicts_errors",
        title="The rule errs about as often as it says, or less",
        place="our own",
        kind=CHECK,
        statement=f"Where nothing is to be found, the rule decides in about {per_cent(LEVEL)} of experiments, or in fewer.",
        measures=[
            Measure(f"{row.scenario}: decided", row.wrong, "of all", "below", limit, note=f"n = {row.n}, the worst")
            for row in worst.itertuples(index=False)
        ],
        rule=f"In every scenario and for every n, less is decided than {per_cent(LEVEL)} and three standard errors of "
        f"{grouped(repetitions)} experiments.",
        table=rates_table(rates, "supported", "not_supported", "wrong"),
        remark=f"Standard deviations of the models in points, as simulated, and as Table 2 has them: {spreads(lab)}.",
        sources=["paper_outputs/tables/summary.csv"],
    )


def stopping(rates: pd.DataFrame) -> Finding:
    """How often seeds that are added until a verdict pleases give one where nothing is to be found."""
    shares = dict(zip(rates["n"], rates["wrong"], strict=True))
    return Finding(
        id="verdicts_looking",
        title="What looking after every seed does",
        place="our own",
        kind=OBSERVATION,
        statement=f"The rule’s {per_cent(LEVEL)} are for a number of seeds that was settled before. Whoever adds seeds one "
        "by one and stops at the first verdict errs more often.",
        in_short=f"Where nothing is to be found, whoever looks after every seed from n = {LEAST_RUNS} on and stops at "
        f"the first verdict decides in {', '.join(f'{100 * share:.1f}% (by n = {n})' for n, share in shares.items())} of "
        "experiments.",
        measures=[Measure(f"Decided by n = {n}", share, "of all") for n, share in shares.items()],
        table=rates_table(rates, "supported", "not_supported", "wrong"),
    )


def spreads(lab: Lab) -> str:
    """e.g. OSA (QR) 0.53 and 0.53; ViT 0.33 and 0.31."""
    summary = lab.tables.get("summary", pd.DataFrame(columns=["variant", "test_accuracy_std"]))
    seen = 100 * summary.set_index("variant")["test_accuracy_std"]
    return "; ".join(f"{lab.label(name)} {std:g} and {number(seen.get(name))}" for name, std in SPREADS.items())


def power(rates: pd.DataFrame) -> Finding:
    """How often the rule sees what is there."""
    seen = rates[rates["scenario"].eq("Two models of one spread") & rates["effect"].eq(2.0)].set_index("n")["supported"]
    return Finding(
        id="verdicts_power",
        title="What the rule can see",
        place="our own",
        kind=OBSERVATION,
        statement="How often a difference that is there is found, by its size and by the runs of each model.",
        in_short=f"A difference of two standard deviations is found in "
        f"{', '.join(f'{100 * share:.0f}% (n = {n})' for n, share in seen.items())} of experiments.",
        measures=[
            Measure(f"{row.scenario}, {row.effect:g} {row.unit} apart, n = {row.n}: supported", row.supported, "of all")
            for row in rates[rates["effect"].isin([0.5, 1.0, 2.0, 3.0])].itertuples(index=False)
        ],
        table=rates_table(rates, "supported", "not_supported"),
        figure=draw_power(rates),
        caption="Share of experiments that find the first model to be better, by how much better it is; n runs of each.",
    )


def rates_table(rates: pd.DataFrame, *columns: str) -> Table:
    """A row for each scenario and effect, and for each n the columns in per cent."""
    rows = []
    for (scenario, effect, unit), group in rates.groupby(["scenario", "effect", "unit"], sort=False):
        by_n = group.set_index("n")
        cells = [" / ".join(number(100 * by_n.loc[n, column]) for column in columns) for n in SIZES if n in by_n.index]
        rows.append([f"{scenario}\n{effect:g} {unit.removesuffix('s') if effect == 1 else unit}", *cells])
    names = " / ".join(column.replace("_", " ") for column in columns)
    return Table(["Scenario", *(f"n = {n}" for n in SIZES)], rows, note=f"Per cent of experiments: {names}.")


def draw_power(rates: pd.DataFrame) -> Figure:
    """A panel for each unit of the effect, a line for each pair of models and n."""
    with matplotlib.rc_context(looks.STYLE):
        drawing, panels = charts.panels(len(POWERS), 2.9, sharey=True)
        for axes, (scenario, rows) in zip(panels, rates.groupby("scenario", sort=False), strict=True):
            for (n, of_n), marker, colour in zip(rows.groupby("n"), "os^D", looks.PALETTE, strict=False):
                axes.plot(of_n["effect"], of_n["supported"], marker=marker, markersize=4, color=colour, label=f"n = {n}")
            axes.set(title=scenario, xlabel=f"Difference ({rows['unit'].iloc[0]})", xlim=(0, None), ylim=(0, 1.03))
        panels[0].set_ylabel("Found")
        panels[0].legend()
        return drawing
