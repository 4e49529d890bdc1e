"""Which runs of deep models are wanted, in which order, what is gathered of them, and verdicts on both sides of a limit."""

import math

import pandas as pd
import pytest

from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.core.params import as_options, parse_overrides
from pipeline.runs import Run
from pipeline.statistics import NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED, UNDECIDED
from pipeline.studies import _deep
from pipeline.studies._deep import GUESSING, gather, judged_claims, read_claims
from pipeline.studies.deep import depth
from pipeline.studies.deep.depth import Settings, findings, measure, wanted
from pipeline.tools import pilot
from tests.pipeline import synthetic

MODELS = ["osa_shaped", "vit", "alpha"]
SETTINGS = Settings(models=MODELS, depths=[[36, 2], [12, 1]], seeds=[0], claim_seeds=[0, 1])
RATES = {"osa_shaped": (3e-5, 1.0), "vit": (1e-4, 0.36)}


@pytest.fixture
def lab(lab, monkeypatch):
    """After a pilot of two kinds of models."""
    lab.study = "depth"
    monkeypatch.setattr(pilot, "found", lambda model, usual, depth: RATES.get(model))
    return lab


def leave(lab, variant, overrides, seed, **metrics):
    """The files of a finished run."""
    run = Run(variant, seed, "depth", overrides)
    history = pd.DataFrame(
        [dict.fromkeys(["step", "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy"], 1)]
    )
    files.write_csv(run.folder / "history.csv", history)
    last = {"diverged": False, "train_loss": 0.4, "test_loss": 0.5, "test_accuracy": 0.9} | metrics
    files.write_json(run.folder / "metrics.json", last)
    files.write_json(run.folder / "record.json", synthetic.record(lab.config(variant, overrides), run, "da7a"))


def made_up(losses: dict[tuple[str, int], list[float | None]]) -> dict[str, pd.DataFrame]:
    """The tables of runs with these last train losses, by model and depth; one without a loss diverged."""
    rows = [
        {"variant": model, "depth": blocks, "seed": seed, "status": "diverged" if loss is None else "finished"}
        | {
            "train_loss": loss,
            "test_accuracy": 0.9,
            "seconds_per_step": 2.0,
            "learning_rate": 1e-4,
            "codes": "c0de",
            "device": "cpu",
        }
        for (model, blocks), each in losses.items()
        for seed, loss in enumerate(each)
    ]
    histories = [
        {"variant": model, "depth": blocks, "seed": seed, "epoch": epoch, "train_loss": loss, "test_accuracy": 0.9}
        for (model, blocks), each in losses.items()
        for seed in range(len(each))
        for epoch, loss in enumerate((2.3, 1.0))
    ]
    columns = ["variant", "depth", "seed", *_deep.RUN]
    runs = pd.DataFrame(rows, columns=columns).astype({"train_loss": float})
    return {
        "runs": runs,
        "histories": pd.DataFrame(histories, columns=[*columns[:3], "epoch", "train_loss", "test_accuracy"]),
    }


def test_the_runs_that_are_wanted_in_the_order_of_training(lab):
    """One of each model, depth by depth; then more of osa_shaped and vit at 36 blocks, which claims are about."""
    settings = SETTINGS.model_copy(update={"models": [*MODELS, "espa"]})  # which the pilot has not come to
    found = wanted(settings, lab)
    cells = [(model, blocks, 0) for blocks in (36, 12) for model in MODELS]
    assert list(found) == [*cells, ("osa_shaped", 36, 1), ("vit", 36, 1)]
    shaped = {"train": {"epochs": 2, "learning_rate": 3e-5}, "model": {"depth": 36}, "variant": {"alpha_times_depth": 1.0}}
    assert found["osa_shaped", 36, 1] == ("osa_shaped", shaped, 1)
    assert found["alpha", 36, 0] == ("osa_shaped", shaped | {"variant": {"alpha_times_depth": None}}, 0)
    vit = {"train": {"epochs": 1, "learning_rate": 1e-4}, "model": {"depth": 12}}
    assert found["vit", 12, 0] == ("vit", vit, 0)
    assert depth.trainings(settings, lab) == list(found.values())
    deep = wanted(settings.model_copy(update={"depths": [[72, 1]]}), lab)
    slower = {seed: overrides for (model, _, seed), (_, overrides, _) in deep.items() if model == "slower"}
    usual = deep["osa_shaped", 72, 0][1]
    assert slower == dict.fromkeys([0, 1], usual | {"train": usual["train"] | {"learning_rate": 1e-5}})
    options = [as_options(overrides)[1::2] for _, overrides, _ in found.values()]
    assert [parse_overrides(each) for each in options] == [overrides for _, overrides, _ in found.values()]


