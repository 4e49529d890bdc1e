"""The way back to the committed results: whatever was done to them, DVC is content afterwards, and nothing is lost."""

import errno
import glob
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.core import files, git
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
        shutil.copy(ROOT / ".dvcignore", folder), shutil.copy(ROOT / ".gitattributes", folder)
        dvc("repro", "--quiet")
        study = Path("paper_outputs/runs/depth/vit/0")
        files.write_text(study / "record.json", "committed\n")
        files.write_text("paper_outputs/weights/depth/vit/0.safetensors", "ignored by git\n")
        command("git", "add", "--all"), command("git", "commit", "--quiet", "--message=results")
    return folder


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(made)
    return tmp_path


def fill(made: Path) -> None:
    """Makes the folder a copy of that repository, with files that nobody but their owner touches."""
    shutil.copytree(made, Path(), dirs_exist_ok=True, symlinks=True)
    for name, text in OWN.items():
        files.write_text(name, text)


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
    staged = kept.pop("staged/params.yaml", None)
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
    assert message.startswith("error: ")
    return message


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_it_asks_and_leaves_all_as_it_is_without_a_yes(project, monkeypatch, capsys):
    edit("epochs: 10", "epochs: 3")
    before = contents()
    assert "`python -m pipeline restore --yes`" in refusal(capsys)
    monkeypatch.setattr(sys, "stdin", Terminal())
    for answer in ("", "no"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        restore.main([])
        assert "Nothing was restored" in capsys.readouterr().out
    assert contents() == before and not Path(".restored").exists()
    for number in range(1, 40):
        files.write_text(f"my_images/{number}.png", "an image\n")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    restore.main([])
    text = capsys.readouterr().out
    assert "params.yaml" in text and "left alone:\n  my_images/, 40 files\n" in text and "  train.sh\n" in text
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


def everything() -> list[str]:
    """Edits of each kind: a file staged and edited again, runs that the commit has and has not, and a deleted table."""
    edit("10", "11"), command("git", "add", "--all"), edit("11", "12")
    trained_study()
    return command("git", "status", "--porcelain", "--untracked-files=all").splitlines()


def kept(name: str) -> list[bytes]:
    """The contents that a file has in place or in any folder of .restored."""
    places = [Path(name), *Path(".restored").glob(f"*/{glob.escape(name)}")]
    return [path.read_bytes() for path in places if path.is_file()]


def check_restored(before: dict[str, bytes]) -> None:
    """The commit's files are back, and nothing of before is lost."""
    assert Path("params.yaml").read_text(encoding="utf-8") == PARAMS
    assert Path("paper_outputs/runs/depth/vit/0/record.json").read_text(encoding="utf-8") == "committed\n"
    left = [line[3:] for line in command("git", "status", "--porcelain", "--untracked-files=all").splitlines()]
    assert {*left} == {"train.sh", "my_images/0.png", "paper_outputs/notes.txt", "paper_outputs/runs/ideas.md"}
    assert [name for name, text in before.items() if text not in kept(name)] == []
    assert not [*Path(".restored").glob("*.incoming")]


def conflict() -> None:
    """Two sides of params.yaml, which a stash brings together: git keeps no file that says so."""
    command("git", "checkout", "--quiet", "train.sh")
    edit("10", "20"), command("git", "stash"), edit("10", "30")
    command("git", "commit", "--quiet", "--message=a", "params.yaml")
    subprocess.run(["git", "stash", "pop"], capture_output=True, check=False)
    files.write_text("train.sh", OWN["train.sh"])


def link(path: str) -> None:
    Path(path).rename("mine"), Path(path).symlink_to(os.path.relpath("mine", Path(path).parent))


def folder_for_file() -> None:
    Path("params.yaml").rename("mine"), files.write_text("params.yaml/mine.yaml", "mine\n")


def own_head(name: str) -> None:
    shutil.copy(".git/refs/heads/" + command("git", "branch", "--show-current").strip(), f".git/{name}")


@pytest.mark.slow
def test_a_file_that_comes_while_it_asks_is_not_overwritten(project, monkeypatch, capsys):
    Path("params.yaml").unlink()
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda question: [files.write_text("params.yaml", "mine"), "y"][1])
    assert "changed since" in refusal(capsys)
    assert Path("params.yaml").read_text(encoding="utf-8") == "mine"


