"""`make setup` chooses PyTorch's build by the machine and by what PyTorch's index does, which a local server plays."""

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from pipeline.core import files
from pipeline.core.files import ROOT
from pipeline.tools import install

UV = """#!/bin/sh
test "$1 $2 $3" = "pip install --python" || exit 2
python=$4; shift 4; echo "$@" >>uv.txt; exec "$python" -m pip install "$@"
"""
REQUIREMENTS = "other==1.0\ntorch==2.0\ntorchvision==3.0\nnvidia-big==1.0 ; sys_platform != 'none'\n"
FOR_CPUS = {"other-1.0", "torch-2.0+cpu", "torchvision-3.0+cpu"}
WITH_CUDA = {"other-1.0", "torch-2.0", "torchvision-3.0", "nvidia_big-1.0"}


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


class Index(ThreadingHTTPServer):
    """Plays PyTorch's index, and counts the requests; `status` other than 200 refuses, and None never answers."""

    status: int | None = 200
    requests = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.requests += 1
        if self.server.status == 200:
            super().do_GET()
        elif self.server.status:
            self.send_error(self.server.status)
        else:
            time.sleep(2)  # longer than the test has patience

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def index(tmp_path):
    for name, version in {"torch": "2.0+cpu", "torchvision": "3.0+cpu"}.items():
        publish(tmp_path / "pytorch", name, version)
    with Index(tmp_path / "pytorch") as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def make(tmp_path, index):
    """Calls make in a folder with these requirements and the machine's GPUs. PyPI, in a folder, has all packages."""
    (tmp_path / "pipeline/tools").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pipeline/tools/install.py", tmp_path / "pipeline/tools")
    (tmp_path / "requirements.txt").write_text(REQUIREMENTS, encoding="utf-8")
    (tmp_path / "requirements-dev.txt").write_text("tester==1.0\n", encoding="utf-8")
    versions = {"other": "1.0", "tester": "1.0", "torch": "2.0", "torchvision": "3.0", "nvidia_big": "1.0"}
    for name, version in versions.items():
        publish(tmp_path / "pypi", name, version)
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "TORCH"))}
    environment = unset | {"PIP_INDEX_URL": (tmp_path / "pypi").as_uri(), "PIP_CONFIG_FILE": os.devnull}
    environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment["TORCH_INDEX"] = index.url

    def call(*arguments: str, gpus: str = "No devices were found") -> subprocess.CompletedProcess:
        program(tmp_path / "bin/nvidia-smi", f"#!/bin/sh\necho '{gpus}'\n")
        return subprocess.run(
            ["make", "UV=", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return call


def program(path: Path, text: str) -> None:
    files.write_text(path, text)
    path.chmod(0o755)


def installed(folder: Path) -> set[str]:
    found = {path.stem for path in folder.glob(".venv/lib/*/site-packages/*.dist-info")}
    return {name for name in found if not name.startswith(("pip-", "setuptools-"))}


@pytest.mark.slow
def test_without_a_gpu_it_takes_the_build_for_cpus_and_asks_once(make, tmp_path, index):
    refused = make("setup", "TORCH=gpu")
    assert refused.returncode and refused.stderr.startswith("error: TORCH=gpu is unknown")
    done = make("setup")
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")  # nothing of the installer's
    assert installed(tmp_path) == FOR_CPUS
    asked = index.requests
    os.utime(tmp_path / "requirements.txt")  # as a checkout leaves it
    for again in ((), ("TORCH=cpu",)):
        done = make("setup", *again)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (tmp_path / "requirements.txt").write_text(f"# changed\n{REQUIREMENTS}", encoding="utf-8")
    assert make("setup").stdout and installed(tmp_path) == FOR_CPUS and index.requests == asked
    other = make("setup", "TORCH=cuda")
    assert other.returncode and other.stderr.startswith("error: .venv has PyTorch for CPUs: move it away")


@pytest.mark.slow
def test_an_index_that_refuses_leaves_pypis_build_and_asking_for_cpus_does_too(make, tmp_path, index):
    index.status = 403
    done = make("setup", "TORCH=cpu")
    assert done.returncode == 0 and f"{index.url} did not provide the CPU build" in done.stdout.splitlines()[-1]
    assert installed(tmp_path) == WITH_CUDA
    asked = index.requests
    (tmp_path / "requirements.txt").write_text(f"# changed\n{REQUIREMENTS}", encoding="utf-8")
    assert make("setup", "TORCH=cpu").returncode == 0
    assert installed(tmp_path) == WITH_CUDA and index.requests == asked


@pytest.mark.slow
def test_a_gpu_takes_cuda_tests_need_more_and_uv_installs_where_it_is(make, tmp_path, index):
    program(tmp_path / "uv", UV)
    uv = f"UV={tmp_path / 'uv'}"
    assert make("setup", uv, gpus="GPU 0: NVIDIA H200").returncode == 0
    assert installed(tmp_path) == WITH_CUDA and index.requests == 0
    assert "other" in (tmp_path / ".venv/install.log").read_text(encoding="utf-8")
    assert make("setup-dev", uv).returncode == 0
    assert installed(tmp_path) == WITH_CUDA | {"tester-1.0"}
    assert len((tmp_path / "uv.txt").read_text(encoding="utf-8").splitlines()) == 2
    (tmp_path / "requirements.txt").write_text("absent==1.0\n", encoding="utf-8")
    for _ in range(2):  # a failure is not taken for installed
        failed = make("setup", uv)
        assert failed.returncode and failed.stderr.startswith("error: the packages cannot be installed (see .venv/")


@pytest.mark.parametrize("status, expected", [(200, True), (403, True), (404, True), (None, False)])
def test_whether_an_index_answers(index, monkeypatch, status, expected):
    """A refusal is an answer, after which the installer fails at once."""
    index.status = status
    monkeypatch.setattr(install, "PATIENCE", 1)
    assert install.answers(f"{index.url}/torch/") == expected


@pytest.mark.slow
def test_the_site_has_both_pages_and_the_reference_and_every_link_leads_somewhere(tmp_path):
    pytest.importorskip("pdoc", reason="needs requirements-dev.txt")
    for path in ("osa", ".github/pages"):
        shutil.copytree(ROOT / path, tmp_path / path, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("report.html", "research.html"):
        files.write_bytes(tmp_path / "paper_outputs" / name, (ROOT / "paper_outputs" / name).read_bytes())
    sources, venv = "https://forge/blob/main", os.path.relpath(sys.prefix, tmp_path)
    command = ["make", "-f", ROOT / "Makefile", "-o", "setup-dev", "site", f"VENV={venv}", f"SOURCES={sources}"]
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
    assert {Path("osa/init"), Path("osa/shaped/layers"), Path("osa/constrained/penalties")} <= modules
    assert 'id="create_model"' in (site / "reference/osa.html").read_text(encoding="utf-8")
