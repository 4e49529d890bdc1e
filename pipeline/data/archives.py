"""The files of a folder, or of a tar or zip archive, which is read in place and never unpacked."""

import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from pipeline.core.errors import UserError

UNSEEN = {"__MACOSX", "Thumbs.db", "ehthumbs.db", "desktop.ini", "Icon\r", "@eaDir", "@Recycle", "@Recently-Snapshot"}
UNSEEN |= {"#recycle", "#snapshot", "$RECYCLE.BIN", "System Volume Information", "lost+found"}  # folders of systems and NAS
DAMAGES = (OSError, EOFError, RuntimeError, ValueError, tarfile.TarError, zipfile.BadZipFile)  # errors of reading an archive
Member = tuple[str, int, Callable[[], bytes] | None]  # name, bytes, and how to read it; None for no plain file


def members(path: Path) -> Iterator[Member]:
    """All files but those that no viewer shows: hidden ones, and what systems leave behind.

    Raises:
        UserError: a member leads out of the archive, or the archive cannot be read.
    """
    for name, length, content in in_folder(path, path) if path.is_dir() else in_archive(path):
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if ".." in parts or "/" in parts[:1]:
            raise UserError(f"{path} has the member {name}, which leads out of the archive: do not trust it.")
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
    """The members of an archive, which is never unpacked."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for entry in archive.infolist():
                    is_link = stat.S_ISLNK(entry.external_attr >> 16)  # the mode that Unix stores
                    if not entry.is_dir():
                        yield entry.filename, entry.file_size, None if is_link else partial(archive.read, entry)
            return
        with tarfile.open(path) as archive:
            for entry in archive:
                if not entry.isdir():
                    content = lambda: archive.extractfile(entry).read()  # noqa: B023, E731  called before the next entry
                    yield entry.name, entry.size, content if entry.isfile() else None
    except DAMAGES as error:
        raise UserError(f"{path} cannot be read as a tar or zip archive ({error}): data.path needs a whole one.") from None
