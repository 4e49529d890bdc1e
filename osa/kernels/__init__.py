"""Triton kernels of CUDA. The import registers them with `osa.linalg`, which knows of none otherwise."""

from osa import linalg
from osa.kernels import launch


def _on_cuda(fits):
    return lambda x, *others: x.device.type == "cuda" and fits(x, *others)


for name, fits, function in (
    ("attend", launch.fits, launch.attend),
    ("phi1_times", launch.fits_phi1, launch.phi1_times),
):
    linalg.KERNELS.setdefault(name, []).append((_on_cuda(fits), function))
