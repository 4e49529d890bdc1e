"""The choices stage: what each choice that the paper leaves open does to a model: `python -m pipeline.choices`.

A training of `choices.runs` differs from its variant in one value. Its test accuracy is set beside that of the variant
with the same seed, beside what another seed does, beside the comparisons of Section 5 that the variant is part of, and
beside the paper's own number.
"""

import math
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from pipeline import figures, files, findings
from pipeline.claims import NOT_SUPPORTED, UNDECIDED
from pipeline.errors import entry_point
from pipeline.params import AccuracyClaim, AnyClaim, DropsClaim, Params, load, resolve
from pipeline.report_text import ABSENT, fixed, interval, per_cent, plain, signed
from pipeline.summary import Summary, rounded_table, summarise

FOLDER = Path("paper_outputs/choices")
CHANGES = "changes"  # the figure
TABLES = Path("paper_outputs/tables")
COLUMNS = ["run", "variant", "seed", "key", "value", "default", "status", "test_accuracy", "default_accuracy", "difference"]
ROUNDING = 0.05  # of the accuracies in Table 2, which have one decimal


@entry_point
def main() -> None:
    params = load()
    defaults = pd.read_csv(TABLES / "runs.csv")
    table, spread = choices_table(params, defaults), spread_table(defaults)
    tables = {
        "choices": table,
        "spread": spread,
        "conclusions": conclusions_table(params, table, defaults),
        "differences": differences_table(params, table, spread, defaults),
    }
    tables = {name: rounded_table(each) for name, each in tables.items()}
    drawn = {CHANGES: figure(params, tables["choices"], defaults)} if len(trained(table)) else {}
    findings.write(FOLDER, tables, findings_of(params, **tables), drawn)


def choices_table(params: Params, defaults: pd.DataFrame) -> pd.DataFrame:
    """One row for each training of `choices.runs` and each value in which it differs; accuracies in per cent."""
    seed, rows = params.choices.seed, []
    accuracy = defaults[defaults["seed"] == seed].set_index("variant")["test_accuracy"]
    for name, run in params.choices.runs.items():
        path = Path("runs", name, str(seed), "metrics.json")
        metrics = files.read_json(path) if path.exists() else None
        ours = math.nan if metrics is None or metrics["diverged"] else 100 * metrics["test_accuracy"]
        status = "missing" if metrics is None else "diverged" if metrics["diverged"] else "finished"
        unchanged = resolve(params, run.variant).model_dump()
        default = 100 * accuracy.get(run.variant, math.nan)
        for section, values in run.overrides.items():
            for key, value in values.items():
                changed = [f"{section}.{key}", value, unchanged[section][key]]
                rows.append([name, run.variant, seed, *changed, status, ours, default, ours - default])
    return pd.DataFrame(rows, columns=COLUMNS)


def trained(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["difference"].notna()]


def spread_table(defaults: pd.DataFrame) -> pd.DataFrame:
    """By how many points two runs of a variant may differ though nothing was chosen.

    The range over its seeds, and no less than two standard errors of the difference of two accuracies p on n test images,
    2 √(2 p (1 − p) / n), which is all that there is to go by where one seed is trained.
    """
    images = pd.read_csv(TABLES / "per_class.csv").groupby(["variant", "seed"])["images"].sum().max()
    accuracies = defaults.groupby("variant", sort=False)["test_accuracy"]
    table = pd.DataFrame({"seeds": accuracies.count(), "range": 100 * (accuracies.max() - accuracies.min())})
    p = accuracies.mean()
    table["two_standard_errors"] = 100 * 2 * (2 * p * (1 - p) / images) ** 0.5
    table["chance"] = table[["range", "two_standard_errors"]].max(axis=1)
    return table.reset_index()


def conclusions_table(params: Params, table: pd.DataFrame, defaults: pd.DataFrame) -> pd.DataFrame:
    """The margin, in points, by which each comparison of accuracies in Section 5 holds with each choice made.

    The chosen run takes the place of its variant, or of the one whose function it computes; the other models stay as they
    are, in the mean over their seeds. `default` is the margin with nothing chosen, of means alone.
    """
    means, rows = (100 * defaults.groupby("variant")["test_accuracy"].mean()).to_dict(), []
    for run, variant, accuracy in (
        trained(table)[["run", "variant", "test_accuracy"]].drop_duplicates().itertuples(index=False)
    ):
        place = params.choices.computes.get(variant, variant)
        accuracies = means | {place: accuracy}
        for name, claim in params.claims.items():
            for (models, margin), (_, default) in zip(margins(claim, accuracies), margins(claim, means), strict=True):
                if place in models and math.isfinite(margin):
                    rows.append([name, " ".join(models), run, margin, default])
    return pd.DataFrame(rows, columns=["claim", "models", "run", "margin", "default"])


