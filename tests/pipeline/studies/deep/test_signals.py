"""The measures of signals by hand, and checks that notice wrong schedules, draws and kernels."""

import math

import pytest
import torch
from torch import nn

import osa
import osa.models
from osa.shaped.matrices import signal_preserving_attention
from pipeline.studies.deep import signals
from pipeline.studies.deep.signals import Settings, kept, measure, of_tokens

SMALL = Settings(seeds=[0], depths=[6], images=2, alpha_seeds=[0], alpha_depths=[6, 9], alpha_patches=[14, 7])


@pytest.mark.slow
def test_models_and_checks_of_what_is_measured(lab, monkeypatch):
    few = [*signals.DRAWN, "espa_skip"]
    monkeypatch.setattr(signals, "MODELS", few)
    tables = measure(SMALL, lab)
    assert len(tables["blocks"]) == 6 * len(few) and tables["blocks"]["gradient"].gt(0).all()
    summary = signals.summarise(SMALL, tables, lab)
    by_name = {row["model"]: row for row in summary["models"]}
    assert list(by_name) == few
    assert by_name["osa_shaped"]["cosine"] < 0.9 < by_name["vit_noskip_nonorm"]["cosine"]
    first = tables["blocks"].query("model == 'vit' and block == 1")["gradient"].item()
    assert by_name["vit"]["gradients"] == pytest.approx([first])
    assert all(each["holds"] for each in summary["kept"].values()) and set(summary["kept"]) == set(signals.PRESERVING)
    assert -2 < summary["alpha"]["slopes"]["depth"].mean < 0
    assert signals.draw(SMALL, tables, lab).axes


def drawn_per_head(attention, joint_value_output=False, **options):
    osa.init.init_orthogonal_attention_(attention, **options)


def heads_drawn_alone(attention, generator, **options):
    osa.init.init_signal_preserving_attention_(attention, generator=generator, **options)
    width = attention.embed_dim // attention.num_heads
    for rows in attention.value.weight.data.split(width):
        rows.copy_(osa.init.stiefel_uniform(attention.embed_dim, width, generator=generator).mT)


def one_block_late(kernel, num_tokens, depth, last, **options):
    return signal_preserving_attention(kernel, num_tokens, depth + 1, last, **options)[:-1]


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("init_orthogonal_attention_", drawn_per_head),
        ("init_signal_preserving_attention_", heads_drawn_alone),
        ("signal_preserving_attention", one_block_late),
    ],
)
def test_wrong_draws_and_schedules_are_noticed(name, wrong, lab, monkeypatch):
    monkeypatch.setattr(osa.models, name, wrong)
    assert max(row["error"] for row in kept(SMALL, lab)) > signals.TOLERANCE


def test_tokens_by_hand():
    """Two images: orthogonal tokens of unlike lengths; three that point one way."""
    orthogonal, alike = torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.ones(3, 3)
    ends = {"q_low": 1.3 / 3, "q_high": 8.5 / 3}  # quantiles of 1, 4 and 9 thirds, a tenth of the way from either end
    assert of_tokens(orthogonal[None]) == pytest.approx({"q": 14 / 9, "cosine": 0, "rank": 3} | ends)
    assert of_tokens(alike[None]) == pytest.approx({"q": 1, "q_low": 1, "q_high": 1, "cosine": 1, "rank": 1})
    assert of_tokens(torch.stack([orthogonal, alike]))["rank"] == pytest.approx(2)


def test_gradients_and_the_share_of_the_image_are_the_model_s(lab):
    model = lab.model(lab.config("espa", {"model": {"depth": 6}}), 0, torch.float64)
    images, labels = (part[:3] for part in lab.images())
    rows, whole = signals.signals(model, images, labels)
    loss = nn.functional.cross_entropy(model(images), labels)
    assert whole["loss"] == pytest.approx(loss.item())
    gradients = torch.autograd.grad(loss, [p for name, p in model.blocks[3].named_parameters() if not name.endswith("bias")])
    assert rows[3]["gradient"] == pytest.approx(torch.cat([each.flatten() for each in gradients]).norm().item())
    product = torch.eye(17, dtype=torch.float64)
    for matrix in signal_preserving_attention("exponential", 17, 6, 0.05, repeated=0.04):
        product = matrix @ product
    assert whole["kappa"] == pytest.approx(torch.linalg.cond(product).item())
    same = images[:1].expand(3, -1, -1, -1)
    assert signals.signals(model, same, labels)[1]["image_share"] == pytest.approx(0, abs=1e-20)
    assert 0 < whole["image_share"] < 1


@pytest.mark.parametrize(
    "name, kappa",
    [("vskipinit", 1.0), ("osa_shaped", 1.0), ("osa_ns", 1.06), ("vit_noskip", math.inf), ("espa_skip", math.nan)],
)
def test_condition_of_the_attention_matrices_multiplied(name, kappa, lab):
    model = lab.model(lab.config(name, {"model": {"depth": 6}}), 0, torch.float64)
    assert signals.attention_condition(model, lab.images()[0][:2]) == pytest.approx(kappa, rel=0.05, nan_ok=True)


def test_the_alpha_that_doubles_is_found_between_rungs(monkeypatch):
    """The gradient 1 + (α/0.3)² is 2 at α = 0.3."""
    monkeypatch.setattr(signals, "first_gradient", lambda model, images, cotangent, alpha: 1 + (alpha / 0.3) ** 2)
    assert signals.doubling_alpha(None, None, None, 0.01) == pytest.approx(0.3, rel=0.02)
