"""The pages of the report: its sentences, its tables as text, and the templates that they fill in."""

import html
import math
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from pipeline import studies
from pipeline.reporting import figures, results
from pipeline.reporting.looks import look
from pipeline.reporting.numbers import fixed, grouped, interval, mean_std, number, per_cent, signed
from pipeline.reporting.results import Results
from pipeline.statistics import CONFIDENCE, NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED, UNDECIDED, VERDICTS
from pipeline.studies import CLAIM, FAILS, KINDS, OBSERVATION, PASSES, Finding, Measure, Table

TEMPLATES = Path(__file__).parent / "templates"
PAGES = ("table_2.md", "table_2.html", "result.md", "report.md", "report.html")
HEADLINES = {
    SUPPORTED: "OSA does as the paper says",
    NOT_SUPPORTED: "Contradicted in part",
    UNDECIDED: "Undecided about OSA",
    NOT_EVALUATED: "OSA is not evaluated",
}
RULES = (
    "A claim could have come out otherwise: it is supported if the whole {} interval, in parentheses, is on its side of the "
    "limit, not supported if the whole interval is on the other side, and undecided otherwise (`pipeline/statistics.py`). A "
    "check is an identity or a proved bound: it tests the code, and passes or fails. An observation is a number worth "
    "knowing. The rules of Section 5’s claims stand in `pipeline/paper.yaml`, where git shows no change since {}."
)
OURS = "ours, not in the paper"
MOST_UNFOLDED = 8  # measures of one finding that the page shows at once
SHOWN_DIGEST = 8  # characters of a SHA-256 that tell codes apart


