"""The run that does not start, from weights that differ by a millionth."""

from pipeline import studies
from pipeline.studies.paper import rounding
from tests.pipeline.studies.paper.conftest import histories, runs


def test_the_draws_that_start_are_counted_once_all_are_there(paper_lab):
    settings = studies.settings("rounding")
    learning, failing = [2.3, 1.0, 0.5, 0.2, 0.1], [2.3, 2.3, 2.3, 2.0, 1.9]
    curves = {"first_draw": [learning], "second_draw": [failing], "third_draw": [learning]}
    accuracies = {"first_draw": [96.0], "second_draw": [60.0], "third_draw": [97.0]}
    summary = rounding.summarise(settings, {"runs": runs(accuracies), "histories": histories(curves)}, paper_lab)
    assert (summary["runs"], summary["trained"], summary["start"], summary["variant"]) == (3, 3, 2, "osa_ns")
    few = rounding.summarise(settings, {"runs": runs({"first_draw": [96.0]}), "histories": histories(curves)}, paper_lab)
    assert (few["trained"], few["start"]) == (1, 1)


def test_each_draw_is_one_of_its_own(paper_lab):
    listed = studies.settings("rounding").runs.values()
    assert [each.set["train"]["perturbation"] for each in listed] == [1, 2, 3]
    assert {(each.variant, *each.seeds) for each in listed} == {("osa_ns", 5)}
