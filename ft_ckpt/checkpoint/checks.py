"""Compares the files of a checkpoint with its manifest. Reads only; needs no torch."""

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TypeVar

from ft_ckpt.checkpoint.manifest import (
    DIFFUSERS_LORA_FILE,
    DIFFUSERS_MODEL_FILE,
    MANIFEST_LIMIT_BYTES,
    Manifest,
    PartRecord,
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
from ft_ckpt.formats import HELPER, TensorRecord, read_header
from ft_ckpt.storage import (
    SMALL_BYTES,
    FileRecord,
    Store,
    Stored,
    digest_problems,
    etag_of,
    read_record,
    read_text,
    size_problem,
    unread_problem,
)

PAUSES_SECONDS = (0.2, 1.0)  # before each retry of a read that the system refused
_T = TypeVar("_T")

# The names by which readers find the weights of a model or an adapter. A file with such a name that
# the manifest does not list is left from another save: from_pretrained prefers model.safetensors to
# an index, vLLM reads every shard, and an adapter_config.json beside a model is applied to it. An
# adapter's folder may be its base's: only names of adapters count there.
_WEIGHTS = r"(-\d+-of-\d+)?\.(safetensors|bin|h5)(\.index\.json)?"
_MISLEADING = {
    "model": re.compile(
        rf"((pytorch_)?model|{DIFFUSERS_MODEL_FILE}){_WEIGHTS}|adapter_config\.json"
    ),
    "module": re.compile(rf"(pytorch_)?model{_WEIGHTS}|adapter_config\.json"),
    "adapter": re.compile(rf"(adapter_model|{DIFFUSERS_LORA_FILE}){_WEIGHTS}"),
}


# the model card, which the Trainer, PEFT and people write again after a save
CARD_NAME = "README.md"


def with_current_cards(
    store: Store, manifest: Manifest, listed: Mapping[str, Stored] | None = None
) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest with the records of the model cards as they are in `store` now, and a note for
    each change.

    `listed` are the objects of a bucket: a card is read only if its version is another one.
    """
    cards = {
        PurePosixPath(part.path, CARD_NAME).as_posix()
        for part in manifest.parts
        if part.kind != "state"
    }
    files: list[FileRecord] = []
    notes: list[str] = []
    for file in manifest.files:
        if file.path not in cards or (
            listed is not None and not _is_other(file, listed.get(file.path))
        ):
            files.append(file)
            continue
        try:
            current = read_record(store, file.path)
        except MissingError:
            notes.append(f"{file.path}: the model card was deleted after the save")
            continue
        if (current.size_bytes, current.digest) == (file.size_bytes, file.digest):
            files.append(file)
        else:
            files.append(replace(current, etag=etag_of(store, file.path)))
            notes.append(f"{file.path}: the model card was changed after the save")
    return (replace(manifest, files=tuple(files)) if notes else manifest), tuple(notes)


def are_transient(problems: Collection[Problem]) -> bool:
    """True if there are problems, all of files that the system cannot read now: the checkpoint may
    be whole.
    """
    return bool(problems) and all(problem.is_transient for problem in problems)


def retry_transient(read: Callable[[], _T], is_transient: Callable[[_T], bool]) -> _T:
    """The result of `read`, which is called up to three times while its result is transient."""
    for seconds in PAUSES_SECONDS:
        result = read()
        if not is_transient(result):
            return result
        time.sleep(seconds)
    return read()


def checkpoint_problems(
    store: Store, manifest: Manifest, *, deep: bool, left_out: Collection[str] = ()
) -> Iterator[Problem]:
    """Every problem that `catalog.verify` reports.

    The digests of small files are always compared, `deep`: those of all files but `left_out` and
    hard links to these.
    """
    folders = {str(PurePosixPath(file.path).parent) for file in manifest.files}
    listings = (store.list_folder("" if folder == "." else folder) for folder in folders)
    listed = {each.name: each for found in listings for each in found.objects}
    bad = {
        file.path: found
        for file in manifest.files
        if (found := _size_problem(store, file, listed.get(file.path)))
    }
    yield from bad.values()
    for name in misleading_files(store, manifest):
        yield misleading_problem(name)
    sound = [file for file in manifest.files if file.path not in bad]
    yield from _tensor_problems(store, manifest, {file.path for file in sound})
    for part in manifest.parts:
        yield from _part_index_problems(store, part, {file.path for file in sound})
    hashed = [
        file for file in sound if deep or _is_small(file) or _is_other(file, listed.get(file.path))
    ]
    if left_out:
        linked = {file_key(store, name) for name in left_out}
        hashed = [file for file in hashed if file_key(store, file.path) not in linked]
    yield from digest_problems(store, distinct_files(store, hashed))


def misleading_problem(name: str) -> Problem:
    """The problem of a file that `misleading_files` names."""
    where = "not of this checkpoint, and readers would take it for its weights; move it away"
    return Problem(f"{name}: {where}")


def large_files(store: Store, manifest: Manifest) -> list[FileRecord]:
    """The files whose digests are not compared whenever the checkpoint is opened; one of several
    hard links.
    """
    return distinct_files(store, [file for file in manifest.files if not _is_small(file)])


def _is_small(file: FileRecord) -> bool:
    return file.size_bytes < SMALL_BYTES


def distinct_files(store: Store, files: Iterable[FileRecord]) -> list[FileRecord]:
    """The files without further hard links to one with the same digest."""
    by_content = {(file.digest, file_key(store, file.path)): file for file in reversed([*files])}
    return [*reversed(by_content.values())]


def replaced_problems(
    store: Store, manifest: Manifest, listed: Mapping[str, Stored]
) -> list[Problem]:
    """A problem for each object that was written after the commit with other bytes than the
    manifest's.

    A copy made by another tool is not a problem: it is another version of the same bytes.
    """
    return digest_problems(
        store, [file for file in manifest.files if _is_other(file, listed.get(file.path))]
    )


def file_problems(store: Store, file: FileRecord) -> list[Problem]:
    """A problem if the size or the digest of the file differs from its record."""
    wrong = _size_problem(store, file, None)
    return [wrong] if wrong else digest_problems(store, [file])


def stored_bytes(store: Store, manifest: Manifest) -> int:
    """Total size of the files that the manifest lists; hard links are counted once."""
    return sum({file_key(store, file.path): file.size_bytes for file in manifest.files}.values())


def file_key(store: Store, name: str) -> object:
    """A key that is equal for all hard links of one file; the name of a missing file or of an
    object.
    """
    try:
        found = None if store.local_folder is None else store.stat(name)
    except UnreadableError:
        found = None
    return store.where(name) if found is None else (found.version, found.modified)


def is_misleading(path: str, manifest: Manifest) -> bool:
    """True when `path`, relative to the checkpoint, is not listed but readers would load it as
    weights.
    """
    where, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    kinds = {part.kind for part in manifest.parts if (part.path or ".") == where}
    if not any(kind in _MISLEADING and _MISLEADING[kind].fullmatch(name) for kind in kinds):
        return False
    return all(file.path != path for file in manifest.files)


def misleading_files(store: Store, manifest: Manifest) -> list[str]:
    """Paths of the misleading files in the folders of the manifest's parts, sorted."""
    found: list[str] = []
    for path in {part.path for part in manifest.parts}:
        listed = store.list_folder(path)
        found += [each.name for each in listed.objects]
        found += [f"{path}/{each.name}".lstrip("/") for each in listed.folders]
    return sorted(path for path in found if is_misleading(path, manifest))


def _is_other(file: FileRecord, found: Stored | None) -> bool:
    """Whether an object has another version than the one that was committed."""
    return found is not None and None not in (file.etag, found.etag) and file.etag != found.etag


def _size_problem(store: Store, file: FileRecord, found: Stored | None) -> Problem | None:
    """The size problem of a file that was listed as `found`; if it was not listed, opening it gives
    the reason.
    """
    try:
        if found is not None:
            size_bytes = found.size_bytes
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


def _tensor_problems(store: Store, manifest: Manifest, sound: set[str]) -> Iterator[Problem]:
    records: dict[str, list[TensorRecord]] = {}
    for part in manifest.parts:
        for tensor in part.tensors:
            records.setdefault(tensor.file, []).append(tensor)
    listed = {file.path for file in manifest.files}
    for file, tensors in records.items():
        if file not in listed:
            unlisted = f"{file}: holds {len(tensors)} tensors but is not among the listed files"
            yield Problem(unlisted)
        elif file in sound and file.endswith(".safetensors"):
            yield from _header_problems(store, file, tensors)


def _header_problems(store: Store, file: str, tensors: list[TensorRecord]) -> Iterator[Problem]:
    try:
        with closing(store.open(file)) as opened:
            found = read_header(opened)
    except UnreadableError as error:
        yield unread_problem(file, error)
        return
    except CorruptError as error:
        yield Problem(f"{file}: not a readable safetensors file ({error})")
        return
    expected = {t.name: (t.dtype, t.shape, t.start, t.end) for t in tensors}
    if lost := expected.keys() - found.keys():
        yield Problem(f"{file}: tensors missing: {listing(sorted(lost), ', ')}")
    if extra := found.keys() - expected.keys() - {HELPER}:
        unlisted = listing(sorted(extra), ", ")
        yield Problem(f"{file}: tensors that the manifest does not list: {unlisted}")
    changed = [name for name in expected.keys() & found.keys() if expected[name] != found[name]]
    if changed:
        facts = (
            f"{name} is {_tensor_fact(found[name])}, expected {_tensor_fact(expected[name])}"
            for name in sorted(changed)
        )
        yield Problem(f"{file}: {listing(list(facts), ', ')}")


def _part_index_problems(store: Store, part: PartRecord, sound: set[str]) -> Iterator[Problem]:
    """Check that the index of a part maps each tensor to its file, and that several shards have an
    index.
    """
    files = {tensor.file for tensor in part.tensors}
    folder = f"{part.path}/" if part.path else ""
    indexes = [
        name
        for name in sound
        if re.fullmatch(rf"{re.escape(folder)}[^/]+\.safetensors\.index\.json", name)
    ]
    sharded = len(files) > 1 and all(file.endswith(".safetensors") for file in files)
    if (
        sharded and not indexes and part.kind != "state"
    ):  # a training state has one file for each rank, and its own reader
        yield Problem(
            f"{folder or './'}: {len(files)} shards without an index; readers of sharded "
            "weights need one"
        )
    expected = {tensor.name: tensor.file for tensor in part.tensors}
    # optional
    tied = {
        name: expected[kept] for kept, *others in part.ties if kept in expected for name in others
    }
    for name in sorted(indexes):
        try:
            found = _indexed_files(store, name, folder)
        except UnreadableError as error:
            yield unread_problem(name, error)
            continue
        places = {**{key: file for key, file in tied.items() if key in found}, **expected}
        if found != places:
            wrong = sorted(
                key for key in places.keys() | found.keys() if places.get(key) != found.get(key)
            )
            yield Problem(
                f"{name}: maps these tensors to other files than the manifest: "
                f"{listing(wrong, ', ')}"
            )


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


def _tensor_fact(entry: tuple[str, tuple[int, ...], int, int]) -> str:
    dtype, shape, start, end = entry
    return f"{dtype} {list(shape)} at bytes {start:,} to {end:,}"
