"""`make setup` with and without TORCH=cpu, from package indexes in a folder."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pipeline.core import files
from pipeline.core.files import ROOT

UNREACHABLE = "http://127.0.0.1:9/"
DEVELOPMENT = "tester==1.0\n"
UV = """#!/bin/sh
test "$1 $2 $3" = "pip install --python" || exit 2
python=$4; shift 4; echo "$@" >>uv.txt; exec "$python" -m pip install "$@"
"""
REQUIREMENTS = "other==1.0\ntorch==2.0\ntorchvision==3.0\nnvidia-big==1.0 ; sys_platform != 'none'\n"


def publish(index: Path, name: str, version: str) -> None:
    """Puts an empty package into an index."""
    project = name.replace("_", "-")
    wheel, info = index / project / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    files.write_text(wheel.parent / "index.html", f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>')


@pytest.fixture
def make(tmp_path):
    """Calls make in a folder with these requirements. PyPI has all packages, PyTorch's index its own as a CPU build."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").write_text(REQUIREMENTS, encoding="utf-8")
    (tmp_path / "requirements-dev.txt").write_text(DEVELOPMENT, encoding="utf-8")
    for name, version in {
        "other": "1.0",
        "tester": "1.0",
        "torch": "2.0",
        "torchvision": "3.0",
        "nvidia_big": "1.0",
    }.items():
        publish(tmp_path / "pypi", name, version)
    for name, version in {"torch": "2.0+cpu", "torchvision": "3.0+cpu"}.items():
        publish(tmp_path / "pytorch", name, version)
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    environment = unset | {"PIP_INDEX_URL": (tmp_path / "pypi").as_uri(), "PIP_CONFIG_FILE": os.devnull}

    def call(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["make", "UV=", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return call


def installed(folder: Path) -> set[str]:
    found = {path.stem for path in folder.glob(".venv/lib/*/site-packages/*.dist-info")}
    return {name for name in found if not name.startswith(("pip-", "setuptools-"))}


@pytest.mark.slow
def test_torch_without_cuda(make, tmp_path):
    planned = make("setup", "--dry-run").stdout  # otherwise it installs the requirements as they are
    assert "-r requirements.txt " in planned and "pytorch.org" not in planned
    refused = make("setup", "TORCH=gpu")
    assert refused.returncode and "error: TORCH=gpu is not known: write TORCH=cpu, or leave it out." in refused.stderr

    failed = make("setup", "TORCH=cpu", f"TORCH_INDEX={UNREACHABLE}")
    sentence, of_make = failed.stderr.splitlines()
    assert failed.returncode and of_make.startswith("make: *** ")
    assert sentence.startswith(
        f"error: {UNREACHABLE} does not deliver PyTorch (see .venv/install.log): try again, or leave TORCH=cpu out"
    )
    assert installed(tmp_path) == set() and not (tmp_path / ".venv/.installed").exists()

    index = f"TORCH_INDEX={(tmp_path / 'pytorch').as_uri()}"
    assert make("setup", "TORCH=cpu", index).returncode == 0
    assert installed(tmp_path) == {"other-1.0", "torch-2.0+cpu", "torchvision-3.0+cpu"}
    assert make("setup").stdout == "make: Nothing to be done for 'setup'.\n"

    (tmp_path / ".venv/.installed").unlink()
    planned = make("setup", "--dry-run").stdout  # the choice stays
    assert "--index-url https://download.pytorch.org/whl/cpu " in planned and "install -r requirements.txt" not in planned


@pytest.mark.slow
@pytest.mark.parametrize("with_uv", [False, True])
def test_who_replicates_gets_no_tests_and_uv_installs_where_it_is(make, tmp_path, with_uv):
    (tmp_path / "requirements.txt").write_text("other==1.0\n", encoding="utf-8")
    files.write_text(tmp_path / "uv", UV)
    (tmp_path / "uv").chmod(0o755)
    uv = [f"UV={tmp_path / 'uv'}", f"PATH={tmp_path}:{os.environ['PATH']}"] if with_uv else []
    done = make("setup", *uv)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 and done.stderr == ""  # nothing of the installer's
    assert installed(tmp_path) == {"other-1.0"}
    assert "other" in (tmp_path / ".venv/install.log").read_text(encoding="utf-8")
    assert make(".venv/.dev", *uv).returncode == 0
    assert installed(tmp_path) == {"other-1.0", "tester-1.0"}
    assert (tmp_path / "uv.txt").exists() == with_uv
    (tmp_path / "requirements.txt").write_text("absent==1.0\n", encoding="utf-8")
    failed = make("setup", *uv)
    assert failed.returncode and failed.stderr.splitlines()[0].startswith(
        "error: the packages cannot be installed (see .venv/"
    )


@pytest.mark.slow
def test_the_site_has_both_pages_and_the_reference_and_every_link_leads_somewhere(tmp_path):
    pytest.importorskip("pdoc", reason="needs requirements-dev.txt")
    for path in ("osa", ".github/pages"):
        shutil.copytree(ROOT / path, tmp_path / path, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("report.html", "research.html"):
        files.write_bytes(tmp_path / "paper_outputs" / name, (ROOT / "paper_outputs" / name).read_bytes())
    sources, venv = "https://forge/blob/main", os.path.relpath(sys.prefix, tmp_path)
    command = ["make", "-f", ROOT / "Makefile", "-o", f"{venv}/.dev", "site", f"VENV={venv}", f"SOURCES={sources}"]
    subprocess.run(command, cwd=tmp_path, check=True)
    site = tmp_path / "site"
    pages = {page: page.read_text(encoding="utf-8") for page in site.glob("*.html")}
    names = {page.name for page in pages}
    assert names == {"index.html", "report.html", "research.html"}
    for page, text in pages.items():
        links = [
            link for link in re.findall(r' href="([^"]+)"', text) if not link.startswith(("data:", "https://arxiv.org/"))
        ]
        assert len(links) > 2
        for link in links:
            path, _, anchor = link.partition("#")
            if path.startswith(sources):
                assert (ROOT / path.removeprefix(f"{sources}/")).exists(), f"{page.name}: {link}"
            elif "://" not in path:
                target = site / path if path else page
                assert target.exists(), f"{page.name}: {link}"
                assert not anchor or f'id="{anchor}"' in target.read_text(encoding="utf-8"), f"{page.name}: {link}"
    modules = {path.relative_to(site / "reference").with_suffix("") for path in (site / "reference/osa").rglob("*.html")}
    assert {Path("osa/init"), Path("osa/deep/shaped"), Path("osa/constrained/penalties")} <= modules
    assert 'id="create_model"' in (site / "reference/osa.html").read_text(encoding="utf-8")
