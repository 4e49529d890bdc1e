"""Evaluate measures the saved weights, not what training said of them, and counts every run that params.yaml lists."""

import json
import math
import shutil
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch

from pipeline import evaluate, params, train
from pipeline.errors import UserError
from pipeline.summary import summarise
from tests.pipeline import synthetic


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A project with all its runs, evaluated once. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    synthetic.write_project(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        evaluate.main()
    return folder


@pytest.fixture
def project(finished, tmp_path, monkeypatch):
    """A copy of it that a test may change."""
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / "project"))
    return tmp_path / "project"


def table(folder, name):
    return pd.read_csv(folder / "paper_outputs/evaluation" / f"{name}.csv")


def run_row(folder, variant, seed):
    runs = table(folder, "runs")
    return runs[(runs["variant"] == variant) & (runs["seed"] == seed)].iloc[0]


def test_statistics_by_hand():
    s = summarise([1.0, 2.0, 4.0, 9.0], 0.95)
    half = 3.182446305 * math.sqrt(38 / 3) / 2  # t(0.975, 3) from a table
    assert (s.n, s.mean, s.min, s.max) == (4, 4.0, 1.0, 9.0)
    assert s.std == pytest.approx(math.sqrt(38 / 3))
    assert (s.low, s.high) == pytest.approx((4 - half, 4 + half), rel=1e-8)


def test_statistics_of_one_value_have_no_spread_and_of_none_no_mean():
    one, none = summarise([0.5], 0.95), summarise([], 0.95)
    assert (one.n, one.mean, one.min, one.max) == (1, 0.5, 0.5, 0.5)
    assert all(map(math.isnan, (one.std, one.low, one.high)))
    assert none.n == 0 and all(map(math.isnan, (none.mean, none.std, none.low, none.min, none.max)))


def test_tables_hold_what_the_weights_say(finished, monkeypatch):
    monkeypatch.chdir(finished)
    settings = params.load()
    config = params.resolve(settings, "vit_noskip")
    model = train.build_model(config, 1)
    mnist = evaluate.data.load(pixel_scaling="unit")
    with torch.no_grad():
        logits = model(mnist.test_images)
    predictions = logits.argmax(1).tolist()
    labels = mnist.test_labels.tolist()
    row = run_row(finished, "vit_noskip", 1)
    assert row["test_accuracy"] == pytest.approx(np.mean(np.equal(predictions, labels)), rel=1e-5)
    loss = torch.nn.functional.cross_entropy(logits, mnist.test_labels)
    assert row["test_loss"] == pytest.approx(loss.item(), rel=1e-5)

    confusion = table(finished, "confusion").query("variant == 'vit_noskip' and seed == 1")
    counts = confusion.set_index(["label", "prediction"])["count"]
    assert counts[counts > 0].to_dict() == Counter(zip(labels, predictions, strict=True))

    per_class = table(finished, "per_class").query("variant == 'vit_noskip' and seed == 1").set_index("class")
    for digit in range(10):
        hits = [p == digit for p, label in zip(predictions, labels, strict=True) if label == digit]
        assert per_class.loc[digit, "images"] == len(hits)
        assert per_class.loc[digit, "accuracy"] == pytest.approx(np.mean(hits), rel=1e-5)


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


def test_softmax_attention_has_no_orthogonality(finished):
    assert set(table(finished, "layers")["variant"]) == {"osa_qr", "osa_ns", "osa_exact"}
    assert len(table(finished, "layers")) == 3 * 3 * 3 * 2  # models, seeds, layers, heads


def test_summary_is_over_the_runs(finished):
    accuracies = table(finished, "runs").query("variant == 'vit'")["test_accuracy"]
    row = table(finished, "summary").set_index("variant").loc["vit"]
    assert (row["n_finished"], row["n_diverged"], row["n_missing"]) == (3, 0, 0)
    assert row["test_accuracy_mean"] == pytest.approx(accuracies.mean(), rel=1e-5)
    assert row["test_accuracy_std"] == pytest.approx(accuracies.std(ddof=1), rel=1e-4)
    metric = json.loads((finished / "paper_outputs/evaluation/summary.json").read_text())["vit"]
    assert metric["n"] == 3 and metric["test_accuracy"] == row["test_accuracy_mean"]


def test_curves_by_hand():
    histories = pd.DataFrame({"seed": [0, 0, 1, 1], "step": [0, 1, 0, 1], "train_loss": [2.0, 1.0, 4.0, math.nan]})
    histories["epoch"] = histories["step"] / 7
    histories = histories.assign(variant="a", train_accuracy=0.5, test_loss=1.0, test_accuracy=0.5)
    curves = evaluate.summarise_curves(histories, 0.95).query("curve == 'train_loss'").set_index("step")
    assert curves.loc[0, ["n", "mean", "min", "max"]].tolist() == [2, 3.0, 2.0, 4.0]
    assert curves.loc[0, "std"] == pytest.approx(math.sqrt(2))
    assert curves.loc[1, ["n", "mean"]].tolist() == [1, 1.0]  # the diverged seed has no value there
    wide = evaluate.one_column_per_variant(curves.reset_index(), "train_loss", ["b", "a"])
    assert wide.columns.tolist() == ["epoch", "b", "a"] and wide["a"].tolist() == [3.0, 1.0]


