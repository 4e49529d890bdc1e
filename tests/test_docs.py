"""Links, commands, parameters and snippets of README and docs/ work."""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
import yaml

from pipeline.config import params, reading
from pipeline.core import files
from pipeline.core.files import ROOT
from pipeline.tools import tries
from pipeline.training.loop import build_model
from tests.pipeline import synthetic

PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
README = PAGES[ROOT / "README.md"]
PACKAGES = {"yaml": "pyyaml", "ruamel.yaml": "ruamel-yaml"}  # where the module has another name than its package
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [text for page in PAGES.values() for name, text in FENCED.findall(page) if name == language]


def spans():
    """Texts between single backticks."""
    return [span for page in PAGES.values() for span in re.findall(r"`([^`\n]+)`", FENCED.sub("", page))]


def commands():
    """Every command as words; those around | and && are commands of their own, and what stands before them is left out."""
    for line in chain(spans(), *(block.splitlines() for block in blocks("sh"))):
        words = []
        for word in [*shlex.split(line), "|"]:
            if word in ("|", "&&"):
                yield words
                words = []
            elif words or not re.fullmatch(r"[A-Z_]+=.*", word):  # a variable of the environment
                words.append(word)


def options(name):
    """Values of an option, for each command that has it."""
    found = [[words[i + 1] for i, word in enumerate(words[:-1]) if word == name] for words in commands()]
    return [group for group in found if group]


def raw_params():
    return yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))


