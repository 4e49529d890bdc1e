"""What is wrong, or not so as it stands, in two documents on orthogonality: Zhang et al. 2021 (“On Orthogonality Constraints
for Transformers”) and the post “Orthogonal Linear Layers in PyTorch”; beside them a trap of torch's own parametrisation.

Every one of `STATEMENTS` has a number that shows it, from the smallest code that does what the statement is about.
"""

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn.utils.parametrizations import orthogonal

from osa.constrained.orthogonal import cayley, givens, orthogonality_error, retract
from osa.constrained.penalties import attention_penalty, gram_penalty
from osa.init import stiefel_uniform
from pipeline.core.params import Section, Seeds
from pipeline.cost import cost
from pipeline.lab import Lab
from pipeline.report.numbers import number
from pipeline.studies import CHECK, Finding, Measure, Table, Tables

place = 63
ABOVE, BELOW = "above", "below"
PAPER, POST, TORCH = "Zhang et al. 2021", "the post", "torch"
SIZE = 6  # n, of matrices whose size does not matter
TABLE_4 = {  # the Transformer, VAR-I, II and III
    "PersonaChat VecE": (49.0, 48.2, 49.0, 48.6),
    "DailyDialog CIDEr": (79.3, 79.2, 79.6, 82.1),
    "DailyDialog EmbA": (84.9, 85.7, 85.6, 85.5),
}


class Settings(Section):
    seeds: Seeds


def measure(settings: Settings, lab: Lab) -> Tables:
    """The number of each check for each seed; 1 and 0 stand for yes and no."""
    rows = []
    for seed, (name, statement) in itertools.product(settings.seeds, STATEMENTS.items()):
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of some of the mistakes
            torch.manual_seed(seed)
            rows.append({"statement": name, "seed": seed, "value": float(statement.check())})
    return {"checks": pd.DataFrame(rows)}


def raises(function: Callable[[], object], error: type[Exception] = RuntimeError) -> bool:
    try:
        function()
    except error:
        return True
    return False


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def rotation(n: int = SIZE) -> Tensor:
    return stiefel_uniform(n, n, dtype=torch.float64)


def gap(w: Tensor) -> Tensor:
    """‖WᵀW − I‖_F²."""
    return (w.mT @ w - torch.eye(w.shape[-1])).square().sum()


def skew(n: int = SIZE) -> Tensor:
    x = numbers(n, n)
    return x - x.mT


# Zhang et al. 2021


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """‖∂f/∂x‖₂ for x of one dimension."""
    return torch.linalg.matrix_norm(torch.func.jacrev(function)(x), 2)


def slope_of_attention() -> Tensor:
    """‖∂/∂X softmax(XXᵀ)X‖₂, which grows with the square of tokens beside one that is 0 (Kim et al. 2021)."""
    x = 10 * numbers(SIZE, 3)
    x[0] = 0
    attention = lambda x: torch.softmax(x @ x.mT, -1) @ x  # noqa: E731
    return slope(lambda x: attention(x.view(SIZE, 3)).flatten(), x.flatten())


def keys_move_too() -> Tensor:
    """How far A moves with a token whose query stays."""
    x, to_query = numbers(SIZE, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    y = x.clone()
    y[0, 1] += 1
    attention = lambda x: torch.softmax(x @ to_query @ (x @ torch.ones_like(to_query)).mT, -1)  # noqa: E731
    return (attention(y) - attention(x)).norm()


def penalties_at_one_bound() -> float:
    """L_AM with Q = 10⁴ K, where every token attends to itself, over that with Q = K/100, for keys of length 1."""
    key = nn.functional.normalize(numbers(1, 1, 50, 16), dim=-1)
    sharp, flat = (attention_penalty(torch.softmax(s * key @ key.mT / 4, -1)) for s in (1e4, 1e-2))
    return (sharp / flat).item()


# The post: Givens rotations and rotors


def angles_that_learn() -> bool:
    angle = torch.ones((), requires_grad=True)
    return torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]]).requires_grad


def writing_into_the_input() -> bool:
    def turn(x: Tensor) -> Tensor:
        x[:, [0, 1]] = x[:, [0, 1]] @ torch.eye(2)
        return x

    leaf = raises(lambda: turn(torch.ones(2, 3, requires_grad=True)))
    saved = raises(lambda: turn(torch.ones(2, 3, requires_grad=True).tanh()).sum().backward())
    return leaf and saved


