"""What the JSON files of a run hold, as far as other stages read it; whatever else is in them is let be.

Beyond types: numbers are finite where a run finished, shares lie within [0, 1], and what can be had from other numbers of
the same file agrees with them.
"""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from pipeline.core import params
from pipeline.core.files import rounded
from pipeline.core.params import NonNegativeFloat, Overrides, PositiveFloat, PositiveInt, Section, Seed

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # SHA-256
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


class Content(Section):
    model_config = ConfigDict(extra="ignore")


class Metrics(Content):
    diverged: bool
    diverged_at_step: Count | None
    steps: Count
    num_parameters: PositiveInt
    train_loss: NonNegativeFloat | None
    test_loss: NonNegativeFloat | None
    train_accuracy: Share
    test_accuracy: Share

    @model_validator(mode="after")
    def _finished_or_diverged(self):
        if self.diverged != (self.diverged_at_step is not None):
            raise ValueError("diverged and diverged_at_step contradict each other")
        if not self.diverged and None in (self.train_loss, self.test_loss):
            raise ValueError("a loss of a run that did not diverge is empty")
        return self


class Environment(Content):
    device: str
    device_name: str
    num_threads: PositiveInt
    python: str
    torch: str
    git_commit: str | None
    git_dirty: bool | None


class Record(Content):
    study: str
    name: str
    variant: str
    overrides: Overrides
    seed: Seed
    status: Literal["finished", "diverged"]
    config: dict[str, dict[str, Any]]
    numerics: int
    data_sha256: Digest
    weights_sha256: Digest
    history_sha256: Digest
    metrics_sha256: Digest
    watched_sha256: Digest | None = None
    environment: Environment
    finished_at: str
    seconds: PositiveFloat
    images_per_second: PositiveFloat | None
    resumptions: Count

    @model_validator(mode="after")
    def _named_by_its_overrides(self):
        if self.name != params.run_name(self.variant, self.overrides):
            raise ValueError("name is not that of variant and overrides")
        return self


class PerClass(Content):
    class_: Annotated[int, Field(ge=0, alias="class")]
    images: PositiveInt
    accuracy: Share


class Evaluation(Content):
    """Of a run that diverged everything but the digests is empty."""

    metrics_sha256: Digest
    weights_sha256: Digest
    test_loss: NonNegativeFloat | None
    test_accuracy: Share | None
    per_class: list[PerClass]
    confusion: list[list[Count]]
    layers: list[dict[str, float | None]]

    @model_validator(mode="after")
    def _agrees_with_confusion(self):
        if not self.confusion:
            if self.per_class or self.layers or (self.test_loss, self.test_accuracy) != (None, None):
                raise ValueError("confusion is empty, and other measurements are not")
            return self
        if {len(row) for row in self.confusion} != {len(self.confusion)} or not np.any(self.confusion):
            raise ValueError("confusion is no square of counts")
        confusion = np.array(self.confusion)
        if self.test_loss is None or self.test_accuracy != rounded(confusion.trace() / confusion.sum()):
            raise ValueError("test_accuracy is not that of confusion, or test_loss is empty")
        rows = [
            (i, int(n), rounded(hits / n))
            for i, (n, hits) in enumerate(zip(confusion.sum(1), confusion.diagonal(), strict=True))
            if n
        ]
        if rows != [(row.class_, row.images, row.accuracy) for row in self.per_class]:
            raise ValueError("per_class is not that of confusion")
        return self
