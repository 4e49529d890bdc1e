"""Whether today's code still makes the committed runs: `python -m pipeline.replay`.

Trains the beginning of each run whose record does not know today's code, up to the second point of its curves, a quarter of
an epoch by default, and compares with the history that git keeps. Where every bit agrees, the new code's digest is written
into the record beside that of the code which trained it, with what was compared and where, and DVC's lock follows.
Otherwise nothing is written, and `dvc repro` trains the run again, or `pipeline.fan_out --only` where no stage does.

Bits are those of one kind of machine: on another kind a difference from the history says nothing of the code. There
`--beside COMMIT` trains the first steps of a run twice, by the code of that commit, which has to be known to the record, and
by today's, and compares every weight, every moment of the optimiser, and an evaluation.

    python -m pipeline.replay [RUN …]                   RUN as in table_2/osa_qr/0; without any, all that need it
    python -m pipeline.replay --beside COMMIT [RUN …]   compare with that commit's code instead of with the histories
    python -m pipeline.replay --states FILE [RUN …]     compare nothing; write what `--beside` compares
"""

import argparse
import functools
import hashlib
import io
import itertools
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from ruamel.yaml import YAML, YAMLError
from tqdm import tqdm

from pipeline.core import files, params, record
from pipeline.core.errors import UserError, entry_point
from pipeline.core.files import ROOT
from pipeline.core.params import RunConfig
from pipeline.runs import FOLDER, TABLE_2, TRIES, Run, history_csv, read_record
from pipeline.training.loop import Observer, Training, evaluate_split, make_deterministic

POINTS = 2  # step 0, and the first point after it
STEPS, IMAGES = 20, 1000  # of training, and of the test set after them, where two codes are compared
DIGEST = "from pipeline.core import record; print(record.code_sha256(record.default_device().type))"
LOCK = Path("dvc.lock")


@dataclass(frozen=True)
class Beginning:
    """The first points of a training as lines of its history, and a digest of weights and optimiser after them."""

    lines: list[str]
    steps: int
    state_sha256: str


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.replay", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="such as table_2/osa_qr/0; default: all whose code is not today's")
    parser.add_argument("--beside", metavar="COMMIT", help="compare with that commit's code instead of with the histories")
    parser.add_argument("--states", type=Path, metavar="FILE", help="write what --beside compares")
    chosen = parser.parse_args(arguments)
    make_deterministic()
    code = record.imported_code_sha256(record.default_device().type)
    found = [read_run(name) for name in chosen.runs] or committed_runs()
    if chosen.states:
        states = {str(run): state(run, recorded_config(run)) for run in tqdm(found, unit="run", disable=None)}
        files.write_json(chosen.states, states)
        return
    stale = [run for run in found if not record.is_of_today(run.read("record"))]
    if stale:
        read_lock()  # which is the last to be written, and so has to be whole
    with check_out(chosen.beside) if chosen.beside else nullcontext() as other:
        compare = functools.partial(beside, other=other) if other else replay
        confirmed = [run for run in tqdm(stale, unit="run", disable=None) if compare(run, code)]
    print(f"{len(confirmed)} of {len(stale)} runs begin with the same bits under today's code {code[:8]}.")
    if len(confirmed) < len(stale):
        sys.exit(1)


def replay(run: Run, code: str) -> bool:
    """Compares the beginning of a run with its history; writes the code's digest down where every bit agrees."""
    here = beginning(run, recorded_config(run))
    there = (run.folder / "history.csv").read_text().splitlines()[1 : 1 + POINTS]
    if here.lines != there:
        where = run.read("record")["environment"]["device_name"]
        print(f"{run} differs within {here.steps} steps from what {where} recorded: stale, or another kind of machine.")
        return False
    confirm(run, code, steps=here.steps, state_sha256=here.state_sha256)
    return True


@dataclass(frozen=True)
class Checkout:
    """The code of a commit in a folder of its own."""

    folder: Path
    name: str  # as it was asked for
    sha: str

    def start(self, *arguments: str | Path) -> subprocess.Popen:
        """Python with that code's packages instead of these."""
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        command = [sys.executable, "-P", *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, process: subprocess.Popen) -> str:
        """What it printed. Raises UserError if it failed."""
        printed, errors = process.communicate()
        if process.returncode:
            why = (errors.splitlines() or [f"exit status {process.returncode}"])[-1]
            raise UserError(f"the code of {self.name} does not run here ({why}): name a later commit.")
        return printed

    @functools.cached_property
    def code_sha256(self) -> str:
        """The digest that records know it by."""
        with self.start("-c", DIGEST) as process:
            return self.finish(process).strip()


