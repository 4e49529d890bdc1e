"""What MLflow calls a run, and the note on it. A run is its record, or the tags that MLflow has of it."""

import re
from dataclasses import dataclass

from pipeline.core.params import LABELS, Paper

TABLE_2, TRIES = "table_2", "tries"  # as in pipeline.runs, which imports torch
EXPERIMENT = """\
**Views**, above, shows the models, their seeds, and each study that trains.

* Accuracies are in per cent, differences in points. A curve's last value is the result.
* `OSA (QR)` is the mean over the seeds that did not diverge (`tags.level = 'mean'`), and `OSA (QR), seed 0` one of them
  (`tags.level = 'single'`). `ViT, init.head=zeros` has that value replaced.
* Parameters are named as in `params.yaml`; `run` names the folder under `paper_outputs/runs`.
"""


@dataclass(frozen=True)
class Notes:
    """Names and notes by what the paper says and what stands, unchecked, in params.yaml."""

    paper: Paper
    settings: dict

    def title(self, run: dict) -> str:
        """OSA (QR), or ViT, init.head=zeros where a value is replaced, or ViT, depth as a study trained it."""
        label = (LABELS | (self.settings.get("labels") or {})).get(run["variant"], run["variant"])
        return ", ".join([label, *(replaced(run) or [run["study"]] * (run["study"] != TABLE_2))])

    def note(self, run: dict, seeds: list[int]) -> str:
        """What the run is, what the paper says of it, and how to repeat it."""
        kind = f"{'mean over seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}"
        lines = [f"**{self.title(run)}** (`{run['variant']}`, study `{run['study']}`), {kind}."]
        if run["study"] == TABLE_2 and run["variant"] in self.paper.table_2:
            lines += [f"The paper's Table 2 has {self.paper.table_2[run['variant']]} %."]
        keys = {change.partition("=")[0].rpartition(".")[2] for change in replaced(run)}
        open_ = [each for each in self.paper.left_open if each.key and each.key.rpartition(".")[2] in keys]
        lines += [f"The paper leaves this open: {each.topic}, {each.paper}." for each in open_]
        moved = "" if run["study"] in (TABLE_2, TRIES) else ", after its folder has been moved away"
        commands = ", ".join(f"`{self.command(run, seed)}`" for seed in seeds)
        return "\n\n".join([*lines, f"To repeat it{moved}: {commands}."])

    def command(self, run: dict, seed: int) -> str:
        listed = self.settings.get("run") or {}
        if run["study"] not in (TABLE_2, TRIES):
            return f"python -m pipeline.tools.fan_out --only '{run['study']}/{run['name']}/{seed}'"
        if run["study"] == TABLE_2 and run["variant"] in listed.get("variants", []) and seed in listed.get("seeds", []):
            return f"dvc repro -f train@{run['variant']}-{seed}"
        return f"python -m pipeline.train {run['variant']} {seed}{''.join(f' --set {each}' for each in replaced(run))}"


def replaced(run: dict) -> list[str]:
    """The values in the name of a run that replace others, as in init.head=zeros, with null where it says None."""
    changes = re.split(r"\+(?=[a-z])", run["name"].removeprefix(run["variant"]))[1:]
    return [re.sub(r"=None$", "=null", change) for change in changes]
