"""Runs: a training leaves whole files with the same bytes, killed or not, and whoever watches it changes nothing."""

import functools
import hashlib
import io
import itertools
import math
import os
import shlex
import signal
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
import safetensors.torch
import torch

import osa
from pipeline.config import params, records
from pipeline.config.records import RECORD, RunRecord
from pipeline.core import files, provenance
from pipeline.core.errors import UserError
from pipeline.data import idx
from pipeline.training import loop, recorder
from pipeline.training.loop import build_model, evaluate_split
from pipeline.training.recorder import Recorder
from pipeline.training.run import TRIES, Run
from tests.faults.process import Training
from tests.pipeline import synthetic
from tests.pipeline.synthetic import ROOT
from tests.pipeline.trainings import (
    SHORT,
    config,
    outputs,
    read_history,
    run_main,
    trained,
    write_params,
)

pytestmark = pytest.mark.usefixtures("project")


# where a run lies


def test_a_run_is_where_its_identity_says():
    overrides = {"train": {"eps": 1e-6, "betas": [0.8, 0.9]}, "init": {"alpha_per_head": False, "head": "zeros"}}
    run = Run("vit", 3, "left_open", overrides)
    name = "vit+init.alpha_per_head=false+init.head=zeros+train.betas=[0.8,0.9]+train.eps=1e-06"
    assert run.folder == Path("paper_outputs/runs/left_open", name, "3")
    assert run.weights == Path("paper_outputs/weights/left_open", name, "3.safetensors")
    assert (Run("vit", 3).folder, Run("vit", 3).weights) == (
        Path("paper_outputs/runs/table_2/vit/3"),
        Path("paper_outputs/weights/table_2/vit/3.safetensors"),
    )
    within = Run("vit", 0, overrides={"init": {"head": "../../x y"}}).folder.parts
    assert within[:3] == ("paper_outputs", "runs", "table_2") and len(within) == 5


# the outputs


@pytest.mark.parametrize("variant", [pytest.param("vit_noskip_nonorm", marks=pytest.mark.slow), "osa_qr"])
def test_the_same_seed_gives_the_same_bytes(project, monkeypatch, variant):
    found = []
    for folder, global_seed in (("one", 1), ("two", 2)):
        enter(project, folder, monkeypatch)
        torch.manual_seed(global_seed)
        found.append(outputs(trained(variant)))
    assert found[0] == found[1]
    for name, content in outputs(trained(variant, seed=1)).items():
        assert content != found[0][name], name


def enter(project, name, monkeypatch) -> None:
    """A further working directory with the same parameters and data."""
    (project / name).mkdir()
    for shared in ("data", "params.yaml", "pipeline"):
        (project / name / shared).symlink_to(project / shared)
    monkeypatch.chdir(project / name)


def test_outputs_and_record():
    run, setting = trained("osa_ns", 7), config("osa_ns")
    metrics, history = run.metrics(), read_history(outputs(run)["history.csv"])
    last = {key: float(value) for key, value in history[-1].items() if key not in ("step", "epoch")}
    model = run.load_model(setting)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert metrics == last | {"steps": 8, "num_parameters": count, "diverged": False, "diverged_at_step": None}
    mnist = idx.read_data("data/mnist", setting.data.pixel_scaling)
    assert evaluate_split(model, mnist.test_images, mnist.test_labels) == (metrics["test_loss"], metrics["test_accuracy"])

    found = run.record()
    assert (found.study, found.variant, found.name, found.seed, found.overrides) == ("table_2", "osa_ns", "osa_ns", 7, {})
    assert (found.status, found.resumptions, found.numerics) == ("finished", 0, osa.NUMERICS)
    assert found.config == setting
    assert found.data_sha256 == idx.data_digest("data/mnist")
    assert found.weights == files.sha256(run.weights)
    assert found.seconds > 0 and found.images_per_second > 0
    assert {phase for phase, seconds in found.phases.items() if seconds} == {"start", "steps", "evaluation", "writing"}
    assert sum(found.phases.values()) - found.phases["start"] == pytest.approx(found.seconds, rel=0.3)
    assert len(found.timestamps) == len(history) == 5
    assert datetime.fromisoformat(found.started_at) <= datetime.fromisoformat(found.finished_at)
    assert found.environment.device == provenance.default_device().type
    assert found.commits == [provenance.describe_commit()["git_commit"]]
    assert not list(Path(".checkpoints").rglob("*.*"))


