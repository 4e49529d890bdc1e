"""Finished runs that nothing trained: real weights of small models, measured, with made-up curves and records."""

import csv
import io
import json
from pathlib import Path

import torch
import yaml
from matplotlib.figure import Figure

from pipeline import data, evaluate, figures, params, tables, train
from tests.pipeline.mnist_files import write_mnist

ROOT = Path(__file__).parents[2]
SMALL = {"patch_size": 7, "embed_dim": 12, "depth": 3, "num_heads": 2}  # N = 17, d_v = 6
COMPLEXITY = {
    "tokens": {"sizes": [32, 64, 128, 256, 512], "width": 4},
    "widths": {"sizes": [2, 4, 8], "tokens": 64},
    "joint": {"sizes": [2, 4, 8], "tokens_per_width": 16},
    "norms": [0.1, 10.0],
    "most_tokens_matrix": 512,
    "most_tokens_exponential": 128,
    "repeats": 2,
    "sample_seconds": 1e-4,
    "fit_points": 3,
}
EPOCHS, POINTS = 10, 4


def shrink_theory(theory: dict) -> None:
    """Sizes at which the stage takes seconds, for the models osa_qr and vit."""
    theory |= {
        "seeds": [0],
        "images": 1,
        "theorem_2_1": {"sizes": [[7, 2]], "norms": [0.01, 1, 20], "conditions": [1, 1e3], "norm": 1},
        "theorem_2_2": {"depths": [0, 1, 4], "alphas": [0.5], "tolerance": 1e-10},
        "theorem_3_1": {"sizes": [[7, 2]], "iterations": 7, "norms": [0.1, 3], "conditions": [1, 10]},
        "theorem_4_1": {"sizes": [[3, 4, 2]], "alpha": 1},
        "theorem_4_2": {"sizes": [[6, 3]]},
    }
    theory["theorems_4_3_4_4"] |= {"sizes": [[3, 4, 2]], "alphas": [1e-5, 1e-4, 1e-3, 1], "layer_stride": 2}
    theory["trainability"] |= {"models": ["osa_qr", "vit"], "baseline": "vit", "depths": [2, 4, 6]}
    theory["trainability"] |= {"gradient_images": 2, "samples": 4, "power_iterations": 3}


