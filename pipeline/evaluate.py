"""The evaluate stage: every run measured again from its weights on the full test set, then summarised over seeds.

Run as `python -m pipeline.evaluate`. Which runs there should be is read from params.yaml, never from the folder: one
that is not there yet is listed as missing, a diverged one is counted, and one that is not listed is left out.
"""

import functools
import itertools
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from tqdm import tqdm

import osa
from osa.functional import orthogonal_attention_matrix
from pipeline import data, files, train
from pipeline.errors import UserError, entry_point
from pipeline.params import Params, load, resolve
from pipeline.summary import DIGITS, rounded_table, summarise

FOLDER = Path("paper_outputs/evaluation")
CURVES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
SUMMARISED = ("test_accuracy", "test_loss", "train_loss")
RUN_FILES = ("weights.pt", "metrics.json", "history.csv")
RUN = ["variant", "seed"]
STATUSES = ("finished", "diverged", "missing")
MEASURED = {
    "test": ["test_loss", "test_accuracy"],
    "per_class": ["class", "images", "accuracy"],
    "confusion": ["label", "prediction", "count"],
    "layers": ["layer", "head", "alpha", "error_max", "error_median", "norm_max", "norm_median"],
}


@entry_point
def main() -> None:
    params = load()
    runs = find_runs(params)
    tables = measure_runs(params, runs[runs["status"] == "finished"])
    tables["runs"] = with_test_results(runs, tables.pop("test"))
    tables["histories"] = read_histories(runs)
    tables["curves"] = summarise_curves(tables["histories"], params.evaluate.confidence)
    for curve in ("train_loss", "test_loss"):
        tables[curve] = one_column_per_variant(tables["curves"], curve, params.run.variants)
    tables["summary"] = summarise_runs(tables["runs"], params)
    for name, table in tables.items():
        write_csv(FOLDER / f"{name}.csv", table)
    files.write_json(FOLDER / "summary.json", headline_metrics(tables["summary"]))


def find_runs(params: Params) -> pd.DataFrame:
    """One row for each run that params.yaml lists: variant, seed, status and what training wrote of it.

    `status` is finished, diverged or missing. Warns of runs that are missing, or there without being listed.

    Raises:
        UserError: there is no run at all.
    """
    listed = list(itertools.product(params.run.variants, params.run.seeds))
    rows = [read_run(variant, seed) for variant, seed in listed]
    missing = [f"{row['variant']}/{row['seed']}" for row in rows if row["status"] == "missing"]
    if len(missing) == len(rows):
        raise UserError(f"runs/ holds none of the {len(rows)} runs of params.yaml: train them with `dvc repro`.")
    if missing:
        warn(f"{len(missing)} of {len(rows)} runs of params.yaml are not trained yet: {', '.join(missing)}")
    strays = {path.parent for path in Path("runs").glob("*/*/metrics.json")} - {run_folder(*run) for run in listed}
    if strays:
        warn(f"left out, because params.yaml does not list them: {', '.join(sorted(map(str, strays)))}")
    return pd.DataFrame(rows)


def read_run(variant: str, seed: int) -> dict:
    """The identity, the status and the metrics of one run."""
    folder = run_folder(variant, seed)
    if not all((folder / name).exists() for name in RUN_FILES):
        return {"variant": variant, "seed": seed, "status": "missing"}
    metrics = files.read_json(folder / "metrics.json")
    status = "diverged" if metrics.pop("diverged") else "finished"
    return {"variant": variant, "seed": seed, "status": status, **metrics}


def run_folder(variant: str, seed: int) -> Path:
    return Path("runs", variant, str(seed))


def warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)


