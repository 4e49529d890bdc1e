"""In a new process a name of the package is imported at its first use, and kernels are registered before the first call."""

import subprocess
import sys

import pytest

import osa
from pipeline.core.files import ROOT

USES = {
    "names": """
import sys, osa
assert set(osa.__all__) <= set(dir(osa)) and osa.ModelConfig(**osa.MODELS["vit"]).depth == 6 and osa.NUMERICS
assert not hasattr(osa, "creat_model") and "torch" not in sys.modules
""",
    "star": "import osa\nfrom osa import *\nassert set(osa.__all__) <= globals().keys() and osa.runtime.KERNELS['attend']",
    "eager": "from osa import orthogonal_attention, runtime\nassert runtime.KERNELS['attend']",
    "layer": "import osa.modules, osa.runtime\nassert osa.runtime.KERNELS['attend']",
    "compile": """
import torch, osa
def backend(graph, _):
    assert "osa.attend_by_value" in graph.code, graph.code
    return graph
x = torch.ones(1, 1, 5, 2)
torch.compile(lambda x: osa.orthogonal_attention(x, 2 * x, x), backend=backend, fullgraph=True)(x)
""",
    "library": "import torch, osa.functional\ntorch.ops.osa.attend_by_value.default",
    "compiled first": "import osa.compiled, osa.runtime\nassert osa.runtime.KERNELS['attend'] and osa.create_model",
}


FORKS = """
import multiprocessing, sys, torch
for use in sys.argv[1:]:
    process = multiprocessing.get_context("fork").Process(target=exec, args=(use, {}))
    process.start()
    process.join()
    assert process.exitcode == 0, use
"""


@pytest.mark.slow
def test_a_new_process_has_what_it_uses():
    """Each use is a process of its own, forked from one that has imported torch alone, but where torch is to be absent."""
    first, *others = USES.values()
    subprocess.run([sys.executable, "-c", first], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS, *others], cwd=ROOT, check=True)


def test_every_name_has_its_module():
    named = {name for names in osa._MODULES.values() for name in names}
    assert named | {"NUMERICS"} == set(osa.__all__) and all(hasattr(osa, name) for name in named)
