"""The choices stage: what each choice that the paper leaves open does to a model: `python -m pipeline.choices`.

A training of `choices.runs` differs from its variant in one value. Its test accuracy is set beside that of the variant
with the same seed, beside what another seed does, and beside the comparisons of Section 5 that the variant is part of.
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
from pipeline.report_text import plain
from pipeline.summary import rounded_table

FOLDER = Path("paper_outputs/choices")
CHANGES = "changes"  # the figure
TABLES = Path("paper_outputs/tables")
COLUMNS = ["run", "variant", "seed", "key", "value", "default", "status", "test_accuracy", "default_accuracy", "difference"]


@entry_point
def main() -> None:
    params = load()
    defaults = pd.read_csv(TABLES / "runs.csv")
    table = choices_table(params, defaults)
    tables = {"choices": table, "spread": spread_table(defaults), "conclusions": conclusions_table(params, table, defaults)}
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
    return table.reset_index()


def conclusions_table(params: Params, table: pd.DataFrame, defaults: pd.DataFrame) -> pd.DataFrame:
    """The margin, in points, by which each comparison of accuracies in Section 5 holds with each choice made.

    The chosen run takes the place of its variant, or of the one whose function it computes; the other models stay as they
    are, in the mean over their seeds.
    """
    means, rows = 100 * defaults.groupby("variant")["test_accuracy"].mean(), []
    for run, variant, accuracy in (
        trained(table)[["run", "variant", "test_accuracy"]].drop_duplicates().itertuples(index=False)
    ):
        place = params.choices.computes.get(variant, variant)
        accuracies = means.to_dict() | {place: accuracy}
        for name, claim in params.claims.items():
            for models, margin in margins(claim, accuracies):
                if place in models and math.isfinite(margin):
                    rows.append([name, " ".join(models), run, margin])
    return pd.DataFrame(rows, columns=["claim", "models", "run", "margin"])


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


def findings_of(params: Params, choices: pd.DataFrame, spread: pd.DataFrame, conclusions: pd.DataFrame) -> list[dict]:
    """For each variant whether a choice moves it, and whether Section 5 holds whatever is chosen."""
    if choices.empty:
        return []
    found = [sensitivity(params, rows, spread.set_index("variant")) for _, rows in choices.groupby("variant", sort=False)]
    found.append(robustness(params, choices, conclusions))
    if len(trained(choices)):
        found[0] |= {"figure": f"{CHANGES}.svg", "caption": caption(params)}
    return found


def sensitivity(params: Params, rows: pd.DataFrame, spread: pd.DataFrame) -> dict:
    """Whether some choice moves a variant by more than another seed does."""
    variant = rows["variant"].iloc[0]
    label = params.label(variant)
    noise = spread.loc[variant, ["range", "two_standard_errors"]].max() if variant in spread.index else math.nan
    there = trained(rows)
    largest = there.loc[there["difference"].abs().idxmax()] if len(there) else None
    measures = [
        findings.measure(
            f"{label}: largest change of the test accuracy",
            math.nan if largest is None else abs(largest["difference"]),
            "points",
            "below",
            float(noise),
            "" if largest is None else f"{largest['key']}: {plain(largest['value'])}",
        )
    ]
    for row in there.to_dict("records"):
        what = f"{row['key']}: {plain(row['value'])} instead of {plain(row['default'])}"
        measures.append(findings.measure(what, row["difference"], "points"))
    paper = params.paper.table_2.get(variant)
    return {
        "id": f"choices_{variant}",
        "title": f"{label}: no unstated choice matters",
        "place": "Section 5 and Appendix D",
        "statement": f"The accuracy of {label} does not depend on what the paper leaves open.",
        "rule": "With one value changed at a time and the same seed, no change of the accuracy is larger than the range "
        "over the default's seeds or, if that is more, than two standard errors of the difference of two such accuracies.",
        "verdict": judged(measures, rows),
        "measures": measures,
        "remark": remark(there, paper),
        "figure": None,
        "caption": "",
        "table": None,
        "sources": [f"{FOLDER}/choices.csv", f"{FOLDER}/spread.csv"],
    }


def robustness(params: Params, choices: pd.DataFrame, conclusions: pd.DataFrame) -> dict:
    """Whether the comparisons of Section 5 hold with each choice made."""
    measures = []
    for claim, rows in conclusions.sort_values("margin").groupby("claim", sort=False):
        least = rows.iloc[0]
        note = f"least with {least['run']}, of {rows['run'].nunique()} choices"
        measures.append(findings.measure(params.claims[claim].title, least["margin"], "points", "above", 0.0, note))
    if not measures:
        measures = [findings.measure("Least margin", math.nan, "points", "above", 0.0)]
    stands_for = "; ".join(
        f"{params.label(ours)} stands for {params.label(theirs)}, whose function it is"
        for ours, theirs in params.choices.computes.items()
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
        "remark": f"The choice is made for one model alone. {stands_for}." if stands_for else "",
        "figure": None,
        "caption": "",
        "table": None,
        "sources": [f"{FOLDER}/conclusions.csv"],
    }


def judged(measures: list[dict], rows: pd.DataFrame) -> str:
    """A fault that is there decides; otherwise runs that are not there leave the verdict open."""
    faults = [m for m in measures if m["side"] and m["value"] is not None and not findings.is_met(m)]
    if faults or (rows["status"] == "diverged").any():
        return NOT_SUPPORTED
    return UNDECIDED if (rows["status"] == "missing").any() else findings.verdict(measures)


def remark(there: pd.DataFrame, paper: float | None) -> str:
    if there.empty:
        return ""
    low, high = there["test_accuracy"].min(), there["test_accuracy"].max()
    choices = f"{low:.2f} to {high:.2f}" if low < high else f"{low:.2f}"
    text = f"{choices} per cent over the choices, {there['default_accuracy'].iloc[0]:.2f} with the defaults"
    return f"{text}; the paper has {paper}." if paper else f"{text}."


def caption(params: Params) -> str:
    return (
        f"Test accuracy with one choice changed, seed {params.choices.seed}. Line: the default at that seed; band: the "
        "default's range over its seeds; dashed: the paper's number. Each panel has a scale of its own."
    )


def figure(params: Params, choices: pd.DataFrame, defaults: pd.DataFrame) -> Figure:
    """A panel for each variant of which some choice is trained, with a dot for each choice that is."""
    variants = list(dict.fromkeys(trained(choices)["variant"]))
    looks = figures.looks(list(params.variants))
    most = choices["variant"].value_counts().max()
    with matplotlib.rc_context(figures.STYLE):
        drawing = Figure(figsize=(7.2, 1.0 + 0.3 * most * len(variants)), layout="constrained")
        for axes, variant in zip(drawing.subplots(len(variants), 1, squeeze=False)[:, 0], variants, strict=True):
            rows = choices[choices["variant"] == variant]
            names = [f"{key.split('.')[1]}: {plain(value)}" for key, value in zip(rows["key"], rows["value"], strict=True)]
            colour = looks[variant].colour
            seeds = 100 * defaults.loc[defaults["variant"] == variant, "test_accuracy"].dropna()
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
