"""What MLflow's menu Views offers: the models first, then their seeds, then each study that trains, beside the models."""

import json
from collections.abc import Iterable

from pipeline.tracking.records import CURVES
from pipeline.training.run import TABLE_2, TRIES

RESULT = ("test_accuracy", "test_accuracy_std", "difference_to_paper", "paper_test_accuracy", "num_seeds", "num_diverged")
SEED = ("test_accuracy", "difference_to_paper", "test_loss", "train_accuracy", "train_loss", "seconds")
STUDY = ("test_accuracy", "test_accuracy_std", "test_loss", "train_loss", "num_seeds", "num_diverged")


def views(studies: Iterable[str]) -> dict[str, tuple[str, str]]:
    """By the end of its address, the name of each view, and itself as MLflow saves views."""
    newest, table_2 = "tags.current = 'true' and tags.level = ", f" and tags.study = '{TABLE_2}'"
    menu = {
        "models": ("Models", _state(f"{newest}'mean'{table_2}", RESULT, "metrics.`test_accuracy`", ascending=False)),
        "seeds": ("Models, seed by seed", _state(f"{newest}'single'{table_2}", SEED)),
    }
    trained = sorted({*studies} - {TABLE_2}, key=lambda study: (study == TRIES, study))
    for study in trained:
        others = "".join(f" and tags.study != '{other}'" for other in trained if other != study)
        menu[study] = (study.replace("_", " ").capitalize(), _state(f"{newest}'mean'{others}", STUDY))
    return {  # the menu sorts by age
        key: (name, json.dumps({"name": name, "createdAt": -age, "state": json.dumps(state)}))
        for age, (key, (name, state)) in enumerate(menu.items())
    }


def _state(runs: str, metrics: Iterable[str], order: str = "tags.`mlflow.runName`", *, ascending: bool = True) -> dict:
    """In MLflow's own format; a version that does not read it shows its default."""
    columns = [f"metrics.`{metric}`" for metric in metrics]
    return {
        "searchFilter": runs,
        "orderByKey": order,
        "orderByAsc": ascending,
        "selectedColumns": columns,
        "columnOrder": ["attributes.`Run Name`", *columns],
        "columnWidths": {"attributes.`Run Name`": 300} | dict.fromkeys(columns, 150),
        "runsHiddenMode": "SHOW_ALL",  # its default draws the ten newest
        "chartsSearchFilter": "^(test|train)_(loss|accuracy)$",
        "compareRunSections": [{"uuid": "curves", "name": "Model metrics", "display": True, "isReordered": False}],
        "compareRunCharts": [_chart(metric) for metric in CURVES if metric != "epoch"],
        "globalLineChartConfig": {"xAxisKey": "metric", "selectedXAxisMetricKey": "epoch", "lineSmoothness": 0},
    }


def _chart(metric: str) -> dict:
    """One metric over the epochs, a loss on a logarithmic axis."""
    axes = {
        "scaleType": "log" if "loss" in metric else "linear",
        "xAxisScaleType": "linear",
        "yAxisKey": "metric",
        "range": {},
    }
    chart = {"type": "LINE", "uuid": metric, "metricSectionId": "curves", "metricKey": metric, "displayName": metric}
    return chart | axes | {"useGlobalXaxisKey": True, "useGlobalLineSmoothing": True}
