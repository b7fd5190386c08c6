"""Splits tensors into the files (shards) of a model, as transformers does, and makes their index.

For every format.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from huggingface_hub import split_state_dict_into_shards_factory

from ft_ckpt.formats.layout import Spec


def split_into_files(
    specs: Mapping[str, Spec],
    stem: str,
    suffix: str,
    most_bytes: int,
    separate: frozenset[str] = frozenset(),
) -> dict[str, list[str]]:
    """The tensors of each file by its name, split as transformers would: in their order, at most
    `most_bytes` each.

    Tensors in `separate` come first, in files without others. A tensor larger than `most_bytes` has
    its own file.
    """
    sizes = {name: spec.size_bytes for name, spec in specs.items()}
    if not separate and sum(sizes.values()) <= most_bytes:
        return {f"{stem}{suffix}": list(specs)}
    groups = [
        {name: size for name, size in sizes.items() if (name in separate) == first}
        for first in (True, False)
    ]
    splits = [
        split_state_dict_into_shards_factory(
            group, get_storage_size=int, filename_pattern="{suffix}", max_shard_size=most_bytes
        )
        for group in groups
        if group
    ]
    shards = [tensors for split in splits for tensors in split.filename_to_tensors.values()]
    if len(shards) < 2:
        return {f"{stem}{suffix}": list(specs)}
    return {
        f"{stem}-{i:05d}-of-{len(shards):05d}{suffix}": tensors
        for i, tensors in enumerate(shards, 1)
    }


def shard_index(
    files: Mapping[str, Sequence[str]],
    totals: Mapping[str, int],
    ties: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The text of the index of several files: the file of each tensor, and of each alias in
    `ties`.
    """
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    places |= {alias: places[kept] for alias, kept in ties.items()}
    return json.dumps({"metadata": totals, "weight_map": places}, indent=2, sort_keys=True) + "\n"
