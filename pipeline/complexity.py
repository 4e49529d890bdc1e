"""The complexity stage: Table 1 and Section 3.1 measured, component by component and for whole operators.

Run as `python -m pipeline.complexity`. Multiply–adds and peak memory repeat exactly and decide; the times stand beside
them in files of their own. Exponents are slopes on log–log axes along three lines: N alone, d alone, and N and d together
at fixed N/d, which measures the total degree.
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy.stats import linregress, t
from torch import Tensor
from tqdm import tqdm

from osa.functional import orthogonal_attention
from osa.linalg import EPSILON, newton_schulz_gram, phi1_times, qr_basis
from pipeline import complexity_report, files, findings, hardware, tally
from pipeline.complexity_report import BOTH, FORWARD, METHODS, ORDER_OF
from pipeline.errors import entry_point
from pipeline.params import Complexity, load
from pipeline.summary import DIGITS, rounded_table

FOLDER = Path("paper_outputs/complexity")
TIMED = ("tokens", "widths")  # the sweeps whose times are taken
AGAINST = ("softmax", "softmax_dense")  # what orthogonal attention is compared with
KEYS = ["sweep", "part", "pass"]


@entry_point
def main() -> None:
    config = load().complexity
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tables = {"counts": count(config, device), "exponential": count_products(config, device)}
    tables["times"] = measure_times(config, device)
    tables["slopes"] = fit_slopes(tables["counts"], ("multiply_adds", "bytes"), config)
    tables["time_slopes"] = fit_slopes(tables["times"], ("seconds",), config)
    tables["crossover"] = find_crossovers(tables["counts"], ("multiply_adds", "bytes"))
    tables["time_crossover"] = find_crossovers(tables["times"], ("seconds",))
    tables = {name: rounded_table(table) for name, table in tables.items()}
    where = hardware.describe(device)
    files.write_json(FOLDER / "environment.json", where)
    found, drawn = complexity_report.report(FOLDER, tables, config, where["device_name"])
    findings.write(FOLDER, tables, found, drawn)


@dataclass(frozen=True)
class Call:
    """A function and the tensors it is given, which count as memory that it needs."""

    function: Callable[..., object]
    tensors: tuple[Tensor, ...]

    def __call__(self) -> object:
        return self.function(*self.tensors)

    @property
    def input_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def with_backward(self) -> "Call":
        """The call and the gradients of all its tensors, from a gradient of its output that is given as well."""
        leaves = tuple(tensor.clone().requires_grad_() for tensor in self.tensors)
        return Call(partial(gradients, self.function), (torch.ones_like(self()), *leaves))


def gradients(function: Callable[..., Tensor], grad: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*leaves), leaves, grad)


@dataclass(frozen=True)
class Inputs:
    """Query, key and value of one head, (1, 1, N, d), and the scale that gives S the norm of params.yaml.

    Column k of query and key has standard deviation k^−decay.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    @classmethod
    def draw(cls, tokens: int, width: int, norm: float, config: Complexity, device: torch.device) -> "Inputs":
        generator = torch.Generator().manual_seed(config.seed)
        draws = torch.randn(3, 1, 1, tokens, width, generator=generator)
        query, key = draws[:2] * torch.arange(1, width + 1) ** -config.decay
        scale = norm / unscaled_norm(query, key)
        return cls(query.to(device), key.to(device), draws[2].to(device), scale)


def unscaled_norm(query: Tensor, key: Tensor) -> float:
    """‖QKᵀ − KQᵀ‖₂ in float64, by the QR decomposition of [Q, K]."""
    r = torch.linalg.qr(torch.cat([query, key], dim=-1).double(), mode="r").R
    half = r[..., : query.shape[-1]] @ r[..., query.shape[-1] :].mT
    return torch.linalg.matrix_norm(half - half.mT, 2).item()


