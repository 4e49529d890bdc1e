"""The runs in MLflow: a view of the files under paper_outputs/runs and .checkpoints, which stay the truth."""

import subprocess
import sys

PATIENCE_SECONDS = 60  # of a training for MLflow, once at its end


def sync_quietly(run: object) -> None:
    """Shows a run that has just been trained in MLflow: in a process of its own, whose failure is a warning."""
    command = [sys.executable, "-m", "pipeline.tracking", "sync", "--only", str(run)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        cause = lines[-1].removeprefix("error: ") if done.returncode else ""
    except subprocess.TimeoutExpired:
        cause = f"no answer in {PATIENCE_SECONDS} s."
    except OSError as error:
        cause = f"{error}."
    if cause:
        print(f"warning: {run} is not in MLflow ({cause}) `make ui` imports it later.", file=sys.stderr, flush=True)
