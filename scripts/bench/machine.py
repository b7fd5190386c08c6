"""The machine, and the versions of the libraries that are measured on it."""

import os
import platform
import tempfile
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import ft_ckpt
from scripts.bench.background import BACKGROUNDS
from scripts.bench.common import ACCELERATOR, is_installed
from scripts.bench.loaders import LOADERS
from scripts.bench.savers import SAVERS

_LIBRARIES = (
    "torch transformers accelerate peft safetensors h5py torchsnapshot torch_checkpointing "
    "tensorizer tensorstore orbax-checkpoint runai-model-streamer fastsafetensors"
)


def facts(folder: Path | None) -> dict[str, Any]:
    """Describe the machine and the libraries on it.

    The file system is that of `folder`, or of temporary files.
    """
    versions = {"ft_ckpt": ft_ckpt.__version__}
    for library in _LIBRARIES.split():
        library_version = _version(library)
        if library_version is not None:
            versions[library] = library_version
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": _accelerator_name(),
        "kernel": platform.release(),
        "file_system": _file_system(Path(folder or tempfile.gettempdir())),
        "python": platform.python_version(),
        "versions": versions,
    }


def missing() -> list[str]:
    """Name the peers that are not installed."""
    peers = [*SAVERS.values(), *LOADERS.values(), *BACKGROUNDS.values()]
    return sorted({peer.module for peer in peers if not is_installed(peer.module)})


def _accelerator_name() -> str | None:
    if ACCELERATOR is None:
        return None
    get_name = getattr(torch.get_device_module(ACCELERATOR), "get_device_name", None)
    return ACCELERATOR.type if get_name is None else str(get_name())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _file_system(folder: Path) -> str:
    """Return the type of the mount with the longest path above `folder`."""
    mounts = []
    for line in Path("/proc/mounts").read_text().splitlines():
        place, kind = line.split()[1:3]
        if folder.resolve().is_relative_to(place):
            mounts.append((len(place), kind))
    return max(mounts)[1] if mounts else "unknown"
