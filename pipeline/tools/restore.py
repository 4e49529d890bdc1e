"""Goes back to the committed results, and loses nothing: `make restore`, or `python -m pipeline restore`.

It puts params.yaml, every dvc.lock and what stages or fan_out made back as the last commit has them. Their present versions,
and the runs that the commit does not have, move to .restored/DATE/. Code, documents and your own files stay as they are.

What can fail comes first: git puts its index back, and writes the committed files to .restored/DATE.incoming/. After that,
files only change their folders. A failure undoes all of it. A kill leaves every file in its place or in .restored/DATE/, and
the next call does what is left to do.
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

KEPT, INCOMING = Path(".restored"), ".incoming"
SHOWN_PARTS = 5  # parts of a path in a list: paper_outputs/runs/table_2/vit/0
RECORD = re.compile(r"paper_outputs/runs/(.*)/record\.json")
OF_A_RUN = re.compile(  # paths of any study but the tries, which git and DVC leave alone
    r"paper_outputs/(runs/(?!tries/)[^/]+/[^/]+/\d+/(history\.csv|watched\.csv|metrics\.json|record\.json)"
    r"|weights/(?!tries/)[^/]+/[^/]+/\d+\.safetensors|evaluations/[^/]+/\d+/evaluation\.json|data/\w+\.txt)"
)
UNFINISHED = {  # files that git keeps of what it has begun
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
        raise UserError("no git repository has its root here: run from the root of a clone.")
    refuse_while_others_work()
    tell_of_interrupted()
    committed = git.run("ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0")
    states, outputs = changes(), outputs_of(committed)
    refuse_hidden(outputs)
    affected = [path for path in states if is_output(path, outputs)]
    if not affected:
        print("Nothing to restore: parameters and results are as the last commit has them.")
        return
    refuse_unfinished(affected, states)
    refuse_links_and_folders(affected)
    back = sorted({*affected} & {*committed})
    # Weights move first: if a kill comes between, their record still differs, and tells the next call of them.
    moving = [path for path in untracked_weights(affected, states) + affected if os.path.lexists(path)]
    folder = new_folder()
    show(f"To be put back as in {git.run('log', '-1', '--format=%h (%s)').strip()}:", back, committed)
    show(f"To be moved to {folder}/, as they are now:", moving, committed)
    show("Changed too, and to be left alone:", [path for path in states if path not in affected], committed)
    if not chosen.yes:
        if not sys.stdin.isatty():
            raise UserError("nothing was restored, as nobody is there to be asked: `python -m pipeline restore --yes`.")
        if input("Restore? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was restored.")
            return
    refuse_while_others_work()
    if changes() != states:
        raise UserError("nothing was restored, as files have changed since the list: give the command again.")
    staged = [path for path in affected if states[path][0] in "MAT" and states[path][1] != " "]  # and edited again since
    restore(folder, affected, staged, moving, back)
    print(f"Restored. What was here is in {folder}/")


def restore(folder: Path, affected: list[str], staged: list[str], moving: list[str], back: list[str]) -> None:
    """Makes the index of the `affected` paths as committed, moves files to the folder and puts the committed ones back.

    The folder keeps the `staged` versions of files too. If anything fails, all of it is undone.
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
    """Moves the files in the folder to their place again, instead of the committed ones."""
    has_moved = {path: os.path.lexists(folder / path) for path in moving}
    for path in back:
        if has_moved.get(path, True) and os.path.lexists(path):
            Path(path).unlink()
            remove_empty_folders(Path(path))
    for path in moving:
        if has_moved[path]:
            move(folder / path, Path(path))


def refuse_while_others_work() -> None:
    """Raises UserError while a stage, a training or DVC works here, which would write into what is restored."""
    if others := [*locks.held(), *locks.stages()]:
        raise UserError(f"at work here: {' and '.join(others)}. Wait until that has ended, or end it.")
    if locks.claims() is None:
        raise UserError(f"{locks.RWLOCK} is empty or torn, as a killed process leaves it: `rm {locks.RWLOCK}`.")


def tell_of_interrupted() -> None:
    """Says where an earlier call that was killed left its files, and removes its copies of committed ones."""
    for incoming in sorted(KEPT.glob(f"*{INCOMING}")):
        folder = incoming.with_suffix("")
        print(f"A restore was interrupted. It had moved {f'files to {folder}/' if folder.exists() else 'no file'}.")
        shutil.rmtree(incoming)


