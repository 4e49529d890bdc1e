"""The whole pipeline by `dvc`, in a temporary clone with a tiny data set and tiny models, told as one story of edits.

Of the studies the clone keeps three: one that trains, one that measures, and one of what is measured elsewhere.
"""

import copy
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

from pipeline import studies
from tests.pipeline.mnist_files import write_mnist
from tests.pipeline.warm_python import warm_python

ROOT = Path(__file__).parents[2]
BY_HAND = tuple(f"paper_outputs/{name}" for name in ("benchmarks/", "pilot.csv"))  # which no stage makes
RESULTS = ("dvc.lock", "paper_outputs/", "runs/")  # which the clone makes itself
KEPT = ("left_open", "section_5", "theorem_4_2")
FILES = ("evaluation.json", "history.csv", "metrics.json", "record.json")  # of a run of Table 2
TINY = '''"""What a new study needs: this file, a section of params.yaml and a stage of dvc.yaml."""

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from pipeline.core.params import Section, Seeds
from pipeline.lab import Lab
from pipeline.report import looks
from pipeline.studies import CHECK, Finding, Measure, Table

place = 99


class Settings(Section):
    seeds: Seeds


def measure(settings: Settings, lab: Lab) -> dict[str, pd.DataFrame]:
    rows = [(seed, lab.normal(seed, "tiny", 4).norm().item()) for seed in settings.seeds]
    return {"norms": pd.DataFrame(rows, columns=["seed", "norm"])}


def findings(settings: Settings, tables: dict[str, pd.DataFrame], lab: Lab) -> list[Finding]:
    norms = tables["norms"]["norm"]
    with matplotlib.rc_context(looks.STYLE):
        figure = Figure(figsize=(3, 2))
        figure.subplots().plot(norms)
    measures = [Measure("smallest norm", norms.min(), "", "above", 0.0)]
    return [
        Finding(
            "tiny_norms", "Norms of the newcomer are positive", "nowhere", CHECK, "A norm is positive.", measures,
            rule="Every norm is above 0.", table=Table(["Seed", "Norm"], [["0", "of the newcomer"]]), figure=figure,
            caption="The newcomer, drawn.",
        )
    ]
'''


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
            wanted = not name.startswith(RESULTS) or name.startswith(BY_HAND)
            if wanted and (ROOT / name).is_file():
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
        self._expect_files(write_mnist(folder / "mirror", train=43, test=31))
        for name in studies.names():
            if name not in KEPT:
                self.drop(name)

    def _expect_files(self, files: dict[str, dict]) -> None:
        """Lets the fetch stage expect the data set of this test."""
        path = self.root / "pipeline/fetch.py"
        main = '\n\nif __name__ == "__main__":'
        before, found, after = path.read_text().partition(main)
        assert found
        expected = {name: f"File({entry['sha256']!r}, {entry['bytes']})" for name, entry in files.items()}
        entries = ", ".join(f"{name!r}: {value}" for name, value in expected.items())
        path.write_text(f"{before}\n\nFILES.clear()\nFILES.update({{{entries}}})\n{main}{after}")

    def drop(self, study: str) -> None:
        """Takes a study out: its file, its section and its stage, and nothing else."""
        (self.root / f"pipeline/studies/{study}.py").unlink()
        self.edit(lambda raw: raw.pop(study, None))
        self.edit(lambda raw: raw["stages"].pop(study, None), "dvc.yaml")

    def add(self, study: str, source: str) -> None:
        """Puts a study in: its file, its section and its stage, and nothing else."""
        (self.root / f"pipeline/studies/{study}.py").write_text(source)
        self.edit(lambda raw: raw.update({study: {"seeds": [0, 1]}}))
        stage = {
            "cmd": f"python -m pipeline.study {study}",
            "deps": [f"paper_outputs/sources/{study}.txt"],
            "params": [study],
            "outs": [{f"paper_outputs/studies/{study}": {"cache": False, "persist": True}}],
        }
        self.edit(lambda raw: raw["stages"].update({study: stage}), "dvc.yaml")

    def run(self, *command: str, status: int | None = 0) -> Step:
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

    def plan(self) -> SimpleNamespace:
        """What `make plan` prints, and the stages by the reason that it gives."""
        text = self.run("python", "-m", "pipeline.plan").output
        groups = [group.partition("\n    because ") for group in text.split("\n\n") if "\n    because " in group]
        why = {" ".join(rest.rpartition("\n")[0].split()): set(re.split(r",\s+", names)) for names, _, rest in groups}
        return SimpleNamespace(text=text, why=why)

    def results(self) -> dict[str, bytes]:
        folders = (self.root / name for name in ("runs", "paper_outputs"))
        paths = (path for folder in folders for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths}

    def edit(self, change, name: str = "params.yaml") -> None:
        """Edits a YAML file as a person does: comments and order stay."""
        yaml, path = YAML(), self.root / name
        raw = yaml.load(path)
        change(raw)
        yaml.dump(raw, path)

    def replace(self, name: str, before: str, after: str) -> None:
        """Edits a line of code."""
        path = self.root / name
        text = path.read_text()
        assert text.count(before) == 1, f"{before} stands {text.count(before)} times in {name}"
        path.write_text(text.replace(before, after))

    def commit(self) -> None:
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--message", "results")


