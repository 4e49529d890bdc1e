"""Finds and opens MLflow's store, and suggests remedies for its errors."""

import gc
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from pipeline.core.errors import UserError, without_password

ENVIRONMENT = {  # defaults for MLflow's environment variables
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # MLflow's background jobs are for language models
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
URI_VARIABLE = "MLFLOW_TRACKING_URI"
# Prefixes of environment variables to keep. Other MLflow variables could redirect the store or the server of the UI.
KEPT_SETTINGS = (*ENVIRONMENT, URI_VARIABLE, "MLFLOW_EXPERIMENT_NAME", "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS")
KEPT_SETTINGS += ("MLFLOW_MYSQL_", "MLFLOW_SQLALCHEMYSTORE_", "MLFLOW_S3_")  # to connect to databases and artifact stores
ARTIFACTS = "mlartifacts"
LOCATIONS = {  # columns of MLflow's tables that hold URIs of artifacts
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
LOCK_SECONDS = 30  # maximum wait for another process that writes


def root() -> Path:
    """The root of the original repository, even if DVC runs a stage in a temporary copy."""
    return Path(os.environ.get("DVC_ROOT") or ".").resolve()


def address() -> str:
    """Returns MLFLOW_TRACKING_URI if set, else the address of the SQLite database at the repository root."""
    path = root() / "mlflow.db"
    # An SQLite URL cannot escape ?, # or %. A relative path omits parent folders, whose names may contain these characters.
    quoted = os.path.relpath(path) if set("?#%") & set(str(path)) else path.as_posix()
    return os.environ.get(URI_VARIABLE) or f"sqlite:///{quoted}"


def database() -> Path | None:
    """Returns the path of an SQLite store, or None for any other store."""
    uri = address()
    return Path(re.split(r"[?#]", uri.removeprefix("sqlite:///"))[0]) if uri.startswith("sqlite:///") else None


def artifacts() -> str | None:
    """Returns the address of the artifacts, which lie next to the database. Returns None if the store is a server."""
    if address().startswith("http"):
        return None
    return ((database() or root() / "mlflow.db").resolve().parent / ARTIFACTS).as_uri()


def make_settings_ours() -> None:
    """Unless the store is a server, removes MLflow's environment variables except KEPT_SETTINGS. Sets default values."""
    if not address().startswith("http"):
        for name in list(os.environ):
            if name.startswith(("MLFLOW_", "UVICORN_")) and not name.startswith(KEPT_SETTINGS):
                del os.environ[name]
    os.environ.update(ENVIRONMENT | os.environ)


def move_along(old: str) -> None:
    """Replaces the artifact address `old` with the current one if an SQLite store was moved or copied with its artifacts."""
    import sqlalchemy

    new = artifacts()
    if database() is None or new is None or old == new or not old.endswith(f"/{ARTIFACTS}"):
        return
    if _path(old).exists() and not _path(new).exists():
        return  # the artifacts are still at the old address
    engine, values = sqlalchemy.create_engine(address()), {"new": new, "old": old, "inside": f"{old}/", "length": len(old)}
    with engine.begin() as connection:
        for table, columns in LOCATIONS.items():
            for name in columns:
                has_moved = f"{name} = :old OR substr({name}, 1, :length + 1) = :inside"
                update = f"UPDATE {table} SET {name} = :new || substr({name}, :length + 1) WHERE {has_moved}"
                connection.execute(sqlalchemy.text(update), values)
    engine.dispose()


def _path(address: str) -> Path:
    return Path(unquote(urlsplit(address).path))


def connect() -> tuple[Any, FileLock]:
    """Opens the store. Returns an MLflow client, and the lock to hold while writing.

    Raises:
        UserError: MLflow is not installed, does not answer or cannot read its store.
    """
    uri, path = address(), database()
    lock = FileLock(f"{path or root() / 'mlflow.db'}.lock", timeout=LOCK_SECONDS)
    make_settings_ours()
    try:
        import mlflow
    except ImportError as error:
        raise UserError(f"MLflow cannot be imported ({error}): run `pip install -r requirements.txt`.") from None
    for name in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    mlflow.clear_active_model()  # otherwise our metrics would go to a model that a notebook has left active
    if path and not path.parent.is_dir():
        raise UserError(f"{URI_VARIABLE} names {path}, but its folder does not exist: create it, or correct the path.")
    with errors_as_user_errors(), lock:
        if path and not (path.exists() and path.stat().st_size):
            # A new database gets its name only once it is complete, since a killed process could leave half of the tables.
            partial = path.with_name(f"{path.name}.partial")
            partial.unlink(missing_ok=True)
            mlflow.MlflowClient(f"sqlite:///{partial.as_posix()}").search_experiments()
            os.replace(partial, path)
        try:
            client = mlflow.MlflowClient(uri)
        except ImportError as error:
            raise UserError(f"{URI_VARIABLE} needs a driver ({error}): install it, or correct {URI_VARIABLE}.") from None
    # A search creates thousands of objects. Without `freeze`, each garbage collection would scan all imported modules.
    gc.freeze()
    return client, lock


@contextmanager
def errors_as_user_errors() -> Iterator[None]:
    """Turns an error of MLflow or the database into a UserError that states the cause and a remedy."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, Timeout) as error:
        why = cause(error)
        raise UserError(f"MLflow at {without_password(address())} failed ({why}): {_remedy(error, why)}.") from None


def _remedy(error: Exception, why: str) -> str:
    """Returns a remedy that does not delete the store, since the store may also hold the user's own runs."""
    is_ours = not os.environ.get(URI_VARIABLE)
    if isinstance(error, Timeout) or "database is locked" in why:
        return "wait until the other process that is writing to it has finished, then run the command again"
    if "schema" in why or "revision" in why:
        return f"copy it to a safe place, then run `mlflow db upgrade {address() if is_ours else f'${URI_VARIABLE}'}`"
    return (
        "move it away; this command then creates another from the runs"
        if is_ours
        else f"start it, or correct {URI_VARIABLE}"
    )


def cause(error: BaseException) -> str:
    """Returns the root cause of an error, on one line. MLflow's outermost error often names only an address."""
    while behind := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        if isinstance(behind, KeyError):  # for an unsupported URI, MLflow's own error message is clearer
            break
        error = behind
    return without_password((str(error).splitlines() or [type(error).__name__])[0])
