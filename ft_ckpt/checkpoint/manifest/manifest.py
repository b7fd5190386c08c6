"""The manifest of a checkpoint: its records and their JSON form.

A checkpoint folder is committed if and only if `ft_ckpt.json` (MANIFEST_NAME) is in it. Everything
in this module is frozen data, without access to disk or torch.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import Any

import xxhash

from ft_ckpt.errors import ManifestError, listing, shown
from ft_ckpt.formats import TensorRecord
from ft_ckpt.messages import short_repr, without_secrets
from ft_ckpt.schema import FieldError, Whole, as_record, values_of
from ft_ckpt.storage import is_inside
from ft_ckpt.storage.digests import FileRecord, digest_of_bytes

# Names of weight files that diffusers reads, without ending and shard number; all other libraries
# read other names.
DIFFUSERS_MODEL_FILE = "diffusion_pytorch_model"
DIFFUSERS_LORA_FILE = "pytorch_lora_weights"
MANIFEST_NAME = "ft_ckpt.json"
FORMAT_VERSION = 1  # increased when an older reader could misread a newer manifest
MANIFEST_LIMIT_BYTES = 256 << 20  # a million tensors
_OF_COMMITS = ("files", "token")  # fields that depend on the commit, not only on the content
_DELTA_FIELDS = {"base", "base_content", "content"}
_MAX_RANKS = 1 << 17  # of one file: a check needs a digest state for each rank that wrote it
_INDEX = re.compile(r"[0-9]{1,19}")
_SHA256 = re.compile("[0-9a-f]{64}")
_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class BaseRecord:
    """The model an adapter was trained on."""

    id: str | None  # name or path given to from_pretrained; None when the base was built in memory
    revision: str | None
    dtype: str
    config_hash: str
    fingerprint: Mapping[str, Any]  # sampled elements, see `model.base_model`
    class_name: str = ""  # its class in training; "" in manifests of earlier versions
    # where its config differs from its files, see `base_class`
    config: Mapping[str, Any] = field(default_factory=dict)


PART_KINDS = ("model", "adapter", "module", "state")


@dataclass(frozen=True)
class PartRecord:
    """A model, an adapter, a plain module or the training state, in a folder of its own."""

    name: str  # "" for the whole model, an attribute path such as "policy", or an adapter's name
    path: str  # folder relative to the checkpoint, "" for the checkpoint folder itself
    kind: str  # one of PART_KINDS
    format: str  # a name of `formats.registry`, such as "safetensors"
    class_name: str
    tensors: tuple[TensorRecord, ...]
    # groups of stored or dropped names that are one tensor, kept name first
    ties: tuple[tuple[str, ...], ...] = ()
    trainable: tuple[str, ...] = ()  # stored names that required a gradient
    adapter: str | None = None
    active: bool = False  # this adapter was active when saved
    base: BaseRecord | None = None
    casts: Mapping[str, int] = field(default_factory=dict)  # "float32->bfloat16": number of tensors

    @property
    def is_of_diffusers(self) -> bool:
        """Whether its weight files have the names that diffusers reads."""
        stems = (DIFFUSERS_MODEL_FILE, DIFFUSERS_LORA_FILE)
        return any(PurePosixPath(tensor.file).name.startswith(stems) for tensor in self.tensors)


@dataclass(frozen=True)
class Manifest:
    """The root record of `ft_ckpt.json`."""

    parts: tuple[PartRecord, ...]
    files: tuple[FileRecord, ...]
    kind: str  # "full" | "adapter" | "attribute" | "state" | "delta"
    created: str  # ISO 8601, UTC
    step: Whole | None = None
    # Integers stay integers, so that a manifest that is read and written again has the same text.
    # In JSON, numbers that are not finite are text.
    metrics: Mapping[str, int | float] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)  # {"size": 2, "engine": "fsdp2", ...}
    versions: Mapping[str, str] = field(default_factory=dict)
    # groups of "part:name in its module" that were one tensor across parts
    shared: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()  # decisions of the saver that matter to readers
    run_id: str | None = None
    # metric -> "min" or "max", as the run ranks it
    rankings: Mapping[str, str] = field(default_factory=dict)
    # weights saved among the checkpoints of a run: retention never deletes them
    export: bool = False
    # without a step: one more than the largest in the same folder, since clocks may go back
    number: int | None = None
    # names of the checkpoints that the weights were computed from: an average, a merge
    made_from: tuple[str, ...] = ()
    # of a delta: its base and contents, see `extensions.rl.deltas.chains`
    delta: Mapping[str, str] = field(default_factory=dict)
    # in a bucket, unique for each save: concurrent saves never write equal manifests
    token: str | None = None
    format_version: int = FORMAT_VERSION


def parse_time(created: str) -> datetime | None:
    """Parse an ISO 8601 time, which is UTC if it has no zone; return None if it is invalid."""
    try:
        then = datetime.fromisoformat(created.replace("Z", "+00:00"))
        return then.astimezone(timezone.utc) if then.tzinfo else then.replace(tzinfo=timezone.utc)
    except (OverflowError, ValueError):  # also for years that datetime does not support
        return None


def age_of(created: str) -> str:
    """Return the age of an ISO 8601 time in its largest unit, as "22 s"; "" for other text."""
    then = parse_time(created)
    if then is None:
        return ""
    seconds = max(0, (datetime.now(timezone.utc) - then).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def manifest_to_json(manifest: Manifest) -> str:
    """Return the manifest as JSON text with one line per record, for diffs and readers.

    The field "digest" is the digest of the text without the line of that field.
    """
    plain = {
        key: value for key, value in values_of(manifest).items() if key not in ("parts", "files")
    }
    plain = {key: value for key, value in plain.items() if value or key not in ("delta", "token")}
    plain["notes"] = [without_secrets(note) for note in manifest.notes]
    plain["metrics"] = {
        name: value if math.isfinite(value) else str(value)
        for name, value in plain["metrics"].items()
    }
    lines = [f"  {_json_text(key)}: {_json_text(value)}," for key, value in plain.items()]
    kept = [_values_of_file(file) for file in manifest.files]
    lines.append(
        '  "files": [\n' + ",\n".join(f"    {_json_text(record)}" for record in kept) + "\n  ],"
    )
    lines.append(
        '  "parts": [\n' + ",\n".join(_part_json(part) for part in manifest.parts) + "\n  ]"
    )
    body = "\n".join(lines) + "\n}\n"
    return "{\n" + _digest_line(_text_digest("{\n" + body)) + body


def manifest_from_json(text: str, source: str = MANIFEST_NAME) -> Manifest:
    """Parse the manifest in `text`; `source` names it in errors.

    Raises ManifestError if the text is not JSON, if a field is missing or has another type or
    range, if the digest differs (manifests of ft_ckpt 0.1.0 have none), or if a newer ft_ckpt has
    written the manifest.
    """
    document = _parse_document(text, source)
    _check_digest(document, text, source)
    document["metrics"] = _metrics_of(document.get("metrics", {}))
    try:
        manifest = as_record(document, Manifest)
    except FieldError as error:
        raise ManifestError(
            f"{source}: malformed manifest ({error}); the checkpoint is damaged, use an older one"
        ) from error
    problems = list(_manifest_problems(manifest))
    if problems:
        raise ManifestError(
            f"{source}: malformed manifest ({listing(problems)}); the checkpoint is damaged, use "
            "an older one"
        )
    return manifest


def content_identity(manifest: Manifest) -> str:
    """Return a digest that all copies of a checkpoint share."""
    facts = values_of(manifest)
    for name in _OF_COMMITS:
        del facts[name]
    files = [(file.path, file.digest, file.size_bytes) for file in manifest.files]
    return digest_of_bytes(repr((facts, files)).encode())


def _part_json(part: PartRecord) -> str:
    facts = values_of(part)
    del facts["tensors"]
    if part.base is not None:
        base_id = part.base.id and without_secrets(part.base.id)
        facts["base"] = {**values_of(part.base), "id": base_id}
    fields_text = "".join(f"{_json_text(key)}: {_json_text(facts[key])}, " for key in facts)
    tensors = ",\n".join("      " + _json_text(values_of(tensor)) for tensor in part.tensors)
    return f'    {{{fields_text}"tensors": [\n{tensors}\n    ]}}'


def _values_of_file(file: FileRecord) -> dict[str, Any]:
    """Return the fields of a record, without an etag or a SHA-256 that is None."""
    values = values_of(file)
    for name in ("etag", "sha256"):
        if values[name] is None:
            del values[name]
    return values


def _json_text(value: Any) -> str:
    """Return JSON that can be encoded as UTF-8.

    Surrogates, which stand for bytes of file names that are not UTF-8, are escaped.
    """
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", _encode(value))


def _text_digest(text: str) -> str:
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(text.encode('utf-8', 'surrogatepass'))}"


def _digest_line(digest: str) -> str:
    return f'  "digest": {_json_text(digest)},\n'


def _metrics_of(stored: Any) -> Any:
    """Convert stored metrics to numbers.

    NaN and infinities are stored as text. ft_ckpt 0.1.0 did not refuse other values.
    """
    if type(stored) is not dict:
        return stored
    metrics = {}
    for name, value in stored.items():
        metrics[name] = _metric_of(value)
    return metrics


def _metric_of(value: Any) -> float:
    try:
        return value if type(value) in (int, float) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _parse_document(text: str, source: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
        version = document["format_version"]
    except (ValueError, KeyError, RecursionError, TypeError) as error:
        raise ManifestError(
            f"{source}: not an ft_ckpt manifest ({shown(error)}); the checkpoint is damaged, use "
            "an older one"
        ) from error
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ManifestError(
            f"{source}: manifest format {version!r}, this ft_ckpt reads up to {FORMAT_VERSION}; "
            "upgrade ft_ckpt"
        )
    return dict(document)


def _check_digest(document: dict[str, Any], text: str, source: str) -> None:
    """Compare a manifest with its digest.

    A manifest without a digest is by ft_ckpt 0.1.0, and must have no undeclared fields.
    """
    expected = document.get("digest")
    if "digest" in document:
        digest = _text_digest(text.replace(_digest_line(str(expected)), "", 1))
        if digest != expected:
            raise ManifestError(
                f"{source}: its digest is {digest}, expected {expected!r}: the manifest has "
                "changed since then; "
                'use an older checkpoint, or delete the line "digest" if you changed it yourself'
            )
        return
    unknown = sorted(document.keys() - {field.name for field in fields(Manifest)})
    if unknown:
        raise ManifestError(
            f"{source}: malformed manifest ({listing(unknown, ', ')}: unknown, and no digest); the "
            "checkpoint is damaged, use an older one"
        )


def _manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Yield a line for each value of the right type that no save can have written."""
    counts = Counter(file.path for file in manifest.files)
    for path, count in counts.items():
        if count > 1:
            yield f"{path!r}: listed more than once"
    for file in manifest.files:
        if file.ranks > _MAX_RANKS:
            yield f"{file.path!r}: written by {file.ranks} ranks, expected at most {_MAX_RANKS}"
        elif file.sha256 is not None and not _SHA256.fullmatch(file.sha256):
            yield f"{file.path!r}: sha256 {short_repr(file.sha256)}, expected 64 hex digits"
        elif not _are_in_order(file):
            yield f"{file.path!r}: cuts that are not in order, inside of the file and of its ranks"
    if manifest.delta and not _is_delta_record(manifest.delta):
        yield f"delta: {dict(manifest.delta)}, expected the name of its base and two digests"
    for part in manifest.parts:
        yield from _part_problems(part)


