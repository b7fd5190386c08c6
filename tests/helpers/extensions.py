"""C++ extensions that are compiled once before the tests, in the environment's own folder.

These are DeepSpeed's CPU operators and the device of `sealed_device`. Run as a script, this module
compiles them. torch's compiler uses a file as a lock and waits as long as that file exists. The
lock of a killed process would hang every later start of DeepSpeed, so stale locks are deleted.
"""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

FOLDER = "TORCH_EXTENSIONS_DIR"
LOCK = "lock"  # the name torch.utils.cpp_extension gives it


def prepare_folder() -> None:
    """Set the folder of extensions inside the environment, and delete stale locks.

    A folder that is set already stays, and so does torch's own where the environment is read-only.
    """
    if os.access(sys.prefix, os.W_OK):
        os.environ.setdefault(FOLDER, str(Path(sys.prefix, "torch_extensions")))
    drop_stale_locks()


def extension_folder() -> Path:
    """Return the folder of compiled extensions, after `prepare_folder`."""
    return Path(os.environ.get(FOLDER, Path(tempfile.gettempdir(), "torch_extensions")))


def drop_stale_locks() -> list[Path]:
    """Delete the locks that no living process has open, and return them."""
    folder = os.environ.get(FOLDER)
    locks = list(Path(folder).rglob(LOCK)) if folder else []
    open_files = _open_files() if locks else set()
    stale = [lock for lock in locks if str(lock.resolve()) not in open_files]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale


def compile_operators() -> None:
    """Compile what DeepSpeed compiles when its first process group is made, if it is installed."""
    try:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    except ImportError:
        return
    builder = ShareMemCommBuilder()
    if builder.is_compatible():
        builder.load(verbose=False)


def _open_files() -> set[str]:
    """Return the files that are open in any process that may be inspected.

    The holder of a lock has it open until the extension is compiled.
    """
    return {_target(handle) for handle in Path("/proc").glob("[0-9]*/fd/*")}


def _target(handle: Path) -> str:
    with suppress(OSError):  # another user's, or closed by now
        return str(handle.readlink())
    return ""


if __name__ == "__main__":
    import sealed_device

    prepare_folder()
    compile_operators()
    sealed_device.compile_device()
