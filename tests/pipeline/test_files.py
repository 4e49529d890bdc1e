"""Files are whole or absent, their bytes depend on their content alone, and errors of users are one line."""

import errno
import hashlib
import json
import os
import shutil
import subprocess

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
    with pytest.raises(UserError, match=r"file.txt cannot be written \(No space left on device\): make room for it"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_file_where_a_folder_should_be_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match=r"runs/metrics.json cannot be written \(.+\): "):
        files.write_text(tmp_path / "runs/metrics.json", "new")


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path, monkeypatch):
    """As where two processes train one run, and the first is done."""
    fsync, times = os.fsync, iter([shutil.rmtree, lambda folder: None])
    monkeypatch.setattr(os, "fsync", lambda handle: (fsync(handle), next(times)(tmp_path / "scratch")))
    files.write_text(tmp_path / "scratch/record.json", "new")
    assert (tmp_path / "scratch/record.json").read_text() == "new"


def test_what_a_killed_writer_left_goes_and_that_of_a_living_one_stays(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (dead.pid, os.getppid(), "x"):
        (tmp_path / f"file.txt.tmp.{pid}").write_text("half")
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
    text = (tmp_path / "one.json").read_text()
    assert (tmp_path / "two.json").read_text() == text
    assert list(json.loads(text).items()) == [
        ("a", [None, None, None, True, 7]),
        ("b", [1.5, None]),
        ("ü", {"y": 2, "z": 1}),
    ]
    assert text.endswith("}\n")


def test_json_is_read_back(tmp_path):
    files.write_json(tmp_path / "file.json", {"a": [1, 0.1]})
    assert files.read_json(tmp_path / "file.json") == {"a": [1, 0.1]}


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, r"file.json is missing: run `dvc repro` to make it\."),
        (b'{"a": ', r"file.json is not valid JSON \(.*\): delete it and run `dvc repro`\."),
        (b"", r"file.json is not valid JSON \(.*\): delete it and run `dvc repro`\."),
        (b"\xff\xfe", r"file.json is not valid JSON \(.*\): delete it and run `dvc repro`\."),
    ],
)
def test_unreadable_json_is_named(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(UserError, match=f"{expected}$"):
        files.read_json(tmp_path / "file.json")


def test_a_table_is_written_to_the_digits_that_files_hold_and_read_back(tmp_path):
    table = pd.DataFrame({"n": [1, 20000000], "x": [1 / 3, float("nan")], "name": ["a, b", "ü"]})
    files.write_csv(tmp_path / "table.csv", table)
    assert (tmp_path / "table.csv").read_bytes() == "\n".join(["n,x,name", '1,0.333333,"a, b"', "20000000,,ü", ""]).encode()
    pd.testing.assert_frame_equal(files.read_csv(tmp_path / "table.csv"), files.rounded_table(table))
    assert files.rounded_table(table)["x"][0] == files.rounded(1 / 3) == 0.333333


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b'a\n"b'])
def test_an_unreadable_table_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "table.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"table.csv cannot be read \(.*\): run `dvc repro` to make it\.$"):
        files.read_csv(tmp_path / "table.csv")


def test_sha256_of_more_than_one_buffer(tmp_path):
    content = bytes(range(251)) * 1999
    files.write_bytes(tmp_path / "file", content)
    assert files.sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_an_error_of_the_user_is_one_line_and_exit_status_1(capsys):
    @entry_point
    def main():
        raise UserError("train.epochs is missing.")

    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr() == ("", "error: train.epochs is missing.\n")


def test_a_file_that_the_system_refuses_is_one_line(tmp_path, capsys):
    (tmp_path / "runs").write_text("")
    with pytest.raises(SystemExit) as caught:
        entry_point((tmp_path / "runs/record.json").unlink)()
    assert caught.value.code == 1
    sentence = "cannot be used (Not a directory): make room for it, or let it be read and written."
    assert capsys.readouterr() == ("", f"error: {tmp_path}/runs/record.json {sentence}\n")


def test_a_file_that_is_missing_has_another_remedy(tmp_path, capsys):
    with pytest.raises(SystemExit):
        entry_point((tmp_path / "result.md").read_text)()
    sentence = "run from the repository root, `git checkout` it, or let `dvc repro` make it."
    assert capsys.readouterr().err == f"error: {tmp_path}/result.md cannot be used (No such file or directory): {sentence}\n"


def test_an_interrupt_is_one_line(capsys):
    @entry_point
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "error: interrupted: the same command goes on from there, or begins anew.\n"


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(errno.EIO, "Input/output error")])
def test_any_other_error_is_not_hidden(error):
    @entry_point
    def main():
        raise error

    with pytest.raises(type(error)):
        main()
