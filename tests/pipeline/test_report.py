"""The report says what the files say, each number at its place, in the same bytes each time, whatever is missing."""

import csv
import itertools
import json
import math
import re
import shutil
import struct
import subprocess
import types
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from pipeline import report, sources, studies
from pipeline.core import files, params, record
from pipeline.core.errors import UserError
from pipeline.core.params import Section, Seeds
from pipeline.lab import Lab
from pipeline.report import figures, looks, pages, results, sentences
from pipeline.statistics import NOT_EVALUATED, NOT_SUPPORTED, SUPPORTED, UNDECIDED
from pipeline.studies import CHECK, CLAIM, OBSERVATION, Finding, Measure, Table

ROOT = Path(__file__).parents[2]
OUTPUTS = Path("paper_outputs")
VARIANTS = ["osa_qr", "vit", "osa_exact"]  # the last one is not the paper's
SEEDS = [0, 1, 2]
STUDY = OUTPUTS / "studies/fake_2_1"
EVIL = '<script>alert("1")</script> & | *b*'


# --- a project whose every number is made up, and different from every other


class Settings(Section):
    seeds: Seeds


def fake_findings(settings, tables, lab) -> list[Finding]:
    """A check of its CSV's column `error`, with figure and table, and an observation of its column `rank`."""
    table = tables["errors"]
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot(table["depth"], table["error"])
    check = Finding(
        id="fake_errors",
        title="The error stays small",
        place="Theorem 2.1",
        kind=CHECK,
        statement="Errors do not grow <with depth>.",
        rule="Every error is below its tolerance.",
        measures=[Measure("largest error", table["error"].max(), "units", side="below", limit=3.1e-5)],
        table=Table(
            ["Depth", "Error"], [[str(row.depth), f"{row.error:g}"] for row in table.itertuples()], note="By depth."
        ),
        figure=figure,
        caption="Errors against depth.",
        remark="They grow elsewhere.",
        sources=["paper_outputs/tables/layers.csv"],
    )
    rank = Finding(
        id="fake_rank",
        title="Rank",
        place="Section 2",
        kind=OBSERVATION,
        statement="The rank.",
        measures=[Measure("rank", table["rank"].iloc[-1], "tokens", low=40.7, high=53.9, n=3)],
    )
    return [check, rank]


def claim(name: str, verdict: str, models: tuple[str, ...], value: float = 0.437) -> Finding:
    measure = Measure("OSA − ViT", value, "points", "above", -0.5, -0.11, 0.83, n=3, note="as said", verdict=verdict)
    return Finding(name, f"Claim {name}", "Section 5", CLAIM, "a sentence", [measure], "a rule", models=models)


@pytest.fixture
def fakes(monkeypatch):
    """Two studies in place of the project's own. A test may change the claims of section_5, a list."""
    claims = [claim("matches", UNDECIDED, ("osa_qr", "vit")), claim("beats", UNDECIDED, ("osa_qr", "vit"))]
    section_5 = types.SimpleNamespace(__doc__="Section 5: whether it holds.", place=0, findings=lambda *_: list(claims))
    measured = types.SimpleNamespace(
        __doc__="Theorem 2.1: whether errors grow.\n\nMore.", Settings=Settings, measure=None, findings=fake_findings
    )
    modules = {"fake_2_1": measured, "section_5": section_5}
    monkeypatch.setattr(studies, "names", lambda: sorted(modules))
    monkeypatch.setattr(studies, "module", modules.__getitem__)
    monkeypatch.setattr(sources, "digest", lambda name: f"source of {name}")
    return claims


@pytest.fixture
def drawing(fakes, tmp_path, monkeypatch):
    """A folder, the working directory, with all that the report reads."""
    monkeypatch.chdir(tmp_path)
    write_params(lambda raw: None)
    write_tables()


@pytest.fixture
def project(drawing, monkeypatch):
    """The same for tests that look at no figure, which takes most of the time."""
    monkeypatch.setattr(figures, "_save", lambda *_: b'<svg width="1pt" height="1pt"></svg>')


def write_params(edit) -> None:
    raw = params.read(ROOT / "params.yaml")
    known = {name: raw[name] for name in params.Params.model_fields if name != "studies"}
    known["run"] = {"variants": VARIANTS, "seeds": SEEDS}
    known["fake_2_1"] = {"seeds": [0]}
    edit(known)
    Path("params.yaml").write_text(yaml.safe_dump(known, sort_keys=False, allow_unicode=True))


def edit_paper(edit) -> None:
    raw = params.read(ROOT / "pipeline/paper.yaml")
    edit(raw)
    files.write_text("pipeline/paper.yaml", yaml.safe_dump(raw, sort_keys=False, allow_unicode=True))


def write_tables(settings: params.Params | None = None) -> None:
    settings = settings or params.load()
    number = itertools.count(1013, 7)  # of four digits, and none twice another
    runs, summary, curves, layers = [], [], [], []
    measured = ("error_max", "error_median", "norm_max", "norm_median", "alpha")
    for variant in settings.run.variants:
        for seed in settings.run.seeds:
            losses = {"train_loss": next(number) / 1e4, "test_loss": next(number) / 1e4, "test_accuracy": next(number) / 1e4}
            runs.append({"variant": variant, "seed": seed, "status": "finished", "diverged_at_step": None} | losses)
            write_record(settings, variant, seed, 60.0 * next(number), float(next(number)))
        counts = {"n_finished": len(settings.run.seeds), "n_diverged": 0, "n_missing": 0}
        names = ("mean", "std", "low", "high", "min", "max")
        quantities = ("test_accuracy", "test_loss", "train_loss")
        statistics = {f"{quantity}_{name}": next(number) / 1e4 for quantity in quantities for name in names}
        summary.append({"variant": variant} | counts | statistics)
        curves += [
            {"variant": variant, "curve": curve, "epoch": epoch, "n": 3, "mean": 1 / (1 + epoch), "min": 0.1, "max": 2.0}
            for curve in ("train_loss", "test_loss")
            for epoch in range(3)
        ]
        if settings.variants[variant].attention == "orthogonal":
            layers += [{"variant": variant, "layer": 0, "head": 0} | {name: next(number) / 1e4 for name in measured}]
    tables = {"runs": pd.DataFrame(runs), "summary": pd.DataFrame(summary), "curves": pd.DataFrame(curves)}
    tables["layers"] = pd.DataFrame(layers, columns=["variant", "layer", "head", *measured])
    for name, table in tables.items():
        files.write_csv(OUTPUTS / f"tables/{name}.csv", table)
    edit_csv(OUTPUTS / "tables/runs.csv", "num_parameters", slice(None), 301_858)
    errors = pd.DataFrame({"depth": [61, 67], "error": [7.1e-7, 1.3e-6], "rank": [43, 47]})
    files.write_csv(STUDY / "errors.csv", errors)
    files.write_json(STUDY / "record.json", {"source_sha256": "source of fake_2_1"})


