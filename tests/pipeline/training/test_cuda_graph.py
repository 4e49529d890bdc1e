"""The recorded step: the numbers of the step itself, whatever happens while it is recorded.

Where there is no CUDA device, `repeated` stands in for the recording: as a graph does, it works on the tensors that it was
given at first, and overwrites its outputs.
"""

import pytest
import torch

from pipeline.training import cuda_graph
from pipeline.training.loop import Observer, Training
from pipeline.training.recorder import history_csv
from tests.pipeline.trainings import CPU, config, write_params

CUDA = torch.cuda.is_available()


def repeated(function):
    for _ in range(cuda_graph.WARM_UP):
        function()
    outputs = function()

    def replay():
        for output, new in zip(outputs, function(), strict=True):
            output.copy_(new)

    return replay, outputs


@pytest.fixture(autouse=True)
def recording(project, monkeypatch):
    if not CUDA:
        monkeypatch.setattr(cuda_graph, "capture", repeated)


def training(variant="osa_exact", with_graph=True) -> Training:
    run = Training(config(variant), 0, torch.device("cuda" if CUDA else "cpu"))
    run.with_graph = with_graph
    return run


def result(run: Training) -> tuple[str, list]:
    run.run(Observer())
    return history_csv(run.progress.history), [tensor.clone() for tensor in run.model.state_dict().values()]


def assert_same(actual: tuple[str, list], expected: tuple[str, list]) -> None:
    assert actual[0] == expected[0]
    assert all(map(torch.equal, actual[1], expected[1]))


KEPT = {"keep": "value_out", "keep_by": "retraction"}
SCHEDULE = {"warmup_steps": 3, "schedule": "cosine"}
PENALTY = {"penalty": "VAR-III", "penalty_weight": 0.01}


@pytest.mark.parametrize(
    "variant, options, train",
    [
        ("vit_noskip_nonorm", {}, {}),
        ("osa_exact", KEPT, SCHEDULE | {"optimizer": "muon"}),
        *(pytest.param(variant, {}, {}, marks=pytest.mark.slow) for variant in ("osa_qr", "osa_ns", "osa_exact")),
        pytest.param("osa_exact", PENALTY | {"keep": "attention", "keep_by": "retraction"}, {}, marks=pytest.mark.slow),
        pytest.param("vit", {"keep": "whole_key_value", "keep_by": "householder"}, {}, marks=pytest.mark.slow),
        pytest.param("osa_exact", KEPT, SCHEDULE | {"optimizer": "adamw"}, marks=pytest.mark.slow),
    ],
)
def test_a_training_with_a_graph_gives_the_same_bits(variant, options, train):
    """The last batch of an epoch is smaller, and so no batch of the graph."""
    write_params(variants={variant: options}, train=train | {"epochs": 1})
    graphed = training(variant)
    actual = result(graphed)
    assert graphed.graphed is not None and graphed.graphed.images.shape[0] == 13
    assert_same(actual, result(training(variant, with_graph=False)))


def test_a_graph_recorded_in_the_middle_of_a_training_leaves_it_as_it_was():
    """A graph recorded after a resumption: the optimiser has moments and counts already."""
    expected = result(training(with_graph=False))
    run = training(with_graph=False)
    images, labels = next(run.batches(0))
    run.step(images, labels)
    count = next(iter(run.optimizers[0].state.values()))["step"].item()
    before = [tensor.clone() for tensor in run.model.state_dict().values()]
    graphed = cuda_graph.GraphedStep(run.eager_step, run.model, run.optimizers, images, labels)
    assert all(map(torch.equal, run.model.state_dict().values(), before))
    assert {state["step"].item() for state in run.optimizers[0].state.values()} == {count}
    loss, correct = graphed(images, labels)
    assert loss.isfinite() and 0 <= correct <= len(labels)
    assert {state["step"].item() for state in run.optimizers[0].state.values()} == {count + 1}
    assert_same(result(training()), expected)


@pytest.mark.parametrize("fault", ["recording fails", "other numbers"])
def test_where_the_recording_does_not_serve_the_training_goes_on_without(monkeypatch, capsys, fault):
    expected = result(training(with_graph=False))

    def capture(function):
        function()  # changes the model
        if fault == "recording fails":
            raise RuntimeError("operation not permitted when stream is capturing\nand so on")
        return lambda: None, function()

    monkeypatch.setattr(cuda_graph, "capture", capture)
    run = training()
    assert_same(result(run), expected)
    assert run.graphed is None and not run.with_graph
    warning = capsys.readouterr().err
    reason = "operation not permitted" if fault == "recording fails" else "its replay gives numbers that differ"
    assert warning.count("warning: the step runs without a CUDA graph") == 1 and reason in warning
    assert "and so on" not in warning


def test_no_graph_is_asked_for_without_a_device():
    run = Training(config("osa_exact"), 0, CPU)
    assert not run.with_graph and not run.optimizers[0].param_groups[0]["capturable"]