def margins(claim: AnyClaim, accuracies: dict[str, float]) -> list[tuple[list[str], float]]:
    """The models of each comparison of accuracies that a claim makes, and the margin by which it holds."""

    def of(model: str) -> float:
        return accuracies.get(model, math.nan)

    if isinstance(claim, AccuracyClaim):
        return [(pair, of(pair[0]) - of(pair[1]) + claim.tolerance_points) for pair in claim.compare]
    if isinstance(claim, DropsClaim):
        first, second, third = map(of, claim.models)
        return [(claim.models, (second - third) - (first - second))]
    return []


def differences_table(params: Params, table: pd.DataFrame, spread: pd.DataFrame, defaults: pd.DataFrame) -> pd.DataFrame:
    """For each model of Table 2 the paper's accuracy, ours, and what may account for the difference, in per cent.

    `low` and `high` are those of `one_more_run`, and `run` that of `nearest_choice`. `distance` is from the paper's number
    to the nearest that is accounted for: by the interval, or as lying between the default and the choice.
    """
    chance, places, rows = spread.set_index("variant")["chance"], table["variant"].replace(params.choices.computes), []
    for variant, paper in params.paper.table_2.items():
        ours = summarise(accuracies_of(variant, defaults), params.tables.confidence)
        choice = nearest_choice(table[places == variant], paper, chance.get(variant, math.nan))
        ranges = [one_more_run(ours)]
        if choice is not None:
            ranges.append(sorted(choice[["default_accuracy", "test_accuracy"]]))
        distance = min(max(low - paper, paper - high, 0) if low <= high else math.nan for low, high in ranges)
        run = "" if choice is None else choice["run"]
        rows.append([variant, paper, ours.mean, ours.mean - paper, ours.n, ours.min, ours.max, *ranges[0], run, distance])
    columns = ["variant", "paper", "mean", "difference", "n", "min", "max", "low", "high", "run", "distance"]
    return pd.DataFrame(rows, columns=columns)


def accuracies_of(variant: str, defaults: pd.DataFrame) -> pd.Series:
    """Those of its seeds, in per cent."""
    return 100 * defaults.loc[defaults["variant"] == variant, "test_accuracy"].dropna()


def one_more_run(ours: Summary) -> tuple[float, float]:
    """Where another seed's per cent are expected, as far as values of seeds are normal.

    mean ± t s √(1 + 1/n), which is √(n + 1) times as wide as the interval of the mean, and NaN where that is.
    """
    half = math.sqrt(ours.n + 1) * (ours.high - ours.mean)
    return max(ours.mean - half, 0.0), min(ours.mean + half, 100.0)


def nearest_choice(choices: pd.DataFrame, paper: float, chance: float) -> pd.Series | None:
    """The choice that comes nearest to the paper's number, of those that move the model beyond chance and towards it."""
    there = trained(choices)
    there = there[there["difference"].abs() > chance]
    there = there[(there["test_accuracy"] - paper).abs() < (there["default_accuracy"] - paper).abs()]
    return there.loc[(there["test_accuracy"] - paper).abs().idxmin()] if len(there) else None


def findings_of(
    params: Params, choices: pd.DataFrame, spread: pd.DataFrame, conclusions: pd.DataFrame, differences: pd.DataFrame
) -> list[dict]:
    """Whether a choice moves a model, whether Section 5 holds whatever is chosen, and what makes our numbers differ."""
    if choices.empty:
        return []
    chance = spread.set_index("variant")["chance"]
    found = [sensitivity(params, choices, chance), robustness(params, choices, chance, conclusions)]
    if len(trained(choices)):
        found[0] |= {"figure": f"{CHANGES}.svg", "caption": caption(params)}
    return [*found, explanation(params, choices, differences)]


def sensitivity(params: Params, choices: pd.DataFrame, chance: pd.Series) -> dict:
    """Whether some choice moves a model by more than another seed does."""
    measures = []
    for variant, rows in choices.groupby("variant", sort=False):
        there = trained(rows)
        largest = there.loc[there["difference"].abs().idxmax()] if len(there) else None
        value = math.nan if largest is None else abs(largest["difference"])
        note = f"{of_runs(there)} trained" if largest is None else f"{what(largest)}; the largest of {of_runs(there)}"
        what_moves = f"{params.label(variant)}: largest change of the test accuracy"
        limit = float(chance[variant]) if variant in chance else None
        measures.append(findings.measure(what_moves, value, "points", "below", limit, note))
    return {
        "id": "choices_accuracy",
        "title": "No accuracy depends on an unstated choice",
        "place": "Table 2 and Appendix D",
        "statement": "The accuracy of no model depends on what the paper leaves open.",
        "rule": "With one value changed at a time and the same seed, no change of the accuracy is larger than chance: the "
        "range over the default's seeds or, if that is more, two standard errors of the difference of two such accuracies.",
        "verdict": judged(measures, choices),
        "measures": measures,
        "remark": "In the table, the change in points that each choice makes; a dash where it was not tried.",
        "figure": None,
        "caption": "",
        "table": changes_table(params, choices, chance),
        "sources": [f"{FOLDER}/choices.csv", f"{FOLDER}/spread.csv"],
    }


