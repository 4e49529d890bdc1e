"""The report says what the files say, each number at its place, in the same bytes each time, whatever is missing."""

import csv
import itertools
import json
import math
import re
import shutil
import struct
import types
import xml.etree.ElementTree as ElementTree
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
from pipeline.reporting import figures, looks, pages, results
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
        "config": params.resolve(settings, variant).model_dump(mode="json"),
        "data_sha256": "da7a" * 16,
        "code_sha256": record.code_sha256(),
        "environment": {
            "git_commit": "c0ffee",
            "git_dirty": False,
            "python": "3.11.14",
            "torch": "2.11.0",
            "device_name": "Imaginary CPU",
            "num_threads": 2,
            "platform": "Linux",
        },
        "started_at": "2099-01-01T00:00:00+00:00",
        "seconds": seconds,
        "images_per_second": speed,
        "resumptions": 0,
    }
    files.write_json(f"runs/table_2/{variant}/{seed}/record.json", made)


def edit_csv(path: Path, column: str, rows, value) -> None:
    table = pd.read_csv(path)
    if column in table:
        table[column] = table[column].astype(object)
    table.loc[rows, column] = value
    table.to_csv(path, index=False)


def edit_record(run: str, **changes) -> None:
    path = Path("runs/table_2", run, "record.json")
    made = files.read_json(path)
    environment = made["environment"] | changes.pop("environment", {})
    files.write_json(path, made | {"environment": environment} | changes)


def read_page(name: str = "report.md") -> str:
    return (OUTPUTS / name).read_text()


def sections(text: str) -> dict[str, str]:
    """The parts of a Markdown page by their headings."""
    parts = re.split(r"^#+ (.*)$", text, flags=re.M)
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))


def rows(section: str) -> list[list[str]]:
    """The cells of the Markdown tables of a section, without their heads."""
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [cells for cells in lines[2:] if not cells[0].startswith(":")]


# --- numbers at their places


def test_every_number_of_the_tables_is_that_of_its_file(project):
    report.main([])
    runs, summary = (pd.read_csv(OUTPUTS / f"tables/{name}.csv") for name in ("runs", "summary"))
    page, paper = sections(read_page()), params.load_paper().table_2
    for row, (_, *shown) in zip(summary.itertuples(), rows(page["Table 2. Test accuracy, per cent"]), strict=True):
        known, mean = row.variant in paper, 100 * row.test_accuracy_mean
        difference = f"{mean - paper[row.variant]:+.2f}".replace("-", "−") if known else "–"
        ours = f"{mean:.2f} ± {100 * row.test_accuracy_std:.2f}"
        assert shown == [f"{paper[row.variant]:.1f}" if known else "not reported", ours, difference, "3"]
    for row, (_, *shown) in zip(summary.itertuples(), rows(page["Spread and cost"]), strict=True):
        made = [files.read_json(f"runs/table_2/{row.variant}/{seed}/record.json") for seed in SEEDS]
        minutes, speed = (sum(each[key] for each in made) / 3 for key in ("seconds", "images_per_second"))
        assert shown == [
            f"{100 * row.test_accuracy_low:.2f} to {100 * row.test_accuracy_high:.2f}",
            f"{100 * row.test_accuracy_min:.2f} to {100 * row.test_accuracy_max:.2f}",
            f"{row.test_loss_mean:.4f} ± {row.test_loss_std:.4f}",
            f"{row.train_loss_mean:.4f} ± {row.train_loss_std:.4f}",
            "301\u202f858",
            f"{minutes / 60:.1f}",
            f"{speed:,.0f}".replace(",", "\u202f"),
        ]
    for row, (_, *shown) in zip(runs.itertuples(), rows(page["Every run"]), strict=True):
        minutes = files.read_json(f"runs/table_2/{row.variant}/{row.seed}/record.json")["seconds"] / 60
        numbers = [f"{100 * row.test_accuracy:.2f}", f"{row.test_loss:.4f}", f"{row.train_loss:.4f}", f"{minutes:.1f}"]
        assert shown == [str(row.seed), "finished", *numbers]


