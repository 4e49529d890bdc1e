"""Table 1 and Section 3.1: what orthogonal attention costs, component by component and as a whole, on one head in float32.

Multiply–adds and peak memory repeat exactly and are what is checked; the times stand beside them. Exponents are slopes on
log–log axes along three lines: N alone, d alone, and N and d together at fixed N/d, which measures the total degree.
"""

import itertools
import math
import random
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import matplotlib
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field, model_validator
from torch import Tensor
from tqdm import tqdm

from osa.functional import orthogonal_attention
from osa.linalg import EPSILON, newton_schulz_gram, phi1_times
from pipeline import cost
from pipeline.core import record
from pipeline.core.files import DIGITS
from pipeline.core.params import PositiveFloat, PositiveInt, Section
from pipeline.cost import Call
from pipeline.lab import Lab
from pipeline.report.charts import EXPECTED, legend, logarithmic, panels
from pipeline.report.looks import PALETTE, STYLE, look
from pipeline.report.numbers import ABSENT, grouped, number, per_cent, span
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import log_log_slope

place = 46

Sizes = Annotated[list[PositiveInt], Field(min_length=3)]
FORWARD, BOTH = "forward", "forward and backward"
KEYS = ["sweep", "part", "pass"]
TIMED = ("tokens", "widths")  # the sweeps whose times are taken
METHODS = {"osa_qr": "qr", "osa_ns": "newton_schulz", "osa_exact": "exact", "osa_qr_literal": "qr_literal"}
SMALLEST = 64  # tokens; N = 50 in the paper, from which 16,384 is 8 doublings
SEED = 0
NORM = 2.0  # ‖S‖₂ of the inputs, and ‖[S]‖₁ where exp[S] is measured alone, whose number of products it sets; a trained
# head has a median of 0.2 to 1.6 by block, and at most 4.3
NORMS = (0.1, 1.0, 10.0, 100.0, 1000.0)  # ‖S‖₂ at which the products that exp[S] takes are counted
DECAY = 1.0  # column k of Q and K has standard deviation k^−DECAY: few directions carry S, as in a trained head
NUM_ITERATIONS = 6  # K of Eq. 9 (Appendix D)


class Settings(Section):
    """How far the sweeps go. `largest_tokens` is that of N = 64, 128, ... at fixed d, `repeats` the rounds of timing."""

    largest_tokens: PositiveInt
    repeats: PositiveInt
    width: PositiveInt = 16  # d_v of the paper's heads, while N varies
    widths: Sizes = Field([8, 16, 32, 64, 128, 256])  # d varies, at `tokens`
    tokens: PositiveInt = 2048
    joint: Sizes = Field([8, 16, 32, 64, 128])  # both vary, at `tokens_per_width`
    tokens_per_width: PositiveInt = 32
    most_tokens_matrix: PositiveInt = 4096  # above, no N×N matrix is formed: 64 MiB each, several at once
    most_tokens_exponential: PositiveInt = 1024  # above, no N×N exponential: its backward pass takes one of 2N×2N
    sample_seconds: PositiveFloat = 0.005  # a sample repeats its call for as long: far above the clock's resolution

    @model_validator(mode="after")
    def _orders_can_be_seen(self):
        least = 256 * self.width  # from where N×N is large beside N×d over all sizes that slopes are fitted to
        if self.largest_tokens < least:
            raise ValueError(f"largest_tokens {self.largest_tokens} is too small for an exponent; write {least} or more")
        for tokens, width in [(self.tokens, max(self.widths)), (self.tokens_per_width, 1)]:
            if tokens < 2 * width:
                raise ValueError(f"{tokens} tokens are fewer than twice the width {width}: Table 1 is about 2d ≤ N")
        return self


def measure(settings: Settings, lab: "Lab") -> Tables:  # in quotes: as it is not used, no number depends on its file
    device = record.default_device()
    return {
        "counts": count(settings, device),
        "exponential": count_products(settings, device),
        "times": measure_times(settings, device),
    }


