"""The spread of |x|² after MLPs by hand and by samples, and the difference of independent and isometric draws."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from pipeline.studies.deep import isometry
from pipeline.studies.deep.isometry import Settings, measure, spreads, stack, summarise

SMALL = Settings(
    seeds=list(range(12)), widths=[12, 24], depths=[6, 24], tokens=20, gradient_depths=[6, 24], gradient_seeds=[0], images=2
)


@pytest.mark.slow
def test_independent_draws_spread_and_isometric_ones_do_not(lab):
    tables = measure(SMALL, lab)
    sd = spreads(tables["mlps"])
    assert sd["suo", 24, 24] > 2 * sd["isometric", 24, 24] and sd["suo", 24, 24] > 1.2 * sd["suo", 24, 6]
    assert sd["isometric", 24, 24] < sd["isometric", 24, 6]
    found = summarise(SMALL, tables, lab)
    assert found["slopes"]["suo"]["depth"].mean > 0.2 > found["slopes"]["isometric"]["depth"].mean
    assert [(row["model"], row["depth"]) for row in found["gradients"]] == [
        (model, depth) for model in ("osa_shaped", "osa_iso") for depth in (6, 24)
    ]
    assert all(row["gradient"][0] > 0 and row["largest"] >= row["cls"][0] for row in found["gradients"])
    assert len(isometry.draw_spreads(SMALL, tables, lab).axes[0].texts) == 4


@pytest.mark.slow
def test_a_linear_mlp_of_independent_draws_spreads_as_predicted(lab):
    """Var log |W₂W₁x|² of one MLP is 2 (1 − d/H)/d, whichever way the frames lie."""
    ratios = []
    for seed in range(300):
        (mlp,) = stack("suo", 32, 6, lab.generator(seed, "test"))[:1]
        x = lab.normal(seed, "test/x", 32)
        ratios.append(((mlp.fc2.weight @ mlp.fc1.weight @ x).square().sum() / x.square().sum()).item())
    assert np.std(np.log(ratios)) == pytest.approx(isometry.predicted(32, 1), rel=0.15)
    (mlp,) = stack("isometric", 32, 6, lab.generator(0, "test"))[:1]
    values = torch.linalg.svdvals(mlp.fc2.weight @ mlp.fc1.weight)
    assert (values.max() / values.min()).item() == pytest.approx(1)


def test_the_jacobian_is_that_of_the_network(lab):
    network, x = stack("suo", 8, 6, lab.generator(0, "test")), lab.normal(0, "test/x", 8)
    with torch.no_grad():
        found = isometry.jacobian_of(network, x)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(network, x))


def test_tokens_and_networks_add_to_the_spread():
    rows = [{"draw": "suo", "width": 8, "depth": 2, "log_mean": mean, "log_std": 3.0} for mean in (-4.0, 4.0)]
    assert spreads(pd.DataFrame(rows)).item() == pytest.approx(math.sqrt(3**2 + 4**2))
