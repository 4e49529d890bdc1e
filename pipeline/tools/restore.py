"""Goes back to the committed results, and loses nothing: `make restore`, or `python -m pipeline restore`.

It puts params.yaml, every dvc.lock and what stages or fan_out made back as the last commit has them. Their present versions,
and the runs that the commit does not have, move to .restored/DATE/. Code, documents and your own files stay as they are.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from ruamel.yaml import YAML

from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.tools import locks

KEPT = Path(".restored")
SHOWN_PARTS = 5  # parts of a path in a list: paper_outputs/runs/table_2/vit/0
RECORD = re.compile(r"paper_outputs/runs/(.*)/record\.json")
OF_A_RUN = re.compile(  # paths of any study but the tries, which git and DVC leave alone
    r"paper_outputs/(runs/(?!tries/)[^/]+/[^/]+/\d+/(history\.csv|watched\.csv|metrics\.json|record\.json)"
    r"|weights/(?!tries/)[^/]+/[^/]+/\d+\.safetensors|evaluations/[^/]+/\d+/evaluation\.json|data/\w+\.txt)"
)


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("restore", __doc__)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    chosen = parser.parse_args(arguments)
    if git("rev-parse", "--show-prefix").strip():
        raise UserError("this is not the root of a git repository: run from there.")
    refuse_while_others_work()
    committed = git("ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0")
    states, outputs = changes(), outputs_of(committed)
    affected = [path for path in states if is_output(path, outputs)]
    if not affected:
        print("Nothing to restore: parameters and results are as the last commit has them.")
        return
    back = sorted({*affected} & {*committed})
    moving = [path for path in affected + untracked_weights(affected, states) if os.path.lexists(path)]
    folder = new_folder()
    show(f"Back as in {git('log', '-1', '--format=%h (%s)').strip()}:", back)
    show(f"Moved to {folder}/, as they are now:", moving)
    show("Changed too, and left alone:", [path for path in states if path not in affected])
    if not chosen.yes:
        if not sys.stdin.isatty():
            raise UserError("nothing was restored, as nobody is there to be asked: give --yes.")
        if input("Restore? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was restored.")
            return
    refuse_while_others_work()
    if any(" " not in states[path] and states[path] != "??" for path in affected):  # staged, and edited again since
        write(folder / "staged.patch", git("diff", "--cached", "--binary", "HEAD"))
    for path in moving:
        move(Path(path), folder)
    git("reset", "--quiet", "HEAD", paths=affected)
    if back:
        git("checkout", "--quiet", "HEAD", paths=back)
    print(f"Restored. What was here is in {folder}/")


def git(*arguments: str, paths: list[str] | None = None) -> str:
    """The output of git, which is given these paths literally. Raises UserError if it fails."""
    from_input = ["--pathspec-from-file=-", "--pathspec-file-nul"] if paths else []
    command = ["git", "--literal-pathspecs", *arguments, *from_input]
    streams = dict(input="\0".join(paths or []), capture_output=True, encoding="utf-8", errors="surrogateescape")
    try:
        done = subprocess.run(command, check=True, **streams)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        raise UserError(f"git does not say or restore what was committed ({why}): run in a clone.") from None
    return done.stdout


def refuse_while_others_work() -> None:
    """Raises UserError while a stage, a training or DVC works here, which would write into what is restored."""
    if others := [*locks.held(), *locks.stages()]:
        raise UserError(f"at work here: {' and '.join(others)}. Wait until that has ended, or end it.")
    if locks.claims() is None:
        raise UserError(f"{locks.RWLOCK} is empty or torn, as a killed process leaves it: `rm {locks.RWLOCK}`.")


def changes() -> dict[str, str]:
    """The paths that differ from the last commit, and how: the two letters of git's short status, for index and disk."""
    lines = git("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").split("\0")
    return {line[3:]: line[:2] for line in lines if line}


def outputs_of(committed: list[str]) -> list[str]:
    """The files and folders that stages write, by the committed locks."""
    found = []
    for path in committed:
        if Path(path).name == "dvc.lock":
            lock = YAML(typ="safe").load(git("show", f"HEAD:{path}"))
            for stage in lock["stages"].values():
                found += [out["path"] for out in stage.get("outs", [])]
    return found


def is_output(path: str, outputs: list[str]) -> bool:
    """Tells whether a path is params.yaml, a lock, or an output of a stage or a training."""
    if path == "params.yaml" or Path(path).name == "dvc.lock" or OF_A_RUN.fullmatch(path):
        return True
    return any(path == output or path.startswith(f"{output}/") for output in outputs)


def untracked_weights(affected: list[str], states: dict[str, str]) -> list[str]:
    """The weights of these runs that git ignores: those of another training than the record that comes back."""
    records = filter(None, map(RECORD.fullmatch, affected))
    weights = [f"paper_outputs/weights/{record[1]}.safetensors" for record in records]
    return [path for path in weights if path not in states and not git("ls-files", path)]


def new_folder() -> Path:
    """The folder of this restoration, named by the time of day, that is not there yet."""
    name = time.strftime("%Y-%m-%d_%H-%M-%S")
    taken = sorted(KEPT.glob(f"{name}*"))
    return KEPT / (f"{name}-{len(taken)}" if taken else name)


def show(head: str, paths: list[str]) -> None:
    """A list with a line for each file or folder of a run."""
    counts = Counter("/".join(path.split("/")[:SHOWN_PARTS]) for path in paths)
    if counts:
        print(head)
    for path, count in sorted(counts.items()):
        print(f"  {path}" + (f"  ({count} files)" if count > 1 else ""))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def move(path: Path, folder: Path) -> None:
    """Moves a file into the folder under its own path, and removes the folders that it leaves empty."""
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, target)
    for above in path.parents[:-1]:
        if any(above.iterdir()):
            return
        above.rmdir()


if __name__ == "__main__":
    main()
