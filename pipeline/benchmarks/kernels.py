"""Resources that the kernels of osa/kernels take: `python -m pipeline benchmarks.kernels`. It needs Triton, and no GPU.

Each kernel is compiled for each architecture by the compilers that come with Triton. Writes kernels.csv to
paper_outputs/benchmarks/: registers of a thread, bytes that a thread stores and loads because registers ran out, bytes of
shared memory, how many programs a multiprocessor holds at once, by that memory alone and altogether, the compiler's warnings
of performance, and for how many of its products of tensor cores (HGMMA, Hopper's asynchronous instruction) a thread waits.
C7510 says that it waits for each of them.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pandas as pd
import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from osa.functional import ITERATIONS
from osa.kernels import heads, launch, operators, sequences
from pipeline.core import files
from pipeline.core.errors import command_parser, entry_point
from pipeline.core.files import ROOT

TABLE = Path("paper_outputs/benchmarks/kernels.csv")
ARCHITECTURES = {80: 164 * 1024, 90: 228 * 1024}  # compute capability: bytes of shared memory of a multiprocessor
REGISTERS, WARPS = 65536, 64  # limits of a multiprocessor of either
RESERVED = 1024  # bytes of shared memory that each program takes besides its own
WIDTHS = (16, 32, 64, 128)  # d_v: that of the paper's heads, and usual ones
DTYPES = (torch.float32, torch.bfloat16)
POINTERS = dict(zip(DTYPES, ("*fp32", "*bf16"), strict=True))
METHODS = (
    *operators.METHODS,
    *(f"long {method}" for method in operators.LONG_METHODS),
    "fused exact",
    "parts exact",
    "phi1",
)
MOST_ROWS = {"exact": 64}  # rows for which a program has a basis
MANY = 4096  # tokens that stand for any number of a long sequence
MULTIPROCESSORS = {"parts": 132}  # an H100's, of which few heads occupy few; for all else heads are many
OPTIONS = ("num_warps", "num_stages", "maxnreg")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
REPORTED = {
    "registers": r"Used (\d+) registers",
    "stored": r"(\d+) bytes spill stores",
    "loaded": r"(\d+) bytes spill loads",
}


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("benchmarks.kernels", __doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--architectures", nargs="+", type=int, choices=ARCHITECTURES, default=tuple(ARCHITECTURES))
    parser.add_argument("--output", type=Path, default=ROOT / TABLE)
    chosen = parser.parse_args(arguments)
    cases = list(itertools.product(chosen.methods, chosen.widths, DTYPES))
    rows = [
        resources(method, launched, width, dtype, architecture)
        for method, width, dtype in tqdm(cases, desc="kernels", unit="case", disable=None)
        for architecture in chosen.architectures
        for launched in launches(method, width, dtype, architecture)
    ]
    files.write_csv(chosen.output, pd.DataFrame(rows).assign(triton=triton.__version__))


Launch = tuple  # the kernel, its tensors and their strides, and its other arguments by name


def launches(method: str, width: int, dtype: torch.dtype, architecture: int) -> list[Launch]:
    """Lists the launches of a call and its backward pass, for heads of one width, at the most tokens it takes."""
    found, (*form, method) = [], method.split()
    multiprocessors = MULTIPROCESSORS.get("".join(form), 1)
    with (
        mock.patch.object(launch, "launch", lambda kernel, programs, *others: found.append((kernel, *others))),
        mock.patch.object(launch, "capability", return_value=architecture // 10),
        mock.patch.object(launch, "multiprocessors", return_value=multiprocessors),
    ):
        if method == "phi1":
            z, y = (torch.empty(1, 2 * width, size, device="meta") for size in (2 * width, width))
            if dtype == torch.float32 and width <= operators.MAX_WIDTH:
                launch.phi1_forward(z, y, y)
                launch.phi1_backward(z, y, y, z, y)
            return found
        tokens = MANY if form else MOST_ROWS.get(method, operators.MAX_TOKENS)
        query = torch.empty(2, 3, tokens, width, dtype=dtype, device="meta")
        kernels, is_there = {
            "": (launch, width <= operators.MAX_WIDTH),
            "long": (sequences, True),
            "fused": (heads, heads.is_fused(method, query, query, query)),
            "parts": (heads, heads.is_fused(method, query, query, query)),
        }["".join(form)]
        if is_there:
            shapes = (2, 3, 1, 1), kernels.saved_shape(method, query, query)
            scale, saved = (torch.empty(shape, device="meta") for shape in shapes)
            iterations = ITERATIONS.get(method, 0), 1e-7
            inputs = query, query, query, scale
            kernels.forward(method, inputs, query, saved, *iterations)
            kernels.backward(method, inputs, saved, query, inputs, *iterations)
    if form == ["parts"]:  # steps are listed with "fused", and the first launch is one of either pass
        found = list({name(each): each for each in found if "stepped" not in name(each)}.values())
    return found


def name(launched: Launch) -> str:
    """The kernel's name in the table."""
    kernel, *_, arguments = launched
    forms = " sheared" * arguments.get("SHEARED", False) + " three" * arguments.get("THREE", False)
    return kernel.fn.__name__.removesuffix("_kernel") + forms


