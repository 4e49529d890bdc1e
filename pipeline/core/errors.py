"""Parses command-line arguments, and prints a one-sentence message for an error that the user can fix."""

import argparse
import difflib
import functools
import io
import re
import sys
from collections.abc import Callable, Collection


class UserError(Exception):
    """An error that the user can fix. The message names the key or file at fault, and a remedy."""


def command_parser(command: str, about: str | None) -> argparse.ArgumentParser:
    """Returns the argument parser of a command. The help shows the first line of `about`, a module's docstring."""
    return argparse.ArgumentParser(prog=f"python -m pipeline {command}", description=(about or "").partition("\n")[0])


def entry_point(main: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command's `main`. On a UserError, Ctrl-C or an OSError about a file, prints a line and exits with status 1."""

    @functools.wraps(main)
    def guarded(*args, **kwargs) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # the terminal may be unable to encode a character
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return main(*args, **kwargs)
        except UserError as error:
            sentence = str(error)
        except OSError as error:
            if error.filename is None:
                raise
            remedy = "check its permissions and the free disk space"
            if isinstance(error, FileNotFoundError):
                remedy = "run from the repository root, restore it with `git checkout`, or create it with `dvc repro`"
            sentence = f"{error.filename} cannot be used ({error.strerror}): {remedy}."
        except KeyboardInterrupt:
            sentence = "interrupted: run the same command again; it resumes if it can, and otherwise starts over."
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(1)

    return guarded


def hint(name: object, known: Collection[str]) -> str:
    """Returns "; did you mean 'vit'?" if a known name is similar to the unknown `name`, else a list of all known names."""
    close = difflib.get_close_matches(str(name), known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; choose one of {', '.join(known)}" if known else ""


def ended(sentence: str) -> str:
    return sentence if sentence.endswith("?") else f"{sentence}."


def without_password(text: str) -> str:
    """Removes the login (user:password@) from each address in `text`, and masks the value of password=, token= and so on."""
    text = re.sub(r"(?<=://)\S*@|[^\s/'\"]+:[^\s'\"]+@", "", text)
    return re.sub(r"(?i)((?:password|passwd|pwd|token|secret|signature|key)=)[^\s&'\"]+", r"\1***", text)
