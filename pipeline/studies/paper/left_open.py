"""What the paper leaves open: each alternative of `left_open` in pipeline/paper.yaml, trained.

A run differs from the paper's recipe in one value. Its test accuracy is set beside the runs of Table 2: beside those of the
same model, beside the comparisons of Section 5 that the model is part of, and beside the paper's own number.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from pipeline.core.errors import UserError
from pipeline.core.params import AnySeeds, Name, OpenChoice, Overrides, Paper, Section
from pipeline.lab import Lab
from pipeline.report import charts, looks
from pipeline.report.numbers import ABSENT, fixed, interval, plain, signed
from pipeline.statistics import (
    LEAST_RUNS,
    NOT_EVALUATED,
    NOT_SUPPORTED,
    combination,
    judge,
    judge_within,
    one_more_run,
    summarise,
)
from pipeline.studies import CLAIM, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._runs import collect_runs, of_other_code
from pipeline.studies.paper.section_5 import Contrast, Results, account, of_recipe, read_claims

place = 95
MARGIN = 1.0  # points: what Section 5's comparisons are about; OSA and ViT differ by less, its ablations by more
ROUNDING = 0.05  # points: Table 2 has one decimal
SOURCES = ["paper_outputs/tables/runs.csv"]
NOTHING_TRIED = Measure("Nothing is tried", math.nan, n=0, verdict=NOT_EVALUATED)


class Settings(Section):
    """Each alternative is trained once for each seed, or for those of its model in `more_seeds`; none, and nothing is."""

    seeds: AnySeeds
    more_seeds: dict[Name, AnySeeds] = Field(default_factory=dict)


class Choice(NamedTuple):
    """One value in the place of the recipe's, for one model."""

    variant: str
    key: str
    value: Any

    @property
    def overrides(self) -> Overrides:
        """Of data.pixel_scaling {"data": {"pixel_scaling": …}}, and of variants.NAME.epsilon {"variant": {"epsilon": …}}."""
        section, *_, name = self.key.split(".")
        return {"variant" if section == "variants" else section: {name: self.value}}

    def default(self, lab: Lab) -> Any:
        """The recipe's value."""
        ((section, values),) = self.overrides.items()
        return lab.config(self.variant).model_dump()[section][next(iter(values))]


def choices(paper: Paper) -> list[Choice]:
    """Every alternative on every model that it is to be tried on."""
    return [
        Choice(variant, topic.key, value)
        for topic in paper.left_open
        for value in topic.alternatives
        for variant in topic.try_on
    ]


def trainings(settings: Settings, lab: Lab) -> list[tuple[str, Overrides, int]]:
    return [(choice.variant, choice.overrides, seed) for choice, seed in tries(settings, lab)]


def tries(settings: Settings, lab: Lab) -> list[tuple[Choice, int]]:
    """Every choice with each of its seeds, those of all before those of few.

    Raises:
        UserError: there are more seeds for a model that there is not.
    """
    more = settings.more_seeds if settings.seeds else {}
    if unknown := sorted(settings.more_seeds.keys() - lab.params.variants.keys()):
        raise UserError(
            f"params.yaml: left_open.more_seeds.{unknown[0]} is no model: name one of {', '.join(lab.params.variants)}."
        )
    found = [(choice, seed) for choice in choices(lab.paper) for seed in more.get(choice.variant, settings.seeds)]
    return sorted(found, key=lambda each: each[1] not in settings.seeds)


def measure(settings: Settings, lab: Lab) -> Tables:
    return {"runs": collect(tries(settings, lab), lab)}


def collect(tried: list[tuple[Choice, int]], lab: Lab) -> pd.DataFrame:
    """One row for each choice and seed as the run's files have it, the accuracy in per cent."""
    runs = collect_runs([(choice.variant, choice.overrides, seed) for choice, seed in tried], lab)["runs"]
    told = [(choice.key, plain(choice.value), plain(choice.default(lab))) for choice, _ in tried]
    table = runs.drop(columns=["train_loss", "test_loss"]).join(pd.DataFrame(told, columns=["key", "value", "default"]))
    return table.assign(test_accuracy=100 * runs["test_accuracy"])


class Tried(NamedTuple):
    """A choice and what came of its runs."""

    variant: str
    key: str
    value: str
    default: str
    accuracies: list[float]  # per cent, of the runs that finished
    diverged: int
    account: str  # how many runs finished, and how many did not

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"


