"""The report says what the files say, in the same bytes each time, whatever is missing, diverged or added."""

import csv
import json
import math
import re
import shutil
import struct
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from pipeline import claims, figures, params, report, report_text, results
from pipeline.errors import UserError
from tests.pipeline import synthetic, test_claims

OUTPUTS = Path("paper_outputs")
README = synthetic.ROOT / "README.md"


def make(folder: Path, edit=lambda raw: None, **project) -> None:
    """A project in `folder`, which is the working directory, evaluated and reported."""
    synthetic.write_project(folder, edit, **project)
    synthetic.measure()
    report.main([])


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A project with all its runs and its report. Tests only read it."""
    folder = tmp_path_factory.mktemp("reported")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make(folder)
    return folder


@pytest.fixture
def project(reported, tmp_path, monkeypatch):
    """A copy of it, as working directory, that a test may change."""
    folder = shutil.copytree(reported, tmp_path / "project")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edit_params(change) -> None:
    raw = yaml.safe_load(Path("params.yaml").read_text())
    change(raw)
    Path("params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False, allow_unicode=True))


def table_2() -> dict[str, dict[str, str]]:
    with open(OUTPUTS / "table_2.csv") as file:
        return {row["variant"]: row for row in csv.DictReader(file)}


def leaves(value) -> list:
    """Every key and every value of nested dicts and lists."""
    if isinstance(value, dict):
        return [leaf for pair in value.items() for item in pair for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def contents_of_files() -> list:
    """What params.yaml, the records and the tables and JSON files beside the report hold."""
    found = leaves(yaml.safe_load(Path("params.yaml").read_text()))
    for path in [*Path("records").glob("*/*.json"), *OUTPUTS.glob("*.json"), *OUTPUTS.glob("*/findings.json")]:
        found += leaves(json.loads(path.read_text()))
    for path in [*OUTPUTS.glob("*.csv"), *OUTPUTS.glob("tables/[rs]u*.csv")]:
        with open(path) as file:
            found += [cell for row in csv.reader(file) for cell in row]
    return found


def as_number(text) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def printed_forms(value: float) -> set[str]:
    """How the report may print a number of a file: rounded, as a percentage, in minutes, with a power of ten."""
    scaled = [value, 100 * value, value / 60]
    forms = {f"{number:z.{digits}f}" for number in scaled for digits in range(5)} | {f"{number:g}" for number in scaled}
    return forms | ({f"{value:.1e}"} if value else set())


def numbers(text: str) -> list[str]:
    """The numbers of a text, in ASCII: the report sets true minus signs, narrow spaces and powers of ten."""
    powers = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    text = re.sub(r" × 10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda match: f"e{int(match[1].translate(powers)):+03d}", text)
    text = text.replace("−", "-").replace("\u202f", "")
    return [match.lstrip("+") for match in re.findall(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?", text)]


def strangers(text: str) -> list[str]:
    """The numbers of a report that are in no file."""
    contents = contents_of_files()
    words = {leaf for leaf in contents if as_number(leaf) is None and re.search(r"\d", str(leaf))}
    text = text.replace("\\", "")
    for word in sorted(map(str, words), key=len, reverse=True):  # such as a checksum, a version or a sentence
        text = text.replace(word, " ")
    values = {number for leaf in contents if (number := as_number(leaf)) is not None and math.isfinite(number)}
    known = set().union(*map(printed_forms, values))
    names = re.compile(r"\b(Table 2|Figure 1|figure_1|table_2|SHA-256)\b")
    return [number for number in numbers(names.sub(" ", text)) if number not in known]


def test_every_number_of_the_report_is_in_a_file(project):
    text = (OUTPUTS / "report.md").read_text()
    assert len(numbers(text)) > 350
    assert strangers(text) == []
    assert strangers(text + " 97.3591 and 12 345.5") == ["97.3591", "345.5"]


def test_findings_stand_in_the_first_screen_in_the_claims_and_in_sections_of_their_own(project):
    page, text = ((OUTPUTS / name).read_text() for name in ("report.html", "report.md"))
    header, rest = page.split("</header>")
    assert "Of 2 theorems, costs and choices, 1 is supported and 1 is not supported." in header
    assert '<a href="#theorem-2-2">Attention keeps the spectrum</a>' in header
    assert rest.count("Attention keeps the spectrum") == 2
    assert rest.count("do not change &lt;with depth&gt;.") == 4  # of both findings
    section = rest.split('<section id="theorem-2-2">')[1].split("</section>")[0]
    assert section.count("<svg") == 1 and "Softmax attention collapses." in section
    assert "1.5 × 10⁻¹³" in section and "has to be below 1.0 × 10⁻¹⁰" in section
    assert "<code>paper_outputs/theory/theorem_2_2.csv</code>" in section
    assert "![Eigenvalues against depth.](theory/theorem_2_2.svg)" in text
    assert "| 64 | 49 |" in text
    claims_table = rest.split('id="claims"')[1].split("</table>")[0]
    assert "largest change" in claims_table and "49 tokens" not in claims_table
    assert "**Not supported.**" in text and "- slope: **1.234**; has to be below 1.050" in text
    assert results.verdict(results.read(params.load()), {})["theorems, costs and choices"]["not supported"] == 1


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (None, "–"), (1.5e-13, "1.5 × 10⁻¹³"), (0.998, "0.998"), (-12.34, "−12.3"), (4096, "4\u202f096")],
)
def test_numbers_of_findings_are_short(value, text):
    assert report_text.compact(value) == text


def test_missing_findings_are_named(project, capsys):
    (OUTPUTS / "theory/findings.json").unlink()
    with pytest.raises(SystemExit):
        report.main([])
    assert "paper_outputs/theory/findings.json is missing" in capsys.readouterr().err


def test_every_number_of_the_table_is_in_its_own_file(project):
    lines = [line for line in (OUTPUTS / "table_2.md").read_text().splitlines() if line.startswith(("| OSA", "| ViT"))]
    for line, row in zip(lines, table_2().values(), strict=True):
        paper, ours, difference, n = line.split("|")[2:6]
        assert ours.strip() == f"{float(row['mean']):.2f} ± {float(row['std']):.2f}"
        assert n.strip() == row["n_finished"]
        if row["paper"]:
            assert float(paper) == float(row["paper"])
            expected = float(row["mean"]) - float(row["paper"])
            assert float(difference.replace("−", "-")) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("template", sorted(report.TEMPLATES.glob("*.j2")), ids=lambda path: path.name)
def test_no_number_is_typed_into_a_template(template):
    text = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", "", template.read_text(), flags=re.S)
    text = re.sub(r"<[^>]*>", "", text)
    text = re.sub(r"Table 2|Figure 1|(figure_1|table_2)\.\w+", "", text)
    assert re.findall(r"\d+", text) == []


def test_rows_that_the_paper_does_not_have_say_so(project):
    for page in ("report.md", "table_2.md", "result.md"):
        assert "| OSA (exact)<br>ours, not in the paper | not reported |" in (OUTPUTS / page).read_text()
    html = (OUTPUTS / "table_2.html").read_text()
    assert html.count("ours, not in the paper") == html.count("not reported") == 1
    assert table_2()["osa_exact"]["paper"] == table_2()["osa_exact"]["difference"] == ""


def test_the_same_files_give_the_same_bytes(project):
    before = {path.name: path.read_bytes() for path in OUTPUTS.iterdir() if path.is_file()}
    assert set(before) >= {"figure_1.svg", "figure_1.png", "report.html", "report.md", "table_2.csv", "claims.csv"}
    report.main([])
    assert {path.name: path.read_bytes() for path in OUTPUTS.iterdir() if path.is_file()} == before


class Page(HTMLParser):
    """The tags of a page, what it links to, and the text of its title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.targets, self.ids, self.texts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("href", "src", "xlink:href"):
                self.targets.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_data(self, data) -> None:
        self.texts.append(data)


