"""Tiny synthetic MNIST as real IDX files, for tests that must not download anything."""

import gzip
import struct
from pathlib import Path

import numpy as np


def write_mnist(folder, train=130, test=70, seed=0) -> None:
    """Writes the four IDX .gz files of a data set that can be learnt.

    Every class is a fixed random pattern under noise, and the labels run through 0…9 in turn.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 2, size=(10, 28, 28))
    for prefix, count in (("train", train), ("t10k", test)):
        labels = np.arange(count) % 10
        images = 155 * patterns[labels] + rng.integers(0, 101, size=(count, 28, 28))
        write_idx(Path(folder, f"{prefix}-images-idx3-ubyte.gz"), images)
        write_idx(Path(folder, f"{prefix}-labels-idx1-ubyte.gz"), labels)


def write_idx(path, array) -> None:
    """Writes one IDX .gz file of unsigned bytes."""
    header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    Path(path).write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0))
