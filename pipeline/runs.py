"""A run: where its files lie, whether they are what params.yaml asks for, and how a training gets there.

    paper_outputs/runs/STUDY/NAME/SEED/    history.csv, metrics.json, record.json; of Table 2's runs evaluation.json, of a
                                           study with a `watch` watched.csv; git keeps them
    paper_outputs/weights/STUDY/NAME/SEED.pt

Table 2's runs belong to the study table_2, what a study trains of its own to that study, and what one tries to tries,
which git does not keep.
"""

import hashlib
import io
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pandas as pd
import torch

from osa import NUMERICS
from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.params import Overrides, RunConfig
from pipeline.training import checkpoint
from pipeline.training.loop import build_model

TABLE_2, TRIES = "table_2", "tries"
FOLDER, WEIGHTS = Path("paper_outputs/runs"), Path("paper_outputs/weights")
IDENTITY = ("study", "name", "variant", "overrides", "seed")
EXPECTED = {  # what other stages read from a run's files
    "metrics": ("diverged", "test_accuracy"),
    "record": (*IDENTITY, "status", "config", "numerics", "data_sha256", "environment", "seconds"),
    "evaluation": ("metrics_sha256", "test_loss", "test_accuracy", "per_class", "confusion", "layers"),
}


@dataclass(frozen=True)
class Run:
    """One variant, with something replaced or not, and one seed."""

    variant: str
    seed: int
    study: str = TABLE_2
    overrides: Overrides = field(default_factory=dict)

    @property
    def name(self) -> str:
        return params.run_name(self.variant, self.overrides)

    @property
    def folder(self) -> Path:
        return FOLDER / self.study / self.name / str(self.seed)

    @property
    def weights(self) -> Path:
        return WEIGHTS / self.study / self.name / f"{self.seed}.pt"

    @property
    def scratch(self) -> Path:
        """Where it is while it trains."""
        return Path(".checkpoints") / self.study / self.name / str(self.seed)

    def __str__(self) -> str:
        return f"{self.study}/{self.name}/{self.seed}"

    @property
    def outputs(self) -> list[Path]:
        """What a training leaves, the record last."""
        return [self.weights, *(self.folder / name for name in ("history.csv", "metrics.json", "record.json"))]

    @property
    def command(self) -> str:
        """What makes it."""
        if self.study == TRIES:
            options = params.as_options(self.overrides)
            return f"python -m pipeline.train {shlex.join([self.variant, str(self.seed), *options])}"
        if self.study == TABLE_2:
            return f"dvc repro -f train@{self.variant}-{self.seed}"
        return f"python -m pipeline.tools.fan_out --only '{self}'"

    def is_there(self) -> bool:
        """Whether its training has ended and left everything that git keeps, each file as its record knows it."""
        return self.record_if_there() is not None

    def record_if_there(self) -> dict | None:
        """Its record; None where `is_there` is false."""
        if not all((self.folder / name).exists() for name in ("history.csv", "metrics.json", "record.json")):
            return None
        made = self.read("record")
        digests = {name: made.get(f"{Path(name).stem}_sha256") for name in ("history.csv", "metrics.json", "watched.csv")}
        is_whole = all(  # as far as the record knows them: older ones know their weights alone
            digest is None or ((path := self.folder / name).exists() and files.sha256(path) == digest)
            for name, digest in digests.items()
        )
        return made if is_whole else None

    def read(self, name: str) -> dict:
        """One of its JSON files: metrics, record or evaluation. Raises UserError if it is absent or malformed."""
        return read(self.folder / f"{name}.json", f"run `{self.command}`")

    def points(self) -> pd.DataFrame:
        """Its history. Where it diverged accuracies are those of no model, and blank as the losses are."""
        table = files.read_csv(self.folder / "history.csv")
        for split in ("train", "test"):
            table[f"{split}_accuracy"] = table[f"{split}_accuracy"].where(table[f"{split}_loss"].notna())
        return table

    def load_model(self, config: RunConfig) -> torch.nn.Module:
        """The trained model. Raises UserError if its weights are not there, not those that its record knows, or not those
        of this configuration."""
        model = build_model(config, self.seed)
        try:
            content = self.weights.read_bytes()
            made = self.read("record") if (self.folder / "record.json").exists() else {}
            if made.get("weights_sha256") not in (None, hashlib.sha256(content).hexdigest()):
                raise ValueError("not the weights of the record")
            model.load_state_dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
        except FileNotFoundError:
            raise UserError(f"{self.weights} is missing: train it with `{self.command}`, or `dvc pull` it.") from None
        except checkpoint.UNREADABLE:
            raise UserError(
                f"{self.weights} is damaged, or of another training than {self.folder}/record.json: run `{self.command}`."
            ) from None
        return model.eval()


def read(path: Path, remedy: str) -> dict:
    """One of a run's JSON files, whole. Raises UserError if it is absent or malformed."""
    content = files.read_json(path)
    missing = [key for key in EXPECTED[path.stem] if not isinstance(content, dict) or key not in content]
    if missing:
        raise UserError(f"{path} has no {missing[0]!r}, and so is damaged: delete it and {remedy}.")
    return content


def read_record(folder: Path) -> dict:
    """The record of whatever run is in a folder. Raises UserError if there is none, or it is malformed."""
    return read(folder / "record.json", "train the run again, or `git checkout` it")


def same_config(recorded: dict, config: RunConfig) -> bool:
    """Whether a record's configuration is this one."""
    return params.written_config(recorded) == params.written_config(config.model_dump(mode="json"))


def is_current(run: Run, config: RunConfig, data_sha256: str | None) -> bool:
    """`is_recorded`, and its weights are there."""
    return run.weights.exists() and is_recorded(run, config, data_sha256)


def is_recorded(run: Run, config: RunConfig, data_sha256: str | None) -> bool:
    """Whether the run is there, and of this configuration, of this data if any is given, and of today's numerics."""
    if (made := run.record_if_there()) is None:
        return False
    same_data = data_sha256 is None or made["data_sha256"] == data_sha256
    return same_data and same_config(made["config"], config) and made["numerics"] == NUMERICS


def finished() -> list[dict]:
    """The records of all runs that finished."""
    made = [read_record(path.parent) for path in sorted(FOLDER.glob("*/*/*/record.json"))]
    return [each for each in made if each["status"] == "finished"]


def alike(run: Run, made: list[dict]) -> list[dict]:
    """Those of these records that say how long the run will take: of the same name, or else of the same variant."""
    named = [each for each in made if (each["study"], each["name"]) == (run.study, run.name)]
    return named or [each for each in made if each["variant"] == run.variant]


def seconds_of(run: Run, made: list[dict]) -> float | None:
    """How long the run will take by these records, their median; None where none is alike."""
    seconds = [each["seconds"] for each in alike(run, made)]
    return median(seconds) if seconds else None
