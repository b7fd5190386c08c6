"""Reads and writes torch files (.pt, .bin, .pth), zip and legacy.

`torch.load(weights_only=True)` reads them: it maps zip files, and reads those of torch before 1.6
as a whole. Objects of classes that are not imported become stand-ins; nothing in a pickle is run.
The checksums of a zip file are compared before its tensors are used.

Source of what is written: the layout of `torch.save` archives. One zip file without compression:
`archive/data.pkl` names the tensors and the record of each storage, `archive/data/N` are the
storages, each at a multiple of 64 bytes, followed by its checksum. To write, torch makes such a
file without the bytes of the storages, which are then inserted.
"""

import ctypes
import io
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from threading import Lock
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    LoadError,
    SelectionError,
    TargetError,
    damaged_input,
    explained,
    listing,
    shown,
    system_error,
)
from ft_ckpt.formats import (
    ITEM_BYTES,
    MOST_LEVELS,
    PLAIN,
    PLAIN_VALUES,
    SCALARS,
    ZIP_MAGIC,
    FileStream,
    Layout,
    RawFile,
    Spec,
    StandIn,
    dtype_name,
    quoted_key,
    record_span,
    stand_in,
)
from ft_ckpt.storage import LocalFile, copy_object, open_local_file, temporary_store

