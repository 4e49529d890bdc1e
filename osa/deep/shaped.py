"""Deprecated: exports the names of `osa.shaped` under their old path, for one more release."""

import warnings

from osa.shaped.activations import *  # noqa: F403
from osa.shaped.layers import *  # noqa: F403
from osa.shaped.matrices import *  # noqa: F403
from osa.shaped.schedules import *  # noqa: F403
from osa.shaped.schedules import KERNEL_KINDS as KERNELS  # noqa: F401

warnings.warn("osa.deep.shaped has moved: import from osa.shaped", DeprecationWarning, stacklevel=2)


def alpha_of_depth(total: float, depth: int) -> float:
    """α = total/L: see `alpha_times_depth` of `osa.ModelConfig`."""
    return total / depth
