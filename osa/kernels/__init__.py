"""Triton kernels for CUDA. Importing this package registers them with `osa.runtime`."""

from osa import runtime
from osa.kernels import operators


def _on_cuda(fits):
    return lambda x, *others: x.device.type == "cuda" and fits(x, *others)


for name, fits, function in (
    ("attend", operators.fits, operators.attend),
    ("phi1_times", operators.fits_phi1, operators.phi1_times),
):
    runtime.KERNELS.setdefault(name, []).append((_on_cuda(fits), function))
