"""A run and its files.

    paper_outputs/runs/STUDY/NAME/SEED/           history.csv, metrics.json, record.json; of a study that watches its models
                                                  watched.csv; git keeps them
    paper_outputs/weights/STUDY/NAME/SEED.safetensors
    paper_outputs/evaluations/VARIANT/SEED/       evaluation.json of Table 2's runs

Table 2's runs belong to the study table_2, what a study trains of its own to that study, and what one tries to tries,
which git does not keep. record.json says which run it is and has the digest of each file: every reader of a run begins with
`Run.record`, which checks both.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from osa import NUMERICS
from pipeline.config import params, records
from pipeline.config.params import Overrides, RunConfig
from pipeline.config.records import RECORD, RunRecord
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.training import COLUMNS

if TYPE_CHECKING:
    import pandas as pd  # slow to import, as torch is, and a list of runs needs neither
    import torch

TABLE_2, TRIES = "table_2", "tries"
CURVES = COLUMNS[2:]
FOLDER, WEIGHTS, EVALUATIONS = (Path("paper_outputs", name) for name in ("runs", "weights", "evaluations"))
# Records of these numbers stay current. Between 1 and 2 "exact" began to balance other heads, which changes last digits, and
# "newton_schulz" to iterate in float64 at norms that only a failing start reaches.
EARLIER_NUMERICS = (1,)


@dataclass(frozen=True)
class Run:
    """One variant, with something replaced or not, and one seed."""

    variant: str
    seed: int
    study: str = TABLE_2
    overrides: Overrides = field(default_factory=dict)
    base: Path = Path()  # with paper_outputs, in a copy of this repository

    @classmethod
    def at(cls, folder: Path) -> Run:
        """The run whose training left a folder. Raises UserError if the record there is damaged or that of another run."""
        record = records.parse(folder / RECORD, RunRecord, f"`git checkout {shlex.quote(str(folder))}`")
        run = cls(record.variant, record.seed, record.study, record.overrides, Path(*folder.parts[:-5]))
        if run.folder != folder:
            raise UserError(
                f"{folder / RECORD} is the record of another run, {run}: `git checkout {shlex.quote(str(folder))}`."
            )
        return run

    @property
    def name(self) -> str:
        return params.run_name(self.variant, self.overrides)

    def __str__(self) -> str:
        return f"{self.study}/{self.name}/{self.seed}"

    @property
    def folder(self) -> Path:
        return self.base / FOLDER / self.study / self.name / str(self.seed)

    @property
    def weights(self) -> Path:
        return self.base / WEIGHTS / self.study / self.name / f"{self.seed}.safetensors"

    @property
    def files(self) -> dict[str, Path]:
        """The files that a training leaves besides its record."""
        return {
            "weights": self.weights,
            "history": self.folder / "history.csv",
            "metrics": self.folder / "metrics.json",
            "watched": self.folder / "watched.csv",
        }

    @property
    def evaluated(self) -> Path:
        return self.base / EVALUATIONS / self.name / str(self.seed) / "evaluation.json"

    @property
    def scratch(self) -> Path:
        """The folder of the run while it trains."""
        return Path(".checkpoints") / self.study / self.name / str(self.seed)

    @property
    def stage(self) -> str:
        """The name of a run of Table 2 in DVC."""
        return f"train@{self.variant}-{self.seed}"

    @property
    def command(self) -> str:
        """The command that trains it."""
        if self.study == TRIES:
            options = params.as_options(self.overrides)
            return f"python -m pipeline train {shlex.join([self.variant, str(self.seed), *options])}"
        if self.study == TABLE_2:
            return f"dvc repro -f {self.stage}"
        return f"python -m pipeline fan_out --only '{self}'"

    def record(self) -> RunRecord | None:
        """Its record; None where no training of it has ended. Weights may be absent: git does not keep them all.

        Raises:
            UserError: the record is damaged or another run's, or a file is not the one that it knows.
        """
        path = self.folder / RECORD
        if not path.exists():
            return None
        record = records.read(self.folder, RunRecord, self.command)
        if self.weights.exists():
            records.verify({self.weights: record.weights}, path, self.command)
        return record

    def is_current(self, config: RunConfig) -> bool:
        """True if the run is whole, with this configuration and a current number of `osa.NUMERICS`."""
        try:
            record = self.record()
        except UserError:
            return False
        return record is not None and matches(record, config)

    def metrics(self) -> dict:
        """The last point of its curves, and whether it diverged."""
        return files.read_json(self.files["metrics"])

    def history(self) -> pd.DataFrame:
        """The points of its curves. Where it diverged accuracies are those of no model, and blank as the losses are."""
        table = files.read_csv(self.files["history"])
        for split in ("train", "test"):
            table[f"{split}_accuracy"] = table[f"{split}_accuracy"].where(table[f"{split}_loss"].notna())
        return table

    def load_model(self, config: RunConfig) -> torch.nn.Module:
        """The trained model. Raises UserError if its weights are absent, or not those that its record knows."""
        if not self.weights.exists():
            there = f"`git checkout {shlex.quote(str(self.weights))}` where git has it"
            raise UserError(f"{self.weights} is missing: {there}, or train it with `{self.command}`.")
        if self.record() is None:
            raise UserError(f"{self.folder} holds no run: train it with `{self.command}`.")
        import safetensors.torch

        from pipeline.training.loop import build_model

        model = build_model(config, self.seed)
        try:
            model.load_state_dict(safetensors.torch.load_file(self.weights))
        except RuntimeError:
            raise UserError(f"{self.weights} has another model than this configuration: run `{self.command}`.") from None
        return model.eval()


def matches(record: RunRecord, config: RunConfig) -> bool:
    """True if a record has this configuration and a current number of `osa.NUMERICS`."""
    return record.config == config and record.numerics in (*EARLIER_NUMERICS, NUMERICS)
