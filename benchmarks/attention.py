"""One attention call against the number of tokens, by every method and by what else one would call:
`python -m benchmarks.attention`.

Orthogonal attention by all methods of `osa.functional`, the paper's formulas as `benchmarks.straightforward` writes them,
the dense N×N `matrix_exp`, and torch's softmax attention, as torch chooses its backend and by each backend that takes the
inputs. Forward and forward with backward; inputs of the spectrum and the ‖S‖₂ of the study `complexity`. At one
size all are timed in rounds of shuffled order. A size that a route is predicted to be too slow or too large for is absent.
Writes attention.csv and .json, in bfloat16 attention_bfloat16.csv and .json, to paper_outputs/benchmarks/HARDWARE/.
"""

import argparse
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from benchmarks import results, straightforward
from osa.functional import ITERATIONS, METHODS, orthogonal_attention
from pipeline import cost
from pipeline.core import record
from pipeline.core.errors import UserError, entry_point
from pipeline.core.files import rounded
from pipeline.cost import Call
from pipeline.studies.benchmarks import BEST, SDPA, with_best
from pipeline.studies.complexity import BOTH, DECAY, FORWARD, NORM, SEED, Inputs, exponential_dense

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALLEST, DOUBLED_FROM = 50, 128  # the paper's N, then 128, 256, …
WIDTHS = (16, 64)  # d_v: that of the paper's heads, and a usual one
SAMPLE_SECONDS = 0.02  # a sample repeats its call for as long
MOST_SECONDS = 2.0  # of a call: a size that is predicted to take more is left out
MOST_MATRIX_BYTES = 2**30  # of an N×N matrix
MOST_TOKENS_DENSE = 512  # on the CPU: beyond, one dense exponential with its backward pass takes seconds
MOST_TOKENS_ERROR = 512  # up to which A is formed and ‖AᵀA − I‖₂ taken
PRODUCTS = {256: 50, 512: 20, 2048: 3}  # square matrices whose product shows the peak, and how many samples of it are taken;
# the small ones last less than the turn of a process, and so show it on a busy machine too
COPIES = [2**k for k in range(16, 29, 2)]  # bytes: from 64 KiB, in the nearest cache, to 256 MiB, in memory
FLOPS_ALLOWANCE = 1.5  # for a clock rate that rises between the two measurements
BYTES_ALLOWANCE = 4.0  # for caches nearer than torch's copy shows, where its overhead counts
BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
KEYS = ["method", "tokens", "width", "pass", "dtype"]

Key = tuple[str, int, str]  # method, width and pass