def render(of: Results) -> dict[str, str]:
    """Every page by its name. HTML templates escape whatever they are given; the others say where with `md`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=lambda name: name.endswith(".html.j2"),
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"md": markdown, "prose": prose}
    variants = list(of.lab.params.variants)
    environment.globals["look"] = lambda variant: look(variant, variants)
    content = context(of)
    return {page: environment.get_template(f"{page}.j2").render(content) for page in PAGES}


def context(of: Results) -> dict:
    """All that the templates say; what they add is layout."""
    verdict, drawn = results.verdict(of), figures.figure_1(of.lab.tables["curves"], of.lab.params)
    found = {name: [finding_text(finding, name) for finding in listed] for name, listed in of.found.items()}
    return {
        "paper": of.lab.paper,
        "headline": HEADLINES[verdict["about_osa"]],
        "answer": outcome(verdict["claims_about_osa"], "the {} about it"),
        "tally": f"{outcome(verdict['claims'], 'all {}')} {coverage(verdict)}",
        "notices": notices(of),
        "table_2": table_2(of),
        "figure_1": figures.inline(figures.svg(drawn), "loss-curves", "Train and test loss by epoch"),
        "figure_caption": figure_caption(of),
        "rules": RULES.format(per_cent(CONFIDENCE), moment(of.lab.paper.rules_since)),
        "kinds": {kind: [each for listed in found.values() for each in listed if each["kind"] == kind] for kind in KINDS},
        "studies": [study_heading(name) | {"findings": listed} for name, listed in found.items() if listed],
        "appendix": {
            "Spread and cost": spread_table(of),
            "Departures from the recipe": departures_table(of),
            "Every run": runs_table(of),
            "Provenance": provenance_table(of),
        },
    }


# --- sentences


def outcome(count: dict[str, int], of: str) -> str:
    """e.g. Of the 9 claims, 5 are supported, 1 is not supported and 3 are undecided."""
    counts = {name: count[name.replace(" ", "_")] for name in VERDICTS}
    parts = [f"{n} {'is' if n == 1 else 'are'} {name}" for name, n in counts.items() if n]
    listing = " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]])) or "none is evaluated"
    return f"Of {of.format(plural(count['total'], 'claim'))}, {listing}."


def coverage(verdict: dict) -> str:
    """How many checks pass, and how many of the listed runs there are."""
    checks, runs = verdict["checks"], verdict["runs"]
    trained = f"{runs['trained']} of {plural(runs['total'], 'run')} trained, {runs['diverged']} diverged"
    models = f"{plural(verdict['models'], 'model')}, {plural(verdict['seeds'], 'seed')}"
    return f"{checks['passes']} of {checks['total']} checks pass. {models}: {trained}."


def notices(of: Results) -> list[str]:
    """What a reader must know before any number: of the settings, of the runs, and of what made them."""
    changes, facts, runs, total = results.departures(of), results.provenance(of), of.lab.tables["runs"], len(of.records)
    stated, unstated = (
        "; ".join(f"{each.key} is {each.here}, in the {where} {each.recipe}" for each in rows.itertuples())
        for where, rows in (("paper", changes[changes["is_stated"]]), ("recipe", changes[~changes["is_stated"]]))
    )
    missing, diverged = (
        [f"{variant}/{seed}" for variant, seed in results.identities(runs[runs["status"] == status])]
        for status in ("missing", "diverged")
    )
    is_single = of.lab.tables["summary"]["n_finished"].max() < 2
    others, here = results.made_otherwise(of), facts["code_sha256_here"][:SHOWN_DIGEST]
    codes = ", ".join(sorted({made["code_sha256"][:SHOWN_DIGEST] for made in others}))
    dirty = sum(bool(made["environment"]["git_dirty"]) for made in of.records.values())
    older, since = facts["runs_older_than_rules"], moment(of.lab.paper.rules_since)
    told = [
        (stated, f"Not the paper's setting: {stated}. A difference to its numbers is no failure to replicate them."),
        (unstated, f"Chosen otherwise than in our recipe, where the paper states nothing: {unstated}."),
        (missing, f"{len(missing)} of {len(runs)} runs not trained yet: {', '.join(missing)}."),
        (diverged, f"{len(diverged)} of {len(runs)} runs diverged and have no final accuracy: {', '.join(diverged)}."),
        (is_single, "One run per model: no spread, no interval, and no comparison of models is decided."),
        (
            others,
            f"{len(others)} of {total} runs were made by other code than is here (code {codes}; here {here}): `dvc repro` "
            "trains them again, `python -m pipeline.replay` confirms them where every bit agrees.",
        ),
        (dirty, f"{dirty} of {total} runs were made with uncommitted changes."),
        (len(facts["runs"]["data_sha256"]) > 1, "Not all runs share the same data: see Provenance."),
        (older, f"{older} of {total} runs are older than the rules that judge them, which date from {since}."),
        (facts["stale_studies"], f"Measured by other code than is here: {', '.join(facts['stale_studies'])}."),
    ]
    return [text for holds, text in told if holds]


def figure_caption(of: Results) -> str:
    n = of.lab.tables["summary"]["n_finished"]
    seeds = f"{n.max()}" if n.min() == n.max() else f"{n.min()} to {n.max()}"
    band = " Line: mean over seeds; band: their range." if n.max() > 1 else ""
    return (
        f"Train and test loss by epoch, cross-entropy, logarithmic axes; finished seeds per model: {seeds}.{band} "
        "A train loss is the mean over the minibatches since the point before. From `paper_outputs/tables/curves.csv`."
    )


def moment(iso: str) -> str:
    """A time of ISO 8601, to the minute in UTC."""
    return f"{datetime.fromisoformat(iso).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def plural(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


# --- findings


def finding_text(finding: Finding, study: str) -> dict:
    """A finding with its numbers as text, its figure for a page, and `short`, what it comes to in an overview."""
    anchor = f"finding-{finding.id.replace('_', '-')}"
    measures, close = [measure_text(measure, finding) for measure in finding.measures], closeness(finding)
    drawing = finding.figure and figures.inline(figures.svg(finding.figure), anchor, finding.caption or finding.title)
    sources = ", ".join(f"`{path}`" for path in results.sources_of(finding, study))
    return vars(finding) | {
        "anchor": anchor,
        "badge": finding.verdict or finding.kind,
        "measures": measures,
        "is_long": len(measures) > MOST_UNFOLDED,
        "closeness": close,
        "judged": f"{finding.rule} {close}".strip(),
        "short": in_short(finding, measures),
        "drawing": drawing,
        "origin": f"From {sources}." if sources else "",
    }


def in_short(finding: Finding, measures: list[dict]) -> list[dict]:
    """What an overview shows: of a claim what decides it, counted where that is much; of an observation the first number."""
    if finding.kind != CLAIM:
        return measures[:1] if finding.kind == OBSERVATION else []
    verdicts = Counter(measure.verdict for measure in finding.measures if measure.verdict)
    if verdicts.total() <= MOST_UNFOLDED:
        return [measure for measure in measures if measure["decides"]]
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS if verdicts[verdict])
    return [{"what": plural(verdicts.total(), "measure"), "value": counts, "note": ""}]


def measure_text(measure: Measure, finding: Finding) -> dict:
    """e.g. what: OSA (QR) − ViT, value: −0.08 points (−0.31 to 0.15), note: has to be above −0.5; n = 3."""
    value = f"{number(measure.value)} {measure.unit}".strip()
    if math.isfinite(measure.low):
        value += f" ({number(measure.low)} to {number(measure.high)})"
    several = sum(bool(each.verdict) for each in finding.measures) > 1
    notes = [
        measure.verdict if several else "",
        f"has to be {measure.side} {number(measure.limit)}" if measure.side else "",
        "" if measure.n is None or "n = " in measure.note else f"n = {measure.n}",
        measure.note,
    ]
    return {"what": measure.what, "value": value, "note": "; ".join(filter(None, notes)), "decides": bool(measure.verdict)}


def closeness(finding: Finding) -> str:
    """How close a check came, e.g. Holds; the worst case uses 2% of what is allowed."""
    deciding = [measure for measure in finding.measures if measure.side]
    if finding.verdict == FAILS:
        worst = max((measure for measure in deciding if not measure.is_met), key=used)
        value = f"{number(worst.value)} {worst.unit}".strip()
        return f"Does not hold: {worst.what} is {value} and has to be {worst.side} {number(worst.limit)}."
    if finding.verdict != PASSES:
        return ""
    worst = max(deciding, key=used)
    if used(worst) < 0:  # the limit is no scale to measure by
        return "Holds."
    if worst.side == "above":
        return f"Holds; the worst case is {number(worst.value / worst.limit)} × what is asked."
    share = "under 0.1" if 0 < used(worst) < 1e-3 else number(100 * used(worst))
    return f"Holds; the worst case uses {share}% of what is allowed."


def used(measure: Measure) -> float:
    """What part of its limit a measure uses up, above 1 if it is beyond; −1 where the limit is no scale for it."""
    if measure.limit <= 0 or measure.value < 0:
        return -1.0
    if measure.side == "below":
        return measure.value / measure.limit
    return measure.limit / measure.value if measure.value else math.inf


def study_heading(name: str) -> dict[str, str]:
    """Title and question of a study: the first paragraph of its module's docstring, before and after its colon."""
    summary = " ".join(studies.module(name).__doc__.split("\n\n")[0].split())
    title, colon, question = summary.partition(": ")
    if not colon:
        title, question = name.replace("_", " ").capitalize(), summary
    if question.split()[0].isalpha():  # and no formula
        question = question[0].upper() + question[1:]
    return {"name": name, "title": title, "question": question}


