"""An experiment beside the committed results: read from git, judged as claims are, and honest about one seed."""

import json
import subprocess

import pytest
import scipy.stats

from pipeline.core import files
from pipeline.tools import compare

COMMITTED = {
    "osa_qr": [97.0, 97.2, 96.9],
    "vit": [97.1, 97.3, 97.2],
    "vit_noskip": [94.0, 95.0, 96.0],
    "osa_ns": [96.0, 96.2, 96.1],
    "osa_exact": [96.5, 96.5, 96.5],
    "vit_noskip_nonorm": [79.0, 80.0, 78.0],
}
TRIED = {
    "osa_qr": [95.0, 95.3, 95.1],
    "vit": [96.0],
    "vit_noskip": [94.5, 95.5, 95.2],
    "osa_ns": [96.0, 96.2, None],
    "osa_exact": [96.5, 96.5, 96.5],
    "osa_<new>": [50.0, 60.0, 70.0],
}
PARAMS = "labels:\n  vit: ViT\n  osa_qr: OSA (QR)\n"


def write(folder, results, rate):
    """The files of made-up runs; None is a run that diverged."""
    for variant, accuracies in results.items():
        for seed, accuracy in enumerate(accuracies):
            run = folder / "paper_outputs/runs/table_2" / variant / str(seed)
            environment = {"device_name": "AMD EPYC", "num_threads": 1, "torch": "2.11.0"}
            record = {"variant": variant, "seed": seed, "environment": environment, "data_sha256": "da7a" * 16}
            config = {"train": {"learning_rate": rate if variant == "osa_qr" else 3e-4}, "init": {"head": "xavier"}}
            files.write_json(run / "record.json", record | {"config": config, "code_sha256": "c0de" * 16})
            metrics = {"diverged": accuracy is None, "test_accuracy": accuracy and accuracy / 100}
            files.write_json(run / "metrics.json", metrics)
            files.write_text(
                run / "history.csv", f"epoch,test_loss\n0.0,2.3\n1.0,{2 - accuracy / 100 if accuracy else ''}\n"
            )
    files.write_text(folder / "params.yaml", PARAMS)


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Committed results at HEAD, and an experiment `faster` as DVC keeps it, checked out nowhere."""
    monkeypatch.chdir(tmp_path)
    for key in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{key}_NAME", "A")
        monkeypatch.setenv(f"GIT_{key}_EMAIL", "a@b.c")
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message=nothing yet")
    write(tmp_path, TRIED, 1e-3)
    git("add", "--all")
    git("update-ref", f"refs/exps/ab/{'c' * 38}/faster", git("commit-tree", "-p", "HEAD", "-m", "tried", git("write-tree")))
    git("rm", "--quiet", "-r", "--force", ".")
    write(tmp_path, COMMITTED, 3e-4)
    files.write_text(".gitignore", "/comparisons/\n")
    git("add", "--all")
    git("commit", "--quiet", "--message=results")
    return tmp_path


def rows(table):
    return {row[0]: row[1:] for row in table.rows}


def test_an_experiment_beside_the_committed_results(repository, capsys):
    compare.main(["faster"])
    assert git("status", "--porcelain") == ""
    before, after = compare.read("HEAD"), compare.read("faster")
    assert rows(compare.changes_table(before, after)) == {"train.learning_rate": ["0.0003", "0.001", "OSA (QR)"]}
    found = rows(compare.results_table(before, after))

    samples = TRIED["osa_qr"], COMMITTED["osa_qr"]
    welch = scipy.stats.ttest_ind(*samples, equal_var=False).confidence_interval(0.95)
    low, high = (f"{end:.2f}".replace("-", "−") for end in welch)
    assert found["OSA (QR)"] == ["97.03 ± 0.15 (3)", "95.13 ± 0.15 (3)", "−1.90", f"{low} to {high}", "lower"]
    assert found["ViT"][1:4] == ["96.00 (1)", "−1.20", "one seed: no interval"]
    assert found["ViT"][4].startswith("1 run, and fewer than 3")
    assert found["vit_noskip"][4] == "no difference shown"
    assert found["osa_ns"][1] == "96.10 ± 0.14 (2)\n1 diverged" and found["osa_ns"][4] == "1 of the runs diverged"
    assert found["osa_exact"][2:] == ["", "", "the same runs"]
    assert found["vit_noskip_nonorm"][1:] == ["not run", "", "", ""]
    assert found["osa_<new>"] == ["not run", "60.00 ± 10.00 (3)", "", "", ""]

    said = capsys.readouterr().out
    assert "train.learning_rate  0.0003" in said and "osa_ns" in said
    assert said.splitlines()[-1] == "comparisons/faster.html"
    page = (repository / "comparisons/faster.html").read_text()
    assert "one seed: no interval" in page and "osa_&lt;new&gt;" in page and "<new>" not in page
    assert page.count("<svg") > len(found)  # a line for each model, and the curves


def test_folders_revisions_and_the_working_directory(repository, tmp_path_factory, capsys):
    compare.main([])
    assert capsys.readouterr().out.count("the same runs") == len(COMMITTED)
    assert (repository / "comparisons/workspace.html").exists()
    write(repository, {"vit": [90.0, 91.0, 92.0]}, 3e-4)
    other = tmp_path_factory.mktemp("other")
    write(other, {"vit": [97.1, 97.3, 97.2]}, 3e-4)
    compare.main([".", "--with", str(other)])
    assert "lower" in capsys.readouterr().out
    assert compare.read("HEAD").runs["vit"] == compare.read(str(other)).runs["vit"] != compare.read(".").runs["vit"]


def test_what_cannot_be_compared_is_one_sentence(repository, capsys):
    def said(*arguments):
        with pytest.raises(SystemExit):
            compare.main([*arguments])
        text = capsys.readouterr().err
        assert text.startswith("error: ") and text.count("\n") == 1
        return text

    assert "the experiments here are faster" in said("slower")
    assert "HEAD~1 has no runs of Table 2" in said("HEAD~1")
    path = repository / "paper_outputs/runs/table_2/vit/1"
    metrics = (path / "metrics.json").read_text()
    (path / "metrics.json").write_text(json.dumps([]))
    assert "paper_outputs/runs/table_2/vit/1/" in said()
    (path / "metrics.json").write_text(metrics)
    (repository / "params.yaml").write_text("labels: [")
    assert "params.yaml is not valid YAML" in said()
    assert not (repository / "comparisons").exists()


@pytest.mark.parametrize("text", ["", "[]", "run:\n", "run: {variants: , seeds: }"])
def test_parameters_that_list_nothing_leave_nothing_out(repository, text):
    (repository / "params.yaml").write_text(text)
    assert len(compare.read(".").runs) == len(compare.read("HEAD").runs) > 0


def test_runs_that_params_yaml_leaves_out_do_not_count(repository):
    assert sorted(compare.read(".").runs["vit"]) == [0, 1, 2]
    files.write_text("params.yaml", f"{PARAMS}run: {{variants: [vit, osa_new], seeds: [0, 2]}}\n")
    assert {variant: sorted(of) for variant, of in compare.read(".").runs.items()} == {"vit": [0, 2]}
