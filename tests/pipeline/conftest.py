"""What tests of training share."""

import pytest

from tests.pipeline.trainings import write_data, write_params


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory of its own, with small parameters and data."""
    monkeypatch.chdir(tmp_path)
    write_params()
    write_data()
    return tmp_path
