"""Finished runs into MLflow, whenever it is convenient, and MLflow's pages over them."""

import json
import os
import socket
import sys
from pathlib import Path

from pipeline.core.errors import UserError
from pipeline.core.files import read_json
from pipeline.tracking.notes import TABLE_2
from pipeline.tracking.runs import Tracker, first_line, root, tracking_uri, warn, without_password

CURRENT = "tags.level = 'variant' and tags.current = 'true'"
COLUMNS = (
    "metrics.`final_test_accuracy_mean`",
    "metrics.`final_test_accuracy_std`",
    "metrics.`paper_test_accuracy`",
    "metrics.`num_seeds`",
    "metrics.`num_diverged`",
)
VIEWS = {  # in MLflow's own format of a shared view; where it does not read this, it shows its default
    "table": {
        "searchFilter": CURRENT,
        "orderByKey": COLUMNS[0],
        "orderByAsc": False,
        "selectedColumns": list(COLUMNS),
        "columnOrder": ["attributes.`Run Name`", *COLUMNS],
        "columnWidths": {"attributes.`Run Name`": 420} | dict.fromkeys(COLUMNS, 190),
    },
    "curves": {
        "searchFilter": f"{CURRENT} and tags.study = '{TABLE_2}'",
        "chartsSearchFilter": "^(train|test)_(loss|accuracy)_mean",
    },
}


def sync(base: Path) -> Tracker:
    """Imports every finished run under `base` that MLflow does not have, and refreshes the parent runs.

    Raises:
        UserError: `base` holds no runs, or MLflow is not installed, does not answer or cannot read its store.
    """
    if not (base / "runs").is_dir() and base != Path("."):
        raise UserError(
            f"--from {base} has no runs/: name a folder that holds runs/, and weights/ if they are to be imported."
        )
    paths, store = sorted(base.glob("runs/*/*/*/record.json")), without_password(tracking_uri())
    try:
        tracker = Tracker()
        imported = sum(_import(tracker, path, base) for path in paths)
        with tracker.lock:
            tracker.sweep()
            for study, name in sorted(
                {(run.data.tags["study"], run.data.tags["name"]) for run in tracker.runs(level="seed")}
            ):
                tracker.refresh(study, name)
            tracker.attach_figures(Path("paper_outputs"))
    except ImportError as error:
        raise UserError(f"MLflow cannot be imported ({error}): install requirements.txt.") from None
    except Exception as error:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if not isinstance(error, MlflowException | SQLAlchemyError | OSError):
            raise
        remedy = "check MLFLOW_TRACKING_URI, or delete a damaged or outdated mlflow.db, which this command rebuilds"
        raise UserError(f"MLflow at {store} failed ({first_line(error)}): {remedy}.") from error
    hint = "" if paths else " Trainings leave records: run `dvc repro` or `dvc pull`."
    print(f"{imported} of {len(paths)} recorded runs were new to MLflow at {store}.{hint}", flush=True)
    return tracker


def _import(tracker: Tracker, path: Path, base: Path) -> bool:
    """Imports the run of one record. A run that cannot be read is named, and does not stop the others."""
    try:
        return tracker.finish(read_json(path), base)
    except (UserError, FileNotFoundError) as error:
        warn(f"{path} is not imported: {error}")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        warn(f"{path} is not imported, because it or its run is malformed ({error!r}): `git checkout` restores both.")
    return False


def ui() -> None:
    """Serves the store of `sync` on 127.0.0.1, in the place of this process."""
    uri, port = tracking_uri(), os.environ.get("PORT") or "5000"
    is_server = uri.startswith("http")
    try:
        if not is_server:
            socket.create_server(("127.0.0.1", int(port))).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"port {port} cannot be used ({error}): choose another, as in `PORT=5001 make ui`.") from None
    tracker = sync(Path("."))
    for name, view in VIEWS.items():
        tracker.client.set_experiment_tag(tracker.experiment, f"mlflow.sharedViewState.{name}", json.dumps(view))
    site = without_password(uri) if is_server else f"http://127.0.0.1:{port}"
    runs = f"{site}/#/experiments/{tracker.experiment}/runs?workflowType=machine_learning"
    print(f"All runs   {runs}\nModels     {runs}&viewStateShareKey=table", flush=True)
    print(f"Curves     {runs}&viewStateShareKey=curves&compareRunsMode=CHART", flush=True)
    if not is_server:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port, "--workers", "1"]
        artifacts = (root() / "mlartifacts").as_uri()
        os.execv(sys.executable, [*command, "--backend-store-uri", uri, "--artifacts-destination", artifacts])
