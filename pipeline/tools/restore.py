"""Goes back to the committed results without losing anything: `make restore`, or `python -m pipeline restore`.

It restores params.yaml, every dvc.lock, and all outputs of DVC stages and training runs from the last commit. Your versions
of these files, and runs that are not committed, move to .restored/DATE/. Code, documents and other files stay unchanged.

First, git resets its index and writes the committed files to .restored/DATE.incoming/. Then restore only moves files. If a
step fails, all steps are undone. If restore is killed, rerun it: your files are at their usual paths or in .restored/DATE/.
"""

import errno
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from ruamel.yaml import YAML

from pipeline.core import files, git
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.tools import locks

MOVED_ASIDE, INCOMING = Path(".restored"), ".incoming"
SHOWN_PARTS = 5  # maximum number of parts in a printed folder path, as in paper_outputs/runs/table_2/vit/0
RECORD_PATH = re.compile(r"paper_outputs/runs/(.*)/record\.json")
OF_A_RUN = re.compile(  # files of runs, but not of trial runs, which git and DVC ignore
    r"paper_outputs/(runs/(?!tries/)[^/]+/[^/]+/\d+/(history\.csv|watched\.csv|metrics\.json|record\.json)"
    r"|weights/(?!tries/)[^/]+/[^/]+/\d+\.safetensors|evaluations/[^/]+/\d+/evaluation\.json|data/\w+\.txt)"
)
UNFINISHED = {  # files in .git that mark an unfinished operation
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase",
    "BISECT_LOG": "a bisection",
}


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("restore", __doc__)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    chosen = parser.parse_args(arguments)
    if not Path(".git").exists() or git.run("rev-parse", "--show-prefix").strip():
        raise UserError("this folder is not the root of a git repository: run from the root of a clone.")
    refuse_while_others_work()
    tell_of_interrupted()
    committed = git.run("ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0")
    states, outputs = changed_paths(), outputs_of(committed)
    refuse_hidden(outputs)
    affected = [path for path in states if is_output(path, outputs)]
    if not affected:
        print("Nothing to restore: parameters and results are as the last commit has them.")
        return
    refuse_unfinished(affected, states)
    refuse_links_and_folders(affected)
    back = sorted({*affected} & {*committed})
    # Weights move before records. If a restore is killed in between, the next call still finds the weights via the records.
    moving = [path for path in untracked_weights(affected, states) + affected if os.path.lexists(path)]
    folder = new_folder()
    print_paths(f"To be put back as in {git.run('log', '-1', '--format=%h (%s)').strip()}:", back, committed)
    print_paths(f"To be moved to {folder}/, as they are now:", moving, committed)
    print_paths("Changed too, and to be left alone:", [path for path in states if path not in affected], committed)
    if not chosen.yes:
        if not sys.stdin.isatty():
            raise UserError(
                "nothing was restored, because there is no terminal on which to ask for confirmation: run "
                "`python -m pipeline restore --yes`."
            )
        if input("Restore? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was restored.")
            return
    refuse_while_others_work()
    if changed_paths() != states:
        raise UserError("nothing was restored, because files have changed since they were listed: run the command again.")
    # A file that was edited after staging has two versions to keep.
    staged = [path for path in affected if states[path][0] in "MAT" and states[path][1] != " "]
    restore(folder, affected, staged, moving, back)
    print(f"Restored. What was here is in {folder}/")


