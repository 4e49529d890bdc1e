"""The words of the report: numbers as text, tables as cells, and the sentences that depend on a result."""

import html
import math
import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from pipeline import claims, results
from pipeline.params import Params
from pipeline.results import Inputs

OURS = "ours, not in the paper"
ABSENT = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Table:
    """A table of text. `align` has l, r or c (code) for each column; a line break in a cell begins a smaller line."""

    title: str
    align: str
    columns: list[str]
    rows: list[tuple[str | None, list[str]]]  # the variant whose line marks the row, and the cells
    source: str
    note: str = ""


def context(inputs: Inputs, judged: dict) -> dict:
    """All that the templates say; what they add is layout."""
    params, verdict = inputs.params, results.verdict(inputs, judged)
    return {
        "paper": params.paper,
        "verdict": verdict["overall"],
        "tally": tally(verdict["claims"], "claims", verdict["undecided that lean the paper's way"]),
        "findings_tally": tally(verdict["theorems, costs and choices"], "theorems, costs and choices"),
        "coverage": coverage(verdict),
        "notices": notices(inputs),
        "confidence": per_cent(params.tables.confidence),
        "attention_images": params.evaluate.attention_images,
        "table_2": table_2(inputs),
        "figure_caption": figure_caption(inputs),
        "claims": [claim_text(inputs, name, *judgement) for name, judgement in judged.items()],
        "findings": [finding_text(finding) for finding in inputs.findings],
        "spread": spread_table(inputs),
        "deviations": deviations_table(inputs),
        "choices": choices_table(params),
        "orthogonality": orthogonality_tables(inputs),
        "cost": cost_table(inputs),
        "runs": runs_table(inputs),
        "commands": commands_table(inputs),
        "provenance": provenance_table(inputs),
    }


def tally(count: dict[str, int], things: str, leaning: int = 0) -> str:
    """e.g. Of 9 claims, 5 are supported, 1 is not supported and 3 are undecided. 2 of the undecided lean the paper's way."""
    parts = [f"{count[v]} {'is' if count[v] == 1 else 'are'} {v}" for v in claims.VERDICTS if count[v]]
    listing = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    lean = f" {leaning} of the undecided {'leans' if leaning == 1 else 'lean'} the paper's way." if leaning else ""
    return f"Of {count['total']} {things}, {listing}.{lean}"


def coverage(verdict: dict) -> str:
    """How many of the listed runs there are."""
    runs, seeds = verdict["runs"], verdict["seeds"]
    models = f"{verdict['models']} {'model' if verdict['models'] == 1 else 'models'}"
    trained = f"{runs['trained']} of {runs['total']} runs trained, {runs['diverged']} diverged"
    return f"{models}, {seeds} {'seed' if seeds == 1 else 'seeds'}: {trained}."


def notices(inputs: Inputs) -> list[str]:
    """What a reader must know before any number."""
    runs, found = inputs.tables["runs"], []
    if deviations := results.deviations(inputs.params):
        listing = "; ".join(f"{d.key} is {d.ours}, in the paper {d.paper}" for d in deviations)
        found.append(f"Not the paper's setting: {listing}. A difference to its numbers is no failure to replicate them.")
    for status, words in (("missing", "not trained yet"), ("diverged", "diverged and have no final accuracy")):
        names = [f"{v}/{s}" for v, s in runs.loc[runs["status"] == status, ["variant", "seed"]].to_numpy()]
        if names:
            found.append(f"{len(names)} of {len(runs)} runs {words}: {', '.join(names)}.")
    if inputs.tables["summary"]["n_finished"].max() < 2:
        found.append("One run per model: no spread, no interval, and no comparison of models is decided.")
    for name, values in results.provenance(inputs)["runs"].items():
        if name.endswith("sha256") and len(values) > 1:
            found.append(f"Not all runs share the same {name.split()[0]}: see Provenance.")
    return found


def table_2(inputs: Inputs) -> Table:
    rows = []
    for row in results.table_2(inputs).to_dict("records"):
        known = row["variant"] in inputs.params.paper.table_2
        cells = [
            row["model"] if known else f"{row['model']}\n{OURS}",
            fixed(row["paper"], 1) if known else "not reported",
            mean_std(row["mean"], row["std"], 2),
            signed(row["difference"], 2),
            with_count(row["n_finished"], row["n_diverged"]),
        ]
        rows.append((row["variant"], cells))
    return Table(
        "Table 2. Test accuracy, per cent",
        "lrrrr",
        ["Model", "Paper", "Ours", "Difference", "n"],
        rows,
        "paper_outputs/table_2.csv",
        "Ours: mean ± standard deviation over the n seeds that finished. Difference: ours minus the paper's, points.",
    )


def with_count(finished: int, diverged: int) -> str:
    return f"{finished}\n{diverged} diverged" if diverged else str(finished)