# --- tables


def tabulate(table: pd.DataFrame, columns: dict[str, Callable], align: str = "", note: str = "") -> Table:
    """A row for each of the table's, where each column is a function of that row."""
    rows = [[cell(row) for cell in columns.values()] for row in table.itertuples(index=False)]
    return Table(list(columns), rows, align, note, list(table.get("variant", [])))


def table_2(of: Results) -> Table:
    paper = of.lab.paper.table_2
    columns = {
        "Model": lambda row: row.model if row.variant in paper else f"{row.model}\n{OURS}",
        "Paper": lambda row: fixed(row.paper, 1) if row.variant in paper else "not reported",
        "Ours": lambda row: mean_std(row.mean, row.std, 2),
        "Difference": lambda row: signed(row.difference, 2),
        "n": lambda row: str(row.n_finished) + (f"\n{row.n_diverged} diverged" if row.n_diverged else ""),
    }
    note = (
        "Ours: mean ± standard deviation over the n seeds that finished. Difference: ours minus the paper's, points. "
        "From `paper_outputs/table_2.csv`."
    )
    return tabulate(results.table_2(of), columns, note=note)


def spread_table(of: Results) -> Table:
    losses = of.lab.tables["summary"].filter(regex="variant|_loss_(mean|std)$")
    columns = {
        "Model": lambda row: row.model,
        f"Accuracy, {per_cent(CONFIDENCE)} interval": lambda row: interval(row.low, row.high, 2),
        "Accuracy, range": lambda row: interval(row.min, row.max, 2),
        "Test loss": lambda row: mean_std(row.test_loss_mean, row.test_loss_std, 4),
        "Train loss": lambda row: mean_std(row.train_loss_mean, row.train_loss_std, 4),
        "Parameters": lambda row: grouped(row.parameters),
        "Minutes a run": lambda row: fixed(row.minutes, 1),
        "Images a second": lambda row: grouped(row.images_per_second),
    }
    note = (
        "Time and speed are those of training with its evaluations, on the machines under Provenance and all else they did. "
        "From `paper_outputs/tables/summary.csv` and `paper_outputs/cost.csv`."
    )
    table = results.table_2(of).merge(losses, on="variant").merge(results.cost(of), on="variant", how="left")
    return tabulate(table, columns, note=note)


