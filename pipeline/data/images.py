"""Converts the user's images, in a folder or a tar or zip archive, to the four files that training reads.

Images lie in train/CLASS/ and test/CLASS/, as for torchvision's ImageFolder, in any format that Pillow reads. An image is
stored as a viewer shows it, with its EXIF orientation and colour profile applied.
"""

import hashlib
import io
import shutil
import sys
import tempfile
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms, ImageOps
from tqdm import tqdm

from pipeline.config import params
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.data import archives, idx

SPLITS = {"train": "train", "test": "t10k"}  # name of the user's folder → name in the stored files
# Some programs that unpack a Windows zip create files with names such as train\cat\1.png instead of folders.
WITH_BACKSLASH = tuple(f"{split}\\" for split in SPLITS)
MAX_CLASSES = 1000
LARGEST_FILE, LARGEST_DATA = 2**28, 2**35  # maximum bytes of an image file, and of all images' pixels
# One of these strings follows the first four bytes of a HEIC file (ISO/IEC 23008-12).
HEIC = (b"ftyphei", b"ftyphev", b"ftypmif1", b"ftypmsf1")
ImagePath = tuple[str, str, str]  # an image's split, class, and name in the folder or archive
Decoded = tuple[str, int, int]  # an image's mode, its width, and the offset of its pixels in the temporary file


def convert(wanted: params.Data, out: Path) -> None:
    """Writes the images of `data.path` and their description to `out`.

    All images are resized (bilinear) to `data.resize` or, if it is not set, to the most common size. They are stored as grey
    if all pixels are grey, else in colour.

    Raises:
        UserError: `data.path` cannot be read, lacks train/CLASS/ or test/CLASS/, or holds an unusable image.
    """
    if wanted.path is None:
        raise UserError("params.yaml has no data.path: set it to the path of the folder or archive of your images.")
    path = files.resolve_user_path(wanted.path)
    if not path.exists():
        raise UserError(
            f"data.path {wanted.path} does not exist: set it in params.yaml to the path of the folder or archive of your "
            "images."
        )
    with tempfile.TemporaryFile(dir=Path()) as spool:
        images, sizes = read_images(path, wanted.resize, spool)
        classes = classes_of(path, images)
        size = wanted.resize or max(sizes, key=lambda each: (sizes[each], each))
        num_grey = sum(mode == "L" for mode, _, _ in images.values())
        mode = "L" if num_grey == len(images) else "RGB"
        if others := len(images) - sizes[size]:
            print(f"{others} of {len(images)} images are resized to {size} x {size}.")
        if num_grey and mode == "RGB":
            print(f"{num_grey} of {len(images)} images are grey, and are stored in colour like the others.")
        # The description marks a complete folder. It is therefore removed first and written last.
        (out / params.DESCRIPTION).unlink(missing_ok=True)
        digests = {split: store_split(out, split, images, classes, mode, size, spool) for split in SPLITS}
    known = set(digests["train"])
    if shared := sum(each in known for each in digests["test"]):
        count = len(digests["test"])
        remedy = "remove them from one of the two"
        print(f"warning: {shared} of {count} test images are also in train/: {remedy}.", file=sys.stderr)
    description = {"path": wanted.path, "resize": wanted.resize, "classes": classes, "channels": len(mode), "size": size}
    files.write_json(out / params.DESCRIPTION, description | {"sha256": idx.data_digest(out, len(classes))})
    print(f"{len(images)} images of {len(classes)} classes, {size} x {size}, from {path}")


def store_split(
    out: Path, split: str, images: dict[ImagePath, Decoded], classes: list[str], mode: str, size: int, spool: BinaryIO
) -> list[bytes]:
    """Writes the images and the labels of a split. Returns the digest of each image's pixels."""
    places, digests = in_turns([place for place in images if place[0] == split]), []

    def rows() -> Iterator[np.ndarray]:
        for place in places:
            stored_mode, width, start = images[place]
            spool.seek(start)
            content = spool.read(len(stored_mode) * width**2)
            image = resized(Image.frombytes(stored_mode, (width, width), content).convert(mode), size)
            pixels = np.moveaxis(np.asarray(image).reshape(size, size, len(mode)), -1, 0)
            digests.append(hashlib.sha256(np.ascontiguousarray(pixels).data).digest())
            yield pixels

    shape = (len(places), len(mode), size, size)
    idx.write_own(out / idx.OWN_IMAGES.format(SPLITS[split]), shape, np.dtype(np.uint8), rows())
    numbers = {label: number for number, label in enumerate(classes)}
    labels = np.array([numbers[label] for _, label, _ in places])
    dtype = idx.LABEL_TYPES[len(classes) > 256]
    idx.write_own(out / idx.OWN_LABELS.format(SPLITS[split]), labels.shape, dtype, [labels])
    return digests


