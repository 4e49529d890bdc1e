"""The numbers of trainings, as osa.NUMERICS stands for them: the losses of every model's first steps on the sample.

An edit that changes them on purpose raises osa.NUMERICS and writes tests/golden.json again:
`python -m tests.pipeline.training.test_golden`.
"""

import json
from pathlib import Path

import pytest

import osa
from pipeline.core import files
from pipeline.data import fetch
from pipeline.tools.same_bits import first_losses
from pipeline.training.loop import configure_torch
from tests.osa.helpers import REPRESENTATIVES

GOLDEN = Path(__file__).parents[2] / "golden.json"
STEPS = 20
EXPECTED = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {"losses": {}}


@pytest.fixture(scope="module", autouse=True)
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fetch.main(["sample"])
        files.write_text("params.yaml", (files.ROOT / "params.yaml").read_text(encoding="utf-8"))
        yield


def test_every_model_has_its_losses_and_the_file_is_of_these_numerics():
    assert EXPECTED["numerics"] == osa.NUMERICS
    assert EXPECTED["losses"].keys() == osa.MODELS.keys()


@pytest.mark.parametrize(
    "name, steps",
    [
        *((name, 2) for name in REPRESENTATIVES),
        *(pytest.param(name, STEPS, marks=pytest.mark.slow) for name in EXPECTED["losses"]),
    ],
)
def test_the_first_steps_have_the_losses_that_they_had(name, steps):
    """Within rounding, which differs by machine and grows from step to step."""
    losses, _ = first_losses(name, steps)
    assert losses[:2] == pytest.approx(EXPECTED["losses"][name][:2], rel=1e-5)
    assert losses == pytest.approx(EXPECTED["losses"][name][:steps], rel=2e-3)


if __name__ == "__main__":
    configure_torch()
    losses = {name: [round(loss, 6) for loss in first_losses(name, STEPS)[0]] for name in osa.MODELS}
    text = json.dumps({"numerics": osa.NUMERICS, "losses": losses})
    GOLDEN.write_text(text.replace("], ", "],\n") + "\n", encoding="utf-8")
