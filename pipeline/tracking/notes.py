"""What MLflow calls a run, and the note on it. A run is its record, or the tags that MLflow has of it."""

import re

from pipeline.core.params import Paper
from pipeline.training.run import TABLE_2

EXPERIMENT = """\
**Views**, above, shows the models, their seeds, and each study that trains.

Accuracies are in per cent, differences in points; a curve's last value is the result. `OSA (QR)` is the mean over the
seeds that did not diverge, `OSA (QR), seed 0` one of them, and `ViT, init.head=zeros` has that value replaced. Parameters
are named as in `params.yaml`; `run` names the folder under `paper_outputs/runs`.
"""


def title(run: dict, settings: dict) -> str:
    """OSA (QR), or ViT, init.head=zeros where a value is replaced, or ViT, depth as a study trained it."""
    label = (settings.get("labels") or {}).get(run["variant"], run["variant"])
    return ", ".join([label, *(_replaced(run) or [run["study"]] * (run["study"] != TABLE_2))])


def note(run: dict, settings: dict, paper: Paper) -> str:
    """What the run is, and what the paper says of it."""
    lines = [f"**{title(run, settings)}** (`{run['variant']}`, study `{run['study']}`)."]
    if run["study"] == TABLE_2 and run["variant"] in paper.table_2:
        lines += [f"The paper's Table 2 has {paper.table_2[run['variant']]} %."]
    keys = {change.partition("=")[0].rpartition(".")[2] for change in _replaced(run)}
    open_ = [each for each in paper.left_open if each.key and each.key.rpartition(".")[2] in keys]
    return "\n\n".join(lines + [f"The paper leaves this open: {each.topic}, {each.paper}." for each in open_])


def _replaced(run: dict) -> list[str]:
    """The values in the name of a run that replace others, as in init.head=zeros."""
    return re.split(r"\+(?=[a-z])", run["name"].removeprefix(run["variant"]))[1:]
