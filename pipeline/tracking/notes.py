"""What MLflow calls a run, and the note on it. A run is its record, or the tags that MLflow has of it."""

import re

from pipeline.core.params import Paper

TABLE_2, TRIES = "table_2", "tries"  # as in pipeline.runs and pipeline.train, whose torch a watcher can do without
ADVICE = "The report takes the last epoch, `final_*`; `best_*`, chosen by the test set, is for information only."


def full_name(run: dict, labels: dict[str, str] | None = None) -> str:
    """`osa_qr` in Table 2, `left_open: vit+init.head=zeros` in a study; with `labels` as a reader calls the variant."""
    variant, prefix = run["variant"], "" if run["study"] == TABLE_2 else f"{run['study']}: "
    return prefix + (labels or {}).get(variant, variant) + run["name"].removeprefix(variant)


def of_seed(record: dict, labels: dict[str, str], paper: Paper) -> str:
    """The note on one training."""
    environment = record["environment"]
    commit = f" It ran at commit `{environment['git_commit']}`" if environment["git_commit"] else ""
    dirty = ", which had changes that were not committed" if environment["git_dirty"] else ""
    about, repeat = _about(record, labels, paper), _to_repeat(record, [record["seed"]])
    return f"Seed {record['seed']} of {about}\n\n{repeat}{commit}{dirty}{'.' if commit else ''}"


def of_family(tags: dict, seeds: list[str], labels: dict[str, str], paper: Paper) -> str:
    """The note on the statistics over seeds."""
    about = f"Mean and standard deviation over those of the seeds {', '.join(seeds)} that did not diverge,"
    return f"{about} of {_about(tags, labels, paper)}\n\n{_to_repeat(tags, seeds)}"


def _about(run: dict, labels: dict[str, str], paper: Paper) -> str:
    variant = run["variant"]
    what = f"**{labels.get(variant, variant)}**, `{variant}`" + "".join(f", with `{change}`" for change in _changes(run))
    number = paper.table_2.get(variant)
    if run["study"] != TABLE_2:
        value = f"A training of the study `{run['study']}`." if run["study"] != TRIES else "A try."
    else:
        value = "Not a model of the paper." if number is None else f"The paper's test accuracy (Table 2): {number} %."
    return f"{what}, in a replication of *{paper.title}*. {value} {ADVICE}"


def _to_repeat(run: dict, seeds: list) -> str:
    study, variant = run["study"], run["variant"]
    if study == TABLE_2:
        return f"To repeat it: `dvc repro -f {' '.join(f'train@{variant}-{seed}' for seed in seeds)}`."
    if study == TRIES:
        options = " ".join(f"--set {change}" for change in _changes(run))
        return f"To repeat it: {', '.join(f'`python -m pipeline.train {variant} {seed} {options}`' for seed in seeds)}."
    folders = ", ".join(f"`runs/{study}/{run['name']}/{seed}`" for seed in seeds)
    return f"To repeat it: delete {folders}, then `dvc repro {study}`."


def _changes(run: dict) -> list[str]:
    """What the name of a run says is changed, as in init.head=zeros."""
    return re.split(r"\+(?=[a-z])", run["name"].removeprefix(run["variant"]))[1:]