def tried(runs: pd.DataFrame) -> list[Tried]:
    """Every choice of the table `runs`."""
    found = []
    for _, rows in runs.groupby("run", sort=False):
        variant, key, *values = rows[["variant", "key", "value", "default"]].iloc[0]
        accuracies, diverged = rows["test_accuracy"].dropna().tolist(), int((rows["status"] == "diverged").sum())
        found.append(Tried(variant, key, *map(plain, values), accuracies, diverged, account(rows["status"])))
    return found


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    found, results = tried(tables["runs"]), Results(lab, of_recipe(lab))
    return [
        replace(sensitivity(found, results, lab.paper, tables["runs"]), limitation=reach(settings, lab)),
        robustness(found, results, lab.paper),
        differences(found, results, lab.paper),
        listing(found, lab),
    ]


def reach(settings: Settings, lab: Lab) -> str:
    """What the runs that are listed cannot decide."""
    listed = Counter(choice for choice, _ in tries(settings, lab))
    few = sum(runs < LEAST_RUNS for runs in listed.values())
    if not few:
        return ""
    return (
        f"Of {len(listed)} choices that the paper leaves open {few} have fewer than {LEAST_RUNS} runs listed, which decide "
        "nothing. So the claims that accuracies and comparisons are the same whatever is chosen can be refuted, by the "
        "other choices, and not be supported."
    )


def variants(found: list[Tried]) -> tuple[str, ...]:
    """The models of these choices."""
    return tuple(dict.fromkeys(choice.variant for choice in found))


def provenance(runs: pd.DataFrame, paper: Paper) -> str:
    """How many runs are of other code than today's, and how many are older than the rules, where some are."""
    there = runs[runs["status"] != "missing"]
    older = sum(pd.to_datetime(there["started_at"], utc=True) < pd.Timestamp(paper.rules_since))
    parts = list(filter(None, [of_other_code(runs)]))
    parts += [f"{older} of {len(there)} runs are older than the rules, which date from {paper.rules_since[:10]}."] * bool(
        older
    )
    return "".join(f" {part}" for part in parts)


def sensitivity(found: list[Tried], results: Results, paper: Paper, runs: pd.DataFrame) -> Finding:
    """Whether some choice changes a model's accuracy."""
    measures = [measure_change(choice, results, len(found)) for choice in found]
    return Finding(
        id="left_open_accuracy",
        title="No accuracy depends on an unstated choice",
        place="Table 2 and Appendix D",
        kind=CLAIM,
        statement="The accuracy of no model depends on what the paper leaves open.",
        measures=measures or [NOTHING_TRIED],
        in_short=changed(measures),
        rule=f"With one value changed at a time, every mean accuracy stays within {MARGIN:g} point of the default's. Judged "
        "by the t-interval of the difference with one spread for both samples, as they have if the choice changes nothing.",
        table=changes_table(found, measures, results) if found else None,
        figure=figure(found, results, paper) if any(choice.accuracies for choice in found) else None,
        caption="Test accuracy with one choice changed, a dot for each run. Line: the default's mean; band: where one more "
        "run of it is expected (95%); dashed: the paper's number. Scales differ.",
        remark=f"A choice with fewer than {LEAST_RUNS} runs decides nothing. It is worth three seeds where its interval "
        f"leaves out 0, as one in twenty does by chance.{provenance(runs, paper)}",
        sources=SOURCES,
        models=variants(found),
    )


def changed(measures: list[Measure]) -> str:
    """How the changes came out, those that decide it, and those whose whole interval is beyond the margin besides."""
    if not measures:
        return ""
    counts = "; ".join(f"{verdict}: {n}" for verdict, n in Counter(measure.verdict for measure in measures).items())
    far = [m for m in measures if m.low > MARGIN or m.high < -MARGIN]
    against, near = ([m for m in far if (m.verdict == NOT_SUPPORTED) == decided] for decided in (True, False))
    told = f"Choices that are {counts}."
    told += f" Not supported is {enumerated(against)}." if against else ""
    few = f"which decides nothing with few runs, or of one choice among {len(measures)}"
    return told + (f" The whole interval is beyond the margin, {few}, for {enumerated(near)}." if near else "")


def enumerated(measures: list[Measure]) -> str:
    return ", ".join(f"{m.what} {signed(m.value, 2)} ({interval(m.low, m.high, 2)}; n = {m.n})" for m in measures)


def measure_change(choice: Tried, results: Results, family: int) -> Measure:
    """The change of the mean accuracy from that of Table 2's runs."""
    default, diverged = results.accuracies(choice.variant), [choice.diverged, *results.diverged([choice.variant])]
    judged = judge_within([choice.accuracies, default], (1, -1), margin=MARGIN, family=family, diverged=diverged)
    if len(choice.accuracies) + choice.diverged < LEAST_RUNS and (judged.low > 0 or judged.high < 0):
        judged = replace(judged, note=f"{judged.note}; worth three seeds")
    fields = judged.as_measure(choice.account, f"default n = {len(default)}")
    return Measure(f"{results.label(choice.variant)}, {choice}", **fields, unit="points")


