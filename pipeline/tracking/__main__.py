"""The runs in MLflow, as a view of the files under runs/, which stay the truth.

    python -m pipeline.tracking sync [--from DIR]   import every finished run that MLflow does not have
    python -m pipeline.tracking ui                  sync, then serve MLflow on 127.0.0.1:$PORT (5000)
    python -m pipeline.tracking watch FOLDER        follow one training while it runs (trainings start this themselves)

The store is mlflow.db at the repository root, or what MLFLOW_TRACKING_URI says. It may be deleted: sync rebuilds it.
"""

import argparse
from pathlib import Path

from pipeline.core.errors import entry_point
from pipeline.tracking.sync import sync, ui
from pipeline.tracking.watcher import watch


@entry_point
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tracking", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    importing = commands.add_parser("sync", help="import finished runs that MLflow does not have")
    importing.add_argument("--from", dest="base", type=Path, default=Path("."), help="a folder with runs/")
    commands.add_parser("ui", help="sync, then serve MLflow on 127.0.0.1")
    commands.add_parser("watch", help="follow one training").add_argument("folder", type=Path)
    arguments = vars(parser.parse_args())
    {"sync": sync, "ui": ui, "watch": watch}[arguments.pop("command")](**arguments)


if __name__ == "__main__":
    main()
