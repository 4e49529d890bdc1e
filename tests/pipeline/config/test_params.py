"""params.yaml and paper.yaml: a mistake is one sentence that names key and cause, and no value is made up."""

import copy
import json
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import osa.models
from pipeline import studies
from pipeline.config import params, reading
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT

WRITTEN = reading.read_yaml(ROOT / "params.yaml")
RAW = params.with_library(WRITTEN)
STUDIES = reading.read_yaml(ROOT / "pipeline/studies/paper/params.yaml")
PAPER = reading.read_yaml(ROOT / "pipeline/paper.yaml")
ABSENT = "(absent)"  # as text, so that every process names its tests alike


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def edited(path: tuple, value, raw: dict = RAW) -> dict:
    """The repository's parameters with one place changed or, for ABSENT, removed."""
    raw = place = copy.deepcopy(raw)
    *parents, last = path
    for key in parents:
        place = place[key]
    if value is ABSENT:
        del place[last]
    else:
        place[last] = value
    return raw


def load(raw: object) -> params.Params:
    files.write_text("params.yaml", json.dumps(raw))  # JSON is YAML whose text is always in quotes
    return params.load()


def load_paper(raw: object) -> params.Paper:
    files.write_text("pipeline/paper.yaml", json.dumps(raw))
    return params.load_paper()


def load_study(raw: object):
    files.write_text("pipeline/studies/paper/params.yaml", json.dumps(raw))
    return studies.settings("theorem_2_2")


def refusal(action, *arguments) -> str:
    """The message of a refused input; nothing if all is well."""
    try:
        action(*arguments)
    except UserError as error:
        return str(error)
    return ""


def test_the_committed_parameters_are_valid_and_know_every_model_of_the_library():
    settings = params.load(ROOT / "params.yaml")
    assert set(settings.run.variants) <= set(WRITTEN["variants"]) <= set(settings.variants) == set(osa.models.MODELS)
    for name, options in osa.models.MODELS.items():
        known = settings.variants[name].model_dump()
        assert {key: value for key, value in options.items() if key in known and key != "init"}.items() <= known.items()


@pytest.mark.parametrize("section", params.SHARED_SECTIONS)
def test_the_committed_parameters_are_the_papers_recipe(section):
    added = {"optimizer", "warmup_steps", "schedule"}  # absent from the recipe, with the paper's values
    recipe = PAPER["readings"]["torch_defaults"][section]
    assert {key: value for key, value in RAW[section].items() if key not in added} == recipe
    if section == "train":
        assert [RAW[section][key] for key in sorted(added)] == ["adamw", "constant", 0]


def test_a_model_of_the_library_needs_its_block_to_be_a_stage_and_the_message_holds_it():
    raw = edited(("run", "variants"), ["osa_shaped"], WRITTEN)
    message = refusal(load, raw)
    assert "run.variants" in message and "osa_shaped" in message
    files.write_text("block.yaml", message.partition("under variants: ")[2].rstrip("."))
    raw["variants"] |= reading.read_yaml("block.yaml")
    assert load(raw).variants["osa_shaped"] == params.load(ROOT / "params.yaml").variants["osa_shaped"]


