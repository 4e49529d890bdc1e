"""Checks params.yaml and pipeline/paper.yaml against their schemas.

Other DVC stages depend on this stage's output. The output is constant, so a rerun of this stage does not rerun the others.
"""

from pipeline.config import params
from pipeline.core import files
from pipeline.core.errors import entry_point


@entry_point
def main() -> None:
    params.load()
    params.load_paper()
    files.write_text("paper_outputs/check.txt", "params.yaml holds what its schema allows.\n")


if __name__ == "__main__":
    main()