def load(raw, folder):
    (folder / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    return params.load(folder / "params.yaml")


def test_links_lead_somewhere_and_to_every_page():
    for page, text in PAGES.items():
        for link in (link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link):
            assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"
    pages = {str(page.relative_to(ROOT)) for page in PAGES if page.parent != ROOT}
    assert {page for page in pages if f"({page})" not in README} == set()


def test_what_is_run_exists():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {words[1] for words in commands() if words[:1] == ["make"] and len(words) > 1} <= targets
    modules = {words[2] for words in commands() if words[:2] == ["python", "-m"]}
    assert modules and {module for module in modules if importlib.util.find_spec(module) is None} == set()


def test_dvc_takes_its_commands():
    from dvc.cli.parser import get_main_parser

    parser, run = get_main_parser(), params.load(ROOT / "params.yaml").run
    content = reading.read_yaml(ROOT / "dvc.yaml")
    stages = content["stages"].keys() | {"{}"}  # xargs fills it in
    stages |= {f"train@{variant}-{seed}" for variant in run.variants for seed in run.seeds}
    stages |= {f"evaluate@{variant}" for variant in run.variants}
    stages |= {f"{group}@{study}" for group in ("analytic", "on_images") for study in content["stages"][group]["foreach"]}
    for words in (words[words.index("dvc") + 1 :] for words in commands() if "dvc" in words[:-1]):
        arguments = parser.parse_args(words)
        if arguments.cmd in ("repro", "commit"):
            assert stages >= {each for each in arguments.targets if not (ROOT / each).exists()}, words


@pytest.mark.parametrize("group", options("-S"), ids=" ".join)
def test_values_that_an_experiment_sets_are_legal(group, tmp_path):
    raw = raw_params()
    for assignment in group:
        *path, last = assignment.split("=")[0].split(".")
        section = raw
        for key in path:
            section = section[key]
        before, section[last] = section[last], yaml.safe_load(assignment.split("=", 1)[1])
        assert section[last] != before
    load(raw, tmp_path)


@pytest.mark.parametrize("group", options("--set"), ids=" ".join)
def test_values_that_a_try_sets_are_legal(group):
    settings = params.load(ROOT / "params.yaml")
    for _, config in tries.grid(["osa_qr"], group, [0], settings):
        assert config != params.resolve(settings, "osa_qr")


@pytest.mark.parametrize("block", blocks("yaml"))
def test_models_to_add_are_legal(block, tmp_path):
    raw, changes = raw_params(), yaml.safe_load(block)
    old, new = set(raw["variants"]), set(changes["variants"])
    assert not old & new
    assert set(changes["run"]["variants"]) == set(raw["run"]["variants"]) | new
    settings = load(synthetic.deep_merge(raw, changes), tmp_path)
    for name in new:
        config = params.resolve(settings, name)
        model = build_model(config, 0)
        assert model(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
        assert len(model.blocks) == config.model.depth != settings.model.depth
        assert config.variant.attention == "orthogonal" and config.variant.skip  # as the text says


@pytest.mark.slow
def test_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README and docs", "exec"), names)
    assert names["rotated"].shape == names["softmax"].shape
    norms = names["value"].square().sum(-2), names["rotated"].square().sum(-2)
    torch.testing.assert_close(*norms)  # a rotation of the tokens
    assert not torch.allclose(names["rotated"], names["value"], atol=0.01)
    assert names["softmax"].equal(F.scaled_dot_product_attention(names["query"], names["key"], names["value"]))
    assert len(names["deep"].blocks) == 72 and names["deep"](torch.zeros(1, 1, 28, 28)).isfinite().all()
    assert (names["logits"].shape, names["y"].shape, names["tokens"].shape) == ((8, 10), (2, 50, 64), (2, 50, 64))


@pytest.mark.slow
@pytest.mark.usefixtures("starts_warm")
def test_ones_own_images_are_trained_on(tmp_path, monkeypatch):
    """The section's code and commands, with the values that it names in params.yaml."""
    monkeypatch.chdir(tmp_path)
    section = PAGES[ROOT / "docs/exploring.md"].partition("## Your own images")[2].partition("\n## ")[0]
    snippets = dict(FENCED.findall(section))
    exec(compile(snippets["python"], "Your own images", "exec"), {})
    raw = raw_params()
    for span in re.findall(r"`(source|path|num_classes): (\w+)`", section):
        raw["model" if span[0] == "num_classes" else "data"][span[0]] = yaml.safe_load(span[1])
    assert load(raw, tmp_path).data.path == "my_images"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for line in snippets["sh"].splitlines():
        subprocess.run([sys.executable, *shlex.split(line)[1:]], env=environment, check=True)
    (record,) = tmp_path.glob("paper_outputs/runs/tries/*/0/record.json")
    assert '"source": "folder"' in record.read_text(encoding="utf-8")


def test_the_page_on_depth_has_the_numbers_of_its_study():
    page = PAGES[ROOT / "docs/depth.md"]
    study = files.read_json(ROOT / "paper_outputs/numbers/research/isometry.json")
    link = "[one matrix](#the-remedy-initialise-both-layers-from-one-matrix)"
    for draw, label in {"suo": "independent", "isometric": f"from {link}"}.items():
        spreads = [f"{row['sd']:.2f}" for row in study["rows"] if row["draw"] == draw and row["depth"] >= 36]
        assert len(spreads) == 3 and f"| W₁ and W₂ {label}, measured | {' | '.join(spreads)} |" in page
    labels = {"osa_shaped": "OSA (shaped): W₁ and W₂ independent", "osa_iso": "OSA (isometric): W₁ and W₂ from one matrix"}
    for model, label in labels.items():
        (cells,) = (line.split(" | ")[1:] for line in page.splitlines() if line.startswith(f"| {label} |"))
        least = [f"{min(row['gradient']):,.0f}" for row in study["gradients"] if row["model"] == model]
        assert all(cell.startswith(f"{number} to ") for cell, number in zip(cells, least, strict=True) if "⁵" not in cell)
    slope = study["slopes"]["suo"]["depth"]
    power = f"{slope['mean']:.2f} on average ({slope['min']:.2f} at width 16 to {slope['max']:.2f} at width 128)"
    assert f"to the power {power}" in " ".join(page.split())


def test_files_in_the_text_and_in_the_layout_exist():
    (tree,) = (block for block in blocks("") if block.startswith("params.yaml"))
    listed = {line.split()[0] for line in tree.splitlines()}
    assert listed >= {f"{path.parent.name}/" for path in ROOT.glob("*/*.py")}
    named = {span for span in spans() if re.fullmatch(r"(osa|pipeline|notebooks|docs)/[a-z_0-9./]+\.\w+", span)}
    made = {"paper_outputs/weights/"}  # training makes it
    assert {path for path in (listed | named) - made if not (ROOT / path).exists()} == set()


@pytest.mark.slow
def test_training_needs_no_other_package():
    (named,) = (set(words[2:]) for words in commands() if words[:3] == ["pip", "install", "torch"])
    script = "import sys, pipeline.data.fetch, pipeline.tools.train as t; t.params.load(); print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True).split()
    asked = re.search(r"for _package in (\(.*?\))", (ROOT / "pipeline/__init__.py").read_text(encoding="utf-8"))[1]
    needed = {PACKAGES.get(module, module) for module in [*modules, *ast.literal_eval(asked)]}
    direct = set(re.findall(r"^[\w.-]+", (ROOT / "requirements.in").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"torch", "numpy"} <= needed & direct <= named