def test_a_try_lies_apart_where_git_does_not_see_it(monkeypatch):
    expected = outputs(trained("vit"))
    run_main(monkeypatch, "vit", "0", "--set", "train.learning_rate=1e-3", "--set", "init.head=zeros")
    folder = Path("paper_outputs/runs/tries/vit+init.head=zeros+train.learning_rate=0.001/0")
    found = files.read_json(folder / "record.json")
    assert found["overrides"] == {"train": {"learning_rate": 0.001}, "init": {"head": "zeros"}}
    assert (found["config"]["train"]["learning_rate"], found["config"]["init"]["head"]) == (0.001, "zeros")
    assert found["config"]["train"]["epochs"] == SHORT["epochs"]
    assert outputs(Run("vit", 0)) == expected
    for path in (folder / "record.json", Run("vit", 0, TRIES).weights):
        assert subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode == 0


def test_whoever_watches_the_scratch_folder_sees_each_point(monkeypatch):
    seen, on_evaluation = [], Recorder.on_evaluation

    def spy(self):
        on_evaluation(self)
        seen.append(read_history((self.scratch / "history.csv").read_bytes()))
        found = records.parse(self.scratch / RECORD, RunRecord, "")
        assert (found.status, found.finished_at, found.run_key) == ("running", None, self.run_key)
        assert len(found.timestamps) == len(seen[-1])

    monkeypatch.setattr(Recorder, "on_evaluation", spy)
    final = read_history(outputs(trained())["history.csv"])
    assert seen == [final[: i + 1] for i in range(5)]


# Currentness of a run


def test_the_last_epoch_is_reported_whatever_the_best_was(monkeypatch):
    curve = iter([(2.3, 0.1), (2.3, 0.1), (0.4, 0.9), (0.1, 0.99), (0.5, 0.7), (1.5, 0.5)])  # step 0 measures both splits
    monkeypatch.setattr(loop, "evaluate_split", lambda *arguments: next(curve))
    metrics = trained("vit").metrics()
    assert (metrics["test_loss"], metrics["test_accuracy"]) == (1.5, 0.5)


def test_a_run_is_recorded_until_something_changes_that_can_change_its_numbers(monkeypatch):
    run, today = Run("vit", 0), config("vit")
    assert not run.is_current(today)
    trained("vit")
    assert run.is_current(today)
    assert not run.is_current(params.resolve(params.load(), "vit", {"train": {"eps": 1e-7}}))
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.training.run.NUMERICS", osa.NUMERICS + 1)
        assert not run.is_current(today)
    (run.folder / "metrics.json").unlink()
    assert not run.is_current(today)


# divergence


def test_a_diverged_run_is_a_result_even_if_it_is_killed_before_its_outputs(monkeypatch):
    write_params(train={"learning_rate": 1e30})
    run = trained("vit_noskip_nonorm")
    found, metrics = outputs(run), run.metrics()
    history = read_history(found["history.csv"])
    assert "nan" not in found["history.csv"].decode().lower()
    finite = [row["test_loss"] != "" for row in history]
    assert finite == [True] * (len(history) - 1) + [False]  # it stops at the first point that is not finite
    assert (metrics["diverged"], metrics["test_loss"]) == (True, None)
    assert metrics["diverged_at_step"] == metrics["steps"] == int(history[-1]["step"]) < 8
    assert run.record().status == "diverged"
    assert run.load_model(config("vit_noskip_nonorm"))
    assert not list(Path(".checkpoints").rglob("*.*"))
    assert history[-1]["test_accuracy"] != "", "that of logits that are not numbers"
    points = run.history()
    assert points["test_accuracy"].notna().tolist() == points["test_loss"].notna().tolist() == finite
    assert (points["train_accuracy"].notna() == points["train_loss"].notna()).all()
    interrupted("vit_noskip_nonorm", monkeypatch, before="write_outputs")
    again = trained("vit_noskip_nonorm")
    assert again.record().resumptions == 1 and outputs(again) == found


