"""Training: what the parameters say is what happens, the same seed gives the same bytes, and a killed run loses nothing."""

import copy
import csv
import io
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ruamel.yaml import YAML

import osa
from pipeline import data, files, params, train
from tests.pipeline.mnist_files import write_mnist

ROOT = Path(__file__).parents[2]
RAW = YAML(typ="safe").load(ROOT / "params.yaml")
VARIANTS = ("osa_qr", "osa_ns", "vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact")
SMALL = {"image_size": 28, "patch_size": 14, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_ratio": 2}  # N = 5, d_v = 4
SHORT = {"epochs": 2, "batch_size": 13, "points_per_epoch": 2, "drop_last": False}
TRAIN_IMAGES, TEST_IMAGES = 43, 31  # 4 steps an epoch, the last one of 4 images
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
OUTPUTS = ("history.csv", "metrics.json")


def write_params(**changes: dict) -> None:
    """The repository's parameters with a small model and a short training, after `changes` of sections."""
    raw = copy.deepcopy(RAW) | {"claims": {}, "report": {"labels": {}, "choices": []}}  # training does not read them
    raw["model"] |= SMALL
    raw["train"] |= SHORT
    for section, values in changes.items():
        for key, value in values.items():
            raw[section][key] = raw[section][key] | value if isinstance(value, dict) else value
    Path("params.yaml").write_text(json.dumps(raw))


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A working directory of its own, with parameters and data."""
    monkeypatch.chdir(tmp_path)
    write_params()
    write_mnist("data/mnist", train=TRAIN_IMAGES, test=TEST_IMAGES, seed=3)
    return tmp_path


def training(variant="osa_exact", seed=0) -> train.Training:
    return train.Training(variant, seed, params.resolve(params.load(), variant), torch.device("cpu"))


def trained(variant="osa_exact", seed=0) -> train.Training:
    run = training(variant, seed)
    run.run()
    run.write_outputs()
    return run


def outputs(variant="osa_exact", seed=0) -> dict[str, bytes]:
    results = {name: Path("runs", variant, str(seed), name).read_bytes() for name in OUTPUTS}
    return results | {"weights": Path("weights", variant, f"{seed}.pt").read_bytes()}


def record(variant="osa_exact", seed=0) -> dict:
    return json.loads(Path("records", variant, f"{seed}.json").read_text())


def read_history(content: bytes) -> list[dict]:
    return list(csv.DictReader(io.StringIO(content.decode())))


def command(variant="osa_exact", seed=0) -> list[str]:
    return [sys.executable, "-m", "pipeline.train", variant, str(seed), "--no-tracking"]


def run_main(monkeypatch, *arguments: str) -> None:
    """`python -m pipeline.train` in this process, whose settings of torch are restored."""
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    monkeypatch.setattr(train, "make_deterministic", lambda: None)
    train.main()


# the models


def built(variant, seed=0, **changes) -> osa.VisionTransformer:
    """A model of the paper's size, or with changes of sections of the parameters."""
    write_params(**{"model": RAW["model"], "train": RAW["train"], **changes})
    return train.build_model(params.resolve(params.load(), variant), seed).requires_grad_(False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_has_the_parts_that_its_block_names(variant):
    block, model = RAW["variants"][variant], built(variant)
    assert (model.patch_embedding.in_features, model.head.out_features) == (16, 10)
    assert model.position_embedding.shape == (1, 50, 64)
    assert len(model.blocks) == 6
    for part in model.blocks:
        assert part.skip is block["skip"]
        assert isinstance(part.norm1, torch.nn.LayerNorm) is isinstance(part.norm2, torch.nn.LayerNorm) is block["norm"]
        assert (part.mlp.fc1.out_features, part.attention.num_heads) == (256, 4)
        if block["attention"] == "orthogonal":
            assert type(part.attention) is osa.OrthogonalSelfAttention
            assert part.attention.options["method"] == block["method"]
            assert part.attention.options["num_iterations"] == block.get("num_iterations")
        else:
            assert type(part.attention) is osa.SoftmaxSelfAttention
    assert isinstance(model.norm, torch.nn.LayerNorm) is block["norm"]


def assert_xavier(weight, fan_in, fan_out):
    bound = math.sqrt(6 / (fan_in + fan_out))
    assert 0.97 * bound < weight.abs().max() <= bound


def assert_isometry(matrix, factor=1.0):
    """The columns are orthogonal and of squared length `factor`."""
    torch.testing.assert_close(matrix.mT @ matrix, factor * torch.eye(matrix.shape[1]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_initialisation_of_each_variant(variant):
    model = built(variant)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
    for embedding in (model.cls_token, model.position_embedding):
        assert embedding.abs().max() <= 0.04
    assert model.position_embedding.std() == pytest.approx(0.02 * 0.8796, rel=0.05)  # of the normal cut at 2σ
    assert_xavier(model.patch_embedding.weight, 16, 64)
    assert_xavier(model.head.weight, 64, 10)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        if RAW["variants"][variant]["init"] == "osa":
            assert attention.alpha.tolist() == pytest.approx([0.1] * 4)
            for i in range(4):
                rows = slice(16 * i, 16 * (i + 1))
                assert_isometry(torch.cat([attention.query.weight[rows], attention.key.weight[rows]]).mT)
            assert_isometry(mlp.fc1.weight, 4.0)
            assert_isometry(mlp.fc2.weight.mT)
        else:
            for linear in (attention.query, attention.key, attention.value, attention.out):
                assert_xavier(linear.weight, 64, 64)
            assert_xavier(mlp.fc1.weight, 64, 256)
            assert_xavier(mlp.fc2.weight, 256, 64)


def test_alpha_per_head():
    assert built("osa_qr", init={"alpha_per_head": True}).blocks[1].attention.alpha.shape == (4,)
    assert built("osa_qr", init={"alpha_per_head": False}).blocks[1].attention.alpha.shape == (1,)


def test_alpha_and_embedding_std():
    model = built("osa_ns", init={"alpha": -0.7, "embedding_std": 0.5})
    assert model.blocks[5].attention.alpha.tolist() == pytest.approx([-0.7] * 4)
    assert model.position_embedding.std() == pytest.approx(0.5 * 0.8796, rel=0.05)


def test_xavier_of_a_fused_query_key_value():
    attention = built("vit", init={"xavier_fused_qkv": True}).blocks[2].attention
    for linear in (attention.query, attention.key, attention.value):
        assert_xavier(linear.weight, 64, 3 * 64)
    assert_xavier(attention.out.weight, 64, 64)


def test_suo_transposed():
    mlp = built("osa_exact", init={"suo_transposed": True}).blocks[3].mlp
    assert_isometry(mlp.fc1.weight)
    assert_isometry(mlp.fc2.weight.mT, 4.0)


@pytest.mark.parametrize("layer", ["patch_embedding", "head"])
def test_torch_initialisation_of_the_outer_layers(layer):
    linear = getattr(built("vit", init={layer: "torch"}), layer)
    bound = 1 / math.sqrt(linear.in_features)
    assert 0.97 * bound < linear.weight.abs().max() <= bound
    assert 0.5 * bound < linear.bias.abs().max() <= bound


def test_a_head_of_zeros_starts_at_the_loss_of_guessing():
    write_params(init={"head": "zeros"})
    run = training("vit")
    loss, _ = train.evaluate_split(run.model, run.data.test_images, run.data.test_labels)
    assert loss == pytest.approx(math.log(10), rel=1e-6)


# random streams


def test_initialisation_depends_on_the_seed_and_not_on_other_draws():
    torch.manual_seed(1)
    first = built("osa_qr", seed=5).state_dict()
    torch.manual_seed(2)
    again = built("osa_qr", seed=5, train={"batch_size": 7, "epochs": 1}).state_dict()
    other = built("osa_qr", seed=6).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        if tensor.numel() > tensor.any().item() and not name.endswith(("bias", "alpha")):
            assert not torch.equal(tensor, other[name]), name


def batches_of(run: train.Training) -> list[list[int]]:
    """The labels of each batch that a training sees."""
    seen, step = [], run.step

    def spy(images, labels):
        seen.append(images[:, 0, 13, 7].tolist())
        return step(images, labels)

    run.step = spy
    run.run()
    return seen


def test_the_order_of_the_data_depends_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    first = batches_of(training("osa_exact", 2))
    torch.manual_seed(2)
    write_params(init={"alpha": 0.4, "head": "torch"}, model={"depth": 1})
    other_model = batches_of(training("vit", 2))
    other_seed = batches_of(training("vit", 3))
    assert first == other_model
    assert first != other_seed
    assert [len(batch) for batch in first] == [13, 13, 13, 4] * 2
    epochs = [list(itertools.chain(*batches)) for batches in (first[:4], first[4:])]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(data.load().train_images[:, 0, 13, 7].tolist())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_seed_gives_the_same_bytes(project, monkeypatch, variant):
    found = []
    for folder, global_seed in (("one", 1), ("two", 2)):
        (project / folder).mkdir()
        (project / folder / "data").symlink_to(project / "data")
        (project / folder / "params.yaml").symlink_to(project / "params.yaml")
        monkeypatch.chdir(project / folder)
        torch.manual_seed(global_seed)
        trained(variant)
        found.append(outputs(variant))
    assert found[0] == found[1]
    trained(variant, seed=1)
    for name, content in outputs(variant, 1).items():
        assert content != found[0][name], name


# the steps


def by_hand(variant, seed, config, mnist):
    """The training of Appendix D written down plainly: weights after it, train loss and accuracy of each epoch."""
    model, options = train.build_model(config, seed), config.train
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=tuple(options.betas),
        eps=options.eps,
        weight_decay=options.weight_decay,
        foreach=False,
    )
    epochs = []
    for epoch in range(options.epochs):
        order = torch.randperm(TRAIN_IMAGES, generator=train.random_stream(seed, f"order/{epoch}")).tolist()
        losses, correct = 0.0, 0
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
            losses += loss.item() * len(chosen)
            correct += (logits.argmax(1) == labels).sum().item()
        epochs.append((losses / TRAIN_IMAGES, correct / TRAIN_IMAGES))
    return model.state_dict(), epochs


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("clip", [0.05, 50.0])
def test_a_training_equals_one_written_by_hand(variant, clip):
    unusual = {"learning_rate": 0.01, "betas": [0.7, 0.8], "eps": 1e-3, "weight_decay": 0.3, "clip_grad_norm": clip}
    write_params(train={**unusual, "points_per_epoch": 1}, data={"pixel_scaling": "standard"})
    run = trained(variant)
    weights, epochs = by_hand(variant, 0, run.config, data.load(pixel_scaling="standard"))
    for name, tensor in weights.items():
        torch.testing.assert_close(run.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)
    rows = run.progress.history[1:]
    assert [row["train_loss"] for row in rows] == pytest.approx([loss for loss, _ in epochs], rel=1e-4)
    assert [row["train_accuracy"] for row in rows] == pytest.approx([accuracy for _, accuracy in epochs])


def test_the_gradient_is_clipped():
    write_params(train={"clip_grad_norm": 0.01})
    run = training("vit")
    norms, step = [], run.optimizer.step

    def spy():
        norms.append(math.sqrt(sum((p.grad**2).sum().item() for p in run.model.parameters())))
        return step()

    run.optimizer.step = spy
    run.run()
    assert norms == pytest.approx([0.01] * 8, rel=1e-3)


@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("variant", ["vit", "osa_exact"])
def test_decay_of_all_parameters_or_of_matrices_alone(variant, decay_all):
    write_params(train={"decay_all": decay_all, "learning_rate": 0.1, "weight_decay": 0.5})
    run = training(variant)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    run.optimizer.step()
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
    run = trained("vit")
    history = read_history(outputs("vit")["history.csv"])
    assert [int(row["step"]) for row in history] == steps
    assert [float(row["epoch"]) for row in history] == pytest.approx([step / 4 for step in steps])
    assert len(record("vit")["timestamps"]) == len(steps)
    assert run.metrics()["steps"] == 8


def test_a_point_is_the_mean_over_the_batches_since_the_one_before():
    run = training("osa_exact")
    losses, step = [], run.step

    def spy(images, labels):
        loss, correct = step(images, labels)
        losses.append((loss.item(), correct.item(), len(labels)))
        return loss, correct

    run.step = spy
    run.run()
    for i, row in enumerate(run.progress.history[1:]):
        batches = losses[2 * i : 2 * i + 2]
        images = sum(count for _, _, count in batches)
        assert row["train_loss"] == pytest.approx(sum(loss * count for loss, _, count in batches) / images)
        assert row["train_accuracy"] == pytest.approx(sum(correct for _, correct, _ in batches) / images)


def test_step_0_is_measured_before_any_step():
    run = training("vit")
    model, mnist = train.build_model(run.config, 0), run.data
    run.run()
    first = run.progress.history[0]
    assert (first["step"], first["epoch"]) == (0, 0.0)
    for split, images, labels in (
        ("train", mnist.train_images[:TEST_IMAGES], mnist.train_labels[:TEST_IMAGES]),
        ("test", mnist.test_images, mnist.test_labels),
    ):
        logits = model(images)
        assert first[f"{split}_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
        assert first[f"{split}_accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())


@pytest.mark.parametrize("count", [1, train.EVALUATION_BATCH, 2 * train.EVALUATION_BATCH + 17])
def test_evaluation_of_a_split_that_batches_do_not_divide(count):
    model = train.build_model(params.resolve(params.load(), "vit"), 0)
    images, labels = torch.rand(count, 1, 28, 28), torch.arange(count) % 10
    logits = model(images)
    loss, accuracy = train.evaluate_split(model, images, labels)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())


@pytest.mark.parametrize("variant", ["vit", "osa_exact"])
def test_training_learns(variant):
    write_params(train={"epochs": 15, "learning_rate": 0.003}, model={"embed_dim": 24})
    history = trained(variant).progress.history
    assert history[0]["test_accuracy"] < 0.4
    assert history[-1]["test_accuracy"] > 0.9


def test_overrides_are_those_of_the_variant():
    write_params(variants={"vit": {"overrides": {"train": {"epochs": 1}, "model": {"depth": 1}}}})
    assert (len(training("vit").model.blocks), len(training("vit_noskip").model.blocks)) == (1, 2)
    assert (trained("vit").metrics()["steps"], trained("vit_noskip").metrics()["steps"]) == (4, 8)


def test_pixel_scaling_reaches_the_model():
    means = []
    for scaling in ("unit", "standard"):
        write_params(data={"pixel_scaling": scaling})
        means.append(training().data.train_images.mean().item())
    assert means[0] > 0.1
    assert means[1] == pytest.approx(0, abs=1e-5)


# the outputs


def test_outputs_and_record():
    run = trained("osa_ns", 7)
    history = read_history(outputs("osa_ns", 7)["history.csv"])
    metrics = json.loads(outputs("osa_ns", 7)["metrics.json"])
    last = {key: float(value) for key, value in history[-1].items() if key not in ("step", "epoch")}
    count = sum(parameter.numel() for parameter in run.model.parameters())
    assert metrics == last | {"steps": 8, "num_parameters": count, "diverged": False, "diverged_at_step": None}

    weights = torch.load("weights/osa_ns/7.pt", weights_only=True)
    assert weights.keys() == run.model.state_dict().keys()
    fresh = train.build_model(run.config, 0)
    fresh.load_state_dict(weights)
    loss, accuracy = train.evaluate_split(fresh, run.data.test_images, run.data.test_labels)
    assert (loss, accuracy) == (metrics["test_loss"], metrics["test_accuracy"])

    found = record("osa_ns", 7)
    assert (found["variant"], found["seed"], found["status"], found["resumptions"]) == ("osa_ns", 7, "finished", 0)
    assert found["config"] == json.loads(json.dumps(run.config.model_dump()))
    assert found["data_sha256"] == data.digest()
    assert found["weights_sha256"] == files.sha256("weights/osa_ns/7.pt")
    assert found["seconds"] > 0
    assert found["images_per_second"] > 0
    assert found["timestamps"] == sorted(found["timestamps"])
    assert datetime.fromisoformat(found["started_at"]) <= datetime.fromisoformat(found["finished_at"])
    assert found["environment"].keys() == {
        *("git_commit", "git_dirty", "python", "torch", "device", "device_name", "num_threads", "platform")
    }
    assert found["environment"]["device"] == "cpu"


def test_the_last_epoch_is_reported_whatever_the_best_was(monkeypatch):
    curve = iter([(2.3, 0.1), (2.3, 0.1), (0.4, 0.9), (0.1, 0.99), (0.5, 0.7), (1.5, 0.5)])  # step 0 measures both splits
    monkeypatch.setattr(train, "evaluate_split", lambda *arguments: next(curve))
    run = trained("vit")
    metrics = json.loads(outputs("vit")["metrics.json"])
    assert (metrics["test_loss"], metrics["test_accuracy"]) == (1.5, 0.5)
    saved = torch.load("weights/vit/0.pt", weights_only=True)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(saved[name], tensor), name


def test_whoever_watches_the_scratch_folder_sees_each_point():
    run = training()
    seen, record_point = [], run._record

    def spy(*arguments):
        record_point(*arguments)
        seen.append(read_history((run.scratch / "history.csv").read_bytes()))
        found = json.loads((run.scratch / "record.json").read_text())
        assert (found["status"], found["finished_at"], found["run_key"]) == ("running", None, run.run_key)
        assert len(found["timestamps"]) == len(seen[-1])

    run._record = spy
    run.run()
    run.write_outputs()
    final = read_history(outputs()["history.csv"])
    assert seen == [final[: i + 1] for i in range(5)]


def test_the_key_of_a_run_depends_on_what_can_change_its_numbers(monkeypatch):
    key = training().run_key
    write_params(variants={"vit": {"skip": False}}, evaluate={"batch_size": 17}, run={"seeds": [5]})
    assert training().run_key == key
    others = {training(seed=1).run_key, training("osa_qr").run_key}
    write_params(train={"eps": 1e-7})
    others.add(training().run_key)
    write_params()
    write_mnist("data/mnist", train=TRAIN_IMAGES, test=TEST_IMAGES, seed=4)
    others.add(training().run_key)
    write_mnist("data/mnist", train=TRAIN_IMAGES, test=TEST_IMAGES, seed=3)
    monkeypatch.setattr(train, "_code_sha256", lambda: "0" * 64)
    others.add(training().run_key)
    assert len(others | {key}) == 6


# the code that a training depends on


def test_dvc_tracks_the_code_of_the_run_key():
    stage = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]["train"]
    assert [path for path in stage["deps"] if path.endswith(".py")] == sorted(train.CODE)


def test_every_module_that_training_imports_is_tracked_or_holds_no_number():
    script = "import sys, pipeline.train; print(*(getattr(m, '__file__', None) for m in sys.modules.values()), sep='\\n')"
    printed = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    imported = {Path(path) for path in printed.stdout.splitlines()}
    ours = {str(path.relative_to(ROOT)) for path in imported if path.is_relative_to(ROOT) and ".venv" not in path.parts}
    without_numbers = {
        "osa/__init__.py",
        "pipeline/__init__.py",
        "pipeline/errors.py",
        "pipeline/files.py",
        "pipeline/hardware.py",
        "pipeline/params.py",
    }
    assert ours == set(train.CODE) | without_numbers


@pytest.mark.parametrize("path", train.CODE)
def test_a_change_of_any_tracked_file_changes_the_digest(tmp_path, monkeypatch, path):
    for name in train.CODE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    before = train._code_sha256()
    monkeypatch.setattr(train, "_root", lambda: tmp_path)
    assert train._code_sha256() == before
    (tmp_path / path).write_text((tmp_path / path).read_text() + "\n")
    assert train._code_sha256() != before


# divergence


@pytest.mark.parametrize("variant", ["vit_noskip_nonorm", "osa_qr"])
def test_a_diverged_run_is_a_result(variant):
    write_params(train={"learning_rate": 1e30})
    done = subprocess.run(command(variant), env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = outputs(variant)
    history, metrics = read_history(found["history.csv"]), json.loads(found["metrics.json"])
    assert "nan" not in found["history.csv"].decode().lower()
    finite = [row["test_loss"] != "" for row in history]
    assert finite == [True] * (len(history) - 1) + [False]  # it stops at the first point that is not finite
    assert metrics["diverged"] is True
    assert metrics["test_loss"] is None
    assert metrics["diverged_at_step"] == metrics["steps"] == int(history[-1]["step"]) < 8
    assert record(variant)["status"] == "diverged"
    assert torch.load(f"weights/{variant}/0.pt", weights_only=True)
    assert not list(Path(".checkpoints").iterdir())


def test_a_run_that_is_infinite_from_the_start_has_diverged_at_step_0(monkeypatch):
    def broken(config, seed):
        model = build(config, seed)
        model.head.bias.data.fill_(math.inf)
        return model

    build = train.build_model
    monkeypatch.setattr(train, "build_model", broken)
    trained()
    metrics = json.loads(outputs()["metrics.json"])
    assert (metrics["diverged"], metrics["diverged_at_step"], metrics["train_loss"]) == (True, 0, None)
    assert len(read_history(outputs()["history.csv"])) == 1


def test_a_diverged_run_that_was_killed_before_its_outputs_stays_diverged():
    write_params(train={"learning_rate": 1e30})
    training("vit_noskip_nonorm").run()
    assert trained("vit_noskip_nonorm").progress.resumptions == 1
    resumed = outputs("vit_noskip_nonorm")
    assert json.loads(resumed["metrics.json"])["diverged"] is True
    shutil.rmtree(".checkpoints")
    trained("vit_noskip_nonorm")
    assert outputs("vit_noskip_nonorm") == resumed


# kill and resume


def train_until_write(number: int) -> None:
    """Trains, and kills this process when it has written its `number`th file, under the temporary name."""
    replace, writes = os.replace, itertools.count(1)

    def mortal(*arguments):
        if next(writes) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments)

    os.replace = mortal
    torch.set_num_threads(1)
    train.tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a killed process leaks
    trained()


@pytest.fixture(scope="module")
def processes():
    """Starts processes that have torch imported but share no state with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # which an optimiser imports when it is first used
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        forkserver.ensure_running()
    return context


WRITES = 5 * 2 + 2 + 4  # points × (history, record), checkpoints, outputs


def test_killed_at_any_write_it_ends_with_the_same_bytes(project, monkeypatch, processes):
    trained()
    expected = outputs()
    resumptions = []
    for number in range(1, WRITES + 1):
        folder = project / str(number)
        folder.mkdir()
        (folder / "data").symlink_to(project / "data")
        (folder / "params.yaml").symlink_to(project / "params.yaml")
        monkeypatch.chdir(folder)
        process = processes.Process(target=train_until_write, args=(number,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        trained()
        assert outputs() == expected, number
        resumptions.append(record()["resumptions"])
    before_the_first_checkpoint = 7
    assert resumptions == [0] * before_the_first_checkpoint + [1] * (WRITES - before_the_first_checkpoint)


def test_resumed_at_each_epoch_it_ends_with_the_same_bytes(monkeypatch):
    trained()
    expected = outputs()
    shutil.rmtree(".checkpoints")
    checkpoint = train.Training._checkpoint

    def interrupted(self):
        checkpoint(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.Training, "_checkpoint", interrupted)
        for _ in range(SHORT["epochs"]):
            with pytest.raises(KeyboardInterrupt):
                trained()
    trained()
    assert outputs() == expected
    assert record()["resumptions"] == SHORT["epochs"]


def test_without_a_kill_there_are_that_many_writes(monkeypatch):
    writes, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *arguments: (writes.append(arguments[1]), replace(*arguments)))
    trained()
    assert len(writes) == WRITES


def test_the_command_killed_from_outside_ends_with_the_same_bytes():
    write_params(train={"epochs": 6, "batch_size": 6})
    write_mnist("data/mnist", train=599, test=TEST_IMAGES, seed=3)
    process = subprocess.Popen(command(), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and not list(Path(".checkpoints").glob("*/checkpoint.pt")):
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not Path("runs").exists()
    subprocess.run(command(), env=ENVIRONMENT, stderr=subprocess.DEVNULL, check=True)
    resumed = outputs()
    assert record()["resumptions"] == 1
    assert not list(Path(".checkpoints").iterdir())
    trained()
    assert outputs() == resumed
    assert record()["resumptions"] == 0


def test_time_is_summed_over_resumptions():
    first = training()
    first.run()
    path = first.scratch / "checkpoint.pt"
    state = load(path.read_bytes())
    state["progress"] |= {"seconds": 1000.0, "started_at": "2025-01-01T00:00:00+00:00"}
    path.write_bytes(saved(state))
    trained()
    assert 1000 < record()["seconds"] < 1100
    assert record()["started_at"] == "2025-01-01T00:00:00+00:00"


def test_a_checkpoint_of_another_configuration_is_not_resumed():
    training().run()
    write_params(train={"learning_rate": 0.02})
    assert trained().progress.resumptions == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:7],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-20],
        lambda content: b"\0" * len(content),
        lambda content: b"not a checkpoint\n",
        lambda content: saved([1, 2]),
        lambda content: saved({"model": {}, "optimizer": {}, "progress": {}}),
        lambda content: saved({"model": None}),
        lambda content: saved(None),
        lambda content: saved(load(content) | {"progress": {"steps": 3}}),
        lambda content: saved(load(content) | {"progress": None}),
        lambda content: saved(load(content) | {"optimizer": {"state": {}, "param_groups": []}}),
    ],
)
def test_an_unreadable_checkpoint_is_named_and_earlier_results_stay(monkeypatch, capsys, damage):
    trained()
    earlier = outputs()
    path = training().scratch / "checkpoint.pt"
    path.write_bytes(damage(path.read_bytes()))
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run_main(monkeypatch, "osa_exact", "0", "--no-tracking")
    assert caught.value.code == 1
    assert capsys.readouterr().err == f"error: the checkpoint {path} cannot be read: delete it to train from the start.\n"
    assert outputs() == earlier
    path.unlink()
    run_main(monkeypatch, "osa_exact", "0", "--no-tracking")
    assert outputs() == earlier


def saved(value) -> bytes:
    return train._saved(value)


def load(content: bytes) -> dict:
    return torch.load(io.BytesIO(content), weights_only=True)


# mistakes


@pytest.mark.parametrize(
    "changes, arguments, expected",
    [
        (
            {"model": {"image_size": 42}},
            ("vit", "0"),
            "model.image_size is 42, but the images are 28 pixels wide: write 28.",
        ),
        (
            {"train": {"drop_last": True, "batch_size": 64}},
            ("vit", "0"),
            "train.batch_size 64 is more than the 43 images: write a smaller one.",
        ),
        ({}, ("vti", "0"), "params.yaml has no variants.vti; did you mean 'vit'?"),
        ({"train": {"learning_rate": "1e-3"}}, ("vit", "0"), "params.yaml: train.learning_rate: '1e-3' is read as text"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_status_1(monkeypatch, capsys, changes, arguments, expected):
    write_params(**changes)
    with pytest.raises(SystemExit) as caught:
        run_main(monkeypatch, *arguments, "--no-tracking")
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {expected}")
    assert not Path("runs").exists()


def test_missing_data_is_named(monkeypatch, capsys):
    Path("data/mnist/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "vit", "0", "--no-tracking")
    assert "t10k-labels-idx1-ubyte.gz is missing; fetch the data again with `dvc repro -f fetch`." in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["fetch", "train", "evaluate", "report"])
def test_a_python_without_torch_is_named(stage):
    command = [sys.executable, "-S", "-m", f"pipeline.{stage}"]  # -S: without the installed packages
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"error: {sys.executable} has no torch: run `make setup` and put .venv/bin first on PATH.\n"


# tracking


def watcher(project, monkeypatch, script: str) -> None:
    """Puts a shell script in the place of the tracking process."""
    path = project / "watcher"
    path.write_text(f"#!/bin/sh\necho $$ > {project}/pid\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(train.sys, "executable", str(path))


def assert_gone(project):
    with pytest.raises(ProcessLookupError):
        os.kill(int((project / "pid").read_text()), 0)


@pytest.mark.parametrize(
    "script", ["exec sleep 100", "exec 0<&-; exec sleep 100"], ids=["hangs", "closes its input and hangs"]
)
def test_tracking_that_hangs_is_given_up(project, monkeypatch, capfd, script):
    watcher(project, monkeypatch, script)
    monkeypatch.setattr(train, "TRACKING_PATIENCE_SECONDS", 1)
    with train._tracked(project / "scratch"):
        start = started(project)
    assert 1 <= time.monotonic() - start < 9
    assert capfd.readouterr().err.startswith("warning: MLflow did not answer; ")
    assert_gone(project)


def test_tracking_that_cannot_start_is_done_without(project, monkeypatch, capfd):
    monkeypatch.setattr(train.sys, "executable", str(project / "no such program"))
    run_main(monkeypatch, "osa_exact", "0")
    assert len(outputs()) == 3
    assert "warning: this run is not tracked, because its watcher cannot be started (" in capfd.readouterr().err


@pytest.mark.parametrize("script", ["exit 3", "kill -9 $$"])
def test_tracking_that_dies_is_not_waited_for(project, monkeypatch, script):
    watcher(project, monkeypatch, script)
    run_main(monkeypatch, "osa_exact", "0")
    assert len(outputs()) == 3
    assert not list(Path(".checkpoints").iterdir())


def test_tracking_sees_the_outputs_before_its_input_closes(project, monkeypatch):
    watcher(project, monkeypatch, "cat > /dev/null; ls -R runs weights records > seen; ls $4 >> seen")
    run_main(monkeypatch, "osa_exact", "0")
    seen = Path("seen").read_text().split()
    assert {*OUTPUTS, "0.pt", "0.json", "record.json", "checkpoint.pt"} <= set(seen)


def test_a_training_that_fails_ends_its_tracking(project, monkeypatch):
    def fail(self):
        started(project)
        raise ZeroDivisionError

    watcher(project, monkeypatch, "exec cat")
    monkeypatch.setattr(train.Training, "run", fail)
    with pytest.raises(ZeroDivisionError):
        run_main(monkeypatch, "osa_exact", "0")
    assert_gone(project)


def started(project) -> float:
    """Waits for the tracking process to be there; the time."""
    path = project / "pid"
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return time.monotonic()
