"""Error rates and power of the rule, on few experiments; runs that fail are among them."""

import numpy as np
import pytest

from pipeline.studies.paper import verdicts
from pipeline.studies.paper.verdicts import Settings, measure, simulated_runs, summarise

SETTINGS = Settings(repetitions=200)
WITHIN = 0.05 + 4 * (0.05 * 0.95 / 200) ** 0.5


@pytest.mark.slow
def test_the_rule_rarely_finds_what_is_not_there_and_often_what_is(paper_lab, monkeypatch):
    monkeypatch.setattr(verdicts, "RUNS_OF_A_MODEL", (5, 10))
    tables = measure(SETTINGS, paper_lab)
    summary = summarise(SETTINGS, tables, paper_lab)
    assert summary["errors"].keys() == summary["power"].keys() == {"0", "0.1"} and len(summary["power"]["0"]) == 5
    assert all(rate < WITHIN for by_name in summary["errors"].values() for own in by_name.values() for rate in own)
    rates = tables["rates"]
    assert 0 < rates.loc[rates["truth"] == "limit", "contradicted"].max() < WITHIN
    power = summary["power"]
    assert power["0"]["osa_qr_vs_vit"][1] > 0.95 and power["0"]["osa_qr_vs_vit_noskip"] == [1, 1]
    assert power["0.1"]["osa_ns_vs_vit_noskip"][0] < power["0"]["osa_ns_vs_vit_noskip"][0]
    assert power["0.1"]["osa_ns_vs_vit_noskip"][1] > 0.8  # one of ten seeds fails, and the others are seen


def test_a_run_fails_as_often_as_it_should():
    values = simulated_runs(np.random.default_rng(0).standard_normal((4000, 2)), 1.0, 5.0, 0.1)
    assert np.mean(values < -10) == pytest.approx(0.1, abs=0.02) and np.mean(values[values > -10]) == pytest.approx(
        5, abs=0.1
    )
