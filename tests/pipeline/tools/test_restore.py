"""The way back to the committed results: whatever was done to them, DVC is content afterwards, and nothing is lost."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.core import files
from pipeline.core.files import ROOT
from pipeline.tools import locks, restore

PARAMS = """\
data: {source: mnist}
run:
  variants: [osa_qr, vit]
  seeds: [0]
train: {epochs: 10}
"""
GRAPH = """\
stages:
  fetch:
    cmd: mkdir -p paper_outputs/data && echo ${data.source} > paper_outputs/data/${data.source}.txt
    params: [data]
    outs: [{"paper_outputs/data/${data.source}.txt": {cache: false, persist: true}}]
  train:
    matrix: {variant: "${run.variants}", seed: "${run.seeds}"}
    cmd: sh train.sh ${item.variant} ${item.seed} ${train.epochs}
    deps: ["paper_outputs/data/${data.source}.txt"]
    params: [train]
    outs:
      - paper_outputs/weights/table_2/${item.variant}/${item.seed}.safetensors: {cache: false, persist: true}
      - paper_outputs/runs/table_2/${item.variant}/${item.seed}: {cache: false, persist: true}
  tables:
    cmd: mkdir -p paper_outputs/tables && cat paper_outputs/runs/table_2/*/*/record.json > paper_outputs/tables/runs.csv
    deps: [paper_outputs/runs/table_2, paper_outputs/weights/table_2]
    outs: [{paper_outputs/tables: {cache: false, persist: true}}]
