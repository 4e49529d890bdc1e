"""The norms as initialised against dense ones, and what the table of runs says."""

import math

import pandas as pd
import pytest
import torch

from osa.functional import orthogonal_attention
from pipeline.results.measures import jacobian, norm, random_head, skew
from pipeline.studies.deep import long_sequences
from pipeline.studies.deep.long_sequences import CASES, Settings, jacobian_norm, measure, skew_norm

RUNS = {f"vit_{n}": {"variant": "vit", "set": {"model": {"patch_size": p}}, "seeds": [0]} for n, p in ((17, 7), (5, 14))}
SETTINGS = Settings.model_validate(
    {"reading": "first", "runs": RUNS, "patches": [14, 7], "initial_seeds": [0], "power_iterations": 2}
)


@pytest.mark.parametrize("tokens", [3, 11])
def test_norms_of_one_head_are_those_of_dense_matrices(tokens):
    """J₁ alone is compared, with the value that A multiplies held fixed."""
    generator = torch.Generator().manual_seed(7)
    x, scale = torch.randn(tokens, 6, generator=generator, dtype=torch.float64), 0.7
    w_query, w_key, w_value, w_out = weights = random_head(6, 2, generator)
    s, value = skew(x @ w_query, x @ w_key, scale), x @ w_value
    assert skew_norm(x, w_query, w_key, scale) == pytest.approx(norm(s).item(), abs=1e-12)
    attend = lambda x: orthogonal_attention(x @ w_query, x @ w_key, value, scale=scale) @ w_out  # noqa: E731
    wanted = norm(jacobian(attend, x)).item()
    start = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    found = jacobian_norm(x, list(weights), scale, start, iterations=150)
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-12)
    assert wanted <= 2 * scale * norm(x).item() ** 2 + 1e-12, "the bound"


def test_sizes_by_patch_and_case(lab):
    initial = measure(SETTINGS, lab)["initial"].set_index(["case", "tokens"])
    assert set(initial.index) == {(case, tokens) for case in CASES for tokens in (5, 17)}
    assert initial.loc[("following", 5), "alpha"] == pytest.approx(0.1 * 17 / 5)  # small models have 17 tokens
    assert initial.loc[("following", 17), "skew"] == pytest.approx(initial.loc[("normalised", 17), "skew"])
    ratio = initial.loc[("following", 5), "skew"] / initial.loc[("normalised", 5), "skew"]
    assert ratio == pytest.approx(17 / 5), "S is in proportion to α"


def test_slopes_and_runs_by_hand(lab):
    powers = dict(zip(CASES, (0.5, 1.0, 0.0), strict=True))
    initial = [
        {"case": case, "tokens": n, "seed": seed, "norm_squared": n, "skew": n**power, "jacobian": 3 * n**power}
        for case, power in powers.items()
        for n in (50, 197, 785)
        for seed in (0, 1, 2)
    ]
    columns = ["name", "status", "test_accuracy", "images_per_second"]
    runs = pd.DataFrame([("vit_17", "finished", 0.95, 16.0), ("vit_5", "missing", math.nan, math.nan)], columns=columns)
    found = long_sequences.summarise(SETTINGS, {"initial": pd.DataFrame(initial), "runs": runs}, lab)
    assert {case: sizes["skew"].mean for case, sizes in found["slopes"].items()} == pytest.approx(powers, abs=1e-9)
    batch = lab.config("vit").train.batch_size
    trained, missing = found["rows"]["vit_17"], found["rows"]["vit_5"]
    row = {"variant": "vit", "tokens": 17, "n": 1, "normalised": False, "alpha": 0.1, "accuracy": 95, "seconds": batch / 16}
    assert trained == row and (missing["tokens"], missing["n"]) == (5, 0) and math.isnan(missing["accuracy"])
