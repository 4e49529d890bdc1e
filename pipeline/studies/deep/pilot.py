"""A pilot study of deep models. About a hundred steps on small batches show which settings fail, before we train for hours.

The layers of an MLP are drawn independently, or together as an isometry. We vary learning rate, warm-up, clipping and α.
"""

from typing import Annotated

import pandas as pd
from pydantic import Field

from pipeline.config.params import PositiveInt
from pipeline.studies import Study, Tables, comparison
from pipeline.studies.lab import Lab, first_steps


class Settings(comparison.Settings):
    steps: PositiveInt  # number of steps of each run, after its warm-up
    # Each window is a pair (first step, last step).
    windows: list[Annotated[list[int], Field(min_length=2, max_length=2)]]
    last: PositiveInt  # number of steps in an additional window at the end of the run


def measure(settings: Settings, lab: Lab) -> Tables:
    rows = []
    for name, (variant, overrides, seed) in settings.requests():
        config = lab.config(variant, overrides)
        steps = first_steps(lab.training(config, seed), config.train.warmup_steps + settings.steps)
        rows += [{"name": name, "variant": variant, "seed": seed, **row} for row in steps]
    return {"steps": pd.DataFrame(rows)}


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Returns a row for each run, with the mean loss over each window and over the last steps.

    A mean is NaN if the run diverges before the end of the window.
    """
    rows = []
    for name, (variant, overrides, seed) in settings.requests():
        config, table = lab.config(variant, overrides), tables["steps"]
        own = table[(table["name"] == name) & (table["seed"] == seed)]
        steps = config.train.warmup_steps + settings.steps
        losses = own.set_index("step")["loss"].reindex(range(steps))
        windows = [*settings.windows, (steps - settings.last, steps - 1)]
        rows.append(
            {"name": name, "variant": variant, "seed": seed, "depth": config.model.depth, "rate": config.train.learning_rate}
            | {"warmup": config.train.warmup_steps, "clip": config.train.clip_grad_norm}
            | {"alpha": config.variant.alpha_times_depth, "gradient": own["gradient"].iloc[0]}
            | {"losses": [losses.loc[first:last].mean(skipna=False) for first, last in windows]}
        )
    return {"rows": rows, "batch": config.train.batch_size} | settings.model_dump(include={"windows", "last", "steps"})


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
