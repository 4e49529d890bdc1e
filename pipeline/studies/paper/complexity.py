"""Table 1 and Section 3.1: what does orthogonal attention cost, by component and as a whole, for one head in float32?

We check the number of multiply–adds and the peak memory, which are exactly reproducible. We do not check times. Three sweeps
vary N alone, d alone, and N and d together at fixed N/d. The log–log slope of a cost against N estimates its degree in N in
the first sweep, and its total degree in N and d in the third sweep.
"""

import itertools
import math
import random
import re
from functools import partial
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from pydantic import Field, model_validator
from torch import Tensor
from tqdm import tqdm

from osa.functional import orthogonal_attention
from osa.linalg import newton_schulz_gram, phi1_times
from osa.options import EPSILON, Method
from osa.reference import newton_schulz_basis, qr_basis
from pipeline.benchmarks import cost
from pipeline.benchmarks.cost import BOTH, FORWARD, Call
from pipeline.benchmarks.inputs import NORM, SEED, Inputs, exponential_dense, skew
from pipeline.config.looks import PALETTE, look_of
from pipeline.config.params import PositiveFloat, PositiveInt, Section
from pipeline.core import provenance
from pipeline.core.files import DIGITS
from pipeline.studies import Study, Tables, charts, check
from pipeline.studies._summaries import log_log_slope
from pipeline.studies.lab import Lab

Sizes = Annotated[list[PositiveInt], Field(min_length=3)]
KEYS = ["sweep", "part", "pass"]
METHODS: dict[str, Method] = {  # model → the method of its attention
    "osa_qr": "qr",
    "osa_ns": "newton_schulz",
    "osa_exact": "exact",
    "osa_cayley": "cayley",
    "osa_qr_literal": "qr_literal",
}
SMALLEST = 64  # minimum N of the first sweep, close to the paper's N = 50
NUM_ITERATIONS = 6  # K of Eq. 9 (Appendix D)


class Settings(Section):
    largest_tokens: PositiveInt  # maximum N in the first sweep
    repeats: PositiveInt  # rounds of timing
    width: PositiveInt = 16  # d_v in the first sweep, as in the paper
    widths: Sizes = Field([8, 16, 32, 64, 128, 256])  # d_v in the second sweep
    tokens: PositiveInt = 2048  # N in the second sweep
    joint: Sizes = Field([8, 16, 32, 64, 128])  # d_v in the third sweep
    tokens_per_width: PositiveInt = 32  # N / d_v in the third sweep
    # Maximum N for calls that form N×N matrices. At N = 4096 a matrix takes 64 MiB, and several exist at the same time.
    most_tokens_matrix: PositiveInt = 4096
    # Maximum N for the exponential of an N×N matrix. Its backward pass needs 2N×2N matrices.
    most_tokens_exponential: PositiveInt = 1024
    sample_seconds: PositiveFloat = 0.005  # a timing sample lasts at least this long, far above the clock's resolution

    @model_validator(mode="after")
    def _orders_can_be_seen(self):
        least = 256 * self.width  # from this N on, N×N terms dominate N×d terms in the fitted slopes
        if self.largest_tokens < least:
            raise ValueError(f"largest_tokens must be {least} or more to fit an exponent, not {self.largest_tokens}")
        per_width = ("tokens_per_width", self.tokens_per_width, 1)
        for key, tokens, width in [("tokens", self.tokens, max(self.widths)), per_width]:
            if tokens < 2 * width:
                raise ValueError(f"{key} must be {2 * width} or more, not {tokens}: Table 1 assumes 2d ≤ N for every width")
        return self


def measure(settings: Settings, lab: Lab) -> Tables:  # `lab` is unused, so the DVC stage does not depend on lab.py
    device = provenance.default_device()
    return {"counts": count_calls(settings, device), "times": measure_times(settings, device)}


def count_calls(settings: Settings, device: torch.device) -> pd.DataFrame:
    """Counts multiply–adds and bytes of every call. The bytes are the inputs' bytes plus the call's peak memory."""
    rows = []
    for sweep, tokens, width in tqdm(points(settings), desc="count", disable=None):
        for (part, direction), call in calls(tokens, width, settings, device).items():
            counted = cost.cost(call, device)
            num_bytes = call.input_bytes + counted.peak_bytes
            rows.append((sweep, part, direction, tokens, width, counted.multiply_adds, num_bytes, counted.by_formula))
    return pd.DataFrame(rows, columns=[*KEYS, "tokens", "width", "multiply_adds", "bytes", "by_formula"])


