"""The measures against dense Jacobians, and a verdict that follows the attention and not the MLPs."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import osa.models
from osa.modules import OrthogonalSelfAttention, SoftmaxSelfAttention
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.lab import float64
from pipeline.measures import jacobian, norm
from pipeline.studies import Measure
from pipeline.studies.paper import trainability
from pipeline.studies.paper.trainability import (
    MLPS,
    MODELS,
    SOFTMAX,
    Settings,
    findings,
    frobenius_norm,
    measure,
    per_block,
    spectral_norm,
)

SMALL = {"depths": [2, 4], "gradient_images": 2, "samples": 4, "power_iterations": 3}


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model_and_image(lab, variant, seed=0):
    with float64():
        model = lab.model(lab.config(variant), seed)
    return model, lab.images()[0][:1]


def found(lab, seeds):
    settings = Settings(seeds=seeds, **SMALL)
    tables = measure(settings, lab)
    return tables, {finding.id: finding for finding in findings(settings, tables, lab)}


def test_one_seed_decides_nothing(lab):
    tables, by_id = found(lab, [0])
    assert list(by_id) == ["trainability", "mlp_initialisation", "vanishing_gradients", "attention_alone"]
    claim = by_id["trainability"]
    assert claim.verdict == "undecided"
    assert all("1 run" in each.note for each in claim.measures) and len(claim.measures) == 8
    assert list(tables["networks"].groupby(["variant", "mlp"], sort=False).groups) == MODELS
    assert [tuple(row[:2]) for row in claim.table.rows] == [(lab.label(variant), MLPS[mlp]) for variant, mlp in MODELS]
    assert tables["attentions"]["variant"].nunique() == 5
    assert all(math.isfinite(each.value) for finding in by_id.values() for each in finding.measures)
    assert all(math.isnan(each.low) for each in by_id["mlp_initialisation"].measures)


@pytest.mark.parametrize("worse, verdict", [(SoftmaxSelfAttention, "supported"), (OrthogonalSelfAttention, "not supported")])
def test_the_verdict_follows_the_attention(worse, verdict, lab, monkeypatch):
    """An attention that loses most of its signal in each block makes the claim come out one way or the other."""
    mix = worse.mix
    monkeypatch.setattr(worse, "mix", lambda *arguments: 0.3 * mix(*arguments))
    only(monkeypatch, "osa_ns")
    _, by_id = found(lab, [0, 1, 2])
    assert {each.verdict for each in by_id["trainability"].measures if "kept per block" in each.what} == {verdict}


def test_the_verdict_does_not_follow_the_mlps(lab, monkeypatch):
    """With one attention in both places there is nothing to support, though SUO's MLPs keep more than Xavier's here."""
    only(monkeypatch, SOFTMAX)
    xavier = osa.models.MLP_INIT["xavier"]()
    monkeypatch.setitem(osa.models.MLP_INIT, "xavier", lambda **_: lambda mlp, **options: shrunken(xavier, mlp, **options))
    _, by_id = found(lab, [0, 1, 2])
    assert by_id["trainability"].verdict == "undecided"
    gain, *_ = by_id["mlp_initialisation"].measures
    assert gain.low > 3


def only(monkeypatch, variant):
    """Leaves this attention and softmax, and only the networks."""
    monkeypatch.setattr(trainability, "OSA", (variant,))
    monkeypatch.setattr(trainability, "MODELS", list(itertools.product(dict.fromkeys((variant, SOFTMAX)), MLPS)))
    monkeypatch.setattr(trainability, "attention_jacobian", lambda *_: {"spectral": 1.0, "gain": 1.0})


@torch.no_grad()
def shrunken(initialise, mlp, **options):
    initialise(mlp, **options)
    mlp.fc2.weight.mul_(0.1)


def test_models_have_the_mlps_that_they_are_named_by(lab):
    for mlp in MLPS:
        model = lab.model(lab.config(SOFTMAX, {"variant": {"init": mlp}}), 0)
        weight = model.blocks[0].mlp.fc2.weight  # (d, hidden)
        is_orthonormal = torch.allclose(weight @ weight.mT, torch.eye(len(weight)), atol=1e-5)
        assert is_orthonormal == (mlp == "osa")


@pytest.mark.parametrize("variant", ["osa_qr", "vit", "vit_noskip_nonorm"])
def test_jacobian_of_the_logits_is_the_model_s(variant, lab):
    """The positions are added to X₀, so that the gradient by them is that by X₀."""
    model, image = model_and_image(lab, variant)
    rows = [torch.autograd.grad(logit, model.position_embedding, retain_graph=True)[0] for logit in model(image)[0]]
    values = torch.linalg.svdvals(torch.stack(rows).flatten(1))
    result = trainability.logits_jacobian(model, model.tokens(image)[0].detach())
    expected = {"logits_spectral": values[0], "logits_frobenius": values.norm(), "logits_kappa": values[0] / values[-1]}
    assert result == {key: pytest.approx(value.item()) for key, value in expected.items()}


@pytest.mark.parametrize("variant", ["osa_qr", "vit"])
def test_jacobian_of_the_attention_alone_is_that_of_a_model_without_mlps(variant, lab):
    model, image = model_and_image(lab, variant)
    x = model.tokens(image)[0].detach()
    settings = Settings(seeds=[0], depths=[2, 4], samples=100, power_iterations=60)
    result = trainability.attention_jacobian(model, x, settings, torch.Generator().manual_seed(0))
    for block in model.blocks:
        block.mlp = Nothing() if block.skip else nn.Identity()
    dense = jacobian(nn.Sequential(*model.blocks), x)
    assert result["spectral"] == pytest.approx(norm(dense).item(), rel=1e-2)
    assert result["gain"] == pytest.approx(dense.norm().item() / math.sqrt(x.numel()), rel=0.05)


class Nothing(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


def test_gradients_of_the_first_and_the_last_block(lab):
    model, image = model_and_image(lab, "osa_qr")
    label = torch.tensor([3])
    result = trainability.gradient_norms(model, image, label)
    loss = nn.functional.cross_entropy(model(image), label)
    for name, block in (("first_gradient", model.blocks[0]), ("last_gradient", model.blocks[-1])):
        gradients = torch.autograd.grad(loss, [*block.parameters()], retain_graph=True, allow_unused=True)
        expected = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).norm()
        assert result[name] == pytest.approx(expected.item())


def test_matrix_free_norms_are_those_of_the_dense_jacobian():
    left, x = gaussian(7, 5, seed=1), gaussian(5, 4)
    function = lambda x: (left @ x).sin() ** 2  # noqa: E731
    dense, generator = jacobian(function, x), torch.Generator().manual_seed(0)
    spectral = spectral_norm(function, x, num_iterations=60, generator=generator)
    assert spectral == pytest.approx(norm(dense).item(), rel=1e-3)
    frobenius = frobenius_norm(function, x, num_samples=4000, generator=generator)
    assert frobenius == pytest.approx(dense.norm().item(), rel=0.03)


def test_factors_of_known_decays():
    rows = [
        {"variant": "a", "mlp": mlp, "seed": seed, "depth": depth, "gain": 5 * (factor + 0.1 * seed) ** depth}
        for mlp, factor in (("osa", 0.5), ("xavier", 0.3))
        for depth in (2, 4, 8)
        for seed in (0, 1)
    ]
    logarithms = per_block(pd.DataFrame(rows), "gain")
    assert list(logarithms) == [("a", "osa"), ("a", "xavier")]
    assert [math.exp(value) for own in logarithms.values() for value in own] == pytest.approx([0.5, 0.6, 0.3, 0.4])


@pytest.mark.parametrize("high, end", [(0.015, "at most 1.5% more."), (-0.01, "Xavier MLPs."), (math.nan, "Xavier MLPs.")])
def test_what_a_block_keeps_is_told_of_both_attentions(lab, high, end):
    kept = {
        (variant, mlp): np.log([0.5 if variant == trainability.SOFTMAX else 0.25])
        for variant, mlp in itertools.product((*trainability.OSA, trainability.SOFTMAX), trainability.MLPS)
    }
    told = trainability.carried([Measure("a", -1.0, high=high), Measure("b", -1.0, high=-0.5)], kept, lab)
    assert "0.25 in OSA (QR) and 0.5 in ViT (no skip, no LN) with SUO MLPs" in told and told.endswith(end)


@pytest.mark.parametrize("depths", [[6], [12, 6], [6, 6]])
def test_impossible_depths_are_named(depths):
    with pytest.raises(UserError, match="trainability.*depths.*two or more that rise"):
        params.validate(Settings, {"seeds": [0], "depths": depths}, "params.yaml: trainability")
