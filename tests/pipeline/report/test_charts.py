"""Labels at the ends of lines are apart where lines end side by side, and elsewhere at the height of their own line.
Intervals have an arrow at each end that is cut, and nowhere else. A model has one look."""

import math

import pytest

import osa
from pipeline.config.looks import FIXED, look_of
from pipeline.studies import charts


def test_labels_give_way_only_to_labels_beside_them():
    _, (axes,) = charts.panels(1)
    for end, height in [(1, 0.50), (1, 0.52), (2, 0.51)]:
        axes.plot([0, end], [0, height], label=f"{end} {height}")
    axes.set_ylim(0, 1)
    charts.label_ends(axes, gap=0.1)
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert heights == pytest.approx({"1 0.5": 0.46, "1 0.52": 0.56, "2 0.51": 0.51})


@pytest.mark.parametrize(
    ("ends", "drawn", "arrows"),
    [((-1, 2), (-1, 2), {}), ((-18, 2), (-8, 2), {-8: "<"}), ((-math.inf, math.inf), (-8, 8), {-8: "<", 8: ">"})],
)
def test_an_arrow_says_that_an_interval_goes_on(ends, drawn, arrows):
    _, (axes,) = charts.panels(1)
    charts.draw_interval(axes, *ends, 0, "#000000", (-8, 8))
    line, *marks = axes.lines
    assert tuple(line.get_xdata()) == drawn
    assert {mark.get_xdata()[0]: mark.get_marker() for mark in marks} == arrows


def test_a_look_does_not_depend_on_what_was_drawn_before():
    """In one process studies, figures and MLflow's runs ask in any order, and the committed figures have to come out."""
    assert look_of("mine") == look_of("yours"), "each is the first of its own figure"
    assert look_of("mine", among=["yours", "vit", "mine"]) != look_of("mine")


def test_every_model_has_a_look_of_its_own():
    assert set(FIXED) == set(osa.MODELS), "listed there so that no figure and no sync imports torch for a colour"
    names = [*osa.MODELS, "mine", "yours"]
    assert len({look_of(name, among=names) for name in names}) == len(names)
    assert look_of("cayley") == look_of("osa_cayley")