def refuse_hidden(outputs: list[str]) -> None:
    """Raises UserError where git is told to overlook changes of outputs, as no plan would have them.

    Files that a sparse checkout leaves out are skipped too, but are not there.
    """
    hidden = {"skip-worktree": [], "assume-unchanged": []}
    for entry in filter(None, git.run("ls-files", "-v", "-z").split("\0")):
        tag, path = entry[0], entry[2:]
        if tag.islower() and is_output(path, outputs):
            hidden["assume-unchanged"].append(path)
        elif tag == "S" and is_output(path, outputs) and os.path.lexists(path):
            hidden["skip-worktree"].append(path)
    for flag, paths in hidden.items():
        if paths:
            remedy = f"git update-index --no-{flag} {shlex.join(paths)}"
            raise UserError(f"git is told to overlook changes of {paths[0]} ({flag}): end that by `{remedy}`.")


def refuse_unfinished(affected: list[str], states: dict[str, str]) -> None:
    """Raises UserError in the middle of a merge or the like, and where a path is in conflict."""
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
    """Raises UserError where a link stands for a file or a folder above it, or a folder stands for a file."""
    for path in affected:
        for each in (Path(path), *Path(path).parents):
            is_folder = str(each) == path and each.is_dir()
            if each.is_symlink() or is_folder:
                remedy = shlex.join(["mv", "-n", str(each), f"{each.name}.mine"])
                kind = "a link" if each.is_symlink() else "a folder"
                raise UserError(f"{each} is {kind}, which cannot be restored in place: move it away, as by `{remedy}`.")


def changes() -> dict[str, str]:
    """The paths that differ from the last commit, and how: the two letters of git's short status, for index and disk.

    Files that the user's git ignores everywhere, as *.csv, are among them: a run has such files.
    """
    ignored_nowhere = ["-c", f"core.excludesFile={os.devnull}"]
    lines = git.run(*ignored_nowhere, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").split("\0")
    return {line[3:]: line[:2] for line in lines if line}


def outputs_of(committed: list[str]) -> list[str]:
    """The files and folders that stages write, by the committed locks."""
    found = []
    for path in committed:
        if Path(path).name == "dvc.lock":
            lock = YAML(typ="safe").load(git.run("cat-file", "blob", f"HEAD:{path}"))
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
    tracked = git.run("ls-files", "-z").split("\0") if weights else []
    return sorted({*weights} - {*states} - {*tracked})


def new_folder() -> Path:
    """The folder of this restoration, named by the time of day, that is not there yet."""
    name = time.strftime("%Y-%m-%d_%H-%M-%S")
    taken = sorted(KEPT.glob(f"{name}*"))
    return KEPT / (f"{name}-{len(taken)}" if taken else name)


def show(head: str, paths: list[str], committed: list[str]) -> None:
    """A list with a line for each file, folder of a run, and folder of which the commit has nothing."""
    known = {str(folder) for path in committed for folder in Path(path).parents}
    counts = Counter(line_of(path, known) for path in paths)
    if counts:
        print(head)
    for line, count in sorted(counts.items()):
        print(f"  {line}" + (f", {count} files" if count > 1 else ""))


def line_of(path: str, known: set[str]) -> str:
    """The path itself, or the uppermost folder above it that is not `known`, or that of its run."""
    parts = path.split("/")
    for count in range(1, len(parts)):
        folder = "/".join(parts[:count])
        if count == SHOWN_PARTS or folder not in known:
            return f"{folder}/"
    return path


def write_from_index(paths: list[str], folder: Path) -> None:
    """Writes files below a folder as the index has them, all of them."""
    git.run("checkout-index", "-z", "--stdin", f"--prefix={folder}/", given=paths)
    if missing := [path for path in paths if not os.path.lexists(folder / path)]:
        raise UserError(f"git does not write {missing[0]}: `git fsck` says whether the repository is whole.")


def move(source: Path, target: Path) -> None:
    """Moves a file, to another disk too. The target is whole as soon as it is there, and if this fails the source stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy(source, target)
        try:
            source.unlink()
        except OSError:
            target.unlink()
            raise


def copy(source: Path, target: Path) -> None:
    try:
        with open(source, "rb") as old, files.replacing(target) as new:
            shutil.copyfileobj(old, new)
        shutil.copystat(source, target)
    except OSError as error:
        raise files.unwritable(target, error) from None


def remove_empty_folders(path: Path) -> None:
    """Removes the folders above a path that are empty."""
    for folder in path.parents[:-1]:
        with suppress(OSError):
            folder.rmdir()


if __name__ == "__main__":
    main()
