"""What a study works with: the paper's recipe as configurations and models, images, random streams, trainings, tables."""

import functools
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from torch import Generator, Tensor

from osa.vit import VisionTransformer
from pipeline.core import files, params
from pipeline.core.params import Overrides, Paper, Params, RunConfig
from pipeline.runs import Run
from pipeline.training import data
from pipeline.training.loop import build_model, random_stream

TABLES = Path("paper_outputs/tables")


class Lab:
    """The bench of one study. Models and trainings follow the recipe of pipeline/paper.yaml, not what one edits."""

    def __init__(self, study: str, settings: Params, paper: Paper) -> None:
        self.study, self.params, self.paper = study, settings, paper

    def label(self, variant: str) -> str:
        """What a reader calls a variant."""
        return self.params.label(variant)

    def config(self, variant: str, overrides: Overrides | None = None) -> RunConfig:
        """The recipe's configuration of a variant, with `overrides` in place."""
        return params.resolve_recipe(self.params, self.paper, variant, overrides)

    def model(self, config: RunConfig, seed: int, dtype: torch.dtype = torch.float32) -> VisionTransformer:
        """The model as a training with this seed begins; of another dtype as drawn in it, and not rounded to float32."""
        with default_dtype(dtype):
            return build_model(config, seed)

    def generator(self, seed: int, name: str) -> Generator:
        """A random stream of its own for each name."""
        return random_stream(seed, name)

    def normal(self, seed: int, name: str, *shape: int) -> Tensor:
        """Standard normal numbers from the stream of that name, float64."""
        return torch.randn(shape, generator=self.generator(seed, name), dtype=torch.float64)

    @functools.cache  # noqa: B019  a lab lives as long as its process
    def images(self, pixel_scaling: str = "unit") -> tuple[Tensor, Tensor]:
        """The test images, (n, C, H, W) in float64, and their labels, (n,)."""
        mnist = data.load(data.folder(self.params.data.source), pixel_scaling)
        return mnist.test_images.double(), mnist.test_labels

    def run(self, variant: str, overrides: Overrides | None = None, seed: int = 0) -> Run:
        """The run of this study with that identity, whether it is there or not."""
        return Run(variant, seed, self.study, overrides or {})

    @functools.cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """What the stage `tables` made of Table 2's runs: runs, summary, curves, histories, layers, per_class, confusion."""
        return {path.stem: files.read_csv(path) for path in sorted(TABLES.glob("*.csv"))}


@contextmanager
def default_dtype(dtype: torch.dtype):
    """Modules made inside have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
