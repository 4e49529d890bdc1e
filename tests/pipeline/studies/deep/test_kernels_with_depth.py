"""Kernels after attention alone, by hand and by samples; code that is wrong on purpose does not pass."""

import math

import pytest
import torch

import osa.models
from osa.init import init_orthogonal_attention_, stiefel_uniform
from osa.shaped.schedules import exponential_schedule, residual_schedule
from pipeline.studies.deep import kernels_with_depth
from pipeline.studies.deep.kernels_with_depth import (
    Settings,
    alibi,
    eq_25,
    measure,
    softmax_rows,
    summary,
    through,
)

SMALL = Settings(seeds=[0], depths=[1, 6, 40], tokens=70, types=40, layer_depths=[6], images=2)
CHECKS = ("schedule", "skips", "corrected", "uncorrected", "spectrum", "trace_joint")


def one_block_late(depth, last):
    return exponential_schedule(depth + 1, last)[: depth + 1]


def drawn_per_head(attention, joint_value_output, **options):
    init_orthogonal_attention_(attention, **options)


def not_orthogonal(*size, **options):
    return 1.001 * stiefel_uniform(*size, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, name, wrong, fails",
    [
        (kernels_with_depth, "TOLERANCE", kernels_with_depth.TOLERANCE, set()),  # nothing is wrong
        (kernels_with_depth, "exponential_schedule", one_block_late, {"schedule"}),
        (osa.models, "init_orthogonal_attention_", drawn_per_head, {"trace_joint"}),
        (kernels_with_depth, "stiefel_uniform", not_orthogonal, {"spectrum"}),
    ],
    ids=["as in the figures", "late", "per head", "not orthogonal"],
)
def test_the_checks_hold_and_fail_of_wrong_code(module, name, wrong, fails, lab, monkeypatch):
    monkeypatch.setattr(module, name, wrong)
    found = kernels_with_depth.summarise(SMALL, measure(SMALL, lab), lab)
    assert fails <= {check for check in CHECKS if not found[check]["holds"]}
    if not fails:
        assert all(found[check]["holds"] for check in CHECKS) and all(row["ends"]["holds"] for row in found["rows"])
        assert found["trace_per_head"] > 1e-3 and found["skips_printed"] > found["skips"]["value"]


def test_eq_25_is_the_square():
    shortcut, steps = 0.873, exponential_schedule(6, 0.2)
    factor = ((1 - math.exp(-0.4)) ** (1 / 6) - shortcut**2) / (1 - shortcut**2)  # λ_α²
    reached = residual_schedule("exponential", steps, shortcut)[0]
    assert eq_25(math.inf, reached) == pytest.approx(-math.log1p(-(factor**2)) / 2)


def test_alibi_by_hand():
    """Two heads: slopes 1/16 and 1/256."""
    first, second = alibi(3, 2)
    assert torch.equal(first.triu(1), torch.zeros(3, 3)) and torch.equal(first[0], torch.tensor([1.0, 0, 0]))
    weights = torch.tensor([-2 / 16, -1 / 16, 0]).exp()
    torch.testing.assert_close(first[2], (weights / weights.sum()).double(), rtol=0, atol=1e-7)
    assert second[2, 0] == pytest.approx(math.exp(-2 / 256) / (1 + math.exp(-1 / 256) + math.exp(-2 / 256)))


def test_uniform_softmax_makes_all_tokens_one_in_a_block():
    """N = 50, Σ_0 = I: cosines 1 and q = 1/50 without skips, and .458, .829, .964 after 6, 12 and 36 blocks of Pre-LN."""
    steps = softmax_rows(torch.full((1, 50, 50), 1 / 50, dtype=torch.float64), 0.98)
    identity = torch.eye(50, dtype=torch.float64)
    after = steps["vanilla"](identity)
    assert summary(after)["cosine"] == pytest.approx(1) and after.trace().item() / 50 == pytest.approx(1 / 50)
    for name, expected in {"pre_ln": (0.458, 0.829, 0.964), "post_ln": (0.558, 0.988, 1.0)}.items():
        kernels = list(through(identity, [steps[name]] * 36))
        assert [summary(kernels[depth - 1])["cosine"] for depth in (6, 12, 36)] == pytest.approx(expected, abs=6e-4)


def test_a_row_is_what_a_wide_layer_does():
    """Heads of equal width with orthogonal weights, at a finite width: within a few standard errors of the kernel."""
    generator, width, heads, tokens = torch.Generator().manual_seed(0), 1024, 4, 7
    matrices = torch.rand(heads, tokens, tokens, generator=generator, dtype=torch.float64)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weights = [stiefel_uniform(width, width, generator=generator, dtype=torch.float64) for _ in range(2)]
    parts = [a @ part for a, part in zip(matrices, (x @ weights[0]).chunk(heads, dim=1), strict=True)]
    y = torch.cat(parts, dim=1) @ weights[1]
    expected = softmax_rows(matrices, 0.98)["vanilla"](x @ x.mT / width)
    assert ((y @ y.mT / width - expected).abs() < 0.2 * expected.abs().max()).all()
    assert (y @ y.mT / width - expected).norm() < 0.05 * expected.norm()
