"""Trains one variant with one seed: `python -m pipeline train osa_qr 0`.

After an interruption, the same command resumes at the last saved point of the learning curves, and produces the same bits
as an uninterrupted run. With `--set train.learning_rate=1e-3`, the run is a trial run, which DVC and git ignore.
"""

import sys
import time

from pipeline import studies, tracking
from pipeline.config import params
from pipeline.core import provenance
from pipeline.core.errors import command_parser, entry_point
from pipeline.tools import times
from pipeline.training.run import TABLE_2, TRIES, Run


@entry_point
def main() -> None:
    parser = command_parser("train", __doc__)
    parser.add_argument("variant", help="a name under variants in params.yaml")
    parser.add_argument("seed", type=params.seed)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="try another value, without DVC")
    parser.add_argument("--study", help="train the model as this study does, and add the run to the study's runs")
    eager_help = "on CUDA, launch every kernel separately, without CUDA graphs: slower, same numbers"
    parser.add_argument("--eager", action="store_true", help=eager_help)
    parser.add_argument("--no-tracking", action="store_true", help="do not show the run in MLflow")
    arguments = parser.parse_args(params.without_stage(sys.argv[1:]))

    overrides = params.parse_overrides(arguments.set)
    settings, study = params.load(), arguments.study or (TRIES if overrides else TABLE_2)
    if study in (TABLE_2, TRIES):
        watch, config = None, params.resolve(settings, arguments.variant, overrides)
    else:
        watch, reading = studies.get(study).watch, studies.reading_of(study)
        config = params.resolve_recipe(settings, params.load_paper(), arguments.variant, overrides, reading)
    run = Run(arguments.variant, arguments.seed, study, overrides)

    # These modules import torch, which is slow, so they are imported only after the settings have been checked.
    from pipeline.training.loop import configure_torch
    from pipeline.training.recorder import train

    before = provenance.process_seconds()
    configure_torch()
    record = train(run, config, watch=watch, eager=arguments.eager, seconds_before=before)
    begun = time.perf_counter()
    if not arguments.no_tracking:
        tracking.sync_quietly(run)
    print(f"{run}: {times.spent(record, tracking=time.perf_counter() - begun)}", file=sys.stderr)


if __name__ == "__main__":
    main()