# Objects of these packages become stand-ins: they are common in training checkpoints and not needed
# for the tensors.
_HARMLESS = frozenset(
    (
        "argparse",
        "deepspeed",
        "enum",
        "numpy",
        "omegaconf",
        "pathlib",
        "peft",
        "torch",
        "transformers",
    )
)
_make_array = np.empty(0).__reduce__()[0]
_VALUES: Mapping[str, Any] = {  # what torch does not accept by itself, and gives plain values
    **PLAIN_VALUES,
    **{f"builtins.{made.__name__}": made for made in (int, float, str, dict, list, tuple)},
    "numpy.core.multiarray._reconstruct": _make_array,
    "numpy._core.multiarray._reconstruct": _make_array,
    "numpy.ndarray": np.ndarray,
}
_NUMPY_TYPES = tuple({type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"})
# how files begin
_LEGACY, _BARE = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", (b"\x80\x02}", b"\x80\x02c")
_BLOCK_BYTES = 1 << 20  # of a record, read at a time
_STREAM_BYTES = 8 << 20  # read at a time from afar
_ACCEPTED = Lock()  # the classes that torch accepts are the same for all threads of a process

Source = Path | BinaryIO  # what torch and zipfile read


def is_harmless(full_name: str) -> bool:
    """Whether a stand-in may take the place of this class or function in any torch file."""
    return full_name.partition(".")[0] in _HARMLESS


def load_torch_value(
    file: RawFile, admits: Callable[[str], bool] = is_harmless, *, mapped: bool = True
) -> Any:
    """The value in a torch file, with its tensors on the CPU: mapped from a local zip file, or else
    in memory.

    Objects whose classes are not imported are stand-ins; `admits` says for which full names. Raises
    LoadError naming all others; CorruptError for a damaged file.
    """
    with damaged_input(f"{file.name}: saved by torch"):
        file.check()
        head = bytes(file.bytes(0, min(16, file.size_bytes)))
        if head.startswith(_BARE):
            raise LoadError(
                f"{file.name}: a pickle, but none that torch.save wrote; save "
                "its tensors with torch.save"
            )
        if head.startswith(_LEGACY):
            return _load_legacy(file)
        source = _source_of(file)
        _check_archive(source, file.name)
        return _load_zip(source, file.name, admits, mmap=mapped and isinstance(source, Path))


def load_torch_part(file: RawFile, start: int, size_bytes: int) -> Any:
    """The value in the torch zip file at [start, start + size_bytes) of `file`, in memory.

    Its checksums are compared. Raises as `load_torch_value` does.
    """
    with damaged_input(f"{file.name}: saved by torch"):
        part = io.BufferedReader(FileStream(file, start, size_bytes), _STREAM_BYTES)
        _check_archive(part, file.name)
        _compare_archive(part, file.name)
        return _load_zip(part, file.name, is_harmless, mmap=False)


def _load_legacy(file: RawFile) -> Any:
    stream = io.BufferedReader(FileStream(file), _STREAM_BYTES)
    value = _load_safely(stream, file.name, (), mmap=False)
    rest_bytes = file.size_bytes - stream.tell()
    if rest_bytes:
        raise CorruptError(
            f"{rest_bytes:,} bytes after its last storage; use another copy of the file"
        )
    return value


def _source_of(file: RawFile) -> Source:
    """The path of the descriptor of a local file, which stays the same file; a stream for an object
    in a bucket.
    """
    if isinstance(file.file, LocalFile):
        return Path(f"/proc/self/fd/{file.file.descriptor}")
    return io.BufferedReader(FileStream(file), _STREAM_BYTES)


def _load_zip(source: Source, name: str, admits: Callable[[str], bool], *, mmap: bool) -> Any:
    _rewind(source)
    unknown = get_unsafe_globals_in_checkpoint(source)
    refused = sorted(
        full_name for full_name in unknown if full_name not in _VALUES and not admits(full_name)
    )
    if refused:
        raise LoadError(
            f"{name}: refers to {listing(refused, ', ')}; expected tensors and plain data. "
            "Nothing of it was run; save a state dict alone, or load it yourself if you trust it"
        )
    return _load_safely(source, name, unknown, mmap=mmap)


def _load_safely(source: Source, name: str, unknown: Iterable[str], *, mmap: bool) -> Any:
    """The value that torch reads without running code; `unknown` are names that become values or
    stand-ins.
    """
    accepted: list[Any] = [(kind, f"{kind.__module__}.{kind.__name__}") for kind in _NUMPY_TYPES]
    for full_name in unknown:
        value = _VALUES[full_name] if full_name in _VALUES else stand_in(full_name)
        accepted.append((value, full_name))
    _rewind(source)
    try:
        with _ACCEPTED, safe_globals(accepted):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except UnpicklingError as error:
        raise LoadError(
            f"{name}: torch does not read it without running code ({_reason_of(error)}); save a "
            "state dict alone"
        ) from error


def _reason_of(error: UnpicklingError) -> str:
    """What torch's reader met, without its advice to trust the file."""
    met = error.__context__ or error  # torch puts its own message around that of its reader
    return shown(met).partition(" Please use")[0]


def _rewind(source: Source) -> None:
    if not isinstance(source, Path):
        source.seek(0)


# Checksums


def _check_archive(source: Source, name: str) -> None:
    """Compare the checksums of all records but the storages.

    Raises LoadError for a program of TorchScript.
    """
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            raise LoadError(
                f"{name}: a TorchScript program, expected saved tensors; save "
                "its state_dict() instead"
            )
        compressed = [
            entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED
        ]
        if compressed:
            raise CorruptError(
                f"{name}: {listing(compressed, ', ')}: compressed, which torch never does; zip the "
                "files again with -0"
            )
        if _has_sums(entries):
            _compare_records(
                archive, [entry for entry in entries if "/data/" not in entry.filename], name
            )


def _compare_archive(source: Source, name: str) -> bool:
    """Compare all checksums; False if there are none."""
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
        if not _has_sums(entries):
            return False
        _compare_records(archive, entries, name)
        return True


def _has_sums(entries: Sequence[zipfile.ZipInfo]) -> bool:
    return any(entry.CRC for entry in entries)  # torch can omit all of them


def _compare_records(
    archive: zipfile.ZipFile, entries: Iterable[zipfile.ZipInfo], name: str
) -> None:
    """Read records to their end, at which zipfile compares their checksum."""
    for entry in entries:
        record = entry.filename.partition("/")[2]
        try:
            with archive.open(entry) as stream:
                while stream.read(_BLOCK_BYTES):
                    pass
        except zipfile.BadZipFile as error:
            raise CorruptError(
                f"{name}: {record} is damaged (its checksum differs); use another copy of the file"
            ) from error


def check_sums(file: RawFile) -> None:
    """Compare the records of a torch file with their checksums.

    Raises CorruptError where one differs, ConfigError for a file without checksums.
    """
    if not compare_sums(file):
        raise ConfigError(
            f"verify=True: {file.name} has no checksums, as those of torch before 1.6; leave it out"
        )


def compare_sums(file: RawFile) -> bool:
    """Compare the records of a torch file with their checksums; False if it has none.

    Raises CorruptError.
    """
    with damaged_input(file.name):
        file.check()
        if bytes(file.bytes(0, min(4, file.size_bytes))) != ZIP_MAGIC:
            return False
        return _compare_archive(_source_of(file), file.name)


# Values


def kind_of_leaf(leaf: Any) -> str:
    """The type of a value in a torch file, also for stand-ins."""
    return leaf.kind if is_stand_in(leaf) else type(leaf).__name__


def is_stand_in(leaf: Any) -> bool:
    """Whether a value takes the place of an object, a class or a function."""
    return isinstance(leaf, StandIn) or (isinstance(leaf, type) and issubclass(leaf, StandIn))


def holds_tensors(leaf: Any) -> bool:
    """Whether a value has tensors or storages in it, also as arguments of an object of an unknown
    class.
    """
    stack, seen = [leaf], set()
    while stack:
        value = stack.pop()
        if isinstance(value, (Tensor, torch.TypedStorage, torch.UntypedStorage)):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, StandIn):
            stack += [value.args, value.state]
        elif isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            stack += value
    return False


