"""Converts weights from any format to any other, slice by slice: a few slices are held, whatever the model's size."""

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint import commit
from ft_ckpt.checkpoint.manifest import BaseRecord, Manifest, PartRecord
from ft_ckpt.checkpoint.marks import is_mark
from ft_ckpt.checkpoint.open_checkpoint import hold_open
from ft_ckpt.checkpoint.staging import Staging, open_staging_at
from ft_ckpt.errors import ConfigError, LoadError, damaged_input, explained, listing
from ft_ckpt.files import folder
from ft_ckpt.files.convert_options import ConvertOptions, check_apart, convert_options
from ft_ckpt.files.convert_output import Output, plan_output, write_outputs
from ft_ckpt.files.rename import TranslatedFile, UntiedFile, check_copy, check_used, read_map
from ft_ckpt.files.shard_rules import assign_shards
from ft_ckpt.formats import detect
from ft_ckpt.formats.layout import Spec, TensorFile
from ft_ckpt.formats.registry import FolderLibrary
from ft_ckpt.formats.shard_files import link_second_names, shard_index, split_into_files
from ft_ckpt.storage.digests import FileRecord, read_record
from ft_ckpt.storage.local_copy import copy_object
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, open_place, source_access
from ft_ckpt.storage.scratch import replaced_object, scratch_folder
from ft_ckpt.storage.store import Store, read_text

_ROOM_BYTES = 16 << 20  # for companions, in the look at free space


@dataclass(frozen=True)
class ConvertReport:
    """A finished conversion: `bytes` of all weight files, `tensors` with a tied one counted once."""

    path: Path | str  # or the URL
    format: str
    bytes: int
    tensors: int
    seconds: float
    casts: Mapping[str, int]  # "float32->bfloat16": number of tensors
    skipped: tuple[str, ...]  # "name: what it is" of what is no tensor
    notes: tuple[str, ...]


