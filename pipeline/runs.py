"""A run: where its files lie, whether they are of today's code, and how a training gets there.

    paper_outputs/runs/STUDY/NAME/SEED/     history.csv, metrics.json, record.json; of Table 2's runs evaluation.json, of a study with a
                              `watch` watched.csv; git keeps them
    paper_outputs/weights/STUDY/NAME/SEED.pt

Table 2's runs belong to the study table_2, what a study trains of its own to that study, and what one tries to tries,
which git does not keep.
"""

import csv
import hashlib
import io
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from pipeline.core import files, params, record
from pipeline.core.errors import UserError
from pipeline.core.params import Overrides, RunConfig
from pipeline.training import checkpoint
from pipeline.training.loop import COLUMNS, Observer, Training, build_model

TABLE_2, TRIES = "table_2", "tries"
FOLDER, WEIGHTS = Path("paper_outputs/runs"), Path("paper_outputs/weights")
IDENTITY = ("study", "name", "variant", "overrides", "seed")
EXPECTED = {  # what other stages read from a run's files
    "metrics": ("diverged", "test_accuracy"),
    "record": (*IDENTITY, "status", "config", "code_sha256", "data_sha256", "environment", "seconds"),
    "evaluation": ("metrics_sha256", "test_loss", "test_accuracy", "per_class", "confusion", "layers"),
}
FORGOTTEN_SECONDS = 24 * 3600  # after which a training of other settings, interrupted and untouched, is given up


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
        names = ["history.csv", "metrics.json", *["watched.csv"] * (watch_of(self.study) is not None), "record.json"]
        return [self.weights, *(self.folder / name for name in names)]

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


def watch_of(study: str) -> Callable[[Training], list[dict[str, float]]] | None:
    """What a study sees of its models at every point of their training, where it does: rows of numbers."""
    from pipeline import studies  # whose modules import this one

    return getattr(studies.module(study), "watch", None) if study in studies.names() else None


def same_config(recorded: dict, config: RunConfig) -> bool:
    """Whether a record's configuration is this one."""
    return params.written_config(recorded) == params.written_config(config.model_dump(mode="json"))


def is_current(run: Run, config: RunConfig, data_sha256: str | None) -> bool:
    """`is_recorded`, and its weights are there."""
    return run.weights.exists() and is_recorded(run, config, data_sha256)


def is_recorded(run: Run, config: RunConfig, data_sha256: str | None) -> bool:
    """Whether the run is there, and of this configuration, of this data if any is given, and of today's code."""
    if (made := run.record_if_there()) is None:
        return False
    same_data = data_sha256 is None or made["data_sha256"] == data_sha256
    return same_data and same_config(made["config"], config) and record.is_of_today(made)


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


def train(run: Run, config: RunConfig, *, eager: bool = False, track: bool = True) -> None:
    """Trains a run to its files; resumes where the same run was interrupted. On CUDA if there is a device."""
    from pipeline.tracking.watcher import tracked

    training = Training(config, run.seed, record.default_device())
    training.with_graph &= not eager
    recorder = Recorder(run, training)
    with (tracked if track else nullcontext)(recorder.scratch):
        recorder.restore()
        with recorder.bar:
            training.run(recorder)
        recorder.write_outputs()
    recorder.clear()


class Recorder(Observer):
    """Writes a training down: its history and record at every point, a checkpoint at every epoch, its outputs at the end.

    Whoever watches the scratch folder sees the run grow.
    """

    def __init__(self, run: Run, training: Training) -> None:
        self.run, self.training, self.watch = run, training, watch_of(run.study)
        self.code_sha256 = record.imported_code_sha256(training.device.type)
        self.environment = record.describe_environment(training.device) | record.describe_commit()
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
        if self.watch and not self.training.progress.diverged:
            self.times.watched += [{"epoch": row["epoch"]} | plain(seen) for seen in self.watch(self.training)]
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
        """Weights, history, metrics and record, each whole. The record, without which they are no run, goes first and comes
        last, with the digests of the others."""
        self._clock()
        weights, folder = self.run.weights, self.run.folder
        (folder / "record.json").unlink(missing_ok=True)
        state = self.training.model.state_dict()
        files.write_bytes(weights, checkpoint.as_bytes({name: tensor.cpu() for name, tensor in state.items()}))
        files.write_text(folder / "history.csv", history_csv(self.training.progress.history))
        files.write_json(folder / "metrics.json", self.metrics())
        written = {"weights": weights, "history": folder / "history.csv", "metrics": folder / "metrics.json"}
        if self.watch:
            written["watched"] = folder / "watched.csv"
            seen = pd.DataFrame(self.times.watched or {"epoch": []})  # of a run that diverged at step 0 nothing
            files.write_csv(written["watched"], seen)
        made = self.record("diverged" if self.training.progress.diverged else "finished")
        made |= {f"{name}_sha256": files.sha256(path) for name, path in written.items()}
        files.write_json(folder / "record.json", made)

    def clear(self) -> None:
        """Removes the scratch folder, and what interrupted trainings of this run with other settings have left."""
        for folder in self.scratch.parent.glob(f"{self.run.seed}-*"):
            if folder == self.scratch or time.time() - folder.stat().st_mtime > FORGOTTEN_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def plain(seen: dict[str, float]) -> dict[str, float]:
    """Numbers as Python's own: torch.load with weights_only, and so a resumed training, refuses those of NumPy."""
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in seen.items()}


def history_csv(history: list[dict[str, float]]) -> str:
    """The points below one another; a number that is not finite is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in history:
        writer.writerow({key: value if math.isfinite(value) else "" for key, value in row.items()})
    return text.getvalue()
