"""Where the time of a training step goes, model by model: `python -m benchmarks.profile`.

The step of `pipeline.train`, with every kernel launched by itself, under torch's profiler. Each operator counts with the
time that it takes itself, without those it calls, and what is left of the step is between operators. Products come with
their rate and the best one that the machine has shown: what runs near it gets faster only by having less to do. Writes
profile.csv, .json, .svg and .png to paper_outputs/benchmarks/HARDWARE/.
"""

import argparse
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator

import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity
from tqdm import tqdm

from benchmarks import results
from benchmarks.attention import Peak
from benchmarks.step import INITIALISED, SEED, TRAINED, Step, compared, load, our_step, with_whole_batches
from pipeline import figures, params, tally, train
from pipeline.errors import entry_point
from pipeline.figures import GRID, PALETTE
from pipeline.params import RunConfig
from pipeline.summary import rounded

LINEAR, ON_TOKENS, SOFTMAX = "linear layers", "functions and sums of tokens", "softmax attention"
PROJECTIONS, PRODUCTS, SUMS = "tokens × small matrices", "products of small matrices", "sums and copies of small matrices"
BASIS, OPTIMIZER, BETWEEN = "QR decomposition", "clipping and AdamW", "between operators"
COLOURS = {  # in the order of the bars
    LINEAR: PALETTE[0],
    ON_TOKENS: PALETTE[1],
    OPTIMIZER: "#8c8c8b",
    BETWEEN: GRID,
    SOFTMAX: PALETTE[6],
    PROJECTIONS: PALETTE[5],
    BASIS: PALETTE[4],
    PRODUCTS: PALETTE[3],
    SUMS: "#f6d9a0",
}
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="rounds, in each of which every model takes a step (9)")
    options = parser.parse_args(arguments)
    train.make_deterministic()
    device, settings = results.default_device(), params.load()
    configs = {variant: with_whole_batches(params.resolve(settings, variant)) for variant in compared(settings)}
    weights = TRAINED if all(train.weights_path(variant, SEED).exists() for variant in configs) else INITIALISED
    steps, loaded = {}, {}
    for variant, config in configs.items():
        training = load(variant, weights, config, loaded, device)
        training.with_graph = False
        steps[variant] = our_step(training)
    table = measure(steps, configs, options.repeats, device)
    peak = Peak.measure(torch.float32, device)
    facts = {
        "environment": results.environment(device),
        "options": vars(options),
        "batch_size": settings.train.batch_size,
        "weights": weights,
        "peak": {"tflops": rounded(peak.flops / 1e12)},
    }
    folder = results.write("profile", table, facts, draw(table, settings.report.labels))
    print(table.to_string(index=False), f"{folder}/profile.csv", sep="\n")


def measure(steps: dict[str, Step], configs: dict[str, RunConfig], repeats: int, device: torch.device) -> pd.DataFrame:
    """Seconds of each part of each model's step, over rounds of shuffled order, and the rate of those that are products."""
    for step in [*steps.values()] * 2:  # the first steps allocate
        step()
    order, samples, counts = random.Random(SEED), defaultdict(list), {}
    for _ in tqdm(range(repeats), desc="profile", unit="round", disable=None):
        for model in order.sample(list(steps), len(steps)):
            seconds, counts[model] = profiled(steps[model], configs[model], device)
            for part in COLOURS:
                samples[model, part].append(seconds.get(part, 0.0))
    rows = []
    for (model, part), seconds in sorted(samples.items(), key=lambda item: list(steps).index(item[0][0])):
        times = results.quantiles(seconds)
        operations = 2 * counts[model].get(part, 0)
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
            if event.name in tally.FORMULAS:
                multiply_adds[kind] += tally.FORMULAS[event.name](event.input_shapes)
    seconds[BETWEEN] = max(whole - sum(seconds.values()), 0.0)
    return seconds, multiply_adds


def part(event: FunctionEvent, config: RunConfig) -> str | None:
    """The part that an event belongs to, or None if it is no operator."""
    for each in with_callers(event):
        for name, kind in CALLERS.items():
            if each.name.startswith(name):
                return kind
    if not event.name.startswith("aten::"):
        return None
    small = is_small(event.input_shapes, config)
    if event.name.removesuffix("_") in ("aten::bmm", "aten::baddbmm"):
        return PRODUCTS if small else PROJECTIONS
    return LINEAR if event.name in tally.FORMULAS else SUMS if small else ON_TOKENS


def with_callers(event: FunctionEvent | None) -> Iterator[FunctionEvent]:
    while event is not None:
        yield event
        event = event.cpu_parent


def is_small(shapes: list[list[int]], config: RunConfig) -> bool:
    """Whether all tensors among the arguments hold a matrix for each head, or its diagonal, no larger than 2d_v×2d_v."""
    model = config.model
    heads, most = config.train.batch_size * model.num_heads, 2 * model.embed_dim // model.num_heads
    shapes = [shape for shape in shapes if shape]
    return bool(shapes) and all(shape[0] == heads and len(shape) > 1 and max(shape[1:]) <= most for shape in shapes)


def draw(table: pd.DataFrame, labels: dict[str, str]) -> Figure:
    """A bar for each model, of milliseconds: first what all models do, then what makes the attention."""
    models = list(dict.fromkeys(table["model"]))
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        axes = figure.subplots()
        ends = dict.fromkeys(models, 0.0)
        for kind, colour in COLOURS.items():
            ms = 1000 * table[table["part"] == kind].set_index("model")["seconds"]
            axes.barh(models, ms[models], left=[ends[model] for model in models], color=colour, height=0.6, label=kind)
            ends = {model: ends[model] + ms[model] for model in models}
        axes.set(xlabel="Training step under the profiler, ms (medians)")
        axes.set_yticks(range(len(models)), [labels.get(model, model) for model in models])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return figure


if __name__ == "__main__":
    main()
