"""Files are whole or absent, their bytes depend on their content alone, and errors of users are one line."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from pipeline.core import files
from pipeline.core.errors import UserError, entry_point


def test_write_creates_folders_and_replaces(tmp_path):
    path = tmp_path / "a/b/file.txt"
    files.write_text(path, "one\n")
    files.write_text(path, "zwei – 2\r\n")
    assert path.read_bytes() == "zwei – 2\r\n".encode()
    assert os.listdir(path.parent) == ["file.txt"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, name):
    path = tmp_path / "file.txt"
    files.write_text(path, "old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, name, full)
    with pytest.raises(UserError, match=r"file.txt .*No space left on device"):
        files.write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path, monkeypatch):
    """Two processes train one run, and the first is done."""
    fsync, times = os.fsync, iter([shutil.rmtree, lambda folder: None])
    monkeypatch.setattr(os, "fsync", lambda handle: (fsync(handle), next(times)(tmp_path / "scratch")))
    files.write_text(tmp_path / "scratch/record.json", "new")
    assert (tmp_path / "scratch/record.json").read_text(encoding="utf-8") == "new"


def test_what_a_killed_writer_left_goes_and_that_of_a_living_one_stays(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (dead.pid, os.getppid(), "x"):
        (tmp_path / f"file.txt.tmp.{pid}").write_text("half", encoding="utf-8")
    files.write_text(tmp_path / "file.txt", "whole")
    assert sorted(os.listdir(tmp_path)) == ["file.txt", f"file.txt.tmp.{os.getppid()}"]


def test_the_bytes_are_on_disk_before_the_file_is_in_place(tmp_path, monkeypatch):
    events = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, original=original: (events.append(name), original(*a)))
    files.write_text(tmp_path / "file.txt", "text")
    assert events == ["fsync", "replace"]


def test_json_does_not_depend_on_the_order_of_keys_and_has_null_for_what_is_not_finite(tmp_path):
    value = {"b": [1.5, float("nan")], "a": (float("inf"), -float("inf"), None, True, 7), "ü": {"z": 1, "y": 2}}
    files.write_json(tmp_path / "one.json", value)
    files.write_json(tmp_path / "two.json", dict(reversed(value.items())))
    text = (tmp_path / "one.json").read_text(encoding="utf-8")
    assert (tmp_path / "two.json").read_text(encoding="utf-8") == text
    assert list(json.loads(text).items()) == [
        ("a", [None, None, None, True, 7]),
        ("b", [1.5, None]),
        ("ü", {"y": 2, "z": 1}),
    ]
    assert text.endswith("}\n")


def test_a_table_is_written_to_the_digits_that_files_hold_and_read_back(tmp_path):
    table = pd.DataFrame({"n": [1, 20000000], "x": [1 / 3, float("nan")], "name": ["a, b", "ü"]})
    files.write_csv(tmp_path / "table.csv", table)
    assert (tmp_path / "table.csv").read_bytes() == "\n".join(["n,x,name", '1,0.333333,"a, b"', "20000000,,ü", ""]).encode()
    pd.testing.assert_frame_equal(files.read_csv(tmp_path / "table.csv"), files.rounded_table(table))
    assert files.rounded_table(table)["x"][0] == files.rounded(1 / 3) == 0.333333


@pytest.mark.parametrize(
    "error, words",
    [
        (UserError("train.epochs is missing."), ["train.epochs is missing."]),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "runs/record.json"), ["runs/record.json", "Not a directory"]),
        (FileNotFoundError(errno.ENOENT, "No such file", "report.md"), ["report.md", "git checkout"]),
        (KeyboardInterrupt(), ["interrupted"]),
    ],
)
def test_an_error_of_the_user_is_one_line_and_exit_status_1(capsys, error, words):
    @entry_point
    def main():
        raise error

    with pytest.raises(SystemExit) as caught:
        main()
    out, line = capsys.readouterr()
    assert caught.value.code == 1 and not out
    assert line.startswith("error: ") and line.count("\n") == 1 and all(word in line for word in words)


HELP = """
import importlib, pkgutil, sys, pipeline
for module in pkgutil.walk_packages(pipeline.__path__, "pipeline."):
    main = getattr(importlib.import_module(module.name), "main", None)
    if main and module.name.rpartition(".")[2] not in ("check", "doctor", "tables"):  # which take no argument
        sys.argv = [module.name, "--help"]
        try:
            main()
        except SystemExit as end:
            print(module.name, end.code)
"""


@pytest.mark.slow
def test_commands_need_no_docstrings_and_no_locale():
    """`python -OO` strips the first; α in a label is more than a terminal of ASCII shows."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-OO", "-c", HELP], env=environment, cwd=files.ROOT, capture_output=True)
    ended = [line for line in done.stdout.decode().splitlines() if line.startswith("pipeline.")]
    assert not done.returncode and len(ended) > 10 and all(line.endswith(" 0") for line in ended), done.stderr.decode()
    label = "from pipeline.core.errors import entry_point\nentry_point(print)('OSA (\\u03b1)')"
    assert subprocess.check_output([sys.executable, "-c", label], env=environment, cwd=files.ROOT) == b"OSA (\\u03b1)\n"


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(errno.EIO, "Input/output error")])
def test_any_other_error_is_not_hidden(error):
    @entry_point
    def main():
        raise error

    with pytest.raises(type(error)):
        main()
