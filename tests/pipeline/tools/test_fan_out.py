"""Runs that are trained side by side, here or on a cluster, are there once each, with the bits of one trained alone."""

import contextlib
import io
import itertools
import os
import shutil
import signal
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import yaml

from pipeline import studies
from pipeline.core import files, params, record
from pipeline.core.errors import UserError
from pipeline.runs import Run
from pipeline.tools import fan_out, plan
from tests.pipeline import synthetic
from tests.pipeline.trainings import outputs, trained, write_data, write_params

CHOICE = Run("vit", 0, "left_open", {"train": {"drop_last": True}})


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A copy of the code with small models of two kinds, and one choice to try."""
    for name in ("osa", "pipeline"):
        shutil.copytree(synthetic.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(synthetic.ROOT / "dvc.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(studies, "measuring", lambda: ["left_open"])
    write_params(run={"variants": ["vit", "osa_exact"], "seeds": [0]})
    edit_params(
        **{name: False for name in studies.names() if hasattr(studies.module(name), "trainings") and name != "left_open"}
    )
    paper = yaml.safe_load(Path("pipeline/paper.yaml").read_text())
    paper["recipe"] = params.deep_merge(paper["recipe"], {"train": {"epochs": 1, "batch_size": 13}})
    for choice in paper["left_open"]:
        if choice.get("key") == "train.drop_last":
            choice["try_on"] = ["vit"]
        else:
            choice.pop("alternatives", None), choice.pop("try_on", None)
    files.write_text("pipeline/paper.yaml", yaml.safe_dump(paper))
    write_data()
    return tmp_path


def edit_params(**changes: dict) -> None:
    made = params.deep_merge(yaml.safe_load(Path("params.yaml").read_text()), changes)
    files.write_text("params.yaml", yaml.safe_dump(made))


def all_runs() -> list[Run]:
    return [run for run, _ in fan_out.missing(params.load())]


def test_only_what_is_named_in_the_order_of_its_names():
    wanted = [(Run("vit", seed, study), None) for study in ("table_2", "depth") for seed in (0, 1)]
    found = [str(run) for run, _ in fan_out.only(wanted, ["depth/*", "*/vit/1", "depth/vit/0"])]
    assert found == ["depth/vit/0", "depth/vit/1", "table_2/vit/1"]
    listed = Run("vit", 0, "left_open", {"train": {"betas": [0.9, 0.95]}})
    assert fan_out.only([(listed, None)], [str(listed)]) == [(listed, None)], "a name with brackets is no pattern"
    with pytest.raises(UserError, match="^--only gone/[*] is no run that is asked for: give STUDY/NAME/SEED"):
        fan_out.only(wanted, ["depth/*", "gone/*"])


def test_side_by_side_each_run_is_trained_once_with_the_bits_of_one_alone(project, monkeypatch, capfd):
    assert all_runs() == [Run("vit", 0), Run("osa_exact", 0), CHOICE]
    fan_out.main(["--jobs", "2", "--no-tracking"])
    shown = capfd.readouterr().err
    assert "0/3 trainings, 0 of 5 epochs, time left unknown [" in shown and "3/3 trainings, 5 of 5 epochs, 0 min" in shown
    assert "image" not in shown
    together = {run.variant: outputs(run) for run in (Run("vit", 0), Run("osa_exact", 0))}
    assert CHOICE.is_there() and all_runs() == []
    with monkeypatch.context() as patch:
        patch.setattr(fan_out, "execute", lambda *_: pytest.fail("trains again"))
        fan_out.main(["--jobs", "2", "--no-tracking"])
    shutil.rmtree("runs"), shutil.rmtree("weights")
    assert {variant: outputs(trained(variant)) for variant in together} == together


def test_what_is_stale_or_without_weights_is_trained(monkeypatch):
    run = trained("vit")
    assert run not in all_runs()
    run.weights.unlink()
    assert run in all_runs()
    trained("vit")
    edit_params(train={"eps": 1e-7})
    assert run in all_runs()


def test_a_failure_is_named_and_loses_no_other_run(monkeypatch, capsys):
    edit_params(variants={"vit": {"overrides": {"train": {"batch_size": 100, "drop_last": True}}}})
    monkeypatch.setattr(studies, "measuring", lambda: [])
    with pytest.raises(SystemExit):
        fan_out.main(["--jobs", "1", "--no-tracking"])
    assert "error: table_2/vit/0 was not trained: train.batch_size 100 is more than the 43 images" in capsys.readouterr().err


def test_at_the_deadline_what_runs_is_cut_off_and_nothing_begins(monkeypatch):
    begun = Path("begun")
    slow = ["-c", f"touch {begun}; exec sleep 60"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/sh")  # which starts at once
        assert not fan_out.execute(slow, Path(), {}, time.monotonic() + 2) and begun.exists()
        begun.unlink()
        assert not fan_out.execute(slow, Path(), {}, time.monotonic()) and not begun.exists()
    assert list(fan_out.here(fan_out.missing(params.load()), 2, ["--no-tracking"], time.monotonic())) == []
    assert len(all_runs()) == 3 and fan_out.execute(["-c", "pass"], Path(), {}, time.monotonic() + 60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_trainings_too_and_begins_none(monkeypatch, capsys, number):
    """Two of the three run, the third waits for its turn."""
    begun = [Path("vit"), Path("osa_exact"), Path("waits")]
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    names = iter(begun)
    monkeypatch.setattr(fan_out, "command", lambda _: ["-c", f"touch {next(names)}; exec sleep 60"])
    monkeypatch.setattr(fan_out, "commit", lambda done: True)
    outside = signal.signal(number, signal.default_int_handler)  # the tests themselves may run under nohup

    def kill():
        while not all(path.exists() for path in begun[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=kill)
    killer.start()
    start = time.monotonic()
    with pytest.raises(SystemExit):
        fan_out.main(["--jobs", "2"])
    killer.join()
    assert signal.signal(number, outside) == signal.default_int_handler
    assert "error: interrupted: the same command goes on" in capsys.readouterr().err and time.monotonic() - start < 50
    assert not begun[2].exists() and not fan_out.STARTED and not fan_out.ENDED_BY


def test_what_nohup_ignores_stays_ignored():
    outside = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with fan_out.ended_together():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN != signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGHUP, outside)


@pytest.mark.parametrize(
    "script, told, why",
    [
        ("echo 'warning: no MLflow' >&2", "warning: no MLflow\n", ""),
        ("echo 'warning: slow' >&2; echo 'error: no data' >&2; exit 1", "warning: slow\n", "^no data$"),
        ("echo 'warning: slow' >&2; kill -9 $$", "warning: slow\n", "^ended by SIGKILL$"),
        ("exit 3", "", "^exit status 3$"),
    ],
)
def test_what_a_training_warns_of_is_told_and_is_not_why_it_failed(monkeypatch, capsys, script, told, why):
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    with pytest.raises(RuntimeError, match=why) if why else contextlib.nullcontext():
        assert fan_out.execute(["-c", script], Path(), {})
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("given, names", [("2,GPU-8a", {"2", "GPU-8a"}), (None, {"0", "1"})])
def test_each_training_has_a_gpu_to_itself_of_those_that_are_given(monkeypatch, given, names):
    """A free one, whichever has been waiting."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given) if given else monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    busy, seen, clashes = [], [], []

    def execute(arguments, folder, environment, deadline):
        device = environment["CUDA_VISIBLE_DEVICES"]
        clashes.extend([device] * (device in busy))
        busy.append(device), seen.append(device)
        time.sleep(0.05 * (len(seen) == 1))
        busy.remove(device)
        return True

    monkeypatch.setattr(fan_out, "execute", execute)
    wanted = [(Run("vit", seed), None) for seed in range(7)]
    assert len(list(fan_out.here(wanted, 2, []))) == 7
    assert set(seen) == names and not clashes


