"""Opens folders of weights as one file of tensors.

These are Hugging Face folders, sharded or not, checkpoints of ft_ckpt, and folders of other
formats.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    UNREADABLE,
    Manifest,
    PartRecord,
    describe_contents,
    load_manifest,
    why_no_checkpoint,
)
from ft_ckpt.errors import LoadError, damaged_input
from ft_ckpt.formats import TensorFormat, format_named, tensor_formats
from ft_ckpt.formats.files import JoinedFile, TensorFile
from ft_ckpt.model.files.folder_files import (
    STEMS,
    check_shard_index,
    join_weight_files,
    library_stem,
    weight_files,
)
from ft_ckpt.model.files.settings import Difference, differing_settings
from ft_ckpt.model.tensors import ADAPTER_FILE
from ft_ckpt.storage import Store, Stored
from ft_ckpt.storage.local import leads_out
from ft_ckpt.storage.places import Place

# Files with these endings have weights or training state in some format. All other files of a
# folder are sidecar files.
_BULK = re.compile(
    r"\.(safetensors|bin|h5|hdf5|mdl|pt|pth|ckpt|msgpack|onnx|onnx_data|gguf|keras|distcp|npz|npy|index)$"
)


@dataclass(frozen=True, eq=False)
class FolderPart:
    """One part of a folder: a model, an adapter or a plain module.

    Attributes:
        path: its folder, relative to the opened folder. "" is the opened folder itself.
        kind: "model", "adapter" or "module".
        file: its weights, as one file.
        record: its record in the manifest, if the folder is a checkpoint of ft_ckpt.
        stem: name of its weight files without ending and shard number, if their library has the
            same name for all formats. Else "".
    """

    path: str
    kind: str
    file: TensorFile
    record: PartRecord | None = None
    stem: str = ""

    @property
    def prefix(self) -> str:
        """Prefix for the names of its tensors, which makes them unique among the parts."""
        return f"{self.path.replace('/', '.')}." if self.path else ""

    def stem_in(self, tensor_format: TensorFormat) -> str:
        """Return the stem of its weight files in another format."""
        if self.stem:
            return self.stem
        return ADAPTER_FILE if self.kind == "adapter" else tensor_format.model_stems[0]


class WeightsFolder(JoinedFile):
    """Folder of weights as one file, with the tensors of all its `parts`."""

    def __init__(
        self, place: Place, parts: Sequence[FolderPart], manifest: Manifest | None = None
    ) -> None:
        super().__init__([(part.prefix, part.file) for part in parts], place.basename)
        self.place = place
        self.store = place.folder
        self.parts = tuple(parts)
        self.manifest = manifest

    def store_of(self, part: FolderPart) -> Store:
        """Return the folder of a part as a store."""
        return Place(self.store, part.path).folder

    def sidecar_files(self) -> tuple[list[Stored], list[str]]:
        """List the sidecar files, which can be copied next to weights of any format.

        Also returns the names of the other files, which have weights, their index or training
        state. Hidden files, and files that the manifest does not list, are left out of both.
        """
        files = self.store.list()
        weight_names = self._weight_names()

        # A file can have two names, one for each of two formats. So files are compared by version.
        weight_versions = {file.version for file in files if file.name in weight_names}
        listed: set[str] | None = None
        state_folders: tuple[str, ...] = ()
        if self.manifest is not None:
            listed = {record.path for record in self.manifest.files}
            states = [part for part in self.manifest.parts if part.kind == "state"]
            state_folders = tuple(f"{part.path}/" for part in states)

        sidecars: list[Stored] = []
        left_out: list[str] = []
        for file in files:
            name = file.name
            is_hidden = any(step.startswith(".") for step in name.split("/"))
            if is_hidden or name == MANIFEST_NAME or file.version in weight_versions:
                continue
            if leads_out(self.store, name):
                left_out.append(f"{name!a} (a link out of the folder)")
                continue

            if listed is not None and name not in listed:
                continue
            is_index = name.endswith(".index.json")
            if is_index or _BULK.search(name) or name.startswith(state_folders):
                left_out.append(name)
            else:
                sidecars.append(file)

        return sidecars, left_out

    def _weight_names(self) -> set[str]:
        """Return the paths of the weight files and their indices."""
        paths: set[str] = set()
        for part in self.parts:
            names, index = weight_files(self.store_of(part), part.kind)
            if index is not None:
                names = [*names, index]
            paths.update(f"{part.path}/{name}".lstrip("/") for name in names)
        return paths


def differing_parts(
    first: WeightsFolder, first_part: FolderPart, second: WeightsFolder, second_part: FolderPart
) -> list[Difference]:
    """List the settings that differ between parts of two folders and change the output.

    Values are text. Raises CorruptError for a settings file that cannot be parsed.
    """
    differences = []
    first_record, second_record = first_part.record, second_part.record
    # Plain modules have no settings file, so their classes are compared.
    if first_part.kind == "module" and first_record is not None and second_record is not None:
        before, after = first_record.class_name, second_record.class_name
        if before != after:
            differences.append(("class", before, after))
    first_store = first.store_of(first_part)
    second_store = second.store_of(second_part)
    return [*differences, *differing_settings(first_store, second_store, first_part.kind)]


def open_folder(place: Place) -> TensorFile:
    """Open the tensors in a folder, or under the prefix of a TensorFlow checkpoint, in any format.

    Raises LoadError when there are no weights, CorruptError when files are missing or inconsistent.
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
    """Open a folder of another program. Return None if no format recognises it."""
    # If two formats match, the more specific one is registered later.
    for tensor_format in reversed(tensor_formats()):
        opened = tensor_format.open_folder(place)
        if opened is not None:
            return opened
    return None


def _open_own_checkpoint(place: Place) -> TensorFile:
    manifest = load_manifest(place.folder)
    refuse_delta(manifest, place)
    for format_name in sorted({part.format for part in manifest.parts}):
        tensor_file = format_named(format_name).open_folder(place)
        if tensor_file is not None:
            return tensor_file

    parts = []
    for record in manifest.parts:
        if record.kind == "state":
            continue
        names = sorted({tensor.file for tensor in record.tensors})
        file = join_weight_files(place.folder, names)
        ties = dict(file.ties)
        for name, *aliases in record.ties:
            if name in file.specs:
                ties.update(dict.fromkeys(aliases, name))
        file.ties = ties
        parts.append(FolderPart(record.path, record.kind, file, record, library_stem(names)))

    return WeightsFolder(place, parts, manifest)


def refuse_delta(manifest: Manifest, place: Place) -> None:
    """Raise LoadError for the manifest of a delta, which has only some elements of the weights."""
    if manifest.delta:
        base = manifest.delta.get("base")
        raise LoadError(
            f"{place}: a delta on {base}, expected all weights; `ft-ckpt pull` makes the "
            "checkpoint of it"
        )


def _huggingface_parts(store: Store) -> Iterator[FolderPart]:
    for kind in STEMS:
        names, index = weight_files(store, kind)
        if names:
            if index is not None:
                check_shard_index(store, index, names)
            file = join_weight_files(store, names)
            yield FolderPart("", kind, file, stem=library_stem(names))
