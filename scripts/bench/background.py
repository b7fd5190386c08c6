"""The saves in the background of each library, in the way that its documentation advises."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ft_ckpt import CheckpointSaver
from scripts.bench.common import ACCELERATOR, is_installed, sync_tree


@dataclass(frozen=True, eq=False)
class Training:
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint contains."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Background:
    """One library, with one save at a time.

    `waited_seconds`: time that optimizer steps have waited for it.
    """

    module = ""
    needs_gpu = False
    syncs = True  # waits for the disk by itself

    def __init__(self, training: Training) -> None:
        self.training = training
        self.waited_seconds = 0.0
        self._pool = ThreadPoolExecutor(1)
        self._syncing: Future[None] | None = None

    def save(self, folder: Path) -> None:
        """Begin a save to `folder`, which is not there yet."""
        raise NotImplementedError

    def is_done(self) -> bool:
        """Check whether the last save is complete."""
        raise NotImplementedError

    def is_durable(self, folder: Path) -> bool:
        """Check whether the last save, to `folder`, is on the disk; called until it is."""
        if not self.is_done() or self.syncs:
            return self.is_done()
        if self._syncing is None:
            self._syncing = self._pool.submit(sync_tree, folder)
        is_synced = self._syncing.done()
        self._syncing = None if is_synced else self._syncing
        return is_synced

    def finish(self) -> None:
        """Wait for the last save."""
        raise NotImplementedError

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Make an optimizer step in the block."""
        yield

    def close(self) -> None:
        """Release its resources."""


class Ours(Background):
    """`CheckpointSaver`, whose hook of the optimizer waits."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._saver = CheckpointSaver(background=True)
        self._saver.register(model=training.model, optimizer=training.optimizer)
        self._begun = 0.0
        self._handle: Any = None

    def save(self, folder: Path) -> None:
        self._pending: Any = self._saver.save_state(path=folder)

    def is_done(self) -> bool:
        return bool(self._pending.done)

    def finish(self) -> None:
        self._saver.wait()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        # global hooks run before those of one optimizer
        first = register_optimizer_step_pre_hook(self._before)
        last = self.training.optimizer.register_step_pre_hook(self._after)
        try:
            yield
        finally:
            first.remove()
            last.remove()

    def _before(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def _after(self, *_: Any) -> None:
        self.waited_seconds += time.perf_counter() - self._begun

    def close(self) -> None:
        self._saver.close()


class TorchDcp(Background):
    """`async_save`, which returns when it has a copy."""

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        self._future: Future[Any] = dcp.async_save(
            self.training.state(), checkpoint_id=str(folder), no_dist=True
        )

    def is_done(self) -> bool:
        return self._future.done()

    def finish(self) -> None:
        self._future.result()


class TorchDcpStaged(TorchDcp):
    """`async_save` with a stager, which copies into pinned memory during forward and backward."""

    needs_gpu = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        from torch.distributed.checkpoint.staging import DefaultStager

        self._stager = DefaultStager()

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        state, stager = self.training.state(), self._stager
        response: Any = dcp.async_save(
            state, checkpoint_id=str(folder), async_stager=stager, no_dist=True
        )
        self._future, self._staged = response.upload_completion, response.staging_completion

    @contextmanager
    def stepping(self) -> Iterator[None]:
        begun = time.perf_counter()
        if hasattr(self, "_staged"):
            self._staged.result()
        self.waited_seconds += time.perf_counter() - begun
        yield

    def close(self) -> None:
        self._stager.close()


class TorchSnapshot(Background):
    """`async_take`, which returns when it has a copy."""

    module = "torchsnapshot"
    syncs = False

    def save(self, folder: Path) -> None:
        from torchsnapshot import Snapshot

        app_state = {"model": self.training.model, "optimizer": self.training.optimizer}
        self._pending = Snapshot.async_take(str(folder), app_state)

    def is_done(self) -> bool:
        return bool(self._pending.done())

    def finish(self) -> None:
        self._pending.wait()


class TorchCheckpointing(Background):
    """`CheckpointManager`: the optimizer takes its lock, and another process writes."""

    module = "torch_checkpointing"
    syncs = False

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        is_pinned = ACCELERATOR is not None
        staging = CheckpointStagerConfig(
            use_pinned_memory=is_pinned, use_non_blocking_copy=is_pinned
        )
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),  # see `savers`
            )
        )

    def save(self, folder: Path) -> None:
        self._future: Any = self._manager.save(str(folder), self.training.state())

    def is_done(self) -> bool:
        return bool(self._future.done())

    def finish(self) -> None:
        self._future.result()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        begun = time.perf_counter()
        with self._manager.lock():
            self.waited_seconds += time.perf_counter() - begun
            yield

    def close(self) -> None:
        self._manager.close()
        self._manager._saver.close()  # its process would stay


BACKGROUNDS: dict[str, type[Background]] = {
    "ours": Ours,
    "torch DCP async": TorchDcp,
    "torch DCP async, staged": TorchDcpStaged,
    "torchsnapshot async": TorchSnapshot,
    "torch_checkpointing": TorchCheckpointing,
}


def installed_backgrounds() -> dict[str, type[Background]]:
    """Return the ways whose library is installed, and whose GPU is there if they need one."""
    installed = {}
    for name, background in BACKGROUNDS.items():
        has_device = ACCELERATOR is not None or not background.needs_gpu
        if has_device and is_installed(background.module):
            installed[name] = background
    return installed
