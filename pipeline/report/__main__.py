"""Writes the pages: `python -m pipeline report paper` for report.html and .md, `report research` for research.html and .md.

    python -m pipeline report paper --only theorem_2_2    summarises this study again and keeps the numbers of the others
    python -m pipeline report readme                      writes the results into README.md, between the markers
    python -m pipeline report demonstration               writes report.html and .md without studies, for the quickstart

templates/ holds the text. The studies supply its numbers, which are also written to paper_outputs/numbers. Pages do not
depend on time or chance: the same files give the same bytes.
"""

import base64
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from pipeline import studies
from pipeline.config import params, records
from pipeline.config.records import Record
from pipeline.core import files
from pipeline.core.errors import UserError, command_parser, ended, entry_point, hint
from pipeline.core.files import rounded
from pipeline.report import figures, page, table_2
from pipeline.report.table_2 import OUTPUTS, TABLE_2_CSV
from pipeline.statistics.verdicts import LEVEL
from pipeline.studies import study
from pipeline.studies.lab import Lab
from pipeline.training.run import RUNS

# Name of a page → name of its file
PAGES = {"paper": "report", "research": "research", "demonstration": "report"}
ON_RESEARCH = ("ablations", "harder_data", "optimisers")  # studies in studies/paper that the page `research` shows
# Page → studies that belong to another page, but whose numbers this page quotes
QUOTED = {"paper": ("ablations", "harder_data")}
NUMBERS, FIGURES = OUTPUTS / "numbers", OUTPUTS / "figures"  # both folders have a subfolder for each page
NARROW_FIGURES = FIGURES / "narrow"  # for phones
TABLE_2_TABLES = ("paper_outputs/tables/runs.csv", "paper_outputs/tables/histories.csv")
STAGES = ("paper", "research")  # pages that are stages of dvc.yaml
README, MARKERS = Path("README.md"), re.compile(r"(<!-- (\w+) -->\n).*?(\n<!-- /\2 -->)", re.DOTALL)


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("report", __doc__)
    parser.add_argument("page", nargs="?", default="paper", choices=[*PAGES, "readme"])
    parser.add_argument("--only", metavar="STUDY", help="summarise this study alone; take the others' numbers as they are")
    chosen = parser.parse_args(arguments)
    if chosen.page == "readme":
        write_readme()
    else:
        make_page(chosen.page, chosen.only)


def studies_on(name: str) -> list[str]:
    """Returns the studies of a page. The page `demonstration` has none."""
    paper = [each for each in studies.names("paper") if each not in ON_RESEARCH]
    return {"paper": paper, "research": [each for each in studies.names() if each not in paper]}.get(name, [])


def make_page(name: str, only: str | None = None) -> None:
    """Writes a page, its numbers and its figures.

    Raises:
        UserError: DVC considers an input out of date, or `only` is not a study of the page. Either way nothing is written.
    """
    if only is None:
        check_current(name)
    elif only not in studies_on(name):
        raise UserError(ended(f"--only {only} is not a study on the page {name}{hint(only, studies_on(name))}"))
    lab = Lab("report", params.load(), params.load_paper())
    context = common(lab)
    commits = commits_of(context["provenance"]["commit"])
    for each in studies_on(name):
        path = NUMBERS / name / f"{each}.json"
        if only in (None, each):
            summary = summary_of_study(each, lab.of(each, studies.reading_of(each)), name, commits)
            files.write_text(path, files.as_json(summary, sort_keys=False))
        context[each] = files.read_json(path)
    for each in QUOTED.get(name, ()):
        context[each] = summary_of_study(each, lab.of(each, studies.reading_of(each)), name, commits)
    if name != "research" and only is None:
        files.write_csv(TABLE_2_CSV, table_2.as_csv(context["table_2"], lab))
        shown = ("table_2", "against_paper", "cost", "compute", "provenance")
        files.write_json(NUMBERS / name / "table_2.json", {key: context[key] for key in shown})
        figure_1 = partial(figures.figure_1, lab.tables["histories"], lab.params)
        sources = ["paper_outputs/tables/histories.csv", *commits]
        write_figure(OUTPUTS / "figure_1.svg", name, sources, lab, figure_1, png=True)
    write_page(name, context, lab)