def named_leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of nested dicts, lists and tuples, in order.

    Raises CorruptError for too many levels.
    """
    stack: list[tuple[str, Any, int]] = [("", value, 0)]
    while stack:
        name, part, level = stack.pop()
        if not isinstance(part, (dict, list, tuple)):
            yield name, part
            continue
        if level >= MOST_LEVELS:
            raise CorruptError(
                f"{name[:60]}: over {MOST_LEVELS} levels deep, or it contains itself"
            )
        items = list(part.items()) if isinstance(part, dict) else list(enumerate(part))
        for key, item in reversed(items):
            stack.append((f"{name}.{key}" if name else str(key), item, level + 1))


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that are one: memory, type, shape and strides."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def split_tensors(value: Any, source: str) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of nested dicts and lists by dotted name, and descriptions of all other values.

    Raises LoadError when two of them get one name, for tensors that are not plain dense data, and
    for tensors inside objects of unknown classes.
    """
    tensors: dict[str, Tensor] = {}
    repeated, unreadable, skipped = [], [], []
    for path, leaf in named_leaves(value):
        name = "tensor" if leaf is value else path
        if isinstance(leaf, Tensor):
            peculiarity = _peculiarity_of(leaf)
            unreadable += [f"{name} ({peculiarity})"] if peculiarity else []
            repeated += [name] if name in tensors else []
            tensors[name] = leaf
        elif holds_tensors(leaf):
            unreadable.append(f"{name} (tensors in an object of {kind_of_leaf(leaf)})")
        else:
            skipped.append(f"{name}: {kind_of_leaf(leaf)}")
    if repeated:
        raise LoadError(
            f"{source}: {listing(repeated, ', ')}: names of several tensors once nesting is "
            "written as dots"
        )
    if unreadable:
        raise LoadError(
            f"{source}: {listing(unreadable, ', ')}: expected plain dense tensors; save them so "
            "(`tensor.dequantize()` for quantized ones), or leave them out"
        )
    return tensors, skipped


def _peculiarity_of(tensor: Tensor) -> str:
    """Why a tensor is not plain dense elements in memory; empty if it is."""
    if type(tensor) not in PLAIN:
        return f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    if tensor.is_conj() or tensor.is_neg():
        return "lazily conjugated or negated"
    if tensor.device.type != "cpu":
        return f"without elements, on the device {tensor.device}"
    return "" if dtype_name(tensor.dtype) in ITEM_BYTES else str(tensor.dtype)


