"""notebooks/minimal.py, the paper in one file, computes what the package and the pipeline do."""

import csv
import importlib.util

import pytest
import torch

import osa
from pipeline.config import params
from pipeline.core.files import ROOT
from pipeline.data import idx
from pipeline.training.loop import make_optimizers
from tests.pipeline.mnist_files import write_mnist

SPEC = importlib.util.spec_from_file_location("minimal", ROOT / "notebooks/minimal.py")
minimal = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(minimal)


@pytest.fixture
def models():
    """Both with the same draws."""
    ours = osa.create_model("osa_qr", patch_embedding="torch", head="torch", generator=torch.Generator().manual_seed(3))
    theirs = minimal.VisionTransformer(torch.Generator().manual_seed(3))
    assert {name: p.shape for name, p in ours.named_parameters()} == {name: p.shape for name, p in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters():
        assert parameter.equal(ours.get_parameter(name)), name
    return ours.double(), theirs.double()


def batches(count):
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.rand(8, 1, 28, 28, generator=generator, dtype=torch.float64), torch.arange(8)


def test_the_same_logits_and_gradients(models):
    ((images, labels),) = batches(1)
    ours, theirs = (torch.nn.functional.cross_entropy(model(images), labels) for model in models)
    torch.testing.assert_close(models[1](images), models[0](images), rtol=1e-9, atol=1e-12)
    ours.backward(), theirs.backward()
    for name, parameter in models[1].named_parameters():
        expected = models[0].get_parameter(name).grad
        assert (parameter.grad - expected).norm() <= 1e-7 * expected.norm(), name


@pytest.mark.slow
def test_ten_steps_of_the_recipe_have_the_same_losses(models):
    """The pipeline's optimiser and clipping give the same losses, as params.yaml and paper.yaml have them."""
    config = params.resolve_recipe(
        params.load(ROOT / "params.yaml"), params.load_paper(), "osa_qr", reading="torch_defaults"
    )
    recipe = config.train
    assert (recipe.epochs, recipe.batch_size) == (minimal.EPOCHS, minimal.BATCH)
    (ours, theirs), losses = models, []
    (optimizer,), own = make_optimizers(ours, config, torch.device("cpu")), minimal.make_optimizer(theirs)
    for images, labels in batches(10):
        loss = torch.nn.functional.cross_entropy(ours(images), labels)
        ours.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), recipe.clip_grad_norm)
        optimizer.step()
        losses.append((loss.item(), minimal.step(theirs, own, images, labels)))
    expected, found = zip(*losses, strict=True)
    assert found == pytest.approx(expected, rel=1e-6) and expected[-1] < expected[0]


def test_it_trains_and_says_what_to_expect(tmp_path, capsys):
    """The notebook trains on the images that the pipeline would read."""
    write_mnist(tmp_path, train=20, test=50)
    loaded = idx.read_data(tmp_path)
    for split, expected in (("train", loaded.train_images), ("t10k", loaded.test_images)):
        torch.testing.assert_close(minimal.load(split, tmp_path)[0], expected[:], rtol=1e-7, atol=0)
    assert minimal.main(epochs=1, folder=tmp_path) in range(101)
    with open(ROOT / "paper_outputs/table_2.csv", encoding="utf-8") as table:
        (row,) = [row for row in csv.DictReader(table) if row["variant"] == "osa_qr"]
    assert f"{float(row['mean']):.2f}" in capsys.readouterr().out.splitlines()[-1]
