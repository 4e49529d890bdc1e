"""A run: where its files lie, whether they are what params.yaml asks for, and how a training gets there.

    paper_outputs/runs/STUDY/NAME/SEED/           history.csv, metrics.json, record.json; of a study with a `watch`
                                                  watched.csv; git keeps them
    paper_outputs/weights/STUDY/NAME/SEED.safetensors
    paper_outputs/evaluations/VARIANT/SEED/       evaluation.json of Table 2's runs

Table 2's runs belong to the study table_2, what a study trains of its own to that study, and what one tries to tries,
which git does not keep.
"""

import hashlib
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import safetensors.torch
import torch

from osa import NUMERICS
from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.params import Overrides, Params, RunConfig
from pipeline.core.schemas import Evaluation, Metrics, Record
from pipeline.training.loop import build_model

TABLE_2, TRIES = "table_2", "tries"
FOLDER, WEIGHTS, EVALUATIONS = (Path("paper_outputs", name) for name in ("runs", "weights", "evaluations"))
KNOWN = ("history.csv", "metrics.json", "watched.csv")  # with their digests, to the record
CURVES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
SCHEMAS = {"metrics": Metrics, "record": Record, "evaluation": Evaluation}


@dataclass(frozen=True)
class Run:
    """One variant, with something replaced or not, and one seed."""

    variant: str
    seed: int
    study: str = TABLE_2
    overrides: Overrides = field(default_factory=dict)
    base: Path = Path()  # with paper_outputs, in a copy of this repository

    @property
    def name(self) -> str:
        return params.run_name(self.variant, self.overrides)

    @property
    def folder(self) -> Path:
        return self.base / FOLDER / self.study / self.name / str(self.seed)

    @property
    def weights(self) -> Path:
        return self.base / WEIGHTS / self.study / self.name / f"{self.seed}.safetensors"

    @property
    def evaluated(self) -> Path:
        return self.base / EVALUATIONS / self.name / str(self.seed) / "evaluation.json"

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
            return f"python -m pipeline train {shlex.join([self.variant, str(self.seed), *options])}"
        if self.study == TABLE_2:
            return f"dvc repro -f train@{self.variant}-{self.seed}"
        return f"python -m pipeline fan_out --only '{self}'"

    def is_there(self) -> bool:
        """Whether its training has ended and left everything that git keeps, each file as its record knows it."""
        return self.record_if_there() is not None

    def record_if_there(self) -> dict | None:
        """Its record; None where `is_there` is false. Raises UserError if it is another run's, or malformed."""
        return None if (made := self._record()) is None or self._strangers(made) else made

    def record(self) -> dict | None:
        """Its record; None where no training of it has ended. Raises UserError if a file is not the one that its record
        knows, or the record is another run's, or malformed."""
        if made := self._record():
            for path in self._strangers(made):
                raise UserError(f"{path} is not the one that record.json beside it knows: {self.remedy}.")
            if self.read("metrics")["diverged"] != (made["status"] == "diverged"):
                raise UserError(f"{self.folder}/record.json has another status than metrics.json: {self.remedy}.")
        return made

    def _record(self) -> dict | None:
        names = ("history.csv", "metrics.json", "record.json")
        return self.read("record") if all((self.folder / name).exists() for name in names) else None

    def _strangers(self, made: dict) -> list[Path]:
        """Its files that are absent, or not those of its record."""
        digests = {self.folder / name: made.get(f"{name.split('.')[0]}_sha256") for name in KNOWN}
        return [path for path, digest in digests.items() if digest and not (path.exists() and files.sha256(path) == digest)]

    @property
    def remedy(self) -> str:
        return f"`git checkout {shlex.quote(str(self.folder))}`, or make it again with `{self.command}`"

    def read(self, name: str) -> dict:
        """Its metrics or its record. Raises UserError if it is absent or malformed, or the record is that of another run."""
        return read(self.folder / f"{name}.json", self.remedy)

    def evaluation(self) -> dict:
        """Its evaluation. Raises UserError if it is of another training."""
        again = f"`git checkout {shlex.quote(str(self.evaluated))}`, or `dvc repro -f evaluate@{self.variant}`"
        found, made = read(self.evaluated, again), self.read("record")
        if any(found[key] != made[key] for key in ("metrics_sha256", "weights_sha256")):
            raise UserError(f"{self.evaluated} is of another training: {again}.")
        if (made["status"] == "diverged") != (not found["confusion"]):
            raise UserError(f"{self.evaluated} does not fit the status of {self.folder}/record.json: {again}.")
        return found

    def points(self) -> pd.DataFrame:
        """Its history. Where it diverged accuracies are those of no model, and blank as the losses are.

        Raises:
            UserError: it does not end as its metrics do, or has other points than its configuration.
        """
        path, metrics = self.folder / "history.csv", self.read("metrics")
        table, train = files.read_csv(path), self.read("record")["config"]["train"]
        try:
            last = table[["step", *CURVES]].astype(float).iloc[-1]
            expected = [metrics["steps"], *(metrics[name] for name in CURVES)]
            is_whole = np.allclose(last, np.array(expected, dtype=float), rtol=1e-12, atol=0, equal_nan=True)
            is_whole &= metrics["diverged"] or len(table) == train["epochs"] * train["points_per_epoch"] + 1
        except (KeyError, IndexError, ValueError, TypeError):
            is_whole = False
        if not is_whole:
            raise UserError(f"{path} does not fit metrics.json and the configuration: {self.remedy}.")
        for split in ("train", "test"):
            table[f"{split}_accuracy"] = table[f"{split}_accuracy"].where(table[f"{split}_loss"].notna())
        return table

    def load_model(self, config: RunConfig) -> torch.nn.Module:
        """The trained model. Raises UserError if its weights are not there, not those that its record knows, or not those
        of this configuration."""
        model = build_model(config, self.seed)
        try:
            content = self.weights.read_bytes()
            if self.read("record")["weights_sha256"] != hashlib.sha256(content).hexdigest():
                raise ValueError("not the weights of the record")
            model.load_state_dict(safetensors.torch.load(content))
        except FileNotFoundError:
            there = f"`git checkout {shlex.quote(str(self.weights))}` where git has it"
            raise UserError(f"{self.weights} is missing: {there}, or train it with `{self.command}`.") from None
        except (OSError, RuntimeError, ValueError, safetensors.SafetensorError):
            raise UserError(
                f"{self.weights} is damaged, or of another training than {self.folder}/record.json: run `{self.command}`."
            ) from None
        return model.eval()


