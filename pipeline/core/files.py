"""Files that are either whole or absent: everything is written under a temporary name and then renamed."""

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
    import pandas as pd  # slow to import, and no training needs it

ROOT = Path(__file__).resolve().parents[2]  # root of the repository whose code is running
DIGITS = 6  # significant ones in every file: beyond them shows the order of additions, which changes with the threads


def found(path: str) -> Path:
    """A path of the user's, from here or else from DVC's root: `dvc exp run --temp` runs in a copy of the repository."""
    here = Path(path).expanduser()
    return here if here.exists() else Path(os.environ.get("DVC_ROOT", ""), here)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes `data` to `path`, creating its folder. A reader sees the old bytes or the new ones, never a part.

    Files that a killed process has left next to it are removed.

    Raises:
        UserError: the disk is full, the folder read-only, or whatever else the system says.
    """
    path = Path(path)
    try:
        try:
            _write(path, data)
        except (FileNotFoundError, FileExistsError):  # another training of the same run has removed the folder meanwhile
            _write(path, data)
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written ({error.strerror or error}): make room for it, or let it be written.")


def _write(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which becomes the one at `path` when all of it is written."""
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{glob.escape(path.name)}.tmp.*"):
        if not _is_alive(left.suffix[1:]):
            left.unlink(missing_ok=True)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_text(path: str | Path, text: str) -> None:
    """`write_bytes` of UTF-8 text, newlines as they are."""
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: object) -> None:
    """Writes `as_json`."""
    write_text(path, as_json(value))


def as_json(value: object, sort_keys: bool = True) -> str:
    """JSON whose bytes depend on `value` alone: null for what is not finite, and keys sorted unless their order matters."""
    return json.dumps(_finite(value), indent=2, sort_keys=sort_keys, allow_nan=False) + "\n"


def read_json(path: str | Path) -> Any:
    """Reads JSON. Raises UserError naming the file if it is absent or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: run `dvc repro` to make it.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): delete it and run `dvc repro`.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): let it be read.") from None


def write_csv(path: str | Path, table: pd.DataFrame) -> None:
    """Writes a table with floats to `DIGITS` significant digits."""
    write_text(path, table.to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n"))


def read_csv(path: str | Path) -> pd.DataFrame:
    """Reads a table. Raises UserError naming the file if it is absent or no table."""
    import pandas as pd

    try:
        return pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): run `dvc repro` to make it.") from None


def rounded(value: float) -> float:
    """`value` to the significant digits that files hold, so that a text made from it and a file agree."""
    return float(f"{value:.{DIGITS}g}")


def rounded_table(table: pd.DataFrame) -> pd.DataFrame:
    """`rounded` of every float of a table."""
    return table.apply(lambda column: column.map(rounded) if column.dtype.kind == "f" else column)


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: object) -> str:
    """The SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
