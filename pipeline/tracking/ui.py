"""MLflow's pages over the runs, as they train: `make ui`."""

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
    """Serves the store on 127.0.0.1 and syncs it whenever a record changes, until it is interrupted."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    server, site = None, without_password(store.address()).rstrip("/")
    try:
        if not site.startswith("http"):
            port = os.environ.get("PORT") or "5000"
            server, site = start_server(port), f"http://127.0.0.1:{port}"
            wait_for(server, int(port))
        print(f"{'MLflow':<28}{site}", flush=True)
        follow(server, site)
    except KeyboardInterrupt:
        pass
    finally:
        if server:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)  # its workers too
            server.wait()


def start_server(port: str) -> subprocess.Popen:
    """`mlflow server`, after the store is there. Raises UserError if the port cannot be used."""
    try:
        socket.create_server(("127.0.0.1", int(port))).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"port {port} cannot be used ({error}): choose another, as in `PORT=5001 make ui`.") from None
    command = ["-m", "pipeline.tracking.ui", "server", "--host", "127.0.0.1", "--port", port, "--workers", "1"]
    command += ["--no-serve-artifacts", "--default-artifact-root", store.artifacts()]
    hidden = {"MLFLOW_BACKEND_STORE_URI": store.address()}  # from `ps`, as it may hold a password
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": store.ENVIRONMENT | os.environ | hidden}
    return subprocess.Popen([sys.executable, *command], start_new_session=True, **quiet)


def wait_for(server: subprocess.Popen, port: int) -> None:
    """Until the server answers. Raises UserError if it ends before."""
    while server.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    with store.explained():
        store.connect()[0].search_experiments()  # which says what is wrong with the store
    raise UserError(f"MLflow's server does not start on port {port}: `mlflow server` says why.")


def follow(server: subprocess.Popen | None, site: str) -> None:
    """Prints the address of each view, then syncs again and again."""
    from pipeline.tracking import records  # seconds to import, in which the server starts
    from pipeline.tracking.sync import Experiment, sync

    opened, seen = store.connect(), None
    with store.explained():
        experiment = Experiment(opened[0])
        menu = experiment.write_views(records.find(Path(".")))
    page = f"{site}/#/experiments/{experiment.id}/runs?workflowType=machine_learning&viewStateShareKey="
    for key, name in menu.items():
        print(f"{name:<28}{page}{key}")
    print(f"{'Curves of the models':<28}{page}models&compareRunsMode=CHART", flush=True)
    while server is None or server.poll() is None:
        # Also now and then with no new point: a training that was killed writes none.
        state = int(time.time() / records.LOST_SECONDS), *((path, _age(path)) for path in records.find(Path(".")))
        if state != seen:
            try:
                sync(opened=opened)
            except UserError as error:
                print(f"warning: {error}", file=sys.stderr, flush=True)
            seen = state
        time.sleep(POLL_SECONDS)
    raise UserError("MLflow's server has ended: `make ui` starts it again.")


def _age(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


if __name__ == "__main__":
    from mlflow.cli import cli

    store.connect()
    cli()
