"""Trains one variant with one seed: `python -m pipeline.train osa_qr 0`.

Runs on CUDA if there is a device, there as a CUDA graph with the same numbers, else on the CPU. Killed at any moment, the
same command resumes at the last epoch's end and finishes with the same bits as an undisturbed run.
"""

import argparse
import csv
import hashlib
import io
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from tqdm import tqdm

import osa
from osa import init
from pipeline import data, files, hardware, params
from pipeline.cuda_graph import GraphedStep
from pipeline.errors import UserError, entry_point
from pipeline.params import RunConfig

COLUMNS = ("step", "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy")
CODE = (  # the files that can change a number of a training, relative to the repository's root
    "osa/functional.py",
    "osa/init.py",
    "osa/linalg.py",
    "osa/modules.py",
    "osa/vit.py",
    "pipeline/cuda_graph.py",
    "pipeline/data.py",
    "pipeline/train.py",
)
EVALUATION_BATCH = 100  # small enough for the activations to stay in cache
TRACKING_PATIENCE_SECONDS = 10
UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError)  # of torch.load


def weights_path(variant: str, seed: int) -> Path:
    """Where the weights of a run lie: apart from its other results, which git keeps."""
    return Path("weights") / variant / f"{seed}.pt"


def random_stream(seed: int, name: str) -> Generator:
    """A generator of its own for each use of randomness, so that a new use leaves the others' draws alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def build_model(config: RunConfig, seed: int) -> osa.VisionTransformer:
    """The variant's model, initialised on the CPU from the seed's own stream so that every device starts alike."""
    model, variant = config.model, config.variant

    def attention() -> nn.Module:
        if variant.attention == "softmax":
            return osa.SoftmaxSelfAttention(model.embed_dim, model.num_heads)
        iteration = {"num_iterations": variant.num_iterations, "epsilon": variant.epsilon} if variant.num_iterations else {}
        return osa.OrthogonalSelfAttention(
            model.embed_dim, model.num_heads, method=variant.method, alpha_per_head=config.init.alpha_per_head, **iteration
        )

    vit = osa.VisionTransformer(
        image_size=model.image_size,
        patch_size=model.patch_size,
        num_classes=model.num_classes,
        embed_dim=model.embed_dim,
        depth=model.depth,
        mlp_ratio=model.mlp_ratio,
        attention=attention,
        skip=variant.skip,
        norm=variant.norm,
    )
    _initialise(vit, config, random_stream(seed, "init"))
    return vit


@torch.no_grad()
def _initialise(vit: osa.VisionTransformer, config: RunConfig, generator: Generator) -> None:
    options = config.init
    for embedding in (vit.cls_token, vit.position_embedding):
        init.truncated_normal_(embedding, options.embedding_std, generator=generator)
    linear = {"xavier": init.xavier_linear_, "torch": init.torch_linear_, "zeros": _zeros}
    linear[options.patch_embedding](vit.patch_embedding, generator=generator)
    linear[options.head](vit.head, generator=generator)
    for block in vit.blocks:
        if config.variant.attention == "orthogonal":
            init.init_orthogonal_attention_(block.attention, alpha=options.alpha, generator=generator)
        else:
            init.init_softmax_attention_(block.attention, fused_qkv=options.xavier_fused_qkv, generator=generator)
        if config.variant.init == "osa":
            init.init_suo_mlp_(block.mlp, transposed=options.suo_transposed, generator=generator)
        else:
            init.xavier_linear_(block.mlp.fc1, generator=generator)
            init.xavier_linear_(block.mlp.fc2, generator=generator)


def _zeros(linear: nn.Linear, *, generator: Generator) -> None:
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)


@torch.no_grad()
def evaluate_split(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cross-entropy and accuracy over a whole split."""
    loss, correct = torch.zeros((), device=labels.device), torch.zeros((), device=labels.device, dtype=torch.long)
    for x, y in zip(images.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH), strict=True):
        logits = model(x)
        loss += F.cross_entropy(logits, y, reduction="sum")
        correct += (logits.argmax(1) == y).sum()
    return loss.item() / len(labels), correct.item() / len(labels)


