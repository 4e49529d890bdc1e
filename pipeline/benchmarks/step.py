"""Times a training step of each model, in our code and in straightforward code: `python -m pipeline benchmarks.step`.

Our code is the step of `pipeline.training`. On CUDA it is timed with a CUDA graph and without one. The straightforward code
trains the models of straightforward.py with a DataLoader over torchvision's MNIST and torch's default settings, and reads
the loss after each step. All steps run in one process. Our code and the straightforward code start from the same weights:
initial weights, and trained weights if they exist. Each round times the steps and a large matrix product in random order.
The product shows the machine's speed. The results go to step.csv and step.json in paper_outputs/benchmarks/HARDWARE/.
"""

import gzip
import itertools
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import osa
from pipeline.benchmarks import cost, measurements, straightforward
from pipeline.benchmarks.measurements import ALL_MODELS, COMPILED, EAGER, INITIALISED, OSA_MODELS, OURS, THEIRS, TRAINED
from pipeline.config import params
from pipeline.config.params import Params, RunConfig
from pipeline.core import provenance
from pipeline.core.errors import entry_point
from pipeline.core.files import rounded
from pipeline.data import idx
from pipeline.training.loop import Training, configure_torch
from pipeline.training.run import Run

SEED = 10  # a seed of Table 2, so that the trained weights are in git
SAMPLE_SECONDS = 0.5  # minimum duration of a sample; a shorter step is repeated
EXACT = "osa_exact"  # our model, which is not in the paper
COMPILABLE = ("vit", EXACT)
KEYS = ["model", "code", "weights"]  # columns that identify a row; `weights` is INITIALISED or TRAINED
Key = tuple[str, str, str]
PEAK: Key = "product", "", ""  # key of the matrix product that measures the machine's speed
PEAK_SIZE = 2048  # size n of the two n×n matrices in this product

StepCall = Callable[[], object]


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = measurements.parser("step", __doc__)
    parser.add_argument("--compile", action="store_true", help=f"also time {' and '.join(COMPILABLE)} under torch.compile")
    options = parser.parse_args(arguments)
    configure_torch()
    device, settings = provenance.default_device(), params.load()
    with tempfile.TemporaryDirectory() as scratch:
        unpack(settings.data.source, Path(scratch))
        table_2 = params.load_paper().table_2
        models = [*(variant for variant in settings.run.variants if variant in table_2), EXACT]
        steps, compile_seconds = prepare(models, settings, Path(scratch), options.compile, device)
        operations = count_operations(steps, device)
        a = torch.randn(PEAK_SIZE, PEAK_SIZE, device=device)
        calls: dict[Key, StepCall] = steps | {PEAK: lambda: a @ a}
        samples = cost.sample_seconds(calls, options.repeats, SAMPLE_SECONDS, random.Random(SEED), device)
    peak = {"tflops": rounded(2 * PEAK_SIZE**3 / min(samples.pop(PEAK)) / 1e12)}
    rows = [(*key, *measurements.quantiles(seconds).values()) for key, seconds in samples.items()]
    table = pd.DataFrame(rows, columns=[*KEYS, *measurements.QUANTILES])
    table["compile_seconds"] = [compile_seconds.get(key, math.nan) for key in samples]
    table["tflops"] = table["seconds"].rdiv([operations[key] / 1e12 for key in samples])
    facts = {"batch_size": settings.train.batch_size, "peak": peak, "ratios": ratios(table, settings)}
    measurements.write_measurements("step", table, device, options, **facts)


def prepare(
    variants: list[str], settings: Params, scratch: Path, with_compiled: bool, device: torch.device
) -> tuple[dict[Key, StepCall], dict[Key, float]]:
    """Returns two dictionaries keyed by `KEYS`: the steps, and the seconds that each compiled model's first step takes."""
    steps: dict[Key, StepCall] = {}
    compile_seconds: dict[Key, float] = {}
    loaded: dict[str, idx.DataSet] = {}
    for variant in tqdm(variants, desc="prepare", disable=None):
        config = with_whole_batches(params.resolve(settings, variant))
        for weights in (INITIALISED, TRAINED):
            if weights == TRAINED and not Run(variant, SEED).weights.exists():
                continue
            ours = training_from(variant, weights, config, loaded, device)
            steps[variant, OURS, weights] = our_step(ours)
            if ours.with_graph:
                eager = training_from(variant, weights, config, loaded, device)
                eager.with_graph = False
                steps[variant, EAGER, weights] = our_step(eager)
            if variant != EXACT:
                steps[variant, THEIRS, weights] = their_step(ours.model, config, scratch, device)
            if with_compiled and variant in COMPILABLE:
                key = variant, COMPILED, weights
                compiled = training_from(variant, weights, config, loaded, device)
                compiled.model.compile()
                compiled.with_graph = False
                steps[key] = our_step(compiled)
                compile_seconds[key] = cost.seconds(steps[key], 1, device)
    return steps, compile_seconds


