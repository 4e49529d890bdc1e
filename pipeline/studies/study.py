"""Measures one study: `python -m pipeline study theorem_2_1` writes paper_outputs/studies/theorem_2_1/*.csv.

The command uses one thread, because the last digits of the results depend on the number of threads.
"""

from pathlib import Path

import pandas as pd
import torch

from pipeline import studies
from pipeline.config import params, records
from pipeline.config.records import Environment, Record
from pipeline.core import files, provenance
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.studies.lab import Lab
from pipeline.training.loop import configure_torch

STUDIES = Path("paper_outputs/studies")


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("study", __doc__)
    parser.add_argument("name", help="a study that makes measurements")
    chosen = parser.parse_args(arguments)
    study = studies.get(chosen.name)
    if study.measure is None:
        raise UserError(
            f"the study {chosen.name} makes no measurements of its own: run `python -m pipeline report PAGE` for its page, "
            "which reads existing results."
        )
    torch.set_num_threads(1)
    configure_torch()
    settings = studies.settings(chosen.name)
    lab = Lab(chosen.name, params.load(), params.load_paper(), studies.reading_of(chosen.name))
    tables, folder = study.measure(settings, lab), STUDIES / chosen.name
    for name, table in tables.items():
        files.write_csv(folder / f"{name}.csv", table)
    for stale in {path.stem for path in folder.glob("*.csv")} - tables.keys():
        (folder / f"{stale}.csv").unlink()
    commit = provenance.describe_commit()
    records.seal(
        folder,
        environment=Environment(**provenance.describe_environment(provenance.default_device())),
        settings=settings.model_dump(mode="json"),
        commits=[commit["git_commit"]],
        dirty=commit["git_dirty"],
    )


def read_tables(name: str) -> dict[str, pd.DataFrame]:
    """Returns a study's measured tables. Raises UserError if a table is missing or has changed since the measurement."""
    folder = STUDIES / name
    records.read_record(folder, Record, f"python -m pipeline study {name}")
    return {path.stem: files.read_csv(path) for path in sorted(folder.glob("*.csv"))}


if __name__ == "__main__":
    main()
