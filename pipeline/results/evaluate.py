"""Measures a model's runs from their weights: `python -m pipeline evaluate osa_qr`.

Each run gets its own file in paper_outputs/evaluations, so evaluating a new run requires only the weights of that run. The
key `mistakes` maps the index of each misclassified test image to the predicted class. The file omits correct predictions.
"""

import copy
import math
import sys

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from osa.functional import orthogonal_attention_matrix
from osa.modules import OrthogonalSelfAttention
from osa.vit import VisionTransformer
from pipeline.config import params
from pipeline.config.params import RunConfig
from pipeline.core import files, provenance
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.core.files import rounded, rounded_table
from pipeline.data import idx
from pipeline.results import measures
from pipeline.training.loop import configure_torch
from pipeline.training.run import Run

BATCH_SIZE = 500
CALIBRATION_BINS = 15
ATTENTION_IMAGES = 128  # number of test images on which attention is measured
TOLERANCE_IMAGES = 5  # number of predictions that rounding may change on another device or with another batch size


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("evaluate", __doc__)
    parser.add_argument("variant", help="a name under variants in params.yaml")
    parser.add_argument("seeds", type=params.seed, nargs="*", metavar="seed", help="default: those of params.yaml")
    chosen = parser.parse_args(params.without_stage(sys.argv[1:] if arguments is None else arguments))
    settings = params.load()
    configure_torch()
    config = params.resolve(settings, chosen.variant)
    for seed in chosen.seeds or settings.run.seeds:
        run = Run(chosen.variant, seed)
        files.write_json(run.evaluated, evaluation(run, config))


def evaluation(run: Run, config: RunConfig) -> dict:
    """Returns the content of evaluation.json: digests and measurements. The measurements are empty if the run diverged."""
    record = run.ended_record()
    training = {"metrics_sha256": record.files["metrics.json"], "weights_sha256": record.weights}
    if record.status == "diverged":
        numbers = dict.fromkeys(("test_loss", "test_accuracy", "calibration_error"))
        return training | numbers | {"per_class": [], "confusion": [], "mistakes": {}, "layers": []}
    return training | measurements(run, config, run.metrics()["test_accuracy"])


def measurements(run: Run, config: RunConfig, trained_accuracy: float) -> dict:
    """Measures a finished run. Raises UserError if the images, labels or accuracy have changed since training."""
    device, model = provenance.default_device(), run.load_model(config)
    folder = idx.folder(config.data.source)
    mnist = idx.read_data(folder, config.data.pixel_scaling, device)
    if mnist.sha256 != run.ended_record().data_sha256:
        problem = f"the images or labels in {folder} differ from those that {run} was trained on"
        raise UserError(f"{problem}: run `dvc repro -f fetch`.")
    logits, labels = predict(model.to(device), mnist.test_images).cpu(), mnist.test_labels.cpu()
    predictions = logits.argmax(-1)
    confusion = confusion_matrix(labels, predictions, config.model.num_classes)
    accuracy = confusion.trace() / confusion.sum()
    check_accuracy(run, accuracy, trained_accuracy, len(predictions))
    return {
        "test_loss": rounded(F.cross_entropy(logits, labels).item()),
        "test_accuracy": rounded(accuracy),
        "calibration_error": rounded(calibration_error(logits.softmax(-1), labels)),
        "per_class": rounded_table(per_class_accuracy(confusion)).to_dict("records"),
        "confusion": confusion.tolist(),
        "mistakes": {str(image): int(predictions[image]) for image in (predictions != labels).nonzero()[:, 0].tolist()},
        "layers": rounded_table(layer_table(model, mnist.test_images[:ATTENTION_IMAGES])).to_dict("records"),
    }


@torch.no_grad()
def predict(model: torch.nn.Module, images: torch.Tensor | idx.Images) -> torch.Tensor:
    """Returns the logits of all images, (n, classes), in float64."""
    return torch.cat([model(batch).double() for batch in images.split(BATCH_SIZE)])