def components(x: Inputs, config: Complexity) -> dict[str, Call]:
    """The rows of Table 1, each on the results of the rows before it."""
    m = torch.cat([x.query, x.key], dim=-1)  # (1, 1, N, 2d)
    basis = qr_basis(m)  # (1, 1, N, 2d)
    small = small_skew(x.scale, basis, m)  # (1, 1, 2d, 2d)
    of_norm = small * (config.norm / torch.linalg.matrix_norm(small, 1))  # ‖[S]‖₁ sets how often matrix_exp squares
    return {
        "qr": Call(qr_basis, (m,)),
        "newton_schulz": Call(partial(newton_schulz_basis, config.num_iterations), (m,)),
        "newton_schulz_gram": Call(partial(gram_of_basis, config.num_iterations), (m,)),
        "small": Call(partial(small_skew, x.scale), (basis, m)),
        "exponential": Call(torch.linalg.matrix_exp, (of_norm,)),
        "phi1": Call(expm1_times, (small, basis.mT @ x.value)),
        "application": Call(apply, (basis, torch.linalg.matrix_exp(small), x.value)),
    }


def components_as_written(x: Inputs, config: Complexity) -> dict[str, Call]:
    """Eq. 7 and Eq. 6 with the N×N matrices that stand there."""
    made = components(x, config)
    basis, exponential, value = made["application"].tensors
    return {
        "small_dense": Call(partial(small_skew_dense, x.scale), (basis, x.query, x.key)),
        "application_dense": Call(apply_dense, (basis, exponential, value)),
    }


def operators(x: Inputs, config: Complexity) -> dict[str, Call]:
    """Orthogonal attention by every method, and softmax attention as torch has it."""
    osa = partial(orthogonal_attention, scale=x.scale)
    tensors = (x.query, x.key, x.value)
    return {
        "osa_qr": Call(partial(osa, method="qr"), tensors),
        "osa_ns": Call(partial(osa, method="newton_schulz", num_iterations=config.num_iterations), tensors),
        "osa_exact": Call(partial(osa, method="exact"), tensors),
        "softmax": Call(F.scaled_dot_product_attention, tensors),
    }


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


def small_skew(scale: float, basis: Tensor, m: Tensor) -> Tensor:
    """[S] = BᵀSB (Eq. 7) from BᵀM, without S."""
    query, key = (basis.mT @ m).chunk(2, dim=-1)  # (1, 1, 2d, d) each
    half = scale * (query @ key.mT)
    return half - half.mT


