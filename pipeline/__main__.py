"""Runs a command. `python -m pipeline` lists all commands, and `python -m pipeline train --help` explains `train`."""

import ast
import importlib
import sys
from pathlib import Path

from pipeline.core.errors import ended, hint

COMMANDS = {
    "check": "config.check",
    "fetch": "data.fetch",
    "train": "tools.train",
    "evaluate": "results.evaluate",
    "tables": "results.tables",
    "study": "studies.study",
    "report": "report.__main__",
    "try": "tools.tries",
}
for name in ("fan_out", "plan", "reproduce", "restore", "doctor", "quickstart", "same_bits"):
    COMMANDS[name] = f"tools.{name}"
COMMANDS["tracking"] = "tracking.__main__"
for name in ("attention", "step", "depth", "orthogonal", "kernels"):
    COMMANDS[f"benchmarks.{name}"] = f"benchmarks.{name}"


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(docstring("__main__"), end="\n\n")
        for each, module in COMMANDS.items():
            print(f"  {each:<23}{docstring(module).splitlines()[0].partition(': `')[0].rstrip('.:')}")
    elif name not in COMMANDS:
        sys.exit(f"error: {ended(f'command {name!r} is unknown{hint(name, COMMANDS)}')}")
    elif {"-h", "--help"} & {*arguments} and "parse_args" not in path(COMMANDS[name]).read_text(encoding="utf-8"):
        print(docstring(COMMANDS[name]))  # the command takes no options
    else:
        sys.argv = [f"python -m pipeline {name}", *arguments]
        importlib.import_module(f"pipeline.{COMMANDS[name]}").main()


def path(module: str) -> Path:
    return Path(__file__).parent / f"{module.replace('.', '/')}.py"


def docstring(module: str) -> str:
    """Reads a module's docstring from its file, since importing is slow and `python -OO` drops docstrings."""
    return ast.get_docstring(ast.parse(path(module).read_text(encoding="utf-8"))) or ""


if __name__ == "__main__":
    main()