def test_gathering_trains_nothing_and_a_run_of_another_configuration_is_missing(lab, monkeypatch):
    monkeypatch.setattr(lab, "train", lambda *_: pytest.fail("trains"))
    asked = wanted(SETTINGS, lab)
    leave(lab, *asked["osa_shaped", 36, 0])
    leave(lab, *asked["vit", 36, 0], diverged=True, train_loss=None)
    leave(lab, *asked["alpha", 36, 0])
    record = Run("osa_shaped", 0, "depth", asked["alpha", 36, 0][1]).folder / "record.json"
    files.write_json(record, files.read_json(record) | {"config": lab.config("vit").model_dump()})
    tables = measure(SETTINGS, lab)
    statuses = tables["runs"].set_index(["variant", "depth", "seed"])["status"]
    assert statuses["osa_shaped", 36, 0] == "finished" and statuses["vit", 36, 0] == "diverged"
    assert (statuses == "missing").sum() == len(asked) - 2
    row = tables["runs"].iloc[0]
    assert row["seconds_per_step"] == pytest.approx(8 / 1234.5) and row["learning_rate"] == 3e-5
    assert tables["histories"][["variant", "depth"]].drop_duplicates().values.tolist() == [["osa_shaped", 36], ["vit", 36]]


def test_with_nothing_trained_every_cell_and_claim_is_not_evaluated(lab):
    files.write_csv("nothing/runs.csv", gather(wanted(SETTINGS, lab), lab)["runs"])
    tables = {"runs": files.read_csv("nothing/runs.csv"), "histories": made_up({})["histories"]}
    answer, _, *claims, of_pilot = findings(SETTINGS, tables, lab)
    assert answer.figure is None and answer.headlines == ()
    assert all(cell == "not evaluated" for row in answer.table.rows for cell in row[2:4])
    assert answer.in_short.startswith("None of 3 models is trained yet.")
    assert {claim.verdict for claim in claims} == {NOT_EVALUATED} and len(claims) == 5
    assert of_pilot.table is None
    answer, *_ = findings(SETTINGS.model_copy(update={"models": ["espa", "vit"]}), made_up({}), lab)
    assert [row[4] for row in answer.table.rows] == ["2.79", "1.76"], "what He et al. report"


@pytest.mark.parametrize(
    "losses, word, headline",
    [
        (
            [0.4],
            "trains",
            "OSA (shaped), our OSA made for depth, gets to a train loss of 0.40 at 36 blocks without skips and LN in 2 "
            "epochs (test accuracy 90.0%; one seed, which decides nothing). Lower in loss or "
            "higher in accuracy, untested: ViT with skips and LN 0.20 (90.0%).",
        ),
        (
            [0.4, 0.5, 0.6],
            "trains",
            "made for depth, trains at 36 blocks without skips and LN in 2 epochs (last train loss 0.50, where below 1.15 "
            "is asked; test accuracy 90.0 ± 0.0%; 3 seeds: supported). Lower in loss or higher in accuracy, untested: "
            "ViT with skips and LN 0.20 (90.0%; one seed).",
        ),
        (
            [0.3, 0.5, 1.14],
            "trains",
            "without skips and LN in 2 epochs (last train loss 0.65, where below 1.15 is asked; test accuracy 90.0 ± 0.0%; "
            "3 seeds: undecided).",
        ),
        (
            [1.5],
            "undecided",
            "not shown to train at 36 blocks without skips and LN in 2 epochs: its train loss ends at 1.50 (one seed",
        ),
        (
            [0.3, 0.3, 2.3],
            "undecided",
            "36 blocks without skips and LN in 2 epochs: its train loss ends at 0.30 to 2.30 (3 seeds: undecided)",
        ),
        (
            [0.3, None],
            "undecided",
            "its train loss ends at 0.30, and 1 of its runs diverges (2 seeds, which decide nothing).",
        ),
        (
            [2.1],
            "does not",
            "OSA (shaped), our OSA made for depth, gets to a train loss of 0.30 at 12 blocks without skips and LN in 1 "
            "epoch (test accuracy 90.0%; one seed, which decides nothing). OSA (shaped) is not shown to train at 36 blocks "
            "without skips and LN in 2 epochs: its train loss ends at 2.10 (one seed, which decides nothing).",
        ),
        ([None], "does not", "without skips and LN in 2 epochs: 1 of its runs diverges (one seed"),
    ],
)
def test_the_answer_and_what_the_first_screen_says(lab, losses, word, headline):
    tables = made_up({("osa_shaped", 36): losses, ("osa_shaped", 12): [0.3], ("vit", 36): [0.2]})
    answer, *_ = findings(SETTINGS, tables, lab)
    assert headline in " ".join(answer.headlines)
    cells = answer.table.rows[0]
    assert cells[1] == "1 × 10⁻⁴" and cells[4] == "–"
    assert cells[2].startswith("trains\n0.30; 90.0%") and cells[3].split("\n")[0] == word
    others = "1 trains: ViT. {}: OSA (shaped)."
    listed = "2 train: OSA (shaped); ViT." if word == "trains" else others.format(word.capitalize())
    assert f"with 2 of 3 models tried, {listed}" in answer.in_short
    several = f"n = {sum(loss is not None for loss in losses)}" + ", 1 diverged" * (None in losses)
    assert cells[3].endswith(several) == (losses not in ([0.4], [1.5], [2.1])), "of one run it is not said"
    assert [text.get_text() for text in answer.figure.legends[0].get_texts()] == ["OSA (shaped)", "ViT"]


