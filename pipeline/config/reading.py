"""Reads YAML, checks it against a schema, and explains an error and its remedy in one sentence."""

import copy
import functools
import math
import re
import reprlib
import textwrap
import unicodedata
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML, YAMLError

from pipeline.core.errors import UserError, ended
from pipeline.core.files import ROOT

CONFLICT = re.compile(r"^(<{7}|\|{7}|={7}|>{7})(?= |$)", re.MULTILINE)  # git's conflict markers
UNREADABLE = (YAMLError, ValueError, RecursionError)  # raised for bad syntax, an impossible date or deep nesting
Schema = TypeVar("Schema", bound=BaseModel)


def in_repository(path: str | Path) -> Path:
    """Returns the path if it exists in the working directory, else the same path under the repository's root."""
    path = Path(path)
    return path if path.exists() else ROOT / path


def read_yaml(path: str | Path) -> Any:
    """Reads a YAML file. Raises UserError if the file is absent or not YAML.

    The parser is ruamel.yaml, as in DVC. PyYAML would read 1e-06 as text, and would accept duplicate keys.
    """
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return copy.deepcopy(_parsed(text))
    except FileNotFoundError:
        remedy = f"run from the repository root, or restore it with `git checkout {path}`"
        raise UserError(f"{path} is missing: {remedy}.") from None
    except UNREADABLE as error:
        if marker := CONFLICT.search(text):
            raise UserError(
                f"{path} has a merge conflict marker on line {text.count(chr(10), 0, marker.start()) + 1}: keep one side, "
                f"by hand or with `git checkout --ours {path}` (or --theirs), then run `git add {path}`."
            ) from None
        mark = getattr(error, "problem_mark", None)
        place = f" on line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path} is not valid YAML{place}: {problem}; fix it, or run `git checkout {path}`.") from None


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Parses YAML. Results are cached, since the parser is slow and a report reads the same files for each study."""
    return YAML(typ="safe").load(text)


def validate(schema: type[Schema], raw: Any, where: str) -> Schema:
    """Converts `raw` to an object of the schema. Raises a UserError that names `where` and the first error."""
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise UserError(ended(f"{where}: {_sentence(error.errors()[0], raw)}")) from None


EXPECTATIONS = {  # in place of pydantic's messages, which name Python types
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "list_type": "must be a list, as in [a, b]",
    "dict_type": "must be a block of keys",
    "model_type": "must be a block of keys",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have at most {max_length} entries",
    "missing": "is missing",
}


def _sentence(error: ErrorDetails, raw: Any) -> str:
    """Describes a validation error: the key, the expected value, and the value found."""
    key, kind, value = _key(error["loc"], raw), error["type"], error["input"]
    if kind == "unknown_key":
        return "{}{key} is unknown{hint}".format(f"{key}." if key else "", **error["ctx"])
    if kind == "value_error":
        message = str(error["ctx"]["error"])
        return f"{key}: {message}" if key else message
    if kind in ("int_type", "float_type") and isinstance(value, str) and (number := _as_number(value)):
        return f"{key}: {_short(value)} is read as text; write {number} without quotes"
    message = error["msg"].removeprefix("Input ").removeprefix("String ").replace("should ", "must ", 1)
    expectation = EXPECTATIONS[kind].format_map(error.get("ctx", {})) if kind in EXPECTATIONS else message
    found = "" if isinstance(value, dict) else ", but is empty" if value in (None, "") else f", not {_short(value)}"
    return f"{key or 'the file'} {expectation}{found}"


def _short(value: Any) -> str:
    return textwrap.shorten(reprlib.repr(value), 80, placeholder="…")


def _key(location: tuple, raw: Any) -> str:
    """The dotted key of an error's location, such as train.epochs."""
    parts = []
    for part in location:
        is_tag = isinstance(raw, dict) and raw.get("kind") == part  # pydantic adds the value of `kind` to `location`
        if not is_tag and part != "[key]":
            parts.append(str(part))
            raw = raw.get(part) if isinstance(raw, dict) else raw[part] if isinstance(raw, list) else None
    return ".".join(parts)


def _as_number(text: str) -> str | None:
    """Replaces non-ASCII digits, such as full-width ones, with ASCII digits. Returns None if `text` is not a number."""
    plain = "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in text)
    try:
        value = _parsed(plain)
    except UNREADABLE:
        return None
    return plain.strip() if type(value) in (int, float) and math.isfinite(value) else None
