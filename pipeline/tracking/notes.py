"""What MLflow calls a run, and the note on it. A run is its record, or the tags that MLflow has of it."""

import re
from dataclasses import dataclass

from pipeline.core.params import LABELS, Paper, plain

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

    def place(self, run: tuple[str, str]) -> tuple:
        """Where a study and a name stand among others: first the models, as params.yaml lists them."""
        study, name = run
        listed = [*((self.settings.get("run") or {}).get("variants") or []), name]
        return study != TABLE_2, study, listed.index(name), name

    def title(self, run: dict) -> str:
        """OSA (QR), or ViT, init.head=zeros where a value is replaced, or ViT, depth as a study trained it."""
        labels, variant = LABELS | (self.settings.get("labels") or {}), run["variant"]
        return ", ".join([labels.get(variant, variant), *(replaced(run) or [run["study"]] * (run["study"] != TABLE_2))])

    def changes(self, record: dict) -> str:
        """The values that the run has in place of others, as in init.head: xavier → zeros."""
        variant = (self.settings.get("variants") or {}).get(record["variant"]) or {}
        shared = self.settings if record["study"] == TRIES else self.paper.recipe.model_dump()
        changes = []
        for section, values in record["overrides"].items():
            own = variant if section == "variant" else (variant.get("overrides") or {}).get(section, {})
            before = shared.get(section, {}) | own
            changes += [f"{section}.{key}: {plain(before.get(key))} → {plain(value)}" for key, value in values.items()]
        return "; ".join(changes)

    def note(self, run: dict, seeds: list[int]) -> str:
        """What the run is, what is changed in it, and how to repeat it; `run` holds its `changes`."""
        variant, study = run["variant"], run["study"]
        kind = "mean over seeds" if len(seeds) > 1 else "seed"
        text = f"**{self.title(run)}** (`{variant}`), {kind} {', '.join(map(str, seeds))}, "
        if study == TABLE_2:
            number = self.paper.table_2.get(variant)
            text += "not a model of the paper." if number is None else f"for which the paper's Table 2 has {number} %."
        else:
            text += "a try." if study == TRIES else f"a training of the study `{study}`."
            text += f" Changed: {run['changes'] or 'nothing'}."
            keys = {change.partition("=")[0].rpartition(".")[2] for change in replaced(run)}
            topics = [each for each in self.paper.left_open if each.key and each.key.rpartition(".")[2] in keys]
            text += "".join(f" The paper leaves this open: {each.topic}, {each.paper}." for each in topics)
        return f"{text}\n\nTo repeat it: {self._commands(run, seeds)}."

    def _commands(self, run: dict, seeds: list[int]) -> str:
        study, variant, listed = run["study"], run["variant"], self.settings.get("run") or {}
        if study not in (TABLE_2, TRIES):
            runs = [f"{study}/{run['name']}/{seed}" for seed in seeds]
            folders = ", ".join(f"`paper_outputs/runs/{each}`" for each in runs)
            quoted = " ".join(f"'{each}'" for each in runs)
            return f"delete {folders}, then `python -m pipeline.tools.fan_out --only {quoted}`"
        if study == TABLE_2 and variant in listed.get("variants", []) and {*seeds} <= {*listed.get("seeds", [])}:
            return f"`dvc repro -f {' '.join(f'train@{variant}-{seed}' for seed in seeds)}`"
        options = "".join(f" --set {change}" for change in replaced(run))
        return ", ".join(f"`python -m pipeline.train {variant} {seed}{options}`" for seed in seeds)


def replaced(run: dict) -> list[str]:
    """The values in the name of a run that replace others, as in init.head=zeros, with null where it says None."""
    changes = re.split(r"\+(?=[a-z])", run["name"].removeprefix(run["variant"]))[1:]
    return [re.sub(r"=None$", "=null", change) for change in changes]