def count(settings: Settings, device: torch.device) -> pd.DataFrame:
    """Multiply–adds and bytes of everything at every point. Bytes are those of the inputs and the peak of the call."""
    rows = []
    for sweep, tokens, width in tqdm(points(settings), desc="count", disable=None):
        for (part, direction), call in calls(tokens, width, settings, device).items():
            of = cost.cost(call, device)
            numbers = (of.multiply_adds, call.input_bytes + of.peak_bytes, of.by_formula)
            rows.append((sweep, part, direction, tokens, width, *numbers))
    return pd.DataFrame(rows, columns=[*KEYS, "tokens", "width", "multiply_adds", "bytes", "by_formula"])


def measure_times(settings: Settings, device: torch.device) -> pd.DataFrame:
    """Median and quartiles of the seconds of everything at every point of the timed sweeps."""
    rows, order = [], random.Random(SEED)
    timed = [point for point in points(settings) if point[0] in TIMED]
    for sweep, tokens, width in tqdm(timed, desc="time", disable=None):
        at_point = calls(tokens, width, settings, device)
        samples = cost.sample_seconds(at_point, settings.repeats, settings.sample_seconds, order, device)
        for (part, direction), seconds in samples.items():
            quartiles = np.quantile(seconds, (0.5, 0.25, 0.75))
            rows.append((sweep, part, direction, tokens, width, *quartiles, len(seconds)))
    names = ["seconds", "lower_quartile", "upper_quartile", "samples"]
    table = pd.DataFrame(rows, columns=[*KEYS, "tokens", "width", *names])
    return table.assign(machine=record.machine(record.describe_environment(device)))


def count_products(settings: Settings, device: torch.device) -> pd.DataFrame:
    """How many products of 2d×2d matrices exp[S] takes, by ‖S‖₂ and by d: multiply–adds in units of (2d)³."""
    rows = []
    for norm, d in [(norm, settings.width) for norm in NORMS] + [(NORM, d) for d in settings.widths]:
        small, _ = parts(Inputs.draw(settings.tokens, d, norm, device))["phi1"].tensors
        of = cost.cost(Call(torch.linalg.matrix_exp, (small,)), device)
        rows.append(("exponential", norm, d, of.multiply_adds / (2 * d) ** 3))
    return pd.DataFrame(rows, columns=["part", "norm", "width", "products"])


def points(settings: Settings) -> list[tuple[str, int, int]]:
    """Sweep, N and d of every point."""
    doublings = int(math.log2(settings.largest_tokens / SMALLEST))
    tokens = [("tokens", SMALLEST * 2**k, settings.width) for k in range(doublings + 1)]
    widths = [("widths", settings.tokens, d) for d in settings.widths]
    return tokens + widths + [("joint", d * settings.tokens_per_width, d) for d in settings.joint]


def calls(tokens: int, width: int, settings: Settings, device: torch.device) -> dict[tuple[str, str], Call]:
    """Everything that is measured at one point, by part and pass. N×N matrices only as far as the settings allow."""
    most = dict.fromkeys(("small_dense", "application_dense", "softmax_dense"), settings.most_tokens_matrix)
    most["exponential_dense"] = settings.most_tokens_exponential
    every = parts(Inputs.draw(tokens, width, NORM, device)).items()
    forward = {(name, FORWARD): call for name, call in every if tokens <= most.get(name, tokens)}
    return forward | {(name, BOTH): call.with_backward() for (name, _), call in forward.items()}


