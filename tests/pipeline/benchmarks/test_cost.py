"""The cost of a call: right where it is known, the same as of torch's own counter, and nothing passed over in silence."""

import ast
import math
import random
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import osa
from osa import runtime
from osa.functional import orthogonal_attention
from osa.linalg import cholesky_qr_basis
from pipeline.benchmarks.cost import FORMULAS, MADE_OF_OTHERS, Call, cholesky, cost, qr, sample_seconds, seconds
from pipeline.core.files import ROOT
from pipeline.studies.paper.complexity import softmax_dense

CPU = torch.device("cpu")


def cost_of(call):
    return cost(call, CPU)


def inputs():
    return torch.randn(3, 1, 1, 50, 3)


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda a, b, c: a @ b, 3 * 5 * 7),
        (lambda a, b, c: torch.addmm(c, a, b), 3 * 5 * 7),
        (lambda a, b, c: a.expand(2, 3, 5) @ b.expand(2, 5, 7), 2 * 3 * 5 * 7),
        (lambda a, b, c: torch.baddbmm(c.expand(2, 3, 7), a.expand(2, 3, 5), b.expand(2, 5, 7)), 2 * 3 * 5 * 7),
        (lambda a, b, c: c.repeat(2, 1, 1).baddbmm_(a.expand(2, 3, 5), b.expand(2, 5, 7)), 2 * 3 * 5 * 7),
        (lambda a, b, c: torch.linalg.solve_triangular(torch.eye(3), c, upper=True), 7 * 3 * 3 // 2),
        (lambda a, b, c: torch.linalg.solve(torch.eye(3), c), 3**3 / 3 + 7 * 3 * 3),
        (lambda a, b, c: torch.linalg.householder_product(b.mT, b[0, :3]), 7 * 5 * 5 - round(5**3 / 3)),
        (lambda a, b, c: torch.linalg.svd(b, full_matrices=False), 3 * 7 * 5 * 5 + 10 * 5**3),
        (lambda a, b, c: a * a + 1, 0),
    ],
)
def test_products_by_hand(call, expected):
    a, b, c = torch.ones(3, 5), torch.ones(5, 7), torch.ones(3, 7)
    assert cost_of(lambda: call(a, b, c)).multiply_adds == expected


def householder(n, r):
    """Multiply–adds of the reduced QR decomposition, reflection by reflection: v (vᵀA) and its difference, twice."""
    return sum(2 * (n - j) * (r - j) + 2 * (n - j) * (min(n, r) - j) for j in range(min(n, r)))


