"""The pages of the report: its sentences, its tables as text, and the templates that they fill in."""

import functools
import html
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from pipeline import studies
from pipeline.core.files import ROOT
from pipeline.report import figures, results, sentences
from pipeline.report.looks import look, on_page
from pipeline.report.numbers import ABSENT, fixed, grouped, mean_std, number, per_cent, plural, scripted, signed
from pipeline.report.results import FOLDER, Results
from pipeline.statistics import CONFIDENCE, NOT_EVALUATED, UNDECIDED
from pipeline.studies import CHECK, CLAIM, FAILS, OBSERVATION, PASSES, Finding, Measure, Table

TEMPLATES = Path(__file__).parent / "templates"
PAGES = ("table_2.md", "result.md", "report.md", "report.html")
PARTS = {  # of the report, by the `place` of the studies below
    20: "Claims about the experiment",
    50: "Theorems and costs",
    60: "Deep models",
    70: "Orthogonal weights",
    100: "Robustness to unstated choices",
    math.inf: "Beyond the paper",
}
OURS = "ours, not in the paper"
MOST_SHOWN = {CLAIM: 8, CHECK: 3, OBSERVATION: 3}  # measures of one finding, where a table says the same
MOST_TOLD = 2  # measures that the sentence of a claim names
TITLE = re.compile(r"\*(\w[^*]*\w)\*")  # of a work
UNITS = {"points": functools.partial(fixed, digits=2)} | dict.fromkeys(("tokens", "layers", "cases"), grouped)


def render(of: Results) -> dict[str, str]:
    """Every page by its name."""
    content = context(of)
    return {page: environment().get_template(f"{page}.j2").render(content) for page in PAGES}