SMALL = {
    "model": {"patch_size": 14, "embed_dim": 8, "depth": 2, "num_heads": 2},
    "train": {"epochs": 2, "batch_size": 13},
}


def shrink(raw: dict) -> None:
    raw["run"] |= {"variants": ["vit"], "seeds": [0]}
    for section, values in SMALL.items():
        raw[section] |= values


def shrink_paper(raw: dict) -> None:
    for section, values in SMALL.items():
        raw["recipe"][section] |= values
    for choice in raw["left_open"]:
        if choice.get("key") == "train.drop_last":
            choice["try_on"] = ["vit"]
        else:
            choice.pop("alternatives", None)
            choice.pop("try_on", None)


def grow(raw: dict) -> None:
    raw["run"] |= {"variants": ["vit", "osa_wide"], "seeds": [0, 1]}
    raw["variants"]["osa_wide"] = dict(raw["variants"]["osa_exact"]) | {
        "overrides": {"model": {"embed_dim": 12, "depth": 1}}
    }


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """The commands in the order in which a researcher would give them."""
    folder = tmp_path_factory.mktemp("pipeline")
    clone = Clone(folder)
    with warm_python(folder / "python", clone.environment) as first:
        clone.environment["PATH"] = os.pathsep.join([str(first), clone.environment["PATH"]])
        yield told(clone)


def told(clone: Clone) -> SimpleNamespace:
    """What each command of the story printed and left."""
    clone.edit(shrink)
    clone.edit(shrink_paper, "pipeline/paper.yaml")
    clone.run("git", "init", "--quiet")
    clone.commit()
    steps = {"first": clone.run("dvc", "repro")}
    steps["changes"] = clone.run("git", "status", "--porcelain", "--untracked-files=all")
    steps["again"] = clone.run("dvc", "repro")
    steps["planned"] = [clone.plan()]
    clone.edit(grow)
    steps["planned"].append(clone.plan())
    steps["grown"] = clone.run("dvc", "repro")
    clone.commit()
    steps["metrics"] = clone.run("dvc", "metrics", "show")
    steps["plots"] = clone.run("dvc", "plots", "show", "--out", "plots")
    few = ["-S", "run.variants=[vit]", "-S", "run.seeds=[0]"]
    steps["experiment"] = clone.run("dvc", "exp", "run", "--name", "slow", "-S", "train.learning_rate=0.000001", *few)
    steps["experiments"] = clone.run("dvc", "exp", "show", "--csv")
    clone.run("git", "add", "params.yaml")  # as a killed experiment leaves it, with weights that DVC has not seen
    (clone.root / "paper_outputs/weights/table_2/vit/0.pt").write_bytes(b"half a training")
    (undo,) = re.findall(r"^git restore .*$", (ROOT / "docs/exploring.md").read_text(), re.MULTILINE)
    steps["restored"] = clone.run("bash", "-c", undo)
    steps["weights"] = clone.run("dvc", "status", "train@vit-0")
    clone.edit(lambda raw: raw["train"].update(learning_rate="1e-3"))
    steps["mistaken"] = clone.run("dvc", "repro", "tables", status=None)
    clone.run("git", "checkout", "--quiet", "params.yaml")
    shutil.rmtree(clone.root / "data")  # what a fresh clone lacks
    shutil.rmtree(clone.root / "weights")
    clone.edit(lambda raw: raw["labels"].update(vit="The baseline"))
    clone.replace(
        "pipeline/studies/paper/theorem_4_2.py", "in float64 and in float32.", "in either precision, as ruled anew."
    )
    steps["planned"].append(clone.plan())
    steps["ruled"] = clone.run("dvc", "repro", "--allow-missing")
    clone.add("tiny", TINY)
    steps["new_study"] = clone.run("dvc", "repro", "--allow-missing")
    return SimpleNamespace(clone=clone, **steps)


