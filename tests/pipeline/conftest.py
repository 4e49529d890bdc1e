"""What tests of training share."""

import pytest

from pipeline.core import record
from tests.pipeline.trainings import write_data, write_params


@pytest.fixture(autouse=True)
def process():
    """Each test is a process of its own as far as its code is concerned."""
    record.imported_code_sha256.cache_clear()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory of its own, with small parameters and data."""
    monkeypatch.chdir(tmp_path)
    write_params()
    write_data()
    return tmp_path
