"""Replaying: today's code is written into a record only where it gives the run's own bits."""

import hashlib
import itertools
import math
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline import replay, runs
from pipeline.core import files, params, record
from pipeline.runs import Run
from pipeline.training import loop
from pipeline.training.loop import Training
from tests.pipeline.synthetic import ROOT
from tests.pipeline.trainings import config, trained, training, write_data, write_params

TODAY = record.code_sha256()
LOCK = Path("dvc.lock")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A project with two runs of another code, one of today's, and a lock. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_params()
        write_data()
        for run in (trained("vit"), trained("osa_exact")):
            age(run)
        trained("vit", 1)
        write_lock(Run("vit", 0), Run("vit", 1))
    return folder


@pytest.fixture(autouse=True)
def project(finished, tmp_path, monkeypatch):
    """A copy of it that a test may change."""
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / "project"))
    monkeypatch.setattr(replay, "make_deterministic", lambda: None)


def age(run: Run) -> None:
    """Makes a run one of another code."""
    files.write_json(run.folder / "record.json", run.read("record") | {"code_sha256": "0" * 64})


def write_lock(*of: Run) -> None:
    """What DVC would have written before the code changed."""

    def locked(path: str) -> dict:
        return {"path": path, "hash": "md5", "md5": hashlib.md5(path.encode()).hexdigest(), "size": 7}

    data = {"path": "data/mnist", "hash": "md5", "md5": "b6c29e96813679dd8c451c9b5ca86e2c.dir", "size": 11, "nfiles": 4}
    stages = {
        f"train@{run.variant}-{run.seed}": {
            "cmd": f"python -m pipeline.train {run.variant} {run.seed}",
            "deps": [data, locked("osa/gone.py"), locked("osa/vit.py")],
            "params": {"params.yaml": {"train": {"eps": 1e-08, "betas": [0.9, 0.999], "none": None}}},
            "outs": [locked(str(run.folder / name)) for name in ("history.csv", "metrics.json", "record.json")],
        }
        for run in of
    }
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump({"schema": "2.0", "stages": stages}, LOCK)


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (LOCK, *Path("runs").rglob("*.*"))}


def replays(run: Run) -> list[dict]:
    return run.read("record").get("replays", [])


