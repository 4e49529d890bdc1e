"""Table 1 and Section 3.1: exponents of known orders, checks that a wrong implementation fails, counts that repeat."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from osa import reference
from osa.functional import orthogonal_attention
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.studies.paper import complexity
from pipeline.studies.paper.complexity import BOTH, FORWARD, NORM, Inputs, Settings

CPU = torch.device("cpu")
SMALL = {"largest_tokens": 512, "width": 2, "widths": [2, 4, 8], "tokens": 64, "joint": [2, 4, 8], "tokens_per_width": 16}
SMALL |= {"most_tokens_matrix": 512, "most_tokens_exponential": 128, "repeats": 2, "sample_seconds": 1e-4}
SETTINGS = Settings(**SMALL)


@pytest.fixture(scope="module")
def tables():
    """What is measured at tiny sizes. Tests only read it."""
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


def test_sweeps_follow_from_the_settings():
    points = complexity.points(Settings(largest_tokens=16384, repeats=9))
    sweeps = {name: [point[1:] for point in points if point[0] == name] for name in ("tokens", "widths", "joint")}
    assert sweeps["tokens"] == [(n, 16) for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)]
    assert sweeps["widths"] == [(2048, d) for d in (8, 16, 32, 64, 128, 256)]
    assert sweeps["joint"] == [(32 * d, d) for d in (8, 16, 32, 64, 128)]


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
    again = complexity.count(SETTINGS, CPU)
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


def test_crossing_lies_on_the_line_between_two_points():
    tokens = np.array([64, 128, 256, 512])
    assert complexity.crossing(pd.Series(100 / tokens, tokens)) == pytest.approx(100)
    assert complexity.crossing(pd.Series([0.5, 2, 0.5, 0.25], tokens)) == pytest.approx(128 * 2**0.5)


@pytest.mark.parametrize("ratio, expected", [(0.5, 64), (2, None)])
def test_no_crossing_within_the_range(ratio, expected):
    assert complexity.crossing(pd.Series(ratio, [64, 128])) == expected


def test_operations_of_the_exact_method_meet_softmax_at_eight_widths(tables):
    """8Nd² + O(d³) against 2N²d: N = 4d at large N, and 8d with the exponential's own products. All N here are larger."""
    counts = tables["counts"].query("part in ('osa_exact', 'softmax') and sweep == 'joint' and `pass` == 'forward'")
    pairs = counts.pivot(index=["tokens", "width"], columns="part", values="multiply_adds").reset_index()
    least = pairs["softmax"] * 4 * pairs["width"] / pairs["tokens"]
    assert ((least <= pairs["osa_exact"]) & (pairs["osa_exact"] < 4 * least)).all()


# Checks


def test_the_code_holds(tables):
    numbers = summary(tables)
    assert all(numbers[check]["holds"] for check in ("table_1", "linear"))
    assert [each["part"] for each in numbers["components"]] == list(complexity.ORDERS)
    assert numbers["largest_tokens"] == 512 and numbers["machine"] == tables["times"]["machine"].iloc[0]
    seconds = tables["times"].query("`pass` == @BOTH and tokens == 512 and sweep == 'tokens'").set_index("part")["seconds"]
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
    numbers = summary(tables, counts=complexity.count(SETTINGS, CPU))
    assert not numbers["table_1"]["holds"] and not numbers["linear"]["holds"]
    excess = {each["part"]: each["slopes"]["operations"]["tokens"] for each in numbers["components"]}
    assert excess["small"] > 1.5 > excess["application"]


@pytest.mark.parametrize("power, holds", [(1.06, False), (1.04, True)])
def test_memory_alone_is_enough_against_a_method(power, holds, tables):
    counts = tables["counts"].astype({"bytes": float})
    rows = (counts["part"] == "osa_ns") & (counts["sweep"] == "tokens")
    counts.loc[rows, "bytes"] = counts["tokens"] ** power
    assert summary(tables, counts=counts)["linear"]["holds"] == holds


def test_times_do_not_judge(tables):
    numbers = summary(tables, times=tables["times"].assign(seconds=tables["times"]["tokens"] ** 9.0))
    assert numbers["table_1"]["holds"] and numbers["linear"]["holds"]


def test_the_literal_method_is_not_checked(tables):
    counts = tables["counts"].copy()
    counts.loc[counts["part"] == "osa_qr_literal", "multiply_adds"] = counts["tokens"] ** 3
    assert summary(tables, counts=counts)["linear"]["holds"]


def test_too_few_sizes_hold_nothing(tables):
    counts = tables["counts"]
    numbers = summary(tables, counts=counts[(counts["part"] != "osa_ns") | (counts["sweep"] != "joint")])
    assert not numbers["linear"]["holds"] and numbers["table_1"]["holds"]


def test_every_part_is_measured_in_both_passes(tables):
    assert set(tables["counts"]["part"]) >= {*complexity.ORDERS, *complexity.OSA, "softmax", "softmax_dense"}
    assert set(tables["counts"]["pass"]) == {FORWARD, BOTH}


# params.yaml


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"widths": [2, 4, 64]}, "64 tokens"),
        ({"tokens_per_width": 1}, "1 tokens"),
        ({"largest_tokens": 511}, "largest_tokens 511.*512"),
        ({"widths": [2, 4]}, "widths"),
    ],
)
def test_sizes_that_show_no_order_are_refused(changes, expected):
    with pytest.raises(UserError, match=expected):
        params.validate(Settings, SMALL | changes, "params.yaml: complexity")
