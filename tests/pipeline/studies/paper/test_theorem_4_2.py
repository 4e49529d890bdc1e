"""Singular values of W̃, and weights that are not Section 4's, which the check must catch."""

from contextlib import nullcontext

import pytest
import torch

import osa.init
from osa.init import stiefel_uniform
from pipeline.studies.paper import theorem_4_2
from pipeline.studies.paper.theorem_4_2 import Settings, measure


def summary(lab):
    return theorem_4_2.summarise(Settings(seeds=[0]), measure(Settings(seeds=[0]), lab), lab)


def gaussian(n, m, *, generator, dtype=None):
    return torch.randn(n, m, generator=generator, dtype=dtype) / n**0.5


def halves(n, m, *, generator, dtype=None):
    """W^Q and W^K orthonormal each, but not together."""
    return torch.cat([stiefel_uniform(n, m // 2, generator=generator, dtype=dtype) for _ in range(2)], -1)


def test_the_code_holds(lab):
    numbers = summary(lab)
    assert numbers["float32"]["holds"] and numbers["float64"]["holds"]


@pytest.mark.parametrize("draw", [gaussian, halves])
def test_other_weights_fail(draw, lab, monkeypatch):
    monkeypatch.setattr(osa.init, "stiefel_uniform", draw)
    numbers = summary(lab)
    assert not numbers["float32"]["holds"] and not numbers["float64"]["holds"]


def test_weights_rounded_to_float32_fail_in_float64(lab, monkeypatch):
    monkeypatch.setattr(theorem_4_2, "float64", nullcontext)
    numbers = summary(lab)
    assert numbers["float32"]["holds"] and not numbers["float64"]["holds"]
