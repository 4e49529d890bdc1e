"""The first steps of OSA are those of a training, in float32 and float64, and a seed that stays with a guess is named."""

import math

import pandas as pd
import pytest
import torch

from osa import reference
from pipeline.results.measures import attention_inputs
from pipeline.statistics.claims import GUESS_LOSS
from pipeline.studies.lab import first_steps
from pipeline.studies.paper.first_steps import LAST_STEPS, Settings, as_dtype, draw, extremes, measure, summarise

STEPS = 10 + LAST_STEPS


def settings(seeds: list[int], steps: int) -> Settings:
    few = {"train": {"batch_size": 10}}
    runs = {
        "osa_ns": {"variant": "osa_ns", "set": few, "seeds": seeds},
        "osa_ns_10": {"variant": "osa_ns", "set": few | {"variant": {"num_iterations": 10}}, "seeds": seeds},
        "osa_qr": {"variant": "osa_qr", "set": few, "seeds": seeds},
    }
    return Settings(reading="first", runs=runs, steps=steps)


def run(name: str, seed: int, losses: list[float], dtype: str = "float32") -> list[dict]:
    """Rows of a run, whose gradient and norm grow with the seed."""
    values = {"gradient": 10.0**seed, "skew_norm": 1.0 + seed, "largest": 1.0, "smallest": 0.5**seed}
    named = {"name": name, "seed": seed, "dtype": dtype}
    return [{**named, "step": step, "loss": loss, **values} for step, loss in enumerate(losses)]


def test_of_the_heads_the_extremes(lab):
    training = lab.training(lab.config("osa_ns", {"train": {"batch_size": 10}}), 3)
    assert len(list(first_steps(training, 2))) == 2
    norms, values = [], []
    for layer, x in attention_inputs(training.model, training.data.test_images[:2]):
        query, key, _ = (each.detach().double() for each in layer.project(x))
        scale = layer.scale().detach().double()
        norms.append(torch.linalg.svdvals(reference.skew(query, key, scale)).max().item())
        basis = reference.newton_schulz_basis(torch.cat([query, key], dim=-1))
        a = reference.low_rank_matrix(query, key, scale, basis)
        values.append(torch.linalg.svdvals(a))
    found = extremes(training)
    assert found["skew_norm"] == pytest.approx(max(norms), rel=1e-5)
    assert found["largest"] == pytest.approx(max(each.max().item() for each in values), rel=1e-5)
    assert found["smallest"] == pytest.approx(min(each.min().item() for each in values), rel=1e-5)


def test_another_dtype_begins_at_the_same_weights_and_images(lab):
    config = lab.config("osa_qr", {"train": {"batch_size": 10}})
    single, double = (as_dtype(lab.training(config, 0), dtype) for dtype in (torch.float32, torch.float64))
    for one, other in zip(single.model.parameters(), double.model.parameters(), strict=True):
        assert other.dtype == torch.float64 and torch.equal(one.double(), other)
    assert torch.equal(single.data.train_images[:3].double(), double.data.train_images[:3])
    losses = [[step["loss"] for step in first_steps(training, 3)] for training in (single, double)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] != losses[1]


def test_a_run_that_fails_is_repeated_in_float64(lab):
    table = measure(settings([0, 1], 1), lab)["steps"]  # after one step nothing has left the guess
    assert table.groupby(["name", "seed", "dtype"]).size().to_dict() == {
        (name, seed, dtype): 1 for name in settings([0], 1).runs for seed in (0, 1) for dtype in ("float32", "float64")
    }


def test_a_seed_fails_that_guesses_or_diverges(lab):
    learning = [GUESS_LOSS] * 10 + [1.5] * LAST_STEPS
    guessing, diverged = [GUESS_LOSS] * STEPS, [GUESS_LOSS] * 5 + [math.nan]
    rows = run("osa_ns", 0, learning) + run("osa_ns", 1, guessing) + run("osa_ns", 2, diverged)
    rows += run("osa_ns", 1, learning, "float64") + run("osa_ns", 2, diverged, "float64")
    for name in ("osa_ns_10", "osa_qr"):
        for seed in (0, 1, 2):
            rows += run(name, seed, learning)
    chosen, tables = settings([0, 1, 2], STEPS), {"steps": pd.DataFrame(rows)}
    summary = summarise(chosen, tables, lab)
    models = summary["models"]
    assert (summary["failing"], summary["failing_double"]) == (2, 1)
    model = models["osa_ns"]
    assert model["failing"] == [1, 2] and model["failing_double"] == [2]
    assert model["learning"] == {"skew_norm": 1, "smallest": 1}
    assert model["lost"] == {"skew_norm": 3, "smallest": 0.25}
    assert models["osa_qr"]["failing"] == [] and models["osa_qr"]["lost"] is None
    lines = [len(ax.lines) for ax in draw(chosen, tables, lab).axes]
    assert lines == [5, 5]  # three medians, two runs that fail
