"""The bounds hold for random queries and keys, and a wrong scale or norm is caught."""

import pytest
import torch

from osa.functional import orthogonal_attention_matrix
from pipeline.studies.orthogonal import perturbation
from pipeline.studies.orthogonal.perturbation import Settings, measure, softmax_rows, summarise

SETTINGS = Settings(seeds=[0], images=1)
CHECKS = ("stated", "quarter", "attained", "orthogonal")


def holds(lab):
    summary = summarise(SETTINGS, measure(SETTINGS, lab), lab)
    return [summary[name]["holds"] for name in CHECKS]


@pytest.fixture
def gaussian_alone(monkeypatch):
    monkeypatch.setattr(perturbation, "MODELS", ())


def test_the_bounds_hold_and_a_quarter_is_reached(lab, monkeypatch):
    monkeypatch.setattr(perturbation, "MODELS", ("vit", "osa_exact"))
    summary = summarise(SETTINGS, measure(SETTINGS, lab), lab)
    assert all(summary[name]["holds"] for name in CHECKS)
    assert 0.999996 < summary["attained"]["value"] <= 1 and 0.5 < summary["orthogonal"]["value"]
    assert summary["typical"].keys() == {"Gaussian", "vit"}


def test_a_random_direction_is_never_above_the_worst_one():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 11, 3, generator=generator, dtype=torch.float64)
    worst, smallest, *_ = softmax_rows(query, key, generator)
    assert 0.1 * worst["largest"] < smallest["largest"] <= worst["largest"] * 1.01 < 0.25
    assert worst["epsilon"] == 0 and 0 < worst["centred_keys"] < 1


def test_another_scale_of_orthogonal_attention_breaks_its_bound(lab, gaussian_alone, monkeypatch):
    wrong = lambda query, key, scale: orthogonal_attention_matrix(query, key, scale=1.1 * scale)  # noqa: E731
    monkeypatch.setattr(perturbation, "orthogonal_attention_matrix", wrong)
    assert holds(lab) == [True, True, True, False]


def test_a_softmax_that_is_too_sharp_breaks_the_quarter(lab, gaussian_alone, monkeypatch):
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, dim: softmax(5 * x, dim))
    assert not holds(lab)[1]
