"""Lists the resources of each kernel in osa/kernels: `python -m pipeline benchmarks.kernels`. Needs Triton but no GPU.

The script compiles each kernel for each architecture, and writes a row to paper_outputs/benchmarks/kernels.csv. It compiles
a kernel again only if the compiler's input has changed, and warns if the kernel then takes more resources. The table has
these columns among others:

registers            number of registers per thread
spilled_bytes        number of bytes that a thread spills: stores plus loads
shared_bytes         bytes of shared memory per program
programs_by_memory   number of programs that fit on a multiprocessor if only shared memory limits them
programs             number of programs that fit on a multiprocessor
warnings             the compiler's performance warnings; C7510 means that asynchronous products are serialised
hgmma                number of HGMMA instructions, Hopper's asynchronous products on tensor cores
waits                number of instructions that wait for these products
source               digest of the compiler's input
"""

import ast
import functools
import inspect
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pandas as pd
import torch
import triton
import triton.language as tl
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from osa.kernels import launch
from osa.kernels.hopper import backend as hopper
from osa.kernels.long import backend as long
from osa.kernels.short import backend as short
from osa.options import ITERATIONS
from pipeline.core import files
from pipeline.core.errors import command_parser, entry_point
from pipeline.core.files import ROOT

TABLE = Path("paper_outputs/benchmarks/kernels.csv")
ARCHITECTURES = {80: 164 * 1024, 90: 228 * 1024}  # compute capability → bytes of shared memory of a multiprocessor
REGISTERS, WARPS = 65536, 64  # limits of a multiprocessor, the same for all ARCHITECTURES
RESERVED = 1024  # bytes of shared memory that the driver reserves for each program
WIDTHS = (16, 32, 64, 128)  # values of d_v: 16 in the paper's models, and three other common widths
DTYPES = (torch.float32, torch.bfloat16)
POINTERS = dict(zip(DTYPES, ("*fp32", "*bf16"), strict=True))
METHODS = (*short.METHODS, *(f"long {method}" for method in long.METHODS), "fused exact", "parts exact", "phi1")
BACKENDS: dict[str, Callable[[str], Any]] = {
    "": short.Short,
    "long": long.Long,
    "fused": hopper.Hopper,
    "parts": hopper.Hopper,
}
MOST_ROWS = {"exact": 64}  # method → maximum number of tokens for which a program holds a basis in its registers
MANY = 4096  # tokens of a long sequence
OPTIONS = ("num_warps", "num_stages", "maxnreg")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
REPORTED = {
    "registers": r"Used (\d+) registers",
    "stored": r"(\d+) bytes spill stores",
    "loaded": r"(\d+) bytes spill loads",
}
KEY = ["method", "kernel", "width", "dtype", "architecture"]  # columns that identify a row
Key = tuple[str, ...]
Launch = tuple  # the kernel, its tensors and their strides, and its other arguments by name


@entry_point
def main(arguments: list[str] | None = None) -> None:
    command_parser("benchmarks.kernels", __doc__).parse_args(arguments)
    before, rows = committed_rows(), []
    for key, launched, architecture in tqdm([*cases()], desc="kernels", unit="kernel", disable=None):
        given, known = source(launched, architecture), before.get(key)
        if known and known["source"] == given:
            rows.append(known)
            continue
        row = dict(zip(KEY, key, strict=True)) | resources(launched, architecture) | {"source": given}
        if known and is_worse(row, known):
            what = "needs more resources or waits, or has new compiler warnings"
            tqdm.write(f"warning: {' '.join(key)} {what}: run `git diff {TABLE}`.", file=sys.stderr)
        rows.append(row)
    files.write_csv(ROOT / TABLE, pd.DataFrame(rows))


def committed_rows() -> dict[Key, dict[str, str]]:
    """Returns the rows of kernels.csv by key, or {} if the file is missing."""
    if not (ROOT / TABLE).exists():
        return {}
    rows = pd.read_csv(ROOT / TABLE, dtype=str, keep_default_na=False).to_dict("records")
    return {tuple(row[name] for name in KEY): row for row in rows}


def cases() -> Iterator[tuple[Key, Launch, int]]:
    """Yields the key, launch and architecture of each row, in the table's order."""
    for method, width, dtype, architecture in itertools.product(METHODS, WIDTHS, DTYPES, ARCHITECTURES):
        for launched in launches(method, width, dtype, architecture):
            key = method, name(launched), str(width), str(dtype).removeprefix("torch."), f"sm_{architecture}"
            yield key, launched, architecture


def source(launched: Launch, architecture: int) -> str:
    """Returns a digest of the compiler's input: code, arguments, and Triton's version."""
    kernel, tensors, strides, arguments = launched
    types = [str(tensor.dtype) for tensor in tensors]
    return files.json_digest([code(kernel), types, strides, arguments, architecture, triton.__version__])[:12]


