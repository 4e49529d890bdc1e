"""A whole training step of each model of the paper, against the straightforward script: `python -m benchmarks.step`.

Both sides take the same steps in one process, in rounds of shuffled order: a batch of the true size, forward, backward,
clipping, AdamW. Ours is what `pipeline.train` runs, on CUDA beside it without its graph; theirs is
`benchmarks.straightforward` behind a DataLoader over torchvision's MNIST, in torch's default settings, reading the loss
after each step as such scripts do. Both start from the same weights: the initial ones of seed 0 and, where the run of seed 0
has been trained here, its last ones, whose ‖S‖ is larger. Writes step.csv, .json, .svg and .png to
paper_outputs/benchmarks/HARDWARE/.
"""

import argparse
import gzip
import math
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import matplotlib
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from tqdm import tqdm

import osa
from benchmarks import results, straightforward
from pipeline import data, figures, params, tally, train
from pipeline.errors import entry_point
from pipeline.figures import INK, PALETTE
from pipeline.params import RunConfig

SEED = 0
EXACT = "osa_exact"  # ours, not in the paper
OURS, EAGER, COMPILED, THEIRS = "ours", "ours, eager", "ours, compiled", "straightforward"
INITIALISED, TRAINED = "initialised", "trained"
COMPILABLE = ("vit", EXACT)
KEYS = ["model", "code", "weights"]
LOOKS = {OURS: (PALETTE[0], "o"), EAGER: (PALETTE[1], "v"), COMPILED: (PALETTE[5], "D"), THEIRS: (PALETTE[4], "s")}

Step = Callable[[], object]


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="rounds, in each of which every model has its turn (9)")
    parser.add_argument("--sample-seconds", type=float, default=0.5, help="a turn repeats its step for as long (0.5)")
    parser.add_argument("--compile", action="store_true", help=f"also {' and '.join(COMPILABLE)} under torch.compile")
    options = parser.parse_args(arguments)
    train.make_deterministic()
    device, settings = results.default_device(), params.load()
    with tempfile.TemporaryDirectory() as scratch:
        unpack(Path(scratch))
        steps, compile_seconds = prepare(compared(settings), settings, Path(scratch), options.compile, device)
        samples = tally.sample_seconds(steps, options.repeats, options.sample_seconds, random.Random(SEED), device)
    rows = [
        dict(zip(KEYS, key, strict=True))
        | results.quantiles(seconds)
        | {"compile_seconds": compile_seconds.get(key, math.nan)}
        for key, seconds in samples.items()
    ]
    table = pd.DataFrame(rows)
    facts = {"environment": results.environment(device), "options": vars(options), "ratios": ratios(table, settings)}
    facts["batch_size"] = settings.train.batch_size
    folder = results.write("step", table, facts, draw(table, settings.report.labels))
    print(table.to_string(index=False), f"{folder}/step.csv", sep="\n")


def compared(settings: params.Params) -> list[str]:
    """The models of Table 2 that are run, and ours."""
    return [*(variant for variant in settings.run.variants if variant in settings.paper.table_2), EXACT]


def prepare(
    variants: list[str], settings: params.Params, scratch: Path, with_compiled: bool, device: torch.device
) -> tuple[dict[tuple[str, str, str], Step], dict[tuple[str, str, str], float]]:
    """The steps by model, code and weights, and the seconds of the first step of the compiled ones."""
    steps, compile_seconds, loaded = {}, {}, {}
    for variant in tqdm(variants, desc="prepare", disable=None):
        config = with_whole_batches(params.resolve(settings, variant))
        for weights in (INITIALISED, TRAINED):
            if weights == TRAINED and not train.weights_path(variant, SEED).exists():
                continue
            ours = load(variant, weights, config, loaded, device)
            steps[variant, OURS, weights] = our_step(ours)
            if ours.with_graph:
                eager = load(variant, weights, config, loaded, device)
                eager.with_graph = False
                steps[variant, EAGER, weights] = our_step(eager)
            if variant != EXACT:
                steps[variant, THEIRS, weights] = their_step(ours.model, config, scratch, device)
            if with_compiled and variant in COMPILABLE:
                key = variant, COMPILED, weights
                compiled = load(variant, weights, config, loaded, device)
                compiled.model, compiled.with_graph = torch.compile(compiled.model), False
                steps[key] = our_step(compiled)
                compile_seconds[key] = tally.seconds(steps[key], 1, device)
    return steps, compile_seconds


def load(
    variant: str, weights: str, config: RunConfig, loaded: dict[str, data.Data], device: torch.device
) -> train.Training:
    """A training at its start or with the weights of its end; all share one copy of the data, by pixel scaling."""
    training = train.Training(variant, SEED, config, device)
    training.data = loaded.setdefault(config.data.pixel_scaling, training.data)
    if weights == TRAINED:
        path = train.weights_path(variant, SEED)
        training.model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    return training