def figure_caption(inputs: Inputs) -> str:
    n = inputs.tables["summary"]["n_finished"]
    seeds = f"{n.max()}" if n.min() == n.max() else f"{n.min()} to {n.max()}"
    band = " Line: mean over seeds; band: their range." if n.max() > 1 else ""
    return (
        f"Train and test loss by epoch, cross-entropy, logarithmic axes; finished seeds per model: {seeds}.{band} "
        "A train loss is the mean over the minibatches since the point before."
    )


def claim_text(inputs: Inputs, name: str, verdict: str, measures: list[claims.Measure]) -> dict:
    claim = inputs.params.claims[name]
    return {
        "title": claim.title,
        "sentence": claim.sentence,
        "place": claim.place,
        "rule": claim.rule(),
        "verdict": verdict,
        "measures": [measure_text(inputs, claim.kind, measure) for measure in measures],
    }


def measure_text(inputs: Inputs, kind: str, measure: claims.Measure) -> dict[str, str]:
    """e.g. what: OSA (QR) − ViT, value: −0.08 points (−0.31 to 0.15), note: has to be above −0.50; n = 3."""
    what = {
        "accuracy": "{0} − {1}",
        "speed": "{0} against {1}",
        "drops": "the fall from {1} to {2}, less that from {0} to {1}",
        "stability": "{0}, largest rise of the train loss",
    }[kind].format(*map(inputs.label, measure.models))
    value = f"{fixed(measure.value, 2)} {measure.unit}" if measure.n else ABSENT
    if math.isfinite(measure.low):
        value += f" ({fixed(measure.low, 2)} to {fixed(measure.high, 2)})"
    note = f"has to be {measure.side} {fixed(measure.limit, 2)}; n = {measure.n}"
    return {"what": what, "value": value, "note": f"{note}; {measure.note}" if measure.note else note}


def finding_text(finding: dict) -> dict:
    """A finding with its measures and its table as text, and its files by their paths from the repository's root."""
    folder, table = finding["folder"], finding["table"]
    return finding | {
        "anchor": finding["id"].replace("_", "-"),
        "measures": [finding_measure(measure) for measure in finding["measures"]],
        "closest": finding_measure(closest(finding["measures"])),
        "figure": folder / finding["figure"] if finding["figure"] else None,
        "table": table and Table("", table["align"], table["columns"], [(None, row) for row in table["rows"]], ""),
    }


def closest(measures: list[dict]) -> dict:
    """Of the measures that decide, the one that is nearest to its limit, or farthest beyond it."""

    def share(measure: dict) -> float:
        value, limit = measure["value"], measure["limit"]
        if value is None:
            return math.inf
        return value / limit if measure["side"] == "below" else limit / value if value > 0 else math.inf

    return max((measure for measure in measures if measure["side"]), key=share)


def finding_measure(measure: dict) -> dict[str, str]:
    limit = f"has to be {measure['side']} {compact(measure['limit'])}" if measure["side"] else ""
    return {
        "what": measure["what"],
        "value": f"{compact(measure['value'])} {measure['unit']}".strip(),
        "note": "; ".join(filter(None, [limit, measure["note"]])),
    }


def spread_table(inputs: Inputs) -> Table:
    losses = inputs.tables["summary"].set_index("variant")
    rows = []
    for row in results.table_2(inputs).to_dict("records"):
        loss = losses.loc[row["variant"]]
        cells = [
            row["model"],
            interval(row["low"], row["high"], 2),
            interval(row["min"], row["max"], 2),
            mean_std(loss["test_loss_mean"], loss["test_loss_std"], 4),
            mean_std(loss["train_loss_mean"], loss["train_loss_std"], 4),
        ]
        rows.append((row["variant"], cells))
    confidence = per_cent(inputs.params.tables.confidence)
    columns = ["Model", f"Accuracy, {confidence} interval", "Accuracy, range", "Test loss", "Train loss"]
    return Table("Spread over seeds", "lrrrr", columns, rows, "paper_outputs/tables/summary.csv")


def deviations_table(inputs: Inputs) -> Table:
    rows = [
        (None, [d.key, plain(d.paper), plain(d.ours), ", ".join(map(inputs.label, d.variants))])
        for d in results.deviations(inputs.params)
    ]
    columns = ["Key", "Paper", "Ours", "Models"]
    return Table("Departures from what the paper states", "clll", columns, rows, "params.yaml")


def choices_table(params: Params) -> Table:
    rows = []
    for choice in params.report.choices:
        ours = choice.ours
        if choice.key:
            ours = f"{plain(params.value(choice.key))}\n{choice.key}"
        rows.append((None, [choice.topic, choice.paper, ours, choice.why]))
    return Table("What the paper leaves open", "llll", ["Choice", "Paper", "Ours", "Why"], rows, "params.yaml")


def orthogonality_tables(inputs: Inputs) -> list[Table]:
    columns = ["Block", "‖AᵀA − I‖, max", "median", "‖S‖, max", "median", "α, range"]
    tables = []
    for variant, layers in results.orthogonality(inputs).groupby("variant", sort=False):
        rows = [
            (
                None,
                [
                    str(row["layer"]),
                    scientific(row["error_max"]),
                    scientific(row["error_median"]),
                    fixed(row["norm_max"], 2),
                    fixed(row["norm_median"], 2),
                    interval(row["alpha_min"], row["alpha_max"], 3),
                ],
            )
            for row in layers.to_dict("records")
        ]
        tables.append(Table(inputs.label(variant), "lrrrrr", columns, rows, "paper_outputs/orthogonality.csv"))
    return tables