def measure_times(settings: Settings, device: torch.device) -> pd.DataFrame:
    """Times every call of the first two sweeps. Returns the median and the quartiles, in seconds."""
    rows, order = [], random.Random(SEED)
    timed = [point for point in points(settings) if point[0] != "joint"]
    for sweep, tokens, width in tqdm(timed, desc="time", disable=None):
        at_point = calls(tokens, width, settings, device)
        samples = cost.sample_seconds(at_point, settings.repeats, settings.sample_seconds, order, device)
        for (part, direction), seconds in samples.items():
            quartiles = np.quantile(seconds, (0.5, 0.25, 0.75))
            rows.append((sweep, part, direction, tokens, width, *quartiles, len(seconds)))
    names = ["seconds", "lower_quartile", "upper_quartile", "samples"]
    table = pd.DataFrame(rows, columns=[*KEYS, "tokens", "width", *names])
    return table.assign(machine=provenance.machine(provenance.describe_environment(device)))


def points(settings: Settings) -> list[tuple[str, int, int]]:
    """Returns (sweep, N, d) for every size of the sweeps."""
    doublings = int(math.log2(settings.largest_tokens / SMALLEST))
    tokens = [("tokens", SMALLEST * 2**k, settings.width) for k in range(doublings + 1)]
    widths = [("widths", settings.tokens, d) for d in settings.widths]
    return tokens + widths + [("joint", d * settings.tokens_per_width, d) for d in settings.joint]


def calls(tokens: int, width: int, settings: Settings, device: torch.device) -> dict[tuple[str, str], Call]:
    """Returns {(part, FORWARD or BOTH): call} for one size. Skips parts that form N×N matrices if N is too large."""
    most = dict.fromkeys(("small_dense", "application_dense", "softmax_dense"), settings.most_tokens_matrix)
    most["exponential_dense"] = settings.most_tokens_exponential
    every = parts(Inputs.draw(tokens, width, NORM, device)).items()
    forward = {(name, FORWARD): call for name, call in every if tokens <= most.get(name, tokens)}
    return forward | {(name, BOTH): call.with_backward() for (name, _), call in forward.items()}


def parts(x: Inputs) -> dict[str, Call]:
    """Returns a `Call` for each part: components of Table 1, and complete implementations of attention (OSA and softmax).

    A component takes the results of earlier components as inputs. A part whose name ends in _dense forms an N×N matrix.
    """
    qkv = (x.query, x.key, x.value)
    m = torch.cat(qkv[:2], dim=-1)  # (1, 1, N, 2d)
    qr, newton_schulz = partial(qr_basis, dtype=m.dtype), partial(newton_schulz_basis, epsilon=EPSILON, dtype=m.dtype)
    basis = qr(m)  # (1, 1, N, 2d)
    small = small_skew(x.scale, basis, m)  # (1, 1, 2d, 2d)
    scaled = small * (NORM / torch.linalg.matrix_norm(small, 1))  # fixed ‖[S]‖₁: for a larger norm, exp takes more products
    factors = (basis, torch.linalg.matrix_exp(small), x.value)
    osa = {name: partial(orthogonal_attention, scale=x.scale, method=method) for name, method in METHODS.items()}
    return {
        "qr": Call(qr, (m,)),
        "newton_schulz": Call(partial(newton_schulz, num_iterations=NUM_ITERATIONS), (m,)),
        "newton_schulz_gram": Call(partial(gram_of_basis, NUM_ITERATIONS), (m,)),
        "small": Call(partial(small_skew, x.scale), (basis, m)),
        "exponential": Call(torch.linalg.matrix_exp, (scaled,)),
        "phi1": Call(expm1_times, (small, basis.mT @ x.value)),
        "application": Call(apply, factors),
        "small_dense": Call(partial(small_skew_dense, x.scale), (basis, x.query, x.key)),
        "application_dense": Call(apply_dense, factors),
        **{name: Call(attention, qkv) for name, attention in osa.items()},
        "softmax": Call(F.scaled_dot_product_attention, qkv),
        "softmax_dense": Call(softmax_dense, qkv),
        "exponential_dense": Call(partial(exponential_dense, x.scale), qkv),
    }