@dataclass(frozen=True)
class Route:
    """A function of query, key and value, the power of N with which its time grows, and whether it forms an N×N matrix."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    power: int
    forms_matrix: bool = False


@dataclass(frozen=True)
class Peak:
    """What the machine has been seen to do: floating-point operations and bytes in a second."""

    flops: float
    bytes: float

    @classmethod
    def measure(cls, dtype: torch.dtype, device: torch.device) -> "Peak":
        """The best of matrix products up to 2048³, and of copies that fit in caches and that do not.

        Products in float32 count too, because the small matrices are float32 whatever the inputs are. Taken by the wall
        clock until the host has read a result, and not by `pipeline.cost`, whose clock it is to check.
        """
        flops, rates = [], []
        for (n, samples), each in itertools.product(PRODUCTS.items(), {dtype, torch.float32}):
            a = torch.randn(n, n, dtype=each, device=device)
            flops.append(2 * n**3 / fastest(partial(torch.matmul, a, a), samples, device))
        for size in COPIES:
            a = torch.ones(size // 4, device=device)
            rates.append(2 * a.nbytes / fastest(partial(torch.empty_like(a).copy_, a), 5, device))
        return cls(max(flops), max(rates))

    def larger(self, other: "Peak") -> "Peak":
        return Peak(max(self.flops, other.flops), max(self.bytes, other.bytes))


def fastest(call: Callable[[], Tensor], samples: int, device: torch.device) -> float:
    """Seconds of a call: the least of some samples, each of which ends when the host has read from the last result."""
    in_a_row = 1 if device.type == "cpu" else 30  # so that on CUDA the way to the host and back is a small part
    call()
    seconds = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(in_a_row):
            result = call()
        result.flatten()[-1].item()
        seconds.append((time.perf_counter() - start) / in_a_row)
    return min(seconds)


def check(row: dict, peak: Peak) -> None:
    """Raises UserError where a row is faster than the machine: then the clock or the count is wrong, and all rows with it.

    Operations: nothing is faster than the fastest product of matrices, up to `FLOPS_ALLOWANCE`. Bytes: a call reads its
    inputs and writes its outputs once or more, and in a cache or not cannot pass the fastest copy of any size, up to
    `BYTES_ALLOWANCE`. A clock that reads milliseconds as seconds, does not wait for the device or divides by the wrong
    number of calls is wrong by a factor of tens and more.
    """
    limits = {
        "tflops": (peak.flops * FLOPS_ALLOWANCE / 1e12, "TFLOP/s"),
        "gigabytes_per_second": (peak.bytes * BYTES_ALLOWANCE / 1e9, "GB/s"),
    }
    for column, (limit, unit) in limits.items():
        if row[column] > limit:
            what = f"{row['method']} ({row['pass']}) at N = {row['tokens']}, d_v = {row['width']}"
            raise UserError(
                f"{what} is measured at {row[column]:.3g} {unit}, above the machine's {limit:.3g}: the clock or the count "
                "is wrong, so run it again on a quiet machine and, if it persists, check pipeline/cost.py."
            )


@entry_point
def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    device = record.default_device()
    table, peak = measure(options, device)
    results.write(
        "attention" if options.dtype == "float32" else f"attention_{options.dtype}",
        table,
        device,
        options,
        inputs={"norm": NORM, "decay": DECAY, "seed": SEED},
        peak={"tflops": rounded(peak.flops / 1e12), "gigabytes_per_second": rounded(peak.bytes / 1e9)},
        ratios=ratios(table),
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = results.parser("attention", __doc__)
    parser.add_argument("--largest", type=int, default=65536, help="largest number of tokens, of 50, 128, 256, ...")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of query, key and value")
    return parser.parse_args(arguments)


def sizes(largest: int) -> list[int]:
    """50, 128, 256, … up to `largest`."""
    doubled = itertools.takewhile(lambda n: n <= largest, (DOUBLED_FROM * 2**k for k in itertools.count()))
    return [SMALLEST, *doubled]


def measure(options: argparse.Namespace, device: torch.device) -> tuple[pd.DataFrame, Peak]:
    dtype, order = DTYPES[options.dtype], random.Random(SEED)
    peak, rows = Peak(0, 0), []
    last: dict[Key, tuple[int, float]] = {}  # tokens and seconds where a route was last measured
    points = list(itertools.product(WIDTHS, sizes(options.largest)))
    for width, tokens in tqdm(points, desc="attention", unit="size", disable=None):
        x = Inputs.draw(tokens, width, NORM, device)
        tensors = tuple(tensor.to(dtype) for tensor in (x.query, x.key, x.value))
        calls = {}
        for method, route in routes(x.scale, tensors).items():
            forward = Call(route.function, tensors)
            for direction in (FORWARD, BOTH):
                if fits(method, route, direction, tensors[0], last.get((method, width, direction))):
                    calls[method, width, direction] = forward if direction == FORWARD else forward.with_backward()
        setup = {key: cost.seconds(call, 1, device) for key, call in calls.items()}
        samples = cost.sample_seconds(calls, options.repeats, SAMPLE_SECONDS, order, device)
        peak = peak.larger(Peak.measure(dtype, device))  # anew at each size: the machine may have been busy before
        errors = {method: orthogonality_error(calls, method, width) for method in {key[0] for key in calls}}
        for key, seconds in samples.items():
            row = describe(calls[key], results.quantiles(seconds), device)
            names = dict(zip(KEYS, (key[0], tokens, *key[1:], options.dtype), strict=True))
            rows.append(names | row | {"orthogonality_error": errors[key[0]], "setup_seconds": setup[key]})
            check(rows[-1], peak)
            last[key] = tokens, row["seconds"]
    return pd.DataFrame(rows), peak


def routes(scale: float, tensors: tuple[Tensor, ...]) -> dict[str, Route]:
    """Every way to compute attention that takes these inputs."""
    literal = partial(straightforward.orthogonal_attention, scale=scale)
    iterated = partial(literal, num_iterations=ITERATIONS["newton_schulz"])
    methods = [method for method in METHODS if method != "qr_literal"]  # which is the literal code below
    found = {method: Route(partial(orthogonal_attention, method=method, scale=scale), 1) for method in methods}
    found |= {"literal_qr": Route(in_float32(literal), 1), "literal_newton_schulz": Route(in_float32(iterated), 1)}
    found["matrix_exp"] = Route(in_float32(partial(exponential_dense, scale)), 3, forms_matrix=True)
    found[SDPA] = Route(F.scaled_dot_product_attention, 2)
    for name, backend in BACKENDS.items():
        function = partial(by_backend, backend)
        if takes(function, tensors):
            found[name] = Route(function, 2, forms_matrix=backend == SDPBackend.MATH)
    return found


def in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` with narrower inputs widened, as torch.linalg has no bfloat16."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function(query.float(), key.float(), value.float()).to(value.dtype)

    return call


def by_backend(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value)


def takes(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> bool:
    """Whether a backend of torch computes attention and its gradients for inputs of this kind, tried on few tokens."""
    few = tuple(tensor[..., :SMALLEST, :] for tensor in tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells by warnings why a backend does not
        try:
            Call(function, few).with_backward()()
        except RuntimeError:
            return False
    return True


def fits(method: str, route: Route, direction: str, query: Tensor, before: tuple[int, float] | None) -> bool:
    """Whether a call is worth its time and memory, given tokens and seconds of the last one."""
    *batch, tokens, width = query.shape
    if method == "literal_qr" and direction == BOTH and tokens < 2 * width:
        return False  # torch.linalg.qr has no gradient for a wide matrix
    if method == "matrix_exp" and query.device.type == "cpu" and tokens > MOST_TOKENS_DENSE:
        return False
    if route.forms_matrix and math.prod(batch) * tokens**2 * query.element_size() > MOST_MATRIX_BYTES:
        return False
    return before is None or before[1] * (tokens / before[0]) ** route.power <= MOST_SECONDS


def describe(call: Call, times: dict[str, float], device: torch.device) -> dict[str, float]:
    """The numbers of a row that follow from the call and its times."""
    of, output = cost.cost(call, device), call()
    moved = call.input_bytes + sum(tensor.nbytes for tensor in (output if isinstance(output, tuple) else (output,)))
    return times | {
        "tflops": 2 * of.multiply_adds / times["seconds"] / 1e12,
        "gigabytes_per_second": moved / times["seconds"] / 1e9,
        "peak_bytes": of.peak_bytes,
    }


def orthogonality_error(calls: dict[Key, Call], method: str, width: int) -> float:
    """‖AᵀA − I‖₂ of the first head, with A = exp(S) formed as the route's result for V = I. NaN for softmax and large N."""
    call = calls.get((method, width, FORWARD))
    if call is None or method.startswith(SDPA) or call.tensors[0].shape[-2] > MOST_TOKENS_ERROR:
        return math.nan
    query, key = (tensor[0, 0] for tensor in call.tensors[:2])
    identity = torch.eye(len(query), dtype=query.dtype, device=query.device)
    a = call.function(query, key, identity).double()
    return torch.linalg.matrix_norm(a.mT @ a - identity.double(), 2).item()


def ratios(table: pd.DataFrame) -> list[dict]:
    """By size: seconds of the best SDPA over "exact", and of the literal formulas over ours; absent where one is."""
    pairs = [(BEST, "exact"), ("literal_qr", "qr"), ("literal_qr", "exact"), ("literal_newton_schulz", "newton_schulz")]
    result = []
    for (direction, width, tokens), rows in with_best(table).groupby(["pass", "width", "tokens"], sort=True):
        seconds = rows.set_index("method")["seconds"]
        numbers = {f"{a} / {b}": rounded(seconds[a] / seconds[b]) for a, b in pairs if {a, b} <= set(seconds.index)}
        result.append({"pass": direction, "width": int(width), "tokens": int(tokens)} | numbers)
    return result


if __name__ == "__main__":
    main()
