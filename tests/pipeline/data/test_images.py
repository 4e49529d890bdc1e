"""One's own images: a folder or an archive becomes the data set that its images are, or one sentence names what is wrong."""

import hashlib
import io
import os
import shutil
import stat
import struct
import tarfile
import tracemalloc
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageCms

from pipeline.config import params
from pipeline.core.errors import UserError
from pipeline.data import fetch, idx, images
from pipeline.tools import jobs
from pipeline.training.loop import build_model
from pipeline.training.run import Run
from tests.pipeline import synthetic
from tests.pipeline.trainings import SHORT, config, run_main

SIZE, CLASSES, COUNTS = 12, ("cat", "dog", "owl"), {"train": 4, "test": 2}
ROOT = Path("images")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """Grey images, and parameters that name them."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for split, count in COUNTS.items():
        for label in CLASSES:
            for i in range(count):
                save(f"{split}/{label}/{i}.png", rng.integers(0, 256, (SIZE, SIZE), np.uint8))
    write_params()


def save(name: str, pixels: np.ndarray) -> None:
    (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(ROOT / name)


def pixels(name: str) -> np.ndarray:
    return np.asarray(Image.open(ROOT / name))


def write_params(patch_size: int = 4, num_classes: int = 3, **changes) -> None:
    def edit(raw: dict) -> None:
        raw["data"] |= {"source": "folder", "path": str(ROOT)} | changes
        raw["model"] |= {"patch_size": patch_size, "num_classes": num_classes, "depth": 1}
        raw["train"] |= SHORT | {"batch_size": 5}

    synthetic.write_params(Path(), edit)


def stored() -> idx.DataSet:
    fetch.main(["folder"])
    return idx.read_data("data/folder")


def sentence(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as caught:
        fetch.main([*arguments])
    assert caught.value.code == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1
    return text


def test_a_folder_is_a_data_set_whose_classes_take_turns():
    loaded = stored()
    assert loaded.train_images.shape == (12, 1, SIZE, SIZE) and loaded.test_images.shape == (6, 1, SIZE, SIZE)
    assert loaded.train_labels.tolist() == [0, 1, 2] * 4
    for row, (label, i) in enumerate((label, i) for i in range(2) for label in CLASSES):
        expected = torch.from_numpy(pixels(f"test/{label}/{i}.png") / np.float32(255))
        torch.testing.assert_close(loaded.test_images[row, 0], expected)


def test_what_is_stored_is_mapped_and_has_the_digest_of_its_bytes():
    loaded = stored()
    bytes_of = [loaded.train_images.pixels, loaded.train_labels, loaded.test_images.pixels, loaded.test_labels]
    expected = hashlib.sha256(b"".join(each.to(torch.uint8).numpy().tobytes() for each in bytes_of)).hexdigest()
    assert loaded.sha256 == params.load().data.description().sha256 == expected
    assert {path.name for path in Path("data/folder").iterdir()} == {
        "images.json", "train-images.npy", "train-labels.npy", "t10k-images.npy", "t10k-labels.npy",
    }  # fmt: skip
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert "data/folder/train-images.npy" in mapped
    loaded.train_images.pixels.zero_()  # whoever writes to it writes to memory
    assert idx.data_digest("data/folder") == expected


@pytest.mark.slow
def test_memory_holds_a_few_of_the_images_at_a_time():
    for number in range(120):
        save(f"train/cat/large {number}.png", np.full((96, 96, 3), number, np.uint8))
    peaks = []
    for _ in range(4):  # the least: other memory of the process, as of a module imported meanwhile, only adds to a peak
        tracemalloc.start()
        try:
            loaded = stored()
            for rows in torch.arange(len(loaded.train_images)).split(8):
                loaded.train_images[rows].mean()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert min(peaks) < loaded.train_images.pixels.nbytes / 2


def test_more_classes_than_a_byte_has(monkeypatch, capsys):
    shutil.rmtree(ROOT)
    for number in range(300):
        for split in COUNTS:
            save(f"{split}/{number:03}/0.png", np.full((4, 4), number % 256, np.uint8))
    loaded = stored()
    assert loaded.train_labels.tolist() == loaded.test_labels.tolist() == [*range(300)]
    assert np.load("data/folder/t10k-labels.npy").dtype == np.uint16
    write_params(num_classes=300, pixel_scaling="standard")
    run_main(monkeypatch, "vit", "0")
    assert Run("vit", 0).is_current(config("vit"))
    monkeypatch.setattr(images, "MAX_CLASSES", 299)
    capsys.readouterr()
    assert "number of classes must be from 2 to 299, not 300" in sentence(capsys)


@pytest.mark.parametrize(
    "damage, problem",
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cannot be read"),
        (lambda path: np.save(path, np.array([{}], object), allow_pickle=True), "cannot be read"),
        (lambda path: np.save(path, np.zeros((12, 1, SIZE, SIZE))), "holds float64 of shape"),
        (lambda path: np.save(path, np.zeros(12, np.uint8)), "holds uint8 of shape"),
        (lambda path: np.save(path, np.zeros((0, 1, SIZE, SIZE), np.uint8)), "is empty"),
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(damage, problem):
    stored()
    damage(Path("data/folder/train-images.npy"))
    with pytest.raises(UserError, match=f"train-images.npy {problem}.*`python -m pipeline fetch folder`"):
        idx.read_data("data/folder")


@pytest.mark.parametrize("around", ["", "animals/"])
@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_an_archive_is_the_folder_in_it(kind, around):
    expected = stored().sha256
    path = Path(f"archive.{kind}")
    files = [*ROOT.rglob("*.png")][::-1]  # the order does not count
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for file in files:
                archive.write(file, around + str(file.relative_to(ROOT)))
            archive.writestr("__MACOSX/train/cat/._0.png", "left behind")
    else:
        with tarfile.open(path, "w:gz" if kind.endswith("gz") else "w") as archive:
            for file in files:
                archive.add(file, around + str(file.relative_to(ROOT)))
    write_params(path=str(path))
    assert stored().sha256 == expected


def test_one_image_in_colour_makes_all_colour(capsys):
    save("train/dog/0.png", np.full((SIZE, SIZE, 3), (10, 20, 30), np.uint8))
    loaded = stored()
    assert "17 of 18 images are grey" in capsys.readouterr().out
    assert (loaded.train_images[1, :, 0, 0] * 255).tolist() == pytest.approx([10, 20, 30])
    assert loaded.train_images[0].equal(loaded.train_images[0, :1].expand(3, -1, -1))
    assert params.load().data.images.channels == 3


def test_images_of_another_size_take_the_most_common_one_or_that_of_the_parameters(capsys):
    save("train/dog/0.png", np.full((7, 7), 51, np.uint8))
    loaded = stored()
    assert "1 of 18 images are resized to 12 x 12" in capsys.readouterr().out
    assert loaded.train_images[1].unique().tolist() == pytest.approx([0.2])
    write_params(resize=8)
    assert stored().train_images.shape[-1] == params.load().data.images.size == 8


def test_a_model_takes_on_the_size_of_the_images():
    stored()
    model = build_model(config("osa_qr"), 0)
    assert model(torch.rand(2, 1, SIZE, SIZE)).shape == (2, 3)
    assert model.position_embedding.shape[1] == (SIZE // 4) ** 2 + 1


def test_an_edit_of_the_folder_makes_another_data_set_and_the_run_not_current(monkeypatch, capsys):
    first = stored().sha256
    run_main(monkeypatch, "vit", "0")
    run = Run("vit", 0)
    jobs.source_digest.cache_clear()
    assert jobs.is_trained(run, config("vit"))
    before = {path: path.read_bytes() for path in Path("data/folder").iterdir()}
    assert stored().sha256 == first
    assert {path: path.read_bytes() for path in Path("data/folder").iterdir()} == before
    labels = idx.read_data("data/folder").test_labels.clamp(max=1)
    np.save("data/folder/t10k-labels.npy", (1 - labels.numpy()).astype(np.uint8))  # other classes
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "vit", "1")
    assert "data/folder" in capsys.readouterr().err and Run("vit", 1).record() is None
    assert stored().sha256 == first
    save("train/cat/0.png", pixels("train/cat/0.png") ^ 1)
    assert stored().sha256 != first
    jobs.source_digest.cache_clear()
    assert not jobs.is_trained(run, config("vit"))


def test_an_image_is_stored_as_a_viewer_shows_it():
    upright = np.arange(SIZE * SIZE, dtype=np.uint8).reshape(SIZE, SIZE)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned by a quarter to the right, as a camera held upright writes it
    Image.fromarray(np.rot90(upright)).save(ROOT / "train/cat/0.png", exif=exif)
    photograph = Image.fromarray(np.full((SIZE, SIZE, 3), (90, 160, 30), np.uint8))
    photograph.save(ROOT / "train/dog/0.png", icc_profile=wide_gamut())
    loaded = stored()
    assert np.array_equal((loaded.train_images[0, 0] * 255).round().numpy(), upright)
    expected = [61, 162, 0]  # Display P3 to sRGB: linear red 1.225 r − 0.225 g, and a blue below 0, which is cut off
    assert (loaded.train_images[1, :, 0, 0] * 255).tolist() == pytest.approx(expected, abs=3)


def wide_gamut() -> bytes:
    """A colour profile whose primaries are those of DCI-P3, further out than sRGB's."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    primaries = {b"rXYZ": (0.5151, 0.2412, -0.0011), b"gXYZ": (0.2919, 0.6922, 0.0419), b"bXYZ": (0.1572, 0.0666, 0.7841)}
    for tag, values in primaries.items():
        (offset,) = struct.unpack_from(">I", profile, profile.index(tag) + 4)
        struct.pack_into(">3i", profile, offset + 8, *(round(value * 2**16) for value in values))
    return bytes(profile)


