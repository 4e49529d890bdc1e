"""Type checkers see options as they are, so that they find a misspelt one."""

import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import osa
from osa import models, options
from osa.functional import METHODS, MethodOptions
from osa.modules import OrthogonalSelfAttention

CODE = """\
import torch

import osa
from osa.integrations import register_with_transformers, timm_attention

x = torch.ones(2, 3, 4)
model = osa.create_model("osa_qr", depth=72, alpha=0.5, activation="gelu_tanh")
osa.create_model("osa_qr", dpeth=72)  # wrong
osa.create_model("osa_qr", depth="72")  # wrong
osa.build_vit(attention="orthogonal", method="qr", skip=False, norm=False, mlp_init="suo")
osa.build_vit(attention="orthgonal", skip=False, norm=False, mlp_init="suo")  # wrong
osa.build_vit(attention="softmax", skip=False, norm=False, mlp_init="suo", head="zero")  # wrong
osa.orthogonal_attention(x, x, x, method="newton_schulz", num_iterations=3)
osa.orthogonal_attention(x, x, x, methd="qr")  # wrong
osa.orthogonal_attention(x, x, x, method="qrr")  # wrong
osa.orthogonal_attention_varlen(x, x, x, torch.tensor([0, 2]), scale=1j)  # wrong
layer = osa.OrthogonalSelfAttention(64, 4, method="exact", dtype=torch.float64)
layer.query.weight.sum()
layer.query.wieght.sum()  # wrong
osa.orthogonal_attention(x, x, x, **layer.options)
timm_attention(methd="qr")  # wrong
register_with_transformers("osa", alpha="1")  # wrong
osa.save_pretrained(model, "folder")
osa.load_pretrained("folder").forward_features(x).sum()
osa.load_pretrained("folder", nmae="vit")  # wrong
"""


def test_the_keywords_are_the_options():
    assert get_type_hints(options.Options) == models.TYPES
    assert list(options.Options.__annotations__) == list(models.OPTIONS)
    words = {
        options.AttentionKind: models.ATTENTION,
        options.AttentionStart: models.ATTENTION_INIT,
        options.MLPStart: models.MLP_INIT,
        options.ActivationKind: models.ACTIVATION,
        options.LinearStart: models.PATCH_EMBEDDING_INIT,
        options.HeadStart: models.HEAD_INIT,
    }
    assert all(get_args(kind) == tuple(known) for kind, known in words.items())
    assert get_args(get_type_hints(MethodOptions)["method"]) == METHODS
    assert get_type_hints(MethodOptions).keys() == OrthogonalSelfAttention(12, 3).options.keys()


@pytest.mark.slow
def test_a_type_checker_finds_what_is_misspelt(tmp_path):
    pytest.importorskip("mypy")
    path = tmp_path / "code.py"
    path.write_text(CODE, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", path]
    root = Path(osa.__file__).parents[1]
    printed = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8").stdout
    found = {int(line.split(":")[1]) for line in printed.splitlines() if ": error:" in line and "code.py" in line}
    assert found == {i for i, line in enumerate(CODE.splitlines(), 1) if line.endswith("# wrong")}, printed
    assert 'Unexpected keyword argument "dpeth" for "create_model"; did you mean "depth"?' in printed
