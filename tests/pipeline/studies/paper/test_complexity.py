"""Table 1 and Section 3.1: exponents of known orders, checks that a wrong implementation fails, counts that repeat."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from osa import reference
from osa.functional import orthogonal_attention
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.lab import Lab
from pipeline.report.numbers import number
from pipeline.studies._findings import log_log_slope
from pipeline.studies.paper import complexity
from pipeline.studies.paper.complexity import BOTH, FORWARD, NORM, Inputs, Results, Settings
from tests.pipeline.synthetic import STUDIES

CPU = torch.device("cpu")
SETTINGS = Settings(**STUDIES["complexity"])


@pytest.fixture(scope="module")
def tables():
    """What is measured at tiny sizes. Tests only read it."""
    return complexity.measure(SETTINGS, None)


@pytest.fixture(scope="module")
def found(tables):
    return findings(tables)


def findings(tables):
    return {finding.id: finding for finding in complexity.findings(SETTINGS, tables, a_lab())}


def results(tables):
    return Results(SETTINGS, tables, a_lab())


def a_lab(paper=None):
    return Lab("complexity", params.load(ROOT / "params.yaml"), paper or params.load_paper())


def cells(finding, column):
    at = finding.table.columns.index(column)
    return {row[0]: row[at] for row in finding.table.rows}


# Parts


def test_every_part_computes_what_it_is_named_after():
    x = Inputs.draw(23, 3, 2.0, CPU)
    made = {name: call() for name, call in complexity.parts(x).items()}
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(made["small"], made["small_dense"])
    close(made["application"], made["application_dense"])
    close(made["newton_schulz"].mT @ made["newton_schulz"], made["newton_schulz_gram"])
    close(made["newton_schulz"].double(), reference.newton_schulz_basis(x.query, x.key, num_iterations=6))
    expected = reference.orthogonal_attention(x.query, x.key, x.value, x.scale)
    close(made["application"].double(), expected)
    close((x.value + made["qr"] @ made["phi1"]).double(), expected)
    for name in ("osa_qr", "osa_exact", "osa_qr_literal", "exponential_dense"):
        close(made[name].double(), expected)
    close(made["softmax"], made["softmax_dense"])


def test_inputs_have_the_norm_that_is_asked_for():
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


def test_the_tables_say_what_is_counted_and_what_a_formula(found):
    components = cells(found["table_1_components"], "By formula")
    assert components.pop("Reduced QR of M") == "100%"
    assert set(components.values()) == {"0%"}
    operators = cells(found["linear_in_n"], "By formula")
    assert operators["softmax, fused"] == "100%" and operators["softmax, N×N formed"] == operators["OSA (NS)"] == "0%"
    assert 0 < int(operators["OSA (QR)"].removesuffix("%")) < 100


def test_times_name_their_machine(tables, found):
    (machine,) = tables["times"]["machine"].unique()
    assert machine.endswith(f", {torch.get_num_threads()} thread" + "s" * (torch.get_num_threads() > 1))
    assert all(machine in finding.table.note for finding in found.values())


# Exponents


def test_slope_of_a_power_is_its_exponent():
    size = np.array([2, 4, 8, 16])
    assert round(log_log_slope(size, 7.0 * size**3), complexity.DIGITS) == 3


@pytest.mark.parametrize(
    "order, tokens, widths, joint",
    [("N d^2 + d^3", 1, 3, 3), ("N d + d^2", 1, 2, 2), ("N^2 d", 2, 1, 3), ("d^3", 0, 3, 3), ("N^2", 2, 0, 2)],
)
def test_degree_of_an_order(order, tokens, widths, joint):
    assert [complexity.degree(order, sweep) for sweep in ("tokens", "widths", "joint")] == [tokens, widths, joint]


def test_an_order_as_it_is_printed():
    assert complexity.big_o("N d^2 + d^3") == "O(Nd² + d³)"
    assert complexity.big_o(None) == "–"


def test_only_the_largest_sizes_are_fitted(tables):
    counts = tables["counts"].query("part == 'softmax' and sweep == 'tokens' and `pass` == 'forward'")
    smaller = counts.assign(tokens=counts["tokens"] // 16, multiply_adds=1)
    both, few = (results(tables | {"counts": rows}) for rows in (pd.concat([smaller, counts]), counts[:2]))
    assert both.slope("multiply_adds", "softmax", "tokens") == 2
    assert np.isnan(few.slope("multiply_adds", "softmax", "tokens"))


# Crossovers


def test_crossover_lies_on_the_line_between_two_points():
    tokens = np.array([64, 128, 256, 512])
    assert complexity.crossing(pd.Series(100 / tokens, tokens)) == (pytest.approx(100), "")
    last = complexity.crossing(pd.Series([0.5, 2, 0.5, 0.25], tokens))
    assert last[0] == pytest.approx(128 * 2**0.5)


@pytest.mark.parametrize("ratio, words", [(0.5, "everywhere from 64 on"), (2, "nowhere up to 128")])
def test_no_crossover_within_the_range_is_told_in_words(ratio, words):
    place, why = complexity.crossing(pd.Series(ratio, [64, 128]))
    assert np.isnan(place) and why == words


def test_the_crossover_table_has_place_and_ratio(tables):
    counts, rows = tables["counts"], tables["counts"]["part"] == "osa_exact"
    memory = counts["bytes"].where(~rows, 8 * counts["tokens"] ** 3)
    found = complexity.crossover(results(tables | {"counts": counts.assign(bytes=memory)}))
    softmax = counts.query("part == 'softmax' and `pass` == 'forward' and tokens == 512 and sweep == 'tokens'")["bytes"]
    ratio = number(8 * 512**3 / softmax.item())
    assert cells(found, "memory, fused")["OSA (exact)"].startswith("nowhere up to 512\n")
    assert ["forward", f"nowhere up to 512\n{ratio}"] in [[row[1], row[5]] for row in found.table.rows]


def test_operations_of_the_exact_method_meet_softmax_at_eight_widths(tables):
    """8Nd² + O(d³) against 2N²d: N = 4d at large N, and 8d with the exponential's own products. All N here are larger."""
    counts = tables["counts"].query("part in ('osa_exact', 'softmax') and sweep == 'joint' and `pass` == 'forward'")
    pairs = counts.pivot(index=["tokens", "width"], columns="part", values="multiply_adds").reset_index()
    least = pairs["softmax"] * 4 * pairs["width"] / pairs["tokens"]
    assert ((least <= pairs["osa_exact"]) & (pairs["osa_exact"] < 4 * least)).all()


