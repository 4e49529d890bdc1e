"""What a choice does to an accuracy and to Section 5's comparisons, judged over seeds, from made-up runs."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest

from pipeline.core import files, params, record
from pipeline.core.errors import UserError
from pipeline.runs import Run, history_csv
from pipeline.statistics import NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED, UNDECIDED
from pipeline.studies import Measure
from pipeline.studies.paper import left_open
from pipeline.studies.paper.left_open import Settings, choices, findings
from tests.pipeline import synthetic

DEFAULTS = {  # test accuracy by seed
    "osa_qr": [0.970, 0.972, 0.974],
    "osa_ns": [0.968, 0.970, 0.972],
    "vit": [0.968, 0.970, 0.972],
    "vit_noskip": [0.948, 0.950, 0.952],
    "vit_noskip_nonorm": [0.60, 0.65, 0.70],
}
COLUMNS = ["run", "variant", "seed", "key", "value", "default", "status", "codes", "device", "started_at", "test_accuracy"]
PIXELS = {"data": {"pixel_scaling": "standard"}}


@pytest.fixture
def lab(lab):
    """With the accuracies of Table 2's runs."""
    lab.study = "left_open"
    lab.tables = {"runs": table_2(DEFAULTS)}
    return lab


def table_2(accuracies: dict[str, list[float]]) -> pd.DataFrame:
    rows = [(variant, seed, "finished", each) for variant, of in accuracies.items() for seed, each in enumerate(of)]
    return pd.DataFrame(rows, columns=["variant", "seed", "status", "test_accuracy"])


def runs_of(*choices: tuple[str, str, list[float | None]]) -> dict[str, pd.DataFrame]:
    """The table of choices (variant, key, accuracies in per cent by seed); a run without one diverged."""
    rows = [
        dict(run=f"{variant}+{key}", variant=variant, seed=seed, key=key, value="other", default="ours")
        | {"codes": "c0de c0ffee", "device": "cpu", "started_at": "2025-11-20T18:00:00+00:00"}
        | {"status": "diverged" if accuracy is None else "finished", "test_accuracy": accuracy}
        for variant, key, accuracies in choices
        for seed, accuracy in enumerate(accuracies)
    ]
    return {"runs": pd.DataFrame(rows, columns=COLUMNS).astype({"test_accuracy": float})}


def found(lab, *choices):
    return {finding.id: finding for finding in findings(Settings(seeds=[0]), runs_of(*choices), lab)}


def test_how_many_choices_have_too_few_runs_listed_is_a_limitation(lab):
    def limitation(**settings) -> str:
        return findings(Settings(**settings), runs_of(), lab)[0].limitation

    total = len(choices(lab.paper))
    bare = sum(choice.variant == "vit_noskip_nonorm" for choice in choices(lab.paper))
    assert f"Of {total} choices that the paper leaves open {total} have fewer than 3 runs" in limitation(seeds=[0, 1])
    assert f"open {total - bare} have" in limitation(seeds=[0], more_seeds={"vit_noskip_nonorm": [0, 1, 2]})
    assert limitation(seeds=[0, 1, 2]) == limitation(seeds=[]) == ""


@pytest.mark.parametrize(
    "accuracies, verdict",  # of ViT, whose mean is 97 and whose interval with three runs each is ± 0.453
    [
        ([97.0, 97.2, 97.4], SUPPORTED),
        ([97.5, 97.7, 97.9], UNDECIDED),
        ([98.3, 98.5, 98.7], NOT_SUPPORTED),
        ([95.3, 95.5, 95.7], NOT_SUPPORTED),
        ([98.5], UNDECIDED),
        ([98.3, 98.5, None], UNDECIDED),
    ],
)
def test_a_change_is_judged_over_seeds_against_its_margin(lab, accuracies, verdict):
    finding = found(lab, ("vit", "train.eps", accuracies))["left_open_accuracy"]
    assert finding.verdict == verdict
    (measure,) = finding.measures
    values = [each for each in accuracies if each]
    assert measure.value == pytest.approx(sum(values) / len(values) - 97)
    assert measure.what == "ViT, train.eps: other" and finding.table.columns == ["Choice", "ViT"]