# Formulas of Table 1 that `osa.reference` lacks


def gram_of_basis(num_iterations: int, m: Tensor) -> Tensor:
    """Returns BᵀB of the Newton–Schulz basis B, from iterations on 2d×2d matrices (end of Section 3)."""
    inverse_norm = 1 / (torch.linalg.matrix_norm(m, keepdim=True) + EPSILON)
    return newton_schulz_gram(inverse_norm.square() * (m.mT @ m), num_iterations)


def small_skew(scale: float, basis: Tensor, m: Tensor) -> Tensor:
    """Returns [S] = BᵀSB (Eq. 7) from BᵀM, without forming S."""
    query, key = (basis.mT @ m).chunk(2, dim=-1)  # each (1, 1, 2d, d)
    return skew(scale, query, key)


def small_skew_dense(scale: float, basis: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns [S] = BᵀSB (Eq. 7), forming the N×N matrix S."""
    return basis.mT @ (skew(scale, query, key) @ basis)


def expm1_times(small: Tensor, products: Tensor) -> Tensor:
    """Returns (exp[S] − I) BᵀV without forming exp[S]."""
    return phi1_times(small, small @ products)


def apply(basis: Tensor, exponential: Tensor, value: Tensor) -> Tensor:
    """Returns V + B ((exp[S] − I) (BᵀV)): Eq. 6 times V, multiplied from right to left."""
    products = basis.mT @ value
    return value + basis @ (exponential @ products - products)


def apply_dense(basis: Tensor, exponential: Tensor, value: Tensor) -> Tensor:
    """Returns A V, forming the N×N matrix A = I + B (exp[S] − I) Bᵀ (Eq. 6)."""
    identity, small_identity = (torch.eye(n, dtype=value.dtype, device=value.device) for n in basis.shape[-2:])
    return (identity + basis @ (exponential - small_identity) @ basis.mT) @ value


def softmax_dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns softmax(QKᵀ/√d) V, forming the N×N matrix of attention weights."""
    return torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1) @ value


