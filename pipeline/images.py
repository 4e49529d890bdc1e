"""One's own images: a folder, or a tar or zip archive, of class folders as the four IDX files that training reads.

The layout is that of torchvision's ImageFolder, train/CLASS/IMAGE and test/CLASS/IMAGE, in any format that Pillow reads.
"""

import hashlib
import io
import os
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image
from tqdm import tqdm

from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.training import data

SPLITS = {"train": "train", "test": "t10k"}  # and what the IDX files call them
MAX_CLASSES = 256  # labels are bytes
GREY = ("1", "L", "LA", "La")
DEEP = ("I", "F")  # modes of more than 8 bits begin so
DAMAGES = (OSError, EOFError, RuntimeError, ValueError, tarfile.TarError, zipfile.BadZipFile)  # of reading an archive


@dataclass(frozen=True, order=True)
class Place:
    """Where a file lies: its split, its class, and its name in the folder or archive."""

    split: str
    label: str
    name: str


@dataclass
class Survey:
    """What is there before any pixel is read."""

    sizes: dict[Place, int]  # height and width of each image
    colours: Counter  # images by whether they have colour
    classes: dict[str, set[str]]  # by split; also those without an image
    sha256: str  # of names and contents


def convert(wanted: params.Data, out: Path) -> None:
    """Writes the images of `data.path` and their description to `out`, unless they are there already.

    All images are of one size: `data.resize`, or else the most common one; others are resized to it (bilinear). They are
    grey if all of them are, else in colour. The classes, sorted by name, take turns, so that every stretch is balanced.

    Raises:
        UserError: what is at `data.path` cannot be read, is not laid out so, or holds an unusable image.
    """
    if wanted.path is None:
        raise UserError("params.yaml has no data.path: write there where the folder or archive of your images lies.")
    path = files.found(wanted.path)
    if not path.exists():
        raise UserError(
            f"data.path {wanted.path} does not exist: write the folder or archive of your images in params.yaml."
        )
    survey = survey_of(path)
    classes = _checked_classes(path, survey)
    common = Counter(survey.sizes.values()).most_common()
    size = wanted.resize or max(common, key=lambda each: (each[1], each[0]))[0]
    description = {
        "path": wanted.path,
        "resize": wanted.resize,
        "made_from": survey.sha256,
        "classes": classes,
        "channels": 3 if survey.colours[True] else 1,
        "size": size,
    }
    if _is_there(out, description):
        print(f"{out} has the images of {path} already.")
        return
    if others := sum(count for each, count in common if each != size):
        print(f"{others} of {len(survey.sizes)} images are resized to {size} x {size}.")
    if survey.colours[True] and survey.colours[False]:
        print(f"{survey.colours[False]} of {len(survey.sizes)} images are grey and become colour images.")
    rows, arrays = _places(survey, classes), {}
    for split, places in rows.items():
        arrays[split] = np.empty((len(places), description["channels"], size, size), np.uint8)
    row_of = {place.name: (arrays[place.split], row) for places in rows.values() for row, place in enumerate(places)}
    for name, content in tqdm(_members(path), total=len(row_of), unit="image", leave=False, disable=None):
        if content is not None and name in row_of:
            array, row = row_of[name]
            array[row] = _pixels(path, name, content, description["channels"], size)
    (out / params.DESCRIPTION).unlink(missing_ok=True)  # it goes first and comes last
    for split, places in rows.items():
        labels = np.array([classes.index(place.label) for place in places])
        files.write_bytes(out / data.IMAGES.format(SPLITS[split]), data.as_idx(arrays.pop(split)))
        files.write_bytes(out / data.LABELS.format(SPLITS[split]), data.as_idx(labels))
    files.write_json(out / params.DESCRIPTION, description)  # the number of classes, which a digest needs
    files.write_json(out / params.DESCRIPTION, description | {"sha256": data.digest(out)})
    print(f"{len(survey.sizes)} images of {len(classes)} classes, {size} x {size}, from {path}")


def survey_of(path: Path) -> Survey:
    """Reads the header of every image. Raises UserError if a file is none, or one that cannot be used."""
    sizes, colours, classes, digests, roots = {}, Counter(), {}, [], set()
    for name, content in _members(path):
        root, parts = _split_root(name)
        if not parts or parts[0] not in SPLITS:
            continue
        roots.add(root)
        classes.setdefault(parts[0], set())
        if len(parts) > 2 or (len(parts) == 2 and content is None):
            classes[parts[0]].add(parts[1])
        if len(parts) < 3 or content is None:
            continue
        with _opened(path, name, content) as image:
            width, height = image.size
            if width != height:
                raise UserError(f"{path}: {name} has {width} x {height} pixels, and images must be square: crop or pad it.")
            if image.mode.startswith(DEEP):
                raise UserError(f"{path}: {name} has more than 8 bits a pixel: save it with 8.")
            sizes[Place(*parts[:2], name)] = width
            colours[image.mode not in GREY] += 1
        digests.append(f"{name} {hashlib.sha256(content).hexdigest()}")
    if len(roots) > 1:
        raise UserError(
            f"{path} has {' and '.join(map(repr, sorted(roots)))} with train/ or test/ inside: leave one of them."
        )
    sha256 = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
    return Survey(sizes, colours, classes, sha256)


