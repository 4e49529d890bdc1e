"""The penalties of Zhang et al. 2021 at matrices whose value is known, and with a model that they leave alone."""

import math

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.optim.swa_utils import AveragedModel

from osa import create_model
from osa.constrained.penalties import (
    PENALTIES,
    attention_matrix,
    attention_penalty,
    gram_penalty,
    head_penalty,
    mlp_penalty,
    projection_penalty,
    with_penalty,
)
from osa.init import stiefel_uniform

SMALL = {"image_size": 4, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_ratio": 2}  # N = 5


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("m, n", [(7, 3), (3, 7), (5, 5), (1, 5)])
def test_gram_penalty(m, n):
    w, least = numbers(m, n), min(m, n)
    literal = lambda w: (w.mT @ w - torch.eye(n, dtype=w.dtype)).square().sum()  # noqa: E731
    assert gram_penalty(torch.zeros(m, n)) == least
    q = stiefel_uniform(max(m, n), least, dtype=w.dtype)
    q = q if m >= n else q.mT
    assert gram_penalty(q) < 1e-28
    torch.testing.assert_close(gram_penalty(3 * q).item(), 64.0 * least)
    torch.testing.assert_close(literal(w) - gram_penalty(w), torch.tensor(float(max(n - m, 0)), dtype=w.dtype))
    torch.testing.assert_close(grad(gram_penalty)(w), grad(literal)(w))
    torch.testing.assert_close(gram_penalty(torch.stack([w, q])), gram_penalty(w))


@pytest.mark.parametrize("n", [2, 5, 11])
def test_attention_penalty(n):
    repeated = lambda a: a.double().expand(2, 3, n, n)  # noqa: E731  of two images and three heads
    assert attention_penalty(repeated(torch.eye(n)[torch.randperm(n)])) == 0
    uniform, collapsed = repeated(torch.full((n, n), 1 / n, dtype=torch.float64)), torch.zeros(n, n)
    collapsed[:, 0] = 1
    torch.testing.assert_close(attention_penalty(uniform).item(), 3.0 * (n - 1))
    assert attention_penalty(repeated(collapsed)) == 3 * n * (n - 1)
    assert grad(attention_penalty)(uniform).abs().max() < 1e-15  # a saddle: a change with rows of sum 0 lowers it


def test_projection_penalty():
    attention = create_model("osa_exact", **SMALL).blocks[0].attention.double()
    parts = (attention.query, attention.key, attention.value, attention.out)
    for part in parts:
        part.weight.data = stiefel_uniform(12, 12, dtype=torch.float64)
    torch.testing.assert_close(projection_penalty(attention).item(), 9.0 * 12)  # Σ WᵢᵀWᵢ = 4I
    assert projection_penalty(attention, separate=True) < 1e-24
    for part in parts:
        part.weight.data /= 2
    assert projection_penalty(attention) < 1e-24
    torch.testing.assert_close(projection_penalty(attention, separate=True).item(), 4 * 12 * 0.75**2)


def test_section_4_begins_at_0_of_the_heads_and_not_of_the_mlps():
    for block in create_model("osa_exact", **SMALL).blocks:
        assert head_penalty(block.attention) < 1e-10
        assert mlp_penalty(block.mlp).item() == pytest.approx(12, rel=1e-5)  # M₁ᵀM₁ = 2I, and M₂M₂ᵀ = I
        block.attention.key.weight.data[4:8] *= math.sqrt(2)
        assert head_penalty(block.attention).item() == pytest.approx(4, rel=1e-5)


@pytest.mark.parametrize("name", ["vit", "osa_exact", "osa_ns"])
def test_attention_matrices_are_those_that_the_heads_use(name):
    attention, x = create_model(name, **SMALL).blocks[0].attention.double(), numbers(2, 5, 12)
    query, key, value = attention.project(x)
    a = attention_matrix(attention, x)
    torch.testing.assert_close(a @ value, attention.mix(query, key, value, None))
    if name == "vit":
        torch.testing.assert_close(a, torch.softmax(query @ key.mT / math.sqrt(4), dim=-1))


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_sums_its_terms_over_blocks_and_leaves_the_output_alone(name):
    model, images = create_model("vit", **SMALL), torch.randn(7, 1, 4, 4)
    output, penalty = with_penalty(model, images, name)
    assert torch.equal(output, model(images))
    expected, x = 0.0, model.tokens(images)
    for block in model.blocks:
        attention = block.attention
        if "VAR" in name:
            expected += attention_penalty(attention_matrix(attention, block.norm1(x)))
        if name in ("VAR-II", "VAR-III", "VAR-II-separate"):
            expected += projection_penalty(attention, separate=name.endswith("separate"))
        expected += {"VAR-III": mlp_penalty(block.mlp), "heads": head_penalty(attention)}.get(name, 0)
        x = block(x)
    torch.testing.assert_close(penalty, expected)
    penalty.backward()
    assert model.blocks[-1].attention.query.weight.grad.norm() > 0
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_wrapped_models_have_their_penalty_and_others_a_sentence():
    model, images = create_model("vit", **SMALL), torch.randn(7, 1, 4, 4)
    expected = with_penalty(model, images, "VAR-III")
    for held in (nn.DataParallel(model), AveragedModel(model)):
        assert all(map(torch.equal, with_penalty(held, images, "VAR-III"), expected))
    for other, name, cause in (
        (model, "VAR-IV", "'VAR-IV' is unknown; choose one of VAR-I,"),
        (nn.Linear(4, 4), "VAR-I", "`blocks`.*Linear has none"),
    ):
        with pytest.raises(ValueError, match=cause):
            with_penalty(other, images, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
@pytest.mark.parametrize("way", ["torch.compile", "in place", "block by block"])
def test_a_compiled_model_is_a_sentence(way):
    """Hooks are no part of what was compiled without them."""
    model, images = create_model("vit", **SMALL), torch.randn(7, 1, 4, 4)
    expected, compiled = model(images), model
    if way == "torch.compile":
        compiled = torch.compile(model, backend="eager")
    for part in {"in place": [model], "block by block": model.blocks}.get(way, []):
        part.compile(backend="eager")
    torch.testing.assert_close(compiled(images), expected)
    with pytest.raises(ValueError, match="without torch.compile"):
        with_penalty(compiled, images, "VAR-I")
    assert not any(module._forward_pre_hooks for module in model.modules())
