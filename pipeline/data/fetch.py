"""Fetches a data set as four verified files in data/SOURCE.

The command also writes the digest of the data set to paper_outputs/data/SOURCE.txt. Published data sets come from the first
mirror that works. An environment variable such as OSA_MNIST_MIRROR can name a folder or URL to try before the mirrors.
"""

import base64
import hashlib
import os
import sys
import tarfile
import tempfile
import urllib.request
from http.client import HTTPException
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
from tqdm import tqdm

from pipeline.config import params
from pipeline.core import files
from pipeline.core.errors import UserError, command_parser, entry_point, without_password
from pipeline.data import idx

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
FILES = {  # MNIST's files and their SHA-256; torchvision has the MD5 digests of the other data sets
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
MEGABYTES = {"mnist": 12, "fashion_mnist": 31, "kmnist": 21, "cifar10": 170}  # sizes of the downloads
TIMEOUT_SECONDS = 20  # maximum wait for the next byte
LARGEST_BYTES = 2**28  # maximum size of a download; CIFAR-10 has 2**27.3 bytes


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("fetch", __doc__)
    sources = [*params.PUBLISHED, params.USER_FOLDER]
    parser.add_argument("source", nargs="?", choices=sources, help="default: data.source of params.yaml")
    source = parser.parse_args(arguments).source or params.load().data.source
    folder = idx.folder(source)
    if source == params.USER_FOLDER:
        from pipeline.data import images

        images.convert(params.load().data, folder)
    elif source == "sample":
        from pipeline.data import sample

        sample.write_sample(folder)
    else:
        fetch(source)
    files.write_text(Path("paper_outputs", f"{folder}.txt"), f"{idx.data_digest(folder)}\n")


def fetch(source: str) -> None:
    """Downloads a data set's missing or damaged files. If a download fails, the old files stay in place.

    Raises:
        UserError: a file could not be downloaded from any mirror.
    """
    mirrors, digests = published(source)
    variable = f"OSA_{source.upper()}_MIRROR"
    if first := os.environ.get(variable):
        mirrors.insert(0, first if "://" in first else files.resolve_user_path(first).resolve().as_uri())
    for name, digest in digests.items():
        path = idx.folder(source) / name
        if not (path.is_file() and _digest_like(path.read_bytes(), digest) == digest):
            files.write_bytes(path, _from_first(mirrors, name, digest, variable))
        if path.suffixes[-2:] == [".tar", ".gz"]:
            _convert_cifar(path)


def _from_first(mirrors: list[str], name: str, digest: str, variable: str) -> bytes:
    """Downloads a file from the first mirror that works. Raises UserError if no mirror works."""
    failures = []
    for mirror in list(mirrors):
        shown = without_password(mirror)
        try:
            content = _download(f"{mirror.rstrip('/')}/{name}", digest)
        except (HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
            failures.append(f"{shown} ({without_password(reason)})")
            print(f"warning: could not download {name} from {failures[-1]}", file=sys.stderr)
        else:
            print(f"{name} from {shown}")
            mirrors.sort(key=mirror.__ne__)  # try this mirror first for the next file
            return content
    raise UserError(
        f"{name} could not be downloaded from {', then '.join(failures)}: set {variable} to a folder or URL that has it, or "
        "run `make quickstart`, which needs no download."
    )


def published(source: str) -> tuple[list[str], dict[str, str]]:
    """Returns the mirrors of a data set, and a dict that maps each file's name to its digest."""
    if source == "mnist":
        return list(MIRRORS), FILES
    from torchvision import datasets  # takes seconds to import

    if source == "cifar10":
        base, _, name = datasets.CIFAR10.url.rpartition("/")
        return [base], {name: datasets.CIFAR10.tgz_md5}
    data_set = {"fashion_mnist": datasets.FashionMNIST, "kmnist": datasets.KMNIST}[source]
    return list(data_set.mirrors), dict(data_set.resources)


def _download(url: str, digest: str) -> bytes:
    """Downloads a file. Raises OSError or HTTPException if the download fails, ValueError if the digest is wrong."""
    parts = urlsplit(url)
    request = urllib.request.Request(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    if parts.username:
        login = unquote(f"{parts.username}:{parts.password or ''}").encode()
        request.add_header("Authorization", f"Basic {base64.b64encode(login).decode()}")
    content = bytearray()
    options = dict(desc=Path(parts.path).name, unit="B", unit_scale=True, leave=False, disable=None)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response, tqdm(**options) as bar:
        bar.total = int(response.headers.get("Content-Length") or 0) or None
        while len(content) <= LARGEST_BYTES and (chunk := response.read(2**16)):
            content += chunk
            bar.update(len(chunk))
    if _digest_like(content, digest) != digest:
        raise ValueError(f"sent {len(content)} bytes with the wrong checksum")
    return bytes(content)


def _digest_like(content: bytes | bytearray, known: str) -> str:
    """Returns the MD5 or SHA-256 of `content`, whichever has the length of `known`."""
    return hashlib.new("md5" if len(known) == 32 else "sha256", content, usedforsecurity=False).hexdigest()


def _convert_cifar(archive: Path) -> None:
    """Converts CIFAR-10's verified archive to the IDX files that training reads."""
    from torchvision.datasets import CIFAR10

    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as opened:
            opened.extraction_filter = getattr(tarfile, "data_filter", None)  # exists from Python 3.11.4 on
            opened.extractall(folder)
        for split in ("train", "t10k"):
            read = CIFAR10(folder, train=split == "train")
            idx.write_split(archive.parent, split, np.moveaxis(read.data, -1, 1), np.array(read.targets))  # (n, 3, 32, 32)


if __name__ == "__main__":
    main()
