"""The state of an object of a run as a tree of JSON, with its tensors apart."""

from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from ft_ckpt.formats import dtype_name
from ft_ckpt.formats.safetensors import NAMES
from ft_ckpt.formats.trees import Node, encode_node, flatten
from ft_ckpt.ranks.sharding import OwnedSharding, Source
from ft_ckpt.ranks.wrappers import is_distributed, source_of_tensor
from ft_ckpt.runs.optimizers import LEAVES
from ft_ckpt.runs.state.document import Document


def flatten_tree(value: Any, name: str, digest: bool) -> tuple[Document, list[Tensor]]:
    """Return the facts of a tree, and its tensors.

    With `digest`, a digest is added by which ranks compare their trees. The digest leaves out
    distributed tensors.
    """
    node, tensors = _flatten_live(value, name)
    leaves = [
        {
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "cut": is_distributed(tensor),
        }
        for tensor in tensors
    ]
    facts: Document = {"tree": encode_node(node), "leaves": leaves}
    if digest:
        state = xxhash.xxh3_128(repr(facts).encode())
        for tensor in tensors:
            if not is_distributed(tensor):
                content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                state.update(content.numpy().data)
        facts["digest"] = state.hexdigest()
    return facts, tensors


def live_tensors(value: Any, name: str) -> list[Tensor]:
    """Return the tensors of a tree, in the order of `flatten_tree`. Raises SelectionError."""
    return _flatten_live(value, name)[1]


def source_of_leaf(name: str, tensor: Tensor) -> Source:
    """Return the source of a tensor that is equal on all ranks, or a DTensor."""
    source = replace(source_of_tensor(name, name, tensor), trainable=False)
    if is_distributed(tensor):
        return source
    return replace(source, sharding=OwnedSharding(source.shape, 0))


def _flatten_live(value: Any, name: str) -> tuple[Node, list[Tensor]]:
    node, leaves = flatten(value, NAMES, name, LEAVES)
    tensors = []
    for leaf in leaves:
        tensor = torch.from_numpy(leaf.data) if leaf.is_array else leaf.data.detach()
        tensors.append(tensor)
    return node, tensors
