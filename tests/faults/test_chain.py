"""A file that was changed between two stages is named before a page is made of it, or changes nothing.

The changes: cut, edited, emptied, of another type, with NUL bytes, gone, or a copy of a sibling, for each file that a stage
writes; and for each value of a run's JSON files another value.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline import tables
from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.report import __main__ as report
from pipeline.report import chain, page
from pipeline.runs import Run
from tests.pipeline import synthetic

pytestmark = pytest.mark.faults
OUTPUTS, RUNS = Path("paper_outputs"), Path("paper_outputs/runs/table_2")
STUDIES = ("complexity", "recipes", "theorem_4_1", "theorem_4_2", "theorems_4_3_4_4", "trainability", "verdicts")
MACHINE = "intel-r-xeon-r-processor-1-thread"
ENTRIES = chain.entries  # which the project below replaces
OUTS = {}  # of stages, as DVC has them, by their paths


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Two models with two seeds, evaluated, in tables; committed studies and benchmarks; and a lock that DVC writes."""
    from dvc.repo import Repo

    folder = tmp_path_factory.mktemp("chain")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        synthetic.write_project(folder, lambda raw: raw["run"].update(variants=["vit", "osa_ns"]), seeds=[0, 1])
        synthetic.measure()
        kept = [f"benchmarks/{MACHINE}", "benchmarks/amd-epyc-2-threads", "runs/repeats"]
        for name in [*(f"studies/{each}" for each in STUDIES), *kept]:
            shutil.copytree(ROOT / OUTPUTS / name, OUTPUTS / name)
        shutil.copy(ROOT / "dvc.yaml", "dvc.yaml")
        with Repo.init(no_scm=True) as repo, repo.lock:
            for stage in repo.index.stages:
                if all(out.exists for out in stage.outs) and stage.name != "fetch":
                    stage.save_deps(allow_missing=True)
                    for out in stage.outs:
                        out.save()
                    stage.md5 = stage.compute_md5()
                    stage.dump(update_pipeline=False)
                    OUTS.update({Path(out.def_path): out for out in stage.outs})
            known = chain.entries(Path())
            patch.setattr(chain, "entries", lambda folder: known if folder == Path() else [])  # read once, not in each case
            yield params.load()


def written() -> list[Path]:
    """What stages have written and a page reads."""
    return [path for path in sorted(OUTPUTS.rglob("*")) if path.is_file() and path.suffix in (".csv", ".json")]