def calibration_error(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the expected calibration error of probabilities (n, classes) (Guo et al. 2017, Eq. 3).

    The error is the mean of |accuracy − confidence| over equally wide bins of confidence, weighted by the number of images.
    Confidence is the probability of the predicted class.
    """
    confidence, predictions = probabilities.max(-1)
    bins = (CALIBRATION_BINS * confidence).long().clamp(max=CALIBRATION_BINS - 1)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=confidence.dtype)
    gaps.index_add_(0, bins, (predictions == labels).double() - confidence)
    return gaps.abs().sum().item() / len(labels)


def check_accuracy(run: Run, measured: float, trained: float, num_images: int) -> None:
    """Raises UserError if `measured` differs from `trained`, the recorded accuracy, by more than TOLERANCE_IMAGES images."""
    if abs(measured - trained) > (TOLERANCE_IMAGES + 0.5) / num_images:
        raise UserError(
            f"{run.weights} has a test accuracy of {measured:.4f}, but {run.folder}/metrics.json says {trained:.4f}: "
            f"train again with `{run.command}`."
        )


def confusion_matrix(labels: torch.Tensor, predictions: torch.Tensor, num_classes: int) -> np.ndarray:
    """Counts the images for each pair of label (row) and prediction (column), (classes, classes)."""
    pairs = (labels * num_classes + predictions).cpu().numpy()
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def per_class_accuracy(confusion: np.ndarray) -> pd.DataFrame:
    """Returns a row for each class that has images."""
    images = confusion.sum(axis=1)
    classes = images.nonzero()[0]
    accuracy = confusion.diagonal()[classes] / images[classes]
    return pd.DataFrame({"class": classes, "images": images[classes], "accuracy": accuracy})


@torch.no_grad()
def layer_table(model: VisionTransformer, images: torch.Tensor) -> pd.DataFrame:
    """Returns the `head_statistics` of all layers with orthogonal attention. The table is empty if no layer has it."""
    tables = [
        head_statistics(number, attention, x)
        for number, (attention, x) in enumerate(measures.attention_inputs(model, images))
        if isinstance(attention, OrthogonalSelfAttention)
    ]
    return pd.concat(tables) if tables else pd.DataFrame()


def head_statistics(number: int, layer: OrthogonalSelfAttention, x: torch.Tensor) -> pd.DataFrame:
    """Measures the quantities of the theorems, for each head of a layer with the input x (images, N, d).

    alpha                    α of Eq. 5
    error_max, _median       ‖AᵀA − I‖₂ (Theorem 3.1) for the model's method: maximum and median over the images
    exp_error_max, _median   ‖A − exp(S)‖₂ (Theorem 2.1)
    norm_max, _median        ‖S‖₂
    size_max                 maximum of μ = |α|/√d_v · ‖M‖₂², M = [Q, K]; the rounding error of "exact" grows with μ
    condition_median         median condition number of M
    weight_kappa             κ(W̃) (Theorem 4.2)
    jacobian_kappa           κ(J) of the first head on the first image (Theorem 4.4); NaN for other heads
    layer_kappa              κ(Σᵢ W^Vᵢ W^Oᵢ), the same for all heads of a layer
    """
    query, key, _ = layer.project(x)  # (images, heads, N, d_v)
    scale = layer.scale().double().expand(layer.num_heads, 1, 1)
    a = orthogonal_attention_matrix(query, key, scale=layer.scale(), **layer.options).double()  # (images, heads, N, N)
    skew = measures.skew(query.double(), key.double(), scale)
    m = torch.cat([query, key], dim=-1).double()
    heads = measures.head_weights(layer)
    total = torch.linalg.svdvals((layer.out.weight @ layer.value.weight).double())
    first = measures.head_condition(copy.deepcopy(layer).double().cpu(), 0, x[0].double().cpu())["kappa"]
    columns = {
        "alpha": layer.alpha.expand(layer.num_heads),
        "weight_kappa": torch.tensor([measures.weight_condition(w_query, w_key) for w_query, w_key, _, _ in heads]),
        "jacobian_kappa": torch.tensor([first, *[math.nan] * (layer.num_heads - 1)]),
        "layer_kappa": torch.full((layer.num_heads,), measures.condition(total, rank=len(total))),
        "size_max": (measures.norm(m).square() * scale[:, 0, 0].abs()).amax(0),
        "condition_median": torch.linalg.cond(m).quantile(0.5, dim=0),
    }
    over_images = {
        "error": measures.orthogonality_error(a),
        "exp_error": measures.norm(a - measures.exponential(skew)),
        "norm": measures.norm(skew),
    }
    table = {name: values.cpu().numpy() for name, values in columns.items()}
    for name, values in over_images.items():
        of_images = values.cpu().numpy()  # (images, heads)
        table |= {f"{name}_max": of_images.max(axis=0), f"{name}_median": np.median(of_images, axis=0)}
    return pd.DataFrame({"layer": number, "head": np.arange(layer.num_heads)} | table)


if __name__ == "__main__":
    main()
