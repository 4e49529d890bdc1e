"""Records a training step as a CUDA graph. Replaying the graph launches hundreds of small kernels with one call."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WARM_UP = 3  # steps run before the recording, so that libraries have chosen kernels and allocated memory

Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class GraphedStep:
    """Replays `step(images, labels)` for batches of one size. Each call overwrites the outputs of the previous call.

    The constructor records the step, compares a replay with the step itself, and restores the model and the optimisers.

    Raises:
        RuntimeError: the step cannot be recorded, or the results of a replay differ from those of the step.
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
                raise RuntimeError("its replay gives numbers that differ from those of the step itself")
        finally:
            before.restore()

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.replay()
        return self.outputs


def capture(function: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Records the kernels that `function` launches.

    Returns:
        The pair (replay, outputs). `replay()` launches the kernels again and overwrites the tensors `outputs`.
    """
    # Warm-up and recording share a stream, since libraries initialise themselves once per stream.
    stream = torch.cuda.Stream()
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
    """A copy of all tensors that a step changes: parameters, buffers, and the optimisers' moments and step counts."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.copies = {key: tensor.clone() for key, tensor in self._tensors().items()}

    def _tensors(self) -> dict[tuple, Tensor]:
        tensors: dict[tuple, Tensor] = {("model", name): tensor for name, tensor in self.model.state_dict().items()}
        for which, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {(which, index, name): tensor for name, tensor in state.items()}
        return tensors

    @torch.no_grad()
    def restore(self) -> None:
        """Copies the saved values back in place. Optimiser state without a saved value becomes 0, its initial value."""
        for key, tensor in self._tensors().items():
            tensor.copy_(self.copies[key]) if key in self.copies else tensor.zero_()

    def is_current(self) -> bool:
        return all(torch.equal(tensor, self.copies[key]) for key, tensor in self._tensors().items())