NESTED = "variants.vit.overrides"
MISTAKES = [  # path, value, words of the message besides the path
    ("trian", {}, ["train"]),
    ("train.epochz", 3, ["is unknown", "epochs"]),
    ("variants.vit.skips", True, ["is unknown", "skip"]),
    ("train.epochs", ABSENT, ["missing"]),
    # types
    ("train.learning_rate", "1e-3", ["text", "without quotes"]),
    ("train.epochs", "\uff13", ["write 3 without quotes"]),  # a full-width digit
    ("train.learning_rate", True, ["number"]),
    ("train.epochs", 1.5, ["whole number"]),
    ("train.epochs", None, ["whole number", "empty"]),
    ("variants.vit.skip", "yes", ["true or false"]),
    ("run.seeds", 3, ["list"]),
    ("train", None, ["block", "empty"]),
    ("variants.vit.overrides", [1], ["block"]),
    # values
    ("train.learning_rate", 0, ["greater than 0"]),
    ("train.betas", [0.9], ["2 or more"]),
    ("data.source", "mnits", ["mnist", "cifar10"]),
    ("model.patch_size", 5, ["28"]),
    ("model.embed_dim", 10**400, ["16384"]),
    ("model.num_classes", 7, ["10"]),
    ("run.seeds", [], ["1 or more"]),
    ("run.seeds", [2, 3, 5, 3], ["3", "twice"]),
    ("run.seeds", ["0; touch X #"], ["whole number"]),
    ("run.variants", ["osa_rq"], ["variants", "osa_qr"]),
    ("run.variants", ["vit; touch X #"], ["pattern"]),
    ("labels.vit", "a $\\foo$", ["$"]),
    ("labels.vit", "", ["words"]),
    ("labels.vit", " ", ["words"]),
    ("labels.vit", "ViT  (two)", ["single spaces"]),
    ("labels.vit", "ViT\nsecond", ["words"]),
    ("labels.vit", "ViT\u200b", ["words"]),
    ("labels.vit", "_ViT", ["_", "legends"]),
    ("labels.vit", "ViT 視", ["視", "figures cannot show"]),
    ("labels.vit", "ויט", ["figures cannot show"]),
    # variants
    ("variants.osa_qr.method", ABSENT, ["missing"]),
    ("variants.osa_ns.epsilon", ABSENT, ["missing"]),
    ("variants.osa_qr.num_iterations", 6, ["newton_schulz"]),
    ("variants.vit.method", "qr", ["orthogonal"]),
    ("variants.vit.penalty", "VAR-I", ["penalty_weight"]),
    # overrides
    (NESTED, {"trian": {}}, ["train"]),
    (NESTED, {"model": {"patch_size": 3}}, ["28"]),
    (NESTED, {"data": {"source": "sample"}}, ["cannot"]),
]


@pytest.mark.parametrize("path, value, words", MISTAKES, ids=lambda value: str(value)[:30] if value else "")
def test_a_mistake_is_one_sentence_with_key_and_cause(path, value, words):
    *parents, key = path.split(".")
    message = refusal(load, edited((*parents, key), value))
    assert message.startswith("params.yaml") and message.endswith((".", "?")) and "\n" not in message
    for word in [key, *words]:
        assert word in message, message


@pytest.mark.parametrize(
    "load, raw, keys, value, words",
    [
        (load_study, STUDIES, ("theorem_2_2", "depths"), [0, "1"], ["theorem_2_2", "depths", "text"]),
        (load_paper, PAPER, ("readings", "first", "train", "epoch"), 3, ["epochs"]),
        (load_paper, PAPER, ("left_open", 0, "key"), "train.dcay_all", ["decay_all"]),
    ],
)
def test_a_mistake_in_another_file_is_one_sentence_too(load, raw, keys, value, words):
    message = refusal(load, edited(keys, value, raw))
    assert message.startswith("pipeline/") and "\n" not in message
    assert all(word in message for word in words)


def test_a_misspelt_key_is_named_rather_than_the_one_it_leaves_missing():
    raw = edited(("train", "learning_rate"), ABSENT)
    raw["train"]["learning_rat"] = 0.1
    assert "train.learning_rat is unknown" in refusal(load, raw)


def test_the_papers_file_is_that_of_the_working_directory_or_else_that_beside_the_code():
    assert params.load_paper().title == PAPER["title"]
    load_paper(edited(("title",), "Another", PAPER))
    assert params.load_paper().title == "Another"


@pytest.mark.parametrize("section", ["run", *params.SHARED_SECTIONS])
def test_the_schema_supplies_no_value(section):
    """DVC tracks what is written, not a default. Keys that older records lack have one, the value of those runs."""
    for key in RAW[section].keys() - {"optimizer", "warmup_steps", "schedule"}:
        message = refusal(load, edited((section, key), ABSENT))
        assert f"{section}.{key}" in message and "missing" in message


def test_models_of_studies_follow_the_recipe_whatever_one_edits():
    settings = load(edited(("train", "epochs"), 1))
    config = params.resolve_recipe(settings, params.load_paper(), "vit", {"train": {"eps": 1e-3}})
    assert (config.train.epochs, config.train.eps) == (PAPER["readings"]["first"]["train"]["epochs"], 1e-3)


