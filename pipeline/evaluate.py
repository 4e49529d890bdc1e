"""The evaluate stage: one run measured again from its weights: `python -m pipeline.evaluate osa_qr 0`.

Writes runs/VARIANT/SEED/evaluation.json: loss, accuracy, per-class accuracy and confusion matrix on the full test set, and
for each layer and head of orthogonal attention how orthogonal it is. Git keeps the file, so that a run need not be measured,
nor its weights be there, where another one is added.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

import osa
from osa.functional import orthogonal_attention_matrix
from pipeline import data, files, train
from pipeline.errors import UserError, entry_point
from pipeline.params import Params, RunConfig, load, resolve
from pipeline.summary import rounded, rounded_table


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("variant", help="a name under variants in params.yaml")
    parser.add_argument("seed", type=int)
    chosen = parser.parse_args(arguments)
    train.make_deterministic()
    path = Path("runs", chosen.variant, str(chosen.seed), "evaluation.json")
    files.write_json(path, evaluation(load(), chosen.variant, chosen.seed))


def evaluation(params: Params, variant: str, seed: int) -> dict:
    """What evaluation.json holds: the measurements of a run, empty if it diverged, and which training they are of."""
    metrics = Path("runs", variant, str(seed), "metrics.json")
    trained, training = files.read_json(metrics), {"metrics_sha256": files.sha256(metrics)}
    if trained["diverged"]:
        return training | {"test_loss": None, "test_accuracy": None, "per_class": [], "confusion": [], "layers": []}
    return training | measure(params, variant, seed, trained["test_accuracy"])


def measure(params: Params, variant: str, seed: int, trained_accuracy: float) -> dict:
    """The measurements of one finished run, to the digits that files hold."""
    config = resolve(params, variant)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mnist = data.load(pixel_scaling=config.data.pixel_scaling, device=device)
    model = load_model(config, variant, seed).to(device)
    predictions, loss = predict(model, mnist.test_images, mnist.test_labels, params.evaluate.batch_size)
    confusion = confusion_matrix(mnist.test_labels, predictions, config.model.num_classes)
    accuracy = confusion.trace() / confusion.sum()
    check_accuracy(variant, seed, accuracy, trained_accuracy, len(predictions), params.evaluate.tolerance_images)
    layers = attention_statistics(model, mnist.test_images[: params.evaluate.attention_images])
    return {
        "test_loss": rounded(loss),
        "test_accuracy": rounded(accuracy),
        "per_class": rounded_table(per_class_accuracy(confusion)).to_dict("records"),
        "confusion": confusion.tolist(),
        "layers": rounded_table(layers).to_dict("records"),
    }


def load_model(config: RunConfig, variant: str, seed: int) -> torch.nn.Module:
    """The trained model of a run. Raises UserError if its weights are not those of a model of this configuration."""
    path = train.weights_path(variant, seed)
    model = train.build_model(config, seed)
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: train it with `dvc repro train@{variant}-{seed}`, or `dvc pull` it.") from None
    except train.UNREADABLE:
        raise UserError(f"{path} is damaged, or of another model than params.yaml has: run `dvc repro`.") from None
    return model.eval()


@torch.no_grad()
def predict(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, batch_size: int) -> tuple:
    """The predicted class of every image, (n,), and the mean cross-entropy, summed in float64."""
    predictions, loss = [], 0.0
    for batch, target in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        logits = model(batch)  # (batch, classes)
        loss += F.cross_entropy(logits.double(), target, reduction="sum").item()
        predictions.append(logits.argmax(-1))
    return torch.cat(predictions), loss / len(images)


def check_accuracy(variant: str, seed: int, measured: float, trained: float, num_images: int, tolerance_images: int) -> None:
    """The weights must repeat the accuracy that training measured, but for images that rounding can tip over: it differs
    with the batch size, the number of threads and the device."""
    if abs(measured - trained) > (tolerance_images + 0.5) / num_images:
        raise UserError(
            f"{train.weights_path(variant, seed)} has a test accuracy of {measured:.4f}, but "
            f"runs/{variant}/{seed}/metrics.json says {trained:.4f}: "
            f"train again with `dvc repro -f train@{variant}-{seed}`."
        )


def confusion_matrix(labels: torch.Tensor, predictions: torch.Tensor, num_classes: int) -> np.ndarray:
    """Counts (classes, classes): row = label, column = prediction."""
    pairs = (labels * num_classes + predictions).cpu().numpy()
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def per_class_accuracy(confusion: np.ndarray) -> pd.DataFrame:
    """One row for each class that has images."""
    images = confusion.sum(axis=1)
    classes = images.nonzero()[0]
    accuracy = confusion.diagonal()[classes] / images[classes]
    return pd.DataFrame({"class": classes, "images": images[classes], "accuracy": accuracy})


@torch.no_grad()
def attention_statistics(model: torch.nn.Module, images: torch.Tensor) -> pd.DataFrame:
    """For each layer and head of orthogonal attention: α, and maximum and median over images of ‖AᵀA − I‖₂ and ‖S‖₂.

    A is the matrix that the model's own method gives in its own precision; the norms are taken in float64. A model
    without orthogonal attention has no rows.
    """
    inputs = []
    layers = [block.attention for block in model.blocks if isinstance(block.attention, osa.OrthogonalSelfAttention)]
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in layers]
    model(images)
    for hook in hooks:
        hook.remove()
    tables = [head_statistics(number, layer, x) for number, (layer, x) in enumerate(zip(layers, inputs, strict=True))]
    return pd.concat(tables) if tables else pd.DataFrame()


def head_statistics(number: int, layer: osa.OrthogonalSelfAttention, x: torch.Tensor) -> pd.DataFrame:
    error, norm = (values.cpu().numpy() for values in orthogonality(layer, x))  # (images, heads) each
    return pd.DataFrame(
        {
            "layer": number,
            "head": np.arange(layer.num_heads),
            "alpha": layer.alpha.expand(layer.num_heads).cpu().numpy(),
            "error_max": error.max(axis=0),
            "error_median": np.median(error, axis=0),
            "norm_max": norm.max(axis=0),
            "norm_median": np.median(norm, axis=0),
        }
    )


def orthogonality(layer: osa.OrthogonalSelfAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """‖AᵀA − I‖₂ and ‖S‖₂, each (batch, heads), for a layer's input x (batch, N, d)."""
    query, key, _ = layer.project(x)  # (batch, heads, N, d_v)
    a = orthogonal_attention_matrix(query, key, scale=layer.scale(), **layer.options).double()  # (batch, heads, N, N)
    half = layer.scale().double() * query.double() @ key.double().mT
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.matrix_norm(a.mT @ a - identity, 2), torch.linalg.matrix_norm(half - half.mT, 2)


if __name__ == "__main__":
    main()
