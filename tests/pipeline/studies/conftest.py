"""A lab of small models and studies, in a folder of its own."""

import pytest

from pipeline.core import params
from pipeline.lab import Lab
from tests.pipeline.mnist_files import write_mnist
from tests.pipeline.synthetic import write_params


@pytest.fixture
def lab(tmp_path, monkeypatch):
    write_params(tmp_path)
    write_mnist(tmp_path / "data/mnist", train=5, test=7)
    monkeypatch.chdir(tmp_path)
    lab = Lab("a_study", params.load(), params.load_paper())
    lab.tables = {}  # nothing is evaluated
    return lab
