"""params.yaml: every mistake is one sentence that names the key and says what to write, and nothing is made up."""

import copy
import json
import re
from pathlib import Path

import pytest
from dvc.utils.hydra import apply_overrides
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

import osa.models
from pipeline.core import params
from pipeline.core.errors import UserError

ROOT = Path(__file__).parents[2]
WRITTEN = YAML(typ="safe").load(ROOT / "params.yaml")
RAW = params.with_library(WRITTEN)
PAPER = YAML(typ="safe").load(ROOT / "pipeline/paper.yaml")
SETTINGS = params.load(ROOT / "params.yaml")
ABSENT = object()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edited(path: tuple, value, of: dict = RAW) -> dict:
    """The repository's parameters with one place changed or, for ABSENT, removed."""
    raw = copy.deepcopy(of)
    *parents, last = path
    place = raw
    for key in parents:
        place = place[key]
    if value is ABSENT:
        del place[last]
    else:
        place[last] = value
    return raw


def load(raw: object) -> params.Params:
    Path("params.yaml").write_text(json.dumps(raw))  # JSON is YAML whose text is always in quotes
    return params.load()


def load_paper(raw: object) -> params.Paper:
    Path("pipeline").mkdir(exist_ok=True)
    Path("pipeline/paper.yaml").write_text(json.dumps(raw))
    return params.load_paper()


def sentence(raw: object, load=load) -> str:
    with pytest.raises(UserError) as caught:
        load(raw)
    return str(caught.value)


def test_the_repositorys_parameters_are_valid():
    settings = params.load(ROOT / "params.yaml")
    assert set(settings.run.variants) <= set(WRITTEN["variants"]) <= set(settings.variants)
    for variant, block in WRITTEN["variants"].items():
        assert params.resolve(settings, variant).variant.attention == block["attention"]


def test_a_model_of_the_library_needs_its_block_to_be_a_stage_and_the_one_that_is_told_is_it(tmp_path):
    path, text = tmp_path / "params.yaml", (ROOT / "params.yaml").read_text()
    asked = text.replace("variants: [osa_qr,", "variants: [osa_shaped, osa_qr,")
    path.write_text(asked)
    with pytest.raises(UserError, match=r"run.variants names 'osa_shaped'; write its block under variants: ") as caught:
        params.load(path)
    block = str(caught.value).partition("under variants: ")[2].rstrip(".")
    path.write_text(re.sub(r"^variants:.*$", f"variants:\n  {block}", asked, flags=re.MULTILINE))
    assert params.load(path).variants["osa_shaped"] == params.load(ROOT / "params.yaml").variants["osa_shaped"]


def test_models_of_the_library_need_no_block():
    settings, models = params.load(ROOT / "params.yaml"), osa.models.MODELS
    assert set(settings.variants) == set(models) > set(WRITTEN["variants"])
    for name, options in models.items():
        assert options.items() <= settings.variants[name].model_dump().items(), name


SOURCES = "data.source should be 'mnist', 'sample', 'fashion_mnist', 'kmnist', 'cifar10' or 'folder', not"


