"""Six blocks, side by side: what does each way to do without skips or LN come to in the paper's own setting? Theirs was
that of language models with 36 blocks.

Six blocks, ten epochs and the paper's recipe, in the form of Table 2, whose runs stand beside them. The stage gathers the
runs that are there; `python -m pipeline.tools.fan_out --only` trains the others.
"""

import math

import pandas as pd
from pydantic import Field

from pipeline.core.params import AnySeeds, Name, Overrides, Section
from pipeline.lab import Lab
from pipeline.report.numbers import ABSENT, fixed, interval, mean_std, signed, span
from pipeline.statistics import summarise
from pipeline.studies import OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._deep import Wanted, gather, judged_claims, results_at
from pipeline.studies._runs import Request, of_other_code
from pipeline.studies._trained import left_out
from pipeline.studies.paper.section_5 import Results, is_trained, known, of_recipe, progress
from pipeline.tools import pilot

place = 54
gathers = True
MODELS = ("vskipinit", "uspa", "espa", "softmax_shaped", pilot.OSA, "espa_skip", "softmax_skip", "softmax_skip_nonorm")
MODELS += ("softmax_shaped_norm", "uspa_causal", "espa_causal")  # in the order of training
BESIDE = ("vit", "vit_noskip_nonorm", "osa_exact")  # of Table 2, for comparison
RUNS = "paper_outputs/tables/runs.csv"
CHOICES: dict[str, tuple[str, Overrides, str]] = {  # a name, its model, what is replaced there, and a label
    "espa_slow": ("espa", {"variant": {"kernel_last": 0.005}}, "γ_L = 0.005, not 0.05"),
    "espa_fast": ("espa", {"variant": {"kernel_last": 0.2}}, "γ_L = 0.2, not 0.05"),
    "espa_cls_first": ("espa", {"variant": {"cls_index": 0}}, "[cls] first, not in the middle"),
    "espa_gelu": ("espa", {"variant": {"activation": "gelu"}}, "GELU, not shaped"),
    "espa_norm": ("espa", {"variant": {"norm": True}}, "LN"),
    "espa_raw_tokens": (
        "espa",
        {"init": {"embedding_std": 1.0}, "variant": {"normalise_tokens": False}},
        "Positions of σ = 1, and tokens not normalised",
    ),
    "espa_zero_key": ("espa", {"variant": {"query_key_init": "zero_key"}}, "W^K = 0, not W^Q"),
    "espa_small": ("espa", {"variant": {"query_key_init": "small"}}, "W^Q and W^K small, not W^Q = 0"),
    "espa_gaussian": ("espa", {"variant": {"value_out_init": "gaussian"}}, "W^V and W^O Gaussian, not orthogonal"),
    "espa_no_decay": ("espa", {"train": {"weight_decay": 0.0}}, "No weight decay"),
    "uspa_slow": ("uspa", {"variant": {"kernel_last": 0.6}}, "ρ_L = 0.6, not 0.8"),
}
ALIKE = 0.5  # points
EXPECTED = {  # what the change of the accuracy lies between by what He et al. say, in points
    "espa_norm": (-math.inf, ALIKE),  # LN is unimportant, or harmful (Table 1)
    "espa_zero_key": (-ALIKE, ALIKE),  # the three ways perform similarly (Section 3.3)
    "espa_small": (-ALIKE, ALIKE),
    "espa_gaussian": (-math.inf, 0.0),  # orthogonal is slightly better (Figure 9)
}


class Settings(Section):
    """Each model once for each of `seeds`, and then each of `CHOICES` for `choice_seeds`."""

    models: list[Name] = Field(list(MODELS))
    seeds: AnySeeds
    choice_seeds: AnySeeds


def trainings(settings: Settings, lab: Lab) -> list[Request]:
    return list(wanted(settings, lab).values())


def wanted(settings: Settings, lab: Lab) -> Wanted:
    """Every run, seed by seed, and then the choices; OSA shaped for depth has the α L of the pilot, and waits for it."""
    found, depth = {}, lab.paper.recipe.model.depth
    for seed in settings.seeds:
        for model in settings.models:
            if model != pilot.OSA:
                found[model, depth, seed] = (model, {}, seed)
            elif chosen := pilot.found(pilot.OSA, lab.paper.recipe.train.learning_rate):
                found[model, depth, seed] = (model, {"variant": {"alpha_times_depth": chosen[1]}}, seed)
    for seed in settings.choice_seeds:
        for name, (model, changes, _) in CHOICES.items():
            if model in settings.models:
                found[name, depth, seed] = (model, changes, seed)
    return found


def measure(settings: Settings, lab: Lab) -> Tables:
    return gather(wanted(settings, lab), lab)


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    depth = lab.paper.recipe.model.depth
    together, references = {}, of_recipe(lab)
    for name, own in tables.items():
        filled = [table for table in (own, beside(references, name, depth)) if len(table)]  # an empty one has no types
        together[name] = pd.concat(filled or [own])
    return [
        side_by_side(settings, depth, together, of_other_code(tables["runs"]), lab),
        choices(results_at(depth, tables, lab, lab.label)),
        *judged_claims([depth], together, lab, lab.label, sources=[RUNS]),
    ]


