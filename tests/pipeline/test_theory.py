"""The theory stage on small models: its files, its verdicts, and that each of them can be lost."""

import copy
import json
import math

import pandas as pd
import pytest
import torch
import yaml

from osa import theory as mathematics
from pipeline import figures, findings, params, theory, theory_figures, theory_findings, train
from pipeline.errors import UserError
from tests.pipeline.mnist_files import write_mnist
from tests.pipeline.synthetic import ROOT, SMALL, shrink_theory

IDS = ["theorem_2_1", "theorem_2_2", "theorem_3_1", "theorem_4_1", "theorem_4_2", "theorems_4_3_4_4", "trainability"]


def small(raw):
    raw["run"] |= {"variants": ["osa_qr", "osa_ns", "vit"], "seeds": [0]}
    raw["model"] |= SMALL
    shrink_theory(raw["theory"])


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A finished stage: osa_qr with weights, osa_ns without."""
    folder = tmp_path_factory.mktemp("theory")
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    small(raw)
    (folder / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False, allow_unicode=True))
    write_mnist(folder / "data/mnist", train=5, test=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        theory.mnist_images.cache_clear()
        write_weights()
        theory.main()
    return folder


def write_weights():
    model = train.build_model(params.resolve(params.load(), "osa_qr"), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    path = train.weights_path("osa_qr", 0)
    path.parent.mkdir(parents=True)
    torch.save(model.state_dict(), path)


@pytest.fixture
def inside(project, monkeypatch):
    monkeypatch.chdir(project)
    return params.load()


@pytest.fixture(scope="module")
def found(project):
    return json.loads((project / theory_findings.FOLDER / "findings.json").read_text())


@pytest.fixture
def tables(project):
    names = [path.stem for path in (project / theory_findings.FOLDER).glob("*.csv")]
    return {name: pd.read_csv(project / theory_findings.FOLDER / f"{name}.csv") for name in names if name != "measures"}


def test_findings_are_complete(found, project):
    assert [finding["id"] for finding in found] == IDS
    keys = {
        "id",
        "title",
        "place",
        "statement",
        "rule",
        "verdict",
        "measures",
        "remark",
        "figure",
        "caption",
        "table",
        "sources",
    }
    for finding in found:
        assert set(finding) == keys
        assert {frozenset(m) for m in finding["measures"]} == {frozenset(["what", "value", "unit", "side", "limit", "note"])}
        assert all((project / source).exists() for source in finding["sources"])
        for suffix in ("svg", "png"):
            assert (project / theory_findings.FOLDER / finding["figure"]).with_suffix(f".{suffix}").stat().st_size > 1000
        table = finding["table"]
        assert {len(row) for row in table["rows"]} == {len(table["columns"])} == {len(table["align"])}


def test_theorems_are_supported(found):
    assert {finding["id"]: finding["verdict"] for finding in found[:6]} == dict.fromkeys(IDS[:6], "supported")


def test_every_measure_stands_in_a_file(found, project):
    cells = pd.read_csv(project / theory_findings.FOLDER / "measures.csv")
    measures = [(finding["id"], m["what"], m["value"]) for finding in found for m in finding["measures"]]
    assert measures == list(cells[["finding", "what", "value"]].itertuples(index=False, name=None))


def test_missing_weights_are_said(found, tables):
    assert "OSA (NS)" in found[0]["remark"] and "OSA (QR)" not in found[0]["remark"]
    layers = tables["theorems_4_3_4_4_layers"].groupby("source")["state"].unique()
    assert set(layers["osa_qr"]) == {"initialised", "trained"}
    assert set(layers["osa_ns"]) == {"initialised"}


def test_missing_weights_are_warned_of_once(inside, capsys):
    theory.model_layers(inside, "osa_ns")
    assert capsys.readouterr().err.count("weights/osa_ns/0.pt is missing") == 1
    assert len(theory.model_layers(inside, "osa_qr")) == 2 * SMALL["depth"]
    assert not capsys.readouterr().err


def test_layers_are_those_of_the_model(inside):
    """What is measured of a head is what the model does."""
    layer = theory.model_layers(inside, "osa_qr")[1]
    scale = layer.attention.scale()
    heads = [
        mathematics.head(layer.x, layer.head_weights(i), scale[i], **layer.attention.options)
        for i in range(layer.attention.num_heads)
    ]
    torch.testing.assert_close(sum(heads), layer.attention(layer.x))


def test_functions_of_tokens_are_the_model(inside):
    model = train.build_model(params.resolve(inside, "vit"), 0).double()
    images, _ = theory.mnist_images("unit")
    torch.testing.assert_close(theory.logits(model, model.tokens(images)), model(images))
    for block in model.blocks:
        for parameter in block.mlp.parameters():
            torch.nn.init.zeros_(parameter)
    through = theory.attention_only(model, model.tokens(images))
    torch.testing.assert_close(model.head(model.norm(through[:, 0])), model(images))


def test_same_inputs_give_the_same_tables(inside):
    once, again = (theory.jacobian_errors(inside) for _ in range(2))
    pd.testing.assert_frame_equal(once, again, check_exact=True)


def test_slope_of_a_known_power_law():
    rows = [(size, alpha, size * alpha**1.5) for size in (2, 7) for alpha in (1e-3, 1e-2, 1e-1)]
    points = pd.DataFrame(rows, columns=["tokens", "alpha", "first_norm"]).assign(embed_dim=1, num_heads=1, seed=0)
    value, low, high = theory_findings.slope(points, 0.95)
    assert low <= value <= high
    assert value == pytest.approx(1.5) and high - low < 1e-6


def test_gain_of_a_known_decay():
    depth = pd.Series([2, 4, 8])
    columns = {"attention_gain": 0.5**depth, "logits_frobenius": 3 * 0.9**depth, "first_gradient": 1.0**depth}
    gains = theory_findings._gains(pd.DataFrame({"depth": depth} | columns))
    assert gains == {key: pytest.approx(v) for key, v in zip(columns, (0.5, 0.9, 1), strict=True)}


WRONG = {  # a table, and what spoils it
    "theorem_2_1": ("theorem_2_1", "error", lambda t: t["error"].where(t["method"] != "exact", 1e-6)),
    "theorem_2_2": ("theorem_2_2", "change", lambda t: t["change"] + 1e-9),
    "theorem_3_1": ("theorem_3_1", "error", lambda t: t["bound_10"] * 1.1 + 1e-9),
    "theorem_4_1": ("theorem_4_1", "error", lambda t: t["error"] + 1e-6),
    "theorem_4_2": ("theorem_4_2", "deviation", lambda t: t["deviation"] + 1e-2),
    "theorems_4_3_4_4": ("theorems_4_3_4_4", "first_norm", lambda t: t["first_norm"] * t["alpha"] ** 0.5),
    "trainability": ("trainability", "attention_gain", lambda t: 0.5 ** t["depth"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_is_not_supported(name, inside, tables):
    table, column, spoil = WRONG[name]
    maker = getattr(theory_findings, name)
    tables[table] = tables[table].assign(**{column: spoil(tables[table])})
    assert maker(inside, tables)["verdict"] == "not supported"


def test_a_condition_above_its_bound_is_not_supported(inside, tables):
    table = tables["theorems_4_3_4_4"]
    tables["theorems_4_3_4_4"] = table.assign(
        excess=table["bound_excess"].where(table["alpha"] > 1e-4, 2 * table["bound_excess"])
    )
    assert theory_findings.theorems_4_3_4_4(inside, tables)["verdict"] == "not supported"


def test_a_measure_without_a_value_supports_nothing():
    measure = findings.measure("x", math.nan, "", "below", 1.0)
    assert measure["value"] is None
    assert findings.verdict([measure]) == "not supported"


def test_figures_depend_on_the_tables_alone(inside, tables):
    once, again = (figures.svg(theory_figures.draw(inside, copy.deepcopy(tables))["theorem_2_2"]) for _ in range(2))
    assert once == again
    assert "effective rank" in once


def test_without_an_orthogonal_model_the_theorems_remain(inside, tables):
    only = inside.model_copy(update={"run": inside.run.model_copy(update={"variants": ["vit"]})})
    assert theory.orthogonal_variants(only) == []
    spectra, kernel = theory.kernel_tables(only)
    assert set(kernel["tokens"]) == {"gaussian"}
    tables |= {
        "theorem_2_1": theory.exponential_errors(only, []),
        "theorem_2_2": kernel,
        "theorem_2_2_spectra": spectra,
        "theorem_3_1": theory.orthogonality_errors(only, []),
        "theorem_4_2": theory.weight_spectra(only, []),
        "theorems_4_3_4_4_layers": theory.layer_conditions(only, []),
    }
    found = theory_findings.findings(only, tables)
    assert [finding["id"] for finding in found] == IDS
    assert all(finding["measures"] for finding in found)
    assert all(figures.png(figure) for figure in theory_figures.draw(only, tables).values())


@pytest.mark.parametrize(
    "block, change, sentence",
    [
        ("theorem_2_1", {"sizes": [[5, 3]]}, "N = 5 < 2 d_v = 6"),
        ("theorem_2_2", {"depths": [1, 2]}, "depths must rise from 0"),
        ("theorem_4_2", {"sizes": [[7, 2]]}, "h must be 2 or more and divide d"),
        ("theorems_4_3_4_4", {"fit_below": 1e-7}, "fewer than 3"),
        ("trainability", {"baseline": "vitt"}, "baseline 'vitt' must be one of models"),
        ("trainability", {"models": ["vitt"], "baseline": "vitt"}, "did you mean 'vit'"),
        ("theorem_3_1", {"iteration": 3}, "did you mean 'iterations'"),
    ],
)
def test_impossible_parameters_are_named(block, change, sentence, tmp_path):
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["theory"][block] |= change
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False, allow_unicode=True))
    with pytest.raises(UserError, match="theory") as caught:
        params.load(tmp_path / "params.yaml")
    assert sentence in str(caught.value)
