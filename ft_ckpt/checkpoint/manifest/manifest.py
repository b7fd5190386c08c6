"""The manifest of a checkpoint: its records, their JSON text, and the checks of such a text.

A folder is a committed checkpoint if and only if the manifest, `ft_ckpt.json`, is in it. A part is
one saved model or state of a checkpoint, for example the policy, the value head, an adapter or the
training state. The records are frozen, and nothing here reads a disk or imports torch.
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
from ft_ckpt.formats import TensorRecord, ceil_div
from ft_ckpt.messages import short_repr, without_secrets
from ft_ckpt.schema import FieldError, Whole, as_record, values_of
from ft_ckpt.storage import is_inside
from ft_ckpt.storage.digests import FileRecord, digest_of_bytes

# Names of the weight files that diffusers reads, without ending and shard number. Other libraries
# read other names.
DIFFUSERS_MODEL_FILE = "diffusion_pytorch_model"
DIFFUSERS_LORA_FILE = "pytorch_lora_weights"
MANIFEST_NAME = "ft_ckpt.json"
# The version is increased when an older reader could misread a newer manifest.
FORMAT_VERSION = 1
MANIFEST_LIMIT_BYTES = 256 << 20  # enough for a million tensors
# These fields depend on the commit, so they may differ between copies of one checkpoint.
_COMMIT_FIELDS = ("files", "token")
_DELTA_FIELDS = {"base", "base_content", "content"}
# A check keeps one digest state for each rank that wrote the file, so their number is limited.
_MAX_WRITERS = 1 << 17
_ELEMENT_INDEX = re.compile(r"[0-9]{1,19}")
_SHA256 = re.compile("[0-9a-f]{64}")
_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class BaseRecord:
    """The model that an adapter was trained on."""

    # name or path given to from_pretrained; None if the base was built in memory
    id: str | None
    revision: str | None
    dtype: str
    config_hash: str
    # tensor -> sampled elements by flat index, such as {"12": 0.5}; see `model.base_model`
    fingerprint: Mapping[str, Any]
    # class of the model in training; "" in manifests of earlier versions
    class_name: str = ""
    # settings in which the model in training differs from its files, see `base_class`
    config: Mapping[str, Any] = field(default_factory=dict)


PART_KINDS = ("model", "adapter", "module", "state")


@dataclass(frozen=True)
class PartRecord:
    """A model, an adapter, a plain module or the training state, in a folder of its own."""

    # "" for the whole model, an attribute path such as "policy", or an adapter's name
    name: str
    # folder relative to the checkpoint; "" for the checkpoint folder itself
    path: str
    # one of PART_KINDS
    kind: str
    # a name of `formats.registry`, such as "safetensors"
    format: str
    class_name: str
    tensors: tuple[TensorRecord, ...]
    # Each group has the names, stored or dropped, of one tied tensor. The kept name comes first.
    ties: tuple[tuple[str, ...], ...] = ()
    # stored names of the tensors that required a gradient
    trainable: tuple[str, ...] = ()
    adapter: str | None = None
    # whether the adapter was active during the save
    active: bool = False
    base: BaseRecord | None = None
    # number of tensors by cast, such as {"float32->bfloat16": 12}
    casts: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_of_diffusers(self) -> bool:
        """Whether the weight files have the names that diffusers reads."""
        stems = (DIFFUSERS_MODEL_FILE, DIFFUSERS_LORA_FILE)
        return any(PurePosixPath(tensor.file).name.startswith(stems) for tensor in self.tensors)


@dataclass(frozen=True)
class Manifest:
    """The root record of `ft_ckpt.json`."""

    parts: tuple[PartRecord, ...]
    files: tuple[FileRecord, ...]
    # "full", "adapter", "attribute", "state" or "delta"
    kind: str
    # time of the save in ISO 8601, UTC
    created: str
    step: Whole | None = None
    # Integers stay integers, so that a manifest that is read and written again has the same text.
    # In JSON, numbers that are not finite are text.
    metrics: Mapping[str, int | float] = field(default_factory=dict)
    # the ranks of the save, such as {"size": 2, "engine": "fsdp2"}
    world: Mapping[str, Any] = field(default_factory=dict)
    # library -> version
    versions: Mapping[str, str] = field(default_factory=dict)
    # Each group names one tensor that several parts share, as "part:name in its module".
    shared: tuple[tuple[str, ...], ...] = ()
    # messages about decisions of the saver that matter to readers
    notes: tuple[str, ...] = ()
    run_id: str | None = None
    # metric -> "min" or "max", as the run ranks it
    rankings: Mapping[str, str] = field(default_factory=dict)
    # whether these are exported weights among the checkpoints of a run; retention keeps them
    export: bool = False
    # A save without a step has a number, one more than the largest in its folder. Numbers order
    # such saves, because clocks may go back.
    number: int | None = None
    # names of the checkpoints from which the weights were computed, by averaging or merging
    made_from: tuple[str, ...] = ()
    # A delta names its base and digests here, see `extensions.rl.deltas.chains`.
    delta: Mapping[str, str] = field(default_factory=dict)
    # A save to a bucket has a unique token, so that concurrent saves never write equal manifests.
    token: str | None = None
    format_version: int = FORMAT_VERSION


def manifest_to_json(manifest: Manifest) -> str:
    """Return the manifest as JSON text with one line per record, for diffs and readers.

    The field "digest" is the digest of the text without the line of that field.
    """
    lines = []
    for name, value in values_of(manifest).items():
        if name in ("parts", "files"):  # these come last, with one record per line
            continue
        if name in ("delta", "token") and not value:  # most manifests have neither
            continue
        lines.append(_field_line(name, value))
    files = ",\n".join(f"    {_json_text(_values_of_file(file))}" for file in manifest.files)
    lines.append(f'  "files": [\n{files}\n  ],')
    parts = ",\n".join(_part_json(part) for part in manifest.parts)
    lines.append(f'  "parts": [\n{parts}\n  ]')
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
    values = values_of(manifest)
    for name in _COMMIT_FIELDS:
        del values[name]
    files = [(file.path, file.digest, file.size_bytes) for file in manifest.files]
    return digest_of_bytes(repr((values, files)).encode())


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


def parse_time(created: str) -> datetime | None:
    """Parse an ISO 8601 time, which is UTC if it has no zone; return None if it is invalid."""
    try:
        time = datetime.fromisoformat(created.replace("Z", "+00:00"))
        return time.astimezone(timezone.utc) if time.tzinfo else time.replace(tzinfo=timezone.utc)
    except (OverflowError, ValueError):  # also for years that datetime does not support
        return None


def age_of(created: str) -> str:
    """Return the age of an ISO 8601 time in its largest unit, such as "22 s".

    Return "" for other text.
    """
    time = parse_time(created)
    if time is None:
        return ""
    seconds = max(0, (datetime.now(timezone.utc) - time).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _field_line(name: str, value: Any) -> str:
    """Return the line of one field; no secret is written, and only finite numbers are numbers."""
    if name == "notes":
        value = [without_secrets(note) for note in value]
    elif name == "metrics":
        value = {
            metric: number if math.isfinite(number) else str(number)
            for metric, number in value.items()
        }
    return f"  {_json_text(name)}: {_json_text(value)},"


def _part_json(part: PartRecord) -> str:
    """Return the fields of a part in one line, and each of its tensors in a line below it."""
    values = values_of(part)
    del values["tensors"]
    if part.base is not None:
        values["base"] = values_of(part.base)
        if part.base.id is not None:
            values["base"]["id"] = without_secrets(part.base.id)
    fields_text = "".join(f"{_json_text(key)}: {_json_text(values[key])}, " for key in values)
    tensors = ",\n".join("      " + _json_text(values_of(tensor)) for tensor in part.tensors)
    return f'    {{{fields_text}"tensors": [\n{tensors}\n    ]}}'


def _values_of_file(file: FileRecord) -> dict[str, Any]:
    """Return the fields of a record. An etag or a SHA-256 that is None is left out."""
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

    NaN and infinities are stored as text. Values that are no numbers become NaN, because
    ft_ckpt 0.1.0 did not refuse them.
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
    """Raise ManifestError if the text differs from its digest.

    A manifest without a digest was written by ft_ckpt 0.1.0, so it must have no other fields than
    those of `Manifest`.
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
        if file.ranks > _MAX_WRITERS:
            yield f"{file.path!r}: written by {file.ranks} ranks, expected at most {_MAX_WRITERS}"
        elif file.sha256 is not None and not _SHA256.fullmatch(file.sha256):
            yield f"{file.path!r}: sha256 {short_repr(file.sha256)}, expected 64 hex digits"
        elif not _are_valid_cuts(file):
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
        _ELEMENT_INDEX.fullmatch(index) and type(number) in (int, float)
        for index, number in samples.items()
    )


def _are_valid_cuts(file: FileRecord) -> bool:
    """Check that the cuts of a file are in order, in the file, and written by its ranks.

    The first chunk of a cut has `lead` bytes, and each later chunk, by the next rank, up to `chunk`
    bytes. For example, 10 bytes with lead 2 and chunk 4 are written by three ranks.
    """
    position = 0
    for cut in file.cuts:
        if not position <= cut.start <= cut.stop <= file.size_bytes:
            return False
        bytes_after_lead = max(0, cut.stop - cut.start - cut.lead)
        last_rank = cut.owner + ceil_div(bytes_after_lead, cut.chunk)
        if last_rank >= file.ranks:
            return False
        position = cut.stop
    return True
