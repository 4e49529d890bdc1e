"""What the numbers of a run, in their last digits, and its times depend on besides the code."""

import platform
from pathlib import Path

import torch


def describe(device: torch.device) -> dict:
    """Device, threads, platform and versions, as records keep them."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "num_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def cpu_name() -> str:
    """The processor's name: Linux tells it in /proc/cpuinfo, elsewhere Python knows as much as there is to know."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