def changes_table(found: list[Tried], measures: list[Measure], results: Results) -> Table:
    """A row for each choice, a column for each model."""
    lines = {}
    for choice, each in zip(found, measures, strict=True):
        cells = lines.setdefault(f"{choice}\ninstead of {choice.default}", dict.fromkeys(variants(found), ABSENT))
        cells[choice.variant] = f"{signed(each.value, 2)}\n{interval(each.low, each.high, 2)}" if each.n else choice.account
    return Table(
        ["Choice", *map(results.label, variants(found))],
        [[name, *cells.values()] for name, cells in lines.items()],
        note="Change of the mean accuracy in points, with its 95% interval; a dash: not tried.",
    )


def robustness(found: list[Tried], results: Results, paper: Paper) -> Finding:
    """Whether the comparisons of accuracies in Section 5 hold with each choice made."""
    compared = [
        (f"{claim.title}\n{contrast.what}", contrast, choice)
        for claim in read_claims(paper).values()
        for contrast in claim.contrasts(results.label)
        for choice in found
        if choice.variant in contrast.models
    ]
    measures = [measure_comparison(contrast, choice, results, len(compared)) for _, contrast, choice in compared]
    return Finding(
        id="left_open_comparisons",
        title="Section 5's comparisons of accuracies hold whatever is chosen",
        place="Section 5",
        kind=CLAIM,
        statement="Every comparison of accuracies in Section 5 comes out as it says, whatever it leaves open.",
        measures=measures or [NOTHING_TRIED],
        rule="A model with one choice made takes its default's place in each comparison of accuracies that it is part of. "
        "Judged as the comparison itself.",
        table=comparisons_table(compared, measures, results) if compared else None,
        sources=SOURCES,
        models=variants([choice for *_, choice in compared]),
    )


def measure_comparison(contrast: Contrast, choice: Tried, results: Results, family: int) -> Measure:
    """A comparison of Section 5 with the runs of a choice in the place of its model's."""
    samples, diverged = [results.accuracies(model) for model in contrast.models], results.diverged(contrast.models)
    place = list(contrast.models).index(choice.variant)
    samples[place], diverged[place] = choice.accuracies, choice.diverged
    asked = {"side": "above", "limit": contrast.limit}
    judged = judge(samples, contrast.weights, family=family, diverged=diverged, **asked)
    what = f"{contrast.what}, {results.label(choice.variant)} with {choice}"
    return Measure(what, **judged.as_measure(choice.account), unit="points", **asked)


def comparisons_table(compared: list[tuple[str, Contrast, Tried]], measures: list[Measure], results: Results) -> Table:
    """A row for each comparison: by how much it holds, and what the choice that is worst for it leaves of that."""
    lines = {}
    for (name, contrast, choice), each in zip(compared, measures, strict=True):
        lines.setdefault(name, []).append((each.value - contrast.limit, contrast, choice))
    rows = []
    for name, margins in lines.items():
        least, contrast, choice = min(margins, key=lambda each: (math.isnan(each[0]), each[0]))
        default = combination([results.accuracies(model) for model in contrast.models], contrast.weights) - contrast.limit
        chosen = f"{choice}\n{results.label(choice.variant)}"
        rows.append([name, signed(default, 2), signed(least, 2), chosen, str(len(margins))])
    columns = ["Comparison", "Default’s margin", "Least margin", "With", "Of choices"]
    note = "In points, how far the means are beyond the rule’s limit, on the right side if positive; without their spread."
    return Table(columns, rows, "lrrlr", note=note)


