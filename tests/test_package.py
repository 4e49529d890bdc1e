"""`pip install .` gives `osa` and nothing else: its wheel is built, installed beside torch alone, and trains a block."""

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
import torch

import osa

torch.manual_seed(0)
attention = osa.OrthogonalSelfAttention(embed_dim=12, num_heads=2)
block = osa.Block(attention, osa.MLP(12, 24), embed_dim=12, skip=False, norm=False)
x, target = torch.randn(2, 3, 7, 12)  # each (3, 7, 12)
optimizer = torch.optim.Adam(block.parameters(), lr=0.01)
losses = []
for _ in range(20):
    loss = (block(x) - target).square().mean()
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert losses[-1] < 0.9 * losses[0], losses
assert osa.create_model("osa_qr", depth=1)(x.new_zeros(1, 1, 28, 28)).shape == (1, 10)
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
    (packages / "torch.pth").write_text(
        f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8"
    )  # torch is found there, osa is not
    imported = subprocess.check_output([python, "-I", "-W", "error", "-c", TRAINING], cwd=tmp_path, text=True)
    assert Path(imported.strip()).is_relative_to(packages)