@pytest.mark.parametrize(
    "path, column, headings",
    [
        ("tables/summary.csv", "test_accuracy_std", {"Table 2. Test accuracy, per cent"}),
        ("tables/summary.csv", "test_accuracy_mean", {"Table 2. Test accuracy, per cent"}),
        ("tables/summary.csv", "test_accuracy_high", {"Spread and cost"}),
        ("tables/summary.csv", "train_loss_mean", {"Spread and cost"}),
        ("tables/runs.csv", "test_loss", {"Every run"}),
        ("studies/fake_2_1/errors.csv", "error", {"Findings", "The error stays small"}),
        ("studies/fake_2_1/errors.csv", "rank", {"Findings", "Rank"}),
    ],
)
def test_a_number_of_a_file_changes_the_page_at_its_place_alone(project, path, column, headings):
    before = pages.render(results.read())["report.md"]
    path = OUTPUTS / path
    row = len(pd.read_csv(path)) - 1 if "errors" in path.name else 0
    edit_csv(path, column, row, 1.7 * pd.read_csv(path).loc[row, column])
    after = pages.render(results.read())["report.md"]
    old, new = sections(before), sections(after)
    assert {heading for heading in new if new[heading] != old[heading]} == headings


def test_numbers_of_a_finding_stand_in_its_section(project):
    report.main([])
    page = sections(read_page())
    check = page["The error stays small"]
    assert "- largest error: **1.3 × 10⁻⁶ units**; has to be below 3.1 × 10⁻⁵\n" in check
    assert "upported" not in check  # a theorem never is
    assert "**Passes.** Every error is below its tolerance. Holds; the worst case uses 4.19% of what is allowed." in check
    assert "| 67 | 1.3e-06 |" in check and "They grow elsewhere." in check and "By depth." in check
    assert "![Errors against depth.](figures/fake_errors.svg)" in check
    assert "From `paper_outputs/studies/fake_2_1/*.csv`, `paper_outputs/tables/layers.csv`." in check
    assert "- rank: **47 tokens (40.7 to 53.9)**; n = 3\n" in page["Rank"] and "**Observation.**" in page["Rank"]
    matches = page["Claim matches"]
    assert "OSA − ViT: **0.437 points (−0.11 to 0.83)**; has to be above −0.5; n = 3; as said" in matches
    assert "From" not in matches  # it has no file of its own


@pytest.mark.parametrize("note, shown", [("", "n = 3"), ("worst", "n = 3; worst"), ("ViT n = 3, 1 missing",) * 2])
def test_a_measure_says_once_how_many_runs_are_behind_it(note, shown):
    finding = Finding("f", "F", "Section 5", OBSERVATION, "s", [Measure("m", 1.0, n=3, note=note)])
    assert pages.measure_text(finding.measures[0], finding)["note"] == shown


def test_findings_and_their_measures_are_files_for_machines(project):
    report.main([])
    found = {each["id"]: each for each in json.loads(read_page("findings.json"))}
    assert list(found) == ["matches", "beats", "fake_errors", "fake_rank"]
    check = found["fake_errors"]
    assert (check["study"], check["kind"], check["verdict"]) == ("fake_2_1", "check", "passes")
    assert check["measures"][0]["value"] == 1.3e-6 and check["measures"][0]["low"] is None
    assert check["sources"] == ["paper_outputs/studies/fake_2_1/*.csv", "paper_outputs/tables/layers.csv"]
    assert not {"figure", "table"} & set(check) and found["fake_rank"]["verdict"] == ""
    with open(OUTPUTS / "measures.csv") as file:
        first, *_, last = csv.DictReader(file)
    assert (first["study"], first["finding"], first["finding_verdict"]) == ("section_5", "matches", "undecided")
    assert (first["value"], first["low"], first["limit"], first["n"]) == ("0.437", "-0.11", "-0.5", "3")
    assert (last["finding"], last["value"], last["kind"], last["limit"]) == ("fake_rank", "47", "observation", "")


@pytest.mark.parametrize("template", sorted(pages.TEMPLATES.glob("*.j2")), ids=lambda path: path.name)
def test_no_number_is_typed_into_a_template(template):
    text = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", "", template.read_text(), flags=re.S)
    text = re.sub(r"<[^>]*>", "", text)
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
    ],
)
def test_the_headline_is_about_osa(project, fakes, verdicts, headline, sentence):
    fakes[:] = [claim(f"c{i}", verdict, ("osa_qr", "vit")) for i, verdict in enumerate(verdicts)]
    fakes.append(claim("ablation", NOT_SUPPORTED, ("vit", "vit_noskip")))  # is not about OSA, and counts elsewhere
    of = results.read()
    page = pages.render(of)
    for name in ("result.md", "report.md"):
        assert f"**{headline}: Of the 2 claims about it, {sentence}**" in page[name]
    assert f'<p class="verdict">{headline}</p>' in page["report.html"]
    assert f"<strong>Of the 2 claims about it, {sentence}</strong>" in page["report.html"]
    counted = results.verdict(of)
    assert counted["claims_about_osa"]["total"] == 2 and counted["claims"]["total"] == 3
    assert counted["claims"]["not_supported"] == 1 + verdicts.count(NOT_SUPPORTED)