def write_record(settings: params.Params, variant: str, seed: int, seconds: float, speed: float) -> None:
    made = {
        "study": "table_2",
        "name": variant,
        "variant": variant,
        "overrides": {},
        "seed": seed,
        "status": "finished",
        "config": params.resolve(settings, variant).model_dump(mode="json"),
        "data_sha256": "da7a" * 16,
        "code_sha256": record.code_sha256(),
        "environment": {
            "git_commit": "c0ffee",
            "git_dirty": False,
            "python": "3.11.14",
            "torch": "2.11.0",
            "device": "cpu",
            "device_name": "Imaginary CPU",
            "num_threads": 2,
            "platform": "Linux",
        },
        "started_at": "2099-01-01T00:00:00+00:00",
        "seconds": seconds,
        "images_per_second": speed,
        "resumptions": 0,
    }
    files.write_json(f"paper_outputs/runs/table_2/{variant}/{seed}/record.json", made)


def edit_csv(path: Path, column: str, rows, value) -> None:
    table = pd.read_csv(path)
    if column in table:
        table[column] = table[column].astype(object)
    table.loc[rows, column] = value
    table.to_csv(path, index=False)


def edit_record(run: str, **changes) -> None:
    path = Path("paper_outputs/runs/table_2", run, "record.json")
    made = files.read_json(path)
    environment = made["environment"] | changes.pop("environment", {})
    files.write_json(path, made | {"environment": environment} | changes)


def read_page(name: str) -> str:
    return (OUTPUTS / name).read_text()


