"""Runs that are trained side by side, here or on a cluster, exist once each, with the bits of a run trained alone."""

import contextlib
import io
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from osa import NUMERICS
from pipeline.config import params, records
from pipeline.core import files, provenance
from pipeline.core.errors import UserError
from pipeline.tools import cluster, fan_out, locks, times
from pipeline.training.run import Run
from tests.pipeline import synthetic
from tests.pipeline.trainings import SHORT, SMALL, outputs, run_main, trained, write_data, write_params

BOTH = {"variants": ["vit", "osa_exact"], "seeds": [0]}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """Small models of two kinds, and no study."""
    shutil.copy(synthetic.ROOT / "dvc.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.studies.names", lambda wing=None: [])
    write_params(run=BOTH)
    write_data()
    return tmp_path


@pytest.fixture
def code(project):
    """A copy of the code, which processes run."""
    for name in ("osa", "pipeline"):
        ignored = shutil.ignore_patterns("__pycache__", "paper.yaml")  # the project has one of its own
        shutil.copytree(synthetic.ROOT / name, project / name, ignore=ignored, dirs_exist_ok=True)


def missing() -> list[tuple]:
    return fan_out.missing(fan_out.list_jobs(params.load()))


def watched_run() -> tuple[Run, params.RunConfig]:
    """A small run of a study that watches its models."""
    run = Run("osa_exact", 0, "penalties", {"model": SMALL, "train": SHORT | {"eps": 1e-7}})
    return run, params.resolve_recipe(params.load(), params.load_paper(), run.variant, run.overrides)


def test_only_what_is_named_in_the_order_of_its_names(monkeypatch):
    by_study = {
        "depth": [(Run("vit", seed, "depth"), None) for seed in (0, 1)],
        "left_open": [(Run("vit", 0, "left_open", {"train": {"betas": [0.9, 0.95]}}), None)],
    }
    monkeypatch.setattr("pipeline.studies.names", lambda wing=None: ["depth", "left_open", "penalties"])
    monkeypatch.setattr("pipeline.tools.jobs.jobs_of", lambda study, _: by_study[study])  # penalties is not imported
    selected = fan_out.list_jobs(params.load(), ["depth/*/1", "depth/*", "table_2/vit/0"])
    assert [str(run) for run, _ in selected] == ["depth/vit/1", "depth/vit/0", "table_2/vit/0"]
    assert {run.study for run, _ in fan_out.list_jobs(params.load())} == {"table_2"}, "where none is named"
    listed = str(by_study["left_open"][0][0])
    assert fan_out.list_jobs(params.load(), [listed]) == by_study["left_open"], "a name with brackets is no pattern"
    with pytest.raises(UserError, match="--only gone/"):
        fan_out.list_jobs(params.load(), ["depth/*", "gone/*"])


@pytest.mark.slow
@pytest.mark.usefixtures("code", "starts_warm")
def test_side_by_side_each_run_is_trained_once_with_the_bits_of_one_alone(monkeypatch, capfd):
    assert [run for run, _ in missing()] == [Run("vit", 0), Run("osa_exact", 0)]
    fan_out.main(["--jobs", "2", "--no-tracking"])
    shown = capfd.readouterr().err
    assert "0/2 trainings, 0 of 4 epochs, time left unknown [" in shown
    assert "2/2 trainings, 4 of 4 epochs, 0 s left [" in shown
    assert "table_2/osa_exact/0: " in shown and "image" not in shown
    together = {run.variant: outputs(run) for run in (Run("vit", 0), Run("osa_exact", 0))}
    assert missing() == []
    with monkeypatch.context() as patch:
        patch.setattr(fan_out, "execute", lambda *_: pytest.fail("trains again"))
        fan_out.main(["--jobs", "2", "--no-tracking"])
    shutil.rmtree("paper_outputs/runs"), shutil.rmtree("paper_outputs/weights")
    assert {variant: outputs(trained(variant)) for variant in together} == together