def differences(found: list[Tried], results: Results, paper: Paper) -> Finding:
    """Our accuracies beside the paper's, and what would be compatible with those."""
    measures, rows = [], []
    for model, theirs in paper.table_2.items():
        label, ours = results.label(model), results.accuracies(model)
        mean, (low, high) = summarise(ours).mean, expected(ours)
        measures.append(Measure(label, mean - theirs, "points", low=low - theirs, high=high - theirs, n=len(ours)))
        runs = {"the default": (low, high)}
        runs |= {str(choice): expected(choice.accuracies, ours) for choice in found if choice.variant == model}
        compatible = [name for name, (least, most) in runs.items() if least - ROUNDING <= theirs <= most + ROUNDING]
        if 3 < len(runs) == len(compatible):
            compatible = ["the default", f"each of the {len(runs) - 1} choices tried"]
        numbers = fixed(theirs, 1), fixed(mean, 2), signed(mean - theirs, 2), interval(low, high, 2)
        rows.append([label, *numbers, "; ".join(compatible) or ABSENT])
    widths = [measure.high - measure.low for measure in measures if math.isfinite(measure.low)]
    widest = fixed(max(widths, default=math.nan), 0)
    return Finding(
        id="left_open_differences",
        title="Where our accuracies differ from the paper's",
        place="Table 2",
        kind=OBSERVATION,
        statement="The differences to Table 2, and where one more run of ours is expected, with and without a choice made.",
        in_short=f"{sum('default' in row[-1] for row in rows)} of the paper's {len(rows)} numbers are where one more run of "
        f"ours is expected, in intervals of up to {widest} points."
        if any(measure.n for measure in measures)
        else "No run of Table 2 is by the paper's recipe.",
        measures=measures,
        table=Table(
            ["Model", "Paper", "Ours", "Difference", "One more run", "Would be compatible"],
            rows,
            "lrrrrl",
            note="One more run is expected (95%) at mean ± t s √(1 + 1/n), with the spread of a choice's runs and the "
            f"default's together. A choice is compatible if the paper's number, rounded to ±{ROUNDING:g} as it "
            "is, is there; that the paper made it does not follow.",
        ),
        sources=SOURCES,
        models=tuple(paper.table_2),
    )


def expected(accuracies: list[float], *others: list[float]) -> tuple[float, float]:
    """Where one more run's per cent are expected."""
    low, high = one_more_run(accuracies, others)
    return max(low, 0.0), min(high, 100.0)


def listing(found: list[Tried], lab: Lab) -> Finding:
    """Everything that the paper leaves open, and what we do."""
    topics = lab.paper.left_open
    rows = [[topic.topic, topic.paper, value_of(topic, lab), topic.why] for topic in topics]
    with_alternatives = sum(bool(topic.alternatives) for topic in topics)
    return Finding(
        id="left_open_choices",
        title="What the paper leaves open",
        place="Section 5 and Appendix D",
        kind=OBSERVATION,
        statement="What one has to choose to train the paper's models, and what we chose.",
        in_short=f"{len(topics)} points, and for {with_alternatives} of them an alternative.",
        measures=[
            Measure("Topics left open", len(topics)),
            Measure("Topics with an alternative to try", with_alternatives),
            Measure("Alternatives with a run, counted for each model", sum(bool(choice.accuracies) for choice in found)),
        ],
        table=Table(["Topic", "Paper", "Ours", "Why"], rows, "llll"),
        sources=["params.yaml", "pipeline/paper.yaml"],
    )


def value_of(topic: OpenChoice, lab: Lab) -> str:
    """What we do, and its key in params.yaml where it has one."""
    if topic.key is None:
        return topic.ours
    try:
        value = plain(lab.params.value(topic.key))
    except LookupError:  # of a variant that is not there
        value = ABSENT
    return f"{value}\n{topic.key}"


def figure(found: list[Tried], results: Results, paper: Paper) -> Figure:
    """A panel for each model of which some choice is trained, with a dot for each run."""
    panels = {variant: [choice for choice in found if choice.variant == variant] for variant in variants(found)}
    heights = [1.5 + len(each) for each in panels.values()]
    with matplotlib.rc_context(looks.STYLE):
        drawing = Figure(figsize=(7.2, 0.4 + 0.3 * sum(heights)), layout="constrained")
        every = drawing.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (variant, of_variant) in zip(every, panels.items(), strict=True):
            colour, default = looks.look(variant, list(panels)).colour, results.accuracies(variant)
            if default:
                axes.axvline(summarise(default).mean, color=colour, linewidth=0.9)
            if len(default) > 1:
                axes.axvspan(*expected(default), color=colour, alpha=0.15, linewidth=0)
            if variant in paper.table_2:
                axes.axvline(paper.table_2[variant], **charts.EXPECTED)
            for row, choice in enumerate(of_variant):
                axes.plot(choice.accuracies, [row] * len(choice.accuracies), "o", color=colour, markersize=5)
            names = [f"{choice.key.split('.')[-1]}: {choice.value}" for choice in of_variant]
            axes.set_yticks(range(len(names)), names)
            axes.set(title=results.label(variant), ylim=(len(names) - 0.5, -0.5))
            axes.margins(x=0.06)
        every[-1].set_xlabel("Test accuracy (per cent)")
        return drawing