def read(path: Path, remedy: str) -> dict:
    """One of a run's JSON files, whole. Raises UserError if it is absent or malformed, or a record of another run."""
    content = files.read_json(path)
    try:
        params.validate(SCHEMAS[path.stem], content, str(path))
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}; {remedy}.") from None
    if path.stem == "record":
        identity = (content["study"], content["name"], str(content["seed"]))
        if identity != path.parts[-4:-1]:
            raise UserError(f"{path} is the record of another run, {'/'.join(identity)}: {remedy}.")
    return content


def read_record(folder: Path) -> dict:
    """The record of whatever run is in a folder. Raises UserError if there is none, or it is malformed."""
    return read(folder / "record.json", f"`git checkout {shlex.quote(str(folder))}`, or train the run again")


def same_config(recorded: dict, config: RunConfig) -> bool:
    """Whether a record's configuration is this one."""
    return params.written_config(recorded) == params.written_config(config.model_dump(mode="json"))


def of_table_2(settings: Params) -> list[Run]:
    """The runs of Table 2, Figure 1 and the verdicts: of each model those of `run.seeds`, and those of `run.recorded_seeds`
    as the model is configured now.

    Raises:
        UserError: a recorded run is not whole.
    """
    listed = []
    for variant in settings.run.variants:
        config, recorded = params.resolve(settings, variant), [Run(variant, seed) for seed in settings.run.recorded_seeds]
        known = [run.seed for run in recorded if (made := run.record()) and is_of(made, config)]
        listed += [Run(variant, seed) for seed in sorted({*known, *settings.run.seeds})]
    return listed


def is_of(record: dict, config: RunConfig) -> bool:
    """Whether a record is of this configuration and of today's numerics."""
    return same_config(record["config"], config) and record["numerics"] == NUMERICS


def is_recorded(run: Run, config: RunConfig) -> bool:
    """Whether the run is there, of this configuration and of today's numerics."""
    return (made := run.record_if_there()) is not None and is_of(made, config)


def finished() -> list[dict]:
    """The records of all runs that finished."""
    made = [read_record(path.parent) for path in sorted(FOLDER.glob("*/*/*/record.json"))]
    return [each for each in made if each["status"] == "finished"]