def contents(path: Path) -> Iterator[bytes | None]:
    """What the file may hold instead; None for a file that is gone."""
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    yield from (None, b"", b"null\n", b"[]\n", b"\0" * len(content), b"\xff\xfe" + content, b"[" * 100_000)
    yield from (lines[0], b"".join(lines[:-1]), content[: len(content) // 2], content + lines[-1], content + b"\0")
    for number in list(re.finditer(rb"\d+\.\d+", content))[:: max(1, content.count(b".") // 3)]:
        value = b"%.6g" % (100 * float(number[0]) + 1)
        yield content[: number.start()] + value + content[number.end() :]
    patterns = (f"*{path.suffix}", f"*/{path.name}", f"*/*/{path.name}")  # siblings, other seeds, other models
    others = [each for folder, pattern in zip(path.parents, patterns, strict=False) for each in folder.glob(pattern)]
    yield from (each.read_bytes() for each in others[:4])


def values(path: Path) -> Iterator[bytes]:
    """For each key of a JSON object: the file without it, and with another value there."""
    whole = files.read_json(path)
    for key, value in whole.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        others = [None, "text", [1], {"a": 1}, not value, -1.5, *([value + 0.01, 100 * value + 1] if number else [])]
        changed = [whole | {key: other} for other in others if other != value]
        changed += [{each: whole[each] for each in whole if each != key}]
        yield from (files.as_json(each).encode() for each in changed)
        yield json.dumps(whole | {key: float("nan")}).encode()


@contextmanager
def replaced(path: Path, content: bytes | None) -> Iterator[None]:
    """Another content inside."""
    before = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def is_new_to_dvc(path: Path) -> bool:
    """Whether `dvc repro` would run the stage that the file is of: make it again, or refuse it by `pipeline check`. A frozen
    stage it would not run, and yet take its outputs as they are."""
    out = next(OUTS[each] for each in (path, *path.parents) if each in OUTS)
    return bool(out.workspace_status()) and not out.stage.frozen


def is_refused() -> bool:
    return bool(chain.compare(report.on_page("paper")).different)


def read(settings) -> list[dict] | str:
    """What the stage `tables` reads of the runs, or why it refuses them."""
    try:
        found = tables.find_runs(settings)
        curves = tables.read_histories(tables.runs_table(found)).to_csv()
    except UserError as error:
        return str(error)
    return [json.dumps(found, sort_keys=True, default=str), curves]


def test_whatever_a_stage_wrote_is_named_where_it_is_changed_before_a_page_and_new_to_dvc(project):
    assert not is_refused() and not any(map(is_new_to_dvc, written()))
    cases, silent = 0, []
    for path in written():
        before = path.read_bytes()
        for content in contents(path):
            if content != before:
                cases += 1
                with replaced(path, content):
                    silent += [] if is_refused() and is_new_to_dvc(path) else [(path, content and content[:80])]
    assert not silent and cases >= 300
    assert not is_refused()


def differing(path: Path, content: bytes) -> set[str]:
    """The keys of a JSON object whose values are others than those in the file."""
    before, after = files.read_json(path), json.loads(content)
    return {key for key in before | after if before.get(key) != after.get(key)}


def test_a_changed_file_of_a_run_is_named_before_tables_are_made_of_it(project, capsys):
    expected, cases, silent = read(project), 0, []
    assert not isinstance(expected, str)
    for path in sorted([*RUNS.glob("*/1/*"), *(OUTPUTS / "evaluations").glob("*/1/*")]):
        for content in [*contents(path), *(values(path) if path.suffix == ".json" else [])]:
            cases += 1
            with replaced(path, content):
                found = read(project)
            if isinstance(found, str):
                is_said = str(path.parent) in found
            else:  # alike, counted as missing, or a measurement that the lock alone knows
                is_said = found == expected or "/".join(path.parts[-3:-1]) in capsys.readouterr().err
                is_said = is_said or (path.stem == "evaluation" and differing(path, content) <= {"test_loss", "layers"})
            if not is_said:
                silent.append((path, content and content[:80], found))
    assert not silent and cases >= 300


def test_a_run_in_the_place_of_another_is_refused(project):
    one, two, other = RUNS / "osa_ns/0", RUNS / "osa_ns/1", RUNS / "vit/1"
    kept = {folder: {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (one, two, other)}
    for sources in ({two: one}, {two: other}, {one: two, two: one}):
        for target, source in sources.items():
            [(target / name).write_bytes(content) for name, content in kept[source].items()]
        assert f"{target}/record.json" in read(project) or f"{source}/record.json" in read(project)
        for target in sources:
            [(target / name).write_bytes(content) for name, content in kept[target].items()]
    assert Run("osa_ns", 1).record() and not is_refused()


def test_a_damaged_lock_is_named(project):
    half = Path("dvc.lock").read_bytes()[:2000] + b"\n: ["
    for other in (b"stages: [1]", b"stages: {report: {outs: [3]}}", b"\xff", b"a: [", half):
        with replaced(Path("dvc.lock"), other), pytest.raises(UserError, match="dvc.lock"):
            list(ENTRIES(Path()))


def test_a_page_of_other_files_is_refused_or_names_them(project, capsys):
    path = OUTPUTS / "studies/theorem_4_2/weights.csv"
    lines = path.read_bytes().splitlines(keepends=True)
    template = page.environment(str).get_template("differing.md.j2")
    for content in (b"\0" * 99, lines[0]):
        with replaced(path, content):
            for arguments in (["paper"], ["paper", "--anyway"]):  # of neither content a page can be made
                with pytest.raises(SystemExit):
                    report.main(arguments)
            errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
            assert len(errors) == 2 and all("studies/theorem_4_2" in line for line in errors)
            compared = chain.compare(report.on_page("paper"))
            assert "`paper_outputs/studies/theorem_4_2`" in template.render(chain=page.plain(compared))
    assert not list(OUTPUTS.glob("report.*"))
    shutil.rmtree(OUTPUTS / "numbers")


def test_a_file_that_no_stage_writes_is_named(project):
    other = OUTPUTS / "benchmarks/another-machine"
    shutil.copytree(OUTPUTS / "benchmarks" / MACHINE, other)
    compared = chain.compare(report.on_page("paper"))
    shutil.rmtree(other)
    assert not compared.different and compared.unknown == [str(other)]
