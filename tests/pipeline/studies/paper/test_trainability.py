"""The measures against dense Jacobians, and a summary of known decays."""

import math

import pandas as pd
import pytest
import torch
from torch import nn

from pipeline.config import reading
from pipeline.core.errors import UserError
from pipeline.results.measures import jacobian, norm
from pipeline.studies.paper import trainability
from pipeline.studies.paper.trainability import MODELS, Settings, measure

SMALL = {"depths": [2, 4], "gradient_images": 2, "samples": 4, "power_iterations": 3}


def model_and_image(lab, variant, seed=0):
    return lab.model(lab.config(variant), seed, torch.float64), lab.images()[0][:1]


def test_every_model_has_its_numbers(lab):
    settings = Settings(seeds=[0], **SMALL)
    numbers = trainability.summarise(settings, measure(settings, lab), lab)
    assert numbers["depths"] == SMALL["depths"]
    assert [(row["variant"], row["mlp"]) for row in numbers["models"]] == MODELS
    values = [value for row in numbers["models"] for key in ("kappa", "first_gradient") for value in row[key]] + [
        row[key] for row in numbers["models"] for key in ("kept", "attention_kept")
    ]
    assert all(math.isfinite(value) and value > 0 for value in values)


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


def test_summary_of_known_decays(lab):
    """Means over seeds are geometric, and the factor a block is that of the exponential decay."""
    decays = [
        {"variant": "a", "mlp": mlp, "seed": seed, "depth": depth, "decay": 5 * (factor * 4**seed) ** depth}
        for mlp, factor in (("suo", 0.25), ("xavier", 0.1))
        for depth in (2, 4, 8)
        for seed in (0, 1)
    ]
    networks = pd.DataFrame(decays)
    for column in ("logits_frobenius", "logits_kappa", "first_gradient"):
        networks[column] = networks["decay"]
    attentions = networks[networks["mlp"] == "suo"].assign(gain=lambda own: 0.5 ** own["depth"])
    tables = {"networks": networks, "attentions": attentions}
    numbers = trainability.summarise(Settings(seeds=[0, 1], **SMALL), tables, lab)
    assert numbers["depths"] == [2, 8]
    suo, xavier = numbers["models"]
    assert (suo["kept"], xavier["kept"]) == (pytest.approx(0.5), pytest.approx(0.2))
    assert suo["kappa"] == suo["first_gradient"] == pytest.approx([5 * 0.5**2, 5 * 0.5**8])
    assert suo["attention_kept"] == xavier["attention_kept"] == pytest.approx(0.5)


@pytest.mark.parametrize("depths", [[6], [12, 6], [6, 6]])
def test_impossible_depths_are_named(depths):
    with pytest.raises(UserError, match="trainability.*depths.*two or more entries, in increasing order"):
        reading.validate(Settings, {"seeds": [0], "depths": depths}, "params.yaml: trainability")
