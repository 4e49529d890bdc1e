"""Carries out a training run, and writes its record, curves, weights and checkpoints."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import pickle
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from tqdm import tqdm

from osa import NUMERICS
from pipeline.config import records
from pipeline.config.params import USER_FOLDER, RunConfig
from pipeline.config.records import RECORD, Environment, RunRecord, Status
from pipeline.core import files, provenance
from pipeline.core.errors import UserError
from pipeline.training import HISTORY_COLUMNS
from pipeline.training.loop import Observer, Progress, Training
from pipeline.training.run import Run

FORGOTTEN_SECONDS = 24 * 3600  # age at which a run's scratch folders from other settings are deleted
DIGEST_BYTES = hashlib.sha256().digest_size
PHASES = ("start", "compiling", "steps", "evaluation", "writing")
# Errors that reading a damaged checkpoint can raise
NOT_A_CHECKPOINT = (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError)

Watch = Callable[[Training], list[dict[str, float]]]


def train(
    run: Run, config: RunConfig, *, watch: Watch | None = None, eager: bool = False, seconds_before: float = 0.0
) -> RunRecord:
    """Carries out a training run and writes its files. Resumes an interrupted run. Uses CUDA if available.

    Args:
        watch: called after every evaluation; returns rows of watched.csv.
        eager: do not use a CUDA graph.
        seconds_before: seconds that the process has spent on imports.

    Returns:
        The record that this call wrote, even if another process has meanwhile overwritten record.json.
    """
    begun = time.perf_counter()
    training = Training(config, run.seed, provenance.default_device())
    if config.data.source == USER_FOLDER and config.data.description().sha256 != training.data.sha256:
        problem = "the images or labels in data/folder are not those that fetch stored"
        raise UserError(f"{problem}: run `python -m pipeline fetch`.")
    training.with_graph &= not eager
    recorder = Recorder(run, training, watch)
    recorder.restore()
    recorder.times.phases["start"] += seconds_before + time.perf_counter() - begun
    with recorder.bar:
        training.run(recorder)
    record = recorder.write_outputs()
    recorder.clear()
    return record


@dataclass
class Times:
    """A run's times, commits and rows of watched.csv. None of these values affects the training."""

    started_at: str = field(default_factory=provenance.now)
    timestamps: list[int] = field(default_factory=list)  # time of each evaluation, in Unix milliseconds
    seconds: float = 0.0  # without the phase "start"
    training_seconds: float = 0.0  # without the evaluations
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # seconds per phase
    images: int = 0
    commits: list[str | None] = field(default_factory=list)  # commit of the code that each process ran
    dirty: bool | None = None  # True if any process ran code with uncommitted changes
    watched: list[dict[str, float]] = field(default_factory=list)


def run_key(config: dict, seed: int, data_sha256: str, device: torch.device) -> str:
    """Returns a digest of everything that determines a run's exact results. Resuming requires a checkpoint with this key."""
    machine = [provenance.device_name(device), torch.get_num_threads(), torch.__version__]
    return files.json_digest([config, seed, data_sha256, NUMERICS, *machine])


