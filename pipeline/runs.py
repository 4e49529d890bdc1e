"""A run: where its files lie, whether they are of today's code, and how a training gets there.

    runs/STUDY/NAME/SEED/     history.csv, metrics.json, record.json, and of Table 2's runs evaluation.json; git keeps them
    weights/STUDY/NAME/SEED.pt

Table 2's runs belong to the study table_2, what a study trains of its own to that study, and what one tries to tries,
which git does not keep.
"""

import csv
import hashlib
import io
import math
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from pipeline.core import files, params, record
from pipeline.core.errors import UserError
from pipeline.core.params import Overrides, RunConfig
from pipeline.training import checkpoint
from pipeline.training.loop import COLUMNS, Observer, Training, build_model

TABLE_2, TRIES = "table_2", "tries"
FOLDER, WEIGHTS = Path("runs"), Path("weights")


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
    def command(self) -> str:
        """What makes it."""
        if self.study == TRIES:
            options = [f"--set {change}" for change in self.name.split("+")[1:]]
            return " ".join(["python -m pipeline.train", self.variant, str(self.seed), *options])
        return f"dvc repro -f {f'train@{self.variant}-{self.seed}' if self.study == TABLE_2 else self.study}"

    def is_there(self) -> bool:
        """Whether its training has ended and left everything that git keeps."""
        return all((self.folder / name).exists() for name in ("history.csv", "metrics.json", "record.json"))

    def read(self, name: str) -> dict:
        """One of its JSON files. Raises UserError if it is absent or malformed."""
        return files.read_json(self.folder / f"{name}.json")

    def load_model(self, config: RunConfig) -> torch.nn.Module:
        """The trained model. Raises UserError if its weights are not there, or not those of this configuration."""
        model = build_model(config, self.seed)
        try:
            model.load_state_dict(torch.load(self.weights, map_location="cpu", weights_only=True))
        except FileNotFoundError:
            raise UserError(f"{self.weights} is missing: train it with `{self.command}`, or `dvc pull` it.") from None
        except checkpoint.UNREADABLE:
            raise UserError(f"{self.weights} is damaged, or of another model than asked for: run `dvc repro`.") from None
        return model.eval()


def same_config(recorded: dict, config: RunConfig) -> bool:
    """Whether a record's configuration is this one; a key that is None does not apply."""

    def written(values: dict) -> dict:
        return {section: {k: v for k, v in of.items() if v is not None} for section, of in values.items()}

    return written(recorded) == written(config.model_dump(mode="json"))


def is_current(run: Run, config: RunConfig, data_sha256: str | None) -> bool:
    """Whether the run is there, and of this configuration, of this data if any is given, and of today's code."""
    if not run.is_there():
        return False
    made = run.read("record")
    same_data = data_sha256 is None or made["data_sha256"] == data_sha256
    return same_data and same_config(made["config"], config) and record.code_sha256() in record.made_by(made)


def train(run: Run, config: RunConfig, *, eager: bool = False, track: bool = True) -> None:
    """Trains a run to its files; resumes where the same run was interrupted. On CUDA if there is a device."""
    from pipeline.tracking.watcher import tracked, untracked

    training = Training(config, run.seed, record.default_device())
    training.with_graph &= not eager
    recorder = Recorder(run, training)
    with (tracked if track else untracked)(recorder.scratch):
        recorder.restore()
        training.run(recorder)
        recorder.write_outputs()
    shutil.rmtree(recorder.scratch, ignore_errors=True)