def restore(folder: Path, affected: list[str], staged: list[str], moving: list[str], back: list[str]) -> None:
    """Resets git's index, moves files aside, and restores committed files. If a step fails, undoes everything.

    Args:
        folder: new folder for the present versions of files.
        affected: paths to reset in git's index.
        staged: paths whose versions in the index are copied to folder/staged.
        moving: paths to move to `folder`.
        back: paths to restore from the last commit.
    """
    incoming = folder.with_name(folder.name + INCOMING)
    index, index_before = Path(git.run("rev-parse", "--git-path", "index").rstrip("\n")), incoming / ".index"
    is_reset = has_begun = False
    incoming.mkdir(parents=True)
    try:
        files.write_bytes(index_before, index.read_bytes())
        write_from_index(staged, folder / "staged")
        literal = [f":(literal){path}" for path in affected]
        git.run("reset", "--quiet", "--pathspec-from-file=-", "--pathspec-file-nul", "HEAD", given=literal)
        is_reset = True
        write_from_index(back, incoming)
        has_begun = True
        for path in moving:
            move(Path(path), folder / path)
        for path in back:
            move(incoming / path, Path(path))
    except BaseException:
        if has_begun:
            put_back(folder, moving, back)
        if is_reset:
            move(index_before, index)
        for copies in (incoming, folder / "staged"):
            shutil.rmtree(copies, ignore_errors=True)
        for path in ("staged", *moving):
            remove_empty_folders(folder / path)
        print("Nothing was restored: all is as it was.")
        raise
    shutil.rmtree(incoming)
    for path in moving:
        remove_empty_folders(Path(path))


def put_back(folder: Path, moving: list[str], back: list[str]) -> None:
    """Undoes `restore`: deletes the restored files (`back`), and moves the displaced files (`moving`) back from `folder`."""
    has_moved = {path: os.path.lexists(folder / path) for path in moving}
    for path in back:
        if has_moved.get(path, True) and os.path.lexists(path):
            Path(path).unlink()
            remove_empty_folders(Path(path))
    for path in moving:
        if has_moved[path]:
            move(folder / path, Path(path))


def refuse_while_others_work() -> None:
    """Raises UserError if a pipeline command or DVC is running in this folder, or if `locks.RWLOCK` is damaged."""
    if others := [*locks.held(), *locks.stages()]:
        problem = f"other processes are using this folder ({' and '.join(others)})"
        raise UserError(f"{problem}: wait for them to finish, or stop them.")
    if locks.claims() is None:
        raise UserError(f"{locks.DAMAGED}: {locks.REMEDY}.")


def tell_of_interrupted() -> None:
    """Prints where a killed restore has moved files, and deletes its copies of committed files from .restored/."""
    for incoming in sorted(MOVED_ASIDE.glob(f"*{INCOMING}")):
        folder = incoming.with_suffix("")
        print(f"A restore was interrupted. It had moved {f'files to {folder}/' if folder.exists() else 'no file'}.")
        shutil.rmtree(incoming)


def refuse_hidden(outputs: list[str]) -> None:
    """Raises UserError if flags in git's index keep `changed_paths` from seeing changed outputs.

    The flag skip-worktree is allowed on absent files, because a sparse checkout sets it on them.
    """
    hidden: dict[str, list[str]] = {"skip-worktree": [], "assume-unchanged": []}
    for entry in filter(None, git.run("ls-files", "-v", "-z").split("\0")):
        tag, path = entry[0], entry[2:]
        if tag.islower() and is_output(path, outputs):
            hidden["assume-unchanged"].append(path)
        elif tag == "S" and is_output(path, outputs) and os.path.lexists(path):
            hidden["skip-worktree"].append(path)
    for flag, paths in hidden.items():
        if paths:
            remedy = f"git update-index --no-{flag} {shlex.join(paths)}"
            raise UserError(f"git has been told to ignore changes to {paths[0]} ({flag}): undo that with `{remedy}`.")


def refuse_unfinished(affected: list[str], states: dict[str, str]) -> None:
    """Raises UserError if a merge or a similar operation is unfinished, or if a path is in conflict."""
    options = []
    for name in UNFINISHED:
        options += ["--git-path", name]
    places = git.run("rev-parse", *options).splitlines()
    for place, what in zip(places, UNFINISHED.values(), strict=True):
        if Path(place).exists():
            raise UserError(f"{what} is under way: end it first, as `git status` says.")
    for path in affected:
        if "U" in states[path] or states[path] in ("AA", "DD"):
            raise UserError(f"{path} is in conflict: resolve that first, as `git status` says.")


def refuse_links_and_folders(affected: list[str]) -> None:
    """Raises UserError if a path is a link or a folder, or lies in a linked folder."""
    for path in affected:
        for each in (Path(path), *Path(path).parents):
            is_folder = str(each) == path and each.is_dir()
            if each.is_symlink() or is_folder:
                remedy = shlex.join(["mv", "-n", str(each), f"{each.name}.mine"])
                kind = "a link" if each.is_symlink() else "a folder"
                problem = f"{each} is {kind}, which cannot be restored in place"
                raise UserError(f"{problem}: move it away, for example with `{remedy}`.")


