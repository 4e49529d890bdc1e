"""The check stage: params.yaml is what its schema allows, before any of it reaches a command line.

Every other stage waits for it. Its output never changes, so that an edit of a parameter reruns what depends on that alone.

`python -m pipeline check PATH COMMAND` is the stage of what a person makes by COMMAND, and git keeps: DVC runs it where PATH
is not what its lock knows, and goes no further.
"""

from pathlib import Path

from pipeline.core import files, params
from pipeline.core.errors import UserError, command_parser, entry_point

OUTPUT = Path("paper_outputs/check.txt")


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("check", __doc__)
    parser.add_argument("path", nargs="?")
    parser.add_argument("command", nargs="?")
    chosen = parser.parse_args(arguments)
    if chosen.path:
        raise UserError(
            f"{chosen.path} is not what dvc.lock knows: `git checkout {chosen.path}`, or make it again by "
            f"`{chosen.command}` and keep it by `dvc commit -f {chosen.path}`."
        )
    params.load()
    params.load_paper()
    files.write_text(OUTPUT, "params.yaml holds what its schema allows.\n")


if __name__ == "__main__":
    main()
