"""Error rates of the rule, on few experiments; and a rule that errs too often is seen."""

import numpy as np
import pandas as pd
import pytest

from pipeline import sources
from pipeline.claims import Results, epochs_to_reach, target_loss
from pipeline.core import params
from pipeline.lab import Lab
from pipeline.studies.paper import section_5, verdicts
from pipeline.studies.paper.verdicts import LOG_SPREADS, SPREADS, Settings, measure, summarise

TABLES = ("runs", "histories")
SETTINGS = Settings(repetitions=200)
WITHIN = 0.05 + 4 * (0.05 * 0.95 / 200) ** 0.5


def test_the_rule_rarely_finds_what_is_not_there_and_one_that_errs_too_often_fails(paper_lab, monkeypatch):
    monkeypatch.setattr(verdicts, "SIZES", (3, 10))
    monkeypatch.setattr(verdicts, "MOST_WATCHED", 6)
    rates = measure(SETTINGS, paper_lab)["rates"]
    summary = summarise(SETTINGS, {"rates": rates}, paper_lab)
    errors = summary["errors"]
    assert len(errors) == 8 and errors["largest"] == [max(errors[name][i] for name in summary["power"]) for i in range(2)]
    contradicted = rates.loc[rates["truth"] == "limit", "contradicted"]
    assert all(max(rates) < WITHIN for rates in errors.values()) and 0 < contradicted.max() < WITHIN
    few, many = summary["power"]["osa_qr_vs_vit"]
    assert few < 0.5 < 0.8 < many and summary["power"]["osa_qr_vs_vit_noskip"][1] == 1
    watched = summary["watched"]
    assert watched["sizes"] == [3, 4, 5, 6] and watched["rates"][-1] > watched["rates"][0]
    worse = rates.assign(reproduced=rates["reproduced"].where(rates["scenario"] != "family", 0.2))
    assert summary["worst"]["holds"] and not summarise(SETTINGS, {"rates": worse}, paper_lab)["worst"]["holds"]


def test_the_spreads_are_those_of_the_exploratory_seeds():
    lab = Lab("verdicts", params.load(), params.load_paper())
    tables = {name: [lab.tables[each] for each in (name, f"exploratory_{name}") if each in lab.tables] for name in TABLES}
    results = Results({name: pd.concat(own).query("seed < 5") for name, own in tables.items()})
    assert {model: np.std(results.accuracies(model), ddof=1).round(2) for model in SPREADS} == SPREADS
    variances = {model: [] for model in LOG_SPREADS}
    for baseline in section_5.BASELINES:
        loss = target_loss(results.curves(baseline), 0.5)
        for model in ("osa_qr", baseline):
            epochs = [epochs_to_reach(curve, loss) for curve in results.curves(model)]
            variances[model].append(np.var(np.log(epochs), ddof=1))
    spreads = {model: np.sqrt(np.mean(own)) for model, own in variances.items()}
    assert spreads == pytest.approx(LOG_SPREADS, rel=0.03)


@pytest.mark.parametrize("edit", ["margin", "table_2"])
def test_other_limits_or_numbers_of_the_paper_measure_again(edit, monkeypatch):
    before, claims, paper = sources.text("verdicts"), params.read(params.beside_code(section_5.CLAIMS)), params.load_paper()
    if edit == "margin":
        claims["osa_matches_vit"]["margin_points"] = 1.0
        monkeypatch.setattr(params, "read", lambda path, read=params.read: claims if "claims" in str(path) else read(path))
    else:
        other = paper.model_copy(update={"table_2": paper.table_2 | {"osa_qr": 97.0}})
        monkeypatch.setattr(params, "load_paper", lambda: other)
    assert sources.text("verdicts") != before