@dataclass
class Progress:
    """What a training has done so far, and all of it that the outputs tell."""

    step: int = 0
    epoch: int = 0
    diverged: bool = False
    history: list[dict[str, float]] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)  # Unix milliseconds, one per row of history
    started_at: str = field(default_factory=lambda: _now())
    seconds: float = 0.0
    training_seconds: float = 0.0  # without the evaluations
    images: int = 0
    resumptions: int = 0

    def add_point(self, epoch: float, train: tuple[float, float], test: tuple[float, float]) -> None:
        self.history.append(dict(zip(COLUMNS, (self.step, epoch, *train, *test), strict=True)))
        self.timestamps.append(time.time_ns() // 1_000_000)
        self.diverged = not (math.isfinite(train[0]) and math.isfinite(test[0]))


class Training:
    """One run: the model, its optimiser, the data and the progress, with a checkpoint at the end of each epoch."""

    def __init__(self, variant: str, seed: int, config: RunConfig, device: torch.device) -> None:
        self.variant, self.seed, self.config, self.device = variant, seed, config, device
        self.data = data.load(pixel_scaling=config.data.pixel_scaling, device=device)
        side = self.data.train_images.shape[-1]
        if side != config.model.image_size:
            raise UserError(
                f"model.image_size is {config.model.image_size}, but the images are {side} pixels wide: write {side}."
            )
        self.model = build_model(config, seed).to(device)
        self.optimizer = _optimizer(self.model, config.train, device)
        self.with_graph = device.type == "cuda"
        self.graphed: GraphedStep | None = None  # recorded at the first step
        self.sampler = _Batches(len(self.data.train_labels), config.train)
        self.progress = Progress()
        self.environment = _environment(device)
        self.code_sha256 = _code_sha256()
        machine = [device.type, torch.get_num_threads(), torch.__version__]
        identity = [config.model_dump(), seed, self.data.sha256, self.code_sha256, *machine]
        self.run_key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.scratch = Path(".checkpoints") / f"{variant}-{seed}-{self.run_key[:12]}"

    def run(self) -> None:
        """Trains to the last epoch or to divergence; resumes where a checkpoint lies."""
        self._restore()
        train, progress = self.config.train, self.progress
        with self._clock(), self._bar() as bar:
            if not progress.history:
                few = slice(len(self.data.test_labels))  # as many training images as there are test images
                first = evaluate_split(self.model, self.data.train_images[few], self.data.train_labels[few])
                self._record(0.0, first)
            while progress.epoch < train.epochs and not progress.diverged:
                self._run_epoch(bar)
                self._checkpoint()

    def _run_epoch(self, bar: tqdm) -> None:
        progress, total = self.progress, _Total(self.device)
        start = time.perf_counter()
        for i, (images, labels) in enumerate(self.batches(progress.epoch), 1):
            total.add(*self.step(images, labels), len(labels))
            progress.step += 1
            progress.images += len(labels)
            bar.update(len(labels))
            if i in self.sampler.points:
                train = total.take()  # reads the device: the step's time is in before the clock stops
                progress.training_seconds += time.perf_counter() - start
                self._record(progress.epoch + i / self.sampler.steps, train)
                row = progress.history[-1]
                bar.set_postfix(loss=f"{row['train_loss']:.3f}", test_accuracy=f"{row['test_accuracy']:.2%}", refresh=False)
                if progress.diverged:
                    return
                start = time.perf_counter()
        progress.epoch += 1

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each step of an epoch."""
        order = self.sampler.order(self.seed, epoch).to(self.device)
        for batch in order.split(self.config.train.batch_size)[: self.sampler.steps]:
            yield self.data.train_images[batch], self.data.train_labels[batch]

    def step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the optimiser. Returns the loss and the number of correct predictions before it, on the device.

        With a graph the next step overwrites both.
        """
        if self.with_graph and not self.graphed and len(labels) == self.config.train.batch_size:
            self._record_graph(images, labels)
        if self.graphed and self.graphed.images.shape == images.shape:
            return self.graphed(images, labels)
        return self.eager_step(images, labels)

    def _record_graph(self, images: Tensor, labels: Tensor) -> None:
        try:
            self.graphed = GraphedStep(self.eager_step, self.model, self.optimizer, images, labels)
        except RuntimeError as error:
            self.with_graph = False
            reason = str(error).partition("\n")[0]
            print(f"warning: the step runs without a CUDA graph, and so more slowly ({reason}).", file=sys.stderr)

    def eager_step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """`step` without a graph."""
        logits = self.model(images)
        loss = F.cross_entropy(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip_grad_norm)
        self.optimizer.step()
        return loss.detach(), (logits.detach().argmax(1) == labels).sum()

    def _record(self, epoch: float, train: tuple[float, float]) -> None:
        """Adds a point of Figure 1 and lets whoever watches the scratch folder see it."""
        self.progress.add_point(epoch, train, evaluate_split(self.model, self.data.test_images, self.data.test_labels))
        files.write_text(self.scratch / "history.csv", self.history_csv())
        files.write_json(self.scratch / "record.json", self.record("running"))

    def _bar(self) -> tqdm:
        images = self.sampler.images_per_epoch
        return tqdm(
            total=images * self.config.train.epochs,
            initial=images * self.progress.epoch,
            desc=f"{self.variant} seed {self.seed}",
            unit="image",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )

    @contextmanager
    def _clock(self):
        before, start = self.progress.seconds, time.perf_counter()
        self._elapsed = lambda: before + time.perf_counter() - start
        yield
        self.progress.seconds = self._elapsed()

    def _checkpoint(self) -> None:
        self.progress.seconds = self._elapsed()
        progress = asdict(self.progress)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "progress": progress}
        files.write_bytes(self.scratch / "checkpoint.pt", _saved(state))

    def _restore(self) -> None:
        path = self.scratch / "checkpoint.pt"
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])
        except UNREADABLE:
            raise UserError(f"the checkpoint {path} cannot be read: delete it to train from the start.") from None
        self.progress.resumptions += 1

    def history_csv(self) -> str:
        """The history; a number that is not finite is an empty field."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in self.progress.history:
            writer.writerow({key: value if math.isfinite(value) else "" for key, value in row.items()})
        return text.getvalue()

    def metrics(self) -> dict:
        """The last point, whatever the best one was."""
        last = {key: value for key, value in self.progress.history[-1].items() if key not in ("step", "epoch")}
        return last | {
            "steps": self.progress.step,
            "num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "diverged": self.progress.diverged,
            "diverged_at_step": self.progress.step if self.progress.diverged else None,
        }

    def record(self, status: str) -> dict:
        """What made the run, where and when: everything that may differ between two runs with the same numbers."""
        progress = self.progress
        return {
            "run_key": self.run_key,
            "variant": self.variant,
            "seed": self.seed,
            "status": status,
            "config": self.config.model_dump(),
            "data_sha256": self.data.sha256,
            "code_sha256": self.code_sha256,
            "environment": self.environment,
            "started_at": progress.started_at,
            "finished_at": None if status == "running" else _now(),
            "seconds": progress.seconds,
            "images_per_second": progress.images / progress.training_seconds if progress.training_seconds else None,
            "resumptions": progress.resumptions,
            "timestamps": progress.timestamps,
        }

    def write_outputs(self) -> None:
        """Weights, history, metrics and record, each whole."""
        folder = Path("runs") / self.variant / str(self.seed)
        weights = _saved({name: tensor.cpu() for name, tensor in self.model.state_dict().items()})
        files.write_bytes(weights_path(self.variant, self.seed), weights)
        files.write_text(folder / "history.csv", self.history_csv())
        files.write_json(folder / "metrics.json", self.metrics())
        status = "diverged" if self.progress.diverged else "finished"
        record = self.record(status) | {"weights_sha256": hashlib.sha256(weights).hexdigest()}
        files.write_json(Path("records") / self.variant / f"{self.seed}.json", record)


class _Batches:
    """How an epoch is cut into steps, and after which of them a point is recorded."""

    def __init__(self, num_images: int, train: params.Train) -> None:
        self.num_images = num_images
        self.steps = num_images // train.batch_size if train.drop_last else math.ceil(num_images / train.batch_size)
        if not self.steps:
            raise UserError(
                f"train.batch_size {train.batch_size} is more than the {num_images} images: write a smaller one."
            )
        self.images_per_epoch = min(num_images, self.steps * train.batch_size)
        self.points = {math.ceil(self.steps * k / train.points_per_epoch) for k in range(1, train.points_per_epoch + 1)}

    def order(self, seed: int, epoch: int) -> Tensor:
        """The epoch's permutation. It depends on the seed and the epoch alone, so that resuming needs no generator state."""
        return torch.randperm(self.num_images, generator=random_stream(seed, f"order/{epoch}"))