def write_params(folder: Path, edit=lambda raw: None, seeds=(0, 1, 2)) -> None:
    """The repository's params.yaml with small models, after `edit`."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["run"]["seeds"] = list(seeds)
    raw["model"] |= SMALL
    raw["paper"]["settings"]["model"] |= SMALL
    raw["evaluate"] |= {"batch_size": 31, "attention_images": 13}
    raw["complexity"] |= COMPLEXITY
    edit(raw)
    (folder / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False, allow_unicode=True))


def write_project(folder: Path, edit=lambda raw: None, seeds=(0, 1, 2), diverged=()) -> None:
    """params.yaml, data and every run that it lists, in `folder`."""
    write_params(folder, edit, seeds)
    write_mnist(folder / "data/mnist", train=23, test=97)
    settings = params.load(folder / "params.yaml")
    for variant in settings.run.variants:
        for seed in settings.run.seeds:
            write_run(folder, settings, variant, seed, (variant, seed) in diverged)
    write_findings(folder)


def write_run(folder: Path, settings: params.Params, variant: str, seed: int, diverged: bool = False) -> None:
    """Weights, history, metrics and record as training leaves them."""
    config = params.resolve(settings, variant)
    mnist = data.load(folder / "data/mnist", config.data.pixel_scaling)
    model = train.build_model(config, seed)
    loss, accuracy = train.evaluate_split(model, mnist.test_images, mnist.test_labels)
    curve = history(list(settings.variants).index(variant), seed, diverged)
    curve[-1] |= {} if diverged else {"test_loss": loss, "test_accuracy": accuracy}
    run = folder / "runs" / variant / str(seed)
    run.mkdir(parents=True, exist_ok=True)
    (run / "history.csv").write_text(as_csv(curve))
    weights = folder / train.weights_path(variant, seed)
    weights.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), weights)
    last = {key: None if curve[-1][key] == "" else curve[-1][key] for key in train.COLUMNS[2:]}
    steps = curve[-1]["step"]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    divergence = {"diverged": diverged, "diverged_at_step": steps if diverged else None}
    write_json(run / "metrics.json", last | divergence | {"steps": steps, "num_parameters": parameters})
    write_json(folder / "records" / variant / f"{seed}.json", record(config, variant, seed, mnist.sha256, diverged))


def write_findings(folder: Path) -> None:
    """What the measuring stages leave for the report: one finding with a figure and a table, one without, and none."""
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([1, 2])
    theory, complexity = folder / "paper_outputs/theory", folder / "paper_outputs/complexity"
    theorem = {
        "id": "theorem_2_2",
        "title": "Attention keeps the spectrum",
        "place": "Theorem 2.2",
        "statement": "The eigenvalues of X Xᵀ do not change <with depth>.",
        "rule": "The largest change is below 1e-10.",
        "verdict": "supported",
        "measures": [
            measure_of("largest change", 1.5e-13, "", "below", 1e-10),
            measure_of("rank", 49, "tokens", None, None),
        ],
        "remark": "Softmax attention collapses.",
        "figure": "theorem_2_2.svg",
        "caption": "Eigenvalues against depth.",
        "table": {"columns": ["Depth", "Rank"], "align": "rr", "rows": [["1", "49"], ["64", "49"]]},
        "sources": ["paper_outputs/theory/theorem_2_2.csv"],
    }
    cost = theorem | {
        "id": "linear_in_n",
        "title": "Memory is linear in N",
        "place": "Section 3.1",
        "verdict": "not supported",
        "measures": [measure_of("slope", 1.2345, "", "below", 1.05)],
        "remark": "",
        "figure": None,
        "table": None,
    }
    write_json(theory / "findings.json", [theorem])
    write_json(complexity / "findings.json", [cost])
    write_json(folder / "paper_outputs/choices/findings.json", [])
    (theory / "theorem_2_2.svg").write_text(figures.svg(figure))


def measure_of(what: str, value: float, unit: str, side: str | None, limit: float | None) -> dict:
    return {"what": what, "value": value, "unit": unit, "side": side, "limit": limit, "note": ""}


def measure() -> None:
    """What the stages evaluate and tables do, for every run that is there, in the working directory."""
    for metrics in Path("runs").glob("*/*/metrics.json"):
        evaluate.main(list(metrics.parts[1:3]))
    tables.main()


def history(index: int, seed: int, diverged: bool) -> list[dict]:
    """A loss that falls geometrically from 2.3, the faster the lower `index`."""
    rate = 0.7 + 0.03 * index + 0.002 * seed
    rows = []
    for point in range(EPOCHS * POINTS + 1):
        loss = 0.05 + 2.25 * rate ** (point / 2)
        rows.append(
            {
                "step": 117 * point,
                "epoch": point / POINTS,
                "train_loss": loss,
                "train_accuracy": 1 - loss / 2.6,
                "test_loss": 1.1 * loss,
                "test_accuracy": 1 - loss / 2.5,
            }
        )
    if diverged:
        rows = rows[:8]
        rows[-1] |= {"train_loss": 9.0, "test_loss": ""}
    return rows


def record(config: params.RunConfig, variant: str, seed: int, data_sha256: str, diverged: bool) -> dict:
    return {
        "run_key": f"{variant}-{seed}",
        "variant": variant,
        "seed": seed,
        "status": "diverged" if diverged else "finished",
        "config": config.model_dump(mode="json"),
        "data_sha256": data_sha256,
        "code_sha256": "c0de" * 16,
        "environment": {
            "git_commit": "c0ffee" * 6 + "c0ff",
            "git_dirty": False,
            "python": "3.11.14",
            "torch": "2.11.0",
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "device_name": "Imaginary CPU @ 2.10GHz",
            "num_threads": 2,
            "platform": "Linux-6.8.0-x86_64-with-glibc2.39",
        },
        "started_at": "2025-11-20T18:00:00+00:00",
        "finished_at": "2025-11-20T18:10:00+00:00",
        "seconds": 611.5 + seed,
        "images_per_second": 1234.5 + seed,
        "resumptions": 0,
        "timestamps": [],
    }


def as_csv(rows: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, train.COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_json(path: Path, value: dict | list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
