"""A data set in memory: the four IDX files of the fetch stage, checked, as tensors on the device.

IDX (LeCun, Cortes and Burges, "The MNIST database of handwritten digits") is a header of big-endian 32-bit words, a
magic number 0x0800 + (number of dimensions) and then each dimension, followed by the unsigned bytes in C order.
"""

import gzip
import hashlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.config import params
from pipeline.core import files
from pipeline.core.errors import UserError

IMAGES, LABELS = "{}-images-idx3-ubyte.gz", "{}-labels-idx1-ubyte.gz"  # of the splits train and t10k


@dataclass(frozen=True)
class Data:
    """Images (n, C, H, W) float32 and labels (n,) int64 of both splits, and the digest of the bytes behind them."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    sha256: str


def folder(source: str) -> Path:
    """The folder in which the fetch stage stores a data set."""
    return Path("data", source)


def load(folder: str | Path, pixel_scaling: str = "unit", device: str | torch.device = "cpu") -> Data:
    """Reads the data set onto `device`.

    `pixel_scaling` maps a level x of 0…255 to x / 255 ("unit"), to 2 x / 255 - 1 ("half") or to (x - mean) / std over
    all pixels of all training images ("standard"); test images get the same map.

    Raises:
        UserError: a file is missing or corrupted, or the scaling is unknown.
    """
    arrays = _read(folder)
    train_images, train_labels, test_images, test_labels = arrays
    levels = _scaled_levels(pixel_scaling, train_images)

    def images(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(levels[array]).to(device)

    def labels(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return Data(images(train_images), labels(train_labels), images(test_images), labels(test_labels), _digest(arrays))


def digest(folder: str | Path) -> str:
    """The `sha256` that `load` reports: over the bytes of train images, train labels, test images and test labels."""
    return _digest(_read(folder))


def _digest(arrays: list[np.ndarray]) -> str:
    sha256 = hashlib.sha256()
    for array in arrays:
        sha256.update(array)
    return sha256.hexdigest()


def _scaled_levels(pixel_scaling: str, train_images: np.ndarray) -> np.ndarray:
    """The float32 value of each of the 256 levels, rounded once from float64."""
    levels = np.arange(256, dtype=np.float64)
    if pixel_scaling == "unit":
        levels /= 255
    elif pixel_scaling == "half":
        levels = 2 * levels / 255 - 1
    elif pixel_scaling == "standard":
        levels = (levels - train_images.mean(dtype=np.float64)) / train_images.std(dtype=np.float64)
    else:
        raise UserError(f"data.pixel_scaling is {pixel_scaling!r}; write unit, half or standard in params.yaml.")
    return levels.astype(np.float32)


def as_idx(array: np.ndarray) -> bytes:
    """A gzipped IDX file of unsigned bytes, without the time of day in it: the same values are the same bytes."""
    header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return gzip.compress(b"".join([header, np.ascontiguousarray(array, np.uint8)]), mtime=0)


def _num_classes(folder: str | Path) -> int:
    path = Path(folder, params.DESCRIPTION)
    if not path.exists():
        return params.DIGITS.num_classes
    try:
        return len(files.read_json(path)["classes"])
    except (UserError, KeyError, TypeError):
        raise _unusable(path, "is damaged") from None


def _read(folder: str | Path) -> list[np.ndarray]:
    """Images (n, C, H, W) and labels (n,) of the training split, then of the test split, all uint8."""
    arrays, num_classes = [], _num_classes(folder)
    for split in ("train", "t10k"):
        images_path, labels_path = Path(folder, IMAGES.format(split)), Path(folder, LABELS.format(split))
        images, labels = _read_idx(images_path, (3, 4)), _read_idx(labels_path, (1,))
        images = images[:, None] if images.ndim == 3 else images  # one channel may be left out
        if images.shape[-1] != images.shape[-2] or (arrays and images.shape[1:] != arrays[0].shape[1:]):
            raise _unusable(images_path, f"has images of the shape {images.shape[1:]}, not square ones of one size")
        if len(labels) != len(images):
            raise _unusable(labels_path, f"has {len(labels)} labels for {len(images)} images")
        if labels.max() >= num_classes:
            raise _unusable(labels_path, f"has the label {labels.max()}, not one of {num_classes} classes")
        arrays += [images, labels]
    return arrays


def _read_idx(path: Path, dimensions: tuple[int, ...]) -> np.ndarray:
    """A uint8 array that is not empty, of one of these numbers of dimensions, from a gzipped IDX file."""
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise _unusable(path, "is missing") from None
    except (OSError, EOFError, zlib.error) as error:
        raise _unusable(path, f"cannot be read ({error})") from None
    ndim = int.from_bytes(content[:4], "big") - 0x0800
    header_size = 4 * (1 + ndim)
    if content and ndim not in dimensions:
        raise _unusable(path, "is not the IDX file its name says")
    if not content or len(content) <= header_size:
        raise _unusable(path, "is empty")
    shape = np.frombuffer(content[4:header_size], ">u4").tolist()
    values = np.frombuffer(content, np.uint8, offset=header_size)
    if values.size != math.prod(shape):
        raise _unusable(path, f"has {values.size} values where its header says {math.prod(shape)}")
    return values.reshape(shape)


def _unusable(path: Path, problem: str) -> UserError:
    return UserError(f"{path} {problem}; fetch the data again with `python -m pipeline fetch {path.parent.name}`.")