def departures_table(of: Results) -> Table:
    columns = {
        "Key": lambda row: row.key,
        "Recipe": lambda row: row.recipe if row.is_stated else f"{row.recipe}\nour choice",
        "Here": lambda row: row.here,
        "Models": lambda row: row.models,
    }
    found, none = results.departures(of), "None: every value of the recipe in `pipeline/paper.yaml` is used."
    return tabulate(found, columns, "clll", none if found.empty else "From `params.yaml` and `pipeline/paper.yaml`.")


def runs_table(of: Results) -> Table:
    columns = {
        "Model": lambda row: of.lab.label(row.variant),
        "Seed": lambda row: str(row.seed),
        "Status": lambda row: row.status + (f"\nat step {row.diverged_at_step:.0f}" if row.status == "diverged" else ""),
        "Accuracy, %": lambda row: fixed(100 * row.test_accuracy, 2),
        "Test loss": lambda row: fixed(row.test_loss, 4),
        "Train loss": lambda row: fixed(row.train_loss, 4),
        "Minutes": lambda row: fixed(row.minutes, 1),
    }
    variant, seed = results.identities(of.runs)[0]
    note = (
        f"From `paper_outputs/tables/runs.csv` and `runs/table_2`. `dvc repro train@{variant}-{seed}` trains one run, "
        "`make reproduce` trains, evaluates and reports everything."
    )
    return tabulate(of.runs, columns, "lrlrrrr", note)


def provenance_table(of: Results) -> Table:
    """provenance.json as it is, where each value that not all runs share says how many do."""
    facts = results.provenance(of)
    runs = {
        key: "\n".join(value if len(counts) == 1 else f"{value} ({plural(n, 'run')})" for value, n in counts.items())
        for key, counts in facts.pop("runs").items()
    }
    facts["stale_studies"] = ", ".join(facts["stale_studies"]) or "none"
    note = (
        "On one machine, with one code and these versions, the same seed gives the same bits. Elsewhere a run agrees "
        "statistically, within the spread over seeds. From `paper_outputs/provenance.json`."
    )
    return Table(["Fact", "Value"], [[key, str(value)] for key, value in (runs | facts).items()], "cl", note)


def markdown(text: str, line_break: str = "<br>") -> str:
    """Text for a cell of a Markdown table, with no meaning to Markdown or HTML but for `code` between backticks."""
    parts = html.escape(text, quote=False).split("`")
    paired, special = len(parts) % 2 == 1, r"[\\*|\[\]]|(?<!\w)_|_(?!\w)"
    parts = [part if paired and place % 2 else re.sub(special, r"\\\g<0>", part) for place, part in enumerate(parts)]
    return ("`" if paired else "\\`").join(parts).replace("\n", line_break)


def prose(text: str) -> Markup:
    """Text for an HTML page, with `code` between backticks."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))