@pytest.mark.parametrize("folder", ["@eaDir", ".thumbnails", "#recycle", "__MACOSX", "$RECYCLE.BIN"])
def test_what_no_viewer_shows_is_no_image(folder):
    expected = stored().sha256
    for place in ("", "train/", "train/cat/", f"train/cat/{folder}/"):
        save(f"{place}{folder}/thumb.png", np.full((SIZE, SIZE), 9, np.uint8))
    (ROOT / "train/cat/Thumbs.db").write_bytes(b"1")
    (ROOT / "train/dog/.hidden").symlink_to("nowhere")
    assert stored().sha256 == expected


def test_test_images_that_are_trained_on_are_told(capsys):
    stored()
    assert "also in train/" not in capsys.readouterr().err
    Image.open(ROOT / "train/cat/3.png").save(ROOT / "test/dog/other.bmp")  # another name and format
    stored()
    assert "warning: 1 of 7 test images are also in train/" in capsys.readouterr().err
    shutil.rmtree(ROOT / "test"), shutil.copytree(ROOT / "train", ROOT / "test")
    stored()
    assert "warning: 12 of 12 test images" in capsys.readouterr().err


def test_both_ways_to_write_an_accent_are_one_class():
    (ROOT / "train/cat").rename(ROOT / "train" / unicodedata.normalize("NFC", "café"))
    (ROOT / "test/cat").rename(ROOT / "test" / unicodedata.normalize("NFD", "café"))
    assert len(stored().test_labels) == 6
    assert params.load().data.description().classes == [unicodedata.normalize("NFC", "café"), "dog", "owl"]