def test_runs_of_other_code_and_runs_older_than_the_rules_are_counted(lab, monkeypatch):
    def remark(code: str, rules_since: str) -> str:
        monkeypatch.setattr(record, "code_sha256", lambda *_: code)
        monkeypatch.setattr(lab, "paper", lab.paper.model_copy(update={"rules_since": rules_since}))
        return found(lab, ("vit", "train.eps", [97.0, 97.2]))["left_open_accuracy"].remark

    assert remark("c0ffee", "2025-11-19T00:00:00+00:00").endswith("by chance.")
    other = remark("c0ff", "2025-11-21T00:00:00+00:00")
    assert "2 of 2 runs are of other code than is here." in other
    assert "2 of 2 runs are older than the rules, which date from 2025-11-21." in other


def test_one_run_beyond_what_one_more_of_the_default_would_be_is_worth_three(lab):
    """The default's next run is expected at 97 ± 0.994."""
    choices = [("vit", "train.eps", [97.9]), ("vit", "train.betas", [98.1]), ("vit", "init.head", [95.9])]
    notes = [measure.note for measure in found(lab, *choices)["left_open_accuracy"].measures]
    assert [note.endswith("worth three seeds") for note in notes] == [False, True, True]
    assert notes[0] == "n = 1; default n = 3; 1 run, and fewer than 3 decide nothing"
    finding = found(lab, ("vit", "train.eps", [98.1, 98.1, 98.3]))["left_open_accuracy"]
    assert "worth" not in finding.measures[0].note


def test_one_of_many_choices_needs_more_to_refute_the_claim(lab):
    worst = ("vit", "train.eps", [98.3, 98.5, 98.7])
    harmless = [("vit", f"train.other_{i}", [96.9, 97.0, 97.1]) for i in range(16)]
    assert found(lab, worst)["left_open_accuracy"].verdict == NOT_SUPPORTED
    finding = found(lab, worst, *harmless)["left_open_accuracy"]
    assert finding.verdict == UNDECIDED and "not as one of 17 measures" in finding.measures[0].note


def test_the_table_of_changes_has_a_row_for_each_choice_and_a_column_for_each_model(lab):
    choices = [("vit", "train.eps", [97.5]), ("vit_noskip", "train.eps", [None]), ("vit_noskip", "init.head", [94.0])]
    finding = found(lab, *choices)["left_open_accuracy"]
    assert finding.table.columns == ["Choice", "ViT", "ViT (no skip)"]
    assert finding.table.rows == [
        ["train.eps: other\ninstead of ours", "+0.50\n−0.49 to 1.49", "n = 0, 1 diverged"],
        ["init.head: other\ninstead of ours", "–", "−1.00\n−1.99 to −0.01"],
    ]
    assert len(finding.figure.axes) == 2 and finding.models == ("vit", "vit_noskip")


def test_a_comparison_is_judged_with_the_choices_runs_in_the_place_of_its_model(lab):
    """ViT at 94 would be below ViT without skips, whose mean is 95, and OSA above it all the more."""
    finding = found(lab, ("vit", "train.eps", [93.8, 94.0, 94.2]))["left_open_comparisons"]
    verdicts = {measure.what.split(",")[0]: measure.verdict for measure in finding.measures}
    assert verdicts["ViT − ViT (no skip)"] == NOT_SUPPORTED
    assert verdicts["OSA (QR) − ViT"] == verdicts["OSA (NS) − ViT"] == SUPPORTED
    assert finding.verdict == NOT_SUPPORTED
    rows = {row[0].split("\n")[1]: row[1:] for row in finding.table.rows}
    assert rows["ViT − ViT (no skip)"] == ["+2.00", "−1.00", "train.eps: other\nViT", "1"]
    assert rows["OSA (QR) − ViT"][:2] == ["+0.70", "+3.70"], "margins count the tolerance of 0.5 points"


def test_a_choice_speaks_for_no_other_model(lab):
    """OSA (exact) computes the function of OSA (QR), but its runs are not those that the paper compares."""
    comparisons = found(lab, ("osa_exact", "train.eps", [80.0, 80.1, 80.2]))["left_open_comparisons"]
    assert comparisons.verdict == NOT_EVALUATED and comparisons.table is None


