"""Labels at the ends of lines: apart where lines end side by side, and elsewhere at the height of their own line."""

import pytest

from pipeline.studies import charts


def test_labels_give_way_only_to_labels_beside_them():
    _, (axes,) = charts.panels(1)
    for end, height in [(1, 0.50), (1, 0.52), (2, 0.51)]:
        axes.plot([0, end], [0, height], label=f"{end} {height}")
    axes.set_ylim(0, 1)
    charts.label_ends(axes, gap=0.1)
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert heights == pytest.approx({"1 0.5": 0.46, "1 0.52": 0.56, "2 0.51": 0.51})
