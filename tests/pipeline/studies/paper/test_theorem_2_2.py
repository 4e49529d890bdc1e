"""The spectrum is kept by what is orthogonal, and lost by what is not."""

import pytest
import torch
import torch.nn.functional as F

from osa.functional import orthogonal_attention
from osa.init import stiefel_uniform
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.report import figures
from pipeline.studies import CHECK, FAILS, OBSERVATION, PASSES
from pipeline.studies.paper import theorem_2_2
from pipeline.studies.paper.theorem_2_2 import attention_stack, effective_rank, findings, kernel_eigenvalues, measure
from tests.pipeline.synthetic import write_params


def gaussian(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_effective_rank_of_known_spectra():
    assert effective_rank(torch.ones(7)) == pytest.approx(7)
    assert effective_rank(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1)


def test_eigenvalues_are_those_of_the_kernel():
    x = gaussian(5, 3)
    torch.testing.assert_close(kernel_eigenvalues(x), torch.linalg.eigvalsh(x @ x.mT).flip(0)[:3])


def spectra(attention, *, skip=False, are_orthogonal=True, depth=24):
    x, d = gaussian(13, 8), 8
    weights = [[stiefel_uniform(d, d, dtype=torch.float64) for _ in range(3)] for _ in range(depth)]
    if not are_orthogonal:
        weights = [(q, k, w + 1e-3 * torch.eye(d)) for q, k, w in weights]
    *_, last = attention_stack(x, weights, attention, skip)
    return kernel_eigenvalues(x), kernel_eigenvalues(last)


def orthogonal(query, key, value):
    return orthogonal_attention(query, key, value, scale=0.5)


def test_an_orthogonal_stack_keeps_its_spectrum():
    first, last = spectra(orthogonal)
    torch.testing.assert_close(last, first, rtol=1e-10, atol=0)


def test_other_stacks_do_not_keep_it():
    first, last = spectra(orthogonal, are_orthogonal=False)
    assert (last / first - 1).abs().max() > 1e-6
    first, last = spectra(orthogonal, skip=True)
    assert (last / first - 1).abs().max() > 1
    first, last = spectra(F.scaled_dot_product_attention)
    assert effective_rank(last) < 1.1 < 3 < effective_rank(first)


def found(lab):
    settings = lab.params.studies["theorem_2_2"]
    return findings(settings, measure(settings, lab), lab)


def test_what_is_found(lab):
    check, softmax, newton_schulz = found(lab)
    assert (check.kind, check.verdict) == (CHECK, PASSES)
    assert all(measure.value < 1e-12 for measure in check.measures)
    assert "effective rank" in figures.svg(check.figure)
    assert softmax.kind == newton_schulz.kind == OBSERVATION
    ranks = [measure.value for measure in softmax.measures if "at depth 4" in measure.what and "no skip" in measure.what]
    assert len(ranks) == 2 and max(ranks) < 1.1
    assert all(measure.value > 1e-6 for measure in newton_schulz.measures)


def test_the_figure_depends_on_the_tables_alone(lab):
    settings = lab.params.studies["theorem_2_2"]
    tables = measure(settings, lab)
    once, again = (figures.svg(findings(settings, tables, lab)[0].figure) for _ in range(2))
    assert once == again


@pytest.mark.parametrize("tokens", ["gaussian", "mnist"])
def test_eigenvalues_in_the_files_are_those_of_the_tokens(tokens, lab):
    """At depth 0 the trace is ‖X‖²_F: the sum of the eigenvalues of X Xᵀ."""
    tables = measure(lab.params.studies["theorem_2_2"], lab)
    image = theorem_2_2._image_tokens(lab, 0)
    x = image if tokens == "mnist" else lab.normal(0, "theory/kernel", *image.shape)
    rows = tables["summary"].query("tokens == @tokens and depth == 0 and seed == 0")
    assert rows["trace"].tolist() == pytest.approx([x.square().sum().item()] * len(rows))
    spectrum = tables["spectra"].query("depth == 0 and stack == 'softmax'")["eigenvalue"]
    assert tokens == "gaussian" or spectrum.sum() == pytest.approx(x.square().sum().item())


def first_order(query, key, value, *, scale, method, **_):
    """V + S V: the first two terms of exp(S) V."""
    half = scale * query @ key.mT
    return value + (half - half.mT) @ value


def too_large(*inputs, **options):
    return (1 + 1e-9) * orthogonal_attention(*inputs, **options)


@pytest.mark.parametrize("wrong", [first_order, too_large])
def test_attention_that_is_not_orthogonal_fails(wrong, lab, monkeypatch):
    monkeypatch.setattr(theorem_2_2, "orthogonal_attention", wrong)
    check, *_ = found(lab)
    assert check.verdict == FAILS
    assert not any(measure.is_met for measure in check.measures)


@pytest.mark.parametrize("depths", [[1, 2], [0, 4, 2], [0, 1, 1]])
def test_depths_that_do_not_rise_from_0_are_refused(depths, tmp_path):
    write_params(tmp_path, lambda raw: raw["theorem_2_2"].update(depths=depths))
    with pytest.raises(UserError, match="theorem_2_2.*depths must rise from 0"):
        params.load(tmp_path / "params.yaml")
