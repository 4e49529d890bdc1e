"""The store of MLflow: its address, its client, and remedies where it fails."""

import gc
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline.core.errors import UserError, without_password

ENVIRONMENT = {  # set before MLflow is imported, where the user has not set them
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its background jobs are for language models
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
VARIABLE = "MLFLOW_TRACKING_URI"
PATIENCE_SECONDS = 30  # with another process that writes


def root() -> Path:
    """The repository root, also where DVC runs a stage in a temporary copy of the repository."""
    return Path(os.environ.get("DVC_ROOT") or ".").resolve()


def address() -> str:
    """MLFLOW_TRACKING_URI, or the SQLite database at the repository root.

    An SQLite address cannot quote a `?`, `#` or `%` in the name of a folder above: there the path is relative.
    """
    path = root() / "mlflow.db"
    path = os.path.relpath(path) if set("?#%") & set(str(path)) else path.as_posix()
    return os.environ.get(VARIABLE) or f"sqlite:///{path}"


def database() -> Path | None:
    """The file of an SQLite store; None of another."""
    uri = address()
    return Path(re.split(r"[?#]", uri.removeprefix("sqlite:///"))[0]) if uri.startswith("sqlite:///") else None


def artifacts() -> str | None:
    """The place of the artifacts: next to the database, as several clones may share it. A server has a place of its own."""
    if address().startswith("http"):
        return None
    return ((database() or root() / "mlflow.db").resolve().parent / "mlartifacts").as_uri()


def connect() -> tuple[Any, FileLock]:
    """A client of MLflow, and the lock to hold while one writes.

    Raises:
        UserError: MLflow is not installed, does not answer or cannot read its store.
    """
    uri, path = address(), database()
    lock = FileLock(f"{path or root() / 'mlflow.db'}.lock", timeout=PATIENCE_SECONDS)
    os.environ.update(ENVIRONMENT | os.environ)
    try:
        import mlflow
    except ImportError as error:
        raise UserError(f"MLflow cannot be imported ({error}): install requirements.txt.") from None
    for name in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    mlflow.clear_active_model()  # a notebook leaves one, in the environment too, and metrics would be its
    if path and not path.parent.is_dir():
        raise UserError(f"{VARIABLE} names {path}, but its folder does not exist: create it, or correct the path.")
    with errors_as_user_errors(), lock:
        if path and not (path.exists() and path.stat().st_size):
            partial = path.with_name(f"{path.name}.partial")  # a kill in between would leave half of the tables
            partial.unlink(missing_ok=True)
            mlflow.MlflowClient(f"sqlite:///{partial.as_posix()}").search_experiments()
            os.replace(partial, path)
        try:
            client = mlflow.MlflowClient(uri)
        except ImportError as error:
            raise UserError(f"{VARIABLE} needs a driver ({error}): install it, or correct {VARIABLE}.") from None
    gc.freeze()  # a search makes thousands of objects, at which the collector would walk all modules again and again
    return client, lock


@contextmanager
def errors_as_user_errors() -> Iterator[None]:
    """Turns a failure of MLflow or of its store inside into a UserError that says why and what to do."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, Timeout) as error:
        why = cause(error)
        raise UserError(f"MLflow at {without_password(address())} failed ({why}): {_remedy(error, why)}.") from None


def _remedy(error: Exception, why: str) -> str:
    """A remedy that loses no run: nobody can rebuild a store that holds other people's too."""
    is_ours = not os.environ.get(VARIABLE)
    if isinstance(error, Timeout) or "database is locked" in why:
        return "another process writes to it, so wait for that and give the command again"
    if "schema" in why or "revision" in why:
        return f"copy it to a safe place, then `mlflow db upgrade {address() if is_ours else f'${VARIABLE}'}`"
    return "move it away, and this command makes another from the runs" if is_ours else f"start it, or correct {VARIABLE}"


def cause(error: BaseException) -> str:
    """The cause of an error, on one line: MLflow's own message is an address, and the cause comes last."""
    while behind := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        if isinstance(behind, KeyError):  # an address that MLflow does not know; its message says less
            break
        error = behind
    return without_password((str(error).splitlines() or [type(error).__name__])[0])