"""
TRAIN = """\
weights=paper_outputs/weights/table_2/$1 run=paper_outputs/runs/table_2/$1/$2
mkdir -p $weights $run
echo "$@" > $weights/$2.safetensors
echo "$@" > $run/record.json
if [ $3 = 99 ]; then sleep 600; fi
"""
OWN = {  # files that nobody but their owner touches
    "train.sh": TRAIN + "# an edit of code\n",
    "paper_outputs/notes.txt": "mine\n",
    "paper_outputs/runs/tries/vit/0/record.json": "a try\n",
    "paper_outputs/runs/ideas.md": "mine\n",
    "my_images/0.png": "an image\n",
}


def command(*words: str, **options) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, **options).stdout


def dvc(*words: str) -> str:
    return command(sys.executable, "-m", "dvc", *words)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A repository whose results are committed, for git and for DVC."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ignored = (ROOT / ".gitignore").read_text(encoding="utf-8")
        for name, text in {"params.yaml": PARAMS, "dvc.yaml": GRAPH, "train.sh": TRAIN, ".gitignore": ignored}.items():
            files.write_text(name, text)
        command("git", "init", "--quiet")
        for key, value in {"user.name": "A", "user.email": "a@b.c", "commit.gpgsign": "false"}.items():
            command("git", "config", key, value)
        dvc("init", "--quiet"), dvc("config", "core.analytics", "false")
        shutil.copy(ROOT / ".dvcignore", folder)
        dvc("repro", "--quiet")
        study = Path("paper_outputs/runs/depth/vit/0")
        files.write_text(study / "record.json", "committed\n")
        files.write_text("paper_outputs/weights/depth/vit/0.safetensors", "ignored by git\n")
        command("git", "add", "--all"), command("git", "commit", "--quiet", "--message=results")
    return folder


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.chdir(tmp_path)
    for name, text in OWN.items():
        files.write_text(name, text)
    return tmp_path


def contents() -> dict[str, bytes]:
    paths = [path for path in Path().rglob("*") if path.is_file() and path.parts[0] not in (".git", ".dvc", ".restored")]
    return {str(path): path.read_bytes() for path in paths}


def edit(old: str, new: str) -> None:
    text = Path("params.yaml").read_text(encoding="utf-8")
    assert old in text
    Path("params.yaml").write_text(text.replace(old, new), encoding="utf-8")


def killed_repro() -> None:
    """`dvc repro`, ended without a word while a training has written a part of its files."""
    edit("epochs: 10", "epochs: 99")
    process = subprocess.Popen([sys.executable, "-m", "dvc", "repro", "--quiet"], start_new_session=True)
    record = Path("paper_outputs/runs/table_2/osa_qr/0/record.json")
    deadline = time.monotonic() + 120
    while "99" not in record.read_text(encoding="utf-8") and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def trained_study() -> None:
    """Runs as fan_out leaves them: one of a study trained again, one more of it, and one of Table 2 without DVC."""
    for seed in ("0", "1"):
        files.write_text(f"paper_outputs/runs/depth/vit/{seed}/record.json", "again\n")
        files.write_text(f"paper_outputs/weights/depth/vit/{seed}.safetensors", "again\n")
    files.write_text("paper_outputs/runs/table_2/vit+train.betas=[0.9,0.95]/3/record.json", "again\n")
    Path("paper_outputs/tables/runs.csv").unlink()


WAYS = {
    "parameters": lambda: [edit("epochs: 10", "epochs: 3"), dvc("repro", "--quiet")],
    "variants_and_seeds": lambda: [edit("vit]", "osa_new]"), edit("seeds: [0]", "seeds: [0, 7]"), dvc("repro", "--quiet")],
    "source": lambda: [edit("mnist", "sample"), dvc("repro", "--quiet")],
    "killed": killed_repro,
    "experiment": lambda: dvc("exp", "run", "--quiet", "--name=tried", "--set-param=train.epochs=5"),
    "studies": trained_study,
    "a_file_staged_and_edited_again": lambda: [edit("10", "11"), command("git", "add", "--all"), edit("11", "12")],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_after_it_dvc_finds_nothing_to_do_and_nothing_is_lost(project, way, capsys):
    committed = {name: command("git", "show", f"HEAD:{name}") for name in command("git", "ls-files").splitlines()}
    WAYS[way]()
    before = contents()
    restore.main(["--yes"])
    shown, after = capsys.readouterr().out, contents()
    assert {name: after[name].decode() for name in OWN} == OWN
    results = {name: text for name, text in after.items() if name not in OWN and "weights/depth" not in name}
    assert {name: text.decode() for name, text in results.items()} == {
        name: text for name, text in committed.items() if name not in OWN and not name.startswith(".dvc/")
    }
    assert dvc("status").strip() == "Data and pipelines are up to date."
    (folder,) = Path(".restored").iterdir()
    kept = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    staged = kept.pop("staged.patch", None)
    assert kept == {name: text for name, text in before.items() if after.get(name) != text}
    assert (staged is not None) == (way == "a_file_staged_and_edited_again")
    assert not staged or b"epochs: 11" in staged
    assert "params.yaml" in shown or way == "studies"
    assert command("git", "status", "--porcelain", "--", "paper_outputs/runs/table_2", "params.yaml", "dvc.lock") == ""
    restore.main(["--yes"])
    assert "Nothing to restore" in capsys.readouterr().out


def refusal(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit):
        restore.main([*arguments])
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_it_asks_and_leaves_all_as_it_is_without_a_yes(project, monkeypatch, capsys):
    edit("epochs: 10", "epochs: 3")
    before = contents()
    assert "--yes" in refusal(capsys)
    monkeypatch.setattr(sys, "stdin", Terminal())
    for answer in ("", "no"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        restore.main([])
        assert "Nothing was restored" in capsys.readouterr().out
    assert contents() == before and not Path(".restored").exists()
    monkeypatch.setattr("builtins.input", lambda question: "y")
    restore.main([])
    text = capsys.readouterr().out
    assert "params.yaml" in text and "left alone:\n  my_images" in text and "  train.sh\n" in text
    assert Path("params.yaml").read_text(encoding="utf-8") == PARAMS


@pytest.mark.slow
def test_it_refuses_while_something_works_here(project, capsys):
    edit("epochs: 10", "epochs: 3")
    files.write_text("pipeline/tools/train.py", "import time\ntime.sleep(600)\n")  # a training that has no lock
    training = subprocess.Popen([sys.executable, "-m", "pipeline.tools.train", "vit", "0"])
    try:
        deadline = time.monotonic() + 60
        while not locks.stages() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert f"`train vit 0` (process {training.pid})" in refusal(capsys, "--yes")
    finally:
        training.kill(), training.wait()
    files.write_json(locks.RWLOCK, {"write": {"/x": {"pid": os.getppid(), "cmd": "dvc repro"}}})
    assert "`dvc repro`" in refusal(capsys, "--yes")
    locks.RWLOCK.write_text("", encoding="utf-8")
    assert f"`rm {locks.RWLOCK}`" in refusal(capsys, "--yes")
    locks.RWLOCK.unlink()
    shutil.rmtree(".git")
    assert "clone" in refusal(capsys, "--yes")
    assert "epochs: 3" in Path("params.yaml").read_text(encoding="utf-8")
