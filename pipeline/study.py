"""Measures one study: `python -m pipeline study theorem_2_1` writes paper_outputs/studies/theorem_2_1/*.csv.

A study that trains reads what is there; `python -m pipeline fan_out` trains what is missing.
"""

from pathlib import Path

import pandas as pd

from pipeline import studies
from pipeline.core import files, params, record
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.lab import Lab
from pipeline.training.loop import make_deterministic

FOLDER = Path("paper_outputs/studies")
RECORD = "record.json"


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("study", __doc__)
    parser.add_argument("name", help="a file in a wing of pipeline/studies that measures")
    chosen = parser.parse_args(arguments)
    study = studies.get(chosen.name)
    if study.measure is None:
        raise UserError(f"{chosen.name} measures nothing: `python -m pipeline report` reads what it needs.")
    make_deterministic()
    settings, lab = studies.settings(chosen.name), Lab(chosen.name, params.load(), params.load_paper())
    tables, folder = study.measure(settings, lab), FOLDER / chosen.name
    for name, table in tables.items():
        files.write_csv(folder / f"{name}.csv", table)
    for stale in {path.stem for path in folder.glob("*.csv")} - tables.keys():
        (folder / f"{stale}.csv").unlink()
    environment = record.describe_environment(record.default_device()) | record.describe_commit()
    made_by = {"settings": settings.model_dump(mode="json"), "environment": environment}
    files.write_json(folder / RECORD, made_by)


def read_tables(name: str) -> dict[str, pd.DataFrame]:
    """The tables that a study has measured. Raises UserError if there is none."""
    paths = sorted((FOLDER / name).glob("*.csv"))
    if not paths:
        raise UserError(f"{FOLDER / name} has no table: run `python -m pipeline study {name}`.")
    return {path.stem: files.read_csv(path) for path in paths}


if __name__ == "__main__":
    main()
