"""Alternatives where the paper leaves a detail open, whole recipes, and attention or initialisation."""

import math

import pytest

from pipeline import studies
from pipeline.report import page
from pipeline.statistics.verdicts import LEVEL, NOT_TRAINED, REPRODUCED
from pipeline.studies.comparison import Settings
from pipeline.studies.paper import ablations, attention_or_initialisation, left_open, recipes
from tests.pipeline.studies.paper.conftest import histories, runs

STANDARD = {"variant": "vit", "set": {"data": {"pixel_scaling": "standard"}}, "seeds": [0, 1, 2]}
EPSILON = {"variant": "osa_ns", "set": {"variant": {"epsilon": 1e-3}}, "seeds": [0]}


def settings(**listed) -> Settings:
    return Settings(reading="first", runs=listed)


def test_every_alternative_belongs_to_a_detail(paper_lab):
    rows = left_open.changes(studies.settings("left_open"), {}, paper_lab)
    details = {detail.key: detail for detail in paper_lab.paper.left_open}
    assert {key for key, detail in details.items() if detail.instead} == {row["key"] for row in rows}


def test_a_change_and_whether_it_matters(paper_lab):
    paper_lab.tables = learning({"vit": [97.0, 97.2, 97.4], "osa_ns": [96.0, 97.0]})
    tables = {"runs": runs({"far": [99.0, 99.2, 99.4], "near": [97.6, 97.8, 98.0], "one": [96.0]})}
    listed = settings(far=STANDARD, near=STANDARD, one=EPSILON, missing=EPSILON)
    summary = left_open.summarise(listed, tables, paper_lab)
    far, one = summary["changes"]["far"], summary["changes"]["one"]
    assert far["change"] == pytest.approx(2) and far["low"] == pytest.approx(2 - 2.776445 * 0.2 * (2 / 3) ** 0.5)
    assert [row["name"] for row in summary["matter"]] == ["far"]
    assert one["key"] == "variants.osa_ns.epsilon" and one["change"] == pytest.approx(-0.5)
    assert one["low"] < -1 < 1 < one["high"]
    assert summary["choices"] == 3 and page.to_json(summary)["changes"]["missing"]["change"] is None
    assert left_open.draw_changes(listed, tables, paper_lab).axes[0].get_yticks().tolist() == [0, 1, 2]


def test_of_many_alternatives_one_must_stand_out(paper_lab):
    """An alternative's own 95 % interval is beyond the margin, the joint one of twenty is not."""
    paper_lab.tables = learning({"vit": [97.0, 97.2, 97.4]})
    tables = {"runs": runs({"far": [98.5, 98.7, 98.9]})}
    assert left_open.summarise(settings(far=STANDARD), tables, paper_lab)["matter"]
    many = settings(far=STANDARD, **{f"other_{i}": STANDARD for i in range(19)})
    assert not left_open.summarise(many, tables, paper_lab)["matter"]


def learning(accuracies: dict[str, list[float]]) -> dict:
    """Runs with these accuracies, and curves of runs that start."""
    curves = {name: [[2.3, 1.0, 0.5]] * len(own) for name, own in accuracies.items()}
    return {"runs": runs(accuracies), "histories": histories(curves)}


def test_distances_of_configurations_from_the_paper(paper_lab):
    paper_lab.tables = learning({"vit": [96.2, 97.2, 98.2]})
    listed = settings(far_vit=STANDARD, missing_vit=STANDARD)
    tables = learning({"far_vit": [94.0, 94.2, 94.4]})
    found = recipes.summarise(listed, tables, paper_lab)["configurations"]
    assert found["table_2"]["distance"] == pytest.approx(0, abs=1e-12) and set(found["table_2"]["models"]) == {"vit"}
    assert found["first"] == found["table_2"]
    far, missing = found["far"], found["missing"]
    assert far["distance"] == pytest.approx(math.log(0.972 / 0.028) - math.log(0.942 / 0.058))
    assert far["models"]["vit"]["difference"] == pytest.approx(-3) and far["models"]["vit"]["is_within"] is False
    assert missing["distance"] is None
    assert not far["is_the_recipe"] and not missing["is_the_recipe"]  # nor is one of four models missing


def test_a_recipe_has_all_five_models_near_the_papers(paper_lab):
    paper = paper_lab.paper.table_2
    near = {model: [value - 1, value, value + 1] for model, value in paper.items()}
    assert recipes.compare_with_paper(near, paper)["is_the_recipe"]
    assert not recipes.compare_with_paper(near | {"vit": []}, paper)["is_the_recipe"]
    assert not recipes.compare_with_paper(near | {"vit": [95.0, 95.1, 95.2]}, paper)["is_the_recipe"]  # outside its interval
    assert not recipes.compare_with_paper(near | {"vit_noskip_nonorm": [50.0, 60.0, 70.0]}, paper)[
        "is_the_recipe"
    ]  # too far


