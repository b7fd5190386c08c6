"""What is compiled once before the tests, in the environment's own folder, past stale locks.

DeepSpeed's CPU operators, and the device of `sealed_device`. torch's compiler locks by making a file and waits for ever
while that file is there, so one that a killed process left would hang every later start of DeepSpeed. Run as a script
it compiles.
"""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

FOLDER = "TORCH_EXTENSIONS_DIR"
LOCK = "lock"  # the name torch.utils.cpp_extension gives it


def settle_folder() -> None:
    """Keep what is compiled inside the environment, unless told otherwise, and drop the locks that nobody holds."""
    if os.access(sys.prefix, os.W_OK):
        os.environ.setdefault(FOLDER, str(Path(sys.prefix, "torch_extensions")))
    drop_stale_locks()


def extension_folder() -> Path:
    """Where compiled extensions are, once it is settled."""
    return Path(os.environ.get(FOLDER, Path(tempfile.gettempdir(), "torch_extensions")))


def drop_stale_locks() -> list[Path]:
    """Delete the locks that no living process has open; those that were."""
    folder = os.environ.get(FOLDER)
    found = list(Path(folder).rglob(LOCK)) if folder else []
    held = _open_files() if found else set()
    stale = [lock for lock in found if str(lock.resolve()) not in held]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale


def compile_operators() -> None:
    """Compile what DeepSpeed would compile when its first process group is made; nothing without DeepSpeed."""
    try:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    except ImportError:
        return
    builder = ShareMemCommBuilder()
    if builder.is_compatible():
        builder.load(verbose=False)


def _open_files() -> set[str]:
    """The files that any process has open, as far as it may be asked; a lock's holder has it open until it is done."""
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
