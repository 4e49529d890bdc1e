"""The sentences of the report, made from what the files hold."""

import itertools
from datetime import UTC, datetime

from pipeline.core import params
from pipeline.report import results
from pipeline.report.numbers import fixed, per_cent, plural
from pipeline.report.results import Results
from pipeline.statistics import CONFIDENCE, NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED, UNDECIDED, VERDICTS
from pipeline.studies import CLAIM

HEADLINES = {
    SUPPORTED: "OSA does as the paper says",
    NOT_SUPPORTED: "Contradicted in part",
    UNDECIDED: "Undecided about OSA",
    NOT_EVALUATED: "OSA is not evaluated",
}
RULES = (
    "A claim could have come out otherwise: it is supported if the whole {} interval, in parentheses, is on its side of the "
    "limit, not supported if the whole interval is on the other side, and undecided otherwise; always so with fewer than "
    "three runs of a model, or if a run diverged, unless the rule counts divergence (`pipeline/statistics.py`). A claim of "
    "several comparisons needs all of them, and any of k refutes it, by its interval at 1 − 0.05/k: where nothing is to be "
    "found, one claim in twenty is decided all the same. A check is an identity or a proved bound: it tests the code. An "
    "observation is a number worth knowing. The rules of Section 5’s claims stand in `pipeline/paper.yaml`, where git shows "
    "no change since {}. When they were written, an earlier code’s Table 2 was known and had been judged by the same "
    "limits, which were thus not chosen blind. How many seeds would decide a claim assumes that means and spreads stay as "
    "they are, and is rough. Speed is counted in epochs, as in Figure 1, and not by the clock."
)
CLAIMS = {
    "claims_of_paper": "Of {} of the paper",
    "claims_on_choices": "Of {} of ours that nothing depends on what it leaves open",
    "claims_beyond": "Of {} beyond it, in our setting",
}
SIZE = ("depth", "embed_dim", "num_heads")
SHOWN_DIGEST = 8  # characters of a SHA-256 that tell codes apart


def answer(of: Results) -> str:
    """e.g. Undecided about OSA: of Section 5’s 6 claims about it, 5 are undecided and 1 is not evaluated."""
    verdict = results.verdict(of)
    return f"{HEADLINES[verdict['about_osa']]}: {outcome(verdict['claims_about_osa'], 'of Section 5’s {} about it')}"


def first_lines(of: Results) -> list[str]:
    """What the first screen says below the answer: how claims about the paper and others came out, how many listed runs
    there are and how many checks pass, and what findings have for it."""
    verdict = results.verdict(of)
    checks, runs = verdict["checks"], verdict["runs"]
    trained = f"{runs['trained']} of {plural(runs['total'], 'run')} trained, {runs['diverged']} diverged"
    models = f"{plural(verdict['models'], 'model')}, {plural(verdict['seeds'], 'seed')}"
    claims = [outcome(verdict[kind], of) for kind, of in CLAIMS.items() if verdict[kind]["total"]]
    passed = f"{checks['passes']} of {plural(checks['total'], 'check')} pass and {checks['fails']} fail"
    headlines = [line for found in of.found.values() for finding in found for line in finding.headlines]
    return [*by_model(of), *claims, f"Table 2: {models}; {trained}. {passed}.", *headlines]


def by_model(of: Results) -> list[str]:
    """How the comparisons of each OSA with ViTs came out, where there are several, as a claim needs all of them."""
    counts = results.against_vits(of)
    if len(counts) < 2:
        return []
    told = [
        f"{of.lab.label(model)} has {plural(sum(own.values()), 'comparison')}, of which {listing(own)}"
        for model, own in counts.items()
    ]
    return [f"Against ViTs {'; '.join(told)}. A claim needs those of all its models."]


def rules(of: Results) -> str:
    """What the kinds of findings are, and how a claim is judged."""
    return RULES.format(per_cent(CONFIDENCE), moment(of.lab.paper.rules_since))


def outcome(count: dict[str, int], of: str) -> str:
    """e.g. Of the 9 claims, 5 are supported, 1 is not supported and 3 are undecided."""
    counts = {name: count[name.replace(" ", "_")] for name in VERDICTS}
    return f"{of.format(plural(count['total'], 'claim'))}, {listing(counts)}."


def listing(counts: dict[str, int]) -> str:
    """e.g. 5 are supported, 1 is not supported and 3 are undecided."""
    parts = [f"{counts[name]} {'is' if counts[name] == 1 else 'are'} {name}" for name in VERDICTS if counts.get(name)]
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]])) or "none is evaluated"


