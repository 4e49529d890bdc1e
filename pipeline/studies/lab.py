"""The bench of a study: a reading of the paper as configurations and models, images, random streams, trainings, tables."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

from osa.modules import OrthogonalSelfAttention
from osa.vit import VisionTransformer
from pipeline.config import params
from pipeline.config.params import FIRST, Overrides, Paper, Params, RunConfig
from pipeline.core import files, provenance
from pipeline.data import idx
from pipeline.results.measures import LAYER_IMAGES, ORTHOGONAL, attention_inputs
from pipeline.training.loop import Training, build_model, random_stream
from pipeline.training.run import Run

if TYPE_CHECKING:
    import pandas as pd

TABLES = Path("paper_outputs/tables")


class Lab:
    """Tools of one study. Models and trainings follow a reading of pipeline/paper.yaml, not what one edits."""

    def __init__(self, study: str, settings: Params, paper: Paper, reading: str = FIRST) -> None:
        self.study, self.params, self.paper, self.reading = study, settings, paper, reading
        self._made: dict[str, Any] = {}  # shared with the labs of other studies

    def of(self, study: str, reading: str) -> Lab:
        """The lab of another study, with the same tables and images."""
        other = copy.copy(self)
        other.study, other.reading = study, reading
        return other

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what `make` gave when this lab, or a lab of another study, first asked for this name."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def label(self, variant: str) -> str:
        """The label of a variant."""
        return self.params.label(variant)

    def config(self, variant: str, overrides: Overrides | None = None) -> RunConfig:
        """The configuration of a variant by the study's reading, with `overrides` in place."""
        return params.resolve_recipe(self.params, self.paper, variant, overrides, self.reading)

    def model(self, config: RunConfig, seed: int, dtype: torch.dtype = torch.float32) -> VisionTransformer:
        """The model as a training with this seed begins; of another dtype as drawn in it, and not rounded to float32."""
        with default_dtype(dtype):
            return build_model(config, seed)

    def training(self, config: RunConfig, seed: int) -> Training:
        """A training before its first step, on the device that a run would take."""
        return Training(config, seed, provenance.default_device())

    def generator(self, seed: int, name: str) -> Generator:
        """A random stream of its own for each name."""
        return random_stream(seed, name)

    def normal(self, seed: int, name: str, *shape: int) -> Tensor:
        """Standard normal numbers from the stream of that name, float64."""
        return torch.randn(shape, generator=self.generator(seed, name), dtype=torch.float64)

    @functools.cache  # noqa: B019  a lab lives as long as its process
    def images(self, pixel_scaling: str = "unit") -> tuple[Tensor, Tensor]:
        """The test images, (n, C, H, W) in float64, and their labels, (n,)."""
        mnist = idx.load(idx.folder(self.params.data.source), pixel_scaling)
        return mnist.test_images[:].double(), mnist.test_labels

    def run(self, variant: str, overrides: Overrides | None = None, seed: int = 0) -> Run:
        """The run of this study with that identity, whether it is there or not."""
        return Run(variant, seed, self.study, overrides or {})

    @functools.cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Output of the stage `tables`: runs, summary, curves, histories, layers, per_class, confusion, mistakes."""
        return {path.stem: files.read_csv(path) for path in sorted(TABLES.glob("*.csv"))}


def first_steps(training: Training, steps: int) -> Iterator[dict[str, float]]:
    """The first steps of a training, from the draws and over the images of a whole one, up to a loss that is not finite.

    loss       of the step's minibatch, before the step
    gradient   ‖∂loss/∂θ‖₂ over all parameters, before it is clipped
    """
    norms: list[Tensor] = []
    training.with_graph = False  # in whose replay no hook runs
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
    """The attention layers of the orthogonal models as a training with this seed begins, in float64.

    Returns:
        For each layer what names it ({"source": variant, "layer": from 1 on}), the module, and what enters it for the first
        `LAYER_IMAGES` test images, (images, N, d).
    """
    layers = []
    for variant in ORTHOGONAL:
        config = lab.config(variant)
        images = lab.images(config.data.pixel_scaling)[0][:LAYER_IMAGES]
        inputs = attention_inputs(lab.model(config, seed).double(), images)
        for number, (attention, x) in enumerate(inputs, 1):
            layers.append(({"source": variant, "layer": number}, attention.requires_grad_(False), x))
    return layers


@contextmanager
def default_dtype(dtype: torch.dtype):
    """Gives new modules this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
