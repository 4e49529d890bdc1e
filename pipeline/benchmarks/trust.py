"""What the pipeline survives, counted: `python -m pipeline.benchmarks.trust`, or `python -m pipeline.benchmarks.trust kills` for one campaign.

Faults are drawn from a seed and made real: processes are killed, bits inverted, disks full, servers lie. A trial is survived
if what is asked for is there afterwards, bit for bit, or refused in one sentence; a traceback, other bits and a fault that
goes unnoticed are not. Trainings are of a tiny model on the sample, in a folder of their own, each in a process that is
forked from one with PyTorch loaded. Writes paper_outputs/trust/CAMPAIGN.json.
"""

import argparse
import contextlib
import ctypes
import functools
import io
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from unittest import mock

import torch
from ruamel.yaml import YAML
from tqdm import tqdm

from pipeline import fetch, runs, studies, train
from pipeline.core import files, params, record
from pipeline.core.errors import UserError, entry_point
from pipeline.core.files import ROOT
from pipeline.runs import Run
from pipeline.studies.paper.trust import CAMPAIGNS, FOLDER

RUN = Run("osa_exact", 0)
RECORD = RUN.folder / "record.json"
TINY = {
    "data": {"source": "sample"},
    "model": {"patch_size": 14, "embed_dim": 8, "depth": 1, "num_heads": 2},
    "train": {"epochs": 4, "batch_size": 500, "points_per_epoch": 2},
}
FORKS = multiprocessing.get_context("forkserver")
LIMITS = {"TIMEOUT_SECONDS": 0.5, "DEADLINE_SECONDS": 1, "BACKOFF_SECONDS": 0.01, "RETRIES": 1}  # of a fetch from a liar
PAGE = 4096  # bytes: the least that a file takes of a tmpfs