def test_from_nothing_to_the_report(story):
    in_order = ["fetch", "train@vit-0", "evaluate@vit-0", "tables", "report"]
    measured = {"sources", "left_open", "theorem_4_2"}
    assert [stage for stage in story.first.stages if stage not in measured] == in_order
    assert measured <= set(story.first.stages)
    page = story.first.files["paper_outputs/report.html"].decode()
    for text in ("Orthogonal Self-Attention", "ViT", "Theorem 4.2"):
        assert text in page
    for name in ("figure_1.svg", "figure_1.png", "table_2.csv", "table_2.md", "report.md"):
        assert story.first.files[f"paper_outputs/{name}"]


def test_training_does_without_mlflow(story):
    assert story.first.output.count("MLflow cannot be imported") == 2


def test_a_study_trains_runs_of_its_own(story):
    trained = {Path(name).parts[2] for name in story.first.files if name.startswith("paper_outputs/runs/left_open/")}
    assert trained == {"vit+train.drop_last=true"}


def test_git_sees_the_results_and_nothing_else(story):
    changes = {line[3:].strip('"') for line in story.changes.output.splitlines()}
    expected = {f"paper_outputs/runs/table_2/vit/0/{name}" for name in FILES}
    expected |= {
        f"paper_outputs/runs/left_open/vit+train.drop_last=true/0/{name}" for name in FILES if name != "evaluation.json"
    }
    assert {path for path in changes if not path.startswith("paper_outputs/")} == expected | {"dvc.lock"}


def test_a_second_time_nothing_runs(story):
    assert story.again.stages == []
    assert story.again.files == story.first.files
    assert "up to date" in story.again.output


def test_the_plan_of_nothing(story):
    assert story.planned[0].text == "`dvc repro` would run nothing: data and pipelines are up to date.\n"


def test_the_plan_names_the_stages_that_run_then(story):
    why = story.planned[1].why
    new = {f"{stage}@{run}" for stage in ("train", "evaluate") for run in story.grown.trainings}
    assert why["dvc.lock knows no run of it"] == new
    run = "run.variants is ['vit', 'osa_wide'], was ['vit']; run.seeds is [0, 1], was [0]"
    assert why[run] == {"tables"}
    assert set().union(*why.values()) == set(story.grown.stages)
    assert re.search(
        r"^    about \d+ s by the records, on .+ 1 thread; \d stages of unknown length$", story.planned[1].text, re.M
    )


def test_the_plan_needs_neither_data_nor_weights(story):
    plan = story.planned[2]
    named = set().union(*plan.why.values())
    assert plan.why["what it wrote to data/ is not here"] == {"fetch"}
    assert plan.why["what it wrote to weights/ is not here"] >= {"train@vit-0", "train@osa_wide-1", "left_open"}
    assert {"sources", "report"} <= named and "theorem_4_2" not in named  # of which a rule was edited
    assert "would run for missing files alone, which git does not keep" in plan.text


def test_a_variant_and_a_seed_are_an_edit_of_params_yaml(story):
    assert story.grown.trainings == {"vit-1", "osa_wide-0", "osa_wide-1"}
    assert story.grown.evaluations == story.grown.trainings
    assert {"tables", "report"} <= story.grown.others and story.grown.stages[-1] == "report"
    for name, content in story.first.files.items():
        if name.startswith("runs/"):
            assert story.grown.files[name] == content, name
    config = json.loads(story.grown.files["paper_outputs/runs/table_2/osa_wide/1/record.json"])["config"]
    assert (config["model"]["embed_dim"], config["model"]["depth"]) == (12, 1)
    assert "osa_wide" in story.grown.files["paper_outputs/report.html"].decode()


