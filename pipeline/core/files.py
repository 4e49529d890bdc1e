"""Reads and writes files. A file is first written under a temporary name and then renamed, so it is never half written."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline.core.errors import UserError

if TYPE_CHECKING:
    import pandas as pd  # slow to import, and not needed to train

ROOT = Path(__file__).resolve().parents[2]  # root folder of the repository
DIGITS = 6  # significant digits of numbers in files; further digits depend on the number of threads


def resolve_user_path(path: str) -> Path:
    """Returns a user's path if it exists, else the same path below DVC_ROOT.

    DVC_ROOT is the original repository while `dvc exp run --temp` runs in a copy.
    """
    here = Path(path).expanduser()
    return here if here.exists() else Path(os.environ.get("DVC_ROOT", ""), here)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes a file and creates its folder. Raises UserError if the file cannot be written, for example on a full disk."""
    path = Path(path)
    try:
        try:
            _write(path, data)
        except (FileNotFoundError, FileExistsError):  # another process removed the folder during `_write`
            _write(path, data)
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> UserError:
    remedy = "check its permissions and the free disk space"
    return UserError(f"{path} cannot be written ({error.strerror or error}): {remedy}.")


def _write(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file, and renames it to `path` when complete. Removes temporary files left by killed processes."""
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{glob.escape(path.name)}.tmp.*"):
        if not is_alive(left.suffix[1:]):
            left.unlink(missing_ok=True)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_alive(pid: int | str) -> bool:
    """True if a process with this id is running. False if the id is not a number."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: object) -> None:
    write_text(path, as_json(value))


def as_json(value: object, sort_keys: bool = True) -> str:
    """Formats `value` as JSON. NaN and infinities become null. With `sort_keys`, the order of dict keys has no effect."""
    return json.dumps(_finite(value), indent=2, sort_keys=sort_keys, allow_nan=False) + "\n"


def read_json(path: str | Path) -> Any:
    """Reads a JSON file. Raises UserError if the file is absent, unreadable or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: run `dvc repro` to create it.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): delete it and run `dvc repro`.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check its permissions.") from None


def write_csv(path: str | Path, table: pd.DataFrame) -> None:
    """Writes a table as CSV, with floats rounded to DIGITS significant digits."""
    write_text(path, table.to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n"))


def read_csv(path: str | Path) -> pd.DataFrame:
    """Reads a table from a CSV file. Raises UserError if the file is absent or not a table."""
    import pandas as pd

    try:
        return pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): run `dvc repro` to create it.") from None


def rounded(value: float) -> float:
    """Rounds `value` to DIGITS significant digits, so that printed text and files show the same number."""
    return float(f"{value:.{DIGITS}g}")


def rounded_table(table: pd.DataFrame) -> pd.DataFrame:
    return table.apply(lambda column: column.map(rounded) if column.dtype.kind == "f" else column)


def sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
