"""Runs git with the user's configuration, except for SETTINGS.

Callers use the output formats that git keeps stable for programs: `--porcelain`, `-z` and `cat-file`.
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
FORM = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}  # messages in English, and no lock while git only reads


def run(*arguments: str, folder: Path | None = None, given: list[str] | None = None) -> str:
    """Runs git in `folder` (default: the working directory) and returns its output. Raises UserError if git fails.

    Git reads the strings `given`, each followed by a zero byte, from its standard input.
    """
    command = ["git"]
    for name, value in SETTINGS.items():
        command += ["-c", f"{name}={value}"]
    stdin = b"".join(os.fsencode(item) + b"\0" for item in given or [])
    # Drops GIT_DIR and the like, which may point to another repository. Keeps GIT_CONFIG_*, the user's configuration.
    kept = {name: text for name, text in os.environ.items() if name.startswith("GIT_CONFIG_") or name[:4] != "GIT_"}
    try:
        done = subprocess.run([*command, *arguments], cwd=folder, env=kept | FORM, input=stdin, capture_output=True)
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
