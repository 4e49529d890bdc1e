"""Attention matrices and weights whose orthogonality is known, and initialisations that the check must catch."""

import math

import pytest
import torch

from osa.modules import OrthogonalSelfAttention
from pipeline.studies.orthogonal import orthogonality
from pipeline.studies.orthogonal.orthogonality import Settings, attention_row, gradient_norms, measure, summarise

SETTINGS = Settings(seeds=[0], images=2)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(orthogonality, "MODELS", ("vit_noskip_nonorm", "osa_exact"))


def holds(lab):
    return [check["holds"] for check in summarise(SETTINGS, measure(SETTINGS, lab), lab)["checks"].values()]


def test_osa_begins_orthogonal_and_penalties_have_a_share_of_the_gradient(lab):
    tables = measure(SETTINGS, lab)
    summary = summarise(SETTINGS, tables, lab)
    assert all(check["holds"] for check in summary["checks"].values())
    row, _ = summary["models"]
    norms = tables["gradients"].set_index("variant").loc["vit_noskip_nonorm"]
    assert row["together"] == pytest.approx(1e-6 * norms[["AM", "LA", "LF"]].sum() / norms["cross_entropy"], rel=1e-4)
    assert max(row["first"].values()) * row["equal_at"] == pytest.approx(1e-6)


def test_other_weights_and_another_attention_fail(lab, monkeypatch):
    model, mix = lab.model, OrthogonalSelfAttention.mix

    def stretched(config, seed):
        vit = model(config, seed)
        for block in vit.blocks:
            block.attention.value.weight.data *= 1.001
            block.mlp.fc1.weight.data *= 1.001
        return vit

    with monkeypatch.context() as patch:
        patch.setattr(lab, "model", stretched)
        assert holds(lab) == [True, False, False]
    monkeypatch.setattr(OrthogonalSelfAttention, "mix", lambda *arguments: 1.0001 * mix(*arguments))
    assert holds(lab) == [False, True, True]


@pytest.mark.parametrize(
    "a, expected",
    [
        (torch.eye(5).roll(1, 0), (0, 0, 0, 5, 0)),
        (torch.full((5, 5), 0.2), (1, 0.2, 0.2, 1, math.log(5))),
        (torch.eye(5)[[2] * 5], (5, 1, 0.2, 1, 0)),
        (-torch.eye(5), (0, 0, 0, 5, math.nan)),
    ],
    ids=["permutation", "uniform", "collapse", "no probabilities"],
)
def test_attention_that_is_known(a, expected):
    row = attention_row(a.double().expand(2, 3, 5, 5))
    values = tuple(row[name] for name in ("penalty", "overlap", "own_token", "rank", "entropy"))
    assert values == pytest.approx(expected, nan_ok=True)


def test_gradients_are_those_of_the_sums_over_blocks(lab):
    images, labels = lab.images()
    model = lab.model(lab.config("vit", {"model": {"depth": 2}}), 0).double()
    norms = gradient_norms(model, images, labels)
    weights = [w for block in model.blocks for w in (block.mlp.fc1.weight, block.mlp.fc2.weight)]
    expected = [4 * w @ (w.mT @ w - torch.eye(w.shape[1])) for w in weights]
    assert norms["LF"] == pytest.approx(torch.cat([each.flatten() for each in expected]).norm().item())
