"""Models of timm, transformers and torchvision with our attention, where installed: the code of docs/library.md."""

import re
from pathlib import Path

import pytest
import torch

from osa import integrations, orthogonal_attention
from tests.osa.helpers import relative_error

PAGE = (Path(__file__).parents[2] / "docs/library.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"```python (timm|transformers|torchvision)\n(.*?)```", PAGE, re.DOTALL))
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of the packages are not ours


@pytest.mark.parametrize("package, size", [("timm", 224), ("transformers", 224), ("torchvision", 32)])
def test_the_pages_model_trains_ten_steps(package, size):
    pytest.importorskip(package)
    assert len(re.findall(r"^.*\S", SNIPPETS[package], re.MULTILINE)) <= (8 if package != "torchvision" else 10)
    names, losses = {}, []
    exec(compile(SNIPPETS[package], "docs/library.md", "exec"), names)
    images, target = torch.randn(1, 3, size, size), torch.randn(10)
    parameters = dict(names["vit"].train().named_parameters())
    projections = ("attn.qkv.weight", "q_proj.weight", "query.weight")
    weight = next(each for name, each in parameters.items() if name.endswith(projections))
    optimizer, before = torch.optim.AdamW(parameters.values(), lr=1e-3), weight.detach().clone()
    for _ in range(10):
        outputs = names["vit"](images)
        outputs = getattr(outputs, "last_hidden_state", outputs)[..., :10]
        loss = (outputs.reshape(-1, 10)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and not torch.equal(weight, before)


def timm_vit(**options):
    timm = pytest.importorskip("timm")
    sizes = dict(img_size=16, patch_size=8, num_classes=7, depth=2)
    return timm.create_model("vit_tiny_patch16_224", **sizes, **options)


def test_timms_attention_is_ours_with_timms_weights():
    pytest.importorskip("timm")
    torch.manual_seed(0)
    ours = timm_vit(attn_layer=integrations.timm_attention(method="qr", alpha_init=0.75), qk_norm=True)
    missing = ours.load_state_dict(timm_vit(qk_norm=True).state_dict(), strict=False)
    assert missing.missing_keys == ["blocks.0.attn.alpha", "blocks.1.attn.alpha"] and not missing.unexpected_keys
    layer, x = ours.blocks[0].attn.double(), torch.randn(2, 5, 192, dtype=torch.float64)
    query, key, value = layer.qkv(x).unflatten(-1, (3, 3, 64)).movedim((2, 3), (0, 2))
    heads = orthogonal_attention(layer.q_norm(query), layer.k_norm(key), value, scale=0.75 / 8, method="qr")
    assert relative_error(layer(x), layer.proj(heads.transpose(1, 2).flatten(2))) < 1e-9
    images = torch.randn(2, 3, 16, 16)
    ours.float()(images).sum().backward()
    assert all(block.attn.alpha.grad.abs().min() > 0 for block in ours.blocks)
    model = timm_vit(attn_layer=integrations.timm_attention(), attn_drop_rate=0.1)  # which is refused in training
    assert model.eval()(images).shape == (2, 7)
    with pytest.raises(ValueError, match="dropout_p"):
        model.train()(images)


def bert(**options):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, vocab_size=50)
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**sizes, **options)).eval()


def test_berts_padding_is_left_out():
    pytest.importorskip("transformers")
    integrations.register_with_transformers("osa_test", alpha=2.0)
    model = bert(attn_implementation="osa_test")
    words, mask = torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with torch.no_grad():
        padded = model(words, attention_mask=mask).last_hidden_state
        assert relative_error(padded[1, :5], model(words[1:, :5]).last_hidden_state[0]) < 1e-5
        assert relative_error(padded[1, :5], model(words).last_hidden_state[1, :5]) > 1e-3  # which reads the padding
        assert relative_error(padded, bert(attn_implementation="sdpa")(words, attention_mask=mask).last_hidden_state) > 1e-3


def test_a_causal_model_is_refused():
    transformers = pytest.importorskip("transformers")
    integrations.register_with_transformers("osa_test")
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, vocab_size=50)
    config = transformers.LlamaConfig(**sizes, intermediate_size=64, attn_implementation="osa_test")
    for mask in (None, torch.tensor([[1, 1, 1, 0, 0]])):
        with pytest.raises(ValueError, match=r"is_causal|whole tokens"):
            transformers.LlamaModel(config)(torch.randint(50, (1, 5)), attention_mask=mask)
