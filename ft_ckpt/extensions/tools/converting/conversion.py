"""Converts weights between formats, slice by slice.

The target is one file, or a folder of files. Some formats are folders that only their library can
write, such as TensorFlow's. A place is a folder on a disk, a prefix in a bucket, or a file.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from ft_ckpt.checkpoint import checkpoint_around, hold_open
from ft_ckpt.checkpoint.commit import Staging, check_target, open_staging_at
from ft_ckpt.checkpoint.manifest import PartRecord, load_manifest
from ft_ckpt.errors import (
    ConfigError,
    LoadError,
    TargetError,
    damaged_input,
    explained,
    listing,
)
from ft_ckpt.extensions.tools.converting.copy_check import check_copy
from ft_ckpt.extensions.tools.converting.folder import (
    ConvertedPart,
    converted_manifest,
    copy_sidecars,
    plan_converted_part,
    staged_records,
)
from ft_ckpt.extensions.tools.converting.output_files import Output, plan_output, write_outputs
from ft_ckpt.extensions.tools.converting.rename_rules import check_used, read_map
from ft_ckpt.extensions.tools.converting.request import ConvertOptions, check_apart, convert_options
from ft_ckpt.extensions.tools.converting.shard_rules import assign_shards
from ft_ckpt.extensions.tools.converting.views import translate_file, untie_file
from ft_ckpt.formats import FolderWriter, open_tensor_file
from ft_ckpt.formats.files import TensorFile, TensorView
from ft_ckpt.formats.safetensors import link_second_names
from ft_ckpt.model.files import FolderPart, WeightsFolder, join_weight_files, open_folder
from ft_ckpt.storage import Store, Stored
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place, replaced_object, scratch_folder

_SIDECAR_BYTES = 16 << 20  # reserved for sidecar files in the check of free space


@dataclass(frozen=True)
class ConvertReport:
    """A finished conversion.

    Attributes:
        path: The path of the target, or its URL.
        format: The name of the format of the target.
        bytes: The size of all weight files.
        tensors: The number of tensors. A tied tensor counts once.
        seconds: The duration of the conversion.
        casts: The number of tensors for each cast, such as "float32->bfloat16".
        skipped: "name: type" for each value of the source that is no tensor.
        notes: Sentences about what the caller should know.
    """

    path: Path | str
    format: str
    bytes: int
    tensors: int
    seconds: float
    casts: Mapping[str, int]
    skipped: tuple[str, ...]
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
    """Write the tensors of `src` to `dst` in another format, atomically and durably.

    `src` is a file (HDF5, safetensors, torch, Keras, flax, Lightning), a Hugging Face folder, a
    checkpoint of ft_ckpt or a folder of torch's distributed checkpoint, DeepSpeed, TensorFlow or
    orbax. `dst` is a file whose suffix names the format, or a folder, which gets the sidecar files
    of a source folder and a manifest. Both may be URLs. `format`: name of the target format.
    `dtype`: cast floating-point tensors. `map`: a mapping of old tensor names to new ones, or a
    file that contains it; * at the end of both names matches any ending. `verify`: compare the
    result bit for bit with the source. `max_shard_size` (bytes or "5GB"): split the weights of a
    folder. `shards`: a file of lines "pattern shard" that assigns each tensor to a TensorFlow
    checkpoint by the first matching pattern.

    Memory holds a few slices, or one tensor if it is not stored in row-major order. Writes to a
    bucket are streamed. An existing checkpoint in a bucket cannot be replaced atomically. It is
    therefore refused, or with `overwrite` deleted first. A source checkpoint of ft_ckpt is kept
    open, so a save that replaces it during the conversion has no effect. Its files are compared
    with their digests before they are read.

    Raises ConfigError for invalid arguments, SelectionError for names and dtypes that the target
    cannot have, LoadError or CorruptError for the source, and TargetError or NoSpaceError for the
    target.
    """
    source = open_place(src)
    target = open_place(dst)

    # A file name might not be valid UTF-8.
    note = f"converted from {os.fsencode(source.basename).decode(errors='replace')}"
    names = read_map(map)
    options = convert_options(
        target,
        format=format,
        dtype=dtype,
        names=names,
        max_shard_size=max_shard_size,
        verify=verify,
        progress=progress,
        note=note,
        shards=shards,
        to_folder=str(dst).endswith("/"),
        overwrite=overwrite,
    )
    check_apart([source], options)
    with hold_open(source) as place, closing(open_source(place)) as tensor_file:
        check_used(names, [*tensor_file.specs, *tensor_file.ties], str(source))
        options = replace(options, max_mode=place.mode_at(options.target))
        return write_converted(tensor_file, place, options)


def write_converted(
    tensor_file: TensorFile, source: Place, options: ConvertOptions
) -> ConvertReport:
    """Write the tensors of `tensor_file`, and to a folder also the sidecar files in `source`.

    Raises LoadError for a file without tensors.
    """
    begun = time.monotonic()
    if not tensor_file.specs:
        skipped = tensor_file.skipped
        reason = "; give a file or folder that has some"
        if skipped:
            reason = f", only {listing(list(skipped))}"
        raise LoadError(f"{source.basename}: no tensors in it{reason}")

    with explained(options.target):
        if options.format.folder_writer is not None:
            report = _convert_by_library(tensor_file, source, options, options.format.folder_writer)
        elif options.to_folder:
            report = _convert_to_folder(tensor_file, source, options)
        else:
            report = _convert_to_file(tensor_file, options)

    return replace(report, path=options.path, seconds=time.monotonic() - begun)


def open_source(place: Place) -> TensorFile:
    """Open the tensors at `place` in any format.

    Reads copy bytes instead of mapping them, so that a read raises an error if the file was
    truncated.
    """
    with damaged_input(place):
        if place.is_object:
            return open_tensor_file(place.open())
        return open_folder(place)


def _convert_to_file(tensor_file: TensorFile, options: ConvertOptions) -> ConvertReport:
    file = translate_file(tensor_file, options.names, options.dtype)
    target = options.target
    _refuse_file_of_checkpoint(target)
    output = plan_output(options.format, target.name, file)
    _check_space(target.store, output.plan.layout.size_bytes)
    with replaced_object(target, options.max_mode) as stage:
        (record,) = write_outputs([output], stage.store, options.progress)
        if options.verify:
            with closing(open_source(stage)) as copied:
                check_copy(file, copied, target.basename)
    return _report_of(options, [file], record.size_bytes, ())


def _refuse_file_of_checkpoint(target: Place) -> None:
    """Raise TargetError if a checkpoint's manifest lists the target and would become wrong."""
    around = checkpoint_around(target)
    if around is None:
        return
    root, path = around
    if any(record.path == path for record in load_manifest(root).files):
        raise TargetError(
            f"{target}: a file of the checkpoint {root.url}; choose a path outside of it"
        )


