"""Every run in MLflow, as a view of the files under runs/ and records/, which stay the truth.

    python -m pipeline.tracking watch FOLDER        follow one training while it runs (pipeline.train starts this)
    python -m pipeline.tracking sync [--from DIR]   import every finished run that MLflow does not have
    python -m pipeline.tracking ui                  sync, then serve MLflow on 127.0.0.1:$PORT (5000)

A training never talks to MLflow: it writes files, and the watcher, a process of its own, follows them. So tracking that
is down or slow costs a training nothing but the seconds that it waits for its watcher at the end.

The store is mlflow.db at the repository root, or what MLFLOW_TRACKING_URI says. It may be deleted: sync rebuilds it.
"""

import argparse
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from pipeline.errors import UserError, entry_point
from pipeline.files import read_json
from pipeline.mlflow_runs import Point, Tracker, read_points, root, tracking_uri
from pipeline.params import load

POLL_SECONDS = 1.0
RETRY_SECONDS = 30.0  # after a failure
GRACE_SECONDS = 8.0  # for the watcher at the end of a training, which waits for 10
CURRENT = {"searchFilter": "tags.level = 'variant' and tags.current = 'true'"}
COLUMNS = (
    "metrics.`final_test_accuracy_mean`",
    "metrics.`final_test_accuracy_std`",
    "metrics.`paper_test_accuracy`",
    "metrics.`num_seeds`",
    "metrics.`num_diverged`",
)
SORTED = {"orderByKey": COLUMNS[0], "orderByAsc": False}
WIDTHS = {"columnOrder": ["attributes.`Run Name`", *COLUMNS], "columnWidths": dict.fromkeys(COLUMNS, 190)}
VIEWS = {  # in MLflow's own format of a shared view; where it does not read this, it shows its default
    "table": CURRENT | SORTED | WIDTHS | {"selectedColumns": list(COLUMNS)},
    "curves": CURRENT | {"chartsSearchFilter": "^(train|test)_(loss|accuracy)_mean"},
}


