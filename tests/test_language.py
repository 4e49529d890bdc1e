"""Docstrings and comments begin with a verb or a noun, and keep the pages' dialect out."""

import pytest

from pipeline.core.files import ROOT
from tests.language import faults

FOLDERS = ("osa", "tests")
ELSEWHERE = ("osa/kernels/",)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_say_what_they_are_about(folder):
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if not str(path.relative_to(ROOT)).startswith(ELSEWHERE)]
    assert len(paths) > 10
    assert not [fault for path in paths for fault in faults(path)]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Of a run its seeds."""\n', ["begins with Of"]),
        ('def f():\n    """Whether it holds."""\n', ["begins with Whether"]),
        ("SEEDS = 3  # by model\n", ["begins with By"]),
        ("# The table is made\n# anew\n", []),
        ("x = 1  # made anew\n", ["has 'anew'"]),
        ("# Seeds of a run,\n# whether it starts or not\n", []),
        ('x = 1  # noqa: E501\n"""Seeds, of all runs"""\n', []),
    ],
)
def test_a_fault_is_found_and_nothing_else(source, found, tmp_path):
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    assert [fault.split(" ", 1)[1] for fault in faults(tmp_path / "module.py")] == found
