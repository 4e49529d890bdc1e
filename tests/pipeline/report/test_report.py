"""The pages: made from the committed files, byte for byte, within their budgets, with no number typed and no sentence in
Python."""

import ast
import copy
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import osa
from pipeline import studies
from pipeline.config import params
from pipeline.core import files
from pipeline.core.files import ROOT
from pipeline.report import __main__ as report
from pipeline.report import figures, page, table_2
from pipeline.report.numbers import interval
from pipeline.report.page import TEMPLATES, to_html
from pipeline.results import runs
from pipeline.statistics.intervals import one_more_run, summary_of
from pipeline.statistics.verdicts import judge
from pipeline.studies import charts
from pipeline.studies.lab import Lab
from pipeline.training.run import Run

BUDGETS = {"report": (3000, 800_000), "research": (6000, 800_000)}  # words, bytes of HTML
MADE_FROM = ("evaluations", "benchmarks", "runs", "studies", "tables")
# Texts that may have digits: names of parts of papers, years, data sets, and identifiers
NAMES = re.compile(
    r"(Table|Figures?|Sections?|Theorems?|Eq\.|Lemma|Remark|[Ff]ootnote|Appendix [A-Z]\.?|arXiv:|ICLR|ICML|NeurIPS|IJCNLP)"
    r" ?[\d.]+(?:(?:,| and| to) [\d.]+)*"
    r"|(He|Zhang|Ji|Martens|Saxe|Pennington|Hanin|Balduzzi|Day|Brantner|Lapenna)[^|\n]{0,40}? \(?(19|20)\d\d"
    r"|CIFAR-10|b?float(16|32|64)|W[12]|[A-Z]-?\d|[₀-₉²³]"
    r"|[=−(] ?1\b|\b1(?= −|/[A-Z(])|\b2(?=[α-ω‖(])"  # parts of formulas: q = 1, κ − 1, 1/N, (1 − α), 2α
)


def workspace(folder: Path) -> None:
    """Links the inputs of the pages into a folder of its own."""
    for name in ("params.yaml", "osa", "docs", "dvc.yaml", "dvc.lock"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "pipeline", folder / "pipeline")  # locks behind a link belong to another workspace
    shutil.copy(ROOT / "README.md", folder)
    (folder / "paper_outputs").mkdir()
    for name in MADE_FROM:
        (folder / "paper_outputs" / name).symlink_to(ROOT / "paper_outputs" / name)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Both pages and README's blocks, from the committed files."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        workspace(folder)
        report.make_page("paper")
        report.make_page("research")
        ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        command = [sys.executable, "-OO", "-m", "pipeline.report", "readme"]  # without docstrings too
        subprocess.run(command, env=os.environ | ascii_alone, check=True)
    return folder / "paper_outputs"


def test_one_more_run_lies_above_an_end_of_its_interval_as_often_as_it_should():
    values = [96.2, 96.9, 97.1, 96.5]
    low, high = one_more_run(values)
    shares = [table_2.share_above(values, level) for level in (low, np.mean(values), high)]
    assert shares == pytest.approx([0.975, 0.5, 0.025])


def test_all_means_below_the_papers_are_less_likely_than_each():
    row = {"accuracies": [96.0, 97.0, 98.0], "paper": 97.5, "difference": -0.5, "is_within": True}
    row["one_more_run"] = {"low": 92.0, "high": 100.0}
    unknown = {"is_within": None}
    one, five = (table_2.against_paper([row] * n + [unknown]) for n in (1, 5))
    assert one["p"] == pytest.approx(2 * table_2.share_above(row["accuracies"], 97.5)) and five["p"] < one["p"]
    assert (five["models"], five["below"], five["widest"]) == (5, 5, 8)
    balanced = table_2.against_paper([row, row | {"paper": 96.5, "difference": 0.5}])
    assert balanced["p"] == pytest.approx(1) and balanced["below"] == 1
    assert np.isnan(table_2.against_paper([unknown])["p"])


