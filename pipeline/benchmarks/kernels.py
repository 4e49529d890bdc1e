"""What the kernels of osa/kernels take of a GPU: `python -m pipeline.benchmarks.kernels`. It needs Triton, and no GPU.

Each kernel is compiled for each architecture by the compilers that come with Triton. Writes kernels.csv to
paper_outputs/benchmarks/: registers of a thread, bytes that a thread stores and loads because registers ran out, bytes of
shared memory, and how many programs a multiprocessor holds at once, by that memory alone and altogether.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from osa.functional import ITERATIONS
from osa.kernels import attention, launch, phi1
from pipeline.core import files
from pipeline.core.errors import command_parser, entry_point
from pipeline.core.files import ROOT

TABLE = Path("paper_outputs/benchmarks/kernels.csv")
ARCHITECTURES = {80: 164 * 1024, 90: 228 * 1024}  # compute capability: bytes of shared memory of a multiprocessor
REGISTERS, WARPS = 65536, 64  # of a multiprocessor of either
RESERVED = 1024  # bytes of shared memory that each program takes besides its own
WIDTHS = (16, 64)  # d_v: that of the paper's heads, and a usual one
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
DTYPES = dict.fromkeys(launch.METHODS, tuple(POINTERS)) | {"phi1": (torch.float32,)}
NAMES = ("forward", "backward")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
REPORTED = {
    "registers": r"Used (\d+) registers",
    "stored": r"(\d+) bytes spill stores",
    "loaded": r"(\d+) bytes spill loads",
}


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("benchmarks.kernels", __doc__)
    parser.add_argument("--methods", nargs="+", choices=DTYPES, default=tuple(DTYPES))
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--architectures", nargs="+", type=int, choices=ARCHITECTURES, default=tuple(ARCHITECTURES))
    parser.add_argument("--output", type=Path, default=ROOT / TABLE)
    chosen = parser.parse_args(arguments)
    cases = grid(chosen.methods, chosen.widths, chosen.architectures)
    rows = [resources(*case) for case in tqdm(cases, desc="kernels", unit="kernel", disable=None)]
    files.write_csv(chosen.output, pd.DataFrame(rows).assign(triton=triton.__version__))


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
        report = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stderr
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
    module = phi1 if method == "phi1" else attention
    kernel = {"forward": module.forward_kernel, "backward": module.backward_kernel}[name]
    if method == "phi1":
        like = torch.empty(1, 2 * width, 2 * width, dtype=dtype, device="meta")
        constants = launch.phi1_constants(like, like[..., :width])
    else:
        rows = min(launch.MAX_TOKENS, launch.MAX_BASIS // (2 * width))  # as many as a program takes
        if method == "exact":
            rows = min(rows, 512 * (8 if width > 16 else 4) // max(16, 2 * width))  # as many as it has a basis for
        like = torch.empty(1, 1, rows, width, dtype=dtype, device="meta")
        constants = launch.attention_constants(method, name, like, like, ITERATIONS.get(method, 0))
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "maxnreg")}
    signature, values, attributes, aligned = {}, {}, {}, [["tt.divisibility", 16]]
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[argument] = "constexpr", constants[argument]
        elif argument.endswith("strides"):
            signature[argument], values[i, 3] = ("i32", "i32", "i32", "constexpr"), 1
            attributes |= {(i, j): aligned for j in range(3)}
        elif argument in ("count", "heads", "tokens", "scratch_size"):
            signature[argument] = "i32"
        elif argument == "epsilon":
            signature[argument] = "fp32"
        else:
            is_float32 = argument in ("scale", "grad_scale", "basis", "scratch")
            signature[argument] = "*fp32" if is_float32 else POINTERS[dtype]
            attributes[i,] = aligned
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


if __name__ == "__main__":
    main(sys.argv[1:])
