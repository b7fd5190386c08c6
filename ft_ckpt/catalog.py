"""What checkpoints are there, and are they whole? Reads only; needs no torch."""

import json
import math
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ft_ckpt.digests import digest_like
from ft_ckpt.disk import local_path
from ft_ckpt.errors import ConfigError, CorruptError, ManifestError, NotACheckpointError, listing
from ft_ckpt.headers import HDF5_HALF, read_header
from ft_ckpt.manifest import MANIFEST_NAME, FileRecord, Manifest, PartRecord, TensorRecord, from_json

_WORTH_THREADS_BYTES = 8 << 20
SMALL_BYTES = 1 << 20  # files below it are hashed whenever a checkpoint is looked at: configs, tokenizers, indexes

# What a reader of a model (or of an adapter) goes by. One of these that the manifest does not list is left over from
# another save: from_pretrained takes model.safetensors before an index, vLLM takes every shard, and an
# adapter_config.json beside a model is applied to it unasked. An adapter's folder may be its base's: only names of
# adapters count there.
_WEIGHTS = r"(-\d+-of-\d+)?\.(safetensors|bin|h5)(\.index\.json)?"
_MISLEADING = {
    "model": re.compile(rf"(pytorch_)?model{_WEIGHTS}|adapter_config\.json"),
    "module": re.compile(rf"(pytorch_)?model{_WEIGHTS}|adapter_config\.json"),
    "adapter": re.compile(rf"adapter_model{_WEIGHTS}"),
}


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint and what its manifest says."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found: `ok` when `problems` is empty; `files` and `bytes` are those the manifest lists."""

    path: Path
    ok: bool
    problems: tuple[str, ...]
    files: int
    bytes: int


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of the checkpoint folder `path`.

    Raises NotACheckpointError when nothing is committed there; ManifestError when the manifest is damaged, from a
    newer ft_ckpt, or names a place outside the folder.
    """
    file = local_path(path) / MANIFEST_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpointError(
            f"{path}: no {MANIFEST_NAME} in it, so no save was completed there; use another folder or save again"
        ) from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{file}: not text ({error}); the checkpoint is damaged, use an older one") from error
    manifest = from_json(text, str(file))
    check_paths(manifest, str(file))
    return manifest


def check_paths(manifest: Manifest, source: str) -> None:
    """Refuse a manifest with a path that leads out of its folder; `source` names it.

    Raises ManifestError naming every such path.
    """
    paths = {file.path for file in manifest.files} | {tensor.file for part in manifest.parts for tensor in part.tensors}
    unsafe = [path for path in paths if not is_inside(path)]
    unsafe += [part.path for part in manifest.parts if part.path != "" and not is_inside(part.path)]
    if unsafe:
        raise ManifestError(
            f"{source}: {listing(sorted(map(repr, unsafe)))}: a path in a manifest must be relative, with forward "
            f"slashes and without '..'; do not use this checkpoint"
        )


def is_inside(path: object) -> bool:
    """True for a relative path in its plainest form (no "..", ".", empty step, backslash or NUL)."""
    return isinstance(path, str) and not re.search(r"[\\\0]", path) and not {"", ".", ".."} & set(path.split("/"))


def misleading(path: str, manifest: Manifest) -> bool:
    """True when `path`, relative to the checkpoint, is not listed and readers would mix it up with the weights."""
    where, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    kinds = {part.kind for part in manifest.parts if (part.path or ".") == where}
    if not any(kind in _MISLEADING and _MISLEADING[kind].fullmatch(name) for kind in kinds):
        return False
    return all(file.path != path for file in manifest.files)


def strays(folder: Path, manifest: Manifest) -> list[str]:
    """Paths of the misleading files in the folders of the manifest's parts, sorted."""
    paths = {part.path for part in manifest.parts}
    found = [(Path(path) / name).as_posix() for path in paths for name in _names(folder / path)]
    return sorted(path for path in found if misleading(path, manifest))


