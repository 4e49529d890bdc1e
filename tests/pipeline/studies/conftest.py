"""A lab of small models and studies, in a folder of its own."""

import shutil

import pytest

from pipeline.config import params
from pipeline.studies import comparison
from pipeline.studies.lab import Lab
from tests.pipeline.mnist_files import write_mnist
from tests.pipeline.synthetic import write_params


@pytest.fixture(autouse=True)
def first_reading(monkeypatch):
    """The lab's own tables stand for the runs by the first reading."""
    monkeypatch.setattr(comparison, "first_reading", lambda lab: lab.tables)


@pytest.fixture(scope="session")
def small_project(tmp_path_factory):
    """A folder with parameters and data, and a lab on it: written once, and copied for each test."""
    folder = tmp_path_factory.mktemp("small_project")
    write_params(folder)
    write_mnist(folder / "data/mnist", train=40, test=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, params.load(), params.load_paper()


@pytest.fixture
def lab(small_project, tmp_path, monkeypatch):
    folder, settings, paper = small_project
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    lab = Lab("a_study", settings.model_copy(deep=True), paper.model_copy(deep=True))
    lab.tables = {}  # nothing is evaluated
    return lab
