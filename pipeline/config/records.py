"""Reads and writes record.json, which holds the provenance of a folder of results and the SHA-256 of the folder's files.

All code that reads results first calls `read_record`, which detects any changed byte in the folder.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from pipeline.config import params
from pipeline.config.params import Name, Overrides, RunConfig, Section, Seed
from pipeline.config.reading import validate
from pipeline.core import files
from pipeline.core.errors import UserError

RECORD = "record.json"
SHA256 = "sha256"  # key in a record; its value is a digest of all other keys and values

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Status = Literal["running", "finished", "diverged"]
Seconds = Annotated[float, Field(ge=0)]


class Environment(Section):
    """The machine that wrote the results, and the versions of Python and torch."""

    python: str
    torch: str
    device: Literal["cpu", "cuda"]
    device_name: str
    num_threads: int
    platform: str


class Record(Section):
    """The provenance of a folder of results."""

    folder: str  # path relative to paper_outputs
    files: dict[str, Digest] = Field(default_factory=dict)
    environment: Environment | None = None
    commits: list[str | None] = Field(default_factory=list)  # commit of the code that each process ran; None if unknown
    dirty: bool | None = None  # True if any process ran with uncommitted code or parameters
    settings: dict[str, Any] | None = None  # the study's section of params.yaml

    @property
    def commit(self) -> str | None:
        """The commit of the code that last wrote these results, or None if it is unknown."""
        return self.commits[-1] if self.commits else None


class RunRecord(Record):
    """The provenance of a run, in its folder. The run's weights lie elsewhere."""

    run_key: str
    study: str
    variant: Name
    overrides: Overrides
    seed: Seed
    status: Status
    environment: Environment
    config: RunConfig
    data_sha256: Digest
    numerics: int
    weights: Digest | None = None
    started_at: str
    finished_at: str | None = None
    seconds: Seconds
    phases: dict[str, Seconds] = Field(default_factory=dict)  # empty if not measured
    images_per_second: Seconds | None = None
    timestamps: list[int]  # Unix time of each row of history.csv, in milliseconds

    @property
    def name(self) -> str:
        return params.run_name(self.variant, self.overrides)

    @property
    def resumptions(self) -> int:
        return len(self.commits) - 1


Kind = TypeVar("Kind", bound=Record)


def write_record(folder: Path, record: Record) -> None:
    """Writes a record into a folder. Omits default values, so that a new option does not change old records."""
    content = json.loads(files.as_json(record.model_dump(mode="json", exclude_defaults=True)))
    files.write_json(folder / RECORD, content | {SHA256: files.json_digest(content)})


def seal(folder: Path, **made_by: Any) -> None:
    """Writes the record of a folder of measurements. `made_by` holds the record's keys other than `folder` and `files`."""
    write_record(folder, Record(folder=place(folder), files=digests(folder), **made_by))


def read_record(folder: Path, schema: type[Kind], command: str) -> Kind:
    """Reads the record of a folder and verifies the folder's files. Errors suggest `command`, which recreates the files.

    Raises:
        UserError: the record is missing or damaged, or belongs to another folder, or a file does not match its digest.
    """
    path = folder / RECORD
    remedy = f"run `git checkout {shlex.quote(str(folder))}`, or recreate it with `{command}`"
    record = parse(path, schema, remedy)
    if record.folder != place(folder):
        raise UserError(f"{path} is the record of another folder, {record.folder}: {remedy}.")
    unknown = {each.name: None for each in _others(folder)}
    verify({folder / name: digest for name, digest in (unknown | record.files).items()}, path, command)
    return record


def parse(path: Path, schema: type[Kind], remedy: str, text: str | None = None) -> Kind:
    """Parses a record from `text` if given, else from the file `path`. Does not verify the folder's other files.

    Raises:
        UserError: the record is missing, does not fit the schema, or does not match its own digest.
    """
    if text is None and not path.exists():
        raise UserError(f"{path} is missing: {remedy}.")
    raw = files.read_json(path) if text is None else json.loads(text)
    own = raw.pop(SHA256, None) if isinstance(raw, dict) else None
    try:
        record = validate(schema, raw, str(path))
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('.')}: {remedy}.") from None
    if own != files.json_digest(raw):
        raise UserError(f"{path} has been changed since it was written (its {SHA256} does not match): {remedy}.")
    return record


def verify(known: dict[Path, str | None], record: Path, command: str) -> None:
    """Compares files with their recorded SHA-256. A digest of None means that the file must not exist.

    Raises:
        UserError: a file differs, is missing, or exists although its digest is None.
    """
    for path, expected in known.items():
        found = files.sha256(path) if path.is_file() else None
        if found != expected or (expected is None and path.exists()):
            problem = "does not match" if expected else "is not listed in"
            remedy = f"run `git checkout {shlex.quote(str(path))}`" if expected else "remove it"
            raise UserError(f"{path} {problem} {record}: {remedy}, or recreate all files listed there with `{command}`.")


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder, except the record."""
    return {path.name: files.sha256(path) for path in _others(folder)}


def _others(folder: Path) -> list[Path]:
    """The entries of a folder, except the record, hidden files and temporary files."""
    others = [path for path in sorted(folder.iterdir()) if path.name != RECORD]
    return [path for path in others if not path.name.startswith(".") and ".tmp." not in path.name]


def place(folder: Path) -> str:
    """The path of a folder relative to paper_outputs, such as runs/table_2/osa_qr/10."""
    return str(folder).rpartition("paper_outputs/")[2]
