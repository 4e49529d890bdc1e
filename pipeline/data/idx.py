"""Loads a data set: checks the four files that the fetch stage wrote, and puts their bytes on the device.

Published data sets are gzipped IDX files (LeCun, Cortes and Burges, "The MNIST database of handwritten digits"). Such a file
begins with big-endian 32-bit words: the magic number 0x0800 + (number of dimensions), and the size of each dimension. The
array follows, as unsigned bytes in C order. The user's images are stored as NumPy files, which are memory-mapped.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.config import params
from pipeline.core import files
from pipeline.core.errors import UserError

if TYPE_CHECKING:
    import torch  # slow to import, and not needed to fetch or compare data

IDX_IMAGES, IDX_LABELS = "{}-images-idx3-ubyte.gz", "{}-labels-idx1-ubyte.gz"  # {} is the split: train or t10k
OWN_IMAGES, OWN_LABELS = "{}-images.npy", "{}-labels.npy"
# Types of stored labels: uint8 for up to 256 classes, uint16 for more
LABEL_TYPES = (np.dtype(np.uint8), np.dtype("<u2"))


@dataclass(frozen=True)
class Images:
    """Images on a device: `pixels` (n, C, H, W) uint8, and `levels` (256,) float32, the scaled value of each pixel level.

    Indexing, slicing and `split` return scaled images in float32. Storing scaled images would take four times the memory.
    """

    pixels: torch.Tensor
    levels: torch.Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, which: int | slice | torch.Tensor) -> torch.Tensor:
        chosen = self.pixels[which]
        return self.levels.index_select(0, chosen.flatten().int()).view(chosen.shape)

    def first(self, count: int) -> Images:
        return replace(self, pixels=self.pixels[:count])

    def only(self, which: torch.Tensor) -> Images:
        return replace(self, pixels=self.pixels[which])

    def split(self, size: int) -> Iterator[torch.Tensor]:
        """Yields all images in order, as float32, `size` at a time."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    @property
    def shape(self) -> torch.Size:
        return self.pixels.shape

    @property
    def device(self) -> torch.device:
        return self.pixels.device


@dataclass(frozen=True)
class DataSet:
    """The images and labels of both splits. Labels are (n,) int64. `sha256` is the digest of the stored bytes."""

    train_images: Images
    train_labels: torch.Tensor
    test_images: Images
    test_labels: torch.Tensor
    sha256: str

    def hold_out(self, which: torch.Tensor) -> DataSet:
        """Returns a data set whose test images are the training images at the int64 indices `which`.

        The other training images remain for training.
        """
        import torch

        is_kept = torch.ones(len(self.train_labels), dtype=torch.bool).index_fill(0, which, False)
        kept, held_out = (each.nonzero()[:, 0].to(self.train_labels.device) for each in (is_kept, ~is_kept))
        return replace(
            self,
            train_images=self.train_images.only(kept),
            train_labels=self.train_labels[kept],
            test_images=self.train_images.only(held_out),
            test_labels=self.train_labels[held_out],
        )


def folder(source: str) -> Path:
    """The folder where the fetch stage stores a data set."""
    return Path("data", source)


