"""Measurements of a machine: their folder, their format, and the options that all scripts share."""

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
SDPA, BEST = "sdpa", "best SDPA"  # torch chooses a backend; the fastest of those it has
QUANTILES = {"seconds": 0.5, "p10": 0.1, "p90": 0.9}
PEAK_SIZES = {
    256: 50,
    512: 20,
    2048: 3,
}  # square matrices whose product shows the peak, and how many samples of it are taken;
# the small ones last less than the turn of a process, and so show it on a busy machine too


def parser(script: str, about: str | None) -> argparse.ArgumentParser:
    """The options of all scripts, and `about` them in its first paragraph."""
    shown, about = argparse.ArgumentDefaultsHelpFormatter, (about or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m pipeline benchmarks.{script}", description=about, formatter_class=shown
    )
    parser.add_argument("--repeats", type=int, default=9, help="rounds, in each of which everything has its turn")
    return parser


def slug(environment: dict) -> str:
    """The folder of a machine: its device and its number of threads, such as amd-epyc-2-threads."""
    return re.sub(r"[^a-z0-9]+", "-", provenance.machine(environment).lower()).strip("-")


def quantiles(seconds: list[float] | NDArray) -> dict[str, float]:
    """Median, 10 % and 90 % of samples, by the names of their columns."""
    return dict(zip(QUANTILES, np.quantile(seconds, list(QUANTILES.values())).tolist(), strict=True))


def peak(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations a second of the fastest product of matrices up to 2048×2048, of float32 or `dtype`.

    With TF32 on CUDA: torch's attention makes its float32 products on tensor cores, several for one, and may pass the
    peak of plain ones. By the wall clock until the host has read a result, and not by benchmarks/cost.py, whose clock it
    is to check.
    """
    best, in_a_row = 0.0, 1 if device.type == "cpu" else 30  # on CUDA the way to the host and back is a small part then
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
    """name.csv with the table and name.json with the facts, in the folder of this machine."""
    environment = provenance.describe_environment(device) | {"torchvision": version("torchvision")}
    path = BENCHMARKS / slug(environment) / name
    files.write_csv(path.with_suffix(".csv"), table)
    files.write_json(path.with_suffix(".json"), facts | {"environment": environment, "options": vars(options)})
    records.seal(path.parent)
    print(f"{path}.csv")


def measured(name: str) -> list[Path]:
    """The file of that name of each machine that has one, such as step.json.

    Raises:
        UserError: a machine's files are not those that were measured there.
    """
    paths = sorted(BENCHMARKS.glob(f"*/{name}"))
    for folder in {path.parent for path in paths}:
        records.read_record(folder, Record, "make benchmark")
    return paths


def with_best(table: pd.DataFrame) -> pd.DataFrame:
    """A table of attention with the fastest of torch's backends at each point in place of all of them."""
    softmax = table["method"].str.startswith(SDPA)
    fastest = table[softmax].sort_values("seconds").groupby(["width", "pass", "tokens"], as_index=False).first()
    return pd.concat([table[~softmax], fastest.assign(method=BEST)], ignore_index=True)
