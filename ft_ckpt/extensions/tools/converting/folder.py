"""Converts a folder of weights: its parts, sidecar files and manifest.

A part is one saved model or adapter of a folder, such as a policy and a value head. A record is the
description of a part in a manifest.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import Any

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint.leases import is_mark
from ft_ckpt.checkpoint.manifest import BaseRecord, Manifest, PartRecord
from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.extensions.tools.converting.output_files import Output, plan_output
from ft_ckpt.extensions.tools.converting.rename_rules import Names, rename_tensors
from ft_ckpt.extensions.tools.converting.request import ConvertOptions
from ft_ckpt.extensions.tools.converting.views import select_tensors, translate_file
from ft_ckpt.formats import shard_index, split_into_files
from ft_ckpt.formats.files import TensorFile, TensorView
from ft_ckpt.model.files import FolderPart, WeightsFolder
from ft_ckpt.storage import Store, read_text
from ft_ckpt.storage.digests import FileRecord, read_record
from ft_ckpt.storage.places import Place, copy_object


@dataclass(frozen=True)
class ConvertedPart:
    """One part of a folder, with the files to write for it.

    Attributes:
        part: The part of the source.
        file: Its tensors, renamed and cast.
        outputs: The weight files to write.
        index_path: The path of the index of these files.
        index: The text of the index. None for one weight file, which needs no index.
    """

    part: FolderPart
    file: TensorView
    outputs: tuple[Output, ...]
    index_path: str
    index: str | None

    def record(self, format_name: str) -> PartRecord:
        """Return the record of the part in the new manifest."""
        tensors = []
        for output in self.outputs:
            tensors += output.plan.records()
        tied_names: dict[str, list[str]] = {}
        for name, stored_name in self.file.ties.items():
            tied_names.setdefault(stored_name, [stored_name]).append(name)
        ties = tuple(tuple(names) for names in tied_names.values())
        source_record = self.part.record
        if source_record is None:
            return PartRecord(
                name="",
                path=self.part.path,
                kind=self.part.kind,
                format=format_name,
                class_name="",
                tensors=tuple(tensors),
                ties=ties,
                casts=self.file.casts,
            )

        new_names = {stored: name for name, stored in self.file.stored_names.items()}
        trainable = [new_names[name] for name in source_record.trainable if name in new_names]
        return replace(
            source_record,
            format=format_name,
            tensors=tuple(tensors),
            ties=ties,
            trainable=tuple(trainable),
            casts={**source_record.casts, **self.file.casts},
        )


def plan_converted_part(part: FolderPart, options: ConvertOptions) -> ConvertedPart:
    """Plan the weight files of a part.

    They have the names and sizes that readers expect, such as transformers and PEFT.
    """
    names = _names_in_part(part, [*part.file.specs, *part.file.ties], options.names)
    file = translate_file(part.file, names, options.dtype)
    stem = part.stem_in(options.format)
    ending = options.format.suffixes[0]
    folder = f"{part.path}/" if part.path else ""
    shards = {f"{stem}{ending}": list(file.specs)}
    if part.kind != "adapter":  # PEFT reads one file only, so that an adapter is never split
        shards = split_into_files(file.specs, stem, ending, options.max_shard_bytes)
    outputs = []
    for file_name, tensor_names in shards.items():
        selected = select_tensors(file, tensor_names)
        outputs.append(plan_output(options.format, folder + file_name, selected))

    index = None
    if len(shards) > 1:
        total_size = sum(spec.size_bytes for spec in file.specs.values())
        index = shard_index(shards, {"total_size": total_size}, file.ties)

    index_path = f"{folder}{stem}{ending}.index.json"
    return ConvertedPart(part, file, tuple(outputs), index_path, index)


def _names_in_part(part: FolderPart, names: Iterable[str], table: Names) -> dict[str, str]:
    """Map the tensors `names` of a part to their new names.

    `table` has the names of the whole folder, in which the part's names begin with the part's
    prefix. Raises SelectionError for a new name without that prefix.
    """
    new_names = rename_tensors([part.prefix + name for name in names], table)
    outside = []
    names_in_part = {}
    for old, new in new_names.items():
        if not new.startswith(part.prefix):
            outside.append(f"{old} -> {new}")
        names_in_part[old.removeprefix(part.prefix)] = new.removeprefix(part.prefix)
    if outside:
        raise SelectionError(
            f"{listing(outside)}: out of the part {part.path}; keep the prefix {part.prefix!r}"
        )
    return names_in_part


def copy_sidecars(
    source: Store, names: Sequence[str], store: Store, options: ConvertOptions
) -> None:
    """Copy the sidecar files `names` into the staging `store`.

    Configs get the new dtype. Files of `options.replaced` get their new contents.
    """
    for name in names:
        with closing(source.open(name)) as file:
            copy_object(file, store, name)
        if options.dtype is not None and PurePosixPath(name).name == "config.json":
            _set_dtype(store, name, options.dtype)
    for name, content in options.replaced.items():
        store.write(name, content)


def _set_dtype(store: Store, name: str, dtype: str) -> None:
    """Write the new dtype of the weights into a config, because readers use the dtype there."""
    try:
        config = json.loads(read_text(store, name))
    except ValueError:
        return
    if not isinstance(config, dict):
        return
    fields = config.keys() & {"dtype", "torch_dtype"}
    if fields:
        config.update(dict.fromkeys(fields, dtype))
        store.write(name, (json.dumps(config, indent=2) + "\n").encode())


def staged_records(store: Store, written: Sequence[FileRecord]) -> tuple[FileRecord, ...]:
    """Return the records of all staged files.

    Files not in `written` are read to compute their digests.
    """
    records = {record.path: record for record in written}
    for file in store.list():
        if file.name not in records and not is_mark(file.name):
            records[file.name] = read_record(store, file.name)
    return tuple(records.values())


def converted_manifest(
    tensor_file: TensorFile,
    source: Place,
    parts: Sequence[PartRecord],
    files: tuple[FileRecord, ...],
    options: ConvertOptions,
) -> Manifest:
    """Return the manifest of the target.

    It is the manifest of the source with the new parts and files, or a new one if the source has
    none.
    """
    if isinstance(tensor_file, WeightsFolder) and tensor_file.manifest is not None:
        manifest = tensor_file.manifest
        shared: tuple[tuple[str, ...], ...] = ()
        if options.format.folder_writer is None:
            shared = _renamed_groups(tensor_file, manifest.shared, options.names)
        return replace(
            manifest,
            parts=tuple(parts),
            files=files,
            notes=(*manifest.notes, options.note),
            shared=shared,
            number=None,
        )

    completed_parts = tuple(_complete_record(part, source) for part in parts)
    are_adapters = all(part.kind == "adapter" for part in completed_parts)
    return Manifest(
        completed_parts,
        files,
        "adapter" if are_adapters else "full",
        datetime.now(timezone.utc).isoformat(),
        versions={"ft_ckpt": __version__},
        notes=(options.note,),
        made_from=options.made_from,
        export=bool(options.made_from),
    )


def _renamed_groups(
    weights: WeightsFolder, groups: Iterable[Iterable[str]], table: Names
) -> tuple[tuple[str, ...], ...]:
    """Rename the tensors in `groups`, a manifest's `shared`.

    Each group has texts "part:name" of one tensor that several parts share.
    """
    parts = {part.record.name: part for part in weights.parts if part.record is not None}
    renamed = []
    for group in groups:
        members = []
        for member in group:
            part_name, _, name = member.partition(":")
            if part_name in parts:
                new_name = _names_in_part(parts[part_name], [name], table)[name]
                member = f"{part_name}:{new_name}"
            members.append(member)
        renamed.append(tuple(members))
    return tuple(renamed)


def _complete_record(part: PartRecord, source: Place) -> PartRecord:
    """Complete the record of a part from its config, because the folder has no manifest."""
    name = "adapter_config.json" if part.kind == "adapter" else "config.json"
    try:
        config: Any = json.loads(read_text(source.folder, name))
    except (OSError, ValueError):
        return part

    if not isinstance(config, dict):
        return part
    if part.kind == "adapter":
        return replace(
            part,
            name="default",
            adapter="default",
            active=True,
            class_name="PeftModel",
            base=base_of_config(config),
        )

    classes = config.get("architectures")
    class_name = str(classes[0]) if isinstance(classes, list) and classes else ""
    return replace(part, class_name=class_name)


def base_of_config(settings: Mapping[str, Any]) -> BaseRecord:
    """Return the base that the config of an adapter names. Values that are no text become None."""
    base_id = settings.get("base_model_name_or_path")
    if not isinstance(base_id, str):
        base_id = None
    revision = settings.get("revision")
    if not isinstance(revision, str):
        revision = None
    return BaseRecord(base_id, revision, "float32", "", {})