def test_a_study_trains_by_the_reading_that_it_names():
    settings, paper = params.load(ROOT / "params.yaml"), params.load_paper()
    config = params.resolve_recipe(settings, paper, "vit", reading="torch_defaults")
    tried = studies.settings("recipes").runs["torch_defaults_vit"]
    assert params.resolve_recipe(settings, paper, "vit", tried.set).init == config.init
    assert config.data.pixel_scaling == "standard" and config.train == params.resolve_recipe(settings, paper, "vit").train
    message = refusal(lambda: params.resolve_recipe(settings, paper, "vit", reading="torch_default"))
    assert "readings.torch_default" in message and "did you mean 'torch_defaults'" in message


def test_overrides_replace_values_of_one_variant_alone():
    changes = {"train": {"learning_rate": 1e-5, "epochs": 3}, "model": {"depth": 2}, "data": {"pixel_scaling": "standard"}}
    before, after = load(WRITTEN), load(edited(("variants", "vit", "overrides"), changes))
    for variant in after.variants:
        expected = params.resolve(before, variant).model_dump()
        if variant == "vit":
            for section, values in changes.items():
                expected[section] |= values
        assert params.resolve(after, variant).model_dump() == expected


def test_a_model_of_the_library_that_does_not_fit_is_refused_where_it_is_used():
    settings = load(edited(("model", "depth"), 1, WRITTEN))
    assert "normalised_skip" in refusal(params.resolve, settings, "espa_skip")
    assert params.resolve(settings, "vit").model.depth == 1


def test_orthogonal_attention_needs_two_heads_and_an_unknown_variant_is_named():
    settings = load(edited(("model", "num_heads"), 2))
    assert "num_heads" in refusal(params.resolve, settings, "osa_qr", {"model": {"num_heads": 1}})
    assert params.resolve(settings, "vit", {"model": {"num_heads": 1}}).model.num_heads == 1
    message = refusal(params.resolve, settings, "vitt")
    assert "variants.vitt" in message and "'vit'" in message


def test_overrides_on_the_command_line_are_read_and_written_back():
    texts = ["train.learning_rate=1e-3", "train.betas=[0.5, 0.9]", "init.head=zeros", "init.alpha_per_head=false"]
    expected = {"train": {"learning_rate": 0.001, "betas": [0.5, 0.9]}, "init": {"head": "zeros", "alpha_per_head": False}}
    assert params.parse_overrides(texts) == expected
    assert params.parse_overrides(params.as_options(expected)[1::2]) == expected
    assert "train.betas" in refusal(params.parse_overrides, [*texts, "train.betas=[0.5, 0.8]"]), "one of them would be lost"


NO_BLOCKS = {b"": "empty", b"hello": "block", b"run: 1\ntrain: 2\nrun: 3\n": "line 3", b"run: 2026-02-30\n": "YAML"}
NO_BLOCKS |= {b"run: " + b"[" * 600: "YAML", b"run: \xff\xfe": "YAML"}


def test_a_file_that_is_no_block_of_keys_is_named():
    assert "missing" in refusal(params.load)
    for content, word in NO_BLOCKS.items():
        Path("params.yaml").write_bytes(content)
        message = refusal(params.load)
        assert message.startswith("params.yaml") and word in message and "\n" not in message


def test_a_merge_conflict_is_told_with_its_line_and_a_remedy_that_works_in_it():
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, *arguments], check=arguments[0] != "merge", capture_output=True)

    original = (ROOT / "params.yaml").read_text(encoding="utf-8")
    git("init", "--quiet", "--initial-branch=main")
    for checkout, epochs in ([], 10), (["-b", "other"], 20), (["main"], 30):
        if checkout:
            git("checkout", "--quiet", *checkout)
        files.write_text("params.yaml", original.replace("epochs: 10", f"epochs: {epochs}"))
        git("add", "--all"), git("commit", "--quiet", "--message=edit")
    git("merge", "other")
    lines = Path("params.yaml").read_text(encoding="utf-8").splitlines()
    message = refusal(params.load)
    assert f"merge conflict marker on line {lines.index('<<<<<<< HEAD') + 1}: " in message and "\n" not in message
    for command in re.findall(r"`(.*?)`", message):
        subprocess.run(command.split(), check=True, capture_output=True)
    assert params.load().train.epochs == 30
    files.write_text("params.yaml", "\n".join(line for line in lines if not line.startswith("<<<<<<<")))
    assert "merge conflict" in refusal(params.load)  # half mended is still one


