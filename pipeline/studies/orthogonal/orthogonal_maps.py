"""How do the maps X → Q(X) ∈ SO(n) of osa/constrained/orthogonal.py differ?

All maps have Q(0) = I and the same derivative at 0. For n = 2 we compare the angles of Q(X). For n > 2 we compare the
exponents k in ‖Q(X) − exp(A)‖₂ = O(‖A‖₂ᵏ), where A = X − Xᵀ.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field

from osa.constrained.names import Map
from osa.constrained.orthogonal import MAPS
from pipeline.config.looks import PALETTE
from pipeline.config.params import Section, Seeds
from pipeline.results.measures import norm
from pipeline.studies import Study, Tables, charts, check
from pipeline.studies._summaries import log_log_slope
from pipeline.studies.lab import Lab

EXPONENTIAL: Map = "exponential"
ANGLES = {  # the angle of Q(X) for n = 2 as a function of x = X₂₁
    "givens": lambda x: x,
    "exponential": lambda x: x,
    "cayley": lambda x: 2 * np.arctan(x / 2),
    "householder": lambda x: 2 * np.arctan(x / 2),
}
ERROR_ORDERS = {"givens": 2, "cayley": 3, "householder": 2}  # k in Q(tX) − exp(tA) = O(tᵏ)
NEAR = 1e-2  # we fit the order k in O(tᵏ) to the points with ‖tA‖₂ up to this value
SLOPE_TOLERANCE = 0.05
TOLERANCE = 1e-12  # maximum error of an angle in float64
COLOURS = dict(zip(MAPS, itertools.cycle((*(PALETTE[i] for i in (3, 0, 2, 5)), *PALETTE[6:])), strict=False))
DASHED = ("exponential", "householder")  # maps whose curve coincides with another map's curve


class Settings(Section):
    seeds: Seeds
    sizes: Annotated[list[Annotated[int, Field(ge=3)]], Field(min_length=1)] = Field([4, 16, 64], min_length=1)  # n
    largest: Annotated[float, Field(gt=NEAR)] = 8.0  # maximum of |x| and of ‖tA‖₂


def measure(settings: Settings, lab: Lab) -> Tables:
    return {"plane": pd.DataFrame(plane(settings)), "apart": pd.DataFrame(apart(settings, lab))}


def plane(settings: Settings) -> Iterator[dict]:
    """Yields the angle of Q(X) for n = 2, for each map and each x. The angle is continuous in x, and 0 at x = 0.

    `error` is the absolute difference from the angle that `ANGLES` gives. It is NaN if `ANGLES` lacks the map.
    """
    x = torch.linspace(-settings.largest, settings.largest, 201, dtype=torch.float64)
    stacked = torch.zeros(len(x), 2, 2, dtype=torch.float64)
    stacked[:, 1, 0] = x
    for name, function in MAPS.items():
        q = function(stacked)  # (x, 2, 2)
        angles = np.unwrap(torch.atan2(q[:, 1, 0], q[:, 0, 0]).numpy())
        angles -= angles[len(x) // 2]
        errors = np.abs(angles - ANGLES[name](x.numpy())) if name in ANGLES else np.full(len(x), math.nan)
        for at, angle, error in zip(x.tolist(), angles, errors, strict=True):
            yield {"map": name, "x": at, "angle": angle, "error": error}


def apart(settings: Settings, lab: Lab) -> Iterator[dict]:
    """Yields ‖Q(tX) − exp(tA)‖₂ for each t, map, size and seed. X is random, scaled so that A = X − Xᵀ has ‖A‖₂ = 1."""
    steps = torch.logspace(-3, math.log10(settings.largest), 25, dtype=torch.float64)
    for n, seed in itertools.product(settings.sizes, settings.seeds):
        x = lab.normal(seed, f"orthogonal_maps/{n}", n, n).tril(-1)
        along = steps[:, None, None] * x / norm(x - x.mT)  # (t, n, n)
        exact = MAPS[EXPONENTIAL](along)
        for name in (name for name in MAPS if name != EXPONENTIAL):
            distances = norm(MAPS[name](along) - exact)
            for t, distance in zip(steps.tolist(), distances.tolist(), strict=True):
                yield {"map": name, "n": n, "seed": seed, "t": t, "distance": distance}


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Checks the angles against `ANGLES`, and the growth of each map's distance from exp against `ERROR_ORDERS`."""
    plane, apart = tables["plane"], tables["apart"]
    near = apart[apart["t"] <= NEAR].groupby(["map", "n", "seed"])[["t", "distance"]]
    slopes = near.apply(lambda rows: log_log_slope(rows["t"], rows["distance"]))
    rows = {}
    for name in MAPS:
        own: dict[str, Any] = {}
        if name in ANGLES:
            own["angle"] = check(float(plane.loc[plane["map"] == name, "error"].max()), TOLERANCE)
        if name in ERROR_ORDERS:
            error = float((slopes[name] - ERROR_ORDERS[name]).abs().max())
            own |= {"order": ERROR_ORDERS[name], "slope": check(error, SLOPE_TOLERANCE)}
        rows[name] = own
    return {"maps": rows}


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    plane, apart = tables["plane"], tables["apart"]
    figure, (left, right) = charts.panels(2, 3.6)
    style: dict[str, dict[str, Any]] = {
        name: {"color": COLOURS[name], "linestyle": (0, (5, 5)) if name in DASHED else "-"} for name in MAPS
    }
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


STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"orthogonal_maps": draw})
