"""Converts a folder of weights: its parts, sidecar files and manifest."""

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
    """One part of a folder with its output files."""

    part: FolderPart
    file: TensorView
    outputs: tuple[Output, ...]
    index_path: str
    index: str | None  # the text of their index; None with one file

    def record(self, format_name: str) -> PartRecord:
        """Return the record of the part in the new manifest."""
        tensors = []
        for output in self.outputs:
            tensors += output.plan.records()
        groups: dict[str, list[str]] = {}
        for name, stored_name in self.file.ties.items():
            groups.setdefault(stored_name, [stored_name]).append(name)
        ties = tuple(tuple(group) for group in groups.values())
        source = self.part.record
        if source is None:
            return PartRecord(
                "",
                self.part.path,
                self.part.kind,
                format_name,
                "",
                tuple(tensors),
                ties,
                casts=self.file.casts,
            )
        new_names = {stored: name for name, stored in self.file.stored_names.items()}
        trainable = [new_names[name] for name in source.trainable if name in new_names]
        return replace(
            source,
            format=format_name,
            tensors=tuple(tensors),
            ties=ties,
            trainable=tuple(trainable),
            casts={**source.casts, **self.file.casts},
        )


def plan_converted_part(part: FolderPart, options: ConvertOptions) -> ConvertedPart:
    """Plan the new files of a part, named and divided as its readers expect."""
    names = _names_in_part(part, [*part.file.specs, *part.file.ties], options.names)
    file = translate_file(part.file, names, options.dtype)
    stem = part.stem_in(options.format)
    ending = options.format.suffixes[0]
    folder = f"{part.path}/" if part.path else ""
    shards = {f"{stem}{ending}": list(file.specs)}
    if part.kind != "adapter":  # PEFT reads one file only
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

    `table` has the names in the whole folder, with its prefix. Raises SelectionError for tensors
    that would leave the part.
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


def copy_companions(
    source: Store, names: Sequence[str], store: Store, options: ConvertOptions
) -> None:
    """Copy sidecar files into the staging `store`; configs get the new dtype."""
    for name in names:
        with closing(source.open(name)) as file:
            copy_object(file, store, name)
        if options.dtype is not None and PurePosixPath(name).name == "config.json":
            _set_dtype(store, name, options.dtype)
    for name, content in options.replaced.items():
        store.write(name, content)


def _set_dtype(store: Store, name: str, dtype: str) -> None:
    """Write the new dtype of the weights into a config, because readers use it."""
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
    """Return the manifest of a source checkpoint with the new files, or else a new manifest."""
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
    described = tuple(_describe_part(part, source) for part in parts)
    are_adapters = all(part.kind == "adapter" for part in described)
    return Manifest(
        described,
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
    """Return the groups of "part:name" of a manifest's `shared`, with the new names."""
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


def _describe_part(part: PartRecord, source: Place) -> PartRecord:
    """Return the part of a folder without manifest, completed from its config."""
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
    """Return the base that the config of an adapter names."""
    identity, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    return BaseRecord(
        identity if isinstance(identity, str) else None,
        revision if isinstance(revision, str) else None,
        "float32",
        "",
        {},
    )
