"""Evaluate measures the saved weights, not what training said of them."""

import gzip
from collections import Counter

import numpy as np
import pytest
import torch

import osa
from osa import reference
from pipeline.config import params, records
from pipeline.core import files
from pipeline.data import idx
from pipeline.results import evaluate
from pipeline.training.loop import build_model
from pipeline.training.run import Run
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
    return files.read_json(Run(variant, seed).evaluated)


def test_it_holds_what_the_weights_say(project):
    settings = params.load()
    config = params.resolve(settings, "vit_noskip")
    model = build_model(config, 1)
    mnist = idx.read_data("data/mnist", settings.data.pixel_scaling)
    with torch.no_grad():
        logits = model(mnist.test_images[:])
    predictions = logits.argmax(1).tolist()
    labels = mnist.test_labels.tolist()
    found = evaluated("vit_noskip", 1)
    assert found["test_accuracy"] == pytest.approx(np.mean(np.equal(predictions, labels)), rel=1e-5)
    loss = torch.nn.functional.cross_entropy(logits, mnist.test_labels)
    assert found["test_loss"] == pytest.approx(loss.item(), rel=1e-5)
    counts = {(i, j): n for i, row in enumerate(found["confusion"]) for j, n in enumerate(row) if n}
    assert counts == Counter(zip(labels, predictions, strict=True))
    wrong = {str(image): p for image, (p, label) in enumerate(zip(predictions, labels, strict=True)) if p != label}
    assert found["mistakes"] == wrong and 0 < len(wrong) < len(labels)
    for row in found["per_class"]:
        hits = [p == row["class"] for p, label in zip(predictions, labels, strict=True) if label == row["class"]]
        assert row["images"] == len(hits)
        assert row["accuracy"] == pytest.approx(np.mean(hits), rel=1e-5)
    assert found["layers"] == []  # softmax attention has no orthogonality
    assert found["metrics_sha256"] == files.sha256("paper_outputs/runs/table_2/vit_noskip/1/metrics.json")


def test_a_diverged_run_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.write_project(tmp_path, two_models, seeds=[0], diverged={("osa_ns", 0)})
    found = evaluated("osa_ns", 0)
    assert (found["test_accuracy"], found["layers"], found["confusion"]) == (None, [], [])
    assert (found["calibration_error"], found["mistakes"]) == (None, {})


def test_the_calibration_error_by_hand():
    """Four images in three bins: two of which one is right, one that is right, and a wrong one that is certain."""
    confidence, labels = torch.tensor([0.62, 0.65, 0.9, 1.0], dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    probabilities = torch.stack([confidence, 1 - confidence], dim=1)
    error = evaluate.calibration_error(probabilities, labels)
    assert error == pytest.approx((2 * abs(0.635 - 0.5) + (1 - 0.9) + 1) / 4)
    assert evaluate.calibration_error(torch.eye(3, dtype=torch.float64), torch.arange(3)) == 0


def test_committed_mistakes_are_as_many_as_training_counted(monkeypatch, subtests):
    """To the last image, where other batches, threads or devices may tip a few over."""
    monkeypatch.chdir(files.ROOT)
    paths = sorted((files.ROOT / "paper_outputs/evaluations").glob("*/*/evaluation.json"))
    assert paths
    for path in paths:
        name, seed = path.parts[-3], int(path.parts[-2])
        with subtests.test(name=name, seed=seed):
            found, trained = files.read_json(path), Run(name, seed).metrics()
            images = sum(row["images"] for row in found["per_class"])
            assert images - len(found["mistakes"]) == round(images * trained["test_accuracy"])
            assert found["test_accuracy"] == pytest.approx(trained["test_accuracy"], abs=1e-6)


def test_confusion_counts_by_hand():
    labels, predictions = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([0, 1, 2, 0, 2])
    confusion = evaluate.confusion_matrix(labels, predictions, 4)
    assert confusion.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 2, 0], [0, 0, 0, 0]]
    per_class = evaluate.per_class_accuracy(confusion)
    assert per_class["class"].tolist() == [0, 2]  # classes without images have no accuracy
    assert per_class["accuracy"].tolist() == pytest.approx([0.5, 2 / 3])


@pytest.mark.parametrize("name", ["osa_exact", "osa_qr", "osa_ns"])
def test_what_is_measured_of_each_head_against_dense_matrices(name):
    """Every column again from the definitions, head by head, of a float64 model, so that only rounding differs."""
    model = osa.create_model(name, embed_dim=24, num_heads=3, depth=2, patch_size=7, mlp_ratio=2).double()  # N = 17, d_v = 8
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # no longer W̃ with equal singular values, nor one α
    images = torch.rand(5, 1, 28, 28, dtype=torch.float64)
    table = evaluate.layer_table(model, images).reset_index(drop=True)
    assert table[["layer", "head"]].to_numpy().tolist() == [[i, j] for i in range(2) for j in range(3)]
    x = model.tokens(images)
    for layer, block in enumerate(model.blocks):
        for head in range(3):
            row = table.iloc[3 * layer + head].to_dict()
            expected = by_hand(block.attention, head, x)
            assert row.keys() == {"layer", "head", *expected}
            for key, value in expected.items():
                assert row[key] == pytest.approx(value, rel=1e-6, abs=1e-11, nan_ok=True), (layer, head, key)
        x = block(x)