def _part_problems(part: PartRecord) -> Iterator[str]:
    if part.kind not in PART_KINDS:
        yield f"part {part.path!r}: kind {part.kind!r}, expected one of {', '.join(PART_KINDS)}"
    fingerprint = part.base.fingerprint if part.base else {}
    for name, samples in fingerprint.items():
        if not _are_samples(samples):
            yield f"sampled elements of {name!r}: {short_repr(samples)}, expected numbers by index"
    for tensor in part.tensors:
        if tensor.start > tensor.end:
            shape = list(tensor.shape)
            yield f"{tensor.name!r}: shape {shape} at bytes {tensor.start} to {tensor.end}"


def _is_delta_record(delta: Mapping[str, str]) -> bool:
    base = delta.get("base", "")
    return delta.keys() >= _DELTA_FIELDS and "/" not in base and is_inside(base)


def _are_samples(samples: Any) -> bool:
    """Check whether a tensor's value in a fingerprint is as saves write it: {"12": 0.5}."""
    if type(samples) is not dict:
        return False
    return all(
        _INDEX.fullmatch(index) and type(number) in (int, float)
        for index, number in samples.items()
    )


def _are_in_order(file: FileRecord) -> bool:
    position = 0
    for cut in file.cuts:
        if not position <= cut.start <= cut.stop <= file.size_bytes:
            return False
        further_ranks = -(-max(0, cut.stop - cut.start - cut.lead) // cut.chunk)
        if cut.owner + further_ranks >= file.ranks:
            return False
        position = cut.stop
    return True


def check_paths(manifest: Manifest, source: str) -> None:
    """Raise ManifestError naming every path of the manifest that leads out of its folder.

    `source` names the manifest in the error.
    """
    paths = {file.path for file in manifest.files}
    paths.update(part.path for part in manifest.parts if part.path)
    for part in manifest.parts:
        paths.update(tensor.file for tensor in part.tensors)
    unsafe = [path for path in paths if not is_inside(path)]
    if unsafe:
        raise ManifestError(
            f"{source}: {listing(sorted(map(repr, unsafe)))}: a path in a manifest must be "
            "relative, with forward slashes and without '..'; do not use this checkpoint"
        )