class Page(HTMLParser):
    """A page: its tags, targets and ids; by the id of the innermost section or details, the text and the rows of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.targets, self.ids, self.texts, self.rows, self.places, self.is_cell = [], [], [], {}, {}, [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes) -> None:
        attributes = dict(attributes)
        self.tags.append(tag)
        self.targets += [attributes[name] for name in ("href", "src", "xlink:href") if name in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag in ("header", "section", "details", "summary"):
            self.places.append(attributes.get("id", self.places[-1] if self.places else ""))
        if tag == "tr":
            self.rows.setdefault(self.places[-1], []).append([])
        if tag in ("td", "th"):
            self.rows[self.places[-1]][-1].append("")
            self.is_cell = True
        if tag == "small":
            self.handle_data("; ")

    def handle_endtag(self, tag) -> None:
        if tag in ("header", "section", "details", "summary"):
            self.places.pop()
        self.is_cell &= tag not in ("td", "th")

    def handle_data(self, data) -> None:
        place = self.places[-1] if self.places else ""
        self.texts[place] = self.texts.get(place, "") + data
        if self.is_cell:
            self.rows[place][-1][-1] += data.replace("\n", "")

    def table(self, place: str) -> list[list[str]]:
        """The rows of the first table there, without its head."""
        first, *rest = self.rows[place]
        return list(itertools.takewhile(lambda row: len(row) == len(first), rest))


def render() -> Page:
    return Page(pages.render(results.read())["report.html"])


# --- numbers at their places


def test_every_number_of_the_tables_is_that_of_its_file(project):
    page, paper = render(), params.load_paper().table_2
    runs, summary = (pd.read_csv(OUTPUTS / f"tables/{name}.csv") for name in ("runs", "summary"))
    for row, (_, *shown) in zip(summary.itertuples(), page.table("table-2"), strict=True):
        known, mean = row.variant in paper, 100 * row.test_accuracy_mean
        difference = f"{mean - paper[row.variant]:+.2f}".replace("-", "−") if known else "–"
        ours = f"{mean:.2f} ± {100 * row.test_accuracy_std:.2f}"
        assert shown == [f"{paper[row.variant]:.1f}" if known else "–", ours, difference, "3"]
    for row, (_, *shown) in zip(summary.itertuples(), page.table("compute"), strict=True):
        made = [files.read_json(f"paper_outputs/runs/table_2/{row.variant}/{seed}/record.json") for seed in SEEDS]
        seconds, speed = (sum(each[key] for each in made) for key in ("seconds", "images_per_second"))
        speed = f"{speed / 3:,.0f}".replace(",", "\u202f")
        assert shown == ["301\u202f858", "3", f"{seconds / 180:.1f}", speed, f"{seconds / 3600:.1f}"]
    for row, (_, *shown) in zip(runs.itertuples(), page.table("runs-of-table-2"), strict=True):
        minutes = files.read_json(f"paper_outputs/runs/table_2/{row.variant}/{row.seed}/record.json")["seconds"] / 60
        numbers = [f"{100 * row.test_accuracy:.2f}", f"{row.test_loss:.4f}", f"{row.train_loss:.4f}", f"{minutes:.1f}"]
        assert shown == [str(row.seed), "finished", *numbers]


@pytest.mark.parametrize(
    "path, column, places",
    [
        ("tables/summary.csv", "test_accuracy_std", {"table-2"}),
        ("tables/summary.csv", "test_accuracy_mean", {"table-2"}),
        ("tables/runs.csv", "test_loss", {"runs-of-table-2"}),
        ("studies/fake_2_1/errors.csv", "error", {"finding-fake-errors"}),
        ("studies/fake_2_1/errors.csv", "rank", {"finding-fake-rank"}),
    ],
)
def test_a_number_of_a_file_changes_the_page_at_its_place_alone(project, path, column, places):
    old, path = render().texts, OUTPUTS / path
    row = len(pd.read_csv(path)) - 1 if "errors" in path.name else 0
    edit_csv(path, column, row, 1.7 * pd.read_csv(path).loc[row, column])
    new = render().texts
    assert {place for place in new if new[place] != old[place]} == places


def test_many_files_of_one_folder_are_named_once_with_it():
    assert pages.listed(["a/b.csv", "c/d.csv", "a/e.csv"]) == "`a/b.csv`, `a/e.csv`, `c/d.csv`"
    assert pages.listed(["a/b.csv", "c/d.csv", "a/e.csv", "a/f.csv"]) == "`a/` (b.csv, e.csv, f.csv), `c/d.csv`"


def test_a_finding_is_told_in_one_sentence_and_whole_where_it_unfolds(project):
    report.main([])
    page = Page(read_page("report.html"))
    check, rank, matches = (page.texts[f"finding-{name}"] for name in ("fake-errors", "fake-rank", "matches"))
    assert "passesThe error stays small. Holds; the worst case uses 4.2% of what is allowed." in check
    for shown in ("Every error is below its tolerance.", "They grow elsewhere.", "By depth.", "Errors against depth."):
        assert shown in check
    assert page.table("finding-fake-errors") == [["largest error", "1.3 × 10−6 units", "below 3.1 × 10−5"]]
    assert ["67", "1.3 × 10−6"] in page.rows["finding-fake-errors"]
    assert "Code: pipeline/studies/fake_2_1.py. Data: paper_outputs/studies/fake_2_1/errors.csv, paper_outputs/tab" in check
    assert "upported" not in check  # a theorem never is
    assert "observationRank. rank is 47 tokens (41 to 54)." in rank  # a token has no parts
    assert page.table("finding-fake-rank") == [["rank", "47 tokens", "41 to 54", "3"]]
    assert "OSA − ViT is 0.44 points (−0.11 to 0.83); above −0.5 is asked." in matches
    assert page.table("finding-matches") == [["OSA − ViT", "0.44 points", "−0.11 to 0.83", "above −0.5", "3", "as said"]]
    summary = read_page("report.md")
    assert (
        "| The error stays small (Theorem 2.1) | passes | Holds; the worst case uses 4.2% of what is allowed. |" in summary
    )
    assert "| Rank (Section 2) | observation | rank is 47 tokens (41 to 54). |" in summary


def test_a_finding_may_have_a_sentence_of_its_own(project, fakes):
    fakes[:] = [replace(claim("x", SUPPORTED, ("vit",)), in_short="It is so.")]
    assert "Claim x. It is so." in render().texts["finding-x"]


def test_what_all_measures_share_is_said_once():
    measures = [Measure(name, 1.0, side="below", limit=2.0, n=n, note="worst") for name, n in (("a", 3), ("b", 4))]
    table = pages.measures_table(measures)
    assert table.columns == ["Measure", "Value", "n"] and table.rows == [["a", "1", "3"], ["b", "1", "4"]]
    assert table.note == "Each: has to be below 2; worst."


@pytest.mark.parametrize("note, shown", [("", ["3"]), ("worst", ["3", "worst"]), ("ViT n = 3, 1 missing",) * 2])
def test_a_measure_says_once_how_many_runs_are_behind_it(note, shown):
    (row,) = pages.measures_table([Measure("m", 1.0, n=3, note=note)]).rows
    assert row == ["m", "1", *([shown] if isinstance(shown, str) else shown)]


@pytest.mark.parametrize("kind, count", [(CLAIM, 8), (OBSERVATION, 3)])
def test_measures_that_a_table_tells_better_are_left_to_their_file(project, fakes, kind, count):
    def shown(count: int) -> str:
        verdict = UNDECIDED if kind == CLAIM else ""
        measures = [Measure(f"comparison {i}", i, verdict=verdict) for i in range(count)]
        rule = "a rule" if kind == CLAIM else ""
        fakes[:] = [Finding("many", "Many", "nowhere", kind, "s", measures, rule, table=Table(["t"], [["told"]]))]
        return render().texts["finding-many"]

    assert "comparison 1" in shown(count) and "measures.csv" not in shown(count)
    many = shown(count + 1)
    assert "comparison 1" not in many and "told" in many and f"Its {count + 1} measures: paper_outputs/measures.csv." in many
    if kind == CLAIM:
        assert "Of 9 comparisons, 9 are undecided." in many


def test_findings_and_their_measures_are_files_for_machines(project):
    report.main([])
    found = {each["id"]: each for each in json.loads(read_page("findings.json"))}
    assert list(found) == ["matches", "beats", "fake_errors", "fake_rank"]
    check = found["fake_errors"]
    assert (check["study"], check["kind"], check["verdict"]) == ("fake_2_1", "check", "passes")
    assert check["measures"][0]["value"] == 1.3e-6 and check["measures"][0]["low"] is None
    assert check["sources"] == ["paper_outputs/studies/fake_2_1/errors.csv", "paper_outputs/tables/layers.csv"]
    assert not {"figure", "table"} & set(check) and found["fake_rank"]["verdict"] == ""
    with open(OUTPUTS / "measures.csv") as file:
        first, *_, last = csv.DictReader(file)
    assert (first["study"], first["finding"], first["finding_verdict"]) == ("section_5", "matches", "undecided")
    assert (first["value"], first["low"], first["limit"], first["n"]) == ("0.437", "-0.11", "-0.5", "3")
    assert (last["finding"], last["value"], last["kind"], last["limit"]) == ("fake_rank", "47", "observation", "")


@pytest.mark.parametrize("template", sorted(pages.TEMPLATES.glob("*.j2")), ids=lambda path: path.name)
def test_no_number_is_typed_into_a_template(template):
    text = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", "", template.read_text(), flags=re.S)
    text = re.sub(r"<script>.*</script>|<[^>]*>", "", text, flags=re.S)
    text = re.sub(r"Table 2|Figure 1|Section 5|(figure_1|table_2)", "", text)
    assert re.findall(r"\d+", text) == []


# --- verdicts


@pytest.mark.parametrize(
    "verdicts, headline, sentence",
    [
        ((SUPPORTED, SUPPORTED), "OSA does as the paper says", "2 are supported."),
        ((SUPPORTED, NOT_SUPPORTED), "Contradicted in part", "1 is supported and 1 is not supported."),
        ((SUPPORTED, UNDECIDED), "Undecided about OSA", "1 is supported and 1 is undecided."),
        ((UNDECIDED, UNDECIDED), "Undecided about OSA", "2 are undecided."),
        ((SUPPORTED, NOT_EVALUATED), "Undecided about OSA", "1 is supported and 1 is not evaluated."),
        ((NOT_EVALUATED, NOT_EVALUATED), "OSA is not evaluated", "2 are not evaluated."),
        ((), "OSA is not evaluated", "none is evaluated."),
    ],
)
def test_the_answer_is_about_osa(project, fakes, verdicts, headline, sentence):
    fakes[:] = [claim(f"c{i}", verdict, ("osa_qr", "vit")) for i, verdict in enumerate(verdicts)]
    fakes.append(claim("ablation", NOT_SUPPORTED, ("vit", "vit_noskip")))  # is not about OSA, and counts elsewhere
    of = results.read()
    page, answer = pages.render(of), f"{headline}: of Section 5’s {len(verdicts)} claims about it, {sentence}"
    assert all(f"**{answer}**" in page[name] for name in ("result.md", "report.md"))
    assert f'<p class="answer">{answer}</p>' in page["report.html"]
    counted = results.verdict(of)
    assert counted["claims_about_osa"]["total"] == len(verdicts) and counted["claims"]["total"] == len(verdicts) + 1
    assert counted["claims"]["not_supported"] == 1 + verdicts.count(NOT_SUPPORTED)


def test_the_stability_of_osa_is_one_of_the_claims_about_it(project, monkeypatch):
    of = results.read()
    monkeypatch.setattr(studies, "place", lambda name: 0)
    with_stability = replace(of, found=of.found | {"stability": [claim("stable", NOT_EVALUATED, ("osa_exact",))]})
    counted = results.verdict(with_stability)
    assert counted["about_osa"] == UNDECIDED
    assert (counted["claims_about_osa"]["total"], counted["claims_about_osa"]["not_evaluated"]) == (3, 1)


def test_claims_of_other_studies_are_not_in_the_headline(project, monkeypatch):
    other = claim("deep", NOT_SUPPORTED, ("osa_qr",))
    monkeypatch.setattr(studies.module("fake_2_1"), "findings", lambda *_: [other])
    counted = results.verdict(results.read())
    assert counted["about_osa"] == UNDECIDED and counted["claims"]["not_supported"] == 1
    assert counted["checks"]["total"] == 0
    choices = "Of 1 claim of ours that nothing depends on what it leaves open"
    beyond = "Of 1 claim beyond it, in our setting"
    kinds = {10: ("of_paper", None), 53: ("beyond", beyond), 95: ("on_choices", choices), math.inf: ("beyond", beyond)}
    for place, (kind, told) in kinds.items():
        monkeypatch.setattr(studies.module("fake_2_1"), "place", place, raising=False)
        of = results.read()
        assert results.verdict(of)[f"claims_{kind}"]["not_supported"] == 1
        said = ["Of 2 claims of the paper, 2 are undecided.", f"{told}, 1 is not supported."]
        said = said if told else ["Of 3 claims of the paper, 1 is not supported and 2 are undecided."]
        assert sentences.first_lines(of)[: len(said)] == said
        assert all(f"\n- {line}\n" in pages.render(of)["result.md"] for line in said)


def test_comparisons_with_vits_are_counted_for_each_orthogonal_model():
    """As OSA's claims need all of their comparisons, one model alone may leave them undecided; QR against NS is none."""
    verdicts = {"osa_matches_vit": (SUPPORTED, UNDECIDED), "osa_approaches_vit_speed": (SUPPORTED, SUPPORTED)}
    verdicts |= {"qr_not_below_ns": (NOT_SUPPORTED,), "norm_matters_most": (SUPPORTED,)}
    found = [
        types.SimpleNamespace(id=name, measures=[types.SimpleNamespace(verdict=each) for each in own])
        for name, own in verdicts.items()
    ]
    lab = Lab("report", params.load(ROOT / "params.yaml"), params.load_paper())
    of = types.SimpleNamespace(lab=lab, found={"section_5": found})
    assert results.against_vits(of) == {"osa_qr": {SUPPORTED: 2}, "osa_ns": {SUPPORTED: 1, UNDECIDED: 1}}
    (told,) = sentences.by_model(of)
    assert told == (
        "Against ViTs OSA (QR) has 2 comparisons, of which 2 are supported; OSA (NS) has 2 comparisons, of which 1 is "
        "supported and 1 is undecided. A claim needs those of all its models."
    )
    of.found["section_5"] = found[2:]
    assert sentences.by_model(of) == []


