"""Layers as initialised are those of the model; of trained ones only what is evaluated is shown."""

import numpy as np
import pandas as pd
import pytest
import torch

from pipeline import measures
from pipeline.studies._findings import LAYERS, origin, trained_layers, worst_over_seeds
from tests.pipeline.synthetic import SMALL

DEPTH = SMALL["model"]["depth"]


def test_every_layer_of_every_orthogonal_model_is_there(lab):
    layers = measures.initialised_layers(lab, 0)
    names = [{"source": variant, "layer": layer + 1} for variant in measures.ORTHOGONAL for layer in range(DEPTH)]
    assert [name for name, *_ in layers] == names
    assert [layer.options["method"] for _, layer, _ in layers[::DEPTH]] == ["qr", "newton_schulz", "exact"]


def test_layers_see_what_the_model_passes_them(lab):
    config = lab.config("osa_qr")
    model = lab.model(config, 0).double()
    images = lab.images()[0][: measures.LAYER_IMAGES]
    seen = []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    model(images)
    for (_, _, x), expected in zip(measures.initialised_layers(lab, 0), seen, strict=False):
        torch.testing.assert_close(x, expected)
    assert len(seen) == DEPTH


def test_the_worst_of_each_seed_is_averaged(lab):
    rows = [
        ("osa_ns", 0, 0, 0.1),
        ("osa_ns", 0, 1, 0.3),
        ("osa_ns", 1, 0, 0.5),
        ("osa_qr", 0, 0, 0.2),
        ("osa_qr", 0, 1, np.nan),
    ]
    lab.tables = {"layers": pd.DataFrame(rows, columns=["variant", "seed", "layer", "error_max"])}
    layers = trained_layers(lab, "error_max")
    newton_schulz, qr = worst_over_seeds(lab, layers, "error_max", "an error")
    assert (newton_schulz.value, newton_schulz.n) == (0.4, 2) and newton_schulz.note == "from 0.3 to 0.5"
    assert (qr.value, qr.n) == (0.2, 1) and not qr.note
    assert newton_schulz.what.startswith(lab.label("osa_ns"))
    assert origin(layers) == {"sources": [LAYERS]}


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"layers": pd.DataFrame()},
        {"layers": pd.DataFrame({"variant": ["osa_ns"], "seed": [0]})},
        {"layers": pd.DataFrame({"variant": ["osa_ns"], "seed": [0], "error_max": [np.nan]})},
    ],
    ids=["no table", "empty table", "no column", "empty column"],
)
def test_layers_that_are_not_evaluated_are_said(tables, lab):
    lab.tables = tables
    layers = trained_layers(lab, "error_max")
    assert not worst_over_seeds(lab, layers, "error_max", "an error")
    assert "not evaluated" in origin(layers)["remark"] and "sources" not in origin(layers)
