"""Whether the files behind a page are those that DVC's locks know, so that no other number reaches a reader unsaid.

A lock is written by `dvc repro` when a stage has run: for each stage the MD5 of every file or folder that it read and wrote.
A folder's digest is that of the JSON of its files' digests in alphabetical order, as DVC makes it.
"""

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from pipeline import studies
from pipeline.benchmarks.results import FOLDER as BENCHMARKS
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.core.schemas import Content
from pipeline.lab import TABLES
from pipeline.runs import EVALUATIONS
from pipeline.runs import FOLDER as RUNS
from pipeline.study import FOLDER as STUDIES

FOLDERS = ("", "pipeline/report", *(f"pipeline/studies/{wing}" for wing in studies.WINGS if wing != "paper"))  # of dvc.yaml
PAGES = ("report", "research")  # stages: what they read is compared as what the others wrote


class Item(Content):
    path: Path = Field(strict=False)
    md5: str | None = None


class Entry(Content):
    deps: list[Item] = Field([])
    outs: list[Item] = Field([])


class Lock(Content):
    stages: dict[str, Entry] = Field({})


@dataclass(frozen=True)
class Chain:
    """What became of a comparison. `different` has a remedy for each path; `unknown` are paths that no stage writes."""

    is_compared: bool
    different: dict[str, str]
    unknown: list[str]


def compare(names: list[str], *more: Path) -> Chain:
    """Compares runs, tables, benchmarks, these studies, and whatever else is given. There is nothing to compare with where
    this folder has no dvc.lock.

    Raises:
        UserError: a lock or its dvc.yaml is malformed.
    """
    if not Path("dvc.lock").exists():
        return Chain(False, {}, [])
    roots = [TABLES, RUNS, EVALUATIONS, BENCHMARKS, *more, *(STUDIES / name for name in names)]
    digests, different, known = {}, {}, set()
    for folder in FOLDERS:
        for path, expected, remedy in entries(Path(folder)):
            if any(path.is_relative_to(root) for root in roots):
                known.add(path)
                if path not in digests:
                    digests[path] = digest(path)
                if digests[path] != expected:
                    different.setdefault(str(path), remedy)
    read = [TABLES, *more, *(STUDIES / name for name in names), *sorted(BENCHMARKS.glob("*"))]
    return Chain(True, different, [str(path) for path in read if path.exists() and path not in known])


def entries(folder: Path) -> list[tuple[Path, str, str]]:
    """Path, digest and remedy of all that the stages of one dvc.yaml have read and written, by the lock beside it."""
    lock = folder / "dvc.lock"
    if not lock.exists() or not folder.resolve().is_relative_to(Path.cwd()):  # the quickstart links to the root's code
        return []
    stages, found = params.read(folder / "dvc.yaml")["stages"], []
    for name, entry in params.validate(Lock, params.read(lock), str(lock)).stages.items():
        stage = stages.get(name.partition("@")[0])
        if stage is None:  # of former days: DVC leaves it in the lock
            continue
        address = name if folder == Path() else f"{folder}/dvc.yaml:{name}"
        again = f"`dvc repro {address}`"
        for output in entry.outs:
            if output.path.exists() or not output.path.is_relative_to(RUNS):  # a run that is no longer listed may have gone
                found.append((output.path, output.md5, f"`git checkout {shlex.quote(str(output.path))}`, or {again}"))
        if name not in PAGES:
            found += [(read.path, read.md5, again) for read in entry.deps]
    return found


def digest(path: Path) -> str | None:
    """DVC's digest of a file or folder; None where there is none."""
    if not path.is_dir():
        return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() if path.exists() else None
    paths = [each for each in path.rglob("*") if each.is_file() and ".tmp." not in each.name]  # as .dvcignore has it
    listing = [{"md5": digest(each), "relpath": each.relative_to(path).as_posix()} for each in paths]
    content = json.dumps(sorted(listing, key=lambda each: each["relpath"]), sort_keys=True)
    return hashlib.md5(content.encode(), usedforsecurity=False).hexdigest() + ".dir"


def check(chain: Chain) -> None:
    """Raises UserError if a file is not the one that a lock knows, naming the first."""
    for path, remedy in chain.different.items():
        others = len(chain.different) - 1
        more = f" ({others} more differ)" if others else ""
        raise UserError(f"{path} is not what dvc.lock knows{more}: {remedy}, or name it on the page with --anyway.")