def test_without_a_gpu_none_is_named(monkeypatch):
    monkeypatch.setattr(fan_out, "execute", lambda arguments, folder, environment, deadline: environment == {})
    assert list(fan_out.here([(Run("vit", 0), None)], 2, [])) == [Run("vit", 0)]


def test_dvc_is_told_of_every_run_that_is_there_also_after_a_kill(monkeypatch, capsys):
    told, before = [], trained("vit")  # by a call that was killed before it told
    monkeypatch.setattr(fan_out, "commit", lambda done: told.append(done) or True)
    monkeypatch.setattr(fan_out, "here", lambda *_: (_ for _ in ()).throw(UserError("failed")))
    with pytest.raises(SystemExit):
        fan_out.main(["--no-tracking"])
    monkeypatch.setattr(fan_out, "here", lambda wanted, *_: (trained(run.variant) for run, _ in wanted[:1]))
    fan_out.main(["--only", "table_2/osa_exact/*", "table_2/vit/0"])
    assert told == [[before], [Run("osa_exact", 0), before]]
    monkeypatch.setattr(fan_out, "commit", lambda done: False)
    with pytest.raises(SystemExit):
        fan_out.main(["--only", "table_2/*"])
    assert "error: DVC could not be told of the trainings" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", ["0", "-1", "x"])
