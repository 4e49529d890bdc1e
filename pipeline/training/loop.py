"""Trains a model, and records the curves of Figure 1."""

import hashlib
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrize

import osa.models
from osa.constrained import orthogonal
from osa.constrained.penalties import with_penalty
from pipeline.config.params import RunConfig, Train
from pipeline.core.errors import UserError
from pipeline.data import idx
from pipeline.training import HISTORY_COLUMNS
from pipeline.training.cuda_graph import GraphedStep

PERTURBATION = 1e-6  # relative change of a weight, about ten times float32's rounding error
# Images per batch of an evaluation: 100 fit into a CPU's cache, and 2000 save kernel launches on a GPU
EVALUATION_BATCH = {"cpu": 100, "cuda": 2000}


def configure_torch() -> None:
    """Makes runs with equal seeds bitwise equal on one machine, and puts large CPU tensors in huge pages, which saves time.

    Call this function before any torch function, because torch reads THP_MEM_ALLOC_ENABLE when it first allocates memory.
    Set this variable to 0 to do without huge pages.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    torch.use_deterministic_algorithms(True)
    # Filling new tensors with NaN would cost a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")


def random_stream(seed: int, name: str) -> Generator:
    """Returns a random generator for the purpose `name`. Generators for different purposes are independent."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def build_model(config: RunConfig, seed: int) -> osa.VisionTransformer:
    """Builds the configured model on the CPU, so that every device starts from the same weights.

    If `train.perturbation` is not 0, each weight is multiplied by 1 + PERTURBATION · z, with z ~ N(0, 1).

    Raises:
        UserError: the model cannot be built.
    """
    try:
        config.check_images()
        model = osa.models.build_vit(config.options, generator=random_stream(seed, "init"))
    except ValueError as error:  # layers check further limits, such as the minimum number of blocks
        raise UserError(f"the model cannot be built: {error}.") from None
    if draw := config.train.perturbation:
        generator = random_stream(seed, f"perturbation/{draw}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + PERTURBATION * torch.randn(parameter.shape, generator=generator))
    if config.variant.keep and config.variant.keep_by:
        orthogonal.constrain_(model, config.variant.keep, config.variant.keep_by)
    return model


def make_optimizers(model: nn.Module, config: RunConfig, device: torch.device) -> list[torch.optim.Optimizer]:
    """Creates AdamW. If `train.optimizer` is "muon", also creates Muon, which updates the weight matrices of the blocks.

    The two optimisers share a learning rate and a weight decay, since Muon's update is scaled to the root mean square
    of AdamW's update (Liu et al. 2025, "Muon is scalable for LLM training", Section 2.2).
    """
    train = config.train

    def decays(name: str, parameter: nn.Parameter) -> bool:
        if ".parametrizations." in name:  # decay would pull an orthogonal weight towards its initial value
            return False
        return train.decay_all or parameter.ndim == 2

    def for_muon(name: str, parameter: nn.Parameter) -> bool:
        is_matrix = name.startswith("blocks.") and name.endswith(".weight") and parameter.ndim == 2
        return train.optimizer == "muon" and is_matrix

    def groups(named: list[tuple[str, nn.Parameter]]) -> list[dict]:
        decayed = [parameter for name, parameter in named if decays(name, parameter)]
        others = [parameter for name, parameter in named if not decays(name, parameter)]
        both = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return [group for group in both if group["params"]]

    named = list(model.named_parameters())
    matrices = [each for each in named if for_muon(*each)]
    adamw = torch.optim.AdamW(
        groups([each for each in named if not for_muon(*each)]),
        lr=train.learning_rate,
        betas=(train.betas[0], train.betas[1]),
        eps=train.eps,
        fused=True,
        capturable=device.type == "cuda",  # keeps the step count on the device, where a CUDA graph can update the count
    )
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if matrices:
        optimizers.append(torch.optim.Muon(groups(matrices), lr=train.learning_rate, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def rate_factor(train: Train, step: int, steps: int) -> float:
    """Returns the factor by which the schedule multiplies the learning rate at `step`, 1 ≤ `step` ≤ `steps`.

    The factor rises linearly to 1 at step `warmup_steps`. Then it stays 1 if the schedule is "constant". Otherwise it
    follows half a period of a cosine, and reaches 0 at the last step.
    """
    if step <= train.warmup_steps:
        return step / train.warmup_steps
    if train.schedule == "constant":
        return 1.0
    return (1 + math.cos(math.pi * (step - train.warmup_steps) / (steps - train.warmup_steps))) / 2


@torch.no_grad()
@parametrize.cached()
def evaluate_split(model: nn.Module, images: Tensor | idx.Images, labels: Tensor) -> tuple[float, float]:
    """Returns the mean cross-entropy and the accuracy over all images of a split."""
    loss, correct = torch.zeros((), device=labels.device), torch.zeros((), device=labels.device, dtype=torch.long)
    size = EVALUATION_BATCH[images.device.type]
    for x, y in zip(images.split(size), labels.split(size), strict=True):
        logits = model(x)
        loss += F.cross_entropy(logits, y, reduction="sum")
        correct += (logits.argmax(1) == y).sum()
    return loss.item() / len(labels), correct.item() / len(labels)


@dataclass
class Progress:
    """The progress of a training run. `history` holds the metrics of each evaluation."""

    step: int = 0
    epoch: int = 0
    diverged: bool = False
    history: list[dict[str, float]] = field(default_factory=list)


class Observer:
    """Observes a training run without affecting its results."""

    def on_step(self, num_images: int) -> None:
        """Called after a training step on a batch of `num_images` images has been queued on the device."""

    def on_interval(self) -> None:
        """Called before an evaluation, when the device has finished all queued steps."""

    def on_evaluation(self) -> None:
        """Called after an evaluation has been added to the history. A checkpoint can then be written."""


def load_data(config: RunConfig, device: torch.device) -> idx.DataSet:
    """Loads the data of a training run.

    If `train.held_out` is not 0, that many random training images, the same for every seed, replace the test images.
    """
    data = idx.read_data(idx.folder(config.data.source), config.data.pixel_scaling, device)
    count, total = config.train.held_out, len(data.train_labels)
    if count >= total:
        raise UserError(f"train.held_out {count} must be less than the {total} training images.")
    return data.hold_out(torch.randperm(total, generator=random_stream(0, "held_out"))[:count]) if count else data


class Training:
    """One run: the model, its optimisers, the data and the progress."""

    def __init__(self, config: RunConfig, seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device
        self.data = load_data(config, device)
        self.model = build_model(config, seed).to(device)
        keep = config.variant.keep if config.variant.keep_by == orthogonal.RETRACTION else None
        self.constraint = orthogonal.StiefelConstraint(self.model, keep) if keep else None
        self.optimizers = make_optimizers(self.model, config, device)
        self.with_graph = device.type == "cuda"
        self.graphed: GraphedStep | None = None  # set by the first step on a GPU
        self.sampler = Batches(len(self.data.train_labels), config.train)
        self.steps = config.train.epochs * self.sampler.steps
        if config.train.warmup_steps >= self.steps:
            raise UserError(
                f"train.warmup_steps {config.train.warmup_steps} must be less than the {self.steps} steps of the run."
            )
        has_schedule = config.train.warmup_steps > 0 or config.train.schedule != "constant"
        self.rate_factor = torch.ones((), device=device) if has_schedule else None  # a CUDA graph would freeze a float
        self.progress = Progress()

    def run(self, observer: Observer) -> None:
        """Trains from the current step to the end of the last epoch, or until the run diverges.

        Raises:
            UserError: the loss of the initial model is not finite.
        """
        progress = self.progress
        if not progress.history:
            few = len(self.data.test_labels)  # the evaluation at step 0 uses as many training images as test images
            train = evaluate_split(self.model, self.data.train_images.first(few), self.data.train_labels[:few])
            self._add_point(0.0, train)
            if progress.diverged:
                raise UserError(
                    "the loss is not finite before the first step, so the model cannot train: write smaller values under "
                    "init or model in params.yaml."
                )
            observer.on_evaluation()
        while progress.epoch < self.config.train.epochs and not progress.diverged:
            self._run_epoch(observer)

    def _run_epoch(self, observer: Observer) -> None:
        progress, total = self.progress, _Total(self.device)
        done = progress.step - progress.epoch * self.sampler.steps  # steps of this epoch that an interrupted process took
        for i, (images, labels) in enumerate(self.batches(progress.epoch, done), done + 1):
            total.add(*self.step(images, labels), len(labels))
            observer.on_step(len(labels))
            if i in self.sampler.points:
                train = total.mean()  # `mean` copies the sums to the CPU, and so waits for the device
                total = _Total(self.device)
                observer.on_interval()
                self._add_point(progress.epoch + i / self.sampler.steps, train)
                observer.on_evaluation()
                if progress.diverged:
                    return
        progress.epoch += 1

    def _add_point(self, epoch: float, train: tuple[float, float]) -> None:
        """Evaluates the model on the test set, and extends the history. `train` is the mean training loss and accuracy."""
        test = evaluate_split(self.model, self.data.test_images, self.data.test_labels)
        self.progress.history.append(dict(zip(HISTORY_COLUMNS, (self.progress.step, epoch, *train, *test), strict=True)))
        self.progress.diverged = not (math.isfinite(train[0]) and math.isfinite(test[0]))

    def batches(self, epoch: int, done: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the images and labels of each step of an epoch, but skips the first `done` steps."""
        order = self.sampler.order(self.seed, epoch).to(self.device)
        for batch in order.split(self.config.train.batch_size)[done : self.sampler.steps]:
            yield self.data.train_images[batch], self.data.train_labels[batch]

    def step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Takes a training step. Returns the loss and the number of correct predictions before the update.

        With a CUDA graph, the next step overwrites the two returned tensors.
        """
        self.progress.step += 1
        if self.rate_factor is not None:
            self.rate_factor.fill_(rate_factor(self.config.train, self.progress.step, self.steps))
        if self.with_graph and not self.graphed and len(labels) == self.config.train.batch_size:
            self._record_graph(images, labels)
        if self.graphed and self.graphed.images.shape == images.shape:
            loss, correct = self.graphed(images, labels)
            return loss, correct
        return self.eager_step(images, labels)

    def _record_graph(self, images: Tensor, labels: Tensor) -> None:
        try:
            self.graphed = GraphedStep(self.eager_step, self.model, self.optimizers, images, labels)
        except RuntimeError as error:
            self.with_graph = False
            reason = str(error).partition("\n")[0]
            print(f"warning: the step runs without a CUDA graph, and so more slowly ({reason}).", file=sys.stderr)

    def eager_step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Takes a training step without a CUDA graph. Returns the cross-entropy and the number of correct predictions."""
        variant = self.config.variant
        if variant.penalty and variant.penalty_weight is not None:
            logits, penalty = with_penalty(self.model, images, variant.penalty)
            loss = F.cross_entropy(logits, labels)
            whole = loss + variant.penalty_weight * penalty
        else:
            logits = self.model(images)
            whole = loss = F.cross_entropy(logits, labels)
        self.model.zero_grad()
        whole.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip_grad_norm)
        with self.constraint.project_step() if self.constraint else nullcontext(), self._scheduled():
            for optimizer in self.optimizers:
                optimizer.step()
        return loss.detach(), (logits.detach().argmax(1) == labels).sum()

    @contextmanager
    def _scheduled(self) -> Iterator[None]:
        """Scales each parameter update inside the `with` block by the schedule's factor.

        The effect is that of scaling the learning rate, because the updates of AdamW and Muon are proportional to the rate.
        The rate itself cannot be scaled: torch's Muon accepts only a float, which a CUDA graph would record as a constant.
        """
        if self.rate_factor is None:
            yield
            return
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        before = [parameter.clone() for parameter in parameters]
        yield
        for parameter, old in zip(parameters, before, strict=True):
            parameter.copy_(old.lerp(parameter, self.rate_factor))


class Batches:
    """Divides an epoch into steps. `points` is the set of steps after which the model is evaluated."""

    def __init__(self, num_images: int, train: Train) -> None:
        self.num_images = num_images
        self.steps = num_images // train.batch_size if train.drop_last else math.ceil(num_images / train.batch_size)
        if not self.steps:
            raise UserError(
                f"train.batch_size {train.batch_size} is more than the {num_images} images: write a smaller one."
            )
        self.images_per_epoch = min(num_images, self.steps * train.batch_size)
        self.points = {math.ceil(self.steps * k / train.points_per_epoch) for k in range(1, train.points_per_epoch + 1)}

    def order(self, seed: int, epoch: int) -> Tensor:
        """Returns the order of the images. It depends only on seed and epoch, so a checkpoint need not store it."""
        return torch.randperm(self.num_images, generator=random_stream(seed, f"order/{epoch}"))


class _Total:
    """Sums the loss and the correct predictions on the device."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self.correct = torch.zeros((), device=device, dtype=torch.long)
        self.count = 0

    def add(self, loss: Tensor, correct: Tensor, count: int) -> None:
        self.loss += loss * count
        self.correct += correct
        self.count += count

    def mean(self) -> tuple[float, float]:
        """Returns the mean loss and the accuracy."""
        return self.loss.item() / self.count, self.correct.item() / self.count
