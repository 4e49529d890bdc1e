"""The whole pipeline by `dvc`, in a temporary clone with a tiny data set and tiny models, told as one story of edits."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML

from pipeline.results import MEASUREMENTS
from pipeline.tables import RUN_FILES
from tests.pipeline.mnist_files import write_mnist
from tests.pipeline.synthetic import COMPLEXITY, shrink_theory

ROOT = Path(__file__).parents[2]
RESULTS = ("dvc.lock", "paper_outputs/", "records/", "runs/")  # which the clone makes itself


@dataclass
class Step:
    """What a command of the story printed, and what it left behind."""

    output: str
    status: int
    files: dict[str, bytes]

    @property
    def stages(self) -> list[str]:
        """The stages that ran, in order."""
        return re.findall(r"^Running stage '(.+)':", self.output, re.MULTILINE)

    @property
    def trainings(self) -> set[str]:
        """The runs among them."""
        return self._runs_of("train")

    @property
    def evaluations(self) -> set[str]:
        return self._runs_of("evaluate")

    @property
    def others(self) -> set[str]:
        return {name for name in self.stages if "@" not in name}

    def _runs_of(self, stage: str) -> set[str]:
        return {name.removeprefix(f"{stage}@") for name in self.stages if name.startswith(f"{stage}@")}


class Clone:
    """A clone of the repository as it stands here, with its own settings of DVC and git, and without MLflow."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone"
        listing = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        for name in listing.splitlines():
            if not name.startswith(RESULTS) and (ROOT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.root / name)
        no_mlflow = folder / "packages/mlflow"
        no_mlflow.mkdir(parents=True)
        (no_mlflow / "__init__.py").write_text("raise ImportError('not in this test')\n")
        settings = {
            name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "GIT_", "MLFLOW_", "OSA_"))
        }
        self.environment = settings | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(no_mlflow.parent),
            "OMP_NUM_THREADS": "1",
            "OSA_MNIST_MIRROR": str(folder / "mirror"),
            "DVC_NO_ANALYTICS": "1",
            "DVC_SITE_CACHE_DIR": str(folder / "site"),
            "DVC_GLOBAL_CONFIG_DIR": str(folder / "global"),
            "DVC_SYSTEM_CONFIG_DIR": str(folder / "system"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            **{
                f"GIT_{role}_{key}": value
                for role in ("AUTHOR", "COMMITTER")
                for key, value in (("NAME", "a"), ("EMAIL", "a@b"))
            },
        }
        self.files = write_mnist(folder / "mirror", train=43, test=31)

    def run(self, *command: str, status: int = 0) -> Step:
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == status or status is None, f"{' '.join(command)}:\n{done.stdout}"
        return Step(done.stdout, done.returncode, self.results())

    def results(self) -> dict[str, bytes]:
        folders = (self.root / name for name in ("runs", "records", "paper_outputs"))
        paths = (path for folder in folders for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths}

    def edit(self, change) -> None:
        """Edits params.yaml as a person does: comments and order stay."""
        yaml, path = YAML(), self.root / "params.yaml"
        raw = yaml.load(path)
        change(raw)
        yaml.dump(raw, path)

    def commit(self) -> None:
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--message", "results")


def shrink(files: dict):
    def change(raw: dict) -> None:
        raw["run"] |= {"variants": ["vit", "osa_exact"], "seeds": [0]}
        raw["fetch"]["files"] = files
        raw["model"] |= {"patch_size": 14, "embed_dim": 8, "depth": 2, "num_heads": 2}
        raw["train"] |= {"epochs": 2, "batch_size": 13}
        raw["evaluate"] |= {"batch_size": 17, "attention_images": 7}
        raw["choices"]["runs"] = {"vit_drop_last": {"variant": "vit", "overrides": {"train": {"drop_last": True}}}}
        raw["complexity"] |= COMPLEXITY
        shrink_theory(raw["theory"])

    return change


def grow(raw: dict) -> None:
    raw["run"] |= {"variants": ["vit", "osa_exact", "osa_wide"], "seeds": [0, 1]}
    raw["variants"]["osa_wide"] = dict(raw["variants"]["osa_exact"]) | {
        "overrides": {"model": {"embed_dim": 12, "depth": 1}}
    }


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """The commands in the order in which a researcher would give them."""
    clone = Clone(tmp_path_factory.mktemp("pipeline"))
    clone.edit(shrink(clone.files))
    clone.run("git", "init", "--quiet")
    clone.commit()
    steps = {"first": clone.run("dvc", "repro")}
    steps["changes"] = clone.run("git", "status", "--porcelain", "--untracked-files=all")
    steps["again"] = clone.run("dvc", "repro")
    steps["status"] = clone.run("dvc", "status")
    clone.edit(grow)
    steps["grown"] = clone.run("dvc", "repro")
    clone.edit(lambda raw: raw["report"]["labels"].update(vit="The baseline"))
    steps["labelled"] = clone.run("dvc", "repro")
    clone.commit()
    steps["metrics"] = clone.run("dvc", "metrics", "show", "--json")
    steps["plots"] = clone.run("dvc", "plots", "show", "--out", "plots")
    few = ["-S", "run.variants=[vit]", "-S", "run.seeds=[0]"]
    steps["experiment"] = clone.run("dvc", "exp", "run", "--name", "slow", "-S", "train.learning_rate=0.000001", *few)
    steps["experiments"] = clone.run("dvc", "exp", "show", "--csv")
    clone.run("git", "checkout", "--quiet", ".")
    steps["restored"] = clone.run("dvc", "checkout")
    clone.edit(lambda raw: raw["train"].update(learning_rate="1e-3"))
    steps["mistaken"] = clone.run("dvc", "repro", status=None)
    return SimpleNamespace(clone=clone, **steps)


