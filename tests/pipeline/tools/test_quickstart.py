"""The quickstart is a workspace of DVC, where the trainings run side by side and nothing is left to do afterwards."""

import re
import signal
import subprocess
import sys
import time
import types

import pytest
import yaml

from pipeline import studies
from pipeline.core import files, params
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.tools import quickstart

TINY = {
    "data": {"source": "sample"},
    "run": {"variants": ["osa_exact", "vit"], "seeds": [0]},
    "model": {"patch_size": 14, "embed_dim": 8, "depth": 1, "num_heads": 2},
    "train": {"epochs": 1, "batch_size": 1000},
    "theorem_4_1": {"seeds": [0]},
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root with params.yaml alone, as the working directory."""
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers are pytest's
    return tmp_path


def dvc(*arguments):
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd="quickstart", capture_output=True, text=True, check=True).stdout


def test_all_is_done_and_dvc_has_nothing_to_do_afterwards(root, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "CHANGES", root / "tiny.yaml")
    monkeypatch.setattr(quickstart, "MEASURED", root / "measured.json")
    quickstart.CHANGES.write_text(yaml.safe_dump(TINY))
    files.write_json(quickstart.MEASURED, {"seconds": {"report": 20}})
    quickstart.main(["--record"])

    told = capsys.readouterr().out
    assert str(root / "quickstart/paper_outputs/report.html") in told
    assert re.search(r"^quickstart: stage 2 of 8: trainings; \d:\d\d gone, about \d:\d\d left$", told, re.MULTILINE)
    dvcs = {"fetch", "tables", "sources", "theorem_4_1", "report", "evaluate@osa_exact-0", "evaluate@vit-0"}
    measured = files.read_json(quickstart.MEASURED)
    assert measured["seconds"].keys() == dvcs | {"trainings", "total"}
    assert measured["took"].startswith(f"{measured['seconds']['total']:.0f} s on ")

    assert dvc("repro").endswith("Data and pipelines are up to date.\n")
    assert set(dvc("stage", "list", "--name-only").split()) == dvcs | {"train@osa_exact-0", "train@vit-0"}
    columns, row = (root / "quickstart/paper_outputs/table_2.md").read_text().splitlines()[2:5:2]
    assert columns == "| Model | Ours | n |" and row.startswith("| OSA (exact)")  # no comparison with the paper
    assert {path.name for path in root.iterdir()} == {"params.yaml", "tiny.yaml", "measured.json", "quickstart"}


def test_its_parameters_show_the_papers_models_and_one_study(root):
    settings = quickstart.prepare()
    assert set(settings.run.variants) <= set(params.load_paper().table_2) and len(settings.run.variants) > 2
    assert settings.data.source == "sample" and len(settings.studies) == 1
    left_out = set(studies.measuring()) - set(settings.studies)
    assert not left_out & set(params.read("quickstart/dvc.yaml")["stages"])


def test_a_study_that_is_wanted_later_has_its_stage(root):
    quickstart.prepare()
    path = root / "quickstart/params.yaml"
    (shown,) = quickstart.prepare().studies
    other = next(name for name in studies.measuring() if name != shown)
    edited = params.read(path) | {shown: False, other: params.read(ROOT / "params.yaml")[other]}
    path.write_text(yaml.safe_dump(edited))
    assert list(quickstart.prepare().studies) == [other]
    stages = params.read(root / "quickstart/dvc.yaml")["stages"]
    assert other in stages and shown not in stages


def test_an_edit_of_its_parameters_stays_and_a_mistake_in_it_is_named(root, capsys):
    quickstart.prepare()
    path = root / "quickstart/params.yaml"
    path.write_text(path.read_text().replace("epochs:", "epoch:"))
    with pytest.raises(SystemExit):
        quickstart.main([])
    assert (
        capsys.readouterr().err == "error: quickstart/params.yaml: train.epoch is not a known key; did you mean 'epochs'?\n"
    )


@pytest.fixture
def work(root, monkeypatch):
    """Work whose modules are what a test says in the shell."""

    def start(log, module):
        with open(log, "w") as output:
            return subprocess.Popen(["sh", "-c", module[1]], stdout=output, start_new_session=True)

    files.write_json(root / "measured.json", {"seconds": {"fetch": 2, "trainings": 40, "tables": 8}})
    monkeypatch.setattr(quickstart, "MEASURED", root / "measured.json")
    monkeypatch.setattr(quickstart, "start", start)
    monkeypatch.setattr(quickstart, "POLL_SECONDS", 0.02)
    (root / "quickstart").mkdir()
    return quickstart.Work(["fetch", "trainings", "tables"])


def test_the_time_left_is_that_of_the_stages_which_run(work, monkeypatch, capsys):
    """Each command is looked at fifteen times before it is over, by a clock that no busy machine hurries."""
    now = [work.start]

    def start(log, module):
        log.write_text(module[1])
        answers = iter([None] * 15)
        return types.SimpleNamespace(poll=lambda: next(answers, 0), returncode=0)

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(quickstart, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(quickstart, "start", start)
    work.do(["dvc", "Stage 'fetch' didn't change, skipping\nRunning stage 'tables':\n"])
    work.do(["pipeline.fan_out", ""], "trainings")
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "quickstart: stage 1 of 2: tables; 0:00 gone, about 0:48 left"  # 40 + 8
    assert re.fullmatch(r"quickstart: stage 2 of 2: trainings; 0:00 gone, about 0:\d\d left", told[1]) and len(told) == 2
    assert work.seconds == {"tables": pytest.approx(15 * 0.02), "trainings": pytest.approx(15 * 0.02)}


def test_a_stage_that_ends_right_after_a_look_is_over(work, monkeypatch):
    answers = iter([None, None])

    def start(log, module):
        log.write_text("Running stage 'tables':\n")
        return types.SimpleNamespace(poll=lambda: next(answers, 0), returncode=0)

    monkeypatch.setattr(quickstart, "start", start)
    work.do(["dvc"])
    assert work.seconds.keys() == {"tables"}


def test_a_stage_that_fails_is_told_in_one_sentence(work):
    fails = "echo \"Running stage 'tables':\"; echo 'error: runs/ is empty: train.'; echo 'ERROR: failed'; exit 3"
    with pytest.raises(UserError, match=r"runs/ is empty: train: see quickstart/dvc\.log; `make quickstart` goes on"):
        work.do(["dvc", fails])


def test_what_runs_is_ended_with_the_quickstart(work, monkeypatch):
    monkeypatch.setattr(work, "_tell", quickstart.stop)
    before = time.monotonic()
    with pytest.raises(UserError, match="^stopped; `make quickstart` goes on from there.$"):
        work.do(["dvc", "sleep 60"])
    assert time.monotonic() - before < 30
