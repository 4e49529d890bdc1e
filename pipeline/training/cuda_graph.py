"""A training step recorded once as a CUDA graph and replayed: its hundreds of small kernels cost the launch of one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WARM_UP = 3  # steps before the recording, in which libraries choose their kernels and allocate what these need

Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class GraphedStep:
    """`step(images, labels)` for batches of one size, with the same numbers: this is checked before anything else.

    A graph is bound to addresses. So a batch is copied to where the recorded one lay, and the outputs are overwritten by
    the next step. Recording takes steps; the model and the optimisers are then put back, in place, to where they were.

    Raises:
        RuntimeError: the step cannot be recorded, or its replay has other numbers. Model and optimisers are as before.
    """

    def __init__(
        self, step: Step, model: nn.Module, optimizers: list[torch.optim.Optimizer], images: Tensor, labels: Tensor
    ) -> None:
        self.images, self.labels = images.clone(), labels.clone()
        before = _State(model, optimizers)
        try:
            self.replay, self.outputs = capture(lambda: step(self.images, self.labels))
            before.restore()
            step(self.images, self.labels)
            expected = _State(model, optimizers)
            before.restore()
            self.replay()
            if not expected.is_current():
                raise RuntimeError("its replay gives other numbers than the step itself")
        finally:
            before.restore()

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.replay()
        return self.outputs


def capture(function: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Captures the work that `function` gives the device: its replay, and the outputs that each replay overwrites."""
    stream = torch.cuda.Stream()  # for both: libraries prepare themselves stream by stream, which a recording cannot hold
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = function()
    return graph.replay, outputs


class _State:
    """A copy of what a step changes: the model's parameters and buffers, and the optimisers' moments and counts."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.copies = {key: tensor.clone() for key, tensor in self._tensors().items()}

    def _tensors(self) -> dict[tuple, Tensor]:
        tensors = {("model", name): tensor for name, tensor in self.model.state_dict().items()}
        for which, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {(which, index, name): tensor for name, tensor in state.items()}
        return tensors

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back in place; what an optimiser did not have yet becomes the zero that it begins with."""
        for key, tensor in self._tensors().items():
            tensor.copy_(self.copies[key]) if key in self.copies else tensor.zero_()

    def is_current(self) -> bool:
        return all(torch.equal(tensor, self.copies[key]) for key, tensor in self._tensors().items())