@functools.cache
def environment() -> jinja2.Environment:
    """The templates. Those of HTML escape whatever they are given; the others say where with `md`."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=lambda name: name.endswith(".html.j2"),
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"md": markdown, "prose": prose, "slug": lambda title: title.lower().replace(" ", "-")}
    made.globals |= {"look": look, "on_page": on_page}
    return made


def context(of: Results) -> dict:
    """All that the templates say; what they add is layout."""
    drawn, told = figures.figure_1(of.lab.tables["curves"], of.lab.params), sentences.cautions(of)
    return {
        "paper": of.lab.paper,
        "repository": href("README.md"),
        "answer": sentences.answer(of),
        "lines": sentences.first_lines(of),
        "caution": ", ".join(told),
        "cautions": list(told.values()),
        "rules": sentences.rules(of),
        "names": Table(["Name", "What it is"], [list(each) for each in of.lab.paper.names.items()], "ll"),
        "references": Table(["In the report", "Work"], [list(each) for each in of.lab.paper.references.items()], "ll"),
        "limitations": sentences.limitations(of),
        "compute": sentences.compute(of),
        "table_2": table_2(of),
        "figure_1": figures.inline(figures.svg(drawn), "loss-curves", "Train and test loss by epoch"),
        "figure_caption": sentences.figure_caption(of),
        "parts": parts(of),
        "cost": cost_table(of),
        "appendix": {
            "Runs of Table 2": runs_table(of),
            "Provenance": provenance_table(of),
        },
    }


def parts(of: Results) -> dict[str, list[dict]]:
    """The studies that found something, each with its findings as text, under the headings of the report."""
    told = {title: [] for title in PARTS.values()}
    for name, found in of.found.items():
        title = next((title for end, title in PARTS.items() if studies.place(name) < end), PARTS[math.inf])
        if found:
            told[title].append(study_heading(name) | {"findings": [finding_text(finding, name) for finding in found]})
    return {title: listed for title, listed in told.items() if listed}


# --- findings


def finding_text(finding: Finding, study: str) -> dict:
    """A finding as text: `in_short`, one sentence of what came out, its measures as a table, and its figure for a page."""
    anchor, drawn = f"finding-{finding.id.replace('_', '-')}", finding.figure
    data, count = listed(results.sources_of(finding, study)), len(finding.measures)
    is_told = finding.table is not None and count > MOST_SHOWN[finding.kind]
    origin = [f"Code: `pipeline/studies/{study}.py`."] + [f"Data: {data}."] * bool(data)
    return vars(finding) | {
        "anchor": anchor,
        "badge": finding.verdict or finding.kind,
        "in_short": in_short(finding),
        "measures": None if is_told else measures_table(finding.measures),
        "drawing": drawn and figures.inline(figures.svg(drawn), anchor, finding.caption or finding.title),
        "origin": " ".join(origin + [f"Its {count} measures: `{FOLDER}/measures.csv`."] * is_told),
    }


def listed(paths: list[str]) -> str:
    """Files by their paths; of a folder with more than two of them, its path and their names."""
    folders: dict[Path, list[str]] = {}
    for path in map(Path, paths):
        folders.setdefault(path.parent, []).append(path.name)
    told = []
    for folder, names in folders.items():
        told += [f"`{folder}/` ({', '.join(names)})"] if len(names) > 2 else [f"`{folder / name}`" for name in names]
    return ", ".join(told)


def in_short(finding: Finding) -> str:
    """One sentence: the finding's own, or of a check how close it came, of a claim what decides it, of an observation its
    extremes or its first number."""
    if finding.in_short or finding.kind == CHECK:
        return finding.in_short or closeness(finding)
    if finding.kind == OBSERVATION and (told := extremes(finding.measures)):
        return told
    deciding = [measure for measure in finding.measures if measure.verdict] or finding.measures[:1]
    if len(deciding) > MOST_TOLD:
        counts = Counter(measure.verdict for measure in deciding)
        return f"Of {len(deciding)} comparisons, {sentences.listing(counts)}."
    told = [f"{m.what} is {value(m)}" for m in deciding]
    asked = {f"; {m.side} {number(m.limit)} is asked" for m in deciding if m.side}
    return f"{', '.join(told)}{asked.pop() if len(asked) == 1 else ''}."


def extremes(measures: list[Measure]) -> str:
    """The least and the largest of one quantity of several things, e.g. Rank: least 1 for ViT; largest 26.1 for OSA (QR)."""
    named = [measure.what.rpartition(": ") for measure in measures]
    quantity = named[0][2]
    if len(measures) < 2 or any(not of or other != quantity for of, _, other in named):
        return ""
    told = [(measure.value, f"{amount(measure)} for {of}") for measure, (of, *_) in zip(measures, named, strict=True)]
    if any(math.isnan(number) for number, _ in told):
        return ""
    return f"{quantity[0].upper()}{quantity[1:]}: least {min(told)[1]}; largest {max(told)[1]}."


def value(measure: Measure) -> str:
    """e.g. 0.43 points (−0.08 to 0.94); of too few runs for an interval 0.43 points (1 run); where there is none, not
    evaluated, or why it is not known."""
    if math.isnan(measure.value):
        return f"not known ({measure.note})" if measure.verdict == UNDECIDED else NOT_EVALUATED
    of = interval_of(measure) or (plural(measure.n, "run") if measure.verdict and measure.n else "")
    return f"{amount(measure)} ({of})" if of else amount(measure)


def amount(measure: Measure) -> str:
    """The value and its unit, without decimals where the unit has no parts."""
    return f"{UNITS.get(measure.unit, number)(measure.value)} {measure.unit}".strip()


def interval_of(measure: Measure) -> str:
    """From one end to the other, and nothing where there is none."""
    ends = map(UNITS.get(measure.unit, number), (measure.low, measure.high))
    return " to ".join(ends) if math.isfinite(measure.low) else ""


def measures_table(measures: list[Measure]) -> Table:
    """A row for each measure; what all of them share stands below, once."""
    several = sum(bool(measure.verdict) for measure in measures) > 1
    columns = {
        "Measure": [measure.what for measure in measures],
        "Value": [amount(measure) for measure in measures],
        f"{per_cent(CONFIDENCE)} interval": [interval_of(measure) for measure in measures],
        "Has to be": [f"{m.side} {number(m.limit)}" if m.side else "" for m in measures],
        "n": ["" if m.n is None or "n = " in m.note else str(m.n) for m in measures],
        "Verdict": [measure.verdict if several else "" for measure in measures],
        "Note": [measure.note for measure in measures],
    }
    shared = {name: cells[0] for name, cells in list(columns.items())[3:] if len(cells) > 1 and len(set(cells)) == 1}
    words = {"Note": "", "n": "n = ", "Has to be": "has to be "}
    told = [f"{words.get(name, '')}{cell}" for name, cell in shared.items() if cell]
    shown = {name: cells for name, cells in columns.items() if any(cells) and name not in shared}
    align = "".join("r" if name in ("Value", "n") or "interval" in name else "l" for name in shown)
    note = f"Each: {'; '.join(told)}." if told else ""
    return Table(list(shown), [list(row) for row in zip(*shown.values(), strict=True)], align, note)


def closeness(finding: Finding) -> str:
    """How close a check came, e.g. Holds; the worst case uses 2% of what rounding allows."""
    deciding = [measure for measure in finding.measures if measure.side]
    if finding.verdict == FAILS:
        worst = max((measure for measure in deciding if not measure.is_met), key=used)
        return f"Does not hold: {worst.what} is {amount(worst)} and has to be {worst.side} {number(worst.limit)}."
    if finding.verdict != PASSES:
        return "A number is missing."
    worst = max(deciding, key=used)
    if used(worst) < 0:  # the limit is no scale to measure by
        return "Holds."
    if worst.side == "above":
        if number(worst.value) == number(worst.limit):
            return f"Holds; the closest is {worst.what}: it comes to the {amount(worst)} asked."
        return f"Holds; the closest is {worst.what}: {amount(worst)}, above the {number(worst.limit)} asked."
    share = "under 0.1" if 0 < used(worst) < 1e-3 else f"{100 * used(worst):.2g}"
    return f"Holds; the worst case uses {share}% of {finding.allowance}."


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
    paper, is_comparable = of.lab.paper.table_2, not results.departures(of)["is_stated"].any()
    columns = {
        "Model": lambda row: row.model if row.variant in paper else f"{row.model}\n{OURS}",
        "Paper": lambda row: fixed(row.paper, 1) if row.variant in paper else ABSENT,
        "Ours": lambda row: mean_std(row.mean, row.std, 2),
        "Difference": lambda row: signed(row.difference, 2),
        "n": lambda row: str(row.n_finished) + (f"\n{row.n_diverged} diverged" if row.n_diverged else ""),
    }
    note = "Ours: mean ± standard deviation over the n seeds that finished. {}Data: `paper_outputs/table_2.csv`."
    if not is_comparable:  # with other settings than the paper's
        columns = {name: columns[name] for name in ("Model", "Ours", "n")}
    told = "Difference: ours minus the paper's, points. " if is_comparable else ""
    return tabulate(results.table_2(of), columns, note=note.format(told))


def cost_table(of: Results) -> Table:
    columns = {
        "Model": lambda row: of.lab.label(row.variant),
        "Parameters": lambda row: grouped(row.parameters),
        "Runs": lambda row: str(row.runs),
        "Minutes a run": lambda row: fixed(row.minutes, 1),
        "Images a second": lambda row: grouped(row.images_per_second),
        "Hours": lambda row: fixed(row.hours, 1),
    }
    note = (
        "Finished runs of Table 2. Minutes and hours: training with its evaluations, and all else the machine did; images a "
        f"second: of the training steps alone. Data: `{FOLDER}/cost.csv`."
    )
    return tabulate(results.cost(of), columns, note=note)


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
        f"Data: `paper_outputs/tables/runs.csv`, and a folder of `paper_outputs/runs/table_2` each. `dvc repro train@{variant}-{seed}` "
        "trains one, `make reproduce` all of them."
    )
    return tabulate(of.runs, columns, "lrlrrrr", note)


def provenance_table(of: Results) -> Table:
    """provenance.json, where each value that not all runs share says how many do."""
    facts = results.provenance(of)
    runs = {
        key: "\n".join(value if len(counts) == 1 else f"{value} ({plural(n, 'run')})" for value, n in counts.items())
        for key, counts in facts.pop("runs").items()
    }
    for of in ("table_2_runs", "all_runs"):
        facts |= {f"{of}_{key}": count for key, count in facts.pop(of).items()}
    others = [f"{name} {count}" for name, count in facts["study_runs_by_other_code"].items()]
    listed = {"study_runs_by_other_code": others, "stale_studies": facts["stale_studies"]}
    facts |= {key: ", ".join(values) or "none" for key, values in listed.items()}
    del facts["compute"]  # which has a place of its own
    note = (
        "On one machine, with one code and these versions, the same seed gives the same bits. Elsewhere a run agrees "
        "statistically, within the spread over seeds. Of Table 2’s runs, where neither studies nor all runs are named. "
        "Data: `paper_outputs/provenance.json`."
    )
    return Table(["Fact", "Value"], [[key, str(value)] for key, value in (runs | facts).items()], "cl", note)


# --- text


def markdown(text: str, line_break: str = "<br>") -> str:
    """Text for a cell of a Markdown table, with no meaning to Markdown or HTML but for formulas and `code`."""
    parts = html.escape(text, quote=False).split("`")
    paired, special = len(parts) % 2 == 1, r"[\\*|\[\]]|(?<!\w)_|_(?!\w)"
    plain = [re.sub(special, r"\\\g<0>", scripted(part)) for part in parts]
    parts = [part if paired and place % 2 else plain[place] for place, part in enumerate(parts)]
    return ("`" if paired else "\\`").join(parts).replace("\n", line_break)


def prose(text: str) -> Markup:
    """Text for an HTML page, with formulas, *titles*, and `code`, which links to the file that it names, if it does."""
    parts = re.split("`([^`]*)`", text)
    return Markup("").join(
        code(part) if place % 2 else Markup(TITLE.sub(r"<em>\1</em>", scripted(str(escape(part)))))
        for place, part in enumerate(parts)
    )


def code(text: str) -> Markup:
    link = href(text)
    return Markup('<a href="{}"><code>{}</code></a>' if link else "<code>{1}</code>").format(link, text)


def href(path: str) -> str:
    """The link from the report to a file or folder/ of the working directory or the repository; empty if none is there."""
    if not re.fullmatch(r"[\w./+=-]{1,200}", path):
        return ""
    is_there = Path.is_dir if path.endswith("/") else Path.is_file
    found = next((base / path for base in (Path(), ROOT) if is_there(base / path)), None)
    return os.path.relpath(found.resolve(), FOLDER.resolve()) if found else ""
