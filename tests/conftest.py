"""Settings of every test: one thread, a fixed seed, property tests that draw the same examples each time."""

import gc
import os
import sys
from types import SimpleNamespace
from unittest import mock

import hypothesis
import pytest

from tests import warm

# Otherwise each of the many processes that tests start would compile all modules again. Some machines set this variable.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config):
    gc.disable()  # until all is imported
    if config.getoption("numprocesses", None):  # hands out tests to other processes, and needs no torch
        return
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: it runs kernels on the CPU then


def pytest_collection_finish():
    gc.freeze()  # torch alone has so many objects that looking at them takes half a second each time
    gc.enable()


def set_seed():
    import torch

    torch.manual_seed(20260)


@pytest.fixture(autouse=True)
def fixed_seed():
    set_seed()


@pytest.fixture
def subtests(subtests):
    """pytest's own, each of which begins with the fixed seed, as a test does."""

    def test(msg=None, **values):
        set_seed()
        return subtests.test(msg, **values)

    return SimpleNamespace(test=test)


@pytest.fixture(autouse=True)
def environment_restored():
    """Restores os.environ after a test, as libraries write to it: mlflow.set_tracking_uri sets a variable."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory):
    with warm.started(tmp_path_factory.mktemp("warm")) as program:
        yield program


@pytest.fixture
def starts_warm(warm_python, monkeypatch):
    """Processes that a test starts as `python` or by sys.executable have imported the libraries."""
    monkeypatch.setattr(sys, "executable", str(warm_python))
    monkeypatch.setenv("PATH", str(warm_python.parent), prepend=os.pathsep)
