"""The bounds hold of what Theorem 3.1 is about, and fail outside."""

import math

import pandas as pd
import pytest
import torch

from osa import reference
from pipeline.measures import matrix_with_condition, orthogonality_error, scale_for_norm
from pipeline.studies.paper import theorem_3_1
from pipeline.studies.paper.theorem_3_1 import Settings, low_rank_exponential, measure, orthogonality_bounds
from tests.osa.helpers import draw, polar_express_basis

SETTINGS = Settings(seeds=[0], sizes=[[7, 2]], iterations=7, norms=[0.1, 3], conditions=[1, 10])


def bases(m, iteration, num_iterations):
    return theorem_3_1._bases(m, num_iterations)[iteration]


def test_low_rank_exponential_is_the_reference_s():
    query, key, _ = (x.detach() for x in draw(11, 3))
    basis = reference.newton_schulz_basis(torch.cat([query, key], -1), num_iterations=3)
    actual = low_rank_exponential(basis, reference.skew(query, key, 0.7))
    torch.testing.assert_close(actual, reference.low_rank_matrix(query, key, 0.7, basis))


def test_newton_schulz_bases_are_the_paper_s():
    query, key, _ = (x.detach() for x in draw(13, 3))
    actual = bases(torch.cat([query, key], -1), "newton_schulz", 6)
    torch.testing.assert_close(actual[-1], reference.newton_schulz_basis(torch.cat([query, key], -1)))
    torch.testing.assert_close(actual[1], reference.newton_schulz_basis(torch.cat([query, key], -1), num_iterations=2))


def test_polar_express_bases_are_those_of_amsel_et_al():
    query, key, _ = (x.detach() for x in draw(13, 3))
    m = torch.cat([query, key], -1)
    for k, basis in enumerate(bases(m, "polar_express", 8), 1):
        torch.testing.assert_close(basis, polar_express_basis(m, k))


def test_polar_express_converges_where_newton_schulz_does_not():
    m = matrix_with_condition(13, 6, 300, generator=torch.Generator().manual_seed(1))
    first, *_, express = bases(m, "polar_express", 8)
    assert orthogonality_error(bases(m, "newton_schulz", 8)[-1]) > 0.5
    assert orthogonality_error(express) < 1e-6
    assert torch.linalg.svdvals(first)[0] > 1.1
    polar = torch.linalg.svd(m, full_matrices=False)
    torch.testing.assert_close(express, polar.U @ polar.Vh, atol=1e-6, rtol=0)


@pytest.mark.parametrize("iterations", [1, 4, 8])
def test_orthogonality_stays_below_the_bounds(iterations):
    query, key, _ = (x[0, 0].detach() for x in draw(13, 3))
    scale = scale_for_norm(query, key, 1.0)
    basis = bases(torch.cat([query, key], -1), "newton_schulz", iterations)[-1]
    error = orthogonality_error(reference.low_rank_matrix(query, key, scale, basis))
    sharp, blunt, general = orthogonality_bounds(basis, torch.tensor(1.0).double())
    assert error <= sharp <= blunt
    assert general <= sharp * (1 + 1e-9)
    wrong = reference.low_rank_matrix(query, key, 3 * scale, 1.05 * basis)  # another S, and singular values beyond 1
    if iterations == 8:
        assert error < 1e-3 < orthogonality_error(wrong)
        assert orthogonality_error(wrong) > sharp


def test_bounds_of_a_known_basis():
    basis = torch.diag(torch.tensor([math.sqrt(0.5), 1.0], dtype=torch.float64))
    skew_norm = torch.tensor(3.0, dtype=torch.float64).log()
    sharp, blunt, general = orthogonality_bounds(basis, skew_norm)
    assert sharp.item() == pytest.approx(4 * 0.25)
    assert blunt.item() == pytest.approx(1)
    assert general.item() == pytest.approx(1)
    assert orthogonality_bounds(math.sqrt(2) * basis, skew_norm)[2].item() == pytest.approx((9 - 1) ** 2 * 2)


def summary(lab):
    return theorem_3_1.summarise(SETTINGS, measure(SETTINGS, lab), lab)


def test_newton_schulz_holds_and_polar_express_does_not(lab):
    numbers = summary(lab)
    for bound in ("eq_10", "eq_11"):
        assert numbers[bound]["holds"] and 0.1 < numbers[bound]["share"]
    express = numbers["polar_express"]
    assert 0 < express["above_10"] < express["cases"] and express["most_above_10"] > 1
    assert express["general"]["holds"]
    assert 0 < numbers["initial"] < 1 and numbers["trained"] == {}


def test_a_wrong_exponential_fails(lab, monkeypatch):
    right = theorem_3_1.exponential
    monkeypatch.setattr(theorem_3_1, "exponential", lambda s: right(2 * s))
    assert not summary(lab)["eq_10"]["holds"]


def test_an_iteration_that_overshoots_fails(lab, monkeypatch):
    right = theorem_3_1.iterates
    monkeypatch.setattr(theorem_3_1, "iterates", lambda m, steps: [1.4 * basis for basis in right(m, steps)])
    assert not summary(lab)["eq_10"]["holds"]


def test_trained_layers_are_those_of_the_table(lab):
    rows = [("osa_ns", 0, 0.1), ("osa_ns", 0, 0.3), ("osa_ns", 1, 0.5), ("osa_exact", 0, 1e-7)]
    lab.tables = {"layers": pd.DataFrame(rows, columns=["variant", "seed", "error_max"])}
    trained = summary(lab)["trained"]
    assert (trained["osa_ns"].mean, trained["osa_ns"].max, trained["osa_ns"].n) == (0.4, 0.5, 2)
    assert trained["osa_exact"].max == 1e-7
