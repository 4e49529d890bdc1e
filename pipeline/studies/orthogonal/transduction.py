"""Transduction: do orthogonality penalties help a Transformer on sequences, as Zhang et al. 2021 claim?

Their translation data is not available to us. Instead, an encoder with skips and LN learns to reverse or sort a string of
symbols, with one output per position. A run trains for a few hundred steps and is tested on new strings.
"""

import itertools
from typing import Annotated

import pandas as pd
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from osa.constrained.penalties import with_penalty
from osa.init import truncated_normal_
from pipeline.config.params import Name, NonNegativeFloat, PositiveInt, Section, Seeds
from pipeline.statistics.claims import Results, read_claims
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab
from pipeline.studies.orthogonal import CLAIMS_FILE
from pipeline.training.loop import make_optimizers

TASKS = {"reverse": lambda strings: strings.flip(1), "sort": lambda strings: strings.sort(dim=1).values}
SYMBOLS, TESTED = 10, 1000
CLAIM = "penalties_boost_transduction"


class Penalised(Section):
    penalty: str | None = None  # name of a penalty in osa.constrained.penalties
    weight: NonNegativeFloat = 0.0


class Settings(Section):
    reading: Name  # a key of `readings` in pipeline/paper.yaml
    seeds: Seeds
    length: PositiveInt
    steps: PositiveInt
    models: Annotated[dict[str, Penalised], Field(min_length=1)]


class Encoder(nn.Module):
    """A Transformer encoder built from the paper's ViT blocks: strings of symbols (B, N) → logits (B, N, symbols)."""

    def __init__(self, blocks: nn.ModuleList, embed_dim: int, length: int, generator: torch.Generator) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = blocks, nn.LayerNorm(embed_dim), nn.Linear(embed_dim, SYMBOLS)
        self.symbols, self.positions = (nn.Parameter(torch.empty(rows, embed_dim)) for rows in (SYMBOLS, length))
        for parameter in (self.symbols, self.positions, self.head.weight):
            truncated_normal_(parameter, 0.02, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, strings: Tensor) -> Tensor:
        x = self.symbols[strings] + self.positions  # (B, N, d)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def measure(settings: Settings, lab: Lab) -> Tables:
    """Returns the train loss, and the per-symbol accuracy on new strings, for each task, model and seed."""
    rows = []
    for task, (name, model), seed in itertools.product(TASKS, settings.models.items(), settings.seeds):
        identity = {"name": f"{task}_{name}", "seed": seed, "status": "finished"}
        rows.append(identity | fit(settings, task, model, seed, lab))
    return {"runs": pd.DataFrame(rows)}


def fit(settings: Settings, task: str, chosen: Penalised, seed: int, lab: Lab) -> dict[str, float]:
    """Trains a model. Returns the mean loss over the last tenth of the steps, and the per-symbol accuracy on new strings."""
    config, draw = lab.config("vit"), lab.generator(seed, f"transduction/{task}")
    blocks, width = lab.model(config, seed).blocks, config.model.embed_dim
    model = Encoder(blocks, width, settings.length, lab.generator(seed, "transduction/init"))
    (optimizer,) = make_optimizers(model, config, torch.device("cpu"))
    losses = []
    for _ in range(settings.steps):
        strings = torch.randint(SYMBOLS, (config.train.batch_size, settings.length), generator=draw)
        logits, penalty = with_penalty(model, strings, chosen.penalty) if chosen.penalty else (model(strings), 0.0)
        loss = F.cross_entropy(logits.flatten(0, 1), TASKS[task](strings).flatten())
        model.zero_grad()
        (loss + chosen.weight * penalty).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, settings.steps // 10) :]
    strings = torch.randint(SYMBOLS, (TESTED, settings.length), generator=lab.generator(seed, f"transduction/{task}/test"))
    with torch.no_grad():
        right = (model(strings).argmax(-1) == TASKS[task](strings)).double().mean().item()
    return {"train_loss": sum(last) / len(last), "test_accuracy": right}


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    results, rows = Results(tables), []
    for task, (name, model) in itertools.product(TASKS, settings.models.items()):
        key = f"{task}_{name}"
        numbers = {"loss": summary_of(results.losses(key)), "accuracy": summary_of(results.accuracies(key))}
        rows.append({"task": task} | model.model_dump() | numbers)
    claim = read_claims(CLAIMS_FILE)[CLAIM]
    return {"rows": rows, "claim": claim.judge(results), "steps": settings.steps, "length": settings.length}


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
