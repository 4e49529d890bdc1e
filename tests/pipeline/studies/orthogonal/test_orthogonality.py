"""Attention matrices and weights whose orthogonality is known, and an initialisation that the check must catch."""

import math

import pytest
import torch

from osa.modules import OrthogonalSelfAttention
from pipeline.studies.orthogonal import orthogonality
from pipeline.studies.orthogonal.orthogonality import Settings, attention_row, findings, gradient_norms, measure

SETTINGS = Settings(seeds=[0], images=2)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(orthogonality, "MODELS", ("vit_noskip_nonorm", "osa_exact"))


def test_what_begins_orthogonal_and_what_penalties_reach(lab, few):
    tables = measure(SETTINGS, lab)
    check, reach, depth = findings(SETTINGS, tables, lab)
    assert check.verdict == "passes" and "= 108," in check.statement  # 12 (4 − 1)²
    assert (
        [row[0] for row in reach.table.rows]
        == [row[0] for row in depth.table.rows]
        == [
            "ViT (no skip, no LN)",
            "OSA (exact)",
        ]
    )
    of = tables["gradients"].set_index("variant").loc["vit_noskip_nonorm"]
    assert reach.measures[0].value == pytest.approx(1e-6 * of[["AM", "LA", "LF"]].sum() / of["cross_entropy"], rel=1e-4)
    assert depth.figure is not None


def test_other_weights_fail(lab, few, monkeypatch):
    model = lab.model

    def stretched(config, seed):
        vit = model(config, seed)
        for block in vit.blocks:
            block.attention.value.weight.data *= 1.001
            block.mlp.fc1.weight.data *= 1.001
        return vit

    monkeypatch.setattr(lab, "model", stretched)
    check, *_ = findings(SETTINGS, measure(SETTINGS, lab), lab)
    assert [each.is_met for each in check.measures] == [True, False, False]


def test_an_attention_that_is_not_orthogonal_fails(lab, few, monkeypatch):
    mix = OrthogonalSelfAttention.mix
    monkeypatch.setattr(OrthogonalSelfAttention, "mix", lambda *arguments: 1.0001 * mix(*arguments))
    check, *_ = findings(SETTINGS, measure(SETTINGS, lab), lab)
    assert [each.is_met for each in check.measures] == [False, True, True]


@pytest.mark.parametrize(
    "a, expected",
    [
        (torch.eye(5), (0, 0, 1, 5, 0)),
        (torch.eye(5).roll(1, 0), (0, 0, 0, 5, 0)),
        (torch.full((5, 5), 0.2), (1, 0.2, 0.2, 1, math.log(5))),
        (torch.eye(5)[[2] * 5], (5, 1, 0.2, 1, 0)),
        (-torch.eye(5), (0, 0, 0, 5, math.nan)),
    ],
    ids=["own token", "permutation", "uniform", "collapse", "no probabilities"],
)
def test_attention_that_is_known(a, expected):
    row = attention_row(a.double().expand(2, 3, 5, 5))
    assert tuple(row[name] for name in ("penalty", "overlap", "own_token", "rank", "entropy")) == pytest.approx(
        expected, nan_ok=True
    )


def test_gradients_are_those_of_the_sums_over_blocks(lab):
    config = lab.config("vit", {"model": {"depth": 1}})
    images, labels = lab.images()
    model = lab.model(config, 0).double()
    norms = gradient_norms(model, images, labels)
    mlp = model.blocks[0].mlp
    weights = [mlp.fc1.weight, mlp.fc2.weight]
    expected = [4 * w @ (w.mT @ w - torch.eye(w.shape[1])) for w in weights]
    assert norms["LF"] == pytest.approx(torch.cat([each.flatten() for each in expected]).norm().item())
