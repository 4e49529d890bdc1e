"""Examples in docstrings of the package run and give what they show."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import osa


def examples_of(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(name)
    names = vars(module) | {"osa": osa, "torch": torch}
    found = doctest.DocTestFinder().find(module, globs=names)
    return [each for each in found if any(doctest.SKIP not in example.options for example in each.examples)]


MODULES = [each.name for each in pkgutil.walk_packages(osa.__path__, "osa.")]
MODULES = [name for name in MODULES if "kernels" not in name and "deep" not in name]  # which need a GPU, and have moved
EXAMPLES = [example for name in MODULES for example in examples_of(name)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_gives_what_it_shows(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    shown: list[str] = []
    results = doctest.DocTestRunner().run(example, out=shown.append, clear_globs=False)
    assert results.attempted and not results.failed, "".join(shown)


@pytest.mark.parametrize("name", [name for name in osa.__all__ if callable(getattr(osa, name))])
def test_every_public_name_has_an_example(name):
    assert any(example.name.endswith(f".{name}") for example in EXAMPLES)
