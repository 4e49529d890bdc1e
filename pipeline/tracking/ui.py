"""Serves MLflow's pages, and keeps them up to date with the runs: `make ui`."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from pipeline.core.errors import UserError, without_password
from pipeline.tracking import store

POLL_SECONDS = 3.0


def ui() -> None:
    """Serves MLflow on 127.0.0.1, and syncs whenever a record changes, until interrupted."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    server, site = None, without_password(store.address()).rstrip("/")
    try:
        if not site.startswith("http"):
            server, port = start_server(os.environ.get("PORT") or "5000")
            site = f"http://127.0.0.1:{port}"
        keep_in_sync(server, site)
    except KeyboardInterrupt:
        pass
    finally:
        if server:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)  # ends the server and its workers
            server.wait()


def start_server(port: str) -> tuple[subprocess.Popen, int]:
    """Starts MLflow's server. Returns the process and the port. If `port` is 0, the system chooses a port.

    Raises:
        UserError: the port cannot be used.
    """
    try:
        with socket.create_server(("127.0.0.1", int(port))) as free:
            number = free.getsockname()[1]
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"port {port} cannot be used ({error}): choose another, as in `PORT=5001 make ui`.") from None
    command = ["-m", "pipeline.tracking.ui", "server", "--host", "127.0.0.1", "--port", str(number), "--workers", "1"]
    command += ["--no-serve-artifacts", "--default-artifact-root", str(store.artifacts())]
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, *command], start_new_session=True, stdout=quiet, stderr=quiet), number


def keep_in_sync(server: subprocess.Popen | None, site: str) -> None:
    """Prints the URLs of the models and of their curves. Then syncs whenever a record changes, until the server exits."""
    from pipeline.tracking import sync, trainings  # slow to import; the server starts meanwhile

    opened = store.connect()
    with store.errors_as_user_errors():
        experiment = sync.Experiment(opened[0])
    if server:
        _wait_for(server, site)
    page = f"{site}/#/experiments/{experiment.id}/runs?workflowType=machine_learning&viewStateShareKey="
    print(f"{'Models':<16}{page}models")
    print(f"{'Their curves':<16}{page}seeds&compareRunsMode=CHART", flush=True)
    seen = None
    while server is None or server.poll() is None:
        points = [(training.path, _age(training.path)) for training in trainings.find()]
        # The first item changes every LOST_SECONDS, to trigger a sync that detects killed runs, which write no new records.
        state = int(time.time() / trainings.LOST_SECONDS), points
        if state != seen:
            try:
                sync.sync(opened=opened)
            except UserError as error:
                print(f"warning: {error}", file=sys.stderr, flush=True)
            seen = state
        time.sleep(POLL_SECONDS)
    raise UserError("MLflow's server has ended: run `make ui` to start it again.")


def _wait_for(server: subprocess.Popen, site: str) -> None:
    """Waits until the server answers. Raises UserError if the server exits first."""
    port = int(site.rpartition(":")[2])
    while server.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise UserError(f"MLflow's server did not start on port {port}: run `mlflow server --port {port}` to see why.")


def _age(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


if __name__ == "__main__":
    from mlflow.cli import cli

    store.connect()
    # The address may hold a password, and `ps` shows arguments, so an environment variable passes the address.
    os.environ["MLFLOW_BACKEND_STORE_URI"] = store.address()
    cli()
