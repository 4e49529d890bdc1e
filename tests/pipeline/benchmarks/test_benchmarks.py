"""The benchmarks compare like with like, write what they say, and refuse a rate that no machine reaches."""

import json
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import safetensors.torch
import torch

from osa.functional import orthogonal_attention
from pipeline.benchmarks import attention, cost, depth, linear, measurements, step, straightforward
from pipeline.config import params
from pipeline.core import files, provenance
from pipeline.training.loop import Training, build_model
from pipeline.training.run import Run
from tests.pipeline import synthetic
from tests.pipeline.mnist_files import write_mnist
from tests.pipeline.synthetic import write_params, write_run

ROOT = Path(__file__).parents[3]
PAPER = list(params.load_paper().table_2)
QUICK_ATTENTION = ["--largest", "128", "--repeats", "2"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory of its own with small models and data; torch's settings as they were, afterwards."""

    def edit(raw):
        raw["model"] |= {"depth": 2}
        raw["train"]["batch_size"] = 7

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measurements, "PEAK_SIZES", {256: 3})
    monkeypatch.setattr(step, "PEAK_SIZE", 256)
    monkeypatch.setattr(attention, "WIDTHS", [4])
    for script in (attention, step):
        monkeypatch.setattr(script, "SAMPLE_SECONDS", 1e-9)
    write_params(tmp_path, edit)
    write_mnist("data/mnist", train=23, test=5)
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield tmp_path
    torch.use_deterministic_algorithms(deterministic)


def read(name):
    """The table, the facts and the folder that a benchmark has left."""
    (path,) = Path("paper_outputs/benchmarks").glob(f"*/{name}.csv")
    facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert path.parent.name == measurements.slug(provenance.describe_environment(provenance.default_device()))
    return pd.read_csv(path), facts


def test_deep_models_are_compared_round_by_round(project, monkeypatch):
    monkeypatch.setattr(depth, "MODELS", ("vit", "osa_shaped"))
    monkeypatch.setattr(depth, "SAMPLE_SECONDS", 1e-9)
    depth.main(["--depth", "6", "--repeats", "2"])
    table, facts = read("depth")
    assert list(table["model"]) == ["vit", "osa_shaped"] and (table["seconds"] > 0).all()
    assert (facts["depth"], facts["rounds"]) == (6, 2)
    rounds = depth.over_vit({"vit": [1.0, 2.0, 4.0], "espa": [3.0, 4.0, 12.0]}).set_index("model")
    assert rounds.loc["espa", ["seconds", "over_vit"]].tolist() == [4, 3] and rounds.loc["vit", "high"] == 1


def models(variant, shared_alpha=False):
    """Ours and the straightforward one with its weights, in float64, with an S that is not small."""
    torch.set_default_dtype(torch.float64)
    try:
        config = params.resolve(params.load(), variant)
        config = config.model_copy(update={"init": config.init.model_copy(update={"alpha_per_head": not shared_alpha})})
        ours = build_model(config, 0).double()
        for name, parameter in ours.named_parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)  # biases and gains that are not 0 and 1
            if name.endswith("alpha"):
                parameter.data.copy_(torch.arange(1, 1 + len(parameter)))
        theirs = straightforward.build(config).double()
    finally:
        torch.set_default_dtype(torch.float32)
    straightforward.load_weights(theirs, ours)
    return ours, theirs


@pytest.mark.parametrize("variant, shared_alpha", [*((variant, False) for variant in PAPER), ("osa_qr", True)])
def test_straightforward_models_compute_the_same(project, variant, shared_alpha):
    ours, theirs = models(variant, shared_alpha)
    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(theirs(images), ours(images), rtol=1e-9, atol=1e-9)
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    assert sizes[0] == sizes[1] or shared_alpha  # the script has one α for each head
    ours.blocks[0].attention.value.weight.data *= 1.5
    assert not torch.allclose(theirs(images), ours(images), rtol=1e-4, atol=1e-4)


def test_the_weights_of_the_timed_steps_are_committed():
    weights = [ROOT / Run(variant, step.SEED).weights for variant in (*PAPER, step.EXACT)]
    assert [path for path in weights if not path.exists()] == []


