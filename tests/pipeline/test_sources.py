"""What makes a study's numbers: edits of it are seen, and edits of a rule, a label or a figure are not."""

import re
from pathlib import Path

import pytest

from pipeline import sources, studies
from tests.pipeline.small_study import NAME, forget, small_study


@pytest.fixture
def tree(tmp_path):
    with small_study(tmp_path) as folder:
        yield folder


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))
    forget()


@pytest.mark.parametrize(
    "old, new",
    [
        ('"""How large is A?"""', '"""Another question."""'),
        ('LABEL = "norm of A"', 'LABEL = "how large A is"'),
        ("    return Measure(f", "    print(value)\n    return Measure('x' + f"),
        ("[label(tables", "[2 * label(tables"),
        ("import OBSERVATION, Finding, Measure, Tables", "import CHECK, OBSERVATION, Finding, Measure, Table, Tables"),
        ("from pipeline.report.numbers import number", "from pipeline.report.numbers import count, number"),
        ("import LEVEL", "import judge"),
        ("    # any Q and K would do\n", ""),
        ("  # of A", "  # tokens\n"),
        ('    """The norm of A for every seed."""\n', '    """Its norm.\n\n    For each seed.\n    """\n'),
        ('NAME = "small"\n', 'NAME = "small"\n\n\ndef unused():\n    return SIZE\n'),
    ],
)
def test_an_edit_that_changes_no_number_is_not_seen(tree, old, new):
    before = sources.text(NAME)
    edit(tree / f"pipeline/studies/{NAME}.py", old, new)
    assert sources.text(NAME) == before


@pytest.mark.parametrize(
    "old, new",
    [
        ("SIZE = 3", "SIZE = 4"),
        ("FACTOR = 1.0", "FACTOR = 2.0"),
        ("FACTOR = 1.0", "FACTOR = 1.0\nFACTOR = 2.0"),
        ("FACTOR = 1.0", "if True:\n    FACTOR = 1.0"),
        ("    seeds: Seeds", "    seeds: Seeds = [0]"),
        ("scale=1.0", "scale=1.5"),
        ('"seed": settings.seeds', '"seed": settings.seeds[::-1]'),
        ("def norm(", "@staticmethod\ndef norm("),
        ("import orthogonal_attention_matrix", "import orthogonal_attention as orthogonal_attention_matrix"),
        ('"small", 2', '"small # not", 2'),
    ],
)
def test_an_edit_that_can_change_a_number_is_seen(tree, old, new):
    before = sources.digest(NAME)
    edit(tree / f"pipeline/studies/{NAME}.py", old, new)
    assert sources.digest(NAME) != before


@pytest.mark.parametrize(
    "path, is_seen",
    [
        ("osa/functional.py", True),
        ("osa/linalg.py", True),  # which functional.py imports
        ("pipeline/lab.py", True),
        ("pipeline/training/loop.py", True),  # which lab.py imports
        ("osa/reference.py", False),
        ("pipeline/statistics.py", False),  # which findings alone uses
        ("pipeline/report/numbers.py", False),
        ("pipeline/runs.py", False),
        ("pipeline/core/files.py", False),
        ("pipeline/tracking/watcher.py", False),
        ("pipeline/evaluate.py", False),
    ],
)
def test_an_edit_of_another_file_is_seen_if_measuring_imports_it(tree, path, is_seen):
    before = sources.digest(NAME)
    (tree / path).write_text((tree / path).read_text() + "\n# edited\n")
    forget()
    assert (sources.digest(NAME) != before) == is_seen


def test_a_file_that_is_imported_anew_is_seen(tree):
    edit(tree / "osa/functional.py", "from osa.linalg", "import osa.reference\nfrom osa.linalg")
    assert "osa/reference.py " in sources.text(NAME)


def test_the_text_is_what_it_says(tree):
    lines = sources.text(NAME).splitlines()
    assert lines[:6] == [
        "from osa.functional import orthogonal_attention_matrix",
        "from pipeline.core.params import Section",
        "from pipeline.core.params import Seeds",
        "from pipeline.lab import Lab",
        "from pipeline.studies import Tables",
        "SIZE = 3",
    ]
    assert [line.split()[0] for line in lines if line.endswith(tuple("0123456789abcdef")) and ".py " in line] == [
        *(f"osa/{name}.py" for name in ("functional", "init", "linalg", "models", "modules", "orthogonal", "penalties")),
        *("osa/deep/shaped.py", "osa/vit.py"),
        *("pipeline/lab.py", "pipeline/training/cuda_graph.py", "pipeline/training/data.py", "pipeline/training/loop.py"),
    ]


def test_the_stage_writes_a_text_for_each_study_and_removes_others(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources.FOLDER.mkdir(parents=True)
    (sources.FOLDER / "gone.txt").write_text("of a study that is no more")
    sources.main()
    assert {path.name: path.read_text() for path in sources.FOLDER.iterdir()} == {f"{NAME}.txt": sources.text(NAME)}


@pytest.mark.parametrize("study", studies.measuring())
def test_measuring_a_study_reaches_neither_its_findings_nor_the_reports_words_and_looks(study):
    text = sources.text(study)
    assert "def measure(" in text and "class Settings(" in text and ".py " in text
    assert "def findings(" not in text
    assert "Finding(" not in text
    assert not re.search(r"pipeline\.reporting\.(?!numbers)|matplotlib", text)
