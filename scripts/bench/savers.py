"""The saves of each library, of a model or of its state dict, to a folder."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import torch
from safetensors.torch import save_file

from ft_ckpt import CheckpointSaver
from scripts.bench.common import is_installed
from scripts.bench.models import Subject


@dataclass(frozen=True)
class Saver:
    """One way to save.

    `save` gets a folder; `module` must be installed; `syncs`: it waits for the disk itself.
    """

    name: str
    save: Callable[[Subject, Path], Any]
    module: str = ""
    syncs: bool = False
    makes_folder: bool = False  # and refuses an existing one

    def __call__(self, subject: Subject, folder: Path) -> None:
        """Save to `folder`, which is not there yet."""
        if not self.makes_folder:
            folder.mkdir(parents=True)
        self.save(subject, folder)


def _ours(format_name: str) -> Callable[[Subject, Path], Any]:
    return lambda subject, folder: _saver(format_name).save(subject.model, folder)


def _run(subject: Subject, folder: Path) -> None:
    with CheckpointSaver() as saver:
        saver.save_state(subject.model, folder)


@lru_cache  # a saver keeps what it finds out about the disk
def _saver(format_name: str) -> CheckpointSaver:
    return CheckpointSaver(format=format_name)


def _accelerate(subject: Subject, folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.prepare(subject.model)
    accelerator.save_state(str(folder))


def _dcp(subject: Subject, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(subject.state), checkpoint_id=str(folder), no_dist=True)


def _torchsnapshot(subject: Subject, folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot.take(str(folder), {"model": StateDict(**subject.state)})


def _torch_checkpointing(subject: Subject, folder: Path) -> None:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # O_DIRECT fails at the odd end of a file on ext4
    buffered = LocalFileSystemStorageConfig(use_direct_io=False)
    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=buffered)
    CheckpointManager(config).save(str(folder), {"model": dict(subject.state)})


def _h5py(subject: Subject, folder: Path) -> None:
    with h5py.File(folder / "model.h5", "w") as file:
        # bf16 as its bits, because numpy has no such type
        for name, tensor in subject.state.items():
            file.create_dataset(name, data=tensor.cpu().view(torch.int16).numpy())


def _tensorizer(subject: Subject, folder: Path) -> None:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(folder / "model.tensors"))
    serializer.write_state_dict(dict(subject.state))
    serializer.close()


def _tensorstore(subject: Subject, folder: Path) -> None:
    import tensorstore

    def begin(name: str, tensor: torch.Tensor) -> Any:
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder / name}/"}}
        shape = list(tensor.shape)
        plain = {"compressor": None, "shape": shape, "chunks": shape, "dtype": "<i2"}
        store = tensorstore.open({**spec, "metadata": plain, "create": True}).result()
        return store.write(tensor.cpu().view(torch.int16).numpy())

    for future in [begin(name, tensor) for name, tensor in subject.state.items()]:
        future.result()


def _orbax(subject: Subject, folder: Path) -> None:
    import orbax.checkpoint

    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        bits = {}
        for name, tensor in subject.state.items():
            bits[name] = tensor.cpu().view(torch.int16).numpy()
        checkpointer.save(folder, bits)


def _fastsafetensors(subject: Subject, folder: Path) -> None:
    from fastsafetensors import ParallelSaver

    ParallelSaver().save(subject.state, str(folder / "model"))


SAVERS = {
    saver.name: saver
    for saver in (
        Saver("ours", _ours("safetensors"), syncs=True, makes_folder=True),
        Saver("ours, h5", _ours("h5"), syncs=True, makes_folder=True),
        Saver("ours, dual", _ours("dual"), syncs=True, makes_folder=True),
        Saver(
            "safetensors",
            lambda subject, to: save_file(dict(subject.state), to / "model.safetensors"),
        ),
        Saver("torch.save", lambda subject, to: torch.save(dict(subject.state), to / "model.pt")),
        Saver("save_pretrained", lambda subject, to: subject.model.save_pretrained(to)),
        Saver("accelerate", _accelerate),
        Saver("torch DCP", _dcp, syncs=True),
        Saver("h5py", _h5py),
        Saver("torchsnapshot", _torchsnapshot, "torchsnapshot", makes_folder=True),
        Saver(
            "torch_checkpointing", _torch_checkpointing, "torch_checkpointing", makes_folder=True
        ),
        Saver("tensorizer", _tensorizer, "tensorizer"),
        Saver("tensorstore", _tensorstore, "tensorstore", syncs=True),
        Saver("orbax", _orbax, "orbax.checkpoint", syncs=True, makes_folder=True),
        Saver("fastsafetensors", _fastsafetensors, "fastsafetensors"),
    )
}


# not in SAVERS: no other library saves a run
RUN = Saver("ours, a run", _run, syncs=True, makes_folder=True)


def installed_savers() -> dict[str, Saver]:
    """Return the savers whose library is installed, by name."""
    return {name: saver for name, saver in SAVERS.items() if is_installed(saver.module)}
