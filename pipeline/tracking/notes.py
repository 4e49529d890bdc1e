"""Names and notes of the runs in MLflow. A run is described by its tags, as a record or MLflow has them."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.tracking.records import TABLE_2

if TYPE_CHECKING:
    from pipeline.config.params import Paper

EXPERIMENT = """\
The menu Views, at the top right of the table, has the models and their seeds.

Accuracies are in per cent, differences in points. `OSA (QR)` is the mean over the seeds that did not diverge,
`OSA (QR), seed 0` one of them, and `ViT, init.head=zeros` has that value replaced. Parameters are named as in `params.yaml`;
the tag `run` names the folder under `paper_outputs/runs`.
"""


def title(tags: Mapping[str, str], settings: dict) -> str:
    """OSA (QR), or ViT, init.head=zeros where a value is replaced, or ViT, depth as a study trained it."""
    label = (settings.get("labels") or {}).get(tags["variant"], tags["variant"])
    changes = _replaced(tags)
    if not changes and tags["study"] != TABLE_2:
        changes = [tags["study"]]
    return ", ".join([label, *changes])


def note(tags: Mapping[str, str], settings: dict, paper: "Paper") -> str:
    """Describes the run, with the paper's number and open questions."""
    lines = [f"**{title(tags, settings)}** (`{tags['variant']}`, study `{tags['study']}`)."]
    if tags["study"] == TABLE_2 and tags["variant"] in paper.table_2:
        lines += [f"The paper's Table 2 has {paper.table_2[tags['variant']]} %."]
    keys = {change.partition("=")[0].rpartition(".")[2] for change in _replaced(tags)}
    for question in paper.left_open:
        if question.key and question.key.rpartition(".")[2] in keys:
            lines += [f"The paper leaves this open: {question.topic}, {question.paper}."]
    return "\n\n".join(lines)


def _replaced(tags: Mapping[str, str]) -> list[str]:
    """The values in the name of a run that replace others, as in init.head=zeros."""
    return re.split(r"\+(?=[a-z])", tags["name"].removeprefix(tags["variant"]))[1:]