class Recorder(Observer):
    """Writes a training down: its history and record at every point, a checkpoint at every epoch, its outputs at the end.

    Whoever watches the scratch folder sees the run grow.
    """

    def __init__(self, run: Run, training: Training) -> None:
        self.run, self.training = run, training
        self.code_sha256, self.environment = record.code_sha256(), record.describe_environment(training.device)
        self.environment |= record.describe_commit()
        config = training.config.model_dump()
        self.run_key = record.run_key(config, run.seed, training.data.sha256, self.code_sha256, training.device)
        self.scratch = run.scratch.with_name(f"{run.seed}-{self.run_key[:12]}")
        self.times, self.bar = checkpoint.Times(), None
        self._begin()

    def restore(self) -> None:
        """Takes the training up where its checkpoint left it."""
        times = checkpoint.restore(self.scratch / "checkpoint.pt", self.training)
        if times is not None:
            self.times = times
            self.times.resumptions += 1
        self._begin()
        images = self.training.sampler.images_per_epoch
        self.bar = tqdm(
            total=images * self.training.config.train.epochs,
            initial=images * self.training.progress.epoch,
            desc=f"{self.run.name} seed {self.run.seed}",
            unit="image",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )

    def _begin(self) -> None:
        self._start, self._before = time.perf_counter(), self.times.seconds
        self._interval_start = self._start

    def stepped(self, num_images: int) -> None:
        self.times.images += num_images
        self.bar.update(num_images)

    def interval_ended(self) -> None:
        self.times.training_seconds += time.perf_counter() - self._interval_start

    def pointed(self) -> None:
        self.times.timestamps.append(time.time_ns() // 1_000_000)
        row = self.training.progress.history[-1]
        self.bar.set_postfix(loss=f"{row['train_loss']:.3f}", test_accuracy=f"{row['test_accuracy']:.2%}", refresh=False)
        files.write_text(self.scratch / "history.csv", history_csv(self.training.progress.history))
        files.write_json(self.scratch / "record.json", self.record("running"))
        self._interval_start = time.perf_counter()

    def epoch_ended(self) -> None:
        self._clock()
        checkpoint.save(self.scratch / "checkpoint.pt", self.training, self.times)

    def _clock(self) -> None:
        self.times.seconds = self._before + time.perf_counter() - self._start

    def metrics(self) -> dict:
        """The last point, whatever the best one was."""
        progress = self.training.progress
        last = {key: value for key, value in progress.history[-1].items() if key not in ("step", "epoch")}
        return last | {
            "steps": progress.step,
            "num_parameters": sum(parameter.numel() for parameter in self.training.model.parameters()),
            "diverged": progress.diverged,
            "diverged_at_step": progress.step if progress.diverged else None,
        }

    def record(self, status: str) -> dict:
        """What made the run, where and when: everything that may differ between two runs with the same numbers."""
        times = self.times
        return {
            "run_key": self.run_key,
            "study": self.run.study,
            "name": self.run.name,
            "variant": self.run.variant,
            "overrides": self.run.overrides,
            "seed": self.run.seed,
            "status": status,
            "config": self.training.config.model_dump(),
            "data_sha256": self.training.data.sha256,
            "code_sha256": self.code_sha256,
            "environment": self.environment,
            "started_at": times.started_at,
            "finished_at": None if status == "running" else record.now(),
            "seconds": times.seconds,
            "images_per_second": times.images / times.training_seconds if times.training_seconds else None,
            "resumptions": times.resumptions,
            "timestamps": times.timestamps,
        }

    def write_outputs(self) -> None:
        """Weights, history, metrics and record, each whole."""
        self._clock()
        self.bar.close()
        weights = checkpoint.as_bytes({name: tensor.cpu() for name, tensor in self.training.model.state_dict().items()})
        files.write_bytes(self.run.weights, weights)
        files.write_text(self.run.folder / "history.csv", history_csv(self.training.progress.history))
        files.write_json(self.run.folder / "metrics.json", self.metrics())
        status = "diverged" if self.training.progress.diverged else "finished"
        made = self.record(status) | {"weights_sha256": hashlib.sha256(weights).hexdigest()}
        files.write_json(self.run.folder / "record.json", made)


def history_csv(history: list[dict[str, float]]) -> str:
    """The points below one another; a number that is not finite is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in history:
        writer.writerow({key: value if math.isfinite(value) else "" for key, value in row.items()})
    return text.getvalue()
