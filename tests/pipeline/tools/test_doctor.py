"""The doctor names what is missing and how to mend it, with nothing installed too."""

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from pipeline.core.files import ROOT
from pipeline.tools import doctor
from tests.pipeline.trainings import trained, write_data, write_params

NOTHING_ELSE = {"left_open": {"seeds": []}, "stability": False, "repeats": False}  # to train


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_params(run={"variants": ["vit"], "seeds": [0]}, **NOTHING_ELSE)
    shutil.copy(ROOT / "requirements.txt", tmp_path)


def told(check) -> list[str]:
    return [str(line) for line in doctor.guarded(check)]


def test_it_needs_python_alone():
    done = subprocess.run([sys.executable, "-S", "-m", "pipeline.doctor"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert any(re.match(r"NO  packages  0 of \d+ as pinned; without .*: `make setup`", line) for line in lines)
    assert "--  data      not looked at, without pydantic: `make setup`" in lines
    assert lines[-1] == "`make reproduce` needs: packages." and len(lines) < 24


def test_its_status_says_whether_something_needed_is_missing(monkeypatch, capsys):
    for is_needed, status in ((False, 0), (True, 1)):
        line = doctor.Line("thing", "gone", "buy one", is_needed)
        monkeypatch.setattr(doctor, "CHECKS", [lambda line=line: [line, doctor.Line("other", "there")]])
        with pytest.raises(SystemExit) as caught:
            doctor.main()
        assert caught.value.code == status
    assert "--  thing     gone: buy one\nok  other     there\n" in capsys.readouterr().out


def test_packages_that_are_not_as_pinned(monkeypatch):
    assert set(re.findall(r"^[\w-]+", (ROOT / "requirements.in").read_text(), re.MULTILINE)) >= doctor.NEEDED
    Path("requirements.txt").write_text("torch==0.1\nno-such-thing==1.0\nappnope==1.0 ; sys_platform == 'darwin'\n")
    (line,) = told(doctor.packages)
    assert re.match(r"--  packages  0 of 2 as pinned; without no-such-thing; torch \S+, not 0.1: `make setup`", line)
    Path("requirements.txt").write_text("torch==0.1\ndvc-of-another-world==1\n")
    monkeypatch.setattr(doctor, "NEEDED", {"dvc-of-another-world"})
    assert told(doctor.packages)[0].startswith("NO")


def test_data_and_runs():
    assert told(doctor.data_)[0].startswith(
        "--  data      mnist, which params.yaml asks for, is not here: `make reproduce` fe"
    )
    assert told(doctor.runs_)[1].startswith("--  records   0 of 1 runs have theirs, 0 of today's")
    write_data()
    shutil.copytree("data/mnist", "data/kmnist")
    Path("data/kmnist/t10k-labels-idx1-ubyte.gz").unlink()
    run = trained("vit")
    assert told(doctor.data_)[:2] == [
        "ok  data      mnist, whole, as params.yaml asks",
        "--  data      data/kmnist/t10k-labels-idx1-ubyte.gz is missing: `python -m pipeline.fetch kmnist`",
    ]
    assert told(doctor.runs_)[1].startswith("--  records   1 of 3 runs have theirs, 1 of today's")  # footnote 6 takes kmnist
    shutil.rmtree("data/kmnist")
    assert [line[:2] for line in told(doctor.runs_)] == ["ok", "ok"]
    run.weights.unlink()
    write_params(run={"variants": ["vit"], "seeds": [0]}, train={"eps": 1e-7}, **NOTHING_ELSE)
    assert [line[:2] for line in told(doctor.runs_)] == ["--", "--"]
    Path("params.yaml").write_text("run: [")
    (line,) = told(doctor.data_)
    assert line.startswith("NO  data      cannot be told: params.yaml is not valid YAML")


def test_what_is_locked_taken_or_broken(monkeypatch):
    Path("dvc.lock").write_text("<<<<<<< HEAD\n")
    assert told(doctor.dvc) == ["NO  dvc.lock  in conflict: `git checkout HEAD dvc.lock`", "ok  locks     free"]
    Path("dvc.lock").unlink(), Path(".dvc/tmp").mkdir(parents=True)
    Path(".dvc/tmp/rwlock").write_text(
        '{"/x": {"write": {"pid": 1, "cmd": "dvc repro"}}, "/y": {"read": [{"pid": 999999999}]}}'
    )
    with FileLock(".dvc/tmp/lock"):
        found = told(doctor.dvc)
    assert found[1] == "NO  locks     held: .dvc/tmp/lock, process 1: wait for it, or `dvc --wait-for-lock repro`"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("PORT", str(port))
        Path("mlflow.db").write_bytes(b"no database" * 100)
        store, taken = told(doctor.mlflow)
    assert store.startswith("--  MLflow    mlflow.db cannot be read (file is not a database): delete mlflow.db")
    assert taken == f"--  port      {port} taken: `make ui PORT={port + 1}`"
    for none in ("abc", "65536"):
        monkeypatch.setenv("PORT", none)
        assert told(doctor.mlflow)[-1] == f"--  port      {none} is none: choose another, as in `PORT=5001 make ui`"
