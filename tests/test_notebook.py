"""The tour runs from top to bottom, with trained models and without, and is committed without its outputs."""

import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from pipeline.core.files import ROOT
from tests.pipeline import synthetic

TOUR = "notebooks/tour.ipynb"


@pytest.fixture(autouse=True)
def kernel_environment(tmp_path_factory, monkeypatch):
    """One thread, and no start-up file of the user's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))


@pytest.fixture
def copy(tmp_path):
    """The code and its parameters in another place, without any result."""
    for name in ("osa", "pipeline", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


def run(folder):
    """What the tour prints, and how many figures it draws, when it runs in `folder`. A cell that fails raises."""
    notebook = nbformat.read(ROOT / TOUR, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    return text, sum("image/png" in output.get("data", {}) for output in outputs)


def files_of(folder):
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_is_committed_without_outputs():
    notebook = nbformat.read(ROOT / TOUR, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(cell["execution_count"] is None and not cell["outputs"] for cell in code)


def test_runs_in_the_repository():
    text, figures = run(ROOT)
    assert f"Results are read from {ROOT}" in text
    assert figures >= 5


def test_without_results_says_so_and_goes_on(copy):
    before = files_of(copy)
    text, figures = run(copy / "notebooks")  # where Jupyter starts it
    assert f"Results are read from {copy}\n" in text
    assert "This model is untrained" in text
    assert "layers.csv: only the models before training" in text
    assert "curves.csv yet" in text
    assert figures == 5
    assert files_of(copy) == before


def test_with_results_shows_them(copy, monkeypatch):
    quickstart = copy / "quickstart"
    quickstart.mkdir()
    synthetic.write_project(quickstart, seeds=[0])
    monkeypatch.chdir(quickstart)
    synthetic.measure()
    text, figures = run(copy)
    assert f"Results are read from {quickstart}" in text
    assert "No " not in text
    assert figures == 6
