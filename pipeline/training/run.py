"""Names and reads the files of a run.

    paper_outputs/runs/STUDY/NAME/SEED/           history.csv, metrics.json, record.json, and watched.csv if the study
                                                  measures its models during training; git tracks these files
    paper_outputs/weights/STUDY/NAME/SEED.safetensors
    paper_outputs/evaluations/VARIANT/SEED/       evaluation.json of Table 2's runs

STUDY is "table_2", the name of a study, or "tries" for the user's experiments, which git does not track. Code that
reads a run first calls `Run.record`, which verifies the files.
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
from pipeline.training import HISTORY_COLUMNS

if TYPE_CHECKING:
    import pandas as pd  # pandas and torch are slow to import, and listing runs needs neither

    from osa.vit import VisionTransformer

TABLE_2, TRIES = "table_2", "tries"
CURVES = HISTORY_COLUMNS[2:]
RUNS, WEIGHTS, EVALUATIONS = (Path("paper_outputs", name) for name in ("runs", "weights", "evaluations"))
SCRATCH = Path(".checkpoints")  # folder for the files of unfinished runs
# Older values of osa.NUMERICS whose runs remain valid. The change from 1 to 2 affected only the last digits of "exact", and
# the results of "newton_schulz" at very large norms of query and key, which occur only in runs that never start to learn.
EARLIER_NUMERICS = (1,)


@dataclass(frozen=True)
class Run:
    """A training run of one variant, with overrides and a seed."""

    variant: str
    seed: int
    study: str = TABLE_2
    overrides: Overrides = field(default_factory=dict)
    base: Path = Path()  # root of the repository or of a copy of it

    @classmethod
    def at(cls, folder: Path) -> Run:
        """Returns the run stored in a folder. Raises UserError if the record is damaged, or belongs to another run."""
        record = records.parse(folder / RECORD, RunRecord, f"run `git checkout {shlex.quote(str(folder))}`")
        run = cls(record.variant, record.seed, record.study, record.overrides, Path(*folder.parts[:-5]))
        if run.folder != folder:
            raise UserError(
                f"{folder / RECORD} is the record of another run, {run}: run `git checkout {shlex.quote(str(folder))}`."
            )
        return run

    @property
    def name(self) -> str:
        return params.run_name(self.variant, self.overrides)

    def __str__(self) -> str:
        return f"{self.study}/{self.name}/{self.seed}"

    @property
    def folder(self) -> Path:
        return self.base / RUNS / self.study / self.name / str(self.seed)

    @property
    def weights(self) -> Path:
        return self.base / WEIGHTS / self.study / self.name / f"{self.seed}.safetensors"

    @property
    def files(self) -> dict[str, Path]:
        """The files that training writes in addition to the record."""
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
        """The folder for the run's files during training. `Recorder` appends a key of the configuration to its name."""
        return SCRATCH / self.study / self.name / str(self.seed)

    @property
    def stage(self) -> str:
        """The name of the DVC stage that trains this run of Table 2."""
        return f"train@{self.variant}-{self.seed}"

    @property
    def command(self) -> str:
        """The command that trains the run."""
        if self.study == TRIES:
            options = params.as_options(self.overrides)
            return f"python -m pipeline train {shlex.join([self.variant, str(self.seed), *options])}"
        if self.study == TABLE_2:
            return f"dvc repro -f {self.stage}"
        return f"python -m pipeline fan_out --only '{self}'"

    def record(self) -> RunRecord | None:
        """Reads the run's record and verifies the files of the run. Returns None if the run has no record.

        The weights file may be absent, because git keeps only the weights of Table 2's runs.

        Raises:
            UserError: the record is damaged or belongs to another run, or a file does not match its digest.
        """
        path = self.folder / RECORD
        if not path.exists():
            return None
        record = records.read_record(self.folder, RunRecord, self.command)
        if self.weights.exists():
            records.verify({self.weights: record.weights}, path, self.command)
        return record

    def ended_record(self) -> RunRecord:
        """Returns the same as `record`, but raises UserError if the run has no record."""
        if (record := self.record()) is None:
            raise UserError(f"{self.folder} holds no run: train it with `{self.command}`.")
        return record

    def is_current(self, config: RunConfig) -> bool:
        """Returns whether the run is complete and has this configuration."""
        try:
            record = self.record()
        except UserError:
            return False
        return record is not None and matches(record, config)

    def metrics(self) -> dict:
        """Returns the content of metrics.json, such as the final test accuracy and whether the run diverged."""
        return files.read_json(self.files["metrics"])

    def history(self) -> pd.DataFrame:
        """Returns the content of history.csv. An accuracy becomes NaN where the loss of the same split is not finite."""
        table = files.read_csv(self.files["history"])
        for split in ("train", "test"):
            table[f"{split}_accuracy"] = table[f"{split}_accuracy"].where(table[f"{split}_loss"].notna())
        return table

    def load_model(self, config: RunConfig) -> VisionTransformer:
        """Returns the trained model. Raises UserError if the weights are absent, or do not match the record."""
        if not self.weights.exists():
            there = f"run `git checkout {shlex.quote(str(self.weights))}` if git has it"
            raise UserError(f"{self.weights} is missing: {there}, or train it with `{self.command}`.")
        self.ended_record()
        import safetensors.torch

        from pipeline.training.loop import build_model

        model = build_model(config, self.seed)
        try:
            model.load_state_dict(safetensors.torch.load_file(self.weights))
        except RuntimeError:
            raise UserError(f"{self.weights} does not fit the model of this configuration: run `{self.command}`.") from None
        return model.eval()


def matches(record: RunRecord, config: RunConfig) -> bool:
    """True if a record has this configuration, and if its value of `osa.NUMERICS` is still valid."""
    return record.config == config and record.numerics in (*EARLIER_NUMERICS, NUMERICS)
