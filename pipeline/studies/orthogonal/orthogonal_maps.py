"""Four charts of one group: how the maps of `osa.orthogonal` from X to rotations Q(X) ∈ SO(n) part from one another.

All have Q(0) = I and the same derivative there. In the plane each is an angle; beyond it they differ from exp(A) by a power
of the distance from 0.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field

from osa.constrained.orthogonal import MAPS
from pipeline.core.params import Section, Seeds
from pipeline.lab import Lab
from pipeline.measures import norm
from pipeline.report import charts
from pipeline.report.looks import PALETTE, STYLE
from pipeline.report.numbers import number
from pipeline.studies import CHECK, Finding, Measure, Tables
from pipeline.studies._findings import largest, log_log_slope

place = 63.5
POST = "“Orthogonal Linear Layers in PyTorch”"
EXACT = "exponential"  # what the others are compared with
ANGLES = {  # of Q(X) for n = 2, by x = X₂₁
    "givens": lambda x: x,
    "exponential": lambda x: x,
    "cayley": lambda x: 2 * np.arctan(x / 2),
    "householder": lambda x: 2 * np.arctan(x / 2),
}
ORDERS = {"givens": 2, "cayley": 3, "householder": 2}  # Q(tX) − exp(tA) = O(tᵏ)
SECOND = 2  # the least power of any map whose derivative at 0 is A
NEAR = 1e-2  # ‖tA‖₂ up to which the power is read off
SLOPE_TOLERANCE = 0.05
TOLERANCE = 1e-12  # of an angle in float64
COLOURS = dict(zip(MAPS, itertools.cycle((*(PALETTE[i] for i in (3, 0, 2, 5)), *PALETTE[6:])), strict=False))
DASHED = ("exponential", "householder")  # where they lie on another's line


class Settings(Section):
    seeds: Seeds
    sizes: Annotated[list[Annotated[int, Field(ge=3)]], Field(min_length=1)] = Field([4, 16, 64], min_length=1)  # n
    largest: Annotated[float, Field(gt=NEAR)] = 8.0  # of |x| and of ‖tA‖₂


def measure(settings: Settings, lab: Lab) -> Tables:
    """Angles in the plane, and how far each map is from the exponential along random directions."""
    return {"plane": pd.DataFrame(plane(settings)), "apart": pd.DataFrame(apart(settings, lab))}


def plane(settings: Settings) -> Iterator[dict]:
    """The angle of Q(X) by x, counted on through half turns from that of x = 0, and how far it is from what it should be, if
    that is known."""
    x = torch.linspace(-settings.largest, settings.largest, 201, dtype=torch.float64)
    stacked = torch.zeros(len(x), 2, 2, dtype=torch.float64)
    stacked[:, 1, 0] = x
    for name, of in MAPS.items():
        q = of(stacked)  # (x, 2, 2)
        angles = np.unwrap(torch.atan2(q[:, 1, 0], q[:, 0, 0]).numpy())
        angles -= angles[len(x) // 2]
        errors = np.abs(angles - ANGLES[name](x.numpy())) if name in ANGLES else np.full(len(x), math.nan)
        rows = zip(x.tolist(), angles, errors, strict=True)
        yield from ({"map": name, "x": at, "angle": angle, "error": error} for at, angle, error in rows)


def apart(settings: Settings, lab: Lab) -> Iterator[dict]:
    """‖Q(tX) − exp(tA)‖₂ along a random X with ‖A‖₂ = 1."""
    steps = torch.logspace(-3, math.log10(settings.largest), 25, dtype=torch.float64)
    for n, seed in itertools.product(settings.sizes, settings.seeds):
        x = lab.normal(seed, f"orthogonal_maps/{n}", n, n).tril(-1)
        along = steps[:, None, None] * x / norm(x - x.mT)  # (t, n, n)
        exact = MAPS[EXACT](along)
        for name in (name for name in MAPS if name != EXACT):
            distances = norm(MAPS[name](along) - exact)
            rows = zip(steps.tolist(), distances.tolist(), strict=True)
            yield from ({"map": name, "n": n, "seed": seed, "t": t, "distance": distance} for t, distance in rows)


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    plane, apart = tables["plane"], tables["apart"]
    angles = [
        largest(f"{name.capitalize()}: error of the angle", own["error"], TOLERANCE)
        for name, own in plane[plane["map"].isin(ANGLES)].groupby("map", sort=False)
    ]
    return [
        Finding(
            id="orthogonal_maps",
            title="Four charts of one group",
            place=POST,
            kind=CHECK,
            statement="In the plane, X₂₁ = x is a rotation by x for Givens and for the exponential, and by 2 arctan(x/2), "
            "which never comes to a half turn, for Cayley and for Householder. In more dimensions the exponential is left "
            "by the third power of the distance from I by Cayley, whose series agrees one term further, and by the second "
            "by Givens and Householder, which take planes or vectors one after another.",
            rule=f"In float64: every angle is right to {number(TOLERANCE)}, and along every random direction the slope of "
            f"log ‖Q(tX) − exp(tA)‖₂ over log t, up to ‖tA‖₂ = {NEAR:g}, is that power to {SLOPE_TOLERANCE:g}.",
            measures=[*angles, *(of_order(name, own) for name, own in apart.groupby("map", sort=False))],
            figure=draw(plane, apart),
            caption="Left, the angle of rotation by x for n = 2; dashed, a half turn. Right, the distance from the "
            f"exponential along a random direction in n = {apart['n'].max()} dimensions.",
            remark="So one learning rate means one step in all of them near the base, and no longer far from it.",
        )
    ]


def of_order(name: str, own: pd.DataFrame) -> Measure:
    """The power of t with which a map leaves the exponential, where it is farthest from what it should be."""
    near = own[own["t"] <= NEAR].groupby(["n", "seed"])[["t", "distance"]]
    slopes = near.apply(lambda rows: log_log_slope(rows["t"], rows["distance"]))
    if name not in ORDERS:  # one that is new: what all have in common, an equal derivative at 0
        least = SECOND - SLOPE_TOLERANCE
        return Measure(f"{name.capitalize()}: slope of log ‖Q − exp(A)‖₂", slopes.min(), side="above", limit=least)
    what = f"{name.capitalize()}: slope of log ‖Q − exp(A)‖₂ less {ORDERS[name]}"
    return largest(what, (slopes - ORDERS[name]).abs(), SLOPE_TOLERANCE)


@matplotlib.rc_context(STYLE)
def draw(plane: pd.DataFrame, apart: pd.DataFrame) -> Figure:
    figure, (left, right) = charts.panels(2, 3.6)
    style = {name: {"color": COLOURS[name], "linestyle": (0, (5, 5)) if name in DASHED else "-"} for name in MAPS}
    for name, own in plane.groupby("map", sort=False):
        left.plot(own["x"], own["angle"], linewidth=1.8, **style[name])
    for half_turn in (-math.pi, math.pi):
        left.axhline(half_turn, **charts.EXPECTED)
    left.set(title="Angle in the plane", xlabel="x")
    shown = apart[(apart["n"] == apart["n"].max()) & (apart["seed"] == apart["seed"].min())]
    for name, own in shown.groupby("map", sort=False):
        right.plot(own["t"], own["distance"], linewidth=1.8, **style[name])
    charts.logarithmic(right, "x", "y")
    right.set(title="‖Q(tX) − exp(tA)‖₂", xlabel="‖tA‖₂")
    charts.legend(figure, [Line2D([], [], color=COLOURS[name], label=name.capitalize()) for name in MAPS], 4)
    return figure
