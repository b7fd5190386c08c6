"""Compile C++ extensions once before the tests, in the environment's own folder, and delete stale
locks.

These are DeepSpeed's CPU operators and the device of `sealed_device`. torch's compiler uses a file
as a lock and waits as long as that file exists, so the lock of a killed process would hang every
later start of DeepSpeed. Run as a script, this module compiles them.
"""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

FOLDER = "TORCH_EXTENSIONS_DIR"
LOCK = "lock"  # the name torch.utils.cpp_extension gives it


def settle_folder() -> None:
    """Set the folder of extensions inside the environment, unless it is set or read-only, and
    delete stale locks.
    """
    if os.access(sys.prefix, os.W_OK):
        os.environ.setdefault(FOLDER, str(Path(sys.prefix, "torch_extensions")))
    drop_stale_locks()


def extension_folder() -> Path:
    """The folder of compiled extensions, after `settle_folder`."""
    return Path(os.environ.get(FOLDER, Path(tempfile.gettempdir(), "torch_extensions")))


def drop_stale_locks() -> list[Path]:
    """Delete the locks that no living process has open, and return them."""
    folder = os.environ.get(FOLDER)
    found = list(Path(folder).rglob(LOCK)) if folder else []
    held = _open_files() if found else set()
    stale = [lock for lock in found if str(lock.resolve()) not in held]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale


def compile_operators() -> None:
    """Compile what DeepSpeed would compile when its first process group is made; nothing without
    DeepSpeed.
    """
    try:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    except ImportError:
        return
    builder = ShareMemCommBuilder()
    if builder.is_compatible():
        builder.load(verbose=False)


def _open_files() -> set[str]:
    """Files open in any process that may be inspected; a lock's holder has it open until it is
    done.
    """
    return {_target(handle) for handle in Path("/proc").glob("[0-9]*/fd/*")}


def _target(handle: Path) -> str:
    with suppress(OSError):  # another user's, or closed by now
        return str(handle.readlink())
    return ""


if __name__ == "__main__":
    import sealed_device

    settle_folder()
    compile_operators()
    sealed_device.compile_device()
