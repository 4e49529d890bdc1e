"""Theorem 4.2: with the initialisation of Section 4, the query–key product W̃ has condition number 1.

We measure the singular values and the condition number κ of W̃ with this initialisation and with Xavier's.
"""

import itertools

import pandas as pd
import torch

from osa.init import init_orthogonal_attention_, init_softmax_attention_
from osa.modules import OrthogonalSelfAttention, SoftmaxSelfAttention
from pipeline.config.params import Section, Seeds
from pipeline.results.measures import condition, query_key_product, rounding
from pipeline.studies import Study, Tables
from pipeline.studies._summaries import worst_case
from pipeline.studies.lab import Lab, default_dtype

SIZES = ((12, 3), (32, 2), (64, 4), (96, 12))  # d, h
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SECTION_4, XAVIER = "Section 4", "Xavier"


class Settings(Section):
    seeds: Seeds


@torch.no_grad()
def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures the singular values of each head's W̃, for Section 4's weights (both dtypes) and Xavier weights (float64)."""
    rows = []
    for (d, heads), seed in itertools.product(SIZES, settings.seeds):
        for name, dtype in DTYPES.items():
            generator = lab.generator(seed, f"theory/weights/{d}x{heads}")
            with default_dtype(torch.float64):
                ours, xavier = OrthogonalSelfAttention(d, heads), SoftmaxSelfAttention(d, heads)
                init_orthogonal_attention_(ours, generator=generator)
                init_softmax_attention_(xavier, generator=generator)
            rows += weight_rows({"source": SECTION_4, "seed": seed, "dtype": name}, ours.to(dtype))
        rows += weight_rows({"source": XAVIER, "seed": seed, "dtype": "float64"}, xavier)
    return {"weights": pd.DataFrame(rows)}


def weight_rows(identity: dict, attention: OrthogonalSelfAttention | SoftmaxSelfAttention) -> list[dict]:
    """Returns a row for each head, with κ(W̃) and the 2d_v nonzero singular values of W̃."""
    d, heads = attention.embed_dim, attention.num_heads
    query, key = (linear.weight.unflatten(0, (heads, -1)).mT for linear in (attention.query, attention.key))
    rows = []
    for head, product in enumerate(query_key_product(query, key), 1):
        values = torch.linalg.svdvals(product)[: 2 * d // heads]
        rows.append(
            identity
            | {"embed_dim": d, "num_heads": heads, "head": head}
            | {"sigma_max": values[0].item(), "sigma_min": values[-1].item()}
            | {"deviation": (values - 1).abs().max().item(), "kappa": condition(values, rank=len(values))}
            | {"singular_values": " ".join(f"{value:.6g}" for value in values)}
        )
    return rows


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Checks for each dtype that the nonzero singular values of W̃ are initially 1 (Section 4), up to rounding."""
    weights = tables["weights"]
    checks = {}
    for dtype, own in weights[weights["source"] == SECTION_4].groupby("dtype"):
        tolerances = [rounding(d, DTYPES[dtype]) for d in own["embed_dim"]]
        checks[dtype] = worst_case(own["deviation"], tolerances)
    return checks


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
