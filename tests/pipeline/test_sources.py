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


@pytest.mark.parametrize(
    "is_seen, path, old, new",
    [
        (False, PATH, '"""How large is A?"""', '"""Another question."""'),
        (False, PATH, 'LABEL = "norm of A"', 'LABEL = "size of A"'),
        (False, PATH, "    return LABEL", "    return LABEL + LABEL"),
        (False, PATH, "    return colour", "    return None"),
        (False, PATH, "    # any Q and K would do\n", ""),
        (False, PATH, '    """The norm of A."""\n', '    """Its norm.\n\n    For each seed.\n    """\n'),
        (False, PATH, "SIZE = 3", "SIZE   =  3  # tokens\n"),
        (False, "osa/tiny.py", '"""A of n tokens."""', '"""A."""'),
        (False, "pipeline/report/tiny.py", "red", "blue"),
        (False, "pipeline/studies/__init__.py", "...", "pass"),
        (False, "osa/kernels/tiny.py", "TILE = 1", "TILE = 2"),
        (True, PATH, "SIZE = 3", "SIZE = 4"),
        (True, PATH, "seeds = [0]", "seeds = [1]"),
        (True, PATH, "scale=1.0", "scale=1.5"),
        (True, PATH, "import attention, other", "import other as attention"),
        (True, PATH, "def norm(", "@staticmethod\ndef norm("),
        (True, "osa/tiny.py", "return n", "return 2 * n"),
        (True, "osa/deeper.py", "1.0", "2.0"),
    ],
)
def test_an_edit_is_seen_if_it_can_change_a_number(tree, is_seen, path, old, new):
    before, text = sources.code(PATH), (tree / path).read_text(encoding="utf-8")
    assert text.count(old) == 1
    files.write_text(tree / path, text.replace(old, new))
    forget()
    assert (sources.code(PATH) != before) is is_seen
