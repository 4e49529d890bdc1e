"""Measures the time of attention calls with growing numbers of tokens, for every method and every alternative:
`python -m pipeline benchmarks.attention`.

Orthogonal attention is computed with each method, with the paper's formulas as written, and with the dense `matrix_exp`. The
alternatives are torch's softmax attention, with each backend, and two kinds of linear attention. At each size, we time all
calls except those predicted to be too slow or too large. Each round times every call once, in a new random order. The
results go to attention.csv and attention.json in paper_outputs/benchmarks/HARDWARE/.
"""

import argparse
import itertools
import math
import random
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

from osa.functional import orthogonal_attention
from osa.options import ITERATIONS, METHODS
from pipeline.benchmarks import cost, linear, measurements, straightforward
from pipeline.benchmarks.cost import BOTH, FORWARD, Call
from pipeline.benchmarks.inputs import DECAY, NORM, SEED, Inputs, exponential_dense
from pipeline.benchmarks.measurements import BEST, SDPA, with_best
from pipeline.core import provenance
from pipeline.core.errors import UserError, entry_point
from pipeline.core.files import rounded
from pipeline.results import measures

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALLEST, DOUBLED_FROM = 50, 128  # numbers of tokens: the paper's N, and then 128, 256, …
VIT_B16 = 197  # tokens of ViT-B/16 at 224×224
WIDTHS = (16, 64)  # values of d_v: 16 in the paper's models, and 64, a common width
SAMPLE_SECONDS = 0.02  # minimum duration of a sample; a shorter call is repeated
MOST_SECONDS = 2.0  # a call that is predicted to take longer is left out
MOST_MATRIX_BYTES = 2**30  # maximum size of an N×N matrix
MOST_TOKENS_DENSE = 512  # for more tokens, `matrix_exp` and its gradient take seconds on the CPU
MOST_TOKENS_ERROR = 512  # maximum number of tokens for which we form A, to measure ‖AᵀA − I‖₂
ALLOWANCE = 1.5  # a call's FLOP/s may reach this multiple of the measured peak, since the clock rate varies
SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
LINEAR = "linear"
KEYS = ["method", "tokens", "width", "pass", "dtype"]  # columns that identify a row

Key = tuple[str, int, str]  # method, width and pass


@dataclass(frozen=True)
class Route:
    """A way to compute attention, in time proportional to N^power. `forms_matrix` says whether it stores an N×N matrix."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    power: int
    forms_matrix: bool = False


def check_peak(row: dict, peak: float) -> None:
    """Raises UserError if a row's FLOP/s exceed `ALLOWANCE` × `peak`: its time or operation count must then be wrong."""
    if row["tflops"] > (limit := ALLOWANCE * peak / 1e12):
        what = f"{row['method']} ({row['pass']}) at N = {row['tokens']}, d_v = {row['width']}"
        raise UserError(
            f"{what} is measured at {row['tflops']:.3g} TFLOP/s, above the limit of {limit:.3g} for this machine: "
            "the timing or the operation count is wrong; run the benchmark again on an idle machine and, if the error "
            "persists, check pipeline/benchmarks/cost.py."
        )


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = measurements.parser("attention", __doc__)
    sizes = "largest number of tokens; the sizes are 50, 128, 197, 256, 512, 1024, ..."
    parser.add_argument("--largest", type=int, default=65536, help=sizes)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of query, key and value")
    parser.add_argument("--heads", type=int, default=1, help="number of heads in each call, all with the same inputs")
    parser.add_argument("--norm", type=float, default=NORM, help="‖S‖₂ of the inputs")
    options, device = parser.parse_args(arguments), provenance.default_device()
    table, peak = measure(options, device)
    measurements.write_measurements(
        file_name(options),
        table,
        device,
        options,
        inputs={"decay": DECAY, "seed": SEED},
        peak={"tflops": rounded(peak / 1e12)},
        ratios=ratios(table),
    )


def file_name(options: argparse.Namespace) -> str:
    """Returns "attention", followed by each option that differs from its default, as in attention_bfloat16_norm_8."""
    unusual = {
        options.dtype: options.dtype != "float32",
        f"{options.heads}_heads": options.heads != 1,
        f"norm_{options.norm:g}": options.norm != NORM,
    }
    return "_".join(["attention", *(name for name, is_unusual in unusual.items() if is_unusual)])