def test_a_single_depth_at_which_osa_does_not_train_is_told(lab):
    alone, *_ = findings(SETTINGS, made_up({("osa_shaped", 36): [2.1]}), lab)
    (line,) = alone.headlines
    assert line.startswith("OSA (shaped), our OSA made for depth, is not shown to train at 36 blocks")
    assert line.endswith("(one seed, which decides nothing).")


def test_where_osa_ends_at_the_next_lower_rate_is_told(lab):
    settings = Settings(models=MODELS, depths=[[12, 2], [72, 1]], seeds=[0], claim_seeds=[0, 1, 2])
    usual = {("osa_shaped", 72): [25.0, None, 0.5], ("vit", 72): [0.2]}
    for losses, told in {
        (): "its train loss ends at 0.50 to 25.00, and 1 of its runs diverges (3 seeds: undecided).",
        (0.5, 0.6): "; at the next lower rate, 1 × 10⁻⁴, its train loss ends at 0.50 to 0.60 (2 seeds).",
        (19.0, 0.6): "; at the next lower rate, 1 × 10⁻⁴, its train loss ends at 0.60 to 19.00 (2 seeds).",
    }.items():
        answer, *rest = findings(settings, made_up(usual | {("slower", 72): losses}), lab)
        assert answer.headlines[-1].endswith(f"{told} At that depth ViT with skips and LN gets to 0.20 (90.0%; one seed).")
        labels = [row[0] for row in answer.table.rows]
        assert labels == ["OSA (shaped)", "ViT", "OSA (shaped), α = 0.1", *["OSA (shaped), next lower rate"] * bool(losses)]
        assert answer.in_short.startswith("At 72 blocks, with 2 of 3 models tried"), "it is none of its own"
    drawn = [text.get_text() for text in answer.figure.legends[0].get_texts()]
    assert drawn == ["OSA (shaped)", "ViT", "OSA (shaped), next lower rate"]
    verdicts = {finding.id: finding.verdict for finding in rest}
    assert verdicts["osa_slower_trains_at_72"] == UNDECIDED
    (slower,) = next(finding.measures for finding in rest if finding.id == "osa_slower_trains_at_72")
    assert slower.what.endswith("last train loss, the mean of 19 and 0.6,") and slower.value == 9.8
    assert answer.table.rows[-1][2:4] == ["–", "undecided\n19.00 and 0.60; 90.0% and 90.0%; n = 2"]


def test_a_panel_without_a_visible_line_says_why(lab):
    tables = made_up({("osa_shaped", 36): [25.0], ("osa_shaped", 12): [0.3], ("vit", 12): [0.2]})
    tables["histories"].loc[tables["histories"]["depth"] == 36, "train_loss"] = 25.0
    answer, *_ = findings(SETTINGS, tables, lab)
    shown = [[text.get_text() for text in axes.texts] for axes in answer.figure.axes]
    assert shown == [[], ["higher throughout"]]