@pytest.mark.slow
def test_steps_are_timed_and_leave_the_weights_alone(project, monkeypatch):
    made = []
    monkeypatch.setattr(step, "Training", lambda *arguments: made.append(Training(*arguments)) or made[-1])
    vit = params.resolve(params.load(), "vit")
    run = Run("vit", step.SEED)
    write_run(project, params.load(), run)
    trained = build_model(vit, 3).state_dict()
    safetensors.torch.save_file(trained, run.weights)
    synthetic.rewrite(run.folder, weights=files.sha256(run.weights))
    step.main(["--repeats", "2"])
    table, facts = read("step")
    expected = {(model, code, "initialised") for model in PAPER for code in ("ours", "straightforward")}
    expected |= {("osa_exact", "ours", "initialised"), ("vit", "ours", "trained"), ("vit", "straightforward", "trained")}
    assert set(table[step.KEYS].itertuples(index=False, name=None)) == expected
    assert (table["p10"] > 0).all() and (table["p10"] <= table["seconds"]).all() and (table["seconds"] <= table["p90"]).all()
    vits = [training.model.state_dict() for training in made if training.config.variant == vit.variant]
    kept = [all(tensor.equal(state[name]) for name, tensor in trained.items()) for state in vits]
    assert kept == [False, True]  # the one that was given them has them still, after its steps
    seconds = table[table["weights"] == "initialised"].set_index(["model", "code"])["seconds"]
    of = facts["ratios"]["initialised"]
    assert of["over_vit"]["osa_exact"] == pytest.approx(seconds["osa_exact", "ours"] / seconds["vit", "ours"], rel=1e-4)
    sums = [sum(seconds[model, code] for model in ("osa_qr", "osa_ns")) for code in ("straightforward", "ours")]
    assert of["straightforward_over_ours"]["the paper's OSA models"] == pytest.approx(sums[0] / sums[1], rel=1e-4)
    assert set(of["straightforward_over_ours"]) == {*PAPER, "the paper's OSA models", "all models of the paper"}
    assert set(facts["ratios"]["trained"]["straightforward_over_ours"]) == {"vit"}
    assert facts["peak"]["tflops"] > 0
    operations = (table["tflops"] * table["seconds"] * 1e12).set_axis(table[step.KEYS].agg(tuple, axis=1))
    training = step.training_from("vit", step.INITIALISED, step.with_whole_batches(vit), {}, torch.device("cpu"))
    batch = next(training.batches(0))
    expected = 2 * cost.cost(lambda: training.step(*batch), torch.device("cpu")).multiply_adds
    for weights in ("initialised", "trained"):
        assert operations["vit", "ours", weights] == pytest.approx(expected, rel=1e-4)
    assert (operations["osa_exact", "ours", "initialised"] > expected) and (operations > 0).all()
    assert facts["environment"]["torchvision"] and facts["options"]["repeats"] == 2


def test_where_ours_is_a_graph_it_is_timed_without_too(project, tmp_path, monkeypatch):
    def with_graph(*arguments):
        training = Training(*arguments)
        training.with_graph = True
        return training

    monkeypatch.setattr(step, "Training", with_graph)
    step.unpack("mnist", tmp_path / "scratch")
    settings = params.load()
    steps, _ = step.prepare(["vit"], settings, tmp_path / "scratch", False, torch.device("cpu"))
    counts = {key[1]: count for key, count in step.count_operations(steps, torch.device("cpu")).items()}
    assert counts[step.OURS] == counts[step.EAGER] > 0
    assert {code for _, code, _ in steps} == {step.OURS, step.EAGER, step.THEIRS}
    rows = [(*key, seconds) for key, seconds in zip(steps, (2.0, 5.0, 8.0), strict=True)]
    ratios = step.ratios(pd.DataFrame(rows, columns=[*step.KEYS, "seconds"]), settings)["initialised"]
    assert ratios["eager_over_ours"] == {"vit": 2.5} and ratios["straightforward_over_ours"] == {"vit": 4.0}


