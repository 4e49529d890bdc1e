"""Creates .venv and installs pinned requirements into it, for `make setup`.

The script needs no packages and runs on older Python versions than the rest of the code. On Linux, a machine without a GPU
gets the CPU build of PyTorch from PyTorch's index, or the larger CUDA build from PyPI if the index does not answer.
"""

from __future__ import annotations

import argparse
import fcntl
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO

OLDEST, NEWEST = (3, 11), (3, 14)  # oldest and newest Python that all pins in requirements.txt support
PATIENCE = 5  # seconds to wait for PyTorch's index
CPU, PYPI = "cpu", "pypi"  # sources of PyTorch: PyTorch's index of CPU builds, and PyPI


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("requirements", type=Path, nargs="+", help="files, requirements.txt first")
    parser.add_argument("--torch", default="", help="cpu or cuda; default: cuda if the machine has a GPU, else cpu")
    parser.add_argument("--index", default="", help="PyTorch's index of builds for CPUs, or a mirror of it")
    parser.add_argument("--uv", help="the path of uv, which then installs instead of pip")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        update(options)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to resume.", file=sys.stderr)
        sys.exit(130)


def update(options: argparse.Namespace) -> None:
    """Installs each requirements file that has changed since it was last installed."""
    venv = options.venv
    if options.torch not in ("", "cpu", "cuda"):
        sys.exit(f"error: TORCH={options.torch} is unknown; choose TORCH=cpu or TORCH=cuda, or leave it out.")
    if options.torch == "cuda" and torch_build(venv) == CPU:
        sys.exit(f"error: {venv} has PyTorch for CPUs: move it away, then run `make setup TORCH=cuda`.")
    stale = [path for path in options.requirements if not is_installed(path, venv)]
    if not stale:
        return
    venv.mkdir(parents=True, exist_ok=True)
    with (venv / "install.log").open("ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an installer inherits the lock, and may outlive this process
        except BlockingIOError:
            sys.exit(f"error: another process is installing into {venv}: try again when it has finished.")
        log.truncate(0)
        if not (has_python(venv) and (venv / "bin/pip").exists()):
            create(options, log)
        for path in stale:
            (venv / path.name).unlink(missing_ok=True)
            if path.name == "requirements.txt":
                install_with_torch(path, options, log)
            else:
                print(f"Installing {path} into {venv}.", flush=True)
                install_all(path, options, log)
            shutil.copyfile(path, venv / path.name)


def has_python(venv: Path) -> bool:
    """True if the environment's Python exists. A system upgrade can remove the target of the link bin/python."""
    return (venv / "bin/python").exists()


def is_installed(path: Path, venv: Path) -> bool:
    """True if the environment holds an identical copy of a requirements file. A failed installation leaves no copy."""
    copy = venv / path.name
    return has_python(venv) and copy.exists() and copy.read_bytes() == path.read_bytes()


def torch_build(venv: Path) -> str:
    """Returns the source of the installed PyTorch: CPU (PyTorch's index of CPU builds), PYPI, or "" if none is installed."""
    note = venv / ".torch"
    return note.read_text(encoding="utf-8").strip() if has_python(venv) and note.exists() else ""


def create(options: argparse.Namespace, log: BinaryIO) -> None:
    """Creates the environment with the running Python or, if that version is not supported, with one that uv finds."""
    venv = options.venv
    for path in (*venv.glob("requirements*.txt"), venv / ".torch"):
        path.unlink(missing_ok=True)  # these files describe an earlier environment, whose Python or pip is gone
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        command = [sys.executable, "-m", "venv", str(venv)]
    elif options.uv:
        fitting = ">={}.{},<{}.{}".format(*OLDEST, NEWEST[0], NEWEST[1] + 1)
        command = [options.uv, "venv", "--seed", "--allow-existing", "--python", fitting, str(venv)]
    else:
        versions = "Python {}.{} to {}.{} is needed, not {}.{}".format(*OLDEST, *NEWEST, *sys.version_info)
        sys.exit(f"error: {versions}: name one, as in `make setup PYTHON=python3.12`, or install uv, which downloads one.")
    if not run_logged(command, venv, log):
        sys.stderr.write((venv / "install.log").read_text(encoding="utf-8", errors="replace"))
        sys.exit(f"error: `{' '.join(command)}` failed: fix the error reported above, and try again.")


def install_with_torch(path: Path, options: argparse.Namespace, log: BinaryIO) -> None:
    """Installs requirements.txt with the build of PyTorch that `choose` returns."""
    venv, chosen = options.venv, choose(options.venv, options.torch)
    if chosen == CPU and install_torch_for_cpus(path, options, log):
        (venv / ".torch").write_text(CPU, encoding="utf-8")
        others = venv / "without_cuda.txt"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        others.write_text("".join(line for line in lines if not re.match("cuda|nvidia|triton", line)), encoding="utf-8")
        install_all(others, options, log)
        return
    if chosen == CPU:
        reason = f"because {public(options.index)} did not provide the CPU build; set TORCH_INDEX=URL to use a mirror"
        print(f"Installing into {venv}: 5.6 GB, most of it CUDA libraries that are not needed here, {reason}.", flush=True)
    else:
        announce(venv, "5.6 GB, most of it CUDA" if sys.platform == "linux" else "about 2 GB")
    install_all(path, options, log)
    (venv / ".torch").write_text(PYPI, encoding="utf-8")


def announce(venv: Path, size: str) -> None:
    print(f"Installing what is new into {venv}." if torch_build(venv) else f"Installing into {venv}: {size}.", flush=True)


def choose(venv: Path, torch: str) -> str:
    """Returns the source of the PyTorch to install: CPU or PYPI. An installed build takes precedence over `torch`."""
    if sys.platform != "linux":
        return PYPI  # PyPI's build has CUDA only on Linux
    if torch_build(venv):
        return torch_build(venv)
    if torch:
        return CPU if torch == "cpu" else PYPI
    return PYPI if has_gpu() else CPU


def has_gpu() -> bool:
    if not shutil.which("nvidia-smi"):
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):  # for instance because the driver is broken
        return False
    return listed.startswith(b"GPU ")


