"""Finds the weight files in a folder that readers prefer, and opens several of them as one."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ft_ckpt.checkpoint.manifest import DIFFUSERS_LORA_FILE, DIFFUSERS_MODEL_FILE
from ft_ckpt.errors import CorruptError, UnreadableError, listing, shown
from ft_ckpt.formats import open_tensor_file, tensor_formats
from ft_ckpt.formats.files import JoinedFile
from ft_ckpt.model.tensors import ADAPTER_FILE
from ft_ckpt.storage import Store, is_inside, read_text

STEMS = {
    "model": ("model", "pytorch_model", DIFFUSERS_MODEL_FILE),
    "adapter": (ADAPTER_FILE, DIFFUSERS_LORA_FILE),
}


def weight_files(store: Store, kind: str) -> tuple[list[str], str | None]:
    """Find the weight files in `store` that readers prefer.

    Returns their names, and the name of their index if they are shards.
    """
    present = {file.name for file in store.list_folder().objects}
    for name in _weight_file_names(kind):
        if name in present:
            return [name], None
        index = f"{name}.index.json"
        if index in present:
            return sorted(set(_read_weight_map(store, index).values())), index
    if kind == "adapter":
        return [], None
    names = [name for name in present if name.endswith(".safetensors")]
    return sorted(name for name in names if not name.startswith(STEMS["adapter"])), None


def _weight_file_names(kind: str) -> Iterator[str]:
    """Yield the names that a weight file can have. Names that readers prefer come first."""
    for tensor_format in tensor_formats():
        if kind == "adapter":
            stems = STEMS["adapter"]
        else:
            stems = (*STEMS["model"], *tensor_format.model_stems)
        for suffix in tensor_format.suffixes[:1]:
            for stem in dict.fromkeys(stems):
                yield f"{stem}{suffix}"


def library_stem(names: Iterable[str]) -> str:
    """Return the stem of diffusers' weight files if one of the files `names` has it, else "".

    diffusers has the same stem for files of all formats.
    """
    file_names = [PurePosixPath(name).name for name in names]
    for stem in (DIFFUSERS_MODEL_FILE, DIFFUSERS_LORA_FILE):
        if any(name.startswith(stem) for name in file_names):
            return stem
    return ""


def join_weight_files(store: Store, names: Iterable[str]) -> JoinedFile:
    """Open weight files in `store` as one. Raises CorruptError naming those that are missing."""
    names = list(names)
    missing = [name for name in names if not is_inside(name) or store.stat(name) is None]
    if missing:
        raise CorruptError(
            f"{store.url}: {listing(missing, ', ')}: missing; the folder is incomplete, use "
            "another copy"
        )
    return JoinedFile([("", open_tensor_file(store.open(name))) for name in names], store.url)


def _read_weight_map(store: Store, index: str) -> Mapping[str, str]:
    """Read an index, which has the file of each tensor, by name."""
    try:
        weight_map: Any = json.loads(read_text(store, index))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except UnreadableError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"{index}: not an index of shards ({shown(error)}); use another copy"
        ) from error


def check_shard_index(store: Store, index: str, names: Sequence[str]) -> None:
    """Raise CorruptError when the shards `names` lack tensors that are in their index."""
    file = join_weight_files(store, names)
    lost = []
    for name in _read_weight_map(store, index):
        if name not in file.specs and name not in file.ties:
            lost.append(name)
    file.close()
    if lost:
        raise CorruptError(
            f"{index}: {listing(lost, ', ')}: in no shard; the folder is "
            "incomplete, use another copy"
        )
