"""The replication pipeline: fetch → train → evaluate → tables → studies → report.

Each stage is a module of this package with a function `main`. Each study is a file under studies/.
"""

import importlib.util
import sys

for _package in ("torch", "numpy", "pandas", "scipy", "matplotlib", "pydantic", "ruamel", "safetensors", "tqdm"):
    is_doctor = {"pipeline.tools.doctor", "doctor"} & {*sys.orig_argv}  # doctor reports missing packages in more detail
    if importlib.util.find_spec(_package) is None and not is_doctor:
        sys.exit(f"error: {sys.executable} has no {_package}: run `make setup` and put .venv/bin first on PATH.")
