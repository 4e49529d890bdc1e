"""The gradient of the literal QR loses digits near rank deficiency, and no other does."""

import torch

from osa import reference
from pipeline.studies.paper import section_3
from pipeline.studies.paper.section_3 import Settings


def test_only_the_literal_qr_loses_digits(lab):
    settings = Settings(seeds=[0, 1], conditions=[1, 1e5])
    tables = section_3.measure(settings, lab)
    methods = section_3.summarise(settings, tables, lab)["methods"]
    errors = tables["gradients"].groupby(["method", "condition"])["error"].median()
    assert methods["qr_literal"]["worst"] > 100 * errors["qr_literal", 1]
    for method in ("qr", "exact", "newton_schulz"):
        assert methods[method]["worst"] < 1e-5 < methods["qr_literal"]["worst"]


def test_a_gradient_is_that_of_the_attention(lab):
    m, value, direction = lab.normal(0, "m", 7, 6), lab.normal(0, "v", 7, 3), lab.normal(0, "d", 7, 3)
    scale = torch.tensor(0.3, dtype=torch.float64)
    exact = section_3.gradient(m, value, direction, scale, "exact")
    torch.testing.assert_close(exact, section_3.gradient(m, value, direction, scale, reference.orthogonal_attention))
