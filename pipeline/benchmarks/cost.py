"""Measures the cost of a call: multiply–adds and peak memory, which are reproducible, and seconds, which are not."""

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from osa import runtime

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler says on stderr that it found no CUDA device

FORWARD, BOTH = "forward", "forward and backward"  # the values of the column "pass" in tables
Shapes = list[list[int]]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Call:
    """A function with its tensor arguments."""

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]

    def __call__(self) -> Any:
        return self.function(*self.tensors)

    @property
    def input_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def with_backward(self) -> "Call":
        """Returns a call that computes the gradients of all tensors. Its first argument is the output's gradient."""
        leaves = tuple(tensor.clone().requires_grad_() for tensor in self.tensors)
        return Call(partial(_gradients, self.function), (torch.ones_like(self()), *leaves))


def _gradients(function: Callable[..., Tensor], grad: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*leaves), leaves, grad)


@dataclass(frozen=True)
class Cost:
    """The cost of a call.

    by_formula   the part of `multiply_adds` that comes from the formulas in `ROUTINES`
    peak_bytes   peak memory, without the memory that was allocated before the call
    """

    multiply_adds: int
    by_formula: int
    peak_bytes: int


def cost(call: Callable[[], object], device: torch.device) -> Cost:
    """Counts the multiply–adds of a call and measures its peak memory.

    We count the matrix products that torch's profiler sees. A library routine, such as a factorisation, hides its products
    from the profiler, so we count them by formula. A kernel of `osa` hides its products too, so we count those of the
    plain route, the same computation in torch. Element-wise work is not counted. The call runs on one thread, because
    operators on the CPU allocate workspace for each thread.

    Raises:
        LookupError: the call runs a linear-algebra or attention routine for which this file has no formula, or an operator
            of `osa` that has no plain route.
    """
    call()  # warm-up: we do not count the memory that the first call keeps
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with _one_thread(), profile(record_shapes=True, profile_memory=True) as profiler:
        call()
    events = profiler.kineto_results.events()
    changes = (event.nbytes() for event in events if event.name() == "[memory]")  # in chronological order
    peak = torch.cuda.max_memory_allocated(device) - before if on_cuda else max(itertools.accumulate(changes, initial=0))
    if any(event.name().startswith("osa::") for event in events):  # the profiler sees no product inside our kernels
        with _one_thread(), mock.patch.object(runtime, "KERNELS", {}), profile(record_shapes=True) as profiler:
            call()
        events = profiler.kineto_results.events()
    multiply_adds = sum(_multiply_adds(event.name(), event.shapes()) for event in events)
    by_formula = sum(ROUTINES[event.name()](event.shapes()) for event in events if event.name() in ROUTINES)
    return Cost(multiply_adds, by_formula, peak)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _multiply_adds(name: str, shapes: Shapes) -> int:
    if name in FORMULAS:
        return FORMULAS[name](shapes)
    if name.startswith(("aten::linalg_", "aten::_scaled_dot_product", "osa::")) and name not in MADE_OF_OTHERS:
        where = "FORMULAS in pipeline/benchmarks/cost.py"
        raise LookupError(f"the number of multiply–adds of {name} is unknown: add a formula for it to {where}")
    return 0


def product(a: list[int], b: list[int]) -> int:
    """Returns the multiply–adds of (..., n, k) times (..., k, m): nkm for each matrix of the batch."""
    return math.prod(a) * b[-1]


def qr(shape: list[int]) -> int:
    """Returns the multiply–adds of the reduced QR decomposition of (..., N, r) by Householder reflections.

    LAPACK's geqrf finds the k = min(N, r) reflections, and orgqr multiplies them into the N×k basis. We count one
    multiply–add for every two floating-point operations (Golub & Van Loan, Section 5.2).
    """
    *batch, n, r = shape
    k = min(n, r)
    reflections = 2 * n * r * k - (n + r) * k**2 + 2 * k**3 / 3
    basis = n * k**2 - k**3 / 3
    return round(math.prod(batch) * (reflections + basis))


def cholesky(shape: list[int]) -> int:
    """Returns the multiply–adds of the Cholesky decomposition of (..., n, n): n³/6 for each matrix.

    Step j subtracts an outer product from the stored half of an (n − j)×(n − j) matrix (Golub & Van Loan, Section 4.2).
    """
    return round(math.prod(shape) * shape[-1] / 6)