def test_a_linked_folder_is_read_and_what_is_too_large_is_refused(monkeypatch, capsys):
    expected = stored().sha256
    (ROOT / "train/dog").rename("elsewhere")
    (ROOT / "train/dog").symlink_to(Path("elsewhere").resolve())
    assert stored().sha256 == expected
    capsys.readouterr()
    monkeypatch.setattr(images, "LARGEST_DATA", 18 * SIZE**2 - 1)
    assert "have 0.0 GB of pixels, above the limit of 0.0 GB" in sentence(capsys)
    monkeypatch.setattr(images, "LARGEST_FILE", 50)
    assert "too large for an image" in sentence(capsys)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    monkeypatch.setattr(images, "LARGEST_FILE", 2**20)
    assert "exceeds limit of 100 pixels" in sentence(capsys)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"patch_size": 5}, "patch_size 5 .*12"),
        ({"num_classes": 2}, "num_classes 2 .*3"),
        ({"path": "others"}, "run `python -m pipeline fetch folder`"),
        ({}, "run `python -m pipeline fetch folder`"),
    ],
)
def test_a_model_that_does_not_fit_the_images_is_refused(changes, expected):
    stored()
    if not changes:
        Path("data/folder/images.json").write_text("[]", encoding="utf-8")
    write_params(**changes)
    with pytest.raises(UserError, match=expected):
        build_model(config("vit"), 0)