def read_data(folder: str | Path, pixel_scaling: str = "unit", device: str | torch.device = "cpu") -> DataSet:
    """Reads the data set in `folder` and returns its tensors on `device`.

    `pixel_scaling` maps each pixel level x from 0 to 255 to a value:

        "unit"       x / 255
        "half"       2 x / 255 - 1
        "standard"   (x - mean) / std, with mean and std over all pixels of all training images

    Raises:
        UserError: a file is missing or corrupted, the scaling is unknown, or a GPU has too little memory.
    """
    import torch

    arrays = _read(folder, _num_own_classes(folder))
    train_images, train_labels, test_images, test_labels = arrays
    levels = torch.from_numpy(_scaled_levels(pixel_scaling, train_images)).to(device)
    _check_memory(folder, train_images.nbytes + test_images.nbytes, torch.device(device))

    def images(array: np.ndarray) -> Images:
        return Images(torch.from_numpy(array).to(device), levels)

    def labels(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return DataSet(images(train_images), labels(train_labels), images(test_images), labels(test_labels), _digest(arrays))


def _check_memory(folder: str | Path, needed: int, device: torch.device) -> None:
    import torch

    if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
        raise UserError(
            f"the images of {folder} take {needed / 1e9:.1f} GB, and the GPU has {free / 1e9:.1f} GB free: write a smaller "
            "data.resize in params.yaml, or free the GPU."
        )


def data_digest(folder: str | Path, num_own_classes: int | None = None) -> str:
    """The SHA-256 of train images, train labels, test images and test labels, concatenated in this order.

    `num_own_classes` is the number of classes of the user's images. Pass it if the images have no description file yet.
    """
    return _digest(_read(folder, num_own_classes or _num_own_classes(folder)))


def _digest(arrays: list[np.ndarray]) -> str:
    sha256 = hashlib.sha256()
    for array in arrays:
        sha256.update(array.data)
    return sha256.hexdigest()


def _scaled_levels(pixel_scaling: str, train_images: np.ndarray) -> np.ndarray:
    """Returns the scaled value of each of the 256 pixel levels, computed in float64 and rounded once to float32."""
    levels = np.arange(256, dtype=np.float64)
    if pixel_scaling == "unit":
        levels /= 255
    elif pixel_scaling == "half":
        levels = 2 * levels / 255 - 1
    elif pixel_scaling == "standard":
        counts = _histogram(train_images)
        if np.count_nonzero(counts) == 1:
            raise UserError(
                "all pixels of the training images are equal, so data.pixel_scaling: standard would divide by a standard "
                "deviation of 0; write unit or half in params.yaml, or use other images."
            )
        mean = counts @ levels / counts.sum()
        levels = (levels - mean) / math.sqrt(counts @ (levels - mean) ** 2 / counts.sum())
    else:
        raise UserError(f"data.pixel_scaling {pixel_scaling!r} is unknown; choose one of unit, half, standard.")
    return levels.astype(np.float32)


def _histogram(images: np.ndarray) -> np.ndarray:
    """Counts how often each pixel value from 0 to 255 occurs, (256,)."""
    pixels, counts = images.reshape(-1), np.zeros(256, np.int64)
    for start in range(0, len(pixels), 2**20):  # in pieces, to save memory: `bincount` converts pixels to 64 bits
        counts += np.bincount(pixels[start : start + 2**20], minlength=256)
    return counts


def write_own(path: Path, shape: tuple[int, ...], dtype: np.dtype, parts: Iterable[np.ndarray]) -> None:
    """Writes an array in NumPy's format, part by part, since the array may not fit in memory.

    Raises:
        UserError: the file cannot be written, for example because the disk is full.
    """
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    try:
        with files.replacing(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for part in parts:
                file.write(np.ascontiguousarray(part, dtype).data)
    except OSError as error:
        raise files.unwritable(path, error) from None


def as_idx(array: np.ndarray) -> bytes:
    """Returns the bytes of a gzipped IDX file. The file has no timestamp, so that equal arrays give equal files."""
    header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return gzip.compress(b"".join([header, np.ascontiguousarray(array, np.uint8).tobytes()]), mtime=0)


def write_split(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Writes the two IDX files of a split, "train" or "t10k"."""
    files.write_bytes(folder / IDX_IMAGES.format(split), as_idx(images))
    files.write_bytes(folder / IDX_LABELS.format(split), as_idx(labels))


def num_train_images(folder: str | Path) -> int:
    """Returns the number of the user's training images. Raises UserError if the file of training labels cannot be used."""
    return len(_map_own(Path(folder, OWN_LABELS.format("train")), (1,)))


def _num_own_classes(folder: str | Path) -> int | None:
    """The number of classes of the user's images; None if the folder holds a published data set."""
    path = Path(folder, params.DESCRIPTION)
    if not path.exists():
        return None
    try:
        return len(params.read_description(folder).classes)
    except UserError:
        raise _unusable(path, "is damaged") from None


def _read(folder: str | Path, num_own_classes: int | None) -> list[np.ndarray]:
    """Reads and checks train images (n, C, H, W), train labels (n,), test images and test labels."""
    arrays: list[np.ndarray] = []
    is_own, num_classes = num_own_classes is not None, num_own_classes or params.MNIST_LIKE.num_classes
    names, read = ((OWN_IMAGES, OWN_LABELS), _map_own) if is_own else ((IDX_IMAGES, IDX_LABELS), _read_idx)
    for split in ("train", "t10k"):
        images_path, labels_path = (Path(folder, name.format(split)) for name in names)
        images, labels = read(images_path, (3, 4)), read(labels_path, (1,))
        images = images[:, None] if images.ndim == 3 else images  # grey images may lack the channel axis
        if images.shape[-1] != images.shape[-2] or (arrays and images.shape[1:] != arrays[0].shape[1:]):
            raise _unusable(images_path, f"has images of shape {images.shape[1:]}, but all must be square and of one shape")
        if len(labels) != len(images):
            raise _unusable(labels_path, f"has {len(labels)} labels for {len(images)} images")
        if labels.max() >= num_classes:
            problem = f"has the label {labels.max()}, but there are only {num_classes} classes, numbered from 0"
            raise _unusable(labels_path, problem)
        arrays += [images, labels]
    return arrays


def _read_idx(path: Path, dimensions: tuple[int, ...]) -> np.ndarray:
    """Reads a gzipped IDX file as uint8. Raises UserError if it is unusable or its number of axes is not in `dimensions`."""
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise _unusable(path, "is missing") from None
    except (OSError, EOFError, zlib.error) as error:
        raise _unusable(path, f"cannot be read ({error})") from None
    ndim = int.from_bytes(content[:4], "big") - 0x0800
    header_size = 4 * (1 + ndim)
    if content and ndim not in dimensions:
        raise _unusable(path, "is not an IDX file of the kind that its name says")
    if not content or len(content) <= header_size:
        raise _unusable(path, "is empty")
    shape = np.frombuffer(content[4:header_size], ">u4").tolist()
    values = np.frombuffer(content, np.uint8, offset=header_size)
    if values.size != math.prod(shape):
        raise _unusable(path, f"has {values.size} values where its header says {math.prod(shape)}")
    return values.reshape(shape).copy()  # without the copy, the array would be read-only


def _map_own(path: Path, dimensions: tuple[int, ...]) -> np.ndarray:
    """Memory-maps pixels or labels. Raises UserError if they are unusable or their number of axes is not in `dimensions`."""
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except FileNotFoundError:
        raise _unusable(path, "is missing") from None
    except (OSError, EOFError, ValueError) as error:
        raise _unusable(path, f"cannot be read ({error})") from None
    types = LABEL_TYPES if dimensions == (1,) else LABEL_TYPES[:1]
    if array.ndim not in dimensions or array.dtype not in types:
        raise _unusable(path, f"holds {array.dtype} of shape {array.shape}, which does not match its name")
    if not array.size:
        raise _unusable(path, "is empty")
    return array


def _unusable(path: Path, problem: str) -> UserError:
    return UserError(f"{path} {problem}; fetch the data again with `python -m pipeline fetch {path.parent.name}`.")