def test_each_section_of_the_research_page_names_the_recipe_of_its_first_study():
    markdown = (ROOT / "paper_outputs/research.md").read_text(encoding="utf-8")
    named = {"first": "first reading", "torch_defaults": "Table 2's recipe"}
    sections = [each for each in re.split(r"\n(?=## )", markdown) if "<small>Numbers" in each]
    for section in sections:
        first_line, study = section.split("\n")[2], re.search(r"numbers/research/(\w+)\.json", section)[1]
        assert named[studies.reading_of(study)] in first_line, study
    assert len(sections) > 5


def test_a_mistake_in_a_study_shows_itself(monkeypatch):
    """Only what the project raises on purpose becomes a sentence."""
    monkeypatch.chdir(ROOT)
    study = studies.get("theorem_4_2")
    broken = dataclasses.replace(study, summarise=lambda *arguments: None.missing)
    monkeypatch.setattr(studies, "get", lambda name: broken)
    with pytest.raises(AttributeError, match="missing"):
        report.main(["paper", "--only", "theorem_4_2"])


WEIGHTS = sorted((ROOT / "paper_outputs/weights/table_2").rglob("*.safetensors"))
ONE_A_MODEL = list({path.parent: path for path in WEIGHTS}.values())
OTHERS = [path for path in WEIGHTS if path not in ONE_A_MODEL]