class TorchFile:
    """The tensors of an open torch file by name; a `TensorFile`.

    Checksums are compared before the first read. Tensors in another order than row-major are
    copied, one at a time.
    """

    def __init__(
        self, file: RawFile, tensors: Mapping[str, Tensor], skipped: Sequence[str] = ()
    ) -> None:
        """`skipped`: "name: kind" of all other values. Further names of a tensor become `ties`.

        Raises CorruptError if elements repeat more often than is plausible for the size of the
        file.
        """
        self.file, self.skipped = file, tuple(skipped)
        self.specs: dict[str, Spec] = {}
        self.ties: dict[str, str] = {}  # further name of a tensor -> its name
        self.tensors: dict[str, Tensor] = {}
        self._are_compared = False
        self._copied: tuple[str | None, Tensor] = (None, torch.empty(0, device="cpu"))
        names: dict[tuple[Any, ...], str] = {}
        for name, tensor in tensors.items():
            first = names.setdefault(identity_of(tensor), name) if tensor.numel() else name
            if first != name:
                self.ties[name] = first
                continue
            file.promise(max(0, tensor.nbytes - tensor.untyped_storage().nbytes()), name)
            self.specs[name] = Spec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            self.tensors[name] = tensor.detach()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) in row-major order: 1-D, on the CPU, mapped from the file or
        copied.

        Raises CorruptError when a checksum differs, or the file has changed since it was opened.
        """
        if not self._are_compared:
            compare_sums(self.file)
            self._are_compared = True
        self.file.check()
        tensor = self.tensors[name]
        if tensor.is_contiguous():
            return tensor.view(-1)[start:stop]
        if self._copied[0] != name:
            # frees the last one before the next is copied
            self._copied = (None, torch.empty(0, device="cpu"))
            self._copied = (name, tensor.reshape(-1))
        return self._copied[1][start:stop]

    def close(self) -> None:
        """Close the file. Tensors that were read stay valid."""
        self.tensors = {}
        self._copied = (None, torch.empty(0, device="cpu"))
        self.file.close()


def open_torch_file(file: RawFile) -> TorchFile:
    """The tensors of a file written by `torch.save`, nested dicts and lists as dotted names;
    nothing in it is run.

    Other values are listed in `skipped`, further names of a tensor in `ties`. Raises LoadError
    naming values that are neither tensors nor plain data, and names that are not unique;
    CorruptError when the file is damaged.
    """
    local = local_copy(file)
    return TorchFile(local, *split_tensors(load_torch_value(local), file.name))


def local_copy(file: RawFile) -> RawFile:
    """The file itself, or the open copy of an object in a bucket, which torch cannot map; its name
    is gone already.
    """
    if file.can_map:
        return file
    with temporary_store() as scratch:
        copy_object(file.file, scratch, file.name)
        return RawFile(open_local_file(scratch.path(file.name)))


def is_torch_file(file: RawFile) -> bool:
    """True when the file begins as torch's do: with a zip record or a pickle."""
    head = bytes(file.bytes(0, min(16, file.size_bytes)))
    # as safetensors can begin
    return head.startswith(ZIP_MAGIC) or (head[:1] == b"\x80" and head[8:9] != b"{")


def load_torch_object(raw: RawFile, map_location: Any, mapped: bool, verify: bool) -> Any:
    """The object in an open file, its tensors on `map_location`; if that is None and `mapped`,
    mapped from the file.

    `verify` compares checksums. Raises CorruptError where the file is damaged or would run code.
    """
    if verify:
        check_sums(raw)
    with damaged_input(raw.name):
        source = _source_of(raw)
        is_zip = bytes(raw.bytes(0, min(4, raw.size_bytes))) == ZIP_MAGIC
        if is_zip:
            _check_archive(source, raw.name)
        mapped = mapped and is_zip and map_location is None and isinstance(source, Path)
        _rewind(source)
        try:
            return torch.load(source, map_location=map_location, weights_only=True, mmap=mapped)
        except UnpicklingError as error:
            reason = _reason_of(error)
            raise CorruptError(
                f"{raw.name}: torch cannot read it without running code ({reason})"
            ) from error


