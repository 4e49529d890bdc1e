"""What the kernels of osa/kernels.py take of a GPU: `python -m pipeline.benchmarks.kernels`. It needs Triton, and no GPU.

Each kernel is compiled for each architecture by the compilers that come with Triton. Writes kernels.csv to
paper_outputs/benchmarks/: registers of a thread, bytes that a thread stores and loads because registers ran out, bytes of
shared memory, and how many programs a multiprocessor holds at once, by that memory alone and altogether.
"""

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch
import triton
import triton.language as tl
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from osa import kernels
from osa.functional import ITERATIONS
from pipeline.core import files
from pipeline.core.errors import entry_point
from pipeline.core.files import ROOT
from pipeline.studies.paper.benchmarks import CODE, KERNELS

ARCHITECTURES = {80: 164 * 1024, 90: 228 * 1024}  # compute capability: bytes of shared memory of a multiprocessor
REGISTERS, WARPS = 65536, 64  # of a multiprocessor of either
RESERVED = 1024  # bytes of shared memory that each program takes besides its own
WIDTHS = (8, 16, 32, 64)
POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16"}
DTYPES = dict.fromkeys(kernels.METHODS, (torch.float32, torch.bfloat16))  # that reach a kernel: `attend` makes others so
DTYPES |= {"polar_express": (torch.float32,), "phi1": (torch.float32, torch.float64)}
NAMES = ("forward", "backward")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
REPORTED = {
    "registers": r"Used (\d+) registers",
    "stored": r"(\d+) bytes spill stores",
    "loaded": r"(\d+) bytes spill loads",
}


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=DTYPES, default=tuple(DTYPES))
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--architectures", nargs="+", type=int, choices=ARCHITECTURES, default=tuple(ARCHITECTURES))
    parser.add_argument("--output", type=Path, default=ROOT / KERNELS)
    chosen = parser.parse_args(arguments)
    cases = grid(chosen.methods, chosen.widths, chosen.architectures)
    rows = [resources(*case) for case in tqdm(cases, desc="kernels", unit="kernel", disable=None)]
    made_by = {"triton": triton.__version__, "code_sha256": files.sha256(ROOT / CODE)}
    files.write_csv(chosen.output, pd.DataFrame(rows).assign(**made_by))


def grid(methods=tuple(DTYPES), widths=WIDTHS, architectures=tuple(ARCHITECTURES)) -> list[tuple]:
    """Method, kernel, width, type and architecture of each kernel that there is for these."""
    cases = itertools.product(methods, NAMES, widths, POINTERS, architectures)
    return [(method, *case) for method, *case in cases if case[2] in DTYPES[method]]


def resources(method: str, name: str, width: int, dtype: torch.dtype, architecture: int) -> dict:
    """A row of the table: a kernel compiled for query, key and value of one width and type, at the most tokens it takes."""
    compiled = compile_kernel(method, name, width, dtype, architecture)
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(compiled.asm["ptx"].encode())
        file.flush()
        target = re.search(r"\.target (\w+)", compiled.asm["ptx"])[1]
        command = [TOOLS / "ptxas", "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = {key: sum(map(int, re.findall(pattern, report))) for key, pattern in REPORTED.items()}  # of all its functions
    registers, warps, shared = used["registers"], compiled.metadata.num_warps, compiled.metadata.shared
    by_registers = REGISTERS // (32 * warps * 8 * -(-registers // 8))
    by_memory = ARCHITECTURES[architecture] // (shared + RESERVED)
    return {
        "method": method,
        "kernel": name,
        "width": width,
        "dtype": str(dtype).removeprefix("torch."),
        "architecture": f"sm_{architecture}",
        "warps": warps,
        "registers": registers,
        "spilled_bytes": used["stored"] + used["loaded"],
        "shared_bytes": shared,
        "programs_by_memory": by_memory,
        "programs": min(by_registers, WARPS // warps, by_memory),
    }


def compile_kernel(method: str, name: str, width: int, dtype: torch.dtype, architecture: int):
    """Compiled as a launch would for contiguous tensors (1, 1, N, width) of aligned addresses."""
    if method == "phi1":
        kernel = {"forward": kernels._phi1_forward, "backward": kernels._phi1_gradients}[name]
        like = torch.empty(1, 2 * width, 2 * width, dtype=dtype, device="meta")
        constants = kernels._phi1_constants(like, like[..., :width])
    else:
        kernel = {"forward": kernels._forward, "backward": kernels._backward}[name]
        of = {"forward": kernels._forward_constants, "backward": kernels._constants}[name]
        rows = min(kernels.MAX_TOKENS, kernels.MAX_BASIS // (2 * width))  # as many as a program takes
        like = torch.empty(1, 1, rows, width, dtype=dtype, device="meta")
        constants = of(method, like, like, ITERATIONS.get(method, 0))
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "maxnreg")}
    space = {tl.float32: "*fp32", tl.float64: "*fp64"}[constants["TILES"][3]]
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature, values, attributes, aligned = {}, {}, {}, [["tt.divisibility", 16]]
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[argument] = "constexpr", constants[argument]
        elif argument.endswith("strides"):
            signature[argument], values[i, 3] = ("i32", "i32", "i32", "constexpr"), 1
            attributes |= {(i, j): aligned for j in range(3)}
        elif argument in ("heads", "tokens", "space_size"):
            signature[argument] = "i32"
        elif argument == "epsilon":
            signature[argument] = "fp32"
        else:
            kept = argument in ("scale", "grad_scale", "basis")
            signature[argument] = space if argument == "space" else "*fp32" if kept else POINTERS[dtype]
            attributes[i,] = aligned
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


if __name__ == "__main__":
    main(sys.argv[1:])
