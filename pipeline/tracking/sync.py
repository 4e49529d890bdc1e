"""Finished runs into MLflow, whenever it is convenient, and MLflow's pages over them."""

import os
import socket
import warnings
from pathlib import Path

from pipeline.core.errors import UserError
from pipeline.core.files import read_json
from pipeline.tracking.runs import Tracker, cause, root, tracking_uri, warn, without_password
from pipeline.tracking.views import opening_on, views


def sync(base: Path) -> Tracker:
    """Imports every finished run under `base` that MLflow does not have, and refreshes the parent runs and the views.

    Raises:
        UserError: `base` holds no runs, or MLflow is not installed, does not answer or cannot read its store.
    """
    if not (base / "runs").is_dir() and base != Path("."):
        raise UserError(f"--from {base} has no runs/: name a folder with runs/, and weights/ if they are to be imported.")
    paths, store = sorted(base.glob("paper_outputs/runs/*/*/*/record.json")), without_password(tracking_uri())
    try:
        tracker = Tracker()
        imported = sum(_import(tracker, path, base) for path in paths)
        with tracker.lock:
            tracker.sweep()
            found = {(run.data.tags["study"], run.data.tags["name"]) for run in tracker.runs(level="single")}
            for study, name in sorted(found, key=tracker.notes.place, reverse=True):  # the models last, and so the newest
                tracker.refresh(study, name)
            for key, (_, view) in views(study for study, _ in found).items():
                tracker.client.set_experiment_tag(tracker.experiment, f"mlflow.sharedViewState.{key}", view)
    except ImportError as error:
        raise UserError(f"MLflow cannot be imported ({error}): install requirements.txt.") from None
    except Exception as error:
        from filelock import Timeout
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if not isinstance(error, MlflowException | SQLAlchemyError | OSError):
            raise
        if isinstance(error, Timeout):
            remedy = "another process writes to it, so wait for that and give the command again"
        elif store.startswith("http"):
            remedy = "start it, or unset MLFLOW_TRACKING_URI"
        elif store.startswith("sqlite"):
            remedy = "delete it, which this command rebuilds"
        else:
            remedy = "mend it, or unset MLFLOW_TRACKING_URI"
        raise UserError(f"MLflow at {store} failed ({cause(error)}): {remedy}.") from error
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
    """Serves the store of `sync` on 127.0.0.1, in this process, so that nothing is left when it ends, however it ends."""
    uri, port = tracking_uri(), os.environ.get("PORT") or "5000"
    is_server = uri.startswith("http")
    try:
        if not is_server:
            socket.create_server(("127.0.0.1", int(port))).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"port {port} cannot be used ({error}): choose another, as in `PORT=5001 make ui`.") from None
    tracker = sync(Path("."))
    site = without_password(uri) if is_server else f"http://127.0.0.1:{port}"
    runs = f"#/experiments/{tracker.experiment}/runs?workflowType=machine_learning&viewStateShareKey="
    for key, (name, _) in views(run.data.tags["study"] for run in tracker.runs(level="mean")).items():
        print(f"{name:<22}{site}/{runs}{key}")
    print(f"{'Curves of the models':<22}{site}/{runs}models&compareRunsMode=CHART", flush=True)
    if not is_server:
        import uvicorn
        from mlflow import server

        # As `mlflow server` does in a process of its own, which outlives it where it is killed.
        os.environ[server.BACKEND_STORE_URI_ENV_VAR] = uri
        os.environ[server.ARTIFACT_ROOT_ENV_VAR] = (root() / "mlartifacts").as_uri()
        page = Path(server.app.static_folder, "index.html").read_text()
        server.app.view_functions["serve"] = lambda: opening_on(page, f"{runs}models")
        warnings.filterwarnings("ignore", module="mlflow")
        app, quiet = "mlflow.server.fastapi_app:app", "warning"
        uvicorn.run(app, host="127.0.0.1", port=int(port), log_level=quiet, timeout_graceful_shutdown=2)