def load_torch_values(
    file: RawFile, objects: Mapping[str, Callable[[StandIn], Any]] = MappingProxyType({})
) -> Any:
    """The object in an open file, its tensors mapped from it.

    `objects`: functions that give the values of stand-ins, by the full names of their classes.
    Raises LoadError naming other values that are neither tensors nor plain data, CorruptError when
    the file is damaged.
    """
    return _real_value(load_torch_value(file), file.name, objects)


def _real_value(value: Any, name: str, objects: Mapping[str, Callable[[StandIn], Any]]) -> Any:
    """`value`, at the path `name`, without stand-ins."""
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind(
            (key, _real_value(item, f"{name}: {key}", objects)) for key, item in value.items()
        )
    if type(value) in (list, tuple):
        return type(value)(
            _real_value(item, f"{name}: {place}", objects) for place, item in enumerate(value)
        )
    if isinstance(value, StandIn) and value.kind in objects:
        return objects[value.kind](value)
    peculiarity = _peculiarity_of(value) if isinstance(value, Tensor) else ""
    if is_stand_in(value) or peculiarity:
        raise LoadError(
            f"{name}: a {peculiarity or kind_of_leaf(value)}, expected tensors and plain data; "
            "nothing of it was run"
        )
    return value


# Writing


_ARCHIVE = "archive"  # the folder of all records in files that we write
# signatures of an entry of the directory, and of a checksum
_ENTRY_MAGIC, _SUM_MAGIC = b"PK\1\2", b"PK\7\10"
_SUM = struct.Struct("<4sI")  # begins the bytes after a record, if it is not empty


@dataclass(frozen=True)
class TorchArchive:
    """A torch file before it is written: one run of bytes in `layout`, which `weave_bytes`
    yields.
    """

    specs: tuple[Spec, ...]
    starts: tuple[int, ...]
    layout: Layout
    # the bytes before each tensor, and those between the last one and the directory
    between: tuple[bytes, ...]
    directory: bytes  # of the zip file; the checksums of tensors are missing

    def weave_bytes(self, chunks: Iterable[tuple[int, int]]) -> Iterator[bytes | tuple[int, int]]:
        """The file's bytes in order; `chunks` are (address, bytes) of the tensors' bytes in order
        of `specs`.
        """
        feed, checksums = iter(chunks), list[int]()
        yield self.between[0]
        for spec, after in zip(self.specs, self.between[1:], strict=True):
            checksum, missing = 0, spec.size_bytes
            while missing:
                address, size = next(feed)
                checksum = zlib.crc32((ctypes.c_char * size).from_address(address), checksum)
                yield address, size
                missing -= size
            checksums.append(checksum)
            yield _SUM.pack(_SUM_MAGIC, checksum) + after[_SUM.size :] if spec.size_bytes else after
        yield self._summed_directory(checksums)

    def _summed_directory(self, checksums: Sequence[int]) -> bytes:
        """The directory with the checksums of the tensors."""
        names = {
            f"{_ARCHIVE}/data/{index}".encode(): checksum
            for index, checksum in enumerate(checksums)
        }
        found, at = bytearray(self.directory), 0
        while found.startswith(_ENTRY_MAGIC, at):
            lengths = struct.unpack_from("<HHH", found, at + 28)  # of name, extra field and comment
            name = bytes(found[at + 46 : at + 46 + lengths[0]])
            if name in names:
                struct.pack_into("<I", found, at + 16, names[name])
            at += 46 + sum(lengths)
        return bytes(found)


def _unset_tensor(spec: Spec) -> Tensor:
    """A tensor whose memory is reserved and never touched, not even by deterministic algorithms,
    which fill it.
    """
    like = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
    empty = torch.empty(0, dtype=like.dtype, device="cpu")
    return empty.set_(torch.UntypedStorage(spec.size_bytes), 0, spec.shape, like.stride())  # type: ignore[no-untyped-call]


