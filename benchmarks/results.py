"""Where the measurements of a machine lie, and how they are written."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torchvision
from matplotlib.figure import Figure

from pipeline import figures, files, hardware
from pipeline.summary import DIGITS, rounded_table

FOLDER = Path("paper_outputs/benchmarks")
QUANTILES = {"seconds": 0.5, "p10": 0.1, "p90": 0.9}


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def environment(device: torch.device) -> dict:
    """The machine and the versions behind the times."""
    return hardware.describe(device) | {"torchvision": torchvision.__version__}


def slug(environment: dict) -> str:
    """The folder of a machine: its device and its number of threads, such as amd-epyc-2-threads."""
    name = re.sub(r"[^a-z0-9]+", "-", environment["device_name"].lower()).strip("-")
    threads = environment["num_threads"]
    return f"{name}-{threads}-thread{'' if threads == 1 else 's'}"


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median, 10 % and 90 % of samples, by the names of their columns."""
    return dict(zip(QUANTILES, np.quantile(seconds, list(QUANTILES.values())).tolist(), strict=True))


def write(name: str, table: pd.DataFrame, facts: dict, figure: Figure) -> Path:
    """name.csv, .json, .svg and .png in the folder of the machine that `facts["environment"]` tells of.

    Returns:
        The folder.
    """
    folder = FOLDER / slug(facts["environment"])
    text = rounded_table(table).to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n")
    files.write_text(folder / f"{name}.csv", text)
    files.write_json(folder / f"{name}.json", facts)
    files.write_text(folder / f"{name}.svg", figures.svg(figure))
    files.write_bytes(folder / f"{name}.png", figures.png(figure))
    return folder