def test_without_a_claim_about_osa_the_headline_says_so(project, fakes):
    fakes[:] = []
    of = results.read()
    assert results.verdict(of)["about_osa"] == NOT_EVALUATED
    assert "**OSA is not evaluated: Of the 0 claims about it, none is evaluated.**" in pages.render(of)["report.md"]


def test_claims_of_other_studies_are_not_in_the_headline(project, monkeypatch):
    other = claim("deep", NOT_SUPPORTED, ("osa_qr",))
    monkeypatch.setattr(studies.module("fake_2_1"), "findings", lambda *_: [other])
    counted = results.verdict(results.read())
    assert counted["about_osa"] == UNDECIDED and counted["claims"]["not_supported"] == 1
    assert counted["checks"]["total"] == 0


def test_the_verdict_file_has_words_for_keys(project):
    report.main([])
    verdict = json.loads(read_page("verdict.json"))
    assert verdict == {
        "about_osa": "undecided",
        "claims_about_osa": {"total": 2, "supported": 0, "not_supported": 0, "undecided": 2, "not_evaluated": 0},
        "claims": {"total": 2, "supported": 0, "not_supported": 0, "undecided": 2, "not_evaluated": 0},
        "checks": {"total": 1, "passes": 1, "fails": 0, "not_evaluated": 0},
        "observations": 1,
        "models": 3,
        "seeds": 3,
        "runs": {"total": 9, "trained": 9, "diverged": 0},
    }
    text = read_page()
    assert "Of all 2 claims, 2 are undecided. 1 of 1 checks pass." in text
    assert "3 models, 3 seeds: 9 of 9 runs trained, 0 diverged." in text


def test_a_check_that_fails_is_shown_as_failing(project):
    edit_csv(STUDY / "errors.csv", "error", 1, 0.0071)
    report.main([])
    text, page = sections(read_page())["The error stays small"], read_page("report.html")
    assert "**Fails.**" in text
    assert "Does not hold: largest error is 0.0071 units and has to be below 3.1 × 10⁻⁵." in text
    assert page.count('<span class="badge fails">fails</span>') == 2 and 'class="badge passes"' not in page
    assert "0 of 1 checks pass." in page and json.loads(read_page("verdict.json"))["checks"]["fails"] == 1


def test_a_check_without_a_number_is_not_evaluated(project):
    edit_csv(STUDY / "errors.csv", "error", slice(None), math.nan)
    text = sections(pages.render(results.read())["report.md"])["The error stays small"]
    assert "**Not evaluated.**" in text and "Holds" not in text


@pytest.mark.parametrize("verdict", [SUPPORTED, NOT_SUPPORTED, UNDECIDED])
def test_the_verdict_of_a_claim_comes_from_its_measures(project, fakes, verdict):
    good, other = claim("x", SUPPORTED, ("vit",)).measures[0], claim("x", verdict, ("vit",)).measures[0]
    fakes[:] = [Finding("both", "Both", "Section 5", CLAIM, "a sentence", [good, other], "a rule")]
    page = pages.render(results.read())
    badge = f'<span class="badge {verdict.replace(" ", "-")}">{verdict}</span>'
    assert page["report.html"].count(badge) == 3  # the first screen, the overview and its section
    assert f"**{verdict.capitalize()}.**" in sections(page["report.md"])["Both"]
    assert f"; {verdict}; has to be" in sections(page["report.md"])["Both"]  # each of several says its own


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
        ([Measure("a", 15.0, side="above", limit=10.0)], "Holds; the worst case is 1.5 × what is asked."),
        ([Measure("a", -1.0, side="below", limit=0.0)], "Holds."),
        (
            [Measure("a", 1.0, side="below", limit=50.0), Measure("b", 5.0, "m", side="below", limit=4.0)],
            "Does not hold: b is 5 m and has to be below 4.",
        ),
        ([Measure("a", math.nan, side="below", limit=50.0)], ""),
    ],
)
def test_how_close_a_check_came(measures, sentence):
    assert pages.closeness(check_of(*measures)) == sentence


