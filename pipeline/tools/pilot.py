"""Finds the learning rates of deep models, and α of OSA shaped for depth, in short trainings: `python -m pipeline.tools.pilot`.

They have a seed that no study has, and come before any: the study `depth` takes its rates and α L of OSA from the table that
is written here. What is found at 36 blocks serves at every depth without a search of its own. Killed, the same command goes
on with the training that it was at.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from pipeline.core import files, params, record
from pipeline.core.errors import entry_point
from pipeline.core.params import Overrides, RunConfig
from pipeline.lab import Lab
from pipeline.studies._deep import GUESSING
from pipeline.training import data
from pipeline.training.loop import Training, make_deterministic

TABLE, LOCK = Path("paper_outputs/pilot.csv"), Path(".checkpoints/pilot.lock")
OSA = "osa_shaped"
MODELS = (OSA, "vskipinit", "espa", "softmax_shaped", "vit", "osa_exact")  # what decides most first
ALPHAS, FIRST_ALPHA = (0.1, 0.36, 1.0, 3.0), 0.36  # α L
SEED = 100
LEARNS = 0.01  # by how much a pilot has to end below the loss of a guess, to tell rates apart
COLUMNS = ["model", "learning_rate", "alpha_times_depth", "depth", "steps", "seed", "loss", "seconds_per_step", "key"]

Loss = Callable[[str, float, float], float]  # of a model, a rate and α L


@dataclass(frozen=True)
class Search:
    """How a rate is sought at one depth."""

    rates: tuple[float, ...]  # ascending
    first: float  # from which on
    steps: int  # of each training
    last: int  # of these, whose mean loss counts


DEPTH = 36  # whose search serves where there is no other
SEARCHES = {
    DEPTH: Search((3e-5, 1e-4, 3e-4), 1e-4, 200, 50),
    72: Search((1e-5, 3e-5, 1e-4), 3e-5, 100, 25),  # lower rates, and the same cost: a step takes twice as long
}


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tools.pilot", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--depth", nargs="+", type=int, choices=SEARCHES, default=list(SEARCHES), help="blocks")
    chosen = parser.parse_args(arguments)
    make_deterministic()
    lab = Lab("pilot", params.load(), params.load_paper())
    for depth in chosen.depth:
        pilot = Pilot(lab, depth, SEARCHES[depth])
        for model in chosen.only:
            search(model, SEARCHES[depth], pilot.loss)


def search(model: str, by: Search, loss: Loss) -> tuple[float, float]:
    """The rate of a model, and of OSA α L with that rate; of the others it means nothing."""
    rate = valley(by.rates, by.first, lambda rate: loss(model, rate, FIRST_ALPHA))
    alpha = valley(ALPHAS, FIRST_ALPHA, lambda alpha: loss(model, rate, alpha)) if model == OSA else FIRST_ALPHA
    return rate, alpha


def valley(grid: Sequence[float], start: float, loss: Callable[[float], float]) -> float:
    """Where an ascending grid has its least loss, if it has one valley: from `start` up, or else down, while it falls."""
    best, least = grid.index(start), loss(start)
    for step in (1, -1):
        while 0 <= best + step < len(grid) and (found := loss(grid[best + step])) < least:
            best, least = best + step, found
    return grid[best]


def found(model: str, usual: float, depth: int = DEPTH) -> tuple[float, float] | None:
    """What the committed table says of a model: its rate, and α L; None where a search is not over, or all diverge.

    Where no rate learns, the rate is the `usual` one.
    """
    depth = searched(depth)
    rows = tried(depth).fillna({"alpha_times_depth": FIRST_ALPHA})
    rows = rows.set_index(["model", "learning_rate", "alpha_times_depth"])["loss"].to_dict()
    try:
        rate, alpha = search(model, SEARCHES[depth], lambda *cell: finite(rows[cell]))
    except KeyError:
        return None
    loss = rows[model, rate, alpha]
    if not math.isfinite(loss):
        return None
    return (rate, alpha) if learns(loss) else (usual, FIRST_ALPHA)


def below(rate: float, depth: int = DEPTH) -> float | None:
    """The next lower rate of the search at a depth; None where there is none."""
    return max((each for each in SEARCHES[searched(depth)].rates if each < rate), default=None)


def searched(depth: int) -> int:
    """The depth whose search serves a depth: its own, if it has one."""
    return depth if depth in SEARCHES else DEPTH


def learns(loss: float) -> bool:
    """Whether a training of the pilot ended below the loss of a guess, and by more than rounding and the batches."""
    return loss < GUESSING - LEARNS


def tried(depth: int = DEPTH) -> pd.DataFrame:
    """The trainings of the table that the search at a depth is made of."""
    rows = read()
    return rows[(rows["depth"] == depth) & (rows["steps"] == SEARCHES[depth].steps) & (rows["seed"] == SEED)]


def read() -> pd.DataFrame:
    return files.read_csv(TABLE) if TABLE.exists() else pd.DataFrame(columns=COLUMNS)


def finite(loss: float) -> float:
    """A loss that is not finite is worse than any other."""
    return loss if math.isfinite(loss) else math.inf


class Pilot:
    """The trainings of the table, and new ones as a search asks for them."""

    def __init__(self, lab: Lab, depth: int, search: Search) -> None:
        self.lab, self.depth, self.steps, self.last = lab, depth, search.steps, search.last

    def loss(self, model: str, rate: float, alpha: float) -> float:
        """Mean train loss of the last steps of the training that is there, if it is of today's code, or of a new one."""
        from filelock import FileLock  # which trainings, that import this file, do without

        overrides: Overrides = {"model": {"depth": self.depth}, "train": {"learning_rate": rate}}
        config = self.lab.config(model, overrides | ({"variant": {"alpha_times_depth": alpha}} if model == OSA else {}))
        key = self.key(config)
        if key not in set(read()["key"]):
            total = config.variant.alpha_times_depth  # None of what has no α
            values = (model, rate, total, self.depth, self.steps, SEED, *self.train(config), key)
            LOCK.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(LOCK):  # what others wrote meanwhile stays
                rows = [*read().to_dict("records"), dict(zip(COLUMNS, values, strict=True))]
                files.write_csv(TABLE, pd.DataFrame(rows).drop_duplicates(COLUMNS[:6], keep="last"))
        return finite(read().set_index("key")["loss"][key])

    def key(self, config: RunConfig) -> str:
        """What a training is known by: configuration, data, code, machine and length."""
        device = record.default_device()
        data_sha256 = data.digest(data.folder(config.data.source))
        key = record.run_key(config.model_dump(), SEED, data_sha256, record.imported_code_sha256(device.type), device)
        return f"{key[:12]}/{self.steps}/{self.last}"

    def train(self, config: RunConfig) -> tuple[float, float]:
        """Mean loss of the last steps, and seconds a step."""
        training, losses = Training(config, SEED, record.default_device()), []
        name = f"{config.variant.attention} {config.train.learning_rate:g} {config.variant.alpha_times_depth or ''}"
        start = time.perf_counter()
        with tqdm(training.batches(0), total=self.steps, desc=name, unit="step", mininterval=5) as bar:
            for images, labels in bar:
                losses.append(training.step(images, labels)[0].item())
                if len(losses) == self.steps or not math.isfinite(losses[-1]):
                    break
        last = losses[-self.last :]
        return sum(last) / len(last), (time.perf_counter() - start) / len(losses)


if __name__ == "__main__":
    main()
