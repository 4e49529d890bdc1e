"""What makes a study's numbers: edits of it are seen, and edits of a summary, a figure or a comment are not."""

import pytest

from pipeline import sources
from pipeline.core import files

PATH = "pipeline/studies/paper/tiny.py"
FILES = {
    PATH: '''"""How large is A?"""
from osa.tiny import attention, other
from pipeline.report.tiny import colour
from pipeline.studies import Study
SIZE = 3
LABEL = "norm of A"
class Settings:
    seeds = [0]
def measure(settings, lab):
    """The norm of A."""
    # any Q and K would do
    return norm(settings, scale=1.0)
def norm(settings, scale):
    return attention(SIZE) * scale
def summarise(settings, tables, lab):
    return LABEL
def draw(settings, tables, lab):
    return colour
STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"tiny": draw})
''',
    "osa/tiny.py": '"""A."""\nimport osa.deeper\ndef attention(n):\n    """A of n tokens."""\n    return n\nother = 2\n',
    "osa/deeper.py": "FACTOR = 1.0\n",
    "osa/kernels/tiny.py": "TILE = 1\n",
    "pipeline/report/tiny.py": "colour = 'red'\n",
    "pipeline/studies/__init__.py": "class Study: ...\n",
}


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    for path, content in FILES.items():
        files.write_text(tmp_path / path, content)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    sources._tree.cache_clear(), sources._digest.cache_clear()


def code_after(tree, path: str, old: str, new: str) -> str:
    text = (tree / path).read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    files.write_text(tree / path, text.replace(old, new))
    forget()
    return sources.code(PATH)


@pytest.mark.parametrize(
    "path, old, new",
    [
        (PATH, '"""How large is A?"""', '"""Another question."""'),
        (PATH, 'LABEL = "norm of A"', 'LABEL = "size of A"'),
        (PATH, "    return LABEL", "    return LABEL + LABEL"),
        (PATH, "    return colour", "    return None"),
        (PATH, "    # any Q and K would do\n", ""),
        (PATH, '    """The norm of A."""\n', '    """Its norm.\n\n    For each seed.\n    """\n'),
        (PATH, "SIZE = 3", "SIZE   =  3  # tokens\n"),
        ("osa/tiny.py", '"""A of n tokens."""', '"""A."""'),
        ("pipeline/report/tiny.py", "red", "blue"),
        ("pipeline/studies/__init__.py", "...", "pass"),
        ("osa/kernels/tiny.py", "TILE = 1", "TILE = 2"),
    ],
)
def test_an_edit_that_changes_no_number_is_not_seen(tree, path, old, new):
    before = sources.code(PATH)
    assert code_after(tree, path, old, new) == before


@pytest.mark.parametrize(
    "path, old, new",
    [
        (PATH, "SIZE = 3", "SIZE = 4"),
        (PATH, "seeds = [0]", "seeds = [1]"),
        (PATH, "scale=1.0", "scale=1.5"),
        (PATH, "attention(SIZE) * scale", "attention(SIZE)"),
        (PATH, "import attention, other", "import other as attention"),
        (PATH, "def norm(", "@staticmethod\ndef norm("),
        ("osa/tiny.py", "return n", "return 2 * n"),
        ("osa/deeper.py", "1.0", "2.0"),
    ],
)
def test_an_edit_that_can_change_a_number_is_seen(tree, path, old, new):
    before = sources.code(PATH)
    assert code_after(tree, path, old, new) != before