@pytest.mark.parametrize(
    "path, value, expected",
    [
        # unknown, misspelt and missing keys
        ("trian", {}, "trian is not a known key; did you mean 'train'?"),
        ("train.lr", 0.1, "train.lr is not a known key; known: epochs, batch_size, learning_rate, "),
        ("train.epochz", 3, "train.epochz is not a known key; did you mean 'epochs'?"),
        ("variants.vit.skips", True, "variants.vit.skips is not a known key; did you mean 'skip'?"),
        ("theorem_22", {}, "theorem_22 is not a known key"),
        ("studies", {}, "studies is not a known key; "),
        ("train.epochs", ABSENT, "train.epochs is missing."),
        ("model", ABSENT, "model is missing."),
        # types
        ("train.learning_rate", "1e-3", "train.learning_rate: '1e-3' is read as text; write 1e-3 without quotes."),
        ("train.epochs", "10", "train.epochs: '10' is read as text; write 10 without quotes."),
        ("train.learning_rate", "fast", "train.learning_rate should be a number, not 'fast'."),
        ("train.learning_rate", True, "train.learning_rate should be a number, not True."),
        ("train.epochs", 1.5, "train.epochs should be a whole number, not 1.5."),
        ("train.epochs", None, "train.epochs should be a whole number, but is empty."),
        ("variants.vit.skip", "yes", "variants.vit.skip should be true or false, not 'yes'."),
        ("run.seeds", 3, "run.seeds should be a list, as in [a, b], not 3."),
        ("run.seeds", [0, "1"], "run.seeds.1: '1' is read as text; write 1 without quotes."),
        ("train", None, "train should be a block of keys, but is empty."),
        ("train", [1], "train should be a block of keys, not [1]."),
        ("variants.vit.overrides", [1], "variants.vit.overrides should be a block of keys, not [1]."),
        # values
        ("train.learning_rate", 0, "train.learning_rate should be greater than 0, not 0."),
        ("train.betas", [0.9], "train.betas should have 2 or more entries, not [0.9]."),
        ("train.betas", [0.9, 1.0], "train.betas.1 should be less than 1, not 1.0."),
        ("data.source", "mnits", f"{SOURCES} 'mnits'."),
        ("model.patch_size", 5, "variants.osa_qr: patch_size 5 must divide image_size 28."),
        ("model.num_heads", 7, "variants.osa_qr: num_heads 7 must divide embed_dim 64."),
        (
            "model.num_heads",
            1,
            "variants.osa_qr: num_heads 1 ",
        ),
        ("model.num_classes", 7, "model.num_classes 7 is less than the 10 classes of mnist."),
        ("model.mlp_ratio", 0.01, "variants.osa_qr: mlp_ratio 0.01 "),
        # runs
        ("run.seeds", [], "run.seeds should have 1 or more entries, not []."),
        ("run.seeds", [2, 3, 5, 3], "run.seeds: 3 is listed twice."),
        ("train.points_per_epoch", 10**9, "train.points_per_epoch should be less than or equal to 1000, not 1000000000."),
        ("model.depth", 10**5, "model.depth should be less than or equal to 1000, not 100000."),
        ("model.embed_dim", 10**400, "model.embed_dim should be less than or equal to 16384, not 1"),
        ("init.alpha", 1e308, "init.alpha should be less than or equal to 1000000, not 1e+308."),
        ("data.source", "x" * 10**5, f"{SOURCES} 'xxx"),
        ("run.seeds", [-1], "run.seeds.0 should be greater than or equal to 0, not -1."),
        ("run.variants", ["vit", "vit"], "run.variants: vit is listed twice."),
        (
            "run.variants",
            ["osa_rq"],
            "run.variants names 'osa_rq', which has no block under variants; did you mean 'osa_qr'?",
        ),
        ("run.variants", ["ViT-B"], "run.variants.0 should match pattern '^[a-z][a-z0-9_]*$', not 'ViT-B'."),
        # variants
        (
            "variants.osa_qr.method",
            "rq",
            "variants.osa_qr.method should be 'qr_literal', 'qr', ",
        ),
        (
            "variants.osa_qr.method",
            ABSENT,
            "variants.osa_qr: method is missing",
        ),
        (
            "variants.osa_qr.num_iterations",
            6,
            "variants.osa_qr: num_iterations belongs to method: newton_schulz or polar_express.",
        ),
        ("variants.vit.method", "qr", "variants.vit: method belongs to orthogonal"),
        (
            "variants.espa.attention_init",
            "xavier",
            "variants.espa: attention_init belongs to orthogonal or softmax",
        ),
        ("variants.osa_ns.epsilon", ABSENT, "variants.osa_ns: epsilon is missing; method newton_schulz needs it."),
        (
            "variants.espa.kernel_last",
            ABSENT,
            "variants.espa: signal_preserving attention needs kernel and kernel_last",
        ),
        ("variants.vit.kernel", "uniform", "variants.vit: kernel belongs to signal_preserving"),
        ("variants.espa.alpha_times_depth", 0.3, "variants.espa: alpha_times_depth belongs to orthogonal"),
        ("variants.espa_skip.skip", False, "variants.espa_skip: normalised_skip 1.4256 "),
        ("labels.osa_rq", "OSA", "labels names 'osa_rq', which has no block under variants; did you mean 'osa_qr'?"),
        (
            "labels.osa_qr",
            "a $\\foo$",
            "labels.osa_qr: 'a $\\\\foo$' has a $, which figures take for mathematics; leave it out.",
        ),
        # overrides
        (
            "variants.vit.overrides",
            {"trian": {}},
            "variants.vit.overrides.trian should be 'data', 'model', 'init' or 'train', not 'trian'.",
        ),
        (
            "variants.vit.overrides",
            {"train": {"epoch": 1}},
            "variants.vit.overrides: train.epoch is not a known key; did you mean 'epochs'?",
        ),
        (
            "variants.vit.overrides",
            {"train": {"eps": "1e-3"}},
            "variants.vit.overrides: train.eps: '1e-3' is read as text; ",
        ),
        (
            "variants.vit.overrides",
            {"model": {"patch_size": 3}},
            "variants.vit.overrides: patch_size 3 ",
        ),
        (
            "variants.vit.overrides",
            {"data": {"source": "sample"}},
            "variants.vit.overrides: data.source cannot be replaced: ",
        ),
        (
            "variants.osa_ns.overrides",
            {"model": {"num_heads": 1}},
            "variants.osa_ns.overrides: num_heads 1 ",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_key_and_remedy(path, value, expected):
    found = sentence(edited(tuple(path.split(".")), value))
    assert found.startswith(f"params.yaml: {expected}")
    assert found.endswith((".", "?"))
    assert "\n" not in found


def test_a_misspelt_key_is_named_rather_than_the_one_it_leaves_missing():
    raw = edited(("train", "learning_rate"), ABSENT)
    raw["train"]["learning_rat"] = 0.1
    assert sentence(raw) == "params.yaml: train.learning_rat is not a known key; did you mean 'learning_rate'?"


@pytest.mark.parametrize(
    "path, value, expected",
    [
        ("titel", "", "titel is not a known key; did you mean 'title'?"),
        ("recipe.train.epoch", 3, "recipe.train.epoch is not a known key; did you mean 'epochs'?"),
        ("table_2.vit", "97.2", "table_2.vit: '97.2' is read as text; write 97.2 without quotes."),
        (
            "left_open.0.key",
            "train.dcay_all",
            "left_open names 'train.dcay_all', which is not a key; did you mean 'train.decay_",
        ),
    ],
)
def test_a_mistake_in_the_papers_file_is_one_sentence_too(path, value, expected):
    keys = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    found = sentence(edited(keys, value, PAPER), load_paper)
    assert found.startswith(f"pipeline/paper.yaml: {expected}") and "\n" not in found


def test_the_papers_file_is_that_of_the_working_directory_or_else_that_beside_the_code():
    assert params.load_paper().title == PAPER["title"]
    load_paper(edited(("title",), "Another", PAPER))
    assert params.load_paper().title == "Another"


@pytest.mark.parametrize("section", params.SHARED)
def test_the_committed_parameters_are_the_papers_recipe(section):
    """What stands in README and report is the paper's result; whoever tries something else edits, and resets."""
    defaults = {"train": {"optimizer": "adamw", "warmup_steps": 0, "schedule": "constant"}}
    assert RAW[section] == PAPER["recipe"][section] | defaults.get(section, {})


def test_models_of_studies_follow_the_recipe_whatever_one_edits():
    before, paper = load(RAW), params.load_paper()
    after = load(edited(("train", "epochs"), 1))
    for settings in (before, after):
        config = params.resolve_recipe(settings, paper, "vit", {"train": {"eps": 1e-3}})
        assert (config.train.epochs, config.train.eps) == (PAPER["recipe"]["train"]["epochs"], 1e-3)


def test_overrides_are_read_from_the_command_line():
    texts = ["train.learning_rate=1e-3", "train.betas=[0.5, 0.9]", "init.head=zeros", "init.alpha_per_head=false"]
    expected = {"train": {"learning_rate": 0.001, "betas": [0.5, 0.9]}, "init": {"head": "zeros", "alpha_per_head": False}}
    assert params.parse_overrides(texts) == expected
    assert params.parse_overrides([]) == {}


def test_a_merge_replaces_leaves_and_keeps_their_neighbours():
    values = {"a": {"b": 1, "c": [1, 2]}, "d": None}
    assert params.deep_merge(values, {"a": {"c": [3]}, "d": {"e": 4}}) == {"a": {"b": 1, "c": [3]}, "d": {"e": 4}}
    assert values == {"a": {"b": 1, "c": [1, 2]}, "d": None}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "params.yaml: the file should be a block of keys, but is empty."),
        ("hello", "params.yaml: the file should be a block of keys, not 'hello'."),
        ("run:\n  seeds: [0\ntrain:\n", "params.yaml is not valid YAML in line 3: "),
        ("run: 1\ntrain: 2\nrun: 3\n", 'params.yaml is not valid YAML in line 3: found duplicate key "run"'),
        ("\ttrain: 2\n", "params.yaml is not valid YAML in line 1: found character '\\t' that cannot start any token"),
        ("run: 2026-02-30\n", "params.yaml is not valid YAML: day is out of range for month"),
        ("run: !!int abc\n", "params.yaml is not valid YAML: invalid literal for int() with base 10: 'abc'"),
        ("run: " + "[" * 1500, "params.yaml is not valid YAML: maximum recursion depth exceeded"),
        ("run: \0", "params.yaml is not valid YAML: unacceptable character #x0000"),
    ],
)
def test_a_file_that_is_no_block_of_keys_is_named(folder, text, expected):
    (folder / "params.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        params.load()
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_named(folder):
    (folder / "params.yaml").write_bytes(b"run: \xff\xfe")
    with pytest.raises(UserError, match="^params.yaml is not valid YAML: 'utf-8' codec can't decode byte 0xff"):
        params.load()


def test_a_missing_file_is_named():
    with pytest.raises(
        UserError, match="^params.yaml is missing: run from the repository root, or `git checkout params.yaml`.$"
    ):
        params.load()


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "+1e-3", "0.001", ".001", "0.1e-2"])
def test_every_way_to_write_a_number_is_a_number(folder, text):
    content = json.dumps(edited(("train", "learning_rate"), 0.123456789))
    (folder / "params.yaml").write_text(content.replace("0.123456789", text))
    assert params.load().train.learning_rate == 0.001


