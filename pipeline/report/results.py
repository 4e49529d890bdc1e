"""What the report's CSV and JSON files hold: the runs beside the paper's numbers, what they cost, what made them, and what
all studies found."""

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import pandas as pd

from pipeline import runs, sources, statistics, studies, study
from pipeline.core import files, params, record
from pipeline.core.errors import UserError
from pipeline.core.files import rounded, rounded_table
from pipeline.core.params import Params
from pipeline.lab import TABLES, Lab
from pipeline.report.looks import look
from pipeline.report.numbers import plain
from pipeline.runs import Run
from pipeline.studies import CHECK, CLAIM, FAILS, OBSERVATION, PASSES, Finding
from pipeline.studies.paper import section_5
from pipeline.tools import pilot

NEEDED = ("runs", "summary", "curves")
FOLDER = Path("paper_outputs")
PLACES = {"claims_of_paper": (0, 50), "claims_on_choices": (90, 100)}  # of studies with such claims, from and to
BEYOND = "claims_beyond"  # claims of all other studies: of other papers, or ours on what is not in this one
ABOUT_OSA = ("section_5", "stability")  # whose claims about orthogonal variants are the answer that readers look for
DIRTY = " with uncommitted changes"
ENVIRONMENT = ("device_name", "platform", "python", "torch", "num_threads")


@dataclass(frozen=True)
class Results:
    """What a report is made from: the tables, the record of every run that is there, and what studies found."""

    lab: Lab
    records: dict[tuple[str, int], dict]  # of Table 2, by variant and seed
    study_records: dict[str, list[dict]]  # of each study that has any
    found: dict[str, list[Finding]]  # by study, in the order of the report

    @property
    def runs(self) -> pd.DataFrame:
        """tables/runs.csv with the time and the speed that the records tell."""
        table = self.lab.tables["runs"]
        made = [self.records.get(run, {}) for run in identities(table)]
        minutes = [each.get("seconds", math.nan) / 60 for each in made]
        return table.assign(minutes=minutes, images_per_second=[each.get("images_per_second", math.nan) for each in made])

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for findings in self.found.values() for finding in findings if finding.kind == kind]


def read() -> Results:
    """Reads what the report needs.

    Raises:
        UserError: a table, a record or a study is missing, or belongs to other parameters than params.yaml has now.
    """
    lab = Lab("report", params.load(), params.load_paper())
    for name in NEEDED:
        if name not in lab.tables:
            raise UserError(f"{TABLES / name}.csv is missing: run `dvc repro tables`.")
    listed = lab.tables["runs"]
    found = identities(listed)
    if found != list(itertools.product(lab.params.run.variants, lab.params.run.seeds)):
        raise UserError(f"{TABLES}/runs.csv has other runs than params.yaml lists: run `dvc repro tables`.")
    for variant in lab.params.variants:
        look(variant)  # so that those without a fixed look get one in this order, whatever is drawn first
    records = {run: read_record(Run(*run), lab) for run in itertools.compress(found, listed["status"] != "missing")}
    left_out = set(studies.measuring()) - lab.params.studies.keys()
    return Results(
        lab,
        records,
        read_study_records(),
        {name: study.findings(name, lab) for name in studies.in_order() if name not in left_out},
    )


def identities(table: pd.DataFrame) -> list[tuple[str, int]]:
    """Variant and seed of every row."""
    return list(table[["variant", "seed"]].itertuples(index=False, name=None))


def read_record(run: Run, lab: Lab) -> dict:
    """The record of a run. Raises UserError if it is not of the configuration that params.yaml has."""
    made = run.read("record")
    if not runs.same_config(made["config"], params.resolve(lab.params, run.variant)):
        raise UserError(f"{run.folder}/record.json was made with other parameters than params.yaml has: run `dvc repro`.")
    return made


def read_study_records() -> dict[str, list[dict]]:
    """The record of every run of each study that has any."""
    paths = {name: sorted((runs.FOLDER / name).glob("*/*/record.json")) for name in studies.measuring()}
    return {name: [runs.read_record(path.parent) for path in own] for name, own in paths.items() if own}


def table_2(results: Results) -> pd.DataFrame:
    """Test accuracy in per cent: the paper's, ours, and ours minus the paper's in percentage points."""
    lab, summary = results.lab, results.lab.tables["summary"]
    ours = {name: 100 * summary[f"test_accuracy_{name}"] for name in ("mean", "std", "low", "high", "min", "max")}
    paper = summary["variant"].map(lab.paper.table_2)
    table = pd.DataFrame(
        {"variant": summary["variant"], "model": summary["variant"].map(lab.label), "paper": paper}
        | ours
        | {"difference": (ours["mean"] - paper).round(files.DIGITS) + 0.0}
        | {name: summary[name] for name in ("n_finished", "n_diverged", "n_missing")}
    )
    return rounded_table(table)