def convert(
    src: str | Path | Place,
    dst: str | Path | Place,
    *,
    format: str | None = None,  # noqa: A002
    dtype: str | None = None,
    map: str | Path | Mapping[str, str] | None = None,  # noqa: A002
    verify: bool = False,
    max_shard_size: int | str | None = None,
    shards: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> ConvertReport:
    """Write the tensors of `src` to `dst` in another format; either everything arrives, durably, or nothing changes.

    `src` is a file (HDF5, safetensors, torch, Keras, flax, Lightning), a Hugging Face folder, a checkpoint of ours or a
    folder of torch's distributed checkpoint, DeepSpeed, TensorFlow or orbax. `dst` is a file whose suffix names the
    format, or a folder, which gets the companions of a source folder and a manifest. `format`: the name of one. `dtype`
    casts floating-point tensors, `map` renames (old names to new ones, with * at the end of both for all that begin so,
    or a file of these), `verify` compares the result bit for bit with the source, `max_shard_size` (bytes or "5GB")
    splits the weights of a folder. `shards`, a file of lines "pattern shard", gives each tensor to a checkpoint of
    TensorFlow by the first pattern that its name fits. At most a few slices are held, or one tensor where it is not
    stored in row-major order. All of them may be URLs: what is written to a bucket is streamed there. A checkpoint that
    is there cannot be replaced in one step: that is refused, or with `overwrite` it is deleted first. A checkpoint of
    ours is held open: a save that replaces it meanwhile changes nothing, and none deletes it. It is compared with its
    digests while it is read; nothing is written of a damaged one.

    Raises ConfigError, SelectionError for names and types that cannot be, LoadError or CorruptError for the source,
    TargetError or NoSpaceError for the target.
    """
    source = open_place(src)
    note = f"converted from {os.fsencode(source.last_step).decode(errors='replace')}"  # a name may be no UTF-8
    names = read_map(map)
    options = convert_options(
        dst, format=format, dtype=dtype, names=names, max_shard_size=max_shard_size, verify=verify, progress=progress,
        note=note, shards=shards, overwrite=overwrite,
    )  # fmt: skip
    check_apart([source], options)
    with hold_open(source) as place, closing(open_source(place, source)) as opened:
        check_used(names, [*opened.specs, *getattr(opened, "ties", {})], str(source))
        options = dataclasses.replace(options, access=source_access(place, source, options.target))
        return write_converted(opened, place, options)


def write_converted(opened: TensorFile, place: Place, options: ConvertOptions) -> ConvertReport:
    """Write the tensors of `opened`, and the companions in the folder `place`, as `options` ask.

    Raises LoadError for a source that has other things than tensors only.
    """
    begun, skipped = time.monotonic(), getattr(opened, "skipped", ())
    if skipped and not opened.specs:
        raise LoadError(f"{place.last_step}: no tensors in it, only {listing(list(skipped))}")
    with explained(options.target):
        if options.format.library is not None:
            written = _convert_by_library(opened, place, options, options.format.library)
        else:
            written = (_convert_to_folder if options.to_folder else _convert_to_file)(opened, place, options)
    return dataclasses.replace(written, path=options.path, seconds=time.monotonic() - begun)


def open_source(path: str | Path | Place, origin: Place | None = None) -> TensorFile:
    """The tensors at `path`, whatever wrote them; bytes are copied, so a file that shrinks ends in an error.

    `origin` is where they were found, when `path` is a place where they are held open.
    """
    place = open_place(path)
    with damaged_input(place):
        return detect.open_tensor_file(place.open()) if place.is_object else folder.open_folder(place, origin)


def _convert_to_file(opened: TensorFile, _source: Place, options: ConvertOptions) -> ConvertReport:
    file, target = TranslatedFile(opened, options.names, options.dtype), options.target
    one = plan_output(options.format, target.name, file)
    _check_room(target.store, one.plan.layout.size_bytes)
    with replaced_object(target, options.access.for_file) as stage:
        (record,) = write_outputs([one], stage.store, options.progress)
        if options.verify:
            with closing(open_source(stage)) as found:
                check_copy(file, found, target.last_step)
    return _conversion_report(options, [file], record.size_bytes, ())


def _staging_with_room(options: ConvertOptions, size_bytes: int) -> Staging:
    """A staging for the target, where there is room for weights of `size_bytes` with what goes along."""
    store = options.target.folder
    _check_room(store, size_bytes + _ROOM_BYTES)
    if store.parent is None:
        raise ConfigError(f"{options.target}: a whole bucket, or disk; name a folder in it")
    return open_staging_at(options.target, overwrite=options.overwrite, access=options.access)


def _check_room(store: Store, size_bytes: int) -> None:
    """Refuse a folder on a disk that has no room, see `commit.check_target`; buckets have no end."""
    if isinstance(store, LocalStore):
        commit.check_target(store.folder, size_bytes)


def _convert_by_library(
    opened: TensorFile, source: Place, options: ConvertOptions, library: FolderLibrary
) -> ConvertReport:
    file = TranslatedFile(opened, options.names, options.dtype)
    whole = UntiedFile(file)  # these formats know no ties
    specs = list(whole.specs.values())
    library.check_types(specs)
    groups = assign_shards(specs, options.shards) if options.shards else {}
    staging = _staging_with_room(options, sum(spec.size_bytes for spec in specs))
    try:
        with scratch_folder(staging.store) as stage:
            if library.write_shards is not None and groups:
                library.write_shards(stage, groups, whole.read)
            else:
                library.write_folder(stage, specs, whole.read)
            if options.verify:
                with closing(library.open_folder(open_place(stage))) as found:
                    check_copy(whole, found, options.target.last_step)
            files = _file_records(open_place(stage).folder, ())
        part = PartRecord("", "", "model", options.format.name, "", (), casts=file.casts)
        staging.commit(_converted_manifest(opened, source, [part], files, options))
    finally:
        staging.discard()
    notes = (f"{len(file.ties)} tied names stored as tensors of their own",) if file.ties else ()
    return _conversion_report(options, [file], sum(file.size_bytes for file in files), notes)


# A folder


@dataclass(frozen=True)
class _ConvertedPart:
    """One part of a folder and the files it becomes; `index` is the text of their index, None with one file."""

    part: folder.FolderPart
    file: TranslatedFile
    outputs: tuple[Output, ...]
    index_path: str
    index: str | None

    def part_record(self, kind: str) -> PartRecord:
        """The part in the manifest."""
        tensors = tuple(record for one in self.outputs for record in one.inner.records())
        groups: dict[str, list[str]] = {}
        for name, kept in self.file.ties.items():
            groups.setdefault(kept, [kept]).append(name)
        known = self.part.record
        if known is None:
            return PartRecord(
                "", self.part.path, self.part.kind, kind, "", tensors, tuple(map(tuple, groups.values())),
                casts=self.file.casts,
            )  # fmt: skip
        new = {old: name for name, old in self.file.old.items()}
        return dataclasses.replace(
            known,
            format=kind,
            tensors=tensors,
            ties=tuple(map(tuple, groups.values())),
            trainable=tuple(new[name] for name in known.trainable if name in new),
            casts={**known.casts, **self.file.casts},
        )


def _convert_to_folder(opened: TensorFile, source: Place, options: ConvertOptions) -> ConvertReport:
    is_folder = isinstance(opened, folder.WeightsFolder)
    parts = opened.parts if isinstance(opened, folder.WeightsFolder) else (folder.FolderPart("", "model", opened),)
    plans = [_plan_converted(part, options) for part in parts]
    outputs = [one for plan in plans for one in plan.outputs]
    kept, left = opened.companions() if isinstance(opened, folder.WeightsFolder) else ([], [])
    size = sum(one.plan.layout.size_bytes for one in outputs)
    staging = _staging_with_room(options, size + sum(each.size_bytes for each in kept))
    store = staging.store
    try:
        _copy_companions(source.folder, [each.name for each in kept], store, options.dtype)
        written = write_outputs(outputs, store, options.progress)
        for plan in plans:
            if plan.index is not None:
                store.write(plan.index_path, plan.index.encode())
            if options.verify:
                with closing(folder.join_weight_files(store, [one.plan.path for one in plan.outputs])) as found:
                    check_copy(plan.file, found, options.target.last_step)
        written += link_second_names(options.format, written, store)
        parts_written = [plan.part_record(options.format.name) for plan in plans]
        staging.commit(_converted_manifest(opened, source, parts_written, _file_records(store, written), options))
    finally:
        staging.discard()
    notes = (f"{listing(left, ', ')}: not taken along",) if is_folder and left else ()
    return _conversion_report(options, [plan.file for plan in plans], size, notes)


def _plan_converted(part: folder.FolderPart, options: ConvertOptions) -> _ConvertedPart:
    file = TranslatedFile(part.file, options.names, options.dtype)
    stem = "adapter_model" if part.kind == "adapter" else options.format.model_stem
    ending, place = options.format.suffixes[0], f"{part.path}/" if part.path else ""
    index_path = f"{place}{stem}{ending}.index.json"
    shards = {f"{stem}{ending}": list(file.specs)}
    if part.kind != "adapter":  # PEFT reads one file only
        shards = split_into_files(file.specs, stem, ending, options.max_shard_bytes)
    outputs = tuple(plan_output(options.format, place + name, _Shard(file, names)) for name, names in shards.items())
    if len(shards) == 1:
        return _ConvertedPart(part, file, outputs, index_path, None)
    total = {"total_size": sum(spec.size_bytes for spec in file.specs.values())}
    return _ConvertedPart(part, file, outputs, index_path, shard_index(shards, total, file.ties))


class _Shard:
    """Some tensors of a file."""

    def __init__(self, file: TranslatedFile, names: Sequence[str]) -> None:
        self.specs: Mapping[str, Spec] = {name: file.specs[name] for name in names}
        self.ties = {name: kept for name, kept in file.ties.items() if kept in self.specs}
        self.metadata = file.metadata
        self.read, self.runs, self.close = file.read, file.runs, file.close


def _copy_companions(source: Store, names: Sequence[str], store: Store, dtype: str | None) -> None:
    for name in names:
        with closing(source.open(name)) as file:
            copy_object(file, store, name)
        if dtype is not None and PurePosixPath(name).name == "config.json":
            _set_dtype(store, name, dtype)


def _set_dtype(store: Store, name: str, dtype: str) -> None:
    """Write the weights' new type into a config: readers go by it."""
    try:
        found = json.loads(read_text(store, name))
    except ValueError:
        return
    if isinstance(found, dict) and found.keys() & {"dtype", "torch_dtype"}:
        found |= {key: dtype for key in ("dtype", "torch_dtype") if key in found}
        store.write(name, (json.dumps(found, indent=2) + "\n").encode())


def _file_records(store: Store, written: Sequence[FileRecord]) -> tuple[FileRecord, ...]:
    """All files of the stage; those not among `written` are read for their digests."""
    known = {record.path for record in written}
    others = (each.name for each in store.list() if each.name not in known and not is_mark(each.name))
    return (*written, *(read_record(store, name) for name in others))


def _converted_manifest(
    opened: TensorFile,
    source: Place,
    parts: Sequence[PartRecord],
    files: tuple[FileRecord, ...],
    options: ConvertOptions,
) -> Manifest:
    """A checkpoint of ours keeps what its manifest says; anything else gets one."""
    known = opened.manifest if isinstance(opened, folder.WeightsFolder) else None
    if known is not None:
        notes = (*known.notes, options.note)
        return dataclasses.replace(known, parts=tuple(parts), files=files, notes=notes, number=None)
    named = tuple(_describe_part(part, source) for part in parts)
    kind = "adapter" if all(part.kind == "adapter" for part in named) else "full"
    created = datetime.now(timezone.utc).isoformat()
    versions = {"ft_ckpt": __version__}
    return Manifest(
        named, files, kind, created, versions=versions, notes=(options.note,), made_from=options.made_from,
        export=bool(options.made_from),
    )  # fmt: skip


def _describe_part(part: PartRecord, source: Place) -> PartRecord:
    """A part of a folder that is not ours, with what its configs say of it."""
    name = "adapter_config.json" if part.kind == "adapter" else "config.json"
    try:
        config: Any = json.loads(read_text(source.folder, name))
    except (OSError, ValueError):
        return part
    if part.kind == "adapter":
        base = BaseRecord(config.get("base_model_name_or_path"), config.get("revision"), "float32", "", {})
        return dataclasses.replace(
            part, name="default", adapter="default", active=True, class_name="PeftModel", base=base
        )
    return dataclasses.replace(part, class_name=str((config.get("architectures") or [""])[0]))


def _conversion_report(
    options: ConvertOptions, files: list[TranslatedFile], size: int, notes: tuple[str, ...]
) -> ConvertReport:
    casts: dict[str, int] = {}
    for file in files:
        for key, count in file.casts.items():
            casts[key] = casts.get(key, 0) + count
    beyond = sorted(name for file in files for name in file.overflown)
    if beyond:
        notes = (*notes, f"{listing(beyond, ', ')}: values beyond what {options.dtype} can hold have become infinite")
    skipped = tuple(what for file in files for what in file.skipped)
    tensors = sum(len(file.specs) for file in files)
    return ConvertReport(options.path, options.format.name, size, tensors, 0.0, casts, skipped, notes)