def test_the_first_screen_speaks_of_the_greatest_depth_that_was_tried(lab):
    answer, *_ = findings(SETTINGS, made_up({("osa_shaped", 12): [0.3], ("vit", 36): [0.2]}), lab)
    assert answer.headlines[0].startswith("OSA (shaped), our OSA made for depth, gets to a train loss of 0.30 at 12 blocks")
    at_each = {12: "OSA (shaped)", 36: "ViT"}.items()
    told = [f"At {depth} blocks, with 1 of 3 models tried, 1 trains: {name}." for depth, name in at_each]
    assert answer.in_short == " ".join(told)


NEAR = [0.49 * GUESSING, 0.495 * GUESSING, 0.49 * GUESSING]


@pytest.mark.parametrize(
    "losses, trains, does_not",
    [
        ([0.3, 0.31, 0.32], SUPPORTED, NOT_SUPPORTED),
        (NEAR, SUPPORTED, UNDECIDED),
        ([loss + 0.02 * GUESSING for loss in NEAR], UNDECIDED, UNDECIDED),
        ([0.3, 0.3, 2.3], UNDECIDED, UNDECIDED),
        ([loss + 0.42 * GUESSING for loss in NEAR], NOT_SUPPORTED, SUPPORTED),
        (NEAR[:2], UNDECIDED, UNDECIDED),
        ([*NEAR, None], UNDECIDED, UNDECIDED),
        ([None] * 3, UNDECIDED, UNDECIDED),
    ],
)
def test_training_is_judged_over_seeds_on_both_sides_of_its_limits(lab, losses, trains, does_not):
    models = ("osa_shaped", "softmax_shaped", "softmax_shaped_norm")
    tables = made_up({(model, 36): losses for model in models})
    verdicts = {claim.id: claim.verdict for claim in judged_claims([36], tables, lab, lab.label)}
    assert (verdicts["osa_trains_at_36"], verdicts["softmax_does_not_train"]) == (trains, does_not)
    assert verdicts["espa_lowest_loss"] == NOT_EVALUATED and "osa_trains_at_72" not in verdicts


def test_the_lower_loss_is_judged_at_its_depth(lab):
    losses = {"espa": [0.30, 0.31, 0.32], "uspa": [0.50, 0.51, 0.52], "vskipinit": [0.60, 0.61, 0.62]}
    tables = made_up({(model, 36): each for model, each in losses.items()} | {("espa", 12): [9.0, 9.1, 9.2]})
    (claim,) = [each for each in judged_claims([36], tables, lab, lab.label) if each.id == "espa_lowest_loss"]
    assert claim.verdict == SUPPORTED
    assert [measure.value for measure in claim.measures] == pytest.approx([-0.2, -0.3])


def test_two_runs_have_no_interval_and_three_that_decide_nothing_say_how_many_would(lab):
    def measure(losses: list[float]):
        claims = judged_claims([36], made_up({("osa_shaped", 36): losses}), lab, lab.label)
        return next(claim for claim in claims if claim.id == "osa_trains_at_36").measures[0]

    two, three = measure([0.3, 2.3]), measure([0.3, 0.9, 1.5])
    assert math.isnan(two.low) and math.isnan(two.high) and two.verdict == UNDECIDED
    assert three.low < 0.9 < three.high and three.note.endswith("seeds would decide it")


def test_what_was_known_and_which_rates_were_sought_less_is_told_of_each_claim(lab, monkeypatch):
    rates = {"vskipinit": (3e-4, 0.36), "vit": (1e-4, 0.36)}
    monkeypatch.setattr(pilot, "found", lambda model, usual, depth: rates.get(model))
    told = {finding.id: finding.remark for finding in findings(SETTINGS, made_up({("espa", 36): [0.3]}), lab)}
    assert told["espa_lowest_loss"] == (
        "Without a pilot of its own, U-SPA has the rate of E-SPA. The rate of V-SkipInit is the highest of those tried, so "
        "that a better one may lie beyond."
    )
    assert told["osa_trains_at_36"].startswith("The rule is older than its runs") and told["default_stays_faster"] == ""