def changed_paths() -> dict[str, str]:
    """Returns, for each path that differs from the last commit, git's two status letters: for the index and for the file."""
    # The user's global gitignore may list *.csv, which would hide files of runs.
    ignored_nowhere = ["-c", f"core.excludesFile={os.devnull}"]
    lines = git.run(*ignored_nowhere, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").split("\0")
    return {line[3:]: line[:2] for line in lines if line}


def outputs_of(committed: list[str]) -> list[str]:
    """Returns the files and folders that stages write, according to the committed dvc.lock files."""
    found = []
    for path in committed:
        if Path(path).name == "dvc.lock":
            lock = YAML(typ="safe").load(git.run("cat-file", "blob", f"HEAD:{path}"))
            for stage in lock["stages"].values():
                found += [out["path"] for out in stage.get("outs", [])]
    return found


def is_output(path: str, outputs: list[str]) -> bool:
    """True if a path is params.yaml, a dvc.lock, or a file that a stage or a training run writes."""
    if path == "params.yaml" or Path(path).name == "dvc.lock" or OF_A_RUN.fullmatch(path):
        return True
    return any(path == output or path.startswith(f"{output}/") for output in outputs)


def untracked_weights(affected: list[str], states: dict[str, str]) -> list[str]:
    """Returns the paths of weights that git ignores, and that may no longer match their records after a restore."""
    records = filter(None, map(RECORD_PATH.fullmatch, affected))
    weights = [f"paper_outputs/weights/{record[1]}.safetensors" for record in records]
    tracked = git.run("ls-files", "-z").split("\0") if weights else []
    return sorted({*weights} - {*states} - {*tracked})


def new_folder() -> Path:
    """Returns the path of a new folder, named after the date and time."""
    name = time.strftime("%Y-%m-%d_%H-%M-%S")
    taken = sorted(MOVED_ASIDE.glob(f"{name}*"))
    return MOVED_ASIDE / (f"{name}-{len(taken)}" if taken else name)


def print_paths(head: str, paths: list[str], committed: list[str]) -> None:
    """Prints a heading and paths. The files of a run, or of a folder that is absent from the commit, share one line."""
    known = {str(folder) for path in committed for folder in Path(path).parents}
    counts = Counter(line_of(path, known) for path in paths)
    if counts:
        print(head)
    for line, count in sorted(counts.items()):
        print(f"  {line}" + (f", {count} files" if count > 1 else ""))


def line_of(path: str, known: set[str]) -> str:
    """Returns the topmost folder above `path` that is a run's folder or not in `known`. If there is none, returns `path`."""
    parts = path.split("/")
    for count in range(1, len(parts)):
        folder = "/".join(parts[:count])
        if count == SHOWN_PARTS or folder not in known:
            return f"{folder}/"
    return path


def write_from_index(paths: list[str], folder: Path) -> None:
    """Copies the files at `paths` from git's index to `folder`. Raises UserError if git fails to write any of them."""
    git.run("checkout-index", "-z", "--stdin", f"--prefix={folder}/", given=paths)
    if missing := [path for path in paths if not os.path.lexists(folder / path)]:
        raise UserError(f"git could not write {missing[0]}: run `git fsck` to check whether the repository is intact.")


def move(source: Path, target: Path) -> None:
    """Moves a file, even to another disk. The target is never incomplete, and the source survives a failure."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy_path(source, target)
        try:
            source.unlink()
        except OSError:
            target.unlink()
            raise


def copy_path(source: Path, target: Path) -> None:
    try:
        with open(source, "rb") as old, files.replacing(target) as new:
            shutil.copyfileobj(old, new)
        shutil.copystat(source, target)
    except OSError as error:
        raise files.unwritable(target, error) from None


def remove_empty_folders(path: Path) -> None:
    """Removes the empty folders above a path."""
    for folder in path.parents[:-1]:
        with suppress(OSError):
            folder.rmdir()


if __name__ == "__main__":
    main()
