"""`pip install .` gives `osa` and nothing else: its wheel is built, installed with torch alone, and trains."""

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import torch

import osa
from osa.options import METHODS
from pipeline.core.files import ROOT

pytestmark = pytest.mark.slow
PAGE = (ROOT / "osa/README.md").read_text(encoding="utf-8")
TRAINING = """
import osa, torch

osa.create_model("osa_qr", depth=1)(torch.rand(2, 1, 28, 28)).sum().backward()
print(osa.__file__)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy: setuptools writes into the folder that it builds."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("osa", "pipeline", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(source):
    """Built without network."""
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
    plain, extra = [], {}
    for requirement in message.get_all("Requires-Dist"):
        name, _, marker = requirement.partition(";")
        (plain if not marker else extra.setdefault(marker.split('"')[1], [])).append(re.match(r"[\w-]+", name)[0])
    extras = {"pretrained": ["safetensors"], "timm": ["timm"], "transformers": ["transformers"]}
    assert plain == ["torch"] and extra == extras and message.get_all("Provides-Extra") == list(extras)
    assert "Typing :: Typed" in message.get_all("Classifier")


def test_the_sdist_holds_the_package_without_tests(source):
    """setuptools adds tests/test*.py by itself, without what they need."""
    code = "from setuptools.build_meta import build_sdist; build_sdist('sdist')"
    subprocess.run([sys.executable, "-c", code], cwd=source, stdout=subprocess.DEVNULL, check=True)
    (path,) = source.glob("sdist/*.tar.gz")
    with tarfile.open(path) as archive:
        names = {"/".join(Path(name).parts[1:]) for name in archive.getnames()}
    assert {"osa/kernels/launch.py", "osa/py.typed", "osa/README.md", "LICENSE", "pyproject.toml"} <= names
    assert not {name for name in names if name.startswith(("tests", "pipeline"))}


def test_its_page_is_rendered_and_its_links_lead_somewhere_from_there(wheel):
    """PyPI checks the page when it is uploaded; a page there has no files next to it."""
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], check=True)
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links and all(link.startswith("https://") for link in links)
    assert not re.search(r"pip install .*orthogonal-self-attention", PAGE)  # a name that nobody holds


def test_the_code_of_its_page_runs():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "osa/README.md", "exec"), names)
    assert names["rotated"].shape == names["padded"].shape == (2, 4, 50, 16)
    assert (names["packed"].shape, names["y"].shape, names["logits"].shape) == ((83, 4, 16), (2, 50, 64), (8, 10))
    methods = re.findall(r'^\| `"(\w+)"` \|', PAGE, re.MULTILINE)
    assert set(methods) == set(METHODS)


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
