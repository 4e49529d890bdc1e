"""The quickstart runs every stage, in order, with its own changes of params.yaml."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest

from pipeline import quickstart, studies
from pipeline.core import params
from pipeline.core.files import ROOT


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The stages that it starts, of which `failing` fails."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    started, failing = [], []

    def run(command, cwd, env):
        assert (command[1], str(cwd), env["DVC_ROOT"]) == ("-m", "quickstart", str(tmp_path / "quickstart"))
        assert env["PYTHONPATH"].startswith(str(ROOT))
        started.append([command[2].removeprefix("pipeline."), *command[3:]])
        return SimpleNamespace(returncode=int(started[-1][0] in failing))

    monkeypatch.setattr(subprocess, "run", run)
    return SimpleNamespace(started=started, failing=failing)


def test_runs_every_stage(commands):
    quickstart.main()
    settings, quick = params.load("params.yaml"), params.load("quickstart/params.yaml")
    assert (quick.data.source, quick.data.pixel_scaling) == ("sample", settings.data.pixel_scaling)
    assert (quick.run.seeds, quick.run.variants) == ([0], settings.run.variants)
    assert quick.variants == settings.variants and quick.train.epochs < settings.train.epochs
    before, after = commands.started[:1], commands.started[-3 - len(studies.measuring()) - 1 :]
    assert before == [["fetch"]]
    measured = [["study", name, "--no-tracking"] for name in studies.measuring()]
    assert after == [["tables"], ["sources"], *measured, ["report"], ["tracking", "sync"]]
    trained = [words for words in commands.started if words[0] in ("train", "evaluate")]
    assert len(trained) == 2 * len(quick.run.variants) == len(commands.started) - len(before) - len(after)
    for variant in quick.run.variants:
        own = [["train", variant, "0", "--no-tracking"], ["evaluate", variant, "0"]]
        assert [words for words in trained if words[1] == variant] == own


def test_names_the_stage_that_fails(commands, capsys):
    commands.failing.append("sources")
    with pytest.raises(SystemExit):
        quickstart.main()
    assert "`sources` of the quickstart failed" in capsys.readouterr().err
    assert commands.started[-1] == ["sources"]