def lay_out_torch(
    specs: Sequence[Spec], metadata: Mapping[str, str], ties: Mapping[str, str] | None = None
) -> TorchArchive:
    """A file that `torch.load` reads as a dict of tensors; `ties` are further names of a tensor.

    torch itself writes all but the tensors' bytes and their checksums, to a sparse temporary file.
    `metadata` is not stored. Raises SelectionError naming dtypes that torch cannot save.
    """
    foreign = [f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in ITEM_BYTES]
    if foreign:
        raise SelectionError(f"{listing(foreign, ', ')}: torch has no such type; convert it first")
    stands = {spec.name: _unset_tensor(spec) for spec in specs}
    stands |= {name: stands[kept] for name, kept in (ties or {}).items()}
    with temporary_store() as room:
        path = room.path(f"{_ARCHIVE}.pt")
        # torch does not report that a file is too large
        with explained(path), path.open("xb") as sparse:
            sparse.truncate(sum(spec.size_bytes for spec in specs))
        try:
            with torch.serialization.skip_data():
                torch.save(stands, path)
        except RuntimeError as error:
            raise TargetError(
                f"{path}: torch does not write it ({shown(error)}); set TMPDIR to another folder"
            ) from error
        with closing(RawFile(open_local_file(path), mapped=False)) as file:
            spans, directory_start = _storage_spans(file, len(specs))
            edges = [0, *(edge for span in spans for edge in span), directory_start]
            between = tuple(
                bytes(file.bytes(low, high - low))
                for low, high in zip(edges[::2], edges[1::2], strict=True)
            )
            directory = bytes(file.bytes(directory_start, file.size_bytes - directory_start))
            body = Spec("archive", (file.size_bytes,), "uint8")
    starts = tuple(start for start, _ in spans)
    return TorchArchive(
        tuple(specs), starts, Layout(b"", (body,), (0,), body.size_bytes), between, directory
    )


def _storage_spans(file: RawFile, count: int) -> tuple[list[tuple[int, int]], int]:
    """The bytes [start, stop) of the storages 0 to `count` - 1 in a file of torch, and the start of
    its directory.
    """
    with zipfile.ZipFile(FileStream(file)) as archive:
        entries = [archive.getinfo(f"{_ARCHIVE}/data/{index}") for index in range(count)]
        return [record_span(file, entry) for entry in entries], archive.start_dir


_MAX_BYTES_AT_ONCE = 1 << 30  # bytes written in one call; Linux takes less than 2 GB


class _CountingStream:
    """A file that torch writes into: writes everything, or keeps the first error and raises it
    again.

    torch's own writer checks neither how many bytes a call has written (Linux writes at most 2 GB)
    nor why it failed.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.size_bytes = stream, 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`. Raises OSError."""
        view = memoryview(data).cast("B")
        try:
            if self.failure is not None:
                raise self.failure
            left = view
            while left:
                left = left[self.stream.write(left[:_MAX_BYTES_AT_ONCE]) or 0 :]
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.size_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def save_torch_object(obj: Any, stage: Path) -> None:
    """Write `obj` into the new file `stage`.

    Raises TargetError, OSError, and SelectionError for tensors that share memory as several types.
    """
    with stage.open("xb", buffering=0) as stream:
        file: Any = _CountingStream(stream)
        try:
            torch.save(obj, file)
        except RuntimeError as error:
            refused = SelectionError(
                f"{stage.name}: torch does not write it ({error}); save it as HDF5"
            )
            raise file.failure or system_error(error) or refused from error
        if file.failure is not None:
            raise file.failure
    with closing(RawFile(open_local_file(stage))) as written:
        check_torch_written(written, file.size_bytes)


def check_torch_written(file: RawFile, size_bytes: int) -> None:
    """Raise TargetError unless the file that torch wrote has `size_bytes` and contains all its
    records.
    """
    where = file.file.where
    if file.size_bytes != size_bytes:
        raise TargetError(
            f"{where}: {file.size_bytes:,} bytes, torch wrote {size_bytes:,}; nothing is kept, "
            "check the disk"
        )
    try:
        with damaged_input(file.name), zipfile.ZipFile(FileStream(file)) as archive:
            for entry in archive.infolist():
                archive.open(entry).close()  # compares the entry with the head of its record
    except CorruptError as error:
        raise TargetError(
            f"{where}: what torch wrote is not whole ({error}); nothing is kept"
        ) from error


