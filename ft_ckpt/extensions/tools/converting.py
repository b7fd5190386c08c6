"""Converts weights between formats slice by slice; options, renaming and sharding of the output."""

import dataclasses
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint import (
    MANIFEST_NAME,
    BaseRecord,
    Manifest,
    PartRecord,
    Staging,
    checkpoint_around,
    commit,
    hold_open,
    is_mark,
    load_manifest,
    open_staging_at,
)
from ft_ckpt.config import canonical_dtype, is_size, parse_size
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    LoadError,
    SelectionError,
    TargetError,
    damaged_input,
    explained,
    listing,
)
from ft_ckpt.extensions.foreign import TorchArchive
from ft_ckpt.formats import (
    DEFAULT_FORMAT,
    FilePlan,
    FolderWriter,
    Layout,
    Spec,
    TensorFile,
    TensorFormat,
    detect,
    format_named,
    is_within,
    link_second_names,
    shard_index,
    split_into_files,
    tensor_formats,
    write_file,
    written_formats,
)
from ft_ckpt.messages import expected_one_of
from ft_ckpt.model import ADAPTER_FILE, folder
from ft_ckpt.storage import (
    ByteRun,
    FileRecord,
    Place,
    Region,
    Store,
    Stored,
    Writer,
    copy_object,
    open_place,
    read_ahead,
    read_record,
    read_text,
    region_of,
    replaced_object,
    scratch_folder,
    track_bytes,
)

ShardRule = tuple[str, str]  # (shell pattern of tensor names, shard for the names that match)
_SHARD = re.compile(r"\w[\w.-]*")


def read_shard_rules(source: str | Path | None) -> tuple[ShardRule, ...]:
    """The rules in a file of lines "pattern shard" (# begins a comment).

    Raises ConfigError for another file.
    """
    if source is None:
        return ()
    place = open_place(source)
    lines = _split_lines(read_text(place.store, place.name))
    wrong = [" ".join(line) for line in lines if len(line) != 2 or not _SHARD.fullmatch(line[1])]
    if wrong or not lines:
        raise ConfigError(
            f"{source}: {listing(wrong) or 'no rule'}: expected a pattern and the name of a shard, "
            "of letters, digits, '.', '_' and '-', in each line"
        )
    return tuple((line[0], line[1]) for line in lines)


