"""The report stage: Figure 1, Table 2, the verdict on each claim, and the report around them as Markdown and as HTML.

    python -m pipeline.report             write everything to paper_outputs/
    python -m pipeline.report --readme    copy the result from there into README.md, between its markers

Every number in the report also stands in params.yaml, in a record, or in a CSV or JSON file that it names. There is no
clock and no chance in here: the same files give the same bytes.
"""

import argparse
from pathlib import Path

import jinja2
import pandas as pd

from pipeline import figures, files, report_text, results, speed
from pipeline.errors import UserError, entry_point
from pipeline.params import load
from pipeline.results import Inputs

FOLDER = Path("paper_outputs")
TEMPLATES = Path(__file__).parent / "templates"
PAGES = ("table_2.md", "table_2.html", "result.md", "report.md", "report.html")
README, MARKERS = Path("README.md"), ("<!-- results -->", "<!-- /results -->")


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.report", description="Writes paper_outputs/.")
    parser.add_argument("--readme", action="store_true", help="copy the result from paper_outputs/ into README.md")
    if parser.parse_args(arguments).readme:
        files.write_text(README, with_result(README.read_text(), (FOLDER / "result.md").read_text()))
    else:
        write_report(results.read(load()))


def write_report(inputs: Inputs) -> None:
    """Writes every output of the stage."""
    judged = results.judge(inputs)
    write_csv("table_2", results.table_2(inputs))
    write_csv("claims", results.claims_table(judged))
    write_csv("orthogonality", results.orthogonality(inputs))
    write_csv("cost", results.cost(inputs))
    files.write_json(FOLDER / "provenance.json", results.provenance(inputs))
    files.write_json(FOLDER / "verdict.json", results.verdict(inputs, judged))
    drawn = draw_figures(inputs)
    write_pages(report_text.context(inputs, judged) | drawn | {"machines": speed.machines(inputs)})


def write_csv(name: str, table: pd.DataFrame) -> None:
    files.write_text(FOLDER / f"{name}.csv", table.to_csv(index=False, lineterminator="\n"))


def draw_figures(inputs: Inputs) -> dict:
    """Writes Figure 1, and returns its parts for the page: the panels, and the label and the look of every model."""
    curves = inputs.tables["curves"]
    drawn = set(curves["variant"])
    labels = {variant: inputs.label(variant) for variant in inputs.params.run.variants if variant in drawn}
    looks = figures.looks(list(inputs.params.variants))
    figure = figures.figure_1(curves, labels, looks)
    files.write_text(FOLDER / "figure_1.svg", figures.svg(figure))
    files.write_bytes(FOLDER / "figure_1.png", figures.png(figure))
    panels = {curve: figures.svg(figures.panel(curves, curve, labels, looks)) for curve in figures.PANELS}
    inline = [figures.inline(svg, curve, f"{figures.PANELS[curve]} by epoch") for curve, svg in panels.items()]
    return {"panels": inline, "labels": labels, "looks": looks, "drawings": read_drawings(inputs.findings)}


def read_drawings(findings: list[dict]) -> dict[str, str]:
    """The figure of each finding that has one, for the page."""
    drawn = [finding for finding in findings if finding["figure"]]
    return {
        finding["id"]: figures.inline((finding["folder"] / finding["figure"]).read_text(), finding["id"], finding["caption"])
        for finding in drawn
    }


def write_pages(context: dict) -> None:
    """Fills in the templates. HTML ones escape whatever they are given; the others say where with `md`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=lambda name: name.endswith(".html.j2"),
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["md"] = report_text.markdown
    for page in PAGES:
        files.write_text(FOLDER / page, environment.get_template(f"{page}.j2").render(context))


def with_result(readme: str, result: str) -> str:
    """The text of README.md with `result` between its markers."""
    begin, end = MARKERS
    before, _, rest = readme.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise UserError(f"README.md has no {begin} with {end} below it: put both where the result should stand.")
    return f"{before}{begin}\n{result.strip()}\n{end}{after}"


if __name__ == "__main__":
    main()
