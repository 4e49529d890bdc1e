"""Each of the paper's models learns the sample: after two epochs its test accuracy is near the one that it had before.

An edit that changes them on purpose writes tests/learning.json again: `python -m tests.pipeline.training.test_learning`.
"""

import json
from pathlib import Path

import pytest
import torch

from pipeline.config import params
from pipeline.core import files
from pipeline.data import fetch
from pipeline.training.loop import Observer, Training, configure_torch

GOLDEN = Path(__file__).parents[2] / "learning.json"
MODELS = ("osa_qr", "osa_ns", "vit", "vit_noskip", "vit_noskip_nonorm")
QUICK = {
    "model": {"patch_size": 7, "embed_dim": 32, "depth": 2},  # N = 17
    "train": {"epochs": 2, "batch_size": 16, "learning_rate": 1e-3, "points_per_epoch": 1},
}


def accuracy(name: str) -> float:
    """Test accuracy on the sample, in per cent."""
    config = params.resolve_recipe(params.load(files.ROOT / "params.yaml"), params.load_paper(), name, QUICK)
    config = config.model_copy(update={"data": config.data.model_copy(update={"source": "sample"})})
    training = Training(config, 0, torch.device("cpu"))
    training.run(Observer())
    return 100 * training.progress.history[-1]["test_accuracy"]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("sample"))
        fetch.main(["sample"])
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_epochs_teach_the_model_as_much_as_before(name, sample):
    assert accuracy(name) == pytest.approx(json.loads(GOLDEN.read_text(encoding="utf-8"))[name], abs=2)


if __name__ == "__main__":
    configure_torch()
    fetch.main(["sample"])
    files.write_json(GOLDEN, {name: round(accuracy(name), 1) for name in MODELS})