def test_the_verdict_file_has_words_for_keys(project):
    report.main([])
    verdict = json.loads(read_page("verdict.json"))
    assert verdict == {
        "about_osa": "undecided",
        "claims_about_osa": {"total": 2, "supported": 0, "not_supported": 0, "undecided": 2, "not_evaluated": 0},
        "claims": {"total": 2, "supported": 0, "not_supported": 0, "undecided": 2, "not_evaluated": 0},
        "claims_of_paper": {"total": 2, "supported": 0, "not_supported": 0, "undecided": 2, "not_evaluated": 0},
        "claims_on_choices": {"total": 0, "supported": 0, "not_supported": 0, "undecided": 0, "not_evaluated": 0},
        "claims_beyond": {"total": 0, "supported": 0, "not_supported": 0, "undecided": 0, "not_evaluated": 0},
        "checks": {"total": 1, "passes": 1, "fails": 0, "not_evaluated": 0},
        "observations": 1,
        "models": 3,
        "seeds": 3,
        "runs": {"total": 9, "trained": 9, "diverged": 0},
    }
    text = read_page("report.html")
    assert "<li>Of 2 claims of the paper, 2 are undecided.</li>" in text
    assert "<li>Table 2: 3 models, 3 seeds; 9 of 9 runs trained, 0 diverged. 1 of 1 check pass and 0 fail.</li>" in text


def test_a_check_that_fails_is_shown_as_failing(project):
    edit_csv(STUDY / "errors.csv", "error", 1, 0.0071)
    report.main([])
    page = read_page("report.html")
    assert (
        "Does not hold: largest error is 0.0071 units and has to be below 3.1 × 10−5."
        in Page(page).texts["finding-fake-errors"]
    )
    assert page.count('class="badge fails"') == 1 and 'class="badge passes"' not in page
    assert "0 of 1 check pass and 1 fail.<" in page and json.loads(read_page("verdict.json"))["checks"]["fails"] == 1


