"""The norms as initialised against dense ones, and what the table of runs says."""

import math

import pandas as pd
import pytest
import torch

from osa.functional import orthogonal_attention
from pipeline.measures import jacobian, norm, random_head, skew
from pipeline.report import figures
from pipeline.studies._deep import RUN
from pipeline.studies.deep import long_sequences
from pipeline.studies.deep.long_sequences import CASES, Settings, costs, how_alpha_follows, jacobian_norm, measure, skew_norm

SETTINGS = Settings(
    models=["vit", "osa_exact"], patches=[14, 7], epochs=1, seeds=[0], initial_seeds=[0], images=1, power_iterations=2
)


@pytest.mark.parametrize("tokens", [3, 11])
def test_norms_of_one_head_are_those_of_dense_matrices(tokens):
    """Of J₁ alone, with the value that A multiplies held fixed."""
    generator = torch.Generator().manual_seed(7)
    x, scale = torch.randn(tokens, 6, generator=generator, dtype=torch.float64), 0.7
    w_query, w_key, w_value, w_out = weights = random_head(6, 2, generator)
    s, value = skew(x @ w_query, x @ w_key, scale), x @ w_value
    assert skew_norm(x, w_query, w_key, scale) == pytest.approx(norm(s).item(), abs=1e-12)
    attend = lambda x: orthogonal_attention(x @ w_query, x @ w_key, value, scale=scale) @ w_out  # noqa: E731
    wanted = norm(jacobian(attend, x)).item()
    start = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    found = jacobian_norm(x, list(weights), scale, start, iterations=150)
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-12)
    assert wanted <= 2 * scale * norm(x).item() ** 2 + 1e-12, "the bound"


def test_measuring_goes_over_patches_cases_and_runs(lab):
    lab.study = "long_sequences"
    tables = measure(SETTINGS, lab)
    initial = tables["initial"].set_index(["case", "tokens"])
    assert set(initial.index) == {(case, tokens) for case in CASES for tokens in (5, 17)}
    assert initial.loc[("following", 17), "alpha"] == pytest.approx(0.1 * 17 / 17)  # small models have 17 tokens
    assert initial.loc[("following", 5), "alpha"] == pytest.approx(0.1 * 17 / 5)
    assert initial.loc[("following", 17), "skew"] == pytest.approx(initial.loc[("normalised", 17), "skew"])
    ratio = initial.loc[("following", 5), "skew"] / initial.loc[("normalised", 5), "skew"]
    assert ratio == pytest.approx(17 / 5), "S is in proportion to α"
    assert tables["runs"][["variant", "tokens", "status"]].values.tolist() == [
        [model, tokens, "missing"] for tokens in (5, 17) for model in ("vit", "osa_exact")
    ]
    answer, _ = long_sequences.findings(SETTINGS, tables, lab)
    assert answer.figure is None and all(row[-1] == "not evaluated" for row in answer.table.rows)


def test_slopes_by_hand():
    rows = [
        {
            "case": case,
            "tokens": n,
            "seed": seed,
            "alpha": 0.1,
            "norm_squared": n,
            "skew": n**power,
            "jacobian": 3 * n**power,
        }
        for case, power in zip(CASES, (0.5, 1.0, 0.0), strict=True)
        for n in (50, 197, 785)
        for seed in (0, 1, 2)
    ]
    finding = how_alpha_follows(pd.DataFrame(rows))
    assert [measure.value for measure in finding.measures] == pytest.approx([1, 0.5, 0.5, 1, 1, 1, 1, 0, 0], abs=1e-9)
    assert "‖S‖₂ goes as N^{0.50}" in finding.in_short and "turns into N^{0.00}" in finding.in_short


def test_time_and_accuracy_on_the_same_axes(lab):
    rows = [("vit", 50, 0, "finished", 0.95, 0.4), ("osa_exact", 50, 0, "finished", 0.94, 0.5)]
    rows += [("vit", 785, 0, "missing", math.nan, math.nan)]
    columns = ["variant", "tokens", "seed", "status", "test_accuracy", "seconds_per_step"]
    runs = pd.DataFrame(rows, columns=columns).assign(codes="c0de", device="cpu").reindex(columns=[*columns[:3], *RUN])
    finding = costs(SETTINGS, runs, lab)
    assert finding.table.rows[0] == ["ViT", "50", "0.40", "95.00", "1"]
    assert finding.table.rows[-1] == ["ViT", "785", "–", "–", "not evaluated"]
    assert finding.figure is None, "two points that no number of tokens tells apart"
    assert finding.in_short == (
        "2 of 3 runs trained so far; ViT: 0.40 s a step for 95.00% at N = 50; "
        "OSA (exact): 0.50 s a step for 94.00% at N = 50."
    )
    longer = runs.assign(status="finished", test_accuracy=0.9, seconds_per_step=[0.4, 0.5, 3.0])
    assert "N = 785" in figures.svg(costs(SETTINGS, longer, lab).figure)
