"""Where the time of a training step goes, model by model: `python -m pipeline.benchmarks.profile`.

The step of a training, with every kernel launched by itself, under torch's profiler. Each operator counts with the
time that it takes itself, without those it calls, and what is left of the step is between operators. Products come with
their rate and the best one that the machine has shown: what runs near it gets faster only by having less to do. Writes
profile.csv and .json to paper_outputs/benchmarks/HARDWARE/.
"""

import math
import random
import time
from collections import defaultdict

import pandas as pd
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity
from tqdm import tqdm

from pipeline import cost
from pipeline.benchmarks import results
from pipeline.benchmarks.step import SEED, Step, compared, load, our_step, with_whole_batches
from pipeline.core import params, record
from pipeline.core.errors import entry_point
from pipeline.core.files import rounded
from pipeline.core.params import RunConfig
from pipeline.runs import Run
from pipeline.studies.paper.benchmarks import (
    BASIS,
    BETWEEN,
    INITIALISED,
    LINEAR,
    ON_TOKENS,
    OPTIMIZER,
    PARTS,
    PRODUCTS,
    PROJECTIONS,
    SOFTMAX,
    SUMS,
    TRAINED,
)
from pipeline.training.loop import make_deterministic

CALLERS = {  # what such a one calls is counted with it
    "aten::_scaled_dot_product": SOFTMAX,
    "aten::linalg_qr": BASIS,
    "aten::linalg_cholesky": BASIS,
    "aten::linalg_solve_triangular": BASIS,
    "Optimizer.step": OPTIMIZER,
    "aten::_foreach": OPTIMIZER,  # the gradient's norm and its clipping
}


@entry_point
def main(arguments: list[str] | None = None) -> None:
    options = results.parser("profile", __doc__).parse_args(arguments)
    make_deterministic()
    device, settings = record.default_device(), params.load()
    configs = {variant: with_whole_batches(params.resolve(settings, variant)) for variant in compared(settings)}
    weights = TRAINED if all(Run(variant, SEED).weights.exists() for variant in configs) else INITIALISED
    steps, loaded = {}, {}
    for variant, config in configs.items():
        training = load(variant, weights, config, loaded, device)
        training.with_graph = False
        steps[variant] = our_step(training)
    table = measure(steps, configs, options.repeats, device)
    facts = {"weights": weights, "peak": {"tflops": rounded(results.peak(device) / 1e12)}}
    results.write("profile", table, device, options, batch_size=settings.train.batch_size, **facts)


def measure(steps: dict[str, Step], configs: dict[str, RunConfig], repeats: int, device: torch.device) -> pd.DataFrame:
    """Seconds of each part of each model's step, over rounds of shuffled order, and the rate of those that are products."""
    for step in [*steps.values()] * 2:  # the first steps allocate
        step()
    order, samples, counts = random.Random(SEED), {(model, part): [] for model in steps for part in PARTS}, {}
    for _ in tqdm(range(repeats), desc="profile", unit="round", disable=None):
        for model in order.sample(list(steps), len(steps)):
            seconds, counts[model] = profiled(steps[model], configs[model], device)
            for part in PARTS:
                samples[model, part].append(seconds.get(part, 0.0))
    rows = []
    for (model, part), seconds in samples.items():
        times, operations = results.quantiles(seconds), 2 * counts[model].get(part, 0)
        rate = operations / times["seconds"] / 1e12 if operations else math.nan
        rows.append({"model": model, "part": part} | times | {"tflops": rate})
    return pd.DataFrame(rows)


def profiled(step: Step, config: RunConfig, device: torch.device) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds and multiply–adds of one step, by part."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        whole = time.perf_counter() - start
    seconds, multiply_adds = defaultdict(float), defaultdict(int)
    for event in profiler.events():
        if event.device_type == DeviceType.CPU and (kind := part(event, config)):
            own = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
            seconds[kind] += own / 1e6
            if event.name in cost.FORMULAS:
                multiply_adds[kind] += cost.FORMULAS[event.name](event.input_shapes)
    seconds[BETWEEN] = max(whole - sum(seconds.values()), 0.0)
    return seconds, multiply_adds


def part(event: FunctionEvent, config: RunConfig) -> str | None:
    """The part that an event belongs to, or None if it is no operator."""
    caller = event
    while caller is not None:
        for name, kind in CALLERS.items():
            if caller.name.startswith(name):
                return kind
        caller = caller.cpu_parent
    if not event.name.startswith("aten::"):
        return None
    small = is_small(event.input_shapes, config)
    if event.name.removesuffix("_") in ("aten::bmm", "aten::baddbmm"):
        return PRODUCTS if small else PROJECTIONS
    return LINEAR if event.name in cost.FORMULAS else SUMS if small else ON_TOKENS


def is_small(shapes: list[list[int]], config: RunConfig) -> bool:
    """Whether all tensors among the arguments hold a matrix for each head, or its diagonal, no larger than 2d_v×2d_v."""
    model = config.model
    heads, most = config.train.batch_size * model.num_heads, 2 * model.embed_dim // model.num_heads
    shapes = [shape for shape in shapes if shape]
    return bool(shapes) and all(shape[0] == heads and len(shape) > 1 and max(shape[1:]) <= most for shape in shapes)


if __name__ == "__main__":
    main()