@dataclass(frozen=True)
class Inputs:
    """Query, key and value of one head, (1, 1, N, d), and the scale that gives S the norm that is asked for.

    Column k of query and key has standard deviation k^−DECAY.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    @classmethod
    def draw(cls, tokens: int, width: int, norm: float, device: torch.device) -> "Inputs":
        draws = torch.randn(3, 1, 1, tokens, width, generator=torch.Generator().manual_seed(SEED))
        query, key = draws[:2] * torch.arange(1, width + 1) ** -DECAY
        r = torch.linalg.qr(torch.cat([query, key], dim=-1).double(), mode="r").R  # S without its N×N matrix
        scale = norm / torch.linalg.matrix_norm(skew(1.0, *r.chunk(2, dim=-1)), 2).item()
        return cls(query.to(device), key.to(device), draws[2].to(device), scale)


def parts(x: Inputs) -> dict[str, Call]:
    """The rows of Table 1, each on the results of the rows before it, two of them also as they are written; then attention:
    ours by every method, torch's, and both with their N×N matrix."""
    qkv = (x.query, x.key, x.value)
    m = torch.cat(qkv[:2], dim=-1)  # (1, 1, N, 2d)
    basis = householder_basis(m)  # (1, 1, N, 2d)
    small = small_skew(x.scale, basis, m)  # (1, 1, 2d, 2d)
    of_norm = small * (NORM / torch.linalg.matrix_norm(small, 1))  # ‖[S]‖₁ sets how often matrix_exp squares
    factors = (basis, torch.linalg.matrix_exp(small), x.value)
    osa = {name: partial(orthogonal_attention, scale=x.scale, method=method) for name, method in METHODS.items()}
    return {
        "qr": Call(householder_basis, (m,)),
        "newton_schulz": Call(partial(newton_schulz_basis, NUM_ITERATIONS), (m,)),
        "newton_schulz_gram": Call(partial(gram_of_basis, NUM_ITERATIONS), (m,)),
        "small": Call(partial(small_skew, x.scale), (basis, m)),
        "exponential": Call(torch.linalg.matrix_exp, (of_norm,)),
        "phi1": Call(expm1_times, (small, basis.mT @ x.value)),
        "application": Call(apply, factors),
        "small_dense": Call(partial(small_skew_dense, x.scale), (basis, x.query, x.key)),
        "application_dense": Call(apply_dense, factors),
        **{name: Call(attention, qkv) for name, attention in osa.items()},
        "softmax": Call(F.scaled_dot_product_attention, qkv),
        "softmax_dense": Call(softmax_dense, qkv),
        "exponential_dense": Call(partial(exponential_dense, x.scale), qkv),
    }


# The formulas as they stand in the paper, in the dtype of their inputs: what is measured here and in benchmarks/.
# `osa.reference`, the yardstick of the tests, has them in float64, from Q and K and with N×N matrices throughout.


def householder_basis(m: Tensor) -> Tensor:
    """B of the reduced QR decomposition of M (Section 3), on every device by Householder reflections."""
    return torch.linalg.qr(m, mode="reduced").Q


def newton_schulz_basis(num_iterations: int, m: Tensor) -> Tensor:
    """B = M_K of Eq. 9 as it is written, on N×2d matrices."""
    basis = m / (torch.linalg.matrix_norm(m, keepdim=True) + EPSILON)
    identity = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    for _ in range(num_iterations):
        basis = 0.5 * basis @ (3 * identity - basis.mT @ basis)
    return basis


def gram_of_basis(num_iterations: int, m: Tensor) -> Tensor:
    """BᵀB, all that `orthogonal_attention` needs of that basis: the iteration runs on 2d×2d matrices (end of Section 3)."""
    inverse_norm = 1 / (torch.linalg.matrix_norm(m, keepdim=True) + EPSILON)
    return newton_schulz_gram(inverse_norm.square() * (m.mT @ m), num_iterations)


def skew(scale: float, query: Tensor, key: Tensor) -> Tensor:
    """scale · (QKᵀ − KQᵀ): S of Eq. 5, or [S] where BᵀQ and BᵀK are given."""
    half = scale * (query @ key.mT)
    return half - half.mT