def cost(results: Results) -> pd.DataFrame:
    """For each model: parameters, and of its finished runs number, mean time and speed, and hours together."""
    finished = results.runs.query("status == 'finished'").astype({"num_parameters": int})
    table = finished.groupby("variant", sort=False).agg(
        parameters=("num_parameters", "first"),
        runs=("seed", "size"),
        minutes=("minutes", "mean"),
        images_per_second=("images_per_second", "mean"),
        hours=("minutes", lambda minutes: minutes.sum() / 60),
    )
    return rounded_table(table.reset_index())


def compute(results: Results) -> dict[str, dict]:
    """What training took: of Table 2, and of each study that trains, the runs, hours and machines."""
    records = {"Table 2": list(results.records.values())} | results.study_records
    short = pilot.read()
    tried = {"runs": len(short), "hours": rounded((short["steps"] * short["seconds_per_step"]).sum() / 3600), "machines": []}
    return {
        name: {
            "runs": len(made),
            "hours": rounded(sum(each["seconds"] for each in made) / 3600),
            "machines": sorted({record.machine(each["environment"]) for each in made}),
        }
        for name, made in records.items()
    } | ({"the pilot of deep models": tried} if len(short) else {})


def departures(results: Results) -> pd.DataFrame:
    """Values of the recipe that some of the paper's models were not trained with, and whether the paper states them."""
    lab = results.lab
    configs = {name: params.resolve(lab.params, name).model_dump() for name in lab.params.run.variants}
    found = [
        (f"{section}.{key}", plain(value), plain(config[section][key]), lab.label(variant))
        for variant, config in configs.items()
        if variant in lab.paper.table_2
        for section, recipe in lab.paper.recipe.model_dump().items()
        for key, value in recipe.items()
        if config[section][key] != value
    ]
    table = pd.DataFrame(found, columns=["key", "recipe", "here", "models"])
    table = table.groupby(["key", "recipe", "here"], sort=False)["models"].agg(", ".join).reset_index()
    return table.assign(is_stated=~table["key"].isin([choice.key for choice in lab.paper.left_open]))


def made_otherwise(results: Results) -> list[dict]:
    """The records of runs that today's code is not known to give: it neither trained them nor replayed their beginning."""
    return [made for made in results.records.values() if not record.is_of_today(made)]


def trained_otherwise(results: Results) -> dict[str, int]:
    """How many runs of each study today's code is not known to give, where there are some."""
    known = {name: [record.is_of_today(each) for each in made] for name, made in results.study_records.items()}
    return {name: each.count(False) for name, each in known.items() if not all(each)}


def all_records(results: Results) -> list[dict]:
    """Those of Table 2's runs and of studies'."""
    return [*results.records.values(), *itertools.chain(*results.study_records.values())]


def known_by(made: list[dict]) -> dict[str, int]:
    """Of runs by their records: how many there are, how many today's code has trained, how many it is only known to begin
    with the same bits, how many neither, and over how few steps the beginnings were compared."""
    here = {device: record.code_sha256(device) for device in {each["environment"]["device"] for each in made}}
    trained, begun, steps = 0, 0, []
    for each in made:
        code = here[each["environment"]["device"]]
        is_own = each["code_sha256"] == code
        trained, begun = trained + is_own, begun + (not is_own and code in record.made_by(each))
        steps += [replay["steps"] for replay in each.get("replays", []) if not is_own and replay["code_sha256"] == code]
    return {
        "number": len(made),
        "trained_by_this_code": trained,
        "begun_alike_by_this_code": begun,
        "neither": len(made) - trained - begun,
        "least_steps_compared": min(steps, default=0),
    }


def stale_studies(settings: Params) -> list[str]:
    """The studies whose tables other code has measured."""
    made_by = {name: files.read_json(study.FOLDER / name / study.RECORD)["source_sha256"] for name in settings.studies}
    return [name for name, digest in made_by.items() if digest != sources.digest(name)]