@pytest.mark.parametrize("paths", [ONE_A_MODEL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["one a model", "others"])
def test_trained_weights_load_by_the_library_alone(paths, monkeypatch, subtests):
    monkeypatch.chdir(ROOT)
    assert paths
    for path in paths:
        name, seed = path.parent.name, int(path.stem)
        with subtests.test(name=name, seed=seed):
            images, run = torch.rand(3, 1, 28, 28), Run(name, seed)
            theirs = run.load_model(run.record().config)
            with torch.no_grad():
                assert osa.load_pretrained(path, name=name)(images).equal(theirs(images))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_pages_show_whatever_runs_are_there(share, tmp_path, monkeypatch):
    """Missing runs leave no row of dashes. Studies that train nothing are as committed."""
    monkeypatch.chdir(tmp_path)
    workspace(tmp_path)
    row, summarise, random = runs.run_row, report.summary_of_study, np.random.default_rng(1)

    def of_some(name: str, *others) -> dict:
        committed = next((ROOT / "paper_outputs/numbers").glob(f"*/{name}.json"))
        return summarise(name, *others) if studies.get(name).trainings else files.read_json(committed)

    monkeypatch.setattr(runs, "run_row", lambda *run: row(*run) if random.random() < share else {"status": "missing"})
    monkeypatch.setattr(report, "summary_of_study", of_some)
    for name in BUDGETS:
        report.make_page({"report": "paper"}.get(name, name))
        lines = Path(f"paper_outputs/{name}.md").read_text(encoding="utf-8").splitlines()
        assert not [
            line for line in lines if re.fullmatch(r"\|[^|]*(\| – )+\|", line) or re.search(r"\b(nan|None\b[^.])", line)
        ]


@pytest.mark.slow
def test_a_demonstration_needs_tables_and_runs_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paper_outputs").mkdir()
    for name in ("params.yaml", "osa", "pipeline", "paper_outputs/tables", "paper_outputs/runs"):
        (tmp_path / name).symlink_to(ROOT / name)
    report.main(["demonstration"])
    markdown = Path("paper_outputs/report.md").read_text(encoding="utf-8")
    accuracy = files.read_json(Path("paper_outputs/numbers/demonstration/table_2.json"))["table_2"][0]["ours"]["mean"]
    assert f"{accuracy:.1f}" in markdown and "verdict" not in markdown
    page = Path("paper_outputs/report.html").read_text(encoding="utf-8")
    assert "figure-1-data" in page and "<svg" in page


@pytest.mark.slow
def test_the_committed_pages_are_what_the_committed_files_give(written):
    made = [path.relative_to(written) for path in written.rglob("*") if path.is_file()]
    paths = [path for path in made if path.parts[0] not in MADE_FROM] + [Path("../README.md")]
    assert {Path("report.html"), Path("report.md"), Path("research.html"), Path("figure_1.svg")} <= set(paths)
    different = [
        str(path) for path in paths if (written / path).read_bytes() != (ROOT / "paper_outputs" / path).read_bytes()
    ]
    assert not different, "run `python -m pipeline report paper`, `… research` and `make readme`"


def with_fresh_seeds(numbers: dict, difference: float) -> dict:
    """The pages' numbers as they would be if OSA (QR) were `difference` points above ViT in all fresh seeds."""
    numbers = copy.deepcopy(numbers)
    searched = [{"rate": 0.001, "loss": 0.25}, {"rate": 0.003, "loss": None}]
    for name, seeds in (("decision", 11), ("own_rate", 5)):
        vit = [97 + 0.01 * seed for seed in range(seeds)]
        osa_qr = [accuracy + difference for accuracy in vit]
        rows = [
            {"variant": model, "accuracy": summary_of(values), "rate": 0.001, "is_at_the_edge": True, "searched": searched}
            for model, values in (("osa_qr", osa_qr), ("vit", vit))
        ]
        numbers[name] |= page.to_json({"verdict": judge(osa_qr, vit, limit=-0.5), "rows": rows})
    row = numbers["section_5"]["claims"]["osa_matches_vit"]["osa_qr_vs_vit"]
    row |= {"before": row["verdict"], "verdict": numbers["decision"]["verdict"]}
    numbers["section_5"]["headline"]["adjusted"] |= {"osa_matches_vit": 0.123, "osa_matches_vit_at_own_rates": 0.321}
    return numbers


def test_fresh_seeds_answer_the_central_claim_whatever_comes_out():
    """In the answer, in the table of claims, which keeps the earlier verdict, and in a section of their own."""
    templates = page.template_environment(Lab("report", params.load(ROOT / "params.yaml"), params.load_paper()).label)
    committed = {path.stem: files.read_json(path) for path in (ROOT / "paper_outputs/numbers").glob("*/*.json")}
    central = templates.from_string(
        '{% from "paper/comparisons.j2" import central %}{{ central(section_5.claims, own_rate, ablations, level, "") }}'
    )
    outcomes = [
        (0.2, "reproduced", "confirmed", "it holds"),
        (-0.5, "open", "undecided", "it is undecided"),
        (-1.3, "contradicted", "not confirmed", "it fails"),
    ]
    for difference, word, here, said in outcomes:
        numbers = with_fresh_seeds(committed, difference) | {"level": 0.05}
        row = numbers["section_5"]["claims"]["osa_matches_vit"]["osa_qr_vs_vit"]
        answer = central.render(numbers)
        assert answer.count(f"{abs(difference):.2f} points") == 2 and said in answer
        assert interval(row["before"]) in answer, "what came before stays"
        table, _, fresh = templates.get_template("paper/section_5.md.j2").render(numbers).partition("### Fresh seeds")
        now, before = (line for line in table.splitlines() if "OSA (QR) − ViT >" in line)
        assert f" {word}" in now and f"| earlier: {row['before']['word'].partition(',')[0]} |" in before
        assert not [shown for shown in (word, here, "0.123", "0.321", "diverged") if shown not in fresh]


def word_count(markdown: str) -> int:
    """The number of visible words, including captions and tables. A word has a letter: numbers are not counted."""
    shown = re.sub(r"</?[a-z][^<>]*>|\]\([^)]*\)|[|*#`!\[\]]", " ", markdown)
    return len([word for word in shown.split() if any(map(str.isalpha, word))])


@pytest.mark.parametrize("name", BUDGETS)
def test_a_page_keeps_to_its_budget(name):
    words, size = BUDGETS[name]
    markdown = (ROOT / f"paper_outputs/{name}.md").read_text(encoding="utf-8")
    assert word_count(markdown.partition("\n## References")[0]) <= words
    assert (ROOT / f"paper_outputs/{name}.html").stat().st_size <= size
    assert not [path for path in (ROOT / "paper_outputs/figures").rglob("*.svg") if path.stat().st_size > 100_000]


@pytest.mark.parametrize("name", BUDGETS)
def test_every_figure_and_link_of_a_page_is_there(name):
    markdown = (ROOT / f"paper_outputs/{name}.md").read_text(encoding="utf-8")
    links = set(re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", markdown))
    missing = [link for link in links if not link.startswith("http") and not (ROOT / "paper_outputs" / link).exists()]
    assert not missing
    anchors = {page.anchor(title) for title in re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]*)\)", markdown)) <= anchors