def small_skew_dense(scale: float, basis: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """[S] = BᵀSB (Eq. 7) with S formed, N×N."""
    return basis.mT @ (skew(scale, query, key) @ basis)


def skew(scale: float, query: Tensor, key: Tensor) -> Tensor:
    half = scale * (query @ key.mT)
    return half - half.mT


def expm1_times(small: Tensor, products: Tensor) -> Tensor:
    """(exp[S] − I) BᵀV as `orthogonal_attention` has it, without exp[S]."""
    return phi1_times(small, small @ products)


def apply(basis: Tensor, exponential: Tensor, value: Tensor) -> Tensor:
    """Eq. 6 times V, from the right to the left: V + B ((exp[S] − I) (BᵀV))."""
    products = basis.mT @ value
    return value + basis @ (exponential @ products - products)


def apply_dense(basis: Tensor, exponential: Tensor, value: Tensor) -> Tensor:
    """Eq. 6 with A = I + B (exp[S] − I) Bᵀ formed, N×N, then A V."""
    identities = (torch.eye(n, dtype=value.dtype, device=value.device) for n in basis.shape[-2:])
    identity, small_identity = identities
    return (identity + basis @ (exponential - small_identity) @ basis.mT) @ value


def softmax_dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(QKᵀ/√d) V with the N×N matrix formed."""
    return torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1) @ value


def exponential_dense(scale: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """exp(S) V (Eq. 5) with the N×N exponential: the naive implementation of Section 2.1."""
    return torch.linalg.matrix_exp(skew(scale, query, key)) @ value


def calls(tokens: int, width: int, config: Complexity, device: torch.device) -> dict[tuple[str, str], Call]:
    """Everything that is measured at one point, by part and pass. N×N matrices only as far as params.yaml allows."""
    x = Inputs.draw(tokens, width, config.norm, config, device)
    parts, whole = components(x, config), operators(x, config)
    if tokens <= config.most_tokens_matrix:
        parts |= components_as_written(x, config)
        whole["softmax_dense"] = Call(softmax_dense, (x.query, x.key, x.value))
    if tokens <= config.most_tokens_exponential:
        whole["exponential_dense"] = Call(partial(exponential_dense, x.scale), (x.query, x.key, x.value))
    every = parts | whole
    forward = {(name, FORWARD): call for name, call in every.items()}
    return forward | {(name, BOTH): call.with_backward() for name, call in every.items()}


def points(config: Complexity, sweeps: Iterable[str]) -> list[tuple[str, int, int]]:
    """Sweep, N and d of every point."""
    lines = {
        "tokens": [(n, config.tokens.width) for n in config.tokens.sizes],
        "widths": [(config.widths.tokens, d) for d in config.widths.sizes],
        "joint": [(d * config.joint.tokens_per_width, d) for d in config.joint.sizes],
    }
    return [(sweep, *point) for sweep in sweeps for point in lines[sweep]]


def count(config: Complexity, device: torch.device) -> pd.DataFrame:
    """Multiply–adds and bytes of everything at every point. Bytes are those of the inputs and the peak of the call."""
    rows = []
    for sweep, tokens, width in tqdm(points(config, ("tokens", "widths", "joint")), desc="count", disable=None):
        for (part, direction), call in calls(tokens, width, config, device).items():
            cost = tally.cost(call, device)
            numbers = (cost.multiply_adds, call.input_bytes + cost.peak_bytes)
            rows.append((sweep, part, direction, tokens, width, *numbers))
    return pd.DataFrame(rows, columns=[*KEYS, "tokens", "width", "multiply_adds", "bytes"])


def measure_times(config: Complexity, device: torch.device) -> pd.DataFrame:
    """Median and quartiles of the seconds of everything at every point of the timed sweeps."""
    rows, order = [], random.Random(config.seed)
    for sweep, tokens, width in tqdm(points(config, TIMED), desc="time", disable=None):
        at_point = calls(tokens, width, config, device)
        samples = tally.sample_seconds(at_point, config.repeats, config.sample_seconds, order, device)
        for (part, direction), seconds in samples.items():
            quartiles = np.quantile(seconds, (0.5, 0.25, 0.75))
            rows.append((sweep, part, direction, tokens, width, *quartiles, len(seconds)))
    names = ["seconds", "lower_quartile", "upper_quartile", "samples"]
    return pd.DataFrame(rows, columns=[*KEYS, "tokens", "width", *names])


def count_products(config: Complexity, device: torch.device) -> pd.DataFrame:
    """How many products of 2d×2d matrices exp[S] takes, by ‖S‖₂ and by d: multiply–adds in units of (2d)³."""
    width, tokens = config.tokens.width, config.widths.tokens
    grid = [(norm, width) for norm in config.norms] + [(config.norm, d) for d in config.widths.sizes]
    rows = []
    for norm, d in grid:
        small, products = components(Inputs.draw(tokens, d, norm, config, device), config)["phi1"].tensors
        one_norm = torch.linalg.matrix_norm(small, 1).item()
        for part, call in {
            "exponential": Call(torch.linalg.matrix_exp, (small,)),
            "phi1": Call(expm1_times, (small, products)),
        }.items():
            rows.append((part, norm, d, one_norm, tally.cost(call, device).multiply_adds / (2 * d) ** 3))
    return pd.DataFrame(rows, columns=["part", "norm", "width", "one_norm", "products"])


def fit_slopes(table: pd.DataFrame, quantities: Iterable[str], config: Complexity) -> pd.DataFrame:
    """The slope on log–log axes over the largest `fit_points` sizes of each sweep, with its interval, and the paper's."""
    rows = []
    for quantity in quantities:
        for (sweep, part, direction), group in table.groupby(KEYS, sort=False):
            size = group["tokens" if sweep == "tokens" else "width"].to_numpy()[-config.fit_points :]
            if len(size) < 3:
                continue
            fit = fit_slope(size, group[quantity].to_numpy()[-config.fit_points :], config.confidence)
            order = getattr(config.paper[ORDER_OF[part]], "memory" if quantity == "bytes" else "operations")
            rows.append((quantity, sweep, part, direction, len(size), *fit, degree(order, sweep) if order else math.nan))
    result = pd.DataFrame(rows, columns=["quantity", *KEYS, "points", "slope", "low", "high", "paper"]).round(DIGITS)
    return result.assign(excess=(result["slope"] - result["paper"]).round(DIGITS))  # of an exact power: 0, not its rounding


def fit_slope(size: np.ndarray, value: np.ndarray, confidence: float) -> tuple[float, float, float]:
    """The least-squares slope of log value against log size, and its interval by Student's t of the residuals."""
    fit = linregress(np.log(size), np.log(value))
    half = t.ppf((1 + confidence) / 2, len(size) - 2) * fit.stderr
    return fit.slope, fit.slope - half, fit.slope + half


def degree(order: str, sweep: str) -> int:
    """The exponent of an order such as "N d^2 + d^3" along a sweep: its degree in N, in d, or in both together."""
    symbols = {"tokens": "N", "widths": "d", "joint": "Nd"}[sweep]
    return max(sum(power(term, symbol) for symbol in symbols) for term in order.split(" + "))


def power(term: str, symbol: str) -> int:
    """The exponent of a symbol in a term such as "N d^2"."""
    for factor in term.split():
        base, _, exponent = factor.partition("^")
        if base == symbol:
            return int(exponent or 1)
    return 0


def find_crossovers(table: pd.DataFrame, quantities: Iterable[str]) -> pd.DataFrame:
    """For each method, pass and kind of softmax attention: the N from which orthogonal attention takes less, see `crossing`.

    `ratio` is what it takes at the largest N, `largest`, in units of what softmax attention takes there.
    """
    rows = []
    along = table[table["sweep"] == "tokens"]
    for quantity in quantities:
        values = along.pivot(index="tokens", columns=["part", "pass"], values=quantity)
        for part in METHODS:
            for direction in (FORWARD, BOTH):
                for against in AGAINST:
                    ratio = (values[part, direction] / values[against, direction]).dropna()
                    place, note = crossing(ratio.index.to_numpy(), ratio.to_numpy())
                    rows.append((quantity, part, direction, against, ratio.index[-1], ratio.iloc[-1], place, note))
    return pd.DataFrame(rows, columns=["quantity", "part", "pass", "against", "largest", "ratio", "tokens", "note"])


def crossing(tokens: np.ndarray, ratio: np.ndarray) -> tuple[float, str]:
    """The N from which a ratio stays below 1, on a straight line between points on log–log axes; NaN and why if none is
    within the range."""
    above = np.flatnonzero(ratio >= 1)
    if len(above) == 0:
        return math.nan, f"less from the smallest N measured, {tokens[0]:,}, on"
    i = above[-1]
    if i == len(ratio) - 1:
        return math.nan, f"not less up to the largest N measured, {tokens[-1]:,}"
    (x, following_x), (y, following_y) = np.log(tokens[i : i + 2]), np.log(ratio[i : i + 2])
    return float(np.exp(x + (following_x - x) * y / (y - following_y))), ""


if __name__ == "__main__":
    main()
