"""The lines of docs/library.md that one tries first do what the page says of them."""

import re
from pathlib import Path

import pytest
import torch

import osa
from osa import orthogonal_attention
from tests.osa.helpers import relative_error

PAGE = (Path(__file__).parents[2] / "docs/library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_padding_packs_adapters_saving_and_loading(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    names = {"osa": osa, "torch": torch}
    (block,) = (block for block in BLOCKS if "attn_mask" in block)
    exec(compile(block, "docs/library.md", "exec"), names)
    layer, tokens, loaded, model = (names[name] for name in ("layer", "tokens", "loaded", "model"))
    plain = loaded.blocks[0].attention
    for i, length in enumerate((50, 33)):
        assert relative_error(names["y"][i, :length], plain(tokens[i, :length])) < 1e-5
    for part in (slice(50), slice(50, 83)):
        alone = orthogonal_attention(*(names[name][part].transpose(0, 1) for name in ("q", "k", "v"))).transpose(0, 1)
        assert relative_error(names["packed"][part], alone) < 1e-5
    assert {file.name for file in Path("my_model").iterdir()} == {"README.md", "config.json", "model.safetensors"}
    images = torch.randn(3, 1, 28, 28)
    assert names["adapted"].shape == (8, 10) and relative_error(model(images), loaded(images)) > 1e-2
    layer.query = layer.query[0]
    assert torch.equal(model(images), loaded(images))
