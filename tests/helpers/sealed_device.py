"""A device, "sealed:0": the host cannot read its memory, and its work is done late.

The device itself is in sealed_device.cpp.
It becomes the accelerator of the process for good, so only processes of their own may call
`become_accelerator`.
"""

import hashlib
import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from extensions import extension_folder

KIND = "sealed"
_NAME = "sealed_device_native"
_SOURCE = Path(__file__).with_suffix(".cpp")


def why_missing() -> str:
    """Return why the device cannot be compiled; "" where it can, or is."""
    if _library().exists():
        return ""
    missing = [name for name in ("c++", "ninja") if shutil.which(name) is None]
    if not missing:
        return ""
    return f"{' and '.join(missing)} not found, which the device is compiled with"


def compile_device() -> None:
    """Compile the device, unless that was done or a tool is missing."""
    if why_missing() or _library().exists():
        return
    from torch.utils import cpp_extension

    folder = _library().parent
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        _NAME,
        [str(_SOURCE)],
        extra_cflags=["-O0"],
        build_directory=str(folder),
        is_python_module=False,
    )


def become_accelerator() -> torch.device:
    """Make the device this process's accelerator, and return it."""
    if not hasattr(torch, KIND):
        compile_device()
        native = _loaded_library()
        torch.utils.rename_privateuse1_backend(KIND)  # type: ignore[attr-defined]
        torch._register_device_module(KIND, _DeviceModule(native))  # type: ignore[no-untyped-call]
        # from here on torch takes the device for one that is in use
        torch.empty(1, pin_memory=True)
    return torch.device(KIND, 0)


def count_late_copies() -> int:
    """Count the copies from or to pinned memory that were done after the call that began them."""
    return int(torch.get_device_module(KIND).native.late_copies())


@contextmanager
def doing_at_once() -> Iterator[None]:
    """Let the device do its work synchronously during the block, as early as possible."""
    native = torch.get_device_module(KIND).native
    native.set_eager(True)
    try:
        yield
    finally:
        native.set_eager(False)


class _DeviceModule(ModuleType):
    """The interface that torch and other libraries use of `torch.sealed`."""

    def __init__(self, native: Any) -> None:
        super().__init__(f"torch.{KIND}")
        self.native = native
        self.is_used = False

    def _lazy_init(self) -> None:
        """Note the first use, before which torch calls it."""
        self.is_used = True

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.is_used

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def device(self, device: Any) -> Any:
        return torch.accelerator.device_index(0)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream()

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.native.default_generator().manual_seed(seed)

    def get_rng_state(self, device: Any = KIND) -> torch.Tensor:
        state: torch.Tensor = self.native.default_generator().get_state()
        return state

    def set_rng_state(self, state: torch.Tensor, device: Any = KIND) -> None:
        self.native.default_generator().set_state(state)

    def cudart(self) -> "_DeviceModule":
        """Return CUDA's interface to register host memory."""
        return self

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        return int(self.native.register_host(address, size_bytes, flags))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return int(self.native.unregister_host(address))


def _library() -> Path:
    """Return the path of the compiled library: one for each version of torch and of the source."""
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()
    return extension_folder() / f"{_NAME}-{digest[:16]}" / f"{_NAME}.so"


def _loaded_library() -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, _library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