def small_skew(scale: float, basis: Tensor, m: Tensor) -> Tensor:
    """[S] = BᵀSB (Eq. 7) from BᵀM, without S."""
    query, key = (basis.mT @ m).chunk(2, dim=-1)  # (1, 1, 2d, d) each
    return skew(scale, query, key)


def small_skew_dense(scale: float, basis: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """[S] = BᵀSB (Eq. 7) with S formed, N×N."""
    return basis.mT @ (skew(scale, query, key) @ basis)


def expm1_times(small: Tensor, products: Tensor) -> Tensor:
    """(exp[S] − I) BᵀV as `orthogonal_attention` has it, without exp[S]."""
    return phi1_times(small, small @ products)


def apply(basis: Tensor, exponential: Tensor, value: Tensor) -> Tensor:
    """Eq. 6 times V, from the right to the left: V + B ((exp[S] − I) (BᵀV))."""
    products = basis.mT @ value
    return value + basis @ (exponential @ products - products)


def apply_dense(basis: Tensor, exponential: Tensor, value: Tensor) -> Tensor:
    """Eq. 6 with A = I + B (exp[S] − I) Bᵀ formed, N×N, then A V."""
    identity, small_identity = (torch.eye(n, dtype=value.dtype, device=value.device) for n in basis.shape[-2:])
    return (identity + basis @ (exponential - small_identity) @ basis.mT) @ value


def softmax_dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(QKᵀ/√d) V with the N×N matrix formed."""
    return torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1) @ value


def exponential_dense(scale: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """exp(S) V (Eq. 5) with the N×N exponential: the naive implementation of Section 2.1."""
    return torch.linalg.matrix_exp(skew(scale, query, key)) @ value


# What follows from the tables alone


@dataclass(frozen=True)
class Part:
    """What a part is called, its entry in paper.yaml's orders, and its line."""

    label: str
    order: str
    line: dict


DASHED, DOTTED = (0, (5, 2)), (0, (1.5, 1.5))
SPARSE, SHIFTED = (0, (1.5, 4.5)), (3, (1.5, 4.5))  # of two lines that coincide both are seen
TABLE_1 = {
    "qr": Part("Reduced QR of M", "qr", look("qr").line()),
    "newton_schulz": Part("Newton–Schulz, Eq. 9", "newton_schulz", look("newton_schulz").line()),
    "newton_schulz_gram": Part("Newton–Schulz, Gram form", "newton_schulz", look("newton_schulz").line(linestyle=DOTTED)),
    "small": Part("[S]", "small", {"color": PALETTE[3]}),
    "exponential": Part("exp[S]", "exponential", {"color": PALETTE[4]}),
    "phi1": Part("exp[S] by φ₁", "exponential", {"color": PALETTE[4], "linestyle": DASHED}),
    "application": Part("Eq. 6 on V", "application", {"color": PALETTE[6], "linestyle": DASHED}),
}
AS_WRITTEN = {
    "small_dense": Part("[S], S formed", "small", {"color": PALETTE[3], "linestyle": SPARSE}),
    "application_dense": Part("Eq. 6 on V, A formed", "application", {"color": PALETTE[6], "linestyle": SHIFTED}),
}
OTHERS = {
    "softmax": Part("softmax, fused", "softmax", look("softmax").line()),
    "softmax_dense": Part("softmax, N×N formed", "softmax", look("softmax").line(linestyle=DOTTED)),
    "exponential_dense": Part("matrix_exp, N×N", "naive", {"color": PALETTE[4]}),
}
LITERAL = "osa_qr_literal"
PASSES = (FORWARD, BOTH)
QUANTITIES = {"multiply_adds": "operations", "bytes": "memory"}
SWEEPS = {"tokens": "N", "widths": "d", "joint": "N and d"}
JUDGED = ("tokens", "joint")  # degree in N, and total degree: what decides an order at 2d ≤ N
FIT_POINTS = 4  # largest sizes of a sweep to which slopes are fitted: exponents are about the large
LEAST_POINTS = 3
TOLERANCE = 0.05  # by which a slope may pass an exponent. A wrong power moves it by 1; one Taylor term or squaring more
# among 15 by 0.03 over three doublings, and a lower-order term that is 10 % at their start by 0.04


@dataclass(frozen=True)
class Order:
    """An entry of `orders` in pipeline/paper.yaml, such as "N d^2 + d^3" operations and "N d" memory."""

    operations: str
    memory: str | None

    def __str__(self) -> str:
        return f"{big_o(self.operations)} operations, {big_o(self.memory)} memory"


def big_o(order: str | None) -> str:
    """ "N d^2 + d^3" as O(Nd² + d³)."""
    if order is None:
        return ABSENT
    written = " + ".join(term.replace(" ", "") for term in order.split(" + "))
    return f"O({written.replace('^2', '²').replace('^3', '³')})"


def degree(order: str, sweep: str) -> int:
    """The exponent of an order such as "N d^2 + d^3" along a sweep: its degree in N, in d, or in both together."""
    varied = {"tokens": "N", "widths": "d", "joint": "Nd"}[sweep]
    terms = [re.findall(r"([Nd])\^?(\d?)", term) for term in order.split(" + ")]
    return max(sum(int(exponent or 1) for symbol, exponent in term if symbol in varied) for term in terms)


def crossing(ratio: pd.Series) -> tuple[float, str]:
    """The N from which a ratio, indexed by N, stays below 1, on a straight line between points on log–log axes; NaN and
    why where it is outside the range."""
    above = np.flatnonzero(ratio >= 1)
    if len(above) == 0:
        return math.nan, f"everywhere from {grouped(ratio.index[0])} on"
    i = above[-1]
    if i == len(ratio) - 1:
        return math.nan, f"nowhere up to {grouped(ratio.index[-1])}"
    (x, following_x), (y, following_y) = np.log(ratio.index[i : i + 2]), np.log(ratio.iloc[i : i + 2])
    return float(np.exp(x + (following_x - x) * y / (y - following_y))), ""


class Results:
    """The tables with the paper's orders and the names of the parts."""

    def __init__(self, settings: Settings, tables: Tables, lab: Lab) -> None:
        self.settings, self.tables = settings, tables
        self.orders = {name: Order(**order) for name, order in lab.paper.orders.items()}
        osa = {name: Part(lab.label(name), "osa", look(name).line()) for name in METHODS}
        self.parts = TABLE_1 | AS_WRITTEN | osa | OTHERS
        self.machine = tables["times"]["machine"].iloc[0]  # that the times were taken on

    def order(self, part: str) -> Order:
        return self.orders[self.parts[part].order]

    def rows(self, quantity: str, part: str, sweep: str, direction: str = FORWARD) -> pd.DataFrame:
        """The points of a part along a sweep, indexed by N, or where d varies by d."""
        table = self.tables["times" if quantity == "seconds" else "counts"]
        table = table[(table["part"] == part) & (table["sweep"] == sweep) & (table["pass"] == direction)]
        return table.set_index("tokens" if sweep == "tokens" else "width")

    def slope(self, quantity: str, part: str, sweep: str, direction: str = FORWARD) -> float:
        """The exponent over the largest sizes; NaN where there are too few."""
        values = self.rows(quantity, part, sweep, direction)[quantity].tail(FIT_POINTS)
        return round(log_log_slope(values.index, values), DIGITS) if len(values) >= LEAST_POINTS else math.nan

    def excess(self, part: str, direction: str) -> Measure:
        """By how much the steepest of a part's judged slopes exceeds its exponent; NaN where one of them is."""
        excesses, order = {}, self.order(part)
        for (quantity, name), sweep in itertools.product(QUANTITIES.items(), JUDGED):
            slope, stated = self.slope(quantity, part, sweep, direction), degree(getattr(order, name), sweep)
            grows = (
                "as stated"
                if number(slope) == f"{stated}"
                else f"{name} against {SWEEPS[sweep]}: {number(slope)}, not {stated}"
            )
            excesses[grows] = max(round(slope - stated, DIGITS), excesses.get(grows, -math.inf))
        value = float(np.max([*excesses.values()]))
        note = max(excesses, key=excesses.get) if math.isfinite(value) else "too few sizes"
        what = f"{self.parts[part].label}{'' if direction == FORWARD else f', {direction}'}: largest excess of a slope"
        return Measure(what, value, side="below", limit=TOLERANCE, note=note)

    def ratio(self, quantity: str, part: str, against: str, direction: str) -> pd.Series:
        """What a part takes in units of what another takes, by N."""
        ours, theirs = (self.rows(quantity, name, "tokens", direction)[quantity] for name in (part, against))
        return (ours / theirs).dropna()

    def table(self, heading: str, along: str, parts: list[str], lines: list[tuple[str, str]]) -> Table:
        """A row for each part, with its orders and its exponents along `lines`, each a sweep and a pass."""
        rows = []
        for part in parts:
            order, last = self.order(part), self.rows("multiply_adds", part, "tokens").iloc[-1]
            operations, memory, times = (
                " / ".join(number(round(self.slope(quantity, part, *line), 2)) for line in lines)
                for quantity in (*QUANTITIES, "seconds")
            )
            by_formula = per_cent(round(last["by_formula"] / last["multiply_adds"], 2))
            counted = [big_o(order.operations), operations, by_formula]
            rows.append([self.parts[part].label, *counted, big_o(order.memory), memory, times])
        note = (
            "Exponents. By formula: the share of the multiply–adds at the largest N that happen inside a library's routine "
            "and are stated by a formula (`ROUTINES` in pipeline/cost.py); all others are counted product by product. Times "
            f"are of {self.machine}."
        )
        columns = [heading, "Operations", along, "By formula", "Memory", along, f"Time: {along}"]
        return Table(columns, rows, "llrrlrr", note)


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    results = Results(settings, tables, lab)
    return [table_1(results), linear_in_n(results), crossover(results)]


def table_1(results: Results) -> Finding:
    settings = results.settings
    return Finding(
        id="table_1_components",
        title="Each component costs what Table 1 says",
        place="Table 1, Appendix A",
        kind=CHECK,
        statement="Table 1 states how the operations and the memory of each component grow with N and d.",
        rule=(
            f"No slope of multiply–adds or peak memory on log–log axes, over the {FIT_POINTS} largest sizes, exceeds the "
            f"entry's exponent by {TOLERANCE:g} or more, neither against N nor against N and d together: at 2d ≤ N these "
            "two decide the order."
        ),
        measures=[results.excess(part, FORWARD) for part in TABLE_1],
        table=results.table("Component", "N / d / both", [*TABLE_1, *AS_WRITTEN], [(sweep, FORWARD) for sweep in SWEEPS]),
        figure=components_figure(results),
        caption=(
            f"Multiply–adds of each component on one head, against N at d = {settings.width} and against d at "
            f"N = {grouped(settings.tokens)}. Dotted, with the N×N matrices formed; dashed in black, powers."
        ),
        remark=components_remark(results),
    )


def components_remark(results: Results) -> str:
    formed = " and ".join(f"N^{number(results.slope('multiply_adds', part, 'tokens'))}" for part in AS_WRITTEN)
    rows = results.tables["exponential"].query("part == 'exponential'")
    by_norm = rows[rows["width"] == results.settings.width].sort_values("norm").iloc[[0, -1]]
    by_width = rows[rows["norm"] == NORM].sort_values("width").iloc[[0, -1]]
    ends = (by_norm["products"], by_norm["norm"], by_width["products"], by_width["width"])
    of_norm, norms, of_width, widths = (" and ".join(map(number, pair)) for pair in ends)
    worst = max((results.excess(part, BOTH) for part in TABLE_1), key=lambda measure: measure.value)
    return (
        f"With their N×N matrices formed, Eq. 7 and Eq. 6 grow with {formed}: their entries hold for products in the order "
        "that avoids these. That of exp[S] holds at fixed ‖[S]‖₁, which the paper does not ask: torch's matrix_exp squares "
        f"about log₂‖[S]‖₁ times, and takes {of_norm} products at ‖S‖₂ = {norms}, and {of_width} at d = {widths} where "
        f"‖S‖₂ = {NORM:g}. With the backward pass, of which Table 1 does not speak, the worst is {worst.what} "
        f"{number(worst.value)} ({worst.note})."
    )


def linear_in_n(results: Results) -> Finding:
    literal, measures = results.parts[LITERAL].label, []
    for part, direction in itertools.product(METHODS, PASSES):
        found = results.excess(part, direction)
        measures.append(found if part != LITERAL else replace(found, side="", limit=math.nan))
    above = {"side": "above", "limit": 2 - TOLERANCE}
    asked = [("softmax_dense", "multiply_adds", above), ("softmax_dense", "bytes", above), ("softmax", "bytes", {})]
    for (part, quantity, limit), direction in itertools.product(asked, PASSES):
        what = f"{OTHERS[part].label}: slope of {QUANTITIES[quantity]} against N"
        measures.append(Measure(what, results.slope(quantity, part, "tokens", direction), note=direction, **limit))
    memory = results.ratio("bytes", "osa_exact", "softmax", BOTH)
    return Finding(
        id="linear_in_n",
        title="Linear in the number of tokens",
        place="Section 3.1",
        kind=CHECK,
        statement=f"OSA: {results.orders['osa']}; softmax attention: {results.orders['softmax']}",
        rule=(
            "OSA meets the rule of Table 1, forward alone and with backward, and each slope against N of softmax attention "
            f"with its N×N matrix is above {2 - TOLERANCE:g}. {literal} is shown and not checked: at fixed ‖S‖₂ its "
            "matrix_exp squares more often the larger d is."
        ),
        measures=measures,
        table=results.table(
            "Operator", "forward / with backward", [*METHODS, *OTHERS], [("tokens", each) for each in PASSES]
        ),
        figure=operators_figure(results),
        caption=(
            f"One head at d = {results.settings.width}, {BOTH}. Left, median time with quartiles on {results.machine}; "
            "right, peak memory with the inputs. Dashed in black, powers."
        ),
        remark=(
            "Softmax attention has quadratic memory where it stores its N×N matrix. torch's fused kernel does not: at "
            f"N = {grouped(memory.index[-1])}, {BOTH}, {results.parts['osa_exact'].label} holds "
            f"{number(memory.iloc[-1])} times as much."
        ),
    )


def crossover(results: Results) -> Finding:
    asked = {
        "operations": ("multiply_adds", "softmax"),
        "time, fused": ("seconds", "softmax"),
        "time, N×N": ("seconds", "softmax_dense"),
        "memory, fused": ("bytes", "softmax"),
        "memory, N×N": ("bytes", "softmax_dense"),
    }
    rows, measures, held = [], [], []
    for part, direction in itertools.product(METHODS, PASSES):
        label, cells = results.parts[part].label, []
        for column, (quantity, against) in asked.items():
            ratio = results.ratio(quantity, part, against, direction)
            tokens, why = crossing(ratio)
            cells.append(f"{why or grouped(tokens)}\n{number(ratio.iloc[-1])}")
            held += [ratio.iloc[-1]] * (column == "memory, fused")
            if column in ("operations", "time, fused"):
                note = "; ".join(filter(None, (direction, why)))
                measures.append(Measure(f"{label}: N from which it takes less ({column})", tokens, "tokens", note=note))
        rows.append([label, direction, *cells])
    found = {name: [m.value for m in measures if name in m.what and m.value > 0] for name in ("operations", "time")}
    spans = [f"in {name} from N = {span(values, grouped)} on" for name, values in found.items() if values]
    note = (
        "Below each N, what OSA takes in units of the other, at the largest N at which both were measured. Times are of "
        f"{results.machine}, and where they cross depends on it; where operations cross does not."
    )
    return Finding(
        id="crossover",
        title="Where OSA overtakes softmax attention",
        place="Section 1",
        kind=OBSERVATION,
        statement="OSA scales linearly with sequence length, in contrast to the quadratic scaling that SSA requires",
        in_short=(f"It takes less {' and '.join(spans)}, by method and pass" if spans else "Nowhere in this range")
        + f", and at the largest N {span(held)} times the memory of torch's fused kernel.",
        measures=measures,
        table=Table(["N from which OSA takes less", "Pass", *asked], rows, "llrrrrr", note),
    )


# Figures


def components_figure(results: Results) -> Figure:
    drawn = {
        "tokens": [("exponential", "N", 1, 1 / 2), ("application_dense", "N²", 2, 3)],
        "widths": [("newton_schulz", "d²", 2, 3), ("exponential", "d³", 3, 1 / 3)],
    }
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(2, 4.4, sharey=True)
        for panel, (sweep, powers) in zip(axes, drawn.items(), strict=True):
            draw(panel, results, "multiply_adds", [*TABLE_1, *AS_WRITTEN], sweep, FORWARD, powers)
        axes[0].set(title=f"Against N, d = {results.settings.width}", xlabel="Tokens N", ylabel="Multiply–adds")
        axes[1].set(title=f"Against d, N = {grouped(results.settings.tokens)}", xlabel="Head width d")
        legend(figure, axes[0].get_legend_handles_labels()[0])
        return figure


def operators_figure(results: Results) -> Figure:
    titles = {"seconds": ("Time", "Seconds"), "bytes": ("Peak memory", "Bytes")}
    powers = [("osa_exact", "N", 1, 1 / 3), ("softmax_dense", "N²", 2, 3)]
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(2, 4)
        for panel, (quantity, (title, label)) in zip(axes, titles.items(), strict=True):
            draw(panel, results, quantity, [*METHODS, *OTHERS], "tokens", BOTH, powers)
            panel.set(title=title, xlabel="Tokens N", ylabel=label)
        legend(figure, axes[0].get_legend_handles_labels()[0])
        return figure


def draw(
    axes: Axes,
    results: Results,
    quantity: str,
    parts: list[str],
    sweep: str,
    direction: str,
    powers: list[tuple[str, str, int, float]],
) -> None:
    """A line for each part along a sweep, times with their quartiles; and dashed over the upper half of some, ending at a
    factor times their end, a power: part, name, exponent and factor."""
    for part in parts:
        rows = results.rows(quantity, part, sweep, direction)
        style = {"marker": "o", "markersize": 2.5} | results.parts[part].line
        (line,) = axes.plot(rows.index, rows[quantity], label=results.parts[part].label, **style)
        if quantity == "seconds":
            axes.fill_between(
                rows.index, rows["lower_quartile"], rows["upper_quartile"], color=line.get_color(), alpha=0.15, linewidth=0
            )
    for part, name, exponent, factor in powers:
        values = results.rows(quantity, part, sweep, direction)[quantity]
        sizes = values.index[len(values) // 2 :]
        power = values.iloc[-1] * factor * (sizes / sizes[-1]) ** exponent
        axes.plot(sizes, power, **EXPECTED)
        axes.annotate(name, (sizes[0], power[0]), xytext=(-4, 0), textcoords="offset points", ha="right", va="center")
    axes.set_xscale("log", base=2)
    logarithmic(axes, "y", numticks=8)
