"""What each study's numbers are made by: `python -m pipeline sources` writes paper_outputs/sources/NAME.txt.

That is the part of the study's file that measures and trains, and a digest of every other file of the project that this part
imports, directly or not; comments, docstrings and layout do not count. A study's stage of dvc.yaml depends on this text
instead of on files, so that an edit of its summary or its figures measures nothing again. Its settings, and a digest of the
recipe and of the variants, stand there too.

pipeline/core, drawing, report and tracking and the packages' own __init__ files make no number and are left out. So do
the CUDA kernels on a CPU, whose numbers `osa.NUMERICS` stands for.
"""

import ast
import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from pipeline import studies
from pipeline.core import files, params
from pipeline.core.errors import entry_point
from pipeline.core.files import ROOT

FOLDER = Path("paper_outputs/sources")
MAKES_NO_NUMBER = (
    "osa/kernels",
    "pipeline/core/",
    "pipeline/drawing/",
    "pipeline/report/",
    "pipeline/tracking/",
    "pipeline/runs.py",
)
SHOWS = ("summarise", "figures")  # the parts of a study that make no number


@entry_point
def main() -> None:
    texts = {FOLDER / f"{name}.txt": text(name) for name in studies.names() if studies.get(name).measure}
    for path, content in texts.items():
        files.write_text(path, content)
    for stale in set(FOLDER.glob("*.txt")) - texts.keys():
        stale.unlink()


def text(study: str) -> str:
    """What makes a study's numbers: see the module."""
    settings = json.dumps(studies.settings(study).model_dump(), sort_keys=True)
    own = code(f"pipeline/studies/{studies.wing(study)}/{study}.py")
    if "read_claims" in own:  # what is measured depends on the limits of claims, and on the paper's numbers
        claims = params.read(params.beside_code(f"pipeline/studies/{studies.wing(study)}/claims.yaml"))
        own += f"claims {files.digest([claims, params.load_paper().table_2])}\n"
    return f"{own}models {_models()}\nsettings {settings}\n"


def code(path: str) -> str:
    """The part of a study's file that measures and trains, and the digests of what that imports."""
    statements = _reached(_tree(path).body)
    own = "".join(f"{ast.unparse(statement)}\n" for statement in statements)
    return own + "".join(f"{each} {_digest(each)}\n" for each in sorted(_closure(statements) - {path}))


def _reached(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that define what `STUDY` uses, directly or not, to measure and to train, in their order."""
    by_name = {name: statement for statement in body for name in _defined(statement)}
    call = by_name["STUDY"].value
    parts = [call.func, *(each.value for each in call.keywords if each.arg not in SHOWS)]
    queue, reached = [name for part in parts for name in _names(part)], set()
    while queue:
        statement = by_name.get(queue.pop())
        if statement is not None and statement not in reached:
            reached.add(statement)
            queue += _names(statement)
    return sorted(reached, key=lambda statement: statement.lineno)


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.split(".")[0] for alias in statement.names]
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _names(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]


def _imports(nodes: Iterable[ast.AST]) -> list[str]:
    """The modules that statements import, with what they import from each."""
    names = []
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _closure(statements: list[ast.stmt]) -> set[str]:
    """The files of the project that make numbers of what is imported, directly or not."""
    found, queue = set(), _imports(statements)
    while queue:
        path = _file_of(queue.pop())
        if path and path not in found and not path.startswith(MAKES_NO_NUMBER):
            found.add(path)
            queue += [] if path == "pipeline/studies/__init__.py" else _imports([_tree(path)])
    return {path for path in found if not path.endswith("__init__.py")}


@functools.cache
def _models() -> str:
    """Of what the studies' models are made from: the paper's recipe and the variants."""
    return files.digest([params.load_paper().recipe.model_dump(), params.load().model_dump(include={"variants"})])


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(ast.unparse(_tree(path)).encode()).hexdigest()


@functools.cache
def _tree(path: str) -> ast.Module:
    """A file as Python reads it, without docstrings."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _file_of(module: str) -> str | None:
    """The file of a module of the project; None for anything else."""
    base = module.replace(".", "/")
    paths = (f"{base}.py", f"{base}/__init__.py") if base.startswith(("osa", "pipeline")) else ()
    return next((path for path in paths if (ROOT / path).is_file()), None)


if __name__ == "__main__":
    main()