ORDERS = {  # part → its key in `orders` of paper.yaml
    "qr": "qr",
    "newton_schulz": "newton_schulz",
    "newton_schulz_gram": "newton_schulz",
    "small": "small",
    "exponential": "exponential",
    "phi1": "exponential",
    "application": "application",
}
OSA = ("osa_qr", "osa_ns", "osa_exact", "osa_cayley")
JUDGED = {"tokens": "N", "joint": "Nd"}  # sweep → the sizes that grow
QUANTITIES = {"multiply_adds": "operations", "bytes": "memory"}
FIT_POINTS = 4  # a slope is fitted to this many of a sweep's largest sizes, since exponents are asymptotic
# How far a slope may exceed the paper's exponent. An extra factor N adds 1. A lower-order term that is 10 % of the total at
# the smallest N changes the slope over three doublings by 0.04. A step from 15 to 16 Taylor terms or squarings adds 0.03.
TOLERANCE = 0.05


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Summarises the costs of Table 1's components, and compares OSA with torch's fused softmax attention.

    table_1      the maximum of (slope − the paper's exponent) over components
    linear       the same maximum over complete implementations of OSA
    formed       log–log slopes of the operation count against N: for Eq. 7 if S is formed, and for Eq. 6 if A is formed
    crossings    the N above which OSA is faster than softmax, for a forward and backward pass
    """
    counts, times, orders = tables["counts"], tables["times"], lab.paper.orders
    components: list[dict[str, Any]] = [
        {"part": part, "order": orders[name], "slopes": slopes(counts, part, FORWARD)} for part, name in ORDERS.items()
    ]
    whole = [(slopes(counts, part, direction), orders["osa"]) for part, direction in itertools.product(OSA, (FORWARD, BOTH))]
    largest = int(counts.loc[counts["sweep"] == "tokens", "tokens"].max())
    seconds, held = along_n(times, "seconds"), along_n(counts, "bytes")
    return {
        "components": components,
        "table_1": check(max_excess([(each["slopes"], each["order"]) for each in components]), TOLERANCE),
        "linear": check(max_excess(whole), TOLERANCE),
        "formed": [slopes(counts, f"{part}_dense", FORWARD)["operations"]["tokens"] for part in ("small", "application")],
        "crossings": {part: crossing(seconds[part] / seconds["softmax"]) for part in OSA},
        "largest_tokens": largest,
        "softmax_over_osa": {part: float(seconds.loc[largest, "softmax"] / seconds.loc[largest, part]) for part in OSA},
        "memory_over_fused": {part: float(held.loc[largest, part] / held.loc[largest, "softmax"]) for part in OSA},
        "machine": times["machine"].iloc[0],
    }


def slopes(counts: pd.DataFrame, part: str, direction: str) -> dict[str, dict[str, float]]:
    """Returns log–log slopes of operations and memory against N in each sweep of `JUDGED`, or NaN for fewer than 3 sizes."""
    own = counts[(counts["part"] == part) & (counts["pass"] == direction)]
    exponents: dict[str, dict[str, float]] = {name: {} for name in QUANTITIES.values()}
    for (quantity, name), sweep in itertools.product(QUANTITIES.items(), JUDGED):
        rows = own[own["sweep"] == sweep].tail(FIT_POINTS)
        fits = len(rows) >= 3
        exponents[name][sweep] = round(log_log_slope(rows["tokens"], rows[quantity]), DIGITS) if fits else math.nan
    return exponents


def degree(order: str, symbols: str) -> int:
    """Returns the degree of `order` in `symbols`: "N d^2 + d^3" has degree 1 in "N", and 3 in "Nd" (N and d together)."""
    terms = [re.findall(r"([Nd])\^?(\d?)", term) for term in order.split(" + ")]
    return max(sum(int(exponent or 1) for symbol, exponent in term if symbol in symbols) for term in terms)


def max_excess(measured: list[tuple[dict, dict]]) -> float:
    """Returns the maximum of (slope − exponent of the paper's order of growth), or NaN if a slope is NaN."""
    excesses = []
    for own, order in measured:
        for name, (sweep, symbols) in itertools.product(QUANTITIES.values(), JUDGED.items()):
            excesses.append(own[name][sweep] - degree(order[name], symbols))
    return float(np.max(excesses))


def along_n(table: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Returns `quantity` of a forward and backward pass: a row for each N, a column for each component or implementation."""
    rows = table[(table["sweep"] == "tokens") & (table["pass"] == BOTH)]
    return rows.pivot(index="tokens", columns="part", values=quantity)


def crossing(ratio: pd.Series) -> float | None:
    """Returns the N above which a ratio, indexed by N, stays below 1. We interpolate on log–log axes.

    Returns the smallest N if the ratio is always below 1, and None if the ratio is not below 1 at the largest N.
    """
    above = np.flatnonzero(ratio >= 1)
    if len(above) == 0:
        return float(ratio.index[0])
    i = above[-1]
    if i == len(ratio) - 1:
        return None
    (x, following_x), (y, following_y) = np.log(ratio.index[i : i + 2]), np.log(ratio.iloc[i : i + 2])
    return float(np.exp(x + (following_x - x) * y / (y - following_y)))


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    """Draws time and peak memory of both passes against N, for OSA, fused softmax, and methods that form N×N matrices."""
    lines = {part: look_of(part).line(label=lab.label(part)) for part in OSA}
    lines["softmax"] = look_of("softmax").line(label="softmax, fused")
    lines["softmax_dense"] = {"color": PALETTE[4], "label": "softmax, N×N"}
    lines["exponential_dense"] = {"color": PALETTE[6], "label": "exp(S), N×N"}
    figure, panels = charts.panels(2, 3.2)
    titles = {"seconds": ("Time", "Seconds"), "bytes": ("Peak memory", "Bytes")}
    for axes, (quantity, (title, unit)) in zip(panels, titles.items(), strict=True):
        values = along_n(tables["counts" if quantity == "bytes" else "times"], quantity)
        for part, style in lines.items():
            axes.plot(values[part], **style)
        axes.set(title=title, xlabel="Tokens N", ylabel=unit)
        axes.set_xscale("log", base=2)
        charts.logarithmic(axes, "y")
    charts.legend(figure, panels[0].get_lines())
    return figure


STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"linear_in_n": draw})
