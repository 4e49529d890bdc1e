"""A Python that starts at once, for tests that start many processes.

A server has imported what commands of the pipeline import, which takes longer than most of them take on small models. The
program `python` of `started` sends its arguments, folder, environment and streams to the server, whose fork then does the
work. Options of Python, such as -OO, and the test of what a command imports, need the ordinary Python.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import sys

LIBRARIES = "dvc.repo jinja2 markdown_it matplotlib.figure pandas pydantic ruamel.yaml safetensors.torch scipy.stats"
LIBRARIES += " torch._inductor.config tqdm"


@contextlib.contextmanager
def started(folder):
    """Starts a server, and yields the path of its `python`, which lies alone in a subfolder of `folder`."""
    import subprocess

    program, address = folder / "bin" / "python", folder / "socket"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "{sys.executable}" "{address}" "$@"\n')
    program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, __file__, program, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout.readline(), "the server must listen by now"
        yield program
        server.stdin.close()  # which ends it


def ask(python: str, address: str, arguments: list[str]) -> None:
    """Has the server run Python with `arguments`, and ends as that process does."""
    if arguments[:1] not in (["-m"], ["-c"]):
        os.execv(python, [python, *arguments])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
        worker = int(server.recv(99))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(worker, number))
        status = int(server.recv(99))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def serve(program: str, address: str) -> None:
    """Waits for requests until stdin ends. Returns in each worker, set up as a new Python with these arguments would be."""
    import gc
    import importlib
    import select

    sys.path.pop(0)  # the folder of this file
    for name in LIBRARIES.split():
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keeps no zombies
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print(flush=True)
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                sys.exit()
            client, _ = listener.accept()
            if not os.fork():
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, *_ = socket.recv_fds(client, 1 << 20, 3)
    if worker := os.fork():
        client.send(str(worker).encode())
        client.send(str(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])).encode())
        os._exit(0)
    client.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    arguments, folder, environment = json.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable, sys.argv = program, arguments
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]


def leave() -> None:
    """Ends a worker after all else that it does at its end. To tear down all modules would take half a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def work(option: str, name: str, *arguments: str) -> int:
    """Does what `python -m name` or `python -c name` does. Returns the exit status."""
    import runpy
    import traceback

    sys.argv = [option, *arguments]
    try:
        if option == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - as Python itself does
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    first, second, *others = sys.argv[1:]
    if others:
        ask(first, second, others)
    serve(first, second)
    atexit.register(leave)
    status = work(*sys.argv)