def test_from_nothing_to_the_report(story):
    in_order = ["fetch", "train@vit-0", "train@osa_exact-0", "evaluate@vit-0", "evaluate@osa_exact-0", "tables", "report"]
    assert [stage for stage in story.first.stages if stage not in (*MEASUREMENTS, "train_choices@vit_drop_last")] == in_order
    assert set(MEASUREMENTS) <= set(story.first.stages)
    page = story.first.files["paper_outputs/report.html"].decode()
    for text in ("Orthogonal Self-Attention", "ViT", "OSA (exact)"):
        assert text in page
    for name in ("figure_1.svg", "figure_1.png", "table_2.csv", "table_2.md", "table_2.html", "report.md"):
        assert story.first.files[f"paper_outputs/{name}"]


def test_training_does_without_mlflow(story):
    assert story.first.output.count("MLflow cannot be imported") == 3


def test_git_sees_the_results_and_nothing_else(story):
    changes = {line[3:] for line in story.changes.output.splitlines()}
    variants = ("vit", "osa_exact")
    expected = {f"runs/{variant}/0/{name}" for variant in variants for name in RUN_FILES}
    expected |= {f"runs/vit_drop_last/0/{name}" for name in RUN_FILES if name != "evaluation.json"}
    expected |= {f"records/{run}/0.json" for run in (*variants, "vit_drop_last")}
    assert {path for path in changes if not path.startswith("paper_outputs/")} == expected | {"dvc.lock"}


def test_a_second_time_nothing_runs(story):
    assert story.again.stages == []
    assert story.again.files == story.first.files
    assert "up to date" in story.status.output


def test_a_variant_and_a_seed_are_an_edit_of_params_yaml(story):
    assert story.grown.trainings == {"vit-1", "osa_exact-1", "osa_wide-0", "osa_wide-1"}
    assert story.grown.evaluations == story.grown.trainings
    assert story.grown.others == {"tables", "choices", "theory", "report"} and story.grown.stages[-1] == "report"
    for name, content in story.first.files.items():
        if name.startswith(("runs/", "records/")):
            assert story.grown.files[name] == content, name
    config = json.loads(story.grown.files["records/osa_wide/1.json"])["config"]
    assert (config["model"]["embed_dim"], config["model"]["depth"]) == (12, 1)
    assert "osa_wide" in story.grown.files["paper_outputs/report.html"].decode()


def test_an_edit_of_the_report_runs_the_report(story):
    assert set(story.labelled.stages) == {"choices", "theory", "report"}  # all of which write labels
    assert "The baseline" in story.labelled.files["paper_outputs/report.html"].decode()
    assert "The baseline" not in story.grown.files["paper_outputs/report.html"].decode()


def test_metrics_are_those_of_the_runs(story):
    shown = json.loads(story.metrics.output)[""]["data"]
    for variant in ("vit", "osa_exact", "osa_wide"):
        path = f"runs/{variant}/1/metrics.json"
        expected = json.loads(story.labelled.files[path])
        assert shown[path]["data"] == {key: value for key, value in expected.items() if value is not None}
    summary = shown["paper_outputs/tables/summary.json"]["data"]
    accuracies = [shown[f"runs/vit/{seed}/metrics.json"]["data"]["test_accuracy"] for seed in (0, 1)]
    assert summary["vit"]["test_accuracy"] == pytest.approx(sum(accuracies) / 2, abs=1e-6)


def test_plots_are_drawn(story):
    page = (story.clone.root / "plots/index.html").read_text()
    for title in ("Train loss", "Test loss", "Test accuracy"):
        assert title in page
    assert page.count("vega-lite") >= 3


def test_an_experiment_trains_with_the_value_that_it_sets(story):
    assert story.experiment.trainings == {"vit-0"}
    assert story.experiment.evaluations == {"vit-0"}
    assert story.experiment.others == {"tables", "choices", "theory", "report"}
    config = json.loads(story.experiment.files["records/vit/0.json"])["config"]
    assert config["train"]["learning_rate"] == 1e-6


def test_experiments_are_compared(story):
    rows = {row["Experiment"]: row for row in csv.DictReader(io.StringIO(story.experiments.output))}
    column = "train.learning_rate"
    assert float(rows["slow"][column]) == 1e-6
    assert rows["slow"]["runs/vit/0/metrics.json:test_loss"] != rows[""]["runs/vit/0/metrics.json:test_loss"]


def test_after_an_experiment_the_results_are_restored(story):
    assert story.restored.files == story.labelled.files


def test_a_mistake_is_told_and_leaves_the_results(story):
    assert story.mistaken.status != 0
    assert (
        "error: params.yaml: train.learning_rate: '1e-3' is read as text; write 1e-3 without quotes."
        in story.mistaken.output
    )
    assert story.mistaken.files == story.restored.files