def test_the_claims_are_about_models_that_are_trained(lab):
    """At each depth that a claim names, by the parameters of the repository."""
    claims, settings = read_claims(lab.paper), pilot.params.load(synthetic.ROOT / "params.yaml")
    trained = {(model, blocks) for model in depth.with_slower(settings.depth.models) for blocks, _ in settings.depth.depths}
    trained |= {(model, 6) for model in [*settings.six_blocks.models, "vit"]}
    assert {(model, claim.depth) for claim in claims.values() for model in claim.models} <= trained
    assert all("{" not in claim.rule() for claim in claims.values())


def test_a_claim_that_is_not_as_its_rule_needs_it(lab):
    wrong = lab.paper.deep_claims | {"a": lab.paper.deep_claims["osa_trains_at_36"] | {"depth": 0}}
    with pytest.raises(UserError, match=r"deep_claims.a.depth should be greater than 0"):
        read_claims(lab.paper.model_copy(update={"deep_claims": wrong}))


def test_what_the_pilot_did_is_told(lab, monkeypatch):
    rates = RATES | {"osa_shaped": (3e-5, pilot.FIRST_ALPHA), "osa_exact": (3e-4, pilot.FIRST_ALPHA)}
    monkeypatch.setattr(pilot, "found", lambda model, usual, depth: rates.get(model) if depth == pilot.DEPTH else None)
    cells = [(3e-5, pilot.FIRST_ALPHA, 1.2), (1e-4, pilot.FIRST_ALPHA, 1.4), (3e-5, 1.0, 1.3)]
    rows = [*(("osa_shaped", *cell) for cell in cells), ("vit", 1e-4, math.nan, 0.5), ("vit", 3e-4, math.nan, 0.7)]
    rows += [("osa_exact", rate, pilot.FIRST_ALPHA, 2.302) for rate in (1e-4, 3e-4)]
    table = pd.DataFrame(rows, columns=["model", "learning_rate", "alpha_times_depth", "loss"])
    table = table.assign(depth=pilot.DEPTH, steps=pilot.SEARCHES[pilot.DEPTH].steps)
    deeper = table.iloc[:1].assign(depth=72, steps=pilot.SEARCHES[72].steps, loss=math.nan)
    files.write_csv(pilot.TABLE, pd.concat([table, deeper]).assign(seed=pilot.SEED))
    finding = depth.of_the_pilot(lab)
    chosen = [tuple(row[:3]) for row in finding.table.rows if row[-1]]
    assert chosen == [("36", "OSA (exact)", "3 × 10⁻⁴"), ("36", "OSA (shaped)", "3 × 10⁻⁵"), ("36", "ViT", "1 × 10⁻⁴")]
    assert finding.table.rows[-1] == ["72", "OSA (shaped)", "3 × 10⁻⁵", "0.36", "diverged", ""]
    assert (
        finding.in_short
        == "Rates at 36 blocks: OSA (shaped) 3 × 10⁻⁵; ViT 1 × 10⁻⁴; OSA (exact) 3 × 10⁻⁴; OSA (shaped) has α = 0.36/L."
    )
    assert "At 36 blocks no rate learns, so that it is the paper’s: OSA (exact)." in finding.remark
    assert "At 36 blocks at an end of the rates tried, so that a better one may lie beyond: OSA (shaped)." in finding.remark


def test_the_parts_are_told_at_every_depth_up_to_that_of_the_signals(lab):
    tables = made_up({("osa_shaped", 12): [0.3], ("gelu", 12): [2.2], ("osa_shaped", 36): [0.4]})
    _, parts, *_ = findings(SETTINGS, tables, lab)
    told = {row[0]: [cell.split("\n")[0] for cell in row[-2:]] for row in parts.table.rows}
    assert told["OSA (shaped)"] == ["trains", "trains"]
    assert told["OSA (shaped), GELU rescaled, not shaped"] == ["does not", "not evaluated"]
    assert parts.table.columns[-2:] == ["Trained, 12", "Trained, 36"]
    assert (
        parts.in_short
        == "At 12 blocks OSA (shaped), with one change left out at a time and the same rate, does not train without shaped "
        "activations."
    )