def measure(options: argparse.Namespace, device: torch.device) -> tuple[pd.DataFrame, float]:
    """Returns the table, and the machine's peak in floating-point operations per second."""
    dtype, order = DTYPES[options.dtype], random.Random(SEED)
    peak, rows = 0.0, []
    last: dict[Key, tuple[int, float]] = {}  # tokens and seconds of each route's last measurement
    doubled = itertools.takewhile(lambda n: n <= options.largest, (DOUBLED_FROM * 2**k for k in itertools.count()))
    larger = sorted(n for n in (VIT_B16, *doubled) if n <= options.largest)
    points = list(itertools.product(WIDTHS, [SMALLEST, *larger]))
    for width, tokens in tqdm(points, desc="attention", unit="size", disable=None):
        x = Inputs.draw(tokens, width, options.norm, device)
        tensors = tuple(each.to(dtype).repeat(1, options.heads, 1, 1) for each in (x.query, x.key, x.value))
        calls: dict[Key, Call] = {}
        for method, route in routes(x.scale, tensors).items():
            forward = Call(route.function, tensors)
            for direction in (FORWARD, BOTH):
                if fits(method, route, direction, tensors[0], last.get((method, width, direction))):
                    calls[method, width, direction] = forward if direction == FORWARD else forward.with_backward()
        samples = cost.sample_seconds(calls, options.repeats, SAMPLE_SECONDS, order, device)
        peak = max(peak, measurements.peak(device, dtype))  # measured again, because the machine may have been busy before
        errors = {method: error_of(calls, method, width) for method in {key[0] for key in calls}}
        for key, seconds in samples.items():
            times, of = measurements.quantiles(seconds), cost.cost(calls[key], device)
            row = dict(zip(KEYS, (key[0], tokens, *key[1:], options.dtype), strict=True)) | times
            row["tflops"] = 2 * of.multiply_adds / times["seconds"] / 1e12
            rows.append(row | {"peak_bytes": of.peak_bytes, "orthogonality_error": errors[key[0]]})
            check_peak(row, peak)
            last[key] = tokens, times["seconds"]
    return pd.DataFrame(rows), peak


def routes(scale: float, tensors: tuple[Tensor, ...]) -> dict[str, Route]:
    """Returns every implementation of attention that accepts these inputs, by name."""
    literal = partial(straightforward.orthogonal_attention, scale=scale)
    iterated = partial(literal, num_iterations=ITERATIONS["newton_schulz"])
    methods = [method for method in METHODS if method != "qr_literal"]  # "literal_qr" below has the same formulas
    found = {method: Route(partial(orthogonal_attention, method=method, scale=scale), 1) for method in methods}
    found |= {"literal_qr": Route(in_float32(literal), 1), "literal_newton_schulz": Route(in_float32(iterated), 1)}
    found["matrix_exp"] = Route(in_float32(partial(exponential_dense, scale)), 3, forms_matrix=True)
    found[SDPA] = Route(F.scaled_dot_product_attention, 2)
    projection = linear.orthogonal_projection(tensors[0].shape[-1]).to(tensors[0])
    found |= {f"{LINEAR}_elu": Route(linear.elu, 1), f"{LINEAR}_favor": Route(partial(linear.favor, projection), 1)}
    for name, backend in SDPA_BACKENDS.items():
        function = partial(by_backend, backend)
        if takes(function, tensors):
            found[name] = Route(function, 2, forms_matrix=backend == SDPBackend.MATH)
    return found


def in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps `function` to compute in float32 for inputs of any type, because torch.linalg lacks bfloat16."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function(query.float(), key.float(), value.float()).to(value.dtype)

    return call


def by_backend(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value)


def takes(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> bool:
    """Returns whether `function` computes attention and gradients for the first few tokens without an error."""
    few = tuple(tensor[..., :SMALLEST, :] for tensor in tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains in warnings why a backend refuses the inputs
        try:
            Call(function, few).with_backward()()
        except RuntimeError:
            return False
    return True


def fits(method: str, route: Route, direction: str, query: Tensor, before: tuple[int, float] | None) -> bool:
    """Returns whether to time a call, judged by its memory and by its predicted time.

    `before` is (tokens, seconds) of the route's last measurement, or None if the route has not been measured yet.
    """
    *batch, tokens, width = query.shape
    if method == "literal_qr" and direction == BOTH and tokens < 2 * width:
        return False  # torch.linalg.qr has no gradient for a wide matrix
    if method == "matrix_exp" and query.device.type == "cpu" and tokens > MOST_TOKENS_DENSE:
        return False
    if route.forms_matrix and math.prod(batch) * tokens**2 * query.element_size() > MOST_MATRIX_BYTES:
        return False
    return before is None or before[1] * (tokens / before[0]) ** route.power <= MOST_SECONDS


def error_of(calls: dict[Key, Call], method: str, width: int) -> float:
    """Returns ‖AᵀA − I‖₂ of the first head, where A is the output for V = I.

    The result is NaN for attention that is not orthogonal, and for N above `MOST_TOKENS_ERROR`.
    """
    call = calls.get((method, width, FORWARD))
    if call is None or method.startswith((SDPA, LINEAR)) or call.tensors[0].shape[-2] > MOST_TOKENS_ERROR:
        return math.nan
    query, key = (tensor[0, 0] for tensor in call.tensors[:2])
    identity = torch.eye(len(query), dtype=query.dtype, device=query.device)
    a = call.function(query, key, identity).double()
    return measures.orthogonality_error(a).item()


def ratios(table: pd.DataFrame) -> list[dict]:
    """Returns ratios of times, such as "literal_qr / qr", for each pass, width and number of tokens."""
    pairs = [(BEST, "exact"), ("literal_qr", "qr"), ("literal_qr", "exact"), ("literal_newton_schulz", "newton_schulz")]
    result = []
    for (direction, width, tokens), rows in with_best(table).groupby(["pass", "width", "tokens"], sort=True):
        seconds = rows.set_index("method")["seconds"]
        numbers = {f"{a} / {b}": rounded(seconds[a] / seconds[b]) for a, b in pairs if {a, b} <= set(seconds.index)}
        result.append({"pass": direction, "width": int(width), "tokens": int(tokens)} | numbers)
    return result


if __name__ == "__main__":
    main()
