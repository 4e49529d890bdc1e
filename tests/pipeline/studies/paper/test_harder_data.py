"""Footnote 6 is trained and judged on the data that are there, and not evaluated on those that are not."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from pipeline import lab
from pipeline.core import files, params
from pipeline.lab import Lab
from pipeline.statistics import NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED, UNDECIDED
from pipeline.studies.paper import harder_data
from pipeline.tools import fan_out
from tests.pipeline.mnist_files import write_idx, write_mnist
from tests.pipeline.trainings import measured, write_data, write_params

SOURCES = ("fashion_mnist", "kmnist", "cifar10")
MODELS = ("vit", "vit_noskip")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A lab with a small recipe, and MNIST."""
    monkeypatch.chdir(tmp_path)
    write_params(run={"variants": [*MODELS], "seeds": [0]}, left_open={"seeds": []}, harder_data={"seeds": [0]})
    paper = yaml.safe_load(Path("pipeline/paper.yaml").read_text())
    small = {"model": {"patch_size": 4, "depth": 1}, "train": {"epochs": 1, "batch_size": 13, "points_per_epoch": 1}}
    paper["recipe"] = params.deep_merge(paper["recipe"], small)
    files.write_text("pipeline/paper.yaml", yaml.safe_dump(paper))
    write_data()
    made = Lab("harder_data", params.load(), params.load_paper())
    made.is_tracked = False
    made.tables, made.params = {}, made.params.model_copy(update=dict(made.paper.recipe))
    return made


def settings(bench: Lab) -> harder_data.Settings:
    return bench.params.studies["harder_data"]


def of_study() -> list[str]:
    return [str(run) for run, _ in fan_out.missing(params.load()) if run.study == "harder_data"]


def write_cifar(folder: Path) -> None:
    """As the stage fetch leaves it: three channels of 32 × 32."""
    folder.mkdir(parents=True)
    for split, count in (("train", 26), ("t10k", 10)):
        images = np.random.default_rng(0).integers(0, 256, size=(count, 3, 32, 32))
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", np.arange(count) % 10)


def test_without_the_data_nothing_is_trained_and_nothing_fails(bench):
    assert of_study() == []
    tables = harder_data.measure(settings(bench), bench)
    assert set(tables["runs"]["status"]) == {"missing"} and len(tables["runs"]) == 6
    assert Path("paper_outputs/runs/harder_data").is_dir() and Path("paper_outputs/weights/harder_data").is_dir()
    (finding,) = harder_data.findings(settings(bench), tables, bench)
    assert finding.verdict == NOT_EVALUATED
    assert [row[1:] for row in finding.table.rows] == [["–", "–", "–", "–"]] * 4


def test_on_the_data_that_are_there_both_models_are_trained_once(bench, monkeypatch):
    write_mnist("data/kmnist", train=26, test=10, seed=5)
    write_cifar(Path("data/cifar10"))
    there = [f"harder_data/{model}+data.source={source}/0" for source in ("kmnist", "cifar10") for model in MODELS]
    assert of_study() == there
    runs = measured(harder_data, settings(bench), bench)["runs"]
    assert of_study() == []
    assert runs.groupby("value")["status"].first().to_dict() == {
        "fashion_mnist": "missing",
        "kmnist": "finished",
        "cifar10": "finished",
    }
    assert {name: str(default) for name, default in zip(runs["value"], runs["default"], strict=True)}["kmnist"] == "mnist"
    record = bench.run("vit", {"data": {"source": "cifar10"}}).read("record")
    assert (record["config"]["data"]["source"], record["overrides"]) == ("cifar10", {"data": {"source": "cifar10"}})
    monkeypatch.setattr(lab.runs, "train", None)
    pd.testing.assert_frame_equal(measured(harder_data, settings(bench), bench)["runs"], runs)


def judged(bench: Lab, **of: list[float]):
    """The finding where ViT has 97 % everywhere and ViT (no skip) 95 % on MNIST, and these on others."""
    bench.tables = {
        "runs": pd.DataFrame(
            [
                (model, seed, "finished", (level + seed / 10) / 100)
                for model, level in (("vit", 97), ("vit_noskip", 95))
                for seed in range(3)
            ],
            columns=["variant", "seed", "status", "test_accuracy"],
        )
    }
    rows = [
        {"value": source, "variant": model, "seed": seed, "status": "finished", "test_accuracy": accuracy}
        for source, accuracies in of.items()
        for model, values in (("vit", [97.0, 97.1, 97.2]), ("vit_noskip", accuracies))
        for seed, accuracy in enumerate(values)
    ]
    runs = pd.DataFrame(rows, columns=["value", "variant", "seed", "status", "test_accuracy"]).astype(
        {"test_accuracy": float}
    )
    (finding,) = harder_data.findings(settings(bench), {"runs": runs}, bench)
    return finding


WIDER, SAME, NARROWER = [90.0, 90.1, 90.2], [94.9, 95.1, 95.3], [96.9, 97.0, 97.1]


@pytest.mark.parametrize(
    "gaps, verdict",
    [
        ([WIDER, WIDER, WIDER], SUPPORTED),
        ([WIDER, WIDER, SAME], UNDECIDED),
        ([WIDER, WIDER, NARROWER], NOT_SUPPORTED),
        ([WIDER], UNDECIDED),  # on one of three
    ],
)
def test_the_difference_has_to_be_larger_on_all(bench, gaps, verdict):
    finding = judged(bench, **dict(zip(SOURCES, gaps, strict=False)))
    assert finding.verdict == verdict
    assert finding.measures[0].value == pytest.approx(5) and "MNIST n = 6" in finding.measures[0].note
    assert finding.table.rows[0] == ["MNIST", "97.10", "95.10", "+2.00", "–"]
    assert finding.table.rows[1][:4] == ["Fashion-MNIST", "97.10", "90.10", "+7.00"]
    assert "{" not in finding.rule


def test_runs_of_table_2_on_other_data_are_not_taken_for_mnists(bench):
    bench.params = bench.params.model_copy(update={"data": bench.params.data.model_copy(update={"source": "sample"})})
    assert judged(bench, kmnist=WIDER).verdict == NOT_EVALUATED
