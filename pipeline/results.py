"""The numbers of the report as they stand in its CSV and JSON files: what the runs measured, beside the paper's own."""

import hashlib
import itertools
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pipeline import claims, files
from pipeline.errors import UserError
from pipeline.params import Params, resolve
from pipeline.summary import rounded, rounded_table

FOLDER = Path("paper_outputs/tables")
TABLES = ("runs", "summary", "curves", "histories", "layers")
MEASUREMENTS = ("theory", "complexity", "choices")  # the stages that leave paper_outputs/STAGE/findings.json


@dataclass(frozen=True)
class Inputs:
    """What a report is made from: params.yaml, the tables, the record of every run that is there, and the findings."""

    params: Params
    tables: dict[str, pd.DataFrame]
    records: dict[tuple[str, int], dict]
    findings: list[dict]

    def label(self, variant: str) -> str:
        return self.params.label(variant)


@dataclass(frozen=True)
class Deviation:
    """A value that the paper states and that some of its models were not trained with."""

    key: str
    paper: Any
    ours: Any
    variants: list[str]


def read(params: Params) -> Inputs:
    """Reads what the report needs.

    Raises:
        UserError: a table, a record or the findings are missing, or belong to other parameters than params.yaml has now.
    """
    tables = {name: read_table(FOLDER / f"{name}.csv") for name in TABLES}
    runs = list(tables["runs"][["variant", "seed"]].itertuples(index=False, name=None))
    if runs != list(itertools.product(params.run.variants, params.run.seeds)):
        raise UserError(f"{FOLDER}/runs.csv has other runs than params.yaml lists: run `dvc repro tables`.")
    there = tables["runs"]["status"] != "missing"
    records = {run: read_record(params, *run) for run in itertools.compress(runs, there)}
    return Inputs(params, tables, records, read_findings())


def read_table(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): run `dvc repro tables`.") from None


def read_findings() -> list[dict]:
    """What was measured of the paper's theorems, costs and choices, in reading order, each with the folder of its files."""
    folders = [Path("paper_outputs", stage) for stage in MEASUREMENTS]
    return [finding | {"folder": folder} for folder in folders for finding in files.read_json(folder / "findings.json")]


def read_record(params: Params, variant: str, seed: int) -> dict:
    path = Path("records", variant, f"{seed}.json")
    record = files.read_json(path)
    written = {section: {k: v for k, v in values.items() if v is not None} for section, values in record["config"].items()}
    if written != resolve(params, variant).model_dump(mode="json", exclude_none=True):  # None: the key does not apply
        raise UserError(f"{path} was made with other parameters than params.yaml has: run `dvc repro`.")
    return record


def judge(inputs: Inputs) -> dict[str, tuple[str, list[claims.Measure]]]:
    """For each claim of params.yaml its verdict and measures."""
    results = claims.Results(inputs.tables["runs"], inputs.tables["histories"], inputs.params.tables.confidence)
    return {name: claims.judge(claim, results) for name, claim in inputs.params.claims.items()}


def verdict(inputs: Inputs, judged: dict[str, tuple[str, list[claims.Measure]]]) -> dict:
    """The whole in a few numbers: an overall verdict, how the claims came out, and how many runs there are."""
    count = Counter(result for result, _ in judged.values())
    found = Counter(finding["verdict"] for finding in inputs.findings)
    status = Counter(inputs.tables["runs"]["status"])
    run, total = inputs.params.run, status.total()
    return {
        "overall": overall(set(count)),
        "claims": {"total": len(judged)} | {name: count[name] for name in claims.VERDICTS},
        "theorems, costs and choices": {"total": len(inputs.findings)} | {name: found[name] for name in claims.VERDICTS},
        "undecided that lean the paper's way": sum(leans(*judgement) for judgement in judged.values()),
        "models": len(run.variants),
        "seeds": len(run.seeds),
        "runs": {"total": total, "trained": total - status["missing"], "diverged": status["diverged"]},
    }


def leans(verdict: str, measures: list[claims.Measure]) -> bool:
    """Whether a claim is undecided although everything measured speaks for it."""
    return verdict == claims.UNDECIDED and all(measure.favourable for measure in measures if measure.n)


def overall(verdicts: set[str]) -> str:
    if claims.NOT_SUPPORTED in verdicts:
        return "Contradicted in part"
    if verdicts == {claims.SUPPORTED}:
        return "Replicated"
    return "Consistent so far" if claims.SUPPORTED in verdicts else "Undecided"