def check_current(*pages: str) -> None:
    """Raises UserError if, according to DVC, a direct or indirect input of the pages is out of date."""
    stages = [name for name in pages if name in STAGES]
    # DVC_STAGE says that DVC has already checked the inputs. `dvc repro` sets this variable.
    if not stages or "DVC_STAGE" in os.environ or not Path(".dvc").is_dir():
        return
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.ERROR)
    for stage, entries in Repo().status(targets=stages, with_deps=True).items():
        for entry in entries if stage not in stages else []:
            states = entry if isinstance(entry, dict) else {"changed command": {stage: "changed"}}
            for path, state in itertools.chain(*(each.items() for each in states.values())):
                if state not in ("deleted", "not in cache"):  # these states are allowed: a fresh clone has no data
                    remedy = f"run `dvc repro {' '.join(stages)}`"
                    raise UserError(f"{path} has changed since the stage {stage} last ran: {remedy}.")


def common(lab: Lab) -> dict[str, Any]:
    """Returns the variables that the templates of all pages share."""
    trained = table_2.read_records(lab)
    rows = table_2.rows(lab)
    content = {
        "table_2": rows,
        "against_paper": table_2.against_paper(rows),
        "cost": table_2.cost_of_runs(lab, trained),
        "compute": table_2.compute(trained),
        "provenance": table_2.made_with(trained),
        "level": LEVEL,
        "params": lab.params.model_dump(),
        "paper": lab.paper.model_dump(),
    }
    return page.to_json(content)


def write_figure(
    path: Path, of_page: str, sources: list[str], lab: Lab, draw: Callable[[], Figure | None], *, png: bool = False
) -> None:
    """Writes a figure for wide and for narrow screens, and as PNG if `png` is set. Writes nothing if `draw` returns None.

    Calls `draw` only if an input has changed.
    """

    def files_of() -> dict[str, str]:
        if (figure := draw()) is None:
            return {}
        image = {"png": base64.b64encode(figures.png(figure)).decode()} if png else {}
        return image | {"wide": figures.svg(figure, sources), "narrow": figures.svg(figures.for_narrow(figure), sources)}

    made_of = files.json_digest([sources, lab.once("inputs of figures", figures.inputs)])
    drawn = figures.cached(f"{of_page}/{path.stem}", made_of, files_of)
    if drawn:
        files.write_text(path, drawn["wide"])
        files.write_text(NARROW_FIGURES / of_page / path.name, drawn["narrow"])
    if "png" in drawn:
        files.write_bytes(path.with_suffix(".png"), base64.b64decode(drawn["png"]))


def summary_of_study(name: str, lab: Lab, of_page: str, commits: list[str]) -> dict[str, Any]:
    """Writes a study's figures. Returns the study's numbers, or {} if the study has not been measured yet.

    A figure drawn from Table 2's runs cites `commits`, the commits whose code trained these runs.
    """
    one = studies.get(name)
    settings = studies.settings(name)
    tables: studies.Tables = {}
    if one.measure:
        if not (study.STUDIES / name).is_dir():
            return {}
        tables |= study.read_tables(name)
    if read := one.read:
        tables |= lab.once(f"runs of {name}", lambda: read(settings, lab))
    sources = sources_of(name) or [*TABLE_2_TABLES, *commits]
    for figure, draw in one.figures.items():
        path, drawing = FIGURES / of_page / f"{figure}.svg", partial(draw, settings, tables, lab)
        with figures.style():
            write_figure(path, of_page, sources, lab, drawing)
    return page.to_json(one.summarise(settings, tables, lab))


def sources_of(name: str) -> list[str]:
    """Returns the sources of a study's figures, or [] if the study has no measurements and no runs of its own."""
    one, folder, sources = studies.get(name), study.STUDIES / name, []
    if one.measure:
        record = records.read_record(folder, Record, f"python -m pipeline study {name}")
        sources += [*map(str, sorted(folder.glob("*.csv"))), *commits_of([record.commit])]
    if one.read:
        sources.append(str(RUNS / name))
    return sources