@contextmanager
def check_out(commit: str) -> Iterator[Checkout]:
    """Writes the files of a commit into a folder that ends with the context. Raises UserError if there is no such commit."""
    try:
        git = ["git", "-C", ROOT]
        command = [*git, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}"]
        sha = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        tar = subprocess.run([*git, "archive", sha], check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise UserError(f"{commit} is no commit of this repository: `git fetch` it, or name another.") from None
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            archive.extractall(folder, filter="data")
        yield Checkout(Path(folder), commit, sha)


def beside(run: Run, code: str, other: Checkout) -> bool:
    """Trains the first steps of a run by another code and by today's; writes today's down where every bit agrees.

    Raises:
        UserError: the other code does not train it.
    """
    if other.code_sha256 not in record.made_by(run.read("record")):
        print(f"{run} is of other code than that of {other.name}: name the commit in its record.")
        return False
    path = other.folder / "states.json"
    with other.start(__file__, "--states", path, str(run)) as process:  # this file, with the other packages
        here = state(run, recorded_config(run))
        other.finish(process)
    if here != files.read_json(path)[str(run)]:
        print(f"{run} differs within {STEPS} steps from what the code of {other.name} gives.")
        return False
    of_other = {"code_sha256": other.code_sha256, "git_commit": other.sha}
    confirm(run, code, steps=STEPS, state_sha256=here["state_sha256"], beside=of_other)
    return True


def state(run: Run, config: RunConfig) -> dict[str, str]:
    """A digest of weights and moments after the first steps of a run, with loss and accuracy on some of the test set.

    Numbers are text, lest the NaN of a run that has diverged by then differ from itself.
    """
    training = begin(run, config)
    for images, labels in itertools.islice(training.batches(0), STEPS):
        training.step(images, labels)
    loss, accuracy = evaluate_split(training.model, training.data.test_images[:IMAGES], training.data.test_labels[:IMAGES])
    return {"state_sha256": state_sha256(training), "test_loss": repr(loss), "test_accuracy": repr(accuracy)}


def confirm(run: Run, code: str, **compared) -> None:
    """Writes into a run's record, and into DVC's lock, that the code of that digest begins it with the same bits."""
    made, environment = run.read("record"), record.describe_environment(record.default_device()) | record.describe_commit()
    entry = {"code_sha256": code, **compared, "at": record.now(), "environment": environment}
    content = files.as_json(made | {"replays": [*made.get("replays", []), entry]})
    if run.study == TABLE_2 and LOCK.exists():
        relock(run, content.encode())  # first: killed in between, the record is still stale, and this is done again
    files.write_text(run.folder / "record.json", content)


def beginning(run: Run, config: RunConfig) -> Beginning:
    """Trains a run up to its second point."""
    training = begin(run, config)
    training.run(Observer(), points=POINTS)
    lines = history_csv(training.progress.history).splitlines()[1:]
    return Beginning(lines, training.progress.step, state_sha256(training))


def begin(run: Run, config: RunConfig) -> Training:
    """The training of a run at its step 0, on as many threads as it had."""
    torch.set_num_threads(run.read("record")["environment"]["num_threads"])
    return Training(config, run.seed, record.default_device())


def state_sha256(training: Training) -> str:
    """A digest of every weight and of the optimisers' moments."""
    digest = hashlib.sha256()
    for tensor in training.model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    for optimizer in training.optimizers:
        for state in optimizer.state_dict()["state"].values():
            for name in sorted(state):
                digest.update(state[name].cpu().numpy().tobytes())
    return digest.hexdigest()


def recorded_config(run: Run) -> RunConfig:
    """The configuration that the run's record tells of, whatever params.yaml has now."""
    return params.validate(RunConfig, params.written_config(run.read("record")["config"]), f"{run.folder}/record.json")


def committed_runs() -> list[Run]:
    """Every run that has a record, but for tries."""
    found = [read_run(str(path.parent.relative_to(FOLDER))) for path in sorted(FOLDER.glob("*/*/*/record.json"))]
    return [run for run in found if run.study != TRIES]


def read_run(name: str) -> Run:
    """The run of that folder. Raises UserError if there is none."""
    folder = FOLDER / name
    if not (folder / "record.json").exists():
        raise UserError(f"{folder} holds no run: name one as in table_2/osa_qr/0.")
    made = read_record(folder)
    return Run(made["variant"], made["seed"], made["study"], made["overrides"])


def relock(run: Run, made: bytes) -> None:
    """Tells DVC's lock that today's code and this record belong to the stage of a run; nothing else of it changes."""
    yaml, text, lock = YAML(), io.StringIO(), read_lock()
    yaml.default_flow_style = False  # as DVC writes it
    stage = lock["stages"].get(f"train@{run.variant}-{run.seed}")
    if stage is None:
        return
    data = [dep for dep in stage["deps"] if not dep["path"].endswith(".py")]
    stage["deps"] = data + [_locked(path, (ROOT / path).read_bytes()) for path in record.code_files()]
    name = str(run.folder / "record.json")
    stage["outs"] = [_locked(name, made) if out["path"] == name else out for out in stage["outs"]]
    yaml.dump(lock, text)
    files.write_text(LOCK, text.getvalue())


def read_lock() -> dict:
    """The content of DVC's lock, nothing where there is none. Raises UserError if it is not YAML."""
    try:
        return YAML().load(LOCK) if LOCK.exists() else {}
    except YAMLError:
        raise UserError(f"{LOCK} is not valid YAML: `git checkout HEAD {LOCK}`.") from None


def _locked(name: str, content: bytes) -> dict:
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return {"path": name, "hash": "md5", "md5": md5, "size": len(content)}


if __name__ == "__main__":
    main()
