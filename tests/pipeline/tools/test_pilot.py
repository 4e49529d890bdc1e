"""The search finds the valley without a training too many, and a training is done once by the same code."""

import math

import pandas as pd
import pytest
import torch.nn.functional as F

from pipeline.core import files, params, record
from pipeline.lab import Lab
from pipeline.tools import pilot
from pipeline.training import data
from pipeline.training.loop import build_model
from tests.pipeline.mnist_files import write_mnist
from tests.pipeline.synthetic import write_params


@pytest.fixture
def lab(tmp_path, monkeypatch):
    write_params(tmp_path)
    write_mnist(tmp_path / "data/mnist", train=7, test=7)
    monkeypatch.chdir(tmp_path)
    return Lab("pilot", params.load(), params.load_paper())


RATES = pilot.SEARCHES[pilot.DEPTH].rates
SHORT, LONGER = (pilot.Search((1e-4,), 1e-4, steps, 1) for steps in (1, 3))


def write(rows, depth=pilot.DEPTH, steps=pilot.SEARCHES[pilot.DEPTH].steps):
    """The table of (model, rate, α L, loss)."""
    columns = ["model", "learning_rate", "alpha_times_depth", "loss"]
    table = pd.DataFrame(rows, columns=columns).assign(key=range(len(rows)), depth=depth)
    files.write_csv(pilot.TABLE, table.assign(steps=steps, seed=pilot.SEED))


@pytest.mark.parametrize(
    "losses, best, asked",
    [
        ([3, 2, 1], 2, [1, 2]),
        ([1, 2, 3], 0, [1, 2, 0]),
        ([2, 1, 2], 1, [1, 2, 0]),
        ([3, 2, 1, 0], 3, [1, 2, 3]),
        ([5, 2, math.inf, 0], 1, [1, 2, 0]),
    ],
)
def test_the_search_goes_on_while_the_loss_falls(losses, best, asked):
    seen = []
    loss = lambda i: seen.append(i) or losses[i]  # noqa: E731
    assert pilot.valley(range(len(losses)), 1, loss) == best
    assert list(dict.fromkeys(seen)) == asked


def test_what_the_table_says_once_a_search_is_over(lab):
    rows = [("vit", rate, None, loss) for rate, loss in ((1e-4, 1.5), (3e-4, math.nan), (3e-5, 1.6))]
    osa = [(1e-4, 0.36, 2.0), (3e-4, 0.36, 2.1), (3e-5, 0.36, 1.9), (3e-5, 1.0, 1.8), (3e-5, 3.0, 2.5), (3e-5, 0.1, 2.2)]
    rows += [("osa_shaped", *each) for each in osa]
    assert pilot.found("vit", 7e-4) is None
    write(rows)
    assert pilot.found("vit", 7e-4) == (1e-4, pilot.FIRST_ALPHA)
    assert pilot.found("osa_shaped", 7e-4) == (3e-5, 1.0)
    assert pilot.found("espa", 7e-4) is None
    write(rows, depth=12)
    assert pilot.found("vit", 7e-4) is None, "of another depth"
    write([("vit", rate, None, math.inf) for rate in RATES])
    assert pilot.found("vit", 7e-4) is None, "every rate diverges"
    for losses in ((2.3, 2.301, 2.302), (2.3, 2.301, math.nan), (2.3, math.nan, 2.301)):
        write([("vit", rate, None, loss) for rate, loss in zip(RATES, losses, strict=True)])
        assert pilot.found("vit", 7e-4) == (7e-4, pilot.FIRST_ALPHA), "no rate learns"
    write([("vit", rate, None, loss) for rate, loss in zip(RATES, (0.568, 0.560, 0.565), strict=True)])
    assert pilot.found("vit", 7e-4) == (RATES[1], pilot.FIRST_ALPHA)
    write([row for row in rows if row[:3] != ("osa_shaped", 3e-5, 3.0)])
    assert pilot.found("osa_shaped", 7e-4) is None, "whether 3 is better than 1 is not known"


def test_a_depth_with_a_search_of_its_own_waits_for_it_and_others_take_that_of_36(lab):
    write([("vit", rate, None, 1.0) for rate in RATES])
    assert pilot.found("vit", 7e-4, 12) == pilot.found("vit", 7e-4, 36) == (1e-4, pilot.FIRST_ALPHA)
    assert pilot.found("vit", 7e-4, 72) is None
    there = pilot.SEARCHES[72]
    rows = [("vit", rate, None, loss) for rate, loss in zip(there.rates, (1.0, math.nan, math.nan), strict=True)]
    write(rows, 72, there.steps)
    assert pilot.found("vit", 7e-4, 72) == (there.rates[0], pilot.FIRST_ALPHA)
    write(rows, 72, there.steps + 1)
    assert pilot.found("vit", 7e-4, 72) is None, "of another length"


def test_a_training_is_done_once_and_again_by_other_code(lab, monkeypatch):
    """Its loss at the first step is that of the model as initialised on the first batch."""
    loss = pilot.Pilot(lab, 2, SHORT).loss("vit", 1e-4, 0.36)
    config = lab.config("vit", {"model": {"depth": 2}})
    mnist, model = data.load(data.folder("mnist"), "unit"), build_model(config, pilot.SEED)
    assert loss == pytest.approx(F.cross_entropy(model(mnist.train_images), mnist.train_labels).item(), rel=1e-5)
    longer = pilot.Pilot(lab, 2, LONGER)
    with monkeypatch.context() as patch:
        patch.setattr(pilot.Pilot, "train", lambda *_: (9.0, 1.0))
        assert pilot.Pilot(lab, 2, SHORT).loss("vit", 1e-4, 0.36) == pytest.approx(loss, rel=1e-5)
        assert longer.loss("vit", 1e-4, 0.36) == 9
        patch.setattr(record, "imported_code_sha256", lambda *_: "c0de")
        assert pilot.Pilot(lab, 2, SHORT).loss("vit", 1e-4, 0.36) == 9
    assert pilot.read()[["steps", "loss"]].values.tolist() == [[3, 9], [1, 9]]


def test_a_loss_that_is_not_finite_ends_a_training(lab):
    config = lab.config("vit_noskip_nonorm", {"init": {"embedding_std": 1e30}, "train": {"batch_size": 2}})
    loss, seconds = pilot.Pilot(lab, 2, LONGER).train(config)
    assert not math.isfinite(loss) and seconds > 0