def test_a_folder_needs_its_path(capsys):
    write_params(path=None)
    assert "data: path is missing" in sentence(capsys)
    write_params(num_classes=10, source="mnist", path=None)
    assert "no data.path" in sentence(capsys, "folder")


def recoded(convert) -> None:
    """All images as files that `convert` writes."""
    for path in [*ROOT.rglob("*.png")]:
        convert(Image.open(path), path)


@pytest.mark.parametrize(
    "convert",
    [
        lambda image, path: image.convert("RGB").save(path),
        lambda image, path: image.convert("RGB").quantize(256).save(path),
        lambda image, path: image.convert("P").save(path.with_suffix(".gif")) or path.unlink(),
        lambda image, path: image.convert("RGBA").save(path),
    ],
    ids=["three equal channels", "palette", "GIF", "opaque"],
)
def test_pixels_decide_whether_images_are_grey(convert):
    expected = stored().sha256
    recoded(convert)
    assert stored().sha256 == expected and params.load().data.images.channels == 1
    save("train/dog/0.png", np.full((SIZE, SIZE, 3), (10, 10, 11), np.uint8))
    (ROOT / "train/dog/0.gif").unlink(missing_ok=True)
    assert stored().train_images.shape[1] == 3


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_of_members_with_one_name_the_last_counts_and_counts_once(kind, capsys):
    expected = stored().sha256
    first, path = b"is replaced further down", Path(f"archive.{kind}")
    files = [(str(file.relative_to(ROOT)), file.read_bytes()) for file in ROOT.rglob("*.png")]
    files = [(name, first) for name, _ in files] + [(f"./{name}", content) for name, content in files]
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files:
                archive.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz" if kind.endswith("gz") else "w") as archive:
            for name, content in files:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    write_params(path=str(path))
    capsys.readouterr()
    assert stored().sha256 == expected
    assert "resized" not in capsys.readouterr().out


def test_a_backslash_is_a_letter_but_in_a_zip_of_windows(capsys):
    expected = stored().sha256
    (ROOT / "test/cat/0.png").rename(ROOT / r"test/cat/0\0.png")
    assert stored().sha256 == expected
    with zipfile.ZipFile("windows.zip", "w") as archive:
        for file in ROOT.rglob("*.png"):
            entry = zipfile.ZipInfo(str(file.relative_to(ROOT)).replace("0\\0", "0").replace("/", "\\"))
            entry.create_system = 0
            archive.writestr(entry, file.read_bytes())
    write_params(path="windows.zip")
    assert stored().sha256 == expected
    (ROOT / "test/cat/1.png").rename(ROOT / r"test\cat\1.png")  # as some programs unpack it
    write_params()
    capsys.readouterr()
    assert r"test\cat\1.png" in (text := sentence(capsys)) and "zip" in text


def test_images_of_one_level_are_trained_on_or_refused_and_no_run_without_a_step_is_a_result(monkeypatch, capsys):
    for path in ROOT.rglob("*.png"):
        Image.new("L", (SIZE, SIZE), 77).save(path)
    write_params(pixel_scaling="standard")
    fetch.main(["folder"])
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "vit", "0")
    assert "data.pixel_scaling" in capsys.readouterr().err and Run("vit", 0).record() is None
    write_params(pixel_scaling="unit")
    run_main(monkeypatch, "vit", "0")
    assert Run("vit", 0).record().status == "finished"


def write(name: str, content: bytes) -> None:
    (ROOT / name).write_bytes(content)


