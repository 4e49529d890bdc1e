"""The report stage: judges and draws what the studies measured, and writes Figure 1, Table 2 and the report around them.

    python -m pipeline.report             write everything to paper_outputs/
    python -m pipeline.report --readme    copy the result from there into README.md, between its markers

Every number in the report also stands in params.yaml, in a record, or in a CSV or JSON file that it names. There is no
clock and no chance in here: the same files give the same bytes.
"""

import argparse
from pathlib import Path

from pipeline.core import files
from pipeline.core.errors import UserError, entry_point
from pipeline.report import figures, pages, results
from pipeline.report.results import FOLDER, Results

README, MARKERS = Path("README.md"), ("<!-- results -->", "<!-- /results -->")


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.report", description="Writes paper_outputs/.")
    parser.add_argument("--readme", action="store_true", help="copy the result from paper_outputs/ into README.md")
    if parser.parse_args(arguments).readme:
        files.write_text(README, with_result(README.read_text(), (FOLDER / "result.md").read_text()))
    else:
        write(results.read())


def write(of: Results) -> None:
    """Writes every output of the stage."""
    for table in (results.table_2, results.cost, results.measures):
        files.write_csv(FOLDER / f"{table.__name__}.csv", table(of))
    for content in (results.findings, results.provenance, results.verdict):
        files.write_json(FOLDER / f"{content.__name__}.json", content(of))
    drawn = {f"{finding.id}.svg": finding.figure for found in of.found.values() for finding in found if finding.figure}
    for stale in {path for path in (FOLDER / "figures").glob("*") if path.name not in drawn}:
        stale.unlink()
    for name, figure in drawn.items():
        files.write_text(FOLDER / "figures" / name, figures.svg(figure))
    figure_1 = figures.figure_1(of.lab.tables["curves"], of.lab.params)
    files.write_text(FOLDER / "figure_1.svg", figures.svg(figure_1))
    files.write_bytes(FOLDER / "figure_1.png", figures.png(figure_1))
    for name, text in pages.render(of).items():
        files.write_text(FOLDER / name, text)


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