@dataclass
class Campaign:
    """How many trials there were, how each ended, and what was not survived."""

    trials: int
    random: Random
    ends: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def count(self, end: str, survived: bool, detail: str = "") -> None:
        self.ends[end] += 1
        if not survived:
            self.failures.append(f"{end}: {detail}"[:300])


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.benchmarks.trust", description=__doc__.splitlines()[0])
    parser.add_argument("campaign", nargs="?", choices=CAMPAIGNS, help="default: all")
    parser.add_argument("--trials", type=int, help="default: the campaign's own number")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    here, environment = FOLDER.absolute(), record.describe_environment(torch.device("cpu")) | record.describe_commit()
    with workplace():
        for name in [chosen.campaign] if chosen.campaign else CAMPAIGNS:
            start, campaign = time.monotonic(), Campaign(chosen.trials or CAMPAIGNS[name].trials, Random(chosen.seed))
            globals()[name](campaign)
            command = f"python -m pipeline.benchmarks.trust {name} --trials {campaign.trials} --seed {chosen.seed}"
            survived = campaign.trials - len(campaign.failures)
            counted = {"trials": campaign.trials, "survived": survived, "ends": campaign.ends, "failures": campaign.failures}
            made = {"command": command, "seed": chosen.seed, "seconds": round(time.monotonic() - start)}
            files.write_json(here / f"{name}.json", counted | made | {"environment": environment})
            print(f"{name}: {survived} of {campaign.trials} survived", flush=True)


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """A folder with the sample and small parameters, which is the working directory inside."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": ""}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), mock.patch.dict(os.environ, variables):
        Path("params.yaml").write_text(small())
        fetch.write_sample(Path("data/sample"))
        everything = ["pipeline.train", "torch._dynamo", *(studies.module(name).__name__ for name in studies.names())]
        FORKS.set_forkserver_preload(everything)
        yield


def small() -> str:
    """The text of params.yaml for trainings of a second."""
    text = io.StringIO()
    YAML().dump(params.deep_merge(params.read(ROOT / "params.yaml"), TINY), text)
    return text.getvalue()


# Trainings


class Training:
    """A training in a process of its own, after `before`, which happens there."""

    def __init__(self, before: Callable[[], object] = int, *options: str) -> None:
        handle, name = tempfile.mkstemp(dir=Path())
        os.close(handle)
        self.said, options = Path(name), options or ("--no-tracking",)
        self.process = FORKS.Process(target=_train, args=(Path.cwd(), self.said, before, options))
        self.process.start()

    def end(self) -> tuple[int, list[str]]:
        """Its exit status, and its last sentences: errors, warnings and tracebacks."""
        self.process.join()
        lines = self.said.read_text(errors="replace").replace("\r", "\n").splitlines()
        self.said.unlink()
        return self.process.exitcode, [line for line in lines if line.startswith(("error: ", "warning: ", "Traceback"))]


def _train(folder: Path, said: Path, before: Callable[[], object], options: tuple[str, ...]) -> None:
    os.chdir(folder)
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    runs.tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a killed process leaks
    sys.argv = ["train", RUN.variant, str(RUN.seed), *options]
    before()
    train.main()


def outputs() -> dict[Path, bytes]:
    """The files of the run but for its record, which has the time of day."""
    paths = RUN.weights, RUN.folder / "history.csv", RUN.folder / "metrics.json"
    return {path: path.read_bytes() for path in paths if path.exists()}


def put(content: dict[Path, bytes]) -> None:
    for path, each in content.items():
        files.write_bytes(path, each)


def clear() -> None:
    for name in ("runs", "weights", ".checkpoints"):
        shutil.rmtree(name, ignore_errors=True)


def undisturbed() -> tuple[dict[Path, bytes], float]:
    """What a training leaves that nothing befalls, and how many seconds it takes."""
    clear()
    training, start = Training(), time.monotonic()
    status, said = training.end()
    if status:
        raise UserError(f"the training fails by itself: {said}.")
    return outputs(), time.monotonic() - start


def ends_as(expected: dict[Path, bytes]) -> tuple[bool, str]:
    """Whether the same command, now undisturbed, ends with these outputs, and leaves nothing else."""
    status, said = Training().end()
    return status == 0 and outputs() == expected and not leftovers(), f"exit {status}, {said}, {leftovers()}"


def leftovers() -> list[str]:
    return [str(path) for pattern in ("**/*.tmp.*", ".checkpoints/**/*.pt") for path in Path().glob(pattern)]


def is_told(status: int, said: list[str], name: str) -> bool:
    """Whether a training ended with one sentence about this."""
    return status == 1 and len(said) == 1 and said[0].startswith("error: ") and name in said[0]


# Campaigns


def kills(campaign: Campaign) -> None:
    """SIGKILL at a random moment, then the same command; one in four is killed again on the way."""
    expected, seconds = undisturbed()
    for _ in progress(campaign):
        times, hit = campaign.random.choice([1, 1, 1, 2]), 0
        while not hit:  # some are over before their moment
            clear()
            for _ in range(times):
                training = Training()
                training.process.join(campaign.random.uniform(0, seconds))
                training.process.kill()
                hit += training.end()[0] == -signal.SIGKILL
        survived = ends_as(expected)
        resumed = RUN.read("record")["resumptions"] if survived[0] else 0
        campaign.count("resumed at the end of an epoch" if resumed else "begun anew", *survived)


def twice(campaign: Campaign) -> None:
    """The same run trained two or three times at once."""
    expected, seconds = undisturbed()
    for _ in progress(campaign):
        clear()
        number = campaign.random.choice([2, 3])
        moments = [campaign.random.uniform(0, seconds / 2) for _ in range(number)]
        ended = [training.end() for training in [Training(functools.partial(time.sleep, each)) for each in moments]]
        whole = all(status == 0 for status, _ in ended) and outputs() == expected and RUN.is_there() and not leftovers()
        campaign.count(f"{number} at once", whole, f"{ended}, {leftovers()}")


def flips(campaign: Campaign) -> None:
    """One bit inverted: of a checkpoint, which a training then resumes, or of the results, which are then read."""
    expected, _ = undisturbed()
    before, config = expected | {RECORD: RECORD.read_bytes()}, params.resolve(params.load(), RUN.variant)
    clear()
    Training(_die_after_an_epoch).end()
    (checkpoint,) = Path(".checkpoints").rglob("checkpoint.pt")
    content = checkpoint.read_bytes()
    for number in progress(campaign):
        clear()
        if number % 2:
            files.write_bytes(checkpoint, flipped(content, campaign.random))
            status, said = Training().end()
            noticed = is_told(status, said, str(checkpoint)) and not outputs()
            campaign.count("checkpoint refused", noticed, f"exit {status}, {said}")
            continue
        path = campaign.random.choice(list(expected))
        put(before | {path: flipped(before[path], campaign.random)})
        try:
            noticed = not RUN.is_there()
            RUN.load_model(config)
        except UserError:
            noticed = True
        campaign.count(f"{'weights' if path == RUN.weights else path.name} refused", noticed)


def _die_after_an_epoch() -> None:
    method = runs.Recorder.epoch_ended
    runs.Recorder.epoch_ended = lambda self: (method(self), os._exit(9))


def flipped(content: bytes, draw: Random) -> bytes:
    bit = draw.randrange(8 * len(content))
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def disk(campaign: Campaign) -> None:
    """A folder that is full, read-only or a file, and then the same command as if nothing had been."""
    expected, _ = undisturbed()
    before = expected | {RECORD: RECORD.read_bytes()}
    folders = {"weights": len(expected[RUN.weights]) // PAGE, "runs": 2, ".checkpoints": 12}  # and pages that are too few
    for number in progress(campaign):
        place, kind = campaign.random.choice(list(folders)), ("full", "full", "read-only", "a file")[number % 4]
        clear()
        if kind == "read-only":
            put(before)
        elif kind == "a file":
            Path(place).write_text("")
        pages = campaign.random.randint(1, folders[place])
        status, said = Training(functools.partial(_spoil, place, kind, pages)).end()
        told = is_told(status, said, f"{place}/") and (outputs() == expected if kind == "read-only" else not RUN.is_there())
        if kind == "a file":
            Path(place).unlink()
        survived = ends_as(expected) if told else (False, f"exit {status}, {said}, {list(outputs())}")
        campaign.count(f"{place.removeprefix('.')} {kind}", *survived)


def _spoil(place: str, kind: str, pages: int) -> None:
    """Makes a folder read-only, or puts an empty file system of so many pages there, for this process alone."""
    if kind == "a file":
        return
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    new_mounts, new_users, read_only, again, bind, private = 0x20000, 0x10000000, 1, 0x20, 0x1000, 0x44000
    failed = libc.unshare(new_mounts | (new_users if user else 0))
    if user and not failed:
        for name, text in {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}.items():
            Path("/proc/self", name).write_text(text)
    Path(place).mkdir(exist_ok=True)
    path, size = place.encode(), f"size={pages * PAGE}".encode()
    mounts = {
        "full": [(b"tmpfs", path, b"tmpfs", 0, size)],
        "read-only": [(path, path, None, bind, None), (None, path, None, bind | again | read_only, None)],
    }
    if failed or any(libc.mount(*each) for each in [(None, b"/", None, private, None), *mounts[kind]]):
        why = os.strerror(ctypes.get_errno())
        raise UserError(f"a file system cannot be mounted ({why}): allow user namespaces, or be root.")


def mutations(campaign: Campaign) -> None:
    """params.yaml with a random change: accepted with the values that stand there, or refused in one sentence."""
    text = (ROOT / "params.yaml").read_text()
    try:
        for _ in progress(campaign):
            kind = campaign.random.choice(list(MUTATIONS))
            Path("params.yaml").write_bytes(changed := MUTATIONS[kind](text, campaign.random))
            try:
                accepted = echoes(params.read("params.yaml"), params.load().model_dump())
                campaign.count("accepted", accepted, f"{kind}: other values than stand there")
            except UserError as error:
                sentence = str(error)
                is_one = "\n" not in sentence and len(sentence) < 500 and "params.yaml" in sentence
                campaign.count("refused in a sentence", is_one, f"{kind}: {sentence}")
            except Exception as error:  # noqa: BLE001  whatever it is, it would be a traceback
                campaign.count("traceback", False, f"{kind}: {error!r} of {changed[:80]!r}")
    finally:
        Path("params.yaml").write_text(small())


def echoes(raw: object, loaded: object) -> bool:
    """Whether all that was written was taken as it stands. A study that is false is left out."""
    if isinstance(raw, dict):
        return isinstance(loaded, dict) and all(
            (value is False and key not in loaded) or (key in loaded and echoes(value, loaded[key]))
            for key, value in raw.items()
        )
    if isinstance(raw, list):
        return isinstance(loaded, list) and len(raw) == len(loaded) and all(map(echoes, raw, loaded))
    return raw == loaded and isinstance(raw, bool) == isinstance(loaded, bool)


HOSTILE = (  # values, between bars
    "¦null¦true¦-1¦0¦1¦0.5¦1e400¦.nan¦-.inf¦'3'¦1e-3¦1.0e-3¦0x10¦1_000¦1:30¦~¦2026-99-99¦!!int abc¦"
    "!!python/object/apply:os.system [true]¦"
    f"&a [*a]¦*missing¦{'9' * 400}¦[]¦{{}}¦[1, 2¦{'[' * 3000 + ']' * 3000}¦{{a: b}}¦- a¦|¦> ¦"
    f"\"¦'¦@¦`¦%¦ümläut¦\x00¦a: b: c¦osa_qr¦mnist¦[osa_qr, osa_qr]¦[0, 0]¦1{'0' * 12}¦false¦yes¦\t3¦{'x' * 5000}"
).split("¦")


def _value(text: str, draw: Random) -> str:
    places = list(re.finditer(r"(?<=: )[^\s{#][^#\n]*?(?=\s*(?:#|$))", text, re.MULTILINE))
    place = draw.choice(places)
    return text[: place.start()] + draw.choice(HOSTILE) + text[place.end() :]


def _key(text: str, draw: Random) -> str:
    place = draw.choice(list(re.finditer(r"\b[a-z_0-9]+(?=:)", text)))
    at = draw.randrange(place.start(), place.end())
    return text[:at] + draw.choice(["", "x", text[at] * 2, "-", "É"]) + text[at + 1 :]


def _line(change: Callable[[list[str], int, Random], object], text: str, draw: Random) -> str:
    lines = text.splitlines(keepends=True)
    change(lines, draw.randrange(len(lines)), draw)
    return "".join(lines)


def _swap(lines: list[str], at: int, draw: Random) -> None:
    other = draw.randrange(len(lines))
    lines[at], lines[other] = lines[other], lines[at]


def _bytes(text: str, draw: Random) -> bytes:
    content = bytearray(text.encode())
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(content))
        content[at : at + draw.choice([0, 1])] = draw.choice([b"", bytes([draw.randrange(256)])])
    return bytes(content)


MUTATIONS = {
    "value": lambda text, draw: _value(text, draw).encode(),
    "key": lambda text, draw: _key(text, draw).encode(),
    "line gone": lambda text, draw: _line(lambda lines, at, _: lines.pop(at), text, draw).encode(),
    "line twice": lambda text, draw: _line(lambda lines, at, _: lines.insert(at, lines[at]), text, draw).encode(),
    "lines swapped": lambda text, draw: _line(_swap, text, draw).encode(),
    "indented": lambda text, draw: _line(lambda lines, at, _: lines.insert(at, " " + lines.pop(at)), text, draw).encode(),
    "bytes": _bytes,
    "cut off": lambda text, draw: text.encode()[: draw.randrange(len(text))],
}


# Servers


ANSWERS = {  # to what is asked for: what is sent, and the length that is told
    "honest": lambda content: (content, len(content)),
    "flipped": lambda content: (flipped(content, Random(0)), len(content)),
    "cut off": lambda content: (content[:-7], len(content)),
    "short": lambda content: (content[:-7], len(content) - 7),
    "longer": lambda content: (content + b"more", len(content) + 4),
    "empty": lambda content: (b"", 0),
    "html": lambda content: (b"<!DOCTYPE html>Please sign in", 29),
    "endless": lambda content: (content * 10_000, 10**12),
    "silent within": lambda content: (content[:5], len(content)),
    "slow": lambda content: (b"", len(content)),
}
STATUSES = {"not found": 404, "error 500": 500, "round and round": 302}
LIES = [*list(ANSWERS)[1:], *STATUSES, "silent", "gibberish", "hung up"]


class Liar(BaseHTTPRequestHandler):
    """Answers as the first part of the path says about files whose name holds the second, and about others truthfully."""

    def do_GET(self) -> None:
        behaviour, about, name = [*self.path.strip("/").split("/"), "", ""][:3]
        content, lie = self.server.truth.get(name, b"{}"), behaviour.replace("_", " ") if about in name else "honest"
        if lie in ANSWERS:
            body, length = ANSWERS[lie](content)
            self.answer(200, {"Content-Length": length})
            self.wfile.write(body)
        elif lie in STATUSES:
            self.answer(STATUSES[lie], {"Location": self.path, "Content-Length": 0})
        elif lie == "gibberish":
            self.wfile.write(b"\x7f\x03 no HTTP\r\n\r\n")
        if lie == "slow":
            for byte in content * 10:
                self.wfile.write(bytes([byte]))
                self.server.over.wait(0.05)
        elif lie.startswith("silent"):
            self.server.over.wait(30)

    do_POST = do_PATCH = do_GET

    def answer(self, status: int, headers: dict[str, object]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, *arguments) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *arguments) -> None:
        """The client has had enough."""


@contextlib.contextmanager
def served(truth: dict[str, bytes]) -> Iterator[str]:
    """The address of a server that knows these files."""
    with Server(("127.0.0.1", 0), Liar) as server:
        server.truth, server.over, server.daemon_threads = truth, threading.Event(), True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.over.set()
        server.shutdown()


def mirrors(campaign: Campaign) -> None:
    """A mirror that lies about one of four files, alone or with an honest one behind it."""
    truth = {name: campaign.random.randbytes(300) for name in fetch.FILES}
    expected = {name: fetch.File(fetch.hashlib.sha256(content).hexdigest(), len(content)) for name, content in truth.items()}
    folder = Path("data/mnist")
    with served(truth) as url:
        for number in progress(campaign):
            shutil.rmtree(folder, ignore_errors=True)
            lie, about = LIES[number % len(LIES)], campaign.random.choice(list(truth))
            is_alone = bool(number // len(LIES) % 2)
            before = dict(list(truth.items())[: list(truth).index(about)])
            asked = (f"{url}/{lie.replace(' ', '_')}/{about}/", *[f"{url}/honest/x/"] * (not is_alone))
            start, said = time.monotonic(), ""
            with mock.patch.multiple(fetch, FILES=expected, MIRRORS=asked, **LIMITS), _hushed():
                try:
                    fetch.fetch("mnist")
                except UserError as error:
                    said = str(error)
            there = {path.name: path.read_bytes() for path in folder.glob("*")}
            wanted = before if is_alone else truth
            in_time = time.monotonic() - start < 10
            told = "\n" not in said and (about in said if is_alone else not said)
            end = "refused in a sentence" if is_alone else "delivered by the next mirror"
            campaign.count(end, there == wanted and told and in_time, f"{lie}, {said}, {list(there)}")


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def tracking(campaign: Campaign) -> None:
    """A training that MLflow cannot follow: the same bits, and no more than warnings."""
    expected, _ = undisturbed()
    with served({}) as url:
        lies = ["error 500", "silent", "slow", "html", "gibberish", "hung up", "not found"]
        stores = {lie: f"{url}/{lie.replace(' ', '_')}" for lie in lies}
        stores |= {
            "refused": "http://127.0.0.1:9",
            "no such store": "nonsense://x",
            "no such folder": "sqlite:////nowhere/x.db",
        }
        for number in progress(campaign):
            clear()
            name = list(stores)[number % len(stores)]
            status, said = Training(functools.partial(os.putenv, "MLFLOW_TRACKING_URI", stores[name]), "--eager").end()
            told = 1 <= len(said) <= 2 and all(each.startswith("warning: ") for each in said)
            campaign.count(name, status == 0 and told and outputs() == expected, f"exit {status}, {said}")


def progress(campaign: Campaign) -> Iterator[int]:
    return iter(tqdm(range(campaign.trials), unit="trial", disable=None))


if __name__ == "__main__":
    main()
