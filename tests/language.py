"""Docstrings and comments of source files, and the words that they keep out."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Openings that hide their subject: a docstring or comment begins with a verb or a noun
OPENINGS = ("And", "By", "How", "Of", "That", "Those", "What", "Whether", "Which", "So")
# Phrases of nobody's English, in pages, docstrings and comments
DIALECT = ("so many of", "is asked", " told", "undecided about", "anew", "lest ", " beside ", "is there, ")
DIRECTIVE = re.compile(r"#\s*(noqa|type:|pyright:|fmt:|!)")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring and each comment, where consecutive lines of comments are one text."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text
    previous = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            alone = token.line.strip() == token.string
            if not (alone and previous == token.start[0] - 1):
                yield token.start[0], token.string.lstrip("# ")
            previous = token.start[0] if alone else 0


def faults(path: Path) -> list[str]:
    """Openings and phrases in a file that a reader stumbles over."""
    found = []
    for line, text in texts(path):
        first = re.match(r"\w*", text)[0].capitalize()
        found += [f"{path}:{line} begins with {first}"] if first in OPENINGS else []
        found += [f"{path}:{line} has {phrase!r}" for phrase in DIALECT if phrase in text.lower()]
    return found