class _Total:
    """Loss and correct predictions summed on the device since they were last taken."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._reset()

    def add(self, loss: Tensor, correct: Tensor, count: int) -> None:
        self.loss += loss * count
        self.correct += correct
        self.count += count

    def take(self) -> tuple[float, float]:
        """Mean loss and accuracy."""
        result = self.loss.item() / self.count, self.correct.item() / self.count
        self._reset()
        return result

    def _reset(self) -> None:
        self.loss = torch.zeros((), device=self.device)
        self.correct = torch.zeros((), device=self.device, dtype=torch.long)
        self.count = 0


def _optimizer(model: nn.Module, train: params.Train, device: torch.device) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    matrices = [p for p in parameters if train.decay_all or p.ndim == 2]
    others = [p for p in parameters if not (train.decay_all or p.ndim == 2)]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(
        groups,
        lr=train.learning_rate,
        betas=tuple(train.betas),
        eps=train.eps,
        fused=True,
        capturable=device.type == "cuda",  # its step count lives on the device, where a graph can raise it
    )


def _saved(state: dict) -> bytes:
    # torch.save writes a file's own name into it; through memory the bytes depend on the state alone.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


def _code_sha256() -> str:
    return hashlib.sha256("".join(files.sha256(_root() / path) for path in CODE).encode()).hexdigest()


def _environment(device: torch.device) -> dict:
    dirty = _git("status", "--porcelain", "--", "osa", "pipeline", "params.yaml", "dvc.yaml", "requirements.txt")
    return {
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if dirty is None else bool(dirty),
    } | hardware.describe(device)


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "--no-optional-locks", *arguments]  # a training must not get in the way of a commit
        return subprocess.run(command, cwd=_root(), capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@contextmanager
def _tracked(scratch: Path):
    """Lets a process of its own follow the run into MLflow: whatever becomes of it, the training goes on."""
    scratch.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pipeline.tracking", "watch", str(scratch)]
    try:
        watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"warning: this run is not tracked, because its watcher cannot be started ({error}).", file=sys.stderr)
        yield
        return
    try:
        yield
    finally:
        watcher.stdin.close()  # the sign that the outputs are in place
        try:
            watcher.wait(TRACKING_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            watcher.kill()
            watcher.wait()
            print("warning: MLflow did not answer; `make ui` imports the run later.", file=sys.stderr)


@contextmanager
def _untracked(scratch: Path):
    yield


def make_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs a pass over memory
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")


@entry_point
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.train", description=__doc__.splitlines()[0])
    parser.add_argument("variant", help="a name under variants or choices.runs in params.yaml")
    parser.add_argument("seed", type=int)
    parser.add_argument("--no-tracking", action="store_true", help="do not follow the run in MLflow")
    parser.add_argument("--eager", action="store_true", help="on CUDA, launch every kernel by itself: slower, same numbers")
    arguments = parser.parse_args()
    make_deterministic()
    config = params.resolve(params.load(), arguments.variant)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = Training(arguments.variant, arguments.seed, config, device)
    training.with_graph &= not arguments.eager
    with (_untracked if arguments.no_tracking else _tracked)(training.scratch):
        training.run()
        training.write_outputs()
    shutil.rmtree(training.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
