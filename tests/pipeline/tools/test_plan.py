"""The plan names what would run and why, and how long by the records, without data or weights."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import reading
from pipeline.core import files
from pipeline.core.files import ROOT
from pipeline.tools import locks, plan
from pipeline.training.run import Run
from tests.pipeline import synthetic
from tests.pipeline.trainings import trained, write_data, write_params

pytestmark = [
    pytest.mark.filterwarnings("ignore:_NoneStep:DeprecationWarning"),  # DVC's own use of pygtrie
    pytest.mark.slow,
]
GRAPH = """
stages:
  fetch: {cmd: mkdir -p paper_outputs/data && echo 1 > paper_outputs/data/mnist.txt, deps: [code],
          outs: [paper_outputs/data/mnist.txt: {cache: false}]}
  check: {cmd: mkdir -p paper_outputs && echo 1 > paper_outputs/check.txt, deps: [pipeline/paper.yaml],
          outs: [paper_outputs/check.txt: {cache: false}]}
  train:
    matrix: {variant: [vit], seed: [0]}
    cmd: "true"
    deps: [paper_outputs/check.txt, paper_outputs/data/mnist.txt]
    params: [train, model]
    outs:
      - paper_outputs/weights/table_2/${item.variant}/${item.seed}.safetensors
      - paper_outputs/runs/table_2/${item.variant}/${item.seed}/metrics.json: {cache: false}
  tables: {cmd: mkdir -p tables, deps: [paper_outputs/runs/table_2/vit/0/metrics.json], outs: [tables]}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One run of 4 epochs, 2 blocks and, by its record, an hour, which DVC knows; its weights and data are gone."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_params(run={"variants": ["vit"], "seeds": [0]}, train={"epochs": 4})
        write_data()
        run = trained("vit")
        synthetic.rewrite(run.folder, seconds=3600.0)
        Path("dvc.yaml").write_text(GRAPH, encoding="utf-8")
        Path("code").write_text("A = 1", encoding="utf-8")
        files.write_text(".dvc/config", "[core]\n    no_scm = true\n    analytics = false\n")
        for command in ("repro --quiet fetch check", "commit --force train@vit-0", "repro --quiet"):
            subprocess.run([sys.executable, "-m", "dvc", *command.split()], check=True)
        shutil.rmtree("data"), shutil.rmtree("paper_outputs/weights"), shutil.rmtree(".dvc/cache")
    return folder


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.studies.names", lambda wing=None: [])


def test_missing_weights_and_data_are_no_reason_to_run(project, capsys):
    plan.main([])
    text = capsys.readouterr().out
    assert "up to date" in text and "train (" not in text
    assert (
        "fetch: mnist is not here, and will be downloaded from its mirrors (12 MB); about 10 s\n"
        in text.splitlines(keepends=True)[0]
    )
    assert "\n1 stage will run, 3 are up to date.\n" in text
    assert "weights of 1 recorded run" in text and "1 h 0 min" in text


def test_an_edit_names_its_group_in_a_line_with_reasons_and_the_time_of_what_is_left(project, capsys):
    changes = {"train": {"epochs": 1}, "model": {"depth": 3}}
    edited = synthetic.deep_merge(reading.read_yaml("params.yaml"), changes)
    write_params(run=edited["run"], **changes)
    plan.main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train (vit-0): ") and "train.epochs is 1, was 4" in lines[0]
    assert "model.depth is 3, was 2" in lines[0] and "about 22 min" in lines[0]  # three eighths of the hour
    assert lines[1].startswith("fetch: ")
    assert "tables; about 5 s" in lines[2] and len(lines) == 4  # it would train again anyway, so no word of its weights


def test_what_follows_has_its_time_too(project, capsys):
    Path("data/mnist").mkdir(parents=True)
    Path("code").write_text("A = 2", encoding="utf-8")
    plan.main([])
    first, second, last, _ = capsys.readouterr().out.splitlines()
    assert first == "fetch: code is modified; about 10 s"
    assert second.startswith("Only if the results above change: train (vit-0), tables; about 1 h 0 min")
    assert last == "1 stage will run, up to 2 more may follow, 1 are up to date."


def test_a_check_that_is_passed_is_followed_by_nothing(project, capsys):
    Path("data/mnist").mkdir(parents=True)
    with Path("pipeline/paper.yaml").open("a", encoding="utf-8") as paper:
        paper.write("# a note\n")
    plan.main([])
    first, last, _ = capsys.readouterr().out.splitlines()
    assert first == "check: pipeline/paper.yaml is modified; about 3 s"
    assert last == "1 stage will run, 3 are up to date."
    Path("pipeline/paper.yaml").write_text("title: [", encoding="utf-8")
    with pytest.raises(SystemExit):
        plan.main([])
    assert "pipeline/paper.yaml is not valid YAML" in capsys.readouterr().err


def test_it_imports_nothing_that_draws_or_tracks():
    code = "import sys, dvc.repo, pipeline.tools.plan; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert not {"pandas", "matplotlib", "scipy", "torchvision", "mlflow", "PIL"} & modules
    assert not [name for name in modules if name.startswith("pipeline.studies.") and name != "pipeline.studies.lab"]


def test_what_stops_dvc_is_one_sentence(project, capsys):
    locks.RWLOCK.write_text("", encoding="utf-8")  # as a kill leaves it
    for remedy in ("`rm .dvc/tmp/rwlock`", "`make doctor`"):
        with pytest.raises(SystemExit):
            plan.main([])
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1 and remedy in message
        locks.RWLOCK.unlink(missing_ok=True)
        Path("dvc.lock").write_text("<<<<<<< HEAD\n", encoding="utf-8")
    assert Run("vit", 0).record().seconds == 3600
