"""The quickstart is a workspace of DVC that shows its accuracies, and does what an edit touches when it is given again."""

import signal
import subprocess
import sys

import pytest
import yaml

from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.tools import quickstart

TINY = {
    "data": {"source": "sample"},
    "run": {"variants": ["osa_exact", "vit"], "seeds": [0]},
    "model": {"patch_size": 14, "embed_dim": 8, "depth": 2, "num_heads": 2},
    "train": {"epochs": 1, "batch_size": 1000},
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root with params.yaml alone, as the working directory."""
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers are pytest's
    return tmp_path


@pytest.mark.slow
def test_all_is_done_shown_and_up_to_date(root, monkeypatch, capfd):
    monkeypatch.setattr(quickstart, "CHANGES", root / "tiny.yaml")
    quickstart.CHANGES.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    quickstart.main([])
    out, err = capfd.readouterr()
    accuracies = {}
    for variant, label in (("osa_exact", "OSA (exact)"), ("vit", "ViT")):
        made = files.read_json(root / f"quickstart/paper_outputs/runs/table_2/{variant}/0/metrics.json")
        accuracies[label] = f"{100 * made['test_accuracy']:.1f} %"
        assert f"table_2/{variant}/0: {made['test_accuracy']:.1%}" in err and " left" in err  # also where it is no terminal
    shown = {line[2:30].strip(): line[30:].strip() for line in out.splitlines() if line.startswith("  ") and "%" in line}
    assert shown == accuracies
    environment = files.read_json(root / "quickstart/paper_outputs/runs/table_2/vit/0/record.json")["environment"]
    assert environment["num_threads"] == 1
    command = [sys.executable, "-m", "dvc", "repro"]
    done = subprocess.run(command, cwd="quickstart", capture_output=True, text=True, check=True)
    assert done.stdout.endswith("Data and pipelines are up to date.\n")
    assert {path.name for path in root.iterdir()} == {"params.yaml", "tiny.yaml", "quickstart"}


def test_its_parameters_show_the_papers_models_and_an_edit_of_them_stays(root, capsys):
    settings = quickstart.prepare()
    assert set(settings.run.variants) <= set(params.load_paper().table_2) and len(settings.run.variants) == 4
    assert settings.data.source == "sample"
    path = root / "quickstart/params.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("depth: 3", "depth: 2"), encoding="utf-8")
    assert quickstart.prepare().model.depth == 2
    path.write_text(path.read_text(encoding="utf-8").replace("epochs:", "epoch:"), encoding="utf-8")
    with pytest.raises(SystemExit):
        quickstart.main([])
    error = capsys.readouterr().err
    assert "quickstart/params.yaml" in error and "train.epoch" in error


def test_what_fails_is_named_and_what_runs_ends_with_the_quickstart(root, monkeypatch):
    (root / "quickstart").mkdir()
    with pytest.raises(UserError, match="no_such_module failed in quickstart"):
        quickstart.run("no_such_module")
    ended = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            if not ended:
                ended.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        quickstart.run("http.server", "0")
    assert ended[0].poll() is not None