def test_a_run_that_is_infinite_from_the_start_is_no_result(monkeypatch):
    def broken(config, seed):
        model = build_model(config, seed)
        model.head.bias.data.fill_(math.inf)
        return model

    monkeypatch.setattr(loop, "build_model", broken)
    with pytest.raises(UserError, match="not finite before the first step"):
        trained()
    assert Run("osa_exact", 0).record() is None


# their records


def test_a_training_ends_well_while_another_of_the_same_run_replaces_its_record(monkeypatch, capsys):
    monkeypatch.setattr(Recorder, "clear", lambda self: (self.run.folder / "record.json").unlink())
    run_main(monkeypatch, "vit", "0")
    assert "table_2/vit/0: " in capsys.readouterr().err and Run("vit", 0).record() is None


def test_a_try_s_command_is_one_that_its_options_understand():
    run = Run("vit", 0, TRIES, {"init": {"alpha": None, "head": "zeros"}, "train": {"eps": 1e16}})
    *name, variant, number = shlex.split(run.command)[:6]
    assert (*name, variant, number) == ("python", "-m", "pipeline", "train", "vit", "0")
    assert params.parse_overrides(shlex.split(run.command)[7::2]) == run.overrides


# kill and resume


def interrupted(variant: str, monkeypatch: pytest.MonkeyPatch, *, before: str = "", after: str = "") -> Path:
    """A training that ends with Ctrl-C before or after one of the recorder's methods; its scratch folder."""
    method = getattr(Recorder, before or after)

    def interrupt(self):
        if after:
            method(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, before or after, interrupt)
        with pytest.raises(KeyboardInterrupt):
            trained(variant)
    (scratch,) = Path(".checkpoints/table_2", variant).iterdir()
    return scratch


def die_at_write(number: int) -> None:
    """Kills this process when it has written its `number`th file, under the temporary name."""
    replace, writes = os.replace, itertools.count(1)

    def mortal(*arguments):
        if next(writes) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments)

    os.replace = mortal
    torch.set_num_threads(1)


POINTS = 5
WRITES = POINTS * 3 + 4  # history, record and checkpoint of each point, outputs


@pytest.mark.slow
def test_killed_at_any_write_it_ends_with_the_same_bytes(project, monkeypatch):
    writes, replace = [], os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *arguments: (writes.append(arguments[1]), replace(*arguments)))
        expected = outputs(trained())
    assert len(writes) == WRITES
    resumptions = []
    for number in range(1, WRITES + 1):
        enter(project, str(number), monkeypatch)
        assert Training(functools.partial(die_at_write, number)).end() == (-signal.SIGKILL, [])
        run = trained()
        assert outputs(run) == expected, number
        resumptions.append(run.record().resumptions)
    before_the_first_checkpoint = 3
    assert resumptions == [0] * before_the_first_checkpoint + [1] * (WRITES - before_the_first_checkpoint)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"optimizer": "muon", "warmup_steps": 6, "schedule": "cosine"}],
)
def test_resumed_at_each_point_it_ends_with_the_same_bytes(monkeypatch, options):
    write_params(train=options)
    expected = outputs(trained())
    for _ in range(POINTS):
        interrupted("osa_exact", monkeypatch, after="on_evaluation")
    run = trained()
    assert outputs(run) == expected
    assert run.record().resumptions == POINTS


def test_time_is_summed_over_resumptions(monkeypatch):
    path = interrupted("osa_exact", monkeypatch, before="write_outputs") / "checkpoint.pt"
    state = load(path.read_bytes())
    state["times"] |= {"seconds": 1000.0, "started_at": "2025-01-01T00:00:00+00:00"}
    state["times"] |= {"commits": ["c0ffee"], "dirty": True}
    path.write_bytes(sealed(state))
    found = trained().record()
    assert 1000 < found.seconds < 1100
    assert found.started_at == "2025-01-01T00:00:00+00:00"
    assert len(found.timestamps) == 5
    assert found.commits == ["c0ffee", provenance.describe_commit()["git_commit"]] and found.dirty


