"""Copies the runs under paper_outputs/runs into MLflow, which shows them.

    python -m pipeline tracking sync            import all runs that have ended or are training
    python -m pipeline tracking sync --models   import the trained models of Table 2 too
    python -m pipeline tracking ui              serve MLflow on 127.0.0.1:$PORT (default 5000), and sync when records change

The store is mlflow.db at the repository root, or MLFLOW_TRACKING_URI if set.
"""

from pipeline.core.errors import command_parser, entry_point, without_password
from pipeline.tracking import store


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("tracking", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sync_parser = commands.add_parser("sync", help="bring MLflow up to date with the runs")
    only_help = "runs, or prefixes of their names, such as table_2/osa_qr/0"
    sync_parser.add_argument("--only", nargs="+", metavar="RUN", default=(), help=only_help)
    sync_parser.add_argument("--models", action="store_true", help="log and register the trained models of Table 2 too")
    commands.add_parser("ui", help="serve MLflow on 127.0.0.1, and sync every few seconds")
    chosen = parser.parse_args(arguments)
    if chosen.command == "ui":
        from pipeline.tracking.ui import ui

        ui()
    else:
        from pipeline.tracking.sync import sync

        new, runs = sync(chosen.only, with_models=chosen.models)
        hint = "" if runs else " There are no runs to import yet: run `dvc repro` to train some."
        print(f"{new} of {runs} runs were new to MLflow at {without_password(store.address())}.{hint}")


if __name__ == "__main__":
    main()
