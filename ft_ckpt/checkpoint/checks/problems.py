"""Compares the files of a checkpoint with its manifest, without changing a file or torch."""

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import PurePosixPath
from typing import TypeVar

from ft_ckpt.checkpoint.manifest import (
    MANIFEST_LIMIT_BYTES,
    Manifest,
    PartRecord,
    is_other_version,
    misleading_files,
    misleading_problem,
)
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    MissingError,
    Problem,
    UnreadableError,
    listing,
    reason_of,
)
from ft_ckpt.formats import TensorRecord
from ft_ckpt.formats.safetensors import HELPER, read_header
from ft_ckpt.storage import Store, Stored, read_text
from ft_ckpt.storage.digests import (
    SMALL_BYTES,
    FileRecord,
    digest_problems,
    size_problem,
    unread_problem,
)

PAUSES_SECONDS = (0.2, 1.0)  # before each retry of a read that the system has refused
_T = TypeVar("_T")


def are_transient(problems: Collection[Problem]) -> bool:
    """Check whether there are problems, all of them of files that the system cannot read now.

    In that case the checkpoint may be whole.
    """
    return bool(problems) and all(problem.is_transient for problem in problems)


def retry_transient(read: Callable[[], _T], is_transient: Callable[[_T], bool]) -> _T:
    """Call `read` up to three times while its result is transient; return the last result."""
    for seconds in PAUSES_SECONDS:
        result = read()
        if not is_transient(result):
            return result
        time.sleep(seconds)
    return read()


def checkpoint_problems(
    store: Store, manifest: Manifest, *, deep: bool, left_out: Collection[str] = ()
) -> Iterator[Problem]:
    """Yield every problem that `verify` reports.

    The digests of small files are always compared. With `deep`, the digests of all files are
    compared, except for the files `left_out` and hard links to these.
    """
    objects = _list_folders_of(store, manifest)
    intact: list[FileRecord] = []  # in size
    for file in manifest.files:
        problem = _size_problem(store, file, objects.get(file.path))
        if problem is None:
            intact.append(file)
        else:
            yield problem

    for name in misleading_files(store, manifest):
        yield misleading_problem(name)
    intact_paths = {file.path for file in intact}
    yield from _tensor_problems(store, manifest, intact_paths)
    for part in manifest.parts:
        yield from _index_problems(store, part, intact_paths)
    compared: list[FileRecord] = []
    for file in intact:
        is_new = is_other_version(file, objects.get(file.path))
        if deep or _is_small(file) or is_new:
            compared.append(file)

    if left_out:
        left_out_keys = {file_key(store, name) for name in left_out}
        compared = [file for file in compared if file_key(store, file.path) not in left_out_keys]

    yield from digest_problems(store, distinct_files(store, compared))


def replaced_problems(
    store: Store, manifest: Manifest, objects: Mapping[str, Stored]
) -> list[Problem]:
    """Return a problem for each object that was overwritten with other bytes after the commit.

    A copy by another tool is not a problem, because it is another version of the same bytes.
    """
    rewritten = [file for file in manifest.files if is_other_version(file, objects.get(file.path))]
    return digest_problems(store, rewritten)


def file_problems(store: Store, file: FileRecord) -> list[Problem]:
    """Return a problem if the size or the digest of the file differs from its record."""
    problem = _size_problem(store, file, None)
    return [problem] if problem else digest_problems(store, [file])


def large_files(store: Store, manifest: Manifest) -> list[FileRecord]:
    """Return the files whose digests are not compared whenever the checkpoint is opened.

    Of several hard links to one file, return one.
    """
    return distinct_files(store, [file for file in manifest.files if not _is_small(file)])


def distinct_files(store: Store, files: Iterable[FileRecord]) -> list[FileRecord]:
    """Return the files, with one of several hard links that have the same digest."""
    by_content: dict[tuple[str, object], FileRecord] = {}
    for file in files:
        by_content.setdefault((file.digest, file_key(store, file.path)), file)
    return list(by_content.values())


def stored_bytes(store: Store, manifest: Manifest) -> int:
    """Return the total size of the files in the manifest; hard links are counted once."""
    sizes = {file_key(store, file.path): file.size_bytes for file in manifest.files}
    return sum(sizes.values())


def file_key(store: Store, name: str) -> object:
    """Return a key that is equal for all hard links of one file.

    For a missing file and for an object in a bucket, the key is the name.
    """
    try:
        stored = None if store.local_folder is None else store.stat(name)
    except UnreadableError:
        stored = None
    return store.where(name) if stored is None else (stored.version, stored.modified)


def _is_small(file: FileRecord) -> bool:
    return file.size_bytes < SMALL_BYTES


def _list_folders_of(store: Store, manifest: Manifest) -> dict[str, Stored]:
    """List the objects in all folders of the manifest's files, by name."""
    objects: dict[str, Stored] = {}
    for folder in {str(PurePosixPath(file.path).parent) for file in manifest.files}:
        listed = store.list_folder("" if folder == "." else folder)
        objects.update({stored.name: stored for stored in listed.objects})
    return objects


