"""The complexity stage: exponents of known orders, verdicts that a wrong implementation loses, files that repeat."""

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import t

from osa import reference
from pipeline import complexity, complexity_report, params
from pipeline.errors import UserError
from pipeline.findings import is_met
from tests.pipeline import synthetic

CPU = torch.device("cpu")


def write_params(folder, **changes):
    synthetic.write_params(folder, lambda raw: raw["complexity"].update(changes))


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """The folder of a whole run at tiny sizes. Tests only read it."""
    folder = tmp_path_factory.mktemp("complexity")
    write_params(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        complexity.main()
    return folder / complexity.FOLDER


@pytest.fixture(scope="module")
def config(stage):
    return params.load(stage.parents[1] / "params.yaml").complexity


@pytest.fixture(scope="module")
def tables(stage):
    read = {path.stem: pd.read_csv(path) for path in stage.glob("*.csv")}
    for name in ("crossover", "time_crossover"):
        read[name]["note"] = read[name]["note"].astype(object).fillna("")
    return read


@pytest.fixture(scope="module")
def findings(stage):
    return {each["id"]: each for each in json.loads((stage / "findings.json").read_text(), parse_constant=pytest.fail)}


def judge(tables, config, name):
    """A finding from tables that a test has tampered with."""
    make = {
        "table_1_components": complexity_report.components,
        "linear_in_n": complexity_report.linear_in_n,
        "crossover": partial(complexity_report.crossover, device_name="a machine"),
    }[name]
    return make(complexity.FOLDER, tables, config)


def recounted(tables, config):
    """The tables with operations and memory counted again, on the code as it now is."""
    counts = complexity.count(config, CPU)
    slopes = complexity.fit_slopes(counts, ("multiply_adds", "bytes"), config)
    crossover = complexity.find_crossovers(counts, ("multiply_adds", "bytes"))
    return tables | {"counts": counts, "slopes": slopes, "crossover": crossover}


# --- parts


def test_every_part_computes_what_it_is_named_after(config):
    x = complexity.Inputs.draw(23, 3, 2.0, config, CPU)
    parts = complexity.components(x, config) | complexity.components_as_written(x, config)
    results = {name: call() for name, call in parts.items()}
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(results["small"], results["small_dense"])
    close(results["application"], results["application_dense"])
    close(results["newton_schulz"].mT @ results["newton_schulz"], results["newton_schulz_gram"])
    close(results["newton_schulz"].double(), reference.newton_schulz_basis(x.query, x.key, num_iterations=6))
    expected = reference.orthogonal_attention(x.query, x.key, x.value, x.scale)
    close(results["application"].double(), expected)
    basis = parts["application"].tensors[0]
    close((x.value + basis @ results["phi1"]).double(), expected)
    operators = complexity.operators(x, config)
    for name in ("osa_qr", "osa_exact"):
        close(operators[name]().double(), expected)
    close(complexity.exponential_dense(x.scale, x.query, x.key, x.value).double(), expected)
    close(operators["softmax"](), complexity.softmax_dense(x.query, x.key, x.value))


def test_inputs_have_the_norm_that_is_asked_for(config):
    x = complexity.Inputs.draw(40, 5, 3.0, config, CPU)
    norm = torch.linalg.matrix_norm(reference.skew(x.query, x.key, x.scale), 2).item()
    assert norm == pytest.approx(3.0, rel=1e-5)
    small = complexity.components(x, config)["exponential"].tensors[0]
    assert torch.linalg.matrix_norm(small, 1).item() == pytest.approx(config.norm, rel=1e-5)


def test_backward_gives_the_gradients_of_all_inputs(config):
    x = complexity.Inputs.draw(12, 2, 1.0, config, CPU)
    call = complexity.operators(x, config)["osa_exact"].with_backward()
    leaves = [tensor.double().requires_grad_() for tensor in (x.query, x.key, x.value)]
    reference.orthogonal_attention(*leaves, x.scale).sum().backward()
    for gradient, leaf in zip(call(), leaves, strict=True):
        torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-4, atol=1e-4)


# --- counts


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
    assert len(rows) == 5 + 3 + 3
    for row in rows.itertuples():
        assert row.multiply_adds == operations(row.tokens, row.width)


