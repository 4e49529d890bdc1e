"""Evaluate measures the saved weights, not what training said of them."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import evaluate, files, params, train
from tests.pipeline import synthetic


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with all runs of two models, as working directory."""
    monkeypatch.chdir(tmp_path)
    synthetic.write_project(tmp_path, two_models, seeds=[0, 1])
    return tmp_path


def two_models(raw):
    raw["run"]["variants"] = ["vit_noskip", "osa_ns"]


def evaluated(variant: str, seed: int) -> dict:
    evaluate.main([variant, str(seed)])
    return files.read_json(Path("runs", variant, str(seed), "evaluation.json"))


def test_it_holds_what_the_weights_say(project):
    settings = params.load()
    config = params.resolve(settings, "vit_noskip")
    model = train.build_model(config, 1)
    mnist = evaluate.data.load(pixel_scaling="unit")
    with torch.no_grad():
        logits = model(mnist.test_images)
    predictions = logits.argmax(1).tolist()
    labels = mnist.test_labels.tolist()
    found = evaluated("vit_noskip", 1)
    assert found["test_accuracy"] == pytest.approx(np.mean(np.equal(predictions, labels)), rel=1e-5)
    loss = torch.nn.functional.cross_entropy(logits, mnist.test_labels)
    assert found["test_loss"] == pytest.approx(loss.item(), rel=1e-5)
    counts = {(i, j): n for i, row in enumerate(found["confusion"]) for j, n in enumerate(row) if n}
    assert counts == Counter(zip(labels, predictions, strict=True))
    for row in found["per_class"]:
        hits = [p == row["class"] for p, label in zip(predictions, labels, strict=True) if label == row["class"]]
        assert row["images"] == len(hits)
        assert row["accuracy"] == pytest.approx(np.mean(hits), rel=1e-5)
    assert found["layers"] == []  # softmax attention has no orthogonality
    assert found["metrics_sha256"] == files.sha256("runs/vit_noskip/1/metrics.json")


def test_each_layer_and_head_of_orthogonal_attention_has_a_row(project):
    rows = evaluated("osa_ns", 0)["layers"]
    assert [(row["layer"], row["head"]) for row in rows] == [(i, j) for i in range(3) for j in range(2)]


def test_a_second_evaluation_writes_the_same_bytes(project):
    path = project / "runs/osa_ns/0/evaluation.json"
    evaluated("osa_ns", 0)
    before = path.read_bytes()
    evaluated("osa_ns", 0)
    assert path.read_bytes() == before


def test_a_diverged_run_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.write_project(tmp_path, two_models, seeds=[0], diverged={("osa_ns", 0)})
    found = evaluated("osa_ns", 0)
    assert (found["test_accuracy"], found["layers"], found["confusion"]) == (None, [], [])


def test_confusion_counts_by_hand():
    labels, predictions = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([0, 1, 2, 0, 2])
    confusion = evaluate.confusion_matrix(labels, predictions, 4)
    assert confusion.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 2, 0], [0, 0, 0, 0]]
    per_class = evaluate.per_class_accuracy(confusion)
    assert per_class["class"].tolist() == [0, 2]  # classes without images have no accuracy
    assert per_class["accuracy"].tolist() == pytest.approx([0.5, 2 / 3])


@pytest.mark.parametrize("method, alpha", [("exact", 0.7), ("qr", 0.7), ("newton_schulz", 40.0)])
def test_attention_statistics_against_dense_matrices(method, alpha):
    def attention():
        return evaluate.osa.OrthogonalSelfAttention(12, 3, method=method, alpha_init=alpha)

    parts = {"embed_dim": 12, "depth": 2, "mlp_ratio": 2, "attention": attention, "skip": False, "norm": False}
    model = evaluate.osa.VisionTransformer(image_size=28, patch_size=7, num_classes=10, **parts)
    images = torch.rand(5, 1, 28, 28)
    statistics = evaluate.attention_statistics(model, images)
    assert statistics[["layer", "head"]].to_numpy().tolist() == [[i, j] for i in range(2) for j in range(3)]
    assert statistics["alpha"].to_numpy() == pytest.approx(np.full(6, alpha))

    first = model.blocks[0].attention
    q, k, _ = (x.detach().double().numpy() for x in first.project(model.tokens(images)))
    s = alpha / 2 * (q @ k.swapaxes(-1, -2) - k @ q.swapaxes(-1, -2))  # d_v = 4
    norms = np.linalg.norm(s, 2, axis=(-2, -1))  # (images, heads)
    assert statistics["norm_max"][:3].to_numpy() == pytest.approx(norms.max(0), rel=1e-5)
    assert statistics["norm_median"][:3].to_numpy() == pytest.approx(np.median(norms, 0), rel=1e-5)

    options = {"scale": first.scale(), "method": method}
    a = evaluate.orthogonal_attention_matrix(*first.project(model.tokens(images))[:2], **options)
    a = a.detach().double().numpy()
    errors = np.linalg.norm(a.swapaxes(-1, -2) @ a - np.eye(a.shape[-1]), 2, axis=(-2, -1))
    assert statistics["error_max"][:3].to_numpy() == pytest.approx(errors.max(0), rel=1e-5)
    assert statistics["error_median"][:3].to_numpy() == pytest.approx(np.median(errors, 0), rel=1e-5)
    orthogonal = statistics["error_max"] < 1e-4
    assert orthogonal.all() if method != "newton_schulz" else not orthogonal.any()


def change_accuracy(images: float) -> None:
    with open("runs/osa_ns/1/metrics.json") as file:
        metrics = json.load(file)
    metrics["test_accuracy"] += images / 97  # of the synthetic test set
    with open("runs/osa_ns/1/metrics.json", "w") as file:
        json.dump(metrics, file)


def test_accuracy_may_differ_by_images_that_rounding_tips_over(project):
    change_accuracy(params.load().evaluate.tolerance_images)
    evaluate.main(["osa_ns", "1"])


def test_weights_that_contradict_the_metrics_are_an_error(project, capsys):
    change_accuracy(params.load().evaluate.tolerance_images + 1)
    with pytest.raises(SystemExit):
        evaluate.main(["osa_ns", "1"])
    message = capsys.readouterr().err
    assert "runs/osa_ns/1/metrics.json" in message and "`dvc repro -f train@osa_ns-1`" in message
    assert not (project / "runs/osa_ns/1/evaluation.json").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"no weights"),
        lambda path: torch.save({}, path),
        lambda path: path.write_bytes(path.read_bytes()[:-50]),
    ],
)
def test_weights_that_do_not_fit_are_an_error(project, capsys, damage):
    damage(project / "weights/osa_ns/0.pt")
    with pytest.raises(SystemExit):
        evaluate.main(["osa_ns", "0"])
    message = capsys.readouterr().err
    assert message.startswith("error: weights/osa_ns/0.pt is damaged") and message.count("\n") == 1


def test_weights_that_are_not_there_are_named_with_the_remedy(project, capsys):
    (project / "weights/osa_ns/0.pt").unlink()
    with pytest.raises(SystemExit):
        evaluate.main(["osa_ns", "0"])
    assert "error: weights/osa_ns/0.pt is missing: train it with `dvc repro train@osa_ns-0`" in capsys.readouterr().err