# --- notices


def notices() -> list[str]:
    return pages.notices(results.read())


def test_nothing_is_told_first_where_there_is_nothing_to_tell(project):
    assert notices() == []
    report.main([])
    assert "\n>" not in read_page() and 'class="notices"' not in read_page("report.html")
    assert "\nNone: every value of the recipe" in read_page()


OTHER_CODE = (
    "runs were made by other code than is here (code {codes}; here {here}): `dvc repro` trains them again, "
    "`python -m pipeline.replay` confirms them where every bit agrees."
)


@pytest.mark.parametrize("count", [1, 9])
def test_runs_of_other_code_are_told(project, count):
    if count == 9:
        for variant, seed in itertools.product(VARIANTS, SEEDS):
            edit_record(f"{variant}/{seed}", code_sha256="0ddc0de5" * 8)
    edit_record("vit/1", code_sha256="badc0de5" * 8)
    codes = "badc0de5" if count == 1 else "0ddc0de5, badc0de5"
    assert notices() == [f"{count} of 9 {OTHER_CODE.format(codes=codes, here=record.code_sha256()[:8])}"]


def test_a_replay_of_todays_code_confirms_a_run(project):
    edit_record("vit/1", code_sha256="badc0de5" * 8, replays=[{"code_sha256": record.code_sha256()}])
    assert notices() == []
    edit_record("vit/1", replays=[{"code_sha256": "f00" * 8}])
    assert len(notices()) == 1


def test_uncommitted_changes_are_told(project):
    edit_record("vit/1", environment={"git_dirty": True})
    assert notices() == ["1 of 9 runs were made with uncommitted changes."]
    edit_record("vit/1", environment={"git_dirty": None})  # made where there is no git
    assert notices() == []


def test_other_data_are_told(project):
    edit_record("vit/1", data_sha256="beef" * 16)
    assert notices() == ["Not all runs share the same data: see Provenance."]


def test_runs_older_than_the_rules_are_told(project):
    edit_paper(lambda raw: raw.update(rules_since="2026-11-22T10:00:00+01:00"))
    edit_record("vit/1", started_at="2026-11-22T08:59:59+00:00")
    edit_record("vit/2", started_at="2026-11-22T09:00:00+00:00")
    told = "runs are older than the rules that judge them, which date from 2026-11-22 09:00 UTC."
    assert notices() == [f"1 of 9 {told}"]


def test_a_study_of_other_code_is_told(project):
    files.write_json(STUDY / "record.json", {"source_sha256": "other"})
    assert notices() == ["Measured by other code than is here: fake_2_1."]


def test_missing_and_diverged_runs_are_told_first(project):
    shutil.rmtree("runs/table_2/vit/0")
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
    for name in ("report.md", "report.html"):
        head = read_page(name).split("Table 2")[0]
        assert "8 of 9 runs trained, 1 diverged" in head
        assert "1 of 9 runs not trained yet: vit/0." in head
        assert "1 of 9 runs diverged and have no final accuracy: osa_qr/1." in head
    page = sections(read_page())
    assert rows(page["Table 2. Test accuracy, per cent"])[0][-1] == "2<br>1 diverged"
    assert ["OSA (QR)", "1", "diverged<br>at step 819", "–", "–", "–"] in [row[:6] for row in rows(page["Every run"])]
    assert ["ViT", "0", "missing", "–", "–", "–", "–"] in rows(page["Every run"])


def test_one_seed_has_no_spread(project):
    for column in ("test_accuracy", "test_loss", "train_loss"):
        for name in ("std", "low", "high"):
            edit_csv(OUTPUTS / "tables/summary.csv", f"{column}_{name}", slice(None), math.nan)
    edit_csv(OUTPUTS / "tables/summary.csv", "n_finished", slice(None), 1)
    edit_csv(OUTPUTS / "tables/curves.csv", "n", slice(None), 1)
    assert notices() == ["One run per model: no spread, no interval, and no comparison of models is decided."]
    page = sections(pages.render(results.read())["report.md"])
    table = page["Table 2. Test accuracy, per cent"]
    assert "±" not in table.replace("mean ± standard", "") and "band" not in page["Figure 1. Loss curves"]


