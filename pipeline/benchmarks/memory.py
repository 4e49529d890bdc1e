"""Memory against the number of one's own images: `python -m pipeline benchmarks.memory`.

Random images in colour, as files of a folder, are converted, and then loaded and looked at as an epoch does, with standard
scaling, each in a process of its own. It prints the pixels' bytes and what the process took beyond its imports, at most: of
anonymous memory, which is its own, and of mapped files, which the system shares between processes and takes back. The last
line has the slopes over the pixels' bytes. A GPU holds the pixels as bytes too, once.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

from pipeline.config import params
from pipeline.core.errors import command_parser, entry_point
from pipeline.core.files import ROOT
from pipeline.data import idx, images

CLASSES, BATCH, CHANNELS = 10, 128, 3
KINDS = {"RssAnon": "anonymous", "RssFile": "mapped"}  # in the words of proc(5)
STEPS = ("convert", "load")
EVERY_SECONDS = 0.002
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc gives larger blocks back when they are freed, else only now and then


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("benchmarks.memory", __doc__)
    parser.add_argument("--counts", type=counts, default=[500, 1000, 2000, 4000], help="images; default: 500,1000,2000,4000")
    parser.add_argument("--size", type=int, default=96, help="of an image, in pixels; default: 96")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)  # in the working directory, as a process of its own
    chosen = parser.parse_args(arguments)
    if chosen.step:
        print(*measure(chosen.step).values())
        return
    rows = [row(count, chosen.size) for count in chosen.counts]
    table = pd.DataFrame(rows)
    print((table.set_index("images") / 1e6).round(1).add_suffix(", MB").to_string())
    print("Slope over the pixels:", ", ".join(f"{name} {slope:.2f}" for name, slope in slopes(table).items()))


def counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def row(count: int, size: int) -> dict[str, int]:
    """The peaks of both steps in bytes, with that many images, four of five of them for training."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            split = "test" if number % 5 == 4 else "train"
            path = Path(folder, "images", split, str(number // 5 % CLASSES), f"{number}.bmp")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (size, size, CHANNELS), np.uint8)).save(path)
        peaks = {"images": count, "pixels": count * CHANNELS * size**2}
        for step in STEPS:
            command = [sys.executable, "-m", "pipeline.benchmarks.memory", "--step", step]
            environment = os.environ | {"PYTHONPATH": str(ROOT)} | ALLOCATOR
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            found = map(int, done.stdout.splitlines()[-1].split())
            peaks |= {f"{step} {kind}": peak for kind, peak in zip(KINDS.values(), found, strict=True)}
    return peaks


def measure(step: str) -> dict[str, int]:
    """The most bytes of each kind that a step takes beyond what the process had."""
    with watched() as peaks:
        if step == "convert":
            images.convert(params.Data(source="folder", pixel_scaling="standard", path="images"), Path("data/folder"))
        else:
            loaded = idx.load("data/folder", "standard")
            for rows in torch.randperm(len(loaded.train_images)).split(BATCH):
                loaded.train_images[rows].mean().item()
            for batch in loaded.test_images.split(BATCH):
                batch.mean().item()
    return peaks


@contextlib.contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Measures the most that this process holds of each kind beyond what it held before, every few milliseconds."""
    before, done = held(), threading.Event()
    peaks = dict.fromkeys(KINDS, 0)

    def look() -> None:
        while not done.wait(EVERY_SECONDS):
            peaks.update({kind: max(peaks[kind], now - before[kind]) for kind, now in held().items()})

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def held() -> dict[str, int]:
    """Bytes of each kind that this process holds."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {kind: int(fields[kind].split()[0]) * 1024 for kind in KINDS}


def slopes(table: pd.DataFrame) -> dict[str, float]:
    """Bytes more for a byte of pixels more, by least squares."""
    return {
        name: np.polyfit(table["pixels"], table[name], 1)[0] for name in table.columns if name not in ("images", "pixels")
    }


if __name__ == "__main__":
    main()
