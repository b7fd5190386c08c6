"""A rank of tests/helpers/on_ranks.py: calls functions of a test file, one after another.

Arguments: the test file, and the seconds of the process group's timeout, or nothing for no group.
"""

import ast
import faulthandler
import importlib.util
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts
from on_ranks import CALLS, RANK, Answer

SWITCH_SECONDS = 0.001  # threads of a save in the background change places with the training often


def import_file(path: Path) -> None:
    """Import a test file as pytest does: by its bare name, with asserts that tell the values."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    source = path.read_bytes()
    tree = ast.parse(source, str(path))
    rewrite_asserts(tree, source, str(path))
    exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)


def answered(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, Any]
) -> Answer:
    """Call the function; return its value, its error, or the reason of a skip."""
    try:
        return Answer(value=function(*args, **kwargs))
    except pytest.skip.Exception as skip:
        return Answer(skipped=str(skip))
    except (Exception, pytest.fail.Exception):
        return Answer(error=traceback.format_exc())


def set_variables(first: Mapping[str, str], changed: Mapping[str, str | None]) -> None:
    """Set the environment to `first` with the changes since then; None: it has no such variable."""
    variables = {**first, **changed}
    present = {name: value for name, value in variables.items() if value is not None}
    os.environ.update(present)
    for name in os.environ.keys() - present.keys():
        del os.environ[name]


def serve(calls: Connection) -> None:
    """Answer calls until pytest closes the connection."""
    first = {**os.environ}
    while True:
        try:
            timeout, changed, function, args, kwargs = calls.recv()
        except EOFError:
            return
        print(f"[rank {RANK}] {function.__qualname__} {args} {kwargs}", flush=True)
        # The stacks are printed shortly before this process would be killed.
        faulthandler.dump_traceback_later(max(timeout - 15, timeout / 2), exit=False)
        set_variables(first, changed)
        torch.manual_seed(0)
        answer = answered(function, args, kwargs)
        faulthandler.cancel_dump_traceback_later()
        calls.send(answer)


def main(path: str, group_seconds: str) -> None:
    """Join the process group, and take calls."""
    sys.setswitchinterval(SWITCH_SECONDS)
    import_file(Path(path))
    if group_seconds:
        dist.init_process_group("gloo", timeout=timedelta(seconds=float(group_seconds)))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[CALLS])
    calls = Connection(connection.detach())
    calls.send(RANK)
    serve(calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
