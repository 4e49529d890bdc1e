"""The runs in MLflow, as a view of the files under paper_outputs/runs, which stay the truth.

    python -m pipeline tracking sync [--from DIR]   bring MLflow up to date with the runs, and with those that train now
    python -m pipeline tracking ui                  serve MLflow on 127.0.0.1:$PORT (5000), and sync every few seconds

The store is mlflow.db at the repository root, or what MLFLOW_TRACKING_URI says.
"""

from pathlib import Path

from pipeline.core.errors import command_parser, entry_point, without_password
from pipeline.tracking import store


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("tracking", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sync_parser = commands.add_parser("sync", help="bring MLflow up to date with the runs")
    sync_parser.add_argument("--from", dest="base", type=Path, default=Path("."), help="a folder with paper_outputs/runs")
    sync_parser.add_argument("--only", metavar="RUN", default="", help="a run, as in table_2/osa_qr/0, or all that begin so")
    sync_parser.add_argument(
        "--register", action="store_true", help="register the models of Table 2 too, as osa_qr and so on"
    )
    commands.add_parser("ui", help="serve MLflow on 127.0.0.1, and sync every few seconds")
    chosen = parser.parse_args(arguments)
    if chosen.command == "ui":
        from pipeline.tracking.ui import ui

        ui()
    else:
        from pipeline.tracking.sync import sync

        new, runs = sync(chosen.base, only=chosen.only, register=chosen.register)
        hint = "" if runs else " Trainings leave records: run `dvc repro`."
        print(f"{new} of {runs} runs were new to MLflow at {without_password(store.address())}.{hint}")


if __name__ == "__main__":
    main()
