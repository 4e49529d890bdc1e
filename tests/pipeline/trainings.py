"""Trainings of a second: small models, 43 images, two epochs of four steps, in a working directory of their own."""

import csv
import io
import sys
from pathlib import Path

import pytest
import torch

from pipeline.config import params
from pipeline.tools import train
from pipeline.training import loop, recorder
from pipeline.training.loop import Observer, Training
from pipeline.training.run import Run
from tests.pipeline import synthetic
from tests.pipeline.mnist_files import write_mnist

SMALL = {"patch_size": 14, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_ratio": 2}  # N = 5, d_v = 4
SHORT = {"epochs": 2, "batch_size": 13, "points_per_epoch": 2}
TRAIN_IMAGES, TEST_IMAGES = 43, 31  # 4 steps an epoch, the last one of 4 images
OUTPUTS = ("history.csv", "metrics.json")
CPU = torch.device("cpu")


def write_params(**changes: dict) -> None:
    """The repository's parameters with a small model and a short training, after `changes` of sections."""

    def edit(raw: dict) -> None:
        raw.update(synthetic.deep_merge(synthetic.deep_merge(raw, {"model": SMALL, "train": SHORT}), changes))

    synthetic.write_params(Path(), edit)


def write_data(seed: int = 3, train: int = TRAIN_IMAGES) -> None:
    write_mnist("data/mnist", train=train, test=TEST_IMAGES, seed=seed)


def config(variant: str) -> params.RunConfig:
    return params.resolve(params.load(), variant)


def training(variant: str = "osa_exact", seed: int = 0) -> Training:
    return Training(config(variant), seed, CPU)


def finished(variant: str = "osa_exact", seed: int = 0) -> Training:
    """A training that leaves no file."""
    result = training(variant, seed)
    result.run(Observer())
    return result


def trained(variant: str = "osa_exact", seed: int = 0) -> Run:
    run = Run(variant, seed)
    recorder.train(run, config(variant))
    return run


def outputs(run: Run) -> dict[str, bytes]:
    return {name: (run.folder / name).read_bytes() for name in OUTPUTS} | {"weights": run.weights.read_bytes()}


def read_history(content: bytes) -> list[dict]:
    return list(csv.DictReader(io.StringIO(content.decode())))


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """`python -m pipeline train` in this process, whose settings of torch are left alone."""
    monkeypatch.setattr(sys, "argv", ["train", *arguments, "--no-tracking"])
    monkeypatch.setattr(loop, "configure_torch", lambda: None)
    train.main()