def test_what_is_stale_or_of_table_2_without_weights_is_trained():
    run, config = trained("vit"), params.resolve(params.load(), "vit")
    assert fan_out.is_trained(run, config)
    shutil.copytree(run.folder, "paper_outputs/runs/depth/vit/0")
    synthetic.rewrite(Path("paper_outputs/runs/depth/vit/0"), study="depth", folder="runs/depth/vit/0")
    run.weights.unlink()
    assert not fan_out.is_trained(run, config)
    assert fan_out.is_trained(Run("vit", 0, "depth"), config)  # nothing evaluates its weights
    write_params(run=BOTH, train={"eps": 1e-7})
    assert not fan_out.is_trained(Run("vit", 0, "depth"), params.resolve(params.load(), "vit"))


def test_a_studys_accuracies_are_not_shown_run_by_run(capfd):
    """Its claims are judged once all runs have ended, and nobody is to look before."""
    run, config = trained("vit"), params.resolve(params.load(), "vit")
    shutil.copytree(run.folder, "paper_outputs/runs/depth/vit/0")
    synthetic.rewrite(Path("paper_outputs/runs/depth/vit/0"), study="depth", folder="runs/depth/vit/0")
    studys = Run("vit", 0, "depth")
    capfd.readouterr()
    list(fan_out.follow([(run, config), (studys, config)], (ended for ended in ([run, studys],)), 1))
    lines = capfd.readouterr().err.replace("\r", "\n").splitlines()
    (shown,), (hidden,) = ([line for line in lines if f"{each}: " in line] for each in (run, studys))
    assert f"{run.metrics()['test_accuracy']:.1%} after" in shown
    assert "vit/0: trained after" in hidden and "%" not in hidden.partition(": ")[2].partition(";")[0]


def test_a_failure_is_named_when_the_others_have_ended():
    def collect(run, task):
        if task == 1:
            raise RuntimeError("Traceback\nerror: out of memory")

    tasks = {task: Run("vit", task) for task in range(4)}
    ends = iter([[0], [], [1], [2, 3]])
    coming = fan_out.as_completed(tasks, lambda left: next(ends), collect)
    assert list(itertools.islice(coming, 4)) == [[Run("vit", 0)], [], [], [Run("vit", 2), Run("vit", 3)]]
    with pytest.raises(UserError, match="^table_2/vit/1 was not trained: out of memory$"):
        next(coming)


@pytest.mark.slow
@pytest.mark.usefixtures("code", "starts_warm")
def test_a_failure_is_why_the_command_fails(capsys):
    write_params(run=BOTH, variants={"vit": {"overrides": {"train": {"batch_size": 100, "drop_last": True}}}})
    with pytest.raises(SystemExit):
        fan_out.main(["--jobs", "1", "--no-tracking"])
    assert "error: table_2/vit/0 was not trained: train.batch_size 100" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_trainings_too_and_begins_none(monkeypatch, capsys, number):
    """Two of the three run, the third waits for its turn."""
    begun = [Path("vit"), Path("osa_exact"), Path("waits")]
    write_params(run=BOTH | {"variants": ["vit", "osa_exact", "osa_qr"]})
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    names = iter(begun)
    monkeypatch.setattr(fan_out, "command", lambda _: ["-c", f"touch {next(names)}; exec sleep 60"])
    monkeypatch.setattr(fan_out, "commit", lambda done: [])
    outside = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup

    def kill():
        while not all(path.exists() for path in begun[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=kill).start()
    start = time.monotonic()
    with pytest.raises(SystemExit):
        fan_out.main(["--jobs", "2"])
    assert "interrupted" in capsys.readouterr().err and time.monotonic() - start < 50
    assert not begun[2].exists() and not fan_out.PROCESSES
    signal.signal(number, signal.SIG_IGN)
    with fan_out.single_instance(Path("lock")):  # signals that nohup ignores stay ignored
        assert signal.getsignal(number) == signal.SIG_IGN
    signal.signal(number, outside)


@pytest.mark.parametrize(
    "script, warned, why",
    [
        ("echo 'warning: no MLflow' >&2", "warning: no MLflow\n", ""),
        ("echo 'warning: slow' >&2; echo 'error: no data' >&2; exit 1", "warning: slow\n", "no data"),
        ("echo 'warning: slow' >&2; kill -9 $$", "warning: slow\n", "SIGKILL"),
        ("exit 3", "", "3"),
    ],
)
def test_what_a_training_warns_of_is_passed_on_and_is_not_why_it_failed(monkeypatch, capsys, script, warned, why):
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    with pytest.raises(RuntimeError, match=why) if why else contextlib.nullcontext():
        fan_out.execute(["-c", script], Path(), {})
    assert capsys.readouterr().err == warned


@pytest.mark.parametrize("given, names", [("2,GPU-8a", {"2", "GPU-8a"}), (None, {"0", "1"})])
def test_each_training_has_a_gpu_to_itself_of_those_that_are_given(monkeypatch, given, names):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given) if given else monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    busy, seen = set(), []

    def execute(arguments, folder, environment):
        device = environment["CUDA_VISIBLE_DEVICES"]
        assert device not in busy
        busy.add(device), seen.append(device)
        time.sleep(0.05 * (len(seen) == 1))
        busy.remove(device)
        return True

    monkeypatch.setattr(fan_out, "execute", execute)
    ended = [run for runs in fan_out.train_here([(Run("vit", seed), None) for seed in range(7)], 2) for run in runs]
    assert len(ended) == 7 and set(seen) == names
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(fan_out, "execute", lambda arguments, folder, environment: environment == {})
    assert list(fan_out.train_here([(Run("vit", 0), None)], 2)) == [[Run("vit", 0)]]


