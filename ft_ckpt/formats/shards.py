"""Splits tensors into the files (shards) of a model, as transformers does, and makes their index.

For every format.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory

from ft_ckpt.formats.layout import Spec


def split_into_files(
    specs: Mapping[str, Spec],
    stem: str,
    suffix: str,
    max_bytes: int,
    separate: frozenset[str] = frozenset(),
) -> dict[str, list[str]]:
    """Divide tensors into files as transformers does, and return the names in each file.

    Tensors keep their order. A file has at most `max_bytes`, but a larger tensor has its own file.
    Tensors in `separate` come first, in files without others.
    """
    sizes = {name: spec.size_bytes for name, spec in specs.items()}
    if not separate and sum(sizes.values()) <= max_bytes:
        return {f"{stem}{suffix}": list(specs)}
    separate_sizes = {name: size for name, size in sizes.items() if name in separate}
    other_sizes = {name: size for name, size in sizes.items() if name not in separate}
    shards = [*_split(separate_sizes, max_bytes), *_split(other_sizes, max_bytes)]
    if len(shards) < 2:
        return {f"{stem}{suffix}": list(specs)}
    files = {}
    for number, names in enumerate(shards, 1):
        files[f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"] = names
    return files


def _split(sizes: dict[str, Any], max_bytes: int) -> list[list[str]]:
    if not sizes:
        return []
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="{suffix}", max_shard_size=max_bytes
    )
    return list(split.filename_to_tensors.values())


def shard_index(
    files: Mapping[str, Sequence[str]],
    totals: Mapping[str, int],
    ties: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Make the text of the index of several files, with the file of each tensor and alias."""
    weight_map: dict[str, str] = {}
    for file, names in files.items():
        weight_map.update(dict.fromkeys(names, file))
    for alias, name in ties.items():
        weight_map[alias] = weight_map[name]
    document = {"metadata": totals, "weight_map": weight_map}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"