@pytest.mark.slow
def test_attention_is_timed_beside_its_error(project):
    attention.main(QUICK_ATTENTION)
    table, facts = read("attention")
    assert set(table["tokens"]) == {50, 128} and set(table["pass"]) == {"forward", "forward and backward"}
    ours = {"exact", "qr", "newton_schulz", "polar_express", "cayley"}
    ours |= {"literal_qr", "literal_newton_schulz", "matrix_exp"}
    others = ["sdpa", "sdpa_math", "linear_elu", "linear_favor"]
    assert ours | {*others} <= set(table["method"])
    errors = table.set_index("method")["orthogonality_error"]
    assert (errors[["exact", "qr", "cayley", "matrix_exp"]] < 1e-5).all() and errors[others].isna().all()
    assert (table[["seconds", "tflops", "peak_bytes"]] > 0).all(axis=None)
    rows = table[(table["tokens"] == 128) & (table["pass"] == "forward")].set_index("method")
    products = 2 * 2 * 128 * 128 * 4  # floating-point operations of the scores and of their product with V
    assert rows.loc["sdpa_math", "tflops"] * rows.loc["sdpa_math", "seconds"] * 1e12 == pytest.approx(products, rel=1e-4)
    (ratio,) = [each for each in facts["ratios"] if each["tokens"] == 128 and each["pass"] == "forward"]
    best = rows[rows.index.str.startswith("sdpa")]["seconds"].min()
    assert ratio["best SDPA / exact"] == pytest.approx(best / rows.loc["exact", "seconds"], rel=1e-4)


def test_linear_attention_is_its_dense_form():
    query, key, value = 2 * torch.randn(3, 2, 2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    projection = linear.orthogonal_projection(8).double()

    def elu_features(x):
        return torch.where(x > 0, x + 1, x.exp())

    def favor_features(x):
        return (x @ projection.mT / 8**0.25 - (x**2).sum(-1, keepdim=True) / (2 * 8**0.5)).exp()

    favor = partial(linear.favor, projection)
    for function, features in ((linear.elu, elu_features), (favor, favor_features)):
        weights = features(query) @ features(key).mT
        dense = weights / weights.sum(-1, keepdim=True) @ value
        torch.testing.assert_close(function(query, key, value), dense, rtol=1e-12, atol=1e-12)
    assert favor(5 * query, 100 + key, value).isfinite().all()  # exponents of −10⁴


def test_favor_estimates_softmax():
    query, key, value = torch.randn(3, 1, 1, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key = query / 2, key / 2  # the estimate's variance grows as exp(‖q + k‖²)
    softmax = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    projection = linear.orthogonal_projection(8, 2**14).double()
    assert (projection[:8] @ projection[:8].mT).fill_diagonal_(0).abs().max() < 1e-5
    error = (linear.favor(projection, query, key, value) - softmax).norm() / softmax.norm()
    assert error < 0.03


def test_bfloat16_has_files_of_its_own(project):
    attention.main([*QUICK_ATTENTION, "--largest", "50", "--dtype", "bfloat16"])
    table, facts = read("attention_bfloat16")
    assert set(table["dtype"]) == {"bfloat16"} and facts["options"]["dtype"] == "bfloat16"
    assert not list(Path("paper_outputs").glob("**/attention.csv"))


def test_a_clock_that_is_wrong_is_caught(project, monkeypatch, capsys):
    seconds = cost.seconds
    monkeypatch.setattr(cost, "seconds", lambda *arguments: seconds(*arguments) / 1e4)
    with pytest.raises(SystemExit):
        attention.main(QUICK_ATTENTION)
    assert "the timing or the operation count is wrong" in capsys.readouterr().err
    assert not Path("paper_outputs").exists()


def test_what_is_too_slow_or_too_large_is_left_out():
    query = torch.empty(1, 1, 400, 4)
    quadratic = attention.Route(orthogonal_attention, 2)
    fits = [attention.fits("sdpa", quadratic, "forward", query, (200, seconds)) for seconds in (0.49, 0.51)]
    assert fits == [True, False]  # twice the tokens take four times as long
    matrix = attention.Route(orthogonal_attention, 2, forms_matrix=True)
    sizes = [torch.empty(1, 1, n, 4, device="meta") for n in (2**14, 2**14 + 1)]
    assert [attention.fits("sdpa_math", matrix, "forward", query, None) for query in sizes] == [True, False]
    linear = attention.Route(orthogonal_attention, 1)
    assert not attention.fits("literal_qr", linear, "forward and backward", query[..., :7, :], None)
