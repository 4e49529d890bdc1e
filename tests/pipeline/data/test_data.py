import gzip
import hashlib

import numpy as np
import pytest
import torch

from pipeline.core.errors import UserError
from pipeline.data import idx
from tests.pipeline.mnist_files import write_idx, write_mnist

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


@pytest.fixture
def folder(tmp_path):
    write_mnist(tmp_path, train=31, test=17, seed=5)
    return tmp_path


def raw_pixels(path):
    return np.frombuffer(gzip.decompress(path.read_bytes())[16:], np.uint8).astype(np.float64)


def rewrite(path, edit):
    """Replaces the decompressed content of a .gz file by `edit` of it."""
    path.write_bytes(gzip.compress(edit(gzip.decompress(path.read_bytes()))))


def test_shapes_and_types(folder):
    loaded = idx.read_data(folder)
    assert loaded.train_images.shape == (31, 1, 28, 28) and loaded.test_images.shape == (17, 1, 28, 28)
    assert loaded.train_images.pixels.dtype == loaded.test_images.pixels.dtype == torch.uint8
    assert loaded.train_images[:].dtype == loaded.test_images[3].dtype == torch.float32
    assert loaded.train_labels.dtype == loaded.test_labels.dtype == torch.int64
    assert loaded.train_labels.tolist() == [i % 10 for i in range(31)]
    assert loaded.test_labels.tolist() == [i % 10 for i in range(17)]


SCALINGS = {
    "unit": lambda pixels, train: pixels / 255,
    "half": lambda pixels, train: pixels / 127.5 - 1,
    "standard": lambda pixels, train: (pixels - train.mean()) / train.std(),  # statistics of training pixels
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_pixels_are_scaled(folder, scaling):
    loaded, train = idx.read_data(folder, scaling), raw_pixels(folder / TRAIN_IMAGES)
    for images, name in ((loaded.train_images, TRAIN_IMAGES), (loaded.test_images, TEST_IMAGES)):
        expected = torch.tensor(SCALINGS[scaling](raw_pixels(folder / name), train), dtype=torch.float32)
        torch.testing.assert_close(images[:].flatten(), expected, rtol=1e-6, atol=1e-6)
        assert scaling != "unit" or torch.equal(images[:].flatten(), expected)


def test_what_is_taken_has_the_bits_of_the_whole_that_is_scaled(folder):
    images = idx.read_data(folder, "standard").train_images
    whole = images.levels.numpy()[images.pixels.numpy()]  # as images were scaled before they were taken
    order = torch.randperm(31, generator=torch.Generator().manual_seed(0))
    for taken, expected in (
        (images[order], whole[order.numpy()]),
        (images[5], whole[5]),
        (images[4:9], whole[4:9]),
        (torch.cat([*images.split(7)]), whole),
        (images.first(3)[:], whole[:3]),
        (torch.cat([*images.first(99).split(31)]), whole),
    ):
        assert taken.numpy().tobytes() == expected.tobytes() and taken.shape == expected.shape
    assert len(images.first(3)) == 3 and [*map(len, images.split(7))] == [7, 7, 7, 7, 3]


def test_standard_levels_are_those_of_numpy(folder):
    """The mean and the deviation of the pixels by their counts, in which the sum of squares is added in another order."""
    pixels = raw_pixels(folder / TRAIN_IMAGES)
    expected = ((np.arange(256.0) - pixels.mean()) / pixels.std()).astype(np.float32)
    assert np.array_equal(idx.read_data(folder, "standard").train_images.levels.numpy(), expected)


def test_a_gpu_with_too_little_memory_is_one_sentence(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30_000, 80_000_000_000))
    with pytest.raises(UserError, match=r"take 0\.0 GB, and the GPU has 0\.0 GB free: write a smaller data\.resize"):
        idx._check_memory(folder, 48 * 784, torch.device("cuda"))
    idx._check_memory(folder, 30_000, torch.device("cuda"))


def test_unknown_scaling_is_named(folder):
    with pytest.raises(UserError, match="data.pixel_scaling .*unitt"):
        idx.read_data(folder, "unitt")


def test_digest_is_that_of_the_decompressed_arrays(folder):
    names_and_headers = ((TRAIN_IMAGES, 16), (TRAIN_LABELS, 8), (TEST_IMAGES, 16), (TEST_LABELS, 8))
    arrays = [gzip.decompress((folder / name).read_bytes())[header:] for name, header in names_and_headers]
    expected = hashlib.sha256(b"".join(arrays)).hexdigest()
    assert idx.data_digest(folder) == expected
    assert idx.read_data(folder, "unit").sha256 == idx.read_data(folder, "standard").sha256 == expected
    rewrite(folder / TEST_IMAGES, lambda content: content)  # compressed otherwise
    assert idx.data_digest(folder) == expected


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"<!DOCTYPE html><p>Sign in</p>"), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8] + b"\0" * 8), "cannot be read"),  # the gzip checksum
        (lambda path: rewrite(path, lambda content: content[:7]), "is empty"),
        (lambda path: rewrite(path, lambda content: content[:-3]), r"has \d+ values where its header says \d+"),
        (
            lambda path: rewrite(path, lambda content: b"\0\0\x0d" + content[3:]),
            "is not an IDX file of the kind that its name says",
        ),
    ],
)
def test_corrupted_file_is_named_with_the_remedy(folder, corrupt, problem):
    corrupt(folder / TEST_LABELS)
    for read in (idx.read_data, idx.data_digest):
        with pytest.raises(UserError, match=rf"{TEST_LABELS} {problem}.*pipeline fetch"):
            read(folder)


@pytest.mark.parametrize(
    ("name", "write", "word"),
    [
        (TRAIN_IMAGES, lambda path: write_idx(path, np.zeros((31, 14, 56))), "14, 56"),
        (TEST_LABELS, lambda path: path.write_bytes(path.with_name(TEST_IMAGES).read_bytes()), "IDX"),
        (TEST_LABELS, lambda path: path.write_bytes(path.with_name(TRAIN_LABELS).read_bytes()), "31 .*17"),
        (TRAIN_LABELS, lambda path: write_idx(path, np.arange(31) % 11), "label 10"),
        ("images.json", lambda path: path.write_text('{"classes": 3}', encoding="utf-8"), "damaged"),
    ],
    ids=["size", "images as labels", "another split", "label", "description"],
)
def test_a_file_that_does_not_fit_is_named(folder, name, write, word):
    write(folder / name)
    with pytest.raises(UserError, match=f"{name} .*{word}"):
        idx.read_data(folder)
