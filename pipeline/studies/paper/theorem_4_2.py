"""Theorem 4.2: with the initialisation of Section 4 the query–key product W̃ has condition number 1.

The singular values of W̃ are set beside those of Xavier's initialisation, and beside what training makes of κ(W̃).
"""

import itertools

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from osa.init import init_orthogonal_attention_, init_softmax_attention_
from osa.modules import OrthogonalSelfAttention, SoftmaxSelfAttention
from pipeline.core.params import Section, Seeds
from pipeline.lab import Lab, float64
from pipeline.measures import PRODUCTS, condition, query_key_product, rounding
from pipeline.report import charts
from pipeline.report.looks import PALETTE, STYLE
from pipeline.report.numbers import number
from pipeline.studies import CHECK, OBSERVATION, Finding, Table, Tables
from pipeline.studies._findings import condition_numbers, largest, trained_layers

place = 42
SIZES = ((12, 3), (32, 2), (64, 4), (96, 12))  # d, h
DTYPES = {"float32": torch.float32, "float64": torch.float64}
OURS, XAVIER = "Section 4", "Xavier"


class Settings(Section):
    seeds: Seeds


@torch.no_grad()
def measure(settings: Settings, lab: Lab) -> Tables:
    """The singular values of W̃ of each head as Section 4 initialises it, in both precisions, and as Xavier does."""
    rows = []
    for (d, heads), seed in itertools.product(SIZES, settings.seeds):
        for name, dtype in DTYPES.items():
            generator = lab.generator(seed, f"theory/weights/{d}x{heads}")
            with float64():
                ours, xavier = OrthogonalSelfAttention(d, heads), SoftmaxSelfAttention(d, heads)
                init_orthogonal_attention_(ours, generator=generator)
                init_softmax_attention_(xavier, generator=generator)
            rows += weight_rows({"source": OURS, "seed": seed, "dtype": name}, ours.to(dtype))
        rows += weight_rows({"source": XAVIER, "seed": seed, "dtype": "float64"}, xavier)
    return {"weights": pd.DataFrame(rows)}


def weight_rows(identity: dict, attention: OrthogonalSelfAttention | SoftmaxSelfAttention) -> list[dict]:
    """For each head the 2d_v singular values of W̃ that are not zero, their extremes, how far they are from 1, and κ."""
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


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    return [initialised(tables["weights"]), other_weights(tables["weights"], lab)]


def initialised(table: pd.DataFrame) -> Finding:
    """The theorem itself."""
    measures, rows = [], []
    for (source, dtype), own in table.groupby(["source", "dtype"], sort=False):
        if source == OURS:
            tolerance = own["embed_dim"].map(lambda d, dtype=DTYPES[dtype]: rounding(d, dtype))
            measures.append(largest(f"{dtype}: |σ − 1| over what rounding allows", own["deviation"] / tolerance))
        rows.append([f"{source}, {dtype}", str(len(own)), *map(number, own[["deviation", "kappa"]].max())])
    return Finding(
        id="theorem_4_2",
        title="The query–key product starts with condition 1",
        place="Theorem 4.2",
        kind=CHECK,
        statement="If [W^Q, W^K] is orthonormal, all 2d_v non-zero singular values of W̃ = W^Q(W^K)ᵀ − W^K(W^Q)ᵀ are 1: "
        "κ(W̃) = 1. It tests that the code draws these weights.",
        measures=measures,
        rule="For every head initialised by Section 4, each of the 2d_v singular values of W̃ is within "
        f"{PRODUCTS} · d · eps of 1, in float64 and in float32.",
        allowance="what rounding allows",
        table=Table(["Weights", "Heads", "Largest |σ − 1|", "Largest κ"], rows),
        figure=draw(table),
        caption="The singular values of W̃ for each head, over their rank in per cent of 2d_v.",
    )


def other_weights(table: pd.DataFrame, lab: Lab) -> Finding:
    """κ(W̃) where the theorem does not hold: Xavier's initialisation, and the layers that training leaves."""
    xavier = {"Xavier, as initialised": table.loc[table["source"] == XAVIER, "kappa"]}
    return Finding(
        id="query_key_conditions",
        title="κ(W̃) of other weights",
        place="Section 4.2",
        kind=OBSERVATION,
        statement="Section 4's initialisation is chosen for κ(W̃) = 1. Xavier's is not, and nothing holds κ(W̃) in training.",
        **condition_numbers(lab, "κ(W̃)", xavier, trained_layers(lab, "weight_kappa"), "weight_kappa"),
    )


@matplotlib.rc_context(STYLE)
def draw(table: pd.DataFrame) -> Figure:
    """The singular values of W̃ of each head against their rank."""
    figure, (axes,) = charts.panels(1)
    colours = {XAVIER: PALETTE[3], OURS: PALETTE[6]}
    for source, colour in colours.items():
        for text in table.loc[(table["source"] == source) & (table["dtype"] == "float64"), "singular_values"]:
            values = np.array([float(value) for value in text.split()])
            axes.plot(np.linspace(0, 100, len(values)), values.clip(1e-4), color=colour, alpha=0.35, linewidth=0.8)
    axes.plot([0, 100], [1, 1], **charts.EXPECTED)
    axes.set(ylabel="Singular values of W̃", xlabel="Rank, % of 2d_v", title="As initialised")
    charts.logarithmic(axes, "y")
    axes.yaxis.set_major_formatter("{x:g}")
    handles = [Line2D([], [], color=colour, label=source) for source, colour in colours.items()]
    charts.legend(figure, [*handles, charts.expected_line("Theorem 4.2")])
    return figure