def cost_table(inputs: Inputs) -> Table:
    rows = [
        (
            row["variant"],
            [
                inputs.label(row["variant"]),
                grouped(row["parameters"]),
                fixed(row["minutes"], 1),
                grouped(row["images_per_second"]),
            ],
        )
        for row in results.cost(inputs).to_dict("records")
    ]
    columns = ["Model", "Parameters", "Minutes a run", "Images a second"]
    note = "Wall-clock time of training with its evaluations, on the machines under Provenance and all else they did."
    return Table("Cost", "lrrr", columns, rows, "paper_outputs/cost.csv", note)


def runs_table(inputs: Inputs) -> Table:
    rows = []
    for row in inputs.tables["runs"].to_dict("records"):
        record = inputs.records.get((row["variant"], row["seed"]))
        status = row["status"] + (f"\nat step {row['diverged_at_step']:.0f}" if row["status"] == "diverged" else "")
        cells = [
            inputs.label(row["variant"]),
            str(row["seed"]),
            status,
            fixed(100 * row["test_accuracy"], 2),
            fixed(row["test_loss"], 4),
            fixed(row["train_loss"], 4),
            fixed(record["seconds"] / 60, 1) if record else ABSENT,
        ]
        rows.append((row["variant"], cells))
    columns = ["Model", "Seed", "Status", "Accuracy, %", "Test loss", "Train loss", "Minutes"]
    return Table("Every run", "lrlrrrr", columns, rows, "paper_outputs/tables/runs.csv and records/")


def commands_table(inputs: Inputs) -> Table:
    """What trains the runs of one row of Table 2."""
    run = inputs.params.run
    stages = {variant: [f"train@{variant}-{seed}" for seed in run.seeds] for variant in run.variants}
    rows = [(variant, [inputs.label(variant), f"dvc repro {' '.join(names)}"]) for variant, names in stages.items()]
    return Table("Commands", "lc", ["Model", "Trains its runs"], rows, "dvc.yaml")


def provenance_table(inputs: Inputs) -> Table:
    facts = results.provenance(inputs)
    names = {
        "data sha256": "Data, SHA-256",
        "code sha256": "Code, SHA-256",
        "commit": "Commit",
        "device_name": "Device",
        "platform": "Platform",
        "python": "Python",
        "torch": "PyTorch",
        "num_threads": "Threads",
    }
    rows = [(None, ["Parameters, SHA-256", facts["parameters_sha256"]])]
    for key, name in names.items():
        values = facts["runs"][key]
        rows.append((None, [name, "\n".join(v if len(values) == 1 else f"{v} ({n} runs)" for v, n in values.items())]))
    rows.append((None, ["Time of all runs", f"{fixed(facts['hours'], 2)} hours, resumed {facts['resumptions']} times"]))
    return Table("Provenance", "ll", ["", ""], rows, "paper_outputs/provenance.json, from records/")


def fixed(value: float, digits: int) -> str:
    """A fixed number of decimals, a true minus sign, and a dash for what there is not."""
    return ABSENT if pd.isna(value) else f"{value:z.{digits}f}".replace("-", "−")


def signed(value: float, digits: int) -> str:
    return ABSENT if pd.isna(value) else f"{value:+z.{digits}f}".replace("-", "−")


def mean_std(mean: float, std: float, digits: int) -> str:
    return fixed(mean, digits) if pd.isna(std) else f"{fixed(mean, digits)} ± {fixed(std, digits)}"


def interval(low: float, high: float, digits: int) -> str:
    return ABSENT if pd.isna(low) else f"{fixed(low, digits)} to {fixed(high, digits)}"


def scientific(value: float) -> str:
    """e.g. 1.2 × 10⁻⁶."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPTS)}"


def compact(value: float | None) -> str:
    """Three digits or so: 0.998, 12.3, 4 096, 1.2 × 10⁻⁶."""
    if value is None or value == 0 or not math.isfinite(value):
        return ABSENT if value != 0 else "0"
    size = abs(value)
    if not 0.01 <= size < 1e5:
        return scientific(value)
    return grouped(value) if size >= 1000 else fixed(value, 3 if size < 10 else 1)


def grouped(value: float) -> str:
    """A whole number with narrow spaces between thousands."""
    return f"{value:,.0f}".replace(",", "\u202f")


def per_cent(value: float) -> str:
    return f"{100 * value:g}%"


def plain(value: Any) -> str:
    """A value of params.yaml as it is written there."""
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def markdown(text: str, line_break: str = "<br>") -> str:
    """Text for a cell of a Markdown table, with no meaning to Markdown or HTML."""
    text = re.sub(r"[\\`*|\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", html.escape(text, quote=False))
    return text.replace("\n", line_break)
