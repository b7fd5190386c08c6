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
    from ft_ckpt.checkpoint.catalog import CheckpointInfo, best, latest, verify
    from ft_ckpt.checkpoint.follow import follow
    from ft_ckpt.checkpoint.sign import sign
    from ft_ckpt.closure import checkpoint_closure
    from ft_ckpt.config import SaverConfig
    from ft_ckpt.engines.export import export
    from ft_ckpt.engines.follow import PendingPublish
    from ft_ckpt.engines.options import ServerOptions
    from ft_ckpt.engines.preflight import check_for
    from ft_ckpt.engines.publish import PublishReport, publish
    from ft_ckpt.model.average import average
    from ft_ckpt.model.convert import convert
    from ft_ckpt.model.load import load_model
    from ft_ckpt.model.load_weights import LoadReport
    from ft_ckpt.model.objects import load, save
    from ft_ckpt.retention import Keep
    from ft_ckpt.saver import CheckpointSaver, Progress, SaveReport
    from ft_ckpt.saving.background import PendingSave
    from ft_ckpt.saving.merge_files import merge
    from ft_ckpt.schedule import Every
    from ft_ckpt.storage.place import Place, open_place
    from ft_ckpt.training.frontier import Frontier
    from ft_ckpt.training.restore import RestoreReport
    from ft_ckpt.transfer.copies import CopyReport, copy
    from ft_ckpt.transfer.outgoing import PullReport, PushReport
    from ft_ckpt.transfer.push import PendingPush, pull, push
    from ft_ckpt.transfer.sync import SyncReport, sync
    from ft_ckpt.writer import Writer

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
    "CheckpointInfo": "ft_ckpt.checkpoint.catalog",
    "CheckpointSaver": "ft_ckpt.saver",
    "CopyReport": "ft_ckpt.transfer.copies",
    "Every": "ft_ckpt.schedule",
    "Frontier": "ft_ckpt.training.frontier",
    "Keep": "ft_ckpt.retention",
    "LoadReport": "ft_ckpt.model.load_weights",
    "PendingPublish": "ft_ckpt.engines.follow",
    "PendingPush": "ft_ckpt.transfer.push",
    "PendingSave": "ft_ckpt.saving.background",
    "Place": "ft_ckpt.storage.place",
    "Progress": "ft_ckpt.saver",
    "PublishReport": "ft_ckpt.engines.publish",
    "PullReport": "ft_ckpt.transfer.outgoing",
    "PushReport": "ft_ckpt.transfer.outgoing",
    "RestoreReport": "ft_ckpt.training.restore",
    "SaveReport": "ft_ckpt.saver",
    "SaverConfig": "ft_ckpt.config",
    "ServerOptions": "ft_ckpt.engines.options",
    "SyncReport": "ft_ckpt.transfer.sync",
    "Writer": "ft_ckpt.writer",
    "average": "ft_ckpt.model.average",
    "best": "ft_ckpt.checkpoint.catalog",
    "check_for": "ft_ckpt.engines.preflight",
    "checkpoint_closure": "ft_ckpt.closure",
    "convert": "ft_ckpt.model.convert",
    "copy": "ft_ckpt.transfer.copies",
    "export": "ft_ckpt.engines.export",
    "follow": "ft_ckpt.checkpoint.follow",
    "latest": "ft_ckpt.checkpoint.catalog",
    "load": "ft_ckpt.model.objects",
    "load_model": "ft_ckpt.model.load",
    "merge": "ft_ckpt.saving.merge_files",
    "open_place": "ft_ckpt.storage.place",
    "publish": "ft_ckpt.engines.publish",
    "pull": "ft_ckpt.transfer.push",
    "push": "ft_ckpt.transfer.push",
    "save": "ft_ckpt.model.objects",
    "sign": "ft_ckpt.checkpoint.sign",
    "sync": "ft_ckpt.transfer.sync",
    "verify": "ft_ckpt.checkpoint.catalog",
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
