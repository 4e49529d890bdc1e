"""Do isometric MLPs of finite width keep the norm |x| of a token? MLPs with independent layers change |x| at random.

We stack shaped MLPs of width d and hidden width H, without attention. The two layers of an MLP are drawn independently
(`osa.init.init_suo_mlp_`) or together (`osa.init.init_isometric_mlp_`). If they are independent and the activation is nearly
linear, an MLP multiplies |x|² by (H/d) b, where b ~ Beta(d/2, (H − d)/2) is random. After L such MLPs

    Var log |x|² ≈ 2 (1 − d/H) L/d.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from osa.init import init_isometric_mlp_, init_suo_mlp_
from osa.modules import MLP
from osa.shaped.activations import dks_gelu, linear_share
from pipeline.config.params import Name, PositiveInt, Section, Seeds
from pipeline.results.measures import gradient_norm
from pipeline.statistics.intervals import summary_of
from pipeline.studies import Study, Tables, charts
from pipeline.studies._summaries import log_log_slope
from pipeline.studies.lab import Lab, default_dtype

DRAWS = ("suo", "isometric")
HIDDEN_RATIO = 4  # H/d
TAILS = (0.05, 0.95)  # quantiles of |x|²/d over tokens


class Settings(Section):
    seeds: Seeds
    widths: Annotated[list[PositiveInt], Field(min_length=2)]
    depths: Annotated[list[PositiveInt], Field(min_length=2)]
    tokens: PositiveInt = 40
    models: list[Name] = Field(["osa_shaped", "osa_iso"])
    gradient_depths: list[PositiveInt] = Field([36, 72, 144])
    gradient_seeds: Seeds = Field([0, 1, 2, 3, 4], min_length=1)
    images: PositiveInt = 8


def measure(settings: Settings, lab: Lab) -> Tables:
    return {"mlps": pd.DataFrame(mlps(settings, lab)), "gradients": pd.DataFrame(gradients(settings, lab))}


@torch.no_grad()
def mlps(settings: Settings, lab: Lab) -> Iterator[dict]:
    """Yields a row for each network. Every input token has squared norm d. Below, x is an output token.

    log_mean, log_std   mean and standard deviation of log |x|²/d over tokens
    q_low, q_high       the quantiles `TAILS` of |x|²/d over tokens
    jacobian            ‖J‖_F²/d at one token, for the Jacobian J of the network
    """
    for draw, width, depth, seed in itertools.product(DRAWS, settings.widths, settings.depths, settings.seeds):
        network = stack(draw, width, depth, lab.generator(seed, f"isometry/{draw}/{width}/{depth}"))
        x = lab.normal(seed, "isometry/tokens", settings.tokens, width)
        x = x / x.square().mean(-1, keepdim=True).sqrt()
        q = network(x).square().mean(-1)
        low, high = q.quantile(q.new_tensor(TAILS)).tolist()
        jacobian = jacobian_of(network, x[0]).square().sum().item() / width
        logs = {"log_mean": q.log().mean().item(), "log_std": q.log().std().item()}
        identity = {"draw": draw, "width": width, "depth": depth, "seed": seed}
        yield identity | logs | {"q_low": low, "q_high": high, "jacobian": jacobian}


def stack(draw: str, width: int, depth: int, generator: Generator) -> nn.Sequential:
    """Returns `depth` MLPs with d = `width` and the GELU that `dks_gelu` shapes for this depth."""
    activation = dks_gelu(depth)
    with default_dtype(torch.float64):
        blocks = [MLP(width, HIDDEN_RATIO * width, activation) for _ in range(depth)]
    for mlp in blocks:
        if draw == "suo":
            init_suo_mlp_(mlp, generator=generator)
        else:
            init_isometric_mlp_(mlp, gain=1.0, kappa=linear_share(activation.of_number), generator=generator)
    return nn.Sequential(*blocks)


def jacobian_of(network: nn.Sequential, x: Tensor) -> Tensor:
    """Returns the Jacobian ∂network/∂x at one token. x is (d,), and the Jacobian is (d, d)."""
    jacobian = torch.eye(len(x), dtype=x.dtype)
    for mlp in network:
        assert isinstance(mlp, MLP)
        hidden = mlp.fc1(x).requires_grad_()  # (H,)
        with torch.enable_grad():
            activated = mlp.activation(hidden)
            (slopes,) = torch.autograd.grad(activated.sum(), hidden)
        jacobian = mlp.fc2.weight @ (slopes[:, None] * (mlp.fc1.weight @ jacobian))
        x = mlp.fc2(activated)
    return jacobian


def gradients(settings: Settings, lab: Lab) -> Iterator[dict]:
    """Yields a row for each initialised model.

    gradient   ‖∂loss/∂θ‖₂
    cls        mean over images of |x|²/d, where x is [cls] after the last block
    largest    maximum over images and tokens of |x|²/d after the last block
    """
    for model, depth, seed in itertools.product(settings.models, settings.gradient_depths, settings.gradient_seeds):
        config = lab.config(model, {"model": {"depth": depth}})
        images, labels = (part[: settings.images] for part in lab.images(config.data.pixel_scaling))
        network = lab.model(config, seed).double()
        x = nn.Sequential(*network.blocks)(network.tokens(images))  # (images, N, d)
        cross_entropy(network.head(network.norm(x[:, 0])), labels).backward()
        q = x.detach().square().mean(-1)  # (images, N)
        sizes = {"cls": q[:, 0].mean().item(), "largest": q.max().item()}
        yield {"model": model, "depth": depth, "seed": seed, "gradient": gradient_norm(network)} | sizes


def spreads(table: pd.DataFrame) -> pd.Series:
    """Returns the standard deviation of log |x|² over tokens and networks, for each combination of draw, width and depth."""
    nets = table.groupby(["draw", "width", "depth"])
    return (nets["log_std"].apply(lambda each: each.pow(2).mean()) + nets["log_mean"].var(ddof=0)).pow(0.5)


def predicted(width: int, depth: int) -> float:
    """Returns the standard deviation of log |x|² that we predict for linear MLPs with independent layers."""
    return math.sqrt(2 * (1 - 1 / HIDDEN_RATIO) * depth / width)


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    sd, width = spreads(tables["mlps"]), lab.paper.readings[lab.reading].model.embed_dim
    own = tables["mlps"][tables["mlps"]["width"] == width].set_index(["draw", "depth"]).sort_index()
    rows = [
        {
            "draw": draw,
            "depth": depth,
            "sd": sd[draw, width, depth],
            "predicted": predicted(width, depth) if draw == "suo" else None,
            "q_low": own.loc[(draw, depth), "q_low"].median(),
            "q_high": own.loc[(draw, depth), "q_high"].median(),
            "jacobian_low": own.loc[(draw, depth), "jacobian"].min(),
            "jacobian_high": own.loc[(draw, depth), "jacobian"].max(),
        }
        for draw, depth in itertools.product(DRAWS, settings.gradient_depths)
    ]
    slopes = {}
    for draw in DRAWS:
        by_width = sd[draw].groupby(level="width")
        exponents = by_width.apply(lambda each: log_log_slope(each.index.get_level_values("depth"), each))
        slopes[draw] = {"depth": summary_of(exponents)}
    gradients = [
        {"model": model, "depth": depth, "gradient": own["gradient"].tolist()}
        | {"cls": own["cls"].tolist(), "largest": own["largest"].max()}
        for (model, depth), own in tables["gradients"].groupby(["model", "depth"], sort=False)
    ]
    return {"width": width, "tails": TAILS, "rows": rows, "slopes": slopes, "gradients": gradients}


def draw_spreads(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    """Draws the standard deviation of log |x|² against depth for the three largest widths. Dashed lines show `predicted`."""
    figure, (axes,) = charts.panels(1, 3.4)
    sd, depths = spreads(tables["mlps"]), np.array(settings.depths)
    for width, colour in zip(settings.widths[-3:], charts.ramp(3), strict=False):
        axes.plot(depths, [predicted(width, depth) for depth in depths], **charts.EXPECTED | {"color": colour})
        for draw, marker in zip(DRAWS, "os", strict=True):
            label = f"{'independent' if draw == 'suo' else 'isometric'}, d = {width}"
            axes.plot(sd[draw, width].loc[depths], color=colour, marker=marker, markersize=4, label=label)
    axes.set(xscale="log", yscale="log", xlabel="Blocks", ylabel="Standard deviation of log |x|²")
    axes.set_xticks(depths, map(str, settings.depths))
    axes.set_xticks([], minor=True)
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    axes.set_yticks([], minor=True)
    charts.label_ends(axes)
    return figure


STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"isometry": draw_spreads})
