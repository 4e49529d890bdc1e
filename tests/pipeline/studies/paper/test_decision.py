"""Fresh seeds decide: nothing is shown before all runs are there, and then the declared rule speaks."""

import math

import pytest

from pipeline import studies
from pipeline.core.files import ROOT
from pipeline.statistics.claims import read_claims
from pipeline.statistics.verdicts import CONTRADICTED, REPRODUCED
from pipeline.studies.paper import CLAIMS_FILE, decision, own_rate, section_5
from pipeline.training import HISTORY_COLUMNS
from tests.pipeline import synthetic

FEW = own_rate.Settings(
    reading="torch_defaults",
    models=["osa_qr", "vit"],
    rates=[1e-4, 1e-3],
    last_rate=1e-2,
    held_out=5,
    search_seed=7,
    seeds=[0, 1, 2],
    spreads={"osa_qr": 0.47, "vit": 0.19},
    differences=[0.0],
)


def end(lab, request, accuracy: float = 97.0, loss: float = 1.0) -> None:
    """Writes the run of a request, as if it had ended so."""
    variant, overrides, seed = request
    last = {"step": 1, "epoch": 1.0, "train_loss": loss, "test_loss": loss, "test_accuracy": accuracy / 100}
    curve = [dict.fromkeys(HISTORY_COLUMNS, 2.3) | {"step": 0, "epoch": 0.0}, dict.fromkeys(HISTORY_COLUMNS, 0.5) | last]
    synthetic.write_ended(lab.run(variant, overrides, seed), lab.config(variant, overrides), curve)


@pytest.fixture
def lab(paper_lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decision, "CLAIMS_FILE", ROOT / CLAIMS_FILE)
    monkeypatch.setattr(own_rate, "CLAIMS_FILE", ROOT / CLAIMS_FILE)
    return paper_lab


def test_the_declared_power_is_that_of_the_rule():
    """The numbers that claims.yaml declares."""
    settings = studies.settings("decision")
    assert list(settings.runs) == ["osa_qr", "vit"]
    assert all(training.seeds == [*range(15, 26)] for training in settings.runs.values())
    power = decision.powers(read_claims(CLAIMS_FILE)["osa_matches_vit"], settings.spreads, settings.differences, [11, 11])
    rates = {row["difference"]: row for row in power["rows"]}
    reproduced = [0.89, 0.65, 0.43, 0.23, 0.05]
    assert [round(rates[each]["reproduced"], 2) for each in (0, -0.15, -0.25, -0.35, -0.5)] == reproduced
    assert round(rates[-0.85]["contradicted"], 2) == 0.65
    assert [round(each, 2) for each in power["together"]] == [0.72, 0.83]
    fewer = decision.powers(read_claims(CLAIMS_FILE)["osa_matches_vit"], settings.spreads, [0.0], [5, 5])
    assert round(fewer["rows"][0]["reproduced"], 2) == 0.58


@pytest.mark.parametrize("difference, word", [(0.0, REPRODUCED), (-1.0, CONTRADICTED)])
def test_the_last_run_brings_the_verdict(lab, monkeypatch, difference, word):
    settings = studies.settings("decision")
    monkeypatch.setattr(studies, "settings", lambda name: settings)
    lab.study, lab.reading = "decision", settings.reading
    *requests, last = [each for _, each in settings.requests()]
    for variant, overrides, seed in requests:
        end(lab, (variant, overrides, seed), 97 + 0.01 * seed + (difference if variant == "osa_qr" else 0))
    summary = decision.summarise(settings, decision.STUDY.read(settings, lab), lab)
    assert (summary["verdict"], summary["rows"], decision.verdict(lab)) == (None, [], None), "no look before the end"
    end(lab, last, 97.25)
    summary = decision.summarise(settings, decision.STUDY.read(settings, lab), lab)
    assert summary["verdict"].word == decision.verdict(lab).word == word
    assert [row["accuracy"].n for row in summary["rows"]] == [11, 11]
    power = summary["power"]
    assert power["observed"] > power["rows"][0]["reproduced"], "these runs spread less than was supposed"


def test_each_model_goes_on_at_the_rate_with_the_lowest_held_out_loss(lab):
    lab.study, lab.reading = "own_rate", FEW.reading
    assert len(own_rate.trainings(FEW, lab)) == 4
    assert {changes["train"]["held_out"] for _, changes, _ in own_rate.trainings(FEW, lab)} == {5}
    for rate, loss in ((1e-4, 0.2), (1e-3, math.inf)):  # OSA diverges at the higher rate, ViT is best there
        end(lab, own_rate.search_request(FEW, "osa_qr", rate), loss=loss)
        end(lab, own_rate.search_request(FEW, "vit", rate), loss=0.4 - 200 * rate)
    extended = own_rate.search_request(FEW, "vit", 1e-2)
    requests = own_rate.trainings(FEW, lab)
    assert extended in requests and len(requests) == 8, "the long runs of OSA, and one more rate for ViT"
    end(lab, extended, loss=0.3)
    long = [each for name, each in own_rate.requests(FEW, lab) if not name.endswith("_search")]
    assert {(variant, changes["train"]["learning_rate"]) for variant, changes, _ in long} == {
        ("osa_qr", 1e-4),
        ("vit", 1e-3),
    }
    assert {seed for _, _, seed in long} == {0, 1, 2} and not any("held_out" in changes["train"] for _, changes, _ in long)
    for variant, overrides, seed in long[:-1]:
        end(lab, (variant, overrides, seed), 96.0 + 0.1 * seed if variant == "osa_qr" else 98.0 + 0.1 * seed)
    assert own_rate.summarise(FEW, own_rate.read(FEW, lab), lab)["verdict"] is None
    end(lab, long[-1], 98.2)
    summary = own_rate.summarise(FEW, own_rate.read(FEW, lab), lab)
    assert summary["verdict"].here == "not confirmed"
    assert [(row["variant"], row["rate"], row["is_at_the_edge"]) for row in summary["rows"]] == [
        ("osa_qr", 1e-4, True),
        ("vit", 1e-3, False),
    ]


def test_fresh_verdicts_take_the_place_of_table_2s(monkeypatch):
    def row(word: str, p: float) -> dict:
        return {"first": {"verdict": section_5.Verdict(word, 0.0, -1.0, 1.0, p, 5, 0.0, "above")}}

    judged = {name: row(REPRODUCED, 0.004) for name in section_5.PRIMARY}
    fresh = {decision.CLAIM: row(CONTRADICTED, 0.9)["first"]["verdict"]}
    assert section_5.headline(judged, {})["reproduced"] == 4
    head = section_5.headline(judged, fresh)
    assert (head["total"], head["reproduced"], head["contradicted"], head["together"]) == (4, 3, 1, 3)
    assert head["adjusted"]["osa_beats_noskip"] == pytest.approx(5 * 0.004), "the family is five before all have runs"
    head = section_5.headline(judged, fresh | {own_rate.CLAIM: row(REPRODUCED, 0.03)["first"]["verdict"]})
    assert (head["total"], head["reproduced"], head["together"]) == (5, 4, 3), "Holm asks more of five"
    assert head["adjusted"][own_rate.CLAIM] == pytest.approx(0.06)