def typed_numbers(source: str) -> list[str]:
    """Numbers in a template's prose and in the texts of its expressions, which have a space where identifiers have none."""
    prose = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}|\]\([^)]*\)|```.*?```|`[^`]*`|<[^>]+>", " ", source, flags=re.DOTALL)
    code = " ".join(re.findall(r"\{\{.*?\}\}|\{%.*?%\}", source, flags=re.DOTALL))
    texts = [text for text in re.findall(r'"([^"]*)"', code) if " " in text.strip()]
    return re.findall(r".{0,30}\d.{0,20}", NAMES.sub(" ", "\n".join([prose, *texts])))


def test_no_number_is_typed_into_a_template(subtests):
    assert typed_numbers("It takes 12 s") and typed_numbers('{{ "12 runs" if n }}') and not typed_numbers("{{ x[12] }}")
    templates = [path for path in TEMPLATES.rglob("*.md.j2") if path.name != "references.md.j2"]
    assert templates
    for template in templates:
        with subtests.test(template=str(template.relative_to(TEMPLATES))):
            assert not typed_numbers(template.read_text(encoding="utf-8"))


def test_no_sentence_that_a_reader_sees_stands_in_python():
    """Summaries and figures of studies have no text of five words or more, but for docstrings and messages of errors."""
    found = []
    for path in [*sorted((ROOT / "pipeline/studies").rglob("*.py")), ROOT / "pipeline/studies/charts.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        unseen = [node for node in ast.walk(tree) if isinstance(node, ast.Raise | ast.Assert)]
        unseen += [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
        skipped = {id(inner) for node in unseen for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if id(node) not in skipped and sum(bool(re.search("[a-z]{2}", word)) for word in shown(node).split()) >= 5:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {shown(node)}")
    assert not found


def shown(node: ast.AST) -> str:
    """Text of a literal or an f-string, with a word for each value put in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(shown, node.values))
    if isinstance(node, ast.FormattedValue):
        return "value"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_a_page_escapes_labels_of_parameters():
    environment = page.template_environment(lambda name: "<script>|*x*")
    text = environment.from_string("{{ 'vit' | label }}").render()
    html, _ = to_html(f"| a |\n| - |\n| {text} |\n", {}, lambda path: "")
    assert "<script>" not in html and "&lt;script&gt;|*x*" in html


def test_a_number_keeps_together():
    html, _ = to_html("| a |\n| - |\n| 96.7 ± 0.5 to 3 × 10 |\n", {}, lambda path: "")
    assert "96.7\u00a0±\u00a00.5 to 3\u00a0×\u00a010" in html


def test_an_image_alone_is_a_figure_with_its_source():
    html, sections = to_html(
        "## A d<sub>v</sub>\n\n![What *it* shows](figures/a.svg)\n\nText ![b](b.svg)\n",
        {"figures/a.svg": "<svg/>"},
        lambda path: f"from {path}",
    )
    assert "<figure" in html and "<svg/>" in html and "What <em>it</em> shows from figures/a.svg" in html
    assert html.count("<figure") == 1 and sections == [("a-dv", "A dv")]


def test_a_figure_for_a_narrow_screen_stacks_panels_with_labels_of_their_own():
    drawing, panels = charts.panels(2, sharey=True)
    for axes in panels:
        axes.plot([0, 1], [0.0004, 2], label="a line")
    charts.legend(drawing, panels[0].get_lines())
    wide = figures.svg(drawing)
    narrow = figures.svg(figures.for_narrow(drawing))
    left, right = (axes.get_position() for axes in drawing.axes)
    assert left.y0 > right.y1 and left.x0 == right.x0
    assert all(axes.yaxis.get_ticklabels()[0].get_visible() for axes in drawing.axes)
    assert wide.count("a line") == narrow.count("a line") == 1


def test_a_figure_is_drawn_again_where_its_code_its_libraries_or_a_result_has_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    files.write_text("params.yaml", "a: 1")
    drawn, path = [], Path("paper_outputs/figure.svg")

    def write() -> bytes:
        draw = lambda: drawn.append(path) or Figure()  # noqa: E731
        report.write_figure(path, "paper", ["a file"], Lab("report", None, None), draw, png=True)
        return path.read_bytes() + path.with_suffix(".png").read_bytes()

    assert write() == write() and len(drawn) == 1
    changes = [
        lambda: files.write_text("params.yaml", "a: 2"),
        lambda: files.write_text("pipeline/config/looks.py", "STYLE = {}"),
        lambda: files.write_text("pipeline/paper.yaml", "a: 1"),
        lambda: files.write_json("paper_outputs/runs/study/vit/0/record.json", {}),
        lambda: files.write_text("paper_outputs/tables/histories.csv", "epoch"),
        lambda: monkeypatch.setattr(figures, "version", lambda name: "99"),
        lambda: files.write_text(figures.CACHE / "paper/figure.json", "{}"),
    ]
    for number, change in enumerate(changes, 2):
        change()
        assert write() == write() and len(drawn) == number


@pytest.mark.slow
def test_a_figure_does_not_depend_on_the_users_matplotlibrc(monkeypatch):
    monkeypatch.chdir(ROOT)
    histories, parameters = files.read_csv(Path("paper_outputs/tables/histories.csv")), params.load()

    def drawn() -> list[str | bytes]:
        figure = figures.figure_1(histories, parameters)
        return [figures.png(figure), figures.svg(figure), figures.svg(figures.for_narrow(figure))]

    ours = drawn()
    with matplotlib.rc_context({"xtick.labelsize": 20, "lines.markersize": 20, "legend.labelspacing": 2}):
        assert drawn() == ours
    with matplotlib.rc_context({"text.usetex": True}):  # fails without LaTeX
        assert drawn() == ours


def test_a_page_has_a_drawing_for_each_width_with_ids_of_its_own():
    markdown, html = ((ROOT / f"paper_outputs/report.{end}").read_text(encoding="utf-8") for end in ("md", "html"))
    shown = re.findall(r"\]\([^)]*\.svg\)", markdown)
    assert html.count('class="roomy"') == html.count('class="narrow"') == len(shown) > 5
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("M 37.31 162.40 \nL 37.36 16.6 \nL 40 16.6 \n", "M37.3 162.4l0.1-145.8 2.6 0"),
        ("M 0 0 \nL 0.04 0 \nL 0.08 0 \nL 0.12 0", "M0 0l0 0 0.1 0 0 0"),  # errors do not add up
        ("M 0 3 \nC 0.8 3 1.5 2.7 2.1 2.1 \nz\n", "M 0 3 \nC 0.8 3 1.5 2.7 2.1 2.1 \nz\n"),
    ],
)
def test_a_line_is_written_by_its_steps(path, steps):
    assert figures.relative(path) == steps


def test_plain_numbers_are_what_files_hold():
    assert page.to_json({"a": float("nan"), "b": -0.0, "c": (1.23456789,)}) == {"a": None, "b": 0.0, "c": [1.23457]}
    assert str(page.to_json(-1e-300 * 0)) == "0.0"


def test_only_one_study_can_be_written_and_a_wrong_name_is_named(capsys):
    with pytest.raises(SystemExit):
        report.main(["paper", "--only", "theorem_4_3"])
    assert "theorem_4_2" in capsys.readouterr().err


def test_every_study_is_on_a_page_with_its_numbers_in_a_file(subtests):
    pages = [path.read_text(encoding="utf-8") for path in TEMPLATES.glob("*.j2")]
    for name in studies.names():
        with subtests.test(name=name):
            page_of = next(each for each in report.PAGES if name in report.studies_on(each))
            assert isinstance(files.read_json(ROOT / f"paper_outputs/numbers/{page_of}/{name}.json"), dict)
            assert any(f'"{name}"' in text for text in pages), "a link to its numbers"