@functools.cache
def code(kernel) -> dict[str, str]:
    """Returns the code of a kernel and of the functions that it calls, and the constants that they read."""
    found, waiting = {}, [kernel.fn]
    while waiting:
        function = waiting.pop()
        place = f"{function.__module__}.{function.__name__}"
        if place in found:
            continue
        definition = ast.parse(inspect.getsource(function)).body[0]
        assert isinstance(definition, ast.FunctionDef)
        if ast.get_docstring(definition):
            del definition.body[0]
        found[place] = ast.unparse(definition)
        scope = dict(function.__globals__)
        for module in function.__globals__.values():
            if isinstance(module, ModuleType) and module.__name__.startswith("osa."):
                scope |= vars(module)
        for used in function.__code__.co_names:
            value: Any = scope.get(used)
            if isinstance(value, tl.constexpr):
                found[f"{place} {used}"] = repr(value.value)
            elif hasattr(value, "fn"):
                waiting.append(value.fn)
    return found


def launches(method: str, width: int, dtype: torch.dtype, architecture: int) -> list[Launch]:
    """Lists the kernel launches of a forward and a backward pass, for heads of one width.

    Kernels for long sequences get `MANY` tokens. Kernels for short sequences get the most tokens that they accept.
    """
    found: list[Launch] = []
    form, _, method = method.rpartition(" ")
    # The launch code chooses the form "parts" if there are many more multiprocessors than heads, as on an H100.
    multiprocessors = 132 if form == "parts" else 1
    with (
        mock.patch.object(launch, "launch", lambda kernel, programs, *others: found.append((kernel, *others))),
        mock.patch.object(launch, "capability", return_value=architecture // 10),
        mock.patch.object(launch, "multiprocessors", return_value=multiprocessors),
    ):
        if method == "phi1":
            z, y = (torch.empty(1, 2 * width, size, device="meta") for size in (2 * width, width))
            if dtype == torch.float32 and width <= short.MAX_WIDTH:
                short.phi1_forward(z, y, y)
                short.phi1_backward(z, y, y, z, y)
            return found
        tokens = MANY if form else MOST_ROWS.get(method, short.MAX_TOKENS)
        query = torch.empty(2, 3, tokens, width, dtype=dtype, device="meta")
        backend = BACKENDS[form](method)
        if backend.forms(query, query, query):
            shapes = (2, 3, 1, 1), backend.saved_shape(query, query)
            scale, saved = (torch.empty(shape, device="meta") for shape in shapes)
            iterations = ITERATIONS.get(method, 0), 1e-7
            inputs = query, query, query, scale
            backend.forward(inputs, query, saved, *iterations)
            backend.backward(inputs, saved, query, inputs, *iterations)
    # "parts" omits the stepped kernels, which "fused" lists. A kernel that forward and backward both launch is listed once.
    if form == "parts":
        found = list({name(each): each for each in found if "stepped" not in name(each)}.values())
    return found


def name(launched: Launch) -> str:
    """Returns the kernel's name in the table."""
    kernel, *_, arguments = launched
    forms = " sheared" * arguments.get("SHEARED", False) + " three" * arguments.get("SPLIT", False)
    return kernel.fn.__name__.removesuffix("_kernel") + forms


def resources(launched: Launch, architecture: int) -> dict:
    """Compiles the kernel of a launch, and returns the measured columns of its row in the table."""
    compiled = compile_kernel(launched, architecture)
    (target,) = re.findall(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        ptx, machine_code = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"], encoding="utf-8")
        report = _run("ptxas", "-v", f"--gpu-name={target}", ptx, "-o", machine_code).stderr
        instructions = _run("cuobjdump", "--dump-sass", machine_code).stdout
    hgmma, waits = (len(re.findall(rf"\b{name}\b", instructions)) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
    # sums, because ptxas reports numbers for each function of a kernel
    used = {key: sum(map(int, re.findall(pattern, report))) for key, pattern in REPORTED.items()}
    registers, warps, shared = used["registers"], compiled.metadata.num_warps, compiled.metadata.shared
    by_registers = REGISTERS // (32 * warps * 8 * -(-registers // 8))
    by_memory = ARCHITECTURES[architecture] // (shared + RESERVED)
    return {
        "warps": warps,
        "registers": registers,
        "spilled_bytes": used["stored"] + used["loaded"],
        "shared_bytes": shared,
        "programs_by_memory": by_memory,
        "programs": min(by_registers, WARPS // warps, by_memory),
        "warnings": " ".join(sorted(set(re.findall(r"\bC75\d\d\b", report)))),
        "hgmma": hgmma,
        "waits": waits,
        "triton": triton.__version__,
    }


def is_worse(row: dict, than: dict) -> bool:
    """Returns whether a kernel takes more resources in its new row, `row`, than in its old row, `than`."""
    return (
        not set(row["warnings"].split()) <= set(than["warnings"].split())
        or any(int(row[name]) > int(than[name]) for name in ("spilled_bytes", "shared_bytes"))
        or int(row["programs"]) < int(than["programs"])
        or int(row["waits"]) * int(than["hgmma"]) > int(than["waits"]) * int(row["hgmma"])
    )


def _run(tool: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True)


def compile_kernel(launched: Launch, architecture: int):
    """Compiles a kernel in the way that launching it would. Assumes that tensors start at multiples of 16 bytes."""
    kernel, tensors, strides, arguments = launched
    options = {key: value for key, value in arguments.items() if key in OPTIONS}
    given = dict(zip(kernel.arg_names, (*tensors, *strides), strict=False)) | arguments
    signature: dict[str, str | tuple[str, ...]] = {}
    values: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    aligned = [["tt.divisibility", 16]]
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
