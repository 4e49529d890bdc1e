"""Lists and reads the files in a folder, or in a tar or zip archive without unpacking it to disk."""

import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pipeline.core.errors import UserError

# Names of files that operating systems and network storage create
UNSEEN = {"__MACOSX", "Thumbs.db", "ehthumbs.db", "desktop.ini", "Icon\r", "@eaDir", "@Recycle", "@Recently-Snapshot"}
UNSEEN |= {"#recycle", "#snapshot", "$RECYCLE.BIN", "System Volume Information", "lost+found"}
# Errors that reading a damaged archive can raise
DAMAGES = (OSError, EOFError, RuntimeError, ValueError, tarfile.TarError, zipfile.BadZipFile)
UNIX = (3, 19)  # `create_system` of zip files made on Unix or macOS, where file names may contain backslashes
Entry = TypeVar("Entry", zipfile.ZipInfo, tarfile.TarInfo)
# The name of a file, its size in bytes, and a function that reads the file. The function is None for links and devices.
Member = tuple[str, int, Callable[[], bytes] | None]


def members(path: Path) -> Iterator[Member]:
    """Yields all files of a folder or archive, except hidden files and the files in UNSEEN.

    Raises:
        UserError: a member's path leads out of the archive, or the archive cannot be read.
    """
    for name, length, content in in_folder(path, path) if path.is_dir() else in_archive(path):
        parts = PurePosixPath(name).parts
        if ".." in parts or "/" in parts[:1]:
            raise UserError(f"{path} has the member {name}, whose path leads out of the archive: do not use this archive.")
        if not any(part.startswith(".") or part in UNSEEN for part in parts):
            yield "/".join(parts), length, content


def in_folder(folder: Path, base: Path) -> Iterator[Member]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from in_folder(path, base)
        elif path.is_file():
            yield path.relative_to(base).as_posix(), path.stat().st_size, path.read_bytes
        else:
            yield path.relative_to(base).as_posix(), 0, None


def in_archive(path: Path) -> Iterator[Member]:
    """Yields the members of an archive. If members share a name, yields only the last, which unpacking would keep."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name, entry in last_of_each((name_in_zip(entry), entry) for entry in archive.infolist()):
                    is_link = stat.S_ISLNK(entry.external_attr >> 16)  # the Unix file mode
                    if not entry.is_dir():
                        yield name, entry.file_size, None if is_link else partial(archive.read, entry)
            return
        with tarfile.open(path) as tar:
            for name, member in last_of_each((member.name, member) for member in tar):
                if not member.isdir():
                    yield name, member.size, partial(read_member, tar, member) if member.isfile() else None
    except DAMAGES as error:
        why = str(error).partition("\n")[0].rstrip(":")
        raise UserError(
            f"{path} cannot be read as a tar or zip archive ({why}): set data.path to an intact archive, or to the unpacked "
            "folder."
        ) from None


def name_in_zip(entry: zipfile.ZipInfo) -> str:
    """Returns the name of a member, with slashes where an old Windows program wrote backslashes."""
    return entry.filename if entry.create_system in UNIX else entry.filename.replace("\\", "/")


def read_member(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    if (file := archive.extractfile(entry)) is None:
        raise tarfile.TarError(f"{entry.name} is not a regular file")
    return file.read()


def last_of_each(entries: Iterable[tuple[str, Entry]]) -> list[tuple[str, Entry]]:
    """Drops entries that a later entry of the same name replaces. Keeps the archive's order, in which reading is fastest."""
    found: dict[str, Entry] = {}
    for name, entry in entries:
        path = PurePosixPath(name).as_posix()  # ./a and a are the same file
        found.pop(path, None)
        found[path] = entry
    return list(found.items())
