"""Error rates of the rule, on few experiments; and a rule that errs too often is seen."""

import pytest

from pipeline.studies.paper import verdicts
from pipeline.studies.paper.verdicts import Settings, measure, summarise

SETTINGS = Settings(repetitions=200)
WITHIN = 0.05 + 4 * (0.05 * 0.95 / 200) ** 0.5


@pytest.fixture(scope="module")
def rates():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "SIZES", (3, 10))
        patch.setattr(verdicts, "MOST_WATCHED", 6)
        yield lambda lab: measure(SETTINGS, lab)


def test_where_nothing_is_to_be_found_it_rarely_finds_something(paper_lab, rates):
    table = rates(paper_lab)
    summary = summarise(SETTINGS, table, paper_lab)
    errors = summary["errors"]
    assert len(errors) == 8 and errors["largest"] == [max(errors[name][i] for name in summary["power"]) for i in range(2)]
    contradicted = table["rates"].loc[table["rates"]["truth"] == "limit", "contradicted"]
    assert all(max(rates) < WITHIN for rates in errors.values()) and 0 < contradicted.max() < WITHIN
    few, many = summary["power"]["osa_qr_vs_vit"]
    assert few < 0.5 < 0.8 < many and summary["power"]["osa_qr_vs_vit_noskip"][1] == 1
    watched = summary["watched"]
    assert watched["sizes"] == [3, 4, 5, 6] and watched["rates"][-1] > watched["rates"][0]


def test_a_rule_that_errs_too_often_fails_the_check(paper_lab, rates):
    table = rates(paper_lab)["rates"]
    assert summarise(SETTINGS, {"rates": table}, paper_lab)["worst"]["holds"]
    worse = table.assign(reproduced=table["reproduced"].where(table["scenario"] != "family", 0.2))
    assert not summarise(SETTINGS, {"rates": worse}, paper_lab)["worst"]["holds"]
