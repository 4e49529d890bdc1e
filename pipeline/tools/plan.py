"""What `dvc repro` would run, why, and for how long: `make plan`. It runs nothing, and needs neither data nor weights.

What has changed is DVC's own answer, as `dvc status` gives it, and what follows from it stands in DVC's graph.
"""

import itertools
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from dvc.dependency import ParamsDependency
from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.repo import Repo
from dvc.repo.reproduce import plan_repro
from dvc.stage import Stage

from pipeline import runs, sources, studies
from pipeline.core import params, record
from pipeline.core.errors import UserError, entry_point
from pipeline.tools import fan_out

WIDTH, SHOWN = 110, 4  # columns; files and parameters named in one reason
NEVER, GONE = "dvc.lock knows no run of it", "not here"
AFTER = "what they read may come out otherwise"


@dataclass
class Plan:
    """The stages that would run with the reasons, those that may follow, and all others."""

    runs: dict[str, list[str]] = field(default_factory=dict)
    follows: list[str] = field(default_factory=list)
    rests: list[str] = field(default_factory=list)

    def for_its_files(self) -> list[str]:
        """The stages that would run for missing files alone."""
        return [stage for stage, why in self.runs.items() if all(reason.endswith(GONE) for reason in why)]


@entry_point
def main() -> None:
    params.load()
    params.load_paper()
    try:
        found = plan(Repo())
    except LockError:
        raise UserError("another process works with DVC here: wait for it, and ask again.") from None
    except DvcException as error:
        raise UserError(
            f"DVC cannot say what has changed ({str(error).splitlines()[0]}): mend dvc.yaml or dvc.lock."
        ) from None
    print("\n".join(told(found)))


def plan(repo: Repo) -> Plan:
    """Which stages have changed by DVC's status, and which read what these write."""
    status, graph, found = repo.status(), repo.index.graph, Plan()
    for stage in plan_repro(graph):
        name = stage.addressing
        if why := list(reasons(stage, status.get(name, []))):
            found.runs[name] = why
        elif any(may_change(before.addressing, name, found) for before in graph.successors(stage)):
            found.follows.append(name)
        else:
            found.rests.append(name)
    return found


def may_change(before: str, stage: str, found: Plan) -> bool:
    """Whether what `stage` reads of `before` may come out otherwise than it is."""
    if before == "fetch" and before in found.for_its_files():
        return False  # its digests are fixed
    if before == "sources" and stage in params.load().studies:
        path = sources.FOLDER / f"{stage}.txt"
        return not path.exists() or path.read_text() != sources.text(stage)
    return before in found.runs or before in found.follows


def reasons(stage: Stage, status: list) -> Iterator[str]:
    """Why DVC would run a stage, in words, from its entry in DVC's status. A missing file that others make is no reason."""
    if status and not any(dep.hash_info for dep in stage.deps):
        yield NEVER
        return
    recorded = {str(dep): dep for dep in stage.deps if isinstance(dep, ParamsDependency)}
    for entry in status:
        if not isinstance(entry, dict):
            yield entry.replace("changed", "another")  # command or checksum
            continue
        for path, state in entry.get("changed deps", {}).items():
            if isinstance(state, dict):
                yield from replaced(recorded[path].hash_info.value or {}, recorded[path].read_params())
            elif state != "deleted":
                yield f"{path} is {state}"
        for path, state in entry.get("changed outs", {}).items():
            yield f"{path} is modified" if state == "modified" else f"what it wrote to {path.partition('/')[0]}/ is {GONE}"


def replaced(before: dict, after: dict, above: str = "") -> Iterator[str]:
    """e.g. train.epochs is 3, was 10; for each value or block that differs, in dots."""
    for key in before | after:
        name, old, new = f"{above}{key}", before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from replaced(old, new, f"{name}.")
        elif key not in before or key not in after:
            yield f"{name} is {'new' if key in after else 'gone'}"
        elif old != new:
            yield f"{name} is {new}, was {old}"


def to_train(stage: str) -> list[runs.Run]:
    """The runs that a study's stage would train: none of another stage."""
    settings = params.load()
    asked = fan_out.of_study(stage, settings, params.load_paper()) if stage in settings.studies else []
    return [run for run, config in asked if not runs.is_current(run, config, None)]


def seconds_of(stage: str, made: list[dict]) -> tuple[float | None, set[str]]:
    """How long a stage takes by these records of trainings, a study as long as those of its runs that it would train, and
    the machines of these."""
    if stage in studies.names() and studies.gathers(stage):
        return None, set()
    if stage.startswith("train@"):
        variant, _, seed = stage.removeprefix("train@").rpartition("-")
        run = runs.Run(variant, int(seed))
        found, seconds = runs.alike(run, made), runs.seconds_of(run, made)
    else:
        left = to_train(stage)
        found = list(itertools.chain(*(runs.alike(run, made) for run in left)))
        times = [runs.seconds_of(run, made) for run in left]
        seconds = None if None in times else sum(times) or None
    return seconds, {record.machine(each["environment"]) for each in found}


def told(found: Plan) -> Iterator[str]:
    """The lines that `make plan` prints."""
    if not found.runs:
        yield "`dvc repro` would run nothing: data and pipelines are up to date."
        return
    made = runs.finished()
    counts = f"{len(found.follows)} may follow, and {len(found.rests)} rest"
    yield f"`dvc repro` would run {plural(len(found.runs))}. Of the others {counts}."
    groups = defaultdict(list)
    for stage, why in found.runs.items():
        more = [f"{len(why) - SHOWN} more"] if len(why) > SHOWN else []
        groups["; ".join([*why[:SHOWN], *more])].append(stage)
    for why, stages in itertools.chain(groups.items(), [(AFTER, found.follows)] if found.follows else []):
        yield ""
        yield from textwrap.wrap(", ".join(stages), WIDTH, break_on_hyphens=False)
        yield from textwrap.wrap(
            f"because {why}", WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )
        yield f"    {duration(stages, made)}"
    yield f"\nIn all {duration([*found.runs, *found.follows], made)}."
    if files_only := found.for_its_files():
        yield (
            f"{plural(len(files_only))} would run for missing files alone, which git does not keep. `dvc pull` gets them "
            "where there is a remote; `dvc repro fetch && dvc repro --allow-missing` does without those that nothing needs."
        )


def duration(stages: list[str], made: list[dict]) -> str:
    """e.g. about 24 min by the records, on AMD EPYC, 2 threads; 3 stages of unknown length."""
    known = {stage: seconds_of(stage, made) for stage in stages}
    times = [seconds for seconds, _ in known.values() if seconds is not None]
    machines = sorted(set().union(*(where for _, where in known.values())))
    unknown = len(stages) - len(times)
    length = f"about {clock(sum(times))} by the records, on {' or '.join(machines)}" if times else ""
    rest = f"{plural(unknown)} of unknown length" if unknown else ""
    return "; ".join(filter(None, [length, rest]))


def plural(stages: int) -> str:
    return f"{stages} stage{'' if stages == 1 else 's'}"


def clock(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


if __name__ == "__main__":
    main()
