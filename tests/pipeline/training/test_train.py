"""Training: what the parameters say is what happens, and the same seed gives the same bits."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import osa
from pipeline.config import params
from pipeline.core.errors import UserError
from pipeline.data import idx
from pipeline.training import loop
from pipeline.training.loop import Observer, Training, build_model, evaluate_split
from pipeline.training.run import Run
from tests.osa.helpers import REPRESENTATIVES
from tests.pipeline.synthetic import ROOT
from tests.pipeline.trainings import (
    TEST_IMAGES,
    TRAIN_IMAGES,
    config,
    finished,
    run_main,
    trained,
    training,
    write_params,
)

pytestmark = pytest.mark.usefixtures("project")

AS_PYTORCH_DRAWS = {"patch_embedding": "torch", "head": "torch", "xavier_fused_qkv": True}  # as params.yaml does


# the models


def assert_same_state(actual: torch.nn.Module, expected: torch.nn.Module) -> None:
    actual, expected = actual.state_dict(), expected.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in REPRESENTATIVES else pytest.mark.slow) for name in osa.MODELS]
)
def test_the_committed_parameters_are_the_librarys_models(variant):
    """Bit for bit what osa.create_model makes, which the tests of osa/ hold against Appendix D, drawn as PyTorch does where
    the appendix is silent."""
    ours = build_model(params.resolve(params.load(ROOT / "params.yaml"), variant), 5)
    papers = osa.create_model(variant, generator=loop.random_stream(5, "init"), **AS_PYTORCH_DRAWS)
    assert_same_state(ours, papers)
    assert repr(ours) == repr(papers)
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(ours(images), papers(images))


@pytest.mark.parametrize(
    "variant, section, change",
    [
        ("osa_qr", "init", {"alpha": -0.7, "alpha_per_head": False, "suo_transposed": True}),
        ("vit", "init", {"embedding_std": 0.5, "xavier_fused_qkv": False, "patch_embedding": "lecun", "head": "zeros"}),
        ("vit", "variant", {"attention_init": "ji", "activation": "gelu_tanh"}),
        ("vit", "model", {"patch_size": 7, "embed_dim": 32, "depth": 2, "num_classes": 13, "norm_eps": 0.5}),
        ("osa_ns", "model", {"num_heads": 2, "mlp_ratio": 1.5}),
        ("osa_ns", "variant", {"num_iterations": 3, "epsilon": 0.01}),
    ],
)
def test_what_the_parameters_say_of_the_model_reaches_it(variant, section, change):
    settings = params.load(ROOT / "params.yaml")
    ours = build_model(params.resolve(settings, variant, {section: change}), 0)
    options = AS_PYTORCH_DRAWS | change
    assert_same_state(ours, osa.create_model(variant, generator=loop.random_stream(0, "init"), **options))


# random streams


def test_initialisation_depends_on_the_seed_and_not_on_other_draws():
    torch.manual_seed(1)
    first = build_model(config("osa_qr"), 5)
    torch.manual_seed(2)
    write_params(train={"batch_size": 7, "epochs": 1})
    assert_same_state(build_model(config("osa_qr"), 5), first)
    other = build_model(config("osa_qr"), 6).state_dict()
    for name, tensor in first.state_dict().items():
        if not name.endswith(("bias", "alpha")):
            assert not torch.equal(tensor, other[name]), name


def batches_of(run: Training) -> list[list[int]]:
    """A pixel of every image of each batch that a training sees."""
    seen, step = [], run.step

    def spy(images, labels):
        seen.append(images[:, 0, 13, 7].tolist())
        return step(images, labels)

    run.step = spy
    run.run(Observer())
    return seen


def test_a_perturbation_changes_every_weight_by_a_millionth_and_nothing_else():
    plain = build_model(config("osa_ns"), 5)
    draws = []
    for number in (1, 2, 1):
        perturbed = params.resolve(params.load(), "osa_ns", {"train": {"perturbation": number}})
        draws.append(build_model(perturbed, 5))
    for name, weight in plain.named_parameters():
        one, two, again = (dict(model.named_parameters())[name] for model in draws)
        assert torch.equal(one, again) and (one - weight).abs().le(7e-6 * weight.abs()).all(), name
        if weight.abs().sum():
            assert not torch.equal(one, weight) and not torch.equal(one, two), name
    assert_same_state(build_model(config("osa_ns"), 5), plain)


def test_the_order_of_the_data_depends_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    first = batches_of(training("osa_exact", 2))
    torch.manual_seed(2)
    write_params(init={"alpha": 0.4, "head": "torch"}, model={"depth": 1})
    assert batches_of(training("vit", 2)) == first
    assert batches_of(training("vit", 3)) != first
    assert [len(batch) for batch in first] == [13, 13, 13, 4] * 2
    epochs = [list(itertools.chain(*batches)) for batches in (first[:4], first[4:])]
    assert epochs[0] != epochs[1]
    pixels = idx.read_data("data/mnist", config("osa_exact").data.pixel_scaling).train_images[:, 0, 13, 7].tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(pixels)


# the steps


def by_hand(variant, seed, config, mnist):
    """The training of Appendix D written down plainly: weights after it, train loss and accuracy of every two steps."""
    model, options = build_model(config, seed), config.train
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=tuple(options.betas),
        eps=options.eps,
        weight_decay=options.weight_decay,
        foreach=False,
    )
    steps = []
    for epoch in range(options.epochs):
        order = torch.randperm(TRAIN_IMAGES, generator=loop.random_stream(seed, f"order/{epoch}")).tolist()
        for start in range(0, TRAIN_IMAGES, options.batch_size):
            chosen = order[start : start + options.batch_size]
            logits = model(mnist.train_images[chosen])
            labels = mnist.train_labels[chosen]
            loss = -logits.log_softmax(1)[range(len(chosen)), labels].mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norm = math.sqrt(sum((gradient.double() ** 2).sum().item() for gradient in gradients))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient * min(1.0, options.clip_grad_norm / (norm + 1e-6))
            optimizer.step()
            steps.append((len(chosen), loss.item() * len(chosen), (logits.argmax(1) == labels).sum().item()))
    pairs = [[sum(each) for each in zip(*pair, strict=True)] for pair in zip(steps[::2], steps[1::2], strict=True)]
    return model.state_dict(), [(loss / images, correct / images) for images, loss, correct in pairs]


@pytest.mark.parametrize("variant, clip", [("osa_qr", 0.05), ("vit_noskip", 50.0), ("osa_qr_literal", 50.0)])
def test_a_training_equals_one_written_by_hand(variant, clip):
    unusual = {"learning_rate": 0.01, "betas": [0.7, 0.8], "eps": 1e-3, "weight_decay": 0.3, "clip_grad_norm": clip}
    write_params(train=unusual, data={"pixel_scaling": "standard"})
    run = finished(variant)
    weights, points = by_hand(variant, 0, run.config, idx.read_data("data/mnist", "standard"))
    for name, tensor in weights.items():
        actual = run.model.state_dict()[name]
        if variant == "osa_qr_literal":  # whose R⁻¹ enlarges rounding, in single entries by more on some processors
            assert (actual - tensor).norm() < 3e-4 * tensor.norm() + 1e-6 * math.sqrt(tensor.numel()), name
        else:
            torch.testing.assert_close(actual, tensor, rtol=1e-3, atol=1e-5)
    rows = run.progress.history[1:]
    assert [row["train_loss"] for row in rows] == pytest.approx([loss for loss, _ in points], rel=1e-4)
    assert [row["train_accuracy"] for row in rows] == pytest.approx([accuracy for _, accuracy in points])


WARM_COSINE = [0.25, 0.5, 0.75, 1, 0.8535534, 0.5, 0.1464466, 0]


@pytest.mark.parametrize(
    "warmup_steps, schedule, expected",
    [
        (0, "constant", [1] * 8),
        (4, "constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        (0, "cosine", [0.9619398, 0.8535534, 0.6913417, 0.5, 0.3086583, 0.1464466, 0.0380602, 0]),
        (4, "cosine", WARM_COSINE),
    ],
)
def test_the_rate_of_each_step(warmup_steps, schedule, expected):
    write_params(train={"warmup_steps": warmup_steps, "schedule": schedule})
    options = config("osa_exact").train
    assert [loop.rate_factor(options, step, 8) for step in range(1, 9)] == pytest.approx(expected)


def test_a_training_takes_these_rates_through_both_epochs():
    """The weights are those of a training whose rates are set by hand."""
    write_params(train={"warmup_steps": 4, "schedule": "cosine"})
    run = finished("osa_exact")
    write_params()
    by_hand = training("osa_exact")
    for factor, (images, labels) in zip(
        WARM_COSINE, (batch for epoch in range(2) for batch in by_hand.batches(epoch)), strict=True
    ):
        for group in by_hand.optimizers[0].param_groups:
            group["lr"] = by_hand.config.train.learning_rate * factor
        by_hand.step(images, labels)
    for (name, parameter), other in zip(run.model.named_parameters(), by_hand.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, msg=name, rtol=1e-5, atol=1e-6)


def test_muon_takes_the_weight_matrices_of_the_blocks():
    write_params(train={"optimizer": "muon"})
    run = training("vit")
    adamw, muon = run.optimizers
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    held = [{names[p] for group in each.param_groups for p in group["params"]} for each in (adamw, muon)]
    parts = ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.fc1", "mlp.fc2")
    assert held[1] == {f"blocks.{i}.{part}.weight" for i in range(2) for part in parts}
    assert held[0] == set(names.values()) - held[1]
    before = {name: parameter.detach().clone() for parameter, name in names.items()}
    run.step(*next(run.batches(0)))
    for name, parameter in run.model.named_parameters():
        change = (parameter - before[name]).square().mean().sqrt().item() / run.config.train.learning_rate
        assert name not in held[1] or change == pytest.approx(0.2, abs=0.07), name


@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("variant", ["vit", "osa_exact"])
def test_decay_of_all_parameters_or_of_matrices_alone(variant, decay_all):
    write_params(train={"decay_all": decay_all, "learning_rate": 0.1, "weight_decay": 0.5})
    run = training(variant)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    run.optimizers[0].step()
    for name, parameter in run.model.named_parameters():
        decayed = decay_all or (name.endswith("weight") and "norm" not in name)
        torch.testing.assert_close(parameter, torch.full_like(parameter, 0.95 if decayed else 1.0), msg=name)


@pytest.mark.parametrize(
    "drop_last, batch_size, steps, images",
    [(False, 13, 4, 43), (True, 13, 3, 39), (False, 43, 1, 43), (True, 43, 1, 43), (False, 99, 1, 43)],
)
def test_drop_last(drop_last, batch_size, steps, images):
    write_params(train={"drop_last": drop_last, "batch_size": batch_size})
    run = training("vit")
    batches = batches_of(run)
    assert [sum(map(len, epoch)) for epoch in (batches[:steps], batches[steps:])] == [images, images]
    assert run.progress.history[-1]["step"] == 2 * steps
    assert run.progress.history[-1]["epoch"] == 2


@pytest.mark.parametrize(
    "points, steps",
    [(1, [0, 4, 8]), (2, [0, 2, 4, 6, 8]), (3, [0, 2, 3, 4, 6, 7, 8]), (4, list(range(9))), (9, list(range(9)))],
)
def test_points_per_epoch(points, steps):
    write_params(train={"points_per_epoch": points})
    history = finished("vit").progress.history
    assert [row["step"] for row in history] == steps
    assert [row["epoch"] for row in history] == pytest.approx([step / 4 for step in steps])


def test_step_0_is_measured_before_any_step():
    run = finished("vit")
    model, mnist = build_model(run.config, 0), run.data
    first = run.progress.history[0]
    assert (first["step"], first["epoch"]) == (0, 0.0)
    for split, images, labels in (
        ("train", mnist.train_images.first(TEST_IMAGES), mnist.train_labels[:TEST_IMAGES]),
        ("test", mnist.test_images, mnist.test_labels),
    ):
        logits = model(images[:])
        assert first[f"{split}_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
        assert first[f"{split}_accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())


@pytest.mark.parametrize("count", [1, loop.EVALUATION_BATCH["cpu"], 2 * loop.EVALUATION_BATCH["cpu"] + 17])
def test_evaluation_of_a_split_that_batches_do_not_divide(count):
    model = build_model(config("vit"), 0)
    images, labels = torch.rand(count, 1, 28, 28), torch.arange(count) % 10
    logits = model(images)
    loss, accuracy = evaluate_split(model, images, labels)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())


@pytest.mark.slow
def test_training_learns():
    write_params(train={"epochs": 15, "learning_rate": 0.003}, model={"embed_dim": 24})
    history = finished("osa_exact").progress.history
    assert history[0]["test_accuracy"] < 0.4 and history[-1]["test_accuracy"] > 0.9


def test_an_observer_is_told_of_everything_and_changes_nothing():
    """The same numbers, whoever watches; an interval ends before its point is measured."""
    events = []

    class Spy(Observer):
        def on_step(self, num_images):
            torch.rand(3)
            events.append(num_images)

        def on_interval(self):
            events.append("interval")

        def on_evaluation(self):
            events.append("point")

    watched = training()
    watched.run(Spy())
    half = ["interval", "point"]
    assert events == ["point", *([13, 13, *half, 13, 4, *half] * 2)]
    assert watched.progress == finished().progress
    assert_same_state(watched.model, finished().model)


def test_no_run_without_a_step_is_a_result():
    write_params(init={"embedding_std": 1e38})
    with pytest.raises(UserError, match="before the first step"):
        trained("vit_noskip_nonorm")
    assert Run("vit_noskip_nonorm", 0).record() is None and not Path(".checkpoints").exists()


# mistakes


@pytest.mark.parametrize(
    "changes, arguments, words",
    [
        ({"train": {"drop_last": True, "batch_size": 64}}, ["vit"], ["train.batch_size 64", "43 images"]),
        ({"train": {"warmup_steps": 8}}, ["vit"], ["train.warmup_steps 8", "8 steps"]),
        ({}, ["vti"], ["variants.vti", "'vit'"]),
        ({}, ["vit", "--set", "train.epoch=1"], ["train.epoch ", "'epochs'"]),
        ({}, ["vit", "--set", "data.source=kmnist"], ["data/kmnist", "missing", "pipeline fetch kmnist"]),
        ({}, ["vit", "--study", "dept"], ["dept", "'depth'"]),
        ({}, ["osa_shaped", "--set", "model.depth=4"], ["GELU"]),
        ({}, ["vit", "--set", "model.depth=1", "--set", "model.depth=2"], ["model.depth", "1,2"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_status_1(monkeypatch, capsys, changes, arguments, words):
    write_params(**changes)
    variant, *options = arguments
    with pytest.raises(SystemExit) as caught:
        run_main(monkeypatch, variant, "0", *options)
    message = capsys.readouterr().err
    assert caught.value.code == 1 and message.startswith("error: ") and message.count("\n") == 1
    assert all(word in message for word in words), message
    assert not Path("paper_outputs").exists()


@pytest.mark.parametrize("stage", ["tools.train", "report"])
def test_a_python_without_torch_is_named(stage):
    command = [sys.executable, "-S", "-m", f"pipeline.{stage}"]  # -S: without the installed packages
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "torch" in done.stderr and "make setup" in done.stderr


# a search


def test_a_search_does_not_see_the_test_images():
    """Other test images leave the curves and weights of a training that holds images out as they are."""
    setting = params.resolve(params.load(), "osa_exact", {"train": {"held_out": 8}})
    whole, data = idx.read_data("data/mnist", setting.data.pixel_scaling), loop.load_data(setting, torch.device("cpu"))
    assert (len(data.train_labels), len(data.test_labels)) == (TRAIN_IMAGES - 8, 8)
    both = torch.cat([data.train_images.pixels, data.test_images.pixels]).flatten(1)
    assert sorted(both.tolist()) == sorted(whole.train_images.pixels.flatten(1).tolist())

    def curves_and_weights() -> tuple[list, dict]:
        search = Training(setting, 0, torch.device("cpu"))
        search.run(Observer())
        return search.progress.history, search.model.state_dict()

    history, state = curves_and_weights()
    idx.write_split(Path("data/mnist"), "t10k", 255 - whole.test_images.pixels[:, 0].numpy(), whole.test_labels.numpy())
    other_history, other_state = curves_and_weights()
    assert history == other_history and all(state[name].equal(other_state[name]) for name in state)
    with pytest.raises(UserError, match="held_out 1000000 must be less than the 43 training images"):
        loop.load_data(params.resolve(params.load(), "vit", {"train": {"held_out": 10**6}}), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no huge pages")
def test_large_tensors_of_a_training_ask_for_huge_pages():
    """In a new process, because torch decides once."""
    code = """
import pathlib
from pipeline.training import loop, recorder
loop.configure_torch()
tensor = loop.torch.ones(16 << 20)
print([line for line in pathlib.Path("/proc/self/smaps").read_text().splitlines() if "VmFlags" in line and " hg" in line])
"""
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    for variable, expected in [({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)]:
        command = [sys.executable, "-c", code]
        printed = subprocess.check_output(command, cwd=ROOT, env=environment | variable, text=True)
        assert (printed.strip() != "[]") == expected
