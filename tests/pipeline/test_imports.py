"""Commands import what they need alone: imports take seconds at the start of every stage."""

import subprocess
import sys

import pytest

from pipeline.core.files import ROOT

DRAWING = {"pandas", "matplotlib"}
RUN = "import sys; sys.argv[1:] = {arguments}; from pipeline.{module} import main; main(); print(*sys.modules)"
REPORT = "import sys; from pipeline import studies; from pipeline.report import __main__; "
REPORT += "print([studies.get(name) for name in studies.names()] and '', *sys.modules)"


def imported(code: str) -> set[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


@pytest.mark.slow
def test_a_check_and_a_training_draw_nothing(project):
    for module, arguments in {"config.check": [], "tools.train": ["osa_exact", "0", "--no-tracking"]}.items():
        modules = imported(RUN.format(module=module, arguments=arguments))
        assert ("torch" in modules) == (module == "tools.train") and not DRAWING & modules, module
    assert (project / "paper_outputs/runs/table_2/osa_exact/0/record.json").exists()


@pytest.mark.slow
def test_a_page_needs_no_torchvision():
    modules = imported(REPORT)
    assert "matplotlib" in modules and "torchvision" not in modules


def test_a_command_that_trains_nothing_needs_no_torch():
    commands = "doctor, fan_out, plan, reproduce, restore, train"
    assert "torch" not in imported(f"import sys; from pipeline.tools import {commands}; print(*sys.modules)")


def test_a_sync_with_nothing_new_needs_no_torch():
    assert "torch" not in imported("import sys; import pipeline.tracking.sync; print(*sys.modules)")


@pytest.mark.slow
def test_a_mistake_in_the_settings_is_found_before_torch_is_imported(project):
    code = "import contextlib, sys; sys.argv[1:] = {}; from pipeline.tools.train import main\n"
    code += "with contextlib.suppress(SystemExit): main()\nprint(*sys.modules)"
    for arguments in (["osa_qrr", "0"], ["osa_qr", "0", "--set", "model.dept=2"]):
        assert "torch" not in imported(code.format(arguments)), arguments
