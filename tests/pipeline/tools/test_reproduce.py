"""`make reproduce` says what came out, whether anything was trained, and which stages run."""

import subprocess

import pytest

from pipeline.config import params
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.tools import fan_out, jobs, reproduce
from tests.pipeline.trainings import write_data, write_params

GRAPH = """\
stages:
  quick: {cmd: echo from the stage, outs: [quick]}
  slow: {cmd: touch slow, deps: [quick], outs: [slow]}
  last: {cmd: "touch last; exit ${status}", deps: [slow], outs: [last]}
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n", encoding="utf-8")
    (tmp_path / "dvc.yaml").write_text(
        GRAPH.replace("echo from the stage", "echo from the stage; touch quick"), encoding="utf-8"
    )
    (tmp_path / "params.yaml").write_text("status: 0\n", encoding="utf-8")


@pytest.mark.slow
def test_it_shows_the_stages_that_run_and_what_they_print(workspace, capfd, tmp_path):
    (tmp_path / "params.yaml").write_text("status: 1\n", encoding="utf-8")
    with pytest.raises(UserError, match="`dvc repro` failed"):
        reproduce.repro()
    out, err = capfd.readouterr()
    assert "from the stage" in out and "'slow'" in out and "failed to reproduce 'last'" in err
    (tmp_path / "params.yaml").write_text("status: 0\n", encoding="utf-8")
    reproduce.repro()
    out, _ = capfd.readouterr()
    assert "'last'" in out and "'slow'" not in out, "stages that are up to date are not named"


def test_the_end_says_what_was_trained_and_how_to_train_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_params(run={"variants": ["osa_qr", "vit"], "seeds": [5]})
    (tmp_path / "README.md").write_text("<!-- answer -->\n| a | b |\n| 1 | 2 |\n<!-- /answer -->\n| c |\n", encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], check=True)
    monkeypatch.setattr(reproduce, "repro", lambda *options: asked.append(options))
    monkeypatch.setattr(subprocess, "run", lambda command, run=subprocess.run, **options: run(["true"], **options))
    monkeypatch.setattr(fan_out, "adopt", lambda settings, no_tracking: None)
    monkeypatch.setattr("pipeline.tools.jobs.is_trained", lambda run, config: True)
    monkeypatch.setattr(fan_out, "main", lambda arguments: trained.append(arguments))
    monkeypatch.setattr(reproduce.times.Estimates, "of", lambda *_: 1500.0)
    jobs.source_digest.cache_clear()
    trained, asked = [], []
    reproduce.main(["--jobs", "3"])
    text = capsys.readouterr().out
    assert "\n| a | b |\n| 1 | 2 |\n\n" in text and "| c |" not in text and "report.html" in text and "figure_1.svg" in text
    assert "Nothing was trained: results are as committed." in text
    assert text.endswith("OSA (QR) anew (about 25 min): `. .venv/bin/activate`, then `dvc repro -f train@osa_qr-5`.\n")
    monkeypatch.setattr("pipeline.tools.jobs.is_trained", lambda run, config: run.variant == "vit")
    reproduce.main(["--jobs", "3", "--per-gpu", "2"])
    assert trained == [["--per-gpu=2", "--jobs=3"]] and "1 run was trained" in capsys.readouterr().out
    assert asked == 2 * [("fetch",), ()], "as no data are here"
    write_data()
    reproduce.main([])
    assert asked[4:] == [()]
    jobs.source_digest.cache_clear()


def test_readme_has_the_table_that_is_shown():
    answer = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- /answer -->")[0]
    assert all(params.load(ROOT / "params.yaml").label(name) in answer for name in ("osa_qr", "vit"))
