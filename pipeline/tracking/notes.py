"""What MLflow calls a run, and the note on it. A run is its record, or the tags that MLflow has of it."""

import re
from dataclasses import dataclass

from pipeline.core.params import LABELS, Paper
from pipeline.report.numbers import plain

TABLE_2, TRIES = "table_2", "tries"  # as in pipeline.runs, whose torch a watcher can do without
EXPERIMENT = """\
**Views**, above, shows the models, their seeds, and each study that trains.

* Accuracies are in per cent, differences in points. A curve's last value is the result.
* `OSA (QR)` is the mean over the seeds that did not diverge (`tags.level = 'mean'`), and `OSA (QR), seed 0` one of them
  (`tags.level = 'single'`). `ViT, init.head=zeros` has that value replaced.
* Parameters are named as in `params.yaml`, and `tags.study`, `tags.name` and `tags.seed` as the folders of `runs/`.
"""


@dataclass(frozen=True)
class Notes:
    """Names and notes by what the paper says and what stands, unchecked, in params.yaml."""

    paper: Paper
    settings: dict

    def place(self, of: tuple[str, str]) -> tuple:
        """Where a study and a name stand among others: first the models, as params.yaml lists them."""
        study, name = of
        listed = [*((self.settings.get("run") or {}).get("variants") or []), name]
        return study != TABLE_2, study, listed.index(name), name

    def title(self, run: dict) -> str:
        """OSA (QR), or ViT, init.head=zeros where something is replaced, or ViT, depth as a study trained it."""
        labels, variant = LABELS | (self.settings.get("labels") or {}), run["variant"]
        return ", ".join([labels.get(variant, variant), *(replaced(run) or [run["study"]] * (run["study"] != TABLE_2))])

    def changes(self, record: dict) -> str:
        """What the run has in another's place, as in init.head: xavier → zeros."""
        variant = self.settings.get("variants", {}).get(record["variant"]) or {}
        shared = self.settings if record["study"] == TRIES else self.paper.recipe.model_dump()
        found = []
        for section, values in record["overrides"].items():
            own = variant if section == "variant" else (variant.get("overrides") or {}).get(section, {})
            before = shared.get(section, {}) | own
            found += [f"{section}.{key}: {plain(before.get(key))} → {plain(value)}" for key, value in values.items()]
        return "; ".join(found)

    def note(self, run: dict, seeds: list[int]) -> str:
        """What the run is, what is changed in it, and how to repeat it; `run` holds its `changes`."""
        variant, study, numbers = run["variant"], run["study"], ", ".join(map(str, seeds))
        what = f"**{self.title(run)}** (`{variant}`), {'mean over seeds' if len(seeds) > 1 else 'seed'} {numbers}, "
        if study == TABLE_2:
            number = self.paper.table_2.get(variant)
            what += "not a model of the paper." if number is None else f"for which the paper's Table 2 has {number} %."
            return f"{what}\n\n{self._to_repeat(run, seeds)}"
        keys = {change.partition("=")[0].rpartition(".")[2] for change in replaced(run)}
        topics = [each for each in self.paper.left_open if each.key and each.key.rpartition(".")[2] in keys]
        left_open = "".join(f" The paper leaves this open: {each.topic}, {each.paper}." for each in topics)
        what += "a try." if study == TRIES else f"a training of the study `{study}`."
        return f"{what} Changed: {run['changes'] or 'nothing'}.{left_open}\n\n{self._to_repeat(run, seeds)}"

    def _to_repeat(self, run: dict, seeds: list[int]) -> str:
        study, variant, listed = run["study"], run["variant"], self.settings.get("run") or {}
        if study not in (TABLE_2, TRIES):
            names = [f"{study}/{run['name']}/{seed}" for seed in seeds]
            folders, quoted = (
                ", ".join(f"`paper_outputs/runs/{name}`" for name in names),
                " ".join(f"'{name}'" for name in names),
            )
            return f"To repeat it: delete {folders}, then `python -m pipeline.tools.fan_out --only {quoted}`."
        if study == TABLE_2 and variant in listed.get("variants", []) and {*seeds} <= {*listed.get("seeds", [])}:
            return f"To repeat it: `dvc repro -f {' '.join(f'train@{variant}-{seed}' for seed in seeds)}`."
        options = "".join(f" --set {change}" for change in replaced(run))
        return f"To repeat it: {', '.join(f'`python -m pipeline.train {variant} {seed}{options}`' for seed in seeds)}."


def replaced(run: dict) -> list[str]:
    """What the name of a run says is replaced, as in init.head=zeros, and null where it says None."""
    changes = re.split(r"\+(?=[a-z])", run["name"].removeprefix(run["variant"]))[1:]
    return [re.sub(r"=None$", "=null", change) for change in changes]
