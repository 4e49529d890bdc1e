"""The installer of .venv reads the machine rightly, and counts as not installed what failed or was interrupted."""

import ast
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from pipeline.core import files
from pipeline.tools import install

SCRIPT = Path(install.__file__)


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """An environment that has a Python and pip, and a file of requirements to install."""
    monkeypatch.chdir(tmp_path)
    files.write_text(Path("requirements-dev.txt"), "tester==1.0\n")
    for name in ("python", "pip"):
        files.write_text(Path(".venv/bin") / name, "")
    return Path(".venv")


def program(path: Path, text: str) -> str:
    files.write_text(path, f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path.resolve())


@pytest.mark.parametrize(
    "platform, there, torch, gpus, expected",
    [
        ("linux", "", "", "GPU 0: NVIDIA H200", "pypi"),
        ("linux", "", "", "No devices were found", "cpu"),
        ("linux", "", "cpu", "GPU 0: NVIDIA H200", "cpu"),
        ("linux", "", "cuda", "No devices were found", "pypi"),
        ("linux", "cpu\n", "", "GPU 0: NVIDIA H200", "cpu"),
        ("linux", "pypi", "cpu", "No devices were found", "pypi"),  # where PyTorch's index did not deliver
        ("darwin", "", "cpu", "No devices were found", "pypi"),
    ],
)
def test_which_build_suits(venv, monkeypatch, platform, there, torch, gpus, expected):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("PATH", "bin", prepend=":")
    program(Path("bin/nvidia-smi"), f"echo '{gpus}'")
    files.write_text(venv / ".torch", there)
    assert install.choose(venv, torch) == expected


def test_a_driver_that_is_broken_or_absent_is_no_gpu(venv, monkeypatch):
    monkeypatch.setenv("PATH", str(Path("bin").resolve()))
    assert not install.has_gpu()
    program(Path("bin/nvidia-smi"), "echo NVIDIA-SMI has failed; exit 9")
    assert not install.has_gpu()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/torch/", "http://name.invalid/torch/"])
def test_an_index_out_of_reach_does_not_answer(url):
    assert not install.answers(url)


def test_a_password_of_a_mirror_is_not_shown():
    assert install.public("https://me:secret@mirror/simple/") == "https://mirror/simple"


def test_what_was_interrupted_is_not_installed_and_the_same_command_goes_on(venv):
    uv = program(Path("uv"), "echo begun; exec sleep 60")
    command = [sys.executable, SCRIPT, venv, "requirements-dev.txt", "--uv", uv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while not ((venv / "install.log").exists() and (venv / "install.log").stat().st_size):
            time.sleep(0.01)
        second = subprocess.run(command, capture_output=True, text=True)
        assert second.returncode == 1 and second.stderr.startswith("error: another process is installing into .venv")
        process.send_signal(signal.SIGTERM)
        assert process.communicate()[1].startswith("interrupted") and process.returncode == 130
    assert not (venv / "requirements-dev.txt").exists()
    program(Path("uv"), 'echo "$@"')
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # the first has left no lock and no installer
    assert install.is_installed(Path("requirements-dev.txt"), venv)
    assert (venv / "install.log").read_text(encoding="utf-8").endswith(" -r requirements-dev.txt\n")


def test_an_environment_whose_python_is_gone_has_nothing(venv):
    files.write_text(venv / "requirements-dev.txt", "tester==1.0\n")
    assert install.is_installed(Path("requirements-dev.txt"), venv)
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to("gone")
    assert not install.is_installed(Path("requirements-dev.txt"), venv)


def test_a_python_too_old_says_so_or_lets_uv_find_another(venv, monkeypatch, capsys):
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 7))
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    options = Namespace(venv=venv, uv=None)
    with open(venv / "install.log", "ab") as log:
        with pytest.raises(SystemExit, match="needed, not 3.10"):
            install.create(options, log)
        options.uv = program(Path("uv"), 'echo "$@" >asked.txt')
        install.create(options, log)
        assert "--python >=3.11,<3.15 .venv" in Path("asked.txt").read_text(encoding="utf-8")
        options.uv = program(Path("uv"), "echo no network; exit 2")
        with pytest.raises(SystemExit, match="failed: fix the error reported above"):
            install.create(options, log)
    assert capsys.readouterr().err == "no network\n"


def test_an_installation_that_fails_is_one_sentence(venv):
    options = Namespace(venv=venv, requirements=[Path("requirements-dev.txt")], torch="", index="", uv="/bin/false")
    with pytest.raises(SystemExit, match="error: the packages cannot be installed"):
        install.update(options)
    assert not install.is_installed(Path("requirements-dev.txt"), venv)
