"""The spectrum is kept by what is orthogonal, and lost by what is not."""

import pytest
import torch
import torch.nn.functional as F

from osa.functional import orthogonal_attention
from osa.init import stiefel_uniform
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.report import figures
from pipeline.studies.paper import theorem_2_2
from pipeline.studies.paper.theorem_2_2 import Settings, attention_stack, effective_rank, kernel_eigenvalues, measure

SETTINGS = Settings(seeds=[0], depths=[0, 1, 4], alphas=[0.5])


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


def test_the_code_holds_and_softmax_loses_rank(lab):
    tables = measure(SETTINGS, lab)
    numbers = theorem_2_2.summarise(SETTINGS, tables, lab)
    assert numbers["float64"]["holds"] and numbers["float64"]["value"] < 1e-12
    assert numbers["rank"]["softmax"] < 1.1 < numbers["rank"]["first"]
    assert numbers["newton_schulz"] > 1e-6
    once, again = (figures.svg(theorem_2_2.draw(SETTINGS, tables, lab)) for _ in range(2))
    assert once == again


@pytest.mark.parametrize("tokens", ["gaussian", "mnist"])
def test_eigenvalues_in_the_files_are_those_of_the_tokens(tokens, lab):
    """At depth 0 the trace is ‖X‖²_F: the sum of the eigenvalues of X Xᵀ."""
    tables = measure(SETTINGS, lab)
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
    assert not theorem_2_2.summarise(SETTINGS, measure(SETTINGS, lab), lab)["float64"]["holds"]


@pytest.mark.parametrize("depths", [[1, 2], [0, 4, 2], [0, 1, 1]])
def test_depths_that_do_not_rise_from_0_are_refused(depths):
    with pytest.raises(UserError, match="depths must rise from 0"):
        params.validate(Settings, {"seeds": [0], "depths": depths}, "params.yaml")
