"""Writes and reads the measurements made on a machine, in the machine's folder under paper_outputs/benchmarks."""

import argparse
import re
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from pipeline.config import records
from pipeline.config.records import Record
from pipeline.core import files, provenance

BENCHMARKS = Path("paper_outputs/benchmarks")
OURS, EAGER, COMPILED, THEIRS = "ours", "ours, eager", "ours, compiled", "straightforward"
INITIALISED, TRAINED = "initialised", "trained"
OSA_MODELS, ALL_MODELS = "the paper's OSA models", "all models of the paper"
SDPA, BEST = "sdpa", "best SDPA"  # softmax attention with the backend that torch chooses, and with the fastest one
QUANTILES = {"seconds": 0.5, "p10": 0.1, "p90": 0.9}
# n → number of timings of an n×n product. We include small n because other processes seldom interrupt a short product.
PEAK_SIZES = {256: 50, 512: 20, 2048: 3}


def parser(script: str, about: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that all scripts share. Its help shows the first paragraph of `about`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m pipeline benchmarks.{script}",
        description=(about or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=9, help="number of rounds; each round times every call once")
    return parser


def slug(environment: dict) -> str:
    """Returns the name of a machine's folder: the device and the number of threads, such as amd-epyc-2-threads."""
    return re.sub(r"[^a-z0-9]+", "-", provenance.machine(environment).lower()).strip("-")


def quantiles(seconds: list[float] | NDArray) -> dict[str, float]:
    """Returns the median and the 10 % and 90 % quantiles of samples, with their column names as keys."""
    return dict(zip(QUANTILES, np.quantile(seconds, list(QUANTILES.values())).tolist(), strict=True))


def peak(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Returns the floating-point operations per second of the fastest matrix product up to 2048×2048, in float32 or `dtype`.

    TF32 is allowed, because torch's attention on CUDA may be faster than the peak of plain float32. We measure with
    the wall clock, so that the peak is an independent check of `seconds` in benchmarks/cost.py, which uses CUDA events.
    """
    # On CUDA we time several products in a row, because reading a result from the GPU is slow.
    best, in_a_row = 0.0, 1 if device.type == "cpu" else 30
    matmul, precision = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    for n, samples in PEAK_SIZES.items():
        for a in (torch.randn(n, n, dtype=each, device=device) for each in {dtype, torch.float32}):
            for _ in range(samples + 1):
                start = time.perf_counter()
                for _ in range(in_a_row):
                    result = a @ a
                result[-1, -1].item()
                best = max(best, 2 * n**3 * in_a_row / (time.perf_counter() - start))
    matmul.fp32_precision = precision
    return best


def write_measurements(name: str, table: pd.DataFrame, device: torch.device, options: argparse.Namespace, **facts) -> None:
    """Writes the table to name.csv and the facts to name.json, in this machine's folder."""
    environment = provenance.describe_environment(device) | {"torchvision": version("torchvision")}
    path = BENCHMARKS / slug(environment) / name
    files.write_csv(path.with_suffix(".csv"), table)
    files.write_json(path.with_suffix(".json"), facts | {"environment": environment, "options": vars(options)})
    records.seal(path.parent)
    print(f"{path}.csv")


def measured(name: str) -> list[Path]:
    """Returns the paths of all files of this name, such as step.json, in the folders of all machines.

    Raises:
        UserError: a machine's files have changed since they were written.
    """
    paths = sorted(BENCHMARKS.glob(f"*/{name}"))
    for folder in {path.parent for path in paths}:
        records.read_record(folder, Record, "make benchmark")
    return paths


def with_best(table: pd.DataFrame) -> pd.DataFrame:
    """Replaces torch's softmax backends with `BEST`, the fastest of them for each width, pass and number of tokens."""
    softmax = table["method"].str.startswith(SDPA)
    fastest = table[softmax].sort_values("seconds").groupby(["width", "pass", "tokens"], as_index=False).first()
    return pd.concat([table[~softmax], fastest.assign(method=BEST)], ignore_index=True)