def resources(method: str, launched: Launch, width: int, dtype: torch.dtype, architecture: int) -> dict:
    """A row of the table."""
    compiled = compile_kernel(launched, architecture)
    target = re.search(r"\.target (\w+)", compiled.asm["ptx"])[1]
    with tempfile.TemporaryDirectory() as folder:
        ptx, machine_code = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"], encoding="utf-8")
        report = _run("ptxas", "-v", f"--gpu-name={target}", ptx, "-o", machine_code).stderr
        instructions = _run("cuobjdump", "--dump-sass", machine_code).stdout
    hgmma, waits = (len(re.findall(rf"\b{name}\b", instructions)) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
    used = {key: sum(map(int, re.findall(pattern, report))) for key, pattern in REPORTED.items()}  # over all its functions
    registers, warps, shared = used["registers"], compiled.metadata.num_warps, compiled.metadata.shared
    by_registers = REGISTERS // (32 * warps * 8 * -(-registers // 8))
    by_memory = ARCHITECTURES[architecture] // (shared + RESERVED)
    return {
        "method": method,
        "kernel": name(launched),
        "width": width,
        "dtype": str(dtype).removeprefix("torch."),
        "architecture": f"sm_{architecture}",
        "warps": warps,
        "registers": registers,
        "spilled_bytes": used["stored"] + used["loaded"],
        "shared_bytes": shared,
        "programs_by_memory": by_memory,
        "programs": min(by_registers, WARPS // warps, by_memory),
        "warnings": " ".join(sorted(set(re.findall(r"\bC75\d\d\b", report)))),
        "hgmma": hgmma,
        "waits": waits,
    }


def is_worse(row: dict, than: dict) -> bool:
    """Tells whether a kernel takes more of a GPU than its row of the table says."""
    return (
        not set(row["warnings"].split()) <= set(than["warnings"].split())
        or any(int(row[name]) > int(than[name]) for name in ("spilled_bytes", "shared_bytes"))
        or int(row["programs"]) < int(than["programs"])
        or int(row["waits"]) * int(than["hgmma"]) > int(than["waits"]) * int(row["hgmma"])
    )


def _run(tool: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [TOOLS / tool, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True)


def compile_kernel(launched: Launch, architecture: int):
    """Compiled as the launch would, for tensors of aligned addresses."""
    kernel, tensors, strides, arguments = launched
    options = {key: value for key, value in arguments.items() if key in OPTIONS}
    given = dict(zip(kernel.arg_names, (*tensors, *strides), strict=False)) | arguments
    signature, values, attributes, aligned = {}, {}, {}, [["tt.divisibility", 16]]
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], values[parameter.name] = "constexpr", value
        elif isinstance(value, tuple):
            signature[parameter.name] = tuple("constexpr" if x == 1 else "i32" for x in value)
            values |= {(i, j): 1 for j, x in enumerate(value) if x == 1}
            attributes |= {(i, j): aligned for j, x in enumerate(value) if x % 16 == 0}
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[i,] = POINTERS[value.dtype], aligned
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


if __name__ == "__main__":
    main(sys.argv[1:])
