"""What is tried where the paper leaves a detail open, whole recipes, and attention or initialisation."""

import pytest

from pipeline import studies
from pipeline.report import page
from pipeline.studies.comparison import Settings
from pipeline.studies.paper import attention_or_initialisation, left_open, recipes
from pipeline.verdicts import NOT_TRAINED, REPRODUCED
from tests.pipeline.studies.paper.conftest import runs

STANDARD = {"variant": "vit", "set": {"data": {"pixel_scaling": "standard"}}, "seeds": [0, 1, 2]}
EPSILON = {"variant": "osa_ns", "set": {"variant": {"epsilon": 1e-3}}, "seeds": [0]}


def settings(**listed) -> Settings:
    return Settings(runs=listed)


def test_every_alternative_belongs_to_a_detail(paper_lab):
    rows = left_open.changes(studies.settings("left_open"), {}, paper_lab)
    details = {detail.key: detail for detail in paper_lab.paper.left_open}
    assert {key for key, detail in details.items() if detail.instead} == {row["key"] for row in rows}


def test_a_change_and_whether_it_matters(paper_lab):
    paper_lab.tables = {"runs": runs({"vit": [97.0, 97.2, 97.4], "osa_ns": [96.0, 97.0]})}
    tables = {"runs": runs({"far": [99.0, 99.2, 99.4], "near": [97.6, 97.8, 98.0], "one": [96.0]})}
    listed = settings(far=STANDARD, near=STANDARD, one=EPSILON, missing=EPSILON)
    summary = left_open.summarise(listed, tables, paper_lab)
    far, one = summary["changes"]["far"], summary["changes"]["one"]
    assert far["change"] == pytest.approx(2) and far["low"] == pytest.approx(2 - 2.776445 * 0.2 * (2 / 3) ** 0.5)
    assert [row["name"] for row in summary["matter"]] == ["far"]
    assert one["key"] == "variants.osa_ns.epsilon" and one["change"] == pytest.approx(-0.5)
    assert one["low"] < -1 < 1 < one["high"]
    assert summary["choices"] == 3 and page.plain(summary)["changes"]["missing"]["change"] is None
    assert left_open.draw_changes(listed, tables, paper_lab).axes[0].get_yticks().tolist() == [0, 1, 2]


def test_of_many_alternatives_one_must_stand_out(paper_lab):
    """Its own 95 % interval is beyond the margin, and not that of twenty together."""
    paper_lab.tables = {"runs": runs({"vit": [97.0, 97.2, 97.4]})}
    tables = {"runs": runs({"far": [98.5, 98.7, 98.9]})}
    assert left_open.summarise(settings(far=STANDARD), tables, paper_lab)["matter"]
    many = settings(far=STANDARD, **{f"other_{i}": STANDARD for i in range(19)})
    assert not left_open.summarise(many, tables, paper_lab)["matter"]


def test_distances_of_configurations_from_table_2(paper_lab):
    paper_lab.tables = {"runs": runs({"vit": [96.2, 97.2, 98.2]})}
    listed = settings(near_vit=STANDARD, far_vit=STANDARD, missing_vit=STANDARD)
    tables = {"runs": runs({"near_vit": [96.2, 97.2, 98.2], "far_vit": [94.0, 94.2, 94.4]})}
    summary = recipes.summarise(listed, tables, paper_lab)
    assert summary["default"]["distance"] == pytest.approx(0, abs=1e-12) and set(summary["default"]["models"]) == {"vit"}
    far = summary["configurations"]["far"]
    assert far["distance"] == pytest.approx(9 / (0.52 * (1 + 1 / 3)))  # the variances are 0.04 and 1
    assert far["models"]["vit"]["difference"] == pytest.approx(-3)
    assert summary["configurations"]["near"]["distance"] == pytest.approx(0, abs=1e-12)
    assert summary["configurations"]["missing"]["distance"] is None


CELLS = {"vit_section_4": [79.0, 80.0, 81.0], "osa_xavier": [89.0, 90.0, 91.0]}
TABLE_2 = {"vit_noskip_nonorm": [69.0, 70.0, 71.0], "osa_exact": [95.0, 96.0, 97.0]}


def test_attention_and_initialisation_share_the_gap(paper_lab):
    paper_lab.tables = {"runs": runs(TABLE_2)}
    summary = attention_or_initialisation.summarise(settings(), {"runs": runs(CELLS)}, paper_lab)
    effects = summary["effects"]
    assert summary["is_trained"] and summary["gap"] == pytest.approx(26)
    shares = [effects[name]["share"] for name in ("attention", "initialisation")]
    assert shares == pytest.approx([18 / 26, 8 / 26])
    assert {each.word for each in summary["verdicts"].values()} == {REPRODUCED}


def test_a_cell_that_is_not_trained_leaves_the_question(paper_lab):
    paper_lab.tables = {"runs": runs(TABLE_2)}
    tables = {"runs": runs({"osa_xavier": CELLS["osa_xavier"]})}
    summary = page.plain(attention_or_initialisation.summarise(settings(), tables, paper_lab))
    assert not summary["is_trained"] and not summary["effects"]
    assert summary["verdicts"]["attention_matters"]["word"] == NOT_TRAINED
    assert summary["verdicts"]["attention_matters_with_xavier"]["word"] == REPRODUCED
