"""Tells how many trainings share a GPU: where NVIDIA's MPS lets their kernels run side by side, as many as memory takes."""

import os
import shutil
import subprocess
from collections.abc import Iterable

from pipeline.config.params import RunConfig
from pipeline.data import idx

CONTROL = "nvidia-cuda-mps-control"
MOST = 48  # clients of MPS on one GPU
# Upper bounds of a training's memory, in round numbers. A process: CUDA's context, cuBLAS's workspace, what allocators keep.
PROCESS_BYTES = 2**30
IMAGES = 70_000  # size of the largest published data set
TENSORS_A_BLOCK = 64  # tensors as large as a batch's tokens, kept for the backward pass and by a graph
EVALUATED, TENSORS_EVALUATED = 2000, 16  # images at a time, and tensors of their tokens


def has_mps() -> bool:
    """Tells whether the control daemon of MPS runs on this machine."""
    try:
        asked = subprocess.run([CONTROL], input="get_server_list\n", capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return not asked.returncode


def can_start_mps() -> bool:
    return shutil.which(CONTROL) is not None


def free_bytes() -> int:
    """The least free memory of the GPUs that CUDA_VISIBLE_DEVICES names, or of all; 0 where nvidia-smi does not say."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = [
        "nvidia-smi",
        "--query-gpu=memory.free",
        "--format=csv,noheader,nounits",
        *([f"--id={chosen}"] if chosen else []),
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
        return min(int(line) for line in done.stdout.splitlines()) * 2**20
    except (OSError, subprocess.CalledProcessError, ValueError):
        return 0


def need(config: RunConfig) -> int:
    """Bytes of a GPU's memory that a training takes at most: the process, the images, the float32 tokens of a batch."""
    options, folder = config.options, idx.folder(config.data.source)
    own = sum(path.stat().st_size for path in folder.glob("*.npy"))
    pixels = own or IMAGES * options.in_channels * options.image_size**2
    tensors = max(config.train.batch_size * options.depth * TENSORS_A_BLOCK, EVALUATED * TENSORS_EVALUATED)
    return PROCESS_BYTES + pixels + 4 * tensors * options.num_tokens * options.embed_dim


def that_fit(configs: Iterable[RunConfig]) -> int:
    """Returns the number of such trainings that share one GPU: by its memory, by MPS, and one a core."""
    largest = max(map(need, configs), default=PROCESS_BYTES)
    return max(1, min(free_bytes() // largest, MOST, len(os.sched_getaffinity(0))))