def test_the_page_stands_alone(reported):
    text = (reported / OUTPUTS / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(page.ids) == len(set(page.ids))
    assert {target for target in page.targets if not target.startswith("#")} == set()
    assert {target[1:] for target in page.targets} <= set(page.ids)


def test_the_verdict_every_claim_and_table_2_are_the_first_screen(reported):
    text = (reported / OUTPUTS / "report.html").read_text()
    head = text[text.index("<header>") : text.index("</header>")]
    verdict = json.loads((reported / OUTPUTS / "verdict.json").read_text())
    assert verdict["overall"] in head and f"Of {verdict['claims']['total']} claims" in head
    assert "18 of 18 runs trained, 0 diverged" in head
    assert verdict["claims"]["total"] == 9
    assert head.count('class="badge') == 9 + verdict["theorems, costs and choices"]["total"]
    assert head.count("<table") == 1 and all(row["model"] in head for row in table_2().values())


def test_text_from_params_is_escaped(empty):
    evil = '<script>alert("1")</script> & | *b*'

    def change(raw):
        raw["run"]["variants"] = ["vit"]
        raw["report"]["labels"]["vit"] = evil
        raw["claims"]["osa_matches_vit"]["sentence"] = evil
        raw["claims"]["osa_matches_vit"]["title"] = evil
        raw["report"]["choices"][0]["why"] = evil

    make(empty, change, seeds=[0])
    for name in ("report.html", "table_2.html", "report.md", "table_2.md", "result.md"):
        text = (OUTPUTS / name).read_text()
        assert "<script" not in text and "&lt;script&gt;" in text
    page = Page((OUTPUTS / "report.html").read_text())
    assert evil in page.texts  # and reads as it was written
    assert "\\| \\*b\\*" in (OUTPUTS / "table_2.md").read_text()
    ElementTree.parse(OUTPUTS / "figure_1.svg")


def test_figure_files(reported):
    svg = ElementTree.parse(reported / OUTPUTS / "figure_1.svg").getroot()
    words = {"".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Train loss", "Test loss", "Epoch", "OSA (QR)", "ViT (no skip, no LN)", "OSA (exact)"} <= words
    png = (reported / OUTPUTS / "figure_1.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG") and (width, height) == (1440, 760)
    assert b"matplotlib" not in png


def test_a_model_looks_the_same_everywhere(reported):
    raw = yaml.safe_load((reported / "params.yaml").read_text())
    looks = figures.looks(list(raw["variants"]))
    svg, html = ((reported / OUTPUTS / name).read_text() for name in ("figure_1.svg", "report.html"))
    for look in looks.values():
        assert f"stroke: {look.colour}" in svg and f"stroke: {look.on_page}" in html
        assert f'stroke="{look.on_page}"' in html


def test_looks_do_not_recur_soon_and_read_without_colour():
    looks = list(figures.looks([f"v{i}" for i in range(42)]).values())
    assert len(set(looks)) == 42
    assert len({look.dashes for look in looks[:6]}) == 6


def test_panels_on_a_page_share_no_id_and_follow_its_colours():
    use = '<use xlink:href="#a" style="clip: url(#a); fill: #1a1a1a"/>'
    svg = f'<?xml version="1.0"?>\n<svg width="1pt" height="2pt"><g id="a"/>{use}</svg>'
    assert figures.inline(svg, "left", 'a "b"') == (
        '<svg role="img" aria-label="a &quot;b&quot;"><g id="left-a"/>'
        '<use xlink:href="#left-a" style="clip: url(#left-a); fill: currentColor"/></svg>'
    )


def test_a_variant_is_added_in_params_alone(empty):
    def change(raw):
        raw["run"]["variants"] = ["vit", "wide_vit"]
        raw["variants"]["wide_vit"] = raw["variants"]["vit"] | {"overrides": {"model": {"embed_dim": 20}}}

    make(empty, change, seeds=[0, 1])
    for name in ("report.md", "report.html", "table_2.md", "table_2.html", "result.md", "figure_1.svg"):
        assert "wide_vit" in (OUTPUTS / name).read_text()
    assert table_2()["wide_vit"]["model"] == "wide_vit" and table_2()["wide_vit"]["paper"] == ""
    assert "`dvc repro train@wide_vit-0 train@wide_vit-1`" in (OUTPUTS / "report.md").read_text()


def test_claims_about_models_that_were_not_run_are_not_evaluated(empty):
    make(empty, lambda raw: raw["run"].update(variants=["vit", "vit_noskip"]), seeds=[0, 1])
    with open(OUTPUTS / "claims.csv") as file:
        verdicts = {row["claim"]: row["claim_verdict"] for row in csv.DictReader(file)}
    assert verdicts["qr_is_stable"] == verdicts["osa_matches_vit"] == verdicts["norm_matters_most"] == "not evaluated"
    assert verdicts["removal_costs_speed"] != "not evaluated"  # one of its two comparisons has its runs
    assert "7 are not evaluated." in (OUTPUTS / "report.md").read_text()


def test_missing_and_diverged_runs_are_told_first(empty):
    synthetic.write_project(empty, diverged={("osa_ns", 1)})
    shutil.rmtree("runs/vit/0")
    Path("records/vit/0.json").unlink()
    synthetic.measure()
    report.main([])
    for name in ("report.md", "report.html"):
        head = (OUTPUTS / name).read_text().split("Table 2")[0]
        assert "17 of 18 runs trained, 1 diverged" in head
        assert "1 of 18 runs not trained yet: vit/0." in head
        assert "1 of 18 runs diverged and have no final accuracy: osa" in head
    text = (OUTPUTS / "report.md").read_text()
    assert "| 2<br>1 diverged |" in text
    assert "diverged<br>at step 819" in text
    assert strangers(text) == []


def test_a_single_diverged_run_still_makes_a_report(empty):
    make(empty, lambda raw: raw["run"].update(variants=["vit"]), seeds=[0], diverged={("vit", 0)})
    text = (OUTPUTS / "report.md").read_text()
    assert "| ViT | 97.2 | – | – | 0<br>1 diverged |" in text and strangers(text) == []


def test_one_seed_has_no_spread(empty):
    make(empty, lambda raw: raw["run"].update(variants=["osa_qr", "vit"]), seeds=[3])
    text = (OUTPUTS / "report.md").read_text()
    assert "One run per model" in text and "±" not in text.split("## Figure 1")[0].replace("mean ± standard", "")
    assert json.loads((OUTPUTS / "verdict.json").read_text())["claims"]["undecided"] == 3
    assert "band" not in text.split("## Claims")[0]


def test_departures_from_the_paper_are_listed_and_told_first(empty):
    def change(raw):
        raw["run"]["variants"] = ["vit", "vit_noskip"]
        raw["train"]["epochs"] = 3
        raw["variants"]["vit"]["overrides"] = {"train": {"batch_size": 61}}

    make(empty, change, seeds=[0])
    text = (OUTPUTS / "report.md").read_text()
    head, rest = text.split("## Table 2")
    assert "Not the paper's setting: train.epochs is 3, in the paper 10; train.batch_size is 61, in the paper" in head
    assert "| `train.epochs` | 10 | 3 | ViT, ViT (no skip) |" in rest
    assert "| `train.batch_size` | 128 | 61 | ViT |" in rest


def test_without_departures_the_report_says_none(reported):
    assert "\nNone: every value that the paper states is used" in (reported / OUTPUTS / "report.md").read_text()


def test_provenance_lists_every_value_that_occurs(project):
    path = Path("records/vit/1.json")
    record = json.loads(path.read_text())
    record["data_sha256"] = "another"
    record["environment"] |= {"git_commit": None, "torch": "2.12.0"}
    path.write_text(json.dumps(record))
    report.main([])
    facts = json.loads((OUTPUTS / "provenance.json").read_text())["runs"]
    assert facts["torch"] == {"2.11.0": 17, "2.12.0": 1} and facts["commit"]["not recorded"] == 1
    text = (OUTPUTS / "report.md").read_text()
    assert "2.11.0 (17 runs)<br>2.12.0 (1 runs)" in text
    assert "Not all runs share the same data" in text.split("## Table 2")[0]


def test_runs_of_other_parameters_are_refused(project, capsys):
    edit_params(lambda raw: raw["train"].update(learning_rate=0.001))
    with pytest.raises(SystemExit):
        report.main([])
    assert "records/osa_qr/0.json was made with other parameters" in capsys.readouterr().err


def test_an_evaluation_of_other_runs_is_refused(project, capsys):
    edit_params(lambda raw: raw["run"].update(seeds=[0, 1]))
    with pytest.raises(SystemExit):
        report.main([])
    assert "`dvc repro tables`" in capsys.readouterr().err


def test_a_missing_table_is_named(project, capsys):
    (OUTPUTS / "tables/layers.csv").unlink()
    with pytest.raises(SystemExit):
        report.main([])
    assert "paper_outputs/tables/layers.csv" in capsys.readouterr().err


def claim_error(change, empty) -> str:
    synthetic.write_params(empty, change)
    with pytest.raises(UserError) as caught:
        params.load()
    return str(caught.value)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda raw: raw["claims"]["qr_is_stable"].update(models=["osa_q"]), "did you mean 'osa_qr'"),
        (lambda raw: raw["claims"]["qr_is_stable"].update(definition="{limit}"), "limit"),
        (lambda raw: raw["claims"]["osa_faster_than_noskip"].update(at_most_factor=2.0), "at_most_factor"),
        (lambda raw: raw["claims"]["osa_matches_vit"].update(tolerance_points=-1), "tolerance_points"),
        (lambda raw: raw["claims"]["osa_matches_vit"].update(kind="beauty"), "osa_matches_vit"),
        (lambda raw: raw["paper"]["table_2"].update(vitt=97.2), "paper.table_2 names 'vitt'"),
        (lambda raw: raw["report"]["choices"][0].update(key="data.pixels"), "data.pixels"),
        (lambda raw: raw["paper"]["settings"]["train"].update(epoch=10), "paper.settings"),
    ],
)
def test_mistakes_in_claims_and_report_are_named(empty, change, message):
    assert message in claim_error(change, empty)


