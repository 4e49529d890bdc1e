"""The better of two optimisers: its search, what follows it, and the verdict."""

import math

from pipeline import studies
from pipeline.report import page
from pipeline.statistics.verdicts import LEVEL
from pipeline.studies.paper import optimisers
from pipeline.training import HISTORY_COLUMNS
from tests.pipeline import synthetic

SETTINGS = optimisers.Settings(
    reading="first",
    set={"train": {"points_per_epoch": 1}},
    models={"osa": "osa_exact", "vit": "vit"},
    optimizers=["adamw", "muon"],
    rates=[1e-4, 1e-3],
    search_epochs=1,
    search_seed=5,
    seeds=[0, 1, 2],
)
ACCURACIES = {("osa", "adamw"): 50.0, ("osa", "muon"): 60.0, ("vit", "adamw"): 58.0, ("vit", "muon"): 40.0}


def train(lab, request, loss: float, accuracy: float) -> None:
    """Writes the run of a request, as if it had ended so."""
    variant, overrides, seed = request
    last = {"step": 1, "epoch": 1.0, "train_loss": loss, "test_loss": loss, "test_accuracy": accuracy / 100}
    curve = [dict.fromkeys(HISTORY_COLUMNS, 2.3) | {"step": 0, "epoch": 0.0}, dict.fromkeys(HISTORY_COLUMNS, 0.5) | last]
    synthetic.write_ended(lab.run(variant, overrides, seed), lab.config(variant, overrides), curve)


def search(lab) -> None:
    """OSA learns best at 1e-3 with AdamW, where Muon diverges, and ViT at 1e-4."""
    for model, optimizer in ACCURACIES:
        for rate, request in optimisers.search_requests(SETTINGS, model, optimizer).items():
            is_best = rate == (1e-3 if (model, optimizer) == ("osa", "adamw") else 1e-4)
            train(lab, request, 1.0 if is_best else math.inf if optimizer == "muon" else 2.0, 10.0)


def test_long_trainings_follow_a_search_at_its_best_rate(paper_lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(optimisers.trainings(SETTINGS, paper_lab)) == 8
    search(paper_lab)
    long = [request for name, request in optimisers.requests(SETTINGS, paper_lab) if not name.endswith("_search")]
    assert len(long) == 12 and {seed for _, _, seed in long} == {0, 1, 2}
    rates = {(variant, changes["train"]["optimizer"]): changes["train"]["learning_rate"] for variant, changes, _ in long}
    assert rates == {
        ("osa_exact", "adamw"): 1e-3,
        ("osa_exact", "muon"): 1e-4,
        ("vit", "adamw"): 1e-4,
        ("vit", "muon"): 1e-4,
    }
    assert all(changes["train"]["points_per_epoch"] == 1 and "epochs" not in changes["train"] for _, changes, _ in long)


def test_each_model_has_the_optimiser_that_ends_with_the_lower_loss(paper_lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    search(paper_lab)
    tables = optimisers.read(SETTINGS, paper_lab)
    few = optimisers.summarise(SETTINGS, tables, paper_lab)
    assert few == {"rows": [], "verdict": None}
    for name, request in optimisers.requests(SETTINGS, paper_lab):
        if not name.endswith("_search"):
            accuracy = ACCURACIES[tuple(name.split("_"))] + 0.1 * request[2]
            train(paper_lab, request, 2 - accuracy / 100, accuracy)
    monkeypatch.setattr(optimisers, "CLAIMS_FILE", synthetic.ROOT / optimisers.CLAIMS_FILE)
    summary = optimisers.summarise(SETTINGS, optimisers.read(SETTINGS, paper_lab), paper_lab)
    assert [row["rate"] for row in summary["rows"]] == [1e-3, 1e-4, 1e-4, 1e-4]
    assert round(summary["verdict"].estimate, 6) == 2 and summary["verdict"].word == "reproduced"  # 60 over 58
    template = page.template_environment(paper_lab.label).get_template("research/optimisers.md.j2")
    shown = template.render(optimisers=page.to_json(summary), level=LEVEL)
    assert "| OSA (exact) | Muon | 1 × 10⁻⁴ |" in shown and "confirmed" in shown
    assert not template.render(optimisers=page.to_json(few), level=LEVEL).strip()


def test_the_long_seeds_are_not_the_search_s():
    settings = studies.settings("optimisers")
    assert settings.search_seed not in settings.seeds and settings.models.keys() == {"osa", "vit"}
