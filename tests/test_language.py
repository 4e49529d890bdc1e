"""Docstrings and comments begin with a verb or a noun, and keep the pages' dialect out."""

import pytest

from pipeline.core.files import ROOT
from tests.language import comments, docstrings, faults, phrases

READ = [(folder, texts) for folder in ("osa", "pipeline", "tests") for texts in (docstrings, comments)]
# words that open no docstring, some of which may open a comment
FIRST_WORDS = ("As", "By", "How", "In", "Of", "That", "Those", "What", "Where", "Whether", "Which")


@pytest.mark.parametrize(("folder", "texts"), READ, ids=lambda value: getattr(value, "__name__", value))
def test_docstrings_and_comments_say_what_they_are_about(folder, texts):
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {path: faults(texts(ROOT / path)) for path in paths}
    assert len(found) > 10
    assert not {str(path): lines for path, lines in found.items() if lines}


def test_the_manual_keeps_the_dialect_out():
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    found = {path.name: phrases(path.read_text(encoding="utf-8")) for path in paths}
    assert len(found) > 10
    assert not {name: words for name, words in found.items() if words}


@pytest.mark.parametrize("folder", ["osa", "pipeline"])
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        firsts = {line: text.split()[0].rstrip(":,") for line, text in docstrings(path)}
        found += [f"{path}: {first} in line {line}" for line, first in firsts.items() if first in FIRST_WORDS]
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Of a run its seeds."""\n', ["1 begins with Of"]),
        ('def f():\n    """Whether it holds."""\n', ["2 begins with Whether"]),
        ("SEEDS = 3  # by model\n", ["1 begins with By"]),
        ("x = 1  # made anew\n", ["1 has 'anew'"]),
        ("# Seeds of a run,\n# whether it starts or not: the smallest first\n", []),
        ('x = 1  # noqa: E501\n"""Seeds, of all runs"""\n', []),
    ],
)
def test_a_fault_is_found_and_nothing_else(source, found, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    assert faults([*docstrings(path), *comments(path)]) == found
