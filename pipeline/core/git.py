"""Git as every command of the pipeline calls it: in an environment of its own, whatever the user's is.

Callers ask for forms that git keeps for programs (`--porcelain`, `-z`, `cat-file`), in which no colour, pager or tool for
differences has a part. The user's configuration holds otherwise: it says, for one, which folders are safe.
"""

import os
import shlex
import subprocess
from pathlib import Path

from pipeline.core.errors import UserError

SETTINGS = {
    "core.hooksPath": os.devnull,  # a hook may need a program that is gone, as git-lfs leaves one
    "core.fsmonitor": "false",  # a program that tells git which files to look at
    "status.showUntrackedFiles": "all",
    "log.showSignature": "false",
    "i18n.logOutputEncoding": "UTF-8",
}
FORM = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}  # English; and whoever only reads is in the way of nobody's commit


def run(*arguments: str, folder: Path | None = None, given: list[str] | None = None) -> str:
    """The output of git in a folder, or here. It reads the strings `given`, each ended by a zero byte.

    Raises:
        UserError: it failed; with all that it says.
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
    """The output of git without the space around it; None if it fails."""
    try:
        return run(*arguments, folder=folder).strip()
    except UserError:
        return None


def environment() -> dict[str, str]:
    """The environment without what a shell has set up for another repository, such as GIT_DIR. GIT_CONFIG_* stay: they say
    where the user's configuration lies."""
    kept = {name: text for name, text in os.environ.items() if name.startswith("GIT_CONFIG_") or name[:4] != "GIT_"}
    return kept | FORM