def columns(n, _):
    """Counts of the Cholesky decomposition, column by column: the half of each outer product that is stored."""
    return sum((n - j) * (n - j + 1) // 2 for j in range(1, n))


@pytest.mark.parametrize(
    "formula, shape, by_hand",
    [
        (qr, (2000, 64), householder),
        (qr, (300, 300), householder),
        (qr, (100, 400), householder),
        (cholesky, (300, 300), columns),
    ],
)
def test_a_routine_takes_what_its_steps_take(formula, shape, by_hand):
    assert formula([*shape]) == pytest.approx(by_hand(*shape), rel=0.02)
    assert formula([2, 3, *shape]) == pytest.approx(6 * formula([*shape]), rel=1e-6)


def test_a_formula_is_told_apart_from_what_is_counted():
    found = cost_of(lambda: torch.linalg.qr(torch.randn(40, 8)))
    assert found.multiply_adds == found.by_formula == qr([40, 8])


def test_all_linear_algebra_of_the_library_has_a_count():
    """Every operator has a count, on whatever device it is called."""
    calls = set()
    for path in (ROOT / "osa").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.linalg":
                calls.add(f"aten::linalg_{node.attr}")
    assert {"aten::linalg_qr", "aten::linalg_cholesky_ex"} <= calls <= FORMULAS.keys() | MADE_OF_OTHERS


@pytest.fixture
def routes_of_cuda(monkeypatch):
    """The routes that CUDA takes, here on the CPU."""
    monkeypatch.setattr("osa.routes.qr_basis", cholesky_qr_basis)
    for module in ("routes", "linalg"):
        monkeypatch.setattr(f"osa.{module}.is_readable", lambda x: False)


@pytest.mark.parametrize("name", ["vit", "osa_qr", "osa_ns", "osa_exact", "osa_qr_literal", "espa"])
def test_a_step_on_cuda_has_a_count(name, routes_of_cuda):
    """Every model has a count, with its loss, clipping and optimizer, and so has every method."""
    depth = 5 if name == "espa" else 2  # its shaping needs as many
    model = osa.create_model(name, embed_dim=8, depth=depth, num_heads=2, patch_size=14)
    optimizer = torch.optim.AdamW(model.parameters())
    images, labels = torch.randn(2, 1, 28, 28), torch.tensor([3, 7])

    def step():
        F.cross_entropy(model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert cost_of(step).multiply_adds > 3 * cost_of(lambda: model.eval()(images)).multiply_adds / 2 > 0


@pytest.mark.parametrize(
    "function",
    [
        partial(orthogonal_attention, method="newton_schulz", scale=0.01),
        partial(orthogonal_attention, method="exact", scale=0.01),
        softmax_dense,
    ],
)
def test_products_are_those_of_torchs_counter(function):
    """Torch's counter needs an entry for the product that adds in place."""
    in_place = {torch.ops.aten.baddbmm_: lambda total, a, b, **_: 2 * math.prod(a) * b[-1]}
    forward = Call(function, tuple(inputs()))
    for call in (forward, forward.with_backward()):
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            call()
        found = cost_of(call)
        assert found.multiply_adds == counter.get_total_flops() / 2 > found.by_formula == 0


def test_fused_attention_takes_the_products_of_the_plain_one():
    q, k, v = inputs()
    fused, plain = (Call(f, (q, k, v)) for f in (F.scaled_dot_product_attention, softmax_dense))
    assert cost_of(fused).multiply_adds == cost_of(plain).multiply_adds == 2 * 50 * 50 * 3
    again = 50 * 50 * 3  # the scores, which it has not kept
    assert cost_of(fused.with_backward()).multiply_adds == cost_of(plain.with_backward()).multiply_adds + again


def test_what_has_no_formula_is_refused():
    with pytest.raises(LookupError, match="aten::linalg_"):
        cost_of(lambda: torch.linalg.eig(torch.eye(3)))


def test_peak_memory_by_hand():
    def call():
        a = torch.empty(1000)
        b = torch.empty(500)
        del a
        return torch.empty(800), b

    assert cost_of(call).peak_bytes == 4 * 1500  # not 4 · 2300: the first is gone when the third comes


def rounds(seed):
    """The order in which three calls are sampled, one a round."""
    made = []
    calls = {name: lambda name=name: made.append(name) for name in "abc"}
    samples = sample_seconds(calls, 4, 1e-9, random.Random(seed), CPU)
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 4)
    return [tuple(made[i : i + 3]) for i in range(6, len(made), 3)]  # after two calls each


def test_every_round_has_each_call_in_an_order_of_its_own():
    order = rounds(0)
    assert len(order) == 4 and all(Counter(each) == Counter("abc") for each in order)
    assert len(set(order)) > 1 and rounds(0) == order != rounds(1)


@torch.library.custom_op("osa::of_a_test", mutates_args=())
def own(a: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(a.numpy() @ a.numpy())


def test_the_products_of_a_kernel_are_those_of_the_plain_route(monkeypatch):
    monkeypatch.setitem(runtime.KERNELS, "square", [(lambda a: True, own)])
    a = torch.ones(3, 3)
    assert cost_of(lambda: (runtime.kernel("square", a) or (lambda a: a @ a))(a)).multiply_adds == 3**3
    assert "square" in runtime.KERNELS
    with pytest.raises(LookupError, match="osa::of_a_test"):  # without such a route they would pass for none
        cost_of(lambda: own(a))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_memory_and_events_are_those_of_the_device():
    device = torch.device("cuda")
    a = torch.randn(256, 256, device=device)
    assert cost(lambda: a @ a, device).multiply_adds == 256**3
    assert cost(lambda: a @ a, device).peak_bytes >= a.nbytes
    assert math.isfinite(seconds(lambda: a @ a, 3, device)) and seconds(lambda: a @ a, 3, device) > 0
