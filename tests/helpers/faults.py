"""Processes killed at a chosen call to the disk, and recorded writes to it."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ft_ckpt.storage import local_disk

CALLS = ("mkdir", "move", "exchange_folders", "unlink", "chmod", "fsync", "rmtree")  # every call that changes the disk


def dies_at(call: int, action: Callable[[], object]) -> bool:
    """Run `action` in a forked process that is killed just before its `call`-th call (1 is the first) to the disk.

    False when `action` made fewer calls and returned. A removal of a folder is killed half way, too.
    """

    def doomed() -> None:
        stop_at(call, lambda: os.kill(os.getpid(), signal.SIGKILL), partial=True)
        action()

    status, said = _forked(doomed)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, said
    return os.WIFSIGNALED(status)


def in_child(action: Callable[[], object]) -> str:
    """Run `action` in a forked process; "" if it returned, else the type and text of its exception."""
    return _forked(action)[1]


def _forked(action: Callable[[], object]) -> tuple[int, str]:
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            os.write(start, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os._exit(0)
    os.close(start)
    with os.fdopen(end, encoding="utf-8") as pipe:
        said = pipe.read()
    return os.waitpid(child, 0)[1], said


def stop_at(
    call: int, stop: Callable[[], object], *, partial: bool = False, patch: Callable[[Any, str, Any], None] = setattr
) -> None:
    """From now on, count the calls to the disk and do `stop` just before the `call`-th. Nothing is really synced."""
    left = call

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if partial and name == "rmtree":
                    _remove_half(args[0])
                stop()
            return None if name == "fsync" else real(*args, **more)  # no power is cut here: spare the disk

        return run

    for name in CALLS:
        patch(local_disk, name, counting(name, getattr(local_disk, name)))


def _remove_half(folder: str | os.PathLike[str]) -> None:
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    for path in files[len(files) // 2 :]:
        path.unlink()


@contextmanager
def writes(before: Callable[[], Any] = lambda: None) -> Iterator[list[int]]:
    """Sizes of the blocks written to files while the block runs; `before` runs before each write, and may raise."""
    real, written = os.pwrite, []

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        before()
        written.append(real(descriptor, data, offset))
        return written[-1]

    os.pwrite = pwrite
    try:
        yield written
    finally:
        os.pwrite = real