IN_THE_WAY = {  # what, a word of the sentence, and what its reader does, where the sentence has no command for it
    "lock": (lambda: Path(".git/index.lock").touch(), "index.lock", "rm .git/index.lock"),
    "skip_worktree": (lambda: command("git", "update-index", "--skip-worktree", "params.yaml"), "params.yaml", None),
    "assume_unchanged": (lambda: command("git", "update-index", "--assume-unchanged", "params.yaml"), "params.yaml", None),
    "merge": (lambda: own_head("MERGE_HEAD"), "a merge", "rm .git/MERGE_HEAD"),
    "cherry_pick": (lambda: own_head("CHERRY_PICK_HEAD"), "a cherry-pick", "rm .git/CHERRY_PICK_HEAD"),
    "rebase": (lambda: Path(".git/rebase-merge").mkdir(), "a rebase", "rmdir .git/rebase-merge"),
    "bisection": (lambda: command("git", "bisect", "start"), "a bisection", "git bisect reset"),
    "link": (lambda: link("params.yaml"), "a link", None),
    "linked_folder": (lambda: link("paper_outputs/weights"), "a link", None),
    "folder": (folder_for_file, "a folder", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_is_in_the_way_is_named_before_anything_moves(project, what, capsys):
    make, word, remedy = IN_THE_WAY[what]
    edit("10", "11")
    make()
    before, state = contents(), command("git", "status", "--porcelain")
    message = refusal(capsys, "--yes")
    assert word in message
    assert contents() == before and command("git", "status", "--porcelain") == state and not Path(".restored").exists()
    subprocess.run(remedy or re.search("`(.+)`", message)[1], shell=True, check=True, capture_output=True)
    before = {name: text for name, text in contents().items() if name not in OWN}
    restore.main(["--yes"])
    assert Path("params.yaml").read_text(encoding="utf-8") == PARAMS
    assert [name for name, text in before.items() if text not in kept(name)] == []


@pytest.mark.slow
def test_a_conflict_is_resolved_first(project, capsys):
    conflict()
    before = contents()
    assert "params.yaml is in conflict" in refusal(capsys, "--yes")
    assert contents() == before


@pytest.mark.slow
def test_a_repository_of_somebody_else_is_restored_once_git_takes_it_as_safe(project, monkeypatch, capsys):
    edit("10", "11")
    monkeypatch.setitem(git.FORM, "GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(project / ".git/of_the_user"))
    remedy = re.search(r"git config --global --add safe.directory \S+", refusal(capsys, "--yes"))[0]
    subprocess.run(remedy, shell=True, check=True)
    restore.main(["--yes"])
    assert Path("params.yaml").read_text(encoding="utf-8") == PARAMS


@pytest.mark.slow
def test_settings_of_the_users_git_change_nothing(project, monkeypatch):
    everything()
    before = contents()
    ignored, failing = project / ".git/ignored", project / ".git/failing"
    files.write_text(ignored, "*.json\n*.yaml\n")
    for path in (failing, *[project / ".git/hooks" / name for name in ("post-checkout", "post-index-change")]):
        files.write_text(path, "#!/bin/sh\necho a word; exit 1\n"), path.chmod(0o755)
    settings = {
        **{"color.ui": "always", "color.status": "always", "diff.external": failing, "diff.noprefix": "true"},
        **{"core.hooksPath": ".git/hooks", "core.fsmonitor": failing, "core.quotePath": "true", "core.autocrlf": "true"},
        **{"core.excludesFile": ignored, "status.showUntrackedFiles": "no", "status.short": "true", "status.branch": "true"},
        **{"log.showSignature": "true", "log.decorate": "full", "core.pager": failing, "diff.renames": "copies"},
    }
    for key, value in settings.items():
        command("git", "config", key, str(value))
    monkeypatch.setenv("GIT_DIR", "/nowhere"), monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    restore.main(["--yes"])
    for name in ("GIT_DIR", "GIT_EXTERNAL_DIFF"):
        monkeypatch.delenv(name)
    for key in settings:
        command("git", "config", "--unset", key)
    check_restored(before)
    assert b"epochs: 11" in next(Path(".restored").glob("*/staged/params.yaml")).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("disks", [1, 2])
def test_a_move_that_fails_undoes_the_others(project, monkeypatch, capsys, disks):
    state, before = everything(), contents()
    staged, moved = command("git", "diff", "--cached"), 0

    def move(source: Path, target: Path, real=restore.move) -> None:
        count(str(target))
        real(source, target)

    def copy(old, new, real=shutil.copyfileobj) -> None:
        new.write(b"a part")
        count(old.name)
        new.seek(0)
        real(old, new)

    def count(path: str) -> None:
        nonlocal steps
        steps -= 1
        if steps == 0:
            raise OSError(errno.ENOSPC, "No space left on device", path)

    def replace(source, target, real=os.replace) -> None:
        if ".tmp." not in str(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(source, target)

    if disks == 1:
        monkeypatch.setattr(restore, "move", move)
    else:
        monkeypatch.setattr(os, "replace", replace), monkeypatch.setattr(shutil, "copyfileobj", copy)
    while True:
        moved += 1
        steps = moved
        try:
            restore.main(["--yes"])
            break
        except SystemExit:
            assert "No space left on device" in capsys.readouterr().err
        assert contents() == before and not Path(".restored").exists()
        assert command("git", "diff", "--cached") == staged
        assert command("git", "status", "--porcelain", "--untracked-files=all").splitlines() == state
    assert moved > 8
    check_restored(before)


KILLED = """
import os, sys
from pipeline.tools import restore

def counted(function):
    def step(*arguments, **options):
        global left
        left -= has_begun
        if left < 0:
            os._exit(9)
        return function(*arguments, **options)
    return step

def begin(*arguments, begun=restore.restore):
    global has_begun
    has_begun = True
    begun(*arguments)

left, has_begun, restore.restore = int(sys.argv[1]), False, begin
steps = {restore.git: ["run"], restore.files: ["write_bytes"], restore.shutil: ["rmtree"]}
steps[restore] = ["move", "remove_empty_folders"]
for module, names in steps.items():
    for name in names:
        setattr(module, name, counted(getattr(module, name)))
restore.main(["--yes"])
"""


def in_a_process(code: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_kill_between_any_two_steps_loses_nothing_and_the_next_call_ends_right(made, tmp_path, monkeypatch, capsys):
    for steps in range(100):
        folder = tmp_path / str(steps)
        folder.mkdir(), monkeypatch.chdir(folder)
        fill(made), everything()
        before = contents()
        done = in_a_process(KILLED, str(steps))
        assert done.returncode in (0, 9), done.stderr
        assert [name for name, text in before.items() if text not in kept(name)] == []
        is_unfinished = any(Path(".restored").glob("*.incoming"))
        restore.main(["--yes"])
        said = capsys.readouterr().out
        check_restored(before)
        assert ("interrupted" in said) == is_unfinished
        assert any(b"epochs: 11" in text for text in kept("staged/params.yaml"))
        if done.returncode == 0:
            break
    assert steps > 15


FAULT = """
import sys
from tests.faults.process import mount
from pipeline.tools import restore
mount(*sys.argv[1:3], int(sys.argv[3]))
restore.main(["--yes"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("where, kind", [(".restored", "full"), (".git", "read-only"), ("paper_outputs/runs", "read-only")])
def test_a_full_disk_and_a_read_only_folder_leave_all_as_it_was(project, where, kind):
    Path(".restored").mkdir()
    state, pages = everything(), 40
    files.write_text("paper_outputs/weights/depth/vit/1.safetensors", "a" * 4096 * pages)
    before, staged = contents(), command("git", "diff", "--cached")
    done = in_a_process(FAULT, where, kind, str(pages))
    if done.returncode == 77:
        pytest.skip("the system mounts nothing for a process")
    assert done.returncode == 1 and "error: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert contents() == before and command("git", "diff", "--cached") == staged
    assert command("git", "status", "--porcelain", "--untracked-files=all").splitlines() == state
