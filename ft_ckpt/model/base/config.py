"""Finds the differences between the config of the live base of adapters and the one in its files.

A save of an adapter records these differences, for example the labels of a classifier. A load
applies them to the config in the files of the base.
"""

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from ft_ckpt.model.base.files import config_in_files
from ft_ckpt.ranks.wrappers import unwrap, user_class

# Fields that a load takes from the files of the base: origin, dtype, kernels and quantisation. The
# size of the vocabulary is among them, because the stored embeddings decide about a resize.
_FIELDS_OF_FILES = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "architectures",
        "auto_map",
        "model_type",
        "dtype",
        "torch_dtype",
        "quantization_config",
        "_pre_quantization_dtype",
        "use_cache",
        "vocab_size",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_experts_implementation",
    }
)
_ABSENT = object()


def class_of_base(model: nn.Module) -> str:
    """Return the class name of the live base `model`."""
    return user_class(type(unwrap(model))).__name__


def changes_of_config(model: Any, source: str | None, revision: str | None) -> dict[str, Any]:
    """Return the fields of the live base's config that differ from the config in its files.

    `source` is the folder or repository of the base. A repository is read from the Hub's cache,
    without network access. If its config is not on this machine, all fields are returned.
    """
    live = getattr(model, "config", None)
    if not hasattr(live, "to_dict"):
        return {}
    published: Any = None
    if source is not None:
        published = config_in_files(source, revision)
    if published is not None:
        published = config_for(type(live), published)
    published_fields = {} if published is None else plain_config(published)
    return _changes(published_fields, plain_config(live))


def config_for(kind: Any, config: Any) -> Any:
    """Return the config that is of class `kind`: `config` itself, or one inside it.

    For example, the text config is inside that of a model for text and images. If `kind` is None,
    `config` is returned. Returns None if neither is of that class.
    """
    if kind is None or isinstance(config, kind):
        return config
    inner = getattr(config, getattr(kind, "base_config_key", None) or "", None)
    return inner if isinstance(inner, kind) else None


def plain_config(config: Any) -> dict[str, Any]:
    """Return the fields of a config as JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return plain


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _changes(published: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `live` that differ. A nested config has its differing fields only."""
    changes: dict[str, Any] = {}
    for name, value in live.items():
        before = published.get(name, _ABSENT)
        if name in _FIELDS_OF_FILES or value == before:
            continue
        if not _is_config(value):
            changes[name] = value
            continue
        nested_before = before if isinstance(before, dict) else {}
        nested_changes = _changes(nested_before, value)
        if nested_changes:
            changes[name] = nested_changes
    return changes


def changed_fields(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the recorded changes, also those inside nested configs."""
    changed = dict(settings)
    for name, value in changes.items():
        before: Any = changed.get(name)
        if _is_config(before):
            value = changed_fields(before, value)
        changed[name] = value
    return changed