def test_a_checkpoint_of_another_configuration_is_not_resumed(monkeypatch):
    interrupted("osa_exact", monkeypatch, before="write_outputs")
    write_params(train={"learning_rate": 0.02})
    assert trained().record().resumptions == 0


DAMAGES = [
    lambda content: b"",
    lambda content: content[: len(content) // 2],
    lambda content: flipped(content),
    lambda content: content[recorder.DIGEST_BYTES :],
    lambda content: sealed([1, 2]),
    lambda content: sealed(load(content) | {"progress": {"steps": 3}}),
    lambda content: sealed(load(content) | {"optimizers": [{"state": {}, "param_groups": []}]}),
    lambda content: sealed(load(content) | {"times": {"hours": 1}}),
]


def test_an_unreadable_checkpoint_is_named_and_earlier_results_stay(monkeypatch, capsys):
    earlier = outputs(trained())
    path = interrupted("osa_exact", monkeypatch, before="write_outputs") / "checkpoint.pt"
    content = path.read_bytes()
    capsys.readouterr()
    for number, damage in enumerate(DAMAGES):
        path.write_bytes(damage(content))
        with pytest.raises(UserError) as caught:
            trained()
        assert str(path) in str(caught.value) and "delete" in str(caught.value), number
        assert outputs(Run("osa_exact", 0)) == earlier
    with pytest.raises(SystemExit) as ended:
        run_main(monkeypatch, "osa_exact", "0")
    assert ended.value.code == 1
    assert str(path) in capsys.readouterr().err
    path.unlink()
    run_main(monkeypatch, "osa_exact", "0")
    assert outputs(Run("osa_exact", 0)) == earlier


def sealed(value) -> bytes:
    """A checkpoint that holds something else."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    content = buffer.getvalue()
    return hashlib.sha256(content).digest() + content


def flipped(content: bytes) -> bytes:
    """One bit flipped among the weights, which torch.load does not notice."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def load(content: bytes) -> dict:
    return torch.load(io.BytesIO(content[recorder.DIGEST_BYTES :]), weights_only=True)


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-50], flipped, lambda content: safetensors.torch.save({}), lambda content: b"no weights"],
)
def test_weights_that_are_not_those_of_the_record_are_named(damage):
    run = trained("vit")
    run.weights.write_bytes(damage(run.weights.read_bytes()))
    with pytest.raises(UserError, match="paper_outputs/weights/table_2/vit/0.safetensors does not match"):
        run.load_model(config("vit"))
    run.weights.unlink()
    with pytest.raises(UserError, match=r"table_2/vit/0.safetensors is missing.*dvc repro -f train@vit-0"):
        run.load_model(config("vit"))


def test_files_of_two_trainings_are_no_run(monkeypatch):
    run = trained("vit")
    assert run.record()
    files.write_text(run.folder / "watched.csv", "epoch\n")
    synthetic.rewrite(run.folder, files=records.digests(run.folder))
    for name in ("history.csv", "metrics.json", "watched.csv"):
        path = run.folder / name
        whole = path.read_bytes()
        path.write_bytes(whole + b"\n")
        with pytest.raises(UserError, match=name):
            run.record()
        assert not run.is_current(config("osa_exact")), name
        path.write_bytes(whole)
    (run.folder / "watched.csv").unlink()
    with pytest.raises(UserError, match="watched.csv"):
        run.record()
    (run.folder / "metrics.json").unlink()
    (run.folder / "metrics.json").mkdir()  # a folder, which no file can replace, long after the weights were written
    with pytest.raises(UserError, match="metrics.json cannot be written"):
        trained("vit")
    assert not (run.folder / "record.json").exists()


def test_forgotten_trainings_of_other_settings_go(monkeypatch):
    run = Run("vit", 0)
    old, young = (run.scratch.with_name(f"0-{name}") for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    trained("vit")
    assert young.exists() and not old.exists()
