"""Tiny synthetic MNIST as real IDX files, for tests that must not download anything."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np


def write_mnist(folder, train=130, test=70, seed=0) -> dict[str, dict]:
    """Writes the four IDX .gz files of a data set that can be learnt; returns the size and SHA-256 of each.

    Every class is a fixed random pattern under noise, and the labels run through 0…9 in turn.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 2, size=(10, 28, 28))
    entries = {}
    for prefix, count in (("train", train), ("t10k", test)):
        labels = np.arange(count) % 10
        images = 155 * patterns[labels] + rng.integers(0, 101, size=(count, 28, 28))
        for name, array in ((f"{prefix}-images-idx3-ubyte.gz", images), (f"{prefix}-labels-idx1-ubyte.gz", labels)):
            entries[name] = write_idx(folder / name, array)
    return entries


def write_idx(path, array) -> dict:
    """Writes one IDX .gz file of unsigned bytes; returns its size and SHA-256."""
    header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    content = gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)
    Path(path).write_bytes(content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
