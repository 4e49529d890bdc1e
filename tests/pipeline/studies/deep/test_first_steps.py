"""What is seen of the first steps of a training, which seeing them does not change."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from pipeline.studies.deep import first_steps
from pipeline.studies.deep.first_steps import Settings, measure
from pipeline.training.loop import Training
from tests.pipeline.mnist_files import write_mnist

SMALL = Settings(seeds=[0, 1], depths=[6, 7], rates=[1e-5, 1e-3], steps=2)


@pytest.fixture
def lab(lab):
    """With three minibatches."""
    write_mnist(Path("data/mnist"), train=23, test=7)
    return lab


def test_the_steps_are_those_of_the_training(lab):
    config = lab.config("osa_shaped", {"model": {"depth": 6}, "train": {"learning_rate": 1e-3}})
    seen = pd.DataFrame(first_steps.first_steps(config, 1, 2))
    training = Training(config, 1, torch.device("cpu"))
    losses, squares = [], []
    for images, labels in training.batches(0):
        with torch.no_grad():
            x = training.model.tokens(images)
            for block in training.model.blocks:
                x = block(x)
        squares.append(x[:, 0].square().mean().item())
        losses.append(training.step(images, labels)[0].item())
    assert seen["step"].tolist() == [0, 1, 2]
    assert seen["loss"].tolist() == losses[:3]
    assert seen["q"].tolist() == pytest.approx(squares[:3], rel=1e-5)
    assert (seen["gradient"] > 1).all(), "before it is clipped"


def test_a_training_whose_loss_is_not_finite_ends_there(lab, monkeypatch):
    config = lab.config("osa_shaped", {"model": {"depth": 6}, "train": {"learning_rate": 1e30}})
    seen = list(first_steps.first_steps(config, 0, 2))
    assert 1 <= len(seen) < 3 and all(math.isfinite(row["loss"]) for row in seen)


def test_seeds_whose_cls_is_large_are_counted(lab):
    sizes = {1e-5: ([1, 20, 1], [12, 19, 9.9]), 1e-3: ([1, 10], [12, 3, 100])}
    rows = [
        {"model": "osa_shaped", "depth": 3, "rate": rate, "seed": seed, "step": step, "q": q}
        for rate, seeds in sizes.items()
        for seed, run in enumerate(seeds)
        for step, q in enumerate(run)
    ]
    found = first_steps.summarise(SMALL, {"steps": pd.DataFrame(rows)}, lab)
    assert found["rows"] == [{"model": "osa_shaped", "depth": 3, "before": 1, "after": [0, 2]}]


def test_every_model_depth_rate_and_seed_is_measured(lab):
    assert len(measure(SMALL, lab)["steps"]) == 2 * 2 * 2 * 2 * 3, "and before and after two steps"