def test_readme_gets_the_result_between_its_markers(project):
    Path("README.md").write_text("above\n<!-- results -->\nold\n<!-- /results -->\nbelow\n")
    report.main(["--readme"])
    first = Path("README.md").read_text()
    assert first.startswith("above\n<!-- results -->\n**") and first.endswith("\n<!-- /results -->\nbelow\n")
    assert "old" not in first and "| OSA (QR) | 97.2 |" in first
    report.main(["--readme"])
    assert Path("README.md").read_text() == first


def test_readme_without_markers_is_an_error(project, capsys):
    Path("README.md").write_text("<!-- /results --> <!-- results -->\n")
    with pytest.raises(SystemExit):
        report.main(["--readme"])
    assert "<!-- results -->" in capsys.readouterr().err
    assert Path("README.md").read_text() == "<!-- /results --> <!-- results -->\n"


@pytest.mark.skipif(not README.exists(), reason="the README is not written yet")
def test_the_repositorys_readme_is_current():
    readme = README.read_text()
    result = (synthetic.ROOT / OUTPUTS / "result.md").read_text()
    assert report.with_result(readme, result) == readme


@pytest.mark.parametrize(
    "text, expected",
    [
        (report_text.fixed(-0.004, 2), "0.00"),
        (report_text.fixed(-1.5, 1), "−1.5"),
        (report_text.fixed(math.nan, 1), "–"),
        (report_text.signed(0.25, 1), "+0.2"),
        (report_text.signed(-2.44, 1), "−2.4"),
        (report_text.mean_std(97.126, math.nan, 2), "97.13"),
        (report_text.mean_std(97.126, 0.5, 2), "97.13 ± 0.50"),
        (report_text.interval(-1, 2, 0), "−1 to 2"),
        (report_text.interval(math.nan, math.nan, 0), "–"),
        (report_text.scientific(1.23e-6), "1.2 × 10⁻⁶"),
        (report_text.scientific(0.0), "0.0 × 10⁰"),
        (report_text.grouped(1234567), "1\u202f234\u202f567"),
        (report_text.per_cent(0.95), "95%"),
        (report_text.plain(True), "true"),
    ],
)
def test_numbers_as_text(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    "count, sentence",
    [
        ((3, 0, 0, 0), "Of 3 claims, 3 are supported."),
        ((1, 1, 0, 0), "Of 2 claims, 1 is supported and 1 is not supported."),
        ((2, 1, 3, 1), "Of 7 claims, 2 are supported, 1 is not supported, 3 are undecided and 1 is not evaluated."),
    ],
)
def test_tally(count, sentence):
    names = dict(zip(report_text.claims.VERDICTS, count, strict=True))
    assert report_text.tally(names | {"total": sum(count)}, "claims") == sentence