@pytest.mark.parametrize("verdict", [SUPPORTED, NOT_SUPPORTED, UNDECIDED])
def test_the_verdict_of_a_claim_comes_from_its_measures(project, fakes, verdict):
    good, other = claim("x", SUPPORTED, ("vit",)).measures[0], claim("x", verdict, ("vit",), value=-9.4).measures[0]
    fakes[:] = [Finding("both", "Both", "Section 5", CLAIM, "a sentence", [good, other], "a rule")]
    page = pages.render(results.read())
    assert page["report.html"].count(f'<span class="badge {verdict.replace(" ", "-")}">{verdict}</span>') == 1
    assert f"| Both (Section 5) | {verdict} | OSA − ViT is 0.44 points" in page["report.md"]
    shown = Page(page["report.html"])
    if verdict == SUPPORTED:
        assert "Each: has to be above −0.5; n = 3; supported; as said." in shown.texts["finding-both"]
    else:
        assert [row[3] for row in shown.table("finding-both")] == [SUPPORTED, verdict]  # each of several says its own


def check_of(*measures: Measure) -> Finding:
    return Finding("c", "C", "Theorem 2.1", CHECK, "s", list(measures), "a rule")


@pytest.mark.parametrize(
    "measures, sentence",
    [
        ([Measure("a", 1.0, side="below", limit=50.0)], "Holds; the worst case uses 2% of what is allowed."),
        ([Measure("a", 1e-9, side="below", limit=1.0)], "Holds; the worst case uses under 0.1% of what is allowed."),
        ([Measure("a", 0.0, side="below", limit=1.0)], "Holds; the worst case uses 0% of what is allowed."),
        (
            [Measure("a", 1.0, side="below", limit=50.0), Measure("b", 3.0, side="below", limit=4.0), Measure("c", 99.0)],
            "Holds; the worst case uses 75% of what is allowed.",
        ),
        ([Measure("a", 15.0, side="above", limit=10.0)], "Holds; the closest is a: 15, above the 10 asked."),
        ([Measure("a", 10.01, side="above", limit=10.0)], "Holds; the closest is a: it comes to the 10 asked."),
        ([Measure("a", -1.0, side="below", limit=0.0)], "Holds."),
        (
            [Measure("a", 1.0, side="below", limit=50.0), Measure("b", 5.0, "m", side="below", limit=4.0)],
            "Does not hold: b is 5 m and has to be below 4.",
        ),
        ([Measure("a", math.nan, side="below", limit=50.0)], "A number is missing."),
    ],
)
def test_how_close_a_check_came(measures, sentence):
    assert pages.closeness(check_of(*measures)) == sentence


def test_an_observation_of_one_quantity_tells_its_extremes():
    def told(*measures):
        return pages.in_short(Finding("o", "O", "Section 1", OBSERVATION, "s", list(measures)))

    ranks = [Measure("ViT: a rank", 3.0), Measure("OSA: a rank", 26.123, "rows"), Measure("ViT, 6: a rank", -1.0)]
    assert told(*ranks) == "A rank: least −1 for ViT, 6; largest 26.1 rows for OSA."
    assert told(*ranks, Measure("ViT: a norm", 5.0)) == told(ranks[0]) == "ViT: a rank is 3."
    assert told(*ranks, Measure("E-SPA: a rank", math.nan)) == "ViT: a rank is 3."


def test_what_no_interval_is_said_of_says_of_how_many_runs_it_is():
    asked = {"unit": "points", "side": "above", "limit": -0.5, "verdict": UNDECIDED}
    of_one, of_three = Measure("A − B", 0.46, n=1, **asked), Measure("A − B", 0.46, low=0.1, high=0.8, n=3, **asked)
    told = [pages.in_short(Finding("c", "C", "Section 5", CLAIM, "s", [each], rule="r")) for each in (of_one, of_three)]
    assert told == [f"A − B is 0.46 points ({of}); above −0.5 is asked." for of in ("1 run", "0.10 to 0.80")]


# --- cautions


def cautions() -> list[str]:
    """In full; each begins as it is in short."""
    told = sentences.cautions(results.read())
    assert all(full.lower().startswith(short.lower()) for short, full in told.items())
    return list(told.values())


def test_nothing_is_told_first_where_there_is_nothing_to_tell(project):
    assert cautions() == []
    report.main([])
    assert "\n>" not in read_page("report.md") and "Read with care" not in read_page("report.html")
    assert "None of the values that the paper states is departed from, as we read it." in read_page("report.html")


OTHER_CODE = (
    "runs of Table 2 by other code: {codes}, where {here} is here; `dvc repro` trains them again, `python -m "
    "pipeline.replay` confirms them where every bit agrees."
)


@pytest.mark.parametrize("count", [1, 9])
def test_runs_of_other_code_are_told(project, count):
    if count == 9:
        for variant, seed in itertools.product(VARIANTS, SEEDS):
            edit_record(f"{variant}/{seed}", code_sha256="0ddc0de5" * 8)
    edit_record("vit/1", code_sha256="badc0de5" * 8)
    codes = "badc0de5" if count == 1 else "0ddc0de5, badc0de5"
    assert cautions() == [f"{count} of 9 {OTHER_CODE.format(codes=codes, here=record.code_sha256()[:8])}"]


def test_a_replay_of_todays_code_confirms_a_run(project):
    edit_record("vit/1", code_sha256="badc0de5" * 8, replays=[{"code_sha256": record.code_sha256(), "steps": 7}])
    assert cautions() == []
    edit_record("vit/1", replays=[{"code_sha256": "f00" * 8, "steps": 7}])
    assert len(cautions()) == 1


def test_uncommitted_changes_are_told(project):
    edit_record("vit/1", environment={"git_dirty": True})
    assert cautions() == ["1 of 9 runs with uncommitted changes."]
    edit_record("vit/1", environment={"git_dirty": None})  # made where there is no git
    assert cautions() == []


def test_other_data_are_told(project):
    edit_record("vit/1", data_sha256="beef" * 16)
    assert cautions() == ["Runs on different data: see Provenance."]


def test_runs_older_than_the_rules_are_told(project):
    edit_paper(lambda raw: raw.update(rules_since="2026-11-22T10:00:00+01:00"))
    edit_record("vit/1", started_at="2026-11-22T08:59:59+00:00")
    edit_record("vit/2", started_at="2026-11-22T09:00:00+00:00")
    assert cautions() == ["1 of 9 runs of Table 2 older than the rules: those date from 2026-11-22 09:00 UTC."]


