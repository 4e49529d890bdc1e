"""`pip install .` gives `osa` and nothing else: its wheel is built, installed beside torch alone, and trains."""

import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import torch

import osa
from pipeline.core.files import ROOT

pytestmark = pytest.mark.slow
TRAINING = """
import osa, torch

osa.create_model("osa_qr", depth=1)(torch.rand(2, 1, 28, 28)).sum().backward()
print(osa.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built without network, from a copy: setuptools writes beside what it builds."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("osa", "pipeline"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", source / "dist"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True)
    (path,) = (source / "dist").glob("*.whl")
    return path


def test_holds_osa_and_nothing_else(wheel):
    files = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    paths = [path for pattern in ("*.py", "py.typed") for path in (ROOT / "osa").rglob(pattern)]
    package = {path.relative_to(ROOT) for path in paths}
    (metadata,) = {file.parent for file in files if file.name == "METADATA"}
    assert {file for file in files if not file.is_relative_to(metadata)} == package
    assert metadata / "licenses/LICENSE" in files
    message = message_from_string(zipfile.ZipFile(wheel).read(str(metadata / "METADATA")).decode())
    assert message["Version"] == osa.__version__
    needed = message.get_all("Requires-Dist")
    assert [requirement.split(">=")[0] for requirement in needed] == ["torch"]


def test_trains_in_an_environment_of_its_own(wheel, tmp_path):
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True)
    (packages,) = (tmp_path / "venv/lib").glob("*/site-packages")
    path = packages / "torch.pth"  # torch is found there, osa is not
    path.write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    imported = subprocess.check_output([python, "-I", "-W", "error", "-c", TRAINING], cwd=tmp_path, text=True)
    assert Path(imported.strip()).is_relative_to(packages)
