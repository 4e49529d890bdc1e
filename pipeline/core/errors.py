"""Parser of all commands, and errors that a user can mend, in one sentence."""

import argparse
import functools
import io
import re
import sys
from collections.abc import Callable


class UserError(Exception):
    """One sentence that names the key or file at fault and the remedy."""


def command_parser(command: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m pipeline COMMAND`, with the first line of its docstring, of which `python -OO` has none."""
    return argparse.ArgumentParser(prog=f"python -m pipeline {command}", description=(about or "").partition("\n")[0])


def entry_point(main: Callable[..., None]) -> Callable[..., None]:
    """Turns a `UserError` of a stage's `main`, or one of the system about a file, into one line and exit status 1."""

    @functools.wraps(main)
    def guarded(*args, **kwargs) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # whatever a label holds, and whatever the terminal shows
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return main(*args, **kwargs)
        except UserError as error:
            sentence = str(error)
        except OSError as error:
            if error.filename is None:
                raise
            remedy = "make room for it, or let it be read and written"
            if isinstance(error, FileNotFoundError):
                remedy = "run from the repository root, `git checkout` it, or let `dvc repro` make it"
            sentence = f"{error.filename} cannot be used ({error.strerror}): {remedy}."
        except KeyboardInterrupt:
            sentence = "interrupted: the same command goes on from there, or begins anew."
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(1)

    return guarded


def without_password(text: str) -> str:
    """`text` with neither what stands before the @ of an address nor the values of password= and the like in its query."""
    text = re.sub(r"(?<=://)\S*@|[^\s/'\"]+:[^\s'\"]+@", "", text)
    return re.sub(r"(?i)((?:password|passwd|pwd|token|secret|signature|key)=)[^\s&'\"]+", r"\1***", text)