def test_memory_holds_inputs_and_what_is_formed(tables):
    rows = tables["counts"].query("`pass` == 'forward'").set_index(["sweep", "part", "tokens"])["bytes"]
    n, d = 512, 4
    inputs = 3 * n * d * 4
    assert rows["tokens", "softmax_dense", n] >= inputs + 2 * 4 * n * n  # the scores and their softmax
    assert inputs + 4 * n * d <= rows["tokens", "osa_exact", n] < 4 * n * n


def test_counts_repeat_to_the_byte(stage, config, tmp_path):
    counts = complexity.count(config, CPU)
    assert counts.to_csv(index=False, lineterminator="\n") == (stage / "counts.csv").read_text()


# --- slopes


def test_slope_of_a_power_is_its_exponent():
    size = np.array([2, 4, 8, 16])
    assert complexity.fit_slope(size, 7.0 * size**3, 0.95) == pytest.approx((3, 3, 3))


def test_interval_is_students_t_of_the_residuals():
    size, value = np.array([1, 2, 4, 8, 16]), np.array([1.0, 2.3, 3.7, 8.9, 15.0])
    (exponent, _), covariance = np.polyfit(np.log(size), np.log(value), 1, cov=True)
    half = t.ppf(0.975, 3) * covariance[0, 0] ** 0.5
    assert complexity.fit_slope(size, value, 0.95) == pytest.approx((exponent, exponent - half, exponent + half))


@pytest.mark.parametrize(
    "order, tokens, widths, joint",
    [("N d^2 + d^3", 1, 3, 3), ("N d + d^2", 1, 2, 2), ("N^2 d", 2, 1, 3), ("d^3", 0, 3, 3), ("N^2", 2, 0, 2)],
)
def test_degree_of_an_order(order, tokens, widths, joint):
    assert [complexity.degree(order, sweep) for sweep in ("tokens", "widths", "joint")] == [tokens, widths, joint]


def test_an_order_as_it_is_printed():
    assert complexity_report.ordered("N d^2 + d^3") == "O(Nd² + d³)"
    assert complexity_report.ordered(None) == "–"


def test_only_the_largest_sizes_are_fitted(config):
    rows = [("tokens", "softmax", "forward", n, 4, value) for n, value in ((32, 1e9), (64, 1), (128, 4), (256, 16))]
    table = pd.DataFrame(rows, columns=[*complexity.KEYS, "tokens", "width", "multiply_adds"])
    (row,) = complexity.fit_slopes(table, ("multiply_adds",), config).itertuples()
    assert (row.points, row.slope, row.paper, row.excess) == (3, 2, 2, 0)


# --- crossover


def test_crossover_lies_on_the_line_between_two_points():
    tokens = np.array([64, 128, 256, 512])
    assert complexity.crossing(tokens, 100 / tokens) == (pytest.approx(100), "")
    assert complexity.crossing(tokens, np.array([0.5, 2, 0.5, 0.25]))[0] == pytest.approx(128 * 2**0.5)  # the last one


def test_no_crossover_within_the_range_is_told_in_words():
    tokens = np.array([64, 128])
    for ratio, words in ((0.5, "less from the smallest N measured, 64, on"), (2, "not less up to the largest N")):
        place, note = complexity.crossing(tokens, np.full(2, ratio))
        assert np.isnan(place) and words in note


def test_operations_of_the_exact_method_meet_softmax_at_eight_widths(tables):
    """8Nd² + O(d³) against 2N²d: N = 4d at large N, and 8d with the exponential's own products."""
    row = tables["crossover"].query("part == 'osa_exact' and quantity == 'multiply_adds' and against == 'softmax_dense'")
    place = row.set_index("pass")["tokens"]["forward"]
    assert np.isnan(place) or 4 * 4 < place < 16 * 4


# --- findings


def test_findings_hold_on_the_code_as_it_is(findings):
    assert list(findings) == ["table_1_components", "linear_in_n", "crossover"]
    assert {each["verdict"] for each in findings.values()} == {"supported"}