def _split_lines(text: str) -> list[list[str]]:
    """The words of each line that is not empty or a comment (#)."""
    return [
        line.split()
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


def assign_shards(specs: Sequence[Spec], rules: Sequence[ShardRule]) -> dict[str, list[Spec]]:
    """The tensors of each shard; the first rule that matches a name decides.

    Raises SelectionError naming tensors that match no rule, and rules without a tensor.
    """
    shards: dict[str, list[Spec]] = {shard: [] for _, shard in rules}
    used, unmatched = set(), []
    for spec in specs:
        rule = next((rule for rule in rules if fnmatchcase(spec.name, rule[0])), None)
        if rule is None:
            unmatched.append(f"{spec.name}: in no shard")
            continue
        used.add(rule)
        shards[rule[1]].append(spec)
    unused = [
        f"{pattern} {shard}: a rule for no tensor"
        for pattern, shard in rules
        if (pattern, shard) not in used
    ]
    if unmatched or unused:
        raise SelectionError(
            f"{listing(unmatched + unused)}; end the rules with '* NAME' for all that is left"
        )
    return shards


@dataclass(frozen=True)
class ConvertOptions:
    """The checked arguments of a conversion."""

    path: Path | str  # as given
    target: Place  # with symbolic links resolved
    format: TensorFormat
    to_folder: bool
    dtype: str | None  # of floating-point tensors; None: unchanged
    names: Mapping[str, str]  # new name by old
    max_shard_bytes: int
    verify: bool
    progress: bool
    note: str  # for the manifest: the source of the weights
    shards: Sequence[ShardRule] = ()  # rules that divide the tensors between several checkpoints
    made_from: tuple[str, ...] = ()  # names of the checkpoints that the weights were computed from
    max_mode: int = 0o777  # see LocalStore; the permissions common to all sources
    # delete a checkpoint of this name in a bucket before the new one is complete
    overwrite: bool = False
    # sidecar files with other contents than the source's
    replaced: Mapping[str, bytes] = field(default_factory=dict)


def convert_options(
    dst: str | Path | Place,
    *,
    format: str | None,  # noqa: A002
    dtype: str | None,
    max_shard_size: int | str | None,
    verify: bool,
    progress: bool,
    note: str,
    names: Mapping[str, str] | None = None,
    shards: str | Path | None = None,
    made_from: tuple[str, ...] = (),
    to_folder: bool = False,
    overwrite: bool = False,
) -> ConvertOptions:
    """Check the arguments of `convert`. Raises ConfigError or TargetError."""
    place = open_place(dst)
    target = open_place(place.folder.identity) if place.is_local else place
    name = target.basename
    writable = [known.name for known in written_formats()]
    if format is not None and format not in writable:
        writers = {known.name: known.written_by for known in tensor_formats()}
        reason = writers.get(format) or expected_one_of(format, writable)
        raise ConfigError(f"format={format!r}: {reason}")
    given = None if format is None else format_named(format)
    names_folder = (
        to_folder or place.is_folder or str(dst).endswith("/") or not PurePath(name).suffix
    )
    to_folder = names_folder or (given is not None and given.folder_writer is not None)
    known = given or (
        format_named(DEFAULT_FORMAT) if to_folder else detect.format_by_suffix(str(target))
    )
    if place.is_object and to_folder:
        raise TargetError(
            f"{target}: a file, expected a folder for {known.name}; choose another path"
        )
    if not to_folder and max_shard_size is not None:
        raise ConfigError(
            f"max_shard_size={max_shard_size!r}: {name} is one file; give a folder to have several"
        )
    if max_shard_size is not None and not is_size(max_shard_size):
        raise ConfigError(
            f"max_shard_size={max_shard_size!r}: expected bytes, or a size such as '5GB', above 0"
        )
    if shards is not None and (
        known.folder_writer is None or known.folder_writer.write_shards is None
    ):
        raise ConfigError(
            f"shards={str(shards)!r}: format {known.name!r} has no shards by name; leave it out"
        )
    most = parse_size(max_shard_size or "50GB")
    return ConvertOptions(
        place.location,
        target,
        known,
        to_folder,
        canonical_dtype(dtype),
        names or {},
        most,
        verify,
        progress,
        note,
        read_shard_rules(shards),
        made_from,
        overwrite=overwrite,
    )


def check_apart(sources: Sequence[Place], options: ConvertOptions) -> None:
    """Raise ConfigError if the target folder lies in a source folder, or is a checkpoint that
    contains a source.
    """
    target = options.target
    there, replaces = (
        PurePosixPath(target.folder.identity),
        target.folder.stat(MANIFEST_NAME) is not None,
    )
    for source in sources:
        here = PurePosixPath(source.folder.identity)
        if options.to_folder and there.is_relative_to(here) and source.is_folder:
            raise ConfigError(
                f"{target}: in the folder that is to be read; choose a path outside of it"
            )
        if options.to_folder and replaces and here.is_relative_to(there):
            raise ConfigError(
                f"{target}: the checkpoint that {source.basename} is read from; choose a path "
                "outside of it"
            )


SLICE_BYTES = 4 << 20  # small, because memory freed by several threads stays in their heaps
DTYPES = ("float64", "float32", "bfloat16", "float16")
FLOAT_DTYPES = (
    *DTYPES,
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
Names = Mapping[str, str]


def read_map(source: str | Path | Names | None) -> dict[str, str]:
    """New names by old name, from a mapping, a JSON file or a file of lines "old new" (# begins a
    comment).

    A name that ends in * is a prefix. Raises ConfigError for another source and for ambiguous
    rules.
    """
    given = {} if source is None else source
    pairs = list(given.items()) if isinstance(given, Mapping) else _parse_map(open_place(given))
    if odd := [
        f"{old!r}" for old, new in pairs if not isinstance(old, str) or not isinstance(new, str)
    ]:
        raise ConfigError(f"{listing(odd, ', ')}: expected an old name and a new one, both text")
    wrong = [f"{old!r}" for old, new in pairs if old.endswith("*") != new.endswith("*")]
    twice = sorted({f"{old!r}" for old, _ in pairs if [one for one, _ in pairs].count(old) > 1})
    if wrong or twice:
        raise ConfigError(
            f"{listing(wrong + twice, ', ')}: expected each old name once, and * at the end of "
            "both or none"
        )
    return dict(pairs)


def _parse_map(path: Place) -> list[tuple[Any, Any]]:
    text = read_text(path.store, path.name)
    if text.lstrip().startswith("{"):
        try:
            return [(old, new) for old, new in json.loads(text, object_pairs_hook=list)]
        except ValueError as error:
            raise ConfigError(
                f"{path}: not JSON ({error}); expected old names and new ones"
            ) from error
    lines = _split_lines(text)
    if wrong := [" ".join(line) for line in lines if len(line) != 2]:
        raise ConfigError(
            f"{path}: {listing(wrong)}: expected an old name and a new one in each line"
        )
    return [(line[0], line[1]) for line in lines]


def check_used(table: Names, names: Iterable[str], source: str) -> None:
    """Raise SelectionError for old names and prefixes in `table` that match none of `names`."""
    there = list(names)
    prefixes = [
        old
        for old in table
        if old.endswith("*") and any(name.startswith(old[:-1]) for name in there)
    ]
    if unknown := sorted(table.keys() - {*there, *prefixes}):
        raise SelectionError(
            f"{listing(unknown, ', ')}: to be renamed, but not in {source}; "
            "`ft-ckpt show` lists names"
        )


def rename_tensors(names: Iterable[str], table: Names) -> dict[str, str]:
    """New names by old. An exact rule takes precedence over a prefix, a longer prefix over a
    shorter one.

    Raises SelectionError naming tensors that would get the same name.
    """
    prefixes = sorted((old for old in table if old.endswith("*")), key=len, reverse=True)
    new = {}
    for name in names:
        rule = next((old for old in prefixes if name.startswith(old[:-1])), None)
        if name in table or rule is None:
            new[name] = table.get(name, name)
        else:
            new[name] = table[rule][:-1] + name[len(rule) - 1 :]
    first_names: dict[str, str] = {}
    conflicts = []
    for name, renamed in new.items():
        first = first_names.setdefault(renamed, name)
        if first != name:
            conflicts.append(f"{name} and {first} -> {renamed}")
    if conflicts:
        raise SelectionError(
            f"{listing(conflicts)}: two tensors would have one name; rename one of them differently"
        )
    return new


class TranslatedFile:
    """`file` with its tensors renamed by `names` (see `read_map`) and its floats cast to `dtype`,
    if given.
    """

    def __init__(self, file: TensorFile, names: Names, dtype: str | None) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r}: {expected_one_of(dtype, DTYPES)}")
        ties: Names = getattr(file, "ties", {})
        new = rename_tensors([*file.specs, *ties], names)
        self.file, self.old = file, {new[name]: name for name in file.specs}
        self.specs = {
            new[name]: Spec(
                new[name], spec.shape, dtype if dtype and spec.dtype in FLOAT_DTYPES else spec.dtype
            )
            for name, spec in file.specs.items()
        }
        self.ties = {new[name]: new[kept] for name, kept in ties.items()}
        self.metadata: dict[str, str] = dict(getattr(file, "metadata", {}))
        self.skipped: tuple[str, ...] = tuple(getattr(file, "skipped", ()))
        self.overflown: set[str] = set()  # names of tensors in which the cast gave infinity

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of a tensor; None if it is cast or not stored byte for byte."""
        old = self.old[name]
        return (
            tensor_runs(self.file, old)
            if self.file.specs[old].dtype == self.specs[name].dtype
            else None
        )

    @property
    def casts(self) -> dict[str, int]:
        """ "float32->bfloat16": number of tensors, including casts by the file itself."""
        dtypes = (
            (self.file.specs[self.old[name]].dtype, spec.dtype) for name, spec in self.specs.items()
        )
        own = Counter(f"{before}->{after}" for before, after in dtypes if before != after)
        return dict(Counter(getattr(self.file, "casts", {})) + own)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the tensor with the new name `name`: 1-D, on the CPU, in
        its new dtype.
        """
        data = self.file.read(self.old[name], start, stop)
        wanted = getattr(torch, self.specs[name].dtype)
        if data.dtype == wanted:
            return data.contiguous()
        cast = data.to(wanted)
        if not is_within(data, wanted) and bool(
            (cast.isinf() & data.to(torch.float64).isfinite()).any()
        ):
            self.overflown.add(name)
        return cast

    def close(self) -> None:
        self.file.close()


class UntiedFile:
    """`file` with each name of a tied tensor as a separate tensor, for formats without ties."""

    def __init__(self, file: TensorFile) -> None:
        ties: Names = getattr(file, "ties", {})
        self.file = file
        self.old = {**{name: name for name in file.specs}, **ties}
        self.specs = {
            name: Spec(name, file.specs[old].shape, file.specs[old].dtype)
            for name, old in self.old.items()
        }
        self.metadata: dict[str, str] = dict(getattr(file, "metadata", {}))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.file.read(self.old[name], start, stop)

    def close(self) -> None:
        self.file.close()


def tensor_runs(file: TensorFile, name: str) -> list[ByteRun] | None:
    """The byte ranges of a tensor; None if the file does not store it byte for byte."""
    ask = getattr(file, "runs", None)
    found: list[ByteRun] | None = None if ask is None else ask(name)
    return found and [replace(run, name=name) for run in found]


def read_slices(file: TensorFile, specs: list[Spec]) -> Iterator[tuple[Spec, Tensor]]:
    """Every tensor of `specs` in order, as slices of at most SLICE_BYTES."""
    for spec in specs:
        count = spec.numel
        step = SLICE_BYTES * count // max(spec.size_bytes, 1) or 1
        for low in range(0, count, step):
            yield spec, file.read(spec.name, low, min(low + step, count))


def check_copy(wanted: TensorFile, found: TensorFile, source: str) -> None:
    """Raise CorruptError naming every tensor of `found` that differs in any bit from `wanted`.

    Reads slice by slice.
    """
    wrong = spec_differences(_all_specs(wanted), _all_specs(found))
    for name, spec in wanted.specs.items():
        if found.specs.get(name) != spec:
            continue
        pairs = zip(read_slices(wanted, [spec]), read_slices(found, [spec]), strict=True)
        if not all(
            torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            for (_, one), (_, other) in pairs
        ):
            wrong.append(f"{name}: other values")
    if wrong:
        raise CorruptError(
            f"{source}: {listing(wrong)}: differs from what was written; nothing "
            "is kept, check the disk"
        )


def spec_differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """A line for each name that is missing, unexpected, or has another shape or dtype in
    `theirs`.
    """
    wrong = [f"{name}: missing" for name in ours if name not in theirs]
    wrong += [f"{name}: unexpected" for name in theirs if name not in ours]
    wrong += [
        f"{n}: {theirs[n]}, expected {ours[n]}"
        for n in ours
        if n in theirs and theirs[n] != ours[n]
    ]
    return wrong


def _all_specs(file: TensorFile) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {name: (spec.shape, spec.dtype) for name, spec in file.specs.items()}
    return found | {name: found[kept] for name, kept in getattr(file, "ties", {}).items()}


@dataclass(frozen=True)
class Output:
    """One planned weight file: the plan of its bytes and the layout of its tensors."""

    plan: FilePlan
    inner: FilePlan  # the plan with a record for each tensor; differs from `plan` for an archive
    file: TensorFile
    archive: TorchArchive | None = None

    def regions(self) -> Iterator[Region]:
        """The file's bytes in order."""
        found = _read_regions(self.file, self.inner.layout)
        return found if self.archive is None else _archive_regions(self.archive, found)


def plan_output(known: TensorFormat, path: str, file: TensorFile) -> Output:
    """The plan of the file `path` in format `known` with the tensors of `file`.

    Raises SelectionError naming tensors whose dtypes or names the format cannot store.
    """
    specs, ties = list(file.specs.values()), dict(getattr(file, "ties", {}))
    # transformers refuses files without it
    metadata = {"format": "pt", **getattr(file, "metadata", {})}
    if known.lay_out_archive is not None:
        archive = known.lay_out_archive(specs, metadata, ties)
        inner = Layout(b"", archive.specs, archive.starts, archive.layout.size_bytes)
        return Output(FilePlan(path, archive.layout), FilePlan(path, inner), file, archive)
    plan = FilePlan(path, known.lay_out_file(specs, metadata, ties))
    if changed := sorted(file.specs.keys() - {spec.name for spec in plan.layout.specs}):
        raise SelectionError(
            f"{listing(list(map(repr, changed)))}: not a name for format {known.name!r}; rename it"
        )
    return Output(plan, plan, file)


def _read_regions(file: TensorFile, layout: Layout) -> Iterator[Region]:
    """The bytes of the tensors: unchanged ones are copied in blocks, others are read slice by
    slice.
    """
    starts = {spec.name: start for spec, start in zip(layout.specs, layout.starts, strict=True)}
    stored = {spec.name: tensor_runs(file, spec.name) for spec in layout.specs}

    def place(name: str, address: int, size_bytes: int, keeper: Any) -> Region:
        starts[name] += size_bytes
        return Region(starts[name] - size_bytes, address, size_bytes, keeper)

    for plain, some in groupby(layout.specs, lambda spec: stored[spec.name] is not None):
        if plain:
            for part in read_ahead(run for spec in some for run in stored[spec.name] or ()):
                yield place(part.run.name, part.address, part.size_bytes, part)
        else:
            for spec, data in _prefetch_items(read_slices(file, list(some))):
                yield place(spec.name, data.data_ptr(), data.nbytes, data)


def _prefetch_items(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`; a thread prepares the next item while one is in use, so that reading and
    writing overlap.
    """
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1, "ft_ckpt-read") as reader:
        coming = reader.submit(next, iterator, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, iterator, end)
            yield item


def _archive_regions(archive: TorchArchive, chunks: Iterator[Region]) -> Iterator[Region]:
    def places() -> Iterator[tuple[int, int]]:
        for region in chunks:  # keeps the region's memory alive until the next one
            yield region.address, region.size_bytes

    at = 0
    for part in archive.weave_bytes(places()):
        region = region_of(at, part) if isinstance(part, bytes) else Region(at, *part)
        if region.size_bytes:
            yield region
        at += region.size_bytes


def write_outputs(outputs: list[Output], store: Store, progress: bool) -> list[FileRecord]:
    """Write `outputs` into `store`, durably; `progress`: with a progress bar on a terminal."""
    total = sum(output.plan.layout.size_bytes for output in outputs)
    with (
        track_bytes(total if progress else 0, "converting") as advance,
        Writer(advance=advance) as writer,
    ):
        return [write_file(output.plan, output.regions(), store, writer) for output in outputs]


_ROOM_BYTES = 16 << 20  # reserved for sidecar files in the check of free space


@dataclass(frozen=True)
class ConvertReport:
    """A finished conversion: `bytes` of all weight files; `tensors` counts a tied tensor once."""

    path: Path | str  # or the URL
    format: str
    bytes: int
    tensors: int
    seconds: float
    casts: Mapping[str, int]  # "float32->bfloat16": number of tensors
    skipped: tuple[str, ...]  # "name: type" of non-tensor values
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
    checkpoint of ours or a folder of torch's distributed checkpoint, DeepSpeed, TensorFlow or
    orbax. `dst` is a file whose suffix names the format, or a folder, which gets the sidecar files
    of a source folder and a manifest. Both may be URLs. `format`: name of the target format.
    `dtype`: cast floating-point tensors. `map`: a mapping of old tensor names to new ones, or a
    file that contains it; * at the end of both names matches any ending. `verify`: compare the
    result bit for bit with the source. `max_shard_size` (bytes or "5GB"): split the weights of a
    folder. `shards`: a file of lines "pattern shard" that assigns each tensor to a TensorFlow
    checkpoint by the first matching pattern.

    Memory holds a few slices, or one tensor if it is not stored in row-major order. Writes to a
    bucket are streamed. An existing checkpoint in a bucket cannot be replaced atomically: it is
    refused, or with `overwrite` deleted first. A source checkpoint of ours is kept open, so a save
    that replaces it meanwhile has no effect. Its files are compared with their digests before they
    are read.

    Raises ConfigError, SelectionError for invalid names and types, LoadError or CorruptError for
    the source, TargetError or NoSpaceError for the target.
    """
    source = open_place(src)
    # the name may not be UTF-8
    note = f"converted from {os.fsencode(source.basename).decode(errors='replace')}"
    names = read_map(map)
    options = convert_options(
        dst,
        format=format,
        dtype=dtype,
        names=names,
        max_shard_size=max_shard_size,
        verify=verify,
        progress=progress,
        note=note,
        shards=shards,
        overwrite=overwrite,
    )
    check_apart([source], options)
    with hold_open(source) as place, closing(open_source(place)) as opened:
        check_used(names, [*opened.specs, *getattr(opened, "ties", {})], str(source))
        options = dataclasses.replace(options, max_mode=place.mode_at(options.target))
        return write_converted(opened, place, options)


def write_converted(opened: TensorFile, place: Place, options: ConvertOptions) -> ConvertReport:
    """Write the tensors of `opened` and the sidecar files in the folder `place` with these
    `options`.

    Raises LoadError for a source without tensors.
    """
    begun, skipped = time.monotonic(), getattr(opened, "skipped", ())
    if not opened.specs:
        others = (
            f", only {listing(list(skipped))}"
            if skipped
            else "; give a file or folder that has some"
        )
        raise LoadError(f"{place.basename}: no tensors in it{others}")
    with explained(options.target):
        if options.format.folder_writer is not None:
            written = _convert_by_library(opened, place, options, options.format.folder_writer)
        else:
            written = (_convert_to_folder if options.to_folder else _convert_to_file)(
                opened, place, options
            )
    return dataclasses.replace(written, path=options.path, seconds=time.monotonic() - begun)


def open_source(path: str | Path | Place) -> TensorFile:
    """The tensors at `path` in any format; bytes are copied, so a truncated file raises an
    error.
    """
    place = open_place(path)
    with damaged_input(place):
        return (
            detect.open_tensor_file(place.open()) if place.is_object else folder.open_folder(place)
        )


def _convert_to_file(opened: TensorFile, _source: Place, options: ConvertOptions) -> ConvertReport:
    file, target = TranslatedFile(opened, options.names, options.dtype), options.target
    _refuse_listed(target)
    one = plan_output(options.format, target.name, file)
    _check_room(target.store, one.plan.layout.size_bytes)
    with replaced_object(target, options.max_mode) as stage:
        (record,) = write_outputs([one], stage.store, options.progress)
        if options.verify:
            with closing(open_source(stage)) as found:
                check_copy(file, found, target.basename)
    return _conversion_report(options, [file], record.size_bytes, ())


def _refuse_listed(target: Place) -> None:
    """Raise TargetError if the target is a file of a checkpoint, which would differ from its
    manifest.
    """
    around = checkpoint_around(target)
    if around is not None and any(
        record.path == around[1] for record in load_manifest(around[0]).files
    ):
        raise TargetError(
            f"{target}: a file of the checkpoint {around[0].url}; choose a path outside of it"
        )


def _staging_with_room(options: ConvertOptions, size_bytes: int) -> Staging:
    """Open a staging for the target, after a check of the space for weights of `size_bytes` and
    sidecar files.
    """
    store = options.target.folder
    _check_room(store, size_bytes + _ROOM_BYTES)
    if store.parent is None:
        raise ConfigError(f"{options.target}: a whole bucket, or disk; name a folder in it")
    return open_staging_at(options.target, overwrite=options.overwrite, max_mode=options.max_mode)


def _check_room(store: Store, size_bytes: int) -> None:
    """Check the free space of a local folder, see `commit.check_target`; buckets have no limit."""
    if store.local_folder is not None:
        commit.check_target(store.local_folder, size_bytes)


def _convert_by_library(
    opened: TensorFile, source: Place, options: ConvertOptions, library: FolderWriter
) -> ConvertReport:
    file = TranslatedFile(opened, options.names, options.dtype)
    whole = UntiedFile(file)  # these formats have no ties
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
                open_written = options.format.open_folder
                assert open_written is not None, "a format that is written is read"
                with closing(open_written(open_place(stage))) as found:
                    check_copy(whole, found, options.target.basename)
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
    """One part of a folder with its output files; `index` is the text of their index, None with one
    file.
    """

    part: folder.FolderPart
    file: TranslatedFile
    outputs: tuple[Output, ...]
    index_path: str
    index: str | None

    def part_record(self, kind: str) -> PartRecord:
        tensors = tuple(record for one in self.outputs for record in one.inner.records())
        groups: dict[str, list[str]] = {}
        for name, kept in self.file.ties.items():
            groups.setdefault(kept, [kept]).append(name)
        ties = tuple(map(tuple, groups.values()))
        known = self.part.record
        if known is None:
            return PartRecord(
                "", self.part.path, self.part.kind, kind, "", tensors, ties, casts=self.file.casts
            )
        new = {old: name for name, old in self.file.old.items()}
        trainable = tuple(new[name] for name in known.trainable if name in new)
        casts = {**known.casts, **self.file.casts}
        return dataclasses.replace(
            known, format=kind, tensors=tensors, ties=ties, trainable=trainable, casts=casts
        )


def _convert_to_folder(opened: TensorFile, source: Place, options: ConvertOptions) -> ConvertReport:
    parts: Sequence[folder.FolderPart] = (folder.FolderPart("", "model", opened),)
    sidecars, left = list[Stored](), list[str]()
    if isinstance(opened, folder.WeightsFolder):
        parts, (sidecars, left) = opened.parts, opened.companions()
    plans = [_plan_converted(part, options) for part in parts]
    outputs = [output for plan in plans for output in plan.outputs]
    size = sum(output.plan.layout.size_bytes for output in outputs)
    staging = _staging_with_room(options, size + sum(each.size_bytes for each in sidecars))
    store = staging.store
    try:
        _copy_companions(source.folder, [each.name for each in sidecars], store, options.dtype)
        for name, text in options.replaced.items():
            store.write(name, text)
        written = write_outputs(outputs, store, options.progress)
        for plan in plans:
            if plan.index is not None:
                store.write(plan.index_path, plan.index.encode())
            if options.verify:
                names = [output.plan.path for output in plan.outputs]
                with closing(folder.join_weight_files(store, names)) as found:
                    check_copy(plan.file, found, options.target.basename)
        written += link_second_names(options.format, written, store)
        parts_written = [plan.part_record(options.format.name) for plan in plans]
        staging.commit(
            _converted_manifest(
                opened, source, parts_written, _file_records(store, written), options
            )
        )
    finally:
        staging.discard()
    notes = (f"{listing(left, ', ')}: not taken along",) if left else ()
    return _conversion_report(options, [plan.file for plan in plans], size, notes)


def _plan_converted(part: folder.FolderPart, options: ConvertOptions) -> _ConvertedPart:
    names = _names_in_part(part, [*part.file.specs, *getattr(part.file, "ties", {})], options.names)
    file = TranslatedFile(part.file, names, options.dtype)
    stem = part.stem or (ADAPTER_FILE if part.kind == "adapter" else options.format.model_stem)
    ending, place = options.format.suffixes[0], f"{part.path}/" if part.path else ""
    index_path = f"{place}{stem}{ending}.index.json"
    shards = {f"{stem}{ending}": list(file.specs)}
    if part.kind != "adapter":  # PEFT reads one file only
        shards = split_into_files(file.specs, stem, ending, options.max_shard_bytes)
    outputs = tuple(
        plan_output(options.format, place + name, _Shard(file, names))
        for name, names in shards.items()
    )
    if len(shards) == 1:
        return _ConvertedPart(part, file, outputs, index_path, None)
    total = {"total_size": sum(spec.size_bytes for spec in file.specs.values())}
    return _ConvertedPart(part, file, outputs, index_path, shard_index(shards, total, file.ties))


def _names_in_part(part: folder.FolderPart, names: Iterable[str], table: Names) -> dict[str, str]:
    """New names by old of the tensors `names` of a part.

    `table` has the names in the whole folder, with its prefix.

    Raises SelectionError for tensors that would leave the part.
    """
    new = rename_tensors([part.prefix + name for name in names], table)
    if left := [
        f"{old} -> {name}" for old, name in new.items() if not name.startswith(part.prefix)
    ]:
        raise SelectionError(
            f"{listing(left)}: out of the part {part.path}; keep the prefix {part.prefix!r}"
        )
    return {
        old.removeprefix(part.prefix): name.removeprefix(part.prefix) for old, name in new.items()
    }


class _Shard:
    """The subset `names` of the tensors of a file."""

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
    """Write the new dtype of the weights into a config, because readers use it."""
    try:
        found = json.loads(read_text(store, name))
    except ValueError:
        return
    if isinstance(found, dict) and found.keys() & {"dtype", "torch_dtype"}:
        found |= {key: dtype for key in ("dtype", "torch_dtype") if key in found}
        store.write(name, (json.dumps(found, indent=2) + "\n").encode())


def _file_records(store: Store, written: Sequence[FileRecord]) -> tuple[FileRecord, ...]:
    """The records of all staged files; files not in `written` are read to compute their digests."""
    known = {record.path for record in written}
    others = (
        each.name for each in store.list() if each.name not in known and not is_mark(each.name)
    )
    return (*written, *(read_record(store, name) for name in others))


def _converted_manifest(
    opened: TensorFile,
    source: Place,
    parts: Sequence[PartRecord],
    files: tuple[FileRecord, ...],
    options: ConvertOptions,
) -> Manifest:
    """The manifest of a source checkpoint with the new files, or a new manifest for other
    sources.
    """
    known = opened.manifest if isinstance(opened, folder.WeightsFolder) else None
    if isinstance(opened, folder.WeightsFolder) and known is not None:
        notes = (*known.notes, options.note)
        shared = (
            _renamed_groups(opened, known.shared, options.names)
            if options.format.folder_writer is None
            else ()
        )
        return dataclasses.replace(
            known, parts=tuple(parts), files=files, notes=notes, shared=shared, number=None
        )
    named = tuple(_describe_part(part, source) for part in parts)
    kind = "adapter" if all(part.kind == "adapter" for part in named) else "full"
    created = datetime.now(timezone.utc).isoformat()
    versions = {"ft_ckpt": __version__}
    return Manifest(
        named,
        files,
        kind,
        created,
        versions=versions,
        notes=(options.note,),
        made_from=options.made_from,
        export=bool(options.made_from),
    )


def _renamed_groups(
    opened: folder.WeightsFolder, groups: Iterable[Iterable[str]], table: Names
) -> tuple[tuple[str, ...], ...]:
    """The groups of "part:name" of a manifest's `shared`, with the new names."""
    parts = {one.record.name: one for one in opened.parts if one.record is not None}

    def renamed(member: str) -> str:
        name, _, tensor = member.partition(":")
        return (
            f"{name}:{_names_in_part(parts[name], [tensor], table)[tensor]}"
            if name in parts
            else member
        )

    return tuple(tuple(map(renamed, group)) for group in groups)


def _describe_part(part: PartRecord, source: Place) -> PartRecord:
    """The part of a folder without manifest, completed from its config."""
    name = "adapter_config.json" if part.kind == "adapter" else "config.json"
    try:
        config: Any = json.loads(read_text(source.folder, name))
    except (OSError, ValueError):
        return part
    if not isinstance(config, dict):
        return part
    if part.kind == "adapter":
        return dataclasses.replace(
            part,
            name="default",
            adapter="default",
            active=True,
            class_name="PeftModel",
            base=named_base(config),
        )
    names = config.get("architectures")
    return dataclasses.replace(
        part, class_name=str(names[0]) if isinstance(names, list) and names else ""
    )


def named_base(settings: Mapping[str, Any]) -> BaseRecord:
    """The base that the config of an adapter names."""
    named = [settings.get(field) for field in ("base_model_name_or_path", "revision")]
    identity, revision = (value if isinstance(value, str) else None for value in named)
    return BaseRecord(identity, revision, "float32", "", {})


def _conversion_report(
    options: ConvertOptions, files: list[TranslatedFile], size: int, notes: tuple[str, ...]
) -> ConvertReport:
    casts = dict(sum((Counter(file.casts) for file in files), Counter[str]()))
    beyond = sorted(name for file in files for name in file.overflown)
    if beyond:
        notes = (
            *notes,
            (
                f"{listing(beyond, ', ')}: values beyond what {options.dtype} can "
                "hold have become infinite"
            ),
        )
    skipped = tuple(what for file in files for what in file.skipped)
    tensors = sum(len(file.specs) for file in files)
    return ConvertReport(
        options.path, options.format.name, size, tensors, 0.0, casts, skipped, notes
    )
