"""Docstrings and comments of source files, and the words that they keep out."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

# Openings that hide their subject: a docstring or comment begins with a verb or a noun
OPENINGS = ("And", "By", "How", "Of", "That", "Those", "What", "Whether", "Which", "So")
# Phrases of nobody's English, in pages, docstrings and comments
DIALECT = ("so many of", "is asked", "told", "undecided about", "anew", "lest", "beside")
DIRECTIVE = re.compile(r"#\s*(noqa|type:|pyright:|fmt:|!)")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each comment, where consecutive lines of comments alone are one text."""
    previous = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            is_alone = token.line.strip() == token.string
            if not is_alone or previous != token.start[0] - 1:
                yield token.start[0], token.string.lstrip("# ")
            previous = token.start[0] if is_alone else 0


def phrases(text: str) -> list[str]:
    """Phrases of the dialect in a text, by whole words."""
    return [phrase for phrase in DIALECT if re.search(rf"\b{phrase}\b", text, re.IGNORECASE)]


def faults(texts: Iterable[tuple[int, str]]) -> list[str]:
    """Openings and phrases in texts that a reader stumbles over, each with its line."""
    found = []
    for line, text in texts:
        first = re.match(r"\w*", text)[0].capitalize()
        found += [f"{line} begins with {first}"] if first in OPENINGS else []
        found += [f"{line} has {phrase!r}" for phrase in phrases(text)]
    return found