def test_findings_have_the_keys_of_the_report(stage, findings):
    keys = {"id", "title", "place", "statement", "rule", "verdict", "measures", "remark"}
    keys |= {"figure", "caption", "table", "sources"}
    for each in findings.values():
        assert set(each) == keys
        assert all(set(measure) == {"what", "value", "unit", "side", "limit", "note"} for measure in each["measures"])
        assert all(len(row) == len(each["table"]["columns"]) for row in each["table"]["rows"])
        assert len(each["table"]["align"]) == len(each["table"]["columns"]) and 3 <= len(each["table"]["rows"]) <= 12
        assert (stage / each["figure"]).exists() and (stage / each["figure"]).with_suffix(".png").exists()
        assert all((stage.parents[1] / source).exists() for source in each["sources"])


def test_every_measure_is_a_cell_of_a_file(stage, findings):
    for each in findings.values():
        cells = set()
        for source in each["sources"]:
            table = pd.read_csv(stage.parents[1] / source)
            cells.update(table.select_dtypes("number").to_numpy().ravel())
        for measure in each["measures"]:
            assert measure["value"] in cells or (measure["value"] is None and measure["note"]), measure


def test_a_component_that_forms_the_matrix_is_caught(tables, config, monkeypatch):
    def small_skew(scale, basis, m):
        return complexity.small_skew_dense(scale, basis, *m.chunk(2, dim=-1))

    monkeypatch.setattr(complexity, "small_skew", small_skew)
    found = judge(recounted(tables, config), config, "table_1_components")
    assert found["verdict"] == "not supported"
    failed = [each["what"] for each in found["measures"] if not is_met(each)]
    assert failed == ["[S]: largest excess of a slope"]


def test_an_operator_that_forms_the_matrix_is_caught(tables, config, monkeypatch):
    def dense(query, key, value, *, scale, method, num_iterations=None):
        return complexity.exponential_dense(scale, query, key, value)

    few = config.model_copy(update={"tokens": config.tokens.model_copy(update={"sizes": [32, 64, 128]})})
    monkeypatch.setattr(complexity, "orthogonal_attention", dense)
    wrong = recounted(tables, few)
    for name in ("linear_in_n", "crossover"):
        assert judge(wrong, few, name)["verdict"] == "not supported"


def test_memory_alone_is_enough_against_a_method(tables, config):
    slopes = tables["slopes"].copy()
    rows = (slopes["part"] == "osa_ns") & (slopes["quantity"] == "bytes") & (slopes["sweep"] == "tokens")
    slopes.loc[rows, "excess"] = config.tolerance
    assert judge(tables, config, "linear_in_n")["verdict"] == "supported"
    assert judge(tables | {"slopes": slopes}, config, "linear_in_n")["verdict"] == "not supported"


def test_times_do_not_judge(tables, config):
    slow = tables | {each: tables[each].copy() for each in ("time_slopes", "time_crossover", "times")}
    slow["time_slopes"]["slope"] = 9.0
    slow["time_crossover"]["tokens"] = np.nan
    slow["time_crossover"]["note"] = "not less up to the largest N measured, 512"
    for name in ("table_1_components", "linear_in_n", "crossover"):
        assert judge(slow, config, name)["verdict"] == "supported"


# --- params.yaml


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"widths": {"sizes": [2, 4, 64], "tokens": 64}}, "64 tokens are fewer than twice the width 64"),
        ({"joint": {"sizes": [2, 4, 8], "tokens_per_width": 1}}, "1 tokens are fewer than twice the width 1"),
        ({"tokens": {"sizes": [64, 32, 128], "width": 4}}, "tokens.sizes should rise"),
        ({"most_tokens_matrix": 64}, "most_tokens_matrix leaves fewer than 3 of tokens.sizes, too few for a slope"),
        ({"fit_points": 2}, "complexity.fit_points should be greater than or equal to 3, not 2"),
        ({"repeat": 2}, "complexity.repeat is not a known key; did you mean 'repeats'?"),
    ],
)
def test_mistakes_in_the_parameters_are_one_sentence(tmp_path, changes, expected):
    write_params(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        params.load(tmp_path / "params.yaml")
    assert expected in str(caught.value)


def test_an_order_that_cannot_be_read_is_refused(tmp_path):
    synthetic.write_params(tmp_path, lambda raw: raw["complexity"]["paper"]["qr"].update(operations="N*d^2"))
    with pytest.raises(UserError, match="complexity.paper.qr.operations should match pattern"):
        params.load(tmp_path / "params.yaml")
