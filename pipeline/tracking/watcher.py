"""One training in MLflow while it runs. The training writes files; a process of its own, the watcher, follows them.

So tracking that is down or slow costs a training nothing but the seconds that it waits for its watcher at the end.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from pipeline.core.files import read_json
from pipeline.tracking.runs import Point, Tracker, alive, cause, outputs, read_points, warn

POLL_SECONDS = 1.0
RETRY_SECONDS = 30.0  # after a failure
GRACE_SECONDS = 8.0  # for the watcher at the end of its training
PATIENCE_SECONDS = 10.0  # of the training for its watcher, which has ended by then


@contextmanager
def tracked(scratch: Path):
    """Lets MLflow follow the training that writes to `scratch`."""
    scratch.mkdir(parents=True, exist_ok=True)
    lock = alive(scratch)
    with suppress(Timeout):  # another training of the same run says for both that they live
        lock.acquire(blocking=False)
    command = [sys.executable, "-m", "pipeline.tracking", "watch", str(scratch)]
    try:
        watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        warn(f"this run is not tracked, because its watcher cannot be started ({error}).")
        yield
        return
    try:
        yield
    finally:
        watcher.stdin.close()  # the sign that the outputs are in place
        try:
            watcher.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            watcher.kill()
            watcher.wait()
            warn("MLflow did not answer; `make ui` imports the run later.")
        lock.release()


def watch(folder: Path) -> None:
    """The watcher: follows the training that writes to `folder` until stdin closes, then imports what it left behind."""
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
                tracker = tracker or Tracker()
                _conclude(tracker, record, points, folder) if is_over else tracker.publish(record, points, folder)
            warned.clear()
        except ImportError as error:
            return warn(f"this run is not tracked, because MLflow cannot be imported ({error}).")
        except Exception as error:  # noqa: BLE001  whatever tracking meets, the training goes on
            if not warned.is_set():
                remedy = "`python -m pipeline.tracking sync` imports it afterwards"
                warn(f"MLflow does not take this run ({cause(error)}); training goes on, and {remedy}.")
            warned.set()
            points = seen
        closed.wait(RETRY_SECONDS if warned.is_set() else POLL_SECONDS)


def _look(folder: Path) -> tuple[dict, list[Point]] | None:
    """The record and the points of a training under way; None before it writes them and after it is done with them."""
    try:
        record = json.loads((folder / "record.json").read_text())
        return record, read_points(folder / "history.csv", record)
    except FileNotFoundError:
        return None


def _conclude(tracker: Tracker, record: dict, points: list[Point], folder: Path) -> None:
    path = outputs(record, Path(".")) / "record.json"
    final = read_json(path) if path.exists() else {}
    if all(final.get(key) == record[key] for key in ("run_key", "started_at")):
        tracker.finish(final, Path("."))
        tracker.refresh(record["study"], record["name"])
    else:  # interrupted: a training that is resumed goes on with the same run
        tracker.publish(record, points, folder, status="KILLED")


def _await_end(closed: threading.Event, warned: threading.Event) -> None:
    """Waits for the end of stdin, then ends the process if the rest takes too long."""
    while os.read(0, 1024):  # not sys.stdin, whose lock would be held while the interpreter ends
        pass
    closed.set()
    time.sleep(GRACE_SECONDS)
    if not warned.is_set():
        warn("MLflow was too slow at the end of this run; `python -m pipeline.tracking sync` imports it.")
    os._exit(0)