def householder_product(shape: list[int]) -> int:
    """Returns the multiply–adds needed to turn k Householder reflections into an n×k basis. `shape` is (..., n, k)."""
    *batch, n, k = shape
    return round(math.prod(batch) * (n * k**2 - k**3 / 3))


def svd(shape: list[int]) -> int:
    """Returns the multiply–adds of the reduced SVD of (..., m, n): 3mn² + 10n³ for m ≥ n (R-SVD, Golub & Van Loan 8.6)."""
    *batch, m, n = *shape[:-2], max(shape[-2:]), min(shape[-2:])
    return math.prod(batch) * (3 * m * n**2 + 10 * n**3)


def attention_products(query: list[int], key: list[int], value: list[int]) -> int:
    """Returns the multiply–adds of two products over N_q·N_k pairs of tokens: QKᵀ, and the weights times V."""
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward(query: list[int], key: list[int], value: list[int]) -> int:
    """Returns the multiply–adds of five products: QKᵀ again, and the gradients of scores, query, key and value."""
    return math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


PRODUCTS: dict[str, Callable[[Shapes], int]] = {  # matrix products that the profiler sees
    **dict.fromkeys(("aten::mm", "aten::bmm"), lambda shapes: product(*shapes[:2])),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::baddbmm_"), lambda shapes: product(*shapes[1:3])),
}
# The profiler sees no matrix products inside these routines. The formulas come from Golub & Van Loan.
ROUTINES: dict[str, Callable[[Shapes], int]] = {
    "aten::linalg_cholesky_ex": lambda shapes: cholesky(shapes[0]),
    "aten::linalg_eigh": lambda shapes: math.prod(shapes[0]) * 9 * shapes[0][-1] // 2,  # 9n³/2 (Golub & Van Loan 8.3)
    # The profiler also lists the `out=` overload that this operator calls, with a third shape. We skip the overload.
    "aten::linalg_householder_product": lambda shapes: householder_product(shapes[0]) * (len(shapes) == 2),
    "aten::linalg_lu_factor_ex": lambda shapes: round(math.prod(shapes[0]) * shapes[0][-1] / 3),  # Golub & Van Loan 3.2
    "aten::linalg_lu_solve": lambda shapes: math.prod(shapes[2]) * shapes[0][-1],  # two triangular solves
    "aten::linalg_qr": lambda shapes: qr(shapes[0]),
    "aten::linalg_solve_triangular": lambda shapes: math.prod(shapes[1]) * shapes[0][-1] // 2,  # n/2 multiply-adds per entry
    "aten::linalg_svd": lambda shapes: svd(shapes[0]),
}
for _kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    ROUTINES[f"aten::_scaled_dot_product_{_kernel}"] = lambda shapes: attention_products(*shapes[:3])
    ROUTINES[f"aten::_scaled_dot_product_{_kernel}_backward"] = lambda shapes: attention_backward(*shapes[1:4])
FORMULAS = PRODUCTS | ROUTINES
MADE_OF_OTHERS = {  # operators without matrix products, or whose products the profiler sees as separate events
    "aten::linalg_cholesky",
    "aten::linalg_matrix_exp",
    "aten::linalg_matrix_norm",
    "aten::linalg_solve",
    "aten::linalg_solve_ex",
    "aten::linalg_vector_norm",
    "aten::_scaled_dot_product_attention_math",
    "osa::warn_where_lost",
}


def sample_seconds(
    calls: Mapping[K, Callable[[], object]], repeats: int, at_least: float, order: random.Random, device: torch.device
) -> dict[K, list[float]]:
    """Returns `repeats` samples of each call's time in seconds. Each round samples every call once, in a new random order.

    A disturbance of the machine therefore affects all calls alike. A sample is the mean over several calls in a row, which
    together take about `at_least` seconds.
    """
    for call in calls.values():
        call()
    in_a_row = {name: math.ceil(at_least / seconds(call, 1, device)) for name, call in calls.items()}
    samples: dict[K, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name in order.sample(list(calls), len(calls)):
            samples[name].append(seconds(calls[name], in_a_row[name], device))
    return samples


def seconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Returns the mean time of a call in seconds, over `times` calls in a row."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1000 / times
    before = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - before) / times
