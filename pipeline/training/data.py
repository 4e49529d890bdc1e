"""MNIST in memory: the four IDX files of the fetch stage, checked, as tensors on the device.

IDX (LeCun, Cortes and Burges, "The MNIST database of handwritten digits") is a header of big-endian 32-bit words, a
magic number 0x0800 + (number of dimensions) and then each dimension, followed by the unsigned bytes in C order.
"""

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.core.errors import UserError

FOLDER = "data/mnist"
IMAGE_SHAPE = (28, 28)
NUM_CLASSES = 10


@dataclass(frozen=True)
class Data:
    """Images (n, 1, 28, 28) float32 and labels (n,) int64 of both splits, and the digest of the bytes behind them."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    sha256: str


def load(folder: str | Path = FOLDER, pixel_scaling: str = "unit", device: str | torch.device = "cpu") -> Data:
    """Reads the data set onto `device`.

    `pixel_scaling` maps a grey level x of 0…255 to x / 255 ("unit") or to (x - mean) / std over all pixels of all
    training images ("standard"); test images get the same map.

    Raises:
        UserError: a file is missing or corrupted, or the scaling is unknown.
    """
    arrays = _read(folder)
    train_images, train_labels, test_images, test_labels = arrays
    levels = _scaled_levels(pixel_scaling, train_images)

    def images(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(levels[array]).unsqueeze(1).to(device)

    def labels(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return Data(images(train_images), labels(train_labels), images(test_images), labels(test_labels), _digest(arrays))


def digest(folder: str | Path = FOLDER) -> str:
    """The `sha256` that `load` reports: over the bytes of train images, train labels, test images and test labels."""
    return _digest(_read(folder))


def _digest(arrays: list[np.ndarray]) -> str:
    sha256 = hashlib.sha256()
    for array in arrays:
        sha256.update(array)
    return sha256.hexdigest()


def _scaled_levels(pixel_scaling: str, train_images: np.ndarray) -> np.ndarray:
    """The float32 value of each of the 256 grey levels, rounded once from float64."""
    levels = np.arange(256, dtype=np.float64)
    if pixel_scaling == "unit":
        levels /= 255
    elif pixel_scaling == "standard":
        levels = (levels - train_images.mean(dtype=np.float64)) / train_images.std(dtype=np.float64)
    else:
        raise UserError(f"data.pixel_scaling is {pixel_scaling!r}; write unit or standard in params.yaml.")
    return levels.astype(np.float32)


def _read(folder: str | Path) -> list[np.ndarray]:
    """Images (n, 28, 28) and labels (n,) of the training split, then of the test split, all uint8."""
    arrays = []
    for split in ("train", "t10k"):
        images = _read_idx(Path(folder, f"{split}-images-idx3-ubyte.gz"), IMAGE_SHAPE)
        labels_path = Path(folder, f"{split}-labels-idx1-ubyte.gz")
        labels = _read_idx(labels_path, ())
        if len(labels) != len(images):
            raise _unusable(labels_path, f"has {len(labels)} labels for {len(images)} images")
        if labels.max() >= NUM_CLASSES:
            raise _unusable(labels_path, f"has the label {labels.max()}, not a digit")
        arrays += [images, labels]
    return arrays


def _read_idx(path: Path, item_shape: tuple[int, ...]) -> np.ndarray:
    """A uint8 array (n, *item_shape) with n >= 1 from a gzipped IDX file."""
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise _unusable(path, "is missing") from None
    except (OSError, EOFError, zlib.error) as error:
        raise _unusable(path, f"cannot be read ({error})") from None
    header_size = 4 * (2 + len(item_shape))
    if len(content) <= header_size:
        raise _unusable(path, "is empty")
    magic, *shape = np.frombuffer(content[:header_size], ">u4").tolist()
    if magic != 0x0801 + len(item_shape) or tuple(shape[1:]) != item_shape:
        raise _unusable(path, "is not the IDX file its name says")
    values = np.frombuffer(content, np.uint8, offset=header_size)
    if values.size != math.prod(shape):
        raise _unusable(path, f"has {values.size} values where its header says {math.prod(shape)}")
    return values.reshape(shape)


def _unusable(path: Path, problem: str) -> UserError:
    return UserError(f"{path} {problem}; fetch the data again with `dvc repro -f fetch`.")
