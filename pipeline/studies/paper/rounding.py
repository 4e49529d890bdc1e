"""Does rounding decide whether a run starts to learn?

We repeat a run whose train loss, halfway through training, was still near chance level. `train.perturbation`
changes the initial weights of each repeat by about a millionth. If only some repeats start to learn, this tiny change
decides whether a run starts to learn. The report shows no results until all runs have ended.
"""

from typing import Any

from pipeline.statistics.claims import Results
from pipeline.studies import Tables, comparison
from pipeline.studies.lab import Lab


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict[str, Any]:
    """Returns the accuracy (%) of each repeat, and the number of repeats that start to learn."""
    results = Results(tables)
    accuracies = [accuracy for name in settings.runs for accuracy in results.accuracies(name)]
    start = sum(len(results.starting(name)) for name in settings.runs)
    (variant,) = {training.variant for training in settings.runs.values()}
    runs = sum(len(training.seeds) for training in settings.runs.values())
    return {"variant": variant, "runs": runs, "trained": len(accuracies), "start": start, "accuracies": accuracies}


STUDY = comparison.study(summarise=summarise)