def test_a_study_of_other_code_is_told(project):
    files.write_json(STUDY / "record.json", {"source_sha256": "other"})
    assert cautions() == ["1 of 1 studies measured by other code: fake_2_1."]


def test_runs_of_studies_by_other_code_are_told(project):
    made = files.read_json("paper_outputs/runs/table_2/vit/1/record.json")
    for seed, code in enumerate((made["code_sha256"], "badc0de5" * 8, "0ddc0de5" * 8)):
        files.write_json(f"runs/fake_2_1/vit+a=b/{seed}/record.json", made | {"code_sha256": code})
    assert cautions() == ["2 runs of studies by other code: fake_2_1 2."]
    report.main([])
    assert json.loads(read_page("provenance.json"))["study_runs_by_other_code"] == {"fake_2_1": 2}
    assert ["study_runs_by_other_code", "fake_2_1 2"] in Page(read_page("report.html")).table("provenance")


def test_missing_and_diverged_runs_are_told_first(project):
    shutil.rmtree("paper_outputs/runs/table_2/vit/0")
    path = OUTPUTS / "tables/runs.csv"
    table = pd.read_csv(path)
    for (variant, seed), status in {("vit", 0): "missing", ("osa_qr", 1): "diverged"}.items():
        row = table.index[(table["variant"] == variant) & (table["seed"] == seed)]
        edit_csv(path, "status", row, status)
        for column in ("train_loss", "test_loss", "test_accuracy"):
            edit_csv(path, column, row, math.nan)
    edit_csv(path, "diverged_at_step", row, 819)
    edit_csv(OUTPUTS / "tables/summary.csv", "n_finished", 0, 2)
    edit_csv(OUTPUTS / "tables/summary.csv", "n_diverged", 0, 1)
    report.main([])
    short = "Read with care: 1 of 9 runs not trained yet, 1 of 9 runs diverged."
    for name in ("report.md", "result.md", "report.html"):
        head = read_page(name).split("Figure 1")[0]
        assert "8 of 9 runs trained, 1 diverged" in head and short in head
    page = Page(read_page("report.html"))
    assert "1 of 9 runs not trained yet: vit/0." in page.texts["result"]
    assert "1 of 9 runs diverged: osa_qr/1 have no final accuracy." in page.texts["result"]
    assert page.table("table-2")[0][-1] == "2; 1 diverged"
    assert ["OSA (QR)", "1", "diverged; at step 819", "–", "–", "–"] in [row[:6] for row in page.table("runs-of-table-2")]
    assert ["ViT", "0", "missing", "–", "–", "–", "–"] in page.table("runs-of-table-2")


def test_one_seed_has_no_spread(project):
    for column in ("test_accuracy", "test_loss", "train_loss"):
        for name in ("std", "low", "high"):
            edit_csv(OUTPUTS / "tables/summary.csv", f"{column}_{name}", slice(None), math.nan)
    edit_csv(OUTPUTS / "tables/summary.csv", "n_finished", slice(None), 1)
    edit_csv(OUTPUTS / "tables/curves.csv", "n", slice(None), 1)
    assert cautions() == ["One run per model: no spread, no interval, and no comparison of models is decided."]
    page = render()
    assert "±" not in str(page.table("table-2")) and "band" not in page.texts["figure-1"]


def test_departures_are_told_first_and_listed(project):
    def change(raw):
        raw["train"] |= {"epochs": 3, "eps": 1e-6}
        raw["variants"]["vit"]["overrides"] = {"train": {"batch_size": 61}}
        raw["variants"]["osa_exact"]["overrides"] = {"train": {"learning_rate": 1.0}}  # ours: it departs from nothing

    write_params(change)
    write_tables()
    assert cautions() == [
        "Not the paper's setting: train.epochs is 3 and not 10 (OSA (QR), ViT); train.batch_size is 61 and not 128 (ViT); "
        "a difference to its numbers is no failure to replicate them.",
        "Not our recipe, where the paper states nothing: train.eps is 1e-06 and not 1e-08 (OSA (QR), ViT).",
    ]
    assert "2 of the values that the paper states are departed from, as we read it." in render().texts["limitations"]
    assert pages.table_2(results.read()).columns == ["Model", "Ours", "n"]  # and no comparison


def test_provenance_lists_every_value_that_occurs(project):
    edit_record("vit/1", resumptions=2, environment={"git_commit": None, "torch": "2.12.0"})
    edit_record("vit/2", code_sha256="before", replays=[{"code_sha256": record.code_sha256(), "steps": 7}])
    report.main([])
    facts = json.loads(read_page("provenance.json"))
    assert facts["runs"]["torch"] == {"2.11.0": 8, "2.12.0": 1} and facts["runs"]["commit"]["not recorded"] == 1
    assert facts["code_sha256_here"] == record.code_sha256() and facts["stale_studies"] == []
    known = {"number": 9, "trained_by_this_code": 8, "begun_alike_by_this_code": 1, "neither": 0}
    assert facts["all_runs"] == facts["table_2_runs"] == known | {"least_steps_compared": 7}
    shown = Page(read_page("report.html")).table("provenance")
    assert ["torch", "2.11.0 (8 runs); 2.12.0 (1 run)"] in shown and ["resumptions", "2"] in shown
    assert all([f"{of}_runs_begun_alike_by_this_code", "1"] in shown for of in ("table_2", "all"))
    told = Page(read_page("report.html")).texts["limitations"]
    assert "8 were trained by the code that is here. Of 1 it is known that this code begins" in told
    assert "over 7 steps or more" in told and "Table 2 was trained on" not in told, "all on one machine"


def test_other_machines_of_studies_are_a_limitation(project):
    files.write_json("runs/fake_2_1/vit+a=b/0/record.json", files.read_json("paper_outputs/runs/table_2/vit/1/record.json"))
    assert "runs of studies on" not in render().texts["limitations"]
    edit_record("vit/1", environment={"device_name": "Another CPU"})
    files.write_json("runs/fake_2_1/vit+a=b/0/record.json", files.read_json("paper_outputs/runs/table_2/vit/1/record.json"))
    edit_record("vit/1", environment={"device_name": "A CPU"})
    assert "and runs of studies on Another CPU." in render().texts["limitations"]