def of_runs(rows: pd.DataFrame) -> str:
    count = rows["run"].nunique()
    return f"{count} {'choice' if count == 1 else 'choices'}"


def what(row: pd.Series) -> str:
    """e.g. data.pixel_scaling: standard."""
    return f"{row['key']}: {plain(row['value'])}"


def changes_table(params: Params, choices: pd.DataFrame, chance: pd.Series) -> dict:
    """A row for each choice, a column for each model; what is beyond chance says so."""
    variants = [variant for variant in params.run.variants if variant in set(choices["variant"])]

    def cell(rows: pd.DataFrame) -> str:
        if rows.empty:
            return ABSENT
        status, change = rows["status"].iloc[0], rows["difference"].iloc[0]
        if status != "finished" or math.isnan(change):
            return status
        beyond = abs(change) > chance.get(rows["variant"].iloc[0], math.nan)
        return f"{signed(change, 2)}\nbeyond chance" if beyond else signed(change, 2)

    lines = [["Chance", *(fixed(chance.get(variant, math.nan), 2) for variant in variants)]]
    for _, rows in choices.groupby([choices["key"], choices["value"].map(plain)], sort=False):
        first = rows.iloc[0]
        name = f"{what(first)}\ninstead of {plain(first['default'])}"
        lines.append([name, *(cell(rows[rows["variant"] == variant]) for variant in variants)])
    return {"columns": ["Choice", *map(params.label, variants)], "align": "l" + "r" * len(variants), "rows": lines}


def explanation(params: Params, choices: pd.DataFrame, differences: pd.DataFrame) -> dict:
    """Whether another seed or an unstated choice is enough to account for each difference to Table 2."""
    measures, lines = [], []
    for row in differences.itertuples(index=False):
        why = reason(row, choices)
        name = f"{params.label(row.variant)}: from the paper's number to the nearest that is accounted for"
        measures.append(findings.measure(name, row.distance, "points", "below", ROUNDING))
        numbers = fixed(row.paper, 1), fixed(row.mean, 2), signed(row.difference, 2), interval(row.low, row.high, 2)
        lines.append([params.label(row.variant), *numbers, why])
    missing = any(measure["value"] is None for measure in measures)
    confidence = per_cent(params.tables.confidence)
    return {
        "id": "choices_differences",
        "title": "Seeds and unstated choices account for every difference to Table 2",
        "place": "Table 2",
        "statement": "Where our accuracies differ from the paper's, another seed or a value that it leaves open is enough.",
        "rule": f"The paper's number, which is rounded to one decimal, lies in the {confidence} interval of one more run of "
        "ours, mean ± t s √(1 + 1/n), or between our run and one with a choice made that moves the model beyond chance.",
        "verdict": UNDECIDED if missing else findings.verdict(measures),
        "measures": measures,
        "remark": "",
        "figure": None,
        "caption": "",
        "table": {
            "columns": ["Model", "Paper", "Ours", "Difference", "One more run of ours", "Most likely reason"],
            "align": "lrrrrl",
            "rows": lines,
        },
        "sources": [f"{FOLDER}/differences.csv", f"{FOLDER}/choices.csv"],
    }


def reason(row, choices: pd.DataFrame) -> str:
    """What may have made a difference, the least first: another of our seeds, one choice, and one more run."""
    if row.n < 2:
        return "Too few seeds to say"
    if row.min - ROUNDING <= row.paper <= row.max + ROUNDING:
        return f"Another seed\nours range from {interval(row.min, row.max, 2)}"
    if row.run:
        chosen = choices[choices["run"] == row.run].iloc[0]
        accuracies = f"{fixed(chosen['test_accuracy'], 2)} instead of {fixed(chosen['default_accuracy'], 2)}"
        return f"{what(chosen)}\n{accuracies} with seed {chosen['seed']}"
    return "Another seed\nwithin one more run" if row.distance < ROUNDING else "Nothing that was measured"


