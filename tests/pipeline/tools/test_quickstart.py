"""The quickstart is a workspace of DVC that shows its accuracies, and does what an edit touches when it is given again."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import params, reading
from pipeline.core import files
from pipeline.core.files import ROOT
from pipeline.tools import quickstart

OURS = ("params.yaml", "dvc.yaml", ".dvc/config", ".gitignore")
OWN_VALUES = {"data.source", "run.variants", "run.seeds", "model.patch_size", "model.embed_dim"}
OWN_VALUES |= {f"train.{key}" for key in ("epochs", "batch_size", "learning_rate", "points_per_epoch")} | {"model.depth"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root with the workspace alone, as the working directory."""
    for name in OURS:
        files.write_bytes(tmp_path / quickstart.FOLDER / name, (ROOT / quickstart.FOLDER / name).read_bytes())
    for name in ("osa", "pipeline"):
        (tmp_path / name).symlink_to(ROOT / name)
        shutil.copy(ROOT / quickstart.FOLDER / name, tmp_path / quickstart.FOLDER / name, follow_symlinks=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers are pytest's
    return tmp_path


def edit(old: str, new: str) -> None:
    path = Path("quickstart/params.yaml")
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("starts_warm")
def test_all_is_done_shown_and_up_to_date(root, capfd):
    edit("[osa_qr, vit, vit_noskip, vit_noskip_nonorm]", "[osa_qr, vit]")
    for old, new in {"size: 7": "size: 14", "dim: 32": "dim: 8", "depth: 3": "depth: 2", "epochs: 8": "epochs: 1"}.items():
        edit(old, new)
    edit("batch_size: 16", "batch_size: 1000")
    edit("num_heads: 4", "num_heads: 2")
    quickstart.main([])
    out, err = capfd.readouterr()
    accuracies = {}
    for variant, label in (("osa_qr", "OSA (QR)"), ("vit", "ViT")):
        made = files.read_json(root / f"quickstart/paper_outputs/runs/table_2/{variant}/0/metrics.json")
        accuracies[label] = f"{100 * made['test_accuracy']:.1f} %"
        assert f"table_2/{variant}/0: {made['test_accuracy']:.1%}" in err and " left" in err  # without a terminal too
    shown = {line[2:30].strip(): line[30:].strip() for line in out.splitlines() if line.startswith("  ") and "%" in line}
    assert shown == accuracies and "skipping" not in out and "lock file" not in out and "dvc push" not in out
    environment = files.read_json(root / "quickstart/paper_outputs/runs/table_2/vit/0/record.json")["environment"]
    assert environment["num_threads"] == 1
    assert Path("paper_outputs/report.html").exists()  # in the workspace, which the process is in now
    done = subprocess.run([sys.executable, "-m", "dvc", "repro"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("Data and pipelines are up to date.\n")
    assert {path.name for path in root.iterdir()} == {"osa", "pipeline", "quickstart"}


def test_it_differs_from_the_root_in_size_alone():
    """A change in params.yaml or dvc.yaml is to change here too."""
    small, whole = (reading.read_yaml(path) for path in (ROOT / "quickstart/params.yaml", ROOT / "params.yaml"))
    for section in ("run", "data", "model", "init", "train"):
        keys = small[section] | whole[section]
        differing = {f"{section}.{key}" for key in keys if small[section].get(key) != whole[section].get(key)}
        assert differing <= OWN_VALUES
    assert small["variants"] == {name: whole["variants"][name] for name in small["run"]["variants"]}
    assert {*small["run"]["variants"]} < {*params.load_paper().table_2}
    stages, of_root = (reading.read_yaml(ROOT / name)["stages"] for name in ("quickstart/dvc.yaml", "dvc.yaml"))
    stages["train"]["cmd"] = stages["train"]["cmd"].removesuffix(" --no-tracking")
    assert stages == {name: of_root[name] for name in stages}


def test_a_mistake_names_its_file(root, capsys):
    edit("epochs:", "epoch:")
    with pytest.raises(SystemExit):
        quickstart.main([])
    error = capsys.readouterr().err
    assert "quickstart/params.yaml" in error and "train.epoch" in error