def test_a_number_of_jobs_that_there_cannot_be_is_refused(jobs, capsys):
    with pytest.raises(SystemExit):
        fan_out.main(["--jobs", jobs])
    assert "argument --jobs: " in capsys.readouterr().err


def test_two_at_once_do_not_train_the_same(capsys):
    fan_out.LOCK.parent.mkdir()
    with fan_out.FileLock(fan_out.LOCK), pytest.raises(SystemExit):
        fan_out.main([])
    assert "error: another process trains these runs already" in capsys.readouterr().err


def test_what_is_left_is_told_from_the_records():
    assert fan_out.remaining([3600.0, 3600.0, 3600.0], jobs=2) == "1.5 h left"
    assert fan_out.remaining([3600.0], jobs=2) == "1.0 h left"
    assert fan_out.remaining([3000.0, 60.0], jobs=2) == "50 min left", "as the longest does"
    assert fan_out.remaining([], 0) == "0 min left", "also on a cluster that is asked for nothing"
    assert fan_out.remaining([None, 1.0], jobs=2) == "time left unknown"


def begin(run: Run, **changes: object) -> None:
    """What a training leaves at its fourth point, with 2, 4 and, as it was killed meanwhile, 900 s between them."""
    config = params.resolve(params.load(), run.variant)
    made = {"config": config.model_dump(mode="json"), "timestamps": [0, 2000, 6000, 906_000]}
    made |= {"environment": {"device": "cpu"}, "code_sha256": record.code_sha256("cpu")} | changes
    files.write_json(run.scratch.with_name(f"{run.seed}-0123456789ab") / "record.json", made)


def test_a_training_under_way_is_told_of_by_its_own_points():
    edit_params(train={"epochs": 3, "points_per_epoch": 4})
    (run, config), *_ = fan_out.wanted(params.load())
    alike = {"study": run.study, "name": run.name, "variant": run.variant, "seconds": 60.0}
    assert fan_out.standing(run, config, []) == (3, None) and fan_out.standing(run, config, [alike]) == (3, 60.0)
    begin(run)
    assert fan_out.standing(run, config, [alike]) == (2.25, 36.0)  # 9 of 12 points are left, 4 s each
    begin(run, timestamps=[0])
    assert fan_out.standing(run, config, [alike]) == (3, 60.0)
    begin(run, code_sha256="of another day")
    assert fan_out.standing(run, config, []) == (3, None)
    edit_params(train={"eps": 1e-7})
    begin(run)
    assert fan_out.standing(run, config, []) == (3, None)


