"""Singular values of W̃, and weights that are not Section 4's, which the check must catch."""

from contextlib import nullcontext

import pandas as pd
import pytest
import torch

import osa.init
from osa.init import stiefel_uniform
from pipeline.studies.paper import theorem_4_2
from pipeline.studies.paper.theorem_4_2 import Settings, findings, measure


def found(lab):
    return findings(Settings(seeds=[0]), measure(Settings(seeds=[0]), lab), lab)


def gaussian(n, m, *, generator, dtype=None):
    return torch.randn(n, m, generator=generator, dtype=dtype) / n**0.5


def halves(n, m, *, generator, dtype=None):
    """W^Q and W^K orthonormal each, but not together."""
    return torch.cat([stiefel_uniform(n, m // 2, generator=generator, dtype=dtype) for _ in range(2)], -1)


def test_the_code_passes(lab):
    check, others = found(lab)
    assert check.verdict == "passes"
    assert [each.what.split(":")[0] for each in check.measures] == ["float32", "float64"]
    assert check.figure is not None
    (xavier,) = others.measures
    assert xavier.value > 1.5


@pytest.mark.parametrize("draw", [gaussian, halves])
def test_other_weights_fail(draw, lab, monkeypatch):
    monkeypatch.setattr(osa.init, "stiefel_uniform", draw)
    check, _ = found(lab)
    assert check.verdict == "fails"
    assert not any(each.is_met for each in check.measures)


def test_weights_rounded_to_float32_fail_in_float64(lab, monkeypatch):
    monkeypatch.setattr(theorem_4_2, "float64", nullcontext)
    check, _ = found(lab)
    assert [each.is_met for each in check.measures] == [True, False]


def test_trained_layers_are_shown_where_they_are(lab):
    _, without = found(lab)
    assert "not evaluated" in without.remark and not without.sources
    kappas = {"osa_qr": [1.5, 2.5, 7.0], "osa_ns": [3.0, 3.0, float("nan")]}
    rows = [(name, 0, 0, head, kappa) for name, own in kappas.items() for head, kappa in enumerate(own)]
    lab.tables["layers"] = pd.DataFrame(rows, columns=["variant", "seed", "layer", "head", "weight_kappa"])
    _, trained = found(lab)
    assert [each.value for each in trained.measures[1:]] == [2.5, 3.0]
    assert [row[:2] for row in trained.table.rows[1:]] == [["OSA (QR), trained", "3"], ["OSA (NS), trained", "2"]]
    assert not trained.remark and trained.sources