def test_the_distance_that_was_known_when_the_limit_was_fixed(paper_lab, known):
    paper = paper_lab.paper.table_2
    first_reading = recipes.compare_with_paper({model: known.accuracies_of_starting(model) for model in paper}, paper)
    assert round(first_reading["distance"], 2) == 0.24 and not first_reading["is_the_recipe"]


CELLS = {"vit_section_4": [79.0, 80.0, 81.0], "osa_xavier": [89.0, 90.0, 91.0]}
TABLE_2 = {"vit_noskip_nonorm": [69.0, 70.0, 71.0], "osa_exact": [95.0, 96.0, 97.0]}


def test_attention_and_initialisation_each_close_a_part_of_the_gap(paper_lab):
    paper_lab.tables = {"runs": runs(TABLE_2)}
    by_reading = attention_or_initialisation.summarise(settings(), {"runs": runs(CELLS)}, paper_lab)
    summary, of_table_2 = by_reading["first"], by_reading["table_2"]
    assert not of_table_2["is_trained"], "the lab's two models are no baseline of the study ablations"
    assert summary["is_trained"] and summary["gap"] == pytest.approx(26)
    assert summary["alone"] == pytest.approx({"attention": 20 / 26, "initialisation": 10 / 26})
    assert summary["interaction"].estimate == pytest.approx(-4)
    assert {each.word for each in summary["verdicts"].values()} == {REPRODUCED}


def test_a_cell_that_is_not_trained_leaves_the_question(paper_lab):
    paper_lab.tables = {"runs": runs(TABLE_2)}
    tables = {"runs": runs({"osa_xavier": CELLS["osa_xavier"]})}
    summary = page.to_json(attention_or_initialisation.summarise(settings(), tables, paper_lab))["first"]
    assert not summary["is_trained"] and summary["alone"]["initialisation"] is None
    assert summary["verdicts"]["attention_matters"]["word"] == NOT_TRAINED
    assert summary["verdicts"]["attention_matters_with_xavier"]["word"] == REPRODUCED


def ablated(accuracy: float = 90.0) -> dict:
    """A run of each seed that the study lists, half a tenth of a point apart."""
    listed = studies.settings("ablations").runs
    return {name: [accuracy + 0.05 * i for i in range(len(each.seeds))] for name, each in listed.items()}


def test_a_claim_about_ablations_is_shown_once_its_runs_are_there_by_the_reading_of_table_2(paper_lab):
    listed = studies.settings("ablations")
    paper_lab.reading = listed.reading
    own = {model: [95.0, 95.2, 95.4, 95.6, 95.8] for model in ablations.BASELINES}
    paper_lab.tables = {"runs": runs(own | {"vit_noskip_nonorm": [92.0, 92.2, 92.4, 92.6, 92.8]})}
    as_listed, first = paper_lab.params, paper_lab.paper.readings["first"]
    paper_lab.params = as_listed.model_copy(update={name: getattr(first, name) for name in ("data", "init")})
    first = ablations.summarise(listed, {"runs": runs(ablated())}, paper_lab)
    assert not first["has_baselines"] and not first["rows"]
    paper_lab.params = as_listed
    some = {name: values for name, values in ablated().items() if name != "vit_fast"}
    some["osa_xavier"] = some["osa_xavier"][1:]
    summary = ablations.summarise(listed, {"runs": runs(some)}, paper_lab)
    waiting = {"rate_is_fair", "osa_matches_vit_at_other_rates"}
    assert {row["claim"] for row in summary["rows"]} == {*ablations.CLAIMS} - waiting
    summary = ablations.summarise(listed, {"runs": runs(ablated())}, paper_lab)
    words = {(row["claim"], row["second"]["variant"]): row["verdict"].word for row in summary["rows"]}
    assert len(summary["rows"]) == 14 and words["detail_matters", "vit_noskip_nonorm"] == REPRODUCED
    assert words["exp_is_not_needed", "osa_exact"] == "contradicted" and words["rate_is_fair", "vit"] == REPRODUCED
    assert attention_or_initialisation.four_cells(ablations.results_of_ablations(paper_lab))["is_trained"]
    template = page.template_environment(paper_lab.label).get_template("research/ablations.md.j2")
    compute = {"table_2": {"machines": {"a": []}}, "ablations": {"machines": {"a": ["osa_cayley"], "b": ["vit"]}}}
    text = template.render(ablations=page.to_json(summary), level=LEVEL, compute=compute, paper=paper_lab.paper)
    assert "Table 2 was trained on a, these runs on a and b" in text
    assert "OSA (QR), learning rate 0.001 (90.0 ± 0.1, n = 3)" in text and text.count("\n| ") == 16 and "α from zero" in text


def test_baselines_by_another_reading_are_none(paper_lab):
    paper_lab.tables = {"runs": runs({model: [95.0, 95.2] for model in ablations.BASELINES})}
    assert not ablations.has_baselines(paper_lab), "the lab has the first reading, params.yaml another"
    paper_lab.reading = "torch_defaults"
    assert ablations.has_baselines(paper_lab)
    paper_lab.tables = {"runs": runs({"vit": [95.0]})}
    assert not ablations.has_baselines(paper_lab)