def test_limitations_and_compute_come_from_the_files(project):
    edit_record("vit/1", environment={"device": "cuda"}, seconds=7200.0)
    files.write_json("runs/fake_2_1/vit+a=b/0/record.json", files.read_json("paper_outputs/runs/table_2/vit/1/record.json"))
    page, compute = render(), results.compute(results.read())
    assert "2 of 2 claims remain undecided or not evaluated." in page.texts["limitations"]
    assert (
        "Table 2 is of 3 seeds, of one data set, mnist, and of one recipe at depth 6, embed_dim 64, num_heads 4."
        in page.texts["limitations"]
    )
    assert "1 of its 9 runs was made on a GPU." in page.texts["limitations"]
    assert compute["fake_2_1"] == {"runs": 1, "hours": 2.0, "machines": ["Imaginary CPU, 2 threads"]}
    whole = sum(each["hours"] for each in compute.values())
    assert f"Training took {whole:.1f} hours on Imaginary CPU, 2 threads." in page.texts["compute"]
    assert "fake_2_1, 1 run: 2.0." in page.texts["compute"]


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (
            lambda: write_params(lambda raw: raw["train"].update(learning_rate=0.001)),
            "paper_outputs/runs/table_2/osa_qr/0/record.json was made with other parameters",
        ),
        (lambda: write_params(lambda raw: raw["run"].update(seeds=[0, 1])), "`dvc repro tables`"),
        (lambda: (OUTPUTS / "tables/curves.csv").unlink(), "paper_outputs/tables/curves.csv"),
        (lambda: shutil.rmtree(STUDY), "`dvc repro fake_2_1`"),
    ],
    ids=["records of other parameters", "tables of other runs", "no table", "no study"],
)
def test_what_is_missing_or_does_not_belong_is_named(project, capsys, damage, sentence):
    damage()
    with pytest.raises(SystemExit):
        report.main([])
    assert sentence in capsys.readouterr().err


# --- pages


def test_the_page_stands_alone_and_its_links_lead_somewhere(drawing):
    files.write_text("README.md", "")
    report.main([])
    text = read_page("report.html")
    page = Page(text)
    assert not {"link", "img", "iframe"} & set(page.tags) and not re.search(r"url\((?!#)|@import|<script src", text)
    assert len(page.ids) == len(set(page.ids))
    anchors = {target[1:] for target in page.targets if target.startswith("#")}
    assert {"result", "claims-about-the-experiment", "beyond-the-paper", "limitations", "compute", "runs"} <= anchors
    assert anchors <= set(page.ids)
    links = {target for target in page.targets if not target.startswith("#")} - {params.load_paper().link}
    assert {"../README.md", "tables/curves.csv", "studies/fake_2_1/errors.csv", "table_2.csv"} <= links
    assert all((OUTPUTS / link).is_file() for link in links)