def cautions(of: Results) -> dict[str, str]:
    """What a reader must know before any number of the settings, the runs and what made them: in short, and in full."""
    changes, facts, runs, total = results.departures(of), results.provenance(of), of.lab.tables["runs"], len(of.records)
    stated, unstated = (
        "; ".join(f"{each.key} is {each.here} and not {each.recipe} ({each.models})" for each in rows.itertuples())
        for rows in (changes[changes["is_stated"]], changes[~changes["is_stated"]])
    )
    missing, diverged = (
        [f"{variant}/{seed}" for variant, seed in results.identities(runs[runs["status"] == status])]
        for status in ("missing", "diverged")
    )
    others, here = results.made_otherwise(of), facts["code_sha256_here"][:SHOWN_DIGEST]
    codes = ", ".join(sorted({made["code_sha256"][:SHOWN_DIGEST] for made in others}))
    dirty = sum(bool(made["environment"]["git_dirty"]) for made in of.records.values())
    older, stale = facts["table_2_runs_older_than_rules"], facts["stale_studies"]
    elsewhere = facts["study_runs_by_other_code"]
    told = [
        (stated, "not the paper's setting", f"{stated}; a difference to its numbers is no failure to replicate them"),
        (unstated, "not our recipe, where the paper states nothing", unstated),
        (missing, f"{len(missing)} of {len(runs)} runs not trained yet", ", ".join(missing)),
        (diverged, f"{len(diverged)} of {len(runs)} runs diverged", f"{', '.join(diverged)} have no final accuracy"),
        (
            of.lab.tables["summary"]["n_finished"].max() < 2,
            "one run per model",
            "no spread, no interval, and no comparison of models is decided",
        ),
        (
            others,
            f"{len(others)} of {total} runs of Table 2 by other code",
            f"{codes}, where {here} is here; `dvc repro` trains them again, `python -m pipeline.tools.replay` confirms them where "
            "every bit agrees",
        ),
        (
            elsewhere,
            f"{plural(sum(elsewhere.values()), 'run')} of studies by other code",
            ", ".join(f"{name} {count}" for name, count in elsewhere.items()),
        ),
        (dirty, f"{dirty} of {total} runs with uncommitted changes", ""),
        (len(facts["runs"]["data_sha256"]) > 1, "runs on different data", "see Provenance"),
        (
            older,
            f"{older} of {total} runs of Table 2 older than the rules",
            f"those date from {moment(of.lab.paper.rules_since)}",
        ),
        (stale, f"{len(stale)} of {len(of.lab.params.studies)} studies measured by other code", ", ".join(stale)),
    ]
    return {short: f"{short[0].upper()}{short[1:]}{': ' if full else ''}{full}." for holds, short, full in told if holds}


def limitations(of: Results) -> list[str]:
    """How far the results reach, besides the cautions."""
    lab, claims, seeds = of.lab, of.of_kind(CLAIM), plural(len(of.lab.params.run.seeds), "seed")
    undecided = sum(claim.verdict in (UNDECIDED, NOT_EVALUATED) for claim in claims)
    models = [params.resolve(lab.params, name).model for name in lab.params.run.variants]
    size = ", ".join(f"{key} {' or '.join(sorted({str(getattr(model, key)) for model in models}))}" for key in SIZE)
    on_gpu = sum(made["environment"].get("device") == "cuda" for made in of.records.values())
    departures, topics = results.departures(of)["is_stated"].sum(), lab.paper.left_open
    tried = sum(bool(topic.alternatives) for topic in topics)
    return [
        f"{undecided} of {plural(len(claims), 'claim')} remain undecided or not evaluated.",
        f"Table 2 is of {seeds}, of one data set, {lab.params.data.source}, and of one recipe at {size}.",
        f"{on_gpu or 'None'} of its {plural(len(of.records), 'run')} {'were' if on_gpu > 1 else 'was'} made on a GPU.",
        f"{departures or 'None'} of the values that the paper states {'are' if departures > 1 else 'is'} departed from, "
        f"as we read it. It leaves {len(topics)} points open, where the choice is ours; for {tried} of them an alternative "
        "is listed.",
        "OSA and the ViTs differ in their attention and in how their MLPs begin, by Section 4.4 and by Appendix D, and no "
        "run of Table 2 tells the two apart.",
        *codes_and_machines(of),
        *(finding.limitation for found in of.found.values() for finding in found if finding.limitation),
    ]


def codes_and_machines(of: Results) -> list[str]:
    """How many runs are known to be today's code's by their beginning alone, and whether machines differ."""
    known, told = results.known_by(results.all_records(of)), []
    if begun := known["begun_alike_by_this_code"]:
        told.append(
            f"Of {plural(known['number'], 'run')}, those of studies among them, {known['trained_by_this_code']} were "
            f"trained by the code that is here. Of {begun} it is known that this code begins them with the same bits, over "
            f"{plural(known['least_steps_compared'], 'step')} or more; the rest is inferred (`pipeline/tools/replay.py`)."
        )
    ours, theirs = (
        {made["environment"]["device_name"] for made in records}
        for records in (of.records.values(), itertools.chain(*of.study_records.values()))
    )
    if theirs - ours:
        told.append(
            f"Table 2 was trained on {listing_of(ours)}, and runs of studies on {listing_of(theirs)}. Where the two are "
            "compared, and between seeds on several machines, rounding differs too, which moves an accuracy as another seed "
            "does."
        )
    return told


def listing_of(names: set[str]) -> str:
    return " and ".join(sorted(names))


def compute(of: Results) -> str:
    """What all training took, and on what."""
    by_study = results.compute(of)
    machines = dict.fromkeys(machine for each in by_study.values() for machine in each["machines"])
    parts = [f"{name}, {plural(each['runs'], 'run')}: {fixed(each['hours'], 1)}" for name, each in by_study.items()]
    whole = fixed(sum(each["hours"] for each in by_study.values()), 1)
    return f"Training took {whole} hours on {'; '.join(machines) or 'no machine yet'}. Hours of {'; '.join(parts)}."


def figure_caption(of: Results) -> str:
    n = of.lab.tables["summary"]["n_finished"]
    seeds = f"{n.max()}" if n.min() == n.max() else f"{n.min()} to {n.max()}"
    band = " Line: mean over seeds; band: their range." if n.max() > 1 else ""
    return (
        f"Cross-entropy; finished seeds per model: {seeds}.{band} A train loss is the mean over the minibatches since the "
        "point before. Code: `pipeline/report/figures.py`. Data: `paper_outputs/tables/curves.csv`."
    )


def moment(iso: str) -> str:
    """A time of ISO 8601, to the minute in UTC."""
    return f"{datetime.fromisoformat(iso).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