@pytest.mark.parametrize(
    "losses, said",
    [
        ({}, ""),
        ({"osa_shaped": 2.3, "tokens": 2.3, "alpha": 0.3}, ""),
        ({"osa_shaped": 0.3, "osa_exact": 1.0}, ""),
        (
            {"osa_shaped": 0.3, "tokens": 0.4, "per_head": 0.5},
            "trains without V and O drawn jointly or without normalised tokens.",
        ),
        (
            {"osa_shaped": 0.3, "alpha": 2.3, "tokens": 1.5, "softmax_shaped": 0.5},
            "does not train without α that falls with depth, is undecided without normalised tokens; softmax in the same "
            "frame trains too, so that training does not need OSA’s attention.",
        ),
        (
            {"osa_shaped": 0.3, "osa_exact": 1.0, "gelu": None, "softmax_shaped": 2.3},
            "does not train without shaped activations; OSA (exact), which has none of them, trains too at another "
            "rate; softmax in the same frame does not train.",
        ),
    ],
)
def test_what_osa_needs_is_told_of_what_was_left_out(losses, said):
    runs = made_up({(model, 36): [loss] for model, loss in losses.items()})["runs"]
    assert depth.needed(runs, 36) == (
        f"At 36 blocks OSA (shaped), with one change left out at a time and the same rate, {said}" if said else ""
    )


def test_what_cls_knows_of_the_image_is_the_signals_number(lab, monkeypatch, tmp_path):
    monkeypatch.setattr(depth, "SIGNALS", str(tmp_path))
    shares = {("softmax_shaped", 1): 0.9, ("softmax_shaped", 36): 0.443, ("vskipinit", 36): 1e-32}
    rows = [{"model": model, "depth": blocks, "seed": 0, "image_share": share} for (model, blocks), share in shares.items()]
    files.write_csv(tmp_path / "wholes.csv", pd.DataFrame(rows))
    assert depth.of_the_task(36, lab).endswith("is 0.443 in Softmax (shaped) and 0 in V-SkipInit.")
    assert depth.of_the_task(12, lab).endswith("is – in Softmax (shaped) and – in V-SkipInit.")


@pytest.mark.parametrize(
    "losses, end",
    [
        (
            [],
            "; softmax attention with the same MLPs, Softmax (shaped), is not tried there, and trains at 12.",
        ),
        ([0.6], "; softmax attention with the same MLPs, Softmax (shaped), gets to 0.60 (90.0%)."),
        (
            [0.3],
            "Softmax (shaped), gets to 0.30 (90.0%). Lower in loss or higher in accuracy, untested: Softmax (shaped) 0.30 "
            "(90.0%).",
        ),
        ([1.5], "; of softmax attention with the same MLPs, Softmax (shaped), it is undecided."),
        ([2.3], "; softmax attention with the same MLPs, Softmax (shaped), does not."),
    ],
)
def test_the_first_screen_names_the_control_beside_osa(lab, losses, end):
    tables = made_up({("osa_shaped", 36): [0.4], ("softmax_shaped", 36): losses, ("softmax_shaped", 12): [0.2]})
    answer, *_ = findings(SETTINGS, tables, lab)
    assert answer.headlines[-1].endswith(end)


def test_what_diverged_is_not_lower_and_what_ends_higher_with_depth_is_told(lab):
    losses = {("osa_shaped", 36): [0.4], ("vit", 36): [0.2, None], ("softmax_shaped", 36): [0.3, 0.3]}
    settings = Settings(models=[*MODELS, "softmax_shaped"], depths=[[12, 2], [36, 2], [72, 1]], seeds=[0], claim_seeds=[0])
    less = {("osa_shaped", 12): [0.5], ("vit", 12): [0.1], ("vskipinit", 12): [1.5]}
    answer, *_ = findings(settings, made_up(losses | less), lab)
    assert answer.headlines[-1].endswith(
        "Lower in loss or higher in accuracy, untested: Softmax (shaped) 0.30 and 0.30 (90.0% and 90.0%; 2 seeds)."
    )
    assert "1 of 2 models that were trained at 12 and 36 blocks end higher at 36." in answer.remark
    answer, *_ = findings(settings, made_up(losses), lab)
    assert "Table 3)" not in answer.remark


def test_accuracies_that_fall_are_told(lab):
    histories = pd.DataFrame(
        [("vit", 36, 0, epoch, accuracy) for epoch, accuracy in ((1, 0.99), (1.5, 0.95), (1.75, 0.9), (2, 0.93))]
        + [("espa", 36, 0, epoch, accuracy) for epoch, accuracy in ((1.5, 0.5), (2, 0.9))],
        columns=["variant", "depth", "seed", "epoch", "test_accuracy"],
    )
    assert depth.of_accuracy(histories, lab).endswith(
        "in one run, ViT at 36 blocks with seed 0, it falls by 2.0 points within the last half epoch, the most of all."
    )
