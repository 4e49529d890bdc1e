"""The replication, stage by stage: fetch → train → evaluate → tables, theory, complexity → report.

Each stage is a module with a `main` of its own.
"""

import importlib.util
import sys

for _package in ("torch", "numpy", "pydantic", "ruamel", "tqdm"):
    if importlib.util.find_spec(_package) is None:
        sys.exit(f"error: {sys.executable} has no {_package}: run `make setup` and put .venv/bin first on PATH.")
