"""The whole pipeline by `dvc`, in a clone of the paper's part with small models and the sample as data, as a story of edits.

DVC runs in this process, and its stages in a warm Python. Trainings are not tracked and figures stay empty, as MLflow and
matplotlib would take longer than all else.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import dvc as _dvc  # noqa: F401  Imported before any test: its loggers keep the streams that are open at import.
import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
LITERAL = Path("paper_outputs/runs/stability/osa_qr_literal")
COMMITTED = ("paper_outputs/benchmarks/", "paper_outputs/studies/", f"{LITERAL}/")  # the clone makes the others itself
BEYOND = ("pipeline/studies/deep/", "pipeline/studies/orthogonal/")
RUN, WEIGHTS = Path("paper_outputs/runs/table_2/vit/0"), "paper_outputs/weights/table_2/vit/0.safetensors"


def make_clone(folder: Path) -> None:
    """The paper's code and parameters as they stand here, with small models, one study and a repository of their own."""
    names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    for name in names:
        result = name == "dvc.lock" or name.startswith(("paper_outputs/", *BEYOND))
        if (not result or name.startswith(COMMITTED)) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    edit(folder / "params.yaml", make_small)
    edit(folder / "dvc.yaml", keep_one_study)
    figures = folder / "pipeline/report/figures.py"
    replace(figures, "figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)", 'buffer.write(b"<svg></svg>")')
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


def edit(path: Path, change) -> None:
    """Edits a YAML file as a person does: comments and order stay."""
    yaml = YAML()
    raw = yaml.load(path)
    change(raw)
    yaml.dump(raw, path)


def replace(path: str | Path, before: str, after: str) -> None:
    text = Path(path).read_text(encoding="utf-8")
    assert text.count(before) == 1
    Path(path).write_text(text.replace(before, after), encoding="utf-8")


def make_small(raw: dict) -> None:
    raw["run"] |= {"variants": ["vit"], "seeds": [0]}
    raw["data"]["source"] = "sample"
    raw["model"] |= {"patch_size": 14, "embed_dim": 8, "depth": 2, "num_heads": 2}
    raw["train"] |= {"epochs": 1, "batch_size": 500}


def keep_one_study(raw: dict) -> None:
    studies = raw["stages"]["analytic"]["foreach"]
    for name in [name for name in studies if name != "theorem_4_2"]:
        del studies[name]
    for name in ("on_images", "verdicts", "research"):
        del raw["stages"][name]