def _open_staging(options: ConvertOptions, size_bytes: int) -> Staging:
    """Check that the target has space, and open a staging folder for it.

    The space is that of weights of `size_bytes` and of sidecar files. The checkpoint is written
    into the staging folder, and a commit makes it the target.
    """
    store = options.target.folder
    _check_space(store, size_bytes + _SIDECAR_BYTES)
    if store.parent is None:
        raise ConfigError(f"{options.target}: a whole bucket, or disk; name a folder in it")
    return open_staging_at(options.target, overwrite=options.overwrite, max_mode=options.max_mode)


def _check_space(store: Store, size_bytes: int) -> None:
    """Check the free space of a local folder; see `check_target`. Buckets have no limit."""
    if store.local_folder is not None:
        check_target(store.local_folder, size_bytes)


def _convert_by_library(
    tensor_file: TensorFile, source: Place, options: ConvertOptions, library: FolderWriter
) -> ConvertReport:
    file = translate_file(tensor_file, options.names, options.dtype)
    untied = untie_file(file)  # the formats of libraries have no ties
    specs = list(untied.specs.values())
    library.check_types(specs)
    shards = assign_shards(specs, options.shards) if options.shards else {}
    staging = _open_staging(options, sum(spec.size_bytes for spec in specs))
    try:
        with scratch_folder(staging.store) as stage:
            if shards:
                library.write_shards(stage, shards, untied.read)
            else:
                library.write(stage, specs, untied.read)
            if options.verify:
                copied = options.format.open_folder(Place(LocalStore(stage)))
                assert copied is not None, "a format that is written is read"
                with closing(copied):
                    check_copy(untied, copied, options.target.basename)
            files = staged_records(LocalStore(stage), ())
        part = PartRecord("", "", "model", options.format.name, "", (), casts=file.casts)
        staging.commit(converted_manifest(tensor_file, source, [part], files, options))
    finally:
        staging.discard()

    notes: tuple[str, ...] = ()
    if file.ties:
        notes = (f"{len(file.ties)} tied names stored as tensors of their own",)
    return _report_of(options, [file], sum(record.size_bytes for record in files), notes)


def _convert_to_folder(
    tensor_file: TensorFile, source: Place, options: ConvertOptions
) -> ConvertReport:
    parts: Sequence[FolderPart] = (FolderPart("", "model", tensor_file),)
    sidecars: list[Stored] = []
    left_out: list[str] = []
    if isinstance(tensor_file, WeightsFolder):
        parts = tensor_file.parts
        sidecars, left_out = tensor_file.sidecar_files()

    converted = [plan_converted_part(part, options) for part in parts]
    outputs: list[Output] = []
    for part in converted:
        outputs += part.outputs
    size_bytes = sum(output.plan.layout.size_bytes for output in outputs)
    staging = _open_staging(options, size_bytes + sum(file.size_bytes for file in sidecars))
    store = staging.store
    try:
        copy_sidecars(source.folder, [file.name for file in sidecars], store, options)
        written = write_outputs(outputs, store, options.progress)
        for part in converted:
            _finish_part(part, store, options)
        written += link_second_names(options.format, written, store)
        records = [part.record(options.format.name) for part in converted]
        files = staged_records(store, written)
        staging.commit(converted_manifest(tensor_file, source, records, files, options))
    finally:
        staging.discard()

    notes = (f"{listing(left_out, ', ')}: not copied",) if left_out else ()
    return _report_of(options, [part.file for part in converted], size_bytes, notes)


def _finish_part(part: ConvertedPart, store: Store, options: ConvertOptions) -> None:
    """Write the index of a part with several files. With `verify`, compare the files."""
    if part.index is not None:
        store.write(part.index_path, part.index.encode())
    if options.verify:
        names = [output.plan.path for output in part.outputs]
        with closing(join_weight_files(store, names)) as copied:
            check_copy(part.file, copied, options.target.basename)


def _report_of(
    options: ConvertOptions,
    files: Sequence[TensorView],
    size_bytes: int,
    notes: tuple[str, ...],
) -> ConvertReport:
    casts: Counter[str] = Counter()
    overflown: list[str] = []
    skipped: list[str] = []
    for file in files:
        casts.update(file.casts)
        overflown += file.overflown
        skipped += file.skipped

    if overflown:
        names = listing(sorted(overflown), ", ")
        notes += (f"{names}: values beyond what {options.dtype} can hold have become infinite",)

    return ConvertReport(
        options.path,
        options.format.name,
        size_bytes,
        sum(len(file.specs) for file in files),
        0.0,
        dict(casts),
        tuple(skipped),
        notes,
    )