@pytest.mark.parametrize("value, written", [("0.000001", "1e-06"), ("1e-3", "0.001"), ("3", "3")])
def test_what_an_experiment_sets_is_what_we_read(folder, value, written):
    path = folder / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    apply_overrides(path, [f"train.learning_rate={value}"])  # of `dvc exp run -S`
    assert f"learning_rate: {written}\n" in path.read_text()
    assert params.load().train.learning_rate == float(value)


def test_overrides_replace_values_of_one_variant_alone():
    changes = {"train": {"learning_rate": 1e-5, "epochs": 3}, "model": {"depth": 2}, "data": {"pixel_scaling": "standard"}}
    before = load(RAW)
    after = load(edited(("variants", "vit", "overrides"), changes))
    for variant in after.variants:
        expected = params.resolve(before, variant).model_dump()
        if variant == "vit":
            for section, values in changes.items():
                expected[section] |= values
        assert params.resolve(after, variant).model_dump() == expected


def test_an_override_may_replace_what_belongs_to_the_variant():
    loaded = load(RAW)
    default, changed = (params.resolve(loaded, "osa_ns", of) for of in (None, {"variant": {"epsilon": 0.01}}))
    assert (default.variant.epsilon, changed.variant.epsilon) == (loaded.value("variants.osa_ns.epsilon"), 0.01)
    assert changed.variant.model_copy(update={"epsilon": default.variant.epsilon}) == default.variant