def watch(folder: Path) -> None:
    """Follows the training that writes to `folder` until stdin closes, then imports what it left behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training, whose end shows on stdin
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")  # seconds, so that the end of the training is noticed
    closed, warned = threading.Event(), threading.Event()
    threading.Thread(target=_await_end, args=(closed, warned), daemon=True).start()
    tracker, record, points, is_over = None, None, None, False
    while not is_over:
        is_over = closed.is_set()  # asked before the files are read, so that the last look comes after the last write
        seen = points
        try:
            record, points = _look(folder) or (record, points)
            if record and (is_over or points != seen):
                tracker = tracker or Tracker(load())
                _conclude(tracker, record, points, folder) if is_over else tracker.publish(record, points, folder)
            warned.clear()
        except ImportError as error:
            return _warn(f"this run is not tracked, because MLflow cannot be imported ({error}).")
        except Exception as error:  # noqa: BLE001  whatever tracking meets, the training goes on
            if not warned.is_set():
                remedy = "`python -m pipeline.tracking sync` imports it afterwards"
                _warn(f"MLflow does not take this run ({_first_line(error)}); training goes on, and {remedy}.")
            warned.set()
            points = seen
        closed.wait(RETRY_SECONDS if warned.is_set() else POLL_SECONDS)


def sync(base: Path) -> Tracker:
    """Imports every finished run under `base` that MLflow does not have, and refreshes the parent runs."""
    params, paths = load(), sorted(base.glob("records/*/*.json"))
    try:
        tracker = Tracker(params)
        imported = sum(_import(tracker, path, base) for path in paths)
        with tracker.lock:
            tracker.sweep()
            for variant in sorted({run.data.tags["variant"] for run in tracker.runs(level="seed")}):
                tracker.refresh(variant)
            tracker.attach_figures(Path("paper_outputs"))
    except ImportError as error:
        raise UserError(f"MLflow cannot be imported ({error}): install requirements.txt.") from None
    except Exception as error:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if not isinstance(error, MlflowException | SQLAlchemyError | OSError):
            raise
        remedy = "check MLFLOW_TRACKING_URI, or delete a damaged or outdated mlflow.db, which this command rebuilds"
        raise UserError(f"MLflow at {_shown(tracking_uri())} failed ({_first_line(error)}): {remedy}.") from error
    hint = "" if paths else " Trainings leave records: run `dvc repro` or `dvc pull`."
    print(f"{imported} of {len(paths)} recorded runs were new to MLflow at {_shown(tracking_uri())}.{hint}", flush=True)
    return tracker


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
    site = _shown(uri) if is_server else f"http://127.0.0.1:{port}"
    runs = f"{site}/#/experiments/{tracker.experiment}/runs?workflowType=machine_learning"
    print(f"All runs   {runs}\nVariants   {runs}&viewStateShareKey=table", flush=True)
    print(f"Curves     {runs}&viewStateShareKey=curves&compareRunsMode=CHART", flush=True)
    if not is_server:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port, "--workers", "1"]
        artifacts = (root() / "mlartifacts").as_uri()
        os.execv(sys.executable, [*command, "--backend-store-uri", uri, "--artifacts-destination", artifacts])


def _look(folder: Path) -> tuple[dict, list[Point]] | None:
    """The record and the points of a training under way; None before it writes them and after it is done with them."""
    try:
        record = json.loads((folder / "record.json").read_text())
        return record, read_points(folder / "history.csv", record)
    except FileNotFoundError:
        return None


def _conclude(tracker: Tracker, record: dict, points: list[Point], folder: Path) -> None:
    path = Path("records") / record["variant"] / f"{record['seed']}.json"
    final = read_json(path) if path.exists() else {}
    if all(final.get(key) == record[key] for key in ("run_key", "started_at")):
        tracker.finish(final, Path("."))
        tracker.refresh(record["variant"])
    else:  # interrupted: a training that is resumed goes on with the same run
        tracker.publish(record, points, folder, status="KILLED")


def _import(tracker: Tracker, path: Path, base: Path) -> bool:
    """Imports the run of one record. A run that cannot be read is named, and does not stop the others."""
    try:
        return tracker.finish(read_json(path), base)
    except (UserError, FileNotFoundError) as error:
        _warn(f"{path} is not imported: {error}")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        _warn(f"{path} is not imported, because it or its run is malformed ({error!r}): `dvc checkout` restores both.")
    return False


def _await_end(closed: threading.Event, warned: threading.Event) -> None:
    """Waits for the end of stdin, then ends the process if the rest takes too long."""
    while os.read(0, 1024):  # not sys.stdin, whose lock would be held while the interpreter ends
        pass
    closed.set()
    time.sleep(GRACE_SECONDS)
    if not warned.is_set():
        _warn("MLflow was too slow at the end of this run; `python -m pipeline.tracking sync` imports it.")
    os._exit(0)


def _shown(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)  # without the password of an address


def _first_line(error: Exception) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return _shown(line if len(line) < 200 else f"{line[:200]}…")


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


@entry_point
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tracking", description="The runs in MLflow.")
    commands = parser.add_subparsers(dest="command", required=True)
    following = commands.add_parser("watch", help="follow one training (pipeline.train starts this)")
    following.add_argument("folder", type=Path)
    importing = commands.add_parser("sync", help="import finished runs that MLflow does not have")
    importing.add_argument("--from", dest="base", type=Path, default=Path("."), help="a folder with runs/ and records/")
    commands.add_parser("ui", help="sync, then serve MLflow on 127.0.0.1")
    arguments = parser.parse_args()
    if arguments.command == "watch":
        watch(arguments.folder)
    elif arguments.command == "ui":
        ui()
    elif not (arguments.base / "records").is_dir() and arguments.base != Path("."):
        raise UserError(f"--from {arguments.base} has no records/: name a folder that holds runs/ and records/.")
    else:
        sync(arguments.base)


if __name__ == "__main__":
    main()