def provenance(results: Results) -> dict:
    """What the runs were made with: for each property every value that occurs, with its number of runs; and totals."""
    records, since = results.records.values(), datetime.fromisoformat(results.lab.paper.rules_since)
    environments = [made["environment"] for made in records]
    facts = {
        "data_sha256": [made["data_sha256"] for made in records],
        "code_sha256": [made["code_sha256"] for made in records],
        "commit": [f"{e['git_commit'] or 'not recorded'}{DIRTY if e['git_dirty'] else ''}" for e in environments],
    } | {key: [str(environment[key]) for environment in environments] for key in ENVIRONMENT}
    trained = results.lab.params.model_dump(mode="json", include={"run", *params.SHARED, "variants"})
    return {
        "runs": {name: dict(sorted(Counter(values).items())) for name, values in facts.items()},
        "code_sha256_here": record.code_sha256(),
        "table_2_runs": known_by(list(results.records.values())),
        "all_runs": known_by(all_records(results)),
        "table_2_runs_older_than_rules": sum(datetime.fromisoformat(made["started_at"]) < since for made in records),
        "study_runs_by_other_code": trained_otherwise(results),
        "stale_studies": stale_studies(results.lab.params),
        "parameters_sha256": hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest(),
        "compute": compute(results),
        "resumptions": sum(made["resumptions"] for made in records),
    }


def verdict(results: Results) -> dict:
    """The whole in a few numbers: how the claims about OSA came out, all claims and checks, and how many runs there are."""
    run, status = results.lab.params.run, Counter(results.lab.tables["runs"]["status"])
    orthogonal = {name for name, variant in results.lab.params.variants.items() if variant.attention == "orthogonal"}
    about = itertools.chain(*(results.found.get(name, []) for name in ABOUT_OSA))
    osa = [each for each in about if each.kind == CLAIM and orthogonal.intersection(each.models)]
    return {
        "about_osa": statistics.combine([finding.verdict for finding in osa] or [statistics.NOT_EVALUATED]),
        "claims_about_osa": count(osa, statistics.VERDICTS),
        "claims": count(results.of_kind(CLAIM), statistics.VERDICTS),
        **{kind: count(claims(results, kind), statistics.VERDICTS) for kind in (*PLACES, BEYOND)},
        "checks": count(results.of_kind(CHECK), (PASSES, FAILS, statistics.NOT_EVALUATED)),
        "observations": len(results.of_kind(OBSERVATION)),
        "models": len(run.variants),
        "seeds": len(run.seeds),
        "runs": {"total": status.total(), "trained": len(results.records), "diverged": status["diverged"]},
    }


def claims(results: Results, kind: str) -> list[Finding]:
    """Those of the paper, on what it leaves open, or beyond it."""

    def kind_of(study: str) -> str:
        return next((kind for kind, (start, end) in PLACES.items() if start <= studies.place(study) < end), BEYOND)

    return [each for name, own in results.found.items() if kind_of(name) == kind for each in own if each.kind == CLAIM]


def against_vits(results: Results) -> dict[str, dict[str, int]]:
    """For each orthogonal model how its comparisons with others came out in Section 5's claims, of which each needs all."""
    found = {each.id: each for each in results.found.get("section_5", [])}
    attention = {name: variant.attention for name, variant in results.lab.params.variants.items()}
    verdicts: dict[str, list[str]] = {}
    for name, claim in section_5.read_claims(results.lab.paper).items():
        if name not in found or not isinstance(claim, section_5.Comparison):
            continue
        for (first, second), measure in zip(claim.compare, found[name].measures, strict=True):
            if (attention.get(first), attention.get(second)) == ("orthogonal", "softmax"):
                verdicts.setdefault(first, []).append(measure.verdict)
    return {model: Counter(own) for model, own in verdicts.items()}


def count(findings: list[Finding], verdicts: Iterable[str]) -> dict[str, int]:
    """How many there are, and how many of each verdict, by keys that are words."""
    found = Counter(finding.verdict for finding in findings)
    return {"total": len(findings)} | {name.replace(" ", "_"): found[name] for name in verdicts}


def findings(results: Results) -> list[dict]:
    """Every finding for findings.json: all that it says but its table and its figure."""
    return [
        {"study": name}
        | {key: value for key, value in vars(finding).items() if key not in ("table", "figure")}
        | {"verdict": finding.verdict, "measures": [asdict(measure) for measure in finding.measures]}
        | {"sources": sources_of(finding, name)}
        for name, found in results.found.items()
        for finding in found
    ]


def sources_of(finding: Finding, name: str) -> list[str]:
    """The files that a finding was made from."""
    own = sorted((study.FOLDER / name).glob("*.csv")) if hasattr(studies.module(name), "measure") else []
    return [*map(str, own), *finding.sources]


def measures(results: Results) -> pd.DataFrame:
    """The measures of all findings below one another."""
    table = pd.DataFrame(
        {"study": name, "finding": finding.id, "kind": finding.kind, "finding_verdict": finding.verdict} | asdict(measure)
        for name, found in results.found.items()
        for finding in found
        for measure in finding.measures
    )
    return table.astype({"n": "Int64"})