class Recorder(Observer):
    """Writes the files of a run: to a scratch folder after every evaluation, and to `Run.files` at the end."""

    def __init__(self, run: Run, training: Training, watch: Watch | None = None) -> None:
        self.run, self.training, self.watch = run, training, watch
        self.environment = Environment(**provenance.describe_environment(training.device))
        config = training.config.model_dump()
        self.run_key = run_key(config, run.seed, training.data.sha256, training.device)
        self.scratch = run.scratch.with_name(f"{run.seed}-{self.run_key[:12]}")
        self.times = Times()

    def restore(self) -> None:
        """Resumes from the run's checkpoint, if one exists. Raises UserError if the checkpoint is damaged."""
        path = self.scratch / "checkpoint.pt"
        if path.exists():
            try:
                self.times = restore_checkpoint(path, self.training)
            except NOT_A_CHECKPOINT:
                raise UserError(f"the checkpoint {path} cannot be read: delete it to train from the start.") from None
        commit = provenance.describe_commit()
        self.times.commits.append(commit["git_commit"])
        self.times.dirty = self.times.dirty or commit["git_dirty"]
        self._start, self._before = time.perf_counter(), self.times.seconds
        self._interval_start = self._last = self._start
        self._has_stepped = False
        self.bar = tqdm(
            total=self.training.sampler.images_per_epoch * self.training.config.train.epochs,
            initial=self.times.images,
            desc=f"{self.run.name} seed {self.run.seed}",
            unit="image",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )

    def _spent_on(self, phase: str) -> None:
        """Adds the time since the last call of this method to the time of `phase`."""
        now = time.perf_counter()
        self.times.phases[phase] += now - self._last
        self._last = now

    def on_step(self, num_images: int) -> None:
        if not self._has_stepped and self.training.device.type == "cuda":  # the first step compiles kernels
            torch.cuda.synchronize()
            self._spent_on("compiling")
        self._has_stepped = True
        self.times.images += num_images
        self.bar.update(num_images)

    def on_interval(self) -> None:
        self._spent_on("steps")
        self.times.training_seconds += time.perf_counter() - self._interval_start

    def on_evaluation(self) -> None:
        self.times.timestamps.append(time.time_ns() // 1_000_000)
        row = self.training.progress.history[-1]
        if self.watch and not self.training.progress.diverged:
            for seen in self.watch(self.training):
                # Checkpoints store these values, and torch.load with weights_only refuses NumPy scalars.
                own = {name: value.item() if isinstance(value, np.generic) else value for name, value in seen.items()}
                self.times.watched.append({"epoch": row["epoch"]} | own)
        self._spent_on("evaluation")
        self.bar.set_postfix(loss=f"{row['train_loss']:.3f}", test_accuracy=f"{row['test_accuracy']:.2%}", refresh=False)
        files.write_text(self.scratch / "history.csv", history_csv(self.training.progress.history))
        self._clock()
        records.write_record(self.scratch, self.description("running"))
        save_checkpoint(self.scratch / "checkpoint.pt", self.training, self.times)
        self._spent_on("writing")
        self._interval_start = time.perf_counter()

    def _clock(self) -> None:
        self.times.seconds = self._before + time.perf_counter() - self._start

    def metrics(self) -> dict:
        """Returns the content of metrics.json. It holds the metrics of the last evaluation, not the best one."""
        progress = self.training.progress
        last = {key: value for key, value in progress.history[-1].items() if key not in ("step", "epoch")}
        return last | {
            "steps": progress.step,
            "num_parameters": sum(parameter.numel() for parameter in self.training.model.parameters()),
            "diverged": progress.diverged,
            "diverged_at_step": progress.step if progress.diverged else None,
        }

    def description(self, status: Status, **digests: Any) -> RunRecord:
        times = self.times
        return RunRecord(
            folder=records.place(self.run.folder),
            run_key=self.run_key,
            study=self.run.study,
            variant=self.run.variant,
            overrides=self.run.overrides,
            seed=self.run.seed,
            status=status,
            config=self.training.config,
            data_sha256=self.training.data.sha256,
            numerics=NUMERICS,
            environment=self.environment,
            commits=times.commits,
            dirty=times.dirty,
            started_at=times.started_at,
            finished_at=None if status == "running" else provenance.now(),
            seconds=times.seconds,
            phases={phase: round(seconds, 3) for phase, seconds in times.phases.items()},
            images_per_second=times.images / times.training_seconds if times.training_seconds else None,
            timestamps=times.timestamps,
            **digests,
        )

    def write_outputs(self) -> RunRecord:
        """Writes weights, history, metrics and record, and returns the record."""
        self._clock()
        paths, progress = self.run.files, self.training.progress
        # The record is removed first and written last, so that readers never find a mixture of old and new files.
        (self.run.folder / RECORD).unlink(missing_ok=True)
        state = {name: tensor.cpu().contiguous() for name, tensor in self.training.model.state_dict().items()}
        files.write_bytes(paths["weights"], safetensors.torch.save(state))
        files.write_text(paths["history"], history_csv(progress.history))
        files.write_json(paths["metrics"], self.metrics())
        if self.watch:
            import pandas as pd

            files.write_csv(paths["watched"], pd.DataFrame(self.times.watched))
        else:
            paths["watched"].unlink(missing_ok=True)
        status: Status = "diverged" if progress.diverged else "finished"
        own = records.digests(self.run.folder)
        self._spent_on("writing")
        record = self.description(status, files=own, weights=files.sha256(paths["weights"]))
        records.write_record(self.run.folder, record)
        return record

    def clear(self) -> None:
        """Removes the scratch folder, and the run's old scratch folders from other settings."""
        for folder in self.scratch.parent.glob(f"{self.run.seed}-*"):
            if folder == self.scratch or time.time() - folder.stat().st_mtime > FORGOTTEN_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def save_checkpoint(path: Path, training: Training, times: Times) -> None:
    """Writes a checkpoint. The file begins with a SHA-256 of the rest, since torch.load verifies no checksum."""
    state = {
        "model": training.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in training.optimizers],
        "progress": asdict(training.progress),
        "times": asdict(times),
    }
    # If torch.save wrote to a path and not to a buffer, it would also store the name of the file.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    files.write_bytes(path, hashlib.sha256(content).digest() + content)


def restore_checkpoint(path: Path, training: Training) -> Times:
    """Restores `training` from a checkpoint, and returns the saved times. Raises ValueError if the digest is wrong."""
    written = path.read_bytes()
    digest, content = written[:DIGEST_BYTES], written[DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("not the bytes that were written")
    state = torch.load(io.BytesIO(content), map_location=training.device, weights_only=True)
    training.model.load_state_dict(state["model"])
    for optimizer, saved in zip(training.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    training.progress = Progress(**state["progress"])
    return Times(**state["times"])


def history_csv(history: list[dict[str, float]]) -> str:
    """Returns the history as CSV. A number that is not finite becomes an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HISTORY_COLUMNS)
    for row in history:
        writer.writerow([row[name] if math.isfinite(row[name]) else "" for name in HISTORY_COLUMNS])
    return text.getvalue()