def test_wide_curves_have_a_column_for_each_variant(finished):
    wide = table(finished, "train_loss")
    assert wide.columns.tolist() == ["epoch", "osa_qr", "osa_ns", "vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact"]
    assert len(wide) == synthetic.EPOCHS * synthetic.POINTS + 1


def test_second_evaluation_writes_the_same_bytes(project):
    before = {path.name: path.read_bytes() for path in (project / "paper_outputs/evaluation").iterdir()}
    evaluate.main()
    assert {path.name: path.read_bytes() for path in (project / "paper_outputs/evaluation").iterdir()} == before


def test_missing_and_unlisted_runs_are_named(project, capsys):
    shutil.rmtree("runs/vit/1")
    (project / "runs/vit/2/weights.pt").unlink()
    shutil.copytree("runs/osa_qr/0", "runs/osa_qr/5")
    evaluate.main()
    warnings = capsys.readouterr().err
    assert "2 of 18 runs of params.yaml are not trained yet: vit/1, vit/2" in warnings
    assert "left out, because params.yaml does not list them: runs/osa_qr/5" in warnings
    assert run_row(project, "vit", 1)["status"] == "missing"
    row = table(project, "summary").set_index("variant").loc["vit"]
    assert (row["n_finished"], row["n_missing"]) == (1, 2)
    assert math.isnan(row["test_accuracy_std"])
    assert 5 not in set(table(project, "runs")["seed"])


def test_whole_numbers_stay_whole_beside_missing_runs(project):
    metrics = json.loads((project / "runs/vit/0/metrics.json").read_text())
    (project / "runs/vit/0/metrics.json").write_text(json.dumps(metrics | {"num_parameters": 12345678}))
    shutil.rmtree("runs/vit/1")
    evaluate.main()
    assert ",12345678," in (project / "paper_outputs/evaluation/runs.csv").read_text()


def test_no_run_at_all_is_an_error_with_the_remedy(project, capsys):
    shutil.rmtree("runs")
    with pytest.raises(SystemExit):
        evaluate.main()
    assert "`dvc repro`" in capsys.readouterr().err
    assert len(table(project, "runs")) == 18  # the results before are still there


def test_diverged_runs_are_counted_and_not_averaged(tmp_path, monkeypatch):
    synthetic.write_project(tmp_path, diverged={("vit", 2)})
    monkeypatch.chdir(tmp_path)
    evaluate.main()
    row = table(tmp_path, "summary").set_index("variant").loc["vit"]
    finished = table(tmp_path, "runs").query("variant == 'vit' and seed != 2")
    assert (row["n_finished"], row["n_diverged"]) == (2, 1)
    assert row["test_accuracy_mean"] == pytest.approx(finished["test_accuracy"].mean(), rel=1e-5)
    diverged = run_row(tmp_path, "vit", 2)
    assert diverged["status"] == "diverged" and diverged["diverged_at_step"] == 117 * 7
    assert math.isnan(diverged["test_accuracy"]) and math.isnan(diverged["train_loss"])
    counts = table(tmp_path, "curves").query("variant == 'vit' and curve == 'test_loss'").set_index("step")["n"]
    assert counts[117 * 6] == 3 and counts[117 * 7] == 2  # its curve counts up to there
    assert ("vit", 2) not in set(zip(*table(tmp_path, "per_class")[["variant", "seed"]].to_numpy().T, strict=True))


def change_accuracy(images: float) -> None:
    with open("runs/osa_ns/1/metrics.json") as file:
        metrics = json.load(file)
    metrics["test_accuracy"] += images / 97  # of the synthetic test set
    with open("runs/osa_ns/1/metrics.json", "w") as file:
        json.dump(metrics, file)


def test_accuracy_may_differ_by_images_that_rounding_tips_over(project):
    change_accuracy(params.load().evaluate.tolerance_images)
    evaluate.main()


def test_weights_that_contradict_the_metrics_are_an_error(project, capsys):
    change_accuracy(params.load().evaluate.tolerance_images + 1)
    with pytest.raises(SystemExit):
        evaluate.main()
    message = capsys.readouterr().err
    assert "runs/osa_ns/1/metrics.json" in message and "`dvc repro -f train@osa_ns-1`" in message


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"no weights"),
        lambda path: torch.save({}, path),
        lambda path: path.write_bytes(path.read_bytes()[:-50]),
    ],
)
def test_weights_that_do_not_fit_are_an_error(project, capsys, damage):
    damage(project / "runs/vit/0/weights.pt")
    with pytest.raises(SystemExit):
        evaluate.main()
    message = capsys.readouterr().err
    assert message.startswith("error: runs/vit/0/weights.pt is damaged") and message.count("\n") == 1


def test_runs_without_a_single_finished_one_have_empty_tables(tmp_path, monkeypatch):
    def one_variant(raw):
        raw["run"]["variants"] = ["vit"]

    synthetic.write_project(tmp_path, one_variant, seeds=[0], diverged={("vit", 0)})
    monkeypatch.chdir(tmp_path)
    evaluate.main()
    assert len(table(tmp_path, "per_class")) == 0 and len(table(tmp_path, "layers")) == 0
    assert table(tmp_path, "summary")["n_diverged"].tolist() == [1]


def test_find_runs_raises_a_user_error(tmp_path, monkeypatch):
    synthetic.write_params(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="none of the 18 runs"):
        evaluate.find_runs(params.load())
