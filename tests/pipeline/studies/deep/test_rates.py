"""The grid of short trainings, and what is best of it."""

import math

import pandas as pd
import pytest
import torch

from pipeline.studies.deep import rates
from pipeline.studies.deep.rates import Settings
from pipeline.training.loop import Training

SEARCH = {"depth": 6, "rates": [1e-4, 1e-3], "steps": 3, "last": 2}
SETTINGS = Settings.model_validate(
    {"reading": "first", "seed": 9, "models": ["osa_shaped", "vit"], "alphas": [0.1, 0.36], "searches": [SEARCH]}
)


def test_the_loss_is_the_mean_of_the_last_steps(lab):
    row = rates.short_training(SETTINGS.searches[0], 9, "vit", 1e-3, math.nan, lab)
    config = lab.config("vit", {"model": {"depth": 6}, "train": {"learning_rate": 1e-3}})
    training = Training(config, 9, torch.device("cpu"))
    losses = [training.step(*batch)[0].item() for batch, _ in zip(training.batches(0), range(3), strict=False)]
    assert row["loss"] == pytest.approx(sum(losses[1:]) / 2)


def test_every_rate_is_tried_and_every_alpha_at_the_best(monkeypatch, lab):
    def last_loss(search, seed, model, rate, alpha, lab):
        return {"model": model, "learning_rate": rate, "alpha": alpha, "loss": {1e-4: 2.0, 1e-3: 1.0}[rate]}

    monkeypatch.setattr(rates, "short_training", last_loss)
    table = rates.measure(SETTINGS, lab)["trainings"][["model", "learning_rate", "alpha"]].fillna(0)
    osa, vit = [("osa_shaped", 1e-4, 0.36), ("osa_shaped", 1e-3, 0.36), ("osa_shaped", 1e-3, 0.1)], ("vit", 1e-4, 0)
    assert list(table.itertuples(index=False, name=None)) == [*osa, vit, ("vit", 1e-3, 0)]


def test_what_diverged_comes_last_and_what_does_not_learn_is_marked(lab):
    columns = ["model", "depth", "learning_rate", "alpha_times_depth", "steps", "loss"]
    rows = [
        ("vit", 6, 1e-3, math.nan, 3, math.nan),
        ("vit", 6, 1e-4, math.nan, 3, 0.5),
        ("espa", 6, 1e-4, math.nan, 3, 2.301),
    ]
    (search,) = rates.summarise(SETTINGS, {"trainings": pd.DataFrame(rows, columns=columns)}, lab)["searches"]
    by_name = {each["model"]: each for each in search["models"]}
    assert [tried["rate"] for tried in by_name["vit"]["tried"]] == [1e-4, 1e-3]
    assert by_name["vit"]["learns"] and not by_name["espa"]["learns"]
