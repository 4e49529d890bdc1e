"""`Lab` gives a study its configurations, models, training loops, images, random numbers, and tables of results."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

from osa.modules import OrthogonalSelfAttention
from osa.vit import VisionTransformer
from pipeline.config import params
from pipeline.config.params import FIRST_READING, Overrides, Paper, Params, RunConfig
from pipeline.core import files, provenance
from pipeline.data import idx
from pipeline.results.measures import LAYER_IMAGES, ORTHOGONAL, attention_inputs
from pipeline.results.tables import TABLES
from pipeline.training.loop import Training, build_model, random_stream
from pipeline.training.run import Run

if TYPE_CHECKING:
    import pandas as pd


class Lab:
    """Gives a study its models and runs.

    pipeline/paper.yaml lists interpretations of the paper. A lab follows the interpretation that `reading` names.
    params.yaml chooses only the image data.
    """

    def __init__(self, study: str, settings: Params, paper: Paper, reading: str = FIRST_READING) -> None:
        self.study, self.params, self.paper, self.reading = study, settings, paper, reading
        self._made: dict[str, Any] = {}  # results of `once`, shared with the labs of other studies

    def of(self, study: str, reading: str) -> Lab:
        """Returns the lab of another study. Both labs share the results of `once`."""
        other = copy.copy(self)
        other.study, other.reading = study, reading
        return other

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns the result of `make()`. The labs of all studies share the result and compute it only once per name."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def label(self, variant: str) -> str:
        return self.params.label(variant)

    def config(self, variant: str, overrides: Overrides | None = None) -> RunConfig:
        """Returns a variant's configuration under the study's interpretation of the paper, with `overrides` applied."""
        return params.resolve_recipe(self.params, self.paper, variant, overrides, self.reading)

    def model(self, config: RunConfig, seed: int, dtype: torch.dtype = torch.float32) -> VisionTransformer:
        """Returns the untrained model from which a run with this seed starts. Its weights are drawn in `dtype`."""
        with default_dtype(dtype):
            return build_model(config, seed)

    def training(self, config: RunConfig, seed: int) -> Training:
        """Returns a `Training` that has not taken a step, on the device that a run would use."""
        return Training(config, seed, provenance.default_device())

    def generator(self, seed: int, name: str) -> Generator:
        return random_stream(seed, name)

    def normal(self, seed: int, name: str, *shape: int) -> Tensor:
        """Returns a float64 tensor of standard normal numbers."""
        return torch.randn(shape, generator=self.generator(seed, name), dtype=torch.float64)

    @functools.cache  # noqa: B019  a lab lives as long as its process
    def images(self, pixel_scaling: str = "unit") -> tuple[Tensor, Tensor]:
        """Returns the test images (n, C, H, W) in float64 and their labels (n,)."""
        mnist = idx.read_data(idx.folder(self.params.data.source), pixel_scaling)
        return mnist.test_images[:].double(), mnist.test_labels

    def run(self, variant: str, overrides: Overrides | None = None, seed: int = 0) -> Run:
        """Returns this study's run of a variant with these overrides and this seed. The run may not exist yet."""
        return Run(variant, seed, self.study, overrides or {})

    @functools.cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Returns the tables that the stage `tables` has written, by name."""
        return {path.stem: files.read_csv(path) for path in sorted(TABLES.glob("*.csv"))}


def first_steps(training: Training, steps: int) -> Iterator[dict[str, float]]:
    """Trains for at most `steps` steps and yields a row for each step. Stops after a loss that is not finite.

    step       the number of the step, from 0
    loss       the loss on the step's minibatch, before the step changes the weights
    gradient   ‖∂loss/∂θ‖₂ over all parameters, before clipping
    """
    norms: list[Tensor] = []
    training.with_graph = False  # a replay of a CUDA graph would not run the hooks
    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.double().norm()))
    for step, batch in enumerate(itertools.islice(training.batches(0), steps)):
        norms.clear()
        loss = training.step(*batch)[0].item()
        yield {"step": step, "loss": loss, "gradient": torch.stack(norms).norm().item()}
        if not math.isfinite(loss):
            return


@torch.no_grad()
def initialised_layers(lab: Lab, seed: int) -> list[tuple[dict, OrthogonalSelfAttention, Tensor]]:
    """Initialises each model of `ORTHOGONAL` with this seed, and returns a triple for each attention layer, in float64.

    The triple is (columns, module, input). The columns {"source": variant, "layer": number} identify the layer. The
    input is what the module receives for the first `LAYER_IMAGES` test images, (images, N, d).
    """
    layers: list[tuple[dict, OrthogonalSelfAttention, Tensor]] = []
    for variant in ORTHOGONAL:
        config = lab.config(variant)
        images = lab.images(config.data.pixel_scaling)[0][:LAYER_IMAGES]
        inputs = attention_inputs(lab.model(config, seed).double(), images)
        for number, (attention, x) in enumerate(inputs, 1):
            assert isinstance(attention, OrthogonalSelfAttention)
            layers.append(({"source": variant, "layer": number}, attention.requires_grad_(False), x))
    return layers


@contextmanager
def default_dtype(dtype: torch.dtype):
    """A context in which the parameters of new modules have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
