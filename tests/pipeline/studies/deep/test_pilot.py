"""First steps of a training as the pilot sees them, without changing them."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

from pipeline.studies.deep import pilot
from pipeline.studies.deep.pilot import Settings, measure
from pipeline.studies.lab import first_steps
from pipeline.training.loop import Training
from tests.pipeline.mnist_files import write_mnist

SHALLOW = {"model": {"depth": 6}, "train": {"batch_size": 8}}


@pytest.fixture
def lab(lab):
    """A lab with three minibatches of eight images or fewer."""
    write_mnist(Path("data/mnist"), train=23, test=7)
    return lab


def settings(**runs):
    return Settings(reading="first", runs=runs, steps=2, windows=[[0, 0]], last=2)


def test_the_steps_are_those_of_the_training(lab):
    training = Training(lab.config("osa_iso", SHALLOW), 1, torch.device("cpu"))
    losses = []
    for images, labels in training.batches(0):
        gradients = torch.autograd.grad(cross_entropy(training.model(images), labels), tuple(training.model.parameters()))
        losses.append(training.step(images, labels)[0].item())
        if len(losses) == 1:
            norm = math.hypot(*(gradient.double().norm().item() for gradient in gradients))
    seen = pd.DataFrame(first_steps(lab.training(lab.config("osa_iso", SHALLOW), 1), 3))
    assert seen["step"].tolist() == [0, 1, 2] and seen["loss"].tolist() == losses
    assert seen["gradient"][0] == pytest.approx(norm, rel=1e-5), "before it is clipped"


def test_windows_are_means_and_nothing_follows_a_divergence(lab):
    warm = {"model": {"depth": 6}, "train": {"batch_size": 8, "warmup_steps": 1}}
    wild = {"model": {"depth": 6}, "train": {"batch_size": 8, "learning_rate": 1e30}}
    chosen = settings(
        tame={"variant": "osa_iso", "set": SHALLOW, "seeds": [0]},
        warm={"variant": "osa_iso", "set": warm, "seeds": [1]},
        wild={"variant": "osa_iso", "set": wild, "seeds": [0]},
    )
    tables = measure(chosen, lab)
    rows = pilot.summarise(chosen, tables, lab)["rows"]
    assert [(row["name"], row["seed"]) for row in rows] == [("tame", 0), ("warm", 1), ("wild", 0)]
    tame, warm, _ = (group["loss"].to_numpy() for _, group in tables["steps"].groupby("name"))
    assert rows[0]["losses"] == [tame[0], pytest.approx(tame.mean())] and len(tame) == 2
    assert rows[1]["losses"] == [warm[0], pytest.approx(warm[1:].mean())], "its warm-up comes before its steps"
    assert math.isfinite(rows[2]["losses"][0]) and math.isnan(rows[2]["losses"][1])