@pytest.fixture
def calls(monkeypatch):
    """The commands that are given to DVC and to MLflow, which succeed; DVC knows no run."""
    given, run = [], subprocess.run

    def spy(command, **options):
        name = next((word for word in ("status", "commit", "sync") if word in command), None)
        if name is None or command[0] == "git":
            return run(command, **options)
        given.append(command[command.index(name) :])
        changed = {"train@vit-0": ["changed outs"], "train@osa_exact-0": []}
        return types.SimpleNamespace(returncode=0, stderr=b"", stdout=json.dumps(changed))

    Path(".dvc").mkdir()
    monkeypatch.setattr(fan_out.shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", spy)
    return given


def test_dvc_and_mlflow_hear_at_once_of_all_runs_that_ended_and_of_those_trained_elsewhere(monkeypatch, calls):
    write_params(run=BOTH | {"seeds": [0, 1]})
    trained("vit")
    monkeypatch.setattr(fan_out, "train_here", lambda jobs, _: (yield [trained(run.variant, run.seed) for run, _ in jobs]))
    fan_out.main([])
    seeds = [("vit", 1), ("osa_exact", 0), ("osa_exact", 1)]
    assert calls == [
        ["status", "--json", "train"],
        ["commit", "--force", "--quiet", "train@vit-0"],  # osa_exact-0 is not there
        ["sync", "--only", "table_2/vit/0"],
        ["sync", "--only", *(f"table_2/{variant}/{seed}" for variant, seed in seeds)],
        ["commit", "--force", "--quiet", *(f"train@{variant}-{seed}" for variant, seed in seeds)],
    ]
    assert fan_out.commit([Run("vit", 0, "depth")]) == [] and len(calls) == 5  # DVC knows nothing of this run


def test_what_dvc_does_not_take_is_named(monkeypatch, capsys):
    monkeypatch.setattr(fan_out, "commit", lambda runs: [run.stage for run in runs])
    monkeypatch.setattr(fan_out, "train_here", lambda jobs, _: (yield [trained(run.variant) for run, _ in jobs]))
    with pytest.raises(SystemExit):
        fan_out.main(["--no-tracking"])
    assert "`dvc commit -f train@vit-0 train@osa_exact-0`" in capsys.readouterr().err


def test_printed_commands_train_what_is_missing(monkeypatch, capsys):
    run, config = watched_run()
    trained("vit")
    monkeypatch.setattr(
        fan_out, "list_jobs", lambda *_: [(Run("vit", 0), fan_out.table_2_jobs(params.load())[0][1]), (run, config)]
    )
    monkeypatch.setattr(fan_out, "train_all", lambda *_: pytest.fail("trains"))
    fan_out.main(["--print", "--only", "*"])
    words = shlex.split(capsys.readouterr().out)
    assert words[:5] == ["python", "-m", "pipeline", "train", "osa_exact"]
    run_main(monkeypatch, *words[4:-1])
    assert words[-1] == "--no-tracking" and fan_out.is_trained(run, config)
    fan_out.main(["--print"])
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.usefixtures("code", "starts_warm")
def test_a_shipped_run_brings_back_all_its_files(project, monkeypatch):
    """One of Table 2, and one of a study that watches its models, as a cluster trains them."""
    jobs = [(Run("vit", 0), params.resolve(params.load(), "vit")), watched_run()]
    monkeypatch.setattr(tempfile, "tempdir", str(project / "node"))
    Path("node").mkdir()
    digest = cluster.ship({"mnist"}, Path("shipped.zip"))
    pages = np.fromfile("shipped.zip", np.uint8)
    for run, config in jobs:
        contents = cluster.execute_shipped(pages, digest, [*fan_out.command(run), "--no-tracking"], cluster.files_of(run))
        assert not run.folder.exists()
        cluster.receive(run, contents)
        assert fan_out.is_trained(run, config) and run.weights.exists()
        assert run.files["watched"].exists() == (run.study == "penalties")
        pages = pages[:0]  # the second finds what the first has unpacked
    assert {path.name for path in Path("node").iterdir()} == {f"osa-{digest}", f"osa-{digest}.lock"}


def test_who_else_works_here_is_named(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        fan_out.main(["--jobs", "0"])
    assert "argument --jobs: " in capsys.readouterr().err
    locks.FAN_OUT.parent.mkdir()
    with fan_out.FileLock(locks.FAN_OUT), pytest.raises(SystemExit):
        fan_out.main([])
    assert str(locks.FAN_OUT) in capsys.readouterr().err
    files.write_json(locks.RWLOCK, {"write": {"/x": {"pid": os.getppid(), "cmd": "dvc repro"}}})
    with pytest.raises(SystemExit):
        fan_out.main([])
    assert f"`dvc repro` (process {os.getppid()})" in capsys.readouterr().err
    locks.RWLOCK.write_text("", encoding="utf-8")
    with pytest.raises(SystemExit):
        fan_out.main([])
    assert f"`rm {locks.RWLOCK}`" in capsys.readouterr().err
    answers = iter([["`dvc repro` (process 1)"], []])
    monkeypatch.setattr(fan_out, "LOGGED_EVERY", 0)
    monkeypatch.setattr(fan_out.shutil, "which", lambda name: name)
    monkeypatch.setattr(locks, "dvc_processes", lambda: next(answers))
    monkeypatch.setattr(fan_out.subprocess, "run", lambda command, check: types.SimpleNamespace(returncode=1))
    assert fan_out.commit([Run("vit", 0)]) == ["train@vit-0"]
    assert "Waiting" in capsys.readouterr().err and next(answers, None) is None


def test_the_time_of_own_images_is_that_of_their_number_once_they_are_stored(monkeypatch):
    made = synthetic.record(params.resolve(params.load(), "vit"), Run("vit", 1), seconds=600.0)
    write_params(run=BOTH, data={"source": "folder", "path": "mine"})
    config = params.resolve(params.load(), "vit")
    assert times.Estimates([made]).of(Run("vit", 0), config) is None, "nobody knows how many there are"
    Path("data/folder").mkdir(parents=True)
    np.save("data/folder/train-labels.npy", np.zeros(600, np.uint8))
    described = {"path": "mine", "resize": None, "sha256": "0" * 64, "classes": ["a"], "channels": 1, "size": 56}
    files.write_json("data/folder/images.json", described)
    assert times.Estimates([made]).of(Run("vit", 0), config) == pytest.approx(600 * 600 / 60_000 * 4), (
        "of four times the patches"
    )
    before = made.model_copy(update={"config": config, "data_sha256": "1" * 64, "seconds": 1e9})
    assert times.Estimates([before, made]).of(Run("vit", 0), config) == pytest.approx(24), "of other images that lay there"
    now = before.model_copy(update={"data_sha256": "0" * 64, "seconds": 30.0})
    assert times.Estimates([now]).of(Run("vit", 0), config) == pytest.approx(30)


def test_time_left_is_scaled_by_epochs_and_depth():
    config = params.resolve(params.load(), "vit")
    made = synthetic.record(config, Run("vit", 1), seconds=600.0)
    shorter = params.resolve(params.load(), "vit", {"train": {"epochs": 1}, "model": {"depth": 1}})
    run, estimate = Run("vit", 0), lambda known, run, config=config: times.Estimates(known).of(run, config)
    assert estimate([made], run) == pytest.approx(600) and estimate([], run) is None
    assert estimate([made], run, config=shorter) == pytest.approx(600 / 4)
    other = made.model_copy(update={"variant": "osa_qr", "seconds": 60.0})
    assert estimate([other, made], run) == pytest.approx(600) and estimate([other], Run("x", 0)) == pytest.approx(60)
    device = "cpu" if made.environment.device == "cuda" else "cuda"
    elsewhere = {"seconds": 60.0, "environment": made.environment.model_copy(update={"device": device})}
    elsewhere = made.model_copy(update=elsewhere)
    assert estimate([elsewhere, elsewhere, made], run) == pytest.approx(600)
    assert estimate([elsewhere], run) == pytest.approx(60), "better than none"
    assert times.spent(made.model_copy(update={"seconds": 720.0})) == "12 min", "where phases were not measured"
    phases = {"start": 4.2, "compiling": 0.0, "steps": 600.0, "evaluation": 115.0, "writing": 5.0}
    whole = made.model_copy(update={"seconds": 720.0, "phases": phases})
    assert times.spent(whole) == "12 min (steps 10 min, evaluation 2 min)"
    assert times.spent(whole, tracking=17.0).endswith("tracking 17 s)")
    assert fan_out.time_left([3600.0, 3600.0, 3600.0], 2) == 5400
    assert fan_out.time_left([3000.0, 60.0], 2) == 3000, "as the longest does"
    assert fan_out.time_left([], 1) == 0 and math.isnan(fan_out.time_left([None, 1.0], 2))


def test_the_line_moves_with_the_points_of_a_training_under_way(monkeypatch):
    write_params(run=BOTH, train={"epochs": 3, "points_per_epoch": 4})
    (run, config), _ = jobs = fan_out.list_jobs(params.load())
    scratch = run.scratch.with_name(f"{run.seed}-0123456789ab")
    points = {"status": "running", "timestamps": [0, 2000, 6000, 906_000]}
    made = synthetic.record(config, run, **points, seconds=12.0)  # without the seconds for which it was killed
    records.write_record(scratch, made)
    assert fan_out.progress(run, config, times.Estimates([])) == (2.25, 36.0)  # 9 of 12 points are left, 4 s each
    for change in ({"timestamps": [0]}, {"numerics": NUMERICS + 1}):
        records.write_record(scratch, made.model_copy(update=change))
        assert fan_out.progress(run, config, times.Estimates([])) == (3, None)
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)

    def train():
        records.write_record(scratch, made)
        yield []
        assert "0/2 trainings, 0.75 of 6 epochs, time left unknown [" in shown.getvalue()
        yield [trained("osa_exact")]

    list(fan_out.follow(jobs, train(), 2))
    assert "1/2 trainings, 3.75 of 6 epochs, 36 s left [" in shown.getvalue()


def test_a_forecast_falls_until_it_is_withdrawn_and_a_point_makes_another(monkeypatch):
    write_params(run=BOTH | {"variants": ["vit"]}, train={"epochs": 1, "points_per_epoch": 4})
    ((run, config),) = jobs = fan_out.list_jobs(params.load())
    scratch, now, shown = run.scratch.with_name(f"{run.seed}-0123456789ab"), [0.0], io.StringIO()
    made = synthetic.record(config, run, status="running", timestamps=[0], seconds=60.0)
    monkeypatch.setattr(fan_out, "recorded", lambda: [(None, made)])
    monkeypatch.setattr(fan_out.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", shown)

    def last() -> str:
        return shown.getvalue().rpartition("trainings, ")[2].rpartition(" [")[0]

    def train():
        for at, expected in ((20.0, "40 s left"), (61.0, "time left unknown")):
            now[0] = at
            yield []
            assert last() == f"0 of 1 epochs, {expected}"
        records.write_record(scratch, made.model_copy(update={"timestamps": [0, 70_000], "seconds": 70.0}))
        now[0] = 72.0
        yield []
        assert last() == "0.25 of 1 epochs, 4 min left"

    list(fan_out.follow(jobs, train(), 1))


def test_a_record_is_looked_at_once_however_many_trainings_wait(monkeypatch):
    (run, config), _ = jobs = fan_out.list_jobs(params.load())
    made, seen = [synthetic.record(config, Run("vit", seed), seconds=60.0) for seed in range(3)], []
    relative_cost = times.relative_cost
    monkeypatch.setattr(times, "relative_cost", lambda config, *data: seen.append(config) or relative_cost(config, *data))
    monkeypatch.setattr(fan_out, "recorded", lambda: [(run, record) for record in made])
    list(fan_out.follow(jobs, (ended for ended in ([], [], [])), 1))
    assert len(seen) == len(made) + 4 * len(jobs), "and each training that waits, at the beginning and three times"


def test_a_gpu_takes_one_training_or_as_many_as_are_asked_for_and_a_core_one(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (fan_out.at_once(1), fan_out.at_once(3)) == (2, 6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert fan_out.at_once(3) == 16
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert fan_out.at_once(1) == os.cpu_count()


@pytest.mark.slow
@pytest.mark.usefixtures("code", "starts_warm")
def test_a_cluster_loses_a_node_and_no_run(monkeypatch, capfd):
    """Runs of all kinds, on nodes with a pretended GPU each."""
    try:
        cluster.import_ray()
    except UserError:
        pytest.skip("needs requirements-cluster.txt")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # not 15, which starves next to other tests
    from ray.cluster_utils import Cluster

    write_params(run=BOTH | {"seeds": [1]})
    # an address of this machine; Ray replaces 127.0.0.1 by an outer one
    options = {"num_cpus": 1, "num_gpus": 1, "node_ip_address": "127.0.0.2"}
    nodes = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
    try:
        node = nodes.add_node(**options)
        jobs, came = [*missing(), watched_run()], []
        for runs in cluster.train(jobs, nodes.address, per_gpu=1, seconds=1):
            came += runs
            if node:
                nodes.remove_node(node, allow_graceful=False)  # in the middle of a training: each takes more than a second
                node = None
    finally:
        nodes.shutdown()
    assert "state-dump" not in "".join(capfd.readouterr())
    assert sorted(map(str, came)) == sorted(str(run) for run, _ in jobs) and len(came) == 3
    assert fan_out.missing(jobs) == [] and watched_run()[0].files["watched"].exists()
    assert Run("vit", 1).record().commits == [provenance.describe_commit()["git_commit"]]
    there = outputs(Run("osa_exact", 1))
    shutil.rmtree("paper_outputs/runs"), shutil.rmtree("paper_outputs/weights")
    assert outputs(trained("osa_exact", 1)) == there


def test_a_training_takes_a_core_and_a_share_of_a_gpu_where_there_is_one():
    assert cluster.needs({"CPU": 8.0}, 2) == {"num_cpus": 1, "num_gpus": 0}
    assert cluster.needs({"CPU": 8.0, "GPU": 2.0}, 2) == {"num_cpus": 1, "num_gpus": 0.5}


def test_a_node_that_dies_is_named_once(capsys):
    nodes = [{"NodeID": str(i), "Alive": i > 0, "NodeManagerAddress": f"10.0.0.{i}"} for i in range(3)]
    known = {"0"}  # which was dead before
    cluster.name_lost_nodes(nodes, known)
    nodes[2]["Alive"] = False
    for _ in range(2):
        cluster.name_lost_nodes(nodes, known)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["warning: lost the node 10.0.0.2: its runs start again on another node."]


def test_a_cluster_needs_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="requirements-cluster.txt"):
        next(cluster.train([], "auto", per_gpu=1, seconds=2))
