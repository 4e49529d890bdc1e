"""Each measure against a known answer or the reference."""

import math

import pytest
import torch

from osa import reference
from osa.models import create_model
from pipeline.results import measures
from tests.osa.helpers import draw


@pytest.mark.parametrize("condition", [1, 1e3, 1e8])
def test_matrix_has_the_condition(condition):
    m = measures.matrix_with_condition(13, 6, condition, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(m)
    assert values[0].item() == pytest.approx(1)
    assert (1 / values[-1]).item() == pytest.approx(condition, rel=1e-6)


def test_scale_gives_the_norm():
    query, key, _ = (x[0, 0].detach() for x in draw(11, 5))
    scale = measures.scale_for_norm(query, key, 2.5)
    assert measures.norm(reference.skew(query, key, scale)).item() == pytest.approx(2.5)


@pytest.mark.parametrize("angle", [1e-4, 1e-2, 1, 50])
def test_exponential_of_a_plane_rotation(angle):
    s = torch.tensor([[0, angle], [-angle, 0]], dtype=torch.float64)
    cosine, sine = math.cos(angle), math.sin(angle)
    expected = torch.tensor([[cosine, sine], [-sine, cosine]], dtype=torch.float64)
    torch.testing.assert_close(measures.exponential(s), expected, rtol=0, atol=1e-15 * max(1, 10 * angle))


def test_exponential_is_torch_s_where_that_is_good():
    query, key, _ = (x.detach() for x in draw(11, 3))
    s = reference.skew(query, key, 0.7)
    torch.testing.assert_close(measures.exponential(s), torch.linalg.matrix_exp(s))


def test_orthogonality_error_of_a_known_matrix():
    matrices = torch.stack([torch.eye(3), torch.diag(torch.tensor([1.0, 3.0, 0.5]))]).double()
    assert measures.orthogonality_error(matrices).tolist() == [0, 8]
    rows = torch.diag(torch.tensor([1.0, 3.0, 0.5])).double()[:2]
    assert measures.orthogonality_error(rows) == measures.orthogonality_error(rows.mT) == 8


def test_mean_cosine_of_known_tokens():
    cosines = torch.tensor([[[1, 0.5], [0.5, 1]], [[1, -1], [-1, 1]]])
    assert measures.mean_cosine(cosines).tolist() == [0.5, -1]


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_jacobian_of_a_linear_map():
    left, right, x = gaussian(3, 5, seed=1), gaussian(4, 2, seed=2), gaussian(5, 4, seed=3)
    actual = measures.jacobian(lambda x: left @ x @ right, x)
    torch.testing.assert_close(actual, torch.kron(right.mT.contiguous(), left))
    row = measures.jacobian(lambda x: (x @ right)[:, 1], x)
    torch.testing.assert_close(row, torch.kron(right.mT.contiguous(), torch.eye(5, dtype=torch.float64)[1:2]))


def test_condition_of_weights():
    w_query, w_key, w_value, w_out = measures.random_head(12, 3, torch.Generator().manual_seed(0))
    assert measures.weight_condition(w_query, w_key) == pytest.approx(1, abs=1e-13)
    assert measures.weight_condition(w_query, w_key + w_query.roll(1, 1)) > 1.5
    torch.testing.assert_close(torch.linalg.svdvals(w_value @ w_out)[:4], torch.ones(4, dtype=torch.float64))
    product = measures.query_key_product(w_query, w_key)
    torch.testing.assert_close(product, -product.mT)
    assert torch.linalg.matrix_rank(product) == 8


def test_heads_of_a_model_s_layers_add_up_to_them(small_model):
    """Measurements of single heads add up to the model's layer."""
    model, images = small_model
    x = model.tokens(images)
    for block, (attention, entering) in zip(model.blocks, measures.attention_inputs(model, images), strict=True):
        torch.testing.assert_close(entering, x)
        scale, weights = attention.scale(), measures.head_weights(attention)
        heads = [measures.head(x, own, scale[i], **attention.options) for i, own in enumerate(weights)]
        torch.testing.assert_close(sum(heads), attention(x))
        x = block(x)


@pytest.fixture
def small_model():
    """OSA (NS) in float64 with an α for each head, and images."""
    sizes = {"patch_size": 7, "embed_dim": 12, "depth": 2, "num_heads": 3}
    model = create_model("osa_ns", **sizes, generator=torch.Generator().manual_seed(0)).double().requires_grad_(False)
    for block in model.blocks:
        block.attention.alpha.copy_(torch.tensor([0.1, 0.5, -2.0]))
    return model, gaussian(2, 1, 28, 28)
