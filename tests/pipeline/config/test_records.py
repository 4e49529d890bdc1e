"""A record vouches for the files of its folder, and for itself."""

import shutil
from pathlib import Path

import pytest

from pipeline.config import records
from pipeline.config.records import RECORD, Record, RunRecord
from pipeline.core import files
from pipeline.core.errors import UserError
from tests.pipeline.synthetic import ROOT, rewrite

RESULTS = {
    "runs/table_2/osa_ns/10": RunRecord,  # resumed once
    "runs/six_blocks/espa/0": RunRecord,
    "runs/penalties/vit+variant.penalty=VAR-I+variant.penalty_weight=0.01/0": RunRecord,  # with watched.csv
    "studies/complexity": Record,
    "benchmarks/amd-epyc-1-thread": Record,
    "benchmarks/nvidia-h200": Record,
}


@pytest.fixture
def copied(tmp_path):
    """A copy of a committed folder of results, and its record."""

    def copied(place: str) -> tuple[Path, Record]:
        folder = tmp_path / "paper_outputs" / place
        shutil.copytree(ROOT / "paper_outputs" / place, folder)
        return folder, records.read_record(folder, RESULTS[place], "make it")

    return copied


def refusal(folder: Path, schema: type[Record]) -> str:
    with pytest.raises(UserError) as caught:
        records.read_record(folder, schema, "make it")
    sentence = str(caught.value)
    assert sentence.count("\n") == 0 and "`make it`" in sentence
    return sentence


@pytest.mark.slow
@pytest.mark.parametrize("place, schema", RESULTS.items())
def test_no_changed_byte_of_a_record_changes_a_number_in_silence(copied, place, schema):
    """Every byte, changed in its lowest and in another bit: the record is refused by name, or says the same."""
    folder, whole = copied(place)
    path = folder / RECORD
    content = path.read_bytes()
    refused = 0
    for position, byte in enumerate(content):
        for bit in (1, 32):
            path.write_bytes(content[:position] + bytes([byte ^ bit]) + content[position + 1 :])
            try:
                found = records.read_record(folder, schema, "make it")
            except UserError as error:
                found = whole if str(folder) in str(error) else error
                refused += 1
            assert found == whole, content[position - 20 : position + 20]
    assert refused > len(content), "more than half of the changes matter; the others are white space"


@pytest.mark.parametrize("place, schema", RESULTS.items())
def test_a_record_is_written_as_it_is_read(copied, place, schema):
    folder, record = copied(place)
    before = (folder / RECORD).read_bytes()
    records.write_record(folder, record)
    assert (folder / RECORD).read_bytes() == before


def test_what_does_not_fit_is_a_sentence_that_names_the_file_and_the_key(copied):
    folder, _ = copied("runs/six_blocks/espa/0")
    content = files.read_json(folder / RECORD)
    older = {key: value for key, value in content.items() if key not in ("folder", "sha256")}
    wrong = {
        "folder is missing": older,
        "seed must be a whole number, not 'zero'": content | {"seed": "zero"},
        "qkv_bias": content | {"config": content["config"] | {"variant": content["config"]["variant"] | {"qkv_bias": True}}},
        "sha256": content | {"seconds": 1.0},
        "must be a block of keys": [content],
    }
    for words, changed in wrong.items():
        files.write_json(folder / RECORD, changed)
        assert words in (sentence := refusal(folder, RunRecord)) and str(folder / RECORD) in sentence


def test_a_record_belongs_to_one_folder_and_knows_all_its_files(copied):
    folder, record = copied("studies/complexity")
    moved = folder.with_name("elsewhere")
    shutil.copytree(folder, moved)
    assert "another folder, studies/complexity" in refusal(moved, Record)
    (folder / ".DS_Store").write_text("a file manager's")
    assert records.read_record(folder, Record, "make it") == record
    (folder / "more.csv").write_text("a,b\n")
    assert "more.csv is not listed in" in refusal(folder, Record)
    (folder / "more.csv").unlink()
    (folder / "times.csv").unlink()
    assert "times.csv does not match" in refusal(folder, Record)
    (folder / RECORD).unlink()
    assert f"{folder / RECORD} is missing" in refusal(folder, Record)


def test_keys_at_their_default_are_left_out(tmp_path):
    """A new option with a default leaves every record current."""
    folder = tmp_path / "paper_outputs/runs/table_2/osa_ns/10"
    shutil.copytree(ROOT / "paper_outputs/runs/table_2/osa_ns/10", folder)
    config = files.read_json(folder / RECORD)["config"]
    assert "optimizer" not in config["train"] and "keep" not in config["variant"]
    assert records.read_record(folder, RunRecord, "make it").config.train.optimizer == "adamw"
    rewrite(folder, config=config | {"train": config["train"] | {"optimizer": "muon"}})
    assert records.read_record(folder, RunRecord, "make it").config.train.optimizer == "muon"