def count_operations(steps: dict[Key, StepCall], device: torch.device) -> dict[Key, int]:
    """Returns the floating-point operations of each step's matrix products.

    CUDA graphs and compiled code hide their products, so for them we count the products of our eager code.
    """
    eager = {(model, weights) for model, code, weights in steps if code == EAGER}
    counted = {}
    for model, code, weights in steps:
        as_code = THEIRS if code == THEIRS else EAGER if (model, weights) in eager else OURS
        counted[model, code, weights] = 2 * cost.cost(steps[model, as_code, weights], device).multiply_adds
    return counted


def training_from(
    variant: str, weights: str, config: RunConfig, loaded: dict[str, idx.DataSet], device: torch.device
) -> Training:
    """Returns a `Training` with initial or trained weights. `loaded` caches the data, keyed by pixel scaling."""
    training = Training(config, SEED, device)
    training.data = loaded.setdefault(config.data.pixel_scaling, training.data)
    if weights == TRAINED:
        training.model.load_state_dict(Run(variant, SEED).load_model(config).state_dict())
    return training


def with_whole_batches(config: RunConfig) -> RunConfig:
    """Returns a configuration that drops the smaller last batch of each epoch, so that all batches have the same size."""
    return config.model_copy(update={"train": config.train.model_copy(update={"drop_last": True})})


def our_step(training: Training) -> StepCall:
    """Returns a function that performs the next step of a training run, epoch after epoch."""
    keep_weights(*training.optimizers)
    batches = itertools.chain.from_iterable(map(training.batches, itertools.count()))
    return in_mode(True, lambda: training.step(*next(batches)))


def their_step(ours: osa.VisionTransformer, config: RunConfig, scratch: Path, device: torch.device) -> StepCall:
    """Returns a function that performs a training step in straightforward PyTorch, on a model with the weights of `ours`."""
    from torchvision import datasets, transforms  # takes seconds to import

    mnist = datasets.MNIST(str(scratch), train=True, transform=transforms.ToTensor())
    loader = DataLoader(mnist, batch_size=config.train.batch_size, shuffle=True, drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    model = straightforward.build(config).to(device)
    straightforward.load_weights(model, ours)
    settings = config.train
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.betas[0], settings.betas[1]),
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


def keep_weights(*optimizers: torch.optim.Optimizer) -> None:
    """Sets the learning rates to 0, which keeps the weights and does not change the time of a step."""
    for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["lr"] = 0.0


def in_mode(deterministic: bool, step: StepCall) -> StepCall:
    """Returns a function that performs `step` with torch's deterministic mode on or off. Our training runs have it on."""

    def call() -> object:
        torch.use_deterministic_algorithms(deterministic)
        return step()

    return call


def unpack(source: str, folder: Path) -> None:
    """Unpacks the fetch stage's files into the folder in which torchvision looks for MNIST."""
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for path in idx.folder(source).glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))


def ratios(table: pd.DataFrame, settings: Params) -> dict:
    """Returns ratios of times, for initial and for trained weights. A ratio is left out unless all its models were timed.

    over_vit                    time of each of our OSA models, divided by the time of our ViT
    straightforward_over_ours   time of straightforward code, divided by our code's time, for each model and group of models
    eager_over_ours             time of our step without a CUDA graph, divided by its time with one; only where we use graphs
    """
    paper, result = list(params.load_paper().table_2), {}
    orthogonal = [name for name, variant in settings.variants.items() if variant.attention == "orthogonal"]
    groups = {name: [name] for name in paper}
    groups |= {OSA_MODELS: [name for name in paper if name in orthogonal], ALL_MODELS: paper}
    for weights, rows in table.groupby("weights", sort=False):
        seconds = rows.pivot(index="model", columns="code", values="seconds")
        ours, there = seconds[OURS], set(seconds.index)
        result[weights] = {
            "over_vit": {name: ours[name] / ours["vit"] for name in orthogonal if {name, "vit"} <= there},
            "straightforward_over_ours": {
                name: seconds.loc[members, THEIRS].sum() / ours[members].sum()
                for name, members in groups.items()
                if set(members) <= there
            },
        }
        if EAGER in seconds:
            result[weights]["eager_over_ours"] = (seconds[EAGER] / ours).dropna().to_dict()
    return result


if __name__ == "__main__":
    main()