# Findings


def test_the_code_passes(found):
    assert {name: finding.verdict for name, finding in found.items()} == {
        "table_1_components": "passes",
        "linear_in_n": "passes",
        "crossover": "",
    }
    assert [finding.figure is not None for finding in found.values()] == [True, True, False]


def test_code_that_forms_the_matrix_is_caught(tables, monkeypatch):
    def small_skew(scale, basis, m):
        return complexity.small_skew_dense(scale, basis, *m.chunk(2, dim=-1))

    def attend(query, key, value, *, scale, method):
        if method == "newton_schulz":
            return complexity.skew(scale, query, key) @ value
        return orthogonal_attention(query, key, value, scale=scale, method=method)

    monkeypatch.setattr(complexity, "small_skew", small_skew)
    monkeypatch.setattr(complexity, "orthogonal_attention", attend)
    found = findings(tables | {"counts": complexity.count(SETTINGS, CPU)})
    for name, wrong in (("table_1_components", {"[S]"}), ("linear_in_n", {"OSA (NS)", f"OSA (NS), {BOTH}"})):
        failed = {each.what.split(":")[0] for each in found[name].measures if each.side and not each.is_met}
        assert found[name].verdict == "fails" and failed == wrong


def test_memory_alone_is_enough_against_a_method(tables):
    counts = tables["counts"].astype({"bytes": float})
    rows = (counts["part"] == "osa_ns") & (counts["sweep"] == "tokens")
    counts.loc[rows, "bytes"] = counts["tokens"] ** 1.06
    assert complexity.linear_in_n(results(tables | {"counts": counts})).verdict == "fails"
    counts.loc[rows, "bytes"] = counts["tokens"] ** 1.04
    assert complexity.linear_in_n(results(tables | {"counts": counts})).verdict == "passes"


def test_times_do_not_judge(tables):
    times = tables["times"].assign(seconds=tables["times"]["tokens"] ** 9.0)
    found = findings(tables | {"times": times})
    assert found["table_1_components"].verdict == found["linear_in_n"].verdict == "passes"
    assert cells(found["linear_in_n"], "Time: forward / with backward")["OSA (QR)"] == "9 / 9"


def test_the_literal_method_is_shown_and_not_checked(tables):
    counts = tables["counts"].copy()
    counts.loc[counts["part"] == "osa_qr_literal", "multiply_adds"] = counts["tokens"] ** 3
    found = complexity.linear_in_n(results(tables | {"counts": counts}))
    literal = {measure.value for measure in found.measures if measure.what.startswith("OSA (literal QR)")}
    assert found.verdict == "passes" and literal == {2.0}


def test_too_few_sizes_are_not_evaluated(tables):
    counts = tables["counts"]
    few = counts[(counts["part"] != "osa_ns") | (counts["sweep"] != "joint")]
    found = findings(tables | {"counts": few})
    assert found["linear_in_n"].verdict == "not evaluated" and found["table_1_components"].verdict == "passes"
    assert {each.note for each in found["linear_in_n"].measures if each.what.startswith("OSA (NS)")} == {"too few sizes"}


def test_every_method_of_the_paper_and_ours_is_measured(tables):
    measured = set(tables["counts"]["part"])
    assert results(tables).parts.keys() == measured
    assert set(tables["counts"]["pass"]) == {FORWARD, BOTH}


# params.yaml and paper.yaml


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"widths": [2, 4, 64]}, "64 tokens are fewer than twice the width 64"),
        ({"tokens_per_width": 1}, "1 tokens are fewer than twice the width 1"),
        ({"largest_tokens": 511}, "largest_tokens 511 is too small for an exponent; write 512 or more"),
        ({"widths": [2, 4]}, "params.yaml: complexity: widths should have 3 or more entries"),
        ({"repeat": 2}, "params.yaml: complexity: repeat is not a known key; did you mean 'repeats'?"),
    ],
)
def test_mistakes_in_the_parameters_are_one_sentence(changes, expected):
    with pytest.raises(UserError) as caught:
        params.validate(Settings, STUDIES["complexity"] | changes, "params.yaml: complexity")
    assert expected in str(caught.value)
