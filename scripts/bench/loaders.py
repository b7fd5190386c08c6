"""The loads of each library, of its own files or of those of another, and of one tensor."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import h5py
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import ft_ckpt
from scripts.bench.common import ACCELERATOR, DEVICE
from scripts.bench.models import Subject
from scripts.bench.savers import RUN

Tensors = Mapping[str, Tensor] | torch.nn.Module


@dataclass(frozen=True)
class Loader:
    """One way to load. `load` gets the folder with the files of the saver `saved_by`."""

    name: str
    saved_by: str
    load: Callable[[Path, Subject], Any]
    module: str = ""


def _file(suffix: str, read: Callable[[Path], Any]) -> Callable[[Path, Subject], Any]:
    return lambda folder, subject: read(folder / f"model.{suffix}")


def _load(path: Path) -> Any:
    # on the host tensors stay mapped, as elsewhere
    return ft_ckpt.load(path, map_location=ACCELERATOR)


def _dcp(folder: Path, subject: Subject) -> Tensors:
    import torch.distributed.checkpoint as dcp

    state = {name: torch.empty_like(tensor) for name, tensor in subject.state.items()}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def _prefetch(path: Path) -> Tensors:
    with safe_open(path, "pt", device=str(DEVICE)) as file, file.prefetch() as tensors:
        return dict(tensors)


def _runai(path: Path) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        # its buffer is its own
        return {name: tensor.to(DEVICE, copy=True) for name, tensor in streamer.get_tensors()}


def _fastsafetensors(path: Path) -> Tensors:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), DEVICE, nogds=True)
    loader.add_filenames({0: [str(path)]})
    # else they stay in memory
    with closing(loader), closing(loader.copy_files_to_device()) as buffers:
        return {name: buffers.get_tensor(name).clone() for name in buffers.key_to_rank_lidx}


def _tensorizer(path: Path) -> Tensors:
    from tensorizer import TensorDeserializer

    with TensorDeserializer(str(path), device=DEVICE) as tensors:
        return dict(tensors)


def _tensorizer_first(path: Path, name: str) -> Tensor:
    from tensorizer import TensorDeserializer

    with TensorDeserializer(str(path), device="cpu", lazy_load=True) as tensors:
        tensor: Tensor = tensors[name]
        return tensor


def _h5py(path: Path) -> Tensors:
    with h5py.File(path) as file:
        return {name: torch.from_numpy(file[name][()]).to(DEVICE) for name in file}


def _resume(folder: Path, subject: Subject, verify: bool = False) -> Tensors:
    # other libraries compare no digests
    with ft_ckpt.CheckpointSaver(verify_resume=verify) as saver:
        saver.resume(folder, model=subject.model)
    return subject.model


def _pretrained(folder: Path, subject: Subject) -> Tensors:
    model: Tensors = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", device_map=None
    ).to(DEVICE)
    return model


def _later_safetensors() -> Iterator[Loader]:
    """Yield the ways that safetensors has from 0.8 and from 0.9 on.

    The latter loads onto CUDA devices alone.
    """
    if "backend" in signature(load_file).parameters:
        read = partial(load_file, device=str(DEVICE), backend="pread")
        yield Loader("safetensors, pread", "safetensors", _file("safetensors", read))
    if hasattr(safe_open, "prefetch") and DEVICE.type == "cuda":
        yield Loader("safetensors, prefetch", "safetensors", _file("safetensors", _prefetch))


LOADERS = {
    loader.name: loader
    for loader in (
        Loader("ours", "ours", lambda folder, _: ft_ckpt.load_model(folder, device=DEVICE)),
        Loader(
            "ours, mapped",
            "ours",
            lambda folder, _: ft_ckpt.load_model(folder, device=DEVICE, mapped=True),
        ),
        Loader("ours, resume", RUN.name, _resume),
        Loader("ours, resume with digests", RUN.name, partial(_resume, verify=True)),
        Loader("ours, load", "ours", _file("safetensors", _load)),
        Loader("ours, load of h5", "ours, h5", _file("h5", _load)),
        Loader(
            "safetensors",
            "safetensors",
            _file("safetensors", lambda path: load_file(path, device=str(DEVICE))),
        ),
        *_later_safetensors(),
        Loader(
            "torch.load",
            "torch.save",
            _file("pt", lambda path: torch.load(path, map_location=DEVICE)),
        ),
        Loader(
            "torch.load, mmap",
            "torch.save",
            _file("pt", lambda path: torch.load(path, DEVICE, mmap=True)),
        ),
        Loader("from_pretrained", "save_pretrained", _pretrained),
        Loader("torch DCP", "torch DCP", _dcp),
        Loader("h5py", "h5py", _file("h5", _h5py)),
        Loader(
            "runai-model-streamer",
            "safetensors",
            _file("safetensors", _runai),
            "runai_model_streamer",
        ),
        Loader(
            "fastsafetensors",
            "safetensors",
            _file("safetensors", _fastsafetensors),
            "fastsafetensors",
        ),
        Loader("tensorizer", "tensorizer", _file("tensors", _tensorizer), "tensorizer"),
    )
}


@dataclass(frozen=True)
class FirstLoader:
    """One way to open `file`, written by the saver `saved_by`, and to return one tensor."""

    saved_by: str
    file: str
    load: Callable[[Path, str], Tensor]
    module: str = ""


FIRST = {
    "ours": FirstLoader("ours", "model.safetensors", lambda path, name: ft_ckpt.load(path)[name]),
    "ours, h5": FirstLoader("ours, h5", "model.h5", lambda path, name: ft_ckpt.load(path)[name]),
    "safetensors safe_open": FirstLoader(
        "safetensors", "model.safetensors", lambda path, name: _from_safetensors(path, name)
    ),
    "safetensors load_file": FirstLoader(
        "safetensors", "model.safetensors", lambda path, name: load_file(path)[name]
    ),
    "torch.load": FirstLoader("torch.save", "model.pt", lambda path, name: torch.load(path)[name]),
    "torch.load, mmap": FirstLoader(
        "torch.save", "model.pt", lambda path, name: torch.load(path, mmap=True)[name]
    ),
    "h5py": FirstLoader("h5py", "model.h5", lambda path, name: _from_h5(path, name)),
    "tensorizer, lazy": FirstLoader("tensorizer", "model.tensors", _tensorizer_first, "tensorizer"),
}


def _from_safetensors(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _from_h5(path: Path, name: str) -> Tensor:
    with h5py.File(path) as file:
        return torch.from_numpy(file[name][()])
