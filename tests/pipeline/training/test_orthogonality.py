"""Trainings with a penalty, and trainings that keep weights orthogonal."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from osa.constrained.orthogonal import (
    CONSTRAINTS,
    MAPS,
    StiefelConstraint,
    gram_error,
)
from osa.constrained.penalties import PENALTIES, with_penalty
from pipeline.config import params
from pipeline.core.errors import UserError
from pipeline.training.loop import Training
from tests.pipeline.trainings import config, finished, trained, training, write_params

FLOAT32 = 12**1.5 * torch.finfo(torch.float32).eps  # d · eps for ‖·‖₂ of a product, and √d times that for ‖·‖_F; d = 12


pytestmark = pytest.mark.usefixtures("project")


def options(variant: str, train: dict | None = None, **values) -> str:
    """Gives a variant of params.yaml these options; its name."""
    write_params(variants={variant: values}, train=train or {})
    return variant


def weights(run: Training, keep: str) -> list[torch.Tensor]:
    return StiefelConstraint(run.model, keep).weights()


@pytest.mark.parametrize("variant, penalty", [("vit", "VAR-III"), ("osa_exact", "heads")])
def test_a_penalty_of_weight_0_leaves_every_bit(variant, penalty):
    expected = finished(variant)
    actual = finished(options(variant, penalty=penalty, penalty_weight=0.0))
    assert actual.progress.history == expected.progress.history
    assert all(map(torch.equal, actual.model.state_dict().values(), expected.model.state_dict().values()))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_is_differentiated_and_the_cross_entropy_recorded(penalty):
    run = training(options("vit", penalty=penalty, penalty_weight=0.1))
    images, labels = next(run.batches(0))
    output, value = with_penalty(run.model, images, penalty)
    cross_entropy = F.cross_entropy(output, labels)
    weights = list(run.model.parameters())
    expected = torch.autograd.grad(cross_entropy + 0.1 * value, weights)
    loss, _ = run.step(images, labels)
    assert torch.equal(loss, cross_entropy) and value > 1
    factor = min(1, run.config.train.clip_grad_norm / nn.utils.get_total_norm(expected).item())
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, factor * gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("keep", ["attention", pytest.param("whole_key_value", marks=pytest.mark.slow)])
def test_constrained_weights_are_orthogonal_after_a_training_with_decay(keep):
    settings = {"weight_decay": 0.5, "learning_rate": 0.01}
    start, free = training("osa_exact"), finished(options("osa_exact", settings))
    run = finished(options("osa_exact", settings, keep=keep, keep_by="retraction"))
    errors = [max(map(gram_error, weights(each, keep))) for each in (run, free)]
    assert errors[0] < FLOAT32 < 1e-2 < errors[1]
    assert all((old - new).norm() > 0.1 for old, new in zip(weights(start, keep), weights(run, keep), strict=True))


@pytest.mark.parametrize("by", [pytest.param(by, marks=[] if by == "cayley" else pytest.mark.slow) for by in MAPS])
def test_parametrised_weights_are_orthogonal_do_not_decay_and_are_read_back(by):
    keep = "whole_value_out"
    run = trained(options("osa_exact", {"learning_rate": 0.01}, keep=keep, keep_by=by))
    start, model = training("osa_exact"), run.load_model(config("osa_exact"))
    parameters = {id(p): name for name, p in start.model.named_parameters()}
    decayed, others = start.optimizers[0].param_groups
    assert {parameters[id(p)].split(".parametrizations")[0] for p in others["params"]} == {
        f"blocks.{i}.attention.{part}" for i in range(2) for part in CONSTRAINTS[keep].parts
    }
    assert len(decayed["params"]) + len(others["params"]) == len(parameters) and others["weight_decay"] == 0
    for block, before in zip(model.blocks, start.model.blocks, strict=True):
        assert gram_error(block.attention.out.weight) < FLOAT32
        assert (block.attention.out.weight - before.attention.out.weight).norm() > 0.01


@pytest.mark.parametrize(
    "values, words",
    [
        ({"keep_by": "cayley"}, ["keep", "keep_by"]),
        ({"keep": "value_out", "keep_by": "givens"}, ["keep_by", "retraction"]),
    ],
)
def test_options_that_do_not_fit_are_refused(values, words):
    options("vit", **values)
    with pytest.raises(UserError) as caught:
        params.load()
    assert all(word in str(caught.value) for word in ["variants.vit", *words])