_SAVED: tuple[type, ...] = (*SCALARS, torch.Size)
_MAPPINGS, _SEQUENCES = (dict, OrderedDict, Counter), (list, tuple, set)


def check_torch_object(obj: Any, root: str = "state", classes: Collection[type] = PLAIN) -> None:
    """Raise SelectionError naming the paths in `obj` of values that torch does not read back
    without running code.

    `classes` are the allowed tensor classes. Limits that types do not show, such as the length of
    integers, are tested by saving and loading the object in memory without its tensors.
    """
    outline = _Outline(frozenset(classes))
    bare = outline.bare_value(obj, root)
    if outline.refused:
        raise SelectionError(
            f"{listing(outline.refused)}. Nothing was written; convert these, leave them out, or "
            "save as HDF5. torch reads back plain containers, numbers, strings, bytes and tensors, "
            "and anything else by running code"
        )
    trial = io.BytesIO()
    torch.save(bare, trial)
    trial.seek(0)
    try:
        torch.load(trial, weights_only=True)
    except UnpicklingError as error:
        raise SelectionError(
            f"{root}: has a value that torch would not read back, such as empty bytes or an "
            "integer of over 255 bytes. Nothing was written; save it as HDF5"
        ) from error


@dataclass
class _Outline:
    """Copies an object without its tensors, and lists the values that are refused."""

    classes: frozenset[type]
    refused: list[str] = field(default_factory=list)
    # containers by identity: shared ones are visited once
    known: dict[int, Any] = field(default_factory=dict)
    above: list[int] = field(default_factory=list)

    def bare_value(self, value: Any, place: str) -> Any:
        """`value` with None, or its extra attributes, for each tensor."""
        if type(value) in _SAVED:
            return value
        if isinstance(value, torch.Tensor):
            return self._bare_tensor(value, place)
        if type(value) not in (*_MAPPINGS, *_SEQUENCES):
            return self._refuse_place(place, f"{type(value).__module__}.{type(value).__qualname__}")
        if id(value) in self.above or len(self.above) >= MOST_LEVELS:
            what = (
                "contains itself" if id(value) in self.above else f"over {MOST_LEVELS} levels deep"
            )
            return self._refuse_place(place, what)
        if id(value) not in self.known:
            self.above.append(id(value))
            self.known[id(value)] = self._bare_container(value, place)
            self.above.pop()
        return self.known[id(value)]

    def _bare_container(self, value: Any, place: str) -> Any:
        if type(value) in _SEQUENCES:
            return type(value)(
                self.bare_value(each, f"{place}[{at}]") for at, each in enumerate(value)
            )
        made = dict(self._bare_items(value, place))
        # of an OrderedDict: torch gives a state dict some
        attributes = getattr(value, "__dict__", None)
        return (
            [made, self.bare_value(dict(attributes), f"{place}.__dict__")] if attributes else made
        )

    def _bare_items(self, value: Any, place: str) -> Iterator[tuple[Any, Any]]:
        for key, each in value.items():
            where = f"{place}[{quoted_key(key)}]"
            if type(key) in (*_SAVED, tuple):
                yield key, self.bare_value(each, where)
            else:
                self._refuse_place(where, f"a key of type {type(key).__qualname__}")

    def _bare_tensor(self, tensor: torch.Tensor, place: str) -> Any:
        if type(tensor) not in self.classes:
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            return self._refuse_place(place, f"{kind}, a tensor with a meaning of its own")
        if tensor.is_quantized:
            return self._refuse_place(place, f"a tensor of {tensor.dtype}")
        own = vars(tensor) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else {}
        return self.bare_value(dict(own), f"{place}.__dict__") if own else None

    def _refuse_place(self, place: str, what: str) -> None:
        self.refused.append(f"{place}: {what}")
