"""What the README says is so: its result is current, and its links, commands, parameters and snippets work."""

import ast
import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

from pipeline import params, report, train

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PACKAGES = {"yaml": "pyyaml", "ruamel.yaml": "ruamel-yaml"}  # where the module has another name than its package
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [text for name, text in FENCED.findall(README) if name == language]


def spans():
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", FENCED.sub("", README))


def commands():
    """Every command of the README as words; those around | and && are commands of their own."""
    for line in chain(spans(), *(block.splitlines() for block in blocks("sh"))):
        words = []
        for word in [*shlex.split(line), "|"]:
            if word in ("|", "&&"):
                yield words
                words = []
            else:
                words.append(word)


def dvc_commands():
    return [words[words.index("dvc") + 1 :] for words in commands() if "dvc" in words[:-1]]


def assignments():
    """For each command with `-S key=value` all of them."""
    found = [[words[i + 1] for i, word in enumerate(words[:-1]) if word == "-S"] for words in commands()]
    return [group for group in found if group]


def raw_params():
    return yaml.safe_load((ROOT / "params.yaml").read_text())


def merge(target, changes):
    """Puts `changes` into `target`, block by block."""
    for key, value in changes.items():
        if isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def load(raw, folder):
    (folder / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    return params.load(folder / "params.yaml")


def test_result_is_current():
    result = (ROOT / report.FOLDER / "result.md").read_text()
    assert report.with_result(README, result) == README, "run `make readme`"


def anchors(path):
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 5
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        assert not anchor or anchor in anchors(ROOT / path), link


def test_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for words in commands() if words[:1] == ["make"] and len(words) > 1}
    assert named >= {"quickstart", "test", "reproduce", "ui"}
    assert named <= targets


def test_modules_that_are_run_exist():
    modules = {words[i + 1] for words in commands() for i, word in enumerate(words[:-1]) if word == "-m"} - {"venv"}
    assert modules >= {"pipeline.fetch", "pipeline.train", "pipeline.tracking"}
    assert all((ROOT / f"{module.replace('.', '/')}.py").exists() for module in modules)


def test_dvc_takes_its_commands():
    from dvc.cli.parser import get_main_parser

    parser, found = get_main_parser(), dvc_commands()
    assert len(found) > 10
    for words in found:
        parser.parse_args(words)


def test_stages_exist():
    run = params.load(ROOT / "params.yaml").run
    stages = {f"train@{variant}-{seed}" for variant in run.variants for seed in run.seeds}
    named = set(re.findall(r"train@\w+-\d+", README))
    assert named
    assert named <= stages


@pytest.mark.parametrize("group", assignments(), ids=" ".join)
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


@pytest.mark.parametrize("block", blocks("yaml"))
def test_models_to_add_are_legal(block, tmp_path):
    raw, changes = raw_params(), yaml.safe_load(block)
    old, new = set(raw["variants"]), set(changes["variants"])
    assert not old & new
    assert set(changes["run"]["variants"]) == set(raw["run"]["variants"]) | new
    merge(raw, changes)
    settings = load(raw, tmp_path)
    for name in new:
        config = params.resolve(settings, name)
        model = train.build_model(config, 0)
        assert model(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
        assert len(model.blocks) == config.model.depth


def test_the_three_examples_are_what_the_text_says(tmp_path):
    raw = raw_params()
    for block in blocks("yaml"):
        merge(raw, yaml.safe_load(block))
    settings = load(raw, tmp_path)
    skip, deep, standard = (
        params.resolve(settings, name) for name in ("osa_skip", "osa_deep", "vit_noskip_nonorm_standard")
    )
    assert skip.variant.attention == deep.variant.attention == "orthogonal"
    assert skip.variant.skip and not deep.variant.skip
    assert deep.model.depth > settings.model.depth
    plain = params.resolve(settings, "vit_noskip_nonorm")
    assert plain.data.pixel_scaling == "unit"
    assert standard == plain.model_copy(update={"data": plain.data.model_copy(update={"pixel_scaling": "standard"})})


def test_snippets_run():
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert names["rotated"].shape == names["softmax"].shape
    norms = names["value"].square().sum(-2), names["rotated"].square().sum(-2)
    torch.testing.assert_close(*norms)  # a rotation of the tokens
    assert not torch.allclose(names["rotated"], names["value"], atol=0.01)
    assert names["softmax"].equal(F.scaled_dot_product_attention(names["query"], names["key"], names["value"]))
    names["y"].sum().backward()
    assert names["y"].shape == (2, 50, 64)


def test_layout_is_complete():
    tree = next(block for block in blocks("") if block.startswith("params.yaml"))
    folder, listed = "", set()
    for line in tree.splitlines():
        indent, names = re.match(r"( *)((?:[\w./]+(?:, )?)+)", line).groups()
        paths = [f"{folder if indent else ''}{name}" for name in names.split(", ")]
        folder = folder if indent else paths[0]
        listed.update(paths)
    made = {"runs/", "records/", "weights/"}  # by training
    assert all((ROOT / path).exists() for path in listed - made)
    modules = {str(path.relative_to(ROOT)) for name in ("osa", "pipeline") for path in (ROOT / name).glob("[!_]*.py")}
    assert modules <= listed


def test_files_in_the_text_exist():
    """But for those that a run makes, of which the report's are checked as links."""
    paths = {span for span in spans() if re.fullmatch(r"(osa|pipeline|notebooks|paper_outputs)/[\w./]+\.\w+", span)}
    assert len(paths) > 8
    assert all((ROOT / path).exists() for path in paths)


def test_training_needs_no_other_package():
    (named,) = (set(words[2:]) for words in commands() if words[:2] == ["pip", "install"])
    script = "import sys, pipeline.fetch, pipeline.train; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True).split()
    asked = re.search(r"for _package in (\(.*?\))", (ROOT / "pipeline/__init__.py").read_text())[1]
    needed = {PACKAGES.get(module, module) for module in [*modules, *ast.literal_eval(asked)]}
    direct = set(re.findall(r"^[\w.-]+", (ROOT / "requirements.in").read_text(), re.MULTILINE))
    assert {"torch", "numpy"} <= needed & direct <= named


def test_cpu_install_keeps_all_but_cuda():
    requirements = (ROOT / "requirements.txt").read_text().splitlines()
    first, rest = (words[2] for words in commands() if words[0] == "grep" and words[-1] == "requirements.txt")
    torches = [line for line in requirements if re.search(first, line)]
    left_out = [line for line in requirements if re.search(rest, line)]
    assert [line.split("==")[0] for line in torches] == ["torch", "torchvision"]
    assert all("linux" in line for line in left_out) and len(left_out) > 5
    assert not any(line.startswith(("nvidia", "cuda", "triton")) for line in set(requirements) - set(left_out))
