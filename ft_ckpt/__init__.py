"""ft_ckpt: the checkpoint manager for Hugging Face and PEFT fine-tuning.

The names in `__all__` are the public interface. They load on first use, so `import ft_ckpt` is fast
and does not import torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ft_ckpt._version import __version__ as __version__

if sys.platform == "win32":
    raise ImportError(
        "ft_ckpt: Windows lacks the calls that its commits rest on (fcntl, syncing a folder); run "
        "it in WSL 2, on the disk of WSL, see docs/platforms.md"
    )

if TYPE_CHECKING:
    from ft_ckpt import errors
    from ft_ckpt.checkpoint import CheckpointInfo, best, latest, verify
    from ft_ckpt.closure import checkpoint_closure
    from ft_ckpt.config import SaverConfig
    from ft_ckpt.extensions.rl import (
        Frontier,
        PendingPublish,
        PublishReport,
        ServerOptions,
        Writer,
        check_for,
        export,
        publish,
    )
    from ft_ckpt.extensions.tools import average, convert, load, merge, save
    from ft_ckpt.extensions.transfer import (
        CopyReport,
        PendingPush,
        PullReport,
        PushReport,
        SyncReport,
        copy,
        pull,
        push,
        sign,
        sync,
    )
    from ft_ckpt.model import LoadReport, load_model
    from ft_ckpt.retention import Keep
    from ft_ckpt.runs import RestoreReport, follow
    from ft_ckpt.saver import CheckpointSaver, Progress, SaveReport
    from ft_ckpt.saving import PendingSave
    from ft_ckpt.schedule import Every
    from ft_ckpt.storage import Place, open_place

__all__ = [
    "CheckpointInfo",
    "CheckpointSaver",
    "CopyReport",
    "Every",
    "Frontier",
    "Keep",
    "LoadReport",
    "PendingPublish",
    "PendingPush",
    "PendingSave",
    "Place",
    "Progress",
    "PublishReport",
    "PullReport",
    "PushReport",
    "RestoreReport",
    "SaveReport",
    "SaverConfig",
    "ServerOptions",
    "SyncReport",
    "Writer",
    "average",
    "best",
    "check_for",
    "checkpoint_closure",
    "convert",
    "copy",
    "errors",
    "export",
    "follow",
    "latest",
    "load",
    "load_model",
    "merge",
    "open_place",
    "publish",
    "pull",
    "push",
    "save",
    "sign",
    "sync",
    "verify",
]

_HOME = {
    "CheckpointInfo": "ft_ckpt.checkpoint",
    "CheckpointSaver": "ft_ckpt.saver",
    "CopyReport": "ft_ckpt.extensions.transfer",
    "Every": "ft_ckpt.schedule",
    "Frontier": "ft_ckpt.extensions.rl",
    "Keep": "ft_ckpt.retention",
    "LoadReport": "ft_ckpt.model",
    "PendingPublish": "ft_ckpt.extensions.rl",
    "PendingPush": "ft_ckpt.extensions.transfer",
    "PendingSave": "ft_ckpt.saving",
    "Place": "ft_ckpt.storage",
    "Progress": "ft_ckpt.saver",
    "PublishReport": "ft_ckpt.extensions.rl",
    "PullReport": "ft_ckpt.extensions.transfer",
    "PushReport": "ft_ckpt.extensions.transfer",
    "RestoreReport": "ft_ckpt.runs",
    "SaveReport": "ft_ckpt.saver",
    "SaverConfig": "ft_ckpt.config",
    "ServerOptions": "ft_ckpt.extensions.rl",
    "SyncReport": "ft_ckpt.extensions.transfer",
    "Writer": "ft_ckpt.extensions.rl",
    "average": "ft_ckpt.extensions.tools",
    "best": "ft_ckpt.checkpoint",
    "check_for": "ft_ckpt.extensions.rl",
    "checkpoint_closure": "ft_ckpt.closure",
    "convert": "ft_ckpt.extensions.tools",
    "copy": "ft_ckpt.extensions.transfer",
    "export": "ft_ckpt.extensions.rl",
    "follow": "ft_ckpt.runs",
    "latest": "ft_ckpt.checkpoint",
    "load": "ft_ckpt.extensions.tools",
    "load_model": "ft_ckpt.model",
    "merge": "ft_ckpt.extensions.tools",
    "open_place": "ft_ckpt.storage",
    "publish": "ft_ckpt.extensions.rl",
    "pull": "ft_ckpt.extensions.transfer",
    "push": "ft_ckpt.extensions.transfer",
    "save": "ft_ckpt.extensions.tools",
    "sign": "ft_ckpt.extensions.transfer",
    "sync": "ft_ckpt.extensions.transfer",
    "verify": "ft_ckpt.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("ft_ckpt.errors")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(
        f"module 'ft_ckpt' has no attribute {name!r}; public names: {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    return sorted(__all__)
