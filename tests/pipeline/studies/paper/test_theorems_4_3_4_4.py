"""Both bounds on one head, weights and operators for which they do not hold, and what is said of the models' layers."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from osa.functional import orthogonal_attention
from pipeline import measures
from pipeline.studies.paper import theorem_4_1, theorems_4_3_4_4
from pipeline.studies.paper.theorems_4_3_4_4 import METHODS, Settings, condition_bound, findings, first_term, measure, slopes


@pytest.fixture
def found(lab, monkeypatch):
    """Measures and judges one small head."""
    monkeypatch.setattr(theorems_4_3_4_4, "SIZES", ((5, 8, 2),))
    monkeypatch.setattr(theorems_4_3_4_4, "ALPHAS", (1e-5, 1e-4, 1e-3, 1e-2, 1.0))
    return lambda: findings(Settings(seeds=[0]), measure(Settings(seeds=[0]), lab), lab)


def met(finding, what):
    return [each.is_met for each in finding.measures if what in each.what]


def test_the_code_passes(found):
    check, heads, layers = found()
    assert check.verdict == "passes"
    assert len(check.measures) == 3 + 3 + 2
    assert not heads.verdict and not layers.verdict


def gaussian(n, m, *, generator, dtype):
    return 3 * torch.randn(n, m, generator=generator, dtype=dtype)


def test_weights_that_are_not_section_4_s_fail_the_bounds_and_not_the_slope(found, monkeypatch):
    monkeypatch.setattr(measures, "stiefel_uniform", gaussian)
    check, *_ = found()
    assert check.verdict == "fails"
    assert all(met(check, "slope"))
    assert not any(met(check, "κ(J)"))
    assert not any(met(check, "over Cα"))


def test_an_operator_that_is_not_smooth_in_alpha_fails_the_slope(found, monkeypatch):
    def wrong(query, key, value, *, scale, **method):
        return orthogonal_attention(query, key, value, scale=scale**0.9, **method)

    monkeypatch.setattr(theorems_4_3_4_4, "orthogonal_attention", wrong)
    check, *_ = found()
    assert not any(met(check, "slope"))


def test_a_stretched_attention_fails_the_condition(found, monkeypatch):
    """A value projection whose columns have unequal lengths, as no weights of Section 4 have."""

    def wrong(query, key, value, *, scale, **method):
        lengths = torch.linspace(1, 2, value.shape[-1], dtype=value.dtype)
        return orthogonal_attention(query, key, value * lengths, scale=scale, **method)

    monkeypatch.setattr(measures, "orthogonal_attention", wrong)
    check, *_ = found()
    assert not any(met(check, "κ(J)"))


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
    points = pd.DataFrame(rows, columns=["tokens", "alpha", "first_norm"]).assign(embed_dim=1, num_heads=1, seed=0)
    assert slopes(points).tolist() == pytest.approx([1.5, 1])


def test_condition_of_a_whole_layer(lab, monkeypatch):
    monkeypatch.setattr(theorems_4_3_4_4, "SIZES", ((3, 4, 2),))
    table = measure(Settings(seeds=[1]), lab)["layers"]
    attention = lab.model(lab.config("osa_qr"), 1).double().blocks[2].attention
    total = sum(w_value @ w_out for _, _, w_value, w_out in measures.head_weights(attention))
    own = table[(table["source"] == "osa_qr") & (table["layer"] == 3)]
    assert own["kappa_sum"].item() == pytest.approx(torch.linalg.cond(total).item(), rel=1e-6)
    assert table.groupby(["seed", "layer"])["kappa_sum"].nunique().eq(1).all()  # what `whole_layers` builds on


def layers(*kappas):
    """The table `layers` of one trained model: κ(J) of the first head of each layer."""
    rows = [
        {"variant": "osa_qr", "seed": 0, "layer": layer, "head": head, "alpha": 0.2, "layer_kappa": 50.0 + layer}
        | {"jacobian_kappa": math.nan if head else kappa}
        for layer, kappa in enumerate(kappas)
        for head in range(2)
    ]
    return pd.DataFrame(rows)


def test_trained_layers_are_shown_where_they_are(found, lab):
    _, heads, whole = found()
    assert "not evaluated" in heads.remark and "not evaluated" in whole.remark
    assert not any("trained" in each.what for each in (*heads.measures, *whole.measures))
    lab.tables["layers"] = layers(2.0, 9.0, 4.0, 5.0)  # one layer more than the recipe has
    _, heads, whole = found()
    assert not heads.remark and heads.sources and whole.sources
    assert [each.value for each in heads.measures if "trained" in each.what] == [9.0]
    assert heads.table.rows[1][1:3] == ["0.1 → 0.2", heads.table.rows[1][2]] and heads.table.rows[1][2].endswith(" → 9")
    assert heads.table.rows[3][1:] == ["– → 0.2", "– → 5", *["– → –"] * 4]
    assert whole.table.rows[1] == ["OSA (QR), trained", "4", "50", "51.5", "53"]


def test_tables_of_an_older_evaluation_leave_the_measure_out(found, lab):
    lab.tables["layers"] = layers(2.0, 9.0, 4.0)[["variant", "seed", "layer", "head", "alpha"]]
    _, heads, _ = found()
    assert "not evaluated" in heads.remark
    assert heads.table.rows[0][1] == "0.1"


def test_condition_of_a_head_is_that_of_its_dense_jacobian(lab):
    (_, attention, x), *_ = measures.initialised_layers(lab, 0)
    weights = measures.head_weights(attention)[1]
    scale = attention.scale()[1]
    whole = measures.jacobian(lambda x: measures.head(x, weights, scale, **attention.options), x[0])
    values = torch.linalg.svdvals(whole)[: x.shape[1] * weights[2].shape[1]]
    result = measures.head_condition(attention, 1, x[0])
    np.testing.assert_allclose([result["kappa"], result["jacobian_norm"]], [values[0] / values[-1], values[0]], rtol=1e-6)
