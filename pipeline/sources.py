"""What each study's numbers are made by: `python -m pipeline.sources` writes paper_outputs/sources/NAME.txt.

That is the part of the study's own file that `trainings`, `watch` and `measure` reach, without comments and docstrings,
and below it the digest of every other file of the project that this imports, directly or not. A study's stage of dvc.yaml
depends on this text instead of on files. So the list of files need not be kept by hand, and an edit of a rule, a label or a
figure in the study's file measures nothing again.

pipeline/core, pipeline/report, pipeline/tracking, pipeline/runs.py and the packages' own __init__ files make no number
and are left out.
"""

import ast
import functools
import hashlib
import io
import itertools
import tokenize
from pathlib import Path

from pipeline import studies
from pipeline.core import files
from pipeline.core.errors import entry_point
from pipeline.core.files import ROOT
from pipeline.core.record import CUDA_ONLY

FOLDER = Path("paper_outputs/sources")
MAKES_NO_NUMBER = ("pipeline/core/", "pipeline/report/", "pipeline/tracking/", "pipeline/runs.py", *CUDA_ONLY)
ENTRY = ("Settings", "trainings", "watch", "measure")


@entry_point
def main() -> None:
    wanted = {FOLDER / f"{name}.txt": text(name) for name in studies.measuring()}
    for path, content in wanted.items():
        files.write_text(path, content)
    for stale in set(FOLDER.glob("*.txt")) - wanted.keys():
        stale.unlink()


def digest(study: str) -> str:
    """SHA-256 of a study's text."""
    return hashlib.sha256(text(study).encode()).hexdigest()


def text(study: str) -> str:
    """What makes a study's numbers: see the module."""
    path = str(Path(studies.module(study).__file__).relative_to(ROOT))
    source = (ROOT / path).read_text(encoding="utf-8")
    reached = _reached(ast.parse(source))
    code = "".join(_code(source, statement) for statement in reached)
    imported = sorted(_closure([name for statement in reached for name in _imports(statement)]))
    return code + "".join(f"{file} {files.sha256(ROOT / file)}\n" for file in imported if file != path)


def imported_files(module: str) -> set[str]:
    """The files of the project that a module and its imports are made of, but for those that make no number on a CPU."""
    return _closure([module])


def _reached(tree: ast.Module) -> list[ast.stmt]:
    """The statements of a module that define what ENTRY uses, directly or not, in their order; of imports those names."""
    by_name: dict[str, list[ast.stmt]] = {}
    for statement in itertools.chain(*map(_one_name_each, tree.body)):
        for name in _defined(statement):
            by_name.setdefault(name, []).append(statement)
    found, queue = set(), list(ENTRY)
    while queue:
        for statement in set(by_name.get(queue.pop(), [])) - found:
            found.add(statement)
            queue += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return sorted(found, key=lambda statement: (statement.lineno, *_defined(statement)))


def _one_name_each(statement: ast.stmt) -> list[ast.stmt]:
    """An import as one for each of its names, so that a name beside those that are used changes nothing."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return [statement]
    rest = {name: value for name, value in vars(statement).items() if name != "names"}
    return [type(statement)(names=[alias], **rest) for alias in statement.names]


def _defined(node: ast.AST) -> list[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.alias):
        return [node.asname or node.name.split(".")[0]]
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return []  # whose names are its own
    return [name for child in ast.iter_child_nodes(node) for name in _defined(child)]


def _code(source: str, statement: ast.stmt) -> str:
    """The statement's text without comments, docstrings and blank lines; a line's own spacing stays."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return ast.unparse(statement) + "\n"
    lines = source.splitlines(keepends=True)
    first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))]) - 1
    segment = "".join(lines[first : statement.end_lineno])
    documented = (ast.FunctionDef, ast.ClassDef)
    hidden = [
        (node.body[0].lineno, node.body[0].end_lineno)
        for node in ast.walk(statement)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    ]
    comments = {
        token.start[0] + first: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(segment).readline)
        if token.type == tokenize.COMMENT
    }
    kept = []
    for number, line in enumerate(lines[first : statement.end_lineno], first + 1):
        if any(begin <= number <= end for begin, end in hidden):
            continue
        line = line[: comments[number]] if number in comments else line
        if line.strip():
            kept.append(line.rstrip() + "\n")
    return "".join(kept)


def _imports(statement: ast.stmt) -> list[str]:
    """The modules that a statement names, where it imports, with what it imports from each."""
    names = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _closure(modules: list[str]) -> set[str]:
    found, queue = set(), list(modules)
    while queue:
        path = _file_of(queue.pop())
        if path and path not in found:
            found.add(path)
            queue += _imports_of(path)
    return {path for path in found if not path.startswith(MAKES_NO_NUMBER) and not path.endswith("__init__.py")}


@functools.cache
def _imports_of(path: str) -> list[str]:
    if path.startswith(MAKES_NO_NUMBER) or (path.startswith("pipeline/studies/") and path.endswith("__init__.py")):
        return []
    return _imports(ast.parse((ROOT / path).read_text(encoding="utf-8")))


def _file_of(module: str) -> str | None:
    """The file of a module of the project; None for anything else."""
    base = module.replace(".", "/")
    if module.split(".")[0] in ("osa", "pipeline"):
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if (ROOT / path).is_file():
                return path
    return None


if __name__ == "__main__":
    main()
