"""The first steps of OSA are those of a training, and a seed that stays with a guess is named."""

import math

import pandas as pd
import pytest
import torch

from osa import reference
from pipeline.results.measures import attention_inputs
from pipeline.studies.lab import first_steps
from pipeline.studies.paper.first_steps import LAST_STEPS, Settings, largest, measure, summarise


def test_of_the_heads_the_largest(lab):
    training = lab.training(lab.config("osa_qr", {"train": {"batch_size": 20}}), 3)
    assert len(list(first_steps(training, 2))) == 2
    values = []
    for layer, x in attention_inputs(training.model, training.data.test_images[:2]):
        query, key, _ = layer.project(x)
        values.append(torch.linalg.svdvals(reference.skew(query, key, layer.scale().double()).detach()).max().item())
    found = largest(training)
    assert found["skew_norm"] == pytest.approx(max(values)) and 0 < found["error"] < 1e-4


def test_one_row_a_step(lab):
    table = measure(Settings(variants=["osa_ns", "osa_qr"], seeds=[0, 1], steps=1), lab)["steps"]
    assert table.groupby(["variant", "seed"]).size().to_dict() == {(v, s): 1 for v in ("osa_ns", "osa_qr") for s in (0, 1)}


def test_a_seed_fails_that_guesses_or_diverges(lab):
    losses = {0: [2.3] * 10 + [1.5] * LAST_STEPS, 1: [2.3] * 10 + [2.25] * LAST_STEPS, 2: [2.3] * 5 + [math.nan]}
    rows = [
        {"variant": "osa_ns", "seed": seed, "step": step, "loss": loss, "gradient": 10.0**seed, "skew_norm": 1, "error": 0.1}
        for seed, own in losses.items()
        for step, loss in enumerate(own)
    ]
    whole = [row for row in rows if row["seed"] == 0]
    rows += [row | {"variant": "osa_qr", "loss": 1.5, "seed": seed} for row in whole for seed in losses]
    settings = Settings(variants=["osa_ns", "osa_qr"], seeds=[0, 1, 2], steps=10 + LAST_STEPS)
    summary = summarise(settings, {"steps": pd.DataFrame(rows)}, lab)
    model = summary["models"]["osa_ns"]
    assert summary["p"] == pytest.approx(0.4)  # two of three against none of three, or as far the other way
    assert model["failing"] == [1, 2]
    assert model["worst"]["learning"]["gradient"] == 1 and model["worst"]["failing"]["gradient"] == 100