def install_torch_for_cpus(path: Path, options: argparse.Namespace, log: BinaryIO) -> bool:
    """Installs torch and torchvision from PyTorch's index. Returns False if the index does not answer or lacks the build."""
    if torch_build(options.venv) != CPU and not answers(public(options.index) + "/torch/"):
        return False
    announce(options.venv, "about 2 GB, with PyTorch for CPUs")
    pins = re.findall(r"^torch(?:vision)?==[\d.]+", path.read_text(encoding="utf-8"), re.MULTILINE)
    source = ["--default-index", options.index] if options.uv else ["--retries", "1", "--index-url", options.index]
    return install(options, log, "--no-deps", *source, *(f"{pin}+cpu" for pin in pins))


def public(url: str) -> str:
    """Removes the login and trailing slashes from an address."""
    return re.sub("//[^/@]*@", "//", url).rstrip("/")


def answers(url: str) -> bool:
    """True if a server answers in time. HTTP and SSL errors count as answers, since the installer may still succeed."""
    answered = []

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            pass
        except OSError as error:
            if not isinstance(getattr(error, "reason", None), ssl.SSLError):
                return
        answered.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)  # urlopen's timeout does not cover the DNS lookup
    return bool(answered)


def install_all(path: Path, options: argparse.Namespace, log: BinaryIO) -> None:
    if not install(options, log, "-r", str(path)):
        sys.exit(f"error: the packages cannot be installed (see {options.venv}/install.log): try again.")


def install(options: argparse.Namespace, log: BinaryIO, *arguments: str) -> bool:
    """Runs uv or pip. Returns True if successful."""
    python = str(options.venv / "bin/python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    command = [options.uv, "pip", "install", "--python", python] if options.uv else pip
    return run_logged([*command, *arguments], options.venv, log)


def run_logged(command: list[str], venv: Path, log: BinaryIO) -> bool:
    """Runs a command and logs its output. On a terminal, also shows the log's last line. Returns True if successful."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            if sys.stderr.isatty():
                messages = (venv / "install.log").read_text(encoding="utf-8", errors="replace").split("\n")
                last = next((line for line in reversed(messages) if line.strip()), "")
                print(f"\r\033[K{time.monotonic() - start:.0f} s  {last[:60]}", end="", file=sys.stderr, flush=True)
            time.sleep(0.5)
    finally:
        process.terminate()
        process.wait()
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    return process.returncode == 0


if __name__ == "__main__":
    main()
