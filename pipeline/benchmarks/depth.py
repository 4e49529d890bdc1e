"""Times a training step of each deep model: `python -m pipeline benchmarks.depth`.

All models run in one process, from their initial weights. Each round times a step of every model, in a new random order.
The results go to depth.csv and depth.json in paper_outputs/benchmarks/HARDWARE/.
"""

import random

import pandas as pd
from tqdm import tqdm

from pipeline.benchmarks import cost, measurements
from pipeline.benchmarks.measurements import INITIALISED
from pipeline.benchmarks.step import SAMPLE_SECONDS, SEED, our_step, training_from, with_whole_batches
from pipeline.config import params
from pipeline.core import provenance
from pipeline.core.errors import entry_point
from pipeline.data import idx
from pipeline.training.loop import configure_torch

MODELS: tuple[str, ...] = ("osa_shaped", "osa_iso", "espa", "espa_iso", "uspa", "vskipinit", "softmax_shaped", "softmax_iso")
MODELS += ("softmax_shaped_norm", "vit_noskip_ji", "vit_noskip_ji_nonorm", "vit", "vit_noskip_nonorm", "osa_exact")


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = measurements.parser("depth", __doc__)
    parser.add_argument("--depth", type=int, default=36, help="number of blocks in every model")
    options = parser.parse_args(arguments)
    configure_torch()
    device, settings, paper = provenance.default_device(), params.load(), params.load_paper()
    loaded: dict[str, idx.DataSet] = {}
    steps = {}
    for model in tqdm(MODELS, desc="prepare", disable=None):
        # the default learning rate and α suffice, since neither affects the time
        deep: params.Overrides = {"model": {"depth": options.depth}}
        config = params.resolve_recipe(settings, paper, model, deep)
        steps[model] = our_step(training_from(model, INITIALISED, with_whole_batches(config), loaded, device))
    samples = cost.sample_seconds(steps, options.repeats, SAMPLE_SECONDS, random.Random(SEED), device)
    measurements.write_measurements(
        "depth",
        over_vit(samples),
        device,
        options,
        depth=options.depth,
        rounds=options.repeats,
        batch_size=paper.readings[params.FIRST_READING].train.batch_size,
    )


def over_vit(samples: dict[str, list[float]]) -> pd.DataFrame:
    """Returns a row for each model.

    seconds     median time of a step in seconds
    over_vit    median over rounds of the model's time divided by ViT's time in the same round
    low, high   10 % and 90 % quantiles of this ratio
    """
    seconds = pd.DataFrame(samples)
    ratios = seconds.div(seconds["vit"], axis=0)
    rows = [(model, seconds[model].median(), *measurements.quantiles(ratios[model]).values()) for model in samples]
    return pd.DataFrame(rows, columns=["model", "seconds", "over_vit", "low", "high"])


if __name__ == "__main__":
    main()