def table_2(inputs: Inputs) -> pd.DataFrame:
    """Test accuracy in per cent: the paper's, ours, and ours minus the paper's in percentage points."""
    summary = inputs.tables["summary"]
    ours = {name: 100 * summary[f"test_accuracy_{name}"] for name in ("mean", "std", "low", "high", "min", "max")}
    paper = summary["variant"].map(inputs.params.paper.table_2)
    table = pd.DataFrame(
        {"variant": summary["variant"], "model": summary["variant"].map(inputs.label), "paper": paper}
        | ours
        | {"difference": (ours["mean"] - paper).round(6) + 0.0}
        | {name: summary[name] for name in ("n_finished", "n_diverged", "n_missing")}
    )
    return rounded_table(table)


def claims_table(judged: dict[str, tuple[str, list[claims.Measure]]]) -> pd.DataFrame:
    """One row for each comparison."""
    return pd.DataFrame(
        {"claim": name, "claim_verdict": verdict} | asdict(measure) | {"models": " ".join(measure.models)}
        for name, (verdict, measures) in judged.items()
        for measure in measures
    )


def orthogonality(inputs: Inputs) -> pd.DataFrame:
    """For each model and layer, over its heads and seeds: the largest and the median error and norm, and the range of α."""
    groups = inputs.tables["layers"].groupby(["variant", "layer"], sort=False)
    table = groups.agg(
        error_max=("error_max", "max"),
        error_median=("error_median", "median"),
        norm_max=("norm_max", "max"),
        norm_median=("norm_median", "median"),
        alpha_min=("alpha", "min"),
        alpha_max=("alpha", "max"),
    )
    return rounded_table(table.reset_index())


def cost(inputs: Inputs) -> pd.DataFrame:
    """For each model: parameters, and mean time and speed of its finished runs."""
    runs = inputs.tables["runs"].query("status == 'finished'")
    records = [inputs.records[run] for run in runs[["variant", "seed"]].itertuples(index=False, name=None)]
    table = pd.DataFrame(
        {
            "variant": runs["variant"].to_numpy(),
            "parameters": runs["num_parameters"].to_numpy(dtype=int),
            "minutes": [record["seconds"] / 60 for record in records],
            "images_per_second": [record["images_per_second"] for record in records],
        }
    )
    means = {"parameters": "first", "minutes": "mean", "images_per_second": "mean"}
    return rounded_table(table.groupby("variant", sort=False).agg(means).reset_index())


def deviations(params: Params) -> list[Deviation]:
    """Where the paper's models are trained with other values than the paper states."""
    models = [variant for variant in params.run.variants if variant in params.paper.table_2]
    found: dict[tuple, list[str]] = {}
    for variant in models:
        config = resolve(params, variant).model_dump()
        for section, stated in params.paper.settings.items():
            for key, paper in stated.items():
                if config[section][key] != paper:
                    found.setdefault((f"{section}.{key}", paper, config[section][key]), []).append(variant)
    return [Deviation(*difference, variants) for difference, variants in found.items()]


def provenance(inputs: Inputs) -> dict:
    """What the runs were made with: for each property every value that occurs, with its number of runs; and totals."""
    records = inputs.records.values()
    facts = {
        "data sha256": [record["data_sha256"] for record in records],
        "code sha256": [record["code_sha256"] for record in records],
        "commit": [commit(record["environment"]) for record in records],
    }
    for key in ("device_name", "platform", "python", "torch", "num_threads"):
        facts[key] = [str(record["environment"][key]) for record in records]
    return {
        "runs": {name: dict(sorted(Counter(values).items())) for name, values in facts.items()},
        "parameters_sha256": parameters_digest(inputs.params),
        "hours": rounded(sum(record["seconds"] for record in records) / 3600),
        "resumptions": sum(record["resumptions"] for record in records),
    }


def commit(environment: dict) -> str:
    if environment["git_commit"] is None:
        return "not recorded"
    return environment["git_commit"] + (" with uncommitted changes" if environment["git_dirty"] else "")


def parameters_digest(params: Params) -> str:
    """SHA-256 over those sections of params.yaml that decide what is trained."""
    content = params.model_dump(mode="json", include={"run", "data", "model", "init", "train", "variants"})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