def isolate(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Gives DVC and git settings of their own."""
    for name in [name for name in os.environ if name.startswith(("DVC_", "GIT_", "MLFLOW_", "OSA_"))]:
        patch.delenv(name)
    roles = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    folders = {f"DVC_{name}_DIR": str(folder / name) for name in ("SITE_CACHE", "GLOBAL_CONFIG", "SYSTEM_CONFIG")}
    settings = {
        "DVC_NO_ANALYTICS": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "OMP_NUM_THREADS": "1",
        "LOG": str(folder / "log"),
    }
    settings["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name, value in (roles | folders | settings).items():
        patch.setenv(name, value)


@pytest.fixture
def clone(tmp_path, monkeypatch, warm_python):
    """A clone as working directory."""
    isolate(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(warm_python.parent), prepend=os.pathsep)
    make_clone(tmp_path / "clone")
    monkeypatch.chdir(tmp_path / "clone")


class Dvc:
    """DVC in this process. `stages` are the commands of the last one that it ran, without `python -m pipeline`"""

    def __init__(self, python: Path, patch: pytest.MonkeyPatch) -> None:
        self.stages, self.python = [], python
        patch.setattr("dvc.stage.run._run", self._run)

    def _run(self, executable: str, command: str, *, cwd: str, env: dict[str, str], **_) -> None:
        from dvc.stage.exceptions import StageCmdFailedError

        python, option, module, *arguments = shlex.split(command.replace("$DVC_STAGE", env["DVC_STAGE"]))
        assert (python, option, module) == ("python", "-m", "pipeline")
        self.stages.append(" ".join(arguments))
        arguments += ["--no-tracking"] if arguments[0] == "train" else []
        with open(os.environ["LOG"], "a", encoding="utf-8") as log:
            done = subprocess.run([self.python, option, module, *arguments], cwd=cwd, env=env, stdout=log, stderr=log)
        if done.returncode:
            raise StageCmdFailedError(command, done.returncode)

    def __call__(self, *arguments: str, status: int = 0) -> list[str]:
        from dvc.cli import main

        self.stages = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert main([*arguments]) == status, Path(os.environ["LOG"]).read_text(encoding="utf-8")
        return self.stages

    def stale(self, *targets: str) -> set[str]:
        """The stages that `dvc status` lists."""
        from dvc.repo import Repo

        with warnings.catch_warnings(), Repo() as repo:
            warnings.simplefilter("ignore")
            return set(repo.status(targets=list(targets) or None))


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory, warm_python):
    """A clone after its first `dvc repro`, and the stages that it ran."""
    folder = tmp_path_factory.mktemp("reproduced")
    with pytest.MonkeyPatch.context() as patch:
        isolate(folder, patch)
        make_clone(folder / "clone")
        patch.chdir(folder / "clone")
        return folder / "clone", Dvc(warm_python, patch)("repro")


@pytest.fixture
def dvc(reproduced, warm_python, tmp_path, monkeypatch):
    """DVC in a copy of the reproduced clone, which is the working directory."""
    isolate(tmp_path, monkeypatch)
    shutil.copytree(reproduced[0], tmp_path / "clone", symlinks=True)
    monkeypatch.chdir(tmp_path / "clone")
    return Dvc(warm_python, monkeypatch)


def results() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path("paper_outputs").rglob("*") if path.is_file()}


def habits() -> list[str]:
    """The commands that docs/exploring.md has for who knows DVC."""
    page = (ROOT / "docs/exploring.md").read_text(encoding="utf-8")
    lines = re.search(r"^## Everyday DVC\n\n```sh\n(.*?)```", page, re.MULTILINE | re.DOTALL)[1].splitlines()
    lines = [line for line in lines if line.startswith("dvc ")]
    assert len(lines) == 5
    return lines


def commit() -> None:
    subprocess.run("git add --all && git commit --quiet --message results", shell=True, check=True)


PLOTS = ("Figure 1, train loss", "Figure 1, test loss", "Runs by seed", "Confusion matrix", "paper_outputs/figure_1.png")
MEASURED = {"evaluate evaluate@vit", "tables", "report paper"}


@pytest.mark.slow
def test_edits_rerun_what_depends_on_them_and_nothing_else(dvc, reproduced):
    _, stages = reproduced
    assert set(stages) == {"check", "fetch", "train train@vit-0", "study theorem_4_2"} | MEASURED
    assert stages[-1] == "report paper"
    changed = subprocess.check_output(["git", "status", "--porcelain", "-uall", RUN], text=True).split()[1::2]
    assert {Path(name).name for name in changed} == {"history.csv", "metrics.json", "record.json"}
    assert subprocess.check_output(["git", "ls-files", "-o", "--exclude-standard", WEIGHTS], text=True).splitlines() == [
        WEIGHTS
    ]
    first = results()
    assert b">4.2</td>" in first["paper_outputs/report.html"]
    assert dvc.stale() == set() and dvc("repro") == []

    edit(Path("params.yaml"), lambda raw: raw.update(labels={"vit": "The baseline"}))
    assert set(dvc("repro")) == {"check", "report paper"}
    assert "The baseline" in Path("paper_outputs/report.html").read_text(encoding="utf-8")
    commit()
    for line in habits():
        assert dvc(*line.split()[1:]) == [], line
    page = Path("dvc_plots/index.html").read_text(encoding="utf-8")
    places = [page.index(f">{name}<") if "." in name else page.index(f'"{name}"') for name in PLOTS]
    assert places == sorted(places)
    for image in re.findall(r'<img src="([^"]+)"', page):
        assert Path("dvc_plots", image).is_file(), image

    assert "train train@vit-0" in dvc("repro", "--force", "train@vit-0")
    assert set(dvc("repro")) == {"tables", "report paper"}  # the weights have the same bits
    assert "trained again here" in Path("paper_outputs/report.md").read_text(encoding="utf-8")
    commit()

    with open("pipeline/training/loop.py", "a", encoding="utf-8") as file:
        file.write("# A comment.\n")
    assert dvc("repro") == [] and dvc.stale() == set()
    replace("osa/__init__.py", "NUMERICS = ", "NUMERICS = 1000 + ")
    assert "train@vit-0" in dvc.stale()
    subprocess.run(["git", "checkout", "--quiet", "osa"], check=True)

    def several(raw: dict) -> None:
        raw["run"] |= {"variants": ["vit", "osa_exact"], "seeds": [0, 1]}
        raw["model"]["depth"], raw["train"]["epochs"] = 3, 2

    edit(Path("params.yaml"), several)
    stale = dvc.stale()
    assert {"train@vit-0", "train@osa_exact-1"} <= stale
    assert "analytic@theorem_4_2" not in stale  # an edit of parameters measures no theorem again
    subprocess.run(["git", "checkout", "--quiet", "params.yaml"], check=True)

    edit(Path("params.yaml"), lambda raw: raw["run"].update(variants=["vit", "osa_exact"]))
    assert set(dvc("repro", "tables")) == {"check", "train train@osa_exact-0", "evaluate evaluate@osa_exact", "tables"}
    commit()
    before = results()
    retrained = {stage for name in ("vit", "osa_exact") for stage in (f"train train@{name}-0", f"evaluate evaluate@{name}")}
    assert set(dvc("exp", "run", "tables", "--set-param", "train.epochs=2")) == {"check", "tables"} | retrained
    assert json.loads((RUN / "record.json").read_text(encoding="utf-8"))["config"]["train"]["epochs"] == 2
    subprocess.run([sys.executable, "-m", "pipeline", "restore", "--yes"], check=True)
    assert results() == before and dvc.stale("train@vit-0") == set()

    replace("pipeline/results/tables.py", "params = load()", "raise SystemExit(1)")
    assert dvc("repro", "tables", status=255) == ["tables"]
    assert results() == before


@pytest.mark.slow
def test_no_result_that_somebody_changed_reaches_a_page(dvc):
    """A changed result is named, or made again."""
    commit()
    first, machines = results(), Path("paper_outputs/benchmarks")

    def edited(path: Path) -> None:
        path.write_text(path.read_text(encoding="utf-8").replace("0.9", "0.8", 1), encoding="utf-8")

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-40])

    def replaced(path: Path) -> None:
        seed = "1" if path.parent.name == "0" else "0"
        shutil.copy(path.parents[1] / seed / path.name, path)

    changes = [(LITERAL / "0/metrics.json", edited), (LITERAL / "0/history.csv", cut), (LITERAL / "0/history.csv", replaced)]
    changes += [(LITERAL / "0/record.json", replaced), (Path("paper_outputs/studies/first_steps/steps.csv"), cut)]
    for path, change in changes:
        change(path)
        assert dvc("repro", status=255) == ["report paper"], path
        said = Path(os.environ["LOG"]).read_text(encoding="utf-8").splitlines()[-1]
        assert said.startswith("error: ") and str(path) in said and "git checkout" in said
        subprocess.run(["git", "checkout", "--quiet", path], check=True)
        assert dvc("repro") == [] and results() == first

    one, other = sorted(path for path in machines.iterdir() if (path / "step.json").exists())[:2]
    for path in one.iterdir():
        if (other / path.name).exists():
            shutil.copy(other / path.name, path)
    assert dvc("repro", status=255) == ["report paper"]
    assert str(one) in Path(os.environ["LOG"]).read_text(encoding="utf-8").splitlines()[-1]
    subprocess.run(["git", "checkout", "--quiet", machines], check=True)

    made = {
        RUN / "metrics.json": "train@vit-0",
        Path(WEIGHTS): "train@vit-0",
        Path("paper_outputs/evaluations/vit/0/evaluation.json"): "evaluate@vit",
        Path("paper_outputs/tables/summary.csv"): "tables",
        Path("paper_outputs/studies/theorem_4_2/weights.csv"): "analytic@theorem_4_2",
    }
    for path, stage in made.items():
        cut(path)
        assert stage in dvc.stale(), path
        path.write_bytes(first[str(path)])
    assert dvc.stale() == set()
    for path in made:
        cut(path)
    assert set(dvc("repro")) == {"train train@vit-0", "study theorem_4_2"} | MEASURED
    assert Path(WEIGHTS).read_bytes() == first[WEIGHTS]
    assert Path("paper_outputs/table_2.csv").read_bytes() == first["paper_outputs/table_2.csv"]


@pytest.mark.slow
def test_an_array_of_printed_commands_trains_all_and_dvc_hears_of_it_afterwards(clone):
    """As docs/pipeline.md has it, with xargs in place of Slurm."""

    def output(command: str) -> str:
        return subprocess.run(command, shell=True, check=True, stdout=subprocess.PIPE, text=True).stdout

    edit(Path("params.yaml"), lambda raw: raw["run"].update(variants=["vit", "osa_exact"]))
    section = (ROOT / "docs/pipeline.md").read_text(encoding="utf-8").partition("## On a cluster")[2]
    script, before, after, *_ = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(script.splitlines()) == 6
    Path(".venv/bin").mkdir(parents=True)
    Path(".venv/bin/activate").touch()
    Path("array.sh").write_text(script, encoding="utf-8")
    (printed, submitted), (again, repro) = before.splitlines(), after.splitlines()
    assert submitted.startswith("sbatch --array=1-") and submitted.endswith(" array.sh")
    output("dvc repro fetch")
    output(printed)
    assert len(Path("runs.txt").read_text(encoding="utf-8").splitlines()) == 2
    output("seq 2 | SLURM_SUBMIT_DIR=$PWD xargs -P 2 -I {} env SLURM_ARRAY_TASK_ID={} bash array.sh")
    assert output("python -m pipeline fan_out --print") == ""
    dry = f"{repro} --dry || true"  # it fails where it comes to a stage that has never run
    assert output(dry).count("Running stage 'train@") == 2
    assert output(f"{again} --no-tracking") == "Nothing to train: all 2 runs exist already.\n"
    assert "Running stage 'train@" not in output(dry)
    assert len([*Path("paper_outputs/runs/table_2").glob("*/*/record.json")]) == 2


@pytest.mark.slow
def test_a_clone_has_the_same_bytes_whatever_the_line_ends(tmp_path):
    folder = tmp_path / "a %41? #é"
    subprocess.run(["git", "clone", "--quiet", "--config", "core.autocrlf=true", ROOT, folder], check=True)
    files = subprocess.check_output(["git", "ls-files", "--eol"], cwd=folder, text=True).splitlines()
    assert files and not [line for line in files if len({end.partition("/")[2] for end in line.split()[:2]}) > 1]


@pytest.mark.slow
def test_a_parameter_never_reaches_a_shell_unchecked(clone):
    edit(Path("params.yaml"), lambda raw: raw["run"].update(seeds=["0; touch X #"]))
    before = results()
    done = subprocess.run(["dvc", "repro"], capture_output=True, text=True)
    assert done.returncode and "run.seeds.0" in done.stderr
    assert "pipeline check" in done.stdout and "pipeline fetch" not in done.stdout
    assert not Path("X").exists() and results() == before
    for path in ("paper_outputs/check.txt", "paper_outputs/data/sample.txt"):  # as an earlier `dvc repro` left them
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    names = ["vit; touch X #", "$(touch X)", "`touch X`"]

    def rename(raw: dict) -> None:
        raw["run"] |= {"seeds": [0], "variants": names}
        raw["variants"] |= dict.fromkeys(names, raw["variants"]["vit"])

    edit(Path("params.yaml"), rename)
    done = subprocess.run(["dvc", "repro", "--single-item", "--keep-going", "train"], capture_output=True, text=True)
    assert done.returncode and "params.yaml: run.variants.0" in done.stderr
    assert not Path("X").exists()
