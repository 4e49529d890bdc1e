"""Trainings with a penalty, and trainings that keep weights orthogonal."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from osa.constrained.orthogonal import KEPT, KEPT_WHOLE, MAPS, Kept, kept_parameters, orthogonality_error, retract
from osa.constrained.penalties import PENALTIES, with_penalty
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.training.loop import Training
from tests.pipeline.trainings import config, finished, trained, training, write_data, write_params

FLOAT32 = 12**1.5 * torch.finfo(torch.float32).eps  # d · eps for ‖·‖₂ of a product, and √d times that for ‖·‖_F; d = 12


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_params()
    write_data()


def options(variant: str, train: dict | None = None, **values) -> str:
    """Gives a variant of params.yaml these options; its name."""
    write_params(variants={variant: values}, train=train or {})
    return variant


def kept_error(run: Training, keep: str) -> float:
    return max(map(orthogonality_error, Kept(run.model, keep).read()))


@pytest.mark.parametrize("variant, penalty", [*(("vit", name) for name in PENALTIES), ("osa_exact", "VAR-III")])
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


@pytest.mark.parametrize("variant, keep", [("osa_exact", keep) for keep in KEPT] + [("vit", "whole_key_value")])
def test_kept_weights_are_orthogonal_after_a_training_with_decay(variant, keep):
    settings = {"weight_decay": 0.5, "learning_rate": 0.01}
    free = finished(options(variant, settings))
    run = finished(options(variant, settings, keep=keep, keep_by="retraction"))
    assert kept_error(run, keep) < FLOAT32 < 1e-2 < kept_error(free, keep)
    begun = Kept(training(variant).model, keep).read()
    assert all((old - new).norm() > 0.1 for old, new in zip(begun, Kept(run.model, keep).read(), strict=True))


@pytest.mark.parametrize("keep", ["value_out", "attention", "whole_value_out"])
def test_what_is_kept_can_descend_by_itself_along_the_manifold(keep):
    train, kept = {"weight_decay": 0.5, "learning_rate": 0.01}, {"keep": keep, "keep_by": "retraction"}
    adamw = training(options("osa_exact", train, **kept))
    run = training(options("osa_exact", train, **kept, keep_rate=0.3))
    images, labels = next(run.batches(0))
    before = Kept(run.model, keep).read()
    for each in (adamw, run):
        each.step(images, labels)
    after, held = Kept(run.model, keep).read(), kept_parameters(run.model, keep)
    with torch.no_grad():
        for weight in held:
            weight.copy_(weight.grad)  # as it was clipped
    for old, gradient, new in zip(before, Kept(run.model, keep).read(), after, strict=True):
        assert (new - old).norm() > 1e-4
        torch.testing.assert_close(new, retract(old, -0.3 * gradient))
    free = {name: p for name, p in run.model.named_parameters() if all(p is not weight for weight in held)}
    assert set(run.optimizers[0].state) == set(free.values())
    assert all(torch.equal(p, dict(adamw.model.named_parameters())[name]) for name, p in free.items())


def test_the_attention_can_be_spared_the_decay():
    run = training(options("osa_exact", {"learning_rate": 0.1, "weight_decay": 0.5}, decay_attention=False))
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    run.optimizers[0].step()
    still = {name for name, p in run.model.named_parameters() if torch.equal(p, torch.ones_like(p))}
    parts = ("query", "key", "value", "out")
    assert still == {f"blocks.{i}.attention.{part}.weight" for i in range(2) for part in parts}


@pytest.mark.parametrize("by", MAPS)
def test_parametrised_weights_are_orthogonal_do_not_decay_and_are_read_back(by):
    keep = "whole_value_out"
    run = trained(options("osa_exact", {"learning_rate": 0.01}, keep=keep, keep_by=by))
    start, model = training("osa_exact"), run.load_model(config("osa_exact"))
    parameters = {id(p): name for name, p in start.model.named_parameters()}
    decayed, others = start.optimizers[0].param_groups
    assert {parameters[id(p)].split(".parametrizations")[0] for p in others["params"]} == {
        f"blocks.{i}.attention.{part}" for i in range(2) for part in KEPT_WHOLE[keep]
    }
    assert len(decayed["params"]) + len(others["params"]) == len(parameters) and others["weight_decay"] == 0
    for block, before in zip(model.blocks, start.model.blocks, strict=True):
        assert orthogonality_error(block.attention.out.weight) < FLOAT32
        assert (block.attention.out.weight - before.attention.out.weight).norm() > 0.01


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"penalty": "VAR-I"}, "params.yaml: variants.vit: penalty and penalty_weight go together; write both or none."),
        ({"keep_by": "cayley"}, "params.yaml: variants.vit: keep and keep_by go together; write both or none."),
        (
            {"keep": "value_out", "keep_by": "givens"},
            "params.yaml: variants.vit: keep_by givens is for whole matrices; write retraction to keep value_out.",
        ),
        (
            {"keep": "whole_value_out", "keep_by": "givens", "keep_rate": 0.1},
            "params.yaml: variants.vit: keep_rate is of gradient steps that are retracted; write it beside keep_by: "
            "retraction.",
        ),
        (
            {"penalty": "VAR-IV", "penalty_weight": 1.0},
            "params.yaml: variants.vit.penalty should be 'VAR-I', 'VAR-II', 'VAR-III', 'VAR-II-separate' or 'heads', "
            "not 'VAR-IV'.",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_sentence(values, expected):
    options("vit", **values)
    with pytest.raises(UserError) as caught:
        params.load()
    assert str(caught.value) == expected


def test_the_schema_knows_every_penalty_and_everything_that_can_be_kept():
    fields = params.Variant.model_fields
    known = {key: set(params.get_args(params.get_args(fields[key].annotation)[0])) for key in ("penalty", "keep", "keep_by")}
    assert known == {"penalty": set(PENALTIES), "keep": {*KEPT, *KEPT_WHOLE}, "keep_by": {"retraction", *MAPS}}
