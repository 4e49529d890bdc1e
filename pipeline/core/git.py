"""Runs git in an environment that does not depend on the user's shell.

Callers use the output formats that git keeps stable for programs (`--porcelain`, `-z`, `cat-file`): no colour, pager or diff
tool changes them. The user's configuration, such as the list of safe folders, applies to everything except SETTINGS.
"""

import os
import shlex
import subprocess
from pathlib import Path

from pipeline.core.errors import UserError

SETTINGS = {
    "core.hooksPath": os.devnull,  # no hooks, since a hook may need a program that is not installed
    "core.fsmonitor": "false",  # git starts no program that watches files for changes
    "status.showUntrackedFiles": "all",
    "log.showSignature": "false",
    "i18n.logOutputEncoding": "UTF-8",
}
# LC_ALL makes git write its messages in English. GIT_OPTIONAL_LOCKS keeps git from taking a lock while it only reads. Such a
# lock could block a commit.
FORM = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}


def run(*arguments: str, folder: Path | None = None, given: list[str] | None = None) -> str:
    """Runs git in `folder` (default: the working directory) and returns its output.

    Args:
        given: strings that git reads from its standard input. Each string is followed by a zero byte.

    Raises:
        UserError: git failed; the message includes its output.
    """
    command = ["git"]
    for name, value in SETTINGS.items():
        command += ["-c", f"{name}={value}"]
    stdin = b"".join(os.fsencode(item) + b"\0" for item in given or [])
    try:
        done = subprocess.run([*command, *arguments], cwd=folder, env=environment(), input=stdin, capture_output=True)
    except OSError as error:
        raise UserError(f"git cannot be run ({error.strerror}): install it.") from None
    if done.returncode:
        raise UserError(f"`{shlex.join(['git', *arguments])}` failed. It says:\n{os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout)


def ask(*arguments: str, folder: Path | None = None) -> str | None:
    """Runs git and returns its output without surrounding whitespace; None if git fails."""
    try:
        return run(*arguments, folder=folder).strip()
    except UserError:
        return None


def environment() -> dict[str, str]:
    """Returns the environment variables of this process, changed for git.

    The variables of FORM are added. GIT_DIR and similar variables are left out, because they may point to another
    repository. The variables GIT_CONFIG_* are kept, because they locate the user's configuration.
    """
    kept = {name: text for name, text in os.environ.items() if name.startswith("GIT_CONFIG_") or name[:4] != "GIT_"}
    return kept | FORM
