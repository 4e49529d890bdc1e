"""Table 1 and Section 3.1: exponents of known orders, checks that a wrong implementation fails, counts that repeat."""

import math
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from osa import reference
from osa.functional import orthogonal_attention
from pipeline.config import params, reading
from pipeline.core.errors import UserError
from pipeline.studies.paper import complexity
from pipeline.studies.paper.complexity import BOTH, FORWARD, NORM, Inputs, Settings

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
SMALL = {"largest_tokens": 512, "width": 2, "widths": [2, 4, 8], "tokens": 64, "joint": [2, 4, 8], "tokens_per_width": 16}
SMALL |= {"most_tokens_matrix": 512, "most_tokens_exponential": 128, "repeats": 2, "sample_seconds": 1e-4}
SETTINGS = Settings(**SMALL)


@pytest.fixture(scope="module")
def tables():
    """Measurements at tiny sizes. Tests only read them."""
    return complexity.measure(SETTINGS, None)


def summary(tables, **changes):
    lab = SimpleNamespace(paper=params.load_paper())
    return complexity.summarise(SETTINGS, tables | changes, lab)


# Parts


def test_every_part_computes_what_it_is_named_after():
    x = Inputs.draw(23, 3, 2.0, CPU)
    made = {name: call() for name, call in complexity.parts(x).items()}
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(made["small"], made["small_dense"])
    close(made["application"], made["application_dense"])
    close(made["newton_schulz"].mT @ made["newton_schulz"], made["newton_schulz_gram"])
    close(made["newton_schulz"].double(), reference.newton_schulz_basis(torch.cat([x.query, x.key], -1)))
    expected = reference.orthogonal_attention(x.query, x.key, x.value, x.scale)
    close(made["application"].double(), expected)
    close((x.value + made["qr"] @ made["phi1"]).double(), expected)
    for name in ("osa_qr", "osa_exact", "osa_qr_literal", "exponential_dense"):
        close(made[name].double(), expected)
    close(made["osa_cayley"].double(), reference.cayley_attention(x.query, x.key, x.value, x.scale))
    close(made["softmax"], made["softmax_dense"])


def test_inputs_have_their_norm():
    x = Inputs.draw(40, 5, 3.0, CPU)
    norm = torch.linalg.matrix_norm(reference.skew(x.query, x.key, x.scale), 2).item()
    assert norm == pytest.approx(3.0, rel=1e-5)
    small = complexity.parts(x)["exponential"].tensors[0]
    assert torch.linalg.matrix_norm(small, 1).item() == pytest.approx(NORM, rel=1e-5)


def test_backward_gives_the_gradients_of_all_inputs():
    x = Inputs.draw(12, 2, 1.0, CPU)
    call = complexity.parts(x)["osa_exact"].with_backward()
    leaves = [tensor.double().requires_grad_() for tensor in (x.query, x.key, x.value)]
    reference.orthogonal_attention(*leaves, x.scale).sum().backward()
    for gradient, leaf in zip(call(), leaves, strict=True):
        torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-4, atol=1e-4)


# Counts


@pytest.mark.parametrize(
    "part, operations",
    [
        ("newton_schulz", lambda n, d: 6 * 2 * n * (2 * d) ** 2),
        ("small", lambda n, d: n * (2 * d) ** 2 + d * (2 * d) ** 2),
        ("application", lambda n, d: 2 * n * 2 * d * d + (2 * d) ** 2 * d),
        ("application_dense", lambda n, d: n * (2 * d) ** 2 + 2 * n * n * d + n * n * d),
        ("small_dense", lambda n, d: n * n * d + 2 * n * n * d + n * (2 * d) ** 2),
        ("softmax", lambda n, d: 2 * n * n * d),
        ("softmax_dense", lambda n, d: 2 * n * n * d),
    ],
)
def test_operations_are_those_of_the_shapes(tables, part, operations):
    rows = tables["counts"].query(f"part == '{part}' and `pass` == 'forward'")
    assert len(rows) == 4 + 3 + 3
    for row in rows.itertuples():
        assert row.multiply_adds == operations(row.tokens, row.width)


def test_memory_holds_inputs_and_what_is_formed(tables):
    rows = tables["counts"].query("`pass` == 'forward'").set_index(["sweep", "part", "tokens"])["bytes"]
    n, d = 512, SETTINGS.width
    inputs = 3 * n * d * 4
    assert rows["tokens", "softmax_dense", n] >= inputs + 2 * 4 * n * n  # the scores and their softmax
    assert inputs + 4 * n * d <= rows["tokens", "osa_exact", n] < 4 * n * n


