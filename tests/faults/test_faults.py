"""Faults at random places and moments: after each, results are right, or one sentence says what to do.

A few trials of each kind run with the other tests; OSA_FAULT_TRIALS=200 is a campaign.
"""

import functools
import os
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import params, reading
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from tests.faults.process import (
    PAGE,
    RUN,
    Training,
    after_seconds,
    clear,
    leftovers,
    mount,
    outputs,
    write_project,
)
from tests.pipeline import synthetic

pytestmark = pytest.mark.faults
TRIALS = int(os.environ.get("OSA_FAULT_TRIALS", "2"))
PARAMS = (ROOT / "params.yaml").read_text(encoding="utf-8")
trials = pytest.mark.parametrize("seed", range(TRIALS))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Makes a project the working directory, and trains; the run's files and its seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("faults"))
        write_project()
        status, errors = Training().end()
        assert (status, errors) == (0, [])
        yield outputs(), RUN.record().seconds


@pytest.fixture
def expected(undisturbed):
    clear()
    return undisturbed[0]


def assert_the_same_command_ends_with(expected):
    status, errors = Training().end()
    assert (status, errors, leftovers()) == (0, [], [])
    assert outputs() == expected


def is_sentence(status, errors, about):
    return status == 1 and len(errors) == 1 and errors[0].startswith("error: ") and about in errors[0]


@trials
def test_the_same_run_trained_several_times_at_once(seed, undisturbed, expected):
    random = Random(f"at once {seed}")
    moments = [random.uniform(0, undisturbed[1] / 2) for _ in range(random.choice([2, 3]))]
    ends = [training.end() for training in [Training(after_seconds(moment)) for moment in moments]]
    assert ends == [(0, [])] * len(moments)
    assert outputs() == expected and RUN.record() and not leftovers()


@pytest.mark.parametrize("kind", ["full", "read-only", "a file"])
@pytest.mark.parametrize("folder", ["paper_outputs/weights", "paper_outputs/runs", ".checkpoints"])
def test_a_folder_that_cannot_be_written(folder, kind, undisturbed, expected):
    random = Random(f"{folder} {kind}")
    for _ in range(max(1, TRIALS // 4)):
        clear()
        if kind == "read-only":
            for path, content in undisturbed[0].items():
                files.write_bytes(path, content)
        if kind == "a file":
            Path(folder).write_text("", encoding="utf-8")
            status, errors = Training().end()
            Path(folder).unlink()
        else:
            fewer = {"paper_outputs/weights": len(expected[RUN.weights]) // PAGE, "paper_outputs/runs": 2}.get(folder, 8)
            status, errors = Training(functools.partial(mount, folder, kind, random.randint(1, fewer))).end()
        if status == 77:
            pytest.skip("needs the right to mount")
        assert is_sentence(status, errors, about=f"{folder}/")
        assert outputs() == expected if kind == "read-only" else not RUN.record()
        assert_the_same_command_ends_with(expected)


# params.yaml


BETWEEN_BARS = (
    "¦null¦true¦-1¦0¦1¦0.5¦1e400¦.nan¦-.inf¦'3'¦1e-3¦0x10¦1_000¦1:30¦~¦2026-99-99¦!!int abc¦&a [*a]¦*missing¦[]¦{}¦[1, 2¦"
    "!!python/object/apply:os.system [true]¦{a: b}¦- a¦|¦> ¦\"¦'¦@¦`¦%¦ümläut¦\x00¦a: b: c¦osa_qr¦[osa_qr, osa_qr]¦\t3¦yes"
)
HOSTILE = [*BETWEEN_BARS.split("¦"), "9" * 400, "[" * 3000 + "]" * 3000, "1" + "0" * 12, "x" * 5000]
PIECES = st.one_of(st.sampled_from(HOSTILE).map(str.encode), st.binary(max_size=2), st.just(b"\n"))


@st.composite
def mutated(draw) -> bytes:
    """params.yaml with lines moved, doubled, indented or gone, or with some bytes replaced."""
    lines, content = PARAMS.splitlines(keepends=True), PARAMS.encode()
    at, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    match draw(st.sampled_from(["bytes", "value", "gone", "doubled", "indented", "moved", "cut off"])):
        case "bytes":
            start = draw(st.integers(0, len(content)))
            return content[:start] + draw(PIECES) + content[start + draw(st.integers(0, 3)) :]
        case "value":
            key, colon, _ = lines[at].partition(": ")
            lines[at] = f"{key}{colon}{draw(st.sampled_from(HOSTILE))}\n"
        case "gone":
            del lines[at]
        case "doubled":
            lines.insert(other, lines[at])
        case "indented":
            lines[at] = " " + lines[at]
        case "moved":
            lines.insert(other, lines.pop(at))
        case "cut off":
            return content[: draw(st.integers(0, len(content)))]
    return "".join(lines).encode()


@settings(max_examples=20 * TRIALS)
@given(content=mutated())
def test_parameters_are_taken_as_they_stand_or_refused_in_one_sentence(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("mutated") / "params.yaml"
    path.write_bytes(content)
    sentence = loaded = None
    try:
        loaded = params.load(path).model_dump()
    except UserError as error:
        sentence = str(error)
    if sentence:
        assert "params.yaml" in sentence and "\n" not in sentence and len(sentence) < 500
    else:
        assert synthetic.deep_merge(loaded, reading.read_yaml(path)) == loaded, "all that was written is there as it stands"
