"""Lists what `make reproduce` would run, why, and for how long: `make plan`. It runs nothing, and needs no data or weights.

Like `dvc repro --allow-missing`, it does not count a missing file as a change.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pipeline.config import params
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.data import fetch, idx
from pipeline.results.runs import recorded
from pipeline.tools import jobs, locks, times
from pipeline.tools.jobs import Job

if TYPE_CHECKING:
    from dvc.repo import Repo
    from dvc.stage import Stage

CHECK = "check"  # a stage that triggers no other, since its output is the same for all valid parameters
MOST_SHOWN = 4  # maximum number of names or reasons on a line


@entry_point
def main(arguments: list[str] | None = None) -> None:
    command_parser("plan", __doc__).parse_args(arguments)
    from dvc.exceptions import DvcException  # slow to import
    from dvc.lock import LockError
    from dvc.repo import Repo

    settings, estimates = params.load(), times.Estimates(record for _, record in recorded())
    params.load_paper()  # if paper.yaml is invalid, raises the error that the stage `check` would raise
    logging.getLogger("dvc").setLevel(logging.ERROR)
    try:
        changed, following, count = plan(Repo())
    except LockError as error:
        cause = " ".join(str(error).split())
        raise UserError(f"another process is using DVC here ({cause}): wait for it to finish.") from None
    except DvcException as error:
        remedy = locks.REMEDY if locks.claims() is None else "run `make doctor`"
        raise UserError(f"DVC cannot say what has changed ({str(error).splitlines()[0]}): {remedy}.") from None
    source = settings.data.source
    if not idx.folder(source).exists():
        size = fetch.MEGABYTES.get(source)
        origin = f"will be downloaded from its mirrors ({size} MB)" if size else "will be made from files on this machine"
        changed.setdefault("fetch", []).append(f"{source} is not here, and {origin}")
        following = [name for name in following if name != "fetch"]
    if not changed:
        print("Nothing has changed: data and pipelines are up to date.")
    for group, stages in by_group(changed).items():
        why: dict[str, None] = {}  # holds each reason once, in order
        for stage in stages:
            why |= dict.fromkeys(changed[stage])
        print(f"{group_label(group, stages)}: {shortened(list(why), '; ')}{estimate(stages, settings, estimates)}")
    if following:
        names = [group_label(group, stages) for group, stages in by_group(following).items()]
        print(f"Only if the results above change: {', '.join(names)}{estimate(following, settings, estimates)}")
    others = count - len(changed) - len(following)
    more = f"up to {len(following)} more may follow, " if following else ""
    stages_will = "1 stage will" if len(changed) == 1 else f"{len(changed)} stages will"
    print(f"{stages_will} run, {more}{others} are up to date.")
    absent = [(run, config) for run, config in jobs.table_2_jobs(settings) if not run.weights.exists()]
    absent = [(run, config) for run, config in absent if run.stage not in changed and run.is_current(config)]
    if absent:
        print(
            f"The weights of {len(absent)} recorded runs are not here: run `git checkout paper_outputs/weights` to restore "
            f"those that git has, and `make reproduce` to train the others again{total(absent, estimates)}."
        )


def plan(repo: Repo) -> tuple[dict[str, list[str]], list[str], int]:
    """Finds the stages that `dvc repro` would run.

    Returns:
        The stages that will run, with the reasons for each.
        The stages that may run too, because they depend on stages that will run.
        The total number of stages.
    """
    import networkx
    from dvc.repo import lock_repo

    with lock_repo(repo):  # while this lock is held, DVC reads each file only once
        status, graph = repo.status(), repo.index.graph
    changed: dict[str, list[str]] = {}
    following: list[str] = []
    in_order = reversed(list(networkx.topological_sort(graph)))  # an edge leads from a stage to its dependency
    for stage in (stages := list(in_order)):
        name = stage.addressing
        if why := list(reasons(stage, status.get(name, []))):
            changed[name] = why
        elif any(before.addressing in {*changed, *following} - {CHECK} for before in graph.successors(stage)):
            following.append(name)
    return changed, following, len(stages)


def reasons(stage: Stage, status: list) -> Iterator[str]:
    """Yields the reasons why DVC would run a stage. `status` is the stage's entry in DVC's status."""
    if status and not any(dep.hash_info for dep in stage.deps):
        yield "it has never run"
        return
    recorded = {str(dep): dep for dep in stage.deps if hasattr(dep, "read_params")}
    for entry in status:
        if not isinstance(entry, dict):
            yield entry
            continue
        for path, state in (entry.get("changed deps", {}) | entry.get("changed outs", {})).items():
            if isinstance(state, dict):
                yield from differences(recorded[path].hash_info.value or {}, recorded[path].read_params())
            elif state not in ("deleted", "not in cache"):
                yield f"{path} is {state}"


def differences(before: dict, after: dict, above: str = "") -> Iterator[str]:
    """Yields a phrase for each parameter that differs, such as "train.epochs is 3, was 10"."""
    for key in before | after:
        name, old, new = f"{above}{key}", before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{name}.")
        elif key not in before or key not in after:
            yield f"{name} is {'new' if key in after else 'gone'}"
        elif old != new:
            yield f"{name} is {new}, was {old}"


def by_group(stages: Iterable[str]) -> dict[str, list[str]]:
    """Groups stage names by the part before the @."""
    groups = defaultdict(list)
    for stage in stages:
        groups[stage.partition("@")[0]].append(stage)
    return groups


def group_label(group: str, stages: list[str]) -> str:
    names = [stage.partition("@")[2] for stage in stages]
    return f"{group} ({shortened(names, ', ')})" if all(names) else group


def shortened(names: list[str], separator: str) -> str:
    more = [f"{len(names) - MOST_SHOWN} more"] if len(names) > MOST_SHOWN else []
    return separator.join([*names[:MOST_SHOWN], *more])


def estimate(stages: list[str], settings: params.Params, estimates: times.Estimates) -> str:
    """Formats an estimate of the total time that stages take."""
    trainings = {run.stage: (run, config) for run, config in jobs.table_2_jobs(settings)}
    others = sum(times.of_stage(stage) for stage in stages if stage not in trainings)
    return total([trainings[stage] for stage in stages if stage in trainings], estimates, others)


def total(trainings: list[Job], estimates: times.Estimates, others: float = 0) -> str:
    """Formats the estimated time of consecutive training runs plus `others` seconds for other stages."""
    known = [seconds for job in trainings if (seconds := estimates.of(*job)) is not None]
    if len(known) < len(trainings):
        return "; time unknown"
    whole = sum(known) + others
    return f"; about {times.duration(whole)}" if whole >= 1 else ""


if __name__ == "__main__":
    main()
