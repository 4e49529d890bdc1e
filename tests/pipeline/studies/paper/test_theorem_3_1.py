"""The bounds hold of what Theorem 3.1 is about, and are seen to fail of what it is not."""

import math

import pandas as pd
import pytest
import torch

from osa import reference
from pipeline.measures import matrix_with_condition, orthogonality_error, scale_for_norm
from pipeline.report import figures
from pipeline.studies import CHECK, FAILS, OBSERVATION, PASSES
from pipeline.studies.paper import theorem_3_1
from pipeline.studies.paper.theorem_3_1 import findings, low_rank_exponential, measure, orthogonality_bounds
from tests.osa.helpers import draw, polar_express_basis


def bases(m, iteration, num_iterations):
    return theorem_3_1._bases(m, num_iterations)[iteration]


def test_low_rank_exponential_is_the_reference_s():
    query, key, _ = (x.detach() for x in draw(11, 3))
    basis = reference.newton_schulz_basis(query, key, num_iterations=3)
    actual = low_rank_exponential(basis, reference.skew(query, key, 0.7))
    torch.testing.assert_close(actual, reference.low_rank_matrix(query, key, 0.7, basis))


def test_newton_schulz_bases_are_the_paper_s():
    query, key, _ = (x.detach() for x in draw(13, 3))
    actual = bases(torch.cat([query, key], -1), "newton_schulz", 6)
    torch.testing.assert_close(actual[-1], reference.newton_schulz_basis(query, key))
    torch.testing.assert_close(actual[1], reference.newton_schulz_basis(query, key, num_iterations=2))


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


def found(lab):
    settings = lab.params.studies["theorem_3_1"]
    return findings(settings, measure(settings, lab), lab)


def test_what_is_found(lab):
    check, express, layers = found(lab)
    assert (check.kind, check.verdict) == (CHECK, PASSES)
    assert all(0.1 < measure.value < 1 for measure in check.measures)
    assert len(figures.png(check.figure)) > 1000
    assert express.kind == layers.kind == OBSERVATION
    values = {measure.what: measure.value for measure in express.measures}
    assert values["Cases above Eq. 10"] > 0 and values["Cases above Eq. 11"] > 0
    assert values["Measured over Eq. 10 with ‖B‖₂² ‖S‖₂ for ‖S‖₂, + rounding, largest"] < 1
    assert 0 < layers.measures[0].value <= layers.measures[1].value
    assert "not evaluated" in layers.remark


def test_a_wrong_exponential_fails(lab, monkeypatch):
    right = theorem_3_1.exponential
    monkeypatch.setattr(theorem_3_1, "exponential", lambda s: right(2 * s))
    assert found(lab)[0].verdict == FAILS


def test_an_iteration_that_overshoots_fails(lab, monkeypatch):
    """What Polar Express does is not hidden where Newton–Schulz is measured."""
    right = theorem_3_1.iterates
    monkeypatch.setattr(theorem_3_1, "iterates", lambda m, steps: [1.4 * basis for basis in right(m, steps)])
    check, *_ = found(lab)
    assert check.verdict == FAILS


def test_trained_layers_are_those_of_the_table(lab):
    norm = math.log(3)  # Eq. 11 is 1 there
    rows = [("osa_ns", 0, 0.1, norm), ("osa_ns", 0, 0.3, norm), ("osa_ns", 1, 0.5, norm), ("osa_exact", 0, 1e-7, norm)]
    lab.tables = {"layers": pd.DataFrame(rows, columns=["variant", "seed", "error_max", "norm_max"])}
    *_, layers = found(lab)
    trained = [measure for measure in layers.measures if "trained" in measure.what]
    assert [(measure.value, measure.n) for measure in trained] == [(0.4, 2), (1e-7, 1), (0.4, 2)]
    assert "Eq. 11" in trained[2].what and trained[2].what.startswith(lab.label("osa_ns"))
    assert not layers.remark
