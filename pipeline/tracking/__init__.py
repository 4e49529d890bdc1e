"""Copies the runs under paper_outputs/runs and .checkpoints into MLflow."""

import subprocess
import sys

PATIENCE_SECONDS = 60  # maximum time for the import of one run; each further run adds 1 s


def sync_quietly(*runs: object) -> None:
    """Imports runs into MLflow, in a separate process. A failure only prints a warning."""
    names, patience = [str(run) for run in runs], PATIENCE_SECONDS + len(runs) - 1
    command = [sys.executable, "-m", "pipeline.tracking", "sync", "--only", *names]
    try:
        done = subprocess.run(command, capture_output=True, timeout=patience, check=False)
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        cause = lines[-1].removeprefix("error: ") if done.returncode else ""
    except subprocess.TimeoutExpired:
        cause = f"no answer in {patience} s."
    except OSError as error:
        cause = f"{error}."
    if cause:
        problem = f"{', '.join(names)}: not imported into MLflow ({cause.removesuffix('.')})"
        print(f"warning: {problem}; `make ui` will import the runs later.", file=sys.stderr, flush=True)
