"""Defines the two views in MLflow's Views menu: the models of Table 2, and their runs, one per seed, with curves."""

import json

from pipeline.tracking.trainings import LOGGED_CURVES
from pipeline.training.run import TABLE_2

# Column widths in pixels. In a window of 1440 pixels, MLflow leaves 823 for all columns and the tick box.
MODEL_WIDTHS = {"test_accuracy": 105, "test_accuracy_std": 135, "paper": 62, "difference_to_paper": 145, "num_seeds": 80}
SEED_WIDTHS = {"test_accuracy": 105, "difference_to_paper": 145, "test_loss": 80, "train_accuracy": 110, "train_loss": 80}
OTHER_WIDTHS = {"attributes.`Run Name`": 150, "runDateAndNestInfo": 60}  # runDateAndNestInfo is the creation time


def views() -> dict[str, str]:
    """Returns saved views of MLflow's run table: key → JSON. A URL with `viewStateShareKey=KEY` opens the view KEY."""
    newest = f"tags.study = '{TABLE_2}' and tags.current = 'true' and tags.level = "
    models = _state(f"{newest}'mean'", "metrics.`test_accuracy`", False, MODEL_WIDTHS, [_chart("test_accuracy", "BAR")])
    lines = [_line(metric) for metric in LOGGED_CURVES if metric != "epoch"]
    seeds = _state(f"{newest}'single'", "tags.`mlflow.runName`", True, SEED_WIDTHS, lines)
    menu = {"models": ("Models", models), "seeds": ("Models, seed by seed", seeds)}
    saved = {}
    for age, (key, (name, state)) in enumerate(menu.items()):  # MLflow sorts the menu by age
        saved[key] = json.dumps({"name": name, "createdAt": -age, "state": json.dumps(state)})
    return saved


def _state(query: str, order: str, is_ascending: bool, widths: dict[str, int], charts: list[dict]) -> dict:
    columns = {f"metrics.`{metric}`": width for metric, width in widths.items()}
    placed = OTHER_WIDTHS | columns
    return {
        "searchFilter": query,
        "orderByKey": order,
        "orderByAsc": is_ascending,
        "selectedColumns": [*columns],
        "columnOrder": [*placed],
        "columnWidths": placed,
        "runsHiddenMode": "SHOW_ALL",  # by default, MLflow draws only the ten newest runs
        "chartsSearchFilter": f"^({'|'.join(chart['metricKey'] for chart in charts)})$",
        "compareRunSections": [{"uuid": "curves", "name": "Model metrics", "display": True, "isReordered": False}],
        "compareRunCharts": charts,
        "globalLineChartConfig": {"xAxisKey": "metric", "selectedXAxisMetricKey": "epoch", "lineSmoothness": 0},
    }


def _chart(metric: str, kind: str) -> dict:
    return {"type": kind, "uuid": metric, "metricSectionId": "curves", "metricKey": metric, "displayName": metric}


def _line(metric: str) -> dict:
    return {
        **_chart(metric, "LINE"),
        "scaleType": "log" if "loss" in metric else "linear",
        "xAxisScaleType": "linear",
        "yAxisKey": "metric",
        "range": {},
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