def _checked_classes(path: Path, survey: Survey) -> list[str]:
    """The names of the classes, sorted; both splits have the same."""
    layout = "write train/CLASS/IMAGE and test/CLASS/IMAGE"
    for split in SPLITS:
        if not (names := survey.classes.get(split)):
            missing = "folder" if names is None else "class folder in"
            raise UserError(f"{path} has no {missing} {split}/: {layout}.")
    train, test = (survey.classes[split] for split in SPLITS)
    for name in sorted(train ^ test):
        there, other = ("train", "test") if name in train else ("test", "train")
        raise UserError(f"{path}: {there}/{name} has no class {other}/{name} beside it: add images there, or remove it.")
    if not 2 <= len(train) <= MAX_CLASSES:
        classes = "one class" if len(train) == 1 else f"{len(train)} classes"
        raise UserError(f"{path} has {classes} in train/: 2 to {MAX_CLASSES} can be learnt.")
    with_images = {(place.split, place.label) for place in survey.sizes}
    for split in SPLITS:
        for name in sorted(survey.classes[split]):
            if (split, name) not in with_images:
                raise UserError(f"{path}: {split}/{name} has no image: add some, or remove the class.")
    return sorted(train)


def _places(survey: Survey, classes: list[str]) -> dict[str, list[Place]]:
    """The images of each split in the order of its arrays: the first of every class, then the second, and so on."""
    counts, ranks = Counter(), {}
    for place in sorted(survey.sizes):
        ranks[place] = counts[place.split, place.label]
        counts[place.split, place.label] += 1
    ordered = sorted(ranks, key=lambda place: (ranks[place], place))
    return {split: [place for place in ordered if place.split == split] for split in SPLITS}


def _pixels(path: Path, name: str, content: bytes, channels: int, size: int) -> np.ndarray:
    """Levels (channels, size, size) of an image, uint8."""
    with _opened(path, name, content) as image:
        pixels = image.convert("RGB" if channels == 3 else "L")
        if pixels.size != (size, size):
            pixels = pixels.resize((size, size), Image.Resampling.BILINEAR)
        return np.moveaxis(np.asarray(pixels).reshape(size, size, channels), -1, 0)


@contextmanager
def _opened(path: Path, name: str, content: bytes) -> Iterator[Image.Image]:
    """An image from its bytes. Whatever a decoder raises, then or inside, is a sentence that names the file."""
    try:
        yield Image.open(io.BytesIO(content))
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001
        reason = "no image" if isinstance(error, Image.UnidentifiedImageError) else str(error) or type(error).__name__
        raise UserError(f"{path}: {name} cannot be read as an image ({reason}): replace or remove it.") from None


def _members(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """Name and content of every file, and of every folder its name alone. An archive is read in memory and never unpacked.

    Files that systems leave behind, hidden ones and __MACOSX, are left out.
    """
    for name, content in _in_folder(path) if path.is_dir() else _in_archive(path):
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if ".." in parts or "/" in parts[:1]:
            raise UserError(f"{path} has the member {name}, which leads out of the archive: do not trust it.")
        if not any(part.startswith(".") or part in ("__MACOSX", "Thumbs.db", "desktop.ini") for part in parts):
            yield "/".join(parts), content


def _in_folder(path: Path) -> Iterator[tuple[str, bytes | None]]:
    for folder, folders, names in os.walk(path, followlinks=True):
        inside = Path(folder).relative_to(path)
        yield from (((inside / name).as_posix(), None) for name in folders)
        yield from (((inside / name).as_posix(), Path(folder, name).read_bytes()) for name in names)


def _in_archive(path: Path) -> Iterator[tuple[str, bytes | None]]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield from ((each.filename, None if each.is_dir() else archive.read(each)) for each in archive.infolist())
            return
        with tarfile.open(path) as archive:
            for member in archive:
                if not (member.isfile() or member.isdir()):
                    raise UserError(f"{path} has the member {member.name}, a link or device: data.path needs plain files.")
                yield member.name, None if member.isdir() else archive.extractfile(member).read()
    except DAMAGES as error:
        raise UserError(f"{path} cannot be read as a tar or zip archive ({error}): data.path needs a whole one.") from None


def _split_root(name: str) -> tuple[str, tuple[str, ...]]:
    """The folder around train/ and test/, which archives often have, and the parts of a name inside it."""
    first, *others = parts = tuple(name.split("/"))
    return ("", parts) if first in SPLITS or not others else (first, tuple(others))


def _is_there(out: Path, description: dict) -> bool:
    try:
        return files.read_json(out / params.DESCRIPTION) == description | {"sha256": data.digest(out)}
    except UserError:
        return False
