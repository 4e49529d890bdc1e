"""Do choices that the paper leaves open matter? We change one at a time, and compare with the study `first_reading`."""

from matplotlib.figure import Figure

from pipeline.config import looks
from pipeline.config.params import as_yaml
from pipeline.statistics.claims import Results
from pipeline.statistics.intervals import contrast, summary_of
from pipeline.studies import Tables, charts, comparison
from pipeline.studies.lab import Lab

MARGIN = 1.0  # a change of more than this many percentage points would matter to Section 5's comparisons


def summarise(settings: comparison.Settings, tables: Tables, lab: Lab) -> dict:
    """Returns `changes` (name → row), `tried` (key of params.yaml → rows), and `matter` (the rows of choices that matter).

    Also returns two counts: `topics` (details that the paper leaves open) and `choices` (choices in `settings.runs` with
    at least one ended run).
    """
    rows = changes(settings, tables, lab)
    tried: dict[str, list[dict]] = {}
    for row in rows:
        tried.setdefault(row["key"], []).append(row)
    return {
        "topics": len(lab.paper.left_open),
        "margin": MARGIN,
        "tried": tried,
        "choices": sum(row["ours"].n > 0 for row in rows),
        "matter": [row for row in rows if row["matters"]],
        "changes": {row["name"]: row for row in rows},
    }


def changes(settings: comparison.Settings, tables: Tables, lab: Lab) -> list[dict]:
    """Returns a row for each choice in `settings.runs`: the change in accuracy, with a 95 % confidence interval.

    The baseline is the mean accuracy of those runs of the study `first_reading` that start to learn. We assume that a choice
    does not alter the spread over runs, so one run of a choice is enough for an interval. A choice matters if the whole
    interval of its change lies beyond the margin, at 95 % confidence for all choices together (Bonferroni).
    """
    own, first, rows = Results(tables), Results(comparison.first_reading(lab)), []
    for name, training in settings.runs.items():
        ((section, values),) = training.set.items()
        ((option, value),) = values.items()
        samples = [own.accuracies(name), first.accuracies_of_starting(training.variant)]
        change = contrast(samples, (1, -1), equal_spread=True)
        low, high = change.interval()
        least, most = change.interval(1 - 0.05 / len(settings.runs))
        rows.append(
            {
                "name": name,
                "variant": training.variant,
                "key": f"variants.{training.variant}.{option}" if section == "variant" else f"{section}.{option}",
                "value": as_yaml(value),
                "ours": summary_of(samples[0]),
                "change": change.value,
                "low": low,
                "high": high,
                "matters": bool(least > MARGIN or most < -MARGIN),
            }
        )
    return rows


def draw_changes(settings: comparison.Settings, tables: Tables, lab: Lab) -> Figure | None:
    """Draws the change in accuracy, with its confidence interval, for each choice in `settings.runs` that has been run."""
    rows = [row for row in changes(settings, tables, lab) if row["ours"].n]
    if not rows:
        return None
    figure = Figure(figsize=(7.2, 0.7 + 0.21 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        colour = looks.look_of(row["variant"], among=lab.params.variants).colour
        axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=looks.LINE_WIDTH)
        axes.plot(row["change"], y, "o", color=colour, markersize=4.5)
    for side in (-MARGIN, MARGIN):
        axes.axvline(side, **charts.EXPECTED)
    topics = {detail.key: detail.topic for detail in lab.paper.left_open}
    names = [f"{topics[row['key']]}, {lab.label(row['variant'])}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=7.5)
    axes.set(xlabel="Accuracy change (points)", ylim=(len(rows) - 0.5, -0.5))
    return figure


STUDY = comparison.study(summarise=summarise, figures={"left_open": draw_changes})