def test_departures_are_told_first_and_listed(project):
    def change(raw):
        raw["train"] |= {"epochs": 3, "eps": 1e-6}
        raw["variants"]["vit"]["overrides"] = {"train": {"batch_size": 61}}
        raw["variants"]["osa_exact"]["overrides"] = {"train": {"learning_rate": 1.0}}  # ours: it departs from nothing

    write_params(change)
    write_tables()
    assert notices() == [
        "Not the paper's setting: train.epochs is 3, in the paper 10; train.batch_size is 61, in the paper 128. "
        "A difference to its numbers is no failure to replicate them.",
        "Chosen otherwise than in our recipe, where the paper states nothing: train.eps is 1e-06, in the recipe 1e-08.",
    ]
    assert rows(sections(pages.render(results.read())["report.md"])["Departures from the recipe"]) == [
        ["`train.epochs`", "10", "3", "OSA (QR), ViT"],
        ["`train.eps`", "1e-08<br>our choice", "1e-06", "OSA (QR), ViT"],
        ["`train.batch_size`", "128", "61", "ViT"],
    ]


def test_provenance_lists_every_value_that_occurs(project):
    edit_record("vit/1", resumptions=2, environment={"git_commit": None, "torch": "2.12.0"})
    report.main([])
    facts = json.loads(read_page("provenance.json"))
    assert facts["runs"]["torch"] == {"2.11.0": 8, "2.12.0": 1} and facts["runs"]["commit"]["not recorded"] == 1
    assert facts["code_sha256_here"] == record.code_sha256() and facts["stale_studies"] == []
    text = sections(read_page())["Provenance"]
    assert "| `torch` | 2.11.0 (8 runs)<br>2.12.0 (1 run) |" in text and "| `resumptions` | 2 |" in text


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (
            lambda: write_params(lambda raw: raw["train"].update(learning_rate=0.001)),
            "runs/table_2/osa_qr/0/record.json was made with other parameters",
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


class Page(HTMLParser):
    """The tags of a page, what it links to, its ids and its texts."""

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


def test_the_page_stands_alone(drawing):
    text = pages.render(results.read())["report.html"]
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(page.ids) == len(set(page.ids))
    assert {target for target in page.targets if not target.startswith("#")} == {params.load_paper().link}
    assert {target[1:] for target in page.targets if target.startswith("#")} <= set(page.ids)
    assert {"finding-matches", "finding-fake-errors", "study-fake_2_1"} <= set(page.ids)


def test_headline_claims_and_table_2_are_the_first_screen(project):
    text = pages.render(results.read())["report.html"]
    head = text[text.index("<header>") : text.index("</header>")]
    assert "Undecided about OSA" in head and head.count('class="badge undecided"') == 2
    assert '<a href="#finding-matches">Claim matches</a>' in head and "The error stays small" not in head
    assert head.count("<table") == 1 and all(label in head for label in ("OSA (QR)", "ViT", "OSA (exact)"))


def test_studies_stand_in_order_under_their_questions(project):
    text = pages.render(results.read())["report.md"]
    headings = list(sections(text))
    expected = ["Section 5", "Claim matches", "Claim beats", "Theorem 2.1", "The error stays small", "Rank"]
    assert headings[headings.index("Section 5") :][: len(expected)] == expected
    assert "## Theorem 2.1\n\nWhether errors grow.\n" in text


def test_a_formula_begins_as_it_is_written(fakes):
    studies.module("fake_2_1").__doc__ = "Theorem 2.1: exp(S) is\northogonal.\n\nMore."
    assert pages.study_heading("fake_2_1")["question"] == "exp(S) is orthogonal."


@pytest.mark.parametrize(
    "text, markdown, page",
    [
        ("run `dvc repro x_*`", "run `dvc repro x_*`", "run <code>dvc repro x_*</code>"),
        ("`<i>` & *b*", "`&lt;i&gt;` &amp; \\*b\\*", "<code>&lt;i&gt;</code> &amp; *b*"),
        ("one ` alone*", "one \\` alone\\*", "one ` alone*"),
        ("x_l _y_ [z]\nend", "x_l \\_y\\_ \\[z\\]<br>end", "x_l _y_ [z]\nend"),
    ],
)
def test_code_between_backticks_is_code_and_all_else_is_text(text, markdown, page):
    assert pages.markdown(text) == markdown
    assert pages.prose(text) == page


def test_a_study_is_added_without_an_edit(project, monkeypatch):
    third = types.SimpleNamespace(__doc__="How fast it is.", place=-1, findings=lambda *_: [claim("z", SUPPORTED, ())])
    known = studies.module
    monkeypatch.setattr(studies, "names", lambda: ["fake_2_1", "quite_new", "section_5"])
    monkeypatch.setattr(studies, "module", lambda name: third if name == "quite_new" else known(name))
    text = pages.render(results.read())["report.md"]
    assert text.index("## Quite new\n\nHow fast it is.") < text.index("## Section 5")


def test_text_of_findings_and_params_is_escaped(drawing, fakes):
    write_params(lambda raw: raw["labels"].update(vit=EVIL))
    table = Table([EVIL, "b"], [[EVIL, EVIL]], note=EVIL)
    measure = Measure(EVIL, 1.0, EVIL, note=EVIL, verdict=SUPPORTED)
    fakes[:] = [Finding("evil", EVIL, EVIL, CLAIM, EVIL, [measure], EVIL, table, caption=EVIL, remark=EVIL, sources=["x"])]
    report.main([])
    for name in ("report.html", "table_2.html", "report.md", "table_2.md", "result.md"):
        text = read_page(name)
        assert "<script" not in text and "&lt;script&gt;" in text
    assert Page(read_page("report.html")).texts.count(EVIL) > 10  # and reads as it was written
    assert "\\| \\*b\\*" in read_page("table_2.md")
    ElementTree.parse(OUTPUTS / "figure_1.svg")


def test_models_that_the_paper_does_not_have_say_so(project):
    rendered = pages.render(results.read())
    for name in ("report.md", "table_2.md", "result.md"):
        assert rendered[name].count("| OSA (exact)<br>ours, not in the paper | not reported |") == 1
    assert rendered["table_2.html"].count("ours, not in the paper") == rendered["table_2.html"].count("not reported") == 1


def test_a_model_is_added_in_params_alone(drawing):
    def change(raw):
        raw["run"]["variants"] = ["vit", "wide_vit"]
        raw["variants"]["wide_vit"] = raw["variants"]["vit"] | {"overrides": {"model": {"embed_dim": 20}}}

    write_params(change)
    write_tables()
    report.main([])
    for name in ("report.md", "report.html", "table_2.md", "table_2.html", "result.md", "figure_1.svg"):
        assert "wide_vit" in read_page(name)
    assert "`dvc repro train@vit-0`" in read_page()
    assert "| wide_vit<br>ours, not in the paper |" in read_page()


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
    for name in ("figures/gone.svg", "figures/gone.png"):
        files.write_text(OUTPUTS / name, "")
    report.main([])
    assert {path.name for path in (OUTPUTS / "figures").iterdir()} == {"fake_errors.svg", "fake_errors.png"}


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
        assert f"stroke: {look.on_page}" in read_page("report.html")
        assert f'stroke="{look.on_page}"' in read_page("report.html")


def test_panels_on_a_page_share_no_id_and_follow_its_colours():
    use = '<use xlink:href="#a" style="clip: url(#a); fill: #1a1a1a"/>'
    svg = f'<?xml version="1.0"?>\n<svg width="1pt" height="2pt"><g id="a"/>{use}</svg>'
    assert figures.inline(svg, "left", 'a "b"') == (
        '<svg role="img" aria-label="a &quot;b&quot;"><g id="left-a"/>'
        '<use xlink:href="#left-a" style="clip: url(#left-a); fill: currentColor"/></svg>'
    )


def test_looks_do_not_recur_soon_and_read_without_colour():
    names = [f"v{i}" for i in range(35)]
    found = [looks.look(name, names) for name in (*looks.MODELS, *names)]
    assert len(set(found)) == 42
    assert len({look.dashes for look in found[:6]}) == 6


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


def test_an_overview_counts_the_measures_of_a_claim_where_they_are_many():
    def shown(count: int) -> list[dict]:
        verdicts = [NOT_SUPPORTED, *[UNDECIDED] * (count - 1)]
        measures = [Measure(f"comparison {i}", i, verdict=verdict) for i, verdict in enumerate(verdicts)]
        finding = Finding("many", "Many", "nowhere", CLAIM, "It holds.", measures, rule="Every one is judged.")
        return pages.in_short(finding, [pages.measure_text(measure, finding) for measure in measures])

    few, many = shown(pages.MOST_UNFOLDED), shown(pages.MOST_UNFOLDED + 1)
    assert [each["what"] for each in few] == [f"comparison {i}" for i in range(pages.MOST_UNFOLDED)]
    assert many == [{"what": "9 measures", "value": "1 not supported, 8 undecided", "note": ""}]
