"""Calls as users write them, for mypy alone: it finds each mistake, and warns of an `ignore` without one."""

import torch

import osa
from osa.integrations import register_with_transformers, timm_attention

x = torch.ones(2, 3, 4)
model = osa.create_model("osa_qr", depth=72, alpha=0.5, activation="gelu_tanh")
osa.create_model("osa_qr", dpeth=72)  # type: ignore[call-arg]
osa.create_model("osa_qr", depth="72")  # type: ignore[arg-type]
osa.build_vit(attention="orthogonal", method="qr", skip=False, norm=False, mlp_init="suo")
osa.build_vit(attention="orthgonal", skip=False, norm=False, mlp_init="suo")  # type: ignore[arg-type]
osa.build_vit(attention="softmax", skip=False, norm=False, mlp_init="suo", head="zero")  # type: ignore[arg-type]
osa.orthogonal_attention(x, x, x, method="newton_schulz", num_iterations=3)
osa.orthogonal_attention(x, x, x, methd="qr")  # type: ignore[call-arg]
osa.orthogonal_attention(x, x, x, method="qrr")  # type: ignore[arg-type]
osa.orthogonal_attention_varlen(x, x, x, torch.tensor([0, 2]), scale=1j)  # type: ignore[arg-type]
model.config.depth.bit_length()
model.config.dpeth.bit_length()  # type: ignore[attr-defined]
layer = osa.OrthogonalSelfAttention(64, 4, method="exact", dtype=torch.float64)
layer.query.weight.sum()
layer.query.wieght.sum()  # type: ignore[operator]
osa.orthogonal_attention(x, x, x, **layer.options)
timm_attention(methd="qr")  # type: ignore[call-arg]
register_with_transformers("osa", alpha="1")  # type: ignore[arg-type]
osa.save_pretrained(model, "folder")
osa.load_pretrained("folder").forward_features(x).sum()
osa.load_pretrained("folder", nmae="vit")  # type: ignore[call-arg]
