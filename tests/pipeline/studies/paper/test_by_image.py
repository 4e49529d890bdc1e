"""Table 2's runs image by image, from made-up mistakes with known answers."""

import numpy as np
import pandas as pd
import pytest

from pipeline.report import page
from pipeline.studies.paper.by_image import right_by_model, summarise, vote
from tests.pipeline.studies.paper.conftest import histories, runs

IMAGES = 10
MISTAKES = {  # images that a run gets wrong, by model and seed; it takes each for a seven
    "osa_qr": [[0, 1], [0, 2], [0]],
    "vit": [[0], [3], [0, 4]],
}


def tables(mistakes, accuracies=None) -> dict[str, pd.DataFrame]:
    rows = [
        (name, seed, image, 7) for name, of_name in mistakes.items() for seed, own in enumerate(of_name) for image in own
    ]
    accuracies = accuracies or {
        name: [100 * (1 - len(own) / IMAGES) for own in of_name] for name, of_name in mistakes.items()
    }
    listed = runs(accuracies).assign(test_loss=0.25, calibration_error=0.01)
    classes = listed.loc[listed["status"] == "finished", ["variant", "seed"]].merge(
        pd.DataFrame({"class": [0, 1], "images": [4, IMAGES - 4]}), how="cross"
    )
    return {
        "runs": listed,
        "histories": histories({name: [[2.0, 1.0]] * len(own) for name, own in accuracies.items()}),
        "mistakes": pd.DataFrame(rows, columns=["variant", "seed", "image", "prediction"]),
        "per_class": classes,
    }


@pytest.fixture
def trained(paper_lab):
    paper_lab.tables = tables(MISTAKES)
    return paper_lab


def test_each_run_gets_right_what_is_not_among_its_mistakes(trained):
    right = right_by_model(trained.tables)
    assert right["osa_qr"].tolist() == [[0, 0] + [1] * 8, [0, 1, 0] + [1] * 7, [0] + [1] * 9]
    assert right["vit"].mean(axis=1) == pytest.approx([0.9, 0.9, 0.8])


def test_a_run_that_diverged_is_as_good_as_a_guess_on_each_image():
    right = right_by_model(tables({"osa_qr": [[0], [0, 2], []]}, {"osa_qr": [90.0, 80.0, None]}))["osa_qr"]
    assert right.mean(axis=1) == pytest.approx([0.9, 0.8, 0.1]) and len(set(right[2])) == 1


def test_means_are_compared_over_seeds_and_images(trained):
    found = summarise(None, {}, trained)["comparisons"]
    means = found["osa_matches_vit"]["osa_qr_vs_vit"]
    assert means["estimate"] == pytest.approx(100 * (25 - 26) / 30)
    accuracies = [80, 80, 90], [90, 90, 80]
    on_images = 100 * np.array([0 - 1 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, 0, 0, 0, 0, 0])
    error = sum(np.var(own, ddof=1) / 3 for own in accuracies) + np.var(on_images, ddof=1) / IMAGES
    low, high = means["low"] - means["estimate"], means["high"] - means["estimate"]
    assert high == -low and 1.7 < high / np.sqrt(error) < 2.2  # t of 5 % with few degrees of freedom
    assert found["osa_matches_vit"]["osa_ns_vs_vit"] is None and found["norm_matters_most"] == {"drops": None}
    assert found["removal_costs_speed"] == {}


def test_a_contrast_of_three_models_has_its_weights(paper_lab):
    paper_lab.tables = tables({"vit": [[0], [1]], "vit_noskip": [[0, 1], [2]], "vit_noskip_nonorm": [[1, 2, 3, 4], [5, 6]]})
    means = summarise(None, {}, paper_lab)["comparisons"]["norm_matters_most"]["drops"]
    assert means["estimate"] == pytest.approx((85 - 70) - (90 - 85))
    assert means["low"] < means["estimate"] < means["high"]


def test_models_have_loss_calibration_and_a_vote(trained):
    qr, vit = summarise(None, {}, trained)["models"]
    assert (qr["variant"], vit["variant"]) == ("osa_qr", "vit")
    assert qr["accuracy"].mean == pytest.approx(250 / 3) and qr["test_loss"].mean == 0.25
    assert qr["calibration_error"].mean == pytest.approx(0.01)
    assert qr["vote"] == pytest.approx(90) and vit["vote"] == pytest.approx(90)  # all but image 0, in which most err


def test_a_tie_counts_by_the_share_of_the_right_class():
    """Five runs vote: 2 right, 2 sevens; 2 right, three others; 1 right, 2 sevens, 2 nines; none right."""
    ties = {0: [7, 7, 9], 1: [1, 2, 3], 2: [7, 7, 9, 9], 3: [7, 7, 7, 9, 9]}
    rows = [(image, prediction) for image, predictions in ties.items() for prediction in predictions]
    table = pd.DataFrame(rows, columns=["image", "prediction"])
    assert vote(table, 5, 10) == pytest.approx((1 / 2 + 1 + 0 + 0 + 6) / 10)
    assert vote(pd.DataFrame([(0, 7), (0, 8)], columns=["image", "prediction"]), 3, 2) == pytest.approx((1 / 3 + 1) / 2)


def test_without_a_mistake_all_is_right(paper_lab):
    paper_lab.tables = tables({"osa_qr": [[], []], "vit": [[], []]})
    summary = page.to_json(summarise(None, {}, paper_lab))
    assert [row["vote"] for row in summary["models"]] == [100, 100]
    assert summary["comparisons"]["osa_matches_vit"]["osa_qr_vs_vit"] == {"estimate": 0, "low": None, "high": None}


def test_without_runs_there_is_nothing(paper_lab):
    assert summarise(None, {}, paper_lab)["models"] == []
