"""A training written down: curves, record and a checkpoint at every point, its outputs at the end.

Whoever watches the scratch folder sees the run grow.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import safetensors.torch
from tqdm import tqdm

from osa import NUMERICS
from pipeline.core import files, record
from pipeline.core.errors import UserError
from pipeline.core.params import FOLDER, RunConfig
from pipeline.runs import Run
from pipeline.training import checkpoint
from pipeline.training.loop import COLUMNS, Observer, Training

FORGOTTEN_SECONDS = 24 * 3600  # after which a training of other settings, interrupted and untouched, is given up
Watch = Callable[[Training], list[dict[str, float]]]


def train(run: Run, config: RunConfig, *, watch: Watch | None = None, eager: bool = False) -> None:
    """Trains a run to its files; resumes where the same run was interrupted. On CUDA if there is a device."""
    training = Training(config, run.seed, record.default_device())
    if config.data.source == FOLDER and config.data.description().sha256 != training.data.sha256:
        raise UserError("data/folder holds other images or labels than fetch stored: run `python -m pipeline fetch`.")
    training.with_graph &= not eager
    recorder = Recorder(run, training, watch)
    recorder.restore()
    with recorder.bar:
        training.run(recorder)
    recorder.write_outputs()
    recorder.clear()


class Recorder(Observer):
    """Writes the files of one run. `watch` adds rows of numbers of its own at every point."""

    def __init__(self, run: Run, training: Training, watch: Watch | None = None) -> None:
        self.run, self.training, self.watch = run, training, watch
        self.environment = record.describe_environment(training.device) | record.describe_commit()
        config = training.config.model_dump()
        self.run_key = record.run_key(config, run.seed, training.data.sha256, training.device)
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
        self.bar = tqdm(
            total=self.training.sampler.images_per_epoch * self.training.config.train.epochs,
            initial=self.times.images,
            desc=f"{self.run.name} seed {self.run.seed}",
            unit="image",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )

    def _begin(self) -> None:
        self._start, self._before = time.perf_counter(), self.times.seconds
        self._interval_start = self._start

    def on_step(self, num_images: int) -> None:
        self.times.images += num_images
        self.bar.update(num_images)

    def on_interval(self) -> None:
        self.times.training_seconds += time.perf_counter() - self._interval_start

    def on_evaluation(self) -> None:
        self.times.timestamps.append(time.time_ns() // 1_000_000)
        row = self.training.progress.history[-1]
        if self.watch and not self.training.progress.diverged:
            for seen in self.watch(self.training):  # as Python's own numbers: torch.load with weights_only refuses NumPy's
                own = {name: value.item() if isinstance(value, np.generic) else value for name, value in seen.items()}
                self.times.watched.append({"epoch": row["epoch"]} | own)
        self.bar.set_postfix(loss=f"{row['train_loss']:.3f}", test_accuracy=f"{row['test_accuracy']:.2%}", refresh=False)
        files.write_text(self.scratch / "history.csv", history_csv(self.training.progress.history))
        self._clock()
        files.write_json(self.scratch / "record.json", self.record("running"))
        checkpoint.save(self.scratch / "checkpoint.pt", self.training, self.times)
        self._interval_start = time.perf_counter()

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
            "numerics": NUMERICS,
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
        state = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
        files.write_bytes(weights, safetensors.torch.save(state))
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


def history_csv(history: list[dict[str, float]]) -> str:
    """The points below one another; a number that is not finite is an empty field."""
    table = pd.DataFrame(history, columns=COLUMNS)
    return table.replace([math.inf, -math.inf], math.nan).to_csv(index=False, lineterminator="\n")
