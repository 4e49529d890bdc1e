"""A `python` whose libraries are imported already: it forks a process that has them for every `python -m MODULE`.

Starting Python, torch and the like takes seconds, of which a stage of a small training has dozens. The code under test is
imported by each process anew, from its own working directory.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = ("dvc.repo", "matplotlib.figure", "pandas", "pydantic", "ruamel.yaml", "scipy.stats", "torch._dynamo")
CLIENT = """#!{python} -SEs
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
sys.exit(server.recv(1)[0])
"""


@contextlib.contextmanager
def warm_python(folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """Inside, the folder that it yields has such a `python`, for the front of PATH."""
    address = str(folder / "server")
    client = folder / "bin/python"
    client.parent.mkdir(parents=True)
    client.write_text(CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o755)
    server = subprocess.Popen([sys.executable, __file__, address], env=environment, stdin=subprocess.PIPE)
    try:
        while not Path(address).exists():
            assert server.poll() is None
            time.sleep(0.05)
        yield client.parent
    finally:
        server.stdin.close()  # the sign to end, also where the tests are killed
        server.wait()


def serve(address: str) -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # so that no fork copies them
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen()
    os.rename(f"{address}.new", address)
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended
                pass
        if os.fork() == 0:
            answer(connection)
        connection.close()


def answer(connection: socket.socket) -> None:
    """Runs what the client asks for in a process of its own, with the client's files, and sends its exit status."""
    header, files, _, _ = socket.recv_fds(connection, 8, 3)
    (flag, module, *arguments), folder, environment = json.loads(receive(connection, int.from_bytes(header, "big")))
    assert flag == "-m"
    if process := os.fork():
        _, status = os.waitpid(process, 0)
        connection.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))
        os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    sys.path[:1] = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def receive(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        parts.append(connection.recv(count))
        count -= len(parts[-1])
    return b"".join(parts)


if __name__ == "__main__":
    serve(sys.argv[1])