def applied(x: Tensor, angles: Tensor) -> Tensor:
    """The layer's own rotations of two columns, (p, q) [[cos, −sin], [sin, cos]], one plane after the other."""
    columns = list(x.unbind(-1))
    for angle, (i, j) in zip(angles, itertools.combinations(range(x.shape[-1]), 2), strict=True):
        p, q = columns[i], columns[j]
        columns[i], columns[j] = angle.cos() * p + angle.sin() * q, angle.cos() * q - angle.sin() * p
    return torch.stack(columns, -1)


def built(angles: Tensor, n: int = SIZE) -> Tensor:
    """The weight matrix of the same angles: `givens` of X_ji = −θ_ij."""
    x = torch.zeros(n, n, dtype=angles.dtype)
    i, j = torch.triu_indices(n, n, 1)
    x[j, i] = -angles
    return givens(x)


def layer_and_matrix() -> Tensor:
    x, angles = numbers(4, SIZE), numbers(SIZE * (SIZE - 1) // 2)
    return (applied(x, angles) - x @ built(angles)).norm() - 1e9 * (applied(x, angles) - x @ built(-angles)).norm()


def entries_multiplied(function: Callable[[], object]) -> int:
    """By element-wise products, as torch's profiler sees them."""
    with profile(record_shapes=True) as profiler:
        function()
    return sum(max(map(math.prod, e.shapes()[:2])) for e in profiler.kineto_results.events() if e.name() == "aten::mul")


def order_of_building() -> float:
    times = [entries_multiplied(lambda n=n: applied(torch.eye(n), torch.ones(math.comb(n, 2)))) for n in (8, 16)]
    return math.log2(times[1] / times[0])


def another_schedule() -> Tensor:
    """Round robin: n − 1 steps of n/2 planes, with the same angle for each plane."""
    angles = numbers(SIZE * (SIZE - 1) // 2)
    of = dict(zip(itertools.combinations(range(SIZE), 2), angles, strict=True))
    w, seats = torch.eye(SIZE, dtype=angles.dtype), list(range(SIZE))
    for _ in range(SIZE - 1):
        for a, b in zip(seats[: SIZE // 2], reversed(seats), strict=False):
            i, j = min(a, b), max(a, b)
            turn = torch.eye(SIZE, dtype=angles.dtype)
            turn[i, i] = turn[j, j] = of[i, j].cos()
            turn[i, j], turn[j, i] = of[i, j].sin(), -of[i, j].sin()
            w = w @ turn
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return (w - built(angles)).norm()


# The post: exponential map and Cayley


def condition_of_i_minus_a() -> Tensor:
    matrices = torch.stack([scale * skew() for scale in (0.1, 1, 10, 100)])
    bound = (1 + torch.linalg.matrix_norm(matrices, 2).square()).sqrt()
    return (torch.linalg.cond(torch.eye(SIZE) - matrices) / bound).max()


def eigenvalues_of_matrix_exp() -> int:
    with profile() as profiler:
        torch.linalg.matrix_exp(torch.stack([skew(), skew()]))
    return sum("eig" in event.name() for event in profiler.kineto_results.events())


def update(w: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """W exp(rate · G) with G = ½ Wᵀ(∇ − W∇ᵀW)."""
    g = w.mT @ (gradient - w @ gradient.mT @ w) / 2
    return w @ torch.linalg.matrix_exp(torch.stack([rate * g, rate * g]))[0]


def ascent() -> Tensor:
    target, w = rotation(), rotation()
    loss = lambda w: (w - target).square().sum()  # noqa: E731
    start = loss(w)
    for _ in range(20):
        w = update(w, torch.func.grad(loss)(w), 0.01)
    return loss(w) / start


def retrofit() -> float:
    w = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64).weight.detach()
    for _ in range(20):
        w = update(w, numbers(SIZE, SIZE), 0.01)
    return orthogonality_error(w)


def wide_leaves_the_manifold() -> float:
    w = stiefel_uniform(SIZE, 3, dtype=torch.float64).mT
    return orthogonality_error(update(w, numbers(3, SIZE), 0.1))


def tall_keeps_its_columns() -> Tensor:
    """What a step adds outside the column space of W, over what a retraction of the same step adds."""
    w, gradient = stiefel_uniform(SIZE, 3, dtype=torch.float64), numbers(SIZE, 3)
    outside = lambda new: (new - w @ (w.mT @ new)).norm()  # noqa: E731
    return outside(update(w, gradient, -0.1)) / outside(retract(w, -0.1 * gradient))


def gradients_add_up() -> float:
    """Two backward passes of one loss with nothing between them that clears gradients, as the post’s loop has it."""
    layer = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64)
    seen = []
    for _ in range(2):
        layer(torch.ones(1, SIZE, dtype=torch.float64)).sum().backward()
        seen.append(layer.weight.grad.norm().item())
    return seen[1] / seen[0]


def moved_in_memory() -> bool:
    parameter = nn.Parameter(rotation())
    before = parameter.data_ptr()
    parameter.data = parameter.data @ rotation()
    return parameter.data_ptr() != before


def buffers_of_indices() -> int:
    module = nn.Module()
    module.upper_indices = torch.triu_indices(SIZE, SIZE, 1)
    return len(list(module.buffers()))


# The post: Householder reflections


def reflections(vectors: Tensor) -> Tensor:
    w = torch.eye(vectors.shape[-1], dtype=vectors.dtype)
    for v in vectors:
        w = w - 2 * torch.outer(w @ v, v) / v.dot(v)
    return w


def rank_of_half_the_reflections() -> int:
    """Dimensions that n/2 reflections reach near a point; SO(6) has 15."""
    derivative = torch.func.jacrev(reflections)(numbers(SIZE // 2, SIZE)).flatten(2).flatten(0, 1)
    return torch.linalg.matrix_rank(derivative, rtol=1e-10).item()


def two_reflections() -> Tensor:
    """Distance from a rotation in 3-D by θ of the reflections of any u across its axis and of what bisects u and Wu."""
    w = rotation(3)
    w = w * torch.linalg.det(w)
    axis = torch.linalg.svd(w - torch.eye(3)).Vh[-1]
    u = torch.linalg.cross(axis, numbers(3))
    return (reflections(torch.stack([u + w @ u, u])) - w).norm()


def tau_of_two() -> Tensor:
    v = nn.functional.normalize(numbers(SIZE, SIZE), dim=1)
    product = torch.linalg.householder_product(v.mT, torch.full((SIZE,), 2.0, dtype=v.dtype))
    return (product - reflections(v)).norm()


def order_of_reflections() -> float:
    times = [entries_multiplied(lambda n=n: reflections(torch.ones(n, n))) for n in (16, 32)]
    return math.log2(times[1] / times[0])


def cost_of_tokens() -> float:
    weight, x = torch.eye(SIZE), torch.ones(128, SIZE)
    many, one = (cost(lambda x=x: nn.functional.linear(x, weight), x.device) for x in (x, x[:1]))
    return many.multiply_adds / one.multiply_adds


# The post on Muon, and torch


def torchs_householder_under_decay() -> Tensor:
    """‖W‖_F after one step of AdamW with decay."""
    linear = orthogonal(nn.Linear(SIZE, SIZE, dtype=torch.float64), orthogonal_map="householder")
    optimizer = torch.optim.AdamW(linear.parameters(), lr=3e-4, weight_decay=0.05)
    linear(numbers(2, SIZE)).square().sum().backward()
    optimizer.step()
    return linear.weight.norm()


@dataclass(frozen=True)
class Statement:
    """A check, what is stated and where, what is so instead, and on which side of a limit the number shows it."""

    check: Callable[[], float | Tensor]
    source: str
    place: str
    stated: str
    is_so: str
    side: str
    limit: float
    shown_by: str


# fmt: off
STATEMENTS = {
    "floor_of_a_wide_matrix": Statement(lambda: gap(stiefel_uniform(256, 64, dtype=torch.float64).mT),
        PAPER, "§2.1", "L_LF drives ‖M₂ᵀM₂ − I‖² to 0",
        "M₂ (64×256) leaves 192 at least", ABOVE, 191.99, "at orthonormal rows"),
    "penalty_of_a_contraction": Statement(lambda: gram_penalty(0.5 * rotation()) / SIZE,
        PAPER, "§2.1", "‖W‖₂ ≤ 1 requires WᵀW ≈ I",
        "½Q has ‖W‖₂ = ½ and is penalised", ABOVE, 0.56, "penalty of ½Q, over n"),
    "norm_with_a_skip": Statement(lambda: torch.linalg.matrix_norm(torch.eye(SIZE) + torch.eye(SIZE), 2),
        PAPER, "§2.1", "constants ≤ 1 multiply to ≤ 1",
        "a skip can make it 2", ABOVE, 1.99, "‖I + W‖₂ of W = I"),
    "slope_of_gelu": Statement(lambda: slope(nn.functional.gelu, torch.linspace(0, 3, 301, dtype=torch.float64)),
        PAPER, "§2.1", "constants ≤ 1 multiply to ≤ 1",
        "GELU’s is not 1", ABOVE, 1.128, "GELU’s steepest slope"),
    "slope_of_layer_norm": Statement(lambda: slope(nn.LayerNorm(SIZE, dtype=torch.float64), 1e-3 * numbers(SIZE)),
        PAPER, "§2.1",
        "constants ≤ 1 multiply to ≤ 1", "LN’s is 1/√ε: it divides by the spread", ABOVE, 100, "‖∂LN/∂x‖₂, spread 0.001"),
    "slope_of_attention": Statement(slope_of_attention, PAPER, "§2.1", "constants ≤ 1 multiply to ≤ 1",
        "dot-product attention has none", ABOVE, 10, "‖∂attention/∂X‖₂ of tokens some 10 long"),
    "keys_move_too": Statement(keys_move_too, PAPER, "§2.2", "Theorem 2.1 bounds what an input’s noise does",
        "of Q alone: K moves with the token", ABOVE, 0.001, "change of A with Q unmoved"),
    "penalties_at_one_bound": Statement(penalties_at_one_bound, PAPER, "§2.2", "Theorem 2.1 is a reason for L_AM",
        "its bound has ‖K‖₂ in it, not AᵀA: Q is free", BELOW, 0.1, "L_AM with two Q, one over the other"),
    "uniform_attention": Statement(lambda: torch.func.grad(attention_penalty)(0 * numbers(1, 1, 50, 50) + 0.02).abs().max(),
        PAPER, "§2.2", "L_AM makes attention diverse",
        "not from uniform attention, a saddle", BELOW, 1e-12, "gradient there"),
    "relative_gain": Statement(lambda: 100 * (14.74 / 13.96 - 1), PAPER, "Table 1", "En→Mk gains 5.3%",
        "14.74 over 13.96 is more", ABOVE, 5.5, "gain in per cent"),
    "not_boosted": Statement(lambda: sum(each < before for before, *variants in TABLE_4.values() for each in variants),
        PAPER, "§3.2, Table 4", "all variants boost performance",
        "VecE of PersonaChat and CIDEr of DailyDialog fall", ABOVE, 2.5, "entries below the Transformer’s"),
    "best_variant_of_emba": Statement(lambda: 1 + max(range(3), key=TABLE_4["DailyDialog EmbA"][1:].__getitem__),
        PAPER, "§3.2, Table 4", "VAR-II or VAR-III is always best",
        "VAR-I is for EmbA of DailyDialog", BELOW, 1.5, "number of the best variant"),
    "angles_that_learn": Statement(angles_that_learn, POST, "GivensLinear", "the layer learns its angles",
        "torch.tensor of them detaches", BELOW, 0.5, "1 if it had a gradient"),
    "writing_into_the_input": Statement(writing_into_the_input, POST, "GivensLinear", "replaces nn.Linear",
        "writes into x: fails for a leaf and after tanh", ABOVE, 0.5, "1: both raise"),
    "layer_and_matrix": Statement(layer_and_matrix, POST, "GivensLinear", "applies weight_matrix(θ)",
        "applies weight_matrix(−θ)", ABOVE, 0.1, "distance from the former, if it is the latter"),
    "order_of_building": Statement(order_of_building, POST, "Table, Givens", "O(n²)",
        "building W is O(n³)", ABOVE, 2.9, "exponent of products, n = 8 to 16"),
    "operations_of_givens": Statement(lambda: 6 * math.comb(64, 2) / (2 * 64**2),
        POST, "Givens", "O(n²) operations, the same as a dense layer’s",
        "of that order, but half as many again", ABOVE, 1.4, "ratio at n = 64"),
    "share_of_parameters": Statement(lambda: 100 * math.comb(64, 2) / 64**2, POST, "Givens", "49.9% of the parameters",
        "(n − 1)/2n is that at n = 512 alone", BELOW, 49.5, "per cent at n = 64"),
    "another_schedule": Statement(another_schedule, POST, "Givens", "disjoint rotations go in parallel, in O(n) steps",
        "so they do by i + j; in another order (round robin) they make another W", ABOVE, 0.1, "distance of the two"),
    "grades_of_the_algebra": Statement(lambda: 2**SIZE - (1 + SIZE + math.comb(SIZE, 2)),
        POST, "Clifford", "Cl(n) is scalars, vectors and bivectors",
        "it has all grades, 2ⁿ", ABOVE, 0.5, "components left out at n = 6"),
    "shear": Statement(lambda: torch.linalg.matrix_norm(torch.tensor([[1.0, 1.0], [0.0, 1.0]]), 2),
        POST, "Definitions", "det ±1 keeps the norm",
        "a shear has det 1", ABOVE, 1.6, "its ‖W‖₂"),
    "vectors_fixed_by_minus_one": Statement(lambda: 3 - torch.linalg.matrix_rank(-torch.eye(3) - torch.eye(3)).item(),
        POST, "Definitions", "det −1 is a reflection",
        "−I in 3-D fixes no plane", BELOW, 0.5, "dimension that it fixes"),
    "cayley_assertion": Statement(lambda: sum(len(torch.triu_indices(n, n, 1)) == math.comb(n, 2) for n in range(1, 100)),
        POST, "CayleyLinear", "asserts len(upper_indices) = n(n − 1)/2",
        "len is 2, the rows: it never constructs", BELOW, 0.5, "n up to 99 that pass"),
    "condition_of_i_minus_a": Statement(condition_of_i_minus_a, POST, "Cayley", "needs that −1 is no eigenvalue of A",
        "I − A is invertible for every skew A", BELOW, 1.000000001, "κ(I − A) over √(1 + ‖A‖²)"),
    "half_turns": Statement(lambda: torch.linalg.svdvals(cayley(100 * numbers(SIZE, SIZE)) + torch.eye(SIZE)).min(),
        POST, "Cayley",
        "parametrises SO(n)", "W never has the eigenvalue −1", ABOVE, 1e-5, "least ‖(W + I)v‖ at ‖A‖ of some 100"),
    "eigenvalues_of_matrix_exp": Statement(eigenvalues_of_matrix_exp, POST, "Cayley", "the exponential takes eigenvalues",
        "torch’s takes products of matrices", BELOW, 0.5, "operators that find eigenvalues"),
    "ascent": Statement(ascent, POST, "ExponentialOptimizer", "W exp(+βG) descends",
        "it ascends", ABOVE, 1.0, "loss after 20 steps over before"),
    "retrofit": Statement(retrofit, POST, "ExponentialOptimizer", "makes an existing layer orthogonal",
        "keeps what it finds: nn.Linear’s start is not", ABOVE, 0.1, "‖WᵀW − I‖_F after 20 steps"),
    "bias_raises": Statement(lambda: raises(lambda: update(numbers(SIZE), numbers(SIZE), 0.01)),
        POST, "ExponentialOptimizer", "steps all parameters",
        "a bias has no matrix product", ABOVE, 0.5, "1: it raises"),
    "wide_leaves_the_manifold": Statement(wide_leaves_the_manifold, POST, "ExponentialOptimizer", "W stays orthogonal",
        "a wide W does not", ABOVE, 0.0001, "‖WWᵀ − I‖_F after a step"),
    "tall_keeps_its_columns": Statement(tall_keeps_its_columns, POST, "ExponentialOptimizer", "W moves along its manifold",
        "a tall W keeps its column space for ever", BELOW, 1e-09, "movement out of it over a retraction’s"),
    "gradients_add_up": Statement(gradients_add_up, POST, "ExponentialOptimizer", "an optimiser",
        "has no zero_grad, so that gradients add up", ABOVE, 1.9, "gradient of a second step over that of the first"),
    "moved_in_memory": Statement(moved_in_memory, POST, "ExponentialOptimizer", "an optimiser",
        "replaces param.data: no CUDA graph can hold it", ABOVE, 0.5, "1: the address changes"),
    "buffers_of_indices": Statement(buffers_of_indices, POST, "ExponentialLinear, CayleyLinear", "a module for any device",
        "its indices are no buffer and stay on the CPU", BELOW, 0.5, "buffers"),
    "determinant_of_odd_size": Statement(lambda: torch.linalg.det(reflections(numbers(5, 5))),
        POST, "Householder", "m = n covers SO(n)",
        "for odd n it misses all of it", BELOW, 0.0, "determinant at n = 5"),
    "rank_of_half_the_reflections": Statement(rank_of_half_the_reflections,
        POST, "Summary", "some n/2 reflections span SO(n)",
        "n − 1 are for odd n, and n for even n, where n − 1 have det −1", BELOW, 14.5,
        "dimensions of 15 that 3 reach at n = 6"),
    "two_reflections": Statement(two_reflections, POST, "Householder", "in 3-D two reflections often do",
        "they always do", BELOW, 1e-9, "distance of a rotation from two"),
    "tau_of_two": Statement(tau_of_two, POST, "Table, Householder", "householder_product with τ = 2",
        "that expects 2/(1 + ‖a‖²) and a unit diagonal", ABOVE, 1.0, "distance from the reflections"),
    "order_of_reflections": Statement(order_of_reflections, POST, "Table, Householder", "O(n²) preparation",
        "m = n reflections build W in O(n³)", ABOVE, 2.9, "exponent of products, n = 16 to 32"),
    "cost_of_tokens": Statement(cost_of_tokens, POST, "Table", "dense is O(n²), others O(bn²)",
        "dense is O(bn²) too", ABOVE, 127.5, "cost of 128 tokens over that of one"),
    "stored_beyond_stated": Statement(lambda: torch.ones(SIZE, SIZE).numel() - SIZE * (SIZE - 1),
        POST, "Householder", "m(n − 1) parameters",
        "the code stores mn", ABOVE, 0.5, "more at m = n = 6"),
    "zero_vector": Statement(lambda: (torch.zeros(SIZE) / torch.zeros(SIZE).norm()).isnan().all(),
        POST, "Householder", "a parameter for each vector, divided by its norm",
        "that of 0 is 0", ABOVE, 0.5, "1: NaN"),
    "orthogonal_updates": Statement(lambda: orthogonality_error(rotation() - 0.1 * rotation()),
        POST, "Introduction", "Muon suggests that rotation is enough",
        "Muon’s updates are orthogonal, its weights are not", ABOVE, 0.1, "‖WᵀW − I‖_F after one"),
    "torchs_householder_under_decay": Statement(torchs_householder_under_decay,
        TORCH, "parametrizations.orthogonal", "householder under AdamW with decay",
        "the diagonal of ±1 decays and is truncated: W is 0 after a step", BELOW, 1e-30, "‖W‖_F"),
}
# fmt: on


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    """One line for each statement: of its numbers over the seeds the one that shows it least."""
    values = tables["checks"].groupby("statement")["value"]
    measures, rows = [], []
    for name, it in STATEMENTS.items():
        value = (values.min() if it.side == ABOVE else values.max())[name]
        place = f"{it.source}, {it.place}"
        measures.append(Measure(f"{place}: {it.shown_by}", value, side=it.side, limit=it.limit, note=it.is_so))
        rows.append([place, it.stated, it.is_so, f"{number(value)}\n{it.shown_by}"])
    return [
        Finding(
            id="orthogonality_sources",
            title="Errors of the documents on orthogonal weights and attention, each by a number",
            place=f"{PAPER}; “Orthogonal Linear Layers in PyTorch”",
            kind=CHECK,
            statement="Statements of both documents that are wrong, or not so as they stand, and a trap of torch’s own "
            "parametrisation. None is used here.",
            measures=measures,
            rule="Every number is on the side of its limit that shows what is so, for every seed.",
            table=Table(["Place", "Stated", "What is so", "Shown by"], rows, align="llll"),
            remark="No number can show what is not there: Zhang et al. give neither seeds nor a spread with any table.",
        )
    ]
