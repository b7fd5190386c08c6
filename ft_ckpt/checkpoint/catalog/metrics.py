"""Metrics that were measured after a save: each is a mark in the checkpoint's folder.

The manifest does not change, so that copies and signatures stay valid. A mark names the save that
was measured, and is ignored after an overwrite.
"""

import json
import math
from collections.abc import Mapping
from urllib.parse import quote

from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.errors import ConfigError, CorruptError, UnreadableError
from ft_ckpt.storage import PREFIX, Store, read_text

METRIC = f"{PREFIX}metric-"  # prefix of the mark's name; the percent-encoded metric follows
_LIMIT_BYTES = 4 << 10
_MAX_NAME_BYTES = 200  # percent-encoded; a file name has at most 255


def read_metrics(store: Store, manifest: Manifest) -> Mapping[str, float]:
    """Return the metrics of the checkpoint in `store`: of its manifest, and measured since.

    Raises UnreadableError if a mark cannot be read now.
    """
    metrics = dict(manifest.metrics)
    for stored in store.list_folder().objects:
        if not stored.name.startswith(METRIC):
            continue
        measured = _read_mark(store, stored.name, manifest)
        if measured is not None:
            metric, value = measured
            metrics[metric] = value
    return metrics


def _read_mark(store: Store, name: str, manifest: Manifest) -> tuple[str, float] | None:
    """Return the metric in a mark; None if the mark is of another save, damaged, or deleted."""
    try:
        mark = json.loads(read_text(store, name, _LIMIT_BYTES))
        metric, value, created = str(mark["metric"]), float(mark["value"]), mark["created"]
    except UnreadableError:
        raise
    except (CorruptError, KeyError, RecursionError, TypeError, ValueError):
        return None
    return (metric, value) if created == manifest.created else None


def check_metric(name: str) -> None:
    """Raise ConfigError for a name that is empty, too long, or has half of a surrogate pair."""
    try:
        stored_name = quote(name, safe="")
    except UnicodeEncodeError:
        raise ConfigError(
            f"metric {name!a}: expected text, which can be encoded in UTF-8"
        ) from None
    if not 0 < len(stored_name) <= _MAX_NAME_BYTES:
        shown_name = name if len(name) <= _MAX_NAME_BYTES else f"{name[:_MAX_NAME_BYTES]}..."
        expected = f"1 to {_MAX_NAME_BYTES} bytes, percent-encoded"
        raise ConfigError(
            f"metric {shown_name!r}: expected {expected}, but it has {len(stored_name)}"
        )


def write_metric(store: Store, manifest: Manifest, name: str, value: float) -> None:
    """Write a metric of the checkpoint in `store`, durably, in place of an older value.

    The checkpoint must be leased. Raises ConfigError as `check_metric` does, and TargetError if the
    mark cannot be written.
    """
    check_metric(name)
    json_value = value if math.isfinite(value) else str(value)
    mark = {"metric": name, "value": json_value, "created": manifest.created}
    store.write(METRIC + quote(name, safe=""), json.dumps(mark).encode())
