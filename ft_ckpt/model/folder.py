"""Opens folders of weights as one file of tensors: Hugging Face folders, sharded or not, and
checkpoints of ours.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ft_ckpt.checkpoint import (
    DIFFUSERS_LORA_FILE,
    DIFFUSERS_MODEL_FILE,
    MANIFEST_NAME,
    UNREADABLE,
    Manifest,
    PartRecord,
    describe_contents,
    load_manifest,
    why_no_checkpoint,
)
from ft_ckpt.errors import CorruptError, LoadError, UnreadableError, damaged_input, listing, shown
from ft_ckpt.formats import (
    JoinedFile,
    TensorFile,
    format_named,
    open_tensor_file,
    tensor_formats,
)
from ft_ckpt.model.libraries import ADAPTER_FILE
from ft_ckpt.storage import (
    Place,
    Store,
    Stored,
    is_inside,
    leads_out,
    read_text,
)

_STEMS = {
    "model": ("model", "pytorch_model", DIFFUSERS_MODEL_FILE),
    "adapter": (ADAPTER_FILE, DIFFUSERS_LORA_FILE),
}
# Files that hold weights or training state in some format; all other files of a folder are sidecar
# files.
_BULK = re.compile(
    r"\.(safetensors|bin|h5|hdf5|mdl|pt|pth|ckpt|msgpack|onnx|onnx_data|gguf|keras|distcp|npz|npy|index)$"
)


@dataclass(frozen=True, eq=False)
class FolderPart:
    """One loadable part of a folder: path, kind, and its weights as one file."""

    path: str  # relative to the folder, "" for the folder itself
    kind: str  # "model" | "adapter" | "module"
    file: TensorFile
    record: PartRecord | None = None  # if the folder is a checkpoint of ours
    stem: str = ""  # of its weight files, if their library has one name for all formats

    @property
    def prefix(self) -> str:
        """The prefix that makes the names of its tensors unique among the parts."""
        return f"{self.path.replace('/', '.')}." if self.path else ""


def differing_class(one: FolderPart, other: FolderPart) -> list[tuple[str, str, str]]:
    """("class", name in `one`, name in `other`) for plain modules of two classes: they have no
    settings file.
    """
    if one.kind != "module" or one.record is None or other.record is None:
        return []
    before, after = one.record.class_name, other.record.class_name
    return [("class", before, after)] if before != after else []


class WeightsFolder(JoinedFile):
    """A folder with config and weights, as one file of all its `parts`."""

    def __init__(
        self, place: Place, parts: Sequence[FolderPart], manifest: Manifest | None = None
    ) -> None:
        super().__init__([(part.prefix, part.file) for part in parts], place.basename)
        self.place, self.store, self.parts, self.manifest = (
            place,
            place.folder,
            tuple(parts),
            manifest,
        )

    def companions(self) -> tuple[list[Stored], list[str]]:
        """Sidecar files that are valid for weights of any format, and names of other files, which
        are left out.
        """
        parts = self.manifest.parts if self.manifest is not None else ()
        state_folders = tuple(f"{part.path}/" for part in parts if part.kind == "state")
        kept: list[Stored] = []
        left: list[str] = []
        weights = set()
        for part in self.parts:
            names, index = weight_files(Place(self.store, part.path).folder, part.kind)
            weights |= {
                f"{part.path}/{name}".lstrip("/") for name in (*names, *([index] if index else []))
            }
        stored = self.store.list()
        # a dual file has two names
        versions = {each.version for each in stored if each.name in weights}
        for each in stored:
            name = each.name
            hidden = any(step.startswith(".") for step in name.split("/"))
            if hidden or name == MANIFEST_NAME or each.version in versions:
                continue
            if leads_out(self.store, name):
                left.append(f"{name!a} (a link out of the folder)")
                continue
            if self.manifest is not None and all(
                record.path != name for record in self.manifest.files
            ):
                continue
            if _BULK.search(name) or name.endswith(".index.json") or name.startswith(state_folders):
                left.append(name)
            else:
                kept.append(each)
        return kept, left


def open_folder(place: Place) -> TensorFile:
    """The tensors in a folder (or under the prefix of a TensorFlow checkpoint), in any format.

    Raises LoadError when there are no weights; CorruptError when files are missing or inconsistent.
    """
    with damaged_input(place):
        return _open_any_folder(place)


def _open_any_folder(place: Place) -> TensorFile:
    store = place.folder
    exists = store.list_folder().exists
    if exists and store.stat(MANIFEST_NAME) is not None:
        return _open_own_checkpoint(place)
    parts = list(_huggingface_parts(store)) if exists else []
    if parts:
        return WeightsFolder(place, parts)
    opened = _open_foreign_folder(place)
    if opened is not None:
        return opened
    if not exists:
        raise LoadError(why_no_checkpoint(place))
    contents = describe_contents(place)
    if contents.kind in UNREADABLE:
        raise LoadError(contents.sentence(place))
    endings = [entry.suffixes[0] for entry in tensor_formats() if entry.suffixes]
    expected = ", ".join(f"*{ending}" for ending in dict.fromkeys(endings))
    raise LoadError(
        f"{place}: no weights found; expected {expected}, a {MANIFEST_NAME}, or a folder of "
        "torch.distributed.checkpoint, TensorFlow or orbax"
    )


def _open_foreign_folder(place: Place) -> TensorFile | None:
    """The tensors in a folder of another program; None if no format recognises it."""
    # the more specific of two matching formats is registered later
    for tensor_format in reversed(tensor_formats()):
        opened = tensor_format.open_folder(place)
        if opened is not None:
            return opened
    return None


def _open_own_checkpoint(place: Place) -> TensorFile:
    manifest = load_manifest(place.folder)
    refuse_delta(manifest, place)
    for name in sorted({part.format for part in manifest.parts}):
        opened = format_named(name).open_folder(place)
        if opened is not None:
            return opened
    parts = []
    for record in (record for record in manifest.parts if record.kind != "state"):
        names = sorted({tensor.file for tensor in record.tensors})
        file = join_weight_files(place.folder, names)
        ties = dict(file.ties)
        for name, *aliases in record.ties:
            if name in file.specs:
                ties.update(dict.fromkeys(aliases, name))
        file.ties = ties
        parts.append(FolderPart(record.path, record.kind, file, record, _library_stem(names)))
    return WeightsFolder(place, parts, manifest)


def refuse_delta(manifest: Manifest, place: Place) -> None:
    """Raise LoadError if this is the manifest of a delta, which has only some elements of the
    weights.
    """
    if manifest.delta:
        base = manifest.delta.get("base")
        raise LoadError(
            f"{place}: a delta on {base}, expected all weights; `ft-ckpt pull` makes the "
            "checkpoint of it"
        )


def _huggingface_parts(store: Store) -> Iterator[FolderPart]:
    for kind in _STEMS:
        names, index = weight_files(store, kind)
        if names:
            if index is not None:
                _check_shard_index(store, index, names)
            yield FolderPart("", kind, join_weight_files(store, names), stem=_library_stem(names))


def _library_stem(names: Sequence[str]) -> str:
    """The stem that diffusers gives to weight files of every format, if the files `names` have it;
    else "".
    """
    for stem in (DIFFUSERS_MODEL_FILE, DIFFUSERS_LORA_FILE):
        if any(PurePosixPath(name).name.startswith(stem) for name in names):
            return stem
    return ""


def join_weight_files(store: Store, names: Iterable[str]) -> JoinedFile:
    """Weight files in `store` as one. Raises CorruptError naming those that are missing."""
    names = list(names)
    missing = [name for name in names if not is_inside(name) or store.stat(name) is None]
    if missing:
        raise CorruptError(
            f"{store.url}: {listing(missing, ', ')}: missing; the folder is incomplete, use "
            "another copy"
        )
    return JoinedFile([("", open_tensor_file(store.open(name))) for name in names], store.url)


def _weight_file_names(kind: str) -> Iterator[str]:
    """The names that a weight file may have, in the order of preference of readers."""
    for tensor_format in tensor_formats():
        if kind == "adapter":
            stems = _STEMS["adapter"]
        else:
            stems = (*_STEMS["model"], *tensor_format.model_stems)
        for suffix in tensor_format.suffixes[:1]:
            yield from (f"{stem}{suffix}" for stem in dict.fromkeys(stems))


def weight_files(store: Store, kind: str) -> tuple[list[str], str | None]:
    """The weight files in `store` that readers prefer, and their index if there are shards."""
    there = {each.name for each in store.list_folder().objects}
    for name in _weight_file_names(kind):
        if name in there:
            return [name], None
        if f"{name}.index.json" in there:
            return sorted(
                set(_read_weight_map(store, f"{name}.index.json").values())
            ), f"{name}.index.json"
    if kind == "adapter":
        return [], None
    return sorted(
        n for n in there if n.endswith(".safetensors") and not n.startswith(_STEMS["adapter"])
    ), None


def _read_weight_map(store: Store, index: str) -> Mapping[str, str]:
    try:
        found: Any = json.loads(read_text(store, index))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except UnreadableError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"{index}: not an index of shards ({shown(error)}); use another copy"
        ) from error


def _check_shard_index(store: Store, index: str, names: Sequence[str]) -> None:
    """Raise CorruptError when shards lack tensors that are in the index."""
    there = join_weight_files(store, names)
    lost = [
        name
        for name in _read_weight_map(store, index)
        if name not in there.specs and name not in there.ties
    ]
    there.close()
    if lost:
        raise CorruptError(
            f"{index}: {listing(lost, ', ')}: in no shard; the folder is "
            "incomplete, use another copy"
        )