def test_counts_repeat_to_the_byte(tables, monkeypatch):
    some = complexity.points(SETTINGS)[::4]
    monkeypatch.setattr(complexity, "points", lambda settings: some)
    again = complexity.count_calls(SETTINGS, CPU)
    before = tables["counts"].merge(again[["sweep", "tokens", "width"]].drop_duplicates())
    assert again.equals(before) and len(again) > len(some)


# Exponents and crossings


@pytest.mark.parametrize(
    "order, tokens, joint", [("N d^2 + d^3", 1, 3), ("N d + d^2", 1, 2), ("N^2 d", 2, 3), ("d^3", 0, 3), ("N^2", 2, 2)]
)
def test_degree_of_an_order(order, tokens, joint):
    assert [complexity.degree(order, symbols) for symbols in ("N", "Nd")] == [tokens, joint]


def test_only_the_largest_sizes_are_fitted(tables):
    counts = tables["counts"].query("part == 'softmax' and sweep == 'tokens' and `pass` == 'forward'")
    smaller = counts.assign(tokens=counts["tokens"] // 16, multiply_adds=1)
    both, few = (
        complexity.slopes(rows, "softmax", FORWARD)["operations"]["tokens"]
        for rows in (pd.concat([smaller, counts]), counts[:2])
    )
    assert both == 2 and math.isnan(few)


@pytest.mark.parametrize(
    "ratios, expected",
    [([1.5, 0.75, 0.4, 0.2], 64 * 1.5), ([0.5, 2, 0.5, 0.25], 128 * 2**0.5), ([0.5] * 4, 64), ([2] * 4, None)],
)
def test_crossing_lies_on_the_line_between_two_points(ratios, expected):
    assert complexity.crossing(pd.Series(ratios, [64, 128, 256, 512])) == pytest.approx(expected)


# Checks


def test_the_code_holds(tables):
    numbers = summary(tables)
    assert all(numbers[check]["holds"] for check in ("table_1", "linear"))
    assert [each["part"] for each in numbers["components"]] == list(complexity.ORDERS)
    assert numbers["largest_tokens"] == 512 and numbers["machine"] == tables["times"]["machine"].iloc[0]
    seconds = (
        tables["times"].query(f"`pass` == '{BOTH}' and tokens == 512 and sweep == 'tokens'").set_index("part")["seconds"]
    )
    assert numbers["softmax_over_osa"]["osa_qr"] == pytest.approx(seconds["softmax"] / seconds["osa_qr"])


def test_code_that_forms_the_matrix_is_caught(tables, monkeypatch):
    def small_skew(scale, basis, m):
        return complexity.small_skew_dense(scale, basis, *m.chunk(2, dim=-1))

    def attend(query, key, value, *, scale, method):
        if method == "newton_schulz":
            return complexity.skew(scale, query, key) @ value
        return orthogonal_attention(query, key, value, scale=scale, method=method)

    monkeypatch.setattr(complexity, "small_skew", small_skew)
    monkeypatch.setattr(complexity, "orthogonal_attention", attend)
    numbers = summary(tables, counts=complexity.count_calls(SETTINGS, CPU))
    assert not numbers["table_1"]["holds"] and not numbers["linear"]["holds"]
    excess = {each["part"]: each["slopes"]["operations"]["tokens"] for each in numbers["components"]}
    assert excess["small"] > 1.5 > excess["application"]


@pytest.mark.parametrize(
    "part, column, power, holds",
    [
        ("osa_ns", "bytes", 1.06, False),  # memory alone is enough against a method
        ("osa_ns", "bytes", 1.04, True),
        ("osa_ns", "bytes", math.nan, False),  # too few sizes hold nothing
        ("osa_qr_literal", "multiply_adds", 3.0, True),  # not checked
    ],
)
def test_a_power_that_is_too_high_fails(part, column, power, holds, tables):
    counts = tables["counts"].astype({column: float})
    rows = (counts["part"] == part) & (counts["sweep"] == "tokens")
    counts.loc[rows, column] = counts["tokens"] ** power
    assert summary(tables, counts=counts)["linear"]["holds"] == holds


# params.yaml


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"widths": [2, 4, 64]}, "tokens must be 128 or more, not 64"),
        ({"tokens_per_width": 1}, "tokens_per_width must be 2 or more, not 1"),
        ({"largest_tokens": 511}, "largest_tokens must be 512 or more.*not 511"),
        ({"widths": [2, 4]}, "widths"),
    ],
)
def test_sizes_that_show_no_order_are_refused(changes, expected):
    with pytest.raises(UserError, match=expected):
        reading.validate(Settings, SMALL | changes, "params.yaml: complexity")
