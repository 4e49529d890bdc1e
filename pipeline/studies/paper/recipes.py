"""Which reading of the recipe comes closest to Table 2: what common code bases choose where the paper leaves a detail open.

A run is called by its configuration and its model: fused_standard_vit_noskip_nonorm.
"""

from pipeline.claims import Results
from pipeline.lab import Lab
from pipeline.statistics import contrast
from pipeline.statistics import summarise as summary
from pipeline.studies import Tables, comparison
from pipeline.studies.paper.section_5 import results_of


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """The accuracies of each configuration, the paper's, and the distance of both."""
    own, table_2 = Results(tables), results_of(lab)
    samples: dict[str, dict[str, list[float]]] = {}
    for name, training in settings.runs.items():
        configuration = name.removesuffix(f"_{training.variant}")
        samples.setdefault(configuration, {})[training.variant] = own.accuracies(name)
    default = {model: table_2.accuracies(model) for model in lab.paper.table_2}
    ours = distances(default, default, lab.paper.table_2)
    configurations = {name: distances(each, default, lab.paper.table_2) for name, each in samples.items()}
    complete = [name for name, each in configurations.items() if len(each["models"]) == len(ours["models"]) == len(default)]
    closest = min(complete, key=lambda name: configurations[name]["distance"], default=None) if default else None
    return {"default": ours, "configurations": configurations, "closest": closest}


def distances(ours: dict[str, list[float]], default: dict[str, list[float]], paper: dict[str, float]) -> dict:
    """For each model that is trained, z² = (paper − mean)² / (s² (1 + 1/n)), and their mean: 1 on average where the paper's
    numbers are one more run of each. s is the spread of these runs and the default's together."""
    models = {}
    for model, values in ours.items():
        if values:
            others = [] if values is default[model] else [default[model]]
            estimate = contrast([[paper[model]], values, *others], [1, -1, *[0] * len(others)], equal_spread=True)
            models[model] = {"ours": summary(values), "paper": paper[model], "difference": -estimate.value}
            models[model]["squared"] = (estimate.value / estimate.error) ** 2
    squared = [model["squared"] for model in models.values()]
    return {
        "models": models,
        "distance": sum(squared) / len(squared) if squared else None,
        "largest_difference": max((abs(model["difference"]) for model in models.values()), default=None),
    }


STUDY = comparison.study(summarise=summarise)