def beside(references: Tables, name: str, depth: int) -> pd.DataFrame:
    """The runs or histories of Table 2's models, if there are any."""
    table = references.get(name, pd.DataFrame(columns=["variant"]))
    return table[table["variant"].isin(BESIDE)].assign(depth=depth)


def side_by_side(settings: Settings, depth: int, tables: Tables, remark: str, lab: Lab) -> Finding:
    results = results_at(depth, tables, lab, lab.label)
    measures, rows, models = [], [], [*settings.models, *BESIDE]
    for model in models:
        found, losses = summarise(results.accuracies(model)), results.rows(model, "finished")["train_loss"]
        what = f"{lab.label(model)}: test accuracy"
        measures.append(Measure(what, found.mean, "%", low=found.low, high=found.high, n=found.n))
        label = f"{lab.label(model)}\nTable 2" if model in BESIDE else lab.label(model)
        accuracy = mean_std(found.mean, found.std, 2) if found.n else ABSENT
        runs = known(results.statuses(model))
        rows.append([label, accuracy, interval(found.low, found.high, 2), fixed(losses.mean(), 3), runs])
    done = {model: measure for model, measure in zip(settings.models, measures, strict=False) if measure.n}
    best = max(done, key=lambda model: done[model].value, default=None)
    reaches = f"{fixed(done[best].value, 2)}% (n = {done[best].n})" if done else ""
    most = f"; the most accurate is {lab.label(best)} with {reaches}" if done else ""
    return Finding(
        id="six_blocks",
        title="Without skips or LN, side by side",
        place="He et al. 2023, Section 4; Table 2",
        kind=OBSERVATION,
        statement=f"Test accuracy in per cent with {depth} blocks, after the {lab.paper.recipe.train.epochs} epochs of the "
        "paper’s recipe.",
        measures=measures,
        table=Table(
            ["Model", "Accuracy", "95% interval", "Train loss", "n"],
            rows,
            note="Mean ± standard deviation over the n seeds that finished. OSA (shaped) has the α L of the pilot.",
            variants=models,
        ),
        in_short=f"{progress([results.statuses(model) for model in settings.models], 'models')}{most}.",
        remark=remark,
        models=tuple(models),
        sources=[RUNS],
    )


def choices(results: Results) -> Finding:
    """What one value changes: of one seed a tendency, and nothing is judged by it."""
    measures, rows, done, missing = [], [], {}, []
    for name, (model, _, what) in CHOICES.items():
        if not is_trained(results.statuses(name)):
            missing.append(f"{results.label(model)}: {what}")
            continue
        tried, own = (100 * results.rows(each, "finished").set_index("seed")["test_accuracy"] for each in (name, model))
        changes = (tried - own).dropna()  # of the seeds that both have
        done |= {name: changes.mean()} if len(changes) else {}
        measures.append(Measure(f"{results.label(model)}, {what}: change", changes.mean(), "points", n=len(changes)))
        numbers = fixed(tried.mean(), 2), fixed(own.reindex(tried.index).mean(), 2), signed(changes.mean(), 2)
        rows.append([results.label(model), what, *numbers, expected(name), known(results.statuses(name))])
    asked = {name: EXPECTED[name] for name in done if name in EXPECTED}
    so = sum(low <= done[name] <= high for name, (low, high) in asked.items())
    as_expected = f", {so} of {len(asked)} as He et al. expect" if asked else ""
    return Finding(
        id="six_blocks_choices",
        title="What He et al. 2023 leave open, or call unimportant",
        place="He et al. 2023, Sections 3.3 and 4, Table 1",
        kind=OBSERVATION,
        statement="Test accuracy in per cent with one value of a model replaced, LN among them, and as it is with the same "
        "seeds.",
        measures=measures or [Measure("Choices that are trained", 0)],
        table=Table(
            ["Model", "Replaced", "Accuracy", "As it is", "Change", "Expected", "n"],
            rows,
            "llrrrlr",
            note=f"Expected is what He et al. say of a change, with {ALIKE:g} points for alike, set before the first run."
            f"{left_out(missing)}",
        )
        if rows
        else None,
        in_short=progress([results.statuses(name) for name in CHOICES], "choices")
        + (f"; they change the accuracy by {span(done.values(), lambda change: signed(change, 2))} points" if done else "")
        + f"{as_expected}.",
    )


def expected(choice: str) -> str:
    """What He et al. say of a choice, e.g. within ±0.5; nothing of most."""
    low, high = EXPECTED.get(choice, (-math.inf, math.inf))
    if math.isinf(high):
        return ""
    return f"at most {signed(high, 1)}" if math.isinf(low) else f"within ±{high:g}"