def refused(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        replay.main(list(arguments))
    assert caught.value.code == 1


def test_where_every_bit_agrees_todays_code_is_written_down(capsys):
    before, run = contents(), Run("vit", 0)
    assert not runs.is_current(run, config("vit"), None)
    replay.main([])
    assert capsys.readouterr().out == f"2 of 2 runs begin with the same bits under today's code {TODAY[:8]}.\n"
    (entry,) = replays(run)
    assert (entry["code_sha256"], entry["steps"]) == (TODAY, 2)
    assert entry["environment"].keys() >= {"device_name", "num_threads", "torch", "git_commit"}
    assert runs.is_current(run, config("vit"), None)
    records = {str(Run(variant, 0).folder / "record.json") for variant in ("vit", "osa_exact")}
    assert {path for path, content in contents().items() if content != before[path]} == {*records, str(LOCK)}
    with_entry = run.read("record")
    assert {key: with_entry[key] for key in with_entry if key != "replays"} == files.json.loads(
        before[str(run.folder / "record.json")]
    )


def test_a_second_time_nothing_is_left_to_do(monkeypatch, capsys):
    replay.main([])
    before = contents()
    monkeypatch.setattr(Training, "run", lambda *_, **__: pytest.fail("trains"))
    replay.main([])
    assert contents() == before
    assert "0 of 0 runs" in capsys.readouterr().out


def test_the_lock_changes_for_that_stage_alone_and_as_dvc_would_write_it():
    before = LOCK.read_text()
    replay.main(["table_2/vit/0"])
    yaml = YAML(typ="safe")
    old, new = yaml.load(before)["stages"], yaml.load(LOCK)["stages"]
    assert new["train@vit-1"] == old["train@vit-1"]
    stage, earlier = new["train@vit-0"], old["train@vit-0"]
    assert stage.keys() == earlier.keys()
    assert (stage["cmd"], stage["params"], stage["outs"][:2]) == (earlier["cmd"], earlier["params"], earlier["outs"][:2])
    assert stage["deps"][0] == earlier["deps"][0]
    assert [dep["path"] for dep in stage["deps"][1:]] == list(record.code_files())
    record_json = "runs/table_2/vit/0/record.json"
    for entry, path in [*((dep, ROOT / dep["path"]) for dep in stage["deps"][1:]), (stage["outs"][2], Path(record_json))]:
        content = path.read_bytes()
        assert (entry["md5"], entry["size"]) == (hashlib.md5(content).hexdigest(), len(content))
    unchanged = before.index("  train@vit-1:")
    assert LOCK.read_text().endswith(before[unchanged:])
    assert stage["outs"][2]["path"] == record_json


def test_the_repositorys_lock_stays_as_dvc_wrote_it_around_that_stage():
    own = LOCK.read_text()
    stage = own[own.index("  train@vit-0:\n") : own.index("  train@vit-1:\n")].replace("train@vit-0", "train@vit-77")
    before = (ROOT / "dvc.lock").read_text().replace("stages:\n", f"stages:\n{stage}", 1)
    LOCK.write_text(before)
    replay.relock(Run("vit", 77), b"{}\n")
    after = LOCK.read_text()
    begin = before.index(stage)
    end = begin + len(stage)
    assert after.startswith(before[:begin]) and after.endswith(before[end:])
    assert all(f"path: {path}" in after[begin : len(after) - len(before) + end] for path in record.code_files())


def test_killed_between_lock_and_record_it_is_done_again(monkeypatch):
    """The record still knows the old code alone, so that the same command mends both."""
    write, run = files.write_text, Run("vit", 0)

    def killed(path, text):
        if str(path).endswith("record.json"):
            raise KeyboardInterrupt
        write(path, text)

    monkeypatch.setattr(files, "write_text", killed)
    with pytest.raises(SystemExit):
        replay.main(["table_2/vit/0"])
    monkeypatch.setattr(files, "write_text", write)
    assert not runs.is_current(run, config("vit"), None)
    replay.main(["table_2/vit/0"])
    assert runs.is_current(run, config("vit"), None)
    stage = YAML(typ="safe").load(LOCK)["stages"]["train@vit-0"]
    assert stage["outs"][2]["md5"] == hashlib.md5((run.folder / "record.json").read_bytes()).hexdigest()


def test_a_run_without_a_stage_in_the_lock_leaves_the_lock_alone():
    before = LOCK.read_bytes()
    replay.main(["table_2/osa_exact/0"])
    assert len(replays(Run("osa_exact", 0))) == 1
    assert LOCK.read_bytes() == before


@pytest.mark.parametrize("line", [1, 2])
def test_a_history_that_was_tampered_with_is_refused(capsys, line):
    path = Run("vit", 0).folder / "history.csv"
    lines = path.read_text().splitlines(keepends=True)
    digit = lines[line].index(".", 7) + 5  # of the train loss
    lines[line] = f"{lines[line][:digit]}{(int(lines[line][digit]) + 1) % 10}{lines[line][digit + 1 :]}"
    path.write_text("".join(lines))
    before = contents()
    refused("table_2/vit/0")
    assert contents() == before
    assert "table_2/vit/0 differs within 2 steps from what " in capsys.readouterr().out


def test_a_code_with_other_numbers_is_refused_and_the_rest_is_compared(monkeypatch, capsys):
    """Here one that draws the initial weights from another stream, for one of the two runs."""
    before, stream = contents(), loop.random_stream
    monkeypatch.setattr(loop, "random_stream", lambda seed, name: stream(seed + next(seeds), name))
    seeds = itertools.chain([0, 0], itertools.repeat(1))  # initial weights and order of the first run
    refused()
    assert "1 of 2 runs begin with the same bits" in capsys.readouterr().out
    assert [len(replays(Run(variant, 0))) for variant in ("osa_exact", "vit")] == [1, 0]
    vit = str(Run("vit", 0).folder / "record.json")
    assert (contents()[vit], contents()[str(LOCK)]) == (before[vit], before[str(LOCK)])


def test_a_run_is_replayed_as_it_was_configured_whatever_the_parameters_are_now():
    write_params(train={"learning_rate": 0.5}, model={"depth": 1}, variants={"vit": {"norm": False}})
    replay.main(["table_2/vit/0"])
    assert len(replays(Run("vit", 0))) == 1


def test_a_run_of_a_study_is_replayed_and_a_try_only_where_it_is_named():
    overrides = {"init": {"head": "zeros"}}
    of_study, a_try = (Run("vit", 0, study, overrides) for study in ("left_open", runs.TRIES))
    for run in (of_study, a_try):
        runs.train(run, params.resolve(params.load(), "vit", overrides), track=False)
        age(run)
    before = LOCK.read_bytes()
    replay.main([str(of_study)])
    assert LOCK.read_bytes() == before
    replay.main([])
    assert (len(replays(of_study)), len(replays(a_try))) == (1, 0)


def test_states_are_digests_of_everything_that_goes_on(tmp_path, monkeypatch):
    """Of weights and moments, after the same steps, beside an evaluation; nothing is compared or written down."""
    monkeypatch.setattr(replay, "STEPS", 2)
    before, path = contents(), tmp_path / "states.json"
    replay.main(["--states", str(path), "table_2/vit/0", "table_2/vit/1"])
    written = files.read_json(path)
    assert contents() == before
    assert written.keys() == {"table_2/vit/0", "table_2/vit/1"}
    zero, one = written.values()
    beginning = training("vit", 1)
    beginning.run(loop.Observer(), points=2)
    assert one["state_sha256"] == replay.state_sha256(beginning) != zero["state_sha256"]
    last = beginning.progress.history[-1]
    assert (one["test_loss"], one["test_accuracy"]) == (repr(last["test_loss"]), repr(last["test_accuracy"]))
    next(iter(beginning.optimizers[0].state.values()))["exp_avg"].view(-1)[0] += 1e-6
    assert one["state_sha256"] != replay.state_sha256(beginning)


@pytest.fixture
def head(monkeypatch):
    """A repository with one commit, of today's code; the project's runs are known to be of it."""
    repository = Path("repository").resolve()
    for name in ("osa", "pipeline", "dvc.yaml"):
        shutil.copytree(ROOT / name, repository / name) if (ROOT / name).is_dir() else shutil.copy(ROOT / name, repository)
    git = ["git", "-C", repository, "-c", "user.name=A", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(replay, "ROOT", repository)
    monkeypatch.setattr(record, "is_of_today", lambda made: "replays" in made)
    for variant in ("vit", "osa_exact"):
        run = Run(variant, 0)
        files.write_json(run.folder / "record.json", run.read("record") | {"code_sha256": TODAY})
    monkeypatch.setattr(replay, "relock", lambda *_: None)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_beside_another_commit_the_histories_do_not_matter(head, capsys):
    """As on another kind of machine, whose bits are not theirs."""
    for variant in ("vit", "osa_exact"):
        path = Run(variant, 0).folder / "history.csv"
        path.write_text(path.read_text().replace(".", ".1"))
    replay.main(["--beside", "HEAD", "table_2/vit/0", "table_2/osa_exact/0"])
    assert "2 of 2 runs begin with the same bits" in capsys.readouterr().out
    (entry,) = replays(Run("vit", 0))
    assert entry["beside"] == {"code_sha256": TODAY, "git_commit": head}
    assert (entry["code_sha256"], entry["steps"]) == (TODAY, replay.STEPS)


def test_beside_another_commit_a_run_that_diverges_at_once_is_compared_like_any_other(head, capsys):
    run = Run("vit", 0)
    made = run.read("record")
    made["config"]["train"]["learning_rate"] = 1e30
    files.write_json(run.folder / "record.json", made)
    assert math.isnan(float(replay.state(run, replay.recorded_config(run))["test_loss"]))
    replay.main(["--beside", "HEAD", str(run)])
    assert "1 of 1 runs begin with the same bits" in capsys.readouterr().out


def test_beside_another_commit_other_numbers_and_other_code_are_refused(head, monkeypatch, capsys):
    age(Run("vit", 0))
    stream = loop.random_stream
    monkeypatch.setattr(loop, "random_stream", lambda seed, name: stream(seed + 1, name))
    before = contents()
    refused("--beside", "HEAD", "table_2/vit/0", "table_2/osa_exact/0")
    printed = capsys.readouterr().out
    assert "table_2/vit/0 is of other code than that of HEAD: name the commit in its record." in printed
    assert "table_2/osa_exact/0 differs within 20 steps from what the code of HEAD gives." in printed
    assert contents() == before


def test_a_commit_that_is_not_there_or_cannot_train_is_named(head, capsys):
    refused("--beside", "f00f00f", "table_2/vit/0")
    assert capsys.readouterr().err == ("error: f00f00f is no commit of this repository: `git fetch` it, or name another.\n")
    (replay.ROOT / "pipeline" / "core" / "params.py").write_text("raise ImportError('no such option')\n")
    git = ["git", "-C", replay.ROOT, "-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "commit", "-qam", "Break"], check=True)
    refused("--beside", "HEAD", "table_2/vit/0")
    assert capsys.readouterr().err == (
        "error: the code of HEAD does not run here (ImportError: no such option): name a later commit.\n"
    )


def test_a_lock_in_conflict_is_named_before_anything_is_written(capsys):
    run = Run("vit", 0)
    age(run)
    LOCK.write_text("stages:\n<<<<<<< HEAD\n  a: 1\n")
    before = contents()
    refused()
    assert "error: dvc.lock is not valid YAML: `git checkout HEAD dvc.lock`.\n" == capsys.readouterr().err
    assert contents() == before


def test_a_run_that_is_not_there_is_named(capsys):
    refused("table_2/vit/7")
    assert capsys.readouterr().err == "error: runs/table_2/vit/7 holds no run: name one as in table_2/osa_qr/0.\n"


def test_the_repositorys_runs_can_be_replayed(monkeypatch):
    """Each has the folder that its record tells of, and a configuration that today's code understands."""
    monkeypatch.chdir(ROOT)
    settings, paper = params.load(), params.load_paper()
    found = replay.committed_runs()
    assert found
    for run in found:
        assert run.is_there()
        expected = params.resolve_recipe(settings, paper, run.variant, run.overrides)
        assert runs.same_config(run.read("record")["config"], expected), run
        assert replay.recorded_config(run) == expected