def test_a_label_is_shown_as_it_is_written():
    for label in ("OSA (12 blocks)", "ViT – α = 0.1", "Größe ≤ 3", "<b>*x*</b> & y|z"):
        assert load(edited(("labels", "vit"), label)).label("vit") == label


@pytest.mark.parametrize("text", ["1e-3", "+1E-3", ".001", "0.1e-2"])
def test_every_way_to_write_a_number_is_a_number(text):
    content = json.dumps(edited(("train", "learning_rate"), 0.123456789))
    files.write_text("params.yaml", content.replace("0.123456789", text))
    assert params.load().train.learning_rate == 0.001


@pytest.mark.parametrize("value", ["0.000001", "1e-3", "3"])
def test_what_an_experiment_sets_is_what_we_read(value):
    files.write_text("params.yaml", (ROOT / "params.yaml").read_text(encoding="utf-8"))
    from dvc.utils.hydra import apply_overrides

    apply_overrides("params.yaml", [f"train.learning_rate={value}"])  # the parser of `dvc exp run -S`
    assert params.load().train.learning_rate == float(value)


def places(raw: object, path: tuple = ()) -> list[tuple]:
    """The paths of all values in nested blocks and lists."""
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    return [path] * bool(path) + [place for key, value in items for place in places(value, (*path, key))]


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["1e-3", "vit"])
VALUES = st.recursive(
    LEAVES, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3)
)


@pytest.mark.parametrize(
    "path, raw, read",
    [
        ("params.yaml", WRITTEN, load),
        ("pipeline/paper.yaml", PAPER, load_paper),
        ("pipeline/studies/paper/params.yaml", STUDIES, load_study),
    ],
)
@given(data=st.data(), value=VALUES)
def test_any_value_anywhere_is_taken_or_refused_in_one_sentence(path, raw, read, data, value):
    message = refusal(read, edited(data.draw(st.sampled_from(places(raw))), value, raw))
    assert not message or (message.startswith(path) and "\n" not in message)


@pytest.mark.parametrize(
    "read, raw, place, value",
    [
        (load, WRITTEN, ("train", "learning_rate"), 10**400),
        (load, WRITTEN, ("variants",), {"1": 1}),
        (load, WRITTEN, ("run",), {"\ud800": None}),
        (load_study, STUDIES, ("theorem_2_2", "depths"), [0, {}]),
    ],
)
def test_values_that_libraries_stumble_over_are_refused_in_one_sentence(read, raw, place, value):
    message = refusal(read, edited(place, value, raw))
    assert "params.yaml" in message and "\n" not in message


KEYS = ("train.epochs", "train.betas", "model.depth", "variant.skip", "init.head", "data", "train.x", "")


@given(key=st.sampled_from(KEYS), equals=st.sampled_from(["=", ""]), value=st.text(st.characters(codec="utf-8"), max_size=8))
@example(key="init.head", equals="=", value='"a\n\nb"')
@example(key="train.epochs", equals="=", value="!!python/name:os.system")
def test_anything_on_the_command_line_is_taken_or_refused_in_one_sentence(key, equals, value):
    text, settings = f"{key}{equals}{value}", params.load(ROOT / "params.yaml")
    message = refusal(lambda: params.resolve(settings, "vit", params.parse_overrides([text])))
    assert "\n" not in message.replace(text, "").replace(value, "")


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["train@osa_qr-10", "--no-tracking"], ["osa_qr", "10", "--no-tracking"]),
        (["quickstart/dvc.yaml:train@vit-0"], ["vit", "0"]),
        (["evaluate@vit_noskip"], ["vit_noskip"]),
        (["vit", "0", "--set", "data.path=train@b-1"], ["vit", "0", "--set", "data.path=train@b-1"]),
        (["train@--set-x; touch X\n"], ["", "", "set", "x; touch X\n"]),  # of which none is an option
        ([], []),
    ],
)
def test_the_name_of_a_stage_stands_for_its_arguments(arguments, expected):
    assert params.without_stage(arguments) == expected
