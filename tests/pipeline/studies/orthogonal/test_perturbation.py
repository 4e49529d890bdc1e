"""The bounds hold for random queries and keys, and a wrong scale or norm is caught."""

import pytest
import torch

from osa.functional import orthogonal_attention_matrix
from pipeline.studies.orthogonal import perturbation
from pipeline.studies.orthogonal.perturbation import SIZES, Settings, findings, measure, softmax_rows

SETTINGS = Settings(seeds=[0], images=1)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(perturbation, "MODELS", ("vit", "osa_exact"))


def test_the_bounds_hold_and_a_quarter_is_reached(lab, few):
    check, typical = findings(SETTINGS, measure(SETTINGS, lab), lab)
    assert check.verdict == "passes" and len(check.measures) == 4 and check.figure is not None
    assert 0.999996 < check.measures[2].value <= 1
    assert 0.5 < check.measures[3].value  # the bound of orthogonal attention is nearly reached
    assert [row[0] for row in typical.table.rows] == ["Gaussian", "ViT, as initialised"]


def test_the_same_seeds_give_the_same_numbers(lab, few, monkeypatch):
    monkeypatch.setattr(perturbation, "MODELS", ())
    once, again = (measure(SETTINGS, lab) for _ in range(2))
    assert all(once[name].equals(again[name]) for name in once)


def test_a_random_direction_is_never_above_the_worst_one():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 11, 3, generator=generator, dtype=torch.float64)
    worst, smallest, *_ = softmax_rows(query, key, generator)
    assert 0.1 * worst["largest"] < smallest["largest"] <= worst["largest"] * 1.01 < 0.25
    assert worst["epsilon"] == 0 and 0 < worst["centred_keys"] < 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda query, key, scale: orthogonal_attention_matrix(query, key, scale=1.1 * scale),
        lambda query, key, scale: torch.eye(query.shape[-2]) + scale * (query @ key.mT - key @ query.mT).square(),
    ],
    ids=["scale", "no exponential"],
)
def test_another_attention_breaks_the_bound(lab, monkeypatch, wrong):
    monkeypatch.setattr(perturbation, "MODELS", ())
    monkeypatch.setattr(perturbation, "orthogonal_attention_matrix", wrong)
    check, _ = findings(SETTINGS, measure(SETTINGS, lab), lab)
    assert check.verdict == "fails" and [each.is_met for each in check.measures] == [True, True, True, False]


def test_a_softmax_that_is_too_sharp_breaks_the_quarter(lab, monkeypatch):
    monkeypatch.setattr(perturbation, "MODELS", ())
    monkeypatch.setattr(perturbation, "SIZES", (*SIZES, (2, 1)))
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, dim: softmax(5 * x, dim))
    check, _ = findings(SETTINGS, measure(SETTINGS, lab), lab)
    assert check.verdict == "fails" and not check.measures[1].is_met
