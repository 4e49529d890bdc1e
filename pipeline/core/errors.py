"""Errors that a user can mend, told in one sentence."""

import functools
import sys
from collections.abc import Callable


class UserError(Exception):
    """One sentence that names the key or file at fault and the remedy."""


def entry_point(main: Callable[..., None]) -> Callable[..., None]:
    """Turns a `UserError` of a stage's `main` into one line on stderr and exit status 1."""

    @functools.wraps(main)
    def guarded(*args, **kwargs) -> None:
        try:
            main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    return guarded
