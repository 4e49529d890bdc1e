"""Launches the kernels for short sequences, and the kernels that compute φ₁(Z) Y and its gradients."""

from dataclasses import dataclass

from torch import Tensor

from osa.kernels import launch
from osa.kernels.launch import Inputs
from osa.kernels.short import attention, phi1
from osa.kernels.tiles import BLOCK, MAX_ROWS

METHODS = ("exact", "newton_schulz", "qr")
MAX_TOKENS, MAX_WIDTH = 256, 16  # maximum rows and columns of query and key
MAX_PHI1_ROWS = MAX_ROWS.value
ENTRIES_PER_THREAD = 64  # entries of a basis that each thread holds in registers during Gram–Schmidt
WARP = {"num_warps": 1, "num_stages": 1, "maxnreg": 255}  # on an H100, one warp per matrix takes half as long as four


@dataclass(frozen=True)
class Short:
    """Implements `osa.kernels.operators.Backend` for one method."""

    method: str

    def forms(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[str, ...]:
        return ("short",) if query.shape[-2] <= MAX_TOKENS and query.shape[-1] <= MAX_WIDTH else ()

    def saved_shape(self, query: Tensor, value: Tensor) -> tuple[int, ...]:
        """Returns (batch, heads, N, 2d) for "qr", which saves bases. Other methods save one number per matrix."""
        return (*query.shape[:-1], 2 * query.shape[-1]) if self.method == "qr" else (*query.shape[:2], 1, 1)

    def forward(self, inputs: Inputs, output: Tensor, saved: Tensor, num_iterations: int, epsilon: float) -> None:
        query, _, value, _ = inputs
        tensors, (size, block) = (*inputs, output, saved), _sizes(query, value)
        scratch_size = (2 * query.shape[-2] + 2) * size + 5 * size**2 + 4 * block
        constants = self.constants("forward", query, value, num_iterations)
        _launch_heads(attention.forward_kernel, tensors, tensors[:5], scratch_size, epsilon, constants)

    def backward(
        self, inputs: Inputs, saved: Tensor, grad: Tensor, grads: Inputs, num_iterations: int, epsilon: float
    ) -> None:
        query, _, value, _ = inputs
        size, block = _sizes(query, value)
        constants = self.constants("backward", query, value, num_iterations)
        squares = 11 + num_iterations  # number of matrices (2d, 2d) in scratch memory; each Newton–Schulz iteration adds one
        scratch_size = (3 * query.shape[-2] + 2) * size + squares * size**2 + 9 * block + _terms_size(size)
        tensors, with_strides = (*inputs, saved, grad, *grads), (*inputs, grad, grads[0], grads[2])
        _launch_heads(attention.backward_kernel, tensors, with_strides, scratch_size, epsilon, constants)

    def scale_where_valid(self, query: Tensor, value: Tensor, saved: Tensor) -> Tensor | None:
        has_basis = self.constants("forward", query, value, 0)["ALL_ROWS"]
        return saved if self.method == "exact" and not has_basis else None

    def constants(self, kernel: str, query: Tensor, value: Tensor, num_iterations: int) -> dict:
        """Constants and launch options of `kernel`, "forward" or "backward". ALL_ROWS is 0 if the kernel computes no basis.

        The forward pass of "qr" has as many warps as its basis needs. "exact" computes a basis only if one warp can hold it.
        """
        rows = launch.padded(query.shape[-2])
        warps = max(1, rows * MAX_ROWS.value // (32 * ENTRIES_PER_THREAD))  # warps whose registers together hold a basis
        options = WARP
        if (self.method, kernel) == ("qr", "forward"):
            options = WARP | {"num_warps": warps}
        elif self.method != "exact" or warps > 1:
            rows = 0
        widths = {"WIDTH": query.shape[-1], "VALUE_WIDTH": value.shape[-1]}
        return widths | {"METHOD": self.method, "ITERATIONS": num_iterations, "ALL_ROWS": rows} | options


def phi1_forward(z: Tensor, y: Tensor, output: Tensor) -> None:
    """Writes φ₁(Z) Y to the output, for contiguous Z (b, n, n) and Y (b, n, m)."""
    constants = {"N": z.shape[-1], "VALUE_WIDTH": y.shape[-1], **WARP}
    launch.launch_resident(phi1.forward_kernel, len(z), (z, y, output), [], 2 * z.shape[-1] ** 2, constants)


def phi1_backward(z: Tensor, y: Tensor, grad: Tensor, grad_z: Tensor, grad_y: Tensor) -> None:
    """Writes the gradients of Z and Y, given the gradient of φ₁(Z) Y."""
    count, size, width = y.shape
    scratch_size = 4 * size**2 + size * width + _terms_size(size)
    constants = {"N": size, "VALUE_WIDTH": width, **WARP}
    launch.launch_resident(phi1.backward_kernel, count, (z, y, grad, grad_z, grad_y), [], scratch_size, constants)


def _launch_heads(
    kernel, tensors: tuple[Tensor, ...], with_strides: tuple[Tensor, ...], scratch_size: int, epsilon: float, constants: dict
) -> None:
    batch, heads, tokens, _ = tensors[0].shape
    strides, numbers = [x.stride() for x in with_strides], {"heads": heads, "tokens": tokens, "epsilon": epsilon}
    launch.launch_resident(kernel, batch * heads, tensors, strides, scratch_size, constants | numbers)


def _sizes(query: Tensor, value: Tensor) -> tuple[int, int]:
    """Returns 2d, the number of columns of M, and 2d · d_value, the number of entries of X."""
    return 2 * query.shape[-1], 2 * query.shape[-1] * value.shape[-1]


def _terms_size(size: int) -> int:
    """Number of scratch entries that `phi1.phi1_gradients` needs for its terms."""
    return phi1.MAX_TERMS.value * BLOCK.value * size