def test_the_first_screen_has_answer_table_and_figure_and_the_rest_unfolds(drawing):
    text = pages.render(results.read())["report.html"]
    head, rest = text[text.index("<header") : text.index("</header>")], text[text.index("</header>") :]
    assert "Undecided about OSA: of Section 5’s 2 claims" in head and params.load_paper().link in head
    assert head.count("<table") == 1 and 'id="loss-curves-' in head
    page = Page(text)
    for found in results.read().found.values():
        assert all(f"finding-{finding.id.replace('_', '-')}" in page.ids for finding in found)
    assert rest.count("<details id=") == rest.count("<details") == 1 + 4 + 2


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_link_to_a_finding_unfolds_it(project):
    report.main([])
    url = (OUTPUTS / "report.html").resolve().as_uri()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--user-data-dir=browser"]
    command = [CHROMIUM, *options, "--dump-dom", f"{url}#finding-fake-rank"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert re.findall(r'<details id="([^"]*)" open', shown) == ["finding-fake-rank"]


def test_studies_stand_in_order_under_the_headings_of_their_places(project, monkeypatch):
    third = types.SimpleNamespace(__doc__="How fast it is.", place=21, findings=lambda *_: [claim("z", SUPPORTED, ())])
    known = studies.module
    monkeypatch.setattr(studies, "names", lambda: ["fake_2_1", "quite_new", "section_5"])
    monkeypatch.setattr(studies, "module", lambda name: third if name == "quite_new" else known(name))
    text = pages.render(results.read())["report.html"]
    expected = ["Claims about the experiment", "Section 5", "Theorems and costs", "Quite new", "How fast it is."]
    expected += ["Beyond the paper", "Theorem 2.1", "Whether errors grow.", "Limitations"]
    main = text[text.index("<main>") :]
    assert [main.index(f">{words}<") for words in expected] == sorted(main.index(f">{words}<") for words in expected)


def test_a_formula_begins_as_it_is_written(fakes):
    studies.module("fake_2_1").__doc__ = "Theorem 2.1: exp(S) is\northogonal.\n\nMore."
    assert pages.study_heading("fake_2_1")["question"] == "exp(S) is orthogonal."


@pytest.mark.parametrize(
    "text, markdown, page",
    [
        ("run `dvc repro x_*`", "run `dvc repro x_*`", "run <code>dvc repro x_*</code>"),
        ("`<i>` & *b*", "`&lt;i&gt;` &amp; \\*b\\*", "<code>&lt;i&gt;</code> &amp; *b*"),
        ("one ` alone*", "one \\` alone\\*", "one ` alone*"),
        ("train.eps _y_ [z]\nend", "train.eps \\_y\\_ \\[z\\]<br>end", "train.eps _y_ [z]\nend"),
        ("‖J‖_F < `d_v`", "‖J‖<sub>F</sub> &lt; `d_v`", "‖J‖<sub>F</sub> &lt; <code>d_v</code>"),
        (
            "*On A* has L_LF, not OSA_XYZ",
            "\\*On A\\* has L<sub>LF</sub>, not OSA_XYZ",
            "<em>On A</em> has L<sub>LF</sub>, not OSA_XYZ",
        ),
        ("see `params.yaml`", "see `params.yaml`", 'see <a href="../params.yaml"><code>params.yaml</code></a>'),
    ],
)
def test_text_has_code_formulas_and_links_and_no_other_meaning(drawing, text, markdown, page):
    assert pages.markdown(text) == markdown
    assert pages.prose(text) == page


def test_text_of_findings_and_params_is_escaped(drawing, fakes):
    write_params(lambda raw: raw["labels"].update(vit=EVIL))
    table = Table([EVIL, "b"], [[EVIL, EVIL]], note=EVIL)
    measure = Measure(EVIL, 1.0, EVIL, note=EVIL, verdict=SUPPORTED)
    fakes[:] = [Finding("evil", EVIL, EVIL, CLAIM, EVIL, [measure], EVIL, table, caption=EVIL, remark=EVIL, sources=["x"])]
    report.main([])
    for name in ("report.html", "report.md", "table_2.md", "result.md"):
        text = read_page(name)
        assert text.count("<script") == (name == "report.html") and "&lt;script&gt;" in text
    assert Page(read_page("report.html")).texts["finding-evil"].count(EVIL) > 10  # and reads as it was written
    assert "\\| \\*b\\*" in read_page("table_2.md")
    ElementTree.parse(OUTPUTS / "figure_1.svg")


def test_models_that_the_paper_does_not_have_say_so(project):
    rendered = pages.render(results.read())
    for name in ("report.md", "table_2.md", "result.md"):
        assert rendered[name].count("| OSA (exact)<br>ours, not in the paper | – |") == 1
    assert rendered["report.html"].count("ours, not in the paper") == 1


def test_a_model_is_added_in_params_alone(drawing):
    def change(raw):
        raw["run"]["variants"] = ["vit", "wide_vit"]
        raw["variants"]["wide_vit"] = raw["variants"]["vit"] | {"overrides": {"model": {"embed_dim": 20}}}

    write_params(change)
    write_tables()
    report.main([])
    for name in ("report.md", "report.html", "table_2.md", "result.md", "figure_1.svg"):
        assert "wide_vit" in read_page(name)
    assert "<code>dvc repro train@vit-0</code>" in read_page("report.html")
    assert "| wide_vit<br>ours, not in the paper |" in read_page("report.md")


def test_the_same_files_give_the_same_bytes(drawing):
    def outputs():
        return {str(path): path.read_bytes() for path in OUTPUTS.rglob("*") if path.is_file()}

    report.main([])
    before = outputs()
    stage = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["report"]
    declared = {next(iter(out)) for out in stage["outs"]}
    inputs = ("paper_outputs/tables/", "paper_outputs/studies/")
    made = {name for name in before if not name.startswith(inputs)}
    assert {"paper_outputs/figures" if "/figures/" in name else name for name in made} == declared
    report.main([])
    assert outputs() == before


def test_figures_of_findings_that_are_gone_are_removed(project):
    for name in ("figures/gone.svg", "figures/fake_errors.png"):
        files.write_text(OUTPUTS / name, "")
    report.main([])
    assert [path.name for path in (OUTPUTS / "figures").iterdir()] == ["fake_errors.svg"]


def test_figure_1(drawing):
    report.main([])
    svg = ElementTree.parse(OUTPUTS / "figure_1.svg").getroot()
    words = {"".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Train loss", "Test loss", "Epoch", "OSA (QR)", "ViT", "OSA (exact)"} <= words
    png = (OUTPUTS / "figure_1.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG") and (width, height) == (1440, 760)
    assert matplotlib.__name__.encode() not in png
    for variant in VARIANTS:
        look = looks.look(variant)
        assert f"stroke: {look.colour}" in read_page("figure_1.svg")
        assert read_page("report.html").count(f"stroke: {looks.on_page(look.colour)}") > 2  # its curves and its rows


def test_panels_on_a_page_share_no_id_and_follow_its_colours():
    use = '<use xlink:href="#a" style="clip: url(#a); fill: #1a1a1a"/>'
    svg = f'<?xml version="1.0"?>\n<svg width="1pt" height="2pt"><g id="a"/>{use}</svg>'
    assert figures.inline(svg, "left", 'a "b"') == (
        '<svg role="img" aria-label="a &quot;b&quot;"><g id="left-a"/>'
        '<use xlink:href="#left-a" style="clip: url(#left-a); fill: currentColor"/></svg>'
    )


def test_formulas_of_a_figure_have_powers_and_indices():
    figure = Figure(figsize=(3, 2))
    figure.subplots().set(xlabel="‖J‖_F < 2d_v", title="N^1.98")
    svg = figures.svg(figure)
    (label,) = (text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text") if "‖J‖" in text.text)
    assert "".join(label.itertext()).replace("\u200b", "") == "‖J‖F < 2dv"
    assert [float(part.get("dy")[:-2]) * float(part.get("font-size", "100%")[:-1]) for part in label] == [21, -21, 21, -21]
    assert "N^1" not in re.sub("<!--.*?-->", "", svg)


def test_every_colour_is_seen_on_the_dark_page():
    for colour in (*looks.PALETTE, "#002b5c", "#000000"):
        shown = looks.on_page(colour)
        assert (shown == colour) == (
            colour not in (looks.INK, "#0072b2", "#882255", "#332288", "#aa4499", "#002b5c", "#000000")
        )
    assert looks.on_page("#332288").startswith("light-dark(#332288, color-mix(in srgb, #332288, #fff ")


def test_every_model_of_ones_own_has_its_look(monkeypatch):
    monkeypatch.setattr(looks, "_places", {name: place for place, name in enumerate(looks.MODELS)})
    names = [f"v{i}" for i in range(35)]
    found = [looks.look(name, names) for name in (*looks.MODELS, *names)]
    assert len(set(found)) == len(found) and found == [looks.look(name) for name in (*looks.MODELS, *names)]
    assert len({look.dashes for look in found[:6]}) == 6
    assert len({looks.look(name).colour for name in (*looks.MODELS, *names[:4])}) == 11


@pytest.mark.parametrize("method, model", looks.METHODS.items())
def test_a_method_looks_like_its_model(method, model):
    assert looks.look(method) == looks.look(model)


# --- README


def test_readme_gets_the_result_between_its_markers(project):
    report.main([])
    Path("README.md").write_text("above\n<!-- results -->\nold\n<!-- /results -->\nbelow\n")
    report.main(["--readme"])
    first = Path("README.md").read_text()
    assert first.startswith("above\n<!-- results -->\n**") and first.endswith("\n<!-- /results -->\nbelow\n")
    assert "old" not in first and "| OSA (QR) | 97.2 |" in first
    report.main(["--readme"])
    assert Path("README.md").read_text() == first


def test_readme_without_markers_is_an_error(project):
    text = "<!-- /results --> <!-- results -->\n"
    with pytest.raises(UserError, match="<!-- results -->"):
        report.with_result(text, "result")