def test_the_line_moves_while_all_trainings_go_on(monkeypatch):
    edit_params(train={"epochs": 3, "points_per_epoch": 4})
    wanted, shown = fan_out.wanted(params.load())[:2], io.StringIO()
    monkeypatch.setattr(fan_out, "LOGGED_EVERY", 0.001)
    monkeypatch.setattr(sys, "stderr", shown)

    def train():
        begin(wanted[0][0])
        while "0/2 trainings, 1 of 6 epochs, time left unknown [" not in shown.getvalue():
            assert time.monotonic() < deadline, shown.getvalue()
            time.sleep(0.001)
        yield wanted[1][0]

    deadline = time.monotonic() + 60
    fan_out.follow(wanted, train(), jobs=2)
    assert shown.getvalue().splitlines()[-1].split("\r")[-1].startswith("1/2 trainings, 4 of 6 epochs, 1 min left [")


def test_a_cluster_loses_a_node_and_no_run(monkeypatch):
    pytest.importorskip("ray", reason="needs requirements-cluster.txt")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # not 15, which starves beside other tests
    from ray.cluster_utils import Cluster

    edit_params(run={"seeds": [0, 1]})
    options = {"num_cpus": 1, "node_ip_address": "127.0.0.2"}  # of this machine; Ray replaces 127.0.0.1 by an outer address
    cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
    try:
        node = cluster.add_node(**options)
        wanted = fan_out.missing(params.load())
        came = []
        for run in fan_out.on_cluster(wanted, cluster.address):
            came.append(run)
            if len(came) == 1:
                cluster.remove_node(node, allow_graceful=False)  # in the middle of a training
    finally:
        cluster.shutdown()
    assert sorted(map(str, came)) == sorted(str(run) for run, _ in wanted) and len(came) == 5
    assert all_runs() == []
    assert Run("vit", 1).read("record")["environment"].items() >= record.describe_commit().items()
    there = outputs(Run("osa_exact", 1))
    shutil.rmtree("runs"), shutil.rmtree("weights")
    assert outputs(trained("osa_exact", 1)) == there


def test_a_failure_on_a_cluster_is_named_when_the_others_have_come(monkeypatch):
    """By a cluster that is none: each task is done when it is asked for, and that of the first run fails."""

    def get(run):
        if run == str(wanted[0][0]):
            raise RuntimeError("out of memory")
        return run

    work = types.SimpleNamespace(remote=lambda bundle, arguments, run: run)
    ray = types.SimpleNamespace(
        init=lambda **_: None,
        shutdown=lambda: None,
        put=lambda bundle: bundle,
        remote=lambda **_: lambda function: work,
        wait=lambda tasks: (tasks[:1], tasks[1:]),
        get=get,
        cloudpickle=types.SimpleNamespace(register_pickle_by_value=lambda module: None),
        exceptions=types.SimpleNamespace(RayError=OSError),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(fan_out, "written", str)
    monkeypatch.setattr(fan_out, "receive", lambda run, content: None)
    wanted = fan_out.missing(params.load())
    coming = fan_out.on_cluster(wanted, "auto")
    assert list(itertools.islice(coming, len(wanted) - 1)) == [run for run, _ in wanted[1:]]
    with pytest.raises(UserError, match=f"^{wanted[0][0]} was not trained: out of memory$"):
        next(coming)


def test_the_plan_counts_what_a_study_would_train_and_not_what_is_there():
    (choice,) = [job for job in fan_out.missing(params.load()) if job[0].study == "left_open"]
    made = [{"study": "table_2", "name": "vit", "variant": "vit", "seconds": 60.0}]
    made[0]["environment"] = record.describe_environment(torch.device("cpu"))
    assert plan.seconds_of("left_open", made)[0] == 60.0 and plan.seconds_of("left_open", [])[0] is None
    fan_out.main(["--jobs", "1", "--no-tracking", "--only", str(choice[0])])
    assert plan.seconds_of("left_open", made) == (None, set()), "nothing is left"


def test_without_ray_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="^--cluster needs Ray: install it with `pip install -r requirements-cluster.txt`.$"):
        next(fan_out.on_cluster([], "auto"))