def archive(cut: int | None = None, kind: str = "w:gz", **members: str) -> None:
    """The folder as an archive at its place, cut off somewhere, with more members: their name in the archive and here."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=kind) as opened:
        for name, source in {"train": "train", "test": "test"}.items():
            opened.add(ROOT / source, name)
        for target in members.values():
            opened.add(ROOT / "train/cat/0.png", target)
    shutil.rmtree(ROOT)
    ROOT.write_bytes(buffer.getvalue()[:cut])


def link(kind: str) -> None:
    (ROOT / "train/cat/link.png").symlink_to("/etc/hostname")
    if kind == "tar":
        archive()
        return
    with zipfile.ZipFile("packed.zip", "w") as packed:
        entry = zipfile.ZipInfo("train/cat/link.png")
        entry.create_system, entry.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        packed.writestr(entry, "/etc/hostname")
    shutil.rmtree(ROOT)
    Path("packed.zip").rename(ROOT)


def animation() -> None:
    frames = [Image.new("L", (SIZE, SIZE), level) for level in (0, 200)]
    frames[0].save(ROOT / "train/dog/0.gif", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    "breakage, expected",
    [
        (lambda: shutil.rmtree(ROOT), ["does not exist"]),
        (lambda: shutil.rmtree(ROOT / "train"), ["no images in train/"]),
        (lambda: shutil.rmtree(ROOT / "test"), ["no images in test/"]),
        (lambda: [shutil.rmtree(ROOT / "test" / label) for label in CLASSES], ["no images in test/"]),
        (lambda: [file.unlink() for file in (ROOT / "train/dog").iterdir()], ["train/dog", "no images"]),
        (
            lambda: [shutil.rmtree(path) for path in ROOT.glob("*/[do]*")],
            ["number of classes must be from 2 to 1000, not 1"],
        ),
        (lambda: save("test/emu/0.png", np.zeros((SIZE, SIZE), np.uint8)), ["test/emu", "train/emu"]),
        (lambda: shutil.rmtree(ROOT / "test/dog"), ["train/dog", "test/dog"]),
        (lambda: write("train/dog/notes.txt", b"a dog"), ["train/dog/notes.txt", "unknown format"]),
        (lambda: write("train/dog/0.png", b""), ["train/dog/0.png", "unknown format"]),
        (lambda: write("train/dog/0.png", (ROOT / "train/dog/0.png").read_bytes()[:90]), ["train/dog/0.png", "read"]),
        (lambda: save("train/dog/0.png", np.zeros((12, 9), np.uint8)), ["train/dog/0.png", "9 x 12", "square"]),
        (lambda: save("train/dog/0.png", np.zeros((12, 12), np.uint16)), ["train/dog/0.png", "8 bits"]),
        (lambda: archive(member="../out.png"), ["../out.png", "out of the archive"]),
        (lambda: link("tar"), ["train/cat/link.png", "link"]),
        (lambda: link("zip"), ["train/cat/link.png", "link"]),
        (lambda: (ROOT / "train/cat/gone.png").symlink_to("nowhere"), ["train/cat/gone.png", "broken link"]),
        (lambda: (ROOT / "train/emu").symlink_to("nowhere"), ["train/emu", "broken link"]),
        (lambda: (ROOT / "train/up").symlink_to("../.."), ["train/up/", "folder inside a class"]),
        (lambda: os.mkfifo(ROOT / "train/cat/pipe"), ["train/cat/pipe", "device"]),
        (lambda: save("train/cat/more/9.png", np.zeros((12, 12), np.uint8)), ["train/cat/more/9.png", "move it up"]),
        (lambda: save("train/dog/0.png", np.zeros((12, 12, 4), np.uint8)), ["train/dog/0.png", "transparent"]),
        (lambda: write("train/dog/0.heic", b"\0\0\0\x24ftypheic\0\0\0\0"), ["0.heic is HEIC", "JPEG or PNG"]),
        (animation, ["train/dog/0.gif", "2 frames"]),
        (lambda: archive(cut=-900), ["images", "archive"]),
        (lambda: archive(cut=5000, kind="w"), ["images", "archive"]),
        (lambda: shutil.rmtree(ROOT) or ROOT.write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(999)), ["tar or zip", "folder"]),
        (lambda: shutil.rmtree(ROOT) or ROOT.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(999)), ["tar or zip", "folder"]),
        (lambda: archive(member="more/train/cat/0.png"), ["'more'"]),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(capsys, breakage, expected):
    breakage()
    text = sentence(capsys)
    assert all(part in text for part in expected), text
    assert not Path("data/folder").exists() and not Path("out.png").exists()
