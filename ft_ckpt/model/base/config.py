"""The differences between the config of the live base of adapters and the one in its files.

A save records them, such as the labels of a classifier; a load applies them to the config in the
files.
"""

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from ft_ckpt.model.base.files import config_in_files
from ft_ckpt.ranks.wrappers import unwrap, user_class

# Fields of a config that a load takes from the files of the base: origin, dtype, kernels,
# quantisation, and the number of rows before a resize, which the stored embeddings decide.
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


def changes_of_config(model: Any, identity: str | None, revision: str | None) -> dict[str, Any]:
    """Return the fields in which the config of the live base differs from that in `identity`.

    `identity` is a folder or a repository, which is read without network access. All fields are
    returned if that config is not on this machine.
    """
    live = getattr(model, "config", None)
    if not hasattr(live, "to_dict"):
        return {}
    stored = None if identity is None else config_in_files(identity, revision)
    published = None if stored is None else config_for(type(live), stored)
    return _changes({} if published is None else plain_config(published), plain_config(live))


def config_for(kind: Any, config: Any) -> Any:
    """Return the config itself, or the one inside it, that is of class `kind` (None: of any class).

    Returns None if there is none.
    """
    if kind is None or isinstance(config, kind):
        return config
    inner = getattr(config, getattr(kind, "base_config_key", None) or "", None)
    return inner if isinstance(inner, kind) else None


def plain_config(config: Any) -> dict[str, Any]:
    """Convert the config to what JSON can hold."""
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return plain


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _changes(published: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `live` that differ; of a nested config, its differing fields."""
    changes: dict[str, Any] = {}
    for name, value in live.items():
        before = published.get(name, _ABSENT)
        if name in _FIELDS_OF_FILES or value == before:
            continue
        if not _is_config(value):
            changes[name] = value
            continue
        nested_changes = _changes(before if isinstance(before, dict) else {}, value)
        if nested_changes:
            changes[name] = nested_changes
    return changes


def changed_fields(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply recorded changes to the settings, inside nested configs too."""
    changed = dict(settings)
    for name, value in changes.items():
        before: Any = changed.get(name)
        if _is_config(before):
            value = changed_fields(before, value)
        changed[name] = value
    return changed
