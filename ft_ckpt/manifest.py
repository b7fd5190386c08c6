"""The records that reach the disk, and their JSON form.

A checkpoint folder is committed when, and only when, `ft_ckpt.json` (MANIFEST_NAME) is in it. Everything in this
module is frozen data: it touches neither the disk nor torch.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ft_ckpt.errors import ManifestError

MANIFEST_NAME = "ft_ckpt.json"
FORMAT_VERSION = 1  # raised when an older reader could misread a newer manifest
_dump = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class Cut:
    """Bytes [start, stop) of a file in consecutive chunks, each written by another rank: `owner`, `owner` + 1, ..."""

    start: int
    stop: int
    chunk: int  # bytes of each chunk but the first and the last
    lead: int  # bytes of the first
    owner: int


@dataclass(frozen=True)
class FileRecord:
    """One file of the checkpoint, `path` relative to its folder with forward slashes."""

    path: str
    size_bytes: int
    digest: str  # "xxh3-128:" and 32 hex digits of the whole file, or "xxh3-128-of-ranks:" as `digests` says
    cuts: tuple[Cut, ...] = ()  # in file order, where several ranks wrote it; what is between them is rank 0's
    ranks: int = 1  # that wrote it
    linked: bool = False  # to the file of an earlier checkpoint, whose tensors had not changed since


@dataclass(frozen=True)
class TensorRecord:
    """One stored tensor: where its bytes are and what they mean."""

    name: str  # as stored in the file
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch.", e.g. "bfloat16"
    file: str  # path of a FileRecord
    start: int  # first byte in the file, inclusive; with `end` 0 when it is compressed, in chunks all over it
    end: int  # last byte in the file, exclusive


@dataclass(frozen=True)
class BaseRecord:
    """The model an adapter was trained on."""

    id: str | None  # name or path given to from_pretrained; None when the base was built in memory
    revision: str | None
    dtype: str
    config_hash: str
    fingerprint: Mapping[str, Any]  # sampled elements, see `engines.sample`


@dataclass(frozen=True)
class PartRecord:
    """One loadable thing in the checkpoint: a model, an adapter or a plain module, in a folder of its own."""

    name: str  # "" for the whole model, an attribute path such as "policy", or an adapter's name
    path: str  # folder relative to the checkpoint, "" for the checkpoint folder itself
    kind: str  # "model" | "adapter" | "module"
    format: str  # "safetensors" (later "h5", "dual")
    class_name: str
    tensors: tuple[TensorRecord, ...]
    ties: tuple[tuple[str, ...], ...] = ()  # groups of stored or dropped names that are one tensor, kept name first
    trainable: tuple[str, ...] = ()  # stored names that required a gradient
    adapter: str | None = None
    active: bool = False  # this adapter was active when saved
    base: BaseRecord | None = None
    casts: Mapping[str, int] = field(default_factory=dict)  # "float32->bfloat16": number of tensors


@dataclass(frozen=True)
class Manifest:
    """What was committed: the root record of `ft_ckpt.json`."""

    parts: tuple[PartRecord, ...]
    files: tuple[FileRecord, ...]
    kind: str  # "full" | "adapter" | "attribute" | "state"
    created: str  # ISO 8601, UTC
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # in JSON those that are not finite are text
    world: Mapping[str, Any] = field(default_factory=dict)  # {"size": 2, "engine": "fsdp2", ...}
    versions: Mapping[str, str] = field(default_factory=dict)
    shared: tuple[tuple[str, ...], ...] = ()  # groups of "part:stored name" that were one parameter across parts
    notes: tuple[str, ...] = ()  # what the saver decided and a reader should know
    run_id: str | None = None
    rankings: Mapping[str, str] = field(default_factory=dict)  # metric -> "min" or "max": what the run calls best
    export: bool = False  # weights saved within a run beside its checkpoints: no rule of the run deletes them
    format_version: int = FORMAT_VERSION


def to_json(manifest: Manifest) -> str:
    """The manifest as JSON text, one line per record so that a diff or an eye can follow it."""
    plain = {key: value for key, value in vars(manifest).items() if key not in ("parts", "files")}
    plain["metrics"] = {name: value if math.isfinite(value) else str(value) for name, value in plain["metrics"].items()}
    lines = [f"  {_dump(key)}: {_dump(value)}," for key, value in plain.items()]
    lines.append('  "files": [\n' + ",\n".join("    " + _file_json(file) for file in manifest.files) + "\n  ],")
    lines.append('  "parts": [\n' + ",\n".join(_part_json(part) for part in manifest.parts) + "\n  ]")
    return "{\n" + "\n".join(lines) + "\n}\n"


def from_json(text: str, source: str = MANIFEST_NAME) -> Manifest:
    """The manifest in `text`; `source` names it in errors.

    Raises ManifestError when it is not JSON, lacks a field, or was written by a newer ft_ckpt.
    """
    try:
        document = json.loads(text)
        version = document["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(
            f"{source}: not an ft_ckpt manifest ({error!r}); the checkpoint is damaged, use an older one"
        ) from error
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ManifestError(
            f"{source}: manifest format {version!r}, this ft_ckpt reads up to {FORMAT_VERSION}; upgrade ft_ckpt"
        )
    try:
        return _manifest(document)
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{source}: malformed manifest ({error!r}); the checkpoint is damaged") from error


def _file_json(file: FileRecord) -> str:
    return _dump({**vars(file), "cuts": [list(vars(cut).values()) for cut in file.cuts]})


def _part_json(part: PartRecord) -> str:
    plain = {**vars(part), "base": None if part.base is None else vars(part.base)}
    head = "".join(f"{_dump(key)}: {_dump(value)}, " for key, value in plain.items() if key != "tensors")
    tensors = ",\n".join("      " + _dump(vars(tensor)) for tensor in part.tensors)
    return f'    {{{head}"tensors": [\n{tensors}\n    ]}}'


def _manifest(document: dict[str, Any]) -> Manifest:
    known = {f.name for f in dataclasses.fields(Manifest)}
    values = {key: value for key, value in document.items() if key in known}
    values["files"] = tuple(_file(file) for file in document["files"])
    values["parts"] = tuple(_part(part) for part in document["parts"])
    values["metrics"] = {name: _number(value) for name, value in document.get("metrics", {}).items()}
    values["rankings"] = dict(document.get("rankings", {}))
    values["shared"] = _groups(document.get("shared", ()))
    values["notes"] = tuple(document.get("notes", ()))
    return Manifest(**values)


def _file(document: dict[str, Any]) -> FileRecord:
    return FileRecord(**{**document, "cuts": tuple(Cut(*cut) for cut in document.get("cuts", ()))})


def _part(document: dict[str, Any]) -> PartRecord:
    values = dict(document)
    values["tensors"] = tuple(TensorRecord(**{**t, "shape": tuple(t["shape"])}) for t in document["tensors"])
    values["ties"] = _groups(document.get("ties", ()))
    values["trainable"] = tuple(document.get("trainable", ()))
    base = document.get("base")
    values["base"] = BaseRecord(**base) if base is not None else None
    return PartRecord(**values)


def _number(value: Any) -> float:
    """A metric; NaN for what is no number, which earlier versions let pass."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _groups(groups: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(group) for group in groups)
