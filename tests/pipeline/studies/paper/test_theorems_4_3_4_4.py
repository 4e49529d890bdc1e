"""Both bounds on one head, weights and operators for which they do not hold, and the models' layers."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from osa.functional import orthogonal_attention
from pipeline import measures
from pipeline.studies.paper import theorem_4_1, theorems_4_3_4_4
from pipeline.studies.paper.theorems_4_3_4_4 import METHODS, Settings, condition_bound, first_term, measure, slopes


@pytest.fixture
def summary(lab, monkeypatch):
    """Measures and judges one small head, by every method or by one."""
    monkeypatch.setattr(theorems_4_3_4_4, "SIZES", ((5, 8, 2),))
    monkeypatch.setattr(theorems_4_3_4_4, "ALPHAS", (1e-5, 1e-4, 1e-3, 1e-2, 1.0))
    settings = Settings(seeds=[0])

    def judge(method=None):
        tables = measure(settings, lab)
        if method is not None:
            tables["alphas"] = tables["alphas"].query("method == @method")
        return theorems_4_3_4_4.summarise(settings, tables, lab)

    return judge


CHECKS = ("slope", "first_term", "condition")


def held(numbers):
    return [numbers[check]["holds"] for check in CHECKS]


def test_the_code_holds(summary):
    numbers = summary()
    assert all(held(numbers))
    assert 1 <= numbers["head"]["initial"] < numbers["layer"]["initial"]


def gaussian(n, m, *, generator, dtype):
    return 3 * torch.randn(n, m, generator=generator, dtype=dtype)


@pytest.mark.parametrize("method", ["qr", "exact"])
def test_weights_that_are_not_section_4_s_fail_the_bounds_and_not_the_slope(method, summary, monkeypatch):
    monkeypatch.setattr(measures, "stiefel_uniform", gaussian)
    assert held(summary(method)) == [True, False, False]


def test_an_operator_that_is_not_smooth_in_alpha_fails_the_slope(summary, monkeypatch):
    def wrong(query, key, value, *, scale, **method):
        return orthogonal_attention(query, key, value, scale=scale**0.9, **method)

    monkeypatch.setattr(theorems_4_3_4_4, "orthogonal_attention", wrong)
    assert not summary()["slope"]["holds"]


def test_a_stretched_attention_fails_the_condition(summary, monkeypatch):
    """A value projection whose columns have unequal lengths, as no weights of Section 4 have."""

    def wrong(query, key, value, *, scale, **method):
        lengths = torch.linspace(1, 2, value.shape[-1], dtype=value.dtype)
        return orthogonal_attention(query, key, value * lengths, scale=scale, **method)

    monkeypatch.setattr(measures, "orthogonal_attention", wrong)
    assert not summary()["condition"]["holds"]


@pytest.mark.parametrize("method", METHODS)
def test_first_term_is_that_of_theorem_4_1(method):
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(7, 6, generator=generator, dtype=torch.float64), measures.random_head(6, 3, generator)
    expected, _, _ = theorem_4_1.terms_and_jacobian(x, weights, 0.7, method)
    torch.testing.assert_close(first_term(x, weights, 0.7, method=method), expected, rtol=1e-9, atol=1e-12)


def test_condition_bound():
    assert condition_bound(0.1, 0.3) == pytest.approx(1.4 / 0.6)
    assert condition_bound(0.5, 0.5) == math.inf


def test_slopes_of_known_power_laws():
    rows = [(size, alpha, size * alpha**power) for size, power in ((2, 1.5), (7, 1)) for alpha in (1e-3, 1e-2, 1e-1)]
    points = pd.DataFrame(rows, columns=["tokens", "alpha", "first_norm"]).assign(
        method="qr", embed_dim=1, num_heads=1, seed=0
    )
    assert slopes(points).tolist() == pytest.approx([1.5, 1])


def test_condition_of_a_whole_layer(lab, monkeypatch):
    monkeypatch.setattr(theorems_4_3_4_4, "SIZES", ((3, 4, 2),))
    table = measure(Settings(seeds=[1]), lab)["layers"]
    attention = lab.model(lab.config("osa_qr"), 1).double().blocks[2].attention
    total = sum(w_value @ w_out for _, _, w_value, w_out in measures.head_weights(attention))
    own = table[(table["source"] == "osa_qr") & (table["layer"] == 3)]
    assert own["kappa_sum"].item() == pytest.approx(torch.linalg.cond(total).item(), rel=1e-6)
    assert table.groupby(["seed", "layer"])["kappa_sum"].nunique().eq(1).all()  # so that the summary takes each once


def test_trained_layers_are_those_of_the_table(summary, lab):
    """κ(J) is that of the first head of each layer."""
    rows = [
        {"variant": "osa_qr", "seed": 0, "layer": layer, "head": head, "layer_kappa": 10.0 ** (1 + layer)}
        | {"jacobian_kappa": math.nan if head else kappa}
        for layer, kappa in enumerate((2.0, 9.0, 4.0))
        for head in range(3 - layer)
    ]
    assert summary()["head"]["trained"] == {}
    lab.tables["layers"] = pd.DataFrame(rows)
    numbers = summary()
    assert numbers["head"]["trained"] == {"osa_qr": 9.0}


def test_condition_of_a_head_is_that_of_its_dense_jacobian(lab):
    (_, attention, x), *_ = measures.initialised_layers(lab, 0)
    weights = measures.head_weights(attention)[1]
    scale = attention.scale()[1]
    whole = measures.jacobian(lambda x: measures.head(x, weights, scale, **attention.options), x[0])
    values = torch.linalg.svdvals(whole)[: x.shape[1] * weights[2].shape[1]]
    result = measures.head_condition(attention, 1, x[0])
    np.testing.assert_allclose([result["kappa"], result["jacobian_norm"]], [values[0] / values[-1], values[0]], rtol=1e-6)