def commits_of(known: Iterable[str | None]) -> list[str]:
    return [f"commit {each}" for each in known if each]


def write_page(name: str, context: dict[str, Any], lab: Lab) -> None:
    """Renders a page as Markdown and as HTML."""
    environment = page.template_environment(lab.label)
    environment.globals["source"] = partial(table_sources, name)
    markdown = re.sub(r"\n{3,}", "\n\n", environment.get_template(f"{name}.md.j2").render(context))
    markdown = markdown.replace("](figures/", f"](figures/{name}/")
    files.write_text(OUTPUTS / f"{PAGES[name]}.md", markdown)
    drawings = {}
    for path in set(re.findall(r"\]\(((?:figures/\w+/)?\w+\.svg)\)", markdown)):
        if (OUTPUTS / path).exists():
            wide = (OUTPUTS / path).read_text(encoding="utf-8")
            narrow = (NARROW_FIGURES / name / Path(path).name).read_text(encoding="utf-8")
            stem = Path(path).stem.replace("_", "-")
            drawings[path] = figures.inline(wide, stem, "roomy") + figures.inline(narrow, f"{stem}-narrow", "narrow")
    body, sections = page.to_html(markdown, drawings, lambda path: source_line(path, name))
    labels = {variant: lab.label(variant) for variant in lab.params.run.variants}
    frame = {"body": Markup(body), "sections": sections, "page": name, "curves": curves(lab), "labels": labels}
    whole = environment.get_template("page.html.j2").render(context | frame)
    files.write_text(OUTPUTS / f"{PAGES[name]}.html", whole)


def curves(lab: Lab) -> dict[str, dict[str, list]]:
    """Returns the points of Figure 1, [epoch, median loss], by curve and model."""
    points: dict[str, dict[str, list]] = {curve: {} for curve in figures.PANELS}
    for variant, own in lab.tables["histories"].groupby("variant", sort=False):
        medians = own.groupby("epoch")[list(figures.PANELS)].median().dropna()
        for curve in figures.PANELS:
            points[curve][variant] = [[epoch, rounded(loss)] for epoch, loss in medians[curve].items()]
    return points


def table_sources(of_page: str, *owners: str) -> Markup:
    """Returns a line of links: to the numbers of each study in `owners`, and to the folder of the first study's code."""
    links = []
    for owner in owners:
        name = re.sub(r"(\d)_(\d)", r"\1.\2", owner).replace("_", " ")  # theorem_2_1 becomes theorem 2.1
        links.append(f"[{name}](numbers/{of_page}/{owner}.json)")
    return Markup(f"<small>Numbers: {', '.join(links)} ([code](../{code_of(owners[0]).parent})).</small>")


def code_of(owner: str) -> Path:
    return Path(f"pipeline/studies/{studies.wing(owner)}/{owner}.py")


def source_line(path: str, of_page: str) -> str:
    """Returns a line that links to the data and the code of a figure."""
    stem = Path(path).stem
    owner = next((each for each in studies_on(of_page) if stem in studies.get(each).figures), None)
    if owner is None:
        return '<small><a href="tables/histories.csv">data</a></small>'
    one = studies.get(owner)
    data = f"studies/{owner}/" if one.measure else f"runs/{owner}/" if one.read else "tables/"
    return f'<small><a href="{data}">data</a>, <a href="../{code_of(owner)}">code</a></small>'


def write_readme() -> None:
    """Rewrites the blocks between markers in README.md. The name of a marker is the name of its template."""
    check_current(*STAGES)
    lab = Lab("report", params.load(), params.load_paper())
    numbers = {path.stem: files.read_json(path) for path in sorted(NUMBERS.glob("*/*.json"))}
    context = {**numbers, **common(lab), "page": "paper_outputs/research.md"}
    environment = page.template_environment(lab.label)
    readme = README.read_text(encoding="utf-8")

    def block(found: re.Match) -> str:
        return found[1] + environment.get_template(f"readme/{found[2]}.md.j2").render(context).strip() + found[3]

    files.write_text(README, MARKERS.sub(block, readme))


if __name__ == "__main__":
    main()
