"""Does rounding decide whether a run starts? One that does not, trained again from weights that differ by a millionth.

The runs differ from it by `train.perturbation` alone. Where some of them start and others do not, what is far below any
choice of a recipe decides. Until all are there, nothing is shown.
"""

from typing import Any

from pipeline.statistics.claims import Results
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict[str, Any]:
    """The accuracy of each draw in per cent, and how many of them start."""
    results = Results(tables)
    accuracies = [accuracy for name in settings.runs for accuracy in results.accuracies(name)]
    start = sum(len(results.starting(name)) for name in settings.runs)
    (variant,) = {training.variant for training in settings.runs.values()}
    runs = sum(len(training.seeds) for training in settings.runs.values())
    return {"variant": variant, "runs": runs, "trained": len(accuracies), "start": start, "accuracies": accuracies}


STUDY = comparison.study(summarise=summarise)
