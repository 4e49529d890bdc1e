"""The baseline of studies that follow the first reading, read from the records that git has."""

import shutil

from pipeline.core import files
from pipeline.statistics.claims import Results
from pipeline.studies.comparison import first_reading  # here, before a fixture puts the lab's tables in its place
from pipeline.training.run import Run
from tests.pipeline.synthetic import ROOT


def test_it_has_ten_seeds_of_each_model_whatever_one_edits(paper_lab):
    runs = first_reading(paper_lab)["runs"]
    assert set(runs["status"]) == {"finished"}
    assert runs.groupby("name")["seed"].apply(list).to_dict() == {
        name: list(range(10)) for name in (*paper_lab.paper.table_2, "osa_exact")
    }
    for row in runs.itertuples():
        folder = Run(row.variant, row.seed, "first_reading").folder
        assert row.test_accuracy == files.read_json(folder / "metrics.json")["test_accuracy"]
    shorter = paper_lab.params.train.model_copy(update={"epochs": 1})
    paper_lab.params, paper_lab.reading = paper_lab.params.model_copy(update={"train": shorter}), "torch_defaults"
    assert first_reading(paper_lab)["runs"].equals(runs)


def test_what_is_absent_is_missing(paper_lab, tmp_path, monkeypatch):
    kept = Run("vit", 3, "first_reading").folder
    shutil.copytree(ROOT / kept, tmp_path / kept)
    monkeypatch.chdir(tmp_path)
    tables = first_reading(paper_lab)
    found = Results(tables)
    assert (found.counts("vit")["missing"], found.counts("osa_qr")["missing"]) == (9, 10)
    assert tables["runs"].query("status == 'finished'")["seed"].tolist() == [3]
    assert len(tables["histories"]) == len(files.read_csv(kept / "history.csv"))