def test_an_edit_of_a_label_and_a_rule_measures_nothing_again_even_without_data_and_weights(story):
    assert set(story.ruled.stages) == {"sources", "report"}  # the former finds that nothing measured has changed
    for text in ("as ruled anew", "The baseline"):
        assert text in story.ruled.files["paper_outputs/report.html"].decode()
        assert text not in story.restored.files["paper_outputs/report.html"].decode()


def test_a_new_study_is_a_file_a_section_and_a_stage(story):
    assert set(story.new_study.stages) == {"sources", "tiny", "report"}
    page, text = (story.new_study.files[f"paper_outputs/report.{kind}"].decode() for kind in ("html", "md"))
    for shown in ("Norms of the newcomer are positive", "Every norm is above 0.", "of the newcomer", "The newcomer, drawn."):
        assert shown in page
    assert "Norms of the newcomer are positive" in text
    assert story.new_study.files["paper_outputs/figures/tiny_norms.svg"]
    assert "Norms of the newcomer" not in story.ruled.files["paper_outputs/report.html"].decode()


def test_metrics_are_the_accuracies_of_the_models(story):
    """One line, whatever the number of runs."""
    names, values = (line.split()[1:] for line in story.metrics.output.splitlines())
    runs = [json.loads(story.grown.files[f"paper_outputs/runs/table_2/vit/{seed}/metrics.json"]) for seed in (0, 1)]
    assert set(names) == {"vit", "osa_wide"}
    assert float(values[names.index("vit")]) == round(50 * sum(run["test_accuracy"] for run in runs), 2)


def test_plots_are_drawn(story):
    page = (story.clone.root / "plots/index.html").read_text()
    for title in ("Train loss", "Test loss", "Test accuracy"):
        assert title in page
    assert page.count("vega-lite") >= 3


def test_an_experiment_trains_the_runs_that_it_names_and_no_others(story):
    assert story.experiment.trainings == story.experiment.evaluations == {"vit-0"}
    assert story.experiment.others == {"tables", "report"}
    config = json.loads(story.experiment.files["paper_outputs/runs/table_2/vit/0/record.json"])["config"]
    assert config["train"]["learning_rate"] == 1e-6
    studied = {
        name for name in story.grown.files if name.startswith(("paper_outputs/runs/left_open/", "paper_outputs/studies/"))
    }
    assert all(story.experiment.files[name] == story.grown.files[name] for name in studied)


def test_experiments_are_compared(story):
    rows = {row["Experiment"]: row for row in csv.DictReader(io.StringIO(story.experiments.output))}
    assert float(rows["slow"]["train.learning_rate"]) == 1e-6
    assert rows["slow"]["vit"] and float(rows[""]["vit"]) > 0


def test_a_killed_experiment_is_undone_as_the_manual_says(story):
    assert story.restored.files == story.grown.files
    assert "up to date" in story.weights.output


def test_a_mistake_is_told_and_leaves_the_results(story):
    assert story.mistaken.status != 0
    assert (
        "error: params.yaml: train.learning_rate: '1e-3' is read as text; write 1e-3 without quotes."
        in story.mistaken.output
    )
    assert story.mistaken.files == story.restored.files


def test_another_clone_pulls_the_weights_of_a_seed_instead_of_training(story):
    """From a plain folder; DVC's lock in git knows their digests, and so does each record."""
    of_seed_0 = ["train@vit-0", "train@osa_wide-0"]
    story.clone.run("git", "stash", "--quiet", "--include-untracked")
    story.clone.run("dvc", "remote", "add", "storage", str(story.clone.root.parent / "storage"))
    story.clone.run("dvc", "push", "--remote", "storage", *of_seed_0)
    story.clone.run("git", "clone", "--quiet", ".", "fresh")
    fresh = copy.copy(story.clone)
    fresh.root = story.clone.root / "fresh"
    fresh.run("dvc", "remote", "add", "-d", "storage", str(story.clone.root.parent / "storage"))
    fresh.run("dvc", "pull", *of_seed_0)
    weights = {path.relative_to(fresh.root).as_posix() for path in fresh.root.glob("paper_outputs/weights/*/*/*.pt")}
    assert weights == {"paper_outputs/weights/table_2/vit/0.pt", "paper_outputs/weights/table_2/osa_wide/0.pt"}
    before = fresh.results()
    fresh.run("dvc", "repro", "--single-item", "fetch")
    fresh.run("dvc", "repro", "--single-item", "--force", "evaluate@vit-0")
    assert fresh.results() == before
