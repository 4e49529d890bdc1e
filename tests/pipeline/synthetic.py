"""Finished runs that nothing trained: real weights of small models, measured, with made-up curves and records."""

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import safetensors.torch
import torch
import yaml

import osa
from pipeline.config import params, records
from pipeline.config.params import Params, RunConfig
from pipeline.config.records import RECORD, SHA256, Environment, RunRecord
from pipeline.core import files
from pipeline.data import idx
from pipeline.results import evaluate, tables
from pipeline.training import HISTORY_COLUMNS
from pipeline.training.loop import build_model, evaluate_split
from pipeline.training.recorder import history_csv
from pipeline.training.run import Run
from tests.pipeline.mnist_files import write_mnist

ROOT = Path(__file__).parents[2]
SMALL = {
    "model": {"patch_size": 7, "embed_dim": 12, "depth": 3, "num_heads": 2},  # N = 17, d_v = 6
    "train": {"batch_size": 8},  # an epoch of 23 images has steps to leave out
}
EPOCHS, POINTS = 10, 4

Edit = Callable[[dict], object]


def write_params(folder: Path, edit: Edit = lambda raw: None, seeds: Iterable[int] = (0, 1, 2)) -> None:
    """The repository's params.yaml with small models, after `edit`, and its paper.yaml with the same models."""
    raw = _small(_read_yaml(ROOT / "params.yaml"))
    raw["run"]["seeds"] = list(seeds)
    edit(raw)
    _write_yaml(folder / "params.yaml", raw)
    paper = _read_yaml(ROOT / "pipeline/paper.yaml")
    _write_yaml(
        folder / "pipeline/paper.yaml",
        paper | {"readings": {name: _small(each) for name, each in paper["readings"].items()}},
    )


def deep_merge(values: object, changes: object) -> object:
    """Merges `changes` into `values` recursively. `changes` takes precedence."""
    if isinstance(values, dict) and isinstance(changes, dict):
        return values | {key: deep_merge(values.get(key), change) for key, change in changes.items()}
    return changes


def _small(sections: dict) -> dict:
    return sections | {name: sections[name] | changes for name, changes in SMALL.items()}


def _write_yaml(path: Path, values: dict) -> None:
    files.write_text(path, yaml.dump(values, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True))


def _read_yaml(path: Path) -> dict:
    """Reads YAML by LibYAML, which is many times faster: tests read hundreds of files."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


def write_project(folder: Path, edit: Edit = lambda raw: None, seeds: Iterable[int] = (0, 1, 2), diverged=()) -> None:
    """`write_params`, data and every run that params.yaml lists, in `folder`; those in `diverged` are (variant, seed)."""
    write_params(folder, edit, seeds)
    write_mnist(folder / "data/mnist", train=23, test=97)
    settings = params.load(folder / "params.yaml")
    for variant, seed in itertools.product(settings.run.variants, settings.run.seeds):
        write_run(folder, settings, Run(variant, seed), (variant, seed) in diverged)


def write_run(folder: Path, settings: Params, run: Run, diverged: bool = False) -> None:
    """Weights, history, metrics and record as training leaves them."""
    config = params.resolve(settings, run.variant, run.overrides)
    mnist = idx.read_data(folder / "data/mnist", config.data.pixel_scaling)
    model = build_model(config, run.seed)
    curve = history(list(settings.variants).index(run.variant), run.seed, diverged)
    if not diverged:
        curve[-1] |= dict(
            zip(HISTORY_COLUMNS[-2:], evaluate_split(model, mnist.test_images, mnist.test_labels), strict=True)
        )
    (folder / run.weights).parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(model.state_dict(), folder / run.weights)
    weights = {"data_sha256": mnist.sha256, "weights": files.sha256(folder / run.weights)}
    write_ended(run, config, curve, folder, num_parameters=sum(p.numel() for p in model.parameters()), **weights)


def write_ended(
    run: Run, config: RunConfig | dict, curve: list[dict], folder: Path = Path(), *, num_parameters: int = 9, **changes
) -> None:
    """History, metrics and record of a training that has ended, at whose end a test loss that is not finite is a divergence.

    `changes` are those of the record.
    """
    steps, path, diverged = curve[-1]["step"], folder / run.folder, not math.isfinite(curve[-1]["test_loss"])
    files.write_text(path / "history.csv", history_csv(curve))
    divergence = {"diverged": diverged, "diverged_at_step": steps if diverged else None}
    last = {key: curve[-1][key] for key in HISTORY_COLUMNS[2:]}
    files.write_json(path / "metrics.json", last | divergence | {"steps": steps, "num_parameters": num_parameters})
    ending = {"status": "diverged" if diverged else "finished", "files": records.digests(path)}
    records.write_record(path, record(config, run, **ending | changes))


def rewrite(folder: Path, /, **changes) -> None:
    """Changes keys of a record, which still vouches for itself."""
    content = files.read_json(folder / RECORD)
    content = {key: value for key, value in (content | changes).items() if key != SHA256}
    files.write_json(folder / RECORD, content | {SHA256: files.json_digest(content)})


def measure() -> None:
    """Does the work of the stages evaluate and tables, for every existing run of Table 2, in the working directory."""
    for metrics in Path("paper_outputs/runs/table_2").glob("*/*/metrics.json"):
        evaluate.main(list(metrics.parts[-3:-1]))
    tables.main()


def history(index: int, seed: int, diverged: bool) -> list[dict[str, float]]:
    """A loss that falls geometrically from 2.3, the faster the lower `index`."""
    rate = 0.7 + 0.03 * index + 0.002 * seed
    rows = []
    for point in range(EPOCHS * POINTS + 1):
        loss = 0.05 + 2.25 * rate ** (point / 2)
        values = (117 * point, point / POINTS, loss, 1 - loss / 2.6, 1.1 * loss, 1 - loss / 2.5)
        rows.append(dict(zip(HISTORY_COLUMNS, values, strict=True)))
    if diverged:
        rows = rows[:8]
        rows[-1] |= {"train_loss": 9.0, "test_loss": float("nan")}
    return rows


def record(config: RunConfig | dict, run: Run, **changes) -> RunRecord:
    environment = Environment(
        python="3.11.14",
        torch="2.11.0",
        device="cuda" if torch.cuda.is_available() else "cpu",
        device_name="Imaginary CPU @ 2.10GHz",
        num_threads=2,
        platform="Linux-6.8.0-x86_64-with-glibc2.39",
    )
    content = {
        "folder": records.place(run.folder),
        "environment": environment,
        "commits": ["c0ffee" * 6 + "c0ff"],
        "dirty": False,
        "run_key": f"{run.variant}-{run.seed}",
        "study": run.study,
        "variant": run.variant,
        "overrides": run.overrides,
        "seed": run.seed,
        "status": "finished",
        "config": config if isinstance(config, dict) else config.model_dump(mode="json"),
        "data_sha256": "0" * 64,
        "numerics": osa.NUMERICS,
        "weights": "0" * 64,
        "started_at": "2025-11-20T18:00:00+00:00",
        "finished_at": "2025-11-20T18:10:00+00:00",
        "seconds": 611.5 + run.seed,
        "images_per_second": 1234.5 + run.seed,
        "timestamps": [],
    }
    return RunRecord(**content | changes)