def _size_problem(store: Store, file: FileRecord, stored: Stored | None) -> Problem | None:
    """Return the problem with the size of a file that was listed as `stored`, or None.

    A file that was not listed is opened, for the reason why it is missing.
    """
    try:
        if stored is not None:
            size_bytes = stored.size_bytes
        else:
            with closing(store.open(file.path)) as opened:
                size_bytes = opened.size_bytes
    except MissingError as error:
        return Problem(f"{file.path}: missing ({reason_of(error)})")
    except UnreadableError as error:
        return unread_problem(file.path, error)
    except CorruptError:
        return Problem(f"{file.path}: not a file")

    if size_bytes != file.size_bytes:
        return Problem(f"{file.path}: {size_problem(size_bytes, file.size_bytes)}")
    return None


# Tensors in headers


def _tensor_problems(store: Store, manifest: Manifest, intact: set[str]) -> Iterator[Problem]:
    records: dict[str, list[TensorRecord]] = {}
    for part in manifest.parts:
        for tensor in part.tensors:
            records.setdefault(tensor.file, []).append(tensor)
    listed = {file.path for file in manifest.files}
    for file, tensors in records.items():
        if file not in listed:
            yield Problem(f"{file}: holds {len(tensors)} tensors but is not among the listed files")
        elif file in intact and file.endswith(".safetensors"):
            yield from _header_problems(store, file, tensors)


def _header_problems(store: Store, file: str, tensors: list[TensorRecord]) -> Iterator[Problem]:
    try:
        with closing(store.open(file)) as opened:
            header = read_header(opened)
    except UnreadableError as error:
        yield unread_problem(file, error)
        return
    except CorruptError as error:
        yield Problem(f"{file}: not a readable safetensors file ({error})")
        return

    expected = {
        tensor.name: (tensor.dtype, tensor.shape, tensor.start, tensor.end) for tensor in tensors
    }
    missing = sorted(expected.keys() - header.keys())
    if missing:
        yield Problem(f"{file}: tensors missing: {listing(missing, ', ')}")
    unlisted = sorted(header.keys() - expected.keys() - {HELPER})
    if unlisted:
        yield Problem(f"{file}: tensors that the manifest does not list: {listing(unlisted, ', ')}")
    changes = []
    for name in sorted(expected.keys() & header.keys()):
        if header[name] != expected[name]:
            before, now = _tensor_text(expected[name]), _tensor_text(header[name])
            changes.append(f"{name} is {now}, expected {before}")

    if changes:
        yield Problem(f"{file}: {listing(changes, ', ')}")


def _tensor_text(entry: tuple[str, tuple[int, ...], int, int]) -> str:
    dtype, shape, start, end = entry
    return f"{dtype} {list(shape)} at bytes {start:,} to {end:,}"


# Indexes of shards


def _index_problems(store: Store, part: PartRecord, intact: set[str]) -> Iterator[Problem]:
    """Yield the problems of the index of a part, which must map each tensor to its file."""
    folder = f"{part.path}/" if part.path else ""
    pattern = re.compile(rf"{re.escape(folder)}[^/]+\.safetensors\.index\.json")
    indexes = sorted(name for name in intact if pattern.fullmatch(name))
    files = {tensor.file for tensor in part.tensors}
    is_sharded = len(files) > 1 and all(file.endswith(".safetensors") for file in files)

    # a training state has one file for each rank, and its own reader
    if is_sharded and not indexes and part.kind != "state":
        yield Problem(
            f"{folder or './'}: {len(files)} shards without an index; readers of sharded "
            "weights need one"
        )

    for name in indexes:
        try:
            indexed = _indexed_files(store, name, folder)
        except UnreadableError as error:
            yield unread_problem(name, error)
            continue
        expected = _expected_files(part, indexed)
        tensors = sorted(expected.keys() | indexed.keys())
        wrong = [tensor for tensor in tensors if expected.get(tensor) != indexed.get(tensor)]
        if wrong:
            yield Problem(
                f"{name}: maps these tensors to other files than the manifest: "
                f"{listing(wrong, ', ')}"
            )


def _expected_files(part: PartRecord, indexed: Collection[str]) -> dict[str, str]:
    """Return the file of each tensor, and of each tied name that the index has (optional)."""
    files = {tensor.name: tensor.file for tensor in part.tensors}
    expected = dict(files)
    for stored_name, *tied_names in part.ties:
        for name in tied_names:
            if stored_name in files and name in indexed and name not in files:
                expected[name] = files[stored_name]
    return expected


def _indexed_files(store: Store, index: str, folder: str) -> dict[str, str]:
    try:
        entries = json.loads(read_text(store, index, MANIFEST_LIMIT_BYTES))["weight_map"]
        return {name: f"{folder}{file}" for name, file in entries.items()}
    except UnreadableError:
        raise
    except (
        AttributeError,
        CheckpointError,
        KeyError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ):
        return {}
