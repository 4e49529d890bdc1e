"""The tour runs in a clone without data and weights, and is committed with the outputs that its code makes."""

import re
import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from pipeline.core.files import ROOT

TOUR = ROOT / "notebooks/tour.ipynb"
NEEDED = ("osa", "pipeline", "notebooks", "paper_outputs/tables", "paper_outputs/runs/table_2")


def read():
    return nbformat.read(TOUR, as_version=4)


def shown(notebook):
    """Output of each cell: kinds of data, tables as they are, which come from files, and text without its numbers."""
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        data = [output["data"] for output in outputs if "data" in output]
        text = "".join(output.get("text", "") for output in outputs)
        yield cell.id, [(sorted(each), each.get("text/html")) for each in data], re.sub(r"\d+", "#", text)


def accuracies(notebook):
    """Accuracies in per cent, as the tour prints them."""
    (text,) = ("".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells if cell.id == "train")
    return [int(number) for number in re.findall(r"(\d+)%", text)]


@pytest.fixture
def clone(tmp_path):
    """The code, its parameters and the results that git keeps, in another place."""
    for name in NEEDED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


def files_of(folder):
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.slow
def test_runs_as_committed(clone, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))  # no start-up file of the user's
    before, notebook = files_of(clone), read()
    resources = {"metadata": {"path": str(clone / "notebooks")}}  # where Jupyter starts it
    NotebookClient(notebook, timeout=300, record_timing=False, resources=resources).execute()
    assert list(shown(notebook)) == list(shown(read()))
    orthogonal, softmax = accuracies(notebook)
    assert orthogonal > softmax + 5
    assert files_of(clone) == before


def test_is_committed_whole_and_small():
    notebook, text = read(), TOUR.read_text(encoding="utf-8")
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))  # from top to bottom, in one go
    assert sum("image/png" in kinds for _, outputs, _ in shown(notebook) for kinds, _ in outputs) == len(code) - 2
    assert len(text) < 1_000_000
    assert not re.search(r"/(home|tmp|root|Users)/|20\d\d-\d\d-\d\dT", text)  # nothing of the machine or the day