def robustness(params: Params, choices: pd.DataFrame, chance: pd.Series, conclusions: pd.DataFrame) -> dict:
    """Whether the comparisons of Section 5 hold with each choice made."""
    measures = []
    for claim, rows in conclusions.sort_values("margin").groupby("claim", sort=False):
        least = rows.iloc[0]
        note = f"least with {least['run']}, of {of_runs(rows)}"
        measures.append(findings.measure(params.claims[claim].title, least["margin"], "points", "above", 0.0, note))
    if not measures:
        measures = [findings.measure("Least margin", math.nan, "points", "above", 0.0)]
    remark = ["The choice is made for one model alone."]
    for ours, theirs in params.choices.computes.items():
        remark.append(f"{params.label(ours)} stands for {params.label(theirs)}, whose function it is.")
    if len(conclusions):
        remark.append(
            "In the table, the margin of each comparison in points, and the choice that leaves least of it, beside the "
            "chance of the model that it is made for."
        )
    return {
        "id": "choices_conclusions",
        "title": "Section 5 holds whatever is chosen",
        "place": "Section 5",
        "statement": "Every comparison of accuracies in Section 5 comes out as it says, whatever it leaves open.",
        "rule": "With each choice made, the model that it is made for takes the place of its default in every comparison of "
        "accuracies, and the other models stay as they are, in the mean over their seeds: every margin is above 0.",
        "verdict": judged(measures, choices),
        "measures": measures,
        "remark": " ".join(remark),
        "figure": None,
        "caption": "",
        "table": comparisons_table(params, choices, chance, conclusions) if len(conclusions) else None,
        "sources": [f"{FOLDER}/conclusions.csv", f"{FOLDER}/spread.csv"],
    }


def comparisons_table(params: Params, choices: pd.DataFrame, chance: pd.Series, conclusions: pd.DataFrame) -> dict:
    """A row for each comparison: by how much it holds, and what the choice that is worst for it leaves of that."""
    lines = []
    for (claim, models), rows in conclusions.sort_values("margin").groupby(["claim", "models"], sort=False):
        least = rows.iloc[0]
        chosen = choices[choices["run"] == least["run"]].iloc[0]
        comparison = f"{params.claims[claim].title}\n{', '.join(map(params.label, models.split()))}"
        numbers = signed(least["default"], 2), signed(least["margin"], 2), fixed(chance[chosen["variant"]], 2)
        lines.append([comparison, *numbers, f"{what(chosen)}\n{params.label(chosen['variant'])}"])
    return {"columns": ["Comparison", "Default", "Least", "Chance", "With"], "align": "lrrrl", "rows": lines}


def judged(measures: list[dict], rows: pd.DataFrame) -> str:
    """A fault that is there decides; otherwise runs that are not there leave the verdict open."""
    faults = [m for m in measures if m["side"] and m["value"] is not None and not findings.is_met(m)]
    if faults or (rows["status"] == "diverged").any():
        return NOT_SUPPORTED
    return UNDECIDED if (rows["status"] == "missing").any() else findings.verdict(measures)


def caption(params: Params) -> str:
    return (
        f"Test accuracy with one choice changed, seed {params.choices.seed}. Line: the default at that seed; band: the "
        "default's range over its seeds; dashed: the paper's number. Each panel has a scale of its own."
    )


def figure(params: Params, choices: pd.DataFrame, defaults: pd.DataFrame) -> Figure:
    """A panel for each variant of which some choice is trained, with a dot for each choice that is."""
    variants = list(dict.fromkeys(trained(choices)["variant"]))
    looks = figures.looks(list(params.variants))
    heights = [1.5 + len(choices[choices["variant"] == variant]) for variant in variants]
    with matplotlib.rc_context(figures.STYLE):
        drawing = Figure(figsize=(7.2, 0.4 + 0.3 * sum(heights)), layout="constrained")
        panels = drawing.subplots(len(variants), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, variant in zip(panels, variants, strict=True):
            rows = choices[choices["variant"] == variant]
            names = [f"{key.split('.')[1]}: {plain(value)}" for key, value in zip(rows["key"], rows["value"], strict=True)]
            colour = looks[variant].colour
            seeds = accuracies_of(variant, defaults)
            if len(seeds):
                axes.axvspan(seeds.min(), seeds.max(), color=colour, alpha=0.15, linewidth=0)
                axes.axvline(rows["default_accuracy"].iloc[0], color=colour, linewidth=0.9)
            if variant in params.paper.table_2:
                axes.axvline(params.paper.table_2[variant], color=figures.INK, linewidth=0.9, linestyle=(0, (4, 2)))
            axes.plot(rows["test_accuracy"], range(len(rows)), "o", color=colour, markersize=5)
            axes.set(title=params.label(variant), ylim=(len(rows) - 0.5, -0.5))
            axes.set_yticks(range(len(rows)), names)
            axes.margins(x=0.06)
        drawing.axes[-1].set_xlabel("Test accuracy (per cent)")
        return drawing


if __name__ == "__main__":
    main()
