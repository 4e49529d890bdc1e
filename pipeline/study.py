"""Measures one study: `python -m pipeline.study theorem_2_1` writes paper_outputs/studies/theorem_2_1/*.csv.

First it trains what the study lists and is not there, unless it gathers, or `--collect` is given. What the tables say is
judged and drawn by the report.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from pipeline import runs, sources, studies
from pipeline.core import files, params, record
from pipeline.core.errors import UserError, entry_point
from pipeline.lab import Lab
from pipeline.studies import Finding
from pipeline.training.loop import make_deterministic

FOLDER = Path("paper_outputs/studies")
RECORD = "record.json"


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.study", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=studies.measuring(), help="a file under pipeline/studies that measures")
    parser.add_argument("--no-tracking", action="store_true", help="do not follow its trainings in MLflow")
    parser.add_argument("--collect", action="store_true", help="train nothing: take the runs that are there")
    chosen = parser.parse_args(arguments)
    make_deterministic()
    settings = params.load()
    lab = Lab(chosen.name, settings, params.load_paper())
    lab.is_tracked = not chosen.no_tracking
    if chosen.name not in settings.studies:
        raise UserError(f"params.yaml leaves {chosen.name} out: give it a section there, as git has it.")
    section = settings.studies[chosen.name]
    for training in [] if chosen.collect or studies.gathers(chosen.name) else studies.trainings(chosen.name, section, lab):
        lab.train(*training)
    warn_of_lost_weights(chosen.name)
    tables = studies.module(chosen.name).measure(section, lab)
    folder = FOLDER / chosen.name
    for name, table in tables.items():
        files.write_csv(folder / f"{name}.csv", table)
    for stale in {path.stem for path in folder.glob("*.csv")} - tables.keys():
        (folder / f"{stale}.csv").unlink()
    made_by = {"source_sha256": sources.digest(chosen.name), "settings": section.model_dump()}
    environment = record.describe_environment(record.default_device())
    files.write_json(folder / RECORD, made_by | {"environment": environment})


def warn_of_lost_weights(name: str) -> None:
    """Says so where weights of recorded runs are not here, which DVC takes for gone when it writes its lock."""
    recorded = [path.parent.relative_to(runs.FOLDER) for path in runs.FOLDER.glob(f"{name}/*/*/record.json")]
    lost = sum(not (runs.WEIGHTS / f"{run}.pt").exists() for run in recorded)
    if lost:
        print(
            f"warning: the weights of {lost} of {len(recorded)} runs of {name} are not here, and dvc.lock forgets them: "
            f"`dvc pull {name}` first, where a remote has them.",
            file=sys.stderr,
        )


def read_tables(name: str) -> dict[str, pd.DataFrame]:
    """The tables that a study has measured. Raises UserError if there is none."""
    paths = sorted((FOLDER / name).glob("*.csv"))
    if not paths:
        raise UserError(f"{FOLDER / name} has no table: run `dvc repro {name}`.")
    return {path.stem: files.read_csv(path) for path in paths}


def findings(name: str, lab: Lab) -> list[Finding]:
    """What a study found, from its tables as they stand in the files."""
    module = studies.module(name)
    if not hasattr(module, "Settings"):
        return module.findings(None, {}, lab)
    return module.findings(lab.params.studies[name], read_tables(name), lab)


if __name__ == "__main__":
    main()