def with_whole_batches(config: RunConfig) -> RunConfig:
    """The same without the smaller last batch of an epoch: every step is to be of the same size."""
    return config.model_copy(update={"train": config.train.model_copy(update={"drop_last": True})})


def our_step(training: train.Training) -> Step:
    """One step of pipeline.train after the other, through the epochs."""
    keep_weights(training.optimizer)
    batches = endless(training.batches)
    return in_mode(True, lambda: training.step(*next(batches)))


def their_step(ours: osa.VisionTransformer, config: RunConfig, scratch: Path, device: torch.device) -> Step:
    """The same of the straightforward script, from the same weights."""
    mnist = datasets.MNIST(str(scratch), train=True, transform=transforms.ToTensor())
    loader = DataLoader(mnist, batch_size=config.train.batch_size, shuffle=True, drop_last=True)
    batches = endless(lambda epoch: loader)
    model = straightforward.build(config).to(device)
    straightforward.load_weights(model, ours)
    settings = config.train
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=tuple(settings.betas),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    keep_weights(optimizer)

    def step() -> float:
        images, labels = (tensor.to(device) for tensor in next(batches))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad_norm)
        optimizer.step()
        return loss.item()

    return in_mode(False, step)


def keep_weights(optimizer: torch.optim.Optimizer) -> None:
    """Learning rate 0: the same arithmetic, and after any number of steps still the weights that the row names."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0


def in_mode(deterministic: bool, step: Step) -> Step:
    """`step` in torch's deterministic mode, in which pipeline.train runs, or without it, as a script does by default."""

    def call() -> object:
        torch.use_deterministic_algorithms(deterministic)
        return step()

    return call


def endless(epoch_of: Callable[[int], Iterable]) -> Iterator:
    """The batches of epoch 0, 1, 2, …"""
    epoch = 0
    while True:
        yield from epoch_of(epoch)
        epoch += 1


def unpack(folder: Path) -> None:
    """The files of the fetch stage where torchvision looks for them."""
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for path in Path(data.FOLDER).glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))


def ratios(table: pd.DataFrame, settings: params.Params) -> dict:
    """By weights: each OSA model over ViT, both ours, and straightforward over ours for each model and for their sums.

    Where ours is a graph, eager over it too. A ratio of which not all models have been measured is absent.
    """
    paper = list(settings.paper.table_2)
    orthogonal = [name for name, variant in settings.variants.items() if variant.attention == "orthogonal"]
    groups = {name: [name] for name in paper}
    groups |= {"the paper's OSA models": [name for name in paper if name in orthogonal], "all models of the paper": paper}
    result = {}
    for weights, rows in table.groupby("weights", sort=False):
        seconds = rows.pivot(index="model", columns="code", values="seconds")
        ours = seconds[OURS]
        whole = {name: members for name, members in groups.items() if set(members) <= set(seconds.index)}
        result[weights] = {
            "over_vit": {name: ours[name] / ours["vit"] for name in orthogonal if {name, "vit"} <= set(ours.index)},
            "straightforward_over_ours": {
                name: seconds.loc[members, THEIRS].sum() / ours[members].sum() for name, members in whole.items()
            },
        }
        if EAGER in seconds:
            result[weights]["eager_over_ours"] = (seconds[EAGER] / ours).dropna().to_dict()
    return result


def draw(table: pd.DataFrame, labels: dict[str, str]) -> Figure:
    """Milliseconds of a step, a line per model: filled with initial weights, hollow with trained ones."""
    models = list(dict.fromkeys(table["model"]))
    kinds = list(dict.fromkeys(table["weights"]))
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for (code, weights), rows in table.groupby(["code", "weights"], sort=False):
            colour, marker = LOOKS[code]
            place = [models.index(model) + 0.22 * (kinds.index(weights) - (len(kinds) - 1) / 2) for model in rows["model"]]
            ms = 1000 * rows[list(results.QUANTILES)]
            axes.errorbar(
                ms["seconds"],
                place,
                xerr=[ms["seconds"] - ms["p10"], ms["p90"] - ms["seconds"]],
                fmt=marker,
                color=colour,
                markerfacecolor=colour if weights == INITIALISED else "white",
                markersize=5,
                linewidth=1,
                label=f"{code}, {weights}",
            )
        axes.set(xlabel="Training step, ms (median, 10 % to 90 %)", xlim=(0, None))
        axes.set_yticks(range(len(models)), [labels.get(model, model) for model in models])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_color(INK)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        return figure


if __name__ == "__main__":
    main()