def discover(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The committed checkpoints in `root` and directly below it, oldest first.

    Runs come in the order of their newest checkpoints, those of one run by step (none first), then by time. Hidden
    folders, folders without a manifest and those whose manifest cannot be read are left out.
    """
    root = local_path(root)
    below = [root / name for name in _names(root) if not name.startswith(".")]
    found: dict[str, CheckpointInfo] = {}
    for path in [root, *sorted(below, key=os.path.islink)]:  # a link to a sibling is not a second checkpoint
        if info := _info(path):
            found.setdefault(os.path.realpath(path), info)
    return _in_order(list(found.values()))


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in `directory` that passes `verify(deep=False)`; None when there is none.

    One that does not pass is left out with a warning that says why.
    """
    return _first_valid(reversed(discover(directory)), "an older checkpoint")


def best(run: str | os.PathLike[str], metric: str | tuple[str, str] | None = None) -> Path | None:
    """The checkpoint of the newest run in the folder `run` that is the best by a metric; None when none has a number.

    `metric` is (name, "min" or "max"). A name alone, or None where there is one metric, is looked up in what the run's
    `Keep.best` and `Every.best` said. NaN is never the best; of equals the first is. What does not pass
    `verify(deep=False)` is left out with a warning. Raises ConfigError when it is not known which metric is meant, or
    whether less or more of it is better.
    """
    infos = discover(run)
    infos = [info for info in infos if info.manifest.run_id == infos[-1].manifest.run_id]
    if not infos:
        return None
    name, mode = _ranking(infos, metric)
    known = [info for info in infos if not math.isnan(info.manifest.metrics.get(name, math.nan))]
    known.sort(key=lambda info: info.manifest.metrics[name] * (1 if mode == "min" else -1))
    return _first_valid(known, "the next best")


def verify(path: str | os.PathLike[str], *, deep: bool = True) -> VerifyReport:
    """Compare the files of checkpoint `path` with its manifest.

    Always: names, sizes, the tensors in every safetensors header, every index, the digests of files below 1 MiB, and no
    weights left from another save. `deep` also reads every other byte and compares the digests.

    Raises NotACheckpointError or ManifestError as `read_manifest` does.
    """
    path = Path(path)
    while True:
        before = _identity(path)
        manifest = read_manifest(path)
        problems = tuple(_problems(path, manifest, deep=deep))
        # One save may overwrite the checkpoint while it is read here: what was seen is then half of each. Look again.
        if not problems or _identity(path) == before:
            size = sum(file.size_bytes for file in manifest.files)
            return VerifyReport(path, not problems, problems, len(manifest.files), size)


def check_small_files(path: str | os.PathLike[str], manifest: Manifest, *, below_bytes: int = SMALL_BYTES) -> None:
    """Compare size and digest of the files of checkpoint `path` that its manifest lists with less than `below_bytes`.

    Reads nothing else: no header, no large file. Raises CorruptError naming every file that differs.
    """
    path = Path(path)
    small = [file for file in manifest.files if file.size_bytes < below_bytes]
    bad = {file.path: problem for file in small if (problem := _size_problem(path, file))}
    problems = [*bad.values(), *_digest_problems(path, [file for file in small if file.path not in bad])]
    if problems:
        raise CorruptError(f"{path}: {listing(problems)}; use an older checkpoint")


def _info(path: Path) -> CheckpointInfo | None:
    try:
        return CheckpointInfo(path, read_manifest(path))
    except (ManifestError, OSError):
        return None


def _in_order(infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Oldest first: a run that was begun afresh is newer than one that got further before it."""
    newest: dict[str | None, str] = {}
    for info in infos:
        run = info.manifest.run_id
        newest[run] = max(newest.get(run, ""), info.manifest.created)
    return sorted(infos, key=lambda info: (newest[info.manifest.run_id], *_age(info)))


def _age(info: CheckpointInfo) -> tuple[int, str]:
    return (-1 if info.manifest.step is None else info.manifest.step, info.manifest.created)


def _first_valid(infos: Iterable[CheckpointInfo], instead: str) -> Path | None:
    """The first that passes `verify(deep=False)`; those before it are warned of."""
    for info in infos:
        try:
            problems = verify(info.path, deep=False).problems
        except (ManifestError, OSError) as error:  # deleted or damaged since it was discovered
            problems = (str(error),)
        if not problems:
            return info.path
        warnings.warn(f"{info.path}: not valid, using {instead}: {'; '.join(problems)}", stacklevel=3)
    return None


def _ranking(infos: Sequence[CheckpointInfo], metric: str | tuple[str, str] | None) -> tuple[str, str]:
    """The metric that is meant, and "min" or "max". Raises ConfigError when that is not known."""
    if isinstance(metric, tuple) and len(metric) == 2 and metric[1] in ("min", "max"):
        return metric
    told = {name: mode for info in infos for name, mode in info.manifest.rankings.items()}
    meant = [name for name in told if metric in (None, name)]
    if len(meant) == 1:
        return meant[0], told[meant[0]]
    known = sorted({name for info in infos for name in info.manifest.metrics})
    raise ConfigError(
        f"metric={metric!r}: expected (name, 'min' or 'max'); the run's Keep and Every rank by "
        f"{listing(sorted(told), ', ') or 'none'}, its checkpoints have {listing(known, ', ') or 'no metrics'}"
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = (path / MANIFEST_NAME).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _problems(path: Path, manifest: Manifest, *, deep: bool) -> Iterator[str]:
    bad = {file.path: problem for file in manifest.files if (problem := _size_problem(path, file))}
    yield from bad.values()
    for name in strays(path, manifest):
        yield f"{name}: not of this checkpoint, and readers would take it for its weights; move it away"
    sound = [file for file in manifest.files if file.path not in bad]
    yield from _tensor_problems(path, manifest, {file.path for file in sound})
    for part in manifest.parts:
        yield from _index_problems(path, part, {file.path for file in sound})
    yield from _digest_problems(path, [file for file in sound if deep or file.size_bytes < SMALL_BYTES])


def _size_problem(path: Path, file: FileRecord) -> str | None:
    try:
        found = (path / file.path).stat()
    except OSError as error:
        return f"{file.path}: missing ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return f"{file.path}: not a file"
    if found.st_size != file.size_bytes:
        return f"{file.path}: {found.st_size:,} bytes, expected {file.size_bytes:,}: cut short or overwritten"
    return None


def _tensor_problems(path: Path, manifest: Manifest, sound: set[str]) -> Iterator[str]:
    records: dict[str, list[TensorRecord]] = {}
    for part in manifest.parts:
        for tensor in part.tensors:
            records.setdefault(tensor.file, []).append(tensor)
    listed = {file.path for file in manifest.files}
    for file, tensors in records.items():
        if file not in listed:
            yield f"{file}: holds {len(tensors)} tensors but is not among the listed files"
        elif file in sound and file.endswith(".safetensors"):
            yield from _header_problems(path, file, tensors)


def _header_problems(path: Path, file: str, tensors: list[TensorRecord]) -> Iterator[str]:
    try:
        found = read_header(path / file)
    except (CorruptError, OSError) as error:
        yield f"{file}: not a readable safetensors file ({error})"
        return
    expected = {t.name: (t.dtype, t.shape, t.start, t.end) for t in tensors}
    if lost := expected.keys() - found.keys():
        yield f"{file}: tensors missing: {listing(sorted(lost), ', ')}"
    if extra := {name for name in found.keys() - expected.keys() if not name.startswith(HDF5_HALF)}:
        yield f"{file}: tensors that the manifest does not list: {listing(sorted(extra), ', ')}"
    changed = [name for name in expected.keys() & found.keys() if expected[name] != found[name]]
    if changed:
        facts = (f"{name} is {_fact(found[name])}, expected {_fact(expected[name])}" for name in sorted(changed))
        yield f"{file}: {listing(list(facts), ', ')}"


def _index_problems(path: Path, part: PartRecord, sound: set[str]) -> Iterator[str]:
    """The index of a part must send each tensor to the file that holds it; several shards must have one."""
    files = {tensor.file for tensor in part.tensors}
    folder = f"{part.path}/" if part.path else ""
    indexes = [name for name in sound if re.fullmatch(rf"{re.escape(folder)}[^/]+\.safetensors\.index\.json", name)]
    sharded = len(files) > 1 and all(file.endswith(".safetensors") for file in files)
    if sharded and not indexes and part.kind != "state":  # a state has a file of each rank, and a reader of its own
        yield f"{folder or './'}: {len(files)} shards without an index; readers of sharded weights need one"
    expected = {tensor.name: tensor.file for tensor in part.tensors}
    for name in sorted(indexes):
        if (found := _weight_map(path / name, folder)) != expected:
            wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
            yield f"{name}: sends these tensors elsewhere than the manifest: {listing(wrong, ', ')}"


def _weight_map(index: Path, folder: str) -> dict[str, str]:
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: f"{folder}{file}" for name, file in entries.items()}
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        return {}


def _digest_problems(path: Path, files: Sequence[FileRecord]) -> Iterator[str]:
    if sum(file.size_bytes for file in files) < _WORTH_THREADS_BYTES:
        found = [_digest_or_reason(path, file) for file in files]
    else:
        from concurrent.futures import ThreadPoolExecutor  # here, so that listing does not pay for it

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing and reading both let other threads run
            found = list(pool.map(lambda file: _digest_or_reason(path, file), files))
    for file, digest in zip(files, found, strict=True):
        if digest != file.digest:
            yield f"{file.path}: digest {digest}, expected {file.digest}: its bytes have changed"


def _digest_or_reason(path: Path, file: FileRecord) -> str:
    """The digest of a file as its record has it, or words that no digest equals when it cannot be read."""
    try:
        return digest_like(path / file.path, file)
    except OSError as error:
        return f"unreadable ({error.strerror})"
    except CorruptError as error:  # a large file that ends too soon, or cannot be read on
        return f"unreadable ({error})"


def _fact(entry: tuple[str, tuple[int, ...], int, int]) -> str:
    dtype, shape, start, end = entry
    return f"{dtype} {list(shape)} at bytes {start:,} to {end:,}"