def test_an_unknown_variant_is_named():
    settings = load(RAW)
    with pytest.raises(UserError, match="^params.yaml has no variants.vitt; did you mean 'vit'\\?$"):
        params.resolve(settings, "vitt")


@pytest.mark.parametrize("section", ["run", *params.SHARED])
def test_the_schema_supplies_no_value(section):
    """Without any one key of the shared sections the file is refused: DVC tracks what is written, not a default.

    Keys that older records lack have one, the value that those runs had.
    """
    for key in RAW[section].keys() - {"optimizer", "warmup_steps", "schedule"}:
        assert sentence(edited((section, key), ABSENT)) == f"params.yaml: {section}.{key} is missing."


def places(raw: object, path: tuple = ()) -> list[tuple]:
    """The paths of all values in nested blocks and lists."""
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    return [path] * bool(path) + [place for key, value in items for place in places(value, (*path, key))]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1e-3", "vit", "{x}", "{"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


def refusal(action, *arguments) -> str:
    """What a user is told; nothing if all is well."""
    try:
        action(*arguments)
    except UserError as error:
        return str(error)
    return ""


@given(place=st.sampled_from(places(RAW)), value=VALUES)
@example(place=("train", "learning_rate"), value=10**400)
@example(place=("variants",), value={"1": 1})
@example(place=("theorem_2_2", "depths"), value=[0, {}])
def test_whatever_is_written_anywhere_is_taken_or_refused_in_one_sentence(place, value):
    message = refusal(load, edited(place, value))
    assert not message or (message.startswith("params.yaml: ") and "\n" not in message)


@given(place=st.sampled_from(places(PAPER)), value=VALUES)
def test_whatever_is_written_in_the_papers_file_is_taken_or_refused_in_one_sentence(place, value):
    message = refusal(load_paper, edited(place, value, PAPER))
    assert not message or (message.startswith("pipeline/paper.yaml: ") and "\n" not in message)


KEYS = ("train.epochs", "train.eps", "train.betas", "model.depth", "variant.skip", "init.head", "data", "train.x", "")


@given(key=st.sampled_from(KEYS), equals=st.sampled_from(["=", ""]), value=st.text(st.characters(codec="utf-8"), max_size=8))
@example(key="init.head", equals="=", value='"a\n\nb"')
@example(key="train.epochs", equals="=", value="2020-01-01")
@example(key="train.epochs", equals="=", value="!!python/name:os.system")
def test_whatever_is_set_on_the_command_line_is_taken_or_refused_in_one_sentence(key, equals, value):
    text = f"{key}{equals}{value}"
    message = refusal(lambda: params.resolve(SETTINGS, "vit", params.parse_overrides([text])))
    assert "\n" not in message.replace(text, "").replace(value, "")