def read_images(path: Path, resize: int | None, spool: BinaryIO) -> tuple[dict[ImagePath, Decoded], Counter[int]]:
    """Decodes the images under train/ and test/, and writes their pixels to `spool`, since the pixels may not fit in memory.

    Returns:
        The decoded images, and the number of images of each original width.
    """
    # The pixels may take half of the free space, since the disk holds them twice: in `spool` and in the data set.
    most = min(LARGEST_DATA, shutil.disk_usage(Path()).free / 2)
    images: dict[ImagePath, Decoded] = {}
    sizes: Counter[int] = Counter()
    roots, num_bytes = set(), 0
    for name, length, content in tqdm(archives.members(path), unit=" files", leave=False, disable=None):
        where, (first, *others) = f"{path}: {name}", name.split("/")
        root, parts = ("", [first, *others]) if first in SPLITS else (first, others)  # archives often have a top folder
        if first.startswith(WITH_BACKSLASH):
            raise UserError(
                f"{where} has backslashes in its name instead of lying in folders: set data.path to the zip file that it "
                "was unpacked from."
            )
        if not parts or parts[0] not in SPLITS:
            continue
        roots.add(root)
        if content is None:
            raise UserError(f"{where} is a broken link, a link in an archive or a device: put a file there, or remove it.")
        if len(parts) < 3:
            continue
        split, label, *_ = parts
        if len(parts) > 3:
            raise UserError(f"{where} lies in a folder inside a class: move it up into {split}/{label}, or remove it.")
        label = unicodedata.normalize("NFC", label)  # macOS stores é as e and an accent
        if length > LARGEST_FILE:
            raise UserError(f"{where} is {length / 2**20:.0f} MiB, too large for an image: remove it.")
        try:
            image, size = decode(where, content(), resize)
        except archives.DAMAGES as error:
            raise UserError(f"{where} cannot be read ({error}): replace it with an intact file or archive.") from None
        images[split, label, name] = image.mode, image.width, num_bytes
        num_bytes += spool.write(image.tobytes())
        if num_bytes > most:
            taken = f"{num_bytes / 1e9:.1f} GB of pixels, above the limit of {most / 1e9:.1f} GB"
            raise UserError(
                f"{path}: the first {len(images):,} images have {taken} (half of the free disk space, at most "
                f"{LARGEST_DATA / 1e9:.0f} GB): write a smaller data.resize, or free up disk space."
            )
        sizes[size] += 1
    if len(roots) > 1:
        names = " and ".join(map(repr, sorted(roots)))
        raise UserError(f"{path} has {names}, each with train/ or test/ inside: keep only one of them.")
    return images, sizes


def classes_of(path: Path, images: Iterable[ImagePath]) -> list[str]:
    """Returns the sorted names of the classes. Raises UserError unless both splits have images of each class."""
    found: dict[str, set[str]] = {split: set() for split in SPLITS}
    for split, label, _ in images:
        found[split].add(label)
    for split, classes in found.items():
        if not classes:
            remedy = "arrange them as train/CLASS/IMAGE and test/CLASS/IMAGE"
            raise UserError(f"{path} has no images in {split}/CLASS/: {remedy}.")
    for label in sorted(found["train"] ^ found["test"]):
        there, other = ("train", "test") if label in found["train"] else ("test", "train")
        remedy = "add images to the first, or remove the second"
        raise UserError(f"{path}: {other}/{label} has no images, but {there}/{label} does: {remedy}.")
    if not 2 <= len(classes) <= MAX_CLASSES:
        limits = f"must be from 2 to {MAX_CLASSES}, not {len(classes)}"
        raise UserError(f"{path}: the number of classes {limits}: add or remove classes.")
    return sorted(classes)


def decode(where: str, content: bytes, resize: int | None) -> tuple[Image.Image, int]:
    """Returns an image as a viewer shows it, and its original width. The mode is L if all pixels are grey, else RGB.

    Raises:
        UserError: the image cannot be decoded, or `problem_of` finds a problem.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # raised if an image exceeds Pillow's pixel limit
            with Image.open(io.BytesIO(content)) as image:
                if problem := problem_of(image):
                    raise UserError(f"{where} has {problem}.")
                return resized(as_seen(image), resize or image.width), image.width
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001
        if content[4:].startswith(HEIC):
            raise UserError(f"{where} is HEIC, which Pillow does not read: save it as JPEG or PNG.") from None
        reason = "unknown format" if isinstance(error, Image.UnidentifiedImageError) else str(error) or type(error).__name__
        raise UserError(f"{where} cannot be read as an image ({reason}): replace or remove it.") from None


def problem_of(image: Image.Image) -> str | None:
    """Returns why an image cannot be used, and a remedy. Returns None if the image can be used."""
    if image.width != image.height:
        return f"{image.width} x {image.height} pixels, and images must be square: crop or pad it"
    if image.mode.startswith(("I", "F")):
        return "more than 8 bits per channel: save it with 8"
    if getattr(image, "is_animated", False) and image.format != "MPO":  # viewers show only an MPO's first picture
        return f"{getattr(image, 'n_frames', 'several')} frames: save one of them as an image"
    if image.has_transparency_data and any(image.convert("RGBA").getchannel("A").histogram()[:255]):
        return "transparent pixels, whose colour depends on the viewer: flatten it onto a background"
    return None


def as_seen(image: Image.Image) -> Image.Image:
    mode = "L" if image.mode in ("1", "L", "LA") else "RGB"
    image, content = ImageOps.exif_transpose(image), image.info.get("icc_profile")
    if content:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(content))
        # Viewers ignore a profile whose colour space is not the image's.
        if profile.profile.xcolor_space.strip() == {"L": "GRAY"}.get(image.mode, image.mode):
            image = ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB") or image
    image = image.convert(mode)
    red, *others = image.split()
    return red if all(red.tobytes() == other.tobytes() for other in others) else image


def resized(image: Image.Image, size: int) -> Image.Image:
    return image if image.width == size else image.resize((size, size), Image.Resampling.BILINEAR)


def in_turns(places: list[ImagePath]) -> list[ImagePath]:
    """Sorts images so that classes take turns: one image of each class comes first, then another one of each, and so on."""
    counts: Counter[str] = Counter()
    ranked = []
    for place in sorted(places):
        _, label, _ = place
        ranked.append((counts[label], place))
        counts[label] += 1
    return [place for _, place in sorted(ranked)]
