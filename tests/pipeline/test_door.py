"""`python -m pipeline` lists every stage and tool, runs them, and names what was meant."""

import re
import subprocess
import sys

import pytest

from pipeline import __main__ as door
from pipeline.core.files import ROOT


@pytest.fixture
def call(monkeypatch, capsys):
    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["pipeline", *arguments])
        door.main()
        return capsys.readouterr().out

    return call


def test_every_command_is_listed_in_a_line_and_all_that_can_be_run_is_a_command(call):
    lines = {line.split()[0]: line for line in call().splitlines() if line.startswith("  ")}
    assert lines.keys() == door.COMMANDS.keys() and all(len(line.split()) > 2 and len(line) < 140 for line in lines.values())
    runnable = {
        ".".join(path.relative_to(ROOT / "pipeline").with_suffix("").parts)
        for path in ROOT.glob("pipeline/**/*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert runnable - {*door.COMMANDS.values()} == {
        "__main__",
        "benchmarks.gpu",
        "tools.install",
        "tracking.ui",
    }  # `make gpu`, `make setup` and `tracking ui` run these


def test_a_command_runs_with_its_arguments_and_says_what_they_are(call, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pipeline.results.tables", door)
    assert "stage `tables`" in call("tables", "--help")  # it takes none, and is not run
    for arguments, status in ((["plan", "--help"], 0), (["plan", "--halp"], 2)):
        with pytest.raises(SystemExit) as caught:
            call(*arguments)
        assert caught.value.code == status and "python -m pipeline" in "".join(capsys.readouterr())
    with pytest.raises(SystemExit, match=r"'tran' is unknown.* 'train'\?"):
        call("tran")


@pytest.mark.slow
def test_it_lists_and_helps_without_docstrings():
    for arguments, shown in (([], "Trains one variant"), (["train", "--help"], "--eager")):
        command = [sys.executable, "-OO", "-m", "pipeline", *arguments]
        assert shown in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_every_text_spells_commands_as_one_types_them():
    texts = [*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    spelt = set()
    for path in texts:
        spelt |= set(re.findall(r"python3? -m pipeline([. ][\w.]*\w)", path.read_text(encoding="utf-8")))
    assert " fetch" in spelt
    assert spelt - {" COMMAND", " benchmarks"} <= {f" {name}" for name in door.COMMANDS}