def test_tally_says_where_the_undecided_lean():
    count = dict(zip(report_text.claims.VERDICTS, (1, 0, 2, 0), strict=True)) | {"total": 3}
    assert report_text.tally(count, "claims", 1).endswith("2 are undecided. 1 of the undecided leans the paper's way.")
    assert report_text.tally(count, "claims", 2).endswith("2 are undecided. 2 of the undecided lean the paper's way.")


@pytest.mark.parametrize("first, leaning", [(97.0, True), (96.0, False)])
def test_a_claim_leans_only_if_its_value_is_on_its_side(first, leaning):
    runs = test_claims.results({"a": [first], "b": [97.0]})
    assert results.leans(*claims.judge(test_claims.accuracy_claim(), runs)) == leaning


def test_a_decided_claim_does_not_lean():
    runs = test_claims.results({"a": [97.0, 97.1], "b": [97.0, 97.1]})
    assert not results.leans(*claims.judge(test_claims.accuracy_claim(), runs))


@pytest.mark.parametrize(
    "verdicts, word",
    [
        ({"supported"}, "Replicated"),
        ({"supported", "undecided"}, "Consistent so far"),
        ({"supported", "undecided", "not supported"}, "Contradicted in part"),
        ({"undecided", "not evaluated"}, "Undecided"),
    ],
)
def test_overall_verdict(verdicts, word):
    assert results.overall(verdicts) == word