def measure_runs(params: Params, runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tables of MEASURED over all finished runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    read_data = functools.cache(functools.partial(data.load, device=device))
    bar = tqdm(runs.to_dict("records"), desc="evaluate", unit="run", disable=None)
    parts = [measure(params, run, read_data, device) for run in bar]
    return {name: stack([part[name] for part in parts], RUN + columns) for name, columns in MEASURED.items()}


def stack(tables: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    """The tables below one another. Empty ones are left out, because their columns have no type."""
    filled = [table for table in tables if len(table)]
    return pd.concat(filled) if filled else pd.DataFrame(columns=columns)


def measure(params: Params, run: dict, read_data: Callable[..., data.Data], device: str) -> dict[str, pd.DataFrame]:
    """The tables of MEASURED for one run, from its weights."""
    config = resolve(params, run["variant"])
    mnist = read_data(pixel_scaling=config.data.pixel_scaling)
    model = load_model(config, run).to(device)
    predictions, loss = predict(model, mnist.test_images, mnist.test_labels, params.evaluate.batch_size)
    confusion = confusion_matrix(mnist.test_labels, predictions, config.model.num_classes)
    accuracy = confusion.trace() / confusion.sum()
    check_accuracy(run, accuracy, len(predictions), params.evaluate.tolerance_images)
    tables = {
        "test": pd.DataFrame({"test_loss": [loss], "test_accuracy": [accuracy]}),
        "per_class": per_class_accuracy(confusion),
        "confusion": long_form(confusion),
        "layers": attention_statistics(model, mnist.test_images[: params.evaluate.attention_images]),
    }
    return {name: table.assign(variant=run["variant"], seed=run["seed"]) for name, table in tables.items()}


def load_model(config, run: dict) -> torch.nn.Module:
    """The trained model of a run. Raises UserError if its weights are not those of a model of this configuration."""
    path = run_folder(run["variant"], run["seed"]) / "weights.pt"
    model = train.build_model(config, run["seed"])
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError):
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


def check_accuracy(run: dict, accuracy: float, num_images: int, tolerance_images: int) -> None:
    """The weights must repeat the accuracy that training measured, but for images that rounding can tip over: it differs
    with the batch size, the number of threads and the device."""
    if abs(accuracy - run["test_accuracy"]) > (tolerance_images + 0.5) / num_images:
        folder = run_folder(run["variant"], run["seed"])
        raise UserError(
            f"{folder}/weights.pt has a test accuracy of {accuracy:.4f}, but {folder}/metrics.json says "
            f"{run['test_accuracy']:.4f}: train again with `dvc repro -f train@{run['variant']}-{run['seed']}`."
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


def long_form(confusion: np.ndarray) -> pd.DataFrame:
    label, prediction = np.indices(confusion.shape)
    return pd.DataFrame({"label": label.ravel(), "prediction": prediction.ravel(), "count": confusion.ravel()})


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
    return stack(tables, MEASURED["layers"])


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
    a = orthogonal_attention_matrix(
        query, key, scale=layer.scale(), method=layer.method, num_iterations=layer.num_iterations
    ).double()  # (batch, heads, N, N)
    half = layer.scale().double() * query.double() @ key.double().mT
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.matrix_norm(a.mT @ a - identity, 2), torch.linalg.matrix_norm(half - half.mT, 2)


def with_test_results(runs: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
    """The runs with test loss and accuracy as measured here. The last train loss of a diverged run is no final one."""
    kept = runs.reindex(columns=[*RUN, "status", "steps", "diverged_at_step", "num_parameters", "train_loss"])
    kept["train_loss"] = kept["train_loss"].where(kept["status"] == "finished")
    whole = dict.fromkeys(("steps", "diverged_at_step", "num_parameters"), "Int64")  # whole even where a run has none
    return kept.astype(whole).merge(test, on=RUN, how="left")


def summarise_runs(runs: pd.DataFrame, params: Params) -> pd.DataFrame:
    """One row per variant: how many runs finished, diverged and are missing, and statistics of the finished ones."""
    rows = []
    for variant in params.run.variants:
        group = runs[runs["variant"] == variant]
        count = group["status"].value_counts()
        row = {"variant": variant} | {f"n_{status}": count.get(status, 0) for status in STATUSES}
        for quantity in SUMMARISED:
            summary = asdict(summarise(group[quantity].dropna(), params.evaluate.confidence))
            row |= {f"{quantity}_{name}": value for name, value in summary.items() if name != "n"}
        rows.append(row)
    return pd.DataFrame(rows)


def read_histories(runs: pd.DataFrame) -> pd.DataFrame:
    """The curves of every run, diverged ones included, one below the other."""
    there = runs.loc[runs["status"] != "missing", RUN].itertuples(index=False)
    return pd.concat(pd.read_csv(run_folder(*run) / "history.csv").assign(**run._asdict()) for run in there)


def summarise_curves(histories: pd.DataFrame, confidence: float) -> pd.DataFrame:
    """Long form: variant, step, epoch, curve and the statistics over those seeds that have a finite value there."""
    long = histories.melt(id_vars=["variant", "step", "epoch"], value_vars=list(CURVES), var_name="curve").dropna()
    groups = long.groupby(["variant", "curve", "step", "epoch"], sort=False)["value"]
    statistics = ("n", "mean", "std", "min", "max")
    return pd.DataFrame(
        dict(zip(groups.keys, group, strict=True)) | {s: getattr(summarise(values, confidence), s) for s in statistics}
        for group, values in groups
    )


def one_column_per_variant(curves: pd.DataFrame, curve: str, variants: list[str]) -> pd.DataFrame:
    """The mean of one curve in the form that `dvc plots` draws: epoch, then a column per variant."""
    wide = curves[curves["curve"] == curve].pivot(index="epoch", columns="variant", values="mean")
    return wide.reindex(columns=variants).reset_index()


def headline_metrics(summary: pd.DataFrame) -> dict:
    """What `dvc metrics show` and `dvc exp show` list: a handful of numbers for each variant."""
    names = {
        "n_finished": "n",
        "n_diverged": "diverged",
        "test_accuracy_mean": "test_accuracy",
        "test_accuracy_std": "test_accuracy_std",
        "test_loss_mean": "test_loss",
        "train_loss_mean": "train_loss",
    }
    return rounded_table(summary.set_index("variant")[list(names)]).rename(columns=names).to_dict("index")


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Run first, then whatever else there is."""
    identity = [name for name in RUN if name in table]
    table = table[identity + [name for name in table if name not in identity]]
    files.write_text(path, table.to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n"))


if __name__ == "__main__":
    main()