@torch.no_grad()
def by_hand(attention, head, x) -> dict[str, float]:
    """The columns of one head with input x (images, N, d)."""
    d_v = attention.embed_dim // attention.num_heads
    rows = slice(head * d_v, (head + 1) * d_v)
    alpha, w_out = attention.alpha[head], attention.out.weight[:, rows].mT
    w_query, w_key, w_value = (linear.weight[rows].mT for linear in (attention.query, attention.key, attention.value))
    query, key, scale = x @ w_query, x @ w_key, alpha / d_v**0.5
    skew = reference.skew(query, key, scale)
    basis = {"qr": reference.qr_basis, "newton_schulz": reference.newton_schulz_basis}.get(attention.options["method"])

    def attention_matrix(query, key):
        if basis is None:
            return reference.orthogonal_attention_matrix(query, key, scale)
        return reference.low_rank_matrix(query, key, scale, basis(torch.cat([query, key], -1)))

    def head_output(x):
        return attention_matrix(x @ w_query, x @ w_key) @ x @ w_value @ w_out

    def norm(matrix):
        return np.linalg.norm(matrix, 2, axis=(-2, -1))

    a, exponential = attention_matrix(query, key), reference.orthogonal_attention_matrix(query, key, scale)
    m = torch.cat([query, key], -1)
    jacobian_kappa = float("nan")
    if head == 0:
        jacobian = torch.func.jacrev(head_output)(x[0]).reshape(x[0].numel(), -1)
        nonzero = torch.linalg.svdvals(jacobian)[: len(x[0]) * d_v]
        jacobian_kappa = (nonzero[0] / nonzero[-1]).item()
    over_images = {"error": norm(a.mT @ a - torch.eye(a.shape[-1])), "exp_error": norm(a - exponential), "norm": norm(skew)}
    return {
        "alpha": alpha.item(),
        **{f"{name}_max": values.max() for name, values in over_images.items()},
        **{f"{name}_median": np.median(values) for name, values in over_images.items()},
        "size_max": abs(scale.item()) * (norm(m) ** 2).max(),
        "condition_median": np.median(np.linalg.cond(m)),
        "weight_kappa": np.divide(*np.linalg.svd(w_query @ w_key.mT - w_key @ w_query.mT)[1][[0, 2 * d_v - 1]]),
        "jacobian_kappa": jacobian_kappa,
        "layer_kappa": np.linalg.cond(attention.out.weight @ attention.value.weight),
    }


def test_errors_are_those_of_the_precision_in_which_the_model_runs():
    model = osa.create_model("osa_exact", embed_dim=24, num_heads=3, depth=2, patch_size=7)
    images = torch.rand(5, 1, 28, 28)
    in_float32, in_float64 = evaluate.layer_table(model, images), evaluate.layer_table(model.double(), images.double())
    for column in ("error_median", "exp_error_median"):
        assert 1e-8 < in_float32[column].min() and in_float32[column].max() < 1e-5
        assert in_float64[column].max() < 1e-13


def change_accuracy(images: float) -> None:
    run = Run("osa_ns", 1)
    metrics = run.metrics()
    metrics["test_accuracy"] += images / 97  # the synthetic test set's size
    files.write_json(run.folder / "metrics.json", metrics)
    synthetic.rewrite(run.folder, files=records.digests(run.folder))


def test_weights_may_contradict_the_metrics_by_what_rounding_tips_over_and_no_more(project, capsys):
    change_accuracy(evaluate.TOLERANCE_IMAGES)
    evaluate.main(["osa_ns", "1"])
    change_accuracy(1)
    before = Run("osa_ns", 1).evaluated.read_bytes()
    with pytest.raises(SystemExit):
        evaluate.main(["osa_ns", "1"])
    message = capsys.readouterr().err
    assert "osa_ns/1/metrics.json" in message and "dvc repro -f train@osa_ns-1" in message
    assert Run("osa_ns", 1).evaluated.read_bytes() == before


def test_a_flipped_label_is_named(project, capsys):
    labels = project / "data/mnist/t10k-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(labels.read_bytes()))
    content[-1] = (content[-1] + 1) % 10
    labels.write_bytes(gzip.compress(content))
    with pytest.raises(SystemExit):
        evaluate.main(["osa_ns", "1"])
    message = capsys.readouterr().err
    assert "data/mnist" in message and "dvc repro -f fetch" in message