def test_one_run_of_a_choice_overturns_nothing(lab):
    """0.2 points below the other model, as the next seed may be."""
    finding = found(lab, ("osa_ns", "variants.osa_ns.epsilon", [94.8]))["left_open_comparisons"]
    assert finding.verdict == UNDECIDED and min(measure.value for measure in finding.measures) < 0


def test_runs_of_other_settings_than_the_recipe_are_no_reference(lab):
    choice = ("vit", "init.head", [97.0, 97.2, 97.4])
    lab.params = lab.params.model_copy(update={"train": lab.params.train.model_copy(update={"epochs": 1})})
    told = found(lab, choice)
    assert {told[name].verdict for name in ("left_open_accuracy", "left_open_comparisons")} == {NOT_EVALUATED}
    assert told["left_open_differences"].in_short == "No run of Table 2 is by the paper's recipe."


def test_differences_to_the_paper_stand_beside_one_more_run(lab):
    """The t-quantile of three seeds is 4.303. The paper has 97.2, 96.9, 97.2, 94.6 and 79.6."""
    choices = [("vit_noskip", "init.head", [94.0]), ("vit_noskip", "train.eps", [95.3])]
    finding = found(lab, *choices)["left_open_differences"]
    rows = {row[0]: row[1:] for row in finding.table.rows}
    assert rows["ViT"] == ["97.2", "97.00", "−0.20", "96.01 to 97.99", "the default"]
    assert rows["ViT (no skip)"][-1] == "the default; init.head: other; train.eps: other"
    assert rows["ViT (no skip, no LN)"][-2:] == ["40.16 to 89.84", "the default"]
    measure = finding.measures[0]
    half = 4.302653 * 0.2 * math.sqrt(4 / 3)
    assert (measure.value, measure.low, measure.high, measure.n) == pytest.approx((0, -half, half, 3), abs=1e-5)
    lab.tables["runs"] = table_2({"vit": [0.99, 0.9901, 0.9902], "osa_ns": [0.97]})
    rows = {row[0]: row[-1] for row in found(lab, ("vit", "init.head", [97.2]))["left_open_differences"].table.rows}
    assert (rows["ViT"], rows["OSA (NS)"], rows["OSA (QR)"]) == ("init.head: other", "–", "–")


def test_where_one_more_run_is_expected_is_an_accuracy():
    assert left_open.expected([99.0, 95.0, 90.0])[1] == 100
    assert left_open.expected([1.0, 5.0, 10.0])[0] == 0


def test_what_is_left_open_is_listed_with_our_value_and_its_key(lab):
    finding = found(lab)["left_open_choices"]
    rows = {row[0]: row[1:] for row in finding.table.rows}
    assert len(rows) == len(lab.paper.left_open) == finding.measures[0].value
    assert rows["Pixel scaling"][:2] == ["not stated", "unit\ndata.pixel_scaling"]
    assert rows["Learning rate schedule"][1] == "none"


def test_with_nothing_tried_or_nothing_trained_there_is_nothing_to_judge(lab):
    def verdicts():
        return [finding.verdict for finding in findings(Settings(seeds=[]), runs_of(), lab)[:2]]

    assert verdicts() == [NOT_EVALUATED, NOT_EVALUATED]
    lab.tables = {}
    assert verdicts() == [NOT_EVALUATED, NOT_EVALUATED]
    assert found(lab, ("vit", "train.eps", [97.0]))["left_open_accuracy"].verdict == NOT_EVALUATED


