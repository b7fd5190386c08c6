"""A server that loads the libraries once and forks the ranks of each launch.

Loading torch, transformers, accelerate and peft takes a rank seconds, most of the time of a
launched test. The server reads one request per line, `[script, arguments, ranks, environment,
folder, output, errors]` as JSON, and answers twice: with the process id of the launch and, when it
is over, with its exit status. Each connection has its own process, so that the workers of one test
run share the libraries; a connection that passes file descriptors becomes such a worker. Ranks get
what torchrun would give them: the same variables, and a store that outlives any of them. A launch
of no ranks is the script alone, as Python would run it.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

LIBRARIES = (
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchdata.stateful_dataloader",
    "safetensors.torch",
    "accelerate",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.olmo2.modeling_olmo2",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "h5py",
    "pytest",
    "ft_ckpt.saver",
)
PORT_BYTES = 8  # length of the padded message with the store's port
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL to the other ranks, once one has failed


def load_libraries() -> None:
    """Import the libraries of nearly every worker; none of them starts threads."""
    for name in LIBRARIES:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")  # noqa: PTH208 - of the process, not a folder
    if len(threads) > 1:
        raise SystemExit(
            f"{len(threads)} threads after loading the libraries: a fork would copy one of them"
        )


def serve(listener: socket.socket) -> None:
    """Serve each connection in a fork of this process, until stdin ends with the parent process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection = listener.accept()[0]
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
            _answer(connection)
            os._exit(0)
        connection.close()


def _answer(connection: socket.socket) -> None:
    """Run the requests of a connection one after the other until it is closed.

    A connection with file descriptors becomes a worker instead.
    """
    descriptors = socket.recv_fds(connection, 1, 3)[1]
    with connection, connection.makefile("rw") as lines:
        if descriptors:
            _end(_be_worker, descriptors, *json.loads(lines.readline()))
        print("ready", file=lines, flush=True)
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if not pid:
                os.close(connection.fileno())
                _end(_be_launch, *request)
            print(pid, file=lines, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=lines, flush=True)


def _be_launch(
    script: str,
    arguments: list[str],
    ranks: int,
    environment: dict[str, str],
    folder: str,
    output: str,
    errors: str,
) -> int:
    """Become the requested launch, with its stdout and stderr in those files."""
    os.setsid()
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(folder)
    if ranks:
        return _be_launcher(script, arguments, ranks, environment)
    return _be_script(script, arguments, environment)


def _be_launcher(script: str, arguments: list[str], ranks: int, environment: dict[str, str]) -> int:
    """Become the launcher: fork the ranks, keep their store, and end them all when one fails."""
    waiting, ready = os.pipe()
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            os.close(ready)
            # the store starts threads, so it is made after the last fork
            port = os.read(waiting, PORT_BYTES).decode()
            _end(_be_script, script, arguments, environment | _variables(rank, ranks, port))
        children.append(pid)
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(ready, f"{store.port:<{PORT_BYTES}}".encode() * ranks)
    return _watch(children)


def _variables(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank on one machine."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port.strip(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }


def _be_script(script: str, arguments: list[str], environment: dict[str, str]) -> int:
    """Run the script as Python would, with these variables only."""
    os.environ.clear()
    os.environ.update(environment)
    search_path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.path.dirname(script), *filter(None, search_path), *sys.path[1:]]  # noqa: PTH120 - as Python itself does
    sys.argv = [script, *arguments]
    tempfile.tempdir = None  # chosen again, as this environment says
    sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115 - for as long as the rank lives
    runpy.run_path(script, run_name="__main__")
    return 0


def _be_worker(descriptors: list[int], code: str, environment: dict[str, str], folder: str) -> int:
    """Become `python -c code` with these three file descriptors as stdin, stdout and stderr."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0], sys.argv = "", ["-c"]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the worker lives
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(code, main.__dict__)
    return 0


def _watch(children: list[int]) -> int:
    """Wait for all ranks; the first failure ends the others. Returns 1 if a rank failed, else 0."""
    running, has_failed, deadline = set(children), False, float("inf")
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG if has_failed else 0)
        if not pid:
            if time.monotonic() > deadline:
                _signal(running, signal.SIGKILL)
            time.sleep(0.02)
            continue
        running.discard(pid)
        if os.waitstatus_to_exitcode(status) and not has_failed:
            has_failed, deadline = True, time.monotonic() + GRACE_SECONDS
            _signal(running, signal.SIGTERM)
    return int(has_failed)


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _end(action: Any, *arguments: Any) -> NoReturn:
    """Run `action` and end this process with its result as the exit status.

    On an exception it ends as an interpreter would. The interpreter is not finalised: freeing the
    loaded modules would copy all of their pages.
    """
    status = 1
    try:
        status = action(*arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends a process: threads are waited for
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    load_libraries()
    gc.collect()
    gc.freeze()  # so that collecting garbage in a rank copies no page of what is shared
    serve(socket.socket(fileno=int(sys.argv[1])))