def test_every_alternative_is_trained_on_each_model_and_measuring_takes_what_it_left(lab, monkeypatch):
    topics = [
        params.OpenChoice(
            topic="a", paper="b", why="c", key="data.pixel_scaling", alternatives=["standard"], try_on=["vit"]
        ),
        params.OpenChoice(
            topic="a", paper="b", why="c", key="variants.osa_ns.epsilon", alternatives=[1e-3], try_on=["osa_ns"]
        ),
    ]
    monkeypatch.setattr(lab, "paper", lab.paper.model_copy(update={"left_open": topics}))
    settings, epsilon = Settings(seeds=[0], more_seeds={"osa_ns": [0, 1]}), {"variant": {"epsilon": 1e-3}}
    trainings = left_open.trainings(settings, lab)
    assert trainings == [("vit", PIXELS, 0), ("osa_ns", epsilon, 0), ("osa_ns", epsilon, 1)]
    for variant, overrides, seed in trainings:
        run = Run(variant, seed, "left_open", overrides)
        files.write_text(run.folder / "history.csv", history_csv([]))
        losses = {"train_loss": 0.1, "test_loss": 0.1, "test_accuracy": 0.961}
        files.write_json(run.folder / "metrics.json", {"diverged": seed == 1} | losses)
        files.write_json(run.folder / "record.json", synthetic.record(lab.config(variant, overrides), run, "da7a"))
    runs = left_open.measure(settings, lab)["runs"]
    assert runs["run"].unique().tolist() == ["vit+data.pixel_scaling=standard", "osa_ns+variant.epsilon=0.001"]
    assert runs["status"].tolist() == ["finished", "finished", "diverged"]
    assert runs[["value", "default"]].drop_duplicates().values.tolist() == [["standard", "unit"], ["0.001", "1e-07"]]
    assert runs["test_accuracy"].tolist() == pytest.approx([96.1, 96.1, math.nan], nan_ok=True)
    assert runs["codes"].iloc[0] == "c0de" * 16 and not runs["git_dirty"].iloc[0]
    files.write_csv("runs.csv", runs)
    read = findings(settings, {"runs": files.read_csv("runs.csv")}, lab)
    assert [measure.note.split(";")[0] for measure in read[0].measures] == ["n = 1", "n = 1, 1 diverged"]


def test_what_is_not_trained_is_missing(lab):
    runs = left_open.measure(Settings(seeds=[0]), lab)["runs"]
    assert set(runs["status"]) == {"missing"} and len(runs) == len(left_open.choices(lab.paper)) == 17
    finding = findings(Settings(seeds=[0]), {"runs": runs}, lab)[0]
    assert finding.verdict == NOT_EVALUATED and finding.figure is None
    assert finding.measures[0].note == "n = 0, 1 missing; default n = 3; no run"


def test_without_seeds_nothing_is_trained(lab):
    assert left_open.trainings(Settings(seeds=[], more_seeds={"vit": [0]}), lab) == []
    with pytest.raises(UserError, match=r"^params.yaml: left_open.more_seeds.vit_nonrm is no model: name one of osa_qr, "):
        left_open.trainings(Settings(seeds=[0], more_seeds={"vit_nonrm": [0, 1]}), lab)
    assert left_open.measure(Settings(seeds=[]), lab)["runs"].empty


def test_a_key_of_a_variant_that_is_not_there_has_no_value(lab):
    topic = SimpleNamespace(key="variants.gone.epsilon", ours=None)
    assert left_open.value_of(topic, lab) == "–\nvariants.gone.epsilon"


def test_changes_beyond_the_margin_are_named_before_they_are_decided():
    far, near = ({"verdict": UNDECIDED, "n": 1, "low": low, "high": low + 4} for low in (1.5, 0.5))
    measures = [Measure("ViT, a", 3.5, **far), Measure("ViT, b", 2.5, **near), Measure("ViT, c", math.nan, n=0, verdict="")]
    assert left_open.changed(measures[1:2]) == "Choices that are undecided: 1."
    assert left_open.changed(measures).endswith(
        "The whole interval is beyond the margin, which decides nothing with few runs, or of one choice among 3, for ViT, a "
        "+3.50 (1.50 to 5.50; n = 1)."
    )
    decided = Measure("ViT, d", -9.0, verdict=NOT_SUPPORTED, n=3, low=-9.5, high=-8.5)
    told = left_open.changed([decided, *measures[1:2]])
    assert told == "Choices that are not supported: 1; undecided: 1. Not supported is ViT, d −9.00 (−9.50 to −8.50; n = 3)."
    assert left_open.changed([]) == ""
